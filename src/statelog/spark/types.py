"""Spark's types as storage types, and Spark's values as stored values."""

from __future__ import annotations

import datetime
import operator
from collections.abc import Callable, Iterable
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any, Final
from zoneinfo import ZoneInfo

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
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    TimeType,
)

from statelog.errors import ConfigurationError, ErrorKind
from statelog.state.keys import KeyCodec
from statelog.state.values import FieldCodec, RowCodec

__all__ = ["arrow_type", "key_decoder", "key_schema", "row_codec", "row_maker", "state_codecs", "storage_converter"]

_Convert = Callable[[Any], Any]

_ATOMIC: Final[dict[type[DataType], pa.DataType]] = {
    BooleanType: pa.bool_(),
    ByteType: pa.int8(),
    ShortType: pa.int16(),
    IntegerType: pa.int32(),
    LongType: pa.int64(),
    FloatType: pa.float32(),
    DoubleType: pa.float64(),
    BinaryType: pa.binary(),
    DateType: pa.date32(),
    TimestampType: pa.timestamp("us", tz="UTC"),
    TimestampNTZType: pa.timestamp("us"),
    DayTimeIntervalType: pa.duration("us"),
    TimeType: pa.time64("ns"),
    NullType: pa.null(),
}
_TIME_DIGITS: Final = 6
_DECIMALS: Final = Context(prec=76, rounding=ROUND_HALF_UP)
# Float and decimal are missing: a Python float must be rounded to 32 bits, a decimal to its scale.
_EXACT: Final[dict[type[DataType], type]] = {
    BooleanType: bool,
    ByteType: int,
    ShortType: int,
    IntegerType: int,
    LongType: int,
    DoubleType: float,
    StringType: str,
    BinaryType: bytes,
    DateType: datetime.date,
}


def arrow_type(kind: DataType, subject: str) -> pa.DataType:
    """Storage type of a Spark type.

    Parameters
    ----------
    kind : DataType
        The Spark type.
    subject : str
        What has the type, for messages.

    Raises
    ------
    ConfigurationError
        If there is none.
    """
    if isinstance(kind, StringType):
        if getattr(kind, "collation", "UTF8_BINARY") != "UTF8_BINARY":
            raise _unsupported(kind, subject, "Strings of this collation may be equal and differ in bytes.")
        return pa.string()
    if isinstance(kind, DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, ArrayType):
        element = pa.field("element", arrow_type(kind.elementType, subject), kind.containsNull)
        return pa.list_(element)
    if isinstance(kind, MapType):
        value = pa.field("value", arrow_type(kind.valueType, subject), kind.valueContainsNull)
        return pa.map_(arrow_type(kind.keyType, subject), value)
    if isinstance(kind, StructType):
        if len(set(kind.names)) < len(kind):
            raise _unsupported(kind, subject, "Give each field of a struct a name of its own.")
        if not len(kind):
            raise _unsupported(kind, subject, "Give the struct a field: files cannot hold structs without any.")
        return pa.struct([pa.field(field.name, arrow_type(field.dataType, subject)) for field in kind])
    if isinstance(kind, TimeType) and kind.precision > _TIME_DIGITS:
        raise _unsupported(kind, subject, f"Convert it to time({_TIME_DIGITS}): times in Python have microseconds.")
    atomic = _ATOMIC.get(type(kind))
    if atomic is None:
        raise _unsupported(kind, subject, "Convert it to a string, number, timestamp, array, map or struct.")
    return atomic


def _unsupported(kind: DataType, subject: str, hint: str) -> ConfigurationError:
    return ConfigurationError(
        f"{subject} has type {kind.simpleString()}, which is not supported.",
        kind=ErrorKind.UNSUPPORTED_STATE_TYPE,
        hint=hint,
    )


def row_codec(schema: StructType, subject: str) -> RowCodec:
    """Codec of the rows of a Spark schema; `subject` names them in messages."""
    fields = [
        FieldCodec(
            name=field.name,
            type=arrow_type(field.dataType, f"{subject}, field '{field.name}',"),
            exact=_EXACT.get(type(field.dataType)),
            to_storage=_to_storage(field.dataType),
            from_storage=_from_storage(field.dataType),
        )
        for field in schema
    ]
    return RowCodec(fields, subject)


def state_codecs(name: str, value: StructType, entry: StructType | None) -> tuple[RowCodec, RowCodec | None]:
    """Codecs of a state's values and, if it is a map, of its keys.

    Raises
    ------
    ConfigurationError
        If a field's type is not supported.
    """
    subject = f"state '{name}'"
    codec = row_codec(value, subject)
    if entry is None:
        return codec, None
    entry_codec = row_codec(entry, f"map key of {subject}")
    KeyCodec(entry_codec.schema, entry_codec.subject, with_maps=False)  # refuses types that cannot be keys
    return codec, entry_codec


def key_schema(columns: Iterable[StructField]) -> pa.Schema:
    """Storage types of grouping columns.

    Raises
    ------
    ConfigurationError
        If a column's type cannot be a key.
    """
    fields: list[pa.Field] = []
    for column in columns:
        try:
            kind = arrow_type(_nullable(column.dataType), f"grouping column '{column.name}'")
            fields.append(pa.field(column.name, kind))
        except ConfigurationError as error:
            raise ConfigurationError(error.message, kind=ErrorKind.UNSUPPORTED_KEY_TYPE, hint=error.hint) from error
    return pa.schema(fields)


def _nullable(kind: DataType) -> DataType:
    """The type with null elements allowed, so that a key does not depend on what Spark knows of its source."""
    if isinstance(kind, ArrayType):
        return ArrayType(_nullable(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(_nullable(kind.keyType), _nullable(kind.valueType))
    if isinstance(kind, StructType):
        return StructType([StructField(field.name, _nullable(field.dataType)) for field in kind])
    return kind


def row_maker(names: list[str]) -> Callable[[list[list[Any]]], list[Any]]:
    """Make a function that turns columns of values into Spark rows.

    The rows are a subclass of :class:`pyspark.sql.Row` with the field names in the class, which makes them
    several times faster to build and to read than rows that carry the names one by one.
    """
    attributes: dict[str, Any] = {"__fields__": list(names)}
    for index, name in enumerate(names):
        if not hasattr(Row, name) and name not in attributes:
            attributes[name] = property(operator.itemgetter(index))
    kind = type("Row", (Row,), attributes)
    new = tuple.__new__

    def make(columns: list[list[Any]]) -> list[Any]:
        return [new(kind, values) for values in zip(*columns, strict=True)]

    return make


def key_decoder(codec: KeyCodec, zone: str) -> Callable[[bytes], tuple[Any, ...]]:
    """Make a function that turns canonical bytes into the key that ``handleExpiredTimer`` gets: a row, as in Spark.

    Parameters
    ----------
    codec : KeyCodec
        Decodes the bytes.
    zone : str
        The session's time zone, which timestamps of keys are in.
    """
    info = ZoneInfo(zone)

    def in_zone(value: Any) -> Any:
        return value.astimezone(info) if isinstance(value, datetime.datetime) and value.tzinfo else value

    make = row_maker(codec.schema.names)
    return lambda data: make([[in_zone(value)] for value in codec.decode(data)])[0]


def storage_converter(kind: DataType) -> Callable[[Any], Any] | None:
    """Conversion of a value of a Spark type, or None, before Arrow takes it; None if none is needed."""
    return _each(_to_storage(kind))


def _to_storage(kind: DataType) -> _Convert | None:
    if isinstance(kind, TimestampType):
        return _local_to_utc
    if isinstance(kind, DecimalType):
        return _DecimalScale(kind)
    if isinstance(kind, StructType):
        return _struct_to_storage(kind)
    return _within_collections(kind, _to_storage)


def _from_storage(kind: DataType) -> _Convert | None:
    """Conversion of a value that Arrow does not give as Spark does."""
    if isinstance(kind, TimestampType):
        return _utc_to_local
    if isinstance(kind, StructType):
        return _struct_from_storage(kind)
    if isinstance(kind, MapType) and isinstance(kind.keyType, TimestampType):
        return _map_by_local_time(_each(_from_storage(kind.valueType)))
    return _within_collections(kind, _from_storage)


def _within_collections(kind: DataType, converter: Callable[[DataType], _Convert | None]) -> _Convert | None:
    """Apply a conversion to the elements of an array, or to the keys and values of a map."""
    if isinstance(kind, ArrayType):
        convert = _each(converter(kind.elementType))
        return None if convert is None else lambda values: [convert(value) for value in values]
    if isinstance(kind, MapType):
        of_key, of_value = _each(converter(kind.keyType)), _each(converter(kind.valueType))
        if of_key is None and of_value is None:
            return None
        first, second = of_key or _same, of_value or _same
        return lambda values: {first(key): second(value) for key, value in values.items()}
    return None


def _each(convert: _Convert | None) -> _Convert | None:
    return None if convert is None else lambda value: None if value is None else convert(value)


def _same(value: Any) -> Any:
    return value


def _local_to_utc(value: datetime.datetime) -> datetime.datetime:
    # A datetime without a zone is local time, as everywhere in PySpark; pandas' own does not take it so.
    plain: datetime.datetime = value.to_pydatetime() if hasattr(value, "to_pydatetime") else value
    return plain.astimezone(datetime.UTC)


def _utc_to_local(value: datetime.datetime) -> datetime.datetime:
    try:
        # Unlike astimezone() it says by `fold` which of two equal local times it is.
        local = datetime.datetime.fromtimestamp(value.replace(microsecond=0).timestamp())
    except (ValueError, OverflowError):  # within a day of the first and the last that there are
        return value.astimezone().replace(tzinfo=None)
    return local.replace(microsecond=value.microsecond)


def _map_by_local_time(of_value: _Convert | None) -> _Convert:
    """Convert a map with timestamps as keys; of two instants with one local time the second keeps its zone."""

    def convert(values: dict[datetime.datetime, Any]) -> dict[datetime.datetime, Any]:
        converted: dict[datetime.datetime, Any] = {}
        for key, value in values.items():
            local = _utc_to_local(key)
            converted[key if local in converted else local] = value if of_value is None else of_value(value)
        return converted

    return convert


class _DecimalScale:
    """Rounds numbers to a decimal type's scale, half away from zero as Spark does; Arrow refuses to."""

    def __init__(self, kind: DecimalType) -> None:
        self._step = Decimal(1).scaleb(-kind.scale)

    def __call__(self, value: Any) -> Decimal:
        exact = value if isinstance(value, Decimal) else Decimal(str(value))
        return exact.quantize(self._step, context=_DECIMALS)


def _struct_to_storage(kind: StructType) -> _Convert:
    names = kind.names
    converts = [_each(_to_storage(field.dataType)) or _same for field in kind]

    def convert(value: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            values = [value.get(name) for name in names]
        else:
            values = list(value)
            if len(values) != len(names):
                raise ValueError(f"it has {len(values)} fields, not {len(names)}")
        return {name: one(item) for name, one, item in zip(names, converts, values, strict=True)}

    return convert


def _struct_from_storage(kind: StructType) -> _Convert:
    converts = [_each(_from_storage(field.dataType)) or _same for field in kind]
    make = row_maker(kind.names)

    def convert(value: dict[str, Any]) -> Any:
        return make([[one(item)] for one, item in zip(converts, value.values(), strict=True)])[0]

    return convert
