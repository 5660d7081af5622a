"""Reads the state of Spark's own operator ``transformWithState``, with Spark's state readers.

``state-metadata`` lists the operators of a checkpointLocation and their state variables. ``statestore`` reads one of
them, or the timers, as of a batch. A value with a TTL is a struct of the value and its expiration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructField, StructType

from statelog.convert.state_tables import EXPIRES, TIME
from statelog.convert.times import TimeMode
from statelog.convert.types import key_schema, state_codecs
from statelog.errors import ConfigurationError, ErrorKind, StateMissingError
from statelog.operators.keyed.timers import timer_descriptor
from statelog.queries.sorted_runs import StateRows
from statelog.runs.schema import StateDescriptor, StateKind, TimeDomain
from statelog.spark.driver.endpoint import error_of
from statelog.spark.plan.keyed_plan import KeyedFrame

_OPERATORS: Final = ("transformWithStateInPySparkExec", "transformWithStateInPandasExec")
"""Spark 4.0 has the second name, later versions the first."""
_ROCKSDB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_PROVIDER: Final = "spark.sql.streaming.stateStore.providerClass"
_KINDS: Final = {"ValueState": StateKind.VALUE, "ListState": StateKind.LIST, "MapState": StateKind.MAP}
_TIMER: Final = "TimerState"
_NO_TIME: Final = "NoTime"
_TTL_VALUE: Final = "value"
_TTL_EXPIRES: Final = "ttlExpirationMs"


@dataclass(frozen=True)
class SparkOperator:
    """The state of Spark's ``transformWithState`` as of a batch."""

    time_mode: TimeMode
    partitions: int
    key_fields: list[StructField]
    states: list[StateRows]
    """By name; the timers are the last."""


@dataclass(frozen=True)
class SparkState:
    """Spark's state below a checkpointLocation."""

    session: SparkSession
    location: str
    batch: int
    """The batch after which the state is read."""

    def operator(self, conf: dict[str, str], files: Sequence[str]) -> SparkOperator:
        """Find the only stateful operator, and plan the reads of its state.

        `conf` are the settings that Spark keeps for the query, `files` the names of the files of its state, relative to
        the location. Raises ConfigurationError for an operator whose state cannot be read, StateMissingError if Spark
        cannot read the state of the batch.
        """
        if not files:
            raise self._refused(
                "it has no Spark state", "Pass the checkpointLocation of a query with Spark's transformWithState."
            )
        found = self._only_operator()
        provider = conf.get(_PROVIDER, "")
        if provider != _ROCKSDB:
            raise self._refused(
                f"its state is kept by {provider.rpartition('.')[2] or 'a default provider'}, but only state of"
                " RocksDBStateStoreProvider can be read",
                "Start a new query, and load its state from another source with initialState.",
            )
        self._require_partitions(found, files)
        properties = json.loads(found["operatorProperties"] or "{}")
        noted = str(properties.get("timeMode"))
        mode = TimeMode.NONE if noted == _NO_TIME else TimeMode.parse(noted)
        variables = sorted(properties.get("stateVariables", ()), key=lambda one: str(one["stateName"]))
        states = [self._variable(one) for one in variables if one["stateVariableType"] != _TIMER]
        if mode.domain is not None:
            states.append(self._timers(mode.domain))
        if not states:
            raise self._refused("its operator has no state", "Start a new query with statelog.key_by.")
        return SparkOperator(mode, found["numPartitions"], states[0].frame.key_fields, states)

    # ---- The operator ----

    def _only_operator(self) -> Row:
        with self.reading("the list of its operators"):
            metadata = self.session.read.format("state-metadata").option("batchId", self.batch).load(self.location)
            rows = metadata.collect()
        operators = {row["operatorId"]: row for row in rows}
        names = sorted(str(row["operatorName"]) for row in operators.values())
        own = [row for row in operators.values() if row["operatorName"] in _OPERATORS]
        if not own:
            raise self._refused(
                f"it has no Python transformWithState; its stateful operators: {', '.join(names) or 'none'}",
                "Only the state of transformWithState and transformWithStateInPandas can be migrated.",
            )
        if len(names) > 1:
            raise self._refused(
                f"it has several stateful operators: {', '.join(names)}",
                "Only a query whose one stateful operator is a transformWithState can be migrated.",
            )
        return own[0]

    def _require_partitions(self, operator: Row, files: Sequence[str]) -> None:
        """Refuse state that lacks a partition: Spark reads the partitions that it finds."""
        prefix = f"state/{operator['operatorId']}/"
        there = {name.removeprefix(prefix).partition("/")[0] for name in files if name.startswith(prefix)}
        lacking = [number for number in range(operator["numPartitions"]) if str(number) not in there]
        if lacking:
            raise StateMissingError(
                f"{self.location}/{prefix}: partition {lacking[0]} of {operator['numPartitions']} has no files.",
                kind=ErrorKind.OBJECT_MISSING,
                hint="Restore the folder from a copy.",
            )

    # ---- State variables ----

    def _variable(self, variable: dict[str, Any]) -> StateRows:
        name, kind = str(variable["stateName"]), _KINDS.get(str(variable["stateVariableType"]))
        if kind is None:
            raise self._refused(
                f"state '{name}' is a {variable['stateVariableType']}, which cannot be read",
                "This version of Spark may be too new for statelog.",
            )
        what = f"state '{name}'"
        df = self._read(what, stateVarName=name, flattenCollectionTypes="true")
        value_name = next(one for one in ("list_element", "user_map_value", "value") if one in df.columns)
        value, expires = F.col(value_name), None
        kinds = {field.name: _struct(field) for field in df.schema if field.name != "partition_id"}
        value_kind, entry_kind = kinds[value_name], kinds.get("user_map_key")
        if variable.get("ttlEnabled"):
            expires = value.getField(_TTL_EXPIRES)
            value, value_kind = value.getField(_TTL_VALUE), _struct(value_kind[_TTL_VALUE])
        codec, entry_codec = state_codecs(name, value_kind, entry_kind)
        descriptor = StateDescriptor(
            name,
            kind,
            codec.schema,
            None if entry_codec is None else entry_codec.schema,
            None if expires is None else TimeDomain.PROCESSING,
        )
        columns = [] if entry_kind is None else _fields(F.col("user_map_key"), entry_kind, "mapkey")
        columns += _fields(value, value_kind, "value")
        columns += [] if expires is None else [expires.alias(EXPIRES)]
        return StateRows(descriptor, self._keyed(df, kinds["key"], columns), value_kind)

    def _timers(self, domain: TimeDomain) -> StateRows:
        df = self._read("the timers", readRegisteredTimers="true")
        time = F.col("expiration_timestamp_ms").alias(TIME)
        values = StructType([StructField(TIME, LongType())])
        return StateRows(timer_descriptor(domain), self._keyed(df, _struct(df.schema["key"]), [time]), values)

    def _keyed(self, df: DataFrame, key: StructType, columns: list[Column]) -> KeyedFrame:
        key_schema(key)  # refuses types that cannot be keys
        return KeyedFrame(df.select(*_fields(F.col("key"), key), *columns), list(key.names))

    def _read(self, what: str, **options: str) -> DataFrame:
        with self.reading(what):
            reader = self.session.read.format("statestore").option("batchId", self.batch)
            return reader.options(**options).load(self.location)

    # ---- Errors ----

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Turn Spark's failure to read `what` into a statelog error."""
        try:
            yield
        except (PySparkException, Py4JJavaError) as error:
            own = error_of(error)
            if own is not None:
                raise own from error
            raise StateMissingError(
                f"{self.location}: Spark cannot read {what} as of batch {self.batch}: {_brief(error)}.",
                kind=ErrorKind.OBJECT_MISSING,
                hint="Check that all files of that batch exist, and that this Spark is not older than the query's.",
            ) from error

    def _refused(self, problem: str, hint: str) -> ConfigurationError:
        return ConfigurationError(f"{self.location}: {problem}.", kind=ErrorKind.UNSUPPORTED_FEATURE, hint=hint)


def _struct(field: StructField) -> StructType:
    assert isinstance(field.dataType, StructType), f"{field.name} is a struct in Spark's reader"
    return field.dataType


def _fields(column: Column, kind: StructType, prefix: str = "") -> list[Column]:
    """The fields of a struct as columns, by temporary names, because field names may need quoting or differ in case."""
    plain = column.cast(StructType([StructField(f"f{place}", field.dataType) for place, field in enumerate(kind)]))
    return [
        plain.getField(f"f{place}").alias(f"{prefix}_{name}" if prefix else name)
        for place, name in enumerate(kind.names)
    ]


def _brief(error: Exception) -> str:
    """The innermost cause that an error's text names with a message, or else Spark's own message."""
    text = str(error)
    told = re.findall(r"^\s*Caused by: ([\w.$]+: .*)", text, re.MULTILINE) or re.findall(r"\[[A-Z_.]{5,}\] .*", text)
    return (told[-1] if told else text.partition("\n")[0])[:500].strip().rstrip(".")
