"""Partial aggregates before the shuffle: the rows of a task, reduced by key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import LongType, StructField, StructType

from statelog.aggregates.accumulators import Reduction
from statelog.aggregates.groups import Groups
from statelog.aggregates.kernels import Columns
from statelog.aggregates.operator import key_named
from statelog.operators.event_time import EventTime
from statelog.operators.keyed.indexing import IndexedRows, index_rows
from statelog.runs.byte_slices import BUDGET, cut_rows
from statelog.runs.key_groups import Hashes
from statelog.runs.times import NO_TIME_MS

_SAMPLE: Final = 16
"""One in so many key hashes, or rows, is looked at."""
_HOT: Final = 0.01
_WORTH_IT: Final = 0.3
"""Rows are reduced if they have at most this share of distinct keys. At 0.43, of 2,000,000 rows, a batch took an eighth
longer than one whose rows were passed on."""
_SKEWED: Final = 0.1
"""Rows are reduced, too, if the hottest keys have more of them: one subtask would get them all."""
_OUTPUT_ROWS: Final = 65_536


@dataclass(frozen=True)
class PartialAggregates:
    """Reduces the rows of a task by key; picklable.

    The input has the columns `columns` and then the key hash. The output has the grouping columns, with an event time
    the newest one and the number of rows, the accumulators, and the key hash.
    """

    columns: StructType
    keys: Sequence[int]
    """The grouping columns."""
    reduction: Reduction
    event_time: EventTime | None
    """The event time of the input."""

    @property
    def output(self) -> StructType:
        """The output columns without the key hash; their names are arbitrary."""
        fields = [self.columns[index] for index in self.keys]
        if self.event_time is not None:
            fields += [self.columns[self.event_time.column], StructField("rows", LongType())]
        fields += self.reduction.schema.fields
        return StructType([StructField(f"p{index}", field.dataType) for index, field in enumerate(fields)])

    @property
    def output_keys(self) -> list[int]:
        """The grouping columns in the output."""
        return list(range(len(self.keys)))

    @property
    def output_event_time(self) -> EventTime | None:
        """The event time of the output."""
        count = len(self.keys)
        return None if self.event_time is None else replace(self.event_time, column=count, rows_column=count + 1)

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Reduce the rows of a task, in parts of bounded size.

        Whether it is worth it is decided by the first part. So a retry on the same rows returns the same.
        """
        part: list[pa.RecordBatch] = []
        size_bytes, combines = 0, None
        for batch in batches:
            part.append(batch)
            size_bytes += batch.nbytes
            if size_bytes >= BUDGET.slice_bytes:
                combines = _is_worth_it(_hashes(part)) if combines is None else combines
                yield from self._partials(part, combines=combines)
                part, size_bytes = [], 0
        if sum(batch.num_rows for batch in part):
            yield from self._partials(part, combines=_is_worth_it(_hashes(part)) if combines is None else combines)

    def _partials(self, part: Sequence[pa.RecordBatch], *, combines: bool) -> Iterator[pa.RecordBatch]:
        rows = [batch for batch in part if batch.num_rows]
        if not combines:
            for batch in rows:
                yield self._made(
                    [batch.column(index) for index in self.keys],
                    None if self.event_time is None else batch.column(self.event_time.column),
                    np.ones(batch.num_rows, np.int64),
                    self._lifted(batch),
                    batch.column(batch.num_columns - 1),
                )
            return
        for indexed in index_rows(rows, _hashes(rows), self.keys, BUDGET):
            for reduced in self._reduced(indexed):
                yield from cut_rows(reduced, BUDGET.slice_bytes, _OUTPUT_ROWS)

    def _reduced(self, rows: IndexedRows) -> Iterator[pa.RecordBatch]:
        """The partial aggregates of keys: one for each, and more for a key with more rows than fit into a batch."""
        start, keys = 0, rows.first_of_keys(self.keys)
        for batch in rows.rows:
            groups = Groups(rows.key_index[start : start + batch.num_rows], len(rows.keys))
            start += batch.num_rows
            with key_named(lambda group: tuple(column[group].as_py() for column in keys)):
                held = self.reduction.reduce(self._lifted(batch), groups)
            yield self._made(
                keys,
                None if self.event_time is None else _newest(batch, self.event_time, groups),
                groups.sizes,
                held,
                pa.array(rows.keys.hashes.view(np.int64)),
            )

    def _lifted(self, rows: pa.RecordBatch) -> Columns:
        return self.reduction.lift(rows, pa.array(np.zeros(rows.num_rows, np.int64)))

    def _made(
        self,
        keys: Columns,
        time: pa.Array | None,
        rows: npt.NDArray[np.int64],
        held: Columns,
        hashes: pa.Array,
    ) -> pa.RecordBatch:
        times = [] if time is None else [time, pa.array(rows)]
        columns = [*keys, *times, *held, hashes]
        return pa.RecordBatch.from_arrays(columns, names=[f"p{index}" for index in range(len(columns))])


def _hashes(rows: Sequence[pa.RecordBatch]) -> Hashes:
    columns = [batch.column(batch.num_columns - 1).to_numpy() for batch in rows]
    hashes: Hashes = np.concatenate(columns).view(np.uint64)
    return hashes


def _newest(rows: pa.RecordBatch, event_time: EventTime, groups: Groups) -> pa.Array:
    """The event time column's value in the newest row of each group."""
    times_us = event_time.times_us(rows).fill_null(NO_TIME_MS).to_numpy()
    newest = np.full(groups.count, NO_TIME_MS)
    np.maximum.at(newest, groups.index, times_us)
    found, _ = groups.first_where(times_us == newest[groups.index])
    return rows.column(event_time.column).take(pa.array(found))


def _is_worth_it(hashes: Hashes) -> bool:
    """Whether rows have so few distinct keys that reducing them costs less than it saves, from two samples.

    A sample of the keys, all rows of one in sixteen, tells how many rows a key has; a sample of the rows, always the
    same, finds the hottest keys, which the first may miss.
    """
    of_keys = hashes[hashes % np.uint64(_SAMPLE) == 0]
    if len(of_keys) < _SAMPLE:
        return True
    distinct = len(np.unique(of_keys)) / len(of_keys)
    rows = np.random.default_rng(0).integers(0, len(hashes), len(hashes) // _SAMPLE)
    counts = np.unique(hashes[rows], return_counts=True)[1]
    share = counts / counts.sum()
    hot = share[share > _HOT].sum()
    return bool(hot > _SKEWED or distinct * (1 - hot) < _WORTH_IT)
