"""Streaming queries that are measured: the sides, the session, the input, the batches, and the check of their output.

A side is described in the benchmark's process and measured in a process of its own. A benchmark of one processor on
statelog and on Spark is a :class:`BatchSide` with two methods, ``output`` and ``expected``, and :func:`compare`;
``benchmarks/count.py`` is an example.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import click
import numpy as np
import numpy.typing as npt
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import DataStreamWriter
from pyspark.sql.streaming.query import StreamingQuery

import statelog
from benchmarks.child import run_in_child
from benchmarks.discarding import SCHEME, DiscardingStore
from benchmarks.figures import summary
from benchmarks.frame import alternate
from benchmarks.processors import KeepPayload
from benchmarks.skew import skewed_key
from benchmarks.usage import Usage
from statelog import CheckpointMetrics, Observer, RestoreMetrics

_POLL_S: Final = 0.25
_DIGEST_BYTES: Final = 32
_FILES: Final = ("files_live", "bytes_live", "files_seen", "bytes_seen")
_ROCKSDB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"

Checks = dict[str, int]
"""Sums over the output of a batch, by name."""
Numbers = npt.NDArray[np.int64]


class Recorder(Observer):
    """Keeps the metrics of all checkpoints, and how and when the query found its state."""

    def __init__(self) -> None:
        self.checkpoints: list[CheckpointMetrics] = []
        self.restores: list[tuple[RestoreMetrics, float]] = []

    def checkpoint(self, metrics: CheckpointMetrics) -> None:
        self.checkpoints.append(metrics)

    def restore(self, metrics: RestoreMetrics) -> None:
        self.restores.append((metrics, time.time()))


@dataclass(frozen=True, kw_only=True)
class Side(ABC):
    """A variant that is measured in a process of its own; if its name begins with "Spark", without statelog."""

    side: str
    parallelism: int

    @property
    def is_spark(self) -> bool:
        """Whether its state is Spark's own."""
        return self.side.startswith("Spark")

    @classmethod
    def of(cls, settings: Any, **fields: Any) -> Self:
        """Make a side from the benchmark's settings of the same names, and the other fields."""
        given = dataclasses.asdict(settings)
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in names} | fields)

    def run(self, place: Path) -> dict[str, Any]:
        """Measure it in a fresh process, with a directory of its own below `place`."""
        directory = Path(tempfile.mkdtemp(dir=place))
        return run_in_child(partial(self.measure, directory), directory)

    @abstractmethod
    def measure(self, directory: Path) -> dict[str, Any]:
        """Run it and return the measurements; RuntimeError if its output is wrong."""

    def session(self, directory: Path, more: Mapping[str, str] | None = None) -> SparkSession:
        """A session with a core per subtask, whose progress has all batches, and scratch files in `directory`.

        Spark's own files are written with settings for a directory, on all sides alike. Its own state store is
        RocksDB with the changelog on.
        """
        settings: dict[str, Any] = {
            "spark.master": f"local[{self.parallelism}]",
            "spark.ui.enabled": "false",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "2g",
            "spark.local.dir": f"{directory}/scratch",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.warehouse.dir": f"{directory}/warehouse",
            "spark.sql.shuffle.partitions": str(self.parallelism),
            "spark.sql.streaming.numRecentProgressUpdates": "1000000",
            **statelog.spark_conf(local_checkpoints=True),
            "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
            "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
            **(more or {}),
        }
        session = SparkSession.builder.appName(type(self).__module__).config(map=settings).getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
        return session

    def transform(
        self,
        rows: DataFrame,
        processor: Any,
        output: Any,
        options: statelog.Options,
        *,
        time_mode: str = "None",
        uses_frames: bool = False,
        location: str | None = None,
        uid: str | None = None,
    ) -> DataFrame:
        """A processor of rows by `key`, on statelog or on Spark's own transformWithState."""
        given: dict[str, Any] = {
            "parallelism": self.parallelism,
            "options": options,
            "location": location,
            "uid": uid,
        }
        keyed: Any = rows.groupBy("key") if self.is_spark else statelog.key_by(rows, "key", **given)
        method = keyed.transformWithStateInPandas if uses_frames else keyed.transformWithState
        transformed: DataFrame = method(processor, output, "update", time_mode)
        return transformed


@dataclass(frozen=True, kw_only=True)
class BatchSide(Side):
    """A side that runs batches of equal size, every one of which is checked."""

    rows_per_batch: int
    batches: int
    is_durable: bool = True
    """Whether statelog's changes are stored; if not, they are dropped as early as options allow."""
    location: str | None = None
    """The place of the changes that are not dropped; None for the checkpointLocation."""

    measures_cpu: ClassVar[bool] = False
    """Whether the CPU time of its processes is measured, batch by batch."""
    output_mode: ClassVar[str] = "update"
    start_ms: ClassVar[int] = 0
    """Event time of the first batch."""
    advance_ms: ClassVar[int] = 1000
    """How much later the time of each other batch is."""

    @property
    def batches_to_check(self) -> int:
        """The batches, and some more that are checked without being measured."""
        return self.batches

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The number of the first row of each batch, and the one after its last."""
        rows = self.rows_per_batch
        return [(batch * rows, (batch + 1) * rows) for batch in range(self.batches_to_check)]

    def stored(self, recorder: Recorder) -> dict[str, Any]:
        """The options and the location of statelog's operator."""
        if self.is_durable:
            return {"options": statelog.Options(observer=recorder), "location": None}
        # A changeset goes from the task to the store, not through the driver; nobody will read it.
        options = statelog.Options(
            inline_budget_bytes=0, compression="none", observer=recorder, tuning=statelog.Tuning(materialization=False)
        )
        return {"options": options, "location": self.location}

    def source(self, session: SparkSession) -> DataFrame:
        """Its input: rows with successive numbers in `value`, and the batch's time in `timestamp`."""
        return rate_source(session, self.rows_per_batch, self.parallelism, self.start_ms, self.advance_ms)

    @abstractmethod
    def output(self, source: DataFrame, recorder: Recorder) -> DataFrame:
        """The query; the source has successive numbers in `value`, and the batch's time in `timestamp`."""

    def writer(self, output: DataFrame) -> DataStreamWriter:
        """The query's sink, which takes all rows and keeps none."""
        return output.writeStream.format("noop")

    def checks(self) -> list[Column]:
        """Sums over the output of a batch, which Spark makes on the way to the sink."""
        return count_checks()

    @abstractmethod
    def expected(self, session: SparkSession) -> Iterable[Checks]:
        """The right sums, by batch, computed without any state."""

    def measure(self, directory: Path) -> dict[str, Any]:
        """Durations and checkpoints by batch, and the files of the state."""
        session = self.session(directory)
        recorder = Recorder()
        source = self.source(session)
        files = Files(directory / "checkpoint" / ("state" if self.is_spark else "statelog"))

        used = Usage(os.getsid(0)) if self.measures_cpu else None
        cpu_s: dict[int, float] = {}

        def is_over(query: StreamingQuery) -> bool:
            files.look()
            last = last_batch(query)
            if used is not None and last not in cpu_s:
                used.look()
                cpu_s[last] = used.total()["cpu_s"]
            return last >= self.batches_to_check - 1

        side = self
        if not self.is_durable:
            statelog.register_store(SCHEME, DiscardingStore)
            side = dataclasses.replace(self, location=f"{SCHEME}:{directory}/dropped")
        output = side.output(source, recorder).observe("check", *self.checks())
        query = start_writer(side.writer(output), directory, self.output_mode)
        progress = stop_when(query, is_over)[: self.batches_to_check]
        files.look()
        require(self.side, progress, self.expected(session))
        session.stop()
        return {
            "batches": [{"batch": entry["batchId"], **entry["durationMs"]} for entry in progress[: self.batches]],
            "checkpoints": [dataclasses.asdict(each) for each in recorder.checkpoints if each.batch < self.batches],
            "cpu_s": cpu_s,
            **files.to_json(),
        }

    def figures(self, rounds: Sequence[dict[str, Any]], warm_up: int) -> dict[str, Any]:
        """Its fields, its rate by round, its durations over all rounds, and its files in the last one.

        `rounds` are what :meth:`measure` returned; their first batches are left out.
        """
        batches_ms = [
            [batch["triggerExecution"] for batch in one["batches"] if batch["batch"] >= warm_up] for one in rounds
        ]
        rates = [self.rows_per_batch * 1000 / statistics.median(durations) for durations in batches_ms]
        return {
            **dataclasses.asdict(self),
            "batches_left_out": warm_up,
            "rows_per_s": statistics.median(rates),
            "rows_per_s_by_round": rates,
            "batch_ms": summary(chain.from_iterable(batches_ms)),
            **self._cpu_figures(rounds, warm_up),
            **{name: rounds[-1][name] for name in _FILES},
            "by_round": list(rounds),
            **self._checkpoint_figures([each for one in rounds for each in one["checkpoints"]], warm_up),
        }

    def _cpu_figures(self, rounds: Sequence[dict[str, Any]], warm_up: int) -> dict[str, Any]:
        """The rows that a second of CPU time suffices for, by round; none if it was not measured."""
        if not self.measures_cpu:
            return {}
        rates: list[float] = []
        for one in rounds:
            # A batch may be over some time before its CPU time is read, and two batches may be over at once.
            read = {batch: cpu_s for batch, cpu_s in one["cpu_s"].items() if batch >= warm_up - 1}
            first, last = min(read), max(read)
            rates.append((last - first) * self.rows_per_batch / (read[last] - read[first]))
        return {"rows_per_cpu_s": statistics.median(rates), "rows_per_cpu_s_by_round": rates}

    def _checkpoint_figures(self, checkpoints: Sequence[dict[str, Any]], warm_up: int) -> dict[str, Any]:
        """The figures of its checkpoints; none if it has no checkpoints."""
        measured = [each for each in checkpoints if each["batch"] >= warm_up]
        if not measured:
            return {}
        parts = {"subtask_ms": ("subtask_s",), "commit_ms": ("commit_s",), "checkpoint_ms": ("subtask_s", "commit_s")}
        changes = statistics.median(each["changes"] for each in measured)
        changed_bytes = statistics.median(each["changed_bytes"] for each in measured)
        return {
            "changed_keys_per_subtask": changes / self.parallelism,
            "changed_bytes_per_subtask": changed_bytes / self.parallelism,
            **{name: summary(1000 * sum(each[part] for part in of) for each in measured) for name, of in parts.items()},
        }


def run_once(sides: Iterable[Side], place: Path) -> dict[str, dict[str, Any]]:
    """The measurements of sides by their names, one after the other."""
    measured = alternate({side.side: partial(side.run, place) for side in sides})
    return {name: one for name, (one,) in measured.items()}


def compare(
    sides: Mapping[str, BatchSide], place: Path, rounds: int, warm_up: int | Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """The figures of sides that take turns; `warm_up` batches are left out, of all sides or by side."""
    left_out = dict.fromkeys(sides, warm_up) if isinstance(warm_up, int) else warm_up

    def run(name: str) -> dict[str, Any]:
        measured = sides[name].run(place)
        # All sides together may take long; whoever has to stop the benchmark has seen something.
        click.echo(f"    {sides[name].figures([measured], left_out[name])['rows_per_s']:,.0f} rows/s", err=True)
        return measured

    measured = alternate({name: partial(run, name) for name in sides}, rounds)
    return {name: side.figures(measured[name], left_out[name]) for name, side in sides.items()}


@dataclass(frozen=True, kw_only=True)
class PayloadSide(Side):
    """Keeps a payload per key: rows of successive keys until each has one, then of random ones.

    A key always has the same payload.
    """

    keys: int
    value_bytes: int
    skew: str
    rows_per_batch: int

    def rows(self, source: DataFrame) -> DataFrame:
        """Keys and payloads, from successive numbers in `value`."""
        return source.select(self._key("value")).select("key", payload("key", self.value_bytes))

    def output(self, source: DataFrame, options: statelog.Options) -> DataFrame:
        """The query."""
        return self.transform(self.rows(source), KeepPayload(), "key long, n long, found long", options)

    def expected(self, session: SparkSession, ranges: Iterable[tuple[int, int]]) -> Iterator[Checks]:
        """The checks of batches with these rows; `found` are the bytes of the payloads that were there before."""
        for keys, rows, counts in counted(row_keys(session, ranges, self._key("id")), self.keys):
            yield {**check_of(keys, counts), "found": self.value_bytes * int(np.count_nonzero(counts > rows))}

    def _key(self, number: str) -> Column:
        column = F.col(number)
        return F.when(column < self.keys, column).otherwise(skewed_key(self.keys, column, self.skew)).alias("key")


def rate_source(
    session: SparkSession, rows_per_batch: int, parallelism: int, start_ms: int = 0, advance_ms: int = 1000
) -> DataFrame:
    """Rows with successive numbers in `value`; their `timestamp` is `start_ms`, and later with every batch."""
    source = session.readStream.format("rate-micro-batch").option("rowsPerBatch", rows_per_batch)
    source = source.option("startTimestamp", start_ms).option("advanceMillisPerBatch", advance_ms)
    return source.option("numPartitions", parallelism).load()


def pseudo_random(below: int, *columns: Column) -> Column:
    """A number from 0 on that depends on some columns and looks random."""
    return F.pmod(F.xxhash64(*columns), F.lit(below))


def payload(column: str, value_bytes: int) -> Column:
    """So many bytes that depend on a column, do not compress, and are called ``payload``."""
    parts = range(-(-value_bytes // _DIGEST_BYTES))
    digests = [F.sha2(F.concat_ws("/", F.col(column).cast("string"), F.lit(part)), 256) for part in parts]
    return F.substring(F.unhex(F.concat(*digests)), 1, value_bytes).alias("payload")


def start(
    output: DataFrame, checks: Sequence[Column], directory: Path, mode: str = "update", every_s: float = 0
) -> StreamingQuery:
    """Start a query into the sink ``noop``, with sums over each batch's output on the way.

    A batch begins every so many seconds, or as soon as the one before is done.
    """
    return start_writer(output.observe("check", *checks).writeStream.format("noop"), directory, mode, every_s)


def start_writer(writer: DataStreamWriter, directory: Path, mode: str, every_s: float = 0) -> StreamingQuery:
    """Start a query into a sink; a batch begins every so many seconds, or as soon as the one before is done."""
    writer = writer.outputMode(mode).trigger(processingTime=f"{every_s} seconds")
    return writer.option("checkpointLocation", f"{directory}/checkpoint").start()


def last_progress(query: StreamingQuery) -> dict[str, Any]:
    """Spark's progress of the last batch that is done; empty if there is none."""
    last = query.lastProgress
    return {} if last is None else json.loads(last.json)


def last_batch(query: StreamingQuery) -> int:
    """The number of the last batch that is done; -1 if there is none."""
    return int(last_progress(query).get("batchId", -1))


def stop_when(
    query: StreamingQuery, is_over: Callable[[StreamingQuery], bool], poll_s: float = _POLL_S
) -> list[dict[str, Any]]:
    """Stop a query once it `is_over`, and return Spark's progress by batch; RuntimeError if it has failed."""
    while query.isActive and not is_over(query):
        time.sleep(poll_s)
    query.stop()
    if error := query.exception():
        raise RuntimeError(f"the query failed: {error}")
    return [json.loads(each.json) for each in query.recentProgress]


def begun_s(progress: dict[str, Any]) -> float:
    """When a batch began, seconds since the Unix epoch."""
    return datetime.fromisoformat(progress["timestamp"]).timestamp()


def ended_s(progress: dict[str, Any]) -> float:
    """When a batch was over, seconds since the Unix epoch."""
    return begun_s(progress) + float(progress["durationMs"]["triggerExecution"]) / 1000


def count_checks(*more: str) -> list[Column]:
    """The number of output rows, the sum of their n, and that of key times n, so that no n can go to another key."""
    sums = [F.sum(name).alias(name) for name in more]
    weighted = F.sum(F.col("key") * F.col("n")).alias("weighted")
    return [F.count(F.lit(1)).alias("keys"), F.sum("n").alias("total"), weighted, *sums]


def check_of(keys: Numbers, numbers: Numbers) -> Checks:
    """The right sums of :func:`count_checks` for an output of these keys and n."""
    return {"keys": len(keys), "total": int(numbers.sum()), "weighted": int((keys * numbers).sum())}


def require(side: str, progress: Iterable[dict[str, Any]], expected: Iterable[Checks], first: int = 0) -> None:
    """Compare the checks of successive batches with what they should be; RuntimeError if they differ."""
    for number, (entry, wanted) in enumerate(zip(progress, expected, strict=True), first):
        # A sum of no rows is null.
        found = {name: value or 0 for name, value in entry["observedMetrics"]["check"].items()}
        if entry["batchId"] != number or found != wanted:
            raise RuntimeError(
                f"{side}: batch {entry['batchId']} returned {found}; batch {number} should return {wanted}"
            )


def row_keys(session: SparkSession, ranges: Iterable[tuple[int, int]], key: Column) -> Iterator[Numbers]:
    """The keys of batches, which `key` makes of `id`; `ranges` are their first rows and the ones after their last."""
    return (session.range(first, end).select(key).toArrow().column(0).to_numpy() for first, end in ranges)


def counted(batches: Iterable[Numbers], below: int) -> Iterator[tuple[Numbers, Numbers, Numbers]]:
    """By batch: its distinct numbers, all `below` a limit, how often it has each, and how often all batches so far do.

    So a count lost or doubled anywhere shows in the next batch that has the number.
    """
    counts = np.zeros(below, np.int64)
    for batch in batches:
        numbers, rows = np.unique(batch, return_counts=True)
        counts[numbers] += rows
        yield numbers, rows, counts[numbers]


def expected_counts(session: SparkSession, ranges: Iterable[tuple[int, int]], keys: int, skew: str) -> Iterator[Checks]:
    """The checks of a count by key, by batch: for each key of a batch the number of its rows so far."""
    for changed, _, counts in counted(row_keys(session, ranges, skewed_key(keys, F.col("id"), skew)), keys):
        yield check_of(changed, counts)


class Files:
    """Files below a folder, looked at from time to time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, int] = {}
        self._live: dict[str, int] = {}

    def look(self) -> None:
        """Take down which files there are."""
        self._live = {}
        for folder, _, names in os.walk(self._folder):
            for path in (f"{folder}/{name}" for name in names if not name.endswith(".tmp")):
                with suppress(FileNotFoundError):  # removed since it was listed
                    self._live[path] = os.stat(path).st_size
        for path, size in self._live.items():
            self._seen[path] = max(size, self._seen.get(path, 0))

    def to_json(self) -> dict[str, int]:
        """Files at the last look, and those of any look."""
        return {
            "files_live": len(self._live),
            "bytes_live": sum(self._live.values()),
            "files_seen": len(self._seen),
            "bytes_seen": sum(self._seen.values()),
        }
