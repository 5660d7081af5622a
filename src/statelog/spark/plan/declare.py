"""Calls the ``init`` of a processor on the driver, to learn its states."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

from pyspark.sql.types import DataType, DecimalType, StructType

from statelog.aggregates.functions import Aggregate, Count, stored_type
from statelog.aggregates.kernels import OVERFLOWED
from statelog.convert.types import Parse, arrow_type, parse_schema
from statelog.errors import ConfigurationError, ErrorKind, ProcessorError, StatelogError
from statelog.numbers import Duration, in_milliseconds
from statelog.operators.unkeyed.processor import OperatorContext
from statelog.operators.unkeyed.states import OperatorStateMode
from statelog.runs.schema import StateKind, StateLife, TimeDomain
from statelog.runs.times import LAST_MS, Ttl
from statelog.spark.plan.states import KeyedStateDeclaration, UnkeyedStateDeclaration

_NAME_LENGTH: Final = 200
_BROADCAST_ERROR: Final = "BROADCAST_VARIABLE_NOT_LOADED"
_Declaration = TypeVar("_Declaration", KeyedStateDeclaration, UnkeyedStateDeclaration)


@dataclass(frozen=True)
class KeyedDeclarations:
    """The states that the ``init`` of a keyed operator's processor has declared and deleted."""

    states: dict[str, KeyedStateDeclaration]
    deleted: dict[str, None]
    """Names of the states whose stored values must go, in the order of the calls."""

    def by_name(self) -> list[KeyedStateDeclaration]:
        """The declared states, sorted by name."""
        return _by_name(self.states.values())


def declare_keyed(
    processor: bytes, uid: str, domains: frozenset[TimeDomain], parse: Parse = DataType.fromDDL
) -> KeyedDeclarations:
    """Call ``init`` and ``close`` of a copy of a pickled processor, as Spark does when it plans the query.

    `domains` are the kinds of time that the operator has. `parse` reads schema texts; the default is Spark's parser,
    which needs a session. Raises ProcessorError if a call fails, and ConfigurationError if a state is declared twice or
    needs a kind of time that the operator does not have.
    """
    return declare_keyed_states_of(_copy_of(processor, uid), uid, domains, parse)


def declare_keyed_states_of(
    processor: Any, uid: str, domains: frozenset[TimeDomain], parse: Parse = DataType.fromDDL
) -> KeyedDeclarations:
    """Call ``init`` and ``close`` of the processor itself, not of a copy; the rest is as in :func:`declare_keyed`."""
    handle = _KeyedHandle(uid, domains, parse)
    _call_init(processor, handle, uid)
    return KeyedDeclarations(handle.states, handle.deleted)


def declare_unkeyed(
    processor: bytes, uid: str, parallelism: int, parse: Parse = DataType.fromDDL
) -> list[UnkeyedStateDeclaration]:
    """The states of an unkeyed operator's pickled processor, sorted by name; otherwise as :func:`declare_keyed`."""
    handle = _UnkeyedHandle(uid, parallelism, parse)
    _call_init(_copy_of(processor, uid), handle, uid)
    return _by_name(handle.states.values())


def _copy_of(processor: bytes, uid: str) -> Any:
    """A copy of a pickled processor; raises ConfigurationError or ProcessorError if it cannot be made."""
    try:
        return pickle.loads(processor)
    except Exception as error:
        if _BROADCAST_ERROR in str(error):
            raise ConfigurationError(
                f"operator '{uid}': the processor uses a Spark broadcast variable, which Spark does not send to"
                " stateful processors.",
                kind=ErrorKind.UNSUPPORTED_FEATURE,
                hint="Keep the value itself in the processor, or load it in init(); for values that change use the"
                " broadcast state of statelog.process(..., broadcast=...).",
            ) from error
        raise ProcessorError(
            f"operator '{uid}': the processor can be pickled but not unpickled: {type(error).__name__}: {error}.",
            kind=ErrorKind.PROCESSOR_NOT_PICKLABLE,
            hint="Keep only objects in the processor that pickle can restore, and open the others in init().",
        ) from error


def _by_name(states: Iterable[_Declaration]) -> list[_Declaration]:
    return sorted(states, key=lambda state: state.name)


def _call_init(processor: Any, handle: object, uid: str) -> None:
    """Call ``init`` and ``close`` of a processor on the driver; raises as :func:`declare_keyed` does."""
    try:
        processor.init(handle)
        processor.close()
    except StatelogError:
        raise
    except Exception as error:
        raise ProcessorError(
            f"operator '{uid}': init() of {type(processor).__name__} failed on the driver, where it is called to learn"
            f" the states: {type(error).__name__}: {error}.",
            hint="In init(), only declare states and prepare what both the driver and the workers can prepare.",
        ) from error


class _DeclaredState:
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


class _DeclaringHandle(Generic[_Declaration]):
    """A handle that records the declared states and returns placeholders."""

    def __init__(self, uid: str, parse: Parse) -> None:
        self.states: dict[str, _Declaration] = {}
        self._uid = uid
        self._parse = parse

    def _record(self, declaration: _Declaration) -> Any:
        """Note a state, and return its placeholder; raises ConfigurationError if the name was declared before."""
        if declaration.name in self.states:
            raise ConfigurationError(
                f"operator '{self._uid}': state '{declaration.name}' is declared twice in init().",
                hint="Give each state a name of its own, whatever its kind.",
            )
        self.states[declaration.name] = declaration
        return _DeclaredState(declaration.name, self._uid)

    def _schemas(self, name: str, value: Any, entry: Any, *, has_entries: bool) -> tuple[StructType, StructType | None]:
        """The checked schemas of a state's values and of its map keys."""
        _check_state_name(name, self._uid)
        subject = f"operator '{self._uid}': state '{name}': schema"
        keys = parse_schema(entry, subject, self._parse) if has_entries else None
        return parse_schema(value, subject, self._parse), keys


class _UnkeyedHandle(_DeclaringHandle[UnkeyedStateDeclaration]):
    """Stands for :class:`statelog.OperatorHandle`."""

    def __init__(self, uid: str, parallelism: int, parse: Parse) -> None:
        super().__init__(uid, parse)
        self.context = OperatorContext(-1, parallelism, -1, -1)

    def getListState(self, stateName: str, schema: Any) -> Any:
        return self._declare(stateName, OperatorStateMode.LIST, schema)

    def getUnionListState(self, stateName: str, schema: Any) -> Any:
        return self._declare(stateName, OperatorStateMode.UNION, schema)

    def getBroadcastState(self, stateName: str, keySchema: Any, valueSchema: Any) -> Any:
        return self._declare(stateName, OperatorStateMode.BROADCAST, valueSchema, keySchema)

    def _declare(self, name: str, mode: OperatorStateMode, value: Any, entry: Any = None) -> Any:
        schemas = self._schemas(name, value, entry, has_entries=mode is OperatorStateMode.BROADCAST)
        return self._record(UnkeyedStateDeclaration(name, mode, *schemas))


class _KeyedHandle(_DeclaringHandle[KeyedStateDeclaration]):
    """Stands for the handle of Spark's ``transformWithState``."""

    def __init__(self, uid: str, domains: frozenset[TimeDomain], parse: Parse) -> None:
        super().__init__(uid, parse)
        self.deleted: dict[str, None] = {}
        self.timers = None
        self.declares_by_key = False
        self._domains = domains

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: Duration | Ttl | None = None) -> Any:
        return self._declare(stateName, StateKind.VALUE, ttlDurationMs, schema)

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: Duration | Ttl | None = None) -> Any:
        return self._declare(stateName, StateKind.LIST, ttlDurationMs, schema)

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: Duration | Ttl | None = None
    ) -> Any:
        return self._declare(stateName, StateKind.MAP, ttlDurationMs, valueSchema, userKeySchema)

    def getTimeColumns(self, stateName: str, userKeySchema: Any, valueSchema: Any) -> Any:
        return self.getMapState(stateName, userKeySchema, valueSchema)

    def getArrivals(self, stateName: str, limit_ms: int, expire: Any) -> Any:
        return self._declare(stateName, StateKind.TIMER, None, f"{TimeDomain.PROCESSING}_ms long")

    def getReducingState(
        self, stateName: str, schema: Any, reduce_function: Any, ttlDurationMs: Duration | Ttl | None = None
    ) -> Any:
        placeholder = self._declare(stateName, StateKind.REDUCING, ttlDurationMs, schema)
        if isinstance(reduce_function, Aggregate):
            require_reducing(reduce_function, self.states[stateName].value_schema, self._subject(stateName))
        return placeholder

    def getAggregatingState(
        self,
        stateName: str,
        accumulator_schema: Any,
        aggregate_function: Any,
        ttlDurationMs: Duration | Ttl | None = None,
    ) -> Any:
        placeholder = self._declare(stateName, StateKind.AGGREGATING, ttlDurationMs, accumulator_schema)
        if isinstance(aggregate_function, Aggregate):
            require_aggregating(aggregate_function, self.states[stateName].value_schema, self._subject(stateName))
        return placeholder

    def deleteIfExists(self, stateName: str) -> None:
        self.deleted[stateName] = None
        declared = self.states.get(stateName)
        if declared is not None:
            self.states[stateName] = replace(declared, life=StateLife.NONE)

    def _declare(self, name: str, kind: StateKind, ttl: Duration | Ttl | None, value: Any, entry: Any = None) -> Any:
        schemas = self._schemas(name, value, entry, has_entries=kind is StateKind.MAP)
        known = self.states.get(name)
        life = StateLife.BATCH if name in self.deleted else StateLife.KEPT
        declaration = KeyedStateDeclaration(name, kind, *schemas, self._ttl(name, ttl), life)
        if known is not None and known.life is StateLife.NONE:
            raise ConfigurationError(
                f"operator '{self._uid}': init() declares state '{name}', deletes it and declares it again.",
                hint="Delete it in one version of the processor, and declare it in a later one.",
            )
        return self._record(declaration)

    def _subject(self, name: str) -> str:
        return f"operator '{self._uid}': state '{name}'"

    def _ttl(self, name: str, ttl: Duration | Ttl | None) -> Ttl | None:
        if ttl is None:
            return None
        subject = self._subject(name)
        if isinstance(ttl, Ttl):
            if ttl.domain is TimeDomain.EVENT and TimeDomain.EVENT not in self._domains:
                raise ConfigurationError(
                    f"{subject} has a TTL in event time, but the operator has no watermark.",
                    hint="Use timeMode 'EventTime', or a TTL in processing time.",
                )
            return ttl
        duration_ms = in_milliseconds(ttl, f"{subject}: its TTL", least=0, most=LAST_MS)
        if not duration_ms:  # to Spark too, 0 is no TTL
            return None
        if TimeDomain.PROCESSING not in self._domains:
            raise ConfigurationError(
                f"{subject} has a ttlDurationMs, which Spark allows with timeMode 'ProcessingTime' only.",
                hint="Use that time mode, or statelog.Ttl(duration), which works in all time modes.",
            )
        return Ttl(duration_ms)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        raise ProcessorError(
            f"operator '{self._uid}': init() or close() uses timers, but no key is processed there.",
            kind=ErrorKind.STATE_USAGE,
            hint="Use timers in handleInputRows, handleExpiredTimer and handleInitialState.",
        )

    deleteTimer = registerTimer

    def listTimers(self) -> Any:
        self.registerTimer(0)


def _check_state_name(name: str, uid: str) -> None:
    """Refuse names that are empty, too long, or start with ``$``; such names are reserved, for timers for example."""
    if not isinstance(name, str) or not 1 <= len(name) <= _NAME_LENGTH or name.startswith("$"):
        raise ConfigurationError(
            f"operator '{uid}': a state is named {name!r}.",
            hint=f"The name must be a string of 1 to {_NAME_LENGTH} characters that does not start with $.",
        )


def require_reducing(aggregate: Aggregate, schema: StructType, subject: str) -> None:
    """Refuse an aggregate that does not combine two values of the state's field into one; ConfigurationError."""
    require_aggregating(aggregate, schema, subject)
    if isinstance(aggregate, Count) or len(schema) != 1:
        raise ConfigurationError(
            f"{subject}: {aggregate} does not combine two values of type {schema.simpleString()} into one.",
            hint="A reducing state takes Sum, Min or Max of its only field; an aggregating state takes Count and Mean.",
        )
    if aggregate.column != schema.names[0]:
        raise ConfigurationError(
            f"{subject}: {aggregate} names a column that the state does not have; its field is {schema.names[0]!r}.",
            hint="Name the field of the state.",
        )


def require_aggregating(aggregate: Aggregate, schema: StructType, subject: str) -> None:
    """Refuse an aggregate whose accumulator does not have the state's schema; ConfigurationError."""
    kind = schema[0].dataType
    try:
        aggregate.row_function(arrow_type(kind, subject))
        # A function of a state raises where a sum does not fit, and so needs no mark.
        accumulator = [field for field in aggregate.bind(kind).accumulator if field[0] != OVERFLOWED]
    except ConfigurationError as error:
        raise ConfigurationError(f"{subject}: {error.message}", hint=error.hint) from error
    needed = [field for _, field in accumulator]
    if len(needed) != len(schema) or not all(map(_holds, [field.dataType for field in schema], needed)):
        names = [suffix or schema.names[0] for suffix, _ in accumulator]
        shown = ", ".join(f"{name} {field.simpleString()}" for name, field in zip(names, needed, strict=True))
        raise ConfigurationError(
            f"{subject}: the accumulator of {aggregate} is '{shown}', not {schema.simpleString()}.",
            hint="Declare the state with that schema; field names may differ.",
        )


def _holds(kind: DataType, needed: DataType) -> bool:
    """Whether a field can hold an accumulator; a sum of decimals needs no more digits than the state has been given."""
    if isinstance(kind, DecimalType) and isinstance(needed, DecimalType):
        return bool(kind.scale == needed.scale)
    return stored_type(kind) == needed
