"""The bytes and files of each checkpoint in a log, in one pass over its entries."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from statelog.history.footprint import log_file
from statelog.history.operator_history import Record
from statelog.log.references import StoredRun
from statelog.metrics import storage_overhead

_T = TypeVar("_T")


@dataclass(frozen=True)
class CheckpointSizes:
    """The sizes of one checkpoint; None where the log does not tell them any more."""

    base_bytes: int | None
    """The materialized state that counts in it."""
    log_bytes: int | None
    """The changes since; of an operator without keys the snapshots. While changes of another parallelism are among
    them, those of subtasks that are materialized already count too.
    """
    files: int | None
    """Objects that it needs, files of the log among them."""
    kept_bytes: int | None
    """Changes and materialized state that it or another checkpoint needed that was retained then."""

    @property
    def state_bytes(self) -> int | None:
        """What a restart reads."""
        return None if self.base_bytes is None or self.log_bytes is None else self.base_bytes + self.log_bytes

    @property
    def storage_overhead(self) -> float | None:
        """Kept bytes per byte of the state."""
        return None if self.kept_bytes is None else storage_overhead(self.kept_bytes, self.state_bytes or 0)


def measure_checkpoints(records: Sequence[Record]) -> Iterator[CheckpointSizes]:
    """The sizes of each checkpoint of an operator, in order."""
    batches = [record.batch for record in records]
    through = [0, *accumulate(sum(segment.length for segment in record.checkpoint.segments) for record in records)]
    names = [
        {segment.name for segment in record.checkpoint.segments} | {log_file(record.checkpoint.number)}
        for record in records
    ]
    bases = _Bases.of(records)
    changes = _Changes(records, batches, through)
    needed_names = _Window(names)
    kept_runs = _Window([one.runs for one in bases.changes], bases.lengths)
    for place, record in enumerate(records):
        changes.add(place)
        first = bisect_left(batches, record.needed_from)
        is_told = record.checkpoint.is_whole or (record.base_map is not None and record.needed_from >= batches[0])
        if not is_told:
            yield CheckpointSizes(None, None, None, None)
            continue
        base = bases.at(place)
        needed_names.move(first, place)
        yield CheckpointSizes(
            base_bytes=base.length,
            log_bytes=changes.since_base(place, first),
            files=needed_names.total + sum(name not in needed_names for name in base.names),
            kept_bytes=_kept_bytes(records, batches, place, through, bases, kept_runs),
        )


def _kept_bytes(
    records: Sequence[Record],
    batches: list[int],
    place: int,
    through: list[int],
    bases: _Bases,
    kept_runs: _Window[tuple[str, int]],
) -> int | None:
    retained_from = records[place].checkpoint.retained_from
    if retained_from is None:
        return None
    oldest = bisect_left(batches, retained_from)
    if oldest > place or records[oldest].needed_from < batches[0]:
        return None
    first = min(bisect_left(batches, record.needed_from) for record in (records[oldest], records[place]))
    kept_runs.move(bases.change_of[oldest], bases.change_of[place])
    return through[place + 1] - through[first] + kept_runs.total


class _Changes:
    """The changes that come on top of the materialized state, which each subtask has of another batch."""

    def __init__(self, records: Sequence[Record], batches: Sequence[int], through: Sequence[int]) -> None:
        self._records = records
        self._batches = batches
        self._through = through
        self._sums: dict[int, npt.NDArray[np.int64]] = {}
        """By place, the bytes of each subtask's changes since the parallelism began."""
        self._began = 0
        """The first place of the newest parallelism."""
        self._kept = 0
        """The first place whose sums are kept."""

    def add(self, place: int) -> None:
        """Add the changes of the next record."""
        checkpoint = self._records[place].checkpoint
        before = self._sums.get(place - 1)
        if before is None or len(before) != checkpoint.parallelism:
            self._sums.clear()
            self._began = self._kept = place
            before = np.zeros(checkpoint.parallelism, np.int64)
        sums = self._sums[place] = before.copy()
        for segment in checkpoint.segments:
            sums[segment.subtask] += segment.length

    def since_base(self, place: int, first: int) -> int:
        """Their bytes in the record that was added last; `first` is the place of the first record that it needs."""
        record = self._records[place]
        ranges = record.base_map.ranges if record.base_map is not None else ()
        is_mixed = any(base_range.base.parallelism != record.checkpoint.parallelism for base_range in ranges)
        if record.checkpoint.is_whole or is_mixed or self._began > first:
            return self._through[place + 1] - self._through[first]
        for gone in range(self._kept, first - 1):
            del self._sums[gone]
        self._kept = max(self._kept, first - 1)
        total = int(self._sums[place].sum())
        for subtask, base in {base_range.base.subtask: base_range.base for base_range in ranges}.items():
            sums = self._sums.get(bisect_right(self._batches, base.through) - 1)
            total -= 0 if sums is None else int(sums[subtask])
        return total


@dataclass(frozen=True)
class _Base:
    """The materialized state of all subtasks from one change of it to the next."""

    length: int
    names: frozenset[str]
    runs: frozenset[tuple[str, int]]
    """Object name and offset of each run."""


@dataclass(frozen=True)
class _Bases:
    """The changes of the materialized state."""

    changes: list[_Base]
    change_of: list[int]
    """For each record the place in `changes`."""
    lengths: dict[tuple[str, int], int]

    @classmethod
    def of(cls, records: Sequence[Record]) -> _Bases:
        changes: list[_Base] = []
        change_of: list[int] = []
        lengths: dict[tuple[str, int], int] = {}
        for place, record in enumerate(records):
            if not place or record.base_map is not records[place - 1].base_map:
                ranges = record.base_map.ranges if record.base_map is not None else ()
                runs: list[StoredRun] = [run for base_range in ranges for run in base_range.runs]
                lengths |= {(run.name, run.offset): run.length for run in runs}
                changes.append(
                    _Base(
                        sum(run.length for run in runs),
                        frozenset(run.name for run in runs),
                        frozenset((run.name, run.offset) for run in runs),
                    )
                )
            change_of.append(len(changes) - 1)
        return cls(changes, change_of, lengths)

    def at(self, place: int) -> _Base:
        """The materialized state that counts in a record's checkpoint."""
        return self.changes[self.change_of[place]]


class _Window(Generic[_T]):
    """The distinct elements of successive sets, between two places that usually move forwards."""

    def __init__(self, sets: Sequence[Collection[_T]], weights: Mapping[_T, int] | None = None) -> None:
        self._sets = sets
        self._weights = weights
        self._counts: Counter[_T] = Counter()
        self._first, self._end = 0, 0
        self.total = 0
        """The sum of the elements' weights, or their number."""

    def __contains__(self, element: _T) -> bool:
        return element in self._counts

    def move(self, first: int, last: int) -> None:
        """Let the window reach from one place to another, both included."""
        if first < self._first or last + 1 < self._end:
            self._counts.clear()
            self._first, self._end, self.total = first, first, 0
        for place in range(self._end, last + 1):
            for element in self._sets[place]:
                if not self._counts[element]:
                    self.total += self._weight(element)
                self._counts[element] += 1
        self._end = max(self._end, last + 1)
        for place in range(self._first, first):
            for element in self._sets[place]:
                self._counts[element] -= 1
                if not self._counts[element]:
                    del self._counts[element]
                    self.total -= self._weight(element)
        self._first = first

    def _weight(self, element: _T) -> int:
        return 1 if self._weights is None else self._weights[element]
