"""Cuts and joins rows by their size in bytes, so that memory stays bounded however large rows are.

Arrow's offsets of strings, binaries and lists have 32 bits, so 2 GiB of one column do not fit into a batch. Nothing
here makes a batch larger than its bound, unless a single row is larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Positions = npt.NDArray[np.int64]

MAX_COLUMN_BYTES: Final = (1 << 31) - 1
"""The reach of Arrow's 32-bit offsets."""
_OFFSET_BYTES: Final = 4
_GROWTH: Final = 4


@dataclass(frozen=True)
class Budget:
    """How much data is processed at once; sizes are those of Arrow columns.

    A single row may exceed every size but the last two.
    """

    window_keys: int = 16_384
    """Keys of a key chunk, that is, keys that are processed together."""
    column_keys: int = 262_144
    """Keys of a key chunk for a processor that takes columns."""
    window_rows: int = 65_536
    """Input rows of a key chunk."""
    slice_bytes: int = 64 << 20
    """Rows of a merge slice, of a block, of a key chunk, and of a batch of output."""
    prefetch_entries: int = 100_000
    """Entries of lists and maps that are fetched for a key chunk at once."""
    input_bytes: int = 256 << 20
    """Input rows that are grouped by key at once."""
    row_bytes: int = 1 << 30
    """Limit of a row: a value, with its key and its map key."""
    elements_bytes: int = MAX_COLUMN_BYTES
    """Limit of an unkeyed state in one subtask."""


BUDGET: Final = Budget()


class Pace:
    """Learns from converted rows how many to convert next, so that together they take at most about `max_bytes`."""

    def __init__(self, max_bytes: int, first_rows: int, most_rows: int) -> None:
        self.rows = min(first_rows, most_rows)
        """Rows to convert next."""
        self._max_bytes = max_bytes
        self._most_rows = most_rows

    def learn(self, rows: int, size_bytes: int) -> None:
        """Note the size of rows that were converted together."""
        if rows:
            grown = _GROWTH * self.rows if rows >= self.rows else self.rows
            fitting = self._max_bytes * rows // max(1, size_bytes)
            self.rows = max(1, min(grown, fitting, self._most_rows))


class RowsTooLarge(Exception):
    """A column does not fit into Arrow's offsets; fewer rows may fit."""


def to_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Make a column; RowsTooLarge if it does not fit into Arrow's offsets."""
    try:
        array = pa.array(values, kind)
    except pa.ArrowCapacityError as error:
        raise RowsTooLarge(str(error)) from error
    if isinstance(array, pa.ChunkedArray):  # PyArrow does this for long strings and binaries
        raise RowsTooLarge(f"{array.nbytes} bytes of {kind}")
    return array


def to_batches(rows: pa.RecordBatch | pa.Table) -> list[pa.RecordBatch]:
    """The rows as batches."""
    return [rows] if isinstance(rows, pa.RecordBatch) else rows.to_batches()


def joined_column(parts: Sequence[pa.Array]) -> pa.Array:
    """Join columns into one; binaries too large for 32-bit offsets become large binaries."""
    if pa.types.is_binary(parts[0].type) and sum([part.nbytes for part in parts]) >= MAX_COLUMN_BYTES:
        parts = [part.cast(pa.large_binary()) for part in parts]
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def size_of(batches: Sequence[pa.RecordBatch]) -> int:
    """Size of all rows together, in bytes."""
    return sum([batch.nbytes for batch in batches])


def bytes_before(column: pa.Array, rows: Positions) -> Positions:
    """Bytes of the values before each of `rows` (0 to the length of the column), from offsets alone."""
    kind = column.type
    if pa.types.is_null(kind) or not len(column):
        return np.zeros(len(rows), np.int64)
    if pa.types.is_struct(kind):
        return sum((bytes_before(column.field(i), rows) for i in range(kind.num_fields)), np.zeros(len(rows), np.int64))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        offsets = column.offsets.to_numpy()
        within, first = offsets[rows].astype(np.int64), offsets[:1].astype(np.int64)
        inside: Positions = _OFFSET_BYTES * rows
        for child in [column.keys, column.items] if pa.types.is_map(kind) else [column.values]:
            inside = inside + bytes_before(child, within) - bytes_before(child, first)
        return inside
    if is_variable(kind):
        width = np.dtype(np.int64 if _is_large(kind) else np.int32)
        offsets = np.frombuffer(column.buffers()[1], width, len(column) + 1, column.offset * width.itemsize)
        before: Positions = width.itemsize * rows + (offsets[rows].astype(np.int64) - int(offsets[0]))
        return before
    try:
        bits = kind.bit_width
    except ValueError:
        bits = -(-8 * column.nbytes // len(column))  # no state has this type: assume that all values are of one size
    return rows * max(1, int(bits) // 8)


def is_variable(kind: pa.DataType) -> bool:
    """Whether values of a type are strings or binaries."""
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind)) or _is_large(kind)


def _is_large(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind))


def row_ends(batch: pa.RecordBatch) -> Positions:
    """Bytes before each row and, last, of all rows: n + 1 numbers for n rows."""
    rows = np.arange(batch.num_rows + 1)
    return sum([bytes_before(column, rows) for column in batch.columns], np.zeros(len(rows), np.int64))


def stretches(ends: Positions, max_bytes: int, max_rows: int | None = None) -> Iterator[tuple[int, int]]:
    """Cut rows into stretches of bounded size, each with at least one row; `ends` as from :func:`row_ends`."""
    count, start = len(ends) - 1, 0
    while start < count:
        end = int(np.searchsorted(ends, ends[start] + max_bytes, "right")) - 1
        end = max(start + 1, end if max_rows is None else min(end, start + max_rows))
        yield start, end
        start = end


def cut_rows(batch: pa.RecordBatch, max_bytes: int, max_rows: int | None = None) -> Iterator[pa.RecordBatch]:
    """Slices of a batch, each of bounded size; nothing is copied."""
    if batch.nbytes <= max_bytes and (max_rows is None or batch.num_rows <= max_rows):
        yield batch
        return
    for start, end in stretches(row_ends(batch), max_bytes, max_rows):
        yield batch.slice(start, end - start)


def join_rows(batches: Sequence[pa.RecordBatch], max_bytes: int) -> Iterator[pa.RecordBatch]:
    """Join batches, in order, into fewer ones of bounded size."""
    held: list[pa.RecordBatch] = []
    held_bytes = 0
    for whole in batches:
        for batch in cut_rows(whole, max_bytes):
            size = batch.nbytes
            if held and held_bytes + size > max_bytes:
                yield _concatenated(held)
                held, held_bytes = [], 0
            held.append(batch)
            held_bytes += size
    if held:
        yield _concatenated(held)


def gather_rows(batches: Sequence[pa.RecordBatch], rows: Positions, max_bytes: int) -> Iterator[pa.RecordBatch]:
    """Take rows of one or more batches, in any order; positions count through all batches."""
    if size_of(batches) <= max_bytes:
        yield _concatenated(batches).take(pa.array(rows))
        return
    starts = np.cumsum([0] + [batch.num_rows for batch in batches])
    sizes = np.concatenate([np.diff(row_ends(batch)) for batch in batches])
    ends = np.concatenate(([0], np.cumsum(sizes[rows])))
    for start, end in stretches(ends, max_bytes):
        yield _gathered(batches, starts, rows[start:end])


def _gathered(batches: Sequence[pa.RecordBatch], starts: Positions, rows: Positions) -> pa.RecordBatch:
    owners = np.searchsorted(starts, rows, "right") - 1
    order = np.argsort(owners, kind="stable")
    parts: list[pa.RecordBatch] = []
    for owner in np.unique(owners).tolist():
        own = rows[owners == owner] - starts[owner]
        parts.append(batches[owner].take(pa.array(own)))
    joined = _concatenated(parts)
    if (order[1:] > order[:-1]).all():
        return joined
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return joined.take(pa.array(back))


def in_parts(
    count: int, make: Callable[[int, int], pa.RecordBatch], max_bytes: int, first: int = 0
) -> Iterator[pa.RecordBatch]:
    """Make rows `first` to `count` - 1 in parts of bounded size, halving a range until it fits.

    `make` makes the columns of the rows from its first argument up to, not including, its second. A part of one row may
    be larger; RowsTooLarge if even one row does not fit into a column.
    """
    try:
        made = make(first, count)
        if count - first <= 1 or made.nbytes <= max_bytes:
            yield made
            return
        del made
    except RowsTooLarge:
        if count - first <= 1:
            raise
    middle = (first + count) // 2
    yield from in_parts(middle, make, max_bytes, first)
    yield from in_parts(count, make, max_bytes, middle)


def _concatenated(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
