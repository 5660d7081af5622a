"""The storage types of Spark's types, the codecs of states and keys, and stored values as users see them."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from decimal import Decimal
from itertools import chain, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from statelog.convert.local_times import local_times, timestamp_column, to_local
from statelog.convert.newer_types import TimeType
from statelog.convert.python_values import PLAIN_TYPES, exact_type, row_maker, to_storage
from statelog.errors import ConfigurationError, ErrorKind
from statelog.runs.byte_slices import RowsTooLarge, to_array
from statelog.runs.column_values import ColumnValues, Integers, MapsAsDicts
from statelog.runs.keys import KeyCodec
from statelog.runs.values import Convert, FieldCodec, MakeColumn, RowCodec
from statelog.time_zones import time_zone


class StoredValues(MapsAsDicts):
    """Stored values as users see them: structs are Rows, and timestamps are local times without a zone."""

    own = MapsAsDicts.own | {pa.lib.Type_STRUCT}

    def timestamps(self, times_us: Integers, zone: datetime.tzinfo | None) -> list[Any]:
        return super().timestamps(times_us, zone) if zone is None else list(local_times(times_us))

    def structs(self, column: pa.Array) -> list[Any]:
        return row_maker([field.name for field in column.type])(list(map(self.of, column.flatten())))

    def maps(self, column: pa.Array, keys: list[Any], items: list[Any], bounds: list[int]) -> list[Any]:
        kind = column.type.key_type
        if not pa.types.is_timestamp(kind) or kind.tz is None:
            return super().maps(column, keys, items, bounds)
        entries = list(zip(keys, items, strict=True))
        dicts = [dict(entries[start:end]) for start, end in pairwise(bounds)]
        if sum(map(len, dicts)) < len(entries):
            offset = column.offsets[0].as_py()
            instants = ColumnValues().of(column.keys.slice(offset, len(keys)))
            return [_by_local_time(entries[start:end], instants[start:end]) for start, end in pairwise(bounds)]
        return dicts


def _by_local_time(entries: list[tuple[Any, Any]], instants: list[Any]) -> dict[Any, Any]:
    """A dict by local time; if two instants have the same local time, the second keeps its zone."""
    found: dict[Any, Any] = {}
    for (local, item), instant in zip(entries, instants, strict=True):
        found[instant if local in found else local] = item
    return found


def from_storage(kind: DataType) -> Convert | None:
    """The conversion of Arrow's Python values to Spark's; None if they are the same."""
    if isinstance(kind, TimestampType):
        return to_local
    if isinstance(kind, StructType):
        return _struct_from_storage(kind)
    if isinstance(kind, MapType) and isinstance(kind.keyType, TimestampType):
        return _map_by_local_time(_each(from_storage(kind.valueType)))
    if isinstance(kind, ArrayType):
        convert = _each(from_storage(kind.elementType))
        return None if convert is None else lambda values: [convert(value) for value in values]
    if isinstance(kind, MapType):
        of_key, of_value = _each(from_storage(kind.keyType)), _each(from_storage(kind.valueType))
        if of_key is None and of_value is None:
            return None
        first, second = of_key or _same, of_value or _same
        return lambda values: {first(key): second(value) for key, value in values.items()}
    return None


def _each(convert: Convert | None) -> Convert | None:
    return None if convert is None else lambda value: None if value is None else convert(value)


def _same(value: Any) -> Any:
    return value


def _map_by_local_time(of_value: Convert | None) -> Convert:
    """Convert a map with timestamps as keys; if two instants have the same local time, the second keeps its zone."""

    def convert(values: dict[datetime.datetime, Any]) -> dict[datetime.datetime, Any]:
        converted: dict[datetime.datetime, Any] = {}
        for key, value in values.items():
            local = to_local(key)
            converted[key if local in converted else local] = value if of_value is None else of_value(value)
        return converted

    return convert


def _struct_from_storage(kind: StructType) -> Convert:
    converts = [_each(from_storage(field.dataType)) or _same for field in kind]
    make = row_maker(kind.names)

    def convert(value: dict[str, Any]) -> Any:
        return make([[one(item)] for one, item in zip(converts, value.values(), strict=True)])[0]

    return convert


_TIME_DIGITS: Final = 6
_PLAIN: Final[dict[type[DataType], type]] = {DecimalType: Decimal, TimestampType: datetime.datetime}
"""Classes of values that columns are made of without holding each."""
_VALUES: Final = StoredValues()


def arrow_type(kind: DataType, subject: str) -> pa.DataType:
    """The storage type of a Spark type; raises ConfigurationError, with `subject` as its owner, if there is none."""
    if isinstance(kind, StringType):
        if getattr(kind, "collation", "UTF8_BINARY") != "UTF8_BINARY":
            raise _unsupported(kind, subject, "Such strings may be equal but differ in bytes: use UTF8_BINARY.")
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
            raise _unsupported(kind, subject, "Give each field of the struct a unique name.")
        if not len(kind):
            raise _unsupported(kind, subject, "Give the struct a field: files cannot hold structs without fields.")
        return pa.struct([pa.field(field.name, arrow_type(field.dataType, subject)) for field in kind])
    if isinstance(kind, TimeType) and kind.precision > _TIME_DIGITS:
        raise _unsupported(kind, subject, f"Convert it to time({_TIME_DIGITS}): times in Python have microseconds.")
    plain = PLAIN_TYPES.get(type(kind))
    if plain is None:
        raise _unsupported(kind, subject, "Convert it to a string, number, timestamp, array, map or struct.")
    return plain.stored


def _unsupported(kind: DataType, subject: str, hint: str) -> ConfigurationError:
    return ConfigurationError(
        f"{subject} has type {kind.simpleString()}, which is not supported.",
        kind=ErrorKind.UNSUPPORTED_STATE_TYPE,
        hint=hint,
    )


def field_codecs(schema: StructType, subject: str, *, nan_is_null: bool = False) -> list[FieldCodec]:
    """Codecs of a schema's fields; `subject` names a field's owner in messages.

    With `nan_is_null`, NaN is null in every field, as in frames. Raises ConfigurationError for an unsupported type.
    """
    return [
        _field_codec(field, arrow_type(field.dataType, f"{subject} '{field.name}'"), nan_is_null=nan_is_null)
        for field in schema
    ]


def _field_codec(field: StructField, stored: pa.DataType, *, nan_is_null: bool) -> FieldCodec:
    kind = field.dataType
    return FieldCodec(
        name=field.name,
        type=stored,
        exact=exact_type(kind),
        to_storage=to_storage(kind, nan_is_null=nan_is_null),
        from_storage=from_storage(kind),
        declared=kind.simpleString(),
        hold=to_storage(kind, nan_is_null=nan_is_null, keeps_datetimes=True),
        make_column=column_maker(kind, stored),
        plain=_PLAIN.get(type(kind)),
        values=_VALUES,
    )


def row_codec(schema: StructType, subject: str) -> RowCodec:
    """Codec of the rows of a Spark schema; `subject` names them in messages."""
    return RowCodec(field_codecs(schema, f"{subject}, field"), subject)


def state_codecs(name: str, value: StructType, entry: StructType | None) -> tuple[RowCodec, RowCodec | None]:
    """Codecs of a state's values and, if it is a map, of its keys; raises ConfigurationError for unsupported types."""
    subject = f"state '{name}'"
    codec = row_codec(value, subject)
    if entry is None:
        return codec, None
    entry_codec = row_codec(entry, f"map key of {subject}")
    KeyCodec(entry_codec.schema, entry_codec.subject, with_maps=False)  # refuses types that cannot be keys
    return codec, entry_codec


def key_schema(columns: Iterable[StructField]) -> pa.Schema:
    """Storage types of grouping columns; raises ConfigurationError if a type cannot be a key."""
    fields: list[pa.Field] = []
    for column in columns:
        try:
            kind = arrow_type(_nullable(column.dataType), f"grouping column '{column.name}'")
            fields.append(pa.field(column.name, kind))
        except ConfigurationError as error:
            raise ConfigurationError(error.message, kind=ErrorKind.UNSUPPORTED_KEY_TYPE, hint=error.hint) from error
    return pa.schema(fields)


def _nullable(kind: DataType) -> DataType:
    """The type with null elements allowed, so that keys do not depend on the nullability that Spark infers."""
    if isinstance(kind, ArrayType):
        return ArrayType(_nullable(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(_nullable(kind.keyType), _nullable(kind.valueType))
    if isinstance(kind, StructType):
        return StructType([StructField(field.name, _nullable(field.dataType)) for field in kind])
    return kind


def key_decoder(codec: KeyCodec, zone: str) -> Callable[[Sequence[bytes]], list[tuple[Any, ...]]]:
    """Make the decoder of keys for ``handleExpiredTimer``: Rows, as in Spark, with times in `zone`, the session's."""
    make = row_maker(codec.schema.names)
    is_zoned = [pa.types.is_timestamp(field.type) and field.type.tz is not None for field in codec.schema]

    def decode(keys: Sequence[bytes]) -> list[tuple[Any, ...]]:
        columns: list[list[Any]] = [list(column) for column in zip(*codec.decode_all(keys), strict=True)]
        for index in itertools.compress(range(len(columns)), is_zoned):
            columns[index] = [None if at is None else at.astimezone(time_zone(zone)) for at in columns[index]]
        return make(columns)

    return decode


# ---- Columns of held values, of types for which Arrow makes none: timestamps, and what holds them or structs ----


_MOST_ELEMENTS: Final = (1 << 31) - 1


def column_maker(kind: DataType, stored: pa.DataType) -> MakeColumn | None:
    """Make a function that makes columns of held values, None included; None if Arrow itself can do this.

    The function raises one of :data:`statelog.runs.values.MISFITS`, or RowsTooLarge.
    """
    if isinstance(kind, TimestampType):
        return timestamp_column
    if isinstance(kind, StructType):
        fields = [_part_maker(field.dataType, own.type) for field, own in zip(kind, stored, strict=True)]
        return lambda values: _struct_column(values, stored, fields)
    if isinstance(kind, ArrayType):
        of_elements = column_maker(kind.elementType, stored.value_type)
        return of_elements and (lambda values: _list_column(values, stored, of_elements))
    if isinstance(kind, MapType):
        if (column_maker(kind.keyType, stored.key_type) or column_maker(kind.valueType, stored.item_type)) is None:
            return None
        parts = _part_maker(kind.keyType, stored.key_type), _part_maker(kind.valueType, stored.item_type)
        return lambda values: _map_column(values, stored, *parts)
    return None


def _part_maker(kind: DataType, stored: pa.DataType) -> MakeColumn:
    return column_maker(kind, stored) or (lambda values: to_array(values, stored))


def _struct_column(values: Sequence[Any], stored: pa.DataType, fields: list[MakeColumn]) -> pa.Array:
    """A column of structs, which are dicts in the storage type and Rows as they are read."""
    nothing = (None,) * len(fields)
    rows = [nothing if value is None else value.values() if isinstance(value, dict) else value for value in values]
    columns = zip(*rows, strict=True) if rows else [()] * len(fields)
    arrays = [make(column) for make, column in zip(fields, columns, strict=True)]
    return pa.StructArray.from_arrays(arrays, fields=list(stored), mask=pa.array(_is_null(values)))


def _list_column(values: Sequence[Any], stored: pa.DataType, of_elements: MakeColumn) -> pa.Array:
    elements = of_elements(list(chain.from_iterable(value for value in values if value is not None)))
    offsets = _offsets(values)
    return pa.ListArray.from_arrays(offsets, elements, type=stored, mask=pa.array(_is_null(values)))


def _map_column(values: Sequence[Any], stored: pa.DataType, of_keys: MakeColumn, of_items: MakeColumn) -> pa.Array:
    dicts: list[dict[Any, Any]] = [value for value in values if value is not None]
    keys = of_keys(list(chain.from_iterable(dicts)))
    items = of_items(list(chain.from_iterable(value.values() for value in dicts)))
    return pa.MapArray.from_arrays(_offsets(values), keys, items, type=stored, mask=pa.array(_is_null(values)))


def _is_null(values: Sequence[Any]) -> npt.NDArray[np.bool_]:
    return np.fromiter((value is None for value in values), bool, len(values))


def _offsets(values: Sequence[Collection[Any] | None]) -> pa.Array:
    """Where the parts of each value begin, and where the last ones end; RowsTooLarge if they are too many."""
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.fromiter((0 if value is None else len(value) for value in values), np.int64), out=offsets[1:])
    if offsets[-1] > _MOST_ELEMENTS:
        raise RowsTooLarge(f"{offsets[-1]:,} elements")
    return pa.array(offsets.astype(np.int32))


Parse = Callable[[str], DataType]
"""Reads a type written as DDL."""


def parse_schema(
    schema: object, subject: str, parse: Parse = DataType.fromDDL, *, may_be_empty: bool = False
) -> StructType:
    """A schema argument, a DDL text or a StructType, as a StructType; `subject` names it in messages.

    `parse` reads DDL; the default is Spark's parser, which needs a session.
    """
    try:
        parsed = parse(schema) if isinstance(schema, str) else schema
    except Exception as error:
        raise ConfigurationError(
            f"{subject} {schema!r} cannot be parsed: {str(error).splitlines()[0].rstrip('.')}.",
            hint="Write it like 'user string, count long'.",
        ) from error
    if not isinstance(parsed, StructType) or not (len(parsed) or may_be_empty):
        needs = "" if may_be_empty else " with at least one field"
        raise ConfigurationError(f"{subject} is {schema!r}.", hint=f"It must be a StructType{needs}, or a DDL string.")
    return parsed


def parse_output(schema: object, parse: Parse = DataType.fromDDL) -> StructType:
    """The output type as a StructType; refuses types that are not supported."""
    parsed = parse_schema(schema, "outputStructType", parse, may_be_empty=True)
    for field in parsed:
        arrow_type(field.dataType, f"output column '{field.name}'")
    return parsed
