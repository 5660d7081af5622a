"""A strict parser of Spark's JSON for types, for descriptions that come from a store.

Spark's own parser unpickles user-defined types, or imports the modules that they name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType

from statelog.convert.ddl import parse_ddl
from statelog.errors import CorruptionError, ErrorKind, StatelogError

_COLLATIONS: Final = "__COLLATIONS"
"""Key of a field's metadata: the collations of the strings in it, by path."""


def parse_type_json(text: str, subject: str) -> StructType:
    """Parse the columns that :meth:`StructType.json` describes; `subject` names the text in messages.

    Raises CorruptionError for any other text, and for types that are not Spark's own.
    """
    try:
        kind = _type(json.loads(text), "", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, StatelogError) as error:
        raise _unknown(subject, f"{type(error).__name__}: {error}") from None
    if not isinstance(kind, StructType):
        raise _unknown(subject, "it is no struct")
    return kind


def _type(value: Any, path: str, collations: Mapping[str, str]) -> DataType:
    """A type; `path` leads to it from its field, which has the `collations` of strings."""
    if isinstance(value, str):
        if value == "string" and path in collations:
            return StringType(collations[path])
        kind = parse_ddl(value)
        if isinstance(kind, (ArrayType, MapType, StructType)):
            raise ValueError(f"{value!r:.80} is no name of a type")
        return kind
    match value["type"]:
        case "struct":
            return StructType([_field(field) for field in value["fields"]])
        case "array":
            element = _type(value["elementType"], _below(path, "element"), collations)
            return ArrayType(element, _flag(value["containsNull"]))
        case "map":
            key = _type(value["keyType"], _below(path, "key"), collations)
            item = _type(value["valueType"], _below(path, "value"), collations)
            return MapType(key, item, _flag(value["valueContainsNull"]))
        case "udt":
            raise ValueError("a user-defined type is code, which is not taken from a store")
        case other:
            raise ValueError(f"{other!r:.80} is no type")


def _field(value: Any) -> StructField:
    metadata = dict(value.get("metadata") or {})
    # Spark writes the collation's provider in front of its name.
    collations = {path: str(name).partition(".")[2] for path, name in dict(metadata.pop(_COLLATIONS, {})).items()}
    name = value["name"]
    if not isinstance(name, str):
        raise TypeError(f"{name!r:.80} is no name of a field")
    return StructField(name, _type(value["type"], name, collations), _flag(value.get("nullable", True)), metadata)


def _below(path: str, part: str) -> str:
    return f"{path}.{part}" if path else part


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r:.80} is neither true nor false")
    return value


def _unknown(subject: str, reason: str) -> CorruptionError:
    return CorruptionError(
        f"{subject}: the description of its columns is not one of Spark's types: {reason}.",
        kind=ErrorKind.FORMAT,
        hint="Was it written by another program, or changed since? Restore the file from a copy.",
    )
