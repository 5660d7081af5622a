"""The plan that a keyed operator becomes."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import DataType, IntegralType, StructType, TimestampNTZType, TimestampType

from statelog.checkpoint.watermark import WatermarkPolicy
from statelog.errors import ConfigurationError, ErrorKind
from statelog.options import Options
from statelog.spark.arguments import (
    check_session,
    checked_parallelism,
    checked_uid,
    new_instance,
    parse_output,
    pickled_processor,
    require_endpoint,
    task_function,
)
from statelog.spark.declare import declare_states
from statelog.spark.endpoint import OperatorPlan, observation_name
from statelog.spark.key_hash import key_hash
from statelog.spark.times import TimeMode
from statelog.spark.types import key_schema
from statelog.spark.worker import (
    HASH_COLUMN,
    INITIAL_COLUMN,
    TIME_COLUMN,
    FrameLimits,
    SubtaskSpec,
    bind_state,
)
from statelog.state.event_time import EventTime
from statelog.state.key_groups import GROUP_SHIFT, KEY_GROUPS
from statelog.state.schema import TimeDomain, encode_schema
from statelog.state.timers import timer_descriptor
from statelog.state.times import Watermark

__all__ = ["KeyedFrame", "OperatorArguments", "OperatorSetting", "build_operator"]

WATERMARK_DELAY = "spark.watermarkDelayMs"
"""The metadata by which Spark knows a column with a watermark."""

_OUTPUT_MODES = ("append", "update", "complete")
_instances = itertools.count()


@dataclass(frozen=True)
class KeyedFrame:
    """A DataFrame and the columns that it is keyed by."""

    df: DataFrame
    columns: list[str]

    @property
    def key_columns(self) -> list[int]:
        """Positions of the grouping columns."""
        return [self.df.columns.index(name) for name in self.columns]

    def rows(self, prefix: str) -> DataFrame:
        """The rows with the key hash.

        ``mapInArrow`` cannot take columns whose names need quoting, so names of our own stand in for them.
        """
        plain = self.df.toDF(*[f"{prefix}{index}" for index in range(len(self.df.columns))])
        keys = [F.col(f"{prefix}{index}") for index in self.key_columns]
        return plain.withColumn(HASH_COLUMN, key_hash(keys, [self.df.schema[name].dataType for name in self.columns]))

    def by_subtask(self, prefix: str, parallelism: int) -> DataFrame:
        """The rows with the key hash, each in the partition of its subtask."""
        return _by_subtask(self.rows(prefix), parallelism)


@dataclass(frozen=True)
class OperatorArguments:
    """The arguments that Spark's method has too; see :class:`statelog.KeyedStream`."""

    processor: StatefulProcessor
    output_type: StructType | str
    output_mode: str
    time_mode: str
    initial: KeyedFrame | None
    event_time_column: str


@dataclass(frozen=True)
class OperatorSetting:
    """The arguments that are statelog's own; see :class:`statelog.KeyedStream`."""

    uid: str | None
    parallelism: int | None
    location: str | None
    options: Options
    watermark: Watermark | None


def build_operator(
    stream: KeyedFrame, arguments: OperatorArguments, setting: OperatorSetting, *, uses_frames: bool
) -> DataFrame:
    """Plan a keyed operator."""
    df = stream.df
    session = df.sparkSession
    _check_arguments(arguments)
    check_session(session)
    uid = checked_uid(setting.uid)
    parallelism = checked_parallelism(setting.parallelism, session)
    output = parse_output(session, arguments.output_type)
    processor = pickled_processor(arguments.processor, uid)
    time_mode = TimeMode.parse(arguments.time_mode)
    event_time, delay_ms = _event_time(df, time_mode, setting.watermark)
    domains = {TimeDomain.EVENT} if setting.watermark else set()
    if time_mode.domain is not None:
        domains.add(time_mode.domain)
    declared = declare_states(processor, session, uid, frozenset(domains))
    keys = key_schema(df.schema, stream.columns)
    initial = arguments.initial
    if initial is not None:
        _check_initial(initial, keys)
    states = sorted(declared.states.values(), key=lambda state: state.name)
    descriptors = [bind_state(state).descriptor for state in states]
    if time_mode.domain is not None:
        descriptors.append(timer_descriptor(time_mode.domain))
    plan = OperatorPlan(
        instance=new_instance(),
        session=session,
        uid=uid,
        parallelism=parallelism,
        location=setting.location,
        key_schema=encode_schema(keys),
        states=[descriptor.to_stored() for descriptor in descriptors],
        options=setting.options,
        watermark=_policy(setting.watermark),
        deleted=tuple(declared.deleted),
        initial=None if initial is None else initial.by_subtask("i", parallelism),
    )
    host, port, secret = "", 0, b""
    if df.isStreaming:
        host, endpoint = require_endpoint(session)
        endpoint.register(plan)
        port, secret = endpoint.port, endpoint.secret
    conf = session.conf
    limits = FrameLimits(
        int(str(conf.get("spark.sql.execution.arrow.maxRecordsPerBatch", "10000"))),
        _bytes(conf.get("spark.sql.execution.arrow.maxBytesPerBatch", str((1 << 31) - 1))),
    )
    spec = SubtaskSpec(
        uid=uid,
        instance=plan.instance,
        parallelism=parallelism,
        is_streaming=df.isStreaming,
        key_schema=keys,
        session_zone=str(conf.get("spark.sql.session.timeZone")),
        columns=df.columns,
        key_columns=stream.key_columns,
        initial_columns=[] if initial is None else initial.df.columns,
        initial_key_columns=[] if initial is None else initial.key_columns,
        frames=limits if uses_frames else None,
        time_mode=time_mode,
        event_time=event_time,
        output_event_time=_output_event_time(output, arguments.event_time_column, event_time),
        states=states,
        output_schema=output,
        processor=processor,
        options=setting.options,
        host=host,
        port=port,
        secret=secret,
    )
    result = _operator_frame(stream, initial, spec, output)
    if arguments.event_time_column:
        marked = F.col(_quoted(arguments.event_time_column)).alias(
            arguments.event_time_column, metadata={WATERMARK_DELAY: delay_ms}
        )
        result = result.select(
            *[marked if name == arguments.event_time_column else F.col(_quoted(name)) for name in output.names]
        )
    return result


def _operator_frame(stream: KeyedFrame, initial: KeyedFrame | None, spec: SubtaskSpec, output: StructType) -> DataFrame:
    rows = stream.rows("c")
    if initial is not None and not spec.is_streaming:
        more = initial.rows("i").withColumn(INITIAL_COLUMN, F.lit(True))
        rows = rows.withColumn(INITIAL_COLUMN, F.lit(False)).unionByName(more, allowMissingColumns=True)
    rows = rows.withColumn(TIME_COLUMN, F.unix_millis(F.current_timestamp()))
    if spec.is_streaming:
        # Spark folds away a branch that it can prove empty, and then the batch would miss an operator;
        # it does not fold what is observed.
        rows = rows.observe(observation_name(spec.uid, spec.instance), F.count(F.lit(1)).alias("rows"))
    return _by_subtask(rows, spec.parallelism).mapInArrow(task_function(spec), output)


def _by_subtask(rows: DataFrame, parallelism: int) -> DataFrame:
    """Bring rows with a key hash to the partition of their subtask."""
    group = F.shiftrightunsigned(F.col(HASH_COLUMN), GROUP_SHIFT)
    return rows.repartitionById(parallelism, F.floor(group * parallelism / KEY_GROUPS).cast("int"))


# ---- Times ----


def _event_time(df: DataFrame, mode: TimeMode, watermark: Watermark | None) -> tuple[EventTime | None, int]:
    """Where the rows have their event time, and the watermark's delay in milliseconds."""
    if watermark is not None:
        return _own_event_time(df, watermark), watermark.delay_ms
    if mode is not TimeMode.EVENT_TIME:
        marked = _watermark_column(df)
        return None, 0 if marked is None else marked[1]
    marked = _watermark_column(df)
    if marked is None:
        if not df.isStreaming:
            return None, 0
        raise ConfigurationError(
            "timeMode is 'EventTime', but the input has no watermark.",
            hint="Call withWatermark(column, delay) on the DataFrame before key_by, or pass watermark=.",
        )
    index, delay_ms = marked
    return (EventTime(index) if df.isStreaming else None), delay_ms


def _watermark_column(df: DataFrame) -> tuple[int, int] | None:
    for index, field in enumerate(df.schema):
        if WATERMARK_DELAY in field.metadata:
            return index, int(field.metadata[WATERMARK_DELAY])
    return None


def _own_event_time(df: DataFrame, watermark: Watermark) -> EventTime:
    def position(name: str, kinds: tuple[type[DataType], ...], expected: str) -> int:
        if name not in df.columns or not isinstance(df.schema[name].dataType, kinds):
            columns = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in df.schema)
            raise ConfigurationError(
                f"The watermark names column {name!r}, which is not {expected} of the input.",
                hint=f"The columns are: {columns}.",
            )
        return df.columns.index(name)

    column = position(watermark.column, (TimestampType, TimestampNTZType), "a timestamp column")
    if watermark.input_column is None:
        return EventTime(column, inputs=watermark.inputs)
    inputs = position(watermark.input_column, (IntegralType,), "an integer column")
    return EventTime(column, inputs=watermark.inputs, input_column=inputs)


def _policy(watermark: Watermark | None) -> WatermarkPolicy | None:
    return None if watermark is None else WatermarkPolicy(watermark.delay_ms, watermark.inputs)


def _output_event_time(output: StructType, column: str, event_time: EventTime | None) -> EventTime | None:
    if not column:
        return None
    if event_time is None:
        raise ConfigurationError(
            f"eventTimeColumnName is {column!r}, but the operator does not go by event time.",
            hint="Use timeMode 'EventTime' and a watermark, or leave eventTimeColumnName out.",
        )
    if column not in output.names or not isinstance(output[column].dataType, (TimestampType, TimestampNTZType)):
        raise ConfigurationError(
            f"eventTimeColumnName is {column!r}, which is not a timestamp column of the output type.",
            hint=f"The output columns are: {output.simpleString()}.",
        )
    return EventTime(output.names.index(column))


# ---- Checks ----


def _check_arguments(arguments: OperatorArguments) -> None:
    processor = arguments.processor
    missing = [name for name in ("init", "handleInputRows", "close") if not hasattr(processor, name)]
    if missing or isinstance(processor, type):
        raise ConfigurationError(
            f"statefulProcessor must be an instance of StatefulProcessor, not {processor!r}.",
            hint="Pass an object, not a class, that has init, handleInputRows and close.",
        )
    mode = arguments.output_mode
    if str(mode).lower() not in _OUTPUT_MODES:
        raise ConfigurationError(f"outputMode is {mode!r}.", hint="It must be 'append', 'update' or 'complete'.")


def _check_initial(initial: KeyedFrame, keys: pa.Schema) -> None:
    own = key_schema(initial.df.schema, initial.columns)
    if own.types != keys.types:
        raise ConfigurationError(
            f"initialState is keyed by ({_listed(own)}), the stream by ({_listed(keys)}).",
            kind=ErrorKind.OTHER_SCHEMA,
            hint="Key both by columns of the same types, in the same order.",
        )


def _listed(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def _bytes(text: str | None) -> int:
    """A size of Spark's configuration, such as 64MB, in bytes."""
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", str(text).strip().lower())
    if found is None:
        return (1 << 31) - 1
    return int(found[1]) << (10 * "bkmgtp".find((found[2] or "b")[0]))


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
