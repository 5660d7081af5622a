"""Loggers whose records say to which operator, batch and subtask they belong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from statelog.shown import plain_text


@dataclass(frozen=True)
class LogFields:
    """The work of a thread; None where that is unknown, or concerns all batches or subtasks."""

    operator: str | None = None
    """The uid."""
    batch: int | None = None
    subtask: int | None = None


_NOTHING: Final = LogFields()
_fields: ContextVar[LogFields] = ContextVar("log_fields", default=_NOTHING)


class Logger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose records have the attributes `statelog_operator`, `statelog_batch` and `statelog_subtask`."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the attributes to a record."""
        for name, value in vars(_fields.get()).items():
            kwargs.setdefault("extra", {})[f"statelog_{name}"] = value
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a line: control characters in texts, of stored names say, are escaped, those of line ends too."""
        if self.isEnabledFor(level):
            plain = [plain_text(str(one)) if isinstance(one, (str, BaseException)) else one for one in args]
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            super().log(level, msg, *plain, **kwargs)


def get_logger(name: str) -> Logger:
    """The logger of a module."""
    return Logger(logging.getLogger(name))


def set_log_fields(fields: LogFields) -> None:
    """Let the records of this thread from now on be about some work."""
    _fields.set(fields)


def in_background(work: Callable[[], None]) -> Callable[[], None]:
    """Work for another thread, whose records are about the operator of this one's."""
    fields = LogFields(_fields.get().operator)

    def run() -> None:
        set_log_fields(fields)
        work()

    return run


@contextmanager
def log_fields(fields: LogFields) -> Iterator[None]:
    """Let the records of this thread during the block be about some work."""
    token = _fields.set(fields)
    try:
        yield
    finally:
        _fields.reset(token)
