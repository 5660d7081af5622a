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
        """Log a line. Control characters in texts, such as stored names, are escaped, including line ends."""
        if self.isEnabledFor(level):
            plain = [plain_text(str(one)) if isinstance(one, (str, BaseException)) else one for one in args]
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            super().log(level, msg, *plain, **kwargs)


def get_logger(name: str) -> Logger:
    """The logger of a module."""
    return Logger(logging.getLogger(name))


def set_log_fields(fields: LogFields) -> None:
    """Set the work that the records of this thread are about from now on."""
    _fields.set(fields)


def in_background(work: Callable[[], None]) -> Callable[[], None]:
    """Wrap work for another thread, so that its records are about the operator of this thread's work."""
    fields = LogFields(_fields.get().operator)

    def run() -> None:
        set_log_fields(fields)
        work()

    return run


@contextmanager
def log_fields(fields: LogFields) -> Iterator[None]:
    """Set the work that the records of this thread are about during the block."""
    token = _fields.set(fields)
    try:
        yield
    finally:
        _fields.reset(token)
