"""Batches without data: watermarks that have advanced and heartbeats that are due, as Spark's offsets show them."""

from __future__ import annotations

import base64
import contextlib
import datetime
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming import StatefulProcessor, StreamingQuery

import statelog
from statelog import Options, Watermark
from statelog.clock import SystemClock
from statelog.spark.driver import internals, query_clocks
from statelog.spark.driver.endpoint import require_endpoint
from statelog.spark.plan import plan
from statelog.spark.source.clock_source import ClockReader, source_class
from tests.spark.faults import wait_until
from tests.spark.support import IS_ONE_BATCH, ForEachBatch, Job, await_end, start_until_idle

pytestmark = pytest.mark.spark

START = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
START_MS = int(START.timestamp() * 1000)
NO_DATA_BATCHES = "spark.sql.streaming.noDataMicroBatches.enabled"


class Remind(StatefulProcessor):
    """Registers a timer 10 seconds after each row's event time, and says when one has fired."""

    def init(self, handle: Any) -> None:
        self._handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self._handle.registerTimer(int(row.at.timestamp() * 1000) + 10_000)
        yield from ()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        due_ms = expiredTimerInfo.getExpiryTimeInMs()
        yield Row(user=key[0], at=START + datetime.timedelta(milliseconds=due_ms - START_MS))

    def close(self) -> None:
        pass


class Echo(StatefulProcessor):
    """Returns the rows."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        yield from rows

    def close(self) -> None:
        pass


class Later(StatefulProcessor):
    """Registers a timer half a second after the processing time, for each user once."""

    def init(self, handle: Any) -> None:
        self._handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 500)
        yield Row(user=key[0], what="row")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(user=key[0], what="timer")

    def close(self) -> None:
        pass


def events(*batches: dict[str, int]) -> list[list[dict[str, Any]]]:
    """Rows of some users, each with the second of its event time; a dictionary per batch."""
    return [
        [{"user": user, "at": (START + datetime.timedelta(seconds=at)).isoformat()} for user, at in batch.items()]
        for batch in batches
    ]


def read(job: Job, spark: SparkSession) -> DataFrame:
    return job.read(spark, "user string, at timestamp")


def reminders(
    job: Job,
    spark: SparkSession,
    *,
    rows: DataFrame | None = None,
    uid: str | None = None,
    watermark: Watermark | None = None,
    options: Options | None = None,
) -> DataFrame:
    """The reminders of all events: by Spark's watermark, or by one of the operator's own."""
    if rows is None:
        rows = read(job, spark)
        rows = rows if watermark else rows.withWatermark("at", "5 seconds")
    return statelog.key_by(
        rows, "user", uid=uid, parallelism=2, options=options, watermark=watermark
    ).transformWithState(Remind(), "user string, at timestamp", "append", "EventTime", eventTimeColumnName="at")


def model(batches: dict[int, dict[str, int]]) -> dict[int, list[list[Any]]]:
    """Who is reminded in which batch, and when it was due: the watermark is the largest second so far less 5."""
    waiting: set[tuple[str, int]] = set()
    largest, answers = 0, {}
    for number, batch in sorted(batches.items()):
        watermark = largest - 5
        waiting |= {(user, at + 10) for user, at in batch.items()}
        fired = sorted(timer for timer in waiting if timer[1] < watermark)
        waiting -= set(fired)
        answers[number] = [[user, due] for user, due in fired]
        largest = max([largest, *batch.values()])
    return answers


def save(job: Job, df: DataFrame, batch: int) -> None:
    rows = sorted([row.user, int(row.at.timestamp() * 1000 - START_MS) // 1000] for row in df.collect())
    job.write_output(batch, rows)


def start(job: Job, df: DataFrame, for_each_batch: ForEachBatch) -> StreamingQuery:
    writer = df.writeStream.outputMode("update").foreachBatch(for_each_batch)
    return start_until_idle(writer.option("checkpointLocation", str(job.checkpoint)))


def run(job: Job, df: DataFrame) -> StreamingQuery:
    query = start(job, df, lambda rows, batch: save(job, rows, batch))
    await_end(query)
    return query


def offsets(job: Job) -> list[tuple[int, list[Any]]]:
    """Watermark, in seconds, and sources' offsets of every batch; -1 is not a watermark."""
    found = []
    for path in sorted((job.checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name)):
        _, times, *sources = path.read_text().splitlines()
        watermark_ms = json.loads(times)["batchWatermarkMs"]
        second = (watermark_ms - START_MS) // 1000 if watermark_ms else -1
        found.append((second, [json.loads(source) for source in sources]))
    return found


def watermarks(job: Job) -> list[int]:
    return [second for second, _ in offsets(job)]


FIRST = {0: {"a": 10, "b": 20}, 1: {"a": 40}}
THEN = {3: {"c": 100}}


@pytest.mark.parametrize("own", [False, True], ids=["watermark of Spark", "watermark of its own"])
def test_timers_fire_in_a_batch_without_data(spark: SparkSession, tmp_path: Path, own: bool) -> None:
    job = Job(tmp_path).add(events(*FIRST.values()))
    operator = reminders(job, spark, watermark=Watermark("at", 5000) if own else None)
    run(job, operator)
    assert job.results() == model(FIRST | {2: {}}) == {0: [], 1: [], 2: [["a", 20], ["b", 30]]}
    assert len({json.dumps(sources[0]) for _, sources in offsets(job)}) == 2, "the last batch had no data"

    run(job, operator)
    assert len(offsets(job)) == 3, "nothing has changed, so nothing is run"
    job.add(events(*THEN.values()))
    run(job, operator)
    assert job.results() == model(FIRST | {2: {}} | THEN | {4: {}})
    assert job.results()[4] == [["a", 50]]
    if not own:
        assert watermarks(job) == [-1, 15, 35, 35, 95]


@pytest.mark.skipif(not IS_ONE_BATCH, reason="Spark 4.2 and later run all batches")
def test_available_now_is_one_micro_batch_before_spark_4_2(spark: SparkSession, tmp_path: Path) -> None:
    """And the batch without data comes at the next start."""
    job = Job(tmp_path).add(events(*FIRST.values()))
    operator = reminders(job, spark)
    for batches in (1, 2, 2):
        await_end(job.start(operator, lambda rows, batch: save(job, rows, batch)))
        assert len(offsets(job)) == batches
    assert job.results() == {0: [], 1: [["a", 20], ["b", 30]]}


@pytest.mark.parametrize("own", [False, True], ids=["watermark of Spark", "watermark of its own"])
def test_batches_without_data_can_be_switched_off(spark: SparkSession, tmp_path: Path, own: bool) -> None:
    job = Job(tmp_path).add(events(*FIRST.values()))
    operator = reminders(job, spark, watermark=Watermark("at", 5000) if own else None)
    spark.conf.set(NO_DATA_BATCHES, "false")
    try:
        run(job, operator)
    finally:
        spark.conf.unset(NO_DATA_BATCHES)
    assert job.results() == model(FIRST)

    run(job, operator)
    assert job.results() == model(FIRST | {2: {}}), "a restart makes up for a batch that was not run"


def test_batch_without_data_is_repeated_after_a_crash(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(events(*FIRST.values()))
    operator = reminders(job, spark)
    run(job, operator)
    before = offsets(job), job.results()
    for file in ("2", ".2.crc"):
        (job.checkpoint / "commits" / file).unlink()
    (job.output / "2.json").unlink()

    run(job, operator)
    assert (offsets(job), job.results()) == before


def test_chained_operators_share_a_clock(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(events(*FIRST.values(), *THEN.values()))
    first = reminders(job, spark, uid="first")
    run(job, reminders(job, spark, rows=first, uid="second"))

    assert watermarks(job) == [-1, 15, 35, 95]
    assert all(len(sources) == 2 for _, sources in offsets(job))
    # The first operator's reminders are events of the second one: its own come 10 seconds after them.
    assert sorted(row for rows in job.results().values() for row in rows) == [["a", 30], ["a", 60], ["b", 40]]


def test_parallel_operators_in_one_query(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Spark plans the shuffles of the operators in threads of their own, and does not keep them from calling the
    # clock's process at once and taking each other's answers: a batch must plan it once, however slow it is.
    planned = tmp_path / "planned"

    def slow_source(host: str, port: int, secret: bytes, certificate: bytes) -> type[DataSource]:
        class SlowReader(ClockReader):
            def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
                with planned.open("a") as lines:
                    lines.write(f"{end['tick']}\n")
                time.sleep(0.5)
                return super().partitions(start, end)

        class SlowSource(source_class(host, port, secret, certificate)):  # type: ignore[misc]  # a class made by a function
            def streamReader(self, schema: Any) -> DataSourceStreamReader:
                return SlowReader(host, port, secret)

        return SlowSource

    monkeypatch.setattr(plan, "source_class", slow_source)
    session = spark.newSession()
    job = Job(tmp_path).add(events(*FIRST.values()))
    rows = read(job, session).withWatermark("at", "5 seconds")
    left, right = (reminders(job, session, rows=rows, uid=uid).repartition(2) for uid in ("left", "right"))
    run(job, left.union(right))

    ticks = planned.read_text().split()
    assert ticks == sorted(set(ticks))
    assert watermarks(job) == [-1, 15, 35]
    expected = model(FIRST | {2: {}})
    assert job.results() == {batch: sorted(rows * 2) for batch, rows in expected.items()}


@pytest.mark.parametrize("filtered", [False, True], ids=["two equal branches", "a filtered branch"])
def test_adaptive_execution_does_not_stop_the_watermark_of_an_output_that_is_used_twice(
    spark: SparkSession, tmp_path: Path, filtered: bool
) -> None:
    """It left out what had no rows, and with it what Spark asks for the watermark."""
    assert spark.conf.get("spark.sql.adaptive.enabled") == "true"
    job = Job(tmp_path).add(events(*FIRST.values()))
    rows = reminders(job, spark)
    other = rows.filter("user != 'nobody'") if filtered else rows
    run(job, rows.repartition(2).union(other.repartition(2)))

    assert watermarks(job) == [-1, 15, 35]
    assert job.results() == {batch: sorted(rows * 2) for batch, rows in model(FIRST | {2: {}}).items()}


def run_without_adaptive_execution(job: Job, df: DataFrame) -> None:
    """The query itself is planned without; what ``foreachBatch`` does with its rows, with it, as the user has set."""

    def write(rows: DataFrame, batch: int) -> None:
        assert rows.sparkSession.conf.get("spark.sql.adaptive.enabled") == "true"
        save(job, rows, batch)

    assert df.sparkSession.conf.get("spark.sql.adaptive.enabled") == "true"
    query: Any = start(job, df, write)
    await_end(query)
    plan = str(query._jsq.streamingQuery().lastExecution().executedPlan())
    assert "Exchange" in plan
    assert "AdaptiveSparkPlan" not in plan


def test_operators_side_by_side_whose_exchanges_are_not_reused(spark: SparkSession, tmp_path: Path) -> None:
    """Each plans the clock then; at once, if adaptive execution did it, and they took each other's answers."""
    session = spark.newSession()
    session.conf.set("spark.sql.exchange.reuse", "false")
    job = Job(tmp_path).add(events(*FIRST.values()))
    rows = read(job, session).withWatermark("at", "5 seconds")
    frames = [reminders(job, session, rows=rows, uid=uid).repartition(2) for uid in ("one", "two", "three")]
    run_without_adaptive_execution(job, frames[0].union(frames[1]).union(frames[2]))

    assert watermarks(job) == [-1, 15, 35]
    assert job.results() == {batch: sorted(rows * 3) for batch, rows in model(FIRST | {2: {}}).items()}


class TwoEvents(DataSource):
    """A streaming source written in Python, which has two rows."""

    @classmethod
    def name(cls) -> str:
        return "two-events"

    def schema(self) -> str:
        return "user string, at timestamp"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return TwoEventsReader()


class TwoEventsReader(DataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:
        return {"rows": 0}

    def latestOffset(self) -> dict[str, int]:
        return {"rows": 2}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        return iter([("a", START + datetime.timedelta(seconds=10)), ("b", START + datetime.timedelta(seconds=20))])


def test_operators_side_by_side_over_a_python_source(spark: SparkSession, tmp_path: Path) -> None:
    """Adaptive execution would plan its reads at once."""
    session = spark.newSession()
    session.dataSource.register(TwoEvents)
    job = Job(tmp_path)
    rows = session.readStream.format("two-events").load().withWatermark("at", "5 seconds")
    frames = [
        statelog.key_by(rows, "user", uid=uid, parallelism=2).transformWithState(
            Echo(), "user string, at timestamp", "append", "None"
        )
        for uid in ("one", "two", "three")
    ]
    run_without_adaptive_execution(
        job, frames[0].repartition(2).union(frames[1].repartition(2)).union(frames[2].repartition(2))
    )
    assert job.results()[0] == sorted([["a", 10], ["b", 20]] * 3)


def test_each_session_has_its_clock(spark: SparkSession, tmp_path: Path) -> None:
    for name, session in ("one", spark), ("other", spark.newSession()):
        job = Job(tmp_path / name).add(events(*FIRST.values()))
        run(job, reminders(job, session))
        assert job.results() == model(FIRST | {2: {}})


def test_one_dataframe_in_two_queries_at_once(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(events(*FIRST.values()))
    other = job.elsewhere("other")
    operator = reminders(job, spark)
    first = start(job, operator, lambda rows, batch: save(job, rows, batch))
    run(other, operator)
    await_end(first)

    assert job.results() == other.results() == model(FIRST | {2: {}})


def test_processes_of_queries_that_start_together_start_one_after_the_other(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark waits 10 seconds for each, however many there are."""
    counts: list[int] = []
    wait = query_clocks.ClockStarts.wait

    def noted(starts: query_clocks.ClockStarts, query: StreamingQuery) -> None:
        wait(starts, query)
        counts.append(sum(one.isActive and not internals.has_sources(one) for one in spark.streams.active))

    monkeypatch.setattr(query_clocks.ClockStarts, "wait", noted)
    jobs = [Job(tmp_path / str(number)).add(events(*FIRST.values())) for number in range(4)]
    frames = [reminders(job, spark) for job in jobs]
    queries = [start(job, frame, partial(save, job)) for job, frame in zip(jobs, frames, strict=True)]
    for query in queries:
        await_end(query)
        assert internals.has_sources(query)
    assert counts == [1] * 4, "only the query that is about to start has no sources yet"
    assert all(job.results() == model(FIRST | {2: {}}) for job in jobs)


def test_idle_query_runs_no_batches(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(events(*FIRST.values()))
    query = continuous(job, reminders(job, spark))
    try:
        wait_until(lambda: 2 in results(job), "the batch without data", 60)
        time.sleep(1.5)
    finally:
        query.stop()
    assert watermarks(job) == [-1, 15, 35]


@pytest.mark.skipif(IS_ONE_BATCH, reason="before Spark 4.2 availableNow is one micro-batch")
@pytest.mark.parametrize("own", [False, True], ids=["watermark of Spark", "watermark of its own"])
def test_query_whose_batches_do_not_run_the_operator_ends(spark: SparkSession, tmp_path: Path, own: bool) -> None:
    job = Job(tmp_path).add(events(*FIRST.values()))
    operator = reminders(job, spark, watermark=Watermark("at", 5000) if own else None)
    query = start(job, operator, lambda rows, batch: None if batch else save(job, rows, batch))
    await_end(query)
    # The batch that did not run moved no watermark, so none follows it.
    assert len(offsets(job)) == 2


# ---- Heartbeats ----


def later(job: Job, spark: SparkSession, heartbeat_s: float | None) -> DataFrame:
    return statelog.key_by(
        read(job, spark), "user", parallelism=2, options=Options(heartbeat_s=heartbeat_s)
    ).transformWithState(Later(), "user string, what string", "append", "ProcessingTime")


def continuous(job: Job, df: DataFrame, timestamps: bool = True) -> StreamingQuery:
    def write(rows: DataFrame, batch: int) -> None:
        if timestamps:
            save(job, rows, batch)
        else:
            job.save(rows, batch)

    return df.writeStream.foreachBatch(write).option("checkpointLocation", str(job.checkpoint)).start()


def results(job: Job) -> dict[int, Any]:
    return job.results() if job.output.exists() else {}


def test_heartbeat_fires_timers_in_processing_time(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(events({"a": 1, "b": 1}))
    query = continuous(job, later(job, spark, 0.4), timestamps=False)
    try:
        wait_until(lambda: len(results(job)) > 3, "heartbeats", 60)
    finally:
        query.stop()
    found = results(job)
    assert found.pop(0) == [["a", "row"], ["b", "row"]]
    assert sorted(row for rows in found.values() for row in rows) == [["a", "timer"], ["b", "timer"]]
    assert [sources[0] for _, sources in offsets(job)] == [{"logOffset": 0}] * len(offsets(job))
    times = [json.loads(path.read_text().splitlines()[1])["batchTimestampMs"] for path in batch_files(job)]
    assert all(after - before >= 400 for before, after in pairwise(times))

    # A query that is to end does: only the batch that was not finished is run.
    await_end(job.start(later(job, spark, 0.4), job.save))

    # Started again it beats before there is any data, and its interval may differ.
    done = len(offsets(job))
    query = continuous(job, later(job, spark, 0.1), timestamps=False)
    try:
        wait_until(lambda: len(offsets(job)) > done + 1, "heartbeats after a restart", 60)
    finally:
        query.stop()


def test_heartbeat_goes_on_when_the_driver_s_clock_is_put_back(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is for the driver then: Spark's time of the last batch is an hour ahead of its own."""
    job = Job(tmp_path).add(events({"a": 1}))
    query = continuous(job, later(job, spark, 0.4), timestamps=False)
    try:
        wait_until(lambda: len(results(job)) > 1, "the first heartbeat", 60)
        monkeypatch.setattr(SystemClock, "now_s", lambda clock: time.time() - 3600)
        done = len(results(job))
        wait_until(lambda: len(results(job)) > done + 2, "heartbeats", 60)
    finally:
        query.stop()


def batch_files(job: Job) -> list[Path]:
    return sorted((job.checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))


@pytest.mark.parametrize("version", ["1", "2"])
def test_heartbeat_may_come_and_go(
    spark: SparkSession, tmp_path: Path, configured: Callable[[str, str], None], version: str
) -> None:
    """Whether the last batch was finished or not; the other source continues where it was."""
    configured("spark.sql.streaming.offsetLog.formatVersion", version)
    job = Job(tmp_path).add(events({"a": 1}))

    def lines() -> int:
        """Number of sources in the newest entry of the offset log."""
        return len(batch_files(job)[-1].read_text().splitlines()) - 2

    def broken_sink(rows: DataFrame, batch: int) -> None:
        rows.collect()
        raise RuntimeError("the sink is broken")

    for number, (heartbeat_s, sources) in enumerate([(None, 1), (10, 2), (None, 1), (10, 2), (10, 2)]):
        job.add(events({"b": number}))
        if number in (1, 2):  # the batch that is repeated has an entry without the change
            assert "broken" in job.fail(later(job, spark, heartbeat_s), broken_sink)
            job.add(events({"c": number}))
            heartbeat_s, sources = (None, 1) if sources == 2 else (10, 2)
        await_end(start(job, later(job, spark, heartbeat_s), job.save))
        assert lines() == sources
    read = [row for rows in results(job).values() for row in rows if row[1] == "row"]
    assert sorted(read) == [["a", "row"], *[["b", "row"]] * 5, *[["c", "row"]] * 2]


def test_heartbeat_with_event_time_may_come_and_go(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(events(*FIRST.values()))
    run(job, reminders(job, spark))
    done = len(offsets(job))
    query = continuous(job, reminders(job, spark, options=Options(heartbeat_s=0.2)))
    try:
        wait_until(lambda: len(offsets(job)) > done + 1, "heartbeats", 60)
    finally:
        query.stop()
    run(job, reminders(job, spark))
    assert set(watermarks(job)[done:]) == {35}


# ---- What the rest of the query sees of it ----


def test_secret_is_written_nowhere(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(events(*FIRST.values()))
    operator = reminders(job, spark)
    query = run(job, operator)
    secret = require_endpoint(spark)[1].secret
    forms = [secret, secret.hex().encode(), base64.b64encode(secret), str(secret).encode()]

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        operator.explain(True)
    assert "statelog-clock" in shown.getvalue()
    texts = [shown.getvalue().encode(), *(progress.json.encode() for progress in query.recentProgress)]
    texts += [path.read_bytes() for path in job.checkpoint.rglob("*") if path.is_file()]
    assert not any(form in text for form in forms for text in texts)


def test_columns_stay_as_they_are(spark: SparkSession, tmp_path: Path) -> None:
    types = [
        "boolean",
        "tinyint",
        "decimal(20,3)",
        "binary",
        "date",
        "timestamp_ntz",
        "array<struct<x: int>>",
        "map<string, array<int>>",
        "struct<a: int, `b c`: string>",
        "interval day to second",
        "string collate UTF8_LCASE",
    ]
    job = Job(tmp_path).add(events({"a": 1}))
    rows = read(job, spark).withWatermark("at", "5 seconds")
    for number, kind in enumerate(types):
        rows = rows.withColumn(f"column {number}", F.expr(f"cast(null as {kind})"))
    operator = statelog.key_by(rows, "user", parallelism=2).transformWithState(
        Remind(), "user string, at timestamp", "append", "EventTime"
    )
    run(job, operator)
    assert job.results() == {0: [], 1: []}


def test_number_of_rows_is_still_reported(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(events(*FIRST.values()))
    query = run(job, reminders(job, spark))
    reported = [(progress.batchId, progress.numInputRows) for progress in query.recentProgress]
    assert reported == [(0, 2), (1, 1), (2, 0)]
