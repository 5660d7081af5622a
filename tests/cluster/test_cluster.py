"""The harms: a query on several hosts goes on after each of them, and its output and its state are exact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.cluster.harms import HARMS
from tests.cluster.life import Life
from tests.cluster.spark_hosts import SparkHosts, missing_for_cluster

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

DAILY: Final = ("executor-killed", "host-off-the-network", "disk-full")
"""The others are in the extended round."""


@pytest.fixture(scope="module")
def life() -> Iterator[Life]:
    if missing := missing_for_cluster():
        pytest.skip(f"no cluster ({missing}); ./dev cluster installs what it can")
    with SparkHosts() as cluster, Life(cluster) as life:
        yield life


@pytest.mark.parametrize(
    "name",
    [*DAILY, *[pytest.param(name, marks=pytest.mark.extended) for name in HARMS if name not in DAILY]],
)
def test_a_query_goes_on_and_is_exact(life: Life, name: str) -> None:
    harm = HARMS[name]
    if harm.needs_kafka and life.cluster.missing_kafka:
        pytest.skip(f"no Kafka ({life.cluster.missing_kafka}); ./dev kafka installs it")
    outcome = life.suffer(harm)
    print(name, outcome)
    assert set(outcome.errors) <= harm.errors, outcome
