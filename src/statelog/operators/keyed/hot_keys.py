"""The keys and key groups with the most input rows of a subtask in one batch."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from statelog.runs.key_groups import GROUP_SHIFT, Hashes
from statelog.tables.table import KeyBatch

MOST: Final = 10
"""Number of keys, and of key groups, that a subtask reports."""
_MOST_KEY_BYTES: Final = 1024
"""Longer keys are counted, but not reported."""
_FEW_ROWS: Final = 4096
"""With fewer rows, sorting them takes less time than counting all key groups."""

_Counts = npt.NDArray[np.int64]


@dataclass
class HotKeys:
    """The keys with the most input rows so far, of keys that come once each; exact."""

    found: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Rows, key group and key, the most rows first; keys with one row are not hot."""

    def note(self, keys: KeyBatch, rows: _Counts) -> None:
        """Note some keys and their numbers of rows, shape (keys,)."""
        places = _hottest(rows)
        found = keys.take(places)
        hottest = zip(rows[places].tolist(), found.hashes.tolist(), found.keys.to_pylist(), strict=True)
        told = [
            (count, hashed >> GROUP_SHIFT, key if len(key) <= _MOST_KEY_BYTES else b"")
            for count, hashed, key in hottest
        ]
        self.found = heapq.nlargest(MOST, [*self.found, *told])


def hot_key_groups(hashes: Hashes) -> list[tuple[int, int]]:
    """Rows and key group of the groups with the most rows, the most first; groups with one row are not hot."""
    groups = (hashes >> np.uint64(GROUP_SHIFT)).astype(np.int64)
    if len(groups) < _FEW_ROWS:
        present, rows = np.unique(groups, return_counts=True)
    else:
        rows = np.bincount(groups)
        present = np.arange(len(rows))
    places = _hottest(rows)
    return sorted(zip(rows[places].tolist(), present[places].tolist(), strict=True), reverse=True)


def _hottest(rows: _Counts) -> _Counts:
    """The ascending places of the largest numbers of rows, without single rows."""
    places = np.flatnonzero(rows > 1)
    if len(places) > MOST:
        places = np.sort(places[np.argpartition(rows[places], -MOST)[-MOST:]])
    return places
