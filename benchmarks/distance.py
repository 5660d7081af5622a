"""What a bucket that is far away costs: a restart from a long log, and look-ups by a reader."""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import numpy as np
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import statelog
from benchmarks.child import kill_child_when, run_in_child
from benchmarks.figures import shown, summary
from benchmarks.frame import POSITIVE, STORED_KEYS, Result, Target, alternate, option
from benchmarks.processors import KeepPayload
from benchmarks.query import PayloadSide, Recorder, count_checks, rate_source, require, start, stop_when
from benchmarks.restarts import fresh, own_temporary_files, restart_parts
from benchmarks.skew import SKEWS, UNIFORM, ZIPF
from benchmarks.tail import s3_server
from statelog.storage import Store, open_store
from statelog.storage.store import StoreWrapper

NEAR: Final = "near"
FAR: Final = "far"

_SCHEME: Final = "far"
ROUND_TRIP_MS: Final = "STATELOG_BENCH_ROUND_TRIP_MS"
"""The environment variable of the processes that are far away."""
_LOOKUP_BATCHES: Final = 20
_BUILD_TIMEOUT_S: Final = 3600
_RESTARTED_BATCHES: Final = 3
_MOST_RESTART_S: Final = 1.5
_MOST_ROUND_TRIPS: Final = 3
_T = TypeVar("_T")


@dataclass(frozen=True)
class Settings:
    store: str = option("local", "A directory used as a bucket, or an S3 server.", click.Choice(["local", "s3"]))
    round_trip_ms: float = option(20.0, "How much longer each request takes.", POSITIVE)
    entries: int = option(600, "In the log from which the query restarts.", click.IntRange(10))
    keys: int = option(200_000, "Of the state in which keys are looked up.", STORED_KEYS)
    skew: str = option(UNIFORM, "How often rows have each key, once each has one.", SKEWS)
    value_bytes: int = option(100, "Of each key.")
    lookups: int = option(100, "Keys that are looked up, one after the other.")
    parallelism: int = option(2, "Subtasks.")
    rounds: int = option(3, "How often to restart, and to open a reader, near and far.")


QUICK: Final = [Settings(entries=10, keys=1_000, skew=ZIPF, lookups=5, rounds=1)]


class FarStore(StoreWrapper):
    """Another store whose requests take a round trip longer each; nothing can be appended, as in a bucket."""

    def __init__(self, location: str, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(open_store(location.removeprefix(f"{_SCHEME}:")))
        self._sleep = sleep
        self._round_trip_s = float(os.environ.get(ROUND_TRIP_MS, "0")) / 1000
        self._lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        """By operation."""

    @property
    def can_append(self) -> bool:
        return False

    def _call(self, operation: str, name: str, effect: Callable[[], _T]) -> _T:
        with self._lock:
            self.requests[operation] += 1
        self._sleep(self._round_trip_s)
        return effect()


@dataclass(frozen=True, kw_only=True)
class DistantSide(PayloadSide):
    """A query whose state is in a bucket."""

    location: str
    batches: int
    materializes: bool

    def build(self, directory: Path) -> None:
        """Run batches until killed."""
        self._run(self.session(directory), directory, Recorder(), lambda query: False)

    def measure(self, directory: Path, started_s: float = 0.0) -> dict[str, Any]:
        """Go on for some batches; the process was started at `started_s`."""
        session, recorder = self.session(directory), Recorder()
        progress = self._run(
            session, directory, recorder, lambda query: len(query.recentProgress) >= _RESTARTED_BATCHES
        )[:_RESTARTED_BATCHES]
        rows = self.rows_per_batch
        ranges = [(each["batchId"] * rows, (each["batchId"] + 1) * rows) for each in progress]
        _, *expected = self.expected(session, [(0, ranges[0][0]), *ranges])
        require(self.side, progress, expected, progress[0]["batchId"])
        session.stop()
        return restart_parts(progress, recorder, started_s)

    def _run(
        self,
        session: SparkSession,
        directory: Path,
        recorder: Recorder,
        is_over: Callable[[StreamingQuery], bool],
    ) -> list[dict[str, Any]]:
        statelog.register_store(_SCHEME, FarStore)
        options = statelog.Options(
            local_directory=f"{directory}/local",
            observer=recorder,
            tuning=statelog.Tuning(materialization=self.materializes),
        )
        source = rate_source(session, self.rows_per_batch, self.parallelism)
        output = self.transform(
            self.rows(source), KeepPayload(), "key long, n long, found long", options, location=self.location
        )
        return stop_when(start(output, count_checks("found"), directory), is_over)

    def look_up(self, lookups: int) -> dict[str, Any]:
        """Open a reader, look a key up, and then others; RuntimeError if a value is wrong."""
        stores: list[FarStore] = []

        def opened(location: str) -> Store:
            stores.append(FarStore(location))
            return stores[-1]

        statelog.register_store(_SCHEME, opened)
        chosen = np.random.default_rng(1).integers(0, self.keys, lookups + 1).tolist()
        durations_s, requests = [], [0]
        started_s = time.perf_counter()
        with statelog.open_state(self.location) as reader:
            opened_s = time.perf_counter() - started_s
            for key in chosen:
                started_s = time.perf_counter()
                [row] = reader.read(keys=[key]).read_all().to_pylist()
                durations_s.append(time.perf_counter() - started_s)
                requests.append(sum(store.requests.total() for store in stores))
                if row["key_key"] != key or len(row["value_payload"]) != self.value_bytes:
                    raise RuntimeError(f"{self.side}: key {key} has the row {row}")
        return {
            "open_s": opened_s,
            "first_lookup_s": durations_s[0],
            "lookups_s": durations_s[1:],
            "requests": [after - before for before, after in pairwise(requests[1:])],
            "requests_until_first": requests[1],
        }


def run(settings: Settings, place: Path) -> Result:
    with s3_server("distance") if settings.store == "s3" else nullcontext(str(place / "bucket")) as bucket:
        long_log, state = sides_of(settings, bucket)
        work = {side.side: fresh(place / side.side.replace(" ", "-")) for side in (long_log, state)}
        for side in (long_log, state):
            click.echo(f"building: {side.side} ...", err=True)
            _build(side, work[side.side])
        delays_ms = {NEAR: 0.0, FAR: settings.round_trip_ms}
        restarts = alternate(
            {name: partial(_restart, long_log, work[long_log.side], delay) for name, delay in delays_ms.items()},
            settings.rounds,
        )
        call, folder = partial(state.look_up, settings.lookups), work[state.side]
        lookups = alternate(
            {name: partial(run_in_child, call, folder, _distance(delay)) for name, delay in delays_ms.items()},
            settings.rounds,
        )
    return result_of(settings, restarts, lookups)


def sides_of(settings: Settings, bucket: str) -> tuple[DistantSide, DistantSide]:
    """The query with a long log that was never materialized, and the one in whose state keys are looked up."""

    def side(name: str, **fields: Any) -> DistantSide:
        location = f"{_SCHEME}:{bucket}/{name.replace(' ', '-')}"
        return DistantSide.of(settings, side=name, location=location, **fields)

    return (
        side("long log", keys=1_000, rows_per_batch=200, batches=settings.entries, materializes=False),
        side("state", rows_per_batch=2 * settings.keys // _LOOKUP_BATCHES, batches=_LOOKUP_BATCHES, materializes=True),
    )


def _distance(delay_ms: float) -> dict[str, str]:
    return {ROUND_TRIP_MS: str(delay_ms)}


def _build(side: DistantSide, work: Path) -> None:
    last = work / "checkpoint" / "commits" / str(side.batches - 1)
    kill_child_when(last.exists, partial(side.build, work), work, own_temporary_files(work), _BUILD_TIMEOUT_S)


def _restart(side: DistantSide, work: Path, delay_ms: float) -> dict[str, Any]:
    """Restart without the local copies of the start before."""
    shutil.rmtree(work / "local", ignore_errors=True)
    environment = own_temporary_files(work) | _distance(delay_ms)
    return run_in_child(partial(side.measure, work, time.time()), work, environment)


def result_of(
    settings: Settings, restarts: dict[str, list[dict[str, Any]]], lookups: dict[str, list[dict[str, Any]]]
) -> Result:
    """The figures of the restarts and of the readers, each by distance and round."""
    rows = []
    figures: dict[str, Any] = {}
    for name in (NEAR, FAR):
        state_s = [one["log_s"] + one["restore_s"] for one in restarts[name]]
        later_ms = summary(1000 * each for one in lookups[name] for each in one["lookups_s"])
        requests = [each for one in lookups[name] for each in one["requests"]]
        figures[name] = {
            "log_s": statistics.median(one["log_s"] for one in restarts[name]),
            "restore_s": statistics.median(one["restore_s"] for one in restarts[name]),
            "state_s": statistics.median(state_s),
            "total_s": statistics.median(one["total_s"] for one in restarts[name]),
            "open_s": statistics.median(one["open_s"] for one in lookups[name]),
            "first_lookup_s": statistics.median(one["first_lookup_s"] for one in lookups[name]),
            "lookup_ms": later_ms,
            "requests_per_lookup": {"median": statistics.median(requests), "max": max(requests)},
            "requests_until_first": lookups[name][-1]["requests_until_first"],
            "restarts_by_round": restarts[name],
            "lookups_by_round": lookups[name],
        }
        rows.append(
            {
                "bucket": name,
                "log s": f"{figures[name]['log_s']:.2f}",
                "restore s": f"{figures[name]['restore_s']:.2f}",
                "restart s": f"{figures[name]['total_s']:.2f}",
                "open reader s": f"{figures[name]['open_s']:.2f}",
                "first look-up s": f"{figures[name]['first_lookup_s']:.2f}",
                "look-up ms": shown(later_ms),
                "requests of a look-up": f"{figures[name]['requests_per_lookup']['median']:g}, max {max(requests)}",
            }
        )
    far, near = figures[FAR], figures[NEAR]
    trips = (far["lookup_ms"]["median"] - near["lookup_ms"]["median"]) / settings.round_trip_ms
    entries = restarts[FAR][-1]["log_entries"]
    return Result(
        figures={**figures, "round_trips_per_lookup": trips, "log_entries": entries},
        targets=[
            Target("restart from the long log, far: log and restore, s", far["state_s"], _MOST_RESTART_S, "at_most"),
            Target("a look-up, far: round trips, by time", trips, _MOST_ROUND_TRIPS, "at_most"),
        ],
        rows=rows,
        remarks=[
            f"Far: each request takes {settings.round_trip_ms:g} ms longer. The log had {entries} entries at the last"
            f" restart, each an object; the state has {settings.keys:,} keys with {settings.value_bytes} bytes each.",
            f"A far look-up takes {trips:.1f} round trips longer than a near one.",
        ],
    )
