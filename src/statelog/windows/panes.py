"""Cuts a batch's rows into groups for windows: by key, in order of time, a group per pane or session."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.operators.event_time import EventTime
from statelog.operators.keyed.grouping import KeyChunk
from statelog.windows.assigners import Panes
from statelog.windows.stored import stored_values

_US_PER_MS: Final = 1000
_WITHOUT_TIME_MS: Final = 1 << 62
"""The time of rows without one; it sorts them behind the other rows of their key."""
_CHUNK_ROWS: Final = 65_536

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Partials(Protocol):
    """Computes accumulators on columns."""

    def partials(self, columns: pa.RecordBatch, starts: Int64s, times_ms: Int64s | None) -> list[tuple[Any, ...]]:
        """Compute an accumulator for each group of rows.

        `starts`, shape (n + 1,), has the start of each of the n groups and the end of the last; no group is empty.
        `times_ms` is None where windows do not depend on event time.
        """
        ...


class BatchRows:
    """Rows of several keys, sorted by key and time, and where their groups start; see :meth:`Partials.partials`."""

    def __init__(
        self,
        columns: pa.RecordBatch,
        times_ms: Int64s | None,
        starts: Int64s,
        make_rows: Callable[[pa.RecordBatch], list[Any]],
    ) -> None:
        self.columns = columns
        self.times_ms = times_ms
        self.starts = starts
        self.make_rows = make_rows
        self._partials: list[tuple[Any, ...]] | None = None

    @cached_property
    def rows(self) -> list[Any]:
        """All rows as the user sees them."""
        return self.make_rows(self.columns)

    @cached_property
    def stored_rows(self) -> list[tuple[Any, ...]]:
        """All rows in stored form: tuples, with timestamps as microseconds since the Unix epoch."""
        return list(zip(*map(stored_values, self.columns.columns), strict=True))

    def partial(self, aggregation: Partials, group: int) -> tuple[Any, ...]:
        """The accumulator of a group; the first call computes all groups' together."""
        if self._partials is None:
            self._partials = aggregation.partials(self.columns, self.starts, self.times_ms)
        return self._partials[group]


class RowGroup:
    """Rows of one key that belong to one pane or session, in order of time.

    They are the rows from `start` to `end` of the batch. `number` is the group's number there; None for a part of a
    group. `first_ms` and `last_ms` are the times of the first and last row; None if they have none.
    """

    __slots__ = ("batch", "end", "first_ms", "last_ms", "number", "start")

    def __init__(
        self, batch: BatchRows, start: int, end: int, number: int | None, first_ms: int | None, last_ms: int | None
    ) -> None:
        self.batch = batch
        self.start = start
        self.end = end
        self.number = number
        self.first_ms = first_ms
        self.last_ms = last_ms

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

    def partial(self, aggregation: Partials) -> tuple[Any, ...]:
        """The accumulator of the rows."""
        if self.number is not None:
            return self.batch.partial(aggregation, self.number)
        columns = self.batch.columns.slice(self.start, len(self))
        times_ms = self.batch.times_ms
        own_times_ms = None if times_ms is None else times_ms[self.start : self.end]
        return aggregation.partials(columns, np.array([0, len(self)]), own_times_ms)[0]

    def part(self, start: int, end: int) -> RowGroup:
        """A part of the rows, as a group without times."""
        if (start, end) == (0, len(self)):
            return self
        return RowGroup(self.batch, self.start + start, self.start + end, None, None, None)


class Cut(ABC):
    """Cuts the rows of one key, in order of time, into groups."""

    @abstractmethod
    def between(self, before_ms: Int64s, after_ms: Int64s) -> Bools:
        """Whether there is a cut between two times, pair by pair; `after_ms` is never the earlier one."""


class PaneCut(Cut):
    """Cuts where a pane, or the gap between two panes, starts."""

    def __init__(self, panes: Panes) -> None:
        self._panes = panes

    def between(self, before_ms: Int64s, after_ms: Int64s) -> Bools:
        is_cut: Bools = self._piece(before_ms) != self._piece(after_ms)
        return is_cut

    def _piece(self, times_ms: Int64s) -> Int64s:
        """The number of each time's pane or gap: panes are even, the gaps behind them odd."""
        panes = self._panes
        pieces = (times_ms - panes.offset_ms) // panes.step_ms * 2
        if panes.step_ms > panes.width_ms:
            pieces += (times_ms - panes.offset_ms) % panes.step_ms >= panes.width_ms
        return pieces


class SessionCut(Cut):
    """Cuts where successive rows are further apart than the gap."""

    def __init__(self, gap_ms: int) -> None:
        self._gap_ms = gap_ms

    def between(self, before_ms: Int64s, after_ms: Int64s) -> Bools:
        is_cut: Bools = after_ms - before_ms > self._gap_ms
        return is_cut


class RowMaker(Protocol):
    """Makes keys and rows as users see them; see :class:`statelog.operators.keyed.operator.InputCodec`."""

    def keys(self, columns: list[pa.Array]) -> list[tuple[Any, ...]]: ...

    def rows(self, rows: pa.RecordBatch) -> list[Any]: ...


class WindowInput:
    """Gives a window operator each key's rows as :class:`RowGroup` objects, in order of time.

    Without an event time or a cut, a key's rows are one group in order of arrival.
    """

    def __init__(self, rows: RowMaker, event_time: EventTime | None, cut: Cut | None) -> None:
        self._rows = rows
        self._event_time = event_time
        self._cut = cut

    def keys(self, columns: list[pa.Array]) -> list[tuple[Any, ...]]:
        return self._rows.keys(columns)

    def by_key(self, window: KeyChunk) -> list[Iterator[RowGroup]]:
        window = window.joined()
        if self._event_time is None or self._cut is None:
            batch = BatchRows(window.rows, None, window.starts, self._rows.rows)
            return [
                iter([RowGroup(batch, start, end, number, None, None)])
                for number, (start, end) in enumerate(pairwise(window.starts.tolist()))
            ]
        return self._by_time(window, self._event_time, self._cut)

    def _by_time(self, window: KeyChunk, event_time: EventTime, cut: Cut) -> list[Iterator[RowGroup]]:
        rows = window.rows
        times_us = event_time.times_us(rows)
        times_ms: Int64s = times_us.fill_null(_WITHOUT_TIME_MS).to_numpy()
        has_all = times_us.null_count == 0
        times_ms = (
            times_ms // _US_PER_MS
            if has_all
            else np.where(times_us.is_null().to_numpy(zero_copy_only=False), _WITHOUT_TIME_MS, times_ms // _US_PER_MS)
        )
        key_of = np.repeat(np.arange(len(window.keys)), np.diff(window.starts))
        is_same_key = key_of[1:] == key_of[:-1]
        if (is_same_key & (times_ms[1:] < times_ms[:-1])).any():
            order = np.lexsort((times_ms, key_of))  # rows of one time stay in order of arrival
            rows, times_ms = rows.take(pa.array(order)), times_ms[order]
        starts_group = np.ones(len(times_ms), bool)
        starts_group[1:] = ~is_same_key | cut.between(times_ms[:-1], times_ms[1:])
        firsts = np.flatnonzero(starts_group)
        starts = np.append(firsts, len(times_ms))
        batch = BatchRows(rows, times_ms, starts, self._rows.rows)
        groups = [
            RowGroup(batch, start, end, number, first_ms, last_ms)
            for number, ((start, end), first_ms, last_ms) in enumerate(
                zip(
                    pairwise(starts.tolist()),
                    times_ms[firsts].tolist(),
                    times_ms[starts[1:] - 1].tolist(),
                    strict=True,
                )
            )
        ]
        if not has_all:
            for group in groups:
                if group.first_ms == _WITHOUT_TIME_MS:
                    group.first_ms = group.last_ms = None
        ends_of_keys = np.searchsorted(key_of[firsts], np.arange(len(window.keys) + 1)).tolist()
        return [iter(groups[start:end]) for start, end in pairwise(ends_of_keys)]
