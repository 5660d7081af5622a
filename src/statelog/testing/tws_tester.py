"""The interface of Spark's TwsTester, on the code that a query runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final
from weakref import finalize

import pyarrow as pa
from pyspark.errors import IllegalArgumentException, PySparkValueError
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo
from pyspark.sql.types import Row

from statelog.convert.ddl import parse_ddl
from statelog.convert.times import TimeMode
from statelog.coordinator.batch import BatchTime
from statelog.errors import ProcessorError, StatelogError
from statelog.numbers import US_PER_MS, Duration, in_milliseconds
from statelog.operators.event_time import EventTime, WatermarkPolicy
from statelog.operators.keyed.grouping import KeyChunk
from statelog.operators.keyed.handle import ProcessorHandle
from statelog.operators.keyed.operator import KeyedInput, KeyedOperator, KeyedRows, Processor
from statelog.options import Options
from statelog.runs.key_groups import row_hashes
from statelog.runs.keys import KeyCodec
from statelog.runs.schema import StateKind
from statelog.spark.plan.checks import check_output_mode
from statelog.spark.plan.declare import declare_keyed_states_of
from statelog.spark.plan.keyed_plan import time_domains
from statelog.spark.plan.states import bind_states
from statelog.testing.keyed import LocalKeyedOperator
from statelog.testing.query import LocalQuery, MicroBatches, discard, new_directory
from statelog.testing.state_view import StateView

if TYPE_CHECKING:
    import pandas as pd

_UID: Final = "tester"
_NUMBERED_KEY: Final = KeyCodec(pa.schema([("key", pa.int64())]))
_TIME_COLUMN: Final = 2

_Take = Callable[[list[int]], list[Any]]
"""Returns what the processor gets for some rows of a call, from their numbers: rows, or one frame."""


class TwsTester:
    """Tests a stateful processor key by key, as ``pyspark.sql.streaming.TwsTester`` does; import this one instead.

    A call of :meth:`test` is a micro-batch with the rows of one key, run by statelog's own tasks: states are stored
    according to their schemas, in a changelog in a temporary directory, and read back from it. The processor gets the
    test's own key and row objects, which need no schema; the values of its states must fit their schemas.

    In addition to what Spark's tester does, entries expire by their TTL when the processing time moves forward, and
    with `watermarkDelay` the watermark is computed from the rows. Where Spark's tester differs from a query, this one
    behaves like a query:

    - A due timer fires in the same batch, so :meth:`test` returns its output too. A timer may be registered for a time
      in the past.
    - If all rows of a call are late, or there are none, the processor is not called.
    - A TTL needs the time mode that Spark requires for it, values must fit their schemas, and an empty list cannot be
      put.
    - ``init`` and ``close`` are called for every batch, on the test's single processor. ``handleExpiredTimer`` gets its
      arguments by name.

    Parameters
    ----------
    processor : StatefulProcessor
        The processor; it is not copied, so that a test can inspect it.
    initialStateRow : list of (key, Row), optional
        Initial state of a processor that takes rows.
    initialStatePandas : list of (key, pandas.DataFrame), optional
        Initial state of a processor that takes frames.
    timeMode : {"None", "ProcessingTime", "EventTime"}
        As for ``transformWithState``.
    outputMode : str
        As for ``transformWithState``.
    eventTimeExtractor : callable, optional
        The event time of a row, milliseconds since the Unix epoch; required with timeMode "EventTime".
    watermarkDelay : int, timedelta or str, optional
        Makes the watermark depend on the rows: it is the largest event time minus this delay, which is a number of
        milliseconds, a timedelta, or words such as "10 seconds". The watermark moves after :meth:`test`; as in a query,
        a batch without rows follows and fires the timers that are due.
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
        watermarkDelay: Duration | None = None,
        options: Options | None = None,
    ) -> None:
        self.processor = processor
        self._mode = TimeMode.parse(timeMode)
        check_output_mode(outputMode)
        self._extractor = eventTimeExtractor
        self._policy = (
            None
            if watermarkDelay is None
            else WatermarkPolicy(in_milliseconds(watermarkDelay, "watermarkDelay", least=0))
        )
        self._require_arguments(initialStateRow, initialStatePandas)
        self._uses_pandas = initialStatePandas is not None
        self._keys: dict[Any, int] = {}
        self._take: _Take = lambda numbers: []
        self._outputs: list[Any] = []
        self._held: list[Any] = []
        self._acting: Processor = processor
        self._declared = declare_keyed_states_of(processor, _UID, time_domains(self._mode, self._policy), parse_ddl)
        initial = initialStatePandas if initialStateRow is None else initialStateRow
        self._initial: list[Any] = [] if initial is None else [held for _, held in initial]
        keys = [] if initial is None else [key for key, _ in initial]
        operator = LocalKeyedOperator(
            uid=_UID,
            make=self._make_operator,
            watermark=self._policy,
            initial=None if initial is None else self._stand_ins(keys, range(len(keys)), [None] * len(keys)),
        )
        query = LocalQuery(operator, new_directory(), options or Options())
        finalize(self, discard, query.directory, query.stores)
        self._batches = MicroBatches(query, parallelism=1)
        self._view = StateView(self._make_operator, self._declared.states, self._mode, self._batches, self._row_of)
        if initial is not None:
            self._held += self._run(self._stand_ins(), self._batches.last_time)

    def _require_arguments(self, rows: object, frames: object) -> None:
        if rows is not None and frames is not None:
            raise ValueError("Cannot specify both Row and Pandas initial states.")
        needs = "timeMode is EventTime" if self._mode is TimeMode.EVENT_TIME else ""
        if self._extractor is None and (needs or self._policy is not None):
            raise PySparkValueError(
                errorClass="ARGUMENT_REQUIRED",
                messageParameters={
                    "arg_name": "eventTimeExtractor",
                    "condition": needs or "watermarkDelay is given",
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
        return self._run_rows(key, times, lambda numbers: [input[number] for number in numbers])

    def testInPandas(self, key: Any, input: pd.DataFrame) -> pd.DataFrame:
        """Run a batch with a frame of one key: like :meth:`test`, for a processor that takes and returns frames."""
        self._uses_pandas = True
        times = [self._event_ms(row) for _, row in input.iterrows()]

        def take(numbers: list[int]) -> list[Any]:
            return [input.iloc[numbers].reset_index(drop=True)] if numbers else []

        result: pd.DataFrame = self._as_result(self._run_rows(key, times, take))
        return result

    def _run_rows(self, key: Any, times: list[int | None], take: _Take) -> list[Any]:
        self._take = take
        output = self._run(self._stand_ins([key] * len(times), range(len(times)), times), self._next_time())
        number = self._batches.next_batch - 1
        query = self._batches.query
        if query.coordinator.watermark_advances(query.operator.uid, number):
            output += self._run(self._stand_ins(), self._next_time())
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
        return self._as_result(self._run(self._stand_ins(), BatchTime(currentTimeMs, 0)))

    def setWatermark(self, currentWatermarkMs: int) -> Any:
        """Move the watermark forward, and fire the timers that are due; returns like :meth:`setProcessingTime`."""
        if self._mode is not TimeMode.EVENT_TIME:
            raise _unsupported("setWatermark with TimeMode other than EventTime")
        if self._policy is not None:
            raise _unsupported("setWatermark with watermarkDelay, by which the watermark follows from the rows")
        before = self._batches.last_time
        if currentWatermarkMs <= before.watermark_ms:
            raise IllegalArgumentException(
                f"Watermark must move forward. Current: {before.watermark_ms} ms, provided: {currentWatermarkMs} ms."
            )
        return self._as_result(
            self._run(self._stand_ins(), BatchTime(before.time_ms, currentWatermarkMs, before.watermark_ms))
        )

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
        clear: dict[StateKind, Callable[[ProcessorHandle], None]] = {
            StateKind.VALUE: lambda handle: handle.getValueState(stateName, None).clear(),
            StateKind.LIST: lambda handle: handle.getListState(stateName, None).clear(),
            StateKind.MAP: lambda handle: handle.getMapState(stateName, None, None).clear(),
        }
        self._edit(key, clear[self._require(stateName, *clear)])

    def _require(self, name: str, *kinds: StateKind) -> StateKind:
        state = self._declared.states.get(name)
        if state is None or state.kind not in kinds:
            raise AssertionError(f"State {name} has not been initialized.")
        return state.kind

    def _edit(self, key: Any, change: Callable[[ProcessorHandle], None]) -> None:
        self._acting = _Editor(self.processor, change)
        try:
            # Due timers fire in this batch too; their output belongs to the next call.
            self._held = self._run(self._row_of(key), self._next_time())
        finally:
            self._acting = self.processor

    def _row_of(self, key: Any) -> KeyedRows:
        return self._stand_ins([key], [None], [None])

    # ---- Batches ----

    def _stand_ins(
        self, keys: Sequence[Any] = (), rows: Sequence[int | None] = (), times_ms: Sequence[int | None] = ()
    ) -> KeyedRows:
        """Rows that stand for the test's own objects: they hold the number of the key and that of the row."""
        numbers = pa.array([self._keys.setdefault(key, len(self._keys)) for key in keys], pa.int64())
        times_us = [None if time_ms is None else time_ms * US_PER_MS for time_ms in times_ms]
        columns = [numbers, pa.array(rows, pa.int64()), pa.array(times_us, pa.timestamp("us"))]
        return KeyedRows(pa.RecordBatch.from_arrays(columns, ["key", "row", "time"]), row_hashes([numbers]))

    def _run(self, data: KeyedRows, time: BatchTime) -> list[Any]:
        """Run a batch, and return the output held back by :meth:`_edit` and the processor's output."""
        self._outputs = []
        try:
            numbers = self._batches.run(data, time)
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

    def _make_operator(self) -> KeyedOperator:
        keys, states = list(self._keys), bind_states(self._declared.by_name(), _UID)
        event_time = None
        if self._extractor is not None:
            is_late = self._mode is TimeMode.EVENT_TIME
            event_time = EventTime(_TIME_COLUMN, drops_late=is_late, inputs=0 if self._policy is None else 1)
        return KeyedOperator(
            uid=_UID,
            processor=self._acting,
            key_codec=_NUMBERED_KEY,
            decode_keys=lambda found: [(keys[number],) for (number,) in _NUMBERED_KEY.decode_all(found)],
            states=states.kept,
            batch_states=states.batch,
            deleted_states=states.deleted,
            input=KeyedInput([0], _ObjectInput(keys, self._take)),
            output=_ObjectOutput(self._outputs),
            timer_values=self._mode.timer_values,
            expired_timer=ExpiredTimerInfo,
            timer_domain=self._mode.domain,
            event_time=event_time,
            initial=KeyedInput([0], _ObjectInput(keys, lambda numbers: [self._initial[number] for number in numbers])),
        )


def _unsupported(operation: str) -> PySparkValueError:
    return PySparkValueError(errorClass="UNSUPPORTED_OPERATION", messageParameters={"operation": operation})


class _ObjectInput:
    """An input codec that gives the processor the objects that rows stand for."""

    def __init__(self, keys: list[Any], take: _Take) -> None:
        self._keys = keys
        self._take = take

    def keys(self, columns: list[pa.Array]) -> list[tuple[Any, ...]]:
        return [(self._keys[number],) for number in columns[0].to_pylist()]

    def by_key(self, window: KeyChunk) -> list[Iterator[Any]]:
        window = window.joined()
        numbers = window.rows.column(1).to_pylist()
        return [
            iter(self._take([number for number in numbers[start:end] if number is not None]))
            for start, end in pairwise(window.starts.tolist())
        ]


class _ObjectOutput:
    """An output codec that collects the processor's results in a list, and returns their numbers."""

    hold = None

    def __init__(self, outputs: list[Any]) -> None:
        self._outputs = outputs

    def encode(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> pa.RecordBatch:
        first = len(self._outputs)
        self._outputs.extend(rows)
        return pa.RecordBatch.from_pydict({"number": pa.array(range(first, len(self._outputs)), pa.int64())})


class _Editor:
    """Replaces the processor in a batch that changes a state from outside."""

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
