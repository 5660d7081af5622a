"""The ready-made aggregates that users name: Count, Sum and others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    FractionalType,
    IntegralType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from statelog.errors import ConfigurationError
from statelog.windows import kernels
from statelog.windows.accumulators import Aggregated

_MAX_PRECISION: Final = 38
_SUM_DIGITS: Final = 10
_COMPARABLE: Final = (
    IntegralType,
    FractionalType,
    BooleanType,
    StringType,
    BinaryType,
    DateType,
    TimestampType,
    TimestampNTZType,
)


@dataclass(frozen=True)
class Aggregate(ABC):
    """Base class of the ready-made aggregates.

    Parameters
    ----------
    column : str
        The input column.
    name : str
        Name of the output column; by default like ``sum(amount)``.
    """

    column: str | None
    name: str = ""

    def alias(self, name: str) -> Self:
        """The same aggregate with another name for its output column."""
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"{type(self).__name__}.alias: {name!r} is no name of a column.")
        return replace(self, name=name)

    @property
    def output_name(self) -> str:
        """Name of the output column."""
        return self.name or str(self)

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}({self.column})"

    @abstractmethod
    def bind(self, kind: DataType | None) -> BoundAggregate:
        """Choose kernel, accumulator and result type for a column.

        Parameters
        ----------
        kind : DataType or None
            The column's type; None if the aggregate has no column.

        Returns
        -------
        BoundAggregate
            The aggregate for that type.

        Raises
        ------
        ConfigurationError
            If it cannot aggregate values of the type.
        """

    def _require(self, kind: DataType | None, kinds: tuple[type[DataType], ...], expected: str) -> DataType:
        if not isinstance(kind, kinds):
            shown = "no column" if kind is None else kind.simpleString()
            raise ConfigurationError(
                f"{type(self).__name__}({self.column!r}): the column is {shown}.", hint=f"It must be {expected}."
            )
        return kind


@dataclass(frozen=True)
class BoundAggregate:
    """An aggregate of a column whose type is known."""

    kernel: kernels.Kernel
    accumulator: tuple[tuple[str, DataType], ...]
    """Suffix and type of each field, whose name is the output column's, with ``.suffix`` if that is not empty."""
    result: DataType


@dataclass(frozen=True)
class Count(Aggregate):
    """Number of rows, or of the values of a column that are not null."""

    column: str | None = None
    name: str = ""

    def __str__(self) -> str:
        return "count" if self.column is None else f"count({self.column})"

    def bind(self, kind: DataType | None) -> BoundAggregate:
        return BoundAggregate(kernels.CountKernel(), (("", LongType()),), LongType())


@dataclass(frozen=True)
class Sum(Aggregate):
    """Sum of the values; null if there are none."""

    def bind(self, kind: DataType | None) -> BoundAggregate:
        kind = self._require(kind, (IntegralType, FractionalType), "a number")
        result: DataType = LongType() if isinstance(kind, IntegralType) else DoubleType()
        if isinstance(kind, DecimalType):
            result = DecimalType(min(kind.precision + _SUM_DIGITS, _MAX_PRECISION), kind.scale)
        return BoundAggregate(kernels.SumKernel(), (("", result),), result)


@dataclass(frozen=True)
class Min(Aggregate):
    """The least value; null if there are none."""

    def bind(self, kind: DataType | None) -> BoundAggregate:
        kind = self._require(kind, _COMPARABLE, _COMPARABLE_TEXT)
        return BoundAggregate(kernels.ExtremeKernel(is_max=False), (("", stored_type(kind)),), kind)


@dataclass(frozen=True)
class Max(Aggregate):
    """The greatest value; null if there are none."""

    def bind(self, kind: DataType | None) -> BoundAggregate:
        kind = self._require(kind, _COMPARABLE, _COMPARABLE_TEXT)
        return BoundAggregate(kernels.ExtremeKernel(is_max=True), (("", stored_type(kind)),), kind)


@dataclass(frozen=True)
class Mean(Aggregate):
    """Arithmetic mean of the values; null if there are none."""

    def bind(self, kind: DataType | None) -> BoundAggregate:
        self._require(kind, (IntegralType, DoubleType, FloatType), "a number and no decimal")
        return BoundAggregate(kernels.MeanKernel(), (("sum", DoubleType()), ("count", LongType())), DoubleType())


@dataclass(frozen=True)
class First(Aggregate):
    """The value of the first row, null or not."""

    def bind(self, kind: DataType | None) -> BoundAggregate:
        kind = self._require(kind, (DataType,), "a column")
        accumulator = (("", stored_type(kind)), ("time_ms", LongType()))
        return BoundAggregate(kernels.FirstLastKernel(is_last=False), accumulator, kind)


@dataclass(frozen=True)
class Last(Aggregate):
    """The value of the last row, null or not."""

    def bind(self, kind: DataType | None) -> BoundAggregate:
        kind = self._require(kind, (DataType,), "a column")
        accumulator = (("", stored_type(kind)), ("time_ms", LongType()))
        return BoundAggregate(kernels.FirstLastKernel(is_last=True), accumulator, kind)


@dataclass(frozen=True)
class Collect(Aggregate):
    """All values that are not null, as an array."""

    def bind(self, kind: DataType | None) -> BoundAggregate:
        kind = self._require(kind, (DataType,), "a column")
        return BoundAggregate(kernels.CollectKernel(), (("", ArrayType(stored_type(kind))),), ArrayType(kind))


@dataclass(frozen=True)
class CountDistinct(Aggregate):
    """Number of different values that are not null."""

    def __str__(self) -> str:
        return f"count_distinct({self.column})"

    def bind(self, kind: DataType | None) -> BoundAggregate:
        kind = self._require(kind, _COMPARABLE, _COMPARABLE_TEXT)
        return BoundAggregate(kernels.DistinctKernel(), (("", ArrayType(stored_type(kind))),), LongType())


_COMPARABLE_TEXT: Final = "a number, boolean, string, binary, date or timestamp"


def bind_aggregates(aggregates: Sequence[Aggregate], schema: StructType) -> tuple[Aggregated, StructType]:
    """Bind aggregates to the input's columns; returns their computation and their output columns.

    Raises ConfigurationError for an unknown column, an unsupported type, or two results of one name.
    """
    bound_kernels: list[tuple[kernels.Kernel, int | None, slice]] = []
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
        column, kind = _column_of(aggregate, schema)
        bound = aggregate.bind(kind)
        fields = slice(len(accumulator), len(accumulator) + len(bound.accumulator))
        bound_kernels.append((bound.kernel, column, fields))
        accumulator += [
            StructField(f"{name}.{field}" if field else name, field_kind) for field, field_kind in bound.accumulator
        ]
        result.append(StructField(name, bound.result))
    if not result:
        raise ConfigurationError("agg takes at least one aggregate.", hint="For example statelog.Count().")
    return Aggregated(StructType(accumulator), bound_kernels), StructType(result)


def stored_type(kind: DataType) -> DataType:
    """The type of values in stored form: timestamps become microseconds, which compare and convert fast."""
    if isinstance(kind, (TimestampType, TimestampNTZType)):
        return LongType()
    if isinstance(kind, ArrayType):
        return ArrayType(stored_type(kind.elementType), kind.containsNull)
    return kind


def _column_of(aggregate: Aggregate, schema: StructType) -> tuple[int | None, DataType | None]:
    column = aggregate.column
    if column is None and isinstance(aggregate, Count):
        return None, None
    if column not in schema.names:
        raise ConfigurationError(
            f"{type(aggregate).__name__}({column!r}): there is no such column.",
            hint=f"The columns are {', '.join(schema.names)}.",
        )
    return schema.names.index(column), schema[column].dataType
