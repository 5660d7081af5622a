"""The numbers of all operators of this driver, added up over the checkpoints of their starts."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
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
    "per_state_rows": Meaning("Rows of the state; an upper bound for keyed state.", "rows", per="state"),
    "per_state_bytes": Meaning("Size of these rows in the local files of the subtasks.", "bytes", per="state"),
}
_OF_SUBTASKS: Final = {
    "per_subtask_input_rows": ("Rows read.", "rows"),
    "per_subtask_changes": ("Changes of state that were logged.", ""),
    "per_subtask_changed_bytes": ("Stored size of the changesets.", "bytes"),
    "per_subtask_restore_s": ("Time until the state could be read.", "seconds"),
    "per_subtask_read_s": ("Time for looking up state.", "seconds"),
    "per_subtask_processor_s": ("Time in the processor, including the conversion of rows and values.", "seconds"),
    "per_subtask_encode_s": ("Time for encoding changes and writing them to the local disk.", "seconds"),
    "per_subtask_upload_s": ("Time spent waiting until objects were written.", "seconds"),
    "per_subtask_wait_s": ("Time spent waiting for the driver, for Spark and for other subtasks.", "seconds"),
}
_BOUNDS: Final = {
    "seconds": (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
    "bytes": tuple(float(4**power) for power in range(5, 16)),
    "": (1.0, 2.0, 3.0, 5.0, 10.0),
}
"""The buckets of distributions, by unit."""


@cache
def exported() -> Mapping[str, Meaning]:
    """The meanings of all exported numbers, by name."""
    counters = {str(metric): Meaning(metric.meaning, adds_up=True) for metric in Metric if _is_counter(metric)}
    subtasks = {name: Meaning(text, unit, adds_up=True, per="subtask") for name, (text, unit) in _OF_SUBTASKS.items()}
    return {**_OWN, **meanings(), **counters, **subtasks}


@cache
def distributions() -> Mapping[str, Meaning]:
    """The meanings of all exported distributions, by name."""
    found = {str(metric): metric.meaning for metric in Metric if not _is_counter(metric)}
    return {name: Meaning(text, _unit_of(name)) for name, text in found.items()}


def _unit_of(name: str) -> str:
    return "bytes" if name.endswith("_bytes") else "seconds" if name.endswith("_s") else ""


def _is_counter(metric: Metric) -> bool:
    return "per" not in metric.split("_") and not metric.endswith(("_s", "_bytes"))


@dataclass(frozen=True)
class Reading:
    """A number of one operator."""

    query_id: str
    uid: str
    value: float
    part: str = ""
    """The subtask or the state that has the number; empty for the whole operator."""


@dataclass
class Distribution:
    """Samples of one operator, counted by buckets."""

    bounds: tuple[float, ...]
    """The largest value of each bucket but the last."""
    counts: list[int]
    """Number of samples in each bucket; the last one has no bound."""
    total: float = 0.0
    """The sum of the samples."""

    def add(self, samples: Iterable[float]) -> None:
        """Count more samples."""
        for sample in samples:
            self.counts[bisect_left(self.bounds, sample)] += 1
            self.total += sample


@dataclass(frozen=True)
class DistributionReading:
    """A distribution of one operator."""

    query_id: str
    uid: str
    distribution: Distribution


class OperatorTotals:
    """The numbers of one operator, in one start of its query."""

    def __init__(self, query_id: str, uid: str) -> None:
        self.query_id = query_id
        self.uid = uid
        self._numbers: dict[tuple[str, str], float] = {}
        self._distributions: dict[str, Distribution] = {}
        self._lock = threading.Lock()

    def note(self, metrics: CheckpointMetrics) -> None:
        """Note a durable checkpoint."""
        known = exported()
        found: dict[tuple[str, str], float | None] = {(CHECKPOINTS, ""): 1, ("batch", ""): metrics.batch}
        found |= {(name, ""): number for name, number in metrics.numbers().items()}
        found |= {(name, ""): number for name, number in metrics.measured.counts.items() if name in known}
        for name, state in metrics.states.items():
            found |= {("per_state_rows", name): state.rows, ("per_state_bytes", name): state.size_bytes}
        for subtask in metrics.subtasks:
            part = str(subtask.subtask)
            found |= {(name, part): getattr(subtask, name.removeprefix("per_subtask_")) for name in _OF_SUBTASKS}
        with self._lock:
            for key, number in found.items():
                if number is not None:
                    before = self._numbers.get(key, 0) if known[key[0]].adds_up else 0
                    self._numbers[key] = before + number
            for name, samples in metrics.measured.samples.items():
                if name in distributions():
                    self._distribution(name).add(samples)

    def _distribution(self, name: str) -> Distribution:
        if name not in self._distributions:
            bounds = _BOUNDS[distributions()[name].unit]
            self._distributions[name] = Distribution(bounds, [0] * (len(bounds) + 1))
        return self._distributions[name]

    def read(self) -> dict[tuple[str, str], float]:
        """The numbers by name and part; empty before the first checkpoint."""
        with self._lock:
            return dict(self._numbers)

    def read_distributions(self) -> dict[str, Distribution]:
        """The distributions by name; without those that have no samples."""
        with self._lock:
            return {name: replace(held, counts=list(held.counts)) for name, held in self._distributions.items()}


class Totals:
    """The numbers of all operators whose queries are running."""

    def __init__(self) -> None:
        self._operators: dict[tuple[str, str], OperatorTotals] = {}
        self._lock = threading.Lock()

    def begin(self, query_id: str, uid: str) -> OperatorTotals:
        """Note that an operator starts; its numbers start over."""
        totals = OperatorTotals(query_id, uid)
        with self._lock:
            self._operators[query_id, uid] = totals
        return totals

    def end(self, totals: OperatorTotals) -> None:
        """Note that a start is over; the numbers of a newer start stay."""
        with self._lock:
            if self._operators.get((totals.query_id, totals.uid)) is totals:
                del self._operators[totals.query_id, totals.uid]

    def read(self) -> dict[str, list[Reading]]:
        """All numbers, by name; every name of :func:`exported` is there."""
        found: dict[str, list[Reading]] = {name: [] for name in exported()}
        for operator in self._running():
            for (name, part), value in operator.read().items():
                found[name].append(Reading(operator.query_id, operator.uid, value, part))
        return found

    def read_distributions(self) -> dict[str, list[DistributionReading]]:
        """All distributions, by name; every name of :func:`distributions` is there."""
        found: dict[str, list[DistributionReading]] = {name: [] for name in distributions()}
        for operator in self._running():
            for name, held in operator.read_distributions().items():
                found[name].append(DistributionReading(operator.query_id, operator.uid, held))
        return found

    def _running(self) -> list[OperatorTotals]:
        with self._lock:
            return list(self._operators.values())


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
