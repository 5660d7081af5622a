"""Cuts a batch's rows into groups for windows: by key, in order of time, a group per pane or session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.aggregates.pane_grid import Panes
from statelog.aggregates.stored import stored_column
from statelog.convert.input import RowInput
from statelog.operators.event_time import EventTime
from statelog.operators.keyed.grouping import KeyChunk

_US_PER_MS: Final = 1000
_WITHOUT_TIME_MS: Final = 1 << 62
"""The time of rows without one; it sorts them behind the other rows of their key."""
_CHUNK_ROWS: Final = 65_536

Row = tuple[Any, ...]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass
class BatchRows:
    """Rows of several keys, sorted by key and time."""

    columns: pa.RecordBatch
    times_ms: Int64s | None
    make_rows: Callable[[pa.RecordBatch], list[Any]]
    """Makes rows as the user sees them."""
    make_tuples: Callable[[list[pa.Array]], list[Row]]
    """Makes tuples of columns, with the values that the user sees."""
    _tuples: tuple[Sequence[int], list[Row]] = ((), [])

    @cached_property
    def rows(self) -> list[Any]:
        """All rows."""
        return self.make_rows(self.columns)

    def tuples(self, positions: Sequence[int]) -> list[Row]:
        """The values of some columns in all rows."""
        if self._tuples[0] is not positions:
            self._tuples = positions, self.make_tuples([self.columns.column(position) for position in positions])
        return self._tuples[1]

    @cached_property
    def stored(self) -> list[pa.Array]:
        """The columns in stored form."""
        return [stored_column(column) for column in self.columns.columns]


@dataclass(slots=True)
class RowGroup:
    """Rows of one key that belong to one pane or session, in order of time."""

    batch: BatchRows
    start: int
    """The first of the rows in the batch; `end` is behind the last."""
    end: int
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
        return chain.from_iterable(map(batch.make_rows, self._chunks()))

    def tuples(self, positions: Sequence[int]) -> Iterator[Row]:
        """The values of some columns in the rows."""
        batch = self.batch
        if batch.columns.num_rows <= _CHUNK_ROWS:
            return iter(batch.tuples(positions)[self.start : self.end])
        chunks = ([rows.column(position) for position in positions] for rows in self._chunks())
        return chain.from_iterable(map(batch.make_tuples, chunks))

    def _chunks(self) -> Iterator[pa.RecordBatch]:
        for first in range(self.start, self.end, _CHUNK_ROWS):
            yield self.batch.columns.slice(first, min(_CHUNK_ROWS, self.end - first))

    def part(self, start: int, end: int) -> RowGroup:
        """A part of the rows, as a group without times."""
        if (start, end) == (0, len(self)):
            return self
        return RowGroup(self.batch, self.start + start, self.start + end, None, None)


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
            batch = BatchRows(window.rows, None, self.rows, self.keys)
            return [iter([RowGroup(batch, start, end, None, None)]) for start, end in pairwise(window.starts.tolist())]
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
        batch = BatchRows(rows, times_ms, self.rows, self.keys)
        times = zip(times_ms[firsts].tolist(), times_ms[starts[1:] - 1].tolist(), strict=True)
        groups = [
            RowGroup(batch, start, end, first_ms, last_ms)
            for (start, end), (first_ms, last_ms) in zip(pairwise(starts.tolist()), times, strict=True)
        ]
        if times_us.null_count:
            for group in groups:
                if group.first_ms == _WITHOUT_TIME_MS:
                    group.first_ms = group.last_ms = None
        ends_of_keys = np.searchsorted(key_of[firsts], np.arange(len(window.keys) + 1)).tolist()
        return [iter(groups[start:end]) for start, end in pairwise(ends_of_keys)]
