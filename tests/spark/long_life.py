"""The life of a query in one story, for every pair of places that its state and Spark's checkpoint can have."""

from __future__ import annotations

from dataclasses import replace

from pyspark.sql import SparkSession

import statelog
from statelog import Options, Step
from tests.spark.faults import KillAt, make_marker
from tests.spark.support import Job, ledger_model, make_orders


def live(session: SparkSession, job: Job, other_location: str, saved: str) -> None:
    """Run a query; kill a worker; start it again; save, rewind and restore it; and compare every batch with the model.

    `other_location` is for the restored state, and `saved` for the savepoint.
    """
    orders = make_orders(5, seed=31)
    job.add(orders[:3])
    kill = KillAt(Step.ACKING, 1, make_marker(job.root / "kill"))
    assert "Python worker exited" in job.fail(job.ledger(session, 2, Options(observer=kill)))
    job.run(job.ledger(session, 3, Options(local_directory=str(job.root / "another host"))))
    job.require_exact()

    done = statelog.savepoint(job.checkpoint_location, saved, location=job.location)
    assert (done.batch, bool(done.rows)) == (2, True)
    taken_back = statelog.rewind(job.checkpoint_location, location=job.location, to=1)
    assert (taken_back.taken_back, taken_back.removed) == ([2], ["commits/2"])
    assert taken_back.moved_to == f"{job.checkpoint_location}/statelog-rewound/1"
    job.add(orders[3:])
    job.run(job.ledger(session, 2))
    job.require_exact()

    other = replace(job.elsewhere("other"), location=other_location)
    assert statelog.restore(saved, other.checkpoint_location, location=other_location).next_batch == 3
    other.run(other.ledger(session, 2))
    answers = ledger_model(orders)
    assert other.results() == {batch: answers[batch] for batch in (3, 4)}
    assert max(job.ends()) == 4, "both names lead to one place"
