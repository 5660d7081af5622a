"""The coordinator, the log and the store without Spark: what a checkpoint costs on the driver."""

from __future__ import annotations

import dataclasses
import os
import random
import secrets
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from cProfile import Profile
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import click
import psutil
import pyarrow as pa

import statelog
from benchmarks.figures import median_ratio, shown, shown_shape, summary
from benchmarks.frame import NOT_NEGATIVE, Result, Target, alternate, option, require_space
from benchmarks.profiling import seconds_by_module
from benchmarks.query import Side
from benchmarks.tail import SlowStore, s3_server
from statelog import CheckpointMetrics, Observer, Options, Tuning
from statelog.clock import SystemClock
from statelog.coordinator.admission import OperatorConfig
from statelog.coordinator.batch import BatchTime
from statelog.coordinator.coordinator import Coordinator
from statelog.log.entry import QueryCheckpoint
from statelog.log.open import open_log, open_retrying_store
from statelog.log.references import SegmentRef
from statelog.metrics import Measurements
from statelog.rpc.calls import RpcClient, RpcServer
from statelog.rpc.messages import Ack, Acked, Begin, Begun, Ping, Reply, Request, TaskId, Tick
from statelog.rpc.tls import new_identity
from statelog.runs import digests
from statelog.runs.schema import StateDescriptor, StateKind, encode_schema
from statelog.storage import Store, open_store
from statelog.storage.store import StoreWrapper

_TENTH: Final = 0.1
_PAYLOADS: Final = 257
_CHECKED_SEGMENTS: Final = 1_000
_INTERVAL_MS: Final = 100
_SCHEME: Final = "slow"
_INSTANCE: Final = "bench"
_WRITES: Final = ("put", "put_if_absent", "append")
_SHOWN_MODULES: Final = 10
_T = TypeVar("_T")


@dataclass(frozen=True)
class Settings:
    store: str = option("local", "A directory, or an S3 server on this machine.", click.Choice(["local", "s3"]))
    file_merging: str = option(
        "across", "Append the checkpoints to a file, or write an object for each.", click.Choice(["across", "within"])
    )
    checkpoints: int = option(10_000, "Per run.")
    subtasks: tuple[int, ...] = option(
        (2, 64), "Of each operator; one run for each number of them.", click.IntRange(1, 32_768)
    )
    operators: tuple[int, ...] = option((1,), "One run for each number of operators, which share the bytes.")
    changeset_bytes: int = option(10_000, "Of every subtask, if there is one operator.")
    total_bytes: int = option(0, "Of all subtasks together, instead; 0 is not.", NOT_NEGATIVE)
    calls: str = option(
        "rpc", "Call over TCP or TLS, as tasks do, or directly.", click.Choice(["rpc", "tls", "direct"])
    )
    latency_scale: float = option(
        0.0,
        "Each write takes so many times FLIP-158's latency longer, and is an object; 0 is not.",
        click.FloatRange(0),
    )
    fresh_every: int = option(
        0, "Use a fresh location every so many checkpoints and delete the old one; 0 is never.", NOT_NEGATIVE
    )
    rounds: int = option(1, "How often every run is done.")
    profile: bool = option(False, "Say in which modules the time goes; takes longer, and needs --calls direct.")


QUICK: Final = [
    Settings(checkpoints=200, subtasks=(2, 8), operators=(1, 5)),
    Settings(checkpoints=20, subtasks=(2,), operators=(1, 5), calls="direct", latency_scale=0.05, profile=True),
]


def run(settings: Settings, place: Path) -> Result:
    if settings.profile and settings.calls != "direct":
        raise click.UsageError("A profile is that of one thread, so it needs --calls direct.")
    checkpoints = settings.checkpoints
    per_location = min(settings.fresh_every or checkpoints, checkpoints)
    makes_objects = settings.store == "s3" or settings.latency_scale > 0
    file_merging = "within" if makes_objects else settings.file_merging
    shapes = {
        (subtasks, operators): settings.total_bytes or subtasks * settings.changeset_bytes
        for subtasks in settings.subtasks
        for operators in settings.operators
    }
    require_space(
        place,
        per_location * max(shapes.values()),
        "Give another --directory, fewer --checkpoints, or --fresh-every 1000: a fresh location every"
        " 1,000 checkpoints, the old one deleted.",
    )
    with s3_server("commit") if settings.store == "s3" else nullcontext(str(place)) as base:
        common = {"file_merging": file_merging, "per_location": per_location, "base": base}
        sides = {
            (subtasks, operators): CommitSide.of(
                settings,
                side=shown_shape(subtasks, operators),
                parallelism=subtasks,
                operators=operators,
                changeset_bytes=max(1, total_bytes // (subtasks * operators)),
                **common,
            )
            for (subtasks, operators), total_bytes in shapes.items()
        }
        measured = alternate({side.side: partial(side.run, place) for side in sides.values()}, settings.rounds)
    figures = {name: figures_of(measured[side.side], per_location) for name, side in sides.items()}
    where = "all in one location"
    if per_location < checkpoints:
        where = f"in a fresh location every {per_location:,} checkpoints; files and bytes are those of the last one"
    slower = f", writes {settings.latency_scale:g} times FLIP-158's latency longer" if settings.latency_scale else ""
    reads = ", ".join(f"{shown_shape(*name)} {each['log_read_s']:.2f} s" for name, each in figures.items())
    return Result(
        figures={
            "store": settings.store,
            "file_merging": file_merging,
            "runs": {shown_shape(*name): each for name, each in figures.items()},
        },
        targets=targets_of(figures, has_equal_bytes=settings.total_bytes > 0),
        rows=[_row(shown_shape(*name), each) for name, each in figures.items()],
        remarks=[
            f"{checkpoints:,} checkpoints per run, files merged {file_merging} checkpoints, calls {settings.calls},"
            f" {where}{slower}. Writes: of the store, for one checkpoint.",
            f"Every log was read back afterwards and its changesets checked; reading its entries took: {reads}.",
            *(f"{shown_shape(*name)}: {_parts_of(each)}." for name, each in figures.items()),
            *(
                f"{shown_shape(*name)}, own time: {shares_of(each)}."
                for name, each in figures.items()
                if each["profile_s"]
            ),
        ],
    )


def figures_of(rounds: Sequence[dict[str, Any]], per_location: int) -> dict[str, Any]:
    """Distributions in place of the samples; the tenths are those of each location's checkpoints, all together."""
    tenth = max(1, int(per_location * _TENTH))
    places = [(index % per_location, 1000 * each) for one in rounds for index, each in enumerate(one["commit_s"])]
    first = [each for place, each in places if place < tenth]
    last = [each for place, each in places if place >= per_location - tenth]
    samples = {
        name: [1000 * each for one in rounds for each in one[f"{name.removesuffix('_ms')}_s"]]
        for name in ("commit_ms", "coordinator_commit_ms", "checkpoint_ms", "begins_ms", "acks_ms", "writes_ms")
    }
    newest = {name: value for name, value in rounds[-1].items() if not isinstance(value, list)}
    return {
        **newest,
        **{name: summary(each) for name, each in samples.items()},
        "checkpoints_per_s": statistics.median(len(one["checkpoint_s"]) / sum(one["checkpoint_s"]) for one in rounds),
        "writes_ms_by_round": [1000 * statistics.median(one["writes_s"]) for one in rounds],
        "writes_per_checkpoint": statistics.mean(chain.from_iterable(one["writes"] for one in rounds)),
        "other_requests_per_checkpoint": statistics.mean(chain.from_iterable(one["others"] for one in rounds)),
        "first_tenth_median_ms": statistics.median(first),
        "last_tenth_median_ms": statistics.median(last or first),
        "rss_growth_bytes": newest["rss_after_bytes"] - newest["rss_before_bytes"],
    }


def targets_of(figures: dict[tuple[int, int], dict[str, Any]], *, has_equal_bytes: bool) -> list[Target]:
    """The targets of figures by subtasks and operators.

    With the fewest operators the number of subtasks matters little, if all have as many bytes; and more operators make
    no more writes, which take hardly longer.
    """
    fewest = min(operators for _, operators in figures)
    targets: list[Target] = []
    if has_equal_bytes:
        medians = [each["commit_ms"]["median"] for (_, operators), each in figures.items() if operators == fewest]
        name = "median commit: slowest / fastest number of subtasks"
        targets.append(Target(name, max(medians) / min(medians), 1.5, "at_most"))
    for (subtasks, operators), each in figures.items():
        if operators > fewest:
            pairs = each["writes_ms_by_round"], figures[subtasks, fewest]["writes_ms_by_round"]
            name = f"{shown_shape(subtasks, operators)}: writes"
            targets += [
                Target(f"{name} per checkpoint", each["writes_per_checkpoint"], 1, "at_most"),
                Target(f"{name} per checkpoint, time / with {fewest}", median_ratio(*pairs), 1.3, "at_most"),
            ]
    return targets


def _parts_of(figures: dict[str, Any]) -> str:
    median = {
        part: f"{figures[f'{part}_ms']['median']:.2f} ms"
        for part in ("checkpoint", "begins", "acks", "commit", "writes")
    }
    return (
        f"a checkpoint {median['checkpoint']}, of it begins {median['begins']}, all acks but the last {median['acks']},"
        f" commit {median['commit']}, of that writes {median['writes']}"
    )


def shares_of(figures: dict[str, Any]) -> str:
    """The modules with the largest parts of the time."""
    by_module = figures["profile_s"]
    total_s = sum(by_module.values())
    largest = sorted(by_module, key=lambda module: -by_module[module])[:_SHOWN_MODULES]
    return ", ".join(f"{by_module[module] / total_s:.0%} {module}" for module in largest)


def _row(name: str, figures: dict[str, Any]) -> dict[str, str]:
    return {
        "run": name,
        "commit ms": shown(figures["commit_ms"], digits=2),
        "first 10%": f"{figures['first_tenth_median_ms']:.2f}",
        "last 10%": f"{figures['last_tenth_median_ms']:.2f}",
        "checkpoints/s": f"{figures['checkpoints_per_s']:.0f}",
        "writes": f"{figures['writes_per_checkpoint']:.2f}",
        "writes ms": f"{figures['writes_ms']['median']:.2f}",
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


class RequestTimes(StoreWrapper):
    """Keeps how long each request to another store took."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.requests: list[tuple[str, float]] = []
        """Operation and seconds."""

    def _call(self, operation: str, name: str, effect: Callable[[], _T]) -> _T:
        started_s = time.perf_counter()
        try:
            return effect()
        finally:
            self.requests.append((operation, time.perf_counter() - started_s))


class Durations(NamedTuple):
    """The durations of one checkpoint, in seconds."""

    checkpoint_s: float
    """From the first begin to the answer to the last ack."""
    begins_s: float
    acks_s: float
    """Of all acks but the last."""
    commit_s: float
    """Of the last ack, which makes the checkpoint durable."""


@dataclass(frozen=True, kw_only=True)
class CommitSide(Side):
    """Checkpoints with the changesets of their tasks; after `per_location` of them the next location is used."""

    operators: int
    checkpoints: int
    changeset_bytes: int
    file_merging: str
    calls: str
    latency_scale: float
    profile: bool
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

    @cached_property
    def _uids(self) -> dict[str, int]:
        """The operators' numbers by their uids, which sort as the numbers do."""
        return {f"operator-{number:09}": number for number in range(self.operators)}

    def _attempt(self, batch: int, uid: str, subtask: int) -> int:
        """The attempt of a subtask in a batch; no other one has its number."""
        return (batch * self.operators + self._uids[uid]) * self.parallelism + subtask

    def measure(self, directory: Path) -> dict[str, Any]:
        """Commit checkpoints and read them back, location by location."""
        durations: list[Durations] = []
        requests: list[list[tuple[str, float]]] = []
        times, profile = _CommitTimes(), Profile()
        rss_before_bytes = 0
        statelog.register_store(_SCHEME, partial(_slow_store, self.latency_scale))
        for done in range(0, self.checkpoints, self.per_location):
            location = f"{self.base}/{directory.name}/logs/location-{done}"
            number = min(self.per_location, self.checkpoints - done)
            store = self._timed_store(location)
            coordinator = self._coordinator(store, location, times)
            coordinator.open(0)
            call: Callable[[Request, bytes], Reply] = partial(_handle, coordinator)
            if self.calls != "direct":
                secret, identity = os.urandom(32), new_identity() if self.calls == "tls" else None
                server = RpcServer("127.0.0.1", 0, secret, call, identity=identity)
                call = RpcClient("127.0.0.1", server.port, secret, certificate=server.certificate).call
            for batch in range(number):
                if batch == max(1, number // 100) and not rss_before_bytes:
                    rss_before_bytes = _rss_bytes()
                store.requests = []
                with ExitStack() as profiled:
                    if self.profile:
                        profiled.enter_context(profile)
                    durations.append(self._checkpoint(batch, call))
                requests.append(store.requests)
            rss_after_bytes = _rss_bytes()
            coordinator.close()
            log_read_s = self._check_log(number, location)
            own = open_store(location)
            files = own.list()
            if done + number < self.checkpoints:
                own.delete([file.name for file in files])
        writes = [[took_s for operation, took_s in each if operation in _WRITES] for each in requests]
        return {
            "checkpoints": self.checkpoints,
            "subtasks": self.parallelism,
            "operators": self.operators,
            "changeset_bytes": self.changeset_bytes,
            "files": len(files),
            "bytes": sum(file.size_bytes for file in files),
            "log_read_s": log_read_s,
            "rss_before_bytes": rss_before_bytes or rss_after_bytes,
            "rss_after_bytes": rss_after_bytes,
            "profile_s": seconds_by_module(profile) if self.profile else {},
            "coordinator_commit_s": list(times.commit_s),
            **{name: [getattr(each, name) for each in durations] for name in Durations._fields},
            "writes": list(map(len, writes)),
            "writes_s": list(map(sum, writes)),
            "others": [len(every) - len(own_writes) for every, own_writes in zip(requests, writes, strict=True)],
        }

    def _checkpoint(self, batch: int, call: Callable[[Request, bytes], Reply]) -> Durations:
        """Operator by operator, all subtasks begin and then ack a batch."""
        begins_s = acks_s = elapsed_s = 0.0
        from_s = time.perf_counter()
        for uid in self._uids:
            tasks = [
                TaskId("query", "run", uid, _INSTANCE, batch, subtask, self._attempt(batch, uid, subtask))
                for subtask in range(self.parallelism)
            ]
            for subtask, task in enumerate(tasks):
                begin = Begin(task, subtask, 1, batch * _INTERVAL_MS, str(task.attempt))
                started_s = time.perf_counter()
                begun = call(begin, b"")
                begins_s += time.perf_counter() - started_s
                if not isinstance(begun, Begun) or begun.permit.inline_bytes < self.changeset_bytes:
                    raise RuntimeError(f"changesets of {self.changeset_bytes} bytes would not travel with the acks")
            for task in tasks:
                picked = task.attempt % _PAYLOADS
                payload = self._payloads[picked]
                segment = SegmentRef(task.subtask, task.attempt, self._checksums[picked], 0, len(payload), 1, 1)
                ack = Ack(task, [segment])
                started_s = time.perf_counter()
                reply = call(ack, payload)
                elapsed_s = time.perf_counter() - started_s
                acks_s += elapsed_s
                if not isinstance(reply, Acked):
                    raise RuntimeError(f"{task.name}: the ack was answered with {reply}")
        return Durations(time.perf_counter() - from_s, begins_s, acks_s - elapsed_s, elapsed_s)

    def _timed_store(self, location: str) -> RequestTimes:
        own = f"{_SCHEME}:{location}" if self.latency_scale else location
        return RequestTimes(open_retrying_store(own, Options(), SystemClock(), Measurements()))

    def _coordinator(self, store: Store, location: str, observer: Observer) -> Coordinator:
        state = StateDescriptor("n", StateKind.VALUE, pa.schema([("n", pa.int64())])).to_stored()
        key_schema = encode_schema(pa.schema([("key", pa.int64())]))
        # Nobody does what the coordinator orders here.
        options = Options(file_merging=self.file_merging, tuning=Tuning(materialization=False))
        *others, last = (
            OperatorConfig(
                "query", "run", uid, self.parallelism, key_schema, [state], options=options, instance=_INSTANCE
            )
            for uid in self._uids
        )
        # The last ack is one of the last operator, so the commit is its.
        last = dataclasses.replace(last, options=dataclasses.replace(options, observer=observer))
        return Coordinator(
            [*others, last],
            store=store,
            location=location,
            log=open_log(store, options, SystemClock()),
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
        entries = open_log(store, Options(file_merging=self.file_merging), SystemClock()).read()
        read_s = time.perf_counter() - started_s
        stored = [entry for entry in entries if isinstance(entry, QueryCheckpoint)]
        if [entry.batch for entry in stored] != list(range(checkpoints)):
            raise RuntimeError(f"the log holds {len(stored)} checkpoints after {checkpoints} commits")
        segments = [
            (self._attempt(entry.batch, section.uid, each.subtask) % _PAYLOADS, each)
            for entry in stored
            for section in entry.sections
            for each in section.segments
        ]
        if len(segments) != checkpoints * self.operators * self.parallelism:
            raise RuntimeError(f"the log names {len(segments)} changesets, which is not one for each ack")
        if any(segment.checksum != self._checksums[picked] for picked, segment in segments):
            raise RuntimeError("the log does not name the changesets that were sent")
        for picked, segment in segments[:: max(1, len(segments) // _CHECKED_SEGMENTS)]:
            data = store.read(segment.name, offset=segment.offset, length=segment.length)
            if data != self._payloads[picked]:
                raise RuntimeError(f"the changeset of subtask {segment.subtask} in {segment.name} is not what was sent")
        return read_s


def _slow_store(scale: float, location: str) -> Store:
    return SlowStore(open_store(location.removeprefix(f"{_SCHEME}:")), scale)


def _handle(coordinator: Coordinator, request: Request, payload: bytes) -> Reply:
    assert not isinstance(request, Tick | Ping)
    return coordinator.handle(request, payload)


def _rss_bytes() -> int:
    rss: int = psutil.Process().memory_info().rss
    return rss
