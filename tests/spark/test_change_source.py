"""``spark.readStream.format("statelog")``: every change of a state once, beside its query and across restarts."""

from __future__ import annotations

import random
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import statelog
from statelog import StatelogError
from statelog.reading.consumer import OWNER
from statelog.spark.source.change_source import ChangeReader, SourceOptions
from tests.reading.changes_support import Rows, replayed
from tests.reading.changes_with_before_support import require_before
from tests.reading.story import STATES, Story
from tests.spark.support import IS_ONE_BATCH, Job, make_orders

FORGETFUL: dict[str, Any] = {
    "retained_checkpoints": 2,
    "materialization_interval_s": 0,
    "max_log_to_base": 0,
    "max_file_bytes": 4000,
    "log_min_age_s": 0,
}


class Feed:
    """A stream of changes, and the rows that it has written."""

    def __init__(self, spark: SparkSession, location: str, checkpoint: Path, **options: Any) -> None:
        spark.dataSource.register(statelog.StateSource)
        self._stream = spark.readStream.format("statelog").options(**{"show": "changes", **options}).load(location)
        self._checkpoint = checkpoint
        self._batches: dict[int, Rows] = {}
        self._has_rows = threading.Condition()

    def _write(self, df: DataFrame, number: int) -> None:
        rows = [row.asDict() for row in df.collect()]
        with self._has_rows:
            self._batches[number] = rows
            self._has_rows.notify_all()

    def start(self, **trigger: Any) -> StreamingQuery:
        writer = self._stream.writeStream.foreachBatch(self._write)
        writer = writer.option("checkpointLocation", str(self._checkpoint))
        return (writer.trigger(**trigger) if trigger else writer).start()

    def run(self, **trigger: Any) -> None:
        """Read the changes that are there."""
        self.start(**(trigger or {"availableNow": True})).awaitTermination()

    def fail(self) -> str:
        """Run, and return the error."""
        with pytest.raises(PySparkException) as error:
            self.run()
        return str(error.value)

    def wait_for(self, batch: int) -> None:
        """Wait until the changes of a batch are there."""
        with self._has_rows:
            assert self._has_rows.wait_for(lambda: batch in {row["batch"] for row in self.rows}, timeout=60)

    @property
    def sizes(self) -> list[int]:
        """How many batches each micro-batch had."""
        return [len({row["batch"] for row in rows}) for _, rows in sorted(self._batches.items())]

    @property
    def rows(self) -> Rows:
        """The rows by batch; within one a key's rows are in order."""
        found = [row for number in sorted(self._batches) for row in self._batches[number]]
        return sorted(found, key=lambda row: int(row["batch"]))


def require_all(feed: Feed, query: Story, state: str) -> None:
    """The changes are those of all batches but the newest, once each."""
    assert {row["batch"] for row in feed.rows} == set(range(len(query.models) - 1))
    assert replayed([], feed.rows, state) == STATES[state](query.models[-2])


@pytest.mark.parametrize("state", STATES)
def test_a_stream_goes_on_after_restarts(spark: SparkSession, tmp_path: Path, state: str) -> None:
    rng = random.Random(3)
    query = Story(tmp_path / "query", **FORGETFUL)
    query.run_batches(2, rng)
    feed = Feed(spark, query.location, tmp_path / "feed", state=state)
    feed.run()
    for parallelism in (3, 2, 5):
        query.start(parallelism)
        query.run_batches(7, rng)
        feed.run()
        require_all(feed, query, state)
    owners = [pin.owner for pin in statelog.list_pins(query.location) if pin.owner.startswith(OWNER)]
    assert len(owners) == 1


def test_a_stream_tells_what_was_before(spark: SparkSession, tmp_path: Path) -> None:
    rng = random.Random(11)
    query = Story(tmp_path / "query", **FORGETFUL)
    query.run_batches(2, rng)
    feed = Feed(spark, query.location, tmp_path / "feed", state="map", with_before="true", max_batch_bytes="9000")
    feed.run()
    for parallelism in (3, 2):
        query.start(parallelism)
        query.run_batches(5, rng)
        feed.run()
        require_all(feed, query, "map")
    require_before(query, feed.rows, "map")


def test_a_stream_follows_its_query(spark: SparkSession, tmp_path: Path) -> None:
    """The query is started again with other subtasks while the stream waits, and so is the stream."""
    rng = random.Random(4)
    query = Story(tmp_path / "query", **FORGETFUL)
    query.run_batches(2, rng)
    feed = Feed(spark, query.location, tmp_path / "feed", state="value")
    for parallelism in (3, 1):
        stream = feed.start()
        try:
            query.start(parallelism)
            for _ in range(3):
                query.run_batches(2, rng)
                feed.wait_for(len(query.models) - 2)
        finally:
            stream.stop()
        require_all(feed, query, "value")


@pytest.mark.skipif(IS_ONE_BATCH, reason="before Spark 4.2 availableNow is one micro-batch")
def test_a_stream_that_was_away_reads_on_in_small_steps(spark: SparkSession, tmp_path: Path) -> None:
    rng = random.Random(9)
    query = Story(tmp_path / "query", **FORGETFUL)
    query.run_batches(2, rng)
    options = {"state": "value", "max_batch_bytes": "1"}
    feed = Feed(spark, query.location, tmp_path / "feed", **options)
    feed.run()
    query.run_batches(3, rng)
    feed.run()
    assert feed.sizes == [1] * 4
    query.run_batches(2, rng)
    stream = feed.start()
    try:
        feed.wait_for(len(query.models) - 2)
    finally:
        stream.stop()
    feed.run()  # the stop may have come before the last micro-batch was committed
    assert feed.sizes == [1] * 6
    query.run_batches(3, rng)
    feed.run(once=True)
    assert feed.sizes == [*[1] * 6, 3], "this trigger wants everything"
    require_all(feed, query, "value")


def test_where_a_restarted_stream_was_is_no_reason_to_give_up_what_it_may_repeat(tmp_path: Path) -> None:
    """Spark tells a source the end of the last micro-batch, and then may repeat that micro-batch."""
    rng = random.Random(10)
    query = Story(tmp_path / "query", **FORGETFUL)
    query.run_batches(3, rng)
    options = SourceOptions.of({"path": query.location, "show": "changes", "state": "value"})
    first = ChangeReader(options, ["batch"])
    start = first.initialOffset()
    query.run_batches(3, rng)
    end = first.latestOffset(start)
    again = ChangeReader(options, ["batch"])
    assert again.partitions(end, end) == []
    query.run_batches(8, rng)
    batches = {changes.batch for part in again.partitions(start, end) for changes in part.changes}  # type: ignore[attr-defined]  # of our own partitions
    assert batches == set(range(start["batch"] + 1, end["batch"] + 1))


def test_with_last_the_committed_batch_comes_too(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", uid="ledger").add(make_orders(3, seed=1))
    job.run(job.ledger(spark, 2))
    [state, *_] = [info.state for info in statelog.list_states(job.checkpoint) if info.kind == "value"]
    feed = Feed(spark, str(job.checkpoint), tmp_path / "feed", uid="ledger", state=state, with_last="true")
    for leg in range(2):
        feed.run()
        batches = range(3 + 2 * leg)
        assert {row["batch"] for row in feed.rows} == set(batches)
        last = {row["key_user"]: row for row in feed.rows}
        found = {user: row["value_count"] for user, row in last.items() if row["operation"] == "put"}
        now = statelog.read_state(job.checkpoint, state=state).read_all().to_pylist()
        assert found == {row["key_user"]: row["value_count"] for row in now}
        job.add(make_orders(2, seed=2))
        job.run(job.ledger(spark, 3))


def test_a_stream_begins_after_a_batch_and_has_some_columns(spark: SparkSession, tmp_path: Path) -> None:
    query = Story(tmp_path / "query")
    query.run_batches(6, random.Random(5))
    feed = Feed(spark, query.location, tmp_path / "feed", state="value", after="2", columns="batch,value_field")
    feed.run()
    assert {row["batch"] for row in feed.rows} == {3, 4}
    assert all(list(row) == ["batch", "value_field"] for row in feed.rows)


def test_a_stream_says_that_changes_are_gone(spark: SparkSession, tmp_path: Path) -> None:
    rng = random.Random(6)
    query = Story(tmp_path / "query", **FORGETFUL)
    query.run_batches(3, rng)
    feed = Feed(spark, query.location, tmp_path / "feed", state="value")
    feed.run()
    [pin] = [pin for pin in statelog.list_pins(query.location) if pin.owner.startswith(OWNER)]
    statelog.unpin(query.location, pin.name)
    query.run_batches(8, rng)
    assert "the changes of batch 2 are gone" in feed.fail()


def test_a_stream_says_that_its_query_was_begun_anew(spark: SparkSession, tmp_path: Path) -> None:
    rng = random.Random(7)
    query = Story(tmp_path / "query")
    query.run_batches(4, rng)
    feed = Feed(spark, query.location, tmp_path / "feed", state="value")
    feed.run()
    (tmp_path / "query").rename(tmp_path / "old")
    anew = Story(tmp_path / "query")
    anew.start()
    anew.run_batches(6, rng)
    assert "batch 2 was replaced" in feed.fail()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"show": "rows"}, "Only changes are a stream: option('show', 'changes')"),
        ({"at": "2"}, "at cannot be used with show=changes. Hint: Use option after: changes begin after a batch."),
        ({"after": "first"}, "Option after is 'first'. Hint: It must be a batch."),
        ({"after": "77"}, "has no batch 77 yet"),
        ({"max_pin_bytes": "1 GiB"}, "It must be a number of bytes"),
        ({"max_batch_bytes": "many"}, "Option max_batch_bytes is 'many'. Hint: It must be a number of bytes"),
        ({"with_before": "yes"}, "Option with_before is 'yes'. Hint: It must be true or false"),
        ({"with_last": "true"}, "has no Spark offsets"),
        ({"with_last": "1"}, "It must be true or false"),
        ({"state": "timer"}, "has no state 'timer'"),
        ({"columns": "hash2"}, "hash2"),
        ({"pin_s": "0"}, "a number of seconds"),
    ],
    ids=str,
)
def test_mistakes_are_named(tmp_path: Path, options: dict[str, str], message: str) -> None:
    query = Story(tmp_path / "query")
    query.run_batches(2, random.Random(8))
    source = statelog.StateSource({"path": query.location, "show": "changes", "state": "value", **options})
    with pytest.raises(StatelogError, match=re.escape(message)):
        source.streamReader(source.schema()).initialOffset()


def test_spark_shows_a_mistake(spark: SparkSession, tmp_path: Path) -> None:
    query = Story(tmp_path / "query")
    query.run_batches(2, random.Random(8))
    assert "has no batch 77 yet" in Feed(spark, query.location, tmp_path / "feed", state="value", after="77").fail()


def test_changes_are_no_batch_read(spark: SparkSession, tmp_path: Path) -> None:
    query = Story(tmp_path / "query")
    query.run_batches(2, random.Random(8))
    spark.dataSource.register(statelog.StateSource)
    reader = spark.read.format("statelog").options(state="value", show="changes")
    with pytest.raises(PySparkException, match="Changes are read as a stream"):
        reader.load(query.location).collect()
    with pytest.raises(PySparkException, match="Use it with show=changes, in spark.readStream"):
        spark.read.format("statelog").options(state="value", after="1").load(query.location)
