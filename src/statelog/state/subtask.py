"""One batch of one subtask: rows in, calls of the processor, rows and changes out. No Spark here."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from statelog.clock import Clock
from statelog.errors import ErrorKind, ProcessorError
from statelog.state.changes import ChangeBuffer, ListPosition
from statelog.state.cursor import KeyCursor
from statelog.state.grouping import Window, group_rows
from statelog.state.handles import KeyedState, ListState, MapState, ValueState
from statelog.state.key_groups import Hashes
from statelog.state.keys import KeyCodec
from statelog.state.schema import StateDescriptor, StateKind
from statelog.state.table import KeyBatch, StateTable
from statelog.state.values import RowCodec

__all__ = ["KeyedOperator", "KeyedSubtask", "ProcessorHandle", "StateBinding"]

_CHUNK_ROWS: Final = 10_000
_COLLECTION_THRESHOLD: Final = 100_000
_S = TypeVar("_S", bound=KeyedState)


class Processor(Protocol):
    """The methods of ``pyspark.sql.streaming.StatefulProcessor`` that are called."""

    def init(self, handle: Any) -> None: ...

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]: ...

    def close(self) -> None: ...


class OutputCodec(Protocol):
    """Converts output rows to columns."""

    def encode(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> pa.RecordBatch:
        """Convert rows; `owner_of` names the key that returned the i-th, for messages."""
        ...


@dataclass(frozen=True)
class StateBinding:
    """A state as the processor declared it, with the codecs of its values and map keys."""

    descriptor: StateDescriptor
    codec: RowCodec
    entry_codec: RowCodec | None
    to_row: Callable[[tuple[Any, ...]], Any]


@dataclass(frozen=True)
class KeyedOperator:
    """What a keyed operator is made of, on the side of the tasks.

    Parameters
    ----------
    uid : str
        The operator's name, for messages.
    processor : Processor
        The user's processor.
    key_codec : KeyCodec
        Codec of the grouping key.
    key_columns : list of int
        Which input columns are the grouping key.
    states : list of StateBinding
        The states that the processor declared.
    to_rows : callable
        Makes the processor's row objects from columns.
    output : OutputCodec
        Makes columns from the processor's output rows.
    timer_values : Any
        The third argument of handleInputRows.
    """

    uid: str
    processor: Processor
    key_codec: KeyCodec
    key_columns: list[int]
    states: list[StateBinding]
    to_rows: Callable[[pa.RecordBatch], list[Any]]
    output: OutputCodec
    timer_values: Any


class ProcessorHandle:
    """What a processor's ``init`` gets on a task: the states that were declared on the driver."""

    def __init__(self, states: dict[str, KeyedState], uid: str) -> None:
        self._states = states
        self._uid = uid

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> ValueState:
        """The value state of this name."""
        return self._declared(stateName, ValueState)

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> ListState:
        """The list state of this name."""
        return self._declared(stateName, ListState)

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: int | None = None
    ) -> MapState:
        """The map state of this name."""
        return self._declared(stateName, MapState)

    def _declared(self, name: str, kind: type[_S]) -> _S:
        state = self._states.get(name)
        if not isinstance(state, kind):
            raise ProcessorError(
                f"operator '{self._uid}': init() asks for {kind.__name__} '{name}' on a task, but did not"
                " declare it so when the query was built.",
                kind=ErrorKind.STATE_USAGE,
                hint="init() must declare the same states every time.",
            )
        return state


class KeyedSubtask:
    """Runs a processor over one batch of one subtask.

    The order of calls is :meth:`process` once, consumed to its end; then `changes` holds the batch's
    changes.

    Parameters
    ----------
    operator : KeyedOperator
        The operator.
    table : StateTable
        The state before the batch.
    list_position : ListPosition
        Where the batch's list elements stand.
    clock : Clock
        Measures the time spent on changes.

    Attributes
    ----------
    changes : ChangeBuffer
        The changes.
    flush_s : float
        Time spent so far on turning what the processor wrote into changes.
    """

    def __init__(self, operator: KeyedOperator, table: StateTable, list_position: ListPosition, clock: Clock) -> None:
        self.changes = ChangeBuffer()
        self.flush_s = 0.0
        self._clock = clock
        self._operator = operator
        no_keys = KeyBatch(np.zeros(0, np.uint64), pa.array([], pa.binary()))
        self._cursor = KeyCursor(table, list_position, no_keys)
        self._states = {binding.descriptor.name: _make_state(self._cursor, binding) for binding in operator.states}

    def process(self, rows: pa.RecordBatch, hashes: Hashes) -> Iterator[pa.RecordBatch]:
        """Call the processor for every key of the batch, with all of the key's rows.

        Parameters
        ----------
        rows : pyarrow.RecordBatch
            n input rows in order of arrival.
        hashes : numpy.ndarray of uint64, shape (n,)
            Their key hashes.

        Yields
        ------
        pyarrow.RecordBatch
            Output rows, some keys at a time.

        Raises
        ------
        ProcessorError
            If the processor raises, or gives values or rows that do not fit their schemas.
        """
        operator = self._operator
        self._call("init", operator.processor.init, ProcessorHandle(self._states, operator.uid))
        if rows.num_rows:
            key_columns = [rows.column(index) for index in operator.key_columns]
            grouped = group_rows(rows, hashes, operator.key_codec.encode_columns(key_columns))
            for window in grouped.windows():
                with _rare_garbage_collection():
                    output = self._process_window(window)
                yield output
        self._call("close", operator.processor.close)

    def _process_window(self, window: Window) -> pa.RecordBatch:
        operator, cursor = self._operator, self._cursor
        cursor.keys = window.keys
        for state in self._states.values():
            state.open()
        firsts = pa.array(window.starts[:-1])
        key_columns = [window.rows.column(index).take(firsts) for index in operator.key_columns]
        keys = list(zip(*(column.to_pylist() for column in key_columns), strict=True))
        self.changes.describe_key = lambda position: repr(keys[position])
        outputs: list[Any] = []
        ends: list[int] = []
        handle_rows, timer_values = operator.processor.handleInputRows, operator.timer_values
        try:
            # The loop that everything is about: nothing in here that could stand outside.
            for position, (key, rows) in enumerate(zip(keys, self._rows_by_key(window), strict=True)):
                cursor.position = position
                outputs.extend(handle_rows(key, rows, timer_values))
                ends.append(len(outputs))
        except Exception as error:
            raise self._failure(error, "handleInputRows", keys[cursor.position]) from error
        cursor.position = -1
        with _OperatorNamed(operator.uid):
            started_s = self._clock.monotonic_s()
            for state in self._states.values():
                state.flush(self.changes)
            self.flush_s += self._clock.monotonic_s() - started_s
            return operator.output.encode(outputs, lambda row: repr(keys[_owner(ends, row)]))

    def _rows_by_key(self, window: Window) -> list[Iterator[Any]]:
        starts = window.starts.tolist()
        to_rows = self._operator.to_rows
        if len(window.keys) == 1 and window.rows.num_rows > _CHUNK_ROWS:
            chunks = range(0, window.rows.num_rows, _CHUNK_ROWS)
            return [(row for start in chunks for row in to_rows(window.rows.slice(start, _CHUNK_ROWS)))]
        rows = to_rows(window.rows)
        return [iter(rows[start:end]) for start, end in itertools.pairwise(starts)]

    def _call(self, name: str, method: Callable[..., None], *arguments: Any) -> None:
        try:
            method(*arguments)
        except Exception as error:
            raise self._failure(error, name) from error

    def _failure(self, error: Exception, method: str, key: tuple[Any, ...] | None = None) -> ProcessorError:
        where = f"operator '{self._operator.uid}': {method}() failed"
        if key is not None:
            where += f" for key {key!r}"
        if isinstance(error, ProcessorError):
            return ProcessorError(f"{where}: {error.message}", kind=error.kind, hint=error.hint)
        return ProcessorError(
            f"{where}: {type(error).__name__}: {error}.",
            hint="The traceback above shows the line of the processor. Nothing of this batch was kept;"
            " start the query again when the code is mended.",
        )


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Look for reference cycles less often.

    A window makes several objects per row, which the collector would visit again and again: with Python's own
    thresholds it took a third of the time of a batch.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(max(thresholds[0], _COLLECTION_THRESHOLD), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


class _OperatorNamed:
    """Adds the operator's name to errors of encoding."""

    def __init__(self, uid: str) -> None:
        self._uid = uid

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ProcessorError):
            message = f"operator '{self._uid}': {error.message}"
            raise ProcessorError(message, kind=error.kind, hint=error.hint) from error


def _owner(ends: list[int], row: int) -> int:
    return next(position for position, end in enumerate(ends) if row < end)


def _make_state(cursor: KeyCursor, binding: StateBinding) -> KeyedState:
    match binding.descriptor.kind:
        case StateKind.VALUE:
            return ValueState(cursor, binding.descriptor, binding.codec)
        case StateKind.LIST:
            return ListState(cursor, binding.descriptor, binding.codec)
        case StateKind.MAP:
            assert binding.entry_codec is not None
            return MapState(cursor, binding.descriptor, binding.codec, binding.entry_codec, binding.to_row)
