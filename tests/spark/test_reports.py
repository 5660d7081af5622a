"""Checkpoints' metrics in Spark's own progress: the same numbers that the observer gets, and no trace in the output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

import statelog
from statelog import CheckpointMetrics, Observer, OperatorProcessor, Options, Sum, TumblingWindows
from tests.spark.inputs import add_json

pytestmark = [pytest.mark.spark, pytest.mark.smoke]

INPUT = "user string, n long, time timestamp"
OUTPUT = "user string not null, n long not null, part struct<a: string not null, b: array<long>> not null"
NARROW = "user string not null, n long not null"


class Noted(Observer):
    """Keeps the metrics of all checkpoints of this process."""

    seen: ClassVar[list[CheckpointMetrics]] = []

    def checkpoint(self, metrics: CheckpointMetrics) -> None:
        self.seen.append(metrics)


class Rows(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        count = (self._count.get() or (0,))[0] + len(list(rows))
        self._count.update((count,))
        if key[0] != "silent":
            yield Row(user=key[0], n=count, part=Row(a=key[0], b=None))

    def close(self) -> None:
        pass


class Frames(Rows):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        yield pd.DataFrame({"user": [key[0]], "n": [sum(map(len, rows))]})


class Columns(statelog.ArrowProcessor):
    def init(self, handle: statelog.ArrowHandle) -> None:
        handle.getValueState("unused", "n long")

    def process(self, batch: statelog.ArrowBatch) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({name: batch.rows[name].combine_chunks() for name in ("user", "n")})


class Unkeyed(OperatorProcessor):
    def init(self, handle: Any) -> None:
        self._seen = handle.getListState("seen", "n long")

    def process(self, rows: Iterator[Row], context: Any) -> Iterator[Row]:
        for row in rows:
            yield Row(user=row.user, n=row.n)


def _write(root: Path, batches: list[list[str]]) -> None:
    add_json(
        root / "input",
        [[{"user": user, "n": 1, "time": f"2024-01-01T00:0{number}:00Z"} for user in users]
         for number, users in enumerate(batches)],
    )  # fmt: skip


def _stream(spark: SparkSession, root: Path) -> DataFrame:
    return spark.readStream.schema(INPUT).option("maxFilesPerTrigger", 1).json(str(root / "input"))


def _observed(query: Any) -> dict[tuple[int, str], dict[str, Any]]:
    """The observed metrics of statelog's operators, by batch and name."""
    query.awaitTermination()
    return {
        (progress.batchId, name): dict(row.checkpoint)
        for progress in query.recentProgress
        for name, row in progress.observedMetrics.items()
        if name.startswith("statelog.")
    }


def test_progress_has_the_numbers_of_every_operator_and_the_output_none_of_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    _write(tmp_path, [["ann", "bob", "ann"], ["silent"]])
    Noted.seen.clear()
    own: dict[str, Any] = {"options": Options(observer=Noted()), "parallelism": 2}
    stream = _stream(spark, tmp_path)

    def keyed(uid: str, **more: Any) -> statelog.KeyedStream:
        return statelog.key_by(stream, "user", uid=uid, **own | more)

    rows = keyed("rows").transformWithState(Rows(), OUTPUT, "update", "None")
    assert rows.schema == StructType.fromDDL(OUTPUT)
    never_on_hidden_rows = F.udf(lambda user: 1 // len(user) >= 0, "boolean")
    parts = [
        rows.filter(never_on_hidden_rows("user")).select("user", "n"),
        keyed("frames", options=Options(observer=Noted(), redact_keys=True))
        .transformWithStateInPandas(Frames(), NARROW, "update", "None"),
        keyed("columns").transformWithStateInArrow(Columns(), NARROW, "update", "None"),
        keyed("sums").agg(Sum("n")),
        keyed("windows").window(TumblingWindows(60_000), timeMode="ProcessingTime")
        .agg(Sum("n")).select("user", "sum(n)"),
        statelog.process(stream, Unkeyed(), NARROW, "append", uid="unkeyed", **own),
    ]  # fmt: skip
    output = parts[0].repartition(1)
    for part in parts[1:]:
        output = output.union(part.repartition(1))
    rows_of: dict[int, list[str]] = {}

    def save(df: DataFrame, batch: int) -> None:
        rows_of[batch] = sorted(row.user for row in df.collect())
        assert df.count() == len(rows_of[batch]), "a batch may be computed several times"

    query = (
        output.writeStream.outputMode("update")
        .foreachBatch(save)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    found = _observed(query)

    assert rows_of[0] == ["ann"] * 7 + ["bob"] * 5
    told = {(one.batch, f"statelog.{one.uid}"): one.numbers() for one in Noted.seen}
    assert found == told
    assert {name for _, name in found} == {
        f"statelog.{uid}" for uid in ("rows", "frames", "columns", "sums", "windows", "unkeyed")
    }
    assert [found[batch, "statelog.rows"]["input_rows"] for batch in (0, 1)] == [3, 1]
    assert found[0, "statelog.rows"]["changed_bytes"] > 0
    assert isinstance(found[0, "statelog.rows"]["changes"], int)
    assert isinstance(found[0, "statelog.rows"]["processor_s"], float)
    _require_parts({(one.batch, one.uid): one for one in Noted.seen})


def _require_parts(found: dict[tuple[int, str], CheckpointMetrics]) -> None:
    """The metrics of subtasks, states and keys, after ann (twice), bob and then silent."""
    rows = found[0, "rows"]
    assert [subtask.subtask for subtask in rows.subtasks] == [0, 1]
    assert sum(subtask.input_rows for subtask in rows.subtasks) == 3
    assert sum(subtask.changed_bytes for subtask in rows.subtasks) == rows.changed_bytes
    assert all(subtask.wait_s > 0 for subtask in rows.subtasks)
    assert max(subtask.processor_s for subtask in rows.subtasks) == rows.processor_s > 0
    assert rows.states["count"].rows == 2
    assert found[1, "rows"].states["count"].rows == 3
    assert found[1, "rows"].state_bytes > 0
    assert found[0, "unkeyed"].states["seen"].rows == 0
    for uid in ("rows", "columns", "sums", "windows"):
        [hot] = found[0, uid].hot_keys
        assert (hot.rows, hot.key) == (2, ("ann",)), uid
        assert found[0, uid].hottest_key_rows == 2
        assert (hot.rows, hot.key_group) in [(group.rows, group.key_group) for group in found[0, uid].hot_key_groups]
        assert found[1, uid].hot_keys == []
    assert [(hot.rows, hot.key) for hot in found[0, "frames"].hot_keys] == [(2, None)], "its keys are redacted"
