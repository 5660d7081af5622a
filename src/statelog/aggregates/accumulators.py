"""Several aggregates side by side: their accumulators are the fields of one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
from pyspark.sql.types import (
    DataType,
    DecimalType,
    DoubleType,
    FractionalType,
    IntegralType,
    LongType,
    StructField,
    StructType,
)

from statelog.aggregates.functions import Aggregate, ApproxCountDistinct, Count, Quantiles, stored_type
from statelog.aggregates.groups import Groups, Int64s
from statelog.aggregates.kernels import MAX_PRECISION, Columns, Kernel
from statelog.aggregates.stored import stored_column, to_given
from statelog.convert.types import arrow_type
from statelog.errors import ConfigurationError


@dataclass(frozen=True)
class Results:
    """Output rows of keys."""

    columns: Columns
    owners: Int64s | None = None
    """The key of each row, by position; None if each key has one row."""


class Reduction(Protocol):
    """Makes the rows of a key one row of state, however they are split into parts; picklable."""

    @property
    def schema(self) -> StructType:
        """The fields of the row of state."""

    @property
    def result(self) -> StructType:
        """The columns of the output but for the key."""

    @property
    def depends_on_arrival(self) -> bool:
        """Whether the result depends on the order in which rows arrive."""

    @property
    def adds_floats(self) -> bool:
        """Whether the last digits of a result depend on the order in which rows are added."""

    def lift(self, rows: pa.RecordBatch, times: pa.Array) -> Columns:
        """The row of state of each row alone; `times`, int64, order rows where no column does."""

    def reduce(self, held: Columns, groups: Groups) -> Columns:
        """Merge the rows of state of each group, in their order."""

    def results(self, held: Columns) -> Results:
        """The output of rows of state."""


@dataclass(frozen=True)
class _Part:
    """One aggregate of several."""

    kernel: Kernel
    column: int | None
    """The input column; None counts rows."""
    by: int | None
    """The input column that orders the rows; None is their time, or the order of arrival."""
    fields: slice
    """Its fields in the row."""
    result: pa.DataType


@dataclass(frozen=True)
class Accumulators:
    """Computes several aggregates on columns."""

    schema: StructType
    """The fields of the row."""
    result: StructType
    """The aggregates' values."""
    depends_on_arrival: bool
    """Whether a value depends on the order in which rows arrive."""
    _parts: Sequence[_Part]

    @property
    def adds_floats(self) -> bool:
        """Whether the last digits of a value depend on the order in which rows are added."""
        return any(part.kernel.adds_floats for part in self._parts)

    def lift(self, rows: pa.RecordBatch, times: pa.Array) -> Columns:
        """The accumulator of each row; `times`, int64, order them where no column does."""
        held: Columns = []
        for part in self._parts:
            column = times if part.column is None else stored_column(rows.column(part.column))
            by = times if part.by is None else stored_column(rows.column(part.by))
            held += part.kernel.lift(column, by)
        return held

    def reduce(self, held: Columns, groups: Groups) -> Columns:
        """Merge the accumulators of each group; a group without any gets nulls, or zeros."""
        return [field for part in self._parts for field in part.kernel.reduce(held[part.fields], groups)]

    def results(self, held: Columns) -> Results:
        """The aggregates' values of accumulators."""
        return Results([to_given(part.kernel.result(held[part.fields]), part.result) for part in self._parts])


def bind_aggregates(aggregates: Sequence[Aggregate], schema: StructType, *, ansi: bool) -> Accumulators:
    """Bind aggregates to the input's columns.

    Raises ConfigurationError for an unknown column, an unsupported type, or two results of one name.
    """
    parts: list[_Part] = []
    accumulator: list[StructField] = []
    result: list[StructField] = []
    for aggregate in aggregates:
        if not isinstance(aggregate, Aggregate):
            raise ConfigurationError(
                f"agg takes aggregates such as statelog.Sum('amount'), not {aggregate!r:.80}.",
                hint="For a function of your own use aggregate().",
            )
        name = aggregate.output_name
        if any(field.name == name for field in result):
            raise ConfigurationError(f"Two aggregates are named {name!r}.", hint="Name them with .alias(name).")
        column, kind = (
            (None, None)
            if aggregate.column is None and isinstance(aggregate, Count)
            else _column(aggregate, aggregate.column, schema)
        )
        by, order = (None, None) if aggregate.ordered_by is None else _column(aggregate, aggregate.ordered_by, schema)
        bound = aggregate.bind(kind, order, ansi=ansi)
        fields = slice(len(accumulator), len(accumulator) + len(bound.accumulator))
        parts.append(_Part(bound.kernel, column, by, fields, arrow_type(bound.result, f"aggregate {name!r}")))
        accumulator += [
            StructField(f"{name}.{field}" if field else name, field_kind) for field, field_kind in bound.accumulator
        ]
        result.append(StructField(name, bound.result))
    if not result:
        raise ConfigurationError("agg takes at least one aggregate.", hint="For example statelog.Count().")
    return Accumulators(
        StructType(accumulator), StructType(result), any(one.depends_on_arrival for one in aggregates), parts
    )


def value_details(aggregates: Sequence[Aggregate], result: StructType) -> dict[str, str]:
    """For each value of `result` that does not follow from its accumulator alone, what it follows from, as text.

    That is the type of values that are stored in another form, and the fractions of quantiles.
    """
    details: dict[str, str] = {}
    for aggregate, field in zip(aggregates, result, strict=True):
        if isinstance(aggregate, Quantiles):
            details[field.name] = ", ".join(map(repr, aggregate.fractions))
        elif stored_type(field.dataType) != field.dataType:
            details[field.name] = field.dataType.simpleString()
    return details


def hashed_types(aggregates: Sequence[Aggregate], schema: StructType) -> dict[str, str]:
    """For each value that counts hashes of values, the type as which they are hashed, as text.

    See :func:`statelog.aggregates.value_hashes.value_hashes`: the widest type whose values have the same hashes.
    """
    return {
        aggregate.output_name: _hashed_type(_column(aggregate, aggregate.column, schema)[1]).simpleString()
        for aggregate in aggregates
        if isinstance(aggregate, ApproxCountDistinct)
    }


def _hashed_type(kind: DataType) -> DataType:
    if isinstance(kind, DecimalType):
        return DecimalType(MAX_PRECISION, kind.scale)
    if isinstance(kind, IntegralType):
        return LongType()
    return DoubleType() if isinstance(kind, FractionalType) else kind


def _column(aggregate: Aggregate, name: str | None, schema: StructType) -> tuple[int, DataType]:
    if name not in schema.names:
        raise ConfigurationError(
            f"{type(aggregate).__name__}({name!r}): there is no such column.",
            hint=f"The columns are {', '.join(schema.names)}.",
        )
    return schema.names.index(name), schema[name].dataType
