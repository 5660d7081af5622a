"""The interface of Spark's TwsTester, on the code that a query runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import finalize

from pyspark.errors import IllegalArgumentException, PySparkValueError
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo
from pyspark.sql.types import Row

from statelog.checkpoint.batch import BatchTime
from statelog.convert.times import TimeMode
from statelog.errors import ProcessorError, StatelogError
from statelog.operators.event_time import EventTime
from statelog.operators.keyed.handle import ProcessorHandle
from statelog.operators.keyed.operator import KeyedInput, KeyedOperator, Processor
from statelog.operators.keyed.subtask import KeyedRows
from statelog.operators.watermark import WatermarkPolicy
from statelog.options import Options
from statelog.runs.schema import StateKind
from statelog.spark.checks import check_output_mode
from statelog.spark.declare import declare_keyed_states_of
from statelog.spark.event_times import time_domains
from statelog.spark.states import bind_states
from statelog.testing.ddl import parse_ddl
from statelog.testing.keyed import LocalKeyedOperator
from statelog.testing.object_rows import (
    NUMBERED_KEY,
    TIME_COLUMN,
    FramePart,
    ObjectInput,
    ObjectOutput,
    RowPart,
    stand_ins,
)
from statelog.testing.query import LocalQuery, MicroBatches, discard, new_directory
from statelog.testing.state_view import StateView

if TYPE_CHECKING:
    import pandas as pd

_UID: Final = "tester"


class TwsTester:
    """Tests a stateful processor key by key, as ``pyspark.sql.streaming.TwsTester`` does; import this one instead.

    A call of :meth:`test` is a micro-batch with the rows of one key, run by statelog's own tasks: states are stored by
    their schemas, in a changelog in a temporary directory, and read back from it. The processor gets the very keys and
    rows of the test, so these need no schema; values of its states must fit theirs.

    In addition to Spark's tester, entries expire by their TTL as the processing time is set forward, and with
    `watermarkDelayMs` the watermark follows from the rows. Where Spark's tester differs from a query, this one behaves
    like a query:

    - A due timer fires in the same batch, so :meth:`test` returns its output too. A timer may be registered for a time
      that is over.
    - If all rows of a call are late, or there are none, the processor is not called.
    - A TTL needs the time mode that Spark requires for it, values must fit their schemas, and an empty list cannot be
      put.
    - ``init`` and ``close`` are called for every batch, on the one processor of the test. ``handleExpiredTimer`` gets
      its arguments by name.

    Parameters
    ----------
    processor : StatefulProcessor
        The processor; not copied, so that a test can look at it.
    initialStateRow : list of (key, Row), optional
        Initial state of a processor that takes rows.
    initialStatePandas : list of (key, pandas.DataFrame), optional
        Initial state of a processor that takes frames.
    timeMode : {"None", "ProcessingTime", "EventTime"}
        As for ``transformWithState``.
    outputMode : str
        As for ``transformWithState``.
    eventTimeExtractor : callable, optional
        The event time of a row, milliseconds since the Unix epoch; needed with timeMode "EventTime".
    watermarkDelayMs : int, optional
        Makes the watermark follow from the rows: the largest event time minus this. It moves after :meth:`test`; as in
        a query, a batch without rows follows and fires the timers that are due.
    options : Options, optional
        The operator's options, for example its table.
    """

    def __init__(
        self,
        processor: Any,
        initialStateRow: list[tuple[Any, Row]] | None = None,
        initialStatePandas: list[tuple[Any, pd.DataFrame]] | None = None,
        timeMode: str = "None",
        outputMode: str = "Append",
        eventTimeExtractor: Callable[[Any], int] | None = None,
        *,
        watermarkDelayMs: int | None = None,
        options: Options | None = None,
    ) -> None:
        self.processor = processor
        self._mode = TimeMode.parse(timeMode)
        check_output_mode(outputMode)
        self._extractor = eventTimeExtractor
        self._policy = None if watermarkDelayMs is None else WatermarkPolicy(watermarkDelayMs)
        self._require_arguments(initialStateRow, initialStatePandas)
        self._uses_pandas = initialStatePandas is not None
        self._keys: dict[Any, int] = {}
        self._rows: list[Any] = []
        self._initial_rows: list[Any] = []
        self._outputs: list[Any] = []
        self._held: list[Any] = []
        self._acting: Processor = processor
        declared = declare_keyed_states_of(processor, _UID, time_domains(self._mode, self._policy), parse_ddl)
        self._declared = declared.states
        self._states = declared.by_name()
        initial = initialStatePandas if initialStateRow is None else initialStateRow
        operator = LocalKeyedOperator(
            uid=_UID,
            make=self._make_operator,
            watermark=self._policy,
            initial=None if initial is None else self._initial(initial),
        )
        query = LocalQuery(operator, new_directory(), options or Options())
        finalize(self, discard, query.directory, query.stores)
        self._batches = MicroBatches(query, parallelism=1)
        self._view = StateView(self._make_operator, self._declared, self._mode, self._batches, self._row_of)
        if initial is not None:
            self._held += self._run([], self._batches.last_time)

    def _require_arguments(self, rows: object, frames: object) -> None:
        if rows is not None and frames is not None:
            raise ValueError("Cannot specify both Row and Pandas initial states.")
        needs = "timeMode is EventTime" if self._mode is TimeMode.EVENT_TIME else ""
        if self._extractor is None and (needs or self._policy is not None):
            raise PySparkValueError(
                errorClass="ARGUMENT_REQUIRED",
                messageParameters={
                    "arg_name": "eventTimeExtractor",
                    "condition": needs or "watermarkDelayMs is given",
                },
            )

    # ---- Rows of one key ----

    def test(self, key: Any, input: list[Row]) -> list[Any]:
        """Run a batch with rows of one key.

        Parameters
        ----------
        key : hashable
            The grouping key; the processor sees ``(key,)``.
        input : list of Row
            The rows.

        Returns
        -------
        list of Row
            The processor's output for rows and timers.
        """
        self._uses_pandas = False
        times = [self._event_ms(row) for row in input]
        return self._run_rows(key, [RowPart(row) for row in input], times)

    def testInPandas(self, key: Any, input: pd.DataFrame) -> pd.DataFrame:
        """Run a batch with a frame of one key.

        Parameters
        ----------
        key : hashable
            The grouping key; the processor sees ``(key,)``.
        input : pandas.DataFrame
            The rows.

        Returns
        -------
        pandas.DataFrame
            The processor's output for rows and timers.
        """
        self._uses_pandas = True
        times = [None if self._extractor is None else self._event_ms(row) for _, row in input.iterrows()]
        parts = [FramePart(input, place) for place in range(len(input))]
        result: pd.DataFrame = self._as_result(self._run_rows(key, parts, times))
        return result

    def _run_rows(self, key: Any, parts: Sequence[Any], times: list[int | None]) -> list[Any]:
        self._rows = list(parts)
        columns: list[list[Any]] = [[self._number(key)] * len(parts), list(range(len(parts))), times]
        output = self._run(columns, self._next_time())
        number = self._batches.next_batch - 1
        if self._batches.query.coordinator.watermark_advances(number):
            output += self._run([], self._next_time())
        return output

    # ---- Times ----

    def setProcessingTime(self, currentTimeMs: int) -> Any:
        """Move the processing time forward, and fire the timers that are due.

        Returns
        -------
        list of Row or pandas.DataFrame
            The processor's output.
        """
        if self._mode is not TimeMode.PROCESSING_TIME:
            raise _unsupported("setProcessingTime with TimeMode other than ProcessingTime")
        now_ms = self._batches.last_time.time_ms
        if currentTimeMs <= now_ms:
            raise IllegalArgumentException(
                f"Processing time must move forward. Current: {now_ms} ms, provided: {currentTimeMs} ms."
            )
        return self._as_result(self._run([], BatchTime(currentTimeMs, 0)))

    def setWatermark(self, currentWatermarkMs: int) -> Any:
        """Move the watermark forward, and fire the timers that are due.

        Returns
        -------
        list of Row or pandas.DataFrame
            The processor's output.
        """
        if self._mode is not TimeMode.EVENT_TIME:
            raise _unsupported("setWatermark with TimeMode other than EventTime")
        if self._policy is not None:
            raise _unsupported("setWatermark with watermarkDelayMs, by which the watermark follows from the rows")
        before = self._batches.last_time
        if currentWatermarkMs <= before.watermark_ms:
            raise IllegalArgumentException(
                f"Watermark must move forward. Current: {before.watermark_ms} ms, provided: {currentWatermarkMs} ms."
            )
        return self._as_result(self._run([], BatchTime(before.time_ms, currentWatermarkMs, before.watermark_ms)))

    def _next_time(self) -> BatchTime:
        before = self._batches.last_time
        return BatchTime(before.time_ms, before.watermark_ms, before.watermark_ms)

    def _event_ms(self, row: Any) -> int | None:
        time_ms = None if self._extractor is None else self._extractor(row)
        return None if time_ms is None else int(time_ms)

    # ---- States ----

    def updateValueState(self, stateName: str, key: Any, value: tuple[Any, ...]) -> None:
        """Set the value of a key in a value state."""
        self._require(stateName, StateKind.VALUE)
        self._edit(key, lambda handle: handle.getValueState(stateName, None).update(value))

    def peekValueState(self, stateName: str, key: Any) -> tuple[Any, ...] | None:
        """The value of a key in a value state; None if it has none."""
        self._require(stateName, StateKind.VALUE)
        return self._view.value(stateName, key)

    def updateListState(self, stateName: str, key: Any, value: list[tuple[Any, ...]]) -> None:
        """Set the elements of a key in a list state."""
        self._require(stateName, StateKind.LIST)

        def change(handle: ProcessorHandle) -> None:
            state = handle.getListState(stateName, None)
            state.clear()
            if value:
                state.put(value)

        self._edit(key, change)

    def peekListState(self, stateName: str, key: Any) -> list[tuple[Any, ...]]:
        """The elements of a key in a list state."""
        self._require(stateName, StateKind.LIST)
        return self._view.elements(stateName, key)

    def updateMapState(self, stateName: str, key: Any, value: dict[Any, Any]) -> None:
        """Set the entries of a key in a map state."""
        self._require(stateName, StateKind.MAP)

        def change(handle: ProcessorHandle) -> None:
            state = handle.getMapState(stateName, None, None)
            state.clear()
            for entry, held in value.items():
                state.updateValue(entry, held)

        self._edit(key, change)

    def peekMapState(self, stateName: str, key: Any) -> dict[Any, Any]:
        """The entries of a key in a map state."""
        self._require(stateName, StateKind.MAP)
        return self._view.entries(stateName, key)

    def deleteState(self, stateName: str, key: Any) -> None:
        """Delete a key's values in a state."""
        kind = self._require(stateName, StateKind.VALUE, StateKind.LIST, StateKind.MAP)

        def change(handle: ProcessorHandle) -> None:
            if kind is StateKind.VALUE:
                handle.getValueState(stateName, None).clear()
            elif kind is StateKind.LIST:
                handle.getListState(stateName, None).clear()
            else:
                handle.getMapState(stateName, None, None).clear()

        self._edit(key, change)

    def _require(self, name: str, *kinds: StateKind) -> StateKind:
        state = self._declared.get(name)
        if state is None or state.kind not in kinds:
            raise AssertionError(f"State {name} has not been initialized.")
        return state.kind

    def _edit(self, key: Any, change: Callable[[ProcessorHandle], None]) -> None:
        self._acting = _Editor(self.processor, change)
        try:
            self._rows = []
            # Due timers fire in this batch too; their output belongs to the next call.
            self._held = self._run([[self._number(key)], [None], [None]], self._next_time())
        finally:
            self._acting = self.processor

    def _row_of(self, key: Any) -> KeyedRows:
        return stand_ins([[self._number(key)], [None], [None]])

    # ---- Batches ----

    def _run(self, columns: list[list[Any]], time: BatchTime) -> list[Any]:
        """Run a batch, and return the output held back by :meth:`_edit` and the processor's output."""
        self._outputs = []
        try:
            numbers = self._batches.run(stand_ins(columns), time)
        except ProcessorError as error:
            if error.__cause__ is not None and not isinstance(error.__cause__, StatelogError):
                raise error.__cause__ from None  # the processor's own error, as Spark's tester raises it
            raise
        held, self._held = self._held, []
        return held + [self._outputs[number] for batch in numbers for number in batch.column(0).to_pylist()]

    def _as_result(self, output: list[Any]) -> Any:
        if not self._uses_pandas:
            return output
        import pandas

        return pandas.concat(output, ignore_index=True) if output else pandas.DataFrame()

    def _number(self, key: Any) -> int:
        return self._keys.setdefault(key, len(self._keys))

    def _initial(self, pairs: Sequence[tuple[Any, Any]]) -> KeyedRows:
        self._initial_rows = [RowPart(held) for _, held in pairs]
        return stand_ins([[self._number(key) for key, _ in pairs], list(range(len(pairs))), [None] * len(pairs)])

    def _make_operator(self) -> KeyedOperator:
        keys, states = list(self._keys), bind_states(self._states, _UID)
        event_time = None
        if self._extractor is not None:
            is_late = self._mode is TimeMode.EVENT_TIME
            event_time = EventTime(TIME_COLUMN, drops_late=is_late, inputs=0 if self._policy is None else 1)
        return KeyedOperator(
            uid=_UID,
            processor=self._acting,
            key_codec=NUMBERED_KEY,
            decode_key=lambda data: (keys[NUMBERED_KEY.decode(data)[0]],),
            states=states.kept,
            batch_states=states.batch,
            deleted_states=states.deleted,
            input=KeyedInput([0], ObjectInput(keys, self._rows)),
            output=ObjectOutput(self._outputs),
            timer_values=self._mode.timer_values,
            expired_timer=ExpiredTimerInfo,
            timer_domain=self._mode.domain,
            event_time=event_time,
            initial=KeyedInput([0], ObjectInput(keys, self._initial_rows)),
        )


def _unsupported(operation: str) -> PySparkValueError:
    return PySparkValueError(errorClass="UNSUPPORTED_OPERATION", messageParameters={"operation": operation})


class _Editor:
    """Takes the processor's place in a batch that changes a state from outside."""

    def __init__(self, processor: Any, change: Callable[[ProcessorHandle], None]) -> None:
        self._processor = processor
        self._change = change

    def init(self, handle: ProcessorHandle) -> None:
        self._handle = handle
        self._processor.init(handle)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        self._change(self._handle)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        fired: Iterator[Any] = self._processor.handleExpiredTimer(
            key=key, timerValues=timerValues, expiredTimerInfo=expiredTimerInfo
        )
        return fired

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._processor.handleInitialState(key, initialState, timerValues)

    def close(self) -> None:
        self._processor.close()
