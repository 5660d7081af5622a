"""What the benchmarks of Flink's workloads report: their sides, figures, targets and plots."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.figures import percentiles, upper_bound
from benchmarks.frame import (
    NOT_NEGATIVE,
    POSITIVE,
    POSSIBLE_KEYS,
    Plot,
    Result,
    Target,
    alternate,
    option,
    require_space,
)
from benchmarks.query import begun_s
from benchmarks.skew import SKEWS, UNIFORM
from benchmarks.workload import WorkloadSide

ON: Final = "changelog on"
OFF: Final = "changelog off"
SPARK_ON: Final = "Spark, changelog on"
SPARK_OFF: Final = "Spark, changelog off"
S3_ON: Final = "S3, changelog on"
S3_OFF: Final = "S3, changelog off"
SIDES: Final = {
    "on": ON,
    "off": OFF,
    "spark-on": SPARK_ON,
    "spark-off": SPARK_OFF,
    "s3-on": S3_ON,
    "s3-off": S3_OFF,
}

_PERCENTILES: Final = ("p50", "p90", "p99", "p99.9")
_STATE_BYTES: Final = 1e9
_KEEPS_UP: Final = 0.95
_QUICK_SIDES: Final = ("on", "spark-on", "s3-on", "s3-off")


@dataclass(frozen=True, kw_only=True)
class WorkloadSettings:
    """The options that both workloads have."""

    rate: float = option(20_000.0, "Events per second of statelog's sides.", POSITIVE)
    spark_rate: float = option(1_000.0, "Events per second of Spark's sides.", POSITIVE)
    seconds: float = option(100.0, "Measured time of each side.", POSITIVE)
    warm_up: float = option(20.0, "Seconds at the rate before it.", click.FloatRange(0))
    keys: int = option(2_000_000, "Number of possible keys.", POSSIBLE_KEYS)
    skew: str = option(UNIFORM, "How often events have each key; uniform are the prescribed events.", SKEWS)
    value_bytes: int = option(256, "Size of an event's payload.", click.IntRange(8))
    built_events: int = option(0, "Events that make statelog's state before, in large batches.", NOT_NEGATIVE)
    materialization_s: float = option(20.0, "Interval of materializations.", click.FloatRange(0))
    parallelism: int = option(2, "Source and state subtasks, and cores.")
    side: tuple[str, ...] = option(tuple(SIDES), "Only these sides.", click.Choice(list(SIDES)))
    quick: bool = option(False, "A smoke test in two minutes: few events and sides, one restart, no target met.")


def run_workload(
    settings: WorkloadSettings, quick: dict[str, Any], make: Callable[..., WorkloadSide], place: Path
) -> Result:
    """Run the sides of a workload one after the other; `make` makes a side of settings and further fields."""
    if settings.quick:
        few = tuple(name for name in settings.side if name in _QUICK_SIDES)
        settings = dataclasses.replace(settings, **{"seconds": 5.0, "warm_up": 1.0, "side": few, **quick})
    kept = min(settings.keys, settings.built_events + int(settings.rate * (settings.seconds + settings.warm_up)))
    require_space(place, 8 * kept * (settings.value_bytes + 40), "Give another --directory, or fewer --keys.")
    sides = {SIDES[name]: _side(SIDES[name], settings, make) for name in settings.side}
    measured = alternate({name: partial(side.run, place) for name, side in sides.items()})
    figures = {name: _figures(sides[name], one) for name, (one,) in measured.items()}
    return Result(
        figures={"sides": figures},
        targets=targets_of(figures),
        rows=[_row(name, each) for name, each in figures.items()],
        remarks=_remarks(settings, figures),
        plots=_plots(figures),
    )


def _side(name: str, settings: WorkloadSettings, make: Callable[..., WorkloadSide]) -> WorkloadSide:
    is_spark = name in (SPARK_ON, SPARK_OFF)
    own = {"rate": settings.spark_rate, "built_events": 0} if is_spark else {}
    return make(
        settings,
        side=name,
        changelog=name.endswith(ON),
        has_delays=name in (S3_ON, S3_OFF),
        is_quick=settings.quick,
        **own,
    )


def _figures(side: WorkloadSide, measured: dict[str, Any]) -> dict[str, Any]:
    """Figures of the batches that began in the measured time."""
    from_s = measured["measured_from_s"]
    checkpoints = {each["batch"]: each for each in measured["checkpoints"]}
    batches = [
        {"at_s": begun_s(entry) - from_s, **_batch(entry, checkpoints.get(entry["batchId"]))}
        for entry in measured["progress"]
        if begun_s(entry) >= from_s
    ]
    if not batches:
        raise click.ClickException(f"{side.side}: no batch began in {side.seconds:g} s; give more --seconds")
    durations = [each["checkpoint_ms"] for each in batches]
    took_s = batches[-1]["at_s"] - batches[0]["at_s"] + batches[-1]["batch_ms"] / 1000
    restart = measured["restart"]
    figures = {
        "rate": side.rate,
        "events": sum(each["events"] for each in batches),
        "events_per_s": sum(each["events"] for each in batches) / took_s,
        "checkpoints": len(batches),
        "batch_ms": statistics.median(each["batch_ms"] for each in batches),
        "checkpoint_ms": {**percentiles(durations, _PERCENTILES), "max": max(durations)},
        "p99.9_at_most_ms": upper_bound(durations, "p99.9"),
        "recovery_s": restart and restart["total_s"] - restart["start_up_s"],
        "restart": restart,
        "batches": batches,
    }
    if side.is_spark:
        created = measured["bytes_seen"] / len(measured["progress"])
        return {**figures, "new_bytes": created, "full_bytes": measured["full_bytes"], "hedges": None}
    sizes = {name: [each[name] for each in batches] for name in ("new_bytes", "full_bytes")}
    return {
        **figures,
        "new_bytes": statistics.mean(sizes["new_bytes"]),
        "full_bytes": sizes["full_bytes"][-1],
        "sizes": {name: {**percentiles(each, _PERCENTILES), "max": max(each)} for name, each in sizes.items()},
        "hedges": sum(each["measured"].get("upload_hedges", 0) for each in checkpoints.values()),
    }


def _batch(entry: dict[str, Any], checkpoint: dict[str, Any] | None) -> dict[str, Any]:
    batch = {"events": entry["numInputRows"], "batch_ms": entry["durationMs"]["triggerExecution"]}
    if checkpoint is None:
        [operator] = entry["stateOperators"]
        # A sum over the tasks.
        return {**batch, "checkpoint_ms": operator["commitTimeMs"] / operator["numShufflePartitions"]}
    return {
        **batch,
        "checkpoint_ms": 1000 * (checkpoint["subtask_s"] + checkpoint["commit_s"]),
        "new_bytes": checkpoint["changed_bytes"] + checkpoint["materialized_bytes"],
        "full_bytes": checkpoint["base_bytes"] + checkpoint["log_bytes"],
    }


def targets_of(figures: dict[str, dict[str, Any]]) -> list[Target]:
    """The targets of the sides with delays, those of a ratio only for states of 1 GB."""
    on, off = (figures.get(name, {"checkpoint_ms": {}, "full_bytes": 0}) for name in (S3_ON, S3_OFF))
    p99_on, p99_off = (side["checkpoint_ms"].get("p99") for side in (on, off))
    p999_on = on.get("p99.9_at_most_ms")
    # If a higher percentile is not known, it is not below the lower one.
    p999_off = off["checkpoint_ms"].get("p99.9", p99_off)
    is_large = off["full_bytes"] >= _STATE_BYTES

    def ratio(one: float | None, other: float | None) -> float | None:
        return one / other if is_large and one is not None and other is not None else None

    return [
        Target("S3, 1 GB of state: p99 of checkpoints, changelog off / on", ratio(p99_off, p99_on), 10, "at_least"),
        Target("the same, p99.9", ratio(p999_off, p999_on), 10, "at_least"),
        Target("S3, changelog on: p99 of checkpoints, s", p99_on and p99_on / 1000, 1.1, "at_most"),
        Target("the same, p99.9", p999_on and p999_on / 1000, 1.7, "at_most"),
    ]


def _row(name: str, figures: dict[str, Any]) -> dict[str, str]:
    durations, restart = figures["checkpoint_ms"], figures["restart"]
    return {
        "side": name,
        "events": f"{figures['events']:,}",
        "batch ms": f"{figures['batch_ms']:,.0f}",
        "checkpoints": f"{figures['checkpoints']:,}",
        **{f"{each} ms": f"{durations[each]:,.0f}" if each in durations else "" for each in (*_PERCENTILES, "max")},
        "new MB": _megabytes(figures, "new_bytes"),
        "full MB": _megabytes(figures, "full_bytes"),
        "recovery s": f"{figures['recovery_s']:.1f}" if restart else "",
    }


def _megabytes(figures: dict[str, Any], name: str) -> str:
    """A size; where it is known for each checkpoint, its percentiles."""
    if "sizes" not in figures:
        return f"{figures[name] / 1e6:,.1f}"
    return ", ".join(f"{percentile} {size / 1e6:,.1f}" for percentile, size in figures["sizes"][name].items())


def _remarks(settings: WorkloadSettings, figures: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        f"{settings.keys:,} possible keys, payloads of {settings.value_bytes:,} bytes, materialized every"
        f" {settings.materialization_s:g} s. The first {settings.warm_up:g} s at the rate are left out. Every batch's"
        " output was checked, also after the restart.",
    ]
    for name, each in figures.items():
        if each["events_per_s"] < _KEEPS_UP * each["rate"]:
            lines.append(f"{name} does not keep up: {each['events_per_s']:,.0f} of {each['rate']:,.0f} events/s.")
    slow = [each for each in figures.values() if "p99" not in each["checkpoint_ms"]]
    if slow:
        needed = max(300 * settings.seconds / each["checkpoints"] for each in slow)
        lines.append(f"With fewer than 300 checkpoints there is no p99: give all of these sides {needed:,.0f} seconds.")
    if ON in figures and SPARK_ON in figures:
        ratio = figures[SPARK_ON]["checkpoint_ms"]["p50"] / figures[ON]["checkpoint_ms"]["p50"]
        lines.append(
            f"{SPARK_ON} / {ON}, p50 of checkpoints: {ratio:.2g}, at {settings.spark_rate:,.0f} and"
            f" {settings.rate:,.0f} events/s."
        )
    return lines


def _plots(figures: dict[str, dict[str, Any]]) -> list[Plot]:
    durations = {name: sorted(each["checkpoint_ms"] for each in side["batches"]) for name, side in figures.items()}
    shares = {
        name: [(100 * (place + 1) / len(ordered), each) for place, each in enumerate(ordered)]
        for name, ordered in durations.items()
    }
    over_time = {
        measure: {
            name: [(each["at_s"], each[measure]) for each in side["batches"] if measure in each]
            for name, side in figures.items()
            if measure in side["batches"][0]
        }
        for measure in ("checkpoint_ms", "batch_ms", "full_bytes")
    }
    sizes = {name: [(at_s, size / 1e6) for at_s, size in line] for name, line in over_time["full_bytes"].items()}
    plots = [
        Plot("checkpoint durations", "percent of the checkpoints", "ms", shares, is_logarithmic=True),
        Plot("checkpoint durations over time", "s", "ms", over_time["checkpoint_ms"], is_logarithmic=True),
        Plot("batch durations over time", "s", "ms", over_time["batch_ms"], is_logarithmic=True),
        Plot("full checkpoint size", "s", "MB", sizes),
    ]
    return [plot for plot in plots if plot.lines]
