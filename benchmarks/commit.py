"""The coordinator, the log and the store without Spark: what a checkpoint costs on the driver."""

from __future__ import annotations

import os
import random
import secrets
import statistics
import time
from array import array
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import click
import psutil
import pyarrow as pa

from benchmarks.figures import shown, summary
from benchmarks.frame import NOT_NEGATIVE, Result, Target, option, require_space
from benchmarks.query import Side, run_once
from benchmarks.tail import s3_server
from statelog import CheckpointMetrics, Observer, Options
from statelog.checkpoint.admission import OperatorConfig
from statelog.checkpoint.batch import BatchTime
from statelog.checkpoint.coordinator import Coordinator
from statelog.checkpoint.protocol import Ack, Acked, Begin, Begun, Ping, Reply, Request, TaskId, Tick
from statelog.clock import SystemClock
from statelog.log.entry import Checkpoint
from statelog.log.open import open_log, open_retrying_store
from statelog.log.references import SegmentRef
from statelog.metrics import Measurements
from statelog.runs import digests
from statelog.runs.schema import StateDescriptor, StateKind, encode_schema
from statelog.spark.rpc import RpcClient, RpcServer
from statelog.spark.rpc_tls import new_identity
from statelog.storage import open_store

_TENTH: Final = 0.1
_ROOT: Final = "main"
_PAYLOADS: Final = 257
_CHECKED_SEGMENTS: Final = 1_000
_INTERVAL_MS: Final = 100


@dataclass(frozen=True)
class Settings:
    store: str = option("local", "A directory, or an S3 server on this machine.", click.Choice(["local", "s3"]))
    file_merging: str = option(
        "across", "Append the checkpoints to a file, or write an object for each.", click.Choice(["across", "within"])
    )
    checkpoints: int = option(10_000, "Per run.")
    subtasks: tuple[int, ...] = option((2, 64), "One run for each number of subtasks.", click.IntRange(1, 32_768))
    changeset_bytes: int = option(10_000, "Of every subtask.")
    total_bytes: int = option(0, "Of all subtasks together, instead; 0 is not.", NOT_NEGATIVE)
    calls: str = option(
        "rpc", "Call over TCP or TLS, as tasks do, or directly.", click.Choice(["rpc", "tls", "direct"])
    )
    fresh_every: int = option(
        0, "Use a fresh location every so many checkpoints and delete the old one; 0 is never.", NOT_NEGATIVE
    )


QUICK: Final = [Settings(checkpoints=200, subtasks=(2, 8))]


def run(settings: Settings, place: Path) -> Result:
    checkpoints, total_bytes = settings.checkpoints, settings.total_bytes
    per_location = min(settings.fresh_every or checkpoints, checkpoints)
    file_merging = "within" if settings.store == "s3" else settings.file_merging
    sizes = dict.fromkeys(settings.subtasks, settings.changeset_bytes)
    if total_bytes:
        sizes = {count: max(1, total_bytes // count) for count in settings.subtasks}
    require_space(
        place,
        per_location * max(count * size for count, size in sizes.items()),
        "Give another --directory, fewer --checkpoints, or --fresh-every 1000: a fresh location every"
        " 1,000 checkpoints, the old one deleted.",
    )
    with s3_server("commit") if settings.store == "s3" else nullcontext(str(place)) as base:
        common = {"file_merging": file_merging, "per_location": per_location, "base": base}
        sides = [
            CommitSide.of(settings, side=f"{count} subtasks", parallelism=count, changeset_bytes=size, **common)
            for count, size in sizes.items()
        ]
        measured = run_once(sides, place)
    figures = {name: _figures(one, per_location) for name, one in measured.items()}
    medians = [each["commit_ms"]["median"] for each in figures.values()]
    ratio = Target("median commit: slowest / fastest number of subtasks", max(medians) / min(medians), 1.5, "at_most")
    where = "all in one location"
    if per_location < checkpoints:
        where = f"in a fresh location every {per_location:,} checkpoints; files and bytes are those of the last one"
    reads = ", ".join(f"{name} {each['log_read_s']:.2f} s" for name, each in figures.items())
    return Result(
        figures={"store": settings.store, "file_merging": file_merging, "runs": figures},
        targets=[ratio] if total_bytes else [],
        rows=[_row(name, each) for name, each in figures.items()],
        remarks=[
            f"{checkpoints:,} checkpoints per run, files merged {file_merging} checkpoints, calls {settings.calls},"
            f" {where}.",
            f"Every log was read back afterwards and its changesets checked; reading its entries took: {reads}.",
        ],
    )


def _figures(measured: dict[str, Any], per_location: int) -> dict[str, Any]:
    """Distributions in place of the samples; the tenths are those of each location's checkpoints, all together."""
    commits_ms = [1000 * each for each in measured.pop("commit_s")]
    own_ms = [1000 * each for each in measured.pop("coordinator_commit_s")]
    tenth = max(1, int(per_location * _TENTH))
    first = [each for index, each in enumerate(commits_ms) if index % per_location < tenth]
    last = [each for index, each in enumerate(commits_ms) if index % per_location >= per_location - tenth]
    return {
        **measured,
        "commit_ms": summary(commits_ms),
        "coordinator_commit_ms": summary(own_ms),
        "first_tenth_median_ms": statistics.median(first),
        "last_tenth_median_ms": statistics.median(last or first),
        "rss_growth_bytes": measured["rss_after_bytes"] - measured["rss_before_bytes"],
    }


def _row(name: str, figures: dict[str, Any]) -> dict[str, str]:
    return {
        "run": name,
        "commit ms": shown(figures["commit_ms"], digits=2),
        "first 10%": f"{figures['first_tenth_median_ms']:.2f}",
        "last 10%": f"{figures['last_tenth_median_ms']:.2f}",
        "checkpoints/s": f"{figures['checkpoints_per_s']:.0f}",
        "files": f"{figures['files']:,}",
        "MB": f"{figures['bytes'] / 1e6:,.0f}",
        "driver memory": f"{figures['rss_growth_bytes'] / 1e6:+,.0f} MB",
    }


class _CommitTimes(Observer):
    """Keeps only how long the commits took, so that it hardly adds to the memory that is measured."""

    def __init__(self) -> None:
        self.commit_s = array("d")

    def checkpoint(self, metrics: CheckpointMetrics) -> None:
        self.commit_s.append(metrics.commit_s)


@dataclass(frozen=True, kw_only=True)
class CommitSide(Side):
    """Checkpoints with the changesets of their tasks; after `per_location` of them the next location is used."""

    checkpoints: int
    changeset_bytes: int
    file_merging: str
    calls: str
    per_location: int
    base: str
    """Below it are the locations."""

    @cached_property
    def _payloads(self) -> list[bytes]:
        source = random.Random(0)
        return [source.randbytes(self.changeset_bytes) for _ in range(_PAYLOADS)]

    @cached_property
    def _checksums(self) -> list[bytes]:
        return [digests.checksum(payload) for payload in self._payloads]

    def _pick(self, batch: int, subtask: int) -> int:
        """Which payload a subtask has in a batch."""
        return (batch * self.parallelism + subtask) % _PAYLOADS

    def measure(self, directory: Path) -> dict[str, Any]:
        """Commit checkpoints and read them back, location by location."""
        commit_s: list[float] = []
        times = _CommitTimes()
        total_s, rss_before_bytes = 0.0, 0
        for done in range(0, self.checkpoints, self.per_location):
            location = f"{self.base}/{directory.name}/logs/location-{done}"
            number = min(self.per_location, self.checkpoints - done)
            coordinator = self._coordinator(location, times)
            coordinator.open(0)
            call: Callable[[Request, bytes], Reply] = partial(_handle, coordinator)
            if self.calls != "direct":
                secret, identity = os.urandom(32), new_identity() if self.calls == "tls" else None
                server = RpcServer("127.0.0.1", 0, secret, call, identity=identity)
                call = RpcClient("127.0.0.1", server.port, secret, certificate=server.certificate).call
            for batch in range(number):
                if batch == max(1, number // 100) and not rss_before_bytes:
                    rss_before_bytes = _rss_bytes()
                started_s = time.perf_counter()
                commit_s.append(self._checkpoint(batch, call))
                total_s += time.perf_counter() - started_s
            rss_after_bytes = _rss_bytes()
            coordinator.close()
            log_read_s = self._check_log(number, location)
            store = open_store(location)
            files = store.list()
            if done + number < self.checkpoints:
                store.delete([file.name for file in files])
        return {
            "checkpoints": self.checkpoints,
            "subtasks": self.parallelism,
            "changeset_bytes": self.changeset_bytes,
            "checkpoints_per_s": self.checkpoints / total_s,
            "files": len(files),
            "bytes": sum(file.size_bytes for file in files),
            "log_read_s": log_read_s,
            "rss_before_bytes": rss_before_bytes or rss_after_bytes,
            "rss_after_bytes": rss_after_bytes,
            "commit_s": commit_s,
            "coordinator_commit_s": list(times.commit_s),
        }

    def _checkpoint(self, batch: int, call: Callable[[Request, bytes], Reply]) -> float:
        """All subtasks begin and ack a batch, one after the other; returns how long the last ack took."""
        tasks = [
            TaskId("query", "run", "main", "bench", batch, subtask, batch * self.parallelism + subtask)
            for subtask in range(self.parallelism)
        ]
        for subtask, task in enumerate(tasks):
            begun = call(Begin(task, subtask, 1, batch * _INTERVAL_MS), b"")
            if not isinstance(begun, Begun) or begun.inline_bytes < self.changeset_bytes:
                raise RuntimeError(f"changesets of {self.changeset_bytes} bytes would not travel with the acks")
        elapsed_s = 0.0
        for subtask, task in enumerate(tasks):
            picked = self._pick(batch, subtask)
            payload = self._payloads[picked]
            segment = SegmentRef(task.subtask, task.attempt, self._checksums[picked], 0, len(payload), 1, 1)
            ack = Ack(task, [segment])
            started_s = time.perf_counter()
            reply = call(ack, payload)
            elapsed_s = time.perf_counter() - started_s
            if not isinstance(reply, Acked):
                raise RuntimeError(f"the ack of subtask {subtask} in batch {batch} was answered with {reply}")
        return elapsed_s

    def _coordinator(self, location: str, observer: Observer) -> Coordinator:
        state = StateDescriptor("n", StateKind.VALUE, pa.schema([("n", pa.int64())])).to_stored()
        key_schema = encode_schema(pa.schema([("key", pa.int64())]))
        # Nobody does what the coordinator orders here.
        options = Options(file_merging=self.file_merging, materialization=False, observer=observer)
        store = open_retrying_store(location, options, SystemClock(), Measurements())
        return Coordinator(
            OperatorConfig("query", "run", "main", self.parallelism, key_schema, [state]),
            store=store,
            location=location,
            root=_ROOT,
            log=open_log(store, _ROOT, options, SystemClock()),
            options=options,
            clock=SystemClock(),
            new_token=lambda: secrets.token_bytes(16),
            batch_time=lambda batch: BatchTime(batch * _INTERVAL_MS, 0),
            measurements=Measurements(),
            deletes_in_background=True,
            slots=1,
        )

    def _check_log(self, checkpoints: int, location: str) -> float:
        """Read the log as a restart would, and compare it with what was sent; how long reading took."""
        store = open_store(location)
        started_s = time.perf_counter()
        entries = open_log(store, _ROOT, Options(file_merging=self.file_merging), SystemClock()).read()
        read_s = time.perf_counter() - started_s
        stored = [entry for entry in entries if isinstance(entry, Checkpoint)]
        if [entry.batch for entry in stored] != list(range(checkpoints)):
            raise RuntimeError(f"the log holds {len(stored)} checkpoints after {checkpoints} commits")
        segments = [(self._pick(entry.batch, each.subtask), each) for entry in stored for each in entry.segments]
        if any(segment.checksum != self._checksums[picked] for picked, segment in segments):
            raise RuntimeError("the log does not name the changesets that were sent")
        for picked, segment in segments[:: max(1, len(segments) // _CHECKED_SEGMENTS)]:
            data = store.read(segment.name, offset=segment.offset, length=segment.length)
            if data != self._payloads[picked]:
                raise RuntimeError(f"the changeset of subtask {segment.subtask} in {segment.name} is not what was sent")
        return read_s


def _handle(coordinator: Coordinator, request: Request, payload: bytes) -> Reply:
    assert not isinstance(request, Tick | Ping)
    return coordinator.handle(request, payload)


def _rss_bytes() -> int:
    rss: int = psutil.Process().memory_info().rss
    return rss
