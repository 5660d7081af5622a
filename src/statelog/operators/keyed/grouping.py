"""Groups the rows of a batch by key, and cuts the keys into chunks of bounded size."""

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
from statelog.runs.key_columns import differs_from_previous
from statelog.runs.key_groups import Hashes
from statelog.tables.table import KeyBatch


@dataclass(frozen=True)
class KeyChunk:
    """Successive keys of a batch, with their rows."""

    keys: KeyBatch
    rows: pa.RecordBatch
    """The rows by key, within a key in order of arrival."""
    starts: Positions
    """Shape (keys + 1,): each key's first row, then the number of rows."""
    more: Sequence[pa.RecordBatch] = ()
    """The rest of the rows, if a key has more than fit into one batch; such a key is a chunk of its own."""

    @property
    def rows_per_key(self) -> Positions:
        """Number of rows of each key, shape (keys,)."""
        rows = np.diff(self.starts)
        return rows + sum(part.num_rows for part in self.more) if self.more else rows

    def cut(self, budget: Budget, max_keys: Callable[[], int]) -> Iterator[KeyChunk]:
        """Cut the keys into chunks of bounded size, a large key alone; `max_keys` is asked before each chunk."""
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

    def chunks(self, max_rows: int, max_bytes: int) -> Iterator[pa.RecordBatch]:
        """All rows, in batches of bounded size."""
        for rows in (self.rows, *self.more):
            yield from cut_rows(rows, max_bytes, max_rows)

    def joined(self) -> KeyChunk:
        """The chunk with all rows in one batch; raises ProcessorError if they are too many for one."""
        if not self.more:
            return self
        parts = [self.rows, *self.more]
        size_bytes = size_of(parts)
        if size_bytes > MAX_COLUMN_BYTES:
            count = sum(part.num_rows for part in parts)
            raise ProcessorError(
                f"the key's {count:,} input rows in one batch take {size_bytes:,} bytes; the limit is"
                f" {MAX_COLUMN_BYTES:,} where rows are sorted by time.",
                kind=ErrorKind.TOO_LARGE,
                hint="Spread the rows over several keys, or use transformWithState, which reads any number of rows.",
            )
        rows = pa.concat_batches(parts)
        return KeyChunk(self.keys, rows, np.array([0, rows.num_rows]))


def key_chunks(
    batches: Sequence[pa.RecordBatch],
    hashes: Hashes,
    encode_keys: Callable[[pa.RecordBatch], pa.Array],
    budget: Budget,
    max_keys: Callable[[], int],
) -> Iterator[KeyChunk]:
    """Group rows by key, and cut the keys into chunks of bounded size.

    The batches, at least one, hold n rows in order of arrival, which is kept within a key; `hashes`, shape (n,), are
    the rows' key hashes. `max_keys` is asked before each chunk.
    """
    if size_of(batches) <= budget.input_bytes:
        rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        yield from group_rows(rows, hashes, encode_keys(rows)).cut(budget, max_keys)
        return
    order = np.argsort(hashes, kind="stable")
    sizes = np.concatenate([np.diff(row_ends(batch)) for batch in batches])
    for start, end in hash_stretches(hashes[order], sizes[order], budget.input_bytes):
        picked = np.sort(order[start:end])
        parts = list(gather_rows(batches, picked, budget.input_bytes))
        if len(parts) == 1:
            yield from group_rows(parts[0], hashes[picked], encode_keys(parts[0])).cut(budget, max_keys)
        else:
            yield from _windows_of_one_hash(parts, hashes[picked[:1]], encode_keys, budget.input_bytes)


def hash_stretches(hashes: Hashes, sizes: Positions, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut rows that are sorted by hash into stretches of bounded size; rows of one hash stay together."""
    firsts = np.flatnonzero(np.concatenate(([True], hashes[1:] != hashes[:-1])))
    ends = np.concatenate(([0], np.cumsum(sizes)))
    bounds = np.append(firsts, len(hashes))
    for first, last in stretches(ends[bounds], max_bytes):
        yield int(bounds[first]), int(bounds[last])


def _windows_of_one_hash(
    parts: Sequence[pa.RecordBatch], hashes: Hashes, encode_keys: Callable[[pa.RecordBatch], pa.Array], max_bytes: int
) -> Iterator[KeyChunk]:
    """A chunk for each key, usually one, of a hash whose rows do not fit into one batch."""
    encoded = [encode_keys(part) for part in parts]
    distinct = sorted({key for keys in encoded for key in pc.unique(keys).to_pylist()})
    for key in distinct:
        own = [
            part.filter(pc.equal(keys, pa.scalar(key, pa.binary()))) for part, keys in zip(parts, encoded, strict=True)
        ]
        rows, *more = join_rows([part for part in own if part.num_rows], max_bytes)
        yield KeyChunk(KeyBatch(hashes, pa.array([key], pa.binary())), rows, np.array([0, rows.num_rows]), more)


def group_rows(rows: pa.RecordBatch, hashes: Hashes, keys: pa.Array) -> KeyChunk:
    """Group rows by key, in order of arrival within a key; the bytes of keys decide, not only their hashes."""
    order = np.argsort(hashes, kind="stable")
    sorted_hashes = hashes[order]
    is_new_hash = np.ones(len(order), bool)
    is_new_hash[1:] = sorted_hashes[1:] != sorted_hashes[:-1]
    sorted_keys = keys.take(pa.array(order))
    is_new_key = differs_from_previous(sorted_keys)
    if (is_new_key > is_new_hash).any():
        order = _part_colliding_keys(order, keys, is_new_hash, is_new_key)
        sorted_keys = keys.take(pa.array(order))
        is_new_key = differs_from_previous(sorted_keys)
    is_new_key |= is_new_hash
    firsts = np.flatnonzero(is_new_key)
    batch = KeyBatch(sorted_hashes[firsts], sorted_keys.take(pa.array(firsts)))
    return KeyChunk(batch, rows.take(pa.array(order)), np.append(firsts, len(order)))


def _part_colliding_keys(
    order: Positions, keys: pa.Array, is_new_hash: npt.NDArray[np.bool_], is_new_key: npt.NDArray[np.bool_]
) -> Positions:
    """Sort the rows of each hash that several keys share by key; all other rows stay in their places."""
    group = np.cumsum(is_new_hash) - 1
    mixed = np.zeros(group[-1] + 1, bool)
    mixed[group[is_new_key & ~is_new_hash]] = True
    places = np.flatnonzero(mixed[group])
    table = pa.table({"group": group[places], "key": keys.take(pa.array(order[places])), "place": places})
    by_key = [("group", "ascending"), ("key", "ascending"), ("place", "ascending")]
    inner = pc.sort_indices(table, by_key).to_numpy()
    result = order.copy()
    result[places] = order[places[inner]]
    return result
