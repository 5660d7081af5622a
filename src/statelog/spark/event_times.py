"""The kinds of time that an operator has, and the event-time columns of its input and output."""

from __future__ import annotations

from pyspark.sql.types import DataType, IntegralType, StructType, TimestampNTZType, TimestampType

from statelog.convert.times import TimeMode
from statelog.errors import ConfigurationError
from statelog.operators.event_time import EventTime
from statelog.runs.schema import TimeDomain
from statelog.runs.times import Watermark


def time_domains(mode: TimeMode, watermark: object) -> frozenset[TimeDomain]:
    """The kinds of time that an operator has; `watermark` is its own, or None."""
    own = {TimeDomain.EVENT} if watermark is not None else set()
    return frozenset(own | ({mode.domain} if mode.domain is not None else set()))


def own_event_time(schema: StructType, watermark: Watermark, *, drops_late: bool) -> EventTime:
    """The event time that an operator's own watermark follows; raises ConfigurationError if a column is missing."""

    def position(name: str, kinds: tuple[type[DataType], ...], expected: str) -> int:
        if name not in schema.names or not isinstance(schema[name].dataType, kinds):
            columns = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in schema)
            raise ConfigurationError(
                f"The watermark names column {name!r}, which is not {expected} of the input.",
                hint=f"The columns are: {columns}.",
            )
        return schema.names.index(name)

    column = position(watermark.column, (TimestampType, TimestampNTZType), "a timestamp column")
    if watermark.input_column is None:
        return EventTime(column, drops_late, watermark.inputs, max_ahead_ms=watermark.max_ahead_ms)
    inputs = position(watermark.input_column, (IntegralType,), "an integer column")
    return EventTime(column, drops_late, watermark.inputs, inputs, max_ahead_ms=watermark.max_ahead_ms)


def result_event_time(output: StructType, column: str, *, has_watermark: bool) -> EventTime | None:
    """The event time of an operator's output; None if `column` is empty.

    Raises ConfigurationError if the output lacks the column, or the input has no watermark.
    """
    if not column:
        return None
    if not has_watermark:
        raise ConfigurationError(
            f"eventTimeColumnName is {column!r}, but the input has no watermark.",
            hint="Call withWatermark(column, delay) on the DataFrame before key_by, or pass watermark=.",
        )
    places = [index for index, name in enumerate(output.names) if name.lower() == column.lower()]
    if not places or not isinstance(output[places[0]].dataType, (TimestampType, TimestampNTZType)):
        raise ConfigurationError(
            f"eventTimeColumnName is {column!r}, which is not a timestamp column of the output type.",
            hint=f"The output columns are: {output.simpleString()}.",
        )
    return EventTime(places[0])
