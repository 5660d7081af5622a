"""The client of ``tail``, in a process of its own: writes objects through the proxy, with hedges and without."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from statelog.clock import SystemClock
from statelog.metrics import Measurements
from statelog.storage import Store, open_store
from statelog.storage.races import ThreadedRaces
from statelog.storage.retry import RetryingStore
from statelog.storage.retry_policy import RetryPolicy

__all__ = ["HEDGED", "SINGLE", "object_name", "run"]

SINGLE: Final = "single"
HEDGED: Final = "hedged"

_CHECKED: Final = 200


def object_name(number: int) -> str:
    """The name of an object, equal on both sides; those below 0 are written to warm up."""
    return f"{number:08}" if number >= 0 else f"warm-up-{-number:08}"


@dataclass
class _Side:
    store: Store
    recorder: Measurements
    warm_up: dict[str, int] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)


def run(
    location: str,
    environment: dict[str, str],
    requests: int,
    warm_up: int,
    block: int,
    concurrency: int,
    object_bytes: int,
    timeout_s: float,
) -> dict[str, Any]:
    """Write objects in blocks, in turn on both sides.

    Parameters
    ----------
    location : str
        The sides write into folders of it.
    environment : dict of str to str
        What the store takes from the environment.
    requests, warm_up : int
        How many objects each side writes that are measured, and before these.
    block : int
        How many objects a side writes in its turn.
    concurrency : int
        How many objects are written at the same time.
    object_bytes : int
        Size of an object.
    timeout_s : float
        Of the policy that hedges.

    Raises
    ------
    RuntimeError
        If an object that was written is not there.
    """
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(environment, NO_PROXY="127.0.0.1")
    sides = {
        SINGLE: _side(f"{location}/{SINGLE}", RetryPolicy(timeout_s=None), concurrency),
        HEDGED: _side(f"{location}/{HEDGED}", RetryPolicy(timeout_s=timeout_s), concurrency),
    }
    with ThreadPoolExecutor(concurrency) as pool:
        for side in sides.values():
            list(pool.map(_writer(side.store, object_bytes), range(-warm_up, 0)))
            side.warm_up = side.recorder.take().counts
        before_s = _times_s()
        for first in range(0, requests, block):
            numbers = range(first, min(first + block, requests))
            for side in sides.values():
                side.latencies_s += pool.map(_writer(side.store, object_bytes), numbers)
        took_s, cpu_s, machine_cpu_s = (after - before for before, after in zip(before_s, _times_s(), strict=True))
    for side in sides.values():
        _check(side.store, range(0, requests, max(1, requests // _CHECKED)), object_bytes)
    return {
        "took_s": took_s,
        "client_cpu_s": cpu_s,
        "machine_cpu_s": machine_cpu_s,
        "sides": {
            name: {
                "latencies_s": side.latencies_s,
                "counts": side.recorder.take().counts,
                "warm_up_counts": side.warm_up,
            }
            for name, side in sides.items()
        },
    }


def _times_s() -> tuple[float, float, float]:
    """Time, and CPU time of this process and of everything on the machine."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    busy_ticks = sum(map(int, fields)) - int(fields[3]) - int(fields[4])
    return time.perf_counter(), time.process_time(), busy_ticks / os.sysconf("SC_CLK_TCK")


def _side(location: str, policy: RetryPolicy, concurrency: int) -> _Side:
    recorder = Measurements()
    store = RetryingStore(
        open_store(location),
        policy,
        clock=SystemClock(),
        recorder=recorder,
        # Enough for the losers too.
        new_races=partial(ThreadedRaces, 2 * concurrency),
    )
    return _Side(store, recorder)


def _writer(store: Store, object_bytes: int) -> Callable[[int], float]:
    def write(number: int) -> float:
        data = _content(number, object_bytes)
        started_s = time.perf_counter()
        store.put(object_name(number), data)
        return time.perf_counter() - started_s

    return write


def _content(number: int, object_bytes: int) -> bytes:
    return random.Random(number).randbytes(object_bytes)


def _check(store: Store, numbers: Iterable[int], object_bytes: int) -> None:
    for number in numbers:
        if store.read(object_name(number)) != _content(number, object_bytes):
            raise RuntimeError(f"{store!r} does not have what was written as {object_name(number)}")
