"""A batch of a real query is run again for one key: from its samples, in Python and by the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import statelog
from statelog import Options
from statelog.__main__ import main
from tests.spark.support import LEDGER, ORDERS, Job, Ledger, ledger_model, make_orders


def test_batches_of_a_query_are_replayed(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    orders = make_orders(8)
    job, options = Job(tmp_path).add(orders[:4]), Options(sample_batches=5)
    job.run(job.ledger(spark, 2, options))
    job.add(orders[4:7])
    job.run(job.ledger(spark, 3, options))
    job.require_exact()
    location, replayed = str(job.checkpoint), 0
    for batch, answers in ledger_model(orders[:7]).items():
        for answer in answers[:4] if batch else ():
            again = statelog.replay(location, batch, answer[0], Ledger())
            assert [list(row.values()) for row in again.output.to_pylist()] == [answer]
            assert again.is_equal
            own = [tuple(order.values()) for order in orders[batch] if order["user"] == answer[0]]
            assert sorted(tuple(row.values()) for row in again.rows.to_pylist()) == own
            replayed += 1
    assert replayed > 15
    user = ledger_model(orders)[6][0][0]
    arguments = ["replay", location, "--batch", "6", "--key", user]
    assert main([*arguments, "--processor", "tests.spark.support:Ledger"]) == 0
    assert "The changes are those of the log." in capsys.readouterr().out

    job.add(orders[7:])
    job.run(job.ledger(spark, 3, Options()))
    assert not list((job.state / "samples").rglob("*.arrow")), "the option was taken away"
    rows = spark.read.schema(ORDERS).json(str(sorted(job.input.iterdir())[6]))
    given = statelog.replay(location, 6, user, Ledger(), rows=rows, output=LEDGER)
    assert given.is_equal
    assert not given.is_order_known
