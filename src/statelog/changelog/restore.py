"""Bringing a subtask's state to where its batch starts: local runs first, then what the log has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import pyarrow as pa

from statelog.changelog import chain
from statelog.changelog.base import Level, StoredRun
from statelog.changelog.local_runs import Edge, LocalRuns
from statelog.changelog.segment import ClippedSegment, MissingSegments, SegmentRef
from statelog.errors import CorruptionError, ErrorKind, StorageError
from statelog.state.key_groups import HashRange
from statelog.state.merge import Garbage, clip_run
from statelog.state.run import Run
from statelog.storage import Store

__all__ = ["read_level", "read_segment", "read_segments", "restore_runs"]

_ATTEMPTS: Final = 3


def restore_runs(
    local: LocalRuns,
    *,
    genesis: bytes,
    head: bytes,
    last_batch: int,
    within: HashRange,
    garbage: Garbage,
    fetch: Callable[[list[bytes]], MissingSegments],
    open_store: Callable[[], Store],
    token: str,
) -> list[tuple[Edge, Run]]:
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

    Returns
    -------
    list of (Edge, Run)
        The state, oldest first; what was missing is local now.

    Raises
    ------
    CorruptionError
        If a stored segment is damaged.
    StorageError
        If a segment cannot be read, or local files disappear again and again.
    """
    for _ in range(_ATTEMPTS):
        path = local.path(genesis, head)
        if path is None:
            missing = fetch(local.digests(genesis))
            for level in missing.levels:
                edge = Edge(level.first, level.last, level.before, level.after)
                runs = read_level(open_store(), level)
                is_bottom = level.before == genesis
                local.write_merged(edge, runs, token, is_bottom=is_bottom, within=level.within, garbage=garbage)
            if missing.since != head:
                edge = Edge(missing.first_batch, last_batch, missing.since, head)
                runs = read_segments(open_store(), missing.segments, within)
                is_bottom = missing.since == genesis
                local.write_merged(edge, runs, token, is_bottom=is_bottom, within=within, garbage=garbage)
            continue
        try:
            return [(edge, local.open(edge)) for edge in path]
        except (CorruptionError, FileNotFoundError):
            # The damaged file is gone now, or another worker merged it; either way look again.
            continue
    raise StorageError(
        f"The local runs in {local.directory} could not be opened in {_ATTEMPTS} attempts.",
        hint="Is the disk failing, or does another program remove files there?",
    )


def read_segments(store: Store, segments: Iterable[ClippedSegment], within: HashRange) -> Iterator[Run]:
    """Read stored changesets one after the other, each once.

    Parameters
    ----------
    store : Store
        Holds them.
    segments : iterable of ClippedSegment
        The changesets; one that counts for several ranges of hashes follows itself.
    within : HashRange
        The hashes that are of interest.

    Raises
    ------
    CorruptionError
        If one is damaged or shorter than recorded; names the object and the offset.
    StorageError
        If one cannot be read.
    """
    last: SegmentRef | None = None
    for clipped in segments:
        segment, clip = clipped.segment, HashRange(clipped.first_hash, clipped.last_hash)
        if segment != last:
            run = Run(pa.py_buffer(read_segment(store, segment)), segment.name, segment.offset)
            last = segment
        yield run if clip == within else clip_run(run, clip)


def read_level(store: Store, level: Level) -> Iterator[Run]:
    """Read the runs of a level one after the other; raises what :func:`read_segments` does."""
    for stored in level.runs:
        data = _read(store, stored, "a materialized run")
        yield Run(pa.py_buffer(data), stored.name, stored.offset)


def read_segment(store: Store, segment: SegmentRef) -> bytes:
    """Read one stored changeset or snapshot; raises what :func:`read_segments` does."""
    return _read(store, segment, f"the changeset of subtask {segment.subtask}")


def _read(store: Store, stored: SegmentRef | StoredRun, what: str) -> bytes:
    try:
        data = store.read(stored.name, offset=stored.offset, length=stored.length)
    except StorageError as error:
        if error.kind is not ErrorKind.OBJECT_MISSING:
            raise
        raise CorruptionError(
            f"{error.message} It holds {what} at offset {stored.offset}.",
            kind=ErrorKind.OBJECT_MISSING,
            hint="Restore the file from a copy; the state cannot be rebuilt without it.",
        ) from error
    if len(data) != stored.length or chain.checksum(data) != stored.checksum:
        raise CorruptionError(
            f"{stored.name}: {what} at offset {stored.offset}, {stored.length} bytes, is damaged or cut short.",
            hint="Restore the file from a copy; the state cannot be rebuilt without it.",
        )
    return data
