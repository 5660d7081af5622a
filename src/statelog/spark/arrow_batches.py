"""Makes sending rows to Python cheaper in queries with stateful operators.

Spark ends an Arrow batch at a number of rows or of bytes (``spark.sql.execution.arrow.maxBytesPerBatch``). It adds up
the batch's bytes anew after every row, which takes longer than writing the row. Rows whose size is fixed cannot reach
that limit before the number of rows does; without the limit nothing is added up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DateType,
    DayTimeIntervalType,
    NullType,
    NumericType,
    StructType,
    TimestampNTZType,
    TimestampType,
    YearMonthIntervalType,
)

from statelog.log_fields import get_logger
from statelog.spark import internals

_log = get_logger(__name__)

_MAX_BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
_NO_LIMIT: Final = str((1 << 31) - 1)
_DEFAULT_BYTES: Final = str(64 << 20)
"""Of Spark 4.1 and later. That of 4.0 is larger, so rows that stay below this one stay below that one too."""
_MAX_ROWS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
_DEFAULT_ROWS: Final = "10000"
_VALUE_BYTES: Final = 17
"""At most, in Arrow: a decimal, and its bit of validity."""
_FIXED: Final = (
    BooleanType,
    DateType,
    DayTimeIntervalType,
    NullType,
    NumericType,
    TimestampNTZType,
    TimestampType,
    YearMonthIntervalType,
)


def lift_byte_limit(session: SparkSession, query: StreamingQuery) -> None:
    """Lift Spark's limit in the own session of a query that is about to start, if no Arrow batch can reach it.

    A limit that the user has set stays, and so does that of a query with ``foreachBatch`` or a sink in Python, which
    may send other rows there in the same session. A failure is only logged.
    """
    try:
        max_rows = int(internals.own(query, _MAX_ROWS, _DEFAULT_ROWS))
        if max_rows <= 0 or internals.own(query, _MAX_BYTES, _DEFAULT_BYTES) != _DEFAULT_BYTES:
            return
        if internals.writes_to_python(query):
            return
        schemas = internals.schemas_sent_to_python(session, query)
        if schemas is not None and stay_below(schemas, max_rows, int(_DEFAULT_BYTES)):
            internals.set_own(query, _MAX_BYTES, _NO_LIMIT)
    except Exception as error:
        _log.info("query %s: Spark adds up the size of Arrow batches after every row: %s", query.id, error)


def stay_below(schemas: Iterable[StructType], rows: int, max_bytes: int) -> bool:
    """Whether so many rows of each schema take at most so many bytes, whatever their values."""
    return all(
        (values := _fixed_values(schema)) is not None and values * _VALUE_BYTES * rows <= max_bytes
        for schema in schemas
    )


def _fixed_values(kind: DataType) -> int | None:
    """How many values of fixed size a value of a type has; None if the number or a size is not fixed."""
    if not isinstance(kind, StructType):
        return 1 if isinstance(kind, _FIXED) else None
    parts = [_fixed_values(field.dataType) for field in kind]
    return None if None in parts else 1 + sum(part for part in parts if part is not None)
