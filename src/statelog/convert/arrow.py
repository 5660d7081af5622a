"""Processors that take the rows of many keys at once, as Arrow columns: what users implement, and what they get."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import TimerValues
from pyspark.sql.types import StructType

from statelog.convert.types import arrow_type
from statelog.errors import ErrorKind, ProcessorError
from statelog.numbers import Duration
from statelog.operators.keyed.column_caller import DueTimers
from statelog.operators.keyed.columns import Entries, EntryColumns, TimerColumns, ValueColumns
from statelog.operators.keyed.indexing import IndexedRows, Int64s
from statelog.runs.keys import KeyCodec
from statelog.runs.schema import StateDescriptor
from statelog.runs.times import Moment, Ttl
from statelog.runs.values import MISFITS
from statelog.tables.table import KeyBatch

_LISTS: Final = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)
_LAST_MS: Final = (1 << 63) - 1

Values: TypeAlias = pa.RecordBatch | pa.Table | Mapping[str, Any]
"""Columns by name: Arrow's, NumPy's or lists."""
Returned: TypeAlias = pa.RecordBatch | pa.Table | Iterable[pa.RecordBatch | pa.Table] | None
"""Output rows; None is none."""


@dataclass(frozen=True)
class ArrowBatch:
    """The rows of many keys."""

    keys: pa.RecordBatch
    """The grouping columns, a row for each distinct key."""
    rows: pa.Table
    """All columns of the rows, in order of arrival."""
    key_index: Int64s
    """For each row, the position of its key in `keys`, shape (rows,)."""
    times: TimerValues
    """The batch's processing time and watermark."""


@dataclass(frozen=True)
class ArrowTimers:
    """Timers of many keys that are due."""

    keys: pa.RecordBatch
    """The grouping columns, a row for each distinct key."""
    key_index: Int64s
    """For each timer, the position of its key in `keys`, ascending."""
    times_ms: Int64s
    """The timers' times, milliseconds since the Unix epoch; ascending within a key."""
    times: TimerValues
    """The batch's processing time and watermark."""


@dataclass(frozen=True)
class ArrowEntries:
    """Elements of lists, or entries of maps, of many keys."""

    key_index: Int64s
    """For each element or entry, the position of its key, ascending."""
    map_keys: pa.RecordBatch | None
    """The map's keys; None for a list."""
    values: pa.RecordBatch


class ArrowProcessor(ABC):
    """Base class of processors that take the rows of many keys at once, as Arrow columns.

    In each batch, :meth:`init` is called first, then :meth:`process` for the rows, in parts of at most some hundred
    thousand keys, then :meth:`fire` for the due timers, then :meth:`close`. Each part has all rows of its keys, so a
    key occurs in only one call of each method. States are read and written with arrays whose positions are those of
    the call's `keys`. States can be used only in :meth:`process` and :meth:`fire`.
    """

    def init(self, handle: Any) -> None:  # noqa: B027 - nothing by default
        """Declare the states, with an :class:`ArrowHandle`.

        This method is called when the query is built, and at the start of each batch in each subtask.
        """

    @abstractmethod
    def process(self, batch: ArrowBatch) -> Returned:
        """Process the rows of some keys.

        Parameters
        ----------
        batch : ArrowBatch
            The rows, and their keys.

        Returns
        -------
        pyarrow.RecordBatch or pyarrow.Table, an iterable of them, or None
            Output rows, with the columns of the output type by name.
        """

    def fire(self, timers: ArrowTimers) -> Returned:  # noqa: B027 - no timers by default
        """Process the due timers of some keys, which are already deleted; returns output rows like :meth:`process`."""

    def close(self) -> None:  # noqa: B027 - nothing by default
        """End the batch."""


class ArrowValueState:
    """A row per key, or none."""

    def __init__(self, state: ValueColumns, descriptor: StateDescriptor) -> None:
        self._state = state
        self._schema = descriptor.value_schema
        self._name = descriptor.name

    def get(self) -> pa.RecordBatch:
        """The value of every key, in the order of the keys; nulls where there is none."""
        values, _ = self._state.read()
        return pa.RecordBatch.from_arrays(values, schema=self._schema)

    def exists(self) -> npt.NDArray[np.bool_]:
        """Whether each key has a value."""
        return self._state.read()[1].copy()

    def put(self, values: Values, keys: Sequence[int] | Int64s | None = None) -> None:
        """Replace values.

        Parameters
        ----------
        values : pyarrow.RecordBatch, pyarrow.Table, or mapping of str to array
            The columns of the state by name.
        keys : array of int, optional
            The positions of the keys that get these values; if a key gets several values, the last one counts. By
            default, the values are for all keys, in their order.

        Raises
        ------
        ProcessorError
            If columns or fields of structs are missing or unknown, columns have the wrong length or do not fit their
            types, or a position is not an integer or not the position of a key.
        """
        subject = f"state '{self._name}'"
        positions = None if keys is None else _positions(keys, self._state.key_count, subject)
        count = self._state.key_count if positions is None else len(positions)
        self._state.write(_columns(values, self._schema, count, subject), positions)

    def clear(self, keys: Sequence[int] | Int64s | None = None) -> None:
        """Remove the values of some keys, given by position, or of all keys."""
        self._state.clear(_positions_or_all(keys, self._state.key_count, f"state '{self._name}'"))


class _EntryState:
    def __init__(self, state: EntryColumns, descriptor: StateDescriptor) -> None:
        self._state = state
        self._schema = descriptor.value_schema
        self._entry_schema = descriptor.entry_schema
        self._name = descriptor.name

    def entries(self) -> ArrowEntries:
        """The elements or entries of all keys, by key; those of a list in their order."""
        return self._shown(self._state.read())

    def _shown(self, found: Entries) -> ArrowEntries:
        map_keys = None
        if self._entry_schema is not None:
            map_keys = pa.RecordBatch.from_arrays(self._state.map_keys(found.entries), schema=self._entry_schema)
        return ArrowEntries(found.key_index, map_keys, pa.RecordBatch.from_arrays(found.values, schema=self._schema))

    def clear(self, keys: Sequence[int] | Int64s | None = None) -> None:
        """Remove the elements or entries of some keys, given by position, or of all keys."""
        self._state.clear(_positions_or_all(keys, self._state.key_count, f"state '{self._name}'"))

    def _owners(self, key_index: Sequence[int] | Int64s) -> Int64s:
        return _positions(key_index, self._state.key_count, f"state '{self._name}'")

    def _columns(self, values: Values, count: int) -> list[pa.Array]:
        return _columns(values, self._schema, count, f"state '{self._name}'")


class ArrowListState(_EntryState):
    """A list of rows per key."""

    def append(self, key_index: Sequence[int] | Int64s, values: Values) -> None:
        """Append an element for each position in `key_index`, in their order.

        Raises like :meth:`ArrowValueState.put`.
        """
        owners = self._owners(key_index)
        self._state.append(owners, self._columns(values, len(owners)))


class ArrowMapState(_EntryState):
    """A map of rows per key."""

    def range(self, first: Sequence[Any] | None = None, end: Sequence[Any] | None = None) -> ArrowEntries:
        """The entries of all keys from one map key up to, not including, another, in order of key and map key.

        A bound is a tuple, and may have only the first fields of a map key; None means no bound. For keys with many
        entries, only the entries in the range are read. Raises ProcessorError if a value does not fit its field, or if
        map keys have fields whose types have no order here, such as text.
        """
        return self._shown(self._state.between(first, end))

    def put(self, key_index: Sequence[int] | Int64s, map_keys: Values, values: Values) -> None:
        """Put an entry for each position in `key_index`; raises like :meth:`ArrowValueState.put`."""
        owners = self._owners(key_index)
        self._state.put(owners, self._entries(map_keys, len(owners)), self._columns(values, len(owners)))

    def remove(self, key_index: Sequence[int] | Int64s, map_keys: Values) -> None:
        """Remove an entry for each position in `key_index`; entries that do not exist are ignored."""
        owners = self._owners(key_index)
        self._state.remove(owners, self._entries(map_keys, len(owners)))

    def _entries(self, map_keys: Values, count: int) -> pa.Array:
        assert self._entry_schema is not None
        subject = f"map key of state '{self._name}'"
        return self._state.entry_keys(_columns(map_keys, self._entry_schema, count, subject))


class ArrowHandle:
    """Gives an :class:`ArrowProcessor` its states and timers."""

    def __init__(self, handle: Any, descriptors: Mapping[str, StateDescriptor]) -> None:
        self._handle = handle
        self._descriptors = descriptors

    def getValueState(
        self, stateName: str, schema: Any, ttlDurationMs: Duration | Ttl | None = None
    ) -> ArrowValueState:
        """The value state of this name."""
        state = self._handle.getValueState(stateName, schema, ttlDurationMs)
        return ArrowValueState(state, self._descriptors[stateName])

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: Duration | Ttl | None = None) -> ArrowListState:
        """The list state of this name."""
        state = self._handle.getListState(stateName, schema, ttlDurationMs)
        return ArrowListState(state, self._descriptors[stateName])

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: Duration | Ttl | None = None
    ) -> ArrowMapState:
        """The map state of this name."""
        state = self._handle.getMapState(stateName, userKeySchema, valueSchema, ttlDurationMs)
        return ArrowMapState(state, self._descriptors[stateName])

    def registerTimers(self, key_index: Sequence[int] | Int64s, times_ms: Sequence[int] | Int64s) -> None:
        """Register a timer for each position in `key_index`; the same time registered twice for a key is one timer."""
        self._timers.register(*_timers_at(self._timers, key_index, times_ms))

    def deleteTimers(self, key_index: Sequence[int] | Int64s, times_ms: Sequence[int] | Int64s) -> None:
        """Delete a timer for each position in `key_index`; timers that do not exist are ignored."""
        self._timers.delete(*_timers_at(self._timers, key_index, times_ms))

    def deleteIfExists(self, stateName: str) -> None:
        """Delete a state of an earlier version of the processor; allowed only in ``init``."""
        self._handle.deleteIfExists(stateName)

    def countLateRows(self, rows: int) -> None:
        """Count rows as late, whether the processor drops them or not."""
        self._handle.countLateRows(rows)

    @property
    def _timers(self) -> TimerColumns:
        if self._handle.timers is None:
            raise ProcessorError(
                "a timer was used, but the operator's timeMode is None.",
                kind=ErrorKind.STATE_USAGE,
                hint="Use timeMode='ProcessingTime' or 'EventTime'.",
            )
        timers: TimerColumns = self._handle.timers
        return timers


class ArrowCalls:
    """Calls an :class:`ArrowProcessor` as a subtask calls a processor of columns."""

    def __init__(
        self,
        processor: ArrowProcessor,
        columns: Sequence[str],
        key_columns: Sequence[int],
        key_codec: KeyCodec,
        output: StructType,
        states: Mapping[str, StateDescriptor],
        times: Any,
    ) -> None:
        self._processor = processor
        self._columns = list(columns)
        self._key_columns = key_columns
        self._key_codec = key_codec
        self._output = pa.schema([(field.name, arrow_type(field.dataType, "an output column")) for field in output])
        self._states = states
        self._times = times

    def init(self, handle: Any) -> None:
        """Give the processor its states."""
        self._processor.init(ArrowHandle(handle, self._states))

    def reduce(self, rows: IndexedRows) -> IndexedRows:
        return rows

    def process(self, chunk: IndexedRows, moment: Moment) -> Iterator[pa.RecordBatch]:
        rows = pa.Table.from_batches(chunk.rows).rename_columns(self._columns)
        columns = chunk.first_of_keys(self._key_columns)
        keys = pa.RecordBatch.from_arrays(columns, names=self._key_codec.schema.names)
        yield from self._returned(self._processor.process(ArrowBatch(keys, rows, chunk.key_index, self._times(moment))))

    def fire(self, due: DueTimers, moment: Moment) -> Iterator[pa.RecordBatch]:
        timers = ArrowTimers(self._keys(due.keys), due.key_index, due.times_ms, self._times(moment))
        yield from self._returned(self._processor.fire(timers))

    def load_initial_state(self, chunk: IndexedRows, moment: Moment) -> Iterable[pa.RecordBatch]:
        raise AssertionError("there are no initial rows")

    def close(self) -> None:
        """End the batch."""
        self._processor.close()

    def _keys(self, keys: KeyBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(self._key_codec.decode_columns(keys.keys), schema=self._key_codec.schema)

    def _returned(self, returned: Returned) -> Iterator[pa.RecordBatch]:
        parts = [returned] if isinstance(returned, pa.RecordBatch | pa.Table) else returned or ()
        for part in parts:
            if not isinstance(part, pa.RecordBatch | pa.Table):
                raise ProcessorError(
                    f"it returned {type(part).__name__}, which is not a pyarrow.RecordBatch or pyarrow.Table.",
                    kind=ErrorKind.OUTPUT_MISMATCH,
                    hint="Return one of them, an iterable of them, or None.",
                )
            for batch in part.to_batches() if isinstance(part, pa.Table) else [part]:
                columns = _columns(batch, self._output, batch.num_rows, "the output", ErrorKind.OUTPUT_MISMATCH)
                yield pa.RecordBatch.from_arrays(columns, schema=self._output)


def _columns(
    values: Values, schema: pa.Schema, count: int, subject: str, kind: ErrorKind = ErrorKind.VALUE_MISMATCH
) -> list[pa.Array]:
    """Columns by name in the types of a schema; raises ProcessorError if they do not fit."""
    if not isinstance(values, pa.RecordBatch | pa.Table | Mapping):
        raise ProcessorError(
            f"{subject} takes columns by name, but got {type(values).__name__}.",
            kind=kind,
            hint="Pass a pyarrow.RecordBatch, a pyarrow.Table, or a dict of arrays.",
        )
    names, given = (
        (list(values), list(values.values())) if isinstance(values, Mapping) else (values.schema.names, values.columns)
    )
    _require_same_names(names, schema.names, subject, "columns", kind)
    held = dict(zip(names, given, strict=True))
    columns: list[pa.Array] = []
    for field in schema:
        owner = f"{subject}: column '{field.name}'"
        try:
            array = _array(held[field.name])
            _require_same_fields(array.type, field.type, owner, kind)
            array = array.cast(field.type)
        except MISFITS as error:
            raise ProcessorError(
                f"{owner} does not fit its type {field.type}: {error}.",
                kind=kind,
                hint="Cast it, or declare another type.",
            ) from error
        if len(array) != count:
            raise ProcessorError(
                f"{owner} has {len(array):,} values, but there are {count:,} keys or rows.",
                kind=kind,
                hint="Pass one value for each.",
            )
        columns.append(array)
    return columns


def _array(column: Any) -> pa.Array:
    """A column as an Arrow array, which later changes of the column do not affect."""
    if isinstance(column, pa.ChunkedArray):
        return column.combine_chunks()
    if isinstance(column, pa.Array):
        return column
    return pa.array(column.copy() if hasattr(column, "copy") else column)


def _require_same_names(
    given: Sequence[Any], wanted: Sequence[str], subject: str, plural: str, kind: ErrorKind
) -> None:
    """Refuse names that are not the wanted ones, each once, in any order."""
    if sorted(map(str, given)) != sorted(wanted):
        raise ProcessorError(
            f"{subject} takes the {plural} {', '.join(wanted)}, but got {', '.join(map(str, given)) or 'none'}.",
            kind=kind,
            hint="Pass each of them by name.",
        )


def _require_same_fields(given: pa.DataType, wanted: pa.DataType, subject: str, kind: ErrorKind) -> None:
    """Refuse structs, at any depth, whose fields are not the wanted ones: Arrow's cast drops fields and adds nulls."""
    if isinstance(given, pa.BaseExtensionType):
        given = given.storage_type
    if isinstance(given, pa.DictionaryType):
        given = given.value_type
    if isinstance(wanted, pa.StructType) and isinstance(given, pa.StructType):
        _require_same_names([field.name for field in given], [field.name for field in wanted], subject, "fields", kind)
        for field in wanted:
            _require_same_fields(given.field(field.name).type, field.type, f"{subject}, field '{field.name}'", kind)
    elif isinstance(wanted, pa.MapType) and isinstance(given, pa.MapType):
        _require_same_fields(given.key_type, wanted.key_type, f"{subject}, its keys:", kind)
        _require_same_fields(given.item_type, wanted.item_type, f"{subject}, its values:", kind)
    elif isinstance(wanted, pa.ListType) and isinstance(given, _LISTS):
        _require_same_fields(given.value_type, wanted.value_type, f"{subject}, its elements:", kind)


def _positions_or_all(keys: Sequence[int] | Int64s | None, count: int, subject: str) -> Int64s:
    return np.arange(count) if keys is None else _positions(keys, count, subject)


def _positions(given: Sequence[int] | Int64s, count: int, subject: str) -> Int64s:
    """Positions of some of `count` keys; raises ProcessorError for anything else."""
    hint = f"A position is an integer from 0 to {count - 1}, that of a row of the call's keys."
    positions = _integers(given, f"{subject}: the positions of keys", hint)
    outside = (positions < 0) | (positions >= count)
    if outside.any():
        raise ProcessorError(
            f"{subject}: {positions[outside][0]} is given as the position of a key, but the call has {count:,} keys.",
            kind=ErrorKind.STATE_USAGE,
            hint=hint,
        )
    return positions.astype(np.int64, copy=False)


def _timers_at(
    timers: TimerColumns, key_index: Sequence[int] | Int64s, times_ms: Sequence[int] | Int64s
) -> tuple[Int64s, Int64s]:
    """The checked positions and times of timers."""
    positions = _positions(key_index, timers.key_count, "timers")
    hint = "A time is a whole number of milliseconds since the Unix epoch, of 64 bits."
    times = _integers(times_ms, "timers: the times", hint)
    if len(times) != len(positions):
        raise ProcessorError(
            f"timers: there are {len(times):,} times for {len(positions):,} positions of keys.",
            kind=ErrorKind.STATE_USAGE,
            hint="Pass one time for each position.",
        )
    beyond = times > _LAST_MS
    if beyond.any():
        raise ProcessorError(
            f"timers: a time is {times[beyond][0]}, which is beyond 64 bits.", kind=ErrorKind.STATE_USAGE, hint=hint
        )
    return positions, times.astype(np.int64, copy=False)


def _integers(given: Any, subject: str, hint: str) -> npt.NDArray[np.integer[Any]]:
    """A copy of a one-dimensional array of integers; raises ProcessorError for anything else."""
    try:
        array = np.array(given)
    except MISFITS as error:
        raise ProcessorError(f"{subject} are not an array: {error}.", kind=ErrorKind.STATE_USAGE, hint=hint) from error
    if array.ndim == 1 and not len(array) and array.dtype != np.bool_:
        return array.astype(np.int64)
    if array.dtype == np.bool_:
        hint = f"numpy.flatnonzero(mask) returns the positions at which a mask is set. {hint}"
    if array.ndim != 1 or array.dtype.kind not in "iu":
        shown = f"of type {array.dtype}, such as {array[0]!s}" if array.ndim == 1 else f"of {array.ndim} dimensions"
        raise ProcessorError(f"{subject} are an array {shown}.", kind=ErrorKind.STATE_USAGE, hint=hint)
    return array
