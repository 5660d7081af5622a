"""Branches of real queries: beside a running parent, with another parallelism, and after the parent has gone on."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import statelog
from statelog import Options
from tests.spark.faults import wait_until
from tests.spark.support import Job, ledger_model, make_orders

pytestmark = pytest.mark.spark

FORGETFUL = Options(retained_checkpoints=2, materialization_interval_s=0.2, inline_budget_bytes=0)


def test_a_branch_of_a_running_query_goes_on_beside_it(spark: SparkSession, tmp_path: Path) -> None:
    orders = make_orders(12, seed=5)
    parent, branch = Job(tmp_path).add(orders[:5]), Job(tmp_path).elsewhere("branch")
    query = (
        parent.ledger(spark, 2, FORGETFUL)
        .writeStream.outputMode("update")
        .foreachBatch(parent.save)
        .option("checkpointLocation", str(parent.checkpoint))
        .start()
    )
    try:
        wait_until(lambda: len(list(parent.output.glob("*.json"))) >= 3, "three batches")
        made = statelog.branch(parent.checkpoint, branch.checkpoint)
        assert made.query_id != query.id
        parent.add(orders[5:9])
        wait_until(lambda: len(list(parent.output.glob("*.json"))) == 9, "nine batches", 120)
        branch.run(branch.ledger(spark, 3, FORGETFUL))
        parent.add(orders[9:])
        branch.run(branch.ledger(spark, 1, FORGETFUL))
        wait_until(lambda: len(list(parent.output.glob("*.json"))) == 12, "all batches", 120)
    finally:
        query.stop()
    answers = ledger_model(orders)
    assert parent.results() == answers
    assert branch.results() == {batch: answers[batch] for batch in range(made.next_batch, 12)}
    compared = statelog.compare(parent.checkpoint, branch.checkpoint, at=11)
    assert sorted(one.state for one in compared if one.is_equal) == ["account", "history", "items"]


def test_a_branch_goes_back_and_takes_another_way(spark: SparkSession, tmp_path: Path) -> None:
    orders, others = make_orders(6, seed=6), make_orders(9, seed=7)
    parent = Job(tmp_path).add(orders)
    parent.run(parent.ledger(spark, 2))
    branch = parent.elsewhere("branch")
    statelog.branch(parent.checkpoint, branch.checkpoint, at=3)
    for path in sorted(parent.input.iterdir())[4:]:
        path.unlink()
    parent.add(others[6:])
    branch.run(branch.ledger(spark, 3))
    answers = ledger_model([*orders[:4], *others[6:]])
    assert branch.results() == {batch: answers[batch] for batch in (4, 5, 6)}
