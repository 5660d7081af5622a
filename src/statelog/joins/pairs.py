"""Rows of the two sides of a join in order of time, and the pairs that they make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import pyarrow as pa

from statelog.numbers import US_PER_MS
from statelog.operators.keyed.columns import Columns, Mask
from statelog.operators.keyed.indexing import Int64s
from statelog.runs.byte_slices import row_ends
from statelog.windows.pane_columns import pair_codes

_Slice = slice
_BLOCK_PAIRS: Final = 65_536
"""So many pairs are looked at together."""


@dataclass(frozen=True)
class Interval:
    """Where the times of matching rows are, relative to a row's own time; both bounds are included."""

    first_ms: int
    last_ms: int

    @property
    def reversed(self) -> Interval:
        """The interval of the other side's rows."""
        return Interval(-self.last_ms, -self.first_ms)


@dataclass(frozen=True)
class SideRows:
    """Rows of one side, by key and then by time."""

    key_index: Int64s
    """The position of each row's key in the chunk."""
    times_us: Int64s
    """Event times, microseconds."""
    columns: Columns
    """All columns but the grouping columns."""
    is_matched: Mask
    """Whether each row has matched one; it is written to."""
    ordinals: Int64s | None = None
    """The places of waiting rows among those of one time; None for new rows."""
    arrived_ms: Int64s | None = None
    """The processing times at which rows came whose side returns those without a match; ``LAST_MS`` for no limit."""

    def __len__(self) -> int:
        return len(self.key_index)

    @cached_property
    def times_ms(self) -> Int64s:
        """Event times, rounded down to milliseconds: the times of the state's entries."""
        return self.times_us // US_PER_MS

    @cached_property
    def sizes(self) -> Int64s:
        """Bytes of each row."""
        if not self.columns:
            return np.zeros(len(self), np.int64)
        names = [str(place) for place in range(len(self.columns))]
        return np.diff(row_ends(pa.RecordBatch.from_arrays(self.columns, names=names)))

    def slice(self, start: int, end: int) -> SideRows:
        """The rows from `start` up to, not including, `end`, which share `is_matched` with these."""
        part = slice(start, end)
        columns = [column.slice(start, end - start) for column in self.columns]
        return self._picked(part, columns)

    def of_key(self, owner: int) -> SideRows:
        """The rows of one key."""
        return self.slice(*np.searchsorted(self.key_index, [owner, owner + 1]).tolist())

    def take(self, rows: Int64s | Mask) -> SideRows:
        """Some of the rows, given by position or mask."""
        places = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        if len(places) == len(self) and (np.diff(places) == 1).all():
            return self
        picked = pa.array(places)
        return self._picked(np.asarray(places, np.int64), [column.take(picked) for column in self.columns])

    def _picked(self, places: Int64s | _Slice, columns: Columns) -> SideRows:
        ordinals, arrived_ms = [None if own is None else own[places] for own in (self.ordinals, self.arrived_ms)]
        return SideRows(
            self.key_index[places], self.times_us[places], columns, self.is_matched[places], ordinals, arrived_ms
        )

    def ends_ms(self, after_ms: int = 0) -> Int64s:
        """The first whole milliseconds at which a watermark has passed the rows' times by so many milliseconds."""
        return -(-self.times_us // US_PER_MS) + after_ms

    def are_over(self, until_ms: int) -> Mask:
        """Which rows came up to a processing time, have a time limit, and have matched none."""
        if self.arrived_ms is None:
            return np.zeros(len(self), bool)
        over: Mask = ~self.is_matched & (self.arrived_ms <= until_ms)
        return over

    def followed_by(self, later: SideRows) -> SideRows:
        """These rows and other waiting ones, in this order."""
        assert self.ordinals is not None
        assert later.ordinals is not None
        return SideRows(
            np.concatenate([self.key_index, later.key_index]),
            np.concatenate([self.times_us, later.times_us]),
            [pa.concat_arrays(list(both)) for both in zip(self.columns, later.columns, strict=True)],
            np.concatenate([self.is_matched, later.is_matched]),
            np.concatenate([self.ordinals, later.ordinals]),
        )


def in_order(rows: SideRows) -> SideRows:
    """The rows by key and then by time; rows of one key and time stay in their order."""
    order = np.lexsort((rows.times_us, rows.key_index))
    return rows.take(order)


def pairs(rows: SideRows, others: SideRows, interval: Interval, keys: int) -> Iterator[tuple[Int64s, Int64s]]:
    """The pairs of rows of one side with those of the other, as their places, in parts of bounded size.

    `interval` is that of `rows`, and `keys` the number of keys in the chunk.
    """
    if not len(rows) or not len(others):
        return
    times_ms = rows.times_ms
    found, firsts, lasts = pair_codes(
        keys,
        (others.key_index, others.times_ms),
        (rows.key_index, times_ms + interval.first_ms),
        (rows.key_index, times_ms + interval.last_ms),
    )
    first = np.searchsorted(found, firsts)
    counts = np.searchsorted(found, lasts, "right") - first
    ends = np.cumsum(counts)
    before = ends - counts
    first_us, last_us = interval.first_ms * US_PER_MS, interval.last_ms * US_PER_MS
    for start in range(0, int(ends[-1]), _BLOCK_PAIRS):
        number = np.arange(start, min(start + _BLOCK_PAIRS, int(ends[-1])))
        own = np.searchsorted(ends, number, "right")
        other = first[own] + number - before[own]
        # The places were found by whole milliseconds; at the bounds microseconds decide.
        distance_us = others.times_us[other] - rows.times_us[own]
        fits = (distance_us >= first_us) & (distance_us <= last_us)
        if fits.any():
            yield own[fits], other[fits]


def newest_until(rows: SideRows, others: SideRows, most_ms: int, keys: int) -> Int64s:
    """The place of the newest of the others that is not later than a row, for each row; -1 for none.

    Of others of one time the last counts, and none that is more than `most_ms` older than the row. The others are in
    order of :func:`in_order`; `keys` is the number of keys in the chunk.
    """
    if not len(others):
        return np.full(len(rows), -1)
    found, wanted = pair_codes(keys, (others.key_index, others.times_us), (rows.key_index, rows.times_us))
    places: Int64s = np.searchsorted(found, wanted, "right") - 1
    is_near = rows.times_us - others.times_us[places] <= most_ms * US_PER_MS
    return np.where((places >= 0) & (others.key_index[places] == rows.key_index) & is_near, places, -1)


def joined_ranges(first_ms: Int64s, last_ms: Int64s) -> Iterator[tuple[int, int]]:
    """The union of ranges of times, as ranges that neither overlap nor touch; the firsts and the lasts ascend."""
    is_new = np.ones(len(first_ms), bool)
    is_new[1:] = first_ms[1:] > last_ms[:-1] + 1
    starts = np.flatnonzero(is_new)
    ends = np.append(starts[1:], len(first_ms)) - 1
    yield from zip(first_ms[starts].tolist(), last_ms[ends].tolist(), strict=True)
