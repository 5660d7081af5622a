"""The rules of conversion, value by value and without any haste: what states and outputs have to do."""

from __future__ import annotations

import array
import datetime
from collections.abc import Callable, Iterable, Mapping
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from types import NoneType
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from statelog.convert.python_values import PLAIN_TYPES
from statelog.convert.types import arrow_type
from statelog.shown import shown_value
from tests.conversions.cases import ZONE

_DECIMALS: Final = Context(prec=76, rounding=ROUND_HALF_UP)


def stored(kind: DataType, value: Any, *, nan_is_null: bool = False) -> Any:
    """A value in storage types; the processes' zone must be that of the cases."""
    has_nan = isinstance(kind, (FloatType, DoubleType, StringType)) and not nan_is_null
    if value is None or type(value).__name__ in ("NaTType", "NAType"):
        return None
    if isinstance(value, (float, Decimal)) and value != value and not has_nan:
        return None

    def of(part: DataType) -> Callable[[Any], Any]:
        return lambda item: stored(part, item, nan_is_null=nan_is_null)

    if isinstance(kind, DecimalType):
        return _decimal(kind, value)
    if isinstance(kind, TimestampType):
        return _instant(_datetime(value))
    if isinstance(kind, TimestampNTZType):
        return _datetime(value).replace(tzinfo=None, fold=0)
    if isinstance(kind, ArrayType):
        elements = list(_elements(value))
        return elements if _is_exact(kind.elementType, elements) else list(map(of(kind.elementType), elements))
    if isinstance(kind, MapType):
        entries = _entries(value)
        found = {of(kind.keyType)(key): of(kind.valueType)(item) for key, item in entries}
        if None in found:
            raise ValueError("one of its keys is null")
        if len(found) < len(entries) and not isinstance(kind.keyType, TimestampType):
            raise ValueError("two of its keys become one")
        return found
    if isinstance(kind, StructType):
        return _struct(kind, value, of)
    return PLAIN_TYPES[type(kind)].convert(value)


def in_field(kind: DataType, value: Any, *, nan_is_null: bool = False) -> Any:
    """A field's value in storage types."""
    return value if _is_exact(kind, [value]) else stored(kind, value, nan_is_null=nan_is_null)


def _is_exact(kind: DataType, values: Iterable[Any]) -> bool:
    """Whether all values are of the type's class; raises the error of one that the type does not hold."""
    plain = PLAIN_TYPES.get(type(kind))
    if plain is None or plain.exact is None or not all(type(value) in (plain.exact, NoneType) for value in values):
        return False
    for value in values:
        if value is not None:
            plain.convert(value)
    return True


def shown(kind: DataType, value: Any) -> Any:
    """What users see of a value in storage types."""
    if value is None:
        return None
    if isinstance(kind, TimestampType):
        return value.astimezone(ZoneInfo(ZONE)).replace(tzinfo=None)
    if isinstance(kind, ArrayType):
        return [shown(kind.elementType, element) for element in value]
    if isinstance(kind, StructType):
        return Row(*kind.names)(*(shown(field.dataType, value[field.name]) for field in kind))
    if isinstance(kind, MapType):
        found: dict[Any, Any] = {}
        for key, item in value.items():
            own = shown(kind.keyType, key)
            # Where two instants have one local time, the second keeps its zone.
            found[key if own in found else own] = shown(kind.valueType, item)
        return found
    return value


def column(kind: DataType, values: list[Any], *, nan_is_null: bool = False) -> pa.Array:
    """A column of values."""
    return pa.array([in_field(kind, value, nan_is_null=nan_is_null) for value in values], arrow_type(kind, "test"))


def _decimal(kind: DecimalType, value: Any) -> Decimal:
    if isinstance(value, Decimal):
        exact = Decimal(value)
    elif isinstance(value, (int, np.integer, np.bool_)) and not isinstance(value, np.timedelta64):
        exact = Decimal(int(value))
    elif isinstance(value, (float, np.floating)):
        exact = Decimal(repr(float(value)))
    else:
        raise TypeError("it is not a number")
    if not exact.is_finite():
        raise ValueError("it is not finite")
    try:
        rounded = exact.quantize(Decimal(1).scaleb(-kind.scale), context=_DECIMALS)
    except InvalidOperation:
        raise ValueError("it has too many digits") from None
    if abs(rounded) >= Decimal(10) ** (kind.precision - kind.scale):
        raise ValueError("it has too many digits")
    return rounded


def _instant(at: datetime.datetime) -> datetime.datetime:
    if at.tzinfo is None and 1 < at.year < 9999:
        in_zone = at.replace(tzinfo=ZoneInfo(ZONE)).astimezone(datetime.UTC)
        if in_zone.astimezone(ZoneInfo(ZONE)).replace(tzinfo=None) != at:
            return in_zone  # the clock leaves it out; astimezone() takes it as earlier, timestamp() as later
    return at.astimezone(datetime.UTC)


def _datetime(value: Any) -> datetime.datetime:
    if isinstance(value, (np.datetime64, np.timedelta64)):
        value = value.astype("datetime64[us]" if isinstance(value, np.datetime64) else "timedelta64[us]").item()
    if hasattr(value, "to_pydatetime"):
        value = value.to_pydatetime()
    if isinstance(value, datetime.datetime):
        return value
    raise TypeError("it is not a datetime")


def _elements(value: Any) -> Any:
    if getattr(value, "ndim", 0) == 1:
        return value.tolist()
    if not isinstance(value, (list, tuple, array.array, set, frozenset)) or isinstance(value, Row):
        raise TypeError("it is not a list")
    return value


def _entries(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value.items()
    if type(value) is list and all(type(pair) is tuple and len(pair) == 2 for pair in value):
        return value
    raise TypeError("it is not a dict")


def _struct(kind: StructType, value: Any, of: Callable[[DataType], Callable[[Any], Any]]) -> dict[str, Any]:
    if isinstance(value, Row) and hasattr(value, "__fields__"):
        held = dict(zip(value.__fields__, value, strict=True))
    elif isinstance(value, Mapping):
        held = dict(value)
    elif isinstance(value, (tuple, list)):
        if len(value) != len(kind):
            raise ValueError(f"it has {len(value)} fields, not {len(kind)}")
        held = dict(zip(kind.names, value, strict=True))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        held = vars(value)
    else:
        raise TypeError("it has no fields")
    if held.keys().isdisjoint(kind.names):
        raise ValueError(f"it has none of the fields ({', '.join(kind.names)})")
    found: dict[str, Any] = {}
    for field in kind:
        item = held.get(field.name)
        try:
            found[field.name] = of(field.dataType)(item)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise type(error)(f"field '{field.name}' has {shown_value(item)}: {error}") from error
    return found
