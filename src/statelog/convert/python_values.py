"""Converts Python values to fields of Spark types; docs/conversions.md has the table.

A conversion loses nothing, or it fails: values that Arrow would cut, round or guess never reach Arrow. Rows, frames,
states, map keys and outputs are all converted here.
"""

from __future__ import annotations

import array
import datetime
import math
import operator
import struct
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import cache
from itertools import repeat
from types import NoneType
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    Row,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from statelog.convert.local_times import only_readable, plain_or_readable, to_utc
from statelog.convert.newer_types import TimeType
from statelog.runs.values import is_text
from statelog.shown import shown_value

Convert = Callable[[Any], Any]

_DECIMALS: Final = Context(prec=76, rounding=ROUND_HALF_UP)
_NEVER_MISSING: Final = frozenset((bool, int, str, bytes, datetime.datetime, list, tuple, dict))
_FLOAT: Final = struct.Struct("<f")
_CODES: Final[dict[type[DataType], str]] = {ByteType: "b", ShortType: "h", IntegerType: "i", LongType: "q"}
_LONGEST: Final = datetime.timedelta(microseconds=(1 << 63) - 1)


def exact_type(kind: DataType) -> type | None:
    """The class whose values need no conversion, or None; Arrow checks the range of a number when it is stored."""
    plain = PLAIN_TYPES.get(type(kind))
    return None if plain is None else plain.exact


def is_mutable(kind: DataType) -> bool:
    """Whether Python values of a type may be changed in place."""
    return isinstance(kind, (ArrayType, MapType, StructType, BinaryType))


def to_storage(kind: DataType, *, nan_is_null: bool = False, keeps_datetimes: bool = False) -> Convert:
    """The conversion to values that Arrow stores unchanged.

    pandas' missing values become None. So does NaN, but in floating-point and text fields only with `nan_is_null`, as
    in frames. The conversion raises ValueError or TypeError, with the reason, for a value that does not fit. With
    `keeps_datetimes` it makes held values, for :func:`statelog.convert.types.column_maker`: plain datetimes stay
    as they are, and those that users could not read back do not fit.
    """
    convert = _converter(kind, nan_is_null, keeps_datetimes)
    has_nan = isinstance(kind, (FloatType, DoubleType, StringType)) and not nan_is_null
    never_missing = _NEVER_MISSING | {float, Decimal} if has_nan else _NEVER_MISSING

    def converted(value: Any) -> Any:
        if type(value) in never_missing:
            return convert(value)
        if value is None or (_is_missing(value) and not (has_nan and isinstance(value, (float, Decimal)))):
            return None
        return convert(value)

    # These run for every write of a state.
    if isinstance(kind, DecimalType):
        return _decimals_first(kind, converted)
    if isinstance(kind, TimestampType) and keeps_datetimes:
        return plain_or_readable(converted)
    if isinstance(kind, ArrayType) and (own := _exact_elements(kind, nan_is_null)) is not None:
        return _lists_first(own, _all_fit(kind.elementType), converted)
    return converted


def _lists_first(exact: type, all_fit: Callable[[list[Any]], bool], convert: Convert) -> Convert:
    """A conversion that copies lists whose elements are stored as they are, and passes other values to `convert`."""
    as_they_are = {exact, NoneType}

    def converted(value: Any) -> Any:
        if type(value) is list and as_they_are.issuperset(map(type, value)) and all_fit(value):
            return value.copy()
        return convert(value)

    return converted


def _all_fit(kind: DataType) -> Callable[[list[Any]], bool]:
    """A test of whether all values of a list, each of the type's exact class or None, can be stored."""
    code = _CODES.get(type(kind))
    if code is not None:

        def store(values: list[Any]) -> object:
            return struct.pack(f"{len(values)}{code}", *values)
    elif isinstance(kind, StringType):

        def store(values: list[Any]) -> object:
            return "".join(values).encode()
    else:
        return lambda values: not isinstance(kind, DayTimeIntervalType)

    def all_fit(values: list[Any]) -> bool:
        try:
            store(values)
        except (TypeError, ValueError, struct.error):
            return None in values and all_fit([value for value in values if value is not None])
        return True

    return all_fit


def _decimals_first(kind: DecimalType, convert: Convert) -> Convert:
    """A conversion that leaves a decimal as it is if it has the right scale and not too many digits."""
    step, digits = Decimal(1).scaleb(-kind.scale, _DECIMALS), kind.precision - kind.scale

    def converted(value: Any) -> Any:
        if type(value) is Decimal and value.same_quantum(step) and value.adjusted() < digits:
            return value
        return convert(value)

    return converted


def _is_missing(value: Any) -> bool:
    if isinstance(value, (float, Decimal)):
        return bool(value != value)
    return type(value).__name__ in ("NaTType", "NAType")


def _converter(kind: DataType, nan_is_null: bool, keeps_datetimes: bool) -> Convert:
    def of(part: DataType) -> Convert:
        return to_storage(part, nan_is_null=nan_is_null, keeps_datetimes=keeps_datetimes)

    if isinstance(kind, ArrayType):
        return _elements(of(kind.elementType), _exact_elements(kind, nan_is_null), _all_fit(kind.elementType))
    if isinstance(kind, MapType):
        of_key = to_storage(kind.keyType, nan_is_null=nan_is_null)
        if isinstance(kind.keyType, TimestampType) and keeps_datetimes:
            of_key = only_readable(of_key)  # otherwise, two instants with the same local time would be one key
        return _entries(of_key, of(kind.valueType), are_instants=isinstance(kind.keyType, TimestampType))
    if isinstance(kind, StructType):
        return _struct(kind.names, [of(field.dataType) for field in kind])
    if isinstance(kind, DecimalType):
        return _DecimalFitting(kind)
    plain = PLAIN_TYPES.get(type(kind))
    if plain is None:
        raise TypeError(f"there are no values of type {kind.simpleString()}")
    return plain.convert


def _exact_elements(kind: ArrayType, nan_is_null: bool) -> type | None:
    own = exact_type(kind.elementType)
    return None if nan_is_null and own is float else own


# ---- Plain types ----


def _integer(bits: int) -> Convert:
    first, last = -(1 << (bits - 1)), (1 << (bits - 1)) - 1

    def convert(value: Any) -> int:
        whole = value if type(value) is int else _whole(value)
        if not first <= whole <= last:
            raise ValueError(f"it is not between {first} and {last}")
        return whole

    return convert


def _whole(value: Any) -> int:
    if _is_integer(value):
        return int(value)
    if isinstance(value, (float, np.floating, Decimal)):
        if not math.isfinite(value) or value != (whole := int(value)):
            raise ValueError("it is not a whole number")
        return whole
    raise TypeError("it is not a number")


def _is_integer(value: Any) -> bool:
    """True and False are integers too, 1 and 0; a timedelta is not, although it is one to NumPy."""
    return isinstance(value, (int, np.integer, np.bool_)) and not isinstance(value, np.timedelta64)


def _boolean(value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError("it is neither true nor false")


def _double(value: Any) -> float:
    if isinstance(value, (float, np.floating)):
        return float(value)
    if _is_integer(value):
        number = float(value)
        if number != int(value):
            raise ValueError("it has more digits than a floating-point number")
        return number
    if isinstance(value, Decimal):
        return float(value)
    raise TypeError("it is not a number")


def _float(value: Any) -> float:
    number = value if type(value) is float else _double(value)
    try:
        rounded: float = _FLOAT.unpack(_FLOAT.pack(number))[0]
    except OverflowError:
        raise ValueError("it is outside the range of a float") from None
    return rounded


class _DecimalFitting:
    """Rounds numbers to a decimal type's scale, half away from zero; raises ValueError if they have too many digits."""

    def __init__(self, kind: DecimalType) -> None:
        self._step = Decimal(1).scaleb(-kind.scale, _DECIMALS)
        self._digits = kind.precision - kind.scale

    def __call__(self, value: Any) -> Decimal:
        if type(value) is Decimal:
            exact = value
        elif _is_integer(value):
            exact = Decimal(int(value))
        elif isinstance(value, (float, np.floating)):
            exact = Decimal(repr(float(value)))
        elif isinstance(value, Decimal):
            exact = Decimal(value)
        else:
            raise TypeError("it is not a number")
        if not exact.is_finite():
            raise ValueError("it is not finite")
        if exact and exact.adjusted() >= self._digits:
            raise ValueError("it has too many digits")
        rounded = exact.quantize(self._step, context=_DECIMALS)
        if rounded and rounded.adjusted() >= self._digits:
            raise ValueError("it has too many digits")
        return rounded


def _text(value: Any) -> str:
    """Numbers and booleans as Spark writes them; other objects are refused, where Spark stores their JVM names."""
    if isinstance(value, str):
        if not is_text(value):
            raise ValueError("half of a surrogate pair is not a character")
        return str(value)
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if _is_integer(value) or isinstance(value, Decimal):
        return str(value)
    if isinstance(value, (float, np.floating)):
        return _float_text(float(value))
    if isinstance(value, (bytes, bytearray)):
        return value.decode()
    raise TypeError("it is not text")


def _float_text(value: float) -> str:
    """A number as Java writes it."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        text = format(Decimal(repr(value)), "f")
        return text if "." in text else f"{text}.0"
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    shown = "".join(map(str, digits)).rstrip("0")
    assert isinstance(exponent, int)
    return f"{'-' if sign else ''}{shown[0]}.{shown[1:] or '0'}E{exponent + len(digits) - 1}"


def _binary(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, str):
        return value.encode()
    raise TypeError("it is neither bytes nor text")


def _plain_time(value: Any) -> Any:
    """NumPy's and pandas' times as Python's."""
    if isinstance(value, (np.datetime64, np.timedelta64)):
        plain = value.astype("datetime64[us]" if isinstance(value, np.datetime64) else "timedelta64[us]").item()
        return plain
    for method in ("to_pydatetime", "to_pytimedelta"):
        if hasattr(value, method):
            return getattr(value, method)()
    return value


def _date(value: Any) -> datetime.date:
    plain = _plain_time(value)
    if isinstance(plain, datetime.datetime):
        return plain.date()
    if isinstance(plain, datetime.date):
        return plain
    raise TypeError("it is not a date")


def _timestamp(value: Any) -> datetime.datetime:
    return to_utc(value if type(value) is datetime.datetime else _datetime(value))


def _timestamp_ntz(value: Any) -> datetime.datetime:
    """A datetime with a zone keeps its wall clock."""
    if type(value) is datetime.datetime and value.tzinfo is None and not value.fold:
        return value
    return _datetime(value).replace(tzinfo=None, fold=0)


def _datetime(value: Any) -> datetime.datetime:
    plain = _plain_time(value)
    if isinstance(plain, datetime.datetime):
        return plain
    raise TypeError("it is not a datetime")


def _time(value: Any) -> datetime.time:
    if isinstance(value, datetime.time):
        if value.tzinfo is not None:
            raise ValueError("it has a zone")
        return value
    raise TypeError("it is not a time of day")


def _interval(value: Any) -> datetime.timedelta:
    plain = _plain_time(value)
    if isinstance(plain, datetime.timedelta):
        if not -_LONGEST <= plain <= _LONGEST:
            raise ValueError("its microseconds have more than 64 bits")
        return plain
    raise TypeError("it is not a timedelta")


def _void(value: Any) -> None:
    raise ValueError("it is not null")


class PlainType(NamedTuple):
    """How values of a type without parameters are stored."""

    stored: pa.DataType
    convert: Convert
    exact: type | None = None


PLAIN_TYPES: Final[dict[type[DataType], PlainType]] = {
    BooleanType: PlainType(pa.bool_(), _boolean, bool),
    ByteType: PlainType(pa.int8(), _integer(8), int),
    ShortType: PlainType(pa.int16(), _integer(16), int),
    IntegerType: PlainType(pa.int32(), _integer(32), int),
    LongType: PlainType(pa.int64(), _integer(64), int),
    FloatType: PlainType(pa.float32(), _float),  # a Python float must be rounded to 32 bits
    DoubleType: PlainType(pa.float64(), _double, float),
    StringType: PlainType(pa.string(), _text, str),
    BinaryType: PlainType(pa.binary(), _binary, bytes),
    DateType: PlainType(pa.date32(), _date, datetime.date),
    TimestampType: PlainType(pa.timestamp("us", tz="UTC"), _timestamp),
    TimestampNTZType: PlainType(pa.timestamp("us"), _timestamp_ntz),
    DayTimeIntervalType: PlainType(pa.duration("us"), _interval, datetime.timedelta),
    TimeType: PlainType(pa.time64("ns"), _time),
    NullType: PlainType(pa.null(), _void),
}


# ---- Arrays, maps, structs ----


def _as_list(value: Any) -> Any:
    if getattr(value, "ndim", 0) == 1:
        return value.tolist()  # NumPy's arrays and pandas' series
    if not isinstance(value, (list, tuple, array.array, set, frozenset)) or isinstance(value, Row):
        raise TypeError("it is not a list")
    return value


def _elements(of_element: Convert, exact: type | None, all_fit: Callable[[list[Any]], bool]) -> Convert:
    as_they_are = {exact, NoneType}

    def convert(value: Any) -> list[Any]:
        if type(value) is not list:
            value = _as_list(value)
        if exact is not None and as_they_are.issuperset(map(type, value)) and all_fit(held := list(value)):
            return held
        return [of_element(element) for element in value]

    return convert


def _entries(of_key: Convert, of_value: Convert, *, are_instants: bool) -> Convert:
    def convert(value: Any) -> dict[Any, Any]:
        if type(value) is dict or isinstance(value, Mapping):
            pairs = list(value.items())
        elif type(value) is list and all(type(pair) is tuple and len(pair) == 2 for pair in value):
            pairs = value
        else:
            raise TypeError("it is not a dict")
        converted = {of_key(key): of_value(item) for key, item in pairs}
        if None in converted:
            raise ValueError("one of its keys is null")
        # Different datetimes may be one instant, whose last value counts.
        if len(converted) < len(pairs) and not are_instants:
            raise ValueError("two of its keys become one")
        return converted

    return convert


def _struct(names: list[str], converts: list[Convert]) -> Convert:
    def convert(value: Any) -> dict[str, Any]:
        items = _fields(value, names)
        try:
            return dict(zip(names, map(operator.call, converts, items), strict=True))
        except (TypeError, ValueError, ArithmeticError):
            pass  # converted again below, to find the field
        stored: dict[str, Any] = {}
        for name, one, item in zip(names, converts, items, strict=True):
            try:
                stored[name] = one(item)
            except (TypeError, ValueError, ArithmeticError) as error:
                raise type(error)(f"field '{name}' has {shown_value(item)}: {error}") from error
        return stored

    return convert


def _fields(value: Any, names: list[str]) -> Sequence[Any]:
    """The values of a struct's fields: by name if the value has names, else by position."""
    own = getattr(value, "__fields__", None) if isinstance(value, Row) else None
    if own is not None:
        if own == names and len(value) == len(names):
            return tuple(value)
        held = dict(zip(own, value, strict=True))
    elif type(value) is dict or isinstance(value, Mapping):
        held = dict(value)
    elif isinstance(value, (tuple, list)):
        if len(value) != len(names):
            raise ValueError(f"it has {len(value)} fields, not {len(names)}")
        return list(value)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        held = vars(value)
    else:
        raise TypeError("it has no fields")
    if names and held.keys().isdisjoint(names):
        raise ValueError(f"it has none of the fields ({', '.join(names)})")
    return [held.get(name) for name in names]


# ---- Rows ----


def row_maker(names: list[str]) -> Callable[[list[list[Any]]], list[Any]]:
    """Make a function that turns columns of values into Spark rows.

    Their class, a subclass of :class:`pyspark.sql.Row`, has the field names: such rows are several times faster to
    build and to read than rows that each carry the names.
    """
    kind = _row_class(tuple(names))

    def make(columns: list[list[Any]]) -> list[Any]:
        return list(map(tuple.__new__, repeat(kind), zip(*columns, strict=True)))

    return make


@cache
def _row_class(names: tuple[str, ...]) -> type[Row]:
    attributes: dict[str, Any] = {"__fields__": list(names)}
    # A named tuple's attributes read a tuple's place without a call of Python code; Row's own way has one.
    getters: Any = namedtuple("getters", names, rename=True)  # type: ignore[misc]  # the names are not known here
    for place, name in enumerate(names):
        if not hasattr(Row, name) and name not in attributes:
            attributes[name] = getattr(getters, getters._fields[place])
    return type("Row", (Row,), attributes)
