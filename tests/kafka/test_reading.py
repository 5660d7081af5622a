"""Queries that read topics: every record counts once, whatever the source's options say and whatever starts again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

import statelog
from statelog import Step
from tests.kafka.queries import KafkaJob, read_topics
from tests.kafka.topics import COMPACTED_AT_ONCE, Record, SentOrders, Topics
from tests.spark.faults import make_marker
from tests.spark.support import Order, ledger_model, make_orders, start_driver

pytest_plugins = ("tests.kafka.plugin",)
pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def orders_from(seed: int, number: int = 90) -> list[Order]:
    """So many orders; those of another seed have other numbers."""
    [orders] = make_orders(1, seed=seed, rows=number)
    return [{**order, "seq": order["seq"] + 100_000 * seed} for order in orders]


def test_several_topics_and_partitions_in_bounded_batches(
    spark: SparkSession, topics: Topics, sent: SentOrders, tmp_path: Path
) -> None:
    first, second, noted = topics.create(3), topics.create(2), tmp_path / "partitions"
    places = [(first, 0), (first, 1), (first, 2), (second, 0), (second, 1)]
    noted.mkdir()
    job = KafkaJob.at(tmp_path, topics.address, (first, second), sent)
    job = job.with_reading({"maxOffsetsPerTrigger": "40", "minPartitions": "8"})

    class Noting(KafkaJob):
        def read(self, session: SparkSession, schema: str = "") -> DataFrame:
            orders = super().read(session)

            def note(batches: Iterator[Any]) -> Iterator[Any]:
                context = TaskContext.get()
                assert context is not None
                (noted / str(context.partitionId())).touch()
                return batches

            return orders.mapInArrow(note, orders.schema)

    sent.send(places, orders_from(1))
    job.run(Noting.at(tmp_path, topics.address, (first, second)).with_reading(job.reading).ledger(spark, 2))
    assert len(list(noted.iterdir())) >= 8
    sent.send(places[::2], orders_from(2))
    job.run(job.ledger(spark, 3))

    job.require_exact()
    sizes = [len(batch) for batch in job.batches_of_spark()]
    assert max(sizes) <= 40  # Spark rounds down the share of each partition
    assert len(sizes) == 6


def test_a_query_begins_where_starting_offsets_say_and_goes_on_where_it_was(
    spark: SparkSession, topics: Topics, sent: SentOrders, tmp_path: Path
) -> None:
    topic = topics.create(3)
    places = [(topic, 0), (topic, 1), (topic, 2)]
    sent.send(places, orders_from(1, 30))
    job = KafkaJob.at(tmp_path, topics.address, (topic,), sent)
    begin = job.with_reading({"startingOffsets": json.dumps({topic: {"0": 7, "1": -2, "2": -1}})})
    begin.run(begin.ledger(spark, 2))
    sent.send(places, orders_from(2, 30))
    # Of a query that has begun Spark does not look at the option.
    again = job.with_reading({"startingOffsets": "latest"})
    again.run(again.ledger(spark, 1))

    found = replace(job, starts={(topic, 0): 7, (topic, 1): 0, (topic, 2): 10})
    found.require_exact()
    assert [len(batch) for batch in found.batches_of_spark()] == [3 + 10, 30]


def test_partitions_that_are_added_while_the_query_is_stopped_are_read_from_their_start(
    spark: SparkSession, topics: Topics, sent: SentOrders, tmp_path: Path
) -> None:
    topic = topics.create(1)
    sent.send([(topic, 0)], orders_from(1))
    job = KafkaJob.at(tmp_path, topics.address, (topic,), sent)
    job.run(job.ledger(spark, 2))
    topics.grow(topic, 4)
    sent.send([(topic, partition) for partition in range(4)], orders_from(2))
    # Where the option would have a new query begin does not count for them either.
    latest = job.with_reading({"startingOffsets": "latest"})
    latest.run(latest.ledger(spark, 2))

    job.require_exact()
    assert [len(places) for _, places in sorted(job.places().items())] == [1, 4]


class Newest(StatefulProcessor):
    """Keeps the newest value of a key, and forgets the key at a tombstone."""

    def init(self, handle: Any) -> None:
        self._newest = handle.getValueState("newest", "value string, trace string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in sorted(rows, key=lambda row: row.offset):
            if row.value is None:
                self._newest.clear()
            else:
                self._newest.update((row.value, row.trace))
        value, trace = self._newest.get() or (None, None)
        yield Row(id=key[0], value=value, trace=trace)

    def close(self) -> None:
        pass


def test_headers_and_tombstones_reach_the_processor(spark: SparkSession, topics: Topics, tmp_path: Path) -> None:
    topic, held = topics.create(2, cleanup_policy="compact"), dict[str, list[str]]()
    job = KafkaJob.at(tmp_path, topics.address, (topic,))

    def send(changes: list[tuple[str, str | None, str]]) -> None:
        records = (Record(topic, ord(k) % 2, k, value, (("trace", trace.encode()),)) for k, value, trace in changes)
        topics.send(records)
        for key, value, trace in changes:
            held.pop(key, None)
            if value is not None:
                held[key] = [value, trace]

    def run() -> None:
        records = read_topics(spark, topics.address, (topic,), {"includeHeaders": "true"}).select(
            F.col("key").cast("string").alias("id"),
            F.col("value").cast("string").alias("value"),
            F.expr("CAST(filter(headers, h -> h.key = 'trace')[0].value AS STRING)").alias("trace"),
            "offset",
        )
        newest = statelog.key_by(records, "id", parallelism=2).transformWithState(
            Newest(), "id string, value string, trace string", "update", "None"
        )
        job.run(newest, lambda df, batch: job.write_output(batch, sorted(map(list, df.collect()), key=str)))

    send([("a", "1", "x"), ("b", "1", "y"), ("a", "2", "z"), ("c", "1", ""), ("b", None, "gone")])
    run()
    assert job.results()[0] == [["a", "2", "z"], ["b", None, None], ["c", "1", ""]]
    send([("a", None, ""), ("b", "7", "back"), ("d", None, "")])
    run()
    assert job.results()[1] == [["a", None, None], ["b", "7", "back"], ["d", None, None]]
    stored = statelog.read_state(job.checkpoint, uid="main", state="newest").read_all().to_pylist()
    assert {row["key_id"]: [row["value_value"], row["value_trace"]] for row in stored} == held


def test_a_compacted_topic_is_a_changing_dimension(spark: SparkSession, topics: Topics, tmp_path: Path) -> None:
    """The newest record of each key is there, at offsets with gaps between them; a restart meets other gaps."""
    # A query that is stopped for longer than tombstones stay does not get them.
    topic = topics.create(1, **{**COMPACTED_AT_ONCE, "delete_retention_ms": "3600000"})
    job = KafkaJob.at(tmp_path, topics.address, (topic,))

    def run() -> dict[str, str]:
        records = read_topics(spark, topics.address, (topic,), {"maxOffsetsPerTrigger": "20"}).selectExpr(
            "CAST(key AS STRING) AS id", "CAST(value AS STRING) AS value", "'' AS trace", "offset"
        )
        newest = statelog.key_by(records.where("id != 'filler'"), "id", parallelism=2).transformWithState(
            Newest(), "id string, value string, trace string", "update", "None"
        )
        job.run(newest, lambda df, batch: job.write_output(batch, [[df.count()]]))
        stored = statelog.read_state(job.checkpoint, uid="main", state="newest").read_all().to_pylist()
        return {row["key_id"]: row["value_value"] for row in stored}

    def change(prices: dict[str, str | None]) -> None:
        topics.send(Record(topic, 0, key, value) for key, value in prices.items())

    for price in range(10):
        change({"a": f"{price}", "b": f"{price}", "c": f"{price}"})
    topics.wait_for_compaction(topic, of="filler")
    assert len([record for record in topics.read(topic) if record.key != "filler"]) == 3
    assert run() == {"a": "9", "b": "9", "c": "9"}
    for price in range(10, 20):
        change({"a": f"{price}", "d": f"{price}"})
    change({"b": None})
    topics.wait_for_compaction(topic, of="filler")
    assert run() == {"a": "19", "c": "9", "d": "19"}


def test_a_savepoint_and_a_branch_go_on_at_the_offsets_of_their_batch(
    spark: SparkSession, topics: Topics, sent: SentOrders, tmp_path: Path
) -> None:
    topic = topics.create(3)
    places = [(topic, partition) for partition in range(3)]
    parent = KafkaJob.at(tmp_path, topics.address, (topic,), sent).with_reading({"maxOffsetsPerTrigger": "30"})
    sent.send(places, orders_from(1))
    parent.run(parent.ledger(spark, 2))
    restored, branch = (parent.elsewhere(name) for name in ("restored", "branch"))
    statelog.savepoint(parent.checkpoint, tmp_path / "saved")
    statelog.branch(parent.checkpoint, branch.checkpoint, at=1)
    sent.send(places, orders_from(2))
    parent.run(parent.ledger(spark, 1))
    statelog.restore(tmp_path / "saved", restored.checkpoint)
    for job in (restored, branch):
        other = job.with_reading({"maxOffsetsPerTrigger": "45"})
        other.run(other.ledger(spark, 3))

    parent.require_exact()
    for job, first, left in ((restored, 3, 90), (branch, 2, 120)):
        earlier = {batch: places for batch, places in parent.places().items() if batch < first}
        batches = replace(job, earlier=earlier).batches_of_spark()
        assert sum(map(len, batches[first:])) == left
        expected = ledger_model(batches)
        assert job.results() == {batch: expected[batch] for batch in expected if batch >= first}


def test_a_rewound_query_reads_the_records_of_its_batches_again(
    spark: SparkSession, topics: Topics, sent: SentOrders, tmp_path: Path
) -> None:
    topic = topics.create(2)
    job = KafkaJob.at(tmp_path, topics.address, (topic,), sent).with_reading({"maxOffsetsPerTrigger": "30"})
    sent.send([(topic, 0), (topic, 1)], orders_from(1))
    job.run(job.ledger(spark, 2))
    shutil.rmtree(job.output)
    assert statelog.rewind(str(job.checkpoint), to=0).next_batch == 1
    job.run(job.ledger(spark, 3))

    expected = ledger_model(job.batches_of_spark())
    assert len(expected) > 1
    assert job.results() == {batch: expected[batch] for batch in expected if batch}


@pytest.mark.parametrize("fails", [True, False], ids=["is an error", "is left out"])
def test_records_that_are_lost_while_the_query_is_stopped(
    spark: SparkSession, topics: Topics, sent: SentOrders, tmp_path: Path, fails: bool
) -> None:
    topic = topics.create(2)
    places = [(topic, 0), (topic, 1)]
    sent.send(places, orders_from(1, 40))
    job = KafkaJob.at(tmp_path, topics.address, (topic,), sent)
    job.run(job.ledger(spark, 2))
    before = statelog.read_state(job.checkpoint, uid="main", state="account").read_all()
    sent.send(places, orders_from(2, 40))
    sent.lose(topic, 0, 29, read=20)

    if fails:
        text = job.fail(job.ledger(spark, 2))
        assert "failOnDataLoss" in text
        after = statelog.read_state(job.checkpoint, uid="main", state="account").read_all()
        assert sorted(map(str, after.to_pylist())) == sorted(map(str, before.to_pylist()))
    job = job.with_reading({"failOnDataLoss": "false"})
    job.run(job.ledger(spark, 1))
    job.require_exact()
    assert [len(batch) for batch in job.batches_of_spark()] == [40, 40 - 9]


@pytest.mark.parametrize(
    ("step", "victim"),
    [(Step.ACKING, "driver"), (Step.DURABLE, "jvm")],
    ids=["driver, before the state is durable", "JVM, when it is"],
)
def test_a_driver_that_is_killed_within_a_batch(
    spark: SparkSession, topics: Topics, sent: SentOrders, tmp_path: Path, step: Step, victim: str
) -> None:
    topic = topics.create(3)
    places = [(topic, partition) for partition in range(3)]
    sent.send(places, orders_from(1))
    job = KafkaJob.at(tmp_path, topics.address, (topic,), sent).with_reading({"maxOffsetsPerTrigger": "30"})
    marker, pid_file = make_marker(tmp_path / "kill"), tmp_path / f"{victim}-0.pid"
    arguments = {
        "address": topics.address,
        "topics": [topic],
        "reading": dict(job.reading),
        "parallelism": 2,
        "kill": {"at": step, "batch": 1, "marker": marker, "pid_file": str(pid_file)},
    }
    driver = start_driver("kafka_ledger", tmp_path, arguments)
    (tmp_path / "driver-0.pid").write_text(str(driver.process.pid))
    assert driver.wait() != 0, driver.end
    assert not Path(marker).exists(), driver.end
    assert sorted(job.results()) == [0]

    sent.send(places, orders_from(2))
    job.run(job.ledger(spark, 3))
    job.require_exact()
