"""A keyed operator without Spark: the test's description of it, and the operator that Spark's workers would run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from statelog.aggregates.operator import KeyedAggregates
from statelog.aggregates.rows import Deduplicate
from statelog.convert.arrow import ArrowProcessor
from statelog.convert.codecs import ArrowCodecs, FrameCodecs, ProcessorCodecs, RowCodecs, recorded_settings
from statelog.convert.ddl import parse_ddl
from statelog.convert.times import TimeMode
from statelog.convert.types import key_schema, parse_output
from statelog.coordinator.admission import OperatorConfig
from statelog.errors import ConfigurationError
from statelog.joins.sides import JoinOperator
from statelog.log.entry import Settings
from statelog.operators.event_time import EventTime, WatermarkPolicy
from statelog.operators.keyed.operator import KeyedOperator, KeyedRows
from statelog.operators.keyed.timers import timer_descriptor
from statelog.options import Options
from statelog.runs.byte_slices import Budget
from statelog.runs.key_groups import Hashes, row_hashes, subtasks_of
from statelog.runs.keys import KeyCodec
from statelog.runs.schema import StateSchema, encode_schema
from statelog.runs.times import Watermark
from statelog.spark.plan.checks import checked_uid, warn_of_deleted
from statelog.spark.plan.declare import declare_keyed
from statelog.spark.plan.keyed_plan import check_processor, own_event_time, result_event_time, time_domains
from statelog.spark.worker.specs import NO_ROWS, KeyedSpec
from statelog.spark.worker.worker import pickled_processor
from statelog.tasks.attempt import Attempt
from statelog.tasks.keyed_task import BatchInput, KeyedTask
from statelog.testing.query import MicroBatches
from statelog.testing.rows import ColumnReader, ColumnWriter, OperatorArguments, read_schema
from statelog.testing.state_view import StateView
from statelog.windows.engine import Windows


@dataclass(frozen=True)
class LocalKeyedOperator:
    """A keyed operator of a :class:`statelog.testing.query.LocalQuery`."""

    uid: str
    make: Callable[[], KeyedOperator]
    """Makes a new operator for each attempt."""
    watermark: WatermarkPolicy | None = None
    """The operator's own watermark."""
    deleted: tuple[str, ...] = ()
    """States of earlier versions that the processor deletes."""
    initial: KeyedRows | None = None
    """The rows of the initial state."""
    settings: Settings = field(default_factory=dict)
    """The settings that the state depends on."""

    def with_budget(self, budget: Budget) -> LocalKeyedOperator:
        """The operator with another budget, the bound of the bytes that a subtask works on at once."""
        return replace(self, make=lambda: replace(self.make(), budget=budget))

    def config_of(self, query_id: str, run_id: str, parallelism: int) -> OperatorConfig:
        operator = self.make()
        return OperatorConfig(
            query_id,
            run_id,
            self.uid,
            parallelism,
            encode_schema(operator.key_codec.schema),
            _stored_states(operator),
            self.watermark,
            self.deleted,
            self.settings,
        )

    def split(self, data: KeyedRows, parallelism: int, time_ms: int) -> list[BatchInput]:
        return [
            BatchInput(rows, subtask, time_ms) if len(rows.hashes) else BatchInput(NO_ROWS, subtask, None)
            for subtask, rows in enumerate(_parts(data, parallelism))
        ]

    def task(self, attempt: Attempt) -> KeyedTask:
        return KeyedTask(attempt, self.make())

    def initial_objects(self, parallelism: int) -> list[bytes]:
        if self.initial is None:
            return []
        return [_as_stream(part) if len(part.hashes) else b"" for part in _parts(self.initial, parallelism)]


def _stored_states(operator: KeyedOperator) -> list[StateSchema]:
    descriptors = [binding.descriptor for binding in operator.states]
    if operator.timer_domain is not None:
        descriptors.append(timer_descriptor(operator.timer_domain))
    return [descriptor.to_stored() for descriptor in sorted(descriptors, key=lambda state: state.name)]


def _parts(data: KeyedRows, parallelism: int) -> list[KeyedRows]:
    """The rows of each subtask."""
    subtasks = subtasks_of(data.hashes, parallelism)
    parts: list[KeyedRows] = []
    for subtask in range(parallelism):
        own = np.flatnonzero(subtasks == subtask)
        parts.append(KeyedRows(data.rows.take(pa.array(own)), data.hashes[own]))
    return parts


def _as_stream(part: KeyedRows) -> bytes:
    """An Arrow IPC stream of rows with their hashes as the last column."""
    hashes: Hashes = part.hashes
    rows = part.rows.append_column("hash", pa.array(hashes.view(np.int64)))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    data: bytes = sink.getvalue().to_pybytes()
    return data


class KeyedQuery:
    """A keyed operator as the test describes it; raises the same errors as ``transformWithState``."""

    def __init__(self, processor: object, arguments: OperatorArguments, options: Options) -> None:
        zone = arguments.sessionTimeZone
        columns = read_schema(arguments.input, "input")
        output = parse_output(arguments.output, parse_ddl)
        self._arguments = arguments
        self._key_columns = _key_places(columns, arguments.keys, "input")
        self._key_types = key_schema(columns[name] for name in arguments.keys)
        self._key_codec = KeyCodec(self._key_types)
        self._writer = ColumnWriter(columns, "push()", zone)
        key_fields = StructType([columns[place] for place in self._key_columns])
        self._key_writer = ColumnWriter(key_fields, "The key", zone)
        self._width = len(columns)
        self.output = ColumnReader(output).rows
        self.time_mode = TimeMode.parse(arguments.timeMode)
        codecs = _codecs(processor, uses_frames=arguments.pandas)
        if not codecs.takes_columns:
            check_processor(processor, "Harness takes")
        event_time = self._event_time(columns, codecs)
        uid = checked_uid(arguments.uid)
        pickled = pickled_processor(processor, uid)
        watermark = arguments.watermark
        declared = declare_keyed(pickled, uid, time_domains(self.time_mode, watermark), parse_ddl)
        self.states = declared.states
        warn_of_deleted(uid, self.states.values())
        initial_columns, initial_key_columns, initial = self._initial(arguments.initialState)
        spec = KeyedSpec(
            uid=uid,
            instance="",
            parallelism=0,
            columns=columns.names,
            output_schema=output,
            processor=pickled,
            options=options,
            key_schema=self._key_types,
            session_zone=zone,
            key_columns=self._key_columns,
            initial_columns=initial_columns,
            initial_key_columns=initial_key_columns,
            codecs=codecs,
            time_mode=self.time_mode,
            event_time=event_time,
            output_event_time=result_event_time(
                output,
                arguments.eventTimeColumnName,
                has_watermark=arguments.watermark is not None or arguments.eventTime is not None,
            ),
            states=declared.by_name(),
        )
        self.operator = LocalKeyedOperator(
            uid=uid,
            make=spec.operator,
            watermark=None if watermark is None else WatermarkPolicy.of(watermark),
            deleted=tuple(declared.deleted),
            initial=initial,
            settings=recorded_settings(self.time_mode, codecs),
        )

    def _event_time(self, columns: StructType, codecs: ProcessorCodecs) -> EventTime | None:
        watermark, column = self._arguments.watermark, self._arguments.eventTime
        if watermark is not None and column is not None:
            raise ConfigurationError(
                "Harness has both watermark and eventTime.",
                hint="watermark= names its own column; eventTime= stands for Spark's withWatermark.",
            )
        if watermark is not None:
            is_event_time = self.time_mode is TimeMode.EVENT_TIME
            return own_event_time(columns, watermark, drops_late=codecs.drops_late and is_event_time)
        if column is None:
            return None
        found = own_event_time(columns, Watermark(column), drops_late=codecs.drops_late)
        return EventTime(found.column, codecs.drops_late) if self.time_mode is TimeMode.EVENT_TIME else None

    def _initial(
        self, state: tuple[StructType | str, Sequence[Any]] | None
    ) -> tuple[list[str], list[int], KeyedRows | None]:
        """Names of the columns of the initial state, positions of its grouping columns, and its rows."""
        if state is None:
            return [], [], None
        schema, rows = state
        columns = read_schema(schema, "initialState")
        places = _key_places(columns, self._arguments.keys, "initialState")
        own = key_schema(columns[name] for name in self._arguments.keys)
        if own != self._key_types:
            raise ConfigurationError(
                f"initialState is keyed by ({own.to_string()}), but the input by ({self._key_types.to_string()}).",
                hint="Key both by columns with the same names and types.",
            )
        batch = ColumnWriter(columns, "initialState", self._arguments.sessionTimeZone).batch(rows)
        hashes = self._hashes([batch.column(place) for place in places])
        return columns.names, places, KeyedRows(batch, hashes)

    def view(self, batches: MicroBatches) -> StateView:
        """The operator's state, by key."""
        return StateView(self.operator.make, self.states, self.time_mode, batches, self.key)

    # ---- Rows ----

    def data(self, rows: Sequence[Any], broadcast: Sequence[Any] = ()) -> KeyedRows:
        """Convert a batch's rows to the columns that a task gets."""
        if broadcast:
            raise ConfigurationError("push: a keyed operator has no broadcast input.")
        batch = self._writer.batch(rows)
        return KeyedRows(batch, self._hashes([batch.column(place) for place in self._key_columns]))

    def key(self, key: Any) -> KeyedRows:
        """Make a row with a key and nulls; a single value stands for a tuple with that value."""
        values = tuple(key) if isinstance(key, (tuple, list)) else (key,)
        columns = self._key_writer.batch([values]).columns
        empty = [pa.nulls(1)] * self._width
        for place, column in zip(self._key_columns, columns, strict=True):
            empty[place] = column
        batch = pa.RecordBatch.from_arrays(empty, names=[f"c{place}" for place in range(self._width)])
        return KeyedRows(batch, self._hashes(columns))

    def _hashes(self, columns: list[pa.Array]) -> Hashes:
        key_hash = self._arguments.keyHash
        if key_hash is None:
            return row_hashes(columns)
        keys = map(self._key_codec.decode, self._key_codec.encode_columns(columns).to_pylist())
        return np.array([key_hash(key) for key in keys], np.uint64)


def _codecs(processor: object, *, uses_frames: bool) -> ProcessorCodecs:
    if isinstance(processor, Windows | KeyedAggregates | Deduplicate | JoinOperator):
        return processor.codecs
    if isinstance(processor, ArrowProcessor):
        return ArrowCodecs()
    return FrameCodecs() if uses_frames else RowCodecs()


def _key_places(columns: StructType, keys: Sequence[str], subject: str) -> list[int]:
    if isinstance(keys, str) or not keys:
        raise ConfigurationError(f"Harness: keys is {keys!r}.", hint="It must be a list of names of input columns.")
    unknown = [name for name in keys if name not in columns.names]
    if unknown:
        raise ConfigurationError(
            f"Harness: {subject} has no key column {unknown[0]!r}; its columns are {', '.join(columns.names)}."
        )
    return [columns.names.index(name) for name in keys]
