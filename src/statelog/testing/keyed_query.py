"""Checks a test's description of a keyed operator, and builds the operator that Spark's workers would run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from statelog.convert.codecs import FrameCodecs, ProcessorCodecs, RowCodecs, recorded_settings
from statelog.convert.times import TimeMode
from statelog.convert.types import key_schema
from statelog.errors import ConfigurationError
from statelog.operators.event_time import EventTime
from statelog.operators.keyed.subtask import KeyedRows
from statelog.operators.watermark import WatermarkPolicy
from statelog.options import Options
from statelog.runs.key_groups import Hashes
from statelog.runs.keys import KeyCodec
from statelog.runs.schema import TimeDomain
from statelog.runs.times import Watermark
from statelog.spark.checks import checked_uid, parse_output, pickled_processor, warn_of_deleted
from statelog.spark.declare import declare_states
from statelog.spark.event_columns import own_event_time, result_event_time
from statelog.spark.worker import KeyedSpec, StateDeclaration, keyed_operator
from statelog.testing.arguments import OperatorArguments, read_schema
from statelog.testing.ddl import parse_ddl
from statelog.testing.key_hashes import row_hashes
from statelog.testing.keyed_operator import LocalKeyedOperator
from statelog.testing.rows import ColumnReader, ColumnWriter
from statelog.windows.operator import WindowOperator


class KeyedQuery:
    """A keyed operator as the test describes it; raises the same errors as ``transformWithState``."""

    def __init__(self, processor: object, arguments: OperatorArguments, options: Options) -> None:
        zone = arguments.sessionTimeZone
        columns = read_schema(arguments.input, "input")
        output = parse_output(arguments.output, parse_ddl)
        _require_processor(processor)
        self._arguments = arguments
        self._key_columns = _key_places(columns, arguments.keys, "input")
        self._key_types = key_schema(columns[name] for name in arguments.keys)
        self._key_codec = KeyCodec(self._key_types)
        self._writer = ColumnWriter(columns, "push()", zone)
        key_fields = StructType([columns[place] for place in self._key_columns])
        self._key_writer = ColumnWriter(key_fields, "The key", zone)
        self._width = len(columns)
        self._reader = ColumnReader(output)
        self.time_mode = TimeMode.parse(arguments.timeMode)
        form = _form(processor, uses_frames=arguments.pandas)
        event_time = self._event_time(columns, form)
        uid = checked_uid(arguments.uid)
        pickled = pickled_processor(processor, uid)
        declared = declare_states(pickled, uid, self._domains(), parse_ddl)
        self.states: dict[str, StateDeclaration] = declared.states
        warn_of_deleted(uid, declared.states.values())
        initial = None if arguments.initialState is None else self._initial(*arguments.initialState)
        spec = KeyedSpec(
            uid=uid,
            instance="",
            parallelism=0,
            is_streaming=True,
            key_schema=self._key_types,
            session_zone=zone,
            columns=columns.names,
            key_columns=self._key_columns,
            initial_columns=[] if initial is None else initial[0],
            initial_key_columns=[] if initial is None else initial[1],
            form=form,
            time_mode=self.time_mode,
            event_time=event_time,
            output_event_time=result_event_time(
                output, arguments.eventTimeColumnName, has_watermark=event_time is not None
            ),
            states=sorted(declared.states.values(), key=lambda state: state.name),
            output_schema=output,
            processor=pickled,
            options=options,
            host="",
            port=0,
            secret=b"",
        )
        watermark = arguments.watermark
        self.operator = LocalKeyedOperator(
            uid=uid,
            make=lambda: keyed_operator(spec),
            watermark=None if watermark is None else WatermarkPolicy(watermark.delay_ms, watermark.inputs),
            deleted=tuple(declared.deleted),
            initial=None if initial is None else initial[2],
            settings=recorded_settings(self.time_mode, form),
        )

    def _domains(self) -> frozenset[TimeDomain]:
        domains = {TimeDomain.EVENT} if self._arguments.watermark is not None else set()
        if self.time_mode.domain is not None:
            domains.add(self.time_mode.domain)
        return frozenset(domains)

    def _event_time(self, columns: StructType, form: ProcessorCodecs) -> EventTime | None:
        watermark, column = self._arguments.watermark, self._arguments.eventTime
        if watermark is not None and column is not None:
            raise ConfigurationError(
                "Harness has both watermark and eventTime.",
                hint="watermark= names its own column; eventTime= stands for Spark's withWatermark.",
            )
        if watermark is not None:
            is_event_time = self.time_mode is TimeMode.EVENT_TIME
            return own_event_time(columns, watermark, drops_late=form.drops_late and is_event_time)
        if column is None:
            return None
        found = own_event_time(columns, Watermark(column), drops_late=form.drops_late)
        return EventTime(found.column, form.drops_late) if self.time_mode is TimeMode.EVENT_TIME else None

    def _initial(self, schema: StructType | str, rows: Sequence[Any]) -> tuple[list[str], list[int], KeyedRows]:
        columns = read_schema(schema, "initialState")
        places = _key_places(columns, self._arguments.keys, "initialState")
        own = key_schema(columns[name] for name in self._arguments.keys)
        if own != self._key_types:
            raise ConfigurationError(
                f"initialState is keyed by ({own.to_string()}), the input by ({self._key_types.to_string()}).",
                hint="Key both by columns of the same names and types.",
            )
        batch = ColumnWriter(columns, "initialState", self._arguments.sessionTimeZone).batch(rows)
        return columns.names, places, KeyedRows(batch, self._hashes([batch.column(place) for place in places]))

    # ---- Rows ----

    def data(self, rows: Sequence[Any], broadcast: Sequence[Any] = ()) -> KeyedRows:
        """Convert a batch's rows to the columns that a task gets."""
        if broadcast:
            raise ConfigurationError("push: a keyed operator has no broadcast input.")
        batch = self._writer.batch(rows)
        return KeyedRows(batch, self._hashes([batch.column(place) for place in self._key_columns]))

    def key(self, key: Any) -> KeyedRows:
        """Make a row with a key and nulls; a single value means the tuple of that value."""
        values = tuple(key) if isinstance(key, (tuple, list)) else (key,)
        columns = self._key_writer.batch([values]).columns
        empty = [pa.nulls(1)] * self._width
        for place, column in zip(self._key_columns, columns, strict=True):
            empty[place] = column
        batch = pa.RecordBatch.from_arrays(empty, names=[f"c{place}" for place in range(self._width)])
        return KeyedRows(batch, self._hashes(columns))

    def output(self, batches: Sequence[pa.RecordBatch]) -> list[Any]:
        """Convert output columns to rows."""
        return self._reader.rows(batches)

    def _hashes(self, columns: list[pa.Array]) -> Hashes:
        key_hash = self._arguments.keyHash
        if key_hash is None:
            return row_hashes(columns)
        keys = map(self._key_codec.decode, self._key_codec.encode_columns(columns).to_pylist())
        return np.array([key_hash(key) for key in keys], np.uint64)


def _form(processor: object, *, uses_frames: bool) -> ProcessorCodecs:
    if isinstance(processor, WindowOperator):
        return processor.form
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


def _require_processor(processor: object) -> None:
    missing = [name for name in ("init", "handleInputRows", "close") if not hasattr(processor, name)]
    if missing or isinstance(processor, type):
        raise ConfigurationError(
            f"Harness takes an instance of StatefulProcessor, not {processor!r}.",
            hint="Pass an object, not a class, that has init, handleInputRows and close.",
        )
