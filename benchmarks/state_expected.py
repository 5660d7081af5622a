"""What the processors of ``state`` should return, computed from the input without any state.

A check of a batch is the number of output rows (`keys`), the sum of their `n` (`total`), and the sum of key times n
(`weighted`), so that a number that is lost, doubled, or given to another key shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.state_rows import WINDOW_MS

__all__ = ["EXPECTED", "ITEMS", "InputBatch"]

ITEMS: Final = 16
"""How many different items there are."""

_Numbers = npt.NDArray[np.int64]
_Check = dict[str, int]


@dataclass(frozen=True)
class InputBatch:
    """The input rows of a batch.

    Parameters
    ----------
    keys : numpy.ndarray of int64, shape (n,)
        Their keys.
    items : numpy.ndarray of int64, shape (n,)
        Their items, below `ITEMS`.
    times_ms : numpy.ndarray of int64, shape (n,)
        Their event times.
    delay_ms : int
        How far the watermark is behind the largest event time of the batches before.
    checks : bool
        Whether this is the batch in which lists are read.
    """

    keys: _Numbers
    items: _Numbers
    times_ms: _Numbers
    delay_ms: int
    checks: bool


def _counts(batches: Iterable[InputBatch]) -> Iterator[_Check]:
    """Each key's number of rows so far."""
    counts: dict[int, int] = {}
    for batch in batches:
        keys, rows = np.unique(batch.keys, return_counts=True)
        yield _check(keys, _added(counts, keys, rows))


def _lists(batches: Iterable[InputBatch]) -> Iterator[_Check]:
    """Each key's number of rows in this batch; where lists are read, their lengths."""
    counts: dict[int, int] = {}
    for batch in batches:
        keys, rows = np.unique(batch.keys, return_counts=True)
        lengths = _added(counts, keys, rows)
        yield _check(keys, lengths if batch.checks else rows)


def _entries(batches: Iterable[InputBatch]) -> Iterator[_Check]:
    """For each key the sum, over its rows, of how many rows its item has had up to there."""
    counts: dict[int, int] = {}
    for batch in batches:
        pairs, rows = np.unique(batch.keys * ITEMS + batch.items, return_counts=True)
        after = _added(counts, pairs, rows)
        # The counts of an item's rows are consecutive numbers, the last of which is the new count.
        sums = rows * (after - rows) + rows * (rows + 1) // 2
        keys, own = np.unique(pairs // ITEMS, return_inverse=True)
        yield _check(keys, np.bincount(own, sums).astype(np.int64))


def _timers(batches: Iterable[InputBatch]) -> Iterator[_Check]:
    """One timer for each key of the batch."""
    for batch in batches:
        keys = np.unique(batch.keys)
        yield _check(keys, np.ones(len(keys), np.int64))


def _windows(batches: Iterable[InputBatch]) -> Iterator[_Check]:
    """The windows that the watermark has come to, with their counts. No row is late."""
    keys, starts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    watermark_ms: int | None = None
    for batch in batches:
        keys = np.concatenate([keys, batch.keys])
        starts = np.concatenate([starts, batch.times_ms - batch.times_ms % WINDOW_MS])
        is_closed = np.zeros(len(keys), bool) if watermark_ms is None else starts + WINDOW_MS <= watermark_ms
        closed, rows = np.unique(np.stack([keys[is_closed], starts[is_closed]]), axis=1, return_counts=True)
        yield _check(closed[0], rows)
        keys, starts = keys[~is_closed], starts[~is_closed]
        watermark_ms = max(int(batch.times_ms.max()) - batch.delay_ms, watermark_ms or 0)


EXPECTED: Final = {
    "value": _counts,
    "ttl": _counts,
    "list": _lists,
    "map": _entries,
    "timer": _timers,
    "window": _windows,
}
"""By kind: what makes the checks of successive batches."""


def _added(counts: dict[int, int], numbers: _Numbers, rows: _Numbers) -> _Numbers:
    """Add to counts, and return the new ones."""
    for number, added in zip(numbers.tolist(), rows.tolist(), strict=True):
        counts[number] = counts.get(number, 0) + added
    return np.array([counts[number] for number in numbers.tolist()], np.int64)


def _check(keys: _Numbers, numbers: _Numbers) -> _Check:
    return {"keys": len(keys), "total": int(numbers.sum()), "weighted": int((keys * numbers).sum())}
