"""Bringing a subtask's state to where its batch starts: local runs first, then what the log has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from statelog.errors import CorruptionError, StorageError
from statelog.local.restore_plan import ClippedSegment, RestorePlan
from statelog.local.runs import LocalRun, LocalRuns
from statelog.local.shared_reads import SharedReads
from statelog.local.stored_reader import Readable, RunMemory, read_ahead, read_run, read_stored
from statelog.log.references import Level, SegmentRef, StoredRun
from statelog.runs.key_groups import HashRange
from statelog.runs.merge import Garbage, clip_run
from statelog.runs.reader import Run
from statelog.storage import Store

_ATTEMPTS: Final = 3
_READ_THREADS: Final = 4
"""Objects that are read from an object store at a time; a directory answers at once."""


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
    """Find or fetch the runs that make up a state.

    Parameters
    ----------
    local : LocalRuns
        The subtask's local runs.
    genesis, head : bytes
        Chain digests of the empty state and of the state that is wanted.
    last_batch : int
        The batch that the wanted state comes after.
    within : HashRange
        Hashes of the subtask.
    garbage : Garbage
        What need not be kept.
    fetch : callable
        Asks the coordinator which segments are missing, given the digests that are here.
    open_store : callable
        Opens the store that holds the segments.
    token : str
        Unique among the directory's writers.
    note_read : callable
        Called whenever a run or a changeset of what is missing has been read, in order.
    shared : SharedReads, optional
        How to read what other subtasks of this host need as well.

    Returns
    -------
    list of (LocalRun, Run)
        The state, oldest first; what was missing is local now.

    Raises
    ------
    CorruptionError
        If a stored segment is damaged.
    StorageError
        If a segment cannot be read, or local files disappear again and again.
    """
    for _ in range(_ATTEMPTS):
        chain = local.chain(genesis, head)
        if chain is None:
            missing = fetch(local.digests(genesis))
            store = open_store() if shared is None else shared.of(open_store(), missing)
            try:
                for level in missing.levels:
                    local_run = LocalRun(level.first, level.last, level.before, level.after)
                    runs = _noted(read_level(store, level), note_read)
                    # A start may go back to a batch between, which still needs what has become garbage since.
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
            # The damaged file is gone now, or another worker merged it; either way look again.
            continue
    raise StorageError(
        f"The local runs in {local.directory} could not be opened in {_ATTEMPTS} attempts.",
        hint="Is the disk failing, or does another program remove files there?",
    )


def _noted(runs: Iterable[Run], note_read: Callable[[], None]) -> Iterator[Run]:
    def note(run: Run) -> Run:
        note_read()
        return run

    return map(note, runs)


def read_segments(
    store: Readable,
    segments: Iterable[ClippedSegment],
    within: HashRange,
    note_read: Callable[[], None] = lambda: None,
) -> Iterator[Run]:
    """Read stored changesets, some of them ahead, and yield them in order.

    Parameters
    ----------
    store : Readable
        Holds them.
    segments : iterable of ClippedSegment
        The changesets; one that counts for several ranges of hashes follows itself.
    within : HashRange
        The hashes that are of interest.
    note_read : callable
        Called whenever a changeset has been read.

    Raises
    ------
    CorruptionError
        If one is damaged or shorter than recorded; names the object and the offset.
    StorageError
        If one cannot be read.
    """

    def read(segment: SegmentRef, clips: list[ClippedSegment]) -> list[Run]:
        part = HashRange(clips[0].first_hash, clips[-1].last_hash) if clips[0].is_shared else None
        run = read_run(store, segment, f"the changeset of subtask {segment.subtask}", part)
        return [run if clip.within == within else clip_run(run, clip.within) for clip in clips]

    grouped = ((segment, list(clips)) for segment, clips in itertools.groupby(segments, lambda clip: clip.segment))
    for runs in read_ahead(grouped, lambda group: read(*group), _threads(store)):
        note_read()
        yield from runs


def read_level(store: Readable, level: Level) -> Iterator[Run]:
    """Read the runs of a level, some of them ahead; raises what :func:`read_segments` does.

    Each run may be used until the next one is asked for.
    """
    threads = _threads(store)
    memory = RunMemory() if threads == 1 else None

    def read(stored: StoredRun) -> Run:
        within = level.within if level.has_part_of(stored) else None
        return read_run(store, stored, "a materialized run", within, memory)

    return read_ahead(level.runs, read, threads)


def _threads(store: Readable) -> int:
    return 1 if store.can_append else _READ_THREADS


def read_segment(store: Readable, segment: SegmentRef) -> bytes:
    """Read one stored changeset or snapshot as a whole; raises what :func:`read_segments` does."""
    return read_stored(store, segment, f"the changeset of subtask {segment.subtask}")
