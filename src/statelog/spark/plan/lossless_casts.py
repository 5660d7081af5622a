"""Converts the columns of DataFrames that are loaded as state, if no value can be lost.

Spark's own cast converts the values. Spark considers some casts safe (``Cast.canUpCast``); of these, the ones that can
map two values to one are refused here. docs/savepoints.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from statelog.convert.newer_types import TimeType
from statelog.errors import ConfigurationError, ErrorKind

_DIGITS: Final[dict[type[T.DataType], int]] = {T.ByteType: 3, T.ShortType: 5, T.IntegerType: 10, T.LongType: 19}
"""Decimal digits of the whole-number types, the narrowest first."""


def require_convertible(own: T.DataType, wanted: T.DataType, name: str, subject: str, owner: str) -> None:
    """Check that all values of type `own` can become values of type `wanted` without loss.

    `subject` has the column `name`, and `owner` the wanted type. Raises ConfigurationError, which names the path of the
    first field that does not fit.
    """
    for misfit, hint in _misfits(own, wanted, name, owner):
        raise ConfigurationError(f"{subject}: {misfit}.", kind=ErrorKind.OTHER_SCHEMA, hint=hint)


def converted_columns(df: DataFrame, wanted: Iterable[tuple[int, str, T.DataType]]) -> DataFrame:
    """Select and convert columns of a DataFrame, each given as its position, its new name and its new type.

    :func:`require_convertible` must have accepted all of them.
    """
    plain, kinds = df.toDF(*[f"c{place}" for place in range(len(df.columns))]), [field.dataType for field in df.schema]
    return plain.select(
        *[_converted(F.col(f"c{place}"), kinds[place], kind).alias(name) for place, name, kind in wanted]
    )


def did_you_mean(name: str, others: Sequence[str]) -> str:
    """A hint at the name that the user may mean; empty if none is similar."""
    by_case = {other.lower(): other for other in others}
    found = get_close_matches(name.lower(), by_case, 1)
    return f"Did you mean '{by_case[found[0]]}'? " if found else ""


# ---- The rule ----


def _misfits(own: T.DataType, wanted: T.DataType, path: str, owner: str) -> Iterator[tuple[str, str]]:
    """The misfits between two types, each with a hint."""
    if isinstance(own, T.StructType) and isinstance(wanted, T.StructType):
        yield from _struct_misfits(own, wanted, path, owner)
    elif isinstance(own, T.ArrayType) and isinstance(wanted, T.ArrayType):
        yield from _misfits(own.elementType, wanted.elementType, f"{path}.element", owner)
    elif isinstance(own, T.MapType) and isinstance(wanted, T.MapType):
        yield from _misfits(own.keyType, wanted.keyType, f"{path}.key", owner)
        yield from _misfits(own.valueType, wanted.valueType, f"{path}.value", owner)
    elif own != wanted and not _is_lossless(own, wanted):
        misfit = f"column '{path}' is {own.simpleString()}, but {owner} is {wanted.simpleString()}"
        yield misfit, "Cast it yourself: the conversion could change values."


def _struct_misfits(own: T.StructType, wanted: T.StructType, path: str, owner: str) -> Iterator[tuple[str, str]]:
    additional = [name for name in own.names if name not in wanted.names]
    for field in wanted:
        count = own.names.count(field.name)
        if count != 1:
            yield (
                f"column '{path}' has {'two fields' if count else 'no field'} '{field.name}', but {owner} has one",
                f"{did_you_mean(field.name, additional)}It must have the fields {', '.join(wanted.names)}.",
            )
    for name in additional:
        yield (
            f"column '{path}' has a field '{name}', but {owner} has none",
            f"It must have the fields {', '.join(wanted.names)}.",
        )
    for field in wanted:
        yield from _misfits(own[field.name].dataType, field.dataType, f"{path}.{field.name}", owner)


def _is_lossless(own: T.DataType, wanted: T.DataType) -> bool:
    match own, wanted:
        case T.NullType(), _:
            return True
        case T.DecimalType(), T.DecimalType():
            more = wanted.scale - own.scale
            return more >= 0 and wanted.precision - own.precision >= more
        case (T.FloatType(), T.DoubleType()) | (T.DateType(), T.TimestampNTZType()):
            return True
        case ((T.CharType() | T.VarcharType()), T.StringType()):
            return wanted == T.StringType()
        case TimeType(), TimeType():
            return own.precision <= wanted.precision
        case T.DayTimeIntervalType(), T.DayTimeIntervalType():
            return own.endField <= wanted.endField
    return _is_wider_than(type(own), wanted)


def _is_wider_than(whole: type[T.DataType], wanted: T.DataType) -> bool:
    """Whether `wanted` holds all numbers of a whole-number type."""
    if whole not in _DIGITS:
        return False
    if isinstance(wanted, T.DecimalType):
        return bool(wanted.precision - wanted.scale >= _DIGITS[whole])
    if isinstance(wanted, T.DoubleType):
        return whole is not T.LongType
    return _DIGITS.get(type(wanted), 0) >= _DIGITS[whole]


# ---- The conversion ----


def _converted(column: Column, own: T.DataType, wanted: T.DataType) -> Column:
    target = _nullable(wanted)
    if _nullable(own) == target:
        return column
    if _has_order(own, wanted):
        return column.cast(target)  # casts structs by position and ignores the names of fields
    return _rearranged(column, own, wanted)


def _has_order(own: T.DataType, wanted: T.DataType) -> bool:
    """Whether the fields of all structs are in the wanted order."""
    match own, wanted:
        case T.StructType(), T.StructType():
            return own.names == wanted.names and all(
                _has_order(one.dataType, other.dataType) for one, other in zip(own, wanted, strict=True)
            )
        case T.ArrayType(), T.ArrayType():
            return _has_order(own.elementType, wanted.elementType)
        case T.MapType(), T.MapType():
            return _has_order(own.keyType, wanted.keyType) and _has_order(own.valueType, wanted.valueType)
    return True


def _rearranged(column: Column, own: T.DataType, wanted: T.DataType) -> Column:
    match own, wanted:
        case T.StructType(), T.StructType():
            # Temporary names, because field names may need quoting or differ only in case.
            named = [T.StructField(f"f{place}", one.dataType) for place, one in enumerate(own)]
            plain = column.cast(T.StructType(named))
            fields = [
                _converted(
                    plain.getField(f"f{own.names.index(field.name)}"), own[field.name].dataType, field.dataType
                ).alias(field.name)
                for field in wanted
            ]
            return F.when(column.isNotNull(), F.struct(*fields))
        case T.ArrayType(), T.ArrayType():
            return F.transform(column, lambda value: _converted(value, own.elementType, wanted.elementType))
    assert isinstance(own, T.MapType)
    assert isinstance(wanted, T.MapType)
    keys = F.transform(F.map_keys(column), lambda key: _converted(key, own.keyType, wanted.keyType))
    values = F.transform(F.map_values(column), lambda value: _converted(value, own.valueType, wanted.valueType))
    return F.map_from_arrays(keys, values)


def _nullable(kind: T.DataType) -> T.DataType:
    """The type with nulls allowed everywhere: Spark casts no nullable type to one without nulls."""
    match kind:
        case T.ArrayType():
            return T.ArrayType(_nullable(kind.elementType))
        case T.MapType():
            return T.MapType(_nullable(kind.keyType), _nullable(kind.valueType))
        case T.StructType():
            return T.StructType([T.StructField(field.name, _nullable(field.dataType)) for field in kind])
    return kind
