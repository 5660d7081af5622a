"""What the processors of ``state`` should return, computed from the input without any state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.query import Checks, Numbers, check_of
from benchmarks.state_processors import WINDOW_MS

ITEMS: Final = 16
"""How many different items there are."""


@dataclass(frozen=True)
class InputBatch:
    """The input rows of a batch: their keys, their items below `ITEMS`, and their event times."""

    keys: Numbers
    items: Numbers
    times_ms: Numbers
    delay_ms: int
    """How far the watermark is behind the largest event time of the batches before."""
    checks: bool
    """Whether this is the batch in which lists are read."""


def _counts(batches: Iterable[InputBatch]) -> Iterator[Checks]:
    """Each key's number of rows so far."""
    counts: dict[int, int] = {}
    for batch in batches:
        keys, rows = np.unique(batch.keys, return_counts=True)
        yield check_of(keys, _added(counts, keys, rows))


def _lists(batches: Iterable[InputBatch]) -> Iterator[Checks]:
    """Each key's number of rows in this batch; where lists are read, their lengths."""
    counts: dict[int, int] = {}
    for batch in batches:
        keys, rows = np.unique(batch.keys, return_counts=True)
        lengths = _added(counts, keys, rows)
        yield check_of(keys, lengths if batch.checks else rows)


def _entries(batches: Iterable[InputBatch]) -> Iterator[Checks]:
    """For each key the sum, over its rows, of how many rows its item has had up to there."""
    counts: dict[int, int] = {}
    for batch in batches:
        pairs, rows = np.unique(batch.keys * ITEMS + batch.items, return_counts=True)
        after = _added(counts, pairs, rows)
        # The counts of an item's rows are consecutive numbers, the last of which is the new count.
        sums = rows * (after - rows) + rows * (rows + 1) // 2
        keys, own = np.unique(pairs // ITEMS, return_inverse=True)
        yield check_of(keys, np.bincount(own, sums).astype(np.int64))


def _timers(batches: Iterable[InputBatch]) -> Iterator[Checks]:
    """One timer for each key of the batch."""
    for batch in batches:
        keys = np.unique(batch.keys)
        yield check_of(keys, np.ones(len(keys), np.int64))


def _windows(batches: Iterable[InputBatch]) -> Iterator[Checks]:
    """The windows that the watermark has come to, with their counts. No row is late."""
    keys, starts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    watermark_ms: int | None = None
    for batch in batches:
        keys = np.concatenate([keys, batch.keys])
        starts = np.concatenate([starts, batch.times_ms - batch.times_ms % WINDOW_MS])
        is_closed = np.zeros(len(keys), bool) if watermark_ms is None else starts + WINDOW_MS <= watermark_ms
        closed, rows = np.unique(np.stack([keys[is_closed], starts[is_closed]]), axis=1, return_counts=True)
        yield check_of(closed[0], rows)
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


def _added(counts: dict[int, int], numbers: Numbers, rows: Numbers) -> Numbers:
    """Add to counts, and return the new ones."""
    for number, added in zip(numbers.tolist(), rows.tolist(), strict=True):
        counts[number] = counts.get(number, 0) + added
    return np.array([counts[number] for number in numbers.tolist()], np.int64)
