"""Looks up keys and their histories for the page, a bounded number of rows and characters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from statelog.errors import ConfigurationError, StatelogError
from statelog.reading.history import read_history
from statelog.reading.keys import keys_of
from statelog.reading.open import open_point
from statelog.reading.point import parse_at
from statelog.reading.read import read_state
from statelog.runs.schema import decode_schema
from statelog.shown import REDACTED, python_rows, time_text
from statelog.tools.pages.model import PageModel

ROWS: Final = 100
_CHARACTERS: Final = 300
_TIMES: Final = frozenset({"batch_time_ms", "expires_ms", "time_ms"})
_NEUTRAL: Final = frozenset({"batch", "batch_time_ms", "expires_ms", "operation", "position", "subtask", "time_ms"})
"""Columns that have neither keys nor values."""


@dataclass(frozen=True)
class Wanted:
    """What a visitor asks for, as typed."""

    operator: str = ""
    state: str = ""
    key: str = ""
    at: str = ""
    is_history: bool = False


@dataclass(frozen=True)
class Found:
    """Rows as text."""

    columns: tuple[str, ...] = ()
    numbers: frozenset[int] = frozenset()
    """Places of the columns with numbers."""
    rows: tuple[tuple[str, ...], ...] = ()
    has_more: bool = False
    problem: str = ""
    """Why there are none."""


def browse(page: PageModel, wanted: Wanted, *, redacts: bool) -> Found:
    """Read what a visitor asks for; a mistake of theirs, or damage, is the result's problem.

    With `redacts` the result has no key and no value.
    """
    location = next((one.location for one in page.operators if one.uid == wanted.operator), None)
    if location is None or not wanted.state:
        return Found(problem="Choose an operator and a state.")
    try:
        return _found(location, wanted, redacts=redacts)
    except StatelogError as error:
        # Messages tell no key that is stored.
        return Found(problem=f"{error.message} {error.hint}")


def _found(location: str, wanted: Wanted, *, redacts: bool) -> Found:
    at = parse_at(wanted.at) if wanted.at else None
    schema = _key_schema(location, wanted.operator)
    try:
        keys = keys_of((wanted.key,), schema) if wanted.key and len(schema) else None
    except ConfigurationError:
        if not redacts:
            raise
        fields = ", ".join(f"{field.name} {field.type}" for field in schema)
        return Found(problem=f"The key does not fit the key's fields ({fields}).")
    if wanted.is_history:
        if keys is None:
            return Found(problem="Name a key: the history is that of one key.")
        [key] = keys.to_pylist()
        reader = read_history(location, key, wanted.operator, wanted.state)
    else:
        reader = read_state(location, wanted.operator, wanted.state, at=at, keys=keys)
    with reader:
        hidden = set(reader.schema.names) - _NEUTRAL if redacts else set()
        rows: list[tuple[str, ...]] = []
        for row in _rows(reader):
            if len(rows) == ROWS:
                return _as_found(reader.schema, rows, has_more=True)
            rows.append(tuple(REDACTED if name in hidden else _text(name, value) for name, value in row.items()))
        return _as_found(reader.schema, rows, has_more=False)


def _key_schema(location: str, uid: str) -> pa.Schema:
    key_schema = open_point(location, uid, None).key_schema
    return decode_schema(key_schema) if key_schema else pa.schema([])


def _rows(reader: pa.RecordBatchReader) -> Iterator[dict[str, Any]]:
    for batch in reader:
        # A batch may be large: its rows become Python values a few at a time.
        for start in range(0, batch.num_rows, ROWS):
            yield from python_rows(batch.slice(start, ROWS))


def _as_found(schema: pa.Schema, rows: list[tuple[str, ...]], *, has_more: bool) -> Found:
    numbers = frozenset(
        place
        for place, field in enumerate(schema)
        if pa.types.is_integer(field.type) or pa.types.is_floating(field.type) or pa.types.is_decimal(field.type)
    )
    return Found(tuple(schema.names), numbers, tuple(rows), has_more)


def _text(name: str, value: Any) -> str:
    if value is None:
        return "null"
    if name in _TIMES:
        return time_text(value)
    text = str(value)
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}\N{HORIZONTAL ELLIPSIS}"
