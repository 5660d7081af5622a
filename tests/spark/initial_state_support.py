"""What the tests of :mod:`tests.spark.test_initial_state` and others share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

import statelog
from tests.spark.faults import wait_until
from tests.spark.inputs import add_json

OUTPUT = "k string, total long"


class Total(StatefulProcessor):
    """Adds up; a key without rows of its own shows itself by a timer."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._total = handle.getValueState("total", "total long")

    def handleInitialState(self, key: Any, initialState: Row, timerValues: Any) -> None:
        self._add(initialState.start)
        self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs())

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        yield Row(k=key[0], total=self._add(sum(row.n for row in rows)))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(k=f"timer {key.k}", total=self._add(0))

    def _add(self, number: int) -> int:
        total = (self._total.get() or (0,))[0] + number
        self._total.update((total,))
        return total

    def close(self) -> None:
        pass


class Query:
    """The query's input, sink and checkpoint in a directory."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self._spark = spark
        self._root = root

    def add(self, **numbers: int) -> None:
        """A file of input, which is a batch."""
        add_json(self._root / "input", [[{"k": key, "n": number} for key, number in numbers.items()]])

    def run(
        self, initial: DataFrame | None, *, parallelism: int = 2, fails: bool = False, location: Path | None = None
    ) -> dict[int, dict[str, int]]:
        """Run to the end of the input; return the output by batch."""
        found: dict[int, dict[str, int]] = {}

        def keep(rows: DataFrame, batch: int) -> None:
            found[batch] = {row.k: row.total for row in rows.collect()}
            if fails:
                raise RuntimeError("the sink is broken")

        source = self._spark.readStream.schema("k string, n long").option("maxFilesPerTrigger", 1)
        totals = statelog.key_by(
            source.json(str(self._root / "input")),
            "k",
            parallelism=parallelism,
            location=None if location is None else str(location),
        ).transformWithState(
            Total(), OUTPUT, "update", "ProcessingTime", None if initial is None else statelog.key_by(initial, "k")
        )
        checkpoint = str(self._root / "checkpoint")
        query = totals.writeStream.foreachBatch(keep).option("checkpointLocation", checkpoint)
        query.trigger(availableNow=True).start().awaitTermination()
        return found

    def wait_until_no_rows_are_stored(self) -> None:
        """Rows of an initial state go soon after the query ended."""
        wait_until(lambda: not list((self._root / "checkpoint").rglob("*.arrow")), "the rows to be removed", 60)
