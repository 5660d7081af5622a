"""Plans a keyed operator: checks its arguments, registers it with the endpoint, and makes its output DataFrame."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, IntegralType, LongType, StructField, StructType, TimestampNTZType, TimestampType

from statelog.convert.codecs import ProcessorCodecs, recorded_settings
from statelog.convert.times import TimeMode
from statelog.convert.types import key_schema
from statelog.errors import ConfigurationError, ErrorKind, ProcessorError
from statelog.operators.event_time import EventTime, WatermarkPolicy
from statelog.operators.keyed.timers import timer_descriptor
from statelog.runs.schema import StateDescriptor, StateLife, TimeDomain, encode_schema
from statelog.runs.times import Watermark
from statelog.shown import redact_messages
from statelog.spark.driver import internals
from statelog.spark.plan.checks import warn_of_deleted, warn_of_no_watermark
from statelog.spark.plan.declare import declare_keyed
from statelog.spark.plan.initial import InitialTable, checked_table
from statelog.spark.plan.lossless_casts import converted_columns, require_convertible
from statelog.spark.plan.operator_plan import NoDataRule, OperatorPlan
from statelog.spark.plan.placement import Placement, to_subtasks
from statelog.spark.plan.plan import (
    StatelogArguments,
    check_arguments,
    key_hash,
    mapped,
    marked_rows,
    registered,
    subtask_of,
)
from statelog.spark.worker.specs import INITIAL_COLUMN, KeyedSpec
from statelog.spark.worker.worker import HASH_COLUMN, SUBTASK_COLUMN, task_function
from statelog.tables.rocksdb import rocksdict_library

WATERMARK_DELAY = "spark.watermarkDelayMs"
"""Spark marks a column with a watermark by this key of its metadata; the value is the delay in milliseconds."""


@dataclass(frozen=True)
class KeyedFrame:
    """A DataFrame and the names of its grouping columns."""

    df: DataFrame
    columns: list[str]

    @property
    def key_columns(self) -> list[int]:
        """Positions of the grouping columns."""
        return [self.df.columns.index(name) for name in self.columns]

    @property
    def key_fields(self) -> list[StructField]:
        """Names and types of the grouping columns."""
        return [self.df.schema[name] for name in self.columns]

    @property
    def key_schema(self) -> pa.Schema:
        """Names and storage types of the grouping columns; raises ConfigurationError if a type cannot be a key."""
        return key_schema(self.key_fields)

    def rows(self, prefix: str) -> DataFrame:
        """The rows with the key hash as the last column.

        ``mapInArrow`` cannot take columns whose names need quoting, so the others are renamed to `prefix` and position.
        """
        plain = self.df.toDF(*[f"{prefix}{index}" for index in range(len(self.df.columns))])
        keys = [F.col(f"{prefix}{index}") for index in self.key_columns]
        return plain.withColumn(HASH_COLUMN, key_hash(keys, [field.dataType for field in self.key_fields]))

    def by_subtask(self, prefix: str, parallelism: int) -> DataFrame:
        """The rows with the key hash, each in the partition of its subtask."""
        return _by_subtask(self.rows(prefix), parallelism)


class BeforeShuffle(Protocol):
    """A step in the map tasks, before rows are brought to the partitions of their subtasks; picklable."""

    @property
    def output(self) -> StructType:
        """The columns that it returns, without the key hash."""

    @property
    def output_keys(self) -> list[int]:
        """The grouping columns in the output."""

    @property
    def output_event_time(self) -> EventTime | None:
        """The event time of the output."""

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Take a task's input rows, with the key hash as the last column; the returned rows have it there, too."""


StepOf: TypeAlias = Callable[[EventTime | None], BeforeShuffle]


@dataclass(frozen=True)
class _StepOfTask:
    """The work of a map task; its errors name the operator, and hide keys like those of the operator."""

    step: BeforeShuffle
    uid: str
    redacts_keys: bool

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        redact_messages(redacts=self.redacts_keys)
        try:
            yield from self.step.run(batches)
        except ProcessorError as error:
            where = f"operator '{self.uid}': the step before the shuffle failed"
            raise ProcessorError(f"{where}: {error.message}", kind=error.kind, hint=error.hint) from error


@dataclass(frozen=True)
class SparkArguments:
    """The arguments that Spark's method has too; see :class:`statelog.KeyedStream`."""

    processor: Any
    """A StatefulProcessor, or a processor of columns."""
    output_type: StructType | str
    output_mode: str
    time_mode: str
    event_time_column: str = ""
    initial: KeyedFrame | None = None
    """Initial state as rows for the processor."""
    tables: Mapping[str, DataFrame] = field(default_factory=dict)
    """Initial state as tables, by name of the state."""


def apply_keyed(
    stream: KeyedFrame,
    arguments: SparkArguments,
    own: StatelogArguments,
    codecs: ProcessorCodecs,
    step_of: StepOf | None = None,
) -> DataFrame:
    """Plan a keyed operator, and return its output rows.

    `step_of` makes a step before the shuffle, for the event time of the input.
    """
    df = stream.df
    if not codecs.takes_columns:
        check_processor(arguments.processor, "statefulProcessor must be")
    plan, output, pickled = check_arguments(df, arguments.processor, arguments.output_type, arguments.output_mode, own)
    uid, parallelism, watermark = plan.uid, plan.parallelism, own.watermark
    if plan.options.table == "rocksdb":
        rocksdict_library()
    time_mode = TimeMode.parse(arguments.time_mode)
    event_time = _event_time(stream, time_mode, watermark, codecs)
    marked = watermark_column(df.schema, stream.columns)
    has_watermark = watermark is not None or marked is not None
    output_event_time = result_event_time(output, arguments.event_time_column, has_watermark=has_watermark)
    if df.isStreaming:
        _check_heartbeat(plan, watermark, codecs)
    if df.isStreaming and time_mode is TimeMode.EVENT_TIME and not has_watermark and not internals.has_watermark(df):
        warn_of_no_watermark(uid)
    declared = declare_keyed(pickled, uid, time_domains(time_mode, watermark))
    keys = stream.key_schema
    initial = None if arguments.initial is None else _with_keys_of(arguments.initial, stream)
    states = declared.by_name()
    warn_of_deleted(uid, states)
    descriptors = [state.bind().descriptor for state in states if state.life is StateLife.KEPT]
    if time_mode.domain is not None:
        descriptors.append(timer_descriptor(time_mode.domain))
    plan = replace(
        plan,
        key_schema=encode_schema(keys),
        states=[descriptor.to_stored() for descriptor in descriptors],
        watermark=None if watermark is None else WatermarkPolicy.of(watermark),
        deleted=tuple(declared.deleted),
        initial=None if initial is None else initial.by_subtask("i", parallelism),
        tables=_tables(arguments.tables, stream, descriptors, uid, parallelism),
        no_data_rule=NoDataRule(
            spark_watermark=event_time is not None and watermark is None,
            own_watermark=watermark is not None,
            heartbeat_ms=plan.options.heartbeat_ms,
        ),
        settings=recorded_settings(time_mode, codecs),
    )
    rows, plan, driver = registered(df, plan)
    stream = replace(stream, df=rows)
    step = None if step_of is None else step_of(event_time)
    spec = KeyedSpec(
        uid=uid,
        instance=plan.instance,
        parallelism=parallelism,
        columns=df.columns if step is None else step.output.names,
        output_schema=output,
        processor=pickled,
        options=plan.options,
        driver=driver,
        key_schema=keys,
        session_zone=str(df.sparkSession.conf.get("spark.sql.session.timeZone")),
        key_columns=stream.key_columns if step is None else step.output_keys,
        initial_columns=[] if initial is None else initial.df.columns,
        initial_key_columns=[] if initial is None else initial.key_columns,
        codecs=codecs,
        time_mode=time_mode,
        event_time=event_time if step is None else step.output_event_time,
        output_event_time=output_event_time,
        states=states,
    )
    result = _operator_frame(stream, initial, spec, plan, step)
    if output_event_time is None:
        return result
    delay_ms = watermark.delay_ms if watermark else df.schema[marked or 0].metadata[WATERMARK_DELAY]
    return _marked(result, output_event_time.column, delay_ms)


def _marked(result: DataFrame, event_time: int, delay_ms: int) -> DataFrame:
    """The result with the metadata by which Spark's later operators recognise its event time."""
    columns = [F.col("`" + name.replace("`", "``") + "`") for name in result.columns]
    columns[event_time] = columns[event_time].alias(result.columns[event_time], metadata={WATERMARK_DELAY: delay_ms})
    return result.select(*columns)


def _operator_frame(
    stream: KeyedFrame, initial: KeyedFrame | None, spec: KeyedSpec, plan: OperatorPlan, step: BeforeShuffle | None
) -> DataFrame:
    rows = stream.rows("c")
    if step is not None:
        names = [*(f"c{place}" for place in range(len(step.output))), HASH_COLUMN]
        kinds = [*(field.dataType for field in step.output), LongType()]
        columns = StructType([StructField(name, kind) for name, kind in zip(names, kinds, strict=True)])
        rows = rows.mapInArrow(task_function(_StepOfTask(step, spec.uid, spec.options.redact_keys)), columns)
    if initial is not None and not rows.isStreaming:
        more = initial.rows("i").withColumn(INITIAL_COLUMN, F.lit(True))
        rows = rows.withColumn(INITIAL_COLUMN, F.lit(False)).unionByName(more, allowMissingColumns=True)
    rows = marked_rows(rows, plan)
    placed = _by_subtask(rows, spec.parallelism, plan.placement)
    return mapped(placed, spec)


def _by_subtask(rows: DataFrame, parallelism: int, placement: Placement | None = None) -> DataFrame:
    """Bring rows with a key hash to the partition of their subtask."""
    subtask = subtask_of(F.col(HASH_COLUMN), parallelism)
    if placement is None:
        return to_subtasks(rows, parallelism, subtask)
    return placement.by_subtask(rows.withColumn(SUBTASK_COLUMN, subtask), SUBTASK_COLUMN).drop(SUBTASK_COLUMN)


def _tables(
    tables: Mapping[str, DataFrame],
    stream: KeyedFrame,
    states: list[StateDescriptor],
    uid: str,
    parallelism: int,
) -> list[InitialTable]:
    """The tables that are loaded as states before the first batch."""
    if tables and not stream.df.isStreaming:
        raise ConfigurationError(
            f"operator '{uid}' is part of a batch query and has tables as initialState.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Only streaming queries keep state that tables could be loaded into.",
        )
    declared = {state.name: state for state in states}
    unknown = [name for name in tables if name not in declared]
    if unknown:
        raise ConfigurationError(
            f"operator '{uid}': initialState has a table for {unknown[0]!r}, which is not a state of the processor.",
            kind=ErrorKind.OTHER_SCHEMA,
            hint=f"Its states are: {', '.join(declared) or 'none'}.",
        )
    loaded: list[InitialTable] = []
    keys = stream.key_fields
    for name, df in tables.items():
        rows = checked_table(df, keys, declared[name], uid)
        keyed = KeyedFrame(rows, rows.columns[: len(keys)])
        loaded.append(InitialTable(declared[name].to_stored(), keyed.by_subtask("i", parallelism), rows.columns))
    return loaded


# ---- Times ----


def _event_time(
    stream: KeyedFrame, mode: TimeMode, watermark: Watermark | None, codecs: ProcessorCodecs
) -> EventTime | None:
    """The event time in the input rows; None if the operator does not use one."""
    is_event_time = mode is TimeMode.EVENT_TIME
    df = stream.df
    if watermark is not None:
        return own_event_time(df.schema, watermark, drops_late=codecs.drops_late and is_event_time)
    marked = watermark_column(df.schema, stream.columns)
    if marked is None or not is_event_time or not df.isStreaming:
        return None
    return EventTime(marked, codecs.drops_late)


def watermark_column(schema: StructType, keys: Collection[str]) -> int | None:
    """The place of the column with Spark's watermark; None if there is none.

    Of several, it is the first grouping column, as in Spark's aggregates, or else the first of all: a window of Spark's
    has the watermark of the time that it is made of, which may still stand before it.
    """
    marked = [place for place, field in enumerate(schema) if WATERMARK_DELAY in field.metadata]
    return next((place for place in marked if schema.names[place] in keys), marked[0] if marked else None)


# ---- Checks ----


def _check_heartbeat(plan: OperatorPlan, watermark: Watermark | None, codecs: ProcessorCodecs) -> None:
    """Refuse what depends on silence in processing time if it has no effect, or may never be noticed."""
    reason = codecs.needs_heartbeat
    if watermark is not None and any(idle_ms is not None for idle_ms in watermark.idle_of_inputs_ms):
        if watermark.inputs == 1:
            raise ConfigurationError(
                f"operator '{plan.uid}': the watermark has idle but only one input, which waits for no other.",
                hint="Omit idle; it is for several inputs, and for the two sides of a join.",
            )
        reason = "the watermark has idle"
    if reason and plan.options.heartbeat_ms is None:
        raise ConfigurationError(
            f"operator '{plan.uid}': {reason}, but the query has no heartbeat: without rows, no batch would notice the"
            " silence.",
            hint="Pass options=statelog.Options(heartbeat_s=...), some seconds, to key_by.",
        )


def check_processor(processor: object, subject: str) -> None:
    """Refuse an object without a processor's methods; `subject` begins the message."""
    missing = [name for name in ("init", "handleInputRows", "close") if not hasattr(processor, name)]
    if missing or isinstance(processor, type):
        raise ConfigurationError(
            f"{subject} an instance of StatefulProcessor, not {processor!r}.",
            hint="Pass an object, not a class, that has init, handleInputRows and close.",
        )


def _with_keys_of(initial: KeyedFrame, stream: KeyedFrame) -> KeyedFrame:
    """The initial state, with its keys converted to the types of the stream's keys."""
    own, wanted = initial.key_fields, stream.key_fields
    subject = f"initialState is keyed by ({_listed(own)}), the stream by ({_listed(wanted)})"
    if len(own) != len(wanted):
        raise ConfigurationError(
            f"{subject}.",
            kind=ErrorKind.OTHER_SCHEMA,
            hint="Key both by columns of the same types, in the same order.",
        )
    for mine, theirs in zip(own, wanted, strict=True):
        require_convertible(mine.dataType, theirs.dataType, mine.name, subject, "the stream's")
    types = {place: field.dataType for place, field in zip(initial.key_columns, wanted, strict=True)}
    columns = [(place, field.name, types.get(place, field.dataType)) for place, field in enumerate(initial.df.schema)]
    return replace(initial, df=converted_columns(initial.df, columns))


def _listed(fields: list[StructField]) -> str:
    return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in fields)


def time_domains(mode: TimeMode, watermark: object) -> frozenset[TimeDomain]:
    """The kinds of time that an operator has; `watermark` is its own, or None."""
    own = {TimeDomain.EVENT} if watermark is not None else set()
    return frozenset(own | ({mode.domain} if mode.domain is not None else set()))


def own_event_time(schema: StructType, watermark: Watermark, *, drops_late: bool) -> EventTime:
    """The event time that an operator's own watermark follows; raises ConfigurationError if a column is missing."""

    def position(name: str, kinds: tuple[type[DataType], ...], expected: str) -> int:
        if name not in schema.names or not isinstance(schema[name].dataType, kinds):
            columns = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in schema)
            raise ConfigurationError(
                f"The watermark names column {name!r}, which is not {expected} of the input.",
                hint=f"The columns are: {columns}.",
            )
        return schema.names.index(name)

    column = position(watermark.column, (TimestampType, TimestampNTZType), "a timestamp column")
    if watermark.input_column is None:
        return EventTime(column, drops_late, watermark.inputs, max_ahead_ms=watermark.max_ahead_ms)
    inputs = position(watermark.input_column, (IntegralType,), "an integer column")
    return EventTime(column, drops_late, watermark.inputs, inputs, max_ahead_ms=watermark.max_ahead_ms)


def result_event_time(output: StructType, column: str, *, has_watermark: bool) -> EventTime | None:
    """The event time of an operator's output; None if `column` is empty.

    Raises ConfigurationError if the output lacks the column, or the input has no watermark.
    """
    if not column:
        return None
    if not has_watermark:
        raise ConfigurationError(
            f"eventTimeColumnName is {column!r}, but the input has no watermark.",
            hint="Call withWatermark(column, delay) on the DataFrame before key_by, or pass it watermark=.",
        )
    places = [index for index, name in enumerate(output.names) if name.lower() == column.lower()]
    if not places or not isinstance(output[places[0]].dataType, (TimestampType, TimestampNTZType)):
        raise ConfigurationError(
            f"eventTimeColumnName is {column!r}, which is not a timestamp column of the output type.",
            hint=f"The output columns are: {output.simpleString()}.",
        )
    return EventTime(places[0])
