"""How long the slowest writes to an object store take, with hedges and without."""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest import mock

import click
import psutil

from benchmarks.child import run_in_child
from benchmarks.figures import percentiles
from benchmarks.frame import NOT_NEGATIVE, POSITIVE, Result, Target, Unavailable, option
from statelog.clock import SystemClock
from statelog.metrics import Measurements, Metric
from statelog.storage import Store, open_store
from statelog.storage.hedging import Races
from statelog.storage.retry import RetryingStore, RetryPolicy
from statelog.storage.store import StoreWrapper

SINGLE: Final = "single"
HEDGED: Final = "hedged"

_PERCENTILES: Final = ("p50", "p90", "p95", "p99", "p99.9")
_TIMEOUT_S: Final = 1.0
_SEED: Final = 158
_ATTEMPTS: Final = (Metric.UPLOAD_REQUESTS, Metric.UPLOAD_HEDGES, Metric.UPLOAD_RETRIES)
_CHECKED: Final = 200
_MEASURED_BYTES: Final = 5_000_000
"""Size of the objects of FLIP-158's table."""
_SLOWER_SAMPLES: Final = 3
"""A quantile needs as many samples above it."""
_T = TypeVar("_T")


# FLIP-158, "DFS write latency": 500 streams of 5 MB objects, in seconds. The ends are not in its table; they are
# assumed. No lognormal distribution has these quantiles.
_QUANTILES: Final = (
    (0.0, 0.300),
    (0.5, 0.459),
    (0.9, 0.740),
    (0.95, 0.833),
    (0.99, 1.039),
    (0.999, 3.202),
    (1.0, 4.000),
)


def latency_s(share: float) -> float:
    """The latency below which this share of the writes is, interpolated between the logarithms of the quantiles."""
    for (low, low_s), (high, high_s) in pairwise(_QUANTILES):
        if low <= share <= high:
            part = (share - low) / (high - low)
            return math.exp((1 - part) * math.log(low_s) + part * math.log(high_s))
    raise ValueError(f"{share} is not between 0 and 1")


def size_factor(size_bytes: int) -> float:
    """How much longer a request takes than one of 5 MB: a constant part, and one that grows with the size.

    FLIP-158 has checkpoints of 500 writes of 5 MB, of which half are done in 1,000 ms, and of 250 writes of 2 MB, of
    which three quarters are done in 500 ms. A constant sixth gives half the time for 2 MB.
    """
    return 1 / 6 + 5 / 6 * size_bytes / _MEASURED_BYTES


def slowest_ms(samples_ms: Sequence[float], writers: int, share: float = 0.5) -> float | None:
    """The time in which a share of checkpoints is done that wait for so many writes each; None for too few samples."""
    quantile: float = share ** (1 / writers)
    if (1 - quantile) * len(samples_ms) < _SLOWER_SAMPLES:
        return None
    return sorted(samples_ms)[math.ceil(quantile * len(samples_ms)) - 1]


def latency_of(name: str, number: int) -> float:
    """The latency of the n-th request for an object, from 1: sides that differ in something else have the same."""
    return latency_s(random.Random(f"{_SEED} {name} {number}").random())


class SlowStore(StoreWrapper):
    """Delays each write to another store by `scale` times FLIP-158's latencies; threads may share it."""

    def __init__(self, inner: Store, scale: float) -> None:
        super().__init__(inner)
        self._scale = scale
        self._lock = threading.Lock()
        self._numbers: Counter[str] = Counter()
        self.late_s: list[float] = []
        """How much longer than planned the delays were."""
        self.server_s: list[float] = []
        """How long the other store took then."""

    @property
    def puts(self) -> int:
        """Writes that have begun."""
        return self._numbers.total()

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._delayed(name, lambda: self._inner.put(name, data))

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        return self._delayed(name, lambda: self._inner.put_if_absent(name, data))

    def _delayed(self, name: str, write: Callable[[], _T]) -> _T:
        with self._lock:
            self._numbers[name] += 1
            number = self._numbers[name]
        until_s = time.perf_counter() + self._scale * latency_of(name, number)
        time.sleep(max(0.0, until_s - time.perf_counter()))
        begun_s = time.perf_counter()
        self.late_s.append(begun_s - until_s)
        written = write()
        self.server_s.append(time.perf_counter() - begun_s)
        return written


@dataclass(frozen=True)
class Settings:
    requests: int = option(20_000, "Of each side.")
    warm_up: int = option(500, "Requests of each side left out.", NOT_NEGATIVE)
    block: int = option(4_000, "Requests until the sides change.")
    scale: float = option(1.0, "Factor of FLIP-158's latencies.", POSITIVE)
    concurrency: int = option(128, "Objects written at a time.")
    object_bytes: int = option(1_000, "Of every object.")
    latency_bytes: int = option(_MEASURED_BYTES, "Latencies are those of objects of this size.")
    writers: int = option(500, "Of a checkpoint that waits for as many writes, beside one that waits for one.")

    @property
    def factor(self) -> float:
        """Of FLIP-158's latencies."""
        return self.scale * size_factor(self.latency_bytes)


QUICK: Final = [Settings(requests=400, warm_up=20, block=100, scale=0.1, concurrency=32)]


def run(settings: Settings, place: Path) -> Result:
    with s3_server("tail") as location:
        return measure(location, place, settings)


@contextmanager
def s3_server(bucket: str, memory_bytes: int = 4 << 30) -> Iterator[str]:
    """A location in a bucket of a server of its own, which the environment leads to meanwhile."""
    # Not at the top: most benchmarks do without the server.
    from tests.s3.server import RadosGateway, missing_programs

    if missing := missing_programs():
        raise Unavailable(f"{', '.join(missing)} not found; ./dev s3 installs an S3 server")
    others = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    with RadosGateway(memory_bytes) as server:
        server.create_bucket(bucket)
        environment = {**others, **server.environment, "NO_PROXY": "127.0.0.1"}
        with mock.patch.dict(os.environ, environment, clear=True):
            yield f"s3://{bucket}/bench"


def measure(location: str, directory: Path, settings: Settings) -> Result:
    """Measure with a server that runs already; click.ClickException if its store saw other requests than were made."""
    server_before_s = _children_cpu_s()
    measured = run_in_child(partial(write_objects, location, settings), directory)
    server_cpu_s = _children_cpu_s() - server_before_s
    sides = {name: _figures(side, settings) for name, side in measured.pop("sides").items()}
    attempts, seen = (sum(side[name] for side in sides.values()) for name in ("attempts", "puts"))
    if seen != attempts:
        raise click.ClickException(f"the client made {attempts} attempts, and the store saw {seen}")
    single, hedged = (sides[name]["latency_ms"].get("p99.9") for name in (SINGLE, HEDGED))
    lower_percent = None if single is None or hedged is None else 100 * (1 - hedged / single)
    figures = {
        "sides": sides,
        "p99.9_lower_percent": lower_percent,
        "server_cpu_s": server_cpu_s,
        "late_ms": _quantiles_ms(measured.pop("late_s")),
        "server_ms": _quantiles_ms(measured.pop("server_s")),
        **measured,
    }
    return Result(
        figures=figures,
        targets=[
            Target("p99.9 with hedges lower by, %", lower_percent, 40, "at_least"),
            Target("requests more with hedges, %", sides[HEDGED]["extra_requests_percent"], 5, "at_most"),
        ],
        rows=[_row(name, side, settings.writers) for name, side in sides.items()],
        remarks=_remarks(figures, settings),
    )


def _children_cpu_s() -> float:
    """Processor time that the children of this process which still run have used."""
    children = [each.as_dict(["cpu_times"])["cpu_times"] for each in psutil.Process().children()]
    return float(sum(times.user + times.system for times in children if times is not None))


def _figures(measured: dict[str, Any], settings: Settings) -> dict[str, Any]:
    latencies_s, counts, warm_up = measured["latencies_s"], measured["counts"], measured["warm_up_counts"]
    extra = counts.get(Metric.UPLOAD_HEDGES, 0) + counts.get(Metric.UPLOAD_RETRIES, 0)
    injected_s = [settings.factor * latency_of(object_name(number), 1) for number in range(len(latencies_s))]
    return {
        "requests": len(latencies_s),
        "latency_ms": _quantiles_ms(latencies_s),
        "slowest_ms": slowest_ms([1000 * each for each in latencies_s], settings.writers),
        "injected_ms": _quantiles_ms(injected_s),
        "added_ms": _quantiles_ms(took - injected for took, injected in zip(latencies_s, injected_s, strict=True)),
        "counts": counts,
        "puts": measured["puts"],
        "attempts": sum(each.get(metric, 0) for each in (counts, warm_up) for metric in _ATTEMPTS),
        "extra_requests_percent": 100 * extra / len(latencies_s),
    }


def _quantiles_ms(samples_s: Iterable[float]) -> dict[str, Any]:
    """The percentiles for which there are enough samples, and the maximum."""
    samples_ms = [1000 * each for each in samples_s]
    return {"samples": len(samples_ms), **percentiles(samples_ms, _PERCENTILES), "max": max(samples_ms)}


def _row(name: str, side: dict[str, Any], writers: int) -> dict[str, str]:
    latency, counts, slowest = side["latency_ms"], side["counts"], side["slowest_ms"]
    return {
        "side": name,
        **{f"{each} ms": f"{latency[each]:.0f}" if each in latency else "" for each in (*_PERCENTILES, "max")},
        f"slowest of {writers}, p50 ms": "" if slowest is None else f"{slowest:.0f}",
        "hedges": f"{counts.get(Metric.UPLOAD_HEDGES, 0):,}",
        "retries": f"{counts.get(Metric.UPLOAD_RETRIES, 0):,}",
        "more requests": f"{side['extra_requests_percent']:.2f}%",
    }


def _remarks(figures: dict[str, Any], settings: Settings) -> list[str]:
    single = figures["sides"][SINGLE]
    share = {name: 100 * figures[f"{name}_cpu_s"] / figures["took_s"] for name in ("client", "server", "machine")}
    others = 2 * share["machine"] - sum(share.values())
    return [
        f"{single['requests']:,} objects per side, {settings.concurrency} at a time, in {figures['took_s']:.0f} s."
        f" Injected: {_shown(single['injected_ms'])} ms; added without hedges: {_shown(single['added_ms'])} ms.",
        f"The server took {_shown(figures['server_ms'])} ms; delays were late by {_shown(figures['late_ms'])} ms.",
        f"Processor time, 100% is one of {os.cpu_count() or 1} cores: client {share['client']:.0f}%, server"
        f" {share['server']:.0f}%, other processes {max(others, 0):.0f}%.",
    ]


def _shown(quantiles: dict[str, Any]) -> str:
    return ", ".join(f"{name} {quantiles[name]:.1f}" for name in ("p50", "p99", "p99.9", "max") if name in quantiles)


def object_name(number: int) -> str:
    """The name of an object, equal on both sides; those below 0 are written to warm up."""
    return f"{number:08}" if number >= 0 else f"warm-up-{-number:08}"


@dataclass
class Writer:
    """A side: writes objects and measures that."""

    store: Store
    slow: SlowStore
    recorder: Measurements
    object_bytes: int
    warm_up: dict[str, int] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)

    def write(self, number: int) -> float:
        """Write an object; how long that took."""
        data = self._content(number)
        started_s = time.perf_counter()
        self.store.put(object_name(number), data)
        return time.perf_counter() - started_s

    def check(self, number: int) -> None:
        """RuntimeError if an object is not there."""
        if self.store.read(object_name(number)) != self._content(number):
            raise RuntimeError(f"{self.store!r} does not have what was written as {object_name(number)}")

    def _content(self, number: int) -> bytes:
        return random.Random(number).randbytes(self.object_bytes)


def write_objects(location: str, settings: Settings) -> dict[str, Any]:
    """Write objects in blocks, in turn on both sides, into folders of `location`; in a process of its own."""
    requests, block, concurrency = settings.requests, settings.block, settings.concurrency
    sides: dict[str, Writer] = {}
    for name, timeout_s in {SINGLE: None, HEDGED: settings.scale * _TIMEOUT_S}.items():
        recorder = Measurements()
        policy = RetryPolicy(timeout_s=timeout_s)
        new_races = partial(Races, 2 * concurrency)  # enough for the losers too
        slow = SlowStore(open_store(f"{location}/{name}"), settings.factor)
        store = RetryingStore(slow, policy, clock=SystemClock(), recorder=recorder, new_races=new_races)
        sides[name] = Writer(store, slow, recorder, settings.object_bytes)
    with ThreadPoolExecutor(concurrency) as pool:
        for side in sides.values():
            list(pool.map(side.write, range(-settings.warm_up, 0)))
            side.warm_up = side.recorder.take().counts
        before_s = _times_s()
        for first in range(0, requests, block):
            for side in sides.values():
                side.latencies_s += pool.map(side.write, range(first, min(first + block, requests)))
        took_s, cpu_s, machine_cpu_s = (after - before for before, after in zip(before_s, _times_s(), strict=True))
    for side in sides.values():
        for number in range(0, requests, max(1, requests // _CHECKED)):
            side.check(number)
    time.sleep(settings.factor * latency_s(1.0))  # the last losers may still be on their way
    return {
        "took_s": took_s,
        "client_cpu_s": cpu_s,
        "machine_cpu_s": machine_cpu_s,
        "late_s": [each for side in sides.values() for each in side.slow.late_s],
        "server_s": [each for side in sides.values() for each in side.slow.server_s],
        "sides": {
            name: {
                "latencies_s": side.latencies_s,
                "counts": side.recorder.take().counts,
                "warm_up_counts": side.warm_up,
                "puts": side.slow.puts,
            }
            for name, side in sides.items()
        },
    }


def _times_s() -> tuple[float, float, float]:
    """Time, and processor time of this process and of everything on the machine."""
    machine = psutil.cpu_times()
    return time.perf_counter(), time.process_time(), sum(machine) - machine.idle - machine.iowait
