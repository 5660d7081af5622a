"""Learning on the driver which states a processor has, by calling its ``init``."""

from __future__ import annotations

import pickle
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.types import DataType, StructType

from statelog.errors import ConfigurationError, ErrorKind, ProcessorError, StatelogError
from statelog.spark.worker import StateDeclaration
from statelog.state.schema import StateKind

__all__ = ["declare_states"]


def declare_states(processor: bytes, session: SparkSession, uid: str) -> list[StateDeclaration]:
    """Call ``init`` and ``close`` of a copy of the processor, as Spark does when it plans the query.

    Raises
    ------
    ProcessorError
        If they fail.
    ConfigurationError
        If a state is declared twice, or asks for what is not supported.
    """
    handle = _DeclaringHandle(uid)
    try:
        copy: Any = pickle.loads(processor)
        copy.init(handle)
        copy.close()
    except StatelogError:
        raise
    except Exception as error:
        raise ProcessorError(
            f"operator '{uid}': init() of {type(copy).__name__} failed on the driver, where it is called to learn"
            f" the states: {type(error).__name__}: {error}.",
            hint="init() may only declare states and prepare what both driver and workers can.",
        ) from error
    return list(handle.states.values())


class _DeclaringHandle:
    """A handle that notes down the states and gives back placeholders."""

    def __init__(self, uid: str) -> None:
        self.states: dict[str, StateDeclaration] = {}
        self._uid = uid

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        return self._declare(stateName, StateKind.VALUE, ttlDurationMs, schema)

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        return self._declare(stateName, StateKind.LIST, ttlDurationMs, schema)

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: int | None = None
    ) -> Any:
        return self._declare(stateName, StateKind.MAP, ttlDurationMs, valueSchema, userKeySchema)

    def _declare(
        self, name: str, kind: StateKind, ttl_ms: int | None, value_schema: Any, entry_schema: Any = None
    ) -> object:
        if ttl_ms is not None:
            raise self._unsupported(f"state '{name}' has a TTL")
        entry = None if entry_schema is None else self._struct(name, entry_schema)
        declaration = StateDeclaration(name, kind, self._struct(name, value_schema), entry)
        if self.states.setdefault(name, declaration) != declaration:
            raise ConfigurationError(
                f"operator '{self._uid}': state '{name}' is declared twice in different ways.",
                hint="Give each state a name of its own.",
            )
        return object()

    def _struct(self, name: str, schema: Any) -> StructType:
        try:
            parsed: DataType = StructType.fromDDL(schema) if isinstance(schema, str) else schema
        except Exception as error:
            raise ConfigurationError(
                f"operator '{self._uid}': the schema {schema!r} of state '{name}' cannot be parsed:"
                f" {str(error).splitlines()[0]}.",
                hint="Write it like 'count long, last timestamp'.",
            ) from error
        if not isinstance(parsed, StructType) or not len(parsed):
            raise ConfigurationError(
                f"operator '{self._uid}': the schema of state '{name}' is {schema!r}.",
                hint="It must be a StructType with at least one field, or a DDL text.",
            )
        return parsed

    def _unsupported(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"operator '{self._uid}': {what}, which is not supported yet.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Use Spark's own transformWithState for it.",
        )

    def registerTimer(self, expiryTimestampMs: int) -> None:
        raise self._unsupported("init() registers a timer")

    deleteTimer = registerTimer

    def listTimers(self) -> Any:
        raise self._unsupported("init() lists timers")

    def deleteIfExists(self, stateName: str) -> None:
        raise self._unsupported(f"init() deletes state '{stateName}'")
