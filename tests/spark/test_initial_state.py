"""Initial state in streaming queries: read once, before the first batch, whatever happens to that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import Row, SparkSession

import statelog
from tests.spark.faults import wait_until
from tests.spark.initial_state_support import OUTPUT, Query, Total
from tests.spark.support import start_driver


def test_it_is_read_once(spark: SparkSession, tmp_path: Path) -> None:
    query = Query(spark, tmp_path)
    initial = spark.createDataFrame([("a", 100), ("b", 200), ("b", 20), (None, 7)], "k string, start long")
    query.add(a=1, c=3)
    query.add(b=2)
    first = {"a": 101, "c": 3, "timer a": 101, "timer b": 220, "timer None": 7}
    assert query.run(initial) == {0: first, 1: {"b": 222}}
    query.wait_until_no_rows_are_stored()
    query.add(a=1, b=1)
    assert query.run(initial, parallelism=3) == {2: {"a": 102, "b": 223}}
    query.add(a=1)
    assert query.run(None, parallelism=1) == {3: {"a": 103}}


def test_a_first_batch_that_is_repeated_reads_it_again(spark: SparkSession, tmp_path: Path) -> None:
    query = Query(spark, tmp_path)
    initial = spark.createDataFrame([("a", 100)], "k string, start long")
    query.add(a=1)
    with pytest.raises(StreamingQueryException, match="the sink is broken"):
        query.run(initial, fails=True)
    assert query.run(initial, parallelism=4) == {0: {"a": 101, "timer a": 101}}
    query.wait_until_no_rows_are_stored()


def test_a_query_that_may_not_use_the_location_leaves_the_initial_state_there_alone(
    spark: SparkSession, tmp_path: Path
) -> None:
    """It would be removed under the first batch of the query that it belongs to."""
    owner, other = Query(spark, tmp_path / "owner"), Query(spark, tmp_path / "other")
    state = tmp_path / "state"
    initial = spark.createDataFrame([("a", 100)], "k string, start long")
    for query in (owner, other):
        query.add(a=1)
    assert owner.run(initial, location=state)[0]["a"] == 101
    wait_until(lambda: not list(state.rglob("*.arrow")), "the rows to be removed", 60)
    rows = state / "main-0123456789abcdef" / "initial" / "another run" / "0-0.arrow"
    rows.parent.mkdir(parents=True)
    rows.write_bytes(b"of the owner")
    before = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
    with pytest.raises(StreamingQueryException, match="other-owner"):
        other.run(initial, location=state)
    assert {path: path.read_bytes() for path in state.rglob("*") if path.is_file()} == before


class Shown(Total):
    """The same with keys that are not strings."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        return (Row(k=str(row.k), total=row.total) for row in super().handleInputRows(key, rows, timerValues))


def test_keys_are_converted_where_nothing_can_be_lost(spark: SparkSession) -> None:
    rows = statelog.key_by(spark.createDataFrame([(7, 1)], "k long, n long"), "k")
    narrow = statelog.key_by(spark.createDataFrame([(5, 7)], "start long, k int"), "k")
    found = rows.transformWithState(Shown(), OUTPUT, "update", "ProcessingTime", narrow).collect()
    assert found == [Row(k="7", total=6), Row(k="timer 7", total=6)]
    wide = statelog.key_by(spark.createDataFrame([(2**32 + 7, 5)], "k long, start long"), "k")
    for kind in ("int", "string", "double"):
        rows = statelog.key_by(spark.sql(f"SELECT {kind}(7) AS k, 1L AS n"), "k")
        message = (
            rf"keyed by \(k bigint\), the stream by \(k {kind}\): column 'k' is bigint, but the stream's is {kind}"
        )
        with pytest.raises(statelog.ConfigurationError, match=message):
            rows.transformWithState(Shown(), OUTPUT, "update", "ProcessingTime", wide)


def test_an_initial_state_that_cannot_be_computed_stops_the_query(tmp_path: Path) -> None:
    # A query's error is that of the last attempt of the task that fails first; all have to say what happened.
    driver = start_driver("broken_initial_state", tmp_path, {})
    assert driver.wait() != 0
    failure = driver.text[driver.text.rindex("pyspark.errors.exceptions") :]
    assert "initial state could not be stored" in failure
    assert "no such table" in failure
    assert "[initial-state]" in failure
