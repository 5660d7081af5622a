"""Counts the keys of a state and finds the largest, from its rows."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statelog.runs.byte_slices import Positions, bytes_before
from statelog.runs.format import VALUE_COLUMN

_KEY = 1
_ENTRY = 2
"""Columns of a batch of changes."""


class KeySize(NamedTuple):
    """What a key takes; the larger of two is the greater one."""

    size_bytes: int
    """Of its rows: the encoded key and map key, and the value as Arrow columns."""
    key: bytes
    """Encoded."""
    rows: int


class KeySizes:
    """The rows, keys and bytes of a state, from puts in run order, and its largest keys.

    `value_fields` is the number of the value's fields, `most` the number of keys to find.
    """

    def __init__(self, value_fields: int, most: int) -> None:
        self._values = slice(VALUE_COLUMN, VALUE_COLUMN + value_fields)
        self._most = most
        self.rows = 0
        self.keys = 0
        self.key_bytes = 0
        self.value_bytes = 0
        self.most_rows = 0
        """The largest number of rows of a key."""
        self._heap: list[KeySize] = []
        self._last: KeySize | None = None
        """The last key, of which more rows may come."""

    def add(self, changes: pa.RecordBatch) -> None:
        """Add the next rows, at least one."""
        keys = changes.column(_KEY)
        is_new = pc.not_equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False)
        bounds = np.concatenate(([0], np.flatnonzero(is_new) + 1, [len(keys)]))
        key_bytes = _sizes([keys, changes.column(_ENTRY)], bounds)
        value_bytes = _sizes(changes.columns[self._values], bounds)
        self.rows += len(keys)
        self.key_bytes += int(key_bytes.sum())
        self.value_bytes += int(value_bytes.sum())
        sizes, rows = key_bytes + value_bytes, np.diff(bounds)

        def at(place: int) -> KeySize:
            return KeySize(int(sizes[place]), keys[int(bounds[place])].as_py(), int(rows[place]))

        first, last = at(0), len(sizes) - 1
        if self._last is not None and self._last.key == first.key:
            first = KeySize(self._last.size_bytes + first.size_bytes, first.key, self._last.rows + first.rows)
        else:
            self._close()
        self._last = first
        if last == 0:
            return
        self._close()
        if last > 1:
            self.keys += last - 1
            self.most_rows = max(self.most_rows, int(rows[1:last].max()))
            for place in 1 + np.argsort(sizes[1:last], kind="stable")[-self._most :]:
                self._offer(at(place))
        self._last = at(last)

    def largest(self) -> list[KeySize]:
        """The largest keys, the largest first, once all rows were added."""
        self._close()
        return sorted(self._heap, reverse=True)

    def _close(self) -> None:
        """Count the last key."""
        if self._last is None:
            return
        self.keys += 1
        self.most_rows = max(self.most_rows, self._last.rows)
        self._offer(self._last)
        self._last = None

    def _offer(self, key: KeySize) -> None:
        heapq.heappush(self._heap, key)
        if len(self._heap) > self._most:
            heapq.heappop(self._heap)


def _sizes(columns: list[pa.Array], bounds: Positions) -> Positions:
    """The bytes of the rows between each two of `bounds`."""
    before = sum([bytes_before(column, bounds) for column in columns], np.zeros(len(bounds), np.int64))
    return np.diff(before)
