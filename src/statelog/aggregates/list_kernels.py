"""Kernels whose accumulators are lists of values: collected values, distinct values, the first rows by order."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.aggregates.groups import Groups
from statelog.aggregates.kernels import Columns, Kernel, order_of
from statelog.errors import ErrorKind, ProcessorError
from statelog.operators.keyed.indexing import Int64s
from statelog.runs.byte_slices import MAX_COLUMN_BYTES, bytes_before
from statelog.runs.key_columns import encode_column, joined_by_row

MAX_LIST_BYTES: Final = 64 << 20
"""Of the values of a key that an aggregate keeps."""


class ListTooLarge(ProcessorError):
    """The values of a group take more bytes than allowed."""

    default_kind = ErrorKind.TOO_LARGE

    def __init__(self, group: int, size_bytes: int, max_bytes: int) -> None:
        super().__init__(
            f"its values take {size_bytes:,} bytes; the limit is {max_bytes:,}",
            hint="Use an aggregate of fixed size, such as ApproxCountDistinct, a TTL, or more keys.",
        )
        self.group = group
        """The group with the values."""


class ListKernel(Kernel):
    """Values in the order of their rows; `max_bytes` bounds those of a group."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def lift(self, column: pa.Array, by: pa.Array) -> Columns:
        valid = column.is_valid()
        counts = valid.to_numpy(zero_copy_only=False).astype(np.int32)
        offsets = np.concatenate(([0], np.cumsum(counts, dtype=np.int32)))
        return [pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), column.filter(valid))]

    def reduce(self, held: Columns, groups: Groups) -> Columns:
        values, counts = self._joined(held[0], groups)
        self._require_small(values, counts)
        return [_lists(values, counts, held[0].type)]

    def result(self, held: Columns) -> pa.Array:
        column = held[0]
        if not column.null_count:
            return column
        lengths = pc.list_value_length(column).fill_null(0).to_numpy()
        return _lists(column.flatten(), lengths, column.type)

    def _joined(self, lists: pa.Array, groups: Groups) -> tuple[pa.Array, Int64s]:
        """The values of all lists by group, and how many each group has."""
        lengths = pc.list_value_length(lists).fill_null(0).to_numpy().astype(np.int64)
        if len(lists) > 1 and (np.diff(groups.index) < 0).any():
            lists = lists.take(pa.array(groups.order))
        return lists.flatten(), groups.sums(lengths)

    def _require_small(self, values: pa.Array, counts: Int64s) -> None:
        ends = np.concatenate(([0], np.cumsum(counts)))
        sizes = np.diff(bytes_before(values, ends))
        largest = int(sizes.argmax()) if len(sizes) else 0
        if len(sizes) and sizes[largest] > self._max_bytes:
            raise ListTooLarge(largest, int(sizes[largest]), self._max_bytes)
        if int(sizes.sum()) > MAX_COLUMN_BYTES:
            raise ListTooLarge(largest, int(sizes.sum()), MAX_COLUMN_BYTES)


class DistinctKernel(ListKernel):
    """Each value once; its value is their number."""

    def lift(self, column: pa.Array, by: pa.Array) -> Columns:
        return super().lift(_one_nan(column), by)

    def reduce(self, held: Columns, groups: Groups) -> Columns:
        values, counts = self._joined(held[0], groups)
        owners = np.repeat(np.arange(groups.count), counts)
        kept = _first_of_each(values, owners)
        values = values.take(pa.array(kept))
        counts = np.bincount(owners[kept], minlength=groups.count)
        self._require_small(values, counts)
        return [_lists(values, counts, held[0].type)]

    def result(self, held: Columns) -> pa.Array:
        return pc.list_value_length(held[0]).cast(pa.int64()).fill_null(0)


class TopKernel(ListKernel):
    """The first `size` values by order, the greatest first; of values with the same order, those that came first.

    A value is a struct whose first field is its order.
    """

    def __init__(self, size: int, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._size = size

    def reduce(self, held: Columns, groups: Groups) -> Columns:
        values, counts = self._joined(held[0], groups)
        owners = np.repeat(np.arange(groups.count), counts)
        # The complement turns the order around, the least number included.
        rows = np.lexsort(
            (~order_of(values.field(0)), owners)
        )  # stable, so values of one order stay in the order of their rows
        starts = np.concatenate(([0], np.cumsum(counts)))[:-1]
        places = np.arange(len(rows)) - np.repeat(starts, counts)
        values = values.take(pa.array(rows[places < self._size]))
        counts = np.minimum(counts, self._size)
        self._require_small(values, counts)
        return [_lists(values, counts, held[0].type)]


def _lists(values: pa.Array, counts: Int64s, kind: pa.DataType) -> pa.Array:
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=kind)


def _one_nan(column: pa.Array) -> pa.Array:
    """The column with one NaN and one zero, as equal values count once."""
    if not pa.types.is_floating(column.type):
        return column
    values: npt.NDArray[np.float64] = column.to_numpy(zero_copy_only=False) + 0.0
    values[np.isnan(values)] = np.nan
    return pa.array(values, column.type, mask=column.is_null().to_numpy(zero_copy_only=False))


def _first_of_each(values: pa.Array, owners: Int64s) -> Int64s:
    """The first row of each pair of a value and its owner, ascending."""
    if not len(values):
        return np.zeros(0, np.int64)
    if pa.types.is_nested(values.type) or pa.types.is_floating(values.type):
        values = joined_by_row(encode_column(values))  # Arrow hashes no nested values, and tells NaNs apart by bits
    codes = values.dictionary_encode().indices.to_numpy().astype(np.int64)
    pairs = owners * (int(codes.max()) + 1) + codes
    return np.sort(np.unique(pairs, return_index=True)[1])
