"""The doctor with a real broker: the driver by Spark's connector, an executor by a connection."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import statelog
from statelog import Finding
from statelog.spark.driver import kafka_client
from tests.kafka.broker import KafkaBroker
from tests.kafka.topics import Topics
from tests.servers import free_ports

pytest_plugins = ("tests.kafka.plugin",)


def diagnosed(directory: Path, kafka: str | dict[str, str], timeout_s: float = 60.0) -> list[tuple[str, str, str]]:
    """Level, place and text of the findings about Kafka."""
    found: list[Finding] = statelog.doctor(directory / "state", kafka=kafka, timeout_s=timeout_s)
    return [(one.level, one.where.split()[0], one.found) for one in found if one.check == "kafka"]


def test_brokers_and_topics(topics: Topics, broker: KafkaBroker, tmp_path: Path) -> None:
    name = topics.create(3)
    driver, topic, missing, executor = diagnosed(
        tmp_path, {"kafka.bootstrap.servers": broker.address, "subscribe": f"{name}, nowhere"}
    )
    assert driver == ("ok", "driver", f"{broker.address} belongs to a cluster of 1 brokers: {broker.address}.")
    assert topic == ("ok", "driver", f"The topic {name} has 3 partitions.")
    assert missing == ("error", "driver", "There is no topic nowhere, or this user may not see it.")
    assert executor[:2] == ("ok", "executor")
    assert executor[2].startswith("1 of 1 brokers were reached")


def test_brokers_that_do_not_answer(broker: KafkaBroker, spark: SparkSession, tmp_path: Path) -> None:
    [port] = free_ports(1)
    [found] = diagnosed(tmp_path, f"127.0.0.1:{port}", timeout_s=9)
    assert found[:2] == ("error", "driver")
    assert "TimeoutException" in found[2]
    [found] = diagnosed(tmp_path, "broker.invalid:9092")
    assert found[:2] == ("error", "driver")
    assert "No resolvable bootstrap urls" in found[2]


def test_a_session_without_the_connector(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_client, "has_kafka_connector", lambda _: False)
    [found] = diagnosed(tmp_path, "127.0.0.1:9092")
    assert found == ("error", "driver", "The session has no Kafka connector.")
