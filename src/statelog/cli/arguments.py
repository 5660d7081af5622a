"""The arguments that commands have in common."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import click
import msgspec
import pyarrow as pa

from statelog.errors import ConfigurationError, ErrorKind
from statelog.reading.source import At, parse_at


class AtType(click.ParamType):  # type: ignore[type-arg]  # older versions of click have no parameter
    """A batch, or a time in ISO 8601; without a zone it is in UTC."""

    name = "batch or time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> At:
        if isinstance(value, (int, datetime)):
            return value
        try:
            return parse_at(value)
        except ConfigurationError as error:
            self.fail(str(error), param, ctx)


LOCATION: Final = click.argument("location")
UID: Final = click.option("--uid", help="The operator; needed if there are several.")
STATE: Final = click.option("--state", help="The state; needed if there are several.")
AT: Final = click.option("--at", type=AtType(), help="A batch, or a time: the newest checkpoint that is not later.")
JSON: Final = click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
LIMIT: Final = click.option(
    "--limit", type=click.IntRange(min=0), default=100, show_default=True, help="Rows; 0 for all."
)
COLUMNS: Final = click.option("--columns", help="The columns, separated by commas.")
KEYS: Final = click.option("--key", "keys", multiple=True, help="Only this key, as in get; may be repeated.")


def names_of(columns: str | None) -> list[str] | None:
    """The columns that a user has named."""
    return None if columns is None else [name.strip() for name in columns.split(",")]


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
