"""The numbers of all operators of this driver, added up over the checkpoints of their starts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Final

from statelog.errors import ConfigurationError
from statelog.metrics import (
    CheckpointMetrics,
    Meaning,
    Metric,
    Observer,
    RestoreMetrics,
    RestoreProgress,
    Step,
    meanings,
)

CHECKPOINTS: Final = "checkpoints"

_OWN: Final = {
    CHECKPOINTS: Meaning("Durable checkpoints.", adds_up=True),
    "batch": Meaning("Spark's id of the batch of the newest checkpoint."),
}


@cache
def exported() -> Mapping[str, Meaning]:
    """The meanings of all exported numbers, by name."""
    counters = {str(metric): Meaning(metric.meaning, adds_up=True) for metric in Metric if _is_counter(metric)}
    return {**_OWN, **meanings(), **counters}


def _is_counter(metric: Metric) -> bool:
    return "per" not in metric.split("_") and not metric.endswith(("_s", "_bytes"))


@dataclass(frozen=True)
class Reading:
    """A number of one operator."""

    query_id: str
    uid: str
    value: float


class OperatorTotals:
    """The numbers of one operator, in one start of its query."""

    def __init__(self, query_id: str, uid: str) -> None:
        self.query_id = query_id
        self.uid = uid
        self._numbers: dict[str, float] = {}
        self._lock = threading.Lock()

    def note(self, metrics: CheckpointMetrics) -> None:
        """Note a durable checkpoint."""
        found = {CHECKPOINTS: 1, "batch": metrics.batch, **metrics.numbers()}
        known = exported()
        counts = {name: number for name, number in metrics.measured.counts.items() if name in known}
        with self._lock:
            for name, number in (found | counts).items():
                if number is not None:
                    before = self._numbers.get(name, 0) if known[name].adds_up else 0
                    self._numbers[name] = before + number

    def read(self) -> dict[str, float]:
        """The numbers by name; empty before the first checkpoint."""
        with self._lock:
            return dict(self._numbers)


class Totals:
    """The numbers of all operators whose queries run."""

    def __init__(self) -> None:
        self._operators: dict[tuple[str, str], OperatorTotals] = {}
        self._lock = threading.Lock()

    def begin(self, query_id: str, uid: str) -> OperatorTotals:
        """An operator starts; its numbers begin anew."""
        totals = OperatorTotals(query_id, uid)
        with self._lock:
            self._operators[query_id, uid] = totals
        return totals

    def end(self, totals: OperatorTotals) -> None:
        """A start is over; the numbers of a newer one stay."""
        with self._lock:
            if self._operators.get((totals.query_id, totals.uid)) is totals:
                del self._operators[totals.query_id, totals.uid]

    def read(self) -> dict[str, list[Reading]]:
        """All numbers, by name; every name of :func:`exported` is there."""
        with self._lock:
            operators = list(self._operators.values())
        found: dict[str, list[Reading]] = {name: [] for name in exported()}
        for operator in operators:
            for name, value in operator.read().items():
                found[name].append(Reading(operator.query_id, operator.uid, value))
        return found


@cache
def process_totals() -> Totals:
    """The totals of this driver."""
    return Totals()


class Counted(Observer):
    """Notes checkpoints for the exporters, and forwards all calls to the user's observer."""

    def __init__(self, observer: Observer, totals: OperatorTotals) -> None:
        self._observer = observer
        self._totals = totals

    def step(self, step: Step, batch: int, subtask: int) -> None:
        self._observer.step(step, batch, subtask)

    def checkpoint(self, metrics: CheckpointMetrics) -> None:
        self._totals.note(metrics)
        self._observer.checkpoint(metrics)

    def restore(self, metrics: RestoreMetrics) -> None:
        self._observer.restore(metrics)

    def restoring(self, progress: RestoreProgress) -> None:
        self._observer.restoring(progress)


def optional_library(load: Callable[[], ModuleType], function: str, extra: str) -> ModuleType:
    """An exporter's library; raises ConfigurationError if it is not installed."""
    try:
        return load()
    except ImportError as error:
        raise ConfigurationError(
            f"statelog.{function} needs a package that is not installed ({error}).",
            hint=f"Install it for the driver: pip install 'statelog[{extra}]'.",
        ) from error
