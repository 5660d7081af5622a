"""Restores the state that a subtask's batch starts from: from local runs first, then from the store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from statelog.errors import CorruptionError
from statelog.history.restore_plan import ClippedSegment, RestorePlan
from statelog.local.runs import LocalRun, LocalRuns
from statelog.local.shared_reads import SharedReads
from statelog.local.stored_reader import RunMemory, read_ahead, read_run, read_stored, read_threads
from statelog.local.use import disk_error
from statelog.log.references import Level, SegmentRef, StoredRun
from statelog.runs.key_groups import HashRange
from statelog.runs.merge import Garbage, clip_run
from statelog.runs.reader import Run
from statelog.storage import Store

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
    raise disk_error(local.directory, f"they were damaged or gone in {_ATTEMPTS} attempts to open them")


def read_segments(
    store: Store, segments: Iterable[ClippedSegment], within: HashRange, note_read: Callable[[], None] = lambda: None
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
    for runs in read_ahead(grouped, lambda group: read(*group), read_threads(store)):
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
