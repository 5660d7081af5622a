"""Declared states: as ``init`` declares them on the driver, and as a task handles them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from pyspark.errors import PySparkRuntimeError
from pyspark.sql.types import StructType

from statelog.convert.python_values import row_maker
from statelog.convert.types import state_codecs
from statelog.operators.keyed.operator import StateBinding
from statelog.operators.unkeyed.states import OperatorStateBinding, OperatorStateDescriptor, OperatorStateMode
from statelog.runs.schema import StateDescriptor, StateKind, StateLife
from statelog.runs.times import Ttl


@dataclass(frozen=True)
class KeyedStateDeclaration:
    """A state that the processor of a keyed operator declares."""

    name: str
    kind: StateKind
    value_schema: StructType
    entry_schema: StructType | None = None
    ttl: Ttl | None = None
    life: StateLife = StateLife.KEPT

    def bind(self) -> StateBinding:
        """Make the state's codecs; raises ConfigurationError if the type of a field is not supported."""
        codec, entry_codec = state_codecs(self.name, self.value_schema, self.entry_schema)
        make = row_maker(self.value_schema.names)
        descriptor = StateDescriptor(
            self.name,
            self.kind,
            codec.schema,
            None if entry_codec is None else entry_codec.schema,
            None if self.ttl is None else self.ttl.domain,
        )
        return StateBinding(
            self.name, descriptor, codec, entry_codec, lambda row: make([[value] for value in row])[0], self.ttl
        )


@dataclass(frozen=True)
class UnkeyedStateDeclaration:
    """A state that the processor of an unkeyed operator declares."""

    name: str
    mode: OperatorStateMode
    value_schema: StructType
    entry_schema: StructType | None = None

    def bind(self) -> OperatorStateBinding:
        """Make the state's codecs; raises ConfigurationError if the type of a field is not supported."""
        codec, entry_codec = state_codecs(self.name, self.value_schema, self.entry_schema)
        entry_schema = None if entry_codec is None else entry_codec.schema
        descriptor = OperatorStateDescriptor(self.name, self.mode, codec.schema, entry_schema)
        return OperatorStateBinding(descriptor, codec, entry_codec)


@dataclass(frozen=True)
class KeyedBindings:
    """The states of a keyed operator, by life."""

    kept: list[StateBinding]
    batch: list[StateBinding]
    """Those whose values live for one batch."""
    deleted: dict[str, Any]
    """Handles, by name, of those that ``init`` declares and then deletes."""


def bind_states(declarations: Iterable[KeyedStateDeclaration], uid: str) -> KeyedBindings:
    """Make what a task of operator `uid` needs of its states."""
    found = KeyedBindings([], [], {})
    for state in declarations:
        if state.life is StateLife.NONE:
            found.deleted[state.name] = DeletedState(state.name, state.kind, uid)
        else:
            (found.kept if state.life is StateLife.KEPT else found.batch).append(state.bind())
    return found


# ---- Deleted states ----
# As in Spark, every read and write fails, iterators are empty, and values and lists share their messages.

_EXISTS: Final = "Error checking value state exists"
_GET: Final = "Error getting value state"
_UPDATE: Final = "Error updating value state"
_CLEAR: Final = "Error clearing value state"
_OF_VALUE: Final = {"exists": _EXISTS, "get": _GET, "update": _UPDATE, "clear": _CLEAR}
_CALLS: Final[dict[StateKind, dict[str, str]]] = {
    StateKind.VALUE: _OF_VALUE,
    StateKind.LIST: {"exists": _EXISTS, "put": _UPDATE, "appendValue": _UPDATE, "appendList": _UPDATE, "clear": _CLEAR},
    StateKind.MAP: {
        "exists": "Error checking map state exists",
        "getValue": "Error getting value",
        "containsKey": "Error checking if map state contains key",
        "updateValue": "Error updating map state value",
        "removeKey": "Error removing key from map state",
        "removeRange": "Error removing key from map state",
        "clear": "Error clearing map state",
    },
    StateKind.REDUCING: _OF_VALUE | {"add": _UPDATE},
    StateKind.AGGREGATING: _OF_VALUE | {"add": _UPDATE, "getAccumulator": _GET, "mergeAccumulator": _UPDATE},
}
_ITERATORS: Final[dict[StateKind, tuple[str, ...]]] = {
    StateKind.LIST: ("get",),
    StateKind.MAP: ("iterator", "keys", "values", "range"),
}


class DeletedState:
    """Stands for a deleted state; it has the methods of the state's kind."""

    def __init__(self, name: str, kind: StateKind, uid: str) -> None:
        reason = (
            f"{kind.value.capitalize()} state {name} is not initialized: init() of operator '{uid}' declares it and"
            " then deletes it. Remove the call of deleteIfExists, or the code that uses the state."
        )
        for method, told in _CALLS[kind].items():
            setattr(self, method, _failing(f"{told}: {reason}"))
        for method in _ITERATORS.get(kind, ()):
            setattr(self, method, lambda *_bounds, **_named: iter(()))

    def bind(self, function: object) -> None:
        """Accept the function of a reducing or aggregating state, which is never called."""


def _failing(message: str) -> Callable[..., NoReturn]:
    def fail(*arguments: object, **named: object) -> NoReturn:
        raise PySparkRuntimeError(message)

    return fail
