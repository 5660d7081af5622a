"""The doctor's check of Kafka brokers from an executor, and the brokers that it is given."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import pytest

from statelog import ConfigurationError
from statelog.clock import SystemClock
from statelog.tools.doctor.finding import Place
from statelog.tools.doctor.kafka import check_from_executor, kafka_options
from tests.servers import free_ports

EXECUTOR = Place("executor 1", "there")


def test_an_executor_connects_to_every_broker() -> None:
    [closed] = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        brokers = [("127.0.0.1", server.getsockname()[1]), ("127.0.0.1", closed)]
        refused, reached = check_from_executor(brokers, EXECUTOR, SystemClock(), 5.0)
    assert (refused.level, reached.level) == ("error", "ok")
    assert f"127.0.0.1:{closed} cannot be reached: Connection refused." in refused.found
    assert "advertised.listeners" in refused.remedy
    assert reached.found.startswith("1 of 2 brokers were reached")


def test_a_broker_whose_name_is_unknown_is_named() -> None:
    [found] = check_from_executor([("broker.invalid", 9092)], EXECUTOR, SystemClock(), 5.0)
    assert found.level == "error"
    assert found.found.startswith("The broker broker.invalid:9092 cannot be reached: ")


@pytest.mark.parametrize("given", ["", "  ", {}, {"subscribe": "clicks"}])
def test_brokers_are_required(given: str | Mapping[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="names no brokers") as caught:
        kafka_options(given)
    assert "kafka.bootstrap.servers" in caught.value.hint


def test_brokers_alone_are_an_option_of_the_source() -> None:
    assert kafka_options("broker:9092") == {"kafka.bootstrap.servers": "broker:9092"}
    assert kafka_options({"kafka.bootstrap.servers": "broker:9092", "maxOffsetsPerTrigger": 5}) == {  # type: ignore[dict-item]  # Spark's options take numbers, too
        "kafka.bootstrap.servers": "broker:9092",
        "maxOffsetsPerTrigger": "5",
    }
    assert kafka_options(None) == {}
