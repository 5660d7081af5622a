"""The streaming job: the total of each account after each payment, into each of some sinks by a query of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
    "STARTING",
    "TOTALS",
    "RunningTotal",
    "expected_totals",
    "sign_of",
    "start_query",
    "watch_commits",
]

PAYMENTS: Final = "seq long, account string, amount long"
TOTALS: Final = "seq long, account string, total long"

BEFORE, AFTER = "before", "after"
STARTING, COMMITTING, PAUSED = "starting", "committing", "paused"
"""Signs by which the job says that its queries start, that the first commit of a sink begins, and that a sink waits."""

_PAUSE_S: Final = 240.0


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
    totals = statelog.key_by(payments, "account", parallelism=parallelism).transformWithState(
        processor or RunningTotal(), TOTALS, "append", "None"
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


def sign_of(signs: Path, sink: str, sign: str) -> Path:
    """The file by which the job gives a sign for a sink."""
    return signs / f"{sink}-{sign}"


@click.command()
@click.option("--target", "targets", nargs=2, multiple=True, required=True, help="A sink, and its target's address.")
@click.option("--payments", required=True, type=click.Path(path_type=Path))
@click.option(
    "--checkpoint", required=True, type=click.Path(path_type=Path), help="Folder of the queries' checkpoints."
)
@click.option("--signs", required=True, type=click.Path(path_type=Path), help="Folder of the signs.")
@click.option("--parallelism", type=int, default=2)
@click.option("--pause", type=click.Choice([BEFORE, AFTER]), help="On which side of a commit to wait to be killed.")
@click.option("--at-commit", type=int, default=1, help="Of which commit of each sink.")
@click.option("--until-end", is_flag=True, help="End when everything is read.")
def main(
    targets: Sequence[tuple[str, str]],
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

    def on_commit(sink: str, side: str, count: int) -> None:
        sign_of(signs, sink, COMMITTING).touch()
        if side == pause and count == at_commit:
            sign_of(signs, sink, PAUSED).touch()
            time.sleep(_PAUSE_S)

    queries = []
    for sink, address in targets:
        target = TARGETS[sink](address)
        owner, name = target.commit
        setattr(owner, name, watch_commits(getattr(owner, name), partial(on_commit, sink)))
        sign_of(signs, sink, STARTING).touch()
        query = start_query(
            spark, target.sink(), payments, checkpoint / sink, parallelism=parallelism, until_end=until_end
        )
        queries.append(query)
    for query in queries:
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
