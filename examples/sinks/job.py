"""The streaming job: the total of each account after each payment, into one of the sinks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import click
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle, StreamingQuery

import statelog
from examples.sinks.targets import TARGETS, Total

__all__ = [
    "AFTER",
    "BEFORE",
    "COMMITTING",
    "PAUSED",
    "TOTALS",
    "RunningTotal",
    "expected_totals",
    "start_query",
    "watch_commits",
]

PAYMENTS: Final = "seq long, account string, amount long"
TOTALS: Final = "seq long, account string, total long"

BEFORE, AFTER = "before", "after"
COMMITTING, PAUSED = "committing", "paused"
"""Files by which the job says that a first commit has begun, and that it waits to be killed."""

_PAUSE_S: Final = 120.0


class RunningTotal(StatefulProcessor):
    """Emits each payment with the account's total. The same rows always give the same output: it sorts them first."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.total = handle.getValueState("total", "total long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        (total,) = self.total.get() or (0,)
        for payment in sorted(rows, key=attrgetter("seq")):
            total += payment.amount
            yield Row(seq=payment.seq, account=key[0], total=total)
        self.total.update((total,))

    def close(self) -> None:
        pass


def start_query(
    spark: SparkSession,
    sink: Callable[[DataFrame, int], None],
    folder: Path,
    checkpoint: Path,
    *,
    parallelism: int,
    until_end: bool,
    processor: StatefulProcessor | None = None,
) -> StreamingQuery:
    """Start the query on a folder of payments, a file per batch; it ends where the files do, or never."""
    payments = spark.readStream.schema(PAYMENTS).option("maxFilesPerTrigger", 1).json(str(folder))
    totals = statelog.key_by(payments, "account").transformWithState(
        processor or RunningTotal(), TOTALS, "append", "None", parallelism=parallelism
    )
    writer = totals.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint))
    return (writer.trigger(availableNow=True) if until_end else writer).start()


def expected_totals(folder: Path) -> list[Total]:
    """What the target must hold in the end, computed without Spark."""
    totals: dict[str, int] = {}
    expected = []
    lines = [line for path in folder.glob("*.json") for line in path.read_text().splitlines()]
    for payment in sorted(map(json.loads, lines), key=lambda payment: payment["seq"]):
        account = payment["account"]
        totals[account] = totals.get(account, 0) + payment["amount"]
        expected.append((payment["seq"], account, totals[account]))
    return expected


def watch_commits(commit: Callable[..., Any], on_commit: Callable[[str, int], None]) -> Callable[..., Any]:
    """A sink's commit that says when it is about to happen, and when it has happened; commits are counted from 1."""
    count = 0

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        on_commit(BEFORE, count)
        result = commit(*args, **kwargs)
        on_commit(AFTER, count)
        return result

    return watched


@click.command()
@click.argument("sink", type=click.Choice(sorted(TARGETS)))
@click.option("--address", required=True, help="Where the sink's target is.")
@click.option("--payments", required=True, type=click.Path(path_type=Path))
@click.option("--checkpoint", required=True, type=click.Path(path_type=Path))
@click.option(
    "--signs", required=True, type=click.Path(path_type=Path), help="Folder of the files that say where it is."
)
@click.option("--parallelism", type=int, default=2)
@click.option("--pause", type=click.Choice([BEFORE, AFTER]), help="On which side of a commit to wait to be killed.")
@click.option("--at-commit", type=int, default=1, help="Of which commit.")
@click.option("--until-end", is_flag=True, help="End when everything is read.")
def main(
    sink: str,
    address: str,
    payments: Path,
    checkpoint: Path,
    signs: Path,
    parallelism: int,
    pause: str | None,
    at_commit: int,
    until_end: bool,
) -> None:
    """Keep the totals of all accounts."""
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    target = TARGETS[sink](address)

    def on_commit(side: str, count: int) -> None:
        (signs / COMMITTING).touch()
        if side == pause and count == at_commit:
            (signs / PAUSED).touch()
            time.sleep(_PAUSE_S)

    owner, name = target.commit
    setattr(owner, name, watch_commits(getattr(owner, name), on_commit))
    start_query(
        spark, target.sink(), payments, checkpoint, parallelism=parallelism, until_end=until_end
    ).awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
