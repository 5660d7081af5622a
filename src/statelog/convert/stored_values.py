"""Makes of stored values what users see: Rows of structs, dicts of maps, and local times of timestamps."""

from __future__ import annotations

import datetime
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, TimestampType

from statelog.convert.local_times import local_times, to_local
from statelog.convert.python_values import row_maker
from statelog.runs.column_values import ColumnValues, Integers, MapsAsDicts
from statelog.runs.values import Convert


class StoredValues(MapsAsDicts):
    """What users see of stored values: structs are Rows, and timestamps local times without a zone."""

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
    """A dict by local time; where two instants have one local time, the second keeps its zone."""
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
    """Convert a map with timestamps as keys; where two instants have one local time, the second keeps its zone."""

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
