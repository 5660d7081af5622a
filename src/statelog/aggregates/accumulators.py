"""Several aggregates side by side: their accumulators are the fields of one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Protocol

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    DoubleType,
    FractionalType,
    IntegralType,
    LongType,
    StructField,
    StructType,
)

from statelog.aggregates.functions import (
    Aggregate,
    ApproxCountDistinct,
    Collect,
    Count,
    CountDistinct,
    First,
    Last,
    Max,
    Min,
    Quantiles,
    stored_type,
)
from statelog.aggregates.groups import Groups, in_types, stored_column, stored_name, to_given
from statelog.aggregates.kernels import MAX_PRECISION, Columns, Kernel
from statelog.convert.types import arrow_type
from statelog.errors import ConfigurationError
from statelog.operators.keyed.indexing import Int64s

_KEEPS_VALUES: Final = (Min, Max, First, Last, Collect, CountDistinct)
"""Aggregates whose accumulators have values of the column."""


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

    @cached_property
    def _types(self) -> list[pa.DataType]:
        return held_types(self.schema)

    def lift(self, rows: pa.RecordBatch, times: pa.Array) -> Columns:
        """The accumulator of each row; `times`, int64, order them where no column does."""
        held: Columns = []
        for part in self._parts:
            column = times if part.column is None else stored_column(rows.column(part.column))
            by = times if part.by is None else stored_column(rows.column(part.by))
            held += part.kernel.lift(column, by)
        return in_types(held, self._types)

    def reduce(self, held: Columns, groups: Groups) -> Columns:
        """Merge the accumulators of each group; a group without any gets nulls, or zeros."""
        return [field for part in self._parts for field in part.kernel.reduce(held[part.fields], groups)]

    def results(self, held: Columns) -> Results:
        """The aggregates' values of accumulators."""
        return Results([to_given(part.kernel.result(held[part.fields]), part.result) for part in self._parts])


def held_types(schema: StructType) -> list[pa.DataType]:
    """The Arrow types of the fields of a row of state."""
    return [arrow_type(field.dataType, field.name) for field in schema]


def bind_aggregates(aggregates: Sequence[Aggregate], schema: StructType, *, ansi: bool) -> Accumulators:
    """Bind aggregates to the input's columns; their names are :func:`resolved`.

    Raises ConfigurationError for an unsupported type, or two results of one name.
    """
    parts: list[_Part] = []
    accumulator: list[StructField] = []
    result: list[StructField] = []
    for aggregate in aggregates:
        name = aggregate.output_name
        if any(field.name == name for field in result):
            raise ConfigurationError(f"Two aggregates are named {name!r}.", hint="Name them with .alias(name).")
        column, by = (
            None if each is None else schema.names.index(each) for each in (aggregate.column, aggregate.ordered_by)
        )
        kind, order = (None if place is None else schema[place].dataType for place in (column, by))
        bound = aggregate.bind(kind, order, ansi=ansi)
        fields = slice(len(accumulator), len(accumulator) + len(bound.accumulator))
        parts.append(_Part(bound.kernel, column, by, fields, arrow_type(bound.result, f"aggregate {name!r}")))
        accumulator += [StructField(stored_name(name, suffix), kind) for suffix, kind in bound.accumulator]
        result.append(StructField(name, bound.result))
    if not result:
        raise ConfigurationError("agg takes at least one aggregate.", hint="Pass one, such as statelog.Count().")
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


def column_types(aggregates: Sequence[Aggregate], schema: StructType) -> dict[str, str]:
    """For each value whose accumulator does not show the types of its columns, the types, as text.

    A sketch of hashes has the widest type whose values have the same hashes, see
    :func:`statelog.aggregates.hyperloglog.value_hashes`. Integers and timestamps are stored alike.
    """
    types: dict[str, str] = {}
    for aggregate in aggregates:
        kinds: list[str] = []
        if isinstance(aggregate, ApproxCountDistinct):
            kinds.append(_hashed_type(_kind_of(aggregate.column, schema)).simpleString())
        elif isinstance(aggregate, _KEEPS_VALUES):
            kinds.append(_stored_as_longs(_kind_of(aggregate.column, schema)))
        if aggregate.ordered_by is not None:
            kinds.append(_stored_as_longs(_kind_of(aggregate.ordered_by, schema)))
        if any(kinds):
            types[aggregate.output_name] = " by ".join(kind or "other" for kind in kinds)
    return types


def _hashed_type(kind: DataType) -> DataType:
    if isinstance(kind, DecimalType):
        return DecimalType(MAX_PRECISION, kind.scale)
    if isinstance(kind, IntegralType):
        return LongType()
    return DoubleType() if isinstance(kind, FractionalType) else kind


def _stored_as_longs(kind: DataType) -> str:
    """The name of a type that is stored as longs, or of arrays of them; empty for other types."""
    if isinstance(kind, ArrayType):
        element = _stored_as_longs(kind.elementType)
        return f"array<{element}>" if element else ""
    if isinstance(kind, IntegralType):
        return LongType().simpleString()
    return kind.simpleString() if stored_type(kind) == LongType() else ""


# ---- Columns ----


def resolved(aggregate: Aggregate, schema: StructType, *, is_case_sensitive: bool) -> Aggregate:
    """The aggregate with the names of its columns as they are in the input; ConfigurationError if there are none."""
    if not isinstance(aggregate, Aggregate):
        raise ConfigurationError(
            f"agg takes aggregates such as statelog.Sum('amount'), not {aggregate!r:.80}.",
            hint="For your own function, use aggregate().",
        )
    names = {"column": aggregate.column, "by": aggregate.ordered_by}
    if aggregate.column is None and isinstance(aggregate, Count):
        return aggregate
    found: dict[str, str] = {}
    for argument, name in names.items():
        if argument == "column" or name is not None:
            place = column_place(name, schema.names, is_case_sensitive=is_case_sensitive)
            if place is None:
                raise ConfigurationError(
                    f"{type(aggregate).__name__}({name!r}): there is no such column.",
                    hint=f"The columns are {', '.join(schema.names)}.",
                )
            found[argument] = schema.names[place]
    return replace(aggregate, **found)


def column_place(name: object, names: Sequence[str], *, is_case_sensitive: bool) -> int | None:
    """The column that a name means, as in Spark: it may be in backquotes. None if there is none, or several."""
    if not isinstance(name, str):
        return None
    if name in names:
        return names.index(name)
    if len(name) > 2 and name[0] == name[-1] == "`":
        name = name[1:-1].replace("``", "`")
        if name in names:
            return names.index(name)
    if is_case_sensitive:
        return None
    places = [place for place, each in enumerate(names) if each.lower() == name.lower()]
    return places[0] if len(places) == 1 else None


def _kind_of(column: str | None, schema: StructType) -> DataType:
    assert column is not None
    return schema[column].dataType
