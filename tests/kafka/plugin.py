"""Fixtures for tests on a real broker; a module that wants them says ``pytest_plugins = ("tests.kafka.plugin",)``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.jars import KAFKA, missing_server
from tests.kafka.broker import KafkaBroker
from tests.kafka.topics import SentOrders, Topics


@pytest.fixture(scope="session")
def broker() -> Iterator[KafkaBroker]:
    """The broker of this session. Tests that use it are skipped where it is not installed."""
    if missing := missing_server(KAFKA):
        pytest.skip(f"no Kafka ({missing}); ./dev kafka installs it")
    with KafkaBroker() as started:
        yield started


@pytest.fixture(scope="session")
def topics(broker: KafkaBroker, spark: SparkSession) -> Iterator[Topics]:
    """The broker's topics, by the session's clients."""
    made = Topics(spark, broker.address)
    yield made
    made.close()


@pytest.fixture
def sent(topics: Topics) -> SentOrders:
    """What a test sends."""
    return SentOrders(topics)
