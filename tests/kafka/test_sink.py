"""The sink of examples/sinks/kafka.py: readers of committed records get every row once."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import statelog
from tests.kafka.queries import KafkaJob, read_topics
from tests.kafka.topics import COMPACTED_AT_ONCE, SentOrders, Topics
from tests.spark.jobs.draws import replayed
from tests.spark.support import Order, make_orders, start_driver

pytest_plugins = ("tests.kafka.plugin",)
pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

QUERY = "a-query"
ROWS = [(f"key-{number % 11}", f"value-{number}") for number in range(60)]
KILLS = 100


@pytest.fixture(name="sinks")
def import_sinks(topics: Topics) -> Any:
    return pytest.importorskip("examples.sinks.kafka", reason="no client of Kafka; ./dev kafka installs it")


@pytest.fixture(autouse=True)
def _be_in_a_query(spark: SparkSession) -> Iterator[None]:
    spark.sparkContext.setLocalProperty("sql.streaming.queryId", QUERY)
    yield
    spark.sparkContext.setLocalProperty("sql.streaming.queryId", "")


def rows_of(spark: SparkSession, pairs: list[tuple[str, str]], partitions: int = 2) -> DataFrame:
    """Rows for the sink, in so many partitions."""
    return spark.createDataFrame(pairs, "key string, value string").repartition(partitions)


def pairs_in(topics: Topics, topic: str, isolation: str = "read_committed") -> list[tuple[str | None, str | None]]:
    """Keys and values that readers get, in order."""
    return sorted((record.key, record.value) for record in topics.read(topic, isolation))


def new_topics(topics: Topics, outputs: int = 3) -> tuple[str, str, str]:
    """The broker's address, an empty topic and its control topic."""
    return topics.address, topics.create(2), topics.create(outputs, cleanup_policy="compact")


def test_a_batch_is_sent_once_however_often_it_is_delivered(spark: SparkSession, topics: Topics, sinks: Any) -> None:
    places = new_topics(topics)
    sink = sinks.KafkaSink(*places)
    sink(rows_of(spark, ROWS[:40]), 0)
    sink(rows_of(spark, ROWS[:40], partitions=5), 0)
    sinks.KafkaSink(*places)(rows_of(spark, ROWS[:40], partitions=1), 0)
    assert pairs_in(topics, places[1]) == sorted(ROWS[:40])
    sink(rows_of(spark, ROWS[40:]), 1)
    sinks.KafkaSink(*places)(rows_of(spark, ROWS[:40]), 0)
    assert pairs_in(topics, places[1]) == sorted(ROWS)


def test_keys_go_where_those_of_java_s_clients_go(spark: SparkSession, topics: Topics, sinks: Any) -> None:
    places = new_topics(topics)
    sinks.KafkaSink(*places, settings={"transaction.timeout.ms": "30000"})(rows_of(spark, ROWS), 0)
    other = topics.create(2)
    rows_of(spark, ROWS).write.format("kafka").option("kafka.bootstrap.servers", topics.address).option(
        "topic", other
    ).save()

    def partition_of(topic: str) -> dict[str | None, int]:
        return {record.key: record.partition for record in topics.read(topic)}

    assert partition_of(places[1]) == partition_of(other)
    assert set(partition_of(other).values()) == {0, 1}


def test_a_delivery_that_failed_between_two_outputs_is_completed(
    spark: SparkSession, topics: Topics, sinks: Any, tmp_path: Path
) -> None:
    places, marker = new_topics(topics), tmp_path / "marker"

    class Failing(sinks.KafkaSink):  # type: ignore[misc]  # of a module that may be missing
        def commit(self, producer: Any, output: int) -> None:
            if output == 1:
                producer.flush()
                raise OSError("the broker is gone")
            super().commit(producer, output)
            marker.touch()

    with pytest.raises(Exception, match="the broker is gone"):
        Failing(*places)(rows_of(spark, ROWS).coalesce(1), 0)
    sink = sinks.KafkaSink(*places)
    done = [sink.delivered(QUERY, output) for output in range(3)]
    assert done[1] is None
    assert any(done) == marker.exists()
    committed, all_sent = pairs_in(topics, places[1]), pairs_in(topics, places[1], "read_uncommitted")
    assert len(committed) < len(all_sent)
    sink(rows_of(spark, ROWS, partitions=4), 0)
    assert pairs_in(topics, places[1]) == sorted(ROWS)
    assert len(pairs_in(topics, places[1], "read_uncommitted")) > len(ROWS)
    assert streamed(spark, topics, places[1], tmp_path, "read_committed") == sorted(ROWS)
    assert len(streamed(spark, topics, places[1], tmp_path, "read_uncommitted")) > len(ROWS)
    assert [sink.delivered(QUERY, output) for output in range(3)] == [sinks.Delivered(0, 3)] * 3


def streamed(spark: SparkSession, topics: Topics, topic: str, folder: Path, isolation: str) -> list[tuple[str, str]]:
    """Keys and values that a query gets, in order."""
    found: list[tuple[str, str]] = []
    records = read_topics(spark, topics.address, (topic,), {"kafka.isolation.level": isolation})
    pairs = records.selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)")
    writer = pairs.writeStream.foreachBatch(lambda df, _: found.extend(map(tuple, df.collect())))
    writer.option("checkpointLocation", str(folder / isolation)).trigger(availableNow=True).start().awaitTermination()
    return sorted(found)


def open_transaction(address: str, transactional_id: str, topic: str, key: str, value: str) -> Any:
    """A producer that has sent a record in a transaction that is open."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": address, "transactional.id": transactional_id})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, key=key, value=value, partition=0)
    producer.flush()
    return producer


def test_an_older_attempt_cannot_commit_once_a_newer_one_has_begun(
    spark: SparkSession, topics: Topics, sinks: Any
) -> None:
    places = new_topics(topics, outputs=1)
    older = open_transaction(topics.address, f"{places[2]}-{QUERY}-0", places[1], *ROWS[0])
    sinks.KafkaSink(*places)(rows_of(spark, ROWS), 0)
    with pytest.raises(Exception, match="fenced"):
        older.commit_transaction(30)
    assert pairs_in(topics, places[1]) == sorted(ROWS)


def test_a_batch_behind_an_open_transaction_of_another_query_is_found(
    spark: SparkSession, topics: Topics, sinks: Any
) -> None:
    """A reader of committed records does not get it before that transaction has ended."""
    places = new_topics(topics, outputs=1)
    address, _, control = places

    class Crossed(sinks.KafkaSink):  # type: ignore[misc]  # as above
        def delivered(self, query: str, output: int, *, wait: bool = False) -> Any:
            """The other transaction begins when the control topic has been read, and stays open."""
            found = super().delivered(query, output, wait=wait)
            if wait:
                open_transaction(address, "another-query", control, "another-query", '{"batch": 7, "outputs": 1}')
            return found

    def abort() -> None:
        open_transaction(address, "another-query", control, "another-query", "").abort_transaction(30)

    Crossed(*places)(rows_of(spark, ROWS), 0)
    assert sinks.KafkaSink(*places).delivered(QUERY, 0) is None
    later = threading.Timer(2.0, abort)
    later.start()
    sinks.KafkaSink(*places)(rows_of(spark, ROWS), 0)
    later.join()
    assert pairs_in(topics, places[1]) == sorted(ROWS)


def test_a_batch_is_found_behind_many_others(spark: SparkSession, topics: Topics, sinks: Any) -> None:
    places = new_topics(topics, outputs=1)
    sink = sinks.KafkaSink(*places)
    sink(rows_of(spark, ROWS), 5)
    other = open_transaction(topics.address, "another-query", places[2], "another-query", '{"batch": 7, "outputs": 1}')
    for _ in range(5000):
        other.produce(places[2], key="another-query", value='{"batch": 7, "outputs": 1}', partition=0)
        other.poll(0)
    other.commit_transaction(30)
    assert sink.delivered(QUERY, 0) == sinks.Delivered(5, 1)
    assert sink.delivered("a-query-without-batches", 0) is None


def test_a_batch_is_found_in_a_control_topic_that_was_compacted(
    spark: SparkSession, topics: Topics, sinks: Any
) -> None:
    places = topics.address, topics.create(2), topics.create(1, **COMPACTED_AT_ONCE)
    sink = sinks.KafkaSink(*places)
    for batch in range(5):
        sink(rows_of(spark, ROWS[batch::5]), batch)
    topics.wait_for_compaction(places[2], of="another-query")
    assert [record.value for record in topics.read(places[2]) if record.key == QUERY] == ['{"batch": 4, "outputs": 1}']
    for batch in range(5):
        sinks.KafkaSink(*places)(rows_of(spark, ROWS[batch::5]), batch)
    assert pairs_in(topics, places[1]) == sorted(ROWS)
    assert sink.delivered(QUERY, 0) == sinks.Delivered(4, 1)


def test_control_topics_that_forget_or_divide_otherwise_are_refused(
    spark: SparkSession, topics: Topics, sinks: Any
) -> None:
    address, topic, control = new_topics(topics)
    with pytest.raises(ValueError, match=r"Set cleanup\.policy of the topic .* to compact, not delete"):
        sinks.KafkaSink(address, topic, topics.create(1))(rows_of(spark, ROWS), 0)
    sinks.KafkaSink(address, topic, control)(rows_of(spark, ROWS), 0)
    topics.grow(control, 4)
    with pytest.raises(ValueError, match="has 4 partitions, and had 3 when batch 0 was sent"):
        sinks.KafkaSink(address, topic, control)(rows_of(spark, ROWS), 1)
    assert pairs_in(topics, topic) == sorted(ROWS)


# ---- Kills ----


def kill_and_compare(spark: SparkSession, topics: Topics, sinks: Any, sent: SentOrders, root: Path, deaths: Any) -> int:
    """Run the query until it has died all deaths, let it end, and compare; returns how many records were aborted."""
    from tests.spark.jobs.kafka_draws import draws_to_kafka

    places, topic = new_topics(topics), topics.create(3)
    job = KafkaJob.at(root, topics.address, (topic,), sent).with_reading({"maxOffsetsPerTrigger": "30"})
    orders: list[Order] = []

    def add(seed: int) -> None:
        [more] = make_orders(1, seed=seed, rows=90)
        orders.extend({**order, "seq": order["seq"] + 90 * seed} for order in more)
        sent.send([(topic, partition) for partition in range(3)], orders[-90:])

    for life, death in enumerate(deaths):
        add(life)
        arguments = {
            "address": topics.address,
            "topics": [topic],
            "reading": dict(job.reading),
            "output": places[1],
            "control": places[2],
            "death": death,
            "seed": life,
            "parallelism": 1 + life % 3,
        }
        driver = start_driver("kafka_draws", root, arguments)
        assert driver.wait() == -signal.SIGKILL, driver.end
    add(len(deaths))
    # What is left after so many deaths is one batch.
    writer = draws_to_kafka(spark, job.with_reading({}), sinks.KafkaSink(*places), 2)
    writer.trigger(availableNow=True).start().awaitTermination()

    records = topics.read(places[1])
    rows = [[json.loads(str(record.value))[name] for name in ("seq", "user", "draw", "total")] for record in records]
    totals = replayed(orders, rows)
    stored = statelog.read_state(job.checkpoint, uid="main", state="total").read_all().to_pylist()
    assert {row["key_user"]: row["value_total"] for row in stored} == totals
    return len(topics.read(places[1], "read_uncommitted")) - len(records)


def test_every_row_is_there_once_after_deaths_around_a_transaction_s_end(
    spark: SparkSession, topics: Topics, sinks: Any, sent: SentOrders, tmp_path: Path
) -> None:
    from tests.spark.jobs.kafka_draws import Death

    assert kill_and_compare(spark, topics, sinks, sent, tmp_path, [Death.BEFORE, Death.AFTER]) > 0


@pytest.mark.extended
@pytest.mark.timeout(7200)
def test_every_row_is_there_once_after_many_kills(
    spark: SparkSession, topics: Topics, sinks: Any, sent: SentOrders, tmp_path: Path
) -> None:
    from tests.spark.jobs.kafka_draws import Death

    deaths = list(Death) * (KILLS // len(Death))
    random.Random(7).shuffle(deaths)
    aborted = kill_and_compare(spark, topics, sinks, sent, tmp_path, deaths)
    print(f"{Counter(deaths)}; {aborted} records in transactions that were aborted")
    assert aborted > 0
