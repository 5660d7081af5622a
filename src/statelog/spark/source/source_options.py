"""The options of the data source ``statelog``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from statelog.errors import ConfigurationError, ErrorKind
from statelog.reading.point import At, parse_at


class Show(StrEnum):
    """What the rows are."""

    ROWS = "rows"
    OPERATORS = "operators"
    STATES = "states"
    CHECKPOINTS = "checkpoints"
    PINS = "pins"
    CHANGES = "changes"


_ANY: Final = ("path", "uid", "state", "columns", "show", "pin_s")
_NOT_FOR_CHANGES: Final = ("at", "push_filters")
_FOR_CHANGES: Final = ("after", "with_last", "max_pin_bytes", "max_batch_bytes", "with_before")
_READ_PIN_S: Final = 3600.0
"""How long the tasks of a read may take to begin."""
_CHANGES_PIN_S: Final = 86_400.0
"""How long changes are kept for a stream that has stopped."""
_MAX_PIN_BYTES: Final = 1 << 30
_MAX_BATCH_BYTES: Final = 256 << 20


@dataclass(frozen=True)
class SourceOptions:
    """A user's choices."""

    location: str
    uid: str | None
    state: str | None
    at: At | None
    columns: tuple[str, ...] | None
    show: Show
    pin_s: float
    pushes_filters: bool
    after: int | None
    with_last: bool
    max_pin_bytes: int
    max_batch_bytes: int
    with_before: bool

    @classmethod
    def of(cls, options: Mapping[str, str]) -> SourceOptions:
        """Check the options; ConfigurationError if one is unknown, cannot be understood or does not fit the others."""
        given = {name.lower(): value for name, value in options.items()}
        known = (*_ANY, *_NOT_FOR_CHANGES, *_FOR_CHANGES)
        if unknown := sorted(set(given) - set(known)):
            raise misuse(f"The format statelog has no option '{unknown[0]}'.", f"It has {', '.join(known)}.")
        if "path" not in given:
            raise misuse("The format statelog has no path.", "Call load(path) with the checkpointLocation.")
        text = given.get("show", Show.ROWS)
        if text not in list(Show):
            raise misuse(f"Option show is '{text}'.", f"It must be one of {', '.join(Show)}.")
        show = Show(text)
        for name in _NOT_FOR_CHANGES if show is Show.CHANGES else _FOR_CHANGES:
            if name in given:
                raise misuse(
                    f"Option {name} does not go with show={show}.",
                    "Changes begin after a batch: option after."
                    if show is Show.CHANGES
                    else "It is for show=changes, in spark.readStream.",
                )
        columns = given.get("columns")
        return cls(
            location=given["path"],
            uid=given.get("uid"),
            state=given.get("state"),
            at=parse_at(given["at"]) if "at" in given else None,
            columns=None if columns is None else tuple(name.strip() for name in columns.split(",")),
            show=show,
            pin_s=_seconds(given, "pin_s", _CHANGES_PIN_S if show is Show.CHANGES else _READ_PIN_S),
            pushes_filters=_truth(given, "push_filters"),
            after=_whole(given, "after", "a batch") if "after" in given else None,
            with_last=_truth(given, "with_last"),
            max_pin_bytes=_whole(given, "max_pin_bytes", "a number of bytes", _MAX_PIN_BYTES),
            max_batch_bytes=_whole(given, "max_batch_bytes", "a number of bytes", _MAX_BATCH_BYTES),
            with_before=_truth(given, "with_before"),
        )


def misuse(message: str, hint: str) -> ConfigurationError:
    """An error of the user's."""
    return ConfigurationError(message, kind=ErrorKind.INVALID_OPTION, hint=hint)


def _seconds(given: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(given.get(name, default))
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise misuse(f"Option {name} is '{given[name]}'.", "It must be a number of seconds.")
    return value


def _whole(given: Mapping[str, str], name: str, what: str, default: int = 0) -> int:
    try:
        return int(given.get(name, default))
    except ValueError:
        raise misuse(f"Option {name} is '{given[name]}'.", f"It must be {what}.") from None


def _truth(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "false").lower()
    if text not in ("true", "false"):
        raise misuse(f"Option {name} is '{text}'.", "It must be true or false.")
    return text == "true"
