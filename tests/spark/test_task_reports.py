"""The report of a task: a column of nulls, and one row more after the ack that completes the checkpoint."""

from __future__ import annotations

from collections.abc import Generator

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructType

from statelog.rpc.messages import Acked
from statelog.spark.worker.worker import REPORT_COLUMN, reported_schema, with_report, zero

OUTPUT = StructType().add("a", LongType(), False).add("b", StringType(), False).add("c", StringType())
ROWS = pa.record_batch({"a": [1, 2], "b": pa.array(["x", "y"], pa.large_string()), "c": [None, "z"]})


def task(batches: list[pa.RecordBatch], acked: Acked) -> Generator[pa.RecordBatch, None, Acked]:
    yield from batches
    return acked


def test_only_the_task_that_completes_the_checkpoint_reports() -> None:
    [rows] = with_report(task([ROWS], Acked()), OUTPUT)
    assert rows.drop_columns([REPORT_COLUMN]).equals(ROWS)
    assert rows.column(REPORT_COLUMN).to_pylist() == [None, None]
    assert list(with_report(task([], Acked()), OUTPUT)) == []


@pytest.mark.parametrize("batches", [[], [ROWS]], ids=["no output", "output"])
def test_the_report_is_a_row_of_the_same_types_without_nulls_where_none_are_declared(
    batches: list[pa.RecordBatch],
) -> None:
    *rows, report = with_report(task(batches, Acked(numbers=[3.0, None])), OUTPUT)
    assert report.to_pylist() == [{"a": 0, "b": "", "c": None, REPORT_COLUMN: [3.0, None]}]
    assert all(one.schema == report.schema for one in rows)
    assert report.schema.names == reported_schema(OUTPUT).names


@pytest.mark.parametrize(
    "kind",
    [
        *(pa.bool_(), pa.int8(), pa.float64(), pa.decimal128(38, 3), pa.date32(), pa.timestamp("us", "UTC")),
        *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.month_day_nano_interval()),
        *(pa.list_(pa.string()), pa.map_(pa.string(), pa.int64()), pa.struct([("a", pa.list_(pa.int8()))])),
    ],
    ids=str,
)
def test_a_zero_is_a_valid_value(kind: pa.DataType) -> None:
    made = zero(kind)
    made.validate(full=True)
    assert (made.type, len(made), made.null_count) == (kind, 1, 0)
    assert made[0].as_py() is not None
