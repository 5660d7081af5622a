"""Handles of states that ``init`` declares and then deletes: as in Spark, every read and write fails.

Also as in Spark, their iterators are empty, and values and lists share their messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

from pyspark.errors import PySparkRuntimeError

from statelog.runs.schema import StateKind

_OF_VALUE: Final = {
    "exists": "Error checking value state exists",
    "get": "Error getting value state",
    "update": "Error updating value state",
    "clear": "Error clearing value state",
}
_CALLS: Final[dict[StateKind, dict[str, str]]] = {
    StateKind.VALUE: _OF_VALUE,
    StateKind.LIST: {
        "exists": "Error checking value state exists",
        "put": "Error updating value state",
        "appendValue": "Error updating value state",
        "appendList": "Error updating value state",
        "clear": "Error clearing value state",
    },
    StateKind.MAP: {
        "exists": "Error checking map state exists",
        "getValue": "Error getting value",
        "containsKey": "Error checking if map state contains key",
        "updateValue": "Error updating map state value",
        "removeKey": "Error removing key from map state",
        "clear": "Error clearing map state",
    },
    StateKind.REDUCING: _OF_VALUE | {"add": "Error updating value state"},
    StateKind.AGGREGATING: _OF_VALUE
    | {
        "add": "Error updating value state",
        "getAccumulator": "Error getting value state",
        "mergeAccumulator": "Error updating value state",
    },
}
_ITERATORS: Final[dict[StateKind, tuple[str, ...]]] = {
    StateKind.LIST: ("get",),
    StateKind.MAP: ("iterator", "keys", "values"),
}


class _DeletedState:
    """Stands for a deleted state; it has the methods of the state's kind."""

    def __init__(self, name: str, kind: StateKind, uid: str) -> None:
        reason = (
            f"{kind.value.capitalize()} state {name} is not initialized: init() of operator '{uid}' deletes it after it"
            " has declared it. Leave out deleteIfExists, or what uses the state."
        )
        for method, told in _CALLS[kind].items():
            setattr(self, method, _failing(f"{told}: {reason}"))
        for method in _ITERATORS.get(kind, ()):
            setattr(self, method, _empty)

    def bind(self, function: object) -> None:
        """Accept the function of a reducing or aggregating state; nobody calls it."""


def deleted_state(name: str, kind: StateKind, uid: str) -> Any:
    """Make the handle of a state that ``init`` of operator `uid` declares and then deletes."""
    return _DeletedState(name, kind, uid)


def _failing(message: str) -> Callable[..., NoReturn]:
    def fail(*arguments: object, **named: object) -> NoReturn:
        raise PySparkRuntimeError(message)

    return fail


def _empty() -> Iterator[Any]:
    return iter(())
