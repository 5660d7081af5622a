"""Exactly-once events from a source that delivers at least once, with state that stays small.

Each event has an id, and may be delivered again up to ten minutes later. An id is remembered until the watermark, ten
minutes behind the newest event, says that no more copies of it can come. So the state has the ids of some minutes only,
however long the stream runs.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from pyspark.sql import SparkSession

import statelog
from examples.program import Rows, after, main, read_batches, run, write_batches

DELAY_MIN: Final = 10
BATCHES: Final = 7
MINUTES_PER_BATCH: Final = 8


def make_deliveries() -> list[Rows]:
    """Events in order of arrival; a third of them comes again, some of these several times."""
    random = Random(2)
    deliveries: list[tuple[float, dict[str, Any]]] = []
    for number in range(900):
        minute = random.uniform(0, BATCHES * MINUTES_PER_BATCH)
        event = {"id": f"event-{number:04}", "at": after(minute), "cents": random.randint(1, 9_999)}
        copies = random.choice((0, 0, 0, 0, 1, 2))
        deliveries += [(minute + delay, event) for delay in (0, *(random.uniform(0, 9.5) for _ in range(copies)))]
    batches: list[Rows] = [[] for _ in range(BATCHES)]
    for minute, event in sorted(deliveries, key=lambda each: each[0]):
        if minute < BATCHES * MINUTES_PER_BATCH:
            batches[int(minute) // MINUTES_PER_BATCH].append(event)
    return batches


def example(spark: SparkSession, folder: Path) -> pd.DataFrame:
    """By batch: how many events were delivered, how many of them passed, and how many ids were remembered after it."""
    write_batches(folder / "deliveries", make_deliveries())
    deliveries = read_batches(spark, folder / "deliveries", "id string, at timestamp, cents long")
    deliveries = deliveries.withWatermark("at", f"{DELAY_MIN} minutes")
    options = statelog.Options(retained_checkpoints=BATCHES + 2)  # so that the state after each batch can be read below
    events = run(statelog.key_by(deliveries, "id", options=options).dedup(within_watermark=True), folder)

    assert events.id.is_unique
    passed = events.groupby("batch").cents.agg(["size", "sum"])
    return pd.DataFrame(
        {
            "delivered": [len(batch) for batch in make_deliveries()],
            "passed": passed["size"],
            "cents": passed["sum"],
            "remembered": [
                statelog.read_state(folder / "checkpoint", state="seen", at=batch).read_all().num_rows
                for batch in range(BATCHES)
            ],
        }
    )


def picture(batches: pd.DataFrame, axes: Axes) -> None:
    """What came and what passed in each batch, and the size of the state after it."""
    axes.bar(batches.index, batches.delivered, color="lightgrey", label="delivered")
    axes.bar(batches.index, batches.passed, width=0.5, color="C0", label="passed, each event once")
    axes.plot(batches.index, batches.passed.cumsum(), color="C2", linestyle=":", label="events so far")
    axes.plot(batches.index, batches.remembered, color="C1", marker="o", label="ids remembered in the state")
    axes.set(xlabel=f"batch, {MINUTES_PER_BATCH} minutes each")
    axes.legend(frameon=False)


if __name__ == "__main__":
    main(example, picture, __doc__)
