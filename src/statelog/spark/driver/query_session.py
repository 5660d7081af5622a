"""What a query needs of its own session when it starts: adaptive execution, Arrow batches, and its file sink."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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

from statelog.errors import ConfigurationError, ErrorKind
from statelog.log_fields import get_logger
from statelog.spark.driver import internals

_log: Final = get_logger(__name__)


# ---- Adaptive execution ----


_ADAPTIVE: Final = "spark.sql.adaptive.streaming.stateless.enabled"


def plan_without_adaptive_execution(query: StreamingQuery) -> None:
    """Have Spark plan a query that is about to start as it plans its own stateful queries; a failure is only logged.

    Spark 4.1 and later plans queries without operators of its own adaptively. Each shuffle is a job then, planned when
    the one before is done, which takes longer than a small batch. Besides,

    - it drops the readers of a shuffle that turns out to have no rows, and then looks for the event times of
      `withWatermark` in the plan that remains: the watermark would stand still while an operator returns no rows;
    - it plans several reads of one Python source in threads that call the source's process over one socket and take
      each other's answers (Spark 4.3.0), so the query would fail or hang.

    What ``foreachBatch`` does with the rows is no streaming plan, and stays adaptive.
    """
    try:
        internals.set_own(query, _ADAPTIVE, "false")
    except Exception as error:
        _log.warning(
            "query %s may run with adaptive execution; to prevent this, set %s=false: %s", query.id, _ADAPTIVE, error
        )


# ---- Arrow batches ----


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
    """Lift Spark's byte limit in a starting query's own session, if no Arrow batch can reach it.

    Spark ends an Arrow batch at a number of rows or of bytes, and adds up the bytes anew after every row, which takes
    longer than writing the row. Rows of fixed size cannot reach the limit of bytes before that of rows; without a limit
    nothing is added up.

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
        _log.info(
            "query %s: the byte limit of Arrow batches could not be lifted, so Spark adds up their size after every"
            " row: %s",
            query.id,
            error,
        )


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


# ---- File sinks ----


_LOG: Final = "_spark_metadata"
"""The sink's log in its folder; an entry has the number of a batch, and each tenth one ends with ``.compact``."""


def check_file_sink(session: SparkSession, query: StreamingQuery, has_state_of: Callable[[int], bool]) -> None:
    """Make a query that is about to start fail if its sink would leave out batches whose rows or state are missing.

    Spark's file sink has a log of its own, beside its files and outside of the checkpoint. It skips each batch up to
    the newest one there without computing it. That is right for a batch whose commit Spark lost in a crash. But a
    rewind, or a new query in an old folder, begins further back: its batches would read input and write nothing.

    `has_state_of` says whether the query has the checkpoint of a batch: a rewind takes back the checkpoint of a
    batch that the sink still has. A failure of the check is only logged.
    """
    try:
        sink, first = internals.file_sink(query), internals.first_batch(query)
        if sink is None or sink[1] < first:
            return
        folder, newest = sink
        if newest > first or not internals.is_planned(query, first) or not has_state_of(first):
            internals.fail(session, query, _left_out(query, folder, first, newest))
    except Exception as error:
        _log.warning("query %s: the batches that its file sink has written could not be looked up: %s", query.id, error)


def _left_out(query: StreamingQuery, folder: str, first: int, newest: int) -> ConfigurationError:
    remedy = "Start the query with another folder for its output."
    if first > 0:
        remedy = (
            f"Remove the files of batch {first} and of later batches from {folder}/{_LOG}, including those that end"
            " with .compact or .crc. Do not use an empty folder: its log would not begin with batch 0, so Spark could"
            " not read the output."
        )
    return ConfigurationError(
        f"Query {query.id} begins with batch {first}, but Spark's file sink in {folder} has batches up to {newest},"
        " from another query or from before a rewind. It would skip batches with these numbers; rows would be missing.",
        kind=ErrorKind.OTHER_OWNER,
        hint=remedy,
    )
