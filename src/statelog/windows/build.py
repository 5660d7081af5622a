"""Builds a window operator from its definition: checks the input's columns, chooses states and output type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

import numpy as np
import pyarrow as pa
from pyspark.sql.types import DataType, StructField, StructType, TimestampNTZType, TimestampType

from statelog.aggregates.accumulators import bind_aggregates, column_types, resolved, value_details
from statelog.aggregates.functions import Aggregate, stored_type
from statelog.aggregates.groups import Groups
from statelog.convert.codecs import ColumnCodecs
from statelog.convert.python_values import exact_type
from statelog.convert.times import TimeMode
from statelog.convert.types import key_schema, parse_output, parse_schema
from statelog.errors import ConfigurationError
from statelog.history.settings import (
    AGGREGATE,
    COLUMN_TYPE,
    COUNT_FIELD,
    COUNT_STATE,
    LATENESS,
    VALUE_DETAIL,
    WindowKind,
    WindowResults,
)
from statelog.operators.event_time import EventTime
from statelog.operators.keyed.columns import ValueColumns
from statelog.operators.keyed.cursor import Row
from statelog.operators.keyed.values import AggregateFunction
from statelog.windows.assigners import CountWindows, SessionWindows, SlidingWindows, WindowAssigner
from statelog.windows.contents import Contents, Folded, Reduced, Sums, TimedRows
from statelog.windows.engine import ChunkKeys, Clock, Windows, WindowShape, WindowTimes, schema_behind
from statelog.windows.panes import TimeWindows
from statelog.windows.processor import WindowProcessor
from statelog.windows.rows import GivenRows, Rows
from statelog.windows.sessions import Sessions


@dataclass(frozen=True)
class WindowPlan:
    """A window operator, ready to be planned like any stateful processor."""

    operator: Windows
    output: StructType
    """The output columns."""
    time_mode: TimeMode
    """The time that fires the operator's timers."""


@dataclass(frozen=True)
class WindowDefinition:
    """The windows of a keyed stream; raises ConfigurationError if its values do not fit each other or the columns."""

    schema: StructType
    """The input columns."""
    keys: list[str]
    """The grouping columns."""
    zone: str
    """The session's time zone."""
    windows: WindowAssigner
    time_mode: TimeMode
    time_column: str | None = None
    """The column of event time; None in processing time and for count windows."""
    allowed_lateness_ms: int = 0
    """How long complete windows still accept late rows."""
    late_column: str | None = None
    """The output column of rows that are too late; None drops them."""
    ansi: bool = True
    """Whether the session is in ANSI mode."""
    is_case_sensitive: bool = True
    """Whether the session distinguishes names of columns by case."""
    parse: Callable[[str], DataType] = DataType.fromDDL
    """Parses DDL; Spark's own parser, the default, needs a session."""

    def __post_init__(self) -> None:
        if not isinstance(self.windows, get_args(WindowAssigner)):
            names = ", ".join(kind.__name__ for kind in get_args(WindowAssigner))
            raise ConfigurationError(f"window takes one of {names}, not {self.windows!r:.80}.")
        lateness_ms = self.allowed_lateness_ms
        if self.time_mode is not TimeMode.EVENT_TIME and (lateness_ms or self.late_column is not None):
            raise ConfigurationError(
                "allowed_lateness and late_column apply in event time only: otherwise no row is late.",
                hint="Omit them, or use timeMode 'EventTime' with tumbling, sliding or session windows.",
            )
        name = self.time_column
        if self.time_mode is TimeMode.EVENT_TIME and (
            name not in self.schema.names or not isinstance(self.schema[name].dataType, _TIMES)
        ):
            columns = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in self.schema)
            raise ConfigurationError(
                f"The windows' time column is {name!r}, which is not a timestamp column of the input.",
                hint=f"The columns are: {columns}.",
            )

    # ---- Kinds of results ----

    def aggregated(self, aggregates: Sequence[Aggregate]) -> WindowPlan:
        """Plan windows with ready-made aggregates."""
        aggregates = [resolved(one, self.schema, is_case_sensitive=self.is_case_sensitive) for one in aggregates]
        accumulators = bind_aggregates(aggregates, self.schema, ansi=self.ansi)
        settings = self._settings(WindowResults.AGG)
        settings |= {AGGREGATE + one.output_name: str(one) for one in aggregates}
        details = value_details(aggregates, accumulators.result)
        settings |= {VALUE_DETAIL + name: detail for name, detail in details.items()}
        settings |= {COLUMN_TYPE + name: kind for name, kind in column_types(aggregates, self.schema).items()}
        contents = Sums(accumulators, self._event_time is not None)
        return self._plan(contents, self._with_window(accumulators.result), settings, accumulators.adds_floats)

    def folded(self, function: AggregateFunction[Any, Any], accumulator: Any, result_type: Any) -> WindowPlan:
        """Plan windows with the user's aggregate function."""
        missing = [name for name in ("createAccumulator", "add", "getResult") if not hasattr(function, name)]
        if missing or isinstance(function, type):
            raise ConfigurationError(
                f"aggregate_function is {function!r:.80}.",
                hint="Pass an object of a subclass of statelog.AggregateFunction, not the class.",
            )
        merges = getattr(type(function), "merge", AggregateFunction.merge) is not AggregateFunction.merge
        if (isinstance(self.windows, SessionWindows) or self._overlap) and not merges:
            raise ConfigurationError(
                f"{type(function).__name__} has no merge(), which {type(self.windows).__name__} need: their results"
                " are merged from parts.",
                hint="Implement merge(one, other), which returns the accumulator of the rows of both.",
            )
        result = parse_schema(result_type, "result_type", self.parse)
        schema = parse_schema(accumulator, "accumulator_schema", self.parse)
        contents = Folded(schema, function, _plain(result), self.schema.names)
        return self._plan(contents, self._with_window(result), self._settings(WindowResults.AGGREGATE))

    def reduced(
        self, function: Callable[[Row, Row], Row], value_schema: Any, value_of: Callable[[Any], Row] | None
    ) -> WindowPlan:
        """Plan windows whose values are reduced to one."""
        if not callable(function) or not (value_of is None or callable(value_of)):
            raise ConfigurationError(
                f"reduce takes functions, not {function!r:.80} and {value_of!r:.80}.",
                hint="Pass reduce_function(one, other) and, if needed, value_of(row).",
            )
        value = parse_schema(value_schema, "value_schema", self.parse)
        unknown = [] if value_of else [name for name in value.names if name not in self.schema.names]
        if unknown:
            raise ConfigurationError(
                f"reduce: value_schema names {unknown[0]!r}, which is not a column of the input.",
                hint=f"Pass value_of, or use the columns {', '.join(self.schema.names)}.",
            )
        positions = () if value_of else tuple(self.schema.names.index(name) for name in value.names)
        are_normal = value_of is None and all(
            field.dataType == self.schema[position].dataType and exact_type(field.dataType) is not None
            for field, position in zip(value, positions, strict=True)
        )
        contents = Reduced(value, function, value_of, positions, are_normal, self.schema.names)
        return self._plan(contents, self._with_window(value), self._settings(WindowResults.REDUCE))

    def processed(self, processor: WindowProcessor, output_type: Any) -> WindowPlan:
        """Plan windows whose rows go to the user's processor."""
        if not isinstance(processor, WindowProcessor):
            raise ConfigurationError(
                f"window_processor is {processor!r:.80}.",
                hint="Pass an object of a subclass of statelog.WindowProcessor, not the class.",
            )
        rows = StructType([StructField(field.name, stored_type(field.dataType)) for field in self.schema])
        output = parse_output(output_type, self.parse)
        contents = Rows(processor, rows, GivenRows(_plain(self.schema), self.zone), self._overlap, output)
        return self._plan(contents, output, self._settings(WindowResults.PROCESS))

    # ---- Parts ----

    @property
    def _overlap(self) -> bool:
        """Whether a row may belong to several windows."""
        return isinstance(self.windows, SlidingWindows) and not self.windows.panes().are_windows

    def _settings(self, results: WindowResults) -> dict[str, int | str]:
        """The settings that the stored state depends on; checkpoints record them."""
        settings: dict[str, int | str] = {"results": str(results)}
        if isinstance(self.windows, CountWindows):
            return settings | {"windows": str(WindowKind.COUNTS), "size": self.windows.size}
        if isinstance(self.windows, SessionWindows):
            settings |= {"windows": str(WindowKind.SESSIONS), "gap_ms": self.windows.gap_ms}
        else:
            panes = self.windows.panes()
            settings |= {"windows": str(WindowKind.OF_TIME), "size_ms": panes.size_ms, "slide_ms": panes.slide_ms}
            settings["offset_ms"] = panes.offset_ms
        if self.time_mode is TimeMode.EVENT_TIME:
            settings[LATENESS] = self.allowed_lateness_ms
        return settings

    @property
    def _window_fields(self) -> list[StructField]:
        """The grouping columns, and the windows' bounds if they have any."""
        keys = [StructField(name, self.schema[name].dataType) for name in self.keys]
        bounds = [] if isinstance(self.windows, CountWindows) else ["window_start", "window_end"]
        return [*keys, *[StructField(name, TimestampType()) for name in bounds]]

    @property
    def _event_time(self) -> EventTime | None:
        if self.time_mode is not TimeMode.EVENT_TIME:
            return None
        assert self.time_column is not None
        return EventTime(self.schema.names.index(self.time_column), drops_late=False)

    def _with_window(self, result: StructType) -> StructType:
        """The grouping columns, the window's bounds if there are any, and the fields of the result."""
        return StructType([*self._window_fields, *_plain(result).fields])

    def _output(self, output: StructType) -> StructType:
        """The output columns, with that of late rows; raises ConfigurationError if two have one name."""
        if self.late_column is not None:
            if not isinstance(self.late_column, str) or not self.late_column:
                raise ConfigurationError(f"late_column is {self.late_column!r}, which is not a column name.")
            output = StructType([*output.fields, StructField(self.late_column, _plain(self.schema))])
        doubled = [name for name in output.names if output.names.count(name) > 1]
        if doubled:
            raise ConfigurationError(
                f"Two output columns of the windows are named {doubled[0]!r}; the columns are"
                f" {', '.join(output.names)}.",
                hint="Give the result's field, or late_column, another name.",
            )
        return output

    def _plan(
        self, contents: Contents, output: StructType, settings: dict[str, int | str], adds_floats: bool = False
    ) -> WindowPlan:
        output = self._output(output)
        clock = Clock(self.time_mode is TimeMode.EVENT_TIME, self.allowed_lateness_ms, self.late_column is not None)
        keys = key_schema(self.schema[name] for name in self.keys)
        shape = WindowShape(keys, self.zone, self.time_mode, self._event_time, output)
        codecs = ColumnCodecs(
            settings=settings,
            drops_late=False,
            completes_in_batch=True,
            adds_floats=adds_floats,
            makes_objects=not isinstance(contents, Sums),
        )
        operator: Windows
        if isinstance(self.windows, CountWindows):
            operator = CountedWindows(self.windows.size, contents, clock, shape, codecs)
        elif isinstance(self.windows, SessionWindows):
            operator = Sessions(self.windows.gap_ms, contents, clock, shape, codecs)
        else:
            operator = TimeWindows(self.windows.panes(), contents, clock, shape, codecs)
        return WindowPlan(operator, output, self.time_mode)


_TIMES: Final = (TimestampType, TimestampNTZType)


def _plain(schema: StructType) -> StructType:
    """The columns without their metadata, all nullable."""
    return StructType([StructField(field.name, field.dataType) for field in schema])


class CountedWindows(Windows):
    """Keeps the accumulator of each key's current window, and the number of its rows."""

    has_bounds = False

    def __init__(self, size: int, contents: Contents, clock: Clock, shape: WindowShape, codecs: ColumnCodecs) -> None:
        super().__init__(contents, clock, shape, codecs)
        self._size = size
        self._schema = schema_behind(COUNT_FIELD, contents.schema)

    def _declare(self, handle: Any) -> None:
        self._current: ValueColumns = handle.getValueState(COUNT_STATE, self._schema)

    def _process(self, timed: TimedRows, keys: ChunkKeys, times: WindowTimes) -> Iterator[pa.RecordBatch]:
        contents, size, owners = self._contents, self._size, np.arange(len(keys))
        (counts, *before), has = self._current.read()
        done = np.where(has, counts.fill_null(0).to_numpy(), 0)
        of_key = Groups(timed.owners, len(keys))
        # An earlier start with larger windows may have left one with as many rows: the next row completes it.
        first_size = np.maximum(size - done, 1)
        place = np.empty(len(timed), np.int64)
        starts = np.cumsum(of_key.sizes) - of_key.sizes
        place[of_key.order] = np.arange(len(place)) - np.repeat(starts, of_key.sizes)
        # The number of each row's window among those of its key, and how many are complete.
        window = np.maximum(0, (place - first_size[timed.owners]) // size + 1)
        full = np.where(of_key.sizes >= first_size, (of_key.sizes - first_size) // size + 1, 0)
        is_last = window == full[timed.owners]
        known = np.flatnonzero(has)
        stored = [column.take(pa.array(known)) for column in before]
        if full.any():
            first_window = np.cumsum(full) - full
            of_window = np.repeat(owners, full)
            rows = replace(timed, times_ms=window).take(~is_last)
            groups = Groups((first_window[timed.owners] + window)[~is_last], len(of_window))
            is_completed = full[known] > 0
            completed, kept = (pa.array(mask) for mask in (is_completed, ~is_completed))
            own = [column.filter(completed) for column in stored]
            held = contents.add(own, first_window[known[is_completed]], rows, groups, keys.of(of_window))
            number = np.arange(len(of_window)) - first_window[of_window]
            yield from self._results(keys, of_window, contents.opened(held), [number, number + 1], times.context)
            contents.clear(np.flatnonzero(full))
            known, stored = known[~is_completed], [column.filter(kept) for column in stored]
        in_last = np.where(full > 0, of_key.sizes - first_size - (full - 1) * size, done + of_key.sizes)
        current = np.flatnonzero(in_last)
        of_owner = np.zeros(len(keys), np.int64)
        of_owner[current] = np.arange(len(current))
        rows = replace(timed, times_ms=np.zeros_like(timed.times_ms)).take(is_last)
        groups = Groups(of_owner[rows.owners], len(current))
        held = contents.add(stored, of_owner[known], rows, groups, keys.of(current))
        self._current.write([pa.array(in_last[current]), *held], current)
        self._current.clear(np.flatnonzero(in_last == 0))
