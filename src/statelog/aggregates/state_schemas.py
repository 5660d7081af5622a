"""Checks, on the driver, that a ready-made aggregate fits the schema of a reducing or aggregating state."""

from __future__ import annotations

from pyspark.sql.types import DataType, DecimalType, StructType

from statelog.aggregates.functions import Aggregate, Count, stored_type
from statelog.aggregates.kernels import OVERFLOWED
from statelog.convert.types import arrow_type
from statelog.errors import ConfigurationError


def require_reducing(aggregate: Aggregate, schema: StructType, subject: str) -> None:
    """Refuse an aggregate that does not make one value of the state's field of two; ConfigurationError."""
    require_aggregating(aggregate, schema, subject)
    if isinstance(aggregate, Count) or len(schema) != 1:
        raise ConfigurationError(
            f"{subject}: {aggregate} makes no value of {schema.simpleString()} of two of them.",
            hint="A reducing state takes Sum, Min or Max of its only field; an aggregating state takes Count and Mean.",
        )
    if aggregate.column != schema.names[0]:
        raise ConfigurationError(
            f"{subject}: {aggregate} names a column that the state does not have; its field is {schema.names[0]!r}.",
            hint="Name the field of the state.",
        )


def require_aggregating(aggregate: Aggregate, schema: StructType, subject: str) -> None:
    """Refuse an aggregate whose accumulator is not of the state's schema; ConfigurationError."""
    kind = schema[0].dataType
    try:
        aggregate.row_function(arrow_type(kind, subject))
        # A function of a state raises where a sum does not fit, and so needs no mark.
        accumulator = [field for field in aggregate.bind(kind).accumulator if field[0] != OVERFLOWED]
    except ConfigurationError as error:
        raise ConfigurationError(f"{subject}: {error.message}", hint=error.hint) from error
    needed = [field for _, field in accumulator]
    if len(needed) != len(schema) or not all(map(_holds, [field.dataType for field in schema], needed)):
        names = [suffix or schema.names[0] for suffix, _ in accumulator]
        shown = ", ".join(f"{name} {field.simpleString()}" for name, field in zip(names, needed, strict=True))
        raise ConfigurationError(
            f"{subject}: the accumulator of {aggregate} is '{shown}', not {schema.simpleString()}.",
            hint="Declare the state with such a schema; the names are free.",
        )


def _holds(kind: DataType, needed: DataType) -> bool:
    """Whether a field can hold an accumulator; a sum of decimals needs no more digits than the state has been given."""
    if isinstance(kind, DecimalType) and isinstance(needed, DecimalType):
        return bool(kind.scale == needed.scale)
    return stored_type(kind) == needed
