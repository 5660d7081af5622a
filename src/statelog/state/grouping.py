"""Grouping the rows of a batch by key, and cutting the keys into windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.state.key_groups import Hashes
from statelog.state.table import KeyBatch

__all__ = ["GroupedRows", "Window", "group_rows"]

WINDOW_KEYS: Final = 16_384
WINDOW_ROWS: Final = 65_536


@dataclass(frozen=True)
class Window:
    """Some successive keys of a batch, with their rows.

    Parameters
    ----------
    keys : KeyBatch
        The keys.
    rows : pyarrow.RecordBatch
        Their rows, by key and then in order of arrival.
    starts : numpy.ndarray of int64, shape (len(keys) + 1,)
        Where each key's rows start, and where the last key's end.
    """

    keys: KeyBatch
    rows: pa.RecordBatch
    starts: npt.NDArray[np.int64]


@dataclass(frozen=True)
class GroupedRows:
    """All rows of a batch by key; the fields are those of :class:`Window`."""

    keys: KeyBatch
    rows: pa.RecordBatch
    starts: npt.NDArray[np.int64]

    def windows(self, max_keys: int = WINDOW_KEYS, max_rows: int = WINDOW_ROWS) -> Iterator[Window]:
        """Cut the keys into windows of bounded size; a key with more rows is a window of its own."""
        start = 0
        while start < len(self.keys):
            first_row = int(self.starts[start])
            end = int(np.searchsorted(self.starts, first_row + max_rows, "right")) - 1
            end = min(max(end, start + 1), start + max_keys, len(self.keys))
            rows = self.rows.slice(first_row, int(self.starts[end]) - first_row)
            yield Window(self.keys.slice(start, end), rows, self.starts[start : end + 1] - first_row)
            start = end


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
