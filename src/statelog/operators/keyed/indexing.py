"""Finds the keys of a batch's rows without sorting the rows: each row gets the position of its key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.operators.keyed.grouping import group_rows, hash_stretches
from statelog.runs.byte_slices import Budget, Positions, gather_rows, row_ends, size_of
from statelog.runs.key_columns import encode_column, joined_by_row
from statelog.runs.key_groups import Hashes
from statelog.tables.table import KeyBatch

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class IndexedRows:
    """Rows in order of arrival, and the keys that they belong to."""

    keys: KeyBatch
    """The distinct keys."""
    rows: Sequence[pa.RecordBatch]
    """One batch, unless a single key has more rows than fit into one."""
    key_index: Positions
    """The position in `keys` of each row's key, shape (rows,)."""
    firsts: Positions
    """The first row of each key, shape (keys,)."""
    newest_ms: Int64s | None = None
    """The newest event time of each key's rows, ``NO_TIME_MS`` for a key without any; None if it is not needed."""

    def first_of_keys(self, columns: Sequence[int]) -> list[pa.Array]:
        """The values of some columns in the first row of each key."""
        firsts = pa.array(self.firsts)
        return [self.rows[0].column(column).take(firsts) for column in columns]

    def cut(
        self, max_keys: Callable[[], int], max_bytes: int, state_bytes: Int64s | None = None
    ) -> Iterator[IndexedRows]:
        """Cut the keys into chunks of bounded size; `max_keys` is asked before each chunk.

        `state_bytes`, shape (keys,), are added to the size of the keys' rows.
        """
        count, start = len(self.keys), 0
        size_bytes = self.rows[0].nbytes + (0 if state_bytes is None else int(state_bytes.sum()))
        if len(self.rows) > 1 or (count <= max_keys() and size_bytes <= max_bytes):
            yield self
            return
        rows = self.rows[0]
        order = np.argsort(self.key_index, kind="stable")
        starts = np.searchsorted(self.key_index[order], np.arange(count + 1))
        ends = np.concatenate(([0], np.cumsum(np.diff(row_ends(rows))[order])))[starts]
        if state_bytes is not None:
            ends = ends + np.concatenate(([0], np.cumsum(state_bytes)))
        while start < count:
            end = int(np.searchsorted(ends, ends[start] + max_bytes, "right")) - 1
            end = max(start + 1, min(end, start + max_keys(), count))
            picked = np.sort(order[starts[start] : starts[end]])
            index = self.key_index[picked] - start
            newest_ms = None if self.newest_ms is None else self.newest_ms[start:end]
            yield IndexedRows(
                self.keys.slice(start, end),
                [rows.take(pa.array(picked))],
                index,
                first_rows(index, end - start),
                newest_ms,
            )
            start = end


def index_rows(
    batches: Sequence[pa.RecordBatch], hashes: Hashes, key_columns: Sequence[int], budget: Budget
) -> Iterator[IndexedRows]:
    """Find the keys of rows, in parts of bounded size, each with all rows of its keys.

    The batches, at least one, hold n rows in order of arrival, and `hashes`, shape (n,), their key hashes. The keys of
    the parts ascend.
    """
    if size_of(batches) <= budget.input_bytes:
        rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        yield _indexed([rows], hashes, key_columns)
        return
    order = np.argsort(hashes, kind="stable")
    sizes = np.concatenate([np.diff(row_ends(batch)) for batch in batches])
    for start, end in hash_stretches(hashes[order], sizes[order], budget.input_bytes):
        picked = np.sort(order[start:end])
        parts = list(gather_rows(batches, picked, budget.input_bytes))
        whole = _indexed(parts, hashes[picked], key_columns)
        if len(parts) == 1 or len(whole.keys) == 1:
            yield whole
        else:  # several keys of one hash
            yield from _key_by_key(whole)


def first_rows(index: Positions, count: int) -> Positions:
    """The first row of each of `count` groups, from the group of each row."""
    firsts = np.empty(count, np.int64)
    firsts[index[::-1]] = np.arange(len(index) - 1, -1, -1)
    return firsts


def _key_by_key(whole: IndexedRows) -> Iterator[IndexedRows]:
    starts = np.cumsum([0] + [part.num_rows for part in whole.rows])
    for key in range(len(whole.keys)):
        is_own = whole.key_index == key
        rows = [
            part.filter(pa.array(is_own[start : start + part.num_rows]))
            for part, start in zip(whole.rows, starts.tolist(), strict=False)
        ]
        kept = [part for part in rows if part.num_rows]
        count = int(is_own.sum())
        yield IndexedRows(whole.keys.slice(key, key + 1), kept, np.zeros(count, np.int64), np.zeros(1, np.int64))


def _indexed(parts: Sequence[pa.RecordBatch], hashes: Hashes, key_columns: Sequence[int]) -> IndexedRows:
    columns = [
        pa.chunked_array([part.column(column) for part in parts]).combine_chunks() if len(parts) > 1
        else parts[0].column(column)
        for column in key_columns
    ]  # fmt: skip
    encoded = pa.array(hashes).dictionary_encode()
    codes, distinct = encoded.indices.to_numpy(), encoded.dictionary.to_numpy()
    # Codes are given in order of first appearance, so a hash appears first where the largest code so far grows.
    firsts = np.flatnonzero(np.diff(np.maximum.accumulate(codes), prepend=-1))
    order = np.argsort(distinct)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    index, firsts = rank[codes], firsts[order]
    if not all(_are_equal(column, firsts[index]) for column in columns):
        return _by_bytes(parts, hashes, columns)
    keys = _encoded([column.take(pa.array(firsts)) for column in columns])
    return IndexedRows(KeyBatch(distinct[order], keys), parts, index, firsts)


def _encoded(columns: Sequence[pa.Array]) -> pa.Array:
    return joined_by_row([part for column in columns for part in encode_column(column)])


def _are_equal(column: pa.Array, others: Positions) -> bool:
    """Whether each value of a key column equals, as a key, the value in another row."""
    kind = column.type
    if pa.types.is_nested(kind):
        column = _encoded([column])
    elif not column.null_count and (pa.types.is_integer(kind) or pa.types.is_timestamp(kind)):
        values = column.cast(pa.int64(), safe=False).to_numpy()
        return bool((values == values[others]).all())
    other = column.take(pa.array(others))
    same = pc.equal(column, other).fill_null(False)
    if column.null_count:
        same = pc.or_(same, pc.and_(column.is_null(), other.is_null()))
    if pa.types.is_floating(kind):
        same = pc.or_(same, pc.and_(pc.is_nan(column).fill_null(False), pc.is_nan(other).fill_null(False)))
    return bool(same.true_count == len(column))


def _by_bytes(parts: Sequence[pa.RecordBatch], hashes: Hashes, columns: Sequence[pa.Array]) -> IndexedRows:
    """Find keys by their canonical bytes, where two of them share a hash."""
    numbers = pa.RecordBatch.from_arrays([pa.array(np.arange(len(hashes)))], names=["row"])
    chunk = group_rows(numbers, hashes, _encoded(columns))
    rows = chunk.rows.column(0).to_numpy()
    index = np.empty(len(rows), np.int64)
    index[rows] = np.repeat(np.arange(len(chunk.keys)), np.diff(chunk.starts))
    return IndexedRows(chunk.keys, parts, index, first_rows(index, len(chunk.keys)))
