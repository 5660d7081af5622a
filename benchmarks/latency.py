"""How long from an event until its result is committed: the same count at a constant rate of events."""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import numpy.typing as npt

from benchmarks.child import run_in_child
from benchmarks.distribution import Distribution
from benchmarks.frame import Benchmark, Result, alternate, scratch
from benchmarks.latency_events import EventSender
from benchmarks.latency_side import AGGREGATION, SPARK, STATELOG

__all__ = ["BENCHMARK", "Schedule", "figures_of", "run"]

_FRACTIONS: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_MIN_THROUGHPUT: Final = 0.95
"""A side keeps up if it commits at least this share of the rate: it commits whole batches, so not exactly the rate."""
_MAX_THROUGHPUT: Final = 1.05
"""A side that commits more than this share of the rate still works off what has come while it started."""
_START_S: Final = 120
"""What a query may take to start."""


@dataclass(frozen=True)
class Schedule:
    """Which events there are, and which of them are measured.

    Parameters
    ----------
    rate : float
        Events per second.
    warm_up_s, measured_s : float
        Events of the first seconds are left out; those of so many seconds after them are measured, and then there
        are no more.
    """

    rate: float
    warm_up_s: float
    measured_s: float

    @property
    def first(self) -> int:
        """The first event that is measured."""
        return round(self.rate * self.warm_up_s)

    @property
    def end(self) -> int:
        """How many events there are."""
        return round(self.rate * (self.warm_up_s + self.measured_s))

    def due_s(self, events: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """When events are due, from the start on."""
        return events / self.rate


def run(
    *,
    rate: float,
    keys: int,
    seconds: float,
    warm_up: float,
    drain: float,
    parallelism: int,
    rounds: int,
    directory: Path | None,
) -> Result:
    """Measure; the parameters are the options of the command."""
    schedule = Schedule(rate, warm_up, seconds)
    if schedule.end == schedule.first:
        raise click.UsageError(f"In {seconds:g} s there is no event at {rate:g} per second.")
    with scratch(directory) as place:
        sides: dict[str, Callable[[], dict[str, Any]]] = {
            side: partial(_run_side, side, schedule, keys, drain, parallelism, place)
            for side in (STATELOG, SPARK, AGGREGATION)
        }
        measured = alternate(sides, rounds)
    figures = {side: figures_of(each, schedule) for side, each in measured.items()}
    ratios = {side: _ratios(figures[STATELOG], figures[side]) for side in (SPARK, AGGREGATION)}
    return Result(
        figures={"sides": figures, "statelog_to": ratios},
        targets=[],
        header=[
            "side",
            "keeps up",
            "events/s",
            "batches",
            "batch ms",
            *(f"{name} ms" for name in _FRACTIONS),
            "max ms",
        ],
        rows=[_row(side, each) for side, each in figures.items()],
        remarks=_remarks(schedule, keys, figures, ratios),
    )


def figures_of(rounds: Sequence[dict[str, Any]], schedule: Schedule) -> dict[str, Any]:
    """Figures of a side: percentiles of all rounds' events, and those of each round.

    Parameters
    ----------
    rounds : sequence of dict
        What :func:`benchmarks.latency_side.run` returned, with the sender's ``started_s`` and ``latest_s``, by round.
    schedule : Schedule
        The events.

    Returns
    -------
    dict
        With fewer than 300 events there is no ``p99``.
    """
    latencies = [_latencies_ms(one, schedule) for one in rounds]
    throughputs = [_throughput(one, schedule) for one in rounds]
    durations = [batch["duration_ms"] for one in rounds for batch in _measured_batches(one, schedule)]
    return {
        "events": sum(map(len, latencies)),
        "latency_ms": _percentiles(np.concatenate(latencies)),
        "latency_ms_by_round": [_percentiles(one) for one in latencies],
        "not_committed": sum(max(0, schedule.end - _committed(one)) for one in rounds),
        "batch_ms": Distribution.of(durations).to_json() if durations else None,
        "events_per_s_by_round": throughputs,
        "keeps_up": all(one >= _MIN_THROUGHPUT * schedule.rate for one in throughputs),
        "catches_up": any(one > _MAX_THROUGHPUT * schedule.rate for one in throughputs),
        "backlog_by_round": [_backlog(one, schedule) for one in rounds],
        "sent_late_s": max(one["latest_s"] for one in rounds),
        "by_round": list(rounds),
    }


def _run_side(side: str, schedule: Schedule, keys: int, drain: float, parallelism: int, place: Path) -> dict[str, Any]:
    directory = place / uuid.uuid4().hex
    directory.mkdir()
    # A new query runs a batch without events first, in which most of what it needs is started.
    is_ready = (directory / "checkpoint" / "commits" / "0").exists
    with EventSender(schedule.rate, schedule.end, is_ready) as sender:
        host, port = sender.address
        arguments = {
            "side": side,
            "host": host,
            "port": port,
            "events": schedule.end,
            "keys": keys,
            "parallelism": parallelism,
            "timeout_s": _START_S + schedule.warm_up_s + schedule.measured_s + drain,
            "directory": str(directory),
        }
        measured = run_in_child("benchmarks.latency_side:run", arguments, directory)
    return {**measured, "started_s": sender.started_s, "latest_s": sender.latest_s}


def _latencies_ms(one: dict[str, Any], schedule: Schedule) -> npt.NDArray[np.float64]:
    """Of each measured event; of one that was not committed, how long it had waited at the end."""
    events = np.arange(schedule.first, schedule.end)
    ends = np.array([batch["end"] for batch in one["batches"]], np.int64)
    committed_s = np.array([*(batch["committed_s"] for batch in one["batches"]), one["stopped_s"]])
    waited_s: npt.NDArray[np.float64] = committed_s[np.searchsorted(ends, events, side="right")] - one["started_s"]
    return 1000 * (waited_s - schedule.due_s(events))


def _percentiles(latencies_ms: npt.NDArray[np.float64]) -> dict[str, float | None]:
    distribution = Distribution.of(latencies_ms.tolist())
    p99 = distribution.percentile("p99")
    return {
        **{name: distribution.quantile(fraction) for name, fraction in _FRACTIONS.items() if name != "p99"},
        "p99": p99,
        "max": distribution.maximum,
    }


def _measured_batches(one: dict[str, Any], schedule: Schedule) -> list[dict[str, Any]]:
    """The batches with events that are measured."""
    return [batch for batch in one["batches"] if batch["end"] > schedule.first]


def _committed(one: dict[str, Any]) -> int:
    """How many events are committed in the end."""
    return max((batch["end"] for batch in one["batches"]), default=0)


def _throughput(one: dict[str, Any], schedule: Schedule) -> float:
    """Events committed per second while the measured ones came in; 0 if there were not two commits meanwhile."""
    begin_s = one["started_s"] + schedule.warm_up_s
    meanwhile = [batch for batch in one["batches"] if begin_s <= batch["committed_s"] <= begin_s + schedule.measured_s]
    if len(meanwhile) < 2:
        return 0.0
    first, *_, last = meanwhile
    rate: float = (last["end"] - first["end"]) / (last["committed_s"] - first["committed_s"])
    return rate


def _backlog(one: dict[str, Any], schedule: Schedule) -> int:
    """How many events were not committed when the last one came in."""
    end_s = one["started_s"] + schedule.warm_up_s + schedule.measured_s
    return schedule.end - max((batch["end"] for batch in one["batches"] if batch["committed_s"] <= end_s), default=0)


def _ratios(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float | None]:
    """Percentiles of one side divided by those of another: medians of the rounds' ratios."""
    pairs = list(zip(one["latency_ms_by_round"], other["latency_ms_by_round"], strict=True))
    return {
        name: None if pairs[0][0][name] is None else statistics.median(a[name] / b[name] for a, b in pairs)
        for name in _FRACTIONS
    }


def _row(side: str, figures: dict[str, Any]) -> list[str]:
    batches = figures["batch_ms"]
    at_least = "> " if figures["not_committed"] else ""
    return [
        side,
        "yes" if figures["keeps_up"] else "NO",
        f"{statistics.median(figures['events_per_s_by_round']):,.0f}",
        f"{batches['samples']}" if batches else "0",
        f"{batches['median']:,.0f}" if batches else "",
        *("" if value is None else f"{at_least}{value:,.0f}" for value in figures["latency_ms"].values()),
    ]


def _remarks(
    schedule: Schedule, keys: int, figures: dict[str, Any], ratios: dict[str, dict[str, float | None]]
) -> list[str]:
    lines = [
        f"{schedule.rate:,.0f} events/s, evenly spaced, {keys:,} possible keys, all alike. Latency: from the time an"
        " event was due until its batch was committed; the events of a batch are not independent.",
        f"The events of the first {schedule.warm_up_s:g} s of every run are left out. Every batch's output was checked."
        " Events were sent late, which counts, by up to "
        + ", ".join(f"{1000 * each['sent_late_s']:,.0f} ms ({side})" for side, each in figures.items())
        + ".",
    ]
    for side, each in figures.items():
        if not each["keeps_up"]:
            lines.append(
                f"{side} does not keep up, so its latency grows with the length of the run: it committed"
                f" {min(each['events_per_s_by_round']):,.0f} of {schedule.rate:,.0f} events/s, and lacked"
                f" {max(each['backlog_by_round']):,} when the last one came."
            )
        if each["catches_up"]:
            lines.append(
                f"{side} still worked off what had come while it started, so its latency is higher than later: it"
                f" committed up to {max(each['events_per_s_by_round']):,.0f} events/s. Give a longer --warm-up."
            )
        if each["not_committed"]:
            lines.append(f"{side}: {each['not_committed']:,} events were not committed when the run ended.")
    for side, values in ratios.items():
        shown = ", ".join(f"{name} {value:.2f}" for name, value in values.items() if value is not None)
        lines.append(f"statelog / {side}: {shown}")
    return lines


_POSITIVE: Final = click.FloatRange(min=0, min_open=True)
_AT_LEAST_1: Final = click.IntRange(min=1)

BENCHMARK: Final = Benchmark(
    name="latency",
    description="From an event to its committed result, at a constant rate: statelog, and Spark in Python and JVM.",
    options=[
        click.Option(["--rate"], type=_POSITIVE, default=5_000, help="Events per second."),
        click.Option(["--keys"], type=click.IntRange(2, 10**8), default=100_000, help="Number of possible keys."),
        click.Option(["--seconds"], type=_POSITIVE, default=60, help="Events of so many seconds are measured."),
        click.Option(["--warm-up"], type=click.FloatRange(min=0), default=60, help="First seconds to leave out."),
        click.Option(
            ["--drain"],
            type=click.FloatRange(min=0),
            default=120,
            help="Seconds to wait after the last event for those that are not committed.",
        ),
        click.Option(["--parallelism"], type=_AT_LEAST_1, default=2, help="Subtasks, state partitions and cores."),
        click.Option(["--rounds"], type=_AT_LEAST_1, default=1, help="How often every side runs."),
        click.Option(
            ["--directory"],
            type=click.Path(file_okay=False, path_type=Path),
            help="For checkpoints and scratch files; by default one in the repository.",
        ),
    ],
    run=run,
)
