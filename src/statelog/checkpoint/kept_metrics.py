"""Keeps the latest metrics of an operator in the driver, for those who look."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from statelog.metrics import CheckpointMetrics, Observer, Recorded

_KEPT: Final = 1000


class KeptMetrics:
    """Tells the observer of each checkpoint, and keeps its metrics: the newest whole, the others' numbers."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.newest: CheckpointMetrics | None = None
        """Those of the newest checkpoint; None before the first one of this start."""
        self._recent: deque[CheckpointMetrics] = deque(maxlen=_KEPT)
        self.last_restore: CheckpointMetrics | None = None
        """The newest checkpoint whose subtasks had to fetch state."""

    @property
    def recent(self) -> Sequence[CheckpointMetrics]:
        """The latest ones, the oldest first."""
        return tuple(self._recent.copy())

    def checkpoint(self, metrics: CheckpointMetrics) -> None:
        """Note a durable checkpoint."""
        self.newest = metrics
        kept = replace(metrics, measured=Recorded(), subtasks=(), states={}, hot_keys=(), hot_key_groups=())
        self._recent.append(kept)
        if kept.restored_bytes:
            self.last_restore = kept
        self._observer.checkpoint(metrics)
