"""Grouping the rows of a batch by key, and cutting the keys into windows of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.errors import ErrorKind, ProcessorError
from statelog.runs.byte_slices import (
    MAX_COLUMN_BYTES,
    Budget,
    Positions,
    cut_rows,
    gather_rows,
    join_rows,
    row_ends,
    size_of,
    stretches,
)
from statelog.runs.key_groups import Hashes
from statelog.tables.table import KeyBatch


@dataclass(frozen=True)
class KeyChunk:
    """Some successive keys of a batch, with their rows.

    Parameters
    ----------
    keys : KeyBatch
        The keys.
    rows : pyarrow.RecordBatch
        Their rows, by key and then in order of arrival.
    starts : numpy.ndarray of int64, shape (len(keys) + 1,)
        Where each key's rows start, and where the last key's end.
    more : sequence of pyarrow.RecordBatch
        The rest of the rows of a key that has more than fit into one batch, and is a window of its own.
    """

    keys: KeyBatch
    rows: pa.RecordBatch
    starts: npt.NDArray[np.int64]
    more: Sequence[pa.RecordBatch] = ()

    def chunks(self, max_rows: int, max_bytes: int) -> Iterator[pa.RecordBatch]:
        """The rows in small batches."""
        for rows in (self.rows, *self.more):
            yield from cut_rows(rows, max_bytes, max_rows)

    def joined(self) -> KeyChunk:
        """The window with all rows in one batch.

        Raises
        ------
        ProcessorError
            If these are too many for one batch.
        """
        if not self.more:
            return self
        parts = [self.rows, *self.more]
        size_bytes = size_of(parts)
        if size_bytes > MAX_COLUMN_BYTES:
            count = sum(part.num_rows for part in parts)
            raise ProcessorError(
                f"the key's {count:,} input rows in one batch take {size_bytes:,} bytes, and may take"
                f" {MAX_COLUMN_BYTES:,} where rows are brought into the order of their times.",
                kind=ErrorKind.TOO_LARGE,
                hint="Spread the rows over several keys, or use transformWithState, which reads any number of rows.",
            )
        rows = pa.concat_batches(parts)
        return KeyChunk(self.keys, rows, np.array([0, rows.num_rows]))


@dataclass(frozen=True)
class GroupedRows:
    """All rows of a batch by key; the fields are those of :class:`KeyChunk`."""

    keys: KeyBatch
    rows: pa.RecordBatch
    starts: npt.NDArray[np.int64]

    def windows(self, budget: Budget, max_keys: Callable[[], int]) -> Iterator[KeyChunk]:
        """Cut the keys into windows of bounded size; a key with more rows is a window of its own.

        Parameters
        ----------
        budget : Budget
            Bounds of a window's rows.
        max_keys : callable
            Asked for each window how many keys it may have.
        """
        max_bytes = budget.slice_bytes
        ends = row_ends(self.rows)[self.starts] if self.rows.nbytes > max_bytes else None
        start = 0
        while start < len(self.keys):
            first_row = int(self.starts[start])
            end = int(np.searchsorted(self.starts, first_row + budget.window_rows, "right")) - 1
            if ends is not None:
                end = min(end, int(np.searchsorted(ends, ends[start] + max_bytes, "right")) - 1)
            end = min(max(end, start + 1), start + max_keys(), len(self.keys))
            rows = self.rows.slice(first_row, int(self.starts[end]) - first_row)
            yield KeyChunk(self.keys.slice(start, end), rows, self.starts[start : end + 1] - first_row)
            start = end


def key_chunks(
    batches: Sequence[pa.RecordBatch],
    hashes: Hashes,
    encode_keys: Callable[[pa.RecordBatch], pa.Array],
    budget: Budget,
    max_keys: Callable[[], int],
) -> Iterator[KeyChunk]:
    """Bring the rows of each key together, and cut the keys into windows of bounded size.

    Parameters
    ----------
    batches : sequence of pyarrow.RecordBatch
        At least one; n rows in order of arrival, which is kept within a key.
    hashes : numpy.ndarray of uint64, shape (n,)
        Key hash of each row.
    encode_keys : callable
        Makes the canonical keys of rows.
    budget : Budget
        How much is grouped at once, and how large a window may be.
    max_keys : callable
        As for :meth:`GroupedRows.windows`.
    """
    if size_of(batches) <= budget.input_bytes:
        rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        yield from group_rows(rows, hashes, encode_keys(rows)).windows(budget, max_keys)
        return
    order = np.argsort(hashes, kind="stable")
    sizes = np.concatenate([np.diff(row_ends(batch)) for batch in batches])
    for start, end in _hash_stretches(hashes[order], sizes[order], budget.input_bytes):
        picked = np.sort(order[start:end])
        parts = list(gather_rows(batches, picked, budget.input_bytes))
        if len(parts) == 1:
            grouped = group_rows(parts[0], hashes[picked], encode_keys(parts[0]))
            yield from grouped.windows(budget, max_keys)
        else:
            yield from _windows_of_one_hash(parts, hashes[picked[:1]], encode_keys, budget.input_bytes)


def _hash_stretches(hashes: Hashes, sizes: Positions, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut rows, sorted by hash, into stretches of bounded size; those of one hash stay together."""
    firsts = np.flatnonzero(np.concatenate(([True], hashes[1:] != hashes[:-1])))
    ends = np.concatenate(([0], np.cumsum(sizes)))
    bounds = np.append(firsts, len(hashes))
    for first, last in stretches(ends[bounds], max_bytes):
        yield int(bounds[first]), int(bounds[last])


def _windows_of_one_hash(
    parts: Sequence[pa.RecordBatch],
    hashes: Hashes,
    encode_keys: Callable[[pa.RecordBatch], pa.Array],
    max_bytes: int,
) -> Iterator[KeyChunk]:
    """A window for each key of a hash, usually one, whose rows are too much for a batch."""
    encoded = [encode_keys(part) for part in parts]
    distinct = sorted({key for keys in encoded for key in pc.unique(keys).to_pylist()})
    for key in distinct:
        own = [
            part.filter(pc.equal(keys, pa.scalar(key, pa.binary()))) for part, keys in zip(parts, encoded, strict=True)
        ]
        rows, *more = join_rows([part for part in own if part.num_rows], max_bytes)
        yield KeyChunk(KeyBatch(hashes, pa.array([key], pa.binary())), rows, np.array([0, rows.num_rows]), more)


def group_rows(rows: pa.RecordBatch, hashes: Hashes, keys: pa.Array) -> GroupedRows:
    """Bring the rows of each key together; the hash only finds, the key's bytes decide.

    Parameters
    ----------
    rows : pyarrow.RecordBatch
        n rows in order of arrival, which is kept within a key.
    hashes : numpy.ndarray of uint64, shape (n,)
        Key hash of each row.
    keys : pyarrow.Array of binary, length n
        Canonical key of each row.
    """
    order = np.argsort(hashes, kind="stable")
    sorted_hashes = hashes[order]
    is_new_hash = np.ones(len(order), bool)
    is_new_hash[1:] = sorted_hashes[1:] != sorted_hashes[:-1]
    sorted_keys = keys.take(pa.array(order))
    is_new_key = _differs_from_previous(sorted_keys)
    if (is_new_key > is_new_hash).any():
        order = _part_colliding_keys(order, keys, is_new_hash, is_new_key)
        sorted_keys = keys.take(pa.array(order))
        is_new_key = _differs_from_previous(sorted_keys)
    is_new_key |= is_new_hash
    firsts = np.flatnonzero(is_new_key)
    batch = KeyBatch(sorted_hashes[firsts], sorted_keys.take(pa.array(firsts)))
    return GroupedRows(batch, rows.take(pa.array(order)), np.append(firsts, len(order)))


def _differs_from_previous(keys: pa.Array) -> npt.NDArray[np.bool_]:
    result = np.ones(len(keys), bool)
    if len(keys) > 1:
        equal = pc.equal(keys.slice(1), keys.slice(0, len(keys) - 1))
        result[1:] = ~equal.to_numpy(zero_copy_only=False)
    return result


def _part_colliding_keys(
    order: npt.NDArray[np.int64],
    keys: pa.Array,
    is_new_hash: npt.NDArray[np.bool_],
    is_new_key: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int64]:
    """Sort the rows of those hashes that several keys share by key, in their places."""
    group = np.cumsum(is_new_hash) - 1
    mixed = np.zeros(group[-1] + 1, bool)
    mixed[group[is_new_key & ~is_new_hash]] = True
    places = np.flatnonzero(mixed[group])
    table = pa.table(
        {"group": group[places], "key": keys.take(pa.array(order[places])), "place": places},
    )
    by_key = [("group", "ascending"), ("key", "ascending"), ("place", "ascending")]
    inner = pc.sort_indices(table, by_key).to_numpy()
    result = order.copy()
    result[places] = order[places[inner]]
    return result
