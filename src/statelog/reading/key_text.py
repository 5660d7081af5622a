"""Makes keys of text, as people type them."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa

from statelog.errors import ConfigurationError, ErrorKind


def keys_of(texts: tuple[str, ...], schema: pa.Schema) -> pa.Table:
    """Keys from text: the value of a key of one field, or a JSON array or object of the fields of `schema`."""
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
        hint="Give the value of a key of one field as it is, and a key of several fields as a JSON array.",
    )
