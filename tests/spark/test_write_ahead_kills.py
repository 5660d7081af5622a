"""Write-ahead output of a query that draws random numbers, and whose driver and JVM are killed again and again."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import statelog
from statelog import Options
from tests.spark.jobs.draws import Death, Deliveries, draws, replayed
from tests.spark.support import Job, make_orders, start_driver

pytestmark = [pytest.mark.spark, pytest.mark.timeout(7200)]

FILES_PER_LIFE = 3


def test_both_deliveries_of_a_batch_are_the_same_and_fit_the_state_after_a_kill(
    spark: SparkSession, tmp_path: Path
) -> None:
    job = Job(tmp_path)
    live(job, Death.AFTER, 0)
    end(spark, job)
    batches, deliveries = require_exact(job)
    assert deliveries == batches + 1


@pytest.mark.extended
def test_every_delivery_is_the_same_and_fits_the_state_after_many_kills(spark: SparkSession, tmp_path: Path) -> None:
    job, kills, again, rng = Job(tmp_path), list(Death) * 10, Counter[Death](), random.Random(21)
    rng.shuffle(kills)
    for life, death in enumerate(kills):
        live(job, death, life)
        again[death] += is_ahead(job)
    end(spark, job)
    batches, deliveries = require_exact(job)
    print(f"{len(kills)} kills; {batches} batches in {deliveries} deliveries; ahead of Spark: {again}")
    assert again[Death.AFTER] == 10
    assert deliveries > batches


def live(job: Job, death: Death, life: int) -> None:
    """Run the query with new input and other numbers of subtasks, until it is killed."""
    add_orders(job)
    rng = random.Random(life)
    arguments = {
        "death": death,
        "seed": life,
        "parallelism": rng.randrange(1, 4),
        "output_parallelism": rng.randrange(2, 5),
        "inline_bytes": rng.choice([0, 8 << 20]),
    }
    driver = start_driver("draws", job.root, arguments)
    assert driver.wait() == -signal.SIGKILL, driver.end


def end(spark: SparkSession, job: Job) -> None:
    """Run the query to the end of all input."""
    writer = draws(spark, job, Deliveries(job), parallelism=2, output_parallelism=2, options=Options())
    writer.trigger(availableNow=True).start().awaitTermination()


def add_orders(job: Job) -> None:
    """Add so much input that the query does not come to its end before it is killed."""
    first = len(list(job.input.iterdir())) if job.input.exists() else 0
    batches = make_orders(FILES_PER_LIFE, seed=first)
    offset = first * len(batches[0])
    job.add([[{**order, "seq": order["seq"] + offset} for order in orders] for orders in batches])


def is_ahead(job: Job) -> bool:
    """Whether the sink has a batch that Spark has not committed."""
    written = max(int(path.name[:6]) for path in job.output.glob("[0-9]*"))
    return written > max((int(path.name) for path in (job.checkpoint / "commits").glob("[0-9]*")), default=-1)


def require_exact(job: Job) -> tuple[int, int]:
    """The sink's rows are those of all input, once, and agree with the state; returns batches and deliveries."""
    deliveries: dict[int, list[list[list[Any]]]] = defaultdict(list)
    partitions = 0
    for path in sorted(job.output.glob("[0-9]*")):
        delivery = json.loads(path.read_text())
        deliveries[delivery["batch"]].append([row[:-1] for row in delivery["rows"]])
        partitions = max(partitions, len({row[-1] for row in delivery["rows"]}))
    assert sorted(deliveries) == list(range(len(deliveries)))
    assert partitions > 1
    for batch, found in deliveries.items():
        assert all(rows == found[0] for rows in found), f"batch {batch} was delivered with different rows"

    rows = [row for batch in sorted(deliveries) for row in deliveries[batch][0]]
    totals = replayed([order for orders in job.batches() for order in orders], rows)
    stored = statelog.read_state(job.checkpoint, uid="main", state="total").read_all().to_pylist()
    assert {row["key_user"]: row["value_total"] for row in stored} == totals
    return len(deliveries), sum(map(len, deliveries.values()))
