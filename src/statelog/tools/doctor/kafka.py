"""Checks that the driver, with Spark's connector, and every executor can reach a query's Kafka brokers."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Final

from pyspark.sql import SparkSession

from statelog.clock import Clock
from statelog.errors import ConfigurationError, ErrorKind
from statelog.spark.driver import kafka_client
from statelog.spark.driver.kafka_client import KafkaError
from statelog.tools.doctor.finding import Findings, Place

CHECK: Final = "kafka"
STUCK_BROKER: Final = "Check whether the brokers' hosts, or a firewall in front of them, drop packets from this host."

_SERVERS: Final = "kafka.bootstrap.servers"
_PREFIX: Final = "kafka."
_TOPICS: Final = ("subscribe", "topic")
"""Options of Spark's source and sink that name topics."""

Address = tuple[str, int]


def kafka_options(given: str | Mapping[str, str] | None) -> dict[str, str]:
    """The options of Spark's source or sink, given as brokers alone or as a mapping; empty for None.

    Raises ConfigurationError if no brokers are named.
    """
    if given is None:
        return {}
    options = {_SERVERS: given} if isinstance(given, str) else {str(name): str(given[name]) for name in given}
    if not options.get(_SERVERS, "").strip():
        raise ConfigurationError(
            "kafka names no brokers.",
            kind=ErrorKind.INVALID_OPTION,
            hint=f'Pass "host:9092,...", or the options of Spark\'s source or sink, with {_SERVERS}.',
        )
    return options


def check_from_driver(
    session: SparkSession, options: Mapping[str, str], place: Place, timeout_s: float, brokers: list[Address]
) -> Findings:
    """Ask the cluster, with the connector's client, for its brokers and for the topics; note the brokers' addresses."""
    servers = options[_SERVERS]
    if not kafka_client.has_kafka_connector(session):
        yield place.error(
            CHECK,
            "The session has no Kafka connector.",
            f"Start Spark with --packages org.apache.spark:spark-sql-kafka-0-10_2.13:{session.version}, or with the"
            " newest available version.",
        )
        return
    client = {name.removeprefix(_PREFIX): value for name, value in options.items() if name.startswith(_PREFIX)}
    topics = [one.strip() for name in _TOPICS for one in options.get(name, "").split(",") if one.strip()]
    try:
        found, partitions = kafka_client.kafka_cluster(session, client, topics, timeout_s)
    except KafkaError as error:
        yield place.error(
            CHECK,
            f"{servers}: {error}",
            f"Check the addresses in {_SERVERS}, that a broker listens there, and the options of its security"
            " (kafka.security.protocol, kafka.sasl.*, kafka.ssl.*): a broker that expects TLS answers nothing else.",
        )
        return
    brokers += found
    told = ", ".join(f"{host}:{port}" for host, port in found)
    yield place.ok(CHECK, f"{servers} belongs to a cluster of {len(found)} brokers: {told}.")
    for topic in topics:
        if topic in partitions:
            yield place.ok(CHECK, f"The topic {topic} has {partitions[topic]} partitions.")
        else:
            yield place.error(
                CHECK,
                f"There is no topic {topic}, or this user may not see it.",
                "Create it, correct its name, or allow the user to describe and read it.",
            )


def check_from_executor(brokers: Sequence[Address], place: Place, clock: Clock, timeout_s: float) -> Findings:
    """Connect to every broker at the address that it advertises, as sources and sinks do in tasks."""
    reached, slowest_s = 0, 0.0
    for host, port in brokers:
        begun_s = clock.monotonic_s()
        try:
            socket.create_connection((host, port), timeout_s / len(brokers)).close()
        except OSError as error:
            yield place.error(
                CHECK,
                f"The broker {host}:{port} cannot be reached: {error.strerror or error}.",
                "Tasks connect to the address that the broker advertises (advertised.listeners), not to the one in"
                f" {_SERVERS}. It must be one that executors can resolve and reach.",
            )
        else:
            reached += 1
            slowest_s = max(slowest_s, clock.monotonic_s() - begun_s)
    if reached:
        slowest = f"{slowest_s * 1000:.1f} ms"
        yield place.ok(CHECK, f"{reached} of {len(brokers)} brokers were reached, in at most {slowest}.")
