"""Calls the ``init`` of a processor on the driver, to learn its states."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pyspark.sql.types import DataType, StructType

from statelog.errors import ConfigurationError, ErrorKind, ProcessorError, StatelogError
from statelog.runs.schema import StateKind, StateLife, TimeDomain
from statelog.runs.times import Ttl
from statelog.spark.worker import StateDeclaration

Parse = Callable[[str], DataType]

_NAME_LENGTH: Final = 200


@dataclass
class Declarations:
    """The states that a processor's ``init`` has declared and deleted."""

    states: dict[str, StateDeclaration] = field(default_factory=dict)
    deleted: dict[str, None] = field(default_factory=dict)
    """Names of the states whose stored values must go, in the order of the calls."""


def declare_states(
    processor: bytes, uid: str, domains: frozenset[TimeDomain], parse: Parse = DataType.fromDDL
) -> Declarations:
    """Call ``init`` and ``close`` of a copy of a pickled processor, as Spark does when it plans the query.

    `parse` reads schema texts; the default is Spark's parser, which needs a session. Raises ProcessorError if a call
    fails, and ConfigurationError if a state is declared twice or needs a kind of time that the operator does not have.
    """
    return declare_states_of(pickle.loads(processor), uid, domains, parse)


def declare_states_of(
    processor: Any, uid: str, domains: frozenset[TimeDomain], parse: Parse = DataType.fromDDL
) -> Declarations:
    """Call ``init`` and ``close`` of the processor itself, not of a copy; the rest is as in :func:`declare_states`."""
    handle = _DeclaringHandle(uid, domains, parse)
    call_init(processor, handle, uid)
    return handle.found


def call_init(processor: Any, handle: object, uid: str) -> None:
    """Call ``init`` and ``close`` of a processor on the driver; raises as :func:`declare_states` does."""
    try:
        processor.init(handle)
        processor.close()
    except StatelogError:
        raise
    except Exception as error:
        raise ProcessorError(
            f"operator '{uid}': init() of {type(processor).__name__} failed on the driver, where it is called to learn"
            f" the states: {type(error).__name__}: {error}.",
            hint="init() may only declare states and prepare what both driver and workers can.",
        ) from error


def check_state_name(name: str, uid: str) -> None:
    """Refuse names that are empty, too long, or start with ``$``; such names are reserved, for timers for example."""
    if not isinstance(name, str) or not 1 <= len(name) <= _NAME_LENGTH or name.startswith("$"):
        raise ConfigurationError(
            f"operator '{uid}': a state is named {name!r}.",
            hint=f"The name must be a text of 1 to {_NAME_LENGTH} characters that does not start with $.",
        )


def state_struct(schema: Any, name: str, uid: str, parse: Parse = DataType.fromDDL) -> StructType:
    """Parse the schema of a state's values, or of a map's keys, as a StructType with at least one field."""
    try:
        parsed: DataType = parse(schema) if isinstance(schema, str) else schema
    except Exception as error:
        raise ConfigurationError(
            f"operator '{uid}': the schema {schema!r} of state '{name}' cannot be parsed:"
            f" {str(error).splitlines()[0]}.",
            hint="Write it like 'count long, last timestamp'.",
        ) from error
    if not isinstance(parsed, StructType) or not len(parsed):
        raise ConfigurationError(
            f"operator '{uid}': the schema of state '{name}' is {schema!r}.",
            hint="It must be a StructType with at least one field, or a DDL text.",
        )
    return parsed


class DeclaredState:
    """Stands for a state on the driver, where only ``init`` and ``close`` run; any use raises ProcessorError."""

    def __init__(self, name: str, uid: str) -> None:
        self._subject = f"operator '{uid}': state '{name}'"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise ProcessorError(
            f"{self._subject} is used in init() or close() ({name}).",
            kind=ErrorKind.STATE_USAGE,
            hint="Read and write states in the methods that handle rows and timers.",
        )


class _DeclaringHandle:
    """A handle that records the declared states and returns placeholders."""

    def __init__(self, uid: str, domains: frozenset[TimeDomain], parse: Parse) -> None:
        self.found = Declarations()
        self._uid = uid
        self._domains = domains
        self._parse = parse

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | Ttl | None = None) -> Any:
        return self._declare(stateName, StateKind.VALUE, ttlDurationMs, schema)

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | Ttl | None = None) -> Any:
        return self._declare(stateName, StateKind.LIST, ttlDurationMs, schema)

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: int | Ttl | None = None
    ) -> Any:
        return self._declare(stateName, StateKind.MAP, ttlDurationMs, valueSchema, userKeySchema)

    def getReducingState(
        self, stateName: str, schema: Any, reduceFunction: Any, ttlDurationMs: int | Ttl | None = None
    ) -> Any:
        return self._declare(stateName, StateKind.REDUCING, ttlDurationMs, schema)

    def getAggregatingState(
        self, stateName: str, accumulatorSchema: Any, aggregateFunction: Any, ttlDurationMs: int | Ttl | None = None
    ) -> Any:
        return self._declare(stateName, StateKind.AGGREGATING, ttlDurationMs, accumulatorSchema)

    def deleteIfExists(self, stateName: str) -> None:
        self.found.deleted[stateName] = None
        declared = self.found.states.get(stateName)
        if declared is not None:
            self.found.states[stateName] = replace(declared, life=StateLife.NONE)

    def _declare(
        self, name: str, kind: StateKind, ttl: int | Ttl | None, value_schema: Any, entry_schema: Any = None
    ) -> object:
        check_state_name(name, self._uid)
        entry = None if entry_schema is None else state_struct(entry_schema, name, self._uid, self._parse)
        value = state_struct(value_schema, name, self._uid, self._parse)
        life = StateLife.BATCH if name in self.found.deleted else StateLife.KEPT
        declaration = StateDeclaration(name, kind, value, entry, self._ttl(name, ttl), life)
        known = self.found.states.setdefault(name, declaration)
        if known.life is StateLife.NONE:
            raise ConfigurationError(
                f"operator '{self._uid}': init() declares state '{name}', deletes it and declares it again.",
                hint="Delete it in one version of the processor, and declare it in a later one.",
            )
        if known != declaration:
            raise ConfigurationError(
                f"operator '{self._uid}': state '{name}' is declared twice in different ways.",
                hint="Give each state a name of its own.",
            )
        return DeclaredState(name, self._uid)

    def _ttl(self, name: str, ttl: int | Ttl | None) -> Ttl | None:
        if ttl is None or ttl == 0:  # to Spark too, 0 is no TTL
            return None
        subject = f"operator '{self._uid}': state '{name}'"
        if isinstance(ttl, Ttl):
            if ttl.domain is TimeDomain.EVENT and TimeDomain.EVENT not in self._domains:
                raise ConfigurationError(
                    f"{subject} has a TTL in event time, but the operator has no watermark.",
                    hint="Use timeMode 'EventTime', or a TTL in processing time.",
                )
            return ttl
        if TimeDomain.PROCESSING not in self._domains:
            raise ConfigurationError(
                f"{subject} has a ttlDurationMs, which Spark allows with timeMode 'ProcessingTime' only.",
                hint="Use that time mode, or statelog.Ttl(duration_ms), which works in all of them.",
            )
        try:
            return Ttl(ttl)
        except ConfigurationError as error:
            raise ConfigurationError(f"{subject}: {error.message}", hint=error.hint) from error

    def registerTimer(self, expiryTimestampMs: int) -> None:
        raise ProcessorError(
            f"operator '{self._uid}': init() or close() uses timers, but no key is processed there.",
            kind=ErrorKind.STATE_USAGE,
            hint="Use timers in handleInputRows, handleExpiredTimer and handleInitialState.",
        )

    deleteTimer = registerTimer

    def listTimers(self) -> Any:
        self.registerTimer(0)
