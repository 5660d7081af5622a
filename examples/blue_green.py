"""A new version of a job takes over from the running one, after it has proved to have the same state.

The *blue* job keeps the balance of each account, booking by booking. Two new versions could replace it: *green* adds up
a whole batch at once; *red* does so too, but forgets refunds. Each begins as a branch of blue, with blue's state but
without copying it, and reads the same input beside it. Then ``statelog.compare`` says in which key groups the states
differ: for green in none. So blue stops, and green continues with the rest of the input.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

import statelog
from examples.program import Rows, main, read_batches, run, write_batches

BRANCHED: Final = 3
COMPARED: Final = 5
BATCHES: Final = 7


def make_bookings() -> list[Rows]:
    """Bookings of some accounts."""
    random = Random(6)
    return [
        [{"account": f"account {random.randrange(40):02}", "cents": random.randint(-5_000, 9_000)} for _ in range(60)]
        for _ in range(BATCHES)
    ]


class Blue(StatefulProcessor):
    """Books one row at a time."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.balance = handle.getValueState("balance", "cents long, bookings long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[tuple[Any, ...]]:
        cents, bookings = self.balance.get() or (0, 0)
        for row in rows:
            cents, bookings = cents + row.cents, bookings + 1
            self.balance.update((cents, bookings))
        yield key[0], cents, bookings

    def close(self) -> None:
        pass


class Green(Blue):
    """Books all rows of a batch at once."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[tuple[Any, ...]]:
        booked = [self._amount(row) for row in rows]
        cents, bookings = self.balance.get() or (0, 0)
        cents, bookings = cents + sum(booked), bookings + len(booked)
        self.balance.update((cents, bookings))
        yield key[0], cents, bookings

    def _amount(self, row: Row) -> int:
        return int(row.cents)


class Red(Green):
    """The same, with a mistake."""

    def _amount(self, row: Row) -> int:
        return max(int(row.cents), 0)


def balances(spark: SparkSession, folder: Path, processor: StatefulProcessor) -> DataFrame:
    """The job, in one of its versions."""
    bookings = read_batches(spark, folder / "bookings", "account string, cents long")
    return statelog.key_by(bookings, "account").transformWithState(
        processor, "account string, cents long, bookings long", outputMode="update", timeMode="None"
    )


def example(spark: SparkSession, folder: Path) -> pd.DataFrame:
    """What each version has returned, and how many key groups of its state differed from blue's when compared."""
    bookings = make_bookings()
    write_batches(folder / "bookings", bookings[:BRANCHED])
    returned = {"blue": run(balances(spark, folder, Blue()), folder / "blue")}
    for version in ("green", "red"):
        statelog.branch(folder / "blue" / "checkpoint", folder / version / "checkpoint")

    write_batches(folder / "bookings", bookings[BRANCHED:COMPARED])
    for version, processor in (("blue", Blue()), ("green", Green()), ("red", Red())):
        returned[version] = run(balances(spark, folder, processor), folder / version)
    different = {"blue": 0}
    for version in ("green", "red"):
        [balance] = statelog.compare(folder / "blue" / "checkpoint", folder / version / "checkpoint")
        different[version] = len(balance.different_groups)

    chosen, processor = ("blue", Blue()) if different["green"] else ("green", Green())
    write_batches(folder / "bookings", bookings[COMPARED:])
    returned[chosen] = run(balances(spark, folder, processor), folder / chosen)
    rows = pd.concat([returned[version].assign(version=version) for version in returned], ignore_index=True)
    return rows.assign(different=rows.version.map(different)).sort_values(
        ["version", "batch", "account"], ignore_index=True
    )


def picture(rows: pd.DataFrame, axes: Axes) -> None:
    """The sum of all balances, after each batch of each version."""
    for width, version in enumerate(("red", "green", "blue")):
        is_own, is_before = rows.version == version, (rows.version == "blue") & (rows.batch < BRANCHED)
        balances = rows[is_own | is_before].pivot(index="batch", columns="account", values="cents").ffill().fillna(0)
        euros = balances.loc[0 if version == "blue" else BRANCHED :].sum(axis=1) / 100
        label = version if version == "blue" else f"{version}: {rows[is_own].different.iloc[0]} key groups differ"
        axes.plot(euros.index, euros, color=version, marker="o", linewidth=5 - 2 * width, alpha=0.8, label=label)
    for batch, text in ((BRANCHED, "branch"), (COMPARED, "compare, switch")):
        axes.axvline(batch - 0.5, color="black", linewidth=0.6, linestyle=":")
        axes.text(batch - 0.5, 1.0, f" {text}", transform=axes.get_xaxis_transform(), fontsize=8)
    axes.set(xlabel="batch", ylabel="all balances, euros")
    axes.legend(frameon=False)


if __name__ == "__main__":
    main(example, picture, __doc__)
