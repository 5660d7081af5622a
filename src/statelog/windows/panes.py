"""Cuts a batch's rows into groups for windows: by key, in order of time, a group per pane or session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.aggregates.stored import stored_values
from statelog.convert.input import RowInput
from statelog.operators.event_time import EventTime
from statelog.operators.keyed.grouping import KeyChunk
from statelog.windows.assigners import Panes

_US_PER_MS: Final = 1000
_WITHOUT_TIME_MS: Final = 1 << 62
"""The time of rows without one; it sorts them behind the other rows of their key."""
_CHUNK_ROWS: Final = 65_536

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


Partials = Callable[[pa.RecordBatch, Int64s, Int64s | None], list[tuple[Any, ...]]]
"""Computes an accumulator for each of n groups of rows, none of them empty.

The arguments are the columns of all rows; the start of each group and the end of the last, shape (n + 1,); and the
event time of each row in milliseconds, or None where windows do not depend on it.
"""


@dataclass
class BatchRows:
    """Rows of several keys, sorted by key and time, and where their groups start; see :data:`Partials`."""

    columns: pa.RecordBatch
    times_ms: Int64s | None
    starts: Int64s
    make_rows: Callable[[pa.RecordBatch], list[Any]]
    _partials: list[tuple[Any, ...]] | None = None

    @cached_property
    def rows(self) -> list[Any]:
        """All rows as the user sees them."""
        return self.make_rows(self.columns)

    @cached_property
    def stored_rows(self) -> list[tuple[Any, ...]]:
        """All rows in stored form: tuples, with timestamps as microseconds since the Unix epoch."""
        return list(zip(*map(stored_values, self.columns.columns), strict=True))

    def partial(self, compute: Partials, group: int) -> tuple[Any, ...]:
        """The accumulator of a group; the first call computes all groups' together."""
        if self._partials is None:
            self._partials = compute(self.columns, self.starts, self.times_ms)
        return self._partials[group]


@dataclass(slots=True)
class RowGroup:
    """Rows of one key that belong to one pane or session, in order of time."""

    batch: BatchRows
    start: int
    """The first of the rows in the batch; `end` is behind the last."""
    end: int
    number: int | None
    """The group's number in the batch; None for a part of a group."""
    first_ms: int | None
    """The time of the first row, as `last_ms` is that of the last; None if the rows have no times."""
    last_ms: int | None

    def __len__(self) -> int:
        return self.end - self.start

    def rows(self) -> Iterator[Any]:
        """The rows as the user sees them; those of a large batch are made while they are read."""
        batch = self.batch
        if batch.columns.num_rows <= _CHUNK_ROWS:
            return iter(batch.rows[self.start : self.end])
        return self._rows_in_chunks()

    def _rows_in_chunks(self) -> Iterator[Any]:
        for first in range(self.start, self.end, _CHUNK_ROWS):
            part = self.batch.columns.slice(first, min(_CHUNK_ROWS, self.end - first))
            yield from self.batch.make_rows(part)

    def stored_rows(self) -> list[tuple[Any, ...]]:
        """The rows in stored form."""
        return self.batch.stored_rows[self.start : self.end]

    def times_ms(self) -> list[int]:
        """The rows' times: their own, or else the group's, or else 0."""
        times_ms = self.batch.times_ms
        if times_ms is None:
            return [self.first_ms or 0] * len(self)
        own_ms: list[int] = times_ms[self.start : self.end].tolist()
        return own_ms

    def partial(self, compute: Partials) -> tuple[Any, ...]:
        """The accumulator of the rows."""
        if self.number is not None:
            return self.batch.partial(compute, self.number)
        columns = self.batch.columns.slice(self.start, len(self))
        times_ms = self.batch.times_ms
        own_times_ms = None if times_ms is None else times_ms[self.start : self.end]
        return compute(columns, np.array([0, len(self)]), own_times_ms)[0]

    def part(self, start: int, end: int) -> RowGroup:
        """A part of the rows, as a group without times."""
        if (start, end) == (0, len(self)):
            return self
        return RowGroup(self.batch, self.start + start, self.start + end, None, None, None)


Cut = Callable[[Int64s, Int64s], Bools]
"""Whether to cut between two times of successive rows of a key, pair by pair; the second is never the earlier one."""


@dataclass(frozen=True)
class PaneCut:
    """Cuts where a pane, or the gap between two panes, starts."""

    panes: Panes

    def __call__(self, before_ms: Int64s, after_ms: Int64s) -> Bools:
        is_cut: Bools = self._piece(before_ms) != self._piece(after_ms)
        return is_cut

    def _piece(self, times_ms: Int64s) -> Int64s:
        """The number of each time's pane or gap: panes are even, the gaps behind them odd."""
        panes = self.panes
        pieces = (times_ms - panes.offset_ms) // panes.step_ms * 2
        if panes.step_ms > panes.width_ms:
            pieces += (times_ms - panes.offset_ms) % panes.step_ms >= panes.width_ms
        return pieces


@dataclass(frozen=True)
class SessionCut:
    """Cuts where successive rows are further apart than the gap."""

    gap_ms: int

    def __call__(self, before_ms: Int64s, after_ms: Int64s) -> Bools:
        is_cut: Bools = after_ms - before_ms > self.gap_ms
        return is_cut


class WindowInput(RowInput):
    """Gives a window operator each key's rows as :class:`RowGroup` objects, in order of time.

    Without an event time or a cut, a key's rows are one group in order of arrival.
    """

    def __init__(self, columns: list[str], event_time: EventTime | None, cut: Cut | None) -> None:
        super().__init__(columns)
        self._event_time = event_time
        self._cut = cut

    def by_key(self, window: KeyChunk) -> list[Iterator[RowGroup]]:
        window = window.joined()
        if self._event_time is None or self._cut is None:
            batch = BatchRows(window.rows, None, window.starts, self.rows)
            return [
                iter([RowGroup(batch, start, end, number, None, None)])
                for number, (start, end) in enumerate(pairwise(window.starts.tolist()))
            ]
        return self._by_time(window, self._event_time, self._cut)

    def _by_time(self, window: KeyChunk, event_time: EventTime, cut: Cut) -> list[Iterator[RowGroup]]:
        rows = window.rows
        times_us = event_time.times_us(rows)
        times_ms: Int64s = times_us.fill_null(0).to_numpy() // _US_PER_MS
        if times_us.null_count:
            times_ms[times_us.is_null().to_numpy(zero_copy_only=False)] = _WITHOUT_TIME_MS
        key_of = np.repeat(np.arange(len(window.keys)), np.diff(window.starts))
        is_same_key = key_of[1:] == key_of[:-1]
        if (is_same_key & (times_ms[1:] < times_ms[:-1])).any():
            order = np.lexsort((times_ms, key_of))  # rows of one time stay in order of arrival
            rows, times_ms = rows.take(pa.array(order)), times_ms[order]
        starts_group = np.ones(len(times_ms), bool)
        starts_group[1:] = ~is_same_key | cut(times_ms[:-1], times_ms[1:])
        firsts = np.flatnonzero(starts_group)
        starts = np.append(firsts, len(times_ms))
        batch = BatchRows(rows, times_ms, starts, self.rows)
        times = zip(times_ms[firsts].tolist(), times_ms[starts[1:] - 1].tolist(), strict=True)
        groups = [
            RowGroup(batch, start, end, number, first_ms, last_ms)
            for number, ((start, end), (first_ms, last_ms)) in enumerate(
                zip(pairwise(starts.tolist()), times, strict=True)
            )
        ]
        if times_us.null_count:
            for group in groups:
                if group.first_ms == _WITHOUT_TIME_MS:
                    group.first_ms = group.last_ms = None
        ends_of_keys = np.searchsorted(key_of[firsts], np.arange(len(window.keys) + 1)).tolist()
        return [iter(groups[start:end]) for start, end in pairwise(ends_of_keys)]
