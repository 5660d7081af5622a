"""Operators without keys in real queries; above all FLIP-8's example, a source that keeps partitions and offsets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

import statelog
from statelog import ConfigurationError, OperatorContext, OperatorHandle, OperatorProcessor, Options, Step
from tests.spark.faults import KillAt, make_marker, wait_until
from tests.spark.support import REPOSITORY, Job

pytestmark = pytest.mark.spark

PARTITIONS = 4
PER_BATCH = 3
RECORDS = "partition long, offset long, word string, subtask long"


# ---- The document's example: partitions that are read like Kafka's ----


class PartitionReader(OperatorProcessor):
    """Reads some records of each partition that the subtask owns; its units of state are (partition, offset)."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def init(self, handle: OperatorHandle) -> None:
        self.units = handle.getListState("units", "partition long, offset long")

    def process(self, rows: Iterator[Row], context: OperatorContext) -> Iterator[Row]:
        units = list(self.units.get())
        if context.batchId == 0:
            owned = range(PARTITIONS)[context.subtaskIndex * PARTITIONS // context.parallelism :]
            units = [(partition, 0) for partition in owned[: PARTITIONS // context.parallelism]]
        for index, (partition, offset) in enumerate(units):
            words = Path(self._folder, f"{partition}.txt").read_text().split()[offset : offset + PER_BATCH]
            for number, word in enumerate(words, offset):
                yield Row(partition=partition, offset=number, word=word, subtask=context.subtaskIndex)
            units[index] = (partition, offset + len(words))
        self.units.update(units)


class UnionPartitionReader(PartitionReader):
    """The same with a union state: a subtask picks what is its own."""

    def init(self, handle: OperatorHandle) -> None:
        self.units = handle.getUnionListState("units", "partition long, offset long")

    def process(self, rows: Iterator[Row], context: OperatorContext) -> Iterator[Row]:
        if context.isRestored:
            units = [unit for unit in self.units.get() if unit[0] % context.parallelism == context.subtaskIndex]
            self.units.update(units)
        return super().process(rows, context)


@pytest.fixture
def partitions(tmp_path: Path) -> Path:
    """Four files of records, of different lengths."""
    folder = tmp_path / "partitions"
    folder.mkdir()
    for partition in range(PARTITIONS):
        words = [f"w{(7 * partition + number) % 11}" for number in range(20 + partition)]
        (folder / f"{partition}.txt").write_text("\n".join(words))
    return folder


def ticks(job: Job, count: int) -> Job:
    """Input that only drives the query: a file per batch."""
    return job.add([[{"tick": number}] for number in range(count)])


def read_partitions(
    job: Job, spark: SparkSession, processor: OperatorProcessor, parallelism: int, options: Options | None = None
) -> DataFrame:
    return statelog.process(
        job.read(spark, "tick long"), processor, RECORDS, uid="source", parallelism=parallelism, options=options
    )


def require_every_record_once(job: Job, partitions: Path, batches: int) -> None:
    """What was read is the beginning of each file, without gaps and in order."""
    found: dict[int, list[tuple[int, str]]] = {partition: [] for partition in range(PARTITIONS)}
    results = job.results()
    assert sorted(results) == list(range(batches))
    for _, rows in sorted(results.items()):
        for partition, offset, word, _ in rows:
            found[partition].append((offset, word))
    for partition, records in found.items():
        words = (partitions / f"{partition}.txt").read_text().split()
        assert records == list(enumerate(words[: PER_BATCH * batches])), f"partition {partition}"


def owners(job: Job, batch: int) -> dict[int, int]:
    """The subtask that read each partition."""
    return {row[0]: row[3] for row in job.results()[batch]}


LAYOUTS = {1: {0: 0, 1: 0, 2: 0, 3: 0}, 2: {0: 0, 1: 0, 2: 1, 3: 1}, 4: {0: 0, 1: 1, 2: 2, 3: 3}}


@pytest.mark.parametrize(
    "options", [Options(), Options(file_merging="within", inline_budget_bytes=0)], ids=["", "objects"]
)
def test_partitions_are_merged_and_split_as_the_document_says(
    spark: SparkSession, tmp_path: Path, partitions: Path, options: Options
) -> None:
    job = Job(tmp_path, uid="source")
    for leg, parallelism in enumerate((2, 1, 4)):
        ticks(job, 2)
        job.run(read_partitions(job, spark, PartitionReader(partitions), parallelism, options))
        for batch in (2 * leg, 2 * leg + 1):
            assert owners(job, batch) == LAYOUTS[parallelism]
    require_every_record_once(job, partitions, 6)


@pytest.mark.parametrize(("step", "parallelism"), [(Step.ACKING, 1), (Step.ACKED, 4)])
def test_a_killed_source_goes_on_with_another_parallelism(
    spark: SparkSession, tmp_path: Path, partitions: Path, step: Step, parallelism: int
) -> None:
    job = ticks(Job(tmp_path, uid="source"), 3)
    kill = KillAt(step, 1, make_marker(tmp_path / "kill"))
    text = job.fail(read_partitions(job, spark, PartitionReader(partitions), 2, Options(observer=kill)))
    assert "Python worker exited unexpectedly" in text
    job.run(read_partitions(job, spark, PartitionReader(partitions), parallelism))
    require_every_record_once(job, partitions, 3)
    assert [owners(job, batch) for batch in range(3)] == [LAYOUTS[2], LAYOUTS[parallelism], LAYOUTS[parallelism]]


def test_union_state_lets_the_subtasks_choose(spark: SparkSession, tmp_path: Path, partitions: Path) -> None:
    job = Job(tmp_path, uid="source")
    for leg, parallelism in enumerate((2, 1, 4, 4)):
        ticks(job, 1)
        job.run(read_partitions(job, spark, UnionPartitionReader(partitions), parallelism))
        if leg:
            assert owners(job, leg) == {partition: partition % parallelism for partition in range(PARTITIONS)}
    require_every_record_once(job, partitions, 4)


class CountWords(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "count long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        (count,) = self._count.get() or (0,)
        count += sum(1 for _ in rows)
        self._count.update((count,))
        yield Row(word=key[0], count=count)

    def close(self) -> None:
        pass


def test_together_with_keyed_state(spark: SparkSession, tmp_path: Path, partitions: Path) -> None:
    job = Job(tmp_path)

    def plan(first: int, second: int, options: Options | None = None) -> DataFrame:
        records = read_partitions(job, spark, PartitionReader(partitions), first, options)
        return statelog.key_by(records, "word", uid="words", parallelism=second).transformWithState(
            CountWords(), "word string, count long", "update", "None"
        )

    ticks(job, 2)
    job.run(plan(2, 2))
    ticks(job, 1)
    kill = KillAt(Step.ACKED, 2, make_marker(tmp_path / "kill"))
    job.fail(plan(4, 1, Options(observer=kill)))
    ticks(job, 1)
    job.run(plan(1, 3))

    counts: Counter[str] = Counter()
    for batch in range(4):
        read = [
            word
            for partition in range(PARTITIONS)
            for word in (partitions / f"{partition}.txt").read_text().split()[PER_BATCH * batch :][:PER_BATCH]
        ]
        counts.update(read)
        assert job.results()[batch] == sorted([word, counts[word]] for word in set(read)), f"batch {batch}"
    assert sorted(path.name for path in (job.checkpoint / "statelog").iterdir()) == ["log"]


def test_example_program_reads_every_record_once(tmp_path: Path) -> None:
    options = ["--lines", "10", "--max-lines", "3"]
    example = subprocess.run(
        [sys.executable, "-m", "examples.partitioned_source", *options],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=250,
        check=True,
    )
    assert "parallelism 2\n  S1: KP1, KP2\n  S2: KP3, KP4\nparallelism 1\n" in example.stdout
    assert "  S3: KP3\n  S4: KP4\n40 records, each read exactly once" in example.stdout
    assert list(tmp_path.glob("statelog-source-*")) == []


# ---- Broadcast state ----


class Convert(OperatorProcessor):
    """Converts amounts by the rates that came before or with them, and says what it saw."""

    def init(self, handle: OperatorHandle) -> None:
        self.rates = handle.getBroadcastState("rates", "currency string", "rate double, changes array<double>")

    def processBroadcast(self, rows: Iterator[Row], context: OperatorContext) -> None:
        for row in rows:
            before = self.rates.get((row.currency,)) or (0.0, [])
            self.rates.put((row.currency,), (row.rate, [*before[1], row.rate]))

    def process(self, rows: Iterator[Row], context: OperatorContext) -> Iterator[Row]:
        known = json.dumps(sorted([key[0], len(value[1])] for key, value in self.rates.items()))
        yield Row(id=-1 - context.subtaskIndex, euros=None, known=known)
        for row in rows:
            rate = self.rates.get((row["cur`rency"],))
            yield Row(id=row.id, euros=None if rate is None else row.amount * rate[0], known="")


def convert(job: Job, rates: Job, spark: SparkSession, parallelism: int, processor: Any = None) -> DataFrame:
    return statelog.process(
        job.read(spark, "id long, `cur``rency` string, amount double"),
        processor or Convert(),
        "id long, euros double, known string",
        parallelism=parallelism,
        broadcast=rates.read(spark, "currency string, rate double"),
    )


@pytest.mark.smoke
def test_every_subtask_has_the_broadcast_state(spark: SparkSession, tmp_path: Path) -> None:
    job, rates = Job(tmp_path), Job(tmp_path / "rates")
    rates.root.mkdir()
    payments: list[dict[str, Any]] = [
        {"id": number, "cur`rency": "ABC"[number % 3], "amount": float(number)} for number in range(30)
    ]
    # Batch 0: both inputs; 1: only payments; 2: only rates, one of them twice; 3: only payments.
    legs = [
        (payments[:10], [("A", 2.0), ("B", 3.0)], 2),
        (payments[10:20], [], 3),
        ([], [("B", 5.0), ("C", 7.0), ("C", 7.0)], 1),
        (payments[20:], [], 4),
    ]
    known: dict[str, list[float]] = {}
    for batch, (rows, changes, parallelism) in enumerate(legs):
        if rows:
            job.add([rows])
        if changes:
            rates.add([[{"currency": currency, "rate": rate} for currency, rate in changes]])
        job.run(convert(job, rates, spark, parallelism))
        for currency, rate in changes:
            known.setdefault(currency, []).append(rate)
        expected: list[list[Any]] = [
            [-1 - subtask, None, json.dumps([[name, len(held)] for name, held in sorted(known.items())])]
            for subtask in range(parallelism)
        ]
        for row in rows:
            rate_now = known.get(row["cur`rency"])
            expected.append([row["id"], row["amount"] * rate_now[-1] if rate_now else None, ""])
        assert job.results()[batch] == sorted(expected, key=lambda row: row[0])


class WritesInProcess(Convert):
    def process(self, rows: Iterator[Row], context: OperatorContext) -> Iterator[Row]:
        self.rates.put(("A",), (1.0, []))
        return iter([])


class GoesByTheSubtask(Convert):
    def processBroadcast(self, rows: Iterator[Row], context: OperatorContext) -> None:
        self.rates.put(("A",), (float(context.subtaskIndex), []))


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (WritesInProcess(), ["[state-usage]", "process() failed at subtask", "'rates' was written in process()"]),
        (GoesByTheSubtask(), ["[copies-differ]", "broadcast state 'rates' differs between subtasks 0 and"]),
    ],
    ids=["written elsewhere", "different copies"],
)
def test_misused_broadcast_state_stops_the_query(
    spark: SparkSession, tmp_path: Path, processor: OperatorProcessor, words: list[str]
) -> None:
    job, rates = Job(tmp_path), Job(tmp_path / "rates")
    rates.root.mkdir()
    job.add([[{"id": 1, "cur`rency": "A", "amount": 2.0}]])
    rates.add([[{"currency": "A", "rate": 4.0}]])
    text = job.fail(convert(job, rates, spark, 2, processor))
    for word in ["operator 'main'", *words]:
        assert word in text
    job.run(convert(job, rates, spark, 3))
    assert [1, 8.0, ""] in job.results()[0]


# ---- Rows and subtasks ----


class Show(OperatorProcessor):
    def init(self, handle: OperatorHandle) -> None:
        self.seen = handle.getListState("seen", "count long, at timestamp, tags map<string, long>")

    def process(self, rows: Iterator[Row], context: OperatorContext) -> Iterator[Row]:
        assert (context.isRestored, context.isRedistributed) == (False, False)
        assert list(self.seen.get()) == []
        count = 0
        for row in rows:
            count += 1
            yield Row(subtask=context.subtaskIndex, id=row.id)
        self.seen.add((count, None, {"count": count}))
        yield Row(subtask=context.subtaskIndex, id=-count)


def test_a_batch_dataframe_starts_empty_and_keeps_nothing(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.range(2000).selectExpr("id", "map('a', id) AS `odd name`", "array(struct(map(id, 'x'))) AS `n.e`")
    doubled = rows.union(rows)
    location = tmp_path / "state"
    for parallelism in (1, 4):
        df = statelog.process(doubled, Show(), "subtask long, id long", parallelism=parallelism, location=str(location))
        found = [tuple(row) for row in df.collect()]
        placed = [(subtask, number) for subtask, number in found if number >= 0]
        assert Counter(number for _, number in placed) == Counter({number: 2 for number in range(2000)})
        assert len(set(placed)) == 2000, "equal rows go to one subtask"
        counts = sorted(-number for _, number in found if number < 0)
        assert len(counts) == parallelism
        assert counts[0] > 0.8 * 4000 / parallelism, "rows are spread evenly"
        assert sorted(df.collect()) == sorted(found), "and every time in the same way"
    assert not location.exists()


class NoBroadcast(Show):
    pass


class InitFails(Show):
    def init(self, handle: OperatorHandle) -> None:
        raise KeyError("DATABASE_URL")


class ReadsInInit(Show):
    def init(self, handle: OperatorHandle) -> None:
        handle.getListState("seen", "count long").get()


class DeclaredTwice(Show):
    def init(self, handle: OperatorHandle) -> None:
        handle.getListState("seen", "count long")
        handle.getUnionListState("seen", "count long")


class OddType(Show):
    def init(self, handle: OperatorHandle) -> None:
        handle.getBroadcastState("seen", "key map<string, long>", "count long")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda df: {"processor": Show}, ["an object, not a class", "statelog.OperatorProcessor"]),
        (lambda df: {"processor": CountWords()}, ["statelog.OperatorProcessor", "key_by"]),
        (lambda df: {"processor": InitFails()}, ["InitFails", "DATABASE_URL", "on the driver"]),
        (lambda df: {"processor": ReadsInInit()}, ["state 'seen' is used in init() or close() (get)"]),
        (lambda df: {"processor": DeclaredTwice()}, ["'seen' is declared twice"]),
        (lambda df: {"processor": OddType()}, ["map key of state 'seen'", "cannot be a key"]),
        (lambda df: {"broadcast": df}, ["has no processBroadcast method"]),
        (lambda df: {"broadcast": df.sparkSession.readStream.format("rate").load()}, ["but broadcast is a streaming"]),
        (lambda df: {"outputMode": "sometimes"}, ["'sometimes'", "'append'"]),
        (lambda df: {"df": 5}, ["takes a DataFrame, not int"]),
    ],
    ids=lambda value: None,
)
def test_what_cannot_run_is_refused_when_the_query_is_built(
    spark: SparkSession, change: Callable[[DataFrame], dict[str, Any]], words: list[str]
) -> None:
    df = spark.range(3).toDF("id")
    arguments = {"df": df, "processor": Show(), "outputStructType": "subtask long, id long", **change(df)}
    with pytest.raises((ConfigurationError, statelog.ProcessorError)) as failure:
        statelog.process(**arguments)
    for word in words:
        assert word in str(failure.value)


class BadRow(Show):
    def process(self, rows: Iterator[Row], context: OperatorContext) -> Iterator[Row]:
        yield Row(subtask="none", id=1)


def test_output_that_does_not_fit_is_an_error(spark: SparkSession) -> None:
    df = statelog.process(spark.range(3).toDF("id"), BadRow(), "subtask long, id long", parallelism=1)
    with pytest.raises(Exception, match="process.. failed at subtask 0: process.. returned str 'none' for output"):
        df.collect()


class Ticks(OperatorProcessor):
    """Returns a row per batch, whatever comes in."""

    def init(self, handle: Any) -> None:
        pass

    def process(self, rows: Iterator[Row], context: OperatorContext) -> Iterator[Row]:
        yield Row(batch=context.batchId)


def test_a_heartbeat_runs_an_operator_without_data(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    (tmp_path / "input/first.json").write_text('{"n": 1}')
    source = spark.readStream.schema("n long").json(str(tmp_path / "input"))
    options = Options(heartbeat_s=0.2)
    ticks = statelog.process(source, Ticks(), "batch long", parallelism=1, options=options)
    seen: set[int] = set()
    query = (
        ticks.writeStream.foreachBatch(lambda rows, _: seen.update(row.batch for row in rows.collect()))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        wait_until(lambda: len(seen) >= 3, "batches without data", 120)
    finally:
        query.stop()
