"""Text for people: keys and values without control characters, sizes and times.

Keys and values can be hidden: then dots stand for them.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pyarrow as pa

REDACTED: Final = "\N{BULLET}\N{BULLET}\N{BULLET}"
_CHARACTERS: Final = 80

# C0, DEL and C1; direction marks and overrides; line separators; surrogates.
_CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_OFTEN: Final = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}

_redacts: ContextVar[bool] = ContextVar("redacts", default=False)


def redact_messages(*, redacts: bool) -> None:
    """Hide keys and values in the messages of this thread from now on, or show them."""
    _redacts.set(redacts)


def plain_text(text: str, kept: str = "") -> str:
    """A text with escapes, such as ``\\x1b``, in place of its control characters, except those in `kept`."""
    if text.isprintable():
        return text
    return _CONTROLS.sub(lambda found: found[0] if found[0] in kept else _escaped(found[0]), text)


def plain_json(text: str) -> str:
    """A JSON text with escapes of JSON in place of the control characters in its strings."""
    return text if text.isprintable() else _CONTROLS.sub(_json_escaped, text)


def _escaped(character: str) -> str:
    if character in _OFTEN:
        return _OFTEN[character]
    return f"\\x{ord(character):02x}" if ord(character) < 0x100 else f"\\u{ord(character):04x}"


def _json_escaped(found: re.Match[str]) -> str:
    # JSON has no raw ASCII control characters in strings; those that occur here are between values.
    return found[0] if ord(found[0]) < 0x20 else f"\\u{ord(found[0]):04x}"


def shown_key(key: object) -> str:
    """A key."""
    return REDACTED if _redacts.get() else plain_text(repr(key))


def shown_value(value: Any) -> str:
    """A value with its type, on one line and shortened."""
    if _redacts.get():
        return f"{type(value).__name__} {REDACTED}"
    text = plain_text(" ".join(repr(value).split()))
    return f"{type(value).__name__} {text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 3] + '...'}"


def python_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch; a value that Python lacks, such as a date after the year 9999, is a text."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows
    except (ValueError, OverflowError):
        columns = [map(_python_value, column) for column in batch.columns]
        return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def _python_value(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except (ValueError, OverflowError):
        pass
    try:
        return value.cast("string").as_py()
    except NotImplementedError:
        return "a value that Python lacks"


# ---- Sizes and times ----


_UNITS: Final = ("B", "KB", "MB", "GB", "TB")


def size_text(size_bytes: int) -> str:
    """A number of bytes for people."""
    size, unit = float(size_bytes), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size_bytes} B" if not unit else f"{size:.1f} {_UNITS[unit]}"


def time_text(time_ms: int) -> str:
    """A time for people, in UTC."""
    time = utc_time(time_ms)
    return f"{time_ms} ms" if time is None else time.strftime("%Y-%m-%d %H:%M:%S")


def utc_time(time_ms: int) -> datetime | None:
    """A time in milliseconds since the Unix epoch; None if its year is not from 1 to 9999."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return None
