"""Searches stored runs for key hashes, several at a time: reads blocks, and holds only the rows that it has found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from statelog.history.restore_plan import RestorePlan
from statelog.local.stored_reader import StoredBytes, read_ahead
from statelog.log.references import SegmentRef, StoredRun
from statelog.runs.byte_slices import BUDGET
from statelog.runs.key_groups import Hashes, HashRange, hash_range
from statelog.runs.merge import merge_runs
from statelog.runs.reader import Run
from statelog.runs.writer import LOCAL_BLOCK_ROWS, RunWriter
from statelog.storage import Store

_THREADS: Final = 16

Keep = Callable[[pa.RecordBatch], pa.Array]
"""Makes a mask of the wanted ones among some rows."""


class FoundTooMuch(Exception):
    """The rows that were found take more bytes than they may."""


class SearchedPart(NamedTuple):
    """A stored run, and the hashes that count in it."""

    ref: StoredRun | SegmentRef
    within: HashRange

    @property
    def what(self) -> str:
        """Its content, for messages."""
        ref = self.ref
        return f"the changeset of subtask {ref.subtask}" if isinstance(ref, SegmentRef) else "a materialized run"


def parts_of(plan: RestorePlan) -> list[SearchedPart]:
    """The stored runs that a state is made of, oldest first."""
    parts = [
        SearchedPart(run, HashRange(max(run.first_hash, level.first_hash), min(run.last_hash, level.last_hash)))
        for level in plan.levels
        for run in level.runs
    ]
    return parts + [SearchedPart(clip.segment, clip.within) for clip in plan.segments]


def segment_parts(segments: Iterable[SegmentRef]) -> list[SearchedPart]:
    """Changesets that count for all hashes."""
    return [SearchedPart(segment, hash_range(0, 1)) for segment in segments]


class RunSearch:
    """Searches the stored runs of a store; footers and small files stay in memory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._runs: dict[tuple[str, int], Run] = {}

    def find(
        self,
        parts: Sequence[SearchedPart],
        name: str,
        hashes: Hashes,
        keep: Keep | None = None,
        max_bytes: int | None = None,
    ) -> list[Run]:
        """The rows of a state with some hashes, which ascend, as runs in memory, oldest first.

        Several stored runs may become one; then only the newest row of each entry is in it. Raises FoundTooMuch if the
        rows take more than `max_bytes`, and the errors of :func:`read_stored`.
        """

        def read(item: tuple[SearchedPart, Hashes]) -> Run:
            part, own = item
            return self._opened(part).searched(name, own, keep)

        wanted = [(part, own) for part in parts if part.ref.rows and len(own := _between(hashes, part.within))]
        found: list[Run] = []
        found_bytes = 0
        limit = BUDGET.slice_bytes if max_bytes is None else max_bytes
        for run in read_ahead(wanted, read, 1 if self._store.can_append else _THREADS):
            if not run.rows:
                continue
            found.append(run)
            found_bytes += _held_bytes(run)
            if found_bytes > limit:
                found = [_merged(found)]
                found_bytes = _held_bytes(found[0])
                if max_bytes is not None and found_bytes > max_bytes:
                    raise FoundTooMuch
                limit = max(limit, 2 * found_bytes)
        return found

    def _opened(self, part: SearchedPart) -> Run:
        ref = part.ref
        place = ref.name, ref.offset
        run = self._runs.get(place)
        if run is None:
            data = StoredBytes(self._store, ref, part.what)
            run = self._runs[place] = Run(data, ref.name, ref.offset, is_stored=True)
        return run


def _between(hashes: Hashes, within: HashRange) -> Hashes:
    """Those of some hashes, which ascend, that are in a range."""
    first = hashes.searchsorted(np.uint64(within.first), "left")
    return hashes[first : hashes.searchsorted(np.uint64(within.last), "right")]


def _held_bytes(run: Run) -> int:
    return sum([section.size_bytes for section in run.sections.values()])


def _merged(runs: Sequence[Run]) -> Run:
    """Runs as one, oldest first."""
    if len(runs) == 1:
        return runs[0]
    sink = pa.BufferOutputStream()
    merge_runs(runs, RunWriter(sink, compression=None, block_rows=LOCAL_BLOCK_ROWS), is_bottom=False)
    return Run(sink.getvalue(), "rows that were found")
