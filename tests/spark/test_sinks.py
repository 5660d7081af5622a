"""The sinks of docs/sinks.md: a query dies on either side of a sink's commit, and its target has every row once."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from deltalake.exceptions import CommitFailedError
from pyiceberg.exceptions import CommitFailedException
from pyspark.errors import StreamingQueryException
from pyspark.sql import Row, SparkSession

import statelog
from examples.sinks.job import AFTER, BEFORE, TOTALS, RunningTotal, expected_totals, start_query, watch_commits
from examples.sinks.kills import Death, add_payments, differences, survive
from examples.sinks.server import PostgresServer, missing_programs
from examples.sinks.targets import TARGETS, IcebergTarget, Target, Total

pytestmark = pytest.mark.spark

KILLS = 100


class Multiplied(RunningTotal):
    """Multiplies amounts by the factor in a file: the same rows do not give the same output, on purpose."""

    def __init__(self, factor: Path) -> None:
        self._factor = factor

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        factor = int(self._factor.read_text())
        multiplied = (Row(seq=row.seq, amount=row.amount * factor) for row in rows)
        return super().handleInputRows(key, multiplied, timerValues)


class Slow:
    """Rows of a batch, while whose computation something happens."""

    def __init__(self, rows: Any, meanwhile: Callable[[], None]) -> None:
        self._rows = rows
        self._meanwhile = meanwhile

    def __getattr__(self, name: str) -> Any:
        if name in ("collect", "toArrow"):
            self._meanwhile()
        return getattr(self._rows, name)


@pytest.fixture(scope="module", name="server")
def start_server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(params=sorted(TARGETS), name="sink")
def choose_sink(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "postgres" and (missing := missing_programs()):
        pytest.skip(f"no PostgreSQL ({missing[0]} is missing); ./dev postgres installs it")
    return name


@pytest.fixture(name="target")
def create_target(sink: str, tmp_path: Path, request: pytest.FixtureRequest) -> Target:
    is_served = sink == "postgres"
    address = request.getfixturevalue("server").create_database() if is_served else str(tmp_path / "target")
    target = TARGETS[sink](address)
    target.create()
    return target


def test_every_row_is_there_once_after_deaths_around_the_commit_and_a_rewind(
    spark: SparkSession, tmp_path: Path, sink: str, target: Target
) -> None:
    """Every start multiplies by another factor, so that the rows tell which start they and the state are of."""
    payments, checkpoint, factor = tmp_path / "payments", tmp_path / "checkpoint", tmp_path / "factor"
    add_payments(payments, 3, random.Random(5))

    def run(factor_now: int, side: str = "", at_commit: int = 0) -> None:
        def on_commit(passed: str, count: int) -> None:
            if (passed, count) == (side, at_commit):
                raise RuntimeError("the driver dies here")

        factor.write_text(str(factor_now))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*target.commit, watch_commits(getattr(*target.commit), on_commit))
            query = start_query(
                spark,
                target.sink(),
                payments,
                checkpoint,
                parallelism=1 + factor_now % 3,
                until_end=True,
                processor=Multiplied(factor),
            )
            with pytest.raises(StreamingQueryException, match="the driver dies here") if side else nullcontext():
                query.awaitTermination()

    def expected(*factors: int) -> list[Total]:
        folder = tmp_path / f"expected-{'-'.join(map(str, factors))}"
        folder.mkdir()
        for times, path in zip(factors, sorted(payments.iterdir()), strict=False):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            multiplied = [{**row, "amount": row["amount"] * times} for row in rows]
            (folder / path.name).write_text("".join(json.dumps(row) + "\n" for row in multiplied))
        return expected_totals(folder)

    run(1, BEFORE, at_commit=2)
    assert target.rows() == expected(1)
    run(11, AFTER, at_commit=1)
    assert target.rows() == expected(1, 11)
    run(30)
    # A file is written again, with the rows of the attempt that counts; the other sinks have the batch, and leave it.
    assert target.rows() == expected(1, *((30, 30) if sink == "files" else (11, 30)))

    query_id = json.loads((checkpoint / "metadata").read_text())["id"]
    target.sink().take_back(query_id, statelog.rewind(str(checkpoint), to=0).next_batch)
    assert target.rows() == expected_totals(tmp_path / "expected-1")
    run(100)
    assert target.rows() == expected(1, 100, 100)


def test_a_batch_that_another_driver_has_written_meanwhile_is_refused(
    spark: SparkSession, sink: str, target: Target
) -> None:
    """Both compute it at the same time. A file is replaced by an equal one."""
    totals = [(0, "ann", 5), (1, "bob", 7)]
    spark.sparkContext.setLocalProperty("sql.streaming.queryId", "a-query")
    rows = spark.createDataFrame(totals, TOTALS)
    other: Any = Slow(rows, lambda: target.sink()(rows, 0))
    refused: dict[str, AbstractContextManager[object]] = {
        "postgres": pytest.raises(RuntimeError, match="Another driver of query a-query has written batch 0"),
        "sqlite": pytest.raises(RuntimeError, match="Another driver of query a-query has written batch 0"),
        "delta": pytest.raises(CommitFailedError, match="Concurrent transaction"),
        "iceberg": pytest.raises(CommitFailedException),
        "files": nullcontext(),
    }
    with refused[sink]:
        target.sink()(other, 0)
    assert target.rows() == totals


def test_iceberg_tables_whose_commits_are_retried_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    target = IcebergTarget(str(tmp_path / "target"))
    target.create()
    with target.catalog().load_table("bank.totals").transaction() as change:
        change.remove_properties("commit.retry.num-retries")
    spark.sparkContext.setLocalProperty("sql.streaming.queryId", "a-query")
    with pytest.raises(ValueError, match=r"Set commit\.retry\.num-retries of bank\.totals to 0"):
        target.sink()(spark.createDataFrame([(0, "ann", 5)], TOTALS), 0)


@pytest.mark.extended
@pytest.mark.timeout(7200)
def test_every_row_is_there_once_after_many_kills(tmp_path: Path) -> None:
    sinks = [sink for sink in sorted(TARGETS) if sink != "postgres" or not missing_programs()]
    outcome = survive(sinks, tmp_path, KILLS, seed=1)
    assert {sink: found.differences for sink, found in outcome.sinks.items()} == {sink: [] for sink in sinks}
    assert set(outcome.kills) == set(Death)
    assert all(found.ahead >= outcome.kills[Death.AFTER] for found in outcome.sinks.values())


def test_the_comparison_finds_missing_and_repeated_rows() -> None:
    one, other = (0, "ann", 5), (1, "bob", 7)
    assert differences([one, one], [one, other]) == [f"missing: {other}", f"too many: {one}"]
    assert differences([other, one], [one, other]) == []
