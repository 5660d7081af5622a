"""Ready-made aggregates in count windows, on columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from statelog.aggregates.accumulators import Accumulators
from statelog.aggregates.groups import Groups
from statelog.convert.codecs import ColumnCodecs
from statelog.history.window_settings import COUNT_FIELD, COUNT_STATE
from statelog.operators.keyed.columns import ValueColumns
from statelog.operators.keyed.indexing import IndexedRows
from statelog.runs.times import Moment
from statelog.windows.aggregated import AggregatedWindows, WindowShape
from statelog.windows.operator import Clock, schema_behind


class AggregatedCounts(AggregatedWindows):
    """Keeps the accumulator of each key's current window, and the number of its rows."""

    def __init__(
        self, size: int, accumulators: Accumulators, clock: Clock, shape: WindowShape, codecs: ColumnCodecs
    ) -> None:
        super().__init__(accumulators, clock, shape, codecs)
        self._size = size
        self._schema = schema_behind(COUNT_FIELD, accumulators.schema)

    def init(self, handle: Any) -> None:
        super().init(handle)
        self._current: ValueColumns = handle.getValueState(COUNT_STATE, self._schema)

    def process(self, chunk: IndexedRows, moment: Moment) -> Iterator[pa.RecordBatch]:
        keys, size = chunk.keys, self._size
        owners = np.arange(len(keys))
        decoded = self._keys(keys)
        for timed in self._timed(chunk, moment):
            (counts, *before), has = self._current.read()
            done = np.where(has, counts.fill_null(0).to_numpy(), 0)
            of_key = Groups(timed.owners, len(keys))
            # An earlier start with larger windows may have left one with as many rows: the next row completes it.
            first_size = np.maximum(size - done, 1)
            place = np.empty(len(timed.owners), np.int64)
            starts = np.cumsum(of_key.sizes) - of_key.sizes
            place[of_key.order] = np.arange(len(place)) - np.repeat(starts, of_key.sizes)
            window = np.maximum(0, (place - first_size[timed.owners]) // size + 1)
            full = np.where(of_key.sizes >= first_size, (of_key.sizes - first_size) // size + 1, 0)
            in_last = np.where(full > 0, of_key.sizes - first_size - (full - 1) * size, done + of_key.sizes)
            # The windows of all keys, by key; of each key the last one, perhaps without rows, is not complete.
            first_window = np.cumsum(full + 1) - (full + 1)
            index = first_window[timed.owners] + window
            of_window = np.repeat(owners, full + 1)
            held = self._lifted(timed)
            known = np.flatnonzero(has)
            if len(known):
                picked = pa.array(known)
                held = [pa.concat_arrays([old.take(picked), new]) for old, new in zip(before, held, strict=True)]
                index = np.concatenate([first_window[known], index])
            merged = self._reduced(held, Groups(index, len(of_window)), of_window, keys)
            last = first_window + full
            is_full = np.ones(len(of_window), bool)
            is_full[last] = False
            complete = np.flatnonzero(is_full)
            if len(complete):
                picked = pa.array(complete)
                yield self._returned(decoded, of_window[complete], [column.take(picked) for column in merged], [])
            picked = pa.array(last)
            self._current.write([pa.array(in_last), *[column.take(picked) for column in merged]])
            self._current.clear(np.flatnonzero(in_last == 0))
