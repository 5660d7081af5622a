"""Restores the state that a subtask's batch starts from: from local runs first, then from the store, once per host."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import xxhash

from statelog.errors import CorruptionError
from statelog.files import removed_on_failure, write_file
from statelog.history.restore_plan import ClippedSegment, Extent, RestorePlan
from statelog.local.runs import LocalRun, LocalRuns
from statelog.local.stored_reader import RunMemory, read_run, read_stored, read_threads
from statelog.local.use import disk_error
from statelog.log.references import Level, SegmentRef, StoredRun
from statelog.runs.key_groups import HashRange
from statelog.runs.merge import Garbage, clip_run
from statelog.runs.reader import Run
from statelog.storage import Store
from statelog.storage.store import StoreWrapper, read_ahead

_ATTEMPTS: Final = 3


def restore_runs(
    local: LocalRuns,
    *,
    genesis: bytes,
    head: bytes,
    last_batch: int,
    within: HashRange,
    garbage: Garbage,
    fetch: Callable[[list[bytes]], RestorePlan],
    open_store: Callable[[], Store],
    token: str,
    note_read: Callable[[], None] = lambda: None,
    shared: SharedReads | None = None,
) -> list[tuple[LocalRun, Run]]:
    """The local runs that make up a state, oldest first; those that were missing are fetched and written.

    The state is the one after `last_batch`, with the chain digest `head`; `genesis` is the digest of the empty state.
    `fetch` asks the coordinator for a restore plan, given the digests that are here. `note_read` is called after each
    stored run or changeset that is read. `token` is unique among the directory's writers.

    Raises CorruptionError if a stored segment is damaged; StorageError if one cannot be read, or if local files
    disappear again and again.
    """
    for _ in range(_ATTEMPTS):
        chain = local.chain(genesis, head)
        if chain is None:
            missing = fetch(local.digests(genesis))
            store = open_store() if shared is None else shared.of(open_store(), missing)
            try:
                for level in missing.levels:
                    local_run = LocalRun(level.first, level.last, level.before, level.after)
                    runs = read_level(store, level, note_read)
                    # A start may go back to a batch in between, which still needs rows that have become garbage since.
                    own = garbage if level.last == last_batch else None
                    is_bottom = level.before == genesis
                    local.write_disjoint(
                        local_run, runs, level.rows, token, is_bottom=is_bottom, within=level.within, garbage=own
                    )
                if missing.since != head:
                    local_run = LocalRun(missing.first_batch, last_batch, missing.since, head)
                    runs = read_segments(store, missing.segments, within, note_read)
                    is_bottom = missing.since == genesis
                    local.write_merged(local_run, runs, token, is_bottom=is_bottom, within=within, garbage=garbage)
            except CorruptionError:
                if shared is not None:
                    shared.discard()
                raise
            continue
        try:
            return [(local_run, local.open(local_run)) for local_run in chain]
        except (CorruptionError, FileNotFoundError):
            # The damaged file is removed now, or another worker merged it: look again.
            continue
    raise disk_error(local.directory, f"they were damaged or missing in {_ATTEMPTS} attempts to open them")


def read_segments(
    store: Store, segments: Sequence[ClippedSegment], within: HashRange, note_read: Callable[[], None] = lambda: None
) -> Iterator[Run]:
    """Read stored changesets, some of them ahead, and yield them in order.

    A changeset that counts for only a part of the hashes `within` is cut to that part; others may hold more keys. One
    that counts for several ranges of hashes is given several times in a row. Raises the errors of :func:`read_stored`.
    """

    def read(segment: SegmentRef, clips: list[ClippedSegment]) -> list[Run]:
        part = HashRange(clips[0].first_hash, clips[-1].last_hash) if clips[0].is_shared else None
        run = read_run(store, segment, f"the changeset of subtask {segment.subtask}", part)
        return [run if clip.within == within else clip_run(run, clip.within) for clip in clips]

    grouped = ((segment, list(clips)) for segment, clips in itertools.groupby(segments, lambda clip: clip.segment))
    largest_bytes = max((clip.segment.length for clip in segments), default=0)
    for runs in read_ahead(grouped, lambda group: read(*group), read_threads(store, largest_bytes)):
        note_read()
        yield from runs


def read_level(store: Store, level: Level, note_read: Callable[[], None] = lambda: None) -> Iterator[Run]:
    """Read the runs of a level, some of them ahead; each is valid until the next one is asked for.

    Raises the errors of :func:`read_stored`.
    """
    threads = read_threads(store)
    memory = RunMemory() if threads == 1 else None

    def read(stored: StoredRun) -> Run:
        within = level.within if level.has_part_of(stored) else None
        return read_run(store, stored, "a materialized run", within, memory)

    def noted(run: Run) -> Run:
        note_read()
        return run

    return map(noted, read_ahead(level.runs, read, threads))


def read_segment(store: Store, segment: SegmentRef) -> bytes:
    """Read one stored changeset or snapshot as a whole; raises the errors of :func:`read_stored`."""
    return read_stored(store, segment, f"the changeset of subtask {segment.subtask}")


SHARED_FOLDER: Final = "shared"
"""Name of the folder, next to those of the operators."""
_CHECKSUM_BYTES: Final = 8


class SharedReads:
    """Reads from an object store that the subtasks of a query, restored on this host, share.

    The first subtask that needs an extent reads it into a file, while the others wait. An extent whose file is missing
    or damaged is read again. The files belong to one batch of one start: objects never change, but in another start
    the store may have other objects with the same names. `token` is unique among all attempts.
    """

    def __init__(self, folder: Path, run_id: str, batch: int, token: str) -> None:
        self._folder = folder
        self._run_id = run_id
        self._batch = batch
        self._token = token

    def of(self, store: Store, missing: RestorePlan) -> Store:
        """The store, with the shared extents of a restore plan read once for this host.

        A directory is read as it is: the operating system caches its files.
        """
        return store if store.can_append else _SharedObjects(store, missing.extents, self)

    def discard(self) -> None:
        """Remove the batch's files because something in them is wrong; the next attempt reads them again."""
        for path in self._folder.glob(f"{self._batch}-*"):
            if not path.suffix:  # others may be writing theirs
                path.unlink(missing_ok=True)

    def read(self, store: Store, extent: Extent) -> bytes:
        """The bytes of an extent; raises the errors of :meth:`Store.read`."""
        wanted = f"{self._run_id} {extent.name} {extent.offset} {extent.length}"
        path = self._folder / f"{self._batch}-{xxhash.xxh3_128_hexdigest(wanted.encode())}"
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(f"{path}.lock", "wb") as lock:
            # A process that dies releases the lock.
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = _checked(path)
            if found is not None:
                return found
            data = store.read(extent.name, offset=extent.offset, length=extent.length)
            temporary = Path(f"{path}.{self._token}.tmp")
            write_file(temporary, data + xxhash.xxh3_64_digest(data))
            with removed_on_failure(temporary):
                temporary.rename(path)
            return data


class _SharedObjects(StoreWrapper):
    """A store whose shared extents are read once per host."""

    def __init__(self, store: Store, extents: Iterable[Extent], shared: SharedReads) -> None:
        super().__init__(store)
        self._shared = shared
        self._extents: dict[str, list[Extent]] = {}
        for extent in extents:
            self._extents.setdefault(extent.name, []).append(extent)

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        for extent in self._extents.get(name, ()):
            start = offset - extent.offset
            if length is not None and start >= 0 and start + length <= extent.length:
                return self._shared.read(self._inner, extent)[start : start + length]
        return super().read(name, offset=offset, length=length)

    def read_into(self, buffer: memoryview, name: str, *, offset: int = 0) -> int:
        return Store.read_into(self, buffer, name, offset=offset)  # by `read`, which knows the extents


def remove_shared(folder: Path, certain: int) -> None:
    """Remove the files of batches up to `certain`, a batch that is certain: all its subtasks have their state."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    for name in names:
        prefix = name.partition("-")[0]
        if not prefix.isdecimal() or int(prefix) <= certain:
            (folder / name).unlink(missing_ok=True)


def _checked(path: Path) -> bytes | None:
    """The bytes of a file; None if it is missing or damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    content = data[:-_CHECKSUM_BYTES]
    return content if xxhash.xxh3_64_digest(content) == data[-_CHECKSUM_BYTES:] else None
