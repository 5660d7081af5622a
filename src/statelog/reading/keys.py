"""Encodes the keys that users look up, given as text, as values or as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa

from statelog.convert.local_times import to_utc
from statelog.errors import ConfigurationError, ErrorKind
from statelog.runs.key_groups import Hashes, row_hashes
from statelog.runs.keys import KeyCodec
from statelog.tables.table import KeyBatch

Keys: TypeAlias = pa.Table | pa.RecordBatch | Sequence[Any]
"""Keys: columns named as the key's fields; or a sequence with a tuple, a dict or, for one field, a value per key.

A datetime without a zone is interpreted as Spark's ``collect()`` returns it: for a timestamp as the local time of this
process, for a ``timestamp_ntz`` as the time itself.
"""


def encoded_keys(keys: Keys, codec: KeyCodec, name: str) -> KeyBatch:
    """Some keys as hashes and bytes, each once, in order; ConfigurationError if they do not fit the key's fields."""
    columns = _key_columns(keys, codec.schema, name)
    return distinct_keys(row_hashes(columns), codec.encode_columns(columns))


def distinct_keys(hashes: Hashes, keys: pa.Array | pa.ChunkedArray) -> KeyBatch:
    """Each key once, by hash and bytes."""
    table = pa.table({"hash": hashes, "key": keys}).group_by(["hash", "key"]).aggregate([])
    table = table.sort_by([("hash", "ascending"), ("key", "ascending")]).combine_chunks()
    return KeyBatch(table["hash"].to_numpy(), table["key"].combine_chunks())


def _key_columns(keys: Keys, schema: pa.Schema, name: str) -> list[pa.Array]:
    """Keys as a column per field of the key."""
    fields = ", ".join(f"{field.name} {field.type}" for field in schema)
    try:
        if isinstance(keys, pa.RecordBatch):
            keys = pa.Table.from_batches([keys])
        if isinstance(keys, pa.Table):
            return [keys[field.name].cast(field.type).combine_chunks() for field in schema]
        rows = [_row(key, schema) for key in keys]
        return [
            pa.array([_instant(row[place], field.type) for row in rows], field.type)
            for place, field in enumerate(schema)
        ]
    except (pa.ArrowException, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"{name} has the key ({fields}), but the given keys do not fit: {error}.",
            kind=ErrorKind.VALUE_MISMATCH,
            hint="Pass a table with these columns, or a sequence with a tuple or dict of these fields for each key.",
        ) from error


def _instant(value: Any, kind: pa.DataType) -> Any:
    """A value in which datetimes without a zone, as Spark returns them for timestamps, are converted to instants."""
    if isinstance(value, datetime) and pa.types.is_timestamp(kind) and kind.tz is not None:
        return to_utc(value)
    if isinstance(value, Mapping) and pa.types.is_struct(kind):
        names = {field.name: field.type for field in kind}
        return {name: _instant(one, names[name]) if name in names else one for name, one in value.items()}
    if isinstance(value, (list, tuple)) and pa.types.is_list(kind):
        return [_instant(one, kind.value_type) for one in value]
    return value


def _row(key: Any, schema: pa.Schema) -> tuple[Any, ...]:
    if isinstance(key, Mapping):
        return tuple(key[field.name] for field in schema)
    values = tuple(key) if isinstance(key, (tuple, list)) else (key,)
    if len(values) != len(schema):
        raise ValueError(f"{key!r} has {len(values)} values")
    return values


def keys_of(texts: tuple[str, ...], schema: pa.Schema) -> pa.Table:
    """Keys from text: the value of a key with one field, or a JSON array or object of the fields of `schema`."""
    return pa.table([pa.array(column, field.type) for field, column in _columns(texts, schema)], schema=schema)


def _columns(texts: tuple[str, ...], schema: pa.Schema) -> list[tuple[pa.Field, list[Any]]]:
    rows = [_fields(text, schema) for text in texts]
    return [(field, [row[place] for row in rows]) for place, field in enumerate(schema)]


def _fields(text: str, schema: pa.Schema) -> list[Any]:
    if len(schema) == 1:
        # Whatever text is given, it may be the key itself.
        given: Any = [None if text == "null" else text]
    else:
        try:
            given = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise _misfit(text, schema, str(error)) from error
    if isinstance(given, dict):
        given = [given[field.name] for field in schema if field.name in given]
    if not isinstance(given, list) or len(given) != len(schema):
        raise _misfit(text, schema, "it has other fields")
    try:
        return [_typed(value, field.type) for value, field in zip(given, schema, strict=True)]
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise _misfit(text, schema, str(error)) from error


def _typed(value: Any, type_: pa.DataType) -> Any:
    if isinstance(value, str) and not pa.types.is_nested(type_):
        return pa.array([value]).cast(type_)[0].as_py()
    return pa.array([value], type_)[0].as_py()


def _misfit(text: str, schema: pa.Schema, reason: str) -> ConfigurationError:
    fields = ", ".join(f"{field.name} {field.type}" for field in schema)
    return ConfigurationError(
        f"The key '{text}' does not fit the key's fields ({fields}): {reason}.",
        kind=ErrorKind.VALUE_MISMATCH,
        hint="Write a key with one field as it is, and a key with several fields as a JSON array.",
    )
