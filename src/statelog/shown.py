"""Keys and values in messages. They can be hidden: then dots stand for them."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final

REDACTED: Final = "\N{BULLET}\N{BULLET}\N{BULLET}"
_CHARACTERS: Final = 80

_redacts: ContextVar[bool] = ContextVar("redacts", default=False)


def redact_messages(*, redacts: bool) -> None:
    """Hide keys and values in the messages of this thread from now on, or show them."""
    _redacts.set(redacts)


def shown_key(key: object) -> str:
    """A key."""
    return REDACTED if _redacts.get() else repr(key)


def shown_value(value: Any) -> str:
    """A value with its type, on one line and cut."""
    if _redacts.get():
        return f"{type(value).__name__} {REDACTED}"
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 3] + '...'}"
