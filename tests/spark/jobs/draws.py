"""A driver program: a query that draws random numbers, into a sink behind write-ahead output, and its death."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import DataStreamWriter, StatefulProcessor

import statelog
from statelog import Options
from tests.spark.jobs.ledger import note_jvm, run_main
from tests.spark.support import ForEachBatch, Job, Order, make_session

DRAWS = "seq long, user string, draw long, total long"


class Death(StrEnum):
    """Where the driver and its JVM are killed."""

    STARTING = "while the query starts"
    BEFORE = "before the sink writes a batch that is stored"
    AFTER = "between the sink's write and Spark's commit"
    ANYWHERE = "at any moment"


class Draws(StatefulProcessor):
    """Adds the amount of each order to the user's total as often as chance says."""

    def init(self, handle: Any) -> None:
        self._total = handle.getValueState("total", "total long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        (total,) = self._total.get() or (0,)
        for order in sorted(rows, key=attrgetter("seq")):
            draw = secrets.randbelow(10**6)
            total += draw * order.amount
            yield Row(seq=order.seq, user=key[0], draw=draw, total=total)
        self._total.update((total,))

    def close(self) -> None:
        pass


class Deliveries:
    """A sink that writes each call's rows to a file of its own, which appears as a whole."""

    def __init__(self, job: Job, on_call: Callable[[Death], None] = lambda _: None) -> None:
        self._folder = job.output
        self._on_call = on_call
        self._folder.mkdir(exist_ok=True)

    def __call__(self, df: DataFrame, batch: int) -> None:
        self._on_call(Death.BEFORE)
        rows = [list(row) for row in df.withColumn("partition", F.spark_partition_id()).collect()]
        hidden = self._folder / f".{uuid.uuid4()}"
        hidden.write_text(json.dumps({"batch": batch, "rows": sorted(rows)}))
        hidden.rename(self._folder / f"{batch:06}-{hidden.name[1:]}.json")
        self._on_call(Death.AFTER)


def draws(
    session: SparkSession, job: Job, sink: ForEachBatch, *, parallelism: int, output_parallelism: int, options: Options
) -> DataStreamWriter:
    """The query's writer."""
    rows = statelog.key_by(job.read(session), "user", parallelism=parallelism, options=options).transformWithState(
        Draws(), DRAWS, "append", "None"
    )
    writer = statelog.write_ahead(rows, sink, parallelism=output_parallelism, options=options)
    return writer.option("checkpointLocation", str(job.checkpoint))


def replayed(orders: Sequence[Order], rows: list[list[Any]]) -> dict[str, int]:
    """The totals of all users by their orders and the draws of a sink's rows; each row is compared with them."""
    totals: dict[str, int] = defaultdict(int)
    expected = []
    draw_of = {seq: draw for seq, _, draw, _ in rows}
    for order in sorted(orders, key=lambda order: order["seq"]):
        draw = draw_of.get(order["seq"])
        assert draw is not None, f"order {order['seq']} is missing"
        totals[order["user"]] += draw * order["amount"]
        expected.append([order["seq"], order["user"], draw, totals[order["user"]]])
    assert sorted(rows) == expected
    return dict(totals)


def main(arguments: dict[str, Any]) -> None:
    """Run the query until it dies."""
    session = make_session()
    note_jvm(session, arguments)
    job = Job(Path(arguments["root"]))
    jvm, death, rng = int(Path(arguments["jvm_pid_file"]).read_text()), Death(arguments["death"]), random.Random()
    rng.seed(arguments["seed"])
    calls, at_call = 0, rng.randrange(1, 3)

    def die() -> None:
        os.kill(jvm, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def die_later(most_s: float) -> None:
        def wait() -> None:
            time.sleep(rng.uniform(0, most_s))
            die()

        threading.Thread(target=wait, daemon=True).start()

    def on_call(passed: Death) -> None:
        nonlocal calls
        calls += passed is Death.BEFORE
        if passed is death and calls == at_call:
            die()
        if death is Death.ANYWHERE and passed is Death.BEFORE and calls == 1:
            die_later(1.5)

    options = Options(inline_budget_bytes=arguments["inline_bytes"])
    query = draws(
        session,
        job,
        Deliveries(job, on_call),
        parallelism=arguments["parallelism"],
        output_parallelism=arguments["output_parallelism"],
        options=options,
    ).start()
    if death is Death.STARTING:
        die_later(3.0)
    query.awaitTermination()


if __name__ == "__main__":
    run_main(main)
