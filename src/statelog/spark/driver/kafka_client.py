"""Kafka's client in the session's JVM, which Spark's connector brings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession


class KafkaError(Exception):
    """An error that Kafka's client reports."""


_KAFKA_SOURCE: Final = "org.apache.spark.sql.kafka010.KafkaSourceProvider"
_KAFKA_CALL_MS: Final = "default.api.timeout.ms", "request.timeout.ms"


def has_kafka_connector(session: SparkSession) -> bool:
    """Whether the session has Spark's source and sink for Kafka."""
    jvm: Any = session._jvm
    try:
        jvm.org.apache.spark.util.Utils.classForName(_KAFKA_SOURCE, False, False)
    except Py4JJavaError:
        return False
    return True


def kafka_cluster(
    session: SparkSession, settings: Mapping[str, str], topics: Iterable[str], timeout_s: float
) -> tuple[list[tuple[str, int]], dict[str, int]]:
    """The addresses that the brokers of a cluster advertise, and the number of partitions of each topic that exists.

    `settings` are those of Kafka's client, which the connector brings. Raises KafkaError if the client cannot be
    created, or no broker answers.
    """
    jvm: Any = session._jvm
    properties = jvm.java.util.Properties()
    for name, value in {**dict.fromkeys(_KAFKA_CALL_MS, str(int(timeout_s * 1000 / 3))), **settings}.items():
        properties.setProperty(name, value)
    try:
        client = jvm.org.apache.kafka.clients.admin.AdminClient.create(properties)
        try:
            nodes = client.describeCluster().nodes().get().toArray()
            brokers = [(str(node.host()), int(node.port())) for node in nodes]
            names = client.listTopics().names().get()
            wanted = [topic for topic in topics if names.contains(topic)]
            described = client.describeTopics(wanted).allTopicNames().get()
            partitions = {str(name): len(described[name].partitions()) for name in described}
        finally:
            client.close(jvm.java.time.Duration.ofSeconds(1))
    except Py4JJavaError as error:
        raise KafkaError(_kafka_reason(error.java_exception)) from None
    return brokers, partitions


def _kafka_reason(error: Any) -> str:
    """The first cause of a Kafka client's error, whose outer ones only say that it failed."""
    while error.getCause() is not None:
        error = error.getCause()
    return f"{error.getClass().getSimpleName()}: {error.getMessage()}"
