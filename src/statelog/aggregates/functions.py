"""The ready-made aggregates that users name: Count, Sum and others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FractionalType,
    IntegralType,
    LongType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from statelog.aggregates.hyperloglog import DEFAULT_RSD, HyperLogLogKernel, lg_k_of
from statelog.aggregates.kernels import (
    MAX_PRECISION,
    MEAN_DIGITS,
    OVERFLOWED,
    SUM_DIGITS,
    CountKernel,
    DecimalMeanKernel,
    DecimalSumKernel,
    ExtremeKernel,
    FirstLastKernel,
    Kernel,
    MeanKernel,
    SumKernel,
    VarianceKernel,
)
from statelog.aggregates.list_kernels import MAX_LIST_BYTES, DistinctKernel, ListKernel
from statelog.aggregates.quantiles import DEFAULT_COMPRESSION, QuantilesKernel
from statelog.aggregates.row_functions import CountFunction, FoldFunction, MeanFunction, greatest, least, sum_of
from statelog.convert.types import arrow_type
from statelog.errors import ConfigurationError
from statelog.operators.keyed.values import AggregateFunction

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
_COMPARABLE_TEXT: Final = "a number, boolean, string, binary, date or timestamp"
_NUMBERS: Final = (IntegralType, FractionalType)
_LEAST_RSD: Final = 0.0025
_MOST_RSD: Final = 0.25
_LEAST_COMPRESSION: Final = 20
_MOST_COMPRESSION: Final = 2000


@dataclass(frozen=True)
class BoundAggregate:
    """An aggregate of a column whose type is known."""

    kernel: Kernel
    accumulator: tuple[tuple[str, DataType], ...]
    """Suffix and type of each field; see :func:`statelog.aggregates.groups.stored_name`."""
    result: DataType


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
    name: str = field(default="", kw_only=True)

    def alias(self, name: str) -> Self:
        """The same aggregate with another name for its output column."""
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"{type(self).__name__}.alias: {name!r} is not a column name.")
        return replace(self, name=name)

    @property
    def output_name(self) -> str:
        """Name of the output column."""
        return self.name or str(self)

    @property
    def ordered_by(self) -> str | None:
        """The column that orders the rows; None if their order does not matter, or if it is that of arrival."""
        return None

    @property
    def depends_on_arrival(self) -> bool:
        """Whether the value depends on the order in which rows arrive."""
        return False

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}({self.column})"

    @abstractmethod
    def bind(self, kind: DataType | None, by: DataType | None = None, *, ansi: bool = True) -> BoundAggregate:
        """Choose kernel, accumulator and result type for a column.

        Parameters
        ----------
        kind : DataType or None
            The column's type; None if the aggregate has no column.
        by : DataType, optional
            The type of the column that orders the rows.
        ansi : bool
            Whether a sum that does not fit its type is an error; otherwise it wraps around, or is null from then on if
            it is a decimal.

        Returns
        -------
        BoundAggregate
            The aggregate for that type.

        Raises
        ------
        ConfigurationError
            If it cannot aggregate values of the type.
        """

    def row_function(self, kind: pa.DataType) -> AggregateFunction[Any, Any]:
        """The aggregate as the function of a reducing or aggregating state.

        Parameters
        ----------
        kind : pyarrow.DataType
            The type of the accumulator's first field.

        Raises
        ------
        ConfigurationError
            If it has none; Count, Sum, Min, Max and Mean have one.
        """
        raise ConfigurationError(
            f"{self} cannot be a state's function.", hint="Use Count, Sum, Min, Max or Mean, or write a function."
        )

    def _require(self, kind: DataType | None, kinds: tuple[type[DataType], ...], expected: str) -> DataType:
        if not isinstance(kind, kinds):
            shown = "no column" if kind is None else kind.simpleString()
            raise ConfigurationError(
                f"{type(self).__name__}({self.column!r}): the column is {shown}.", hint=f"It must be {expected}."
            )
        return kind


@dataclass(frozen=True)
class Count(Aggregate):
    """Number of rows, or of the values of a column that are not null."""

    column: str | None = None

    def __str__(self) -> str:
        return "count" if self.column is None else f"count({self.column})"

    def bind(self, kind: DataType | None, by: DataType | None = None, *, ansi: bool = True) -> BoundAggregate:
        return BoundAggregate(CountKernel(), (("", LongType()),), LongType())

    def row_function(self, kind: pa.DataType) -> AggregateFunction[Any, Any]:
        return CountFunction(skips_nulls=self.column is not None)


@dataclass(frozen=True)
class Sum(Aggregate):
    """Sum of the values; null if there are none."""

    def bind(self, kind: DataType | None, by: DataType | None = None, *, ansi: bool = True) -> BoundAggregate:
        result = _sum_type(self._require(kind, _NUMBERS, "a number"))
        if isinstance(result, DecimalType):
            fields = (("", result), (OVERFLOWED, BooleanType()))
            return BoundAggregate(DecimalSumKernel(_arrow(result), ansi=ansi), fields, result)
        return BoundAggregate(SumKernel(_arrow(result), wraps=not ansi), (("", result),), result)

    def row_function(self, kind: pa.DataType) -> AggregateFunction[Any, Any]:
        return FoldFunction(sum_of(kind))


@dataclass(frozen=True)
class Mean(Aggregate):
    """Arithmetic mean of the values; null if there are none."""

    def bind(self, kind: DataType | None, by: DataType | None = None, *, ansi: bool = True) -> BoundAggregate:
        kind = self._require(kind, _NUMBERS, "a number")
        if isinstance(kind, DecimalType):
            sums = _sum_type(kind)
            result = _bounded_decimal(kind.precision + MEAN_DIGITS, kind.scale + MEAN_DIGITS)
            kernel = DecimalMeanKernel(_arrow(sums), _arrow(result), ansi=ansi)
            return BoundAggregate(kernel, (("sum", sums), ("count", LongType())), result)
        return BoundAggregate(MeanKernel(), (("sum", DoubleType()), ("count", LongType())), DoubleType())

    def row_function(self, kind: pa.DataType) -> AggregateFunction[Any, Any]:
        if pa.types.is_decimal(kind):
            raise ConfigurationError(f"{self} of decimals cannot be a state's function.", hint="Use doubles.")
        return MeanFunction()


@dataclass(frozen=True)
class Variance(Aggregate):
    """Variance of the values, of a sample unless `population` is set; null if there are too few."""

    population: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        return f"var_{'pop' if self.population else 'samp'}({self.column})"

    def bind(self, kind: DataType | None, by: DataType | None = None, *, ansi: bool = True) -> BoundAggregate:
        self._require(kind, _NUMBERS, "a number")
        kernel = VarianceKernel(is_sample=not self.population, is_deviation=isinstance(self, StandardDeviation))
        return BoundAggregate(kernel, _MOMENTS, DoubleType())


@dataclass(frozen=True)
class StandardDeviation(Variance):
    """Standard deviation of the values, of a sample unless `population` is set; null if there are too few."""

    def __str__(self) -> str:
        return f"stddev_{'pop' if self.population else 'samp'}({self.column})"


@dataclass(frozen=True)
class Min(Aggregate):
    """The least value; null if there are none."""

    def bind(self, kind: DataType | None, by: DataType | None = None, *, ansi: bool = True) -> BoundAggregate:
        kind = self._require(kind, _COMPARABLE, _COMPARABLE_TEXT)
        return BoundAggregate(ExtremeKernel(is_max=False), (("", stored_type(kind)),), kind)

    def row_function(self, kind: pa.DataType) -> AggregateFunction[Any, Any]:
        return FoldFunction(least)


@dataclass(frozen=True)
class Max(Aggregate):
    """The greatest value; null if there are none."""

    def bind(self, kind: DataType | None, by: DataType | None = None, *, ansi: bool = True) -> BoundAggregate:
        kind = self._require(kind, _COMPARABLE, _COMPARABLE_TEXT)
        return BoundAggregate(ExtremeKernel(is_max=True), (("", stored_type(kind)),), kind)

    def row_function(self, kind: pa.DataType) -> AggregateFunction[Any, Any]:
        return FoldFunction(greatest)


@dataclass(frozen=True)
class _OfOneRow(Aggregate):
    """The value of one row, chosen by order."""

    by: str | None = None

    @property
    def ordered_by(self) -> str | None:
        return self.by

    @property
    def depends_on_arrival(self) -> bool:
        return self.by is None

    def __str__(self) -> str:
        name = f"{type(self).__name__.lower()}({self.column}"
        return f"{name})" if self.by is None else f"{name} by {self.by})"

    def bind(self, kind: DataType | None, by: DataType | None = None, *, ansi: bool = True) -> BoundAggregate:
        kind = self._require(kind, (DataType,), "a column")
        order: tuple[str, DataType] = ("time_ms", LongType())
        if self.by is not None:
            assert by is not None
            require_comparable(by, f"{type(self).__name__}({self.column!r}, by={self.by!r})")
            order = ("by", stored_type(by))
        return BoundAggregate(FirstLastKernel(is_last=isinstance(self, Last)), (("", stored_type(kind)), order), kind)


@dataclass(frozen=True)
class First(_OfOneRow):
    """The value of the first row, null or not.

    The first row is the one with the least value of the column `by`; rows where that is null do not count. Without
    `by`, it is the row with the least event time in windows that have one, and otherwise the first row to arrive.
    """


@dataclass(frozen=True)
class Last(_OfOneRow):
    """The value of the last row, null or not.

    The last row is the one with the greatest value of the column `by`; rows where that is null do not count. Without
    `by`, it is the row with the greatest event time in windows that have one, and otherwise the last row to arrive.
    """


@dataclass(frozen=True)
class Collect(Aggregate):
    """All values that are not null, as an array, in order of arrival; at most 64 MB."""

    @property
    def depends_on_arrival(self) -> bool:
        return True

    def bind(self, kind: DataType | None, by: DataType | None = None, *, ansi: bool = True) -> BoundAggregate:
        kind = self._require(kind, (DataType,), "a column")
        return BoundAggregate(ListKernel(MAX_LIST_BYTES), (("", ArrayType(stored_type(kind))),), ArrayType(kind))


@dataclass(frozen=True)
class CountDistinct(Aggregate):
    """Number of different values that are not null, counted exactly; the values take at most 64 MB."""

    def __str__(self) -> str:
        return f"count_distinct({self.column})"

    def bind(self, kind: DataType | None, by: DataType | None = None, *, ansi: bool = True) -> BoundAggregate:
        kind = self._require(kind, _COMPARABLE, _COMPARABLE_TEXT)
        return BoundAggregate(DistinctKernel(MAX_LIST_BYTES), (("", ArrayType(stored_type(kind))),), LongType())


@dataclass(frozen=True)
class ApproxCountDistinct(Aggregate):
    """Approximate number of different values that are not null, by HyperLogLog.

    Parameters
    ----------
    column : str
        The input column.
    name : str
        Name of the output column.
    rsd : float
        The relative standard deviation of the result, 0.0025 to 0.25. One result in 20 is off by more than twice as
        much. The state of a key takes up to ``(1.04 / rsd) ** 2`` bytes, rounded up to a power of two: 512 bytes for
        0.05, 16 kB for 0.01.
    """

    rsd: float = DEFAULT_RSD

    def __str__(self) -> str:
        return f"approx_count_distinct({self.column}{'' if self.rsd == DEFAULT_RSD else f', rsd={self.rsd}'})"

    def bind(self, kind: DataType | None, by: DataType | None = None, *, ansi: bool = True) -> BoundAggregate:
        kind = self._require(kind, _COMPARABLE, _COMPARABLE_TEXT)
        _require_number(self, "rsd", self.rsd, _LEAST_RSD, _MOST_RSD)
        return BoundAggregate(HyperLogLogKernel(lg_k_of(self.rsd)), (("", BinaryType()),), LongType())


@dataclass(frozen=True, init=False)
class Quantiles(Aggregate):
    """The values below which given fractions of the values lie, as an array of doubles; null if there are no values.

    Nulls do not count; NaN is greater than all numbers. With up to `compression` values of a key, the quantile of f
    is exact: the least value with at least f of the values up to it, as in Spark's ``percentile_approx``. With more
    values, the result is one of them, and the quantile of a fraction that is off by at most
    ``20 / compression * f * (1 - f)``, and by one value. For compression 200 this is 0.025 for the median and 0.001 for
    f = 0.99. This holds for all values, in any order.

    Parameters
    ----------
    column : str
        The input column, of numbers.
    fractions : sequence of float
        The fractions, from 0 to 1: 0.5 for the median.
    name : str
        Name of the output column.
    compression : int
        From 20 to 2000. The state of a key takes some 20 to 80 times as many bytes.
    """

    fractions: tuple[float, ...] = ()
    compression: int = DEFAULT_COMPRESSION

    def __init__(
        self, column: str | None, fractions: Sequence[float], *, name: str = "", compression: int = DEFAULT_COMPRESSION
    ) -> None:
        super().__init__(column, name=name)
        is_sequence = isinstance(fractions, Sequence) and not isinstance(fractions, str)
        object.__setattr__(self, "fractions", tuple(fractions) if is_sequence else fractions)
        object.__setattr__(self, "compression", compression)

    def __str__(self) -> str:
        # Without the fractions: the state does not depend on them.
        return f"quantiles({self.column}{'' if self.compression == DEFAULT_COMPRESSION else f', {self.compression}'})"

    def bind(self, kind: DataType | None, by: DataType | None = None, *, ansi: bool = True) -> BoundAggregate:
        self._require(kind, _NUMBERS, "a number")
        if not isinstance(self.fractions, tuple) or not self.fractions:
            raise ConfigurationError(
                f"{self}: fractions is {self.fractions!r:.80}.", hint="Pass numbers from 0 to 1, such as [0.5, 0.99]."
            )
        for fraction in self.fractions:
            _require_number(self, "a fraction", fraction, 0, 1)
        if not isinstance(self.compression, int):
            raise ConfigurationError(f"{self}: compression is {self.compression!r}.", hint="It must be a whole number.")
        _require_number(self, "compression", self.compression, _LEAST_COMPRESSION, _MOST_COMPRESSION)
        result = ArrayType(DoubleType(), containsNull=False)
        kernel = QuantilesKernel(self.fractions, self.compression, _arrow(result))
        return BoundAggregate(kernel, (("", BinaryType()),), result)


_MOMENTS: Final = (("count", LongType()), ("mean", DoubleType()), ("m2", DoubleType()))


def require_comparable(kind: DataType, subject: str) -> None:
    """Refuse a column that does not order rows."""
    if not isinstance(kind, _COMPARABLE):
        raise ConfigurationError(
            f"{subject}: the column is {kind.simpleString()}.", hint=f"It must be {_COMPARABLE_TEXT}."
        )


def _require_number(aggregate: Aggregate, name: str, value: object, least: float, most: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:  # type: ignore[operator]  # a number
        raise ConfigurationError(
            f"{aggregate}: {name} is {value!r:.80}.", hint=f"It must be a number from {least} to {most}."
        )


def stored_type(kind: DataType) -> DataType:
    """The type of values in stored form: timestamps become microseconds, which compare and convert fast."""
    if isinstance(kind, (TimestampType, TimestampNTZType)):
        return LongType()
    if isinstance(kind, ArrayType):
        return ArrayType(stored_type(kind.elementType), kind.containsNull)
    return kind


def _sum_type(kind: DataType) -> DataType:
    if isinstance(kind, DecimalType):
        return DecimalType(min(kind.precision + SUM_DIGITS, MAX_PRECISION), kind.scale)
    return LongType() if isinstance(kind, IntegralType) else DoubleType()


def _bounded_decimal(precision: int, scale: int) -> DecimalType:
    """Spark's type for a result of such precision and scale (``DecimalType.bounded``)."""
    return DecimalType(min(precision, MAX_PRECISION), min(scale, MAX_PRECISION))


def _arrow(kind: DataType) -> pa.DataType:
    return arrow_type(kind, "an aggregate")
