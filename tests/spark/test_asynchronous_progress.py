"""Asynchronous progress tracking: Spark stores some of its commits, so a restart repeats several batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import statelog
from statelog import Options, Step, Tuning
from tests.spark.faults import make_marker
from tests.spark.jobs.ledger import run_asynchronously
from tests.spark.support import Job, ledger_model, make_orders, start_driver

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

_NEVER_MS = 600_000
"""After the first batch Spark stores nothing for so long."""
_OPTIONS: dict[str, Any] = {
    "retained_checkpoints": 2,
    "materialization_interval_s": 0,
    "log_min_age_s": 0,
    "orphan_min_age_s": 0,
}
_SAME_OPTIONS = Options(
    retained_checkpoints=2,
    materialization_interval_s=0,
    tuning=Tuning(log_min_age_s=0, orphan_min_age_s=0),
)


def run_until_killed(job: Job, step: Step, batch: int, interval_ms: int) -> None:
    """Run the query in a process that is killed at a step of a batch."""
    marker = make_marker(job.root / f"kill-{step}-{batch}")
    arguments = {"parallelism": 2, "progress_interval_ms": interval_ms, "options": _OPTIONS}
    driver = start_driver("ledger", job.root, arguments | {"kills": [{"at": step, "batch": batch, "marker": marker}]})
    driver.wait()
    assert not Path(marker).exists(), driver.end


def newest(job: Job, folder: str) -> int:
    """The newest batch in one of Spark's logs."""
    return max(int(path.name) for path in (job.checkpoint / folder).glob("[0-9]*"))


def require_exact(job: Job) -> None:
    """The state is that of all orders, each handled once."""
    expected = {
        user: (count, amount) for rows in ledger_model(job.batches()).values() for user, count, amount, *_ in rows
    }
    accounts = statelog.read_state(job.checkpoint, state="account").read_all().to_pylist()
    found = {row["key_user"]: (row["value_count"], row["value_amount"]) for row in accounts}
    assert found == {user: account for user, account in expected.items() if account[0]}


def test_a_restart_goes_back_to_the_last_stored_commit(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(14, seed=37))
    run_until_killed(job, Step.DURABLE, 9, _NEVER_MS)
    assert newest(job, "commits") == newest(job, "offsets") == 0
    checkpoints = [each.batch for each in statelog.list_checkpoints(job.checkpoint)]
    assert checkpoints == list(range(10)), (
        "those up to the stored commit stay, although two would be enough for a rewind"
    )

    run_until_killed(job, Step.LAST_ACK, 4, _NEVER_MS)
    assert newest(job, "commits") <= 1
    run_asynchronously(job, job.ledger(spark, 3, _SAME_OPTIONS), _NEVER_MS)
    require_exact(job)


def test_batches_that_spark_would_repeat_as_one_are_planned_anew(spark: SparkSession, tmp_path: Path) -> None:
    orders = make_orders(13, seed=38)
    job = Job(tmp_path).add(orders[:10])
    run_until_killed(job, Step.DURABLE, 6, _NEVER_MS)
    offsets = job.checkpoint / "offsets"
    # The plan of a batch that was stored, and whose commit was not.
    version, metadata, offset = (offsets / "0").read_text().split("\n")
    (offsets / "5").write_text("\n".join([version, metadata, json.dumps({**json.loads(offset), "logOffset": 5})]))

    run_asynchronously(job, job.ledger(spark, 2, _SAME_OPTIONS), _NEVER_MS)
    assert list(job.checkpoint.glob("statelog-rewound/1/offsets/5"))
    require_exact(job)
    job.add(orders[10:])
    run_asynchronously(job, job.ledger(spark, 2, _SAME_OPTIONS), 0)
    require_exact(job)


def test_kills_at_any_step_lose_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """Spark stores a commit every few batches."""
    job = Job(tmp_path).add(make_orders(24, seed=40))
    for step, batch in ((Step.LAST_ACK, 5), (Step.DURABLE, 9), (Step.RESTORED, 13)):
        run_until_killed(job, step, batch, 700)
    run_asynchronously(job, job.ledger(spark, 1, _SAME_OPTIONS), 700)
    require_exact(job)
