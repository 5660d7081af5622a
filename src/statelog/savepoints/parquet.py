"""The Parquet files of a savepoint: types that all tools read, with Spark's names of the types in the metadata."""

from __future__ import annotations

import json
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from statelog.reading.manifest import SavedFile, store_saved
from statelog.storage import Store

_COMPRESSION: Final = "zstd"
_SPARK_SCHEMA: Final = "org.apache.spark.sql.parquet.row.metadata"
"""Spark looks here for the types of a file's columns, as Parquet has no intervals and no void."""
_TIME: Final = pa.time64("us")
"""Spark's own unit in Parquet; times have no more digits."""

_SPARK_NAMES: Final[dict[pa.DataType, str]] = {
    pa.bool_(): "boolean",
    pa.int8(): "byte",
    pa.int16(): "short",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
    pa.timestamp("us", tz="UTC"): "timestamp",
    pa.timestamp("us"): "timestamp_ntz",
    pa.duration("us"): "interval day to second",
    _TIME: "time(6)",
    pa.null(): "void",
}


def file_schema(schema: pa.Schema) -> pa.Schema:
    """The columns of a table in its files; all are nullable."""
    fields = [_file_field(field) for field in schema]
    return pa.schema(fields, {_SPARK_SCHEMA: json.dumps(_spark_struct(fields))})


class TableFile:
    """A Parquet file in memory; `schema` has the table's columns in the state's types."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = file_schema(schema)
        self._sink = pa.BufferOutputStream()
        self._writer = pq.ParquetWriter(self._sink, self._schema, compression=_COMPRESSION)
        self.rows = 0

    def write(self, rows: pa.RecordBatch) -> None:
        """Add rows."""
        self._writer.write_batch(rows.cast(self._schema))
        self.rows += rows.num_rows

    def store(self, target: Store, folder: str, part: int) -> SavedFile:
        """Close the file and store it."""
        self._writer.close()
        data = memoryview(self._sink.getvalue())
        return store_saved(target, f"{folder}/part-{part:05}.parquet", data, rows=self.rows, part=part)


def _file_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, _file_type(field.type))


def _file_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_time64(kind):
        return _TIME
    if pa.types.is_list(kind):
        return pa.list_(_file_field(kind.value_field))
    if pa.types.is_map(kind):
        return pa.map_(_file_type(kind.key_type), _file_field(kind.item_field))
    return pa.struct([_file_field(field) for field in kind.fields]) if pa.types.is_struct(kind) else kind


def _spark_struct(fields: list[pa.Field]) -> dict[str, Any]:
    members = [
        {"name": field.name, "type": _spark_type(field.type), "nullable": True, "metadata": {}} for field in fields
    ]
    return {"type": "struct", "fields": members}


def _spark_type(kind: pa.DataType) -> str | dict[str, Any]:
    """A type in Spark's JSON."""
    if pa.types.is_list(kind):
        return {"type": "array", "elementType": _spark_type(kind.value_type), "containsNull": True}
    if pa.types.is_map(kind):
        key, value = _spark_type(kind.key_type), _spark_type(kind.item_type)
        return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
    if pa.types.is_struct(kind):
        return _spark_struct(kind.fields)
    return f"decimal({kind.precision},{kind.scale})" if pa.types.is_decimal(kind) else _SPARK_NAMES[kind]
