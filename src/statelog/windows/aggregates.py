"""Ready-made aggregates in windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from pyspark.sql.types import DataType, DecimalType, StructField, StructType

from statelog.aggregates.functions import (
    Aggregate,
    Collect,
    Count,
    CountDistinct,
    First,
    Last,
    Max,
    Mean,
    Min,
    Sum,
)
from statelog.errors import ConfigurationError
from statelog.windows import kernels
from statelog.windows.accumulators import Aggregated

_KERNELS: Final[dict[type[Aggregate], Callable[[], kernels.Kernel]]] = {
    Count: kernels.CountKernel,
    Sum: kernels.SumKernel,
    Mean: kernels.MeanKernel,
    Min: lambda: kernels.ExtremeKernel(is_max=False),
    Max: lambda: kernels.ExtremeKernel(is_max=True),
    First: lambda: kernels.FirstLastKernel(is_last=False),
    Last: lambda: kernels.FirstLastKernel(is_last=True),
    Collect: kernels.CollectKernel,
    CountDistinct: kernels.DistinctKernel,
}


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
        _require_available(aggregate, kind)
        bound = aggregate.bind(kind)
        fields = slice(len(accumulator), len(accumulator) + len(bound.accumulator))
        bound_kernels.append((_KERNELS[type(aggregate)](), column, fields))
        accumulator += [
            StructField(f"{name}.{field}" if field else name, field_kind) for field, field_kind in bound.accumulator
        ]
        result.append(StructField(name, bound.result))
    if not result:
        raise ConfigurationError("agg takes at least one aggregate.", hint="For example statelog.Count().")
    return Aggregated(StructType(accumulator), bound_kernels), StructType(result)


def _require_available(aggregate: Aggregate, kind: DataType | None) -> None:
    is_decimal_mean = isinstance(aggregate, Mean) and isinstance(kind, DecimalType)
    if type(aggregate) not in _KERNELS or aggregate.ordered_by is not None or is_decimal_mean:
        raise ConfigurationError(
            f"{aggregate}{' of decimals' if is_decimal_mean else ''} is not available in windows.",
            hint="Use aggregate() with a function of your own, or agg() of the keyed stream.",
        )


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
