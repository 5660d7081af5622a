"""A slowly changing dimension: every version of each customer, with the time for which it is valid.

Changes of customers arrive out of order. Each becomes a version, valid until the customer's next change (null: still
valid). A change in the middle of a history also shortens the version before it. A batch returns the versions that it
has changed; a sink replaces them by customer and ``valid_from``. (Data warehouses call it a dimension of type 2.)
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from random import Random
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

import statelog
from examples.program import Rows, main, read_batches, run, write_batches

BATCHES: Final = 4
FIRST_DAY: Final = date(2024, 5, 1)
DAYS: Final = 90
TIERS: Final = ("basic", "silver", "gold")


def make_changes() -> list[Rows]:
    """Changes of eight customers over ninety days, in an order of arrival that is not that of the changes."""
    random = Random(5)
    batches: list[Rows] = [[] for _ in range(BATCHES)]
    for number in range(8):
        days = sorted(random.sample(range(DAYS), random.randint(2, 6)))
        for day in days:
            arrives = min(day + random.choice((0, 1, 25)), DAYS - 1)
            change = {"changed_on": FIRST_DAY + timedelta(days=day), "tier": random.choice(TIERS)}
            batches[arrives * BATCHES // DAYS].append({"customer": f"customer {number}", **change})
    for changes in batches:
        random.shuffle(changes)
    return batches


class History(StatefulProcessor):
    """Keeps the versions of a customer."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.versions = handle.getMapState("versions", "valid_from date", "tier string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[tuple[Any, ...]]:
        changed = {row.changed_on: row.tier for row in rows}
        for valid_from, tier in changed.items():
            self.versions.updateValue((valid_from,), (tier,))
        versions = sorted((valid_from, tier) for (valid_from,), (tier,) in self.versions.iterator())
        ends = [*(valid_from for valid_from, _ in versions[1:]), None]
        for (valid_from, tier), valid_to in zip(versions, ends, strict=True):
            if valid_from in changed or valid_to in changed:
                yield key[0], tier, valid_from, valid_to

    def close(self) -> None:
        pass


def example(spark: SparkSession, folder: Path) -> pd.DataFrame:
    """All versions of all customers."""
    write_batches(folder / "changes", make_changes())
    changes = read_batches(spark, folder / "changes", "customer string, changed_on date, tier string")
    versions = statelog.key_by(changes, "customer").transformWithState(
        History(),
        "customer string, tier string, valid_from date, valid_to date",
        outputMode="update",
        timeMode="None",
    )
    updates = run(versions, folder)
    # What a sink does that replaces rows by key.
    newest = updates.drop_duplicates(["customer", "valid_from"], keep="last").drop(columns="batch")
    return newest.sort_values(["customer", "valid_from"], ignore_index=True)


def picture(versions: pd.DataFrame, axes: Axes) -> None:
    """A line of time per customer, coloured by the version that is valid."""
    colors = dict(zip(TIERS, ("tan", "silver", "gold"), strict=True))
    for version in versions.to_dict("records"):
        start = (version["valid_from"] - FIRST_DAY).days
        end = DAYS if version["valid_to"] is None else (version["valid_to"] - FIRST_DAY).days
        axes.barh(version["customer"], end - start, left=start, color=colors[version["tier"]], edgecolor="white")
    for tier, color in colors.items():
        axes.bar(0, 0, color=color, label=tier)
    axes.set(xlabel="day", xlim=(0, DAYS))
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


if __name__ == "__main__":
    main(example, picture, __doc__)
