"""A workload of Flink's blog: events at a constant rate, as many checkpoints as possible, a crash, and the restart."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import shutil
import time
import zipfile
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import statelog
from benchmarks.child import kill_child_when, run_in_child
from benchmarks.events import EventStream
from benchmarks.frame import QUICK_JVM
from benchmarks.query import (
    Checks,
    Files,
    Numbers,
    Recorder,
    Side,
    count_checks,
    last_progress,
    require,
    start,
    stop_when,
)
from benchmarks.restarts import fresh, load_rocksdb, own_temporary_files, restart_parts
from benchmarks.tail import SlowStore, s3_server
from statelog.storage import Store, open_store

_SCHEME: Final = "flip158"
_SERVER_BYTES: Final = 12 << 30
_MEASURED: Final = "measured"
_RESTARTED_BATCHES: Final = 3
_START_S: Final = 600
"""The longest time for the start and the last batch."""
_BUILT_PER_S: Final = 2_000
"""The fewest events of the backlog that any side reads in a second."""
_POLL_S: Final = 0.25
_CHANGELOG: Final = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"


def slow_store(location: str) -> Store:
    """The store of a location, whose writes take FLIP-158's latencies longer."""
    return SlowStore(open_store(location.removeprefix(f"{_SCHEME}:")), 1.0)


@dataclass(frozen=True)
class EventBatch:
    """The events of a batch, from number `first` to before `end`, and its time."""

    number: int
    time_ms: int
    first: int
    end: int


@dataclass(frozen=True, kw_only=True)
class WorkloadSide(Side):
    """Runs a query on a stream of events, kills it, and starts it again."""

    changelog: bool
    has_delays: bool
    is_quick: bool
    """Whether its process has a JVM that starts fast and is slow; statelog's local side alone starts again then."""
    rate: float
    seconds: float
    warm_up: float
    keys: int
    skew: str
    value_bytes: int
    built_events: int
    materialization_s: float

    @property
    def output_mode(self) -> str:
        """Of the query."""
        return "update"

    @abstractmethod
    def output(self, events: DataFrame, options: statelog.Options, location: str | None) -> DataFrame:
        """The query; `events` have `key` and `payload`."""

    @abstractmethod
    def expected(self, batches: Sequence[EventBatch]) -> Iterator[Checks]:
        """The right sums over the output of all batches from the first one on, computed without any state."""

    def checks(self) -> list[Column]:
        """Sums over the output of a batch, which Spark makes on the way to the sink."""
        return count_checks()

    def keys_of(self, batch: EventBatch) -> Numbers:
        """The keys of a batch's events."""
        return self._stream(0).keys_of(batch.first, batch.end)

    def run(self, place: Path) -> dict[str, Any]:
        """Progress, checkpoints and files until the query is killed, and the parts of its restart."""
        work = fresh(place / re.sub(r"\W+", "-", self.side))
        try:
            with s3_server("workload", _SERVER_BYTES) if self.has_delays else nullcontext() as bucket:
                return self._run(work, None if bucket is None else f"{_SCHEME}:{bucket}")
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _run(self, work: Path, location: str | None) -> dict[str, Any]:
        environment, measured_file = own_temporary_files(work), work / _MEASURED
        if self.is_quick:
            environment["JDK_JAVA_OPTIONS"] = QUICK_JVM
        timeout_s = self.warm_up + self.seconds + self.built_events / _BUILT_PER_S + _START_S
        kill_child_when(measured_file.exists, partial(self.live, work, location), work, environment, timeout_s)
        measured: dict[str, Any] = pickle.loads(measured_file.read_bytes())
        batches = measured.pop("batches") | planned_batches(work / "checkpoint", 0)
        if self.is_spark:
            measured["full_bytes"] = stored_bytes(work / "checkpoint" / "state" / "0")
        restarted: dict[str, Any] = {"progress": [], "batches": {}, "parts": None}
        if not self.is_quick or not (self.is_spark or self.has_delays):
            for folder in ("local", "scratch", "tmp"):
                shutil.rmtree(work / folder, ignore_errors=True)
            (work / "tmp").mkdir()
            restart = partial(self.measure, work, location, batches[max(batches)].end, time.time())
            restarted = run_in_child(restart, work, environment)
        self._check(batches | restarted["batches"], measured["progress"], restarted["progress"])
        return {**measured, "restart": restarted["parts"]}

    def live(self, directory: Path, location: str | None) -> None:
        """Run the query until killed; write the measurements to a file once the time is over."""
        session = self._session(directory)
        recorder, files = Recorder(), Files(directory / "checkpoint" / "state")
        batches: dict[int, EventBatch] = {}
        over_s: float | None = None

        def look(query: StreamingQuery) -> bool:
            nonlocal over_s
            if new := planned_batches(directory / "checkpoint", len(batches)):
                batches.update(new)
                if self.is_spark:
                    files.look()
            last = last_progress(query)
            if over_s is None and last and _events_to(last) > self.built_events:
                over_s = time.time() + self.warm_up + self.seconds
            if over_s is not None and time.time() > over_s and not (directory / _MEASURED).exists():
                measured = {
                    "measured_from_s": over_s - self.seconds,
                    "progress": _progress(query),
                    "batches": batches,
                    "checkpoints": [_counted(each) for each in recorder.checkpoints],
                    **files.to_json(),
                }
                unfinished = directory / f"{_MEASURED}.tmp"
                unfinished.write_bytes(pickle.dumps(measured))
                unfinished.rename(directory / _MEASURED)
            return False

        stop_when(self._start(session, directory, location, recorder, 0), look, _POLL_S)

    def measure(
        self, directory: Path, location: str | None = None, first: int = 0, started_s: float = 0.0
    ) -> dict[str, Any]:
        """Start the query again for some batches, in a process that was started at `started_s`.

        `first` events are in the batches that Spark has planned.
        """
        session = self._session(directory)
        if self.is_spark:
            load_rocksdb(session)
        recorder = Recorder()
        query = self._start(session, directory, location, recorder, first)
        stop_when(query, lambda query: len(_progress(query)) >= _RESTARTED_BATCHES, _POLL_S)
        progress = _progress(query)[:_RESTARTED_BATCHES]
        batches = planned_batches(directory / "checkpoint", progress[0]["batchId"])
        session.stop()
        return {"progress": progress, "batches": batches, "parts": restart_parts(progress, recorder, started_s)}

    def _session(self, directory: Path) -> SparkSession:
        return self.session(directory, {_CHANGELOG: str(self.changelog).lower()})

    def _stream(self, first: int) -> EventStream:
        return EventStream(
            self.rate, self.parallelism, self.keys, self.value_bytes, first, self.built_events, self.skew
        )

    def _start(
        self, session: SparkSession, directory: Path, location: str | None, recorder: Recorder, first: int
    ) -> StreamingQuery:
        statelog.register_store(_SCHEME, slow_store)
        options = statelog.Options(
            materialization_interval_s=self.materialization_s,
            local_directory=f"{directory}/local",
            observer=recorder,
            tuning=statelog.Tuning(changelog=self.changelog),
        )
        output = self.output(self._stream(first).load(session), options, location)
        return start(output, self.checks(), directory, self.output_mode)

    def _check(
        self, batches: dict[int, EventBatch], progress: list[dict[str, Any]], restarted: list[dict[str, Any]]
    ) -> None:
        """RuntimeError if the output of any batch is wrong."""
        if sorted(batches) != list(range(len(batches))):
            raise RuntimeError(f"{self.side}: batches are missing among {sorted(batches)}")
        expected = list(self.expected([batches[number] for number in range(len(batches))]))
        require(self.side, progress, expected[: len(progress)])
        first = restarted[0]["batchId"] if restarted else 0
        require(self.side, restarted, expected[first : first + len(restarted)], first)


def planned_batches(checkpoint: Path, first: int) -> dict[int, EventBatch]:
    """The batches from number `first` on whose offsets Spark has kept, and those of the batch before.

    The last one is perhaps not committed.
    """
    folder = checkpoint / "offsets"
    numbers = [int(file.name) for file in folder.glob("[0-9]*")]
    ends: dict[int, tuple[int, int]] = {}
    for number in sorted(number for number in numbers if number >= first - 1):
        _, metadata, offset = (folder / str(number)).read_text().splitlines()
        ends[number] = json.loads(metadata)["batchTimestampMs"], json.loads(offset)["events"]
    return {
        number: EventBatch(number, time_ms, ends[number - 1][1] if number else 0, end)
        for number, (time_ms, end) in ends.items()
        if number >= first and (number == 0 or number - 1 in ends)
    }


def stored_bytes(operator: Path) -> int:
    """The bytes that a restart of Spark's state store needs: in each partition a snapshot, and the changelogs since."""
    total = 0
    for partition in operator.glob("[0-9]*"):
        snapshots = {int(path.stem.partition("_")[0]): path for path in partition.glob("*.zip")}
        newest = max(snapshots, default=-1)
        if snapshots:
            total += snapshots[newest].stat().st_size + _table_bytes(snapshots[newest])
        logs = {int(path.stem.partition("_")[0]): path for path in partition.glob("*.changelog")}
        total += sum(path.stat().st_size for version, path in logs.items() if version > newest)
    return total


def _table_bytes(snapshot: Path) -> int:
    """The sizes of the table files that a snapshot names; its metadata are a version and a line of JSON."""
    with zipfile.ZipFile(snapshot) as archive:
        _, metadata = archive.read("metadata").decode().split("\n", 1)
    return sum(file["sizeBytes"] for file in json.loads(metadata)["sstFiles"])


def _progress(query: StreamingQuery) -> list[dict[str, Any]]:
    """Spark's progress by batch; it also tells that there was nothing to do."""
    progress = [json.loads(each.json) for each in query.recentProgress]
    return [each for each in progress if each.get("observedMetrics")]


def _events_to(progress: dict[str, Any]) -> int:
    """How many events there are up to the end of a batch."""
    [source] = progress["sources"]
    return int(source["endOffset"]["events"])


def _counted(checkpoint: statelog.CheckpointMetrics) -> dict[str, Any]:
    """A checkpoint's metrics, without the distributions."""
    return {**dataclasses.asdict(checkpoint), "measured": checkpoint.measured.counts}
