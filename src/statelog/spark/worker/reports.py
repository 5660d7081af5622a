"""Brings a checkpoint's metrics into Spark's own progress: by a row that only an observation sees.

The rows of a streaming operator have one more column, the report, which is null. The task whose ack completes the
checkpoint gets its numbers with the reply, and returns one more row that has them as its report. The plan observes the
report (``observedMetrics`` of Spark's progress), and then removes that row and the column.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DoubleType, StructField, StructType

from statelog.convert.types import arrow_type
from statelog.metrics import CheckpointMetrics, meanings
from statelog.rpc.messages import Acked

REPORT_COLUMN: Final = "__statelog_report"
OBSERVED: Final = "checkpoint"
"""The name of the numbers in an operator's entry of ``observedMetrics``."""

_REPORT: Final = pa.field(REPORT_COLUMN, pa.list_(pa.float64()))
_LARGEST_BYTES: Final = 16
"""No value of fixed size takes more, in Arrow."""
_LONG: Final = frozenset(name for name, kind in CheckpointMetrics.__annotations__.items() if kind == "int")
"""The numbers without a fraction."""


# ---- The plan ----


def observation_of(uid: str) -> str:
    """The name of an operator's entry in ``observedMetrics``."""
    return f"statelog.{uid}"


def reported_schema(output: StructType) -> StructType:
    """The output's columns with the report behind them."""
    return StructType([*output.fields, StructField(REPORT_COLUMN, ArrayType(DoubleType()))])


def observed(rows: DataFrame, uid: str) -> DataFrame:
    """Observe the report, and remove it.

    A batch may be computed several times, and then has several reports, of which the largest counts: with the later
    revision, and of one revision all have the same numbers.
    """
    # One aggregate, and one result: Spark generates code for each aggregate, in every task of every batch.
    largest = F.array(F.max(F.col(REPORT_COLUMN)))
    numbers = F.get(F.transform(largest, lambda report: F.struct(*_numbers(report))), F.lit(0))
    seen = rows.observe(observation_of(uid), numbers.alias(OBSERVED))
    return seen.filter(F.col(REPORT_COLUMN).isNull()).drop(REPORT_COLUMN)


def _numbers(report: Column) -> list[Column]:
    numbers = [(name, F.get(report, F.lit(place))) for place, name in enumerate(meanings())]
    return [(number.cast("long") if name in _LONG else number).alias(name) for name, number in numbers]


# ---- The tasks ----


def with_report(output: Generator[pa.RecordBatch, None, Acked], schema: StructType) -> Iterator[pa.RecordBatch]:
    """A task's output with the report column; if its ack has completed the checkpoint, one more row has the report."""
    columns: pa.Schema | None = None
    while True:
        try:
            rows = next(output)
        except StopIteration as end:
            acked: Acked = end.value
            break
        columns = rows.schema
        yield _with_column(rows, pa.nulls(rows.num_rows, _REPORT.type))
    if acked.numbers:
        yield _with_column(_hidden_row(columns, schema), pa.array([acked.numbers], _REPORT.type))


def _with_column(rows: pa.RecordBatch, report: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*rows.columns, report], schema=rows.schema.append(_REPORT))


def _hidden_row(columns: pa.Schema | None, schema: StructType) -> pa.RecordBatch:
    """A row of nulls. Spark does not look for nulls in columns that are declared without any, so these have zeros."""
    if columns is None:
        columns = pa.schema([(field.name, arrow_type(field.dataType, "output column")) for field in schema])
    nulls = [
        pa.nulls(1, column.type) if field.nullable else zero(column.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(nulls, schema=columns)


def zero(kind: pa.DataType) -> pa.Array:
    """One value of an Arrow type that is not null: 0, the empty string or list, a struct of such values."""
    if pa.types.is_null(kind):
        return pa.nulls(1)
    zeros = pa.py_buffer(bytes(_LARGEST_BYTES))
    children = [zero(kind.field(index).type) for index in range(kind.num_fields)]
    return pa.Array.from_buffers(kind, 1, [None] + [zeros] * (kind.num_buffers - 1), 0, children=children)
