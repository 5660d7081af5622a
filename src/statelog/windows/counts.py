"""Count windows: a fixed number of rows each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from statelog.aggregates.groups import Groups
from statelog.convert.codecs import ColumnCodecs
from statelog.history.window_settings import COUNT_FIELD, COUNT_STATE
from statelog.operators.keyed.columns import ValueColumns
from statelog.windows.contents import Contents, TimedRows
from statelog.windows.engine import ChunkKeys, Clock, Windows, WindowShape, WindowTimes, schema_behind


class CountedWindows(Windows):
    """Keeps the accumulator of each key's current window, and the number of its rows."""

    has_bounds = False

    def __init__(self, size: int, contents: Contents, clock: Clock, shape: WindowShape, codecs: ColumnCodecs) -> None:
        super().__init__(contents, clock, shape, codecs)
        self._size = size
        self._schema = schema_behind(COUNT_FIELD, contents.schema)

    def _declare(self, handle: Any) -> None:
        self._current: ValueColumns = handle.getValueState(COUNT_STATE, self._schema)

    def _process(self, timed: TimedRows, keys: ChunkKeys, times: WindowTimes) -> Iterator[pa.RecordBatch]:
        contents, size, owners = self._contents, self._size, np.arange(len(keys))
        (counts, *before), has = self._current.read()
        done = np.where(has, counts.fill_null(0).to_numpy(), 0)
        of_key = Groups(timed.owners, len(keys))
        # An earlier start with larger windows may have left one with as many rows: the next row completes it.
        first_size = np.maximum(size - done, 1)
        place = np.empty(len(timed), np.int64)
        starts = np.cumsum(of_key.sizes) - of_key.sizes
        place[of_key.order] = np.arange(len(place)) - np.repeat(starts, of_key.sizes)
        # The number of each row's window among those of its key, and how many are complete.
        window = np.maximum(0, (place - first_size[timed.owners]) // size + 1)
        full = np.where(of_key.sizes >= first_size, (of_key.sizes - first_size) // size + 1, 0)
        is_last = window == full[timed.owners]
        known = np.flatnonzero(has)
        stored = [column.take(pa.array(known)) for column in before]
        if full.any():
            first_window = np.cumsum(full) - full
            of_window = np.repeat(owners, full)
            rows = replace(timed, times_ms=window).take(~is_last)
            groups = Groups((first_window[timed.owners] + window)[~is_last], len(of_window))
            is_completed = full[known] > 0
            completed, kept = (pa.array(mask) for mask in (is_completed, ~is_completed))
            own = [column.filter(completed) for column in stored]
            held = contents.add(own, first_window[known[is_completed]], rows, groups, keys.of(of_window))
            number = np.arange(len(of_window)) - first_window[of_window]
            yield from self._results(keys, of_window, contents.opened(held), [number, number + 1], times.context)
            contents.clear(np.flatnonzero(full))
            known, stored = known[~is_completed], [column.filter(kept) for column in stored]
        in_last = np.where(full > 0, of_key.sizes - first_size - (full - 1) * size, done + of_key.sizes)
        current = np.flatnonzero(in_last)
        of_owner = np.zeros(len(keys), np.int64)
        of_owner[current] = np.arange(len(current))
        rows = replace(timed, times_ms=np.zeros_like(timed.times_ms)).take(is_last)
        groups = Groups(of_owner[rows.owners], len(current))
        held = contents.add(stored, of_owner[known], rows, groups, keys.of(current))
        self._current.write([pa.array(in_last[current]), *held], current)
        self._current.clear(np.flatnonzero(in_last == 0))
