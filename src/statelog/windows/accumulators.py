"""Accumulators: the stored state of a window, a pane or a session, and the results made from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, Final

from statelog.errors import ErrorKind, ProcessorError
from statelog.operators.keyed.values import AggregateFunction
from statelog.runs.values import RowCodec
from statelog.windows.panes import Partials, RowGroup
from statelog.windows.processor import TimeWindow, WindowContext, WindowHandle, WindowProcessor

ROWS_STATE: Final = "window.rows"
_US_PER_MS: Final = 1000

Row = tuple[Any, ...]
Codecs = Callable[[Any, str], RowCodec]
"""Makes the codec of a schema; the text names the schema's owner in messages."""


class Contents(ABC):
    """Adds rows to an accumulator, which is one row of state, and makes output rows from accumulators."""

    schema: Any
    """The accumulator's fields, a ``StructType``."""

    def init(self, handle: Any) -> None:  # noqa: B027 - nothing by default
        """Declare further states."""

    @abstractmethod
    def added(self, group: RowGroup, held: Row | None) -> Row:
        """Add a group's rows to an accumulator; `held` is None if there is none yet."""

    @abstractmethod
    def merged(self, one: Row, other: Row) -> Row:
        """Merge two accumulators; `one` is the earlier."""

    @abstractmethod
    def results(
        self, key: Row, window: TimeWindow | None, held: Sequence[Row], context: WindowContext
    ) -> Iterable[Any]:
        """Make a window's output rows from the accumulators of its panes, in order of time."""

    def remove(self, start_ms: int, end_ms: int) -> None:  # noqa: B027 - nothing by default
        """Delete the rows of [start_ms, end_ms) that are stored besides the accumulator."""

    def clear(self) -> None:  # noqa: B027 - nothing by default
        """Delete all rows of the key that are stored besides the accumulators."""

    def close(self) -> None:  # noqa: B027 - nothing by default
        """End the batch."""


class _Accumulated(Contents):
    """Stores an accumulator only, and no rows."""

    def results(
        self, key: Row, window: TimeWindow | None, held: Sequence[Row], context: WindowContext
    ) -> Iterable[Any]:
        result = self._result(held[0] if len(held) == 1 else reduce(self.merged, held))
        if window is None:
            return [(*key, *result)]
        return [(*key, window.start_ms * _US_PER_MS, window.end_ms * _US_PER_MS, *result)]

    @abstractmethod
    def _result(self, held: Row) -> Row:
        """The fields of the result."""


class Aggregation(Partials, ABC):
    """Aggregates columns into accumulators that can be merged."""

    schema: Any

    @abstractmethod
    def merge(self, one: Row, other: Row) -> Row:
        """Merge two accumulators; `one` is the earlier."""

    @abstractmethod
    def result(self, held: Row) -> Row:
        """The fields of the result."""


class Aggregated(_Accumulated):
    """Ready-made aggregates."""

    def __init__(self, aggregation: Aggregation) -> None:
        self.schema = aggregation.schema
        self._aggregation = aggregation

    def added(self, group: RowGroup, held: Row | None) -> Row:
        partial = group.partial(self._aggregation)
        return partial if held is None else self._aggregation.merge(held, partial)

    def merged(self, one: Row, other: Row) -> Row:
        return self._aggregation.merge(one, other)

    def _result(self, held: Row) -> Row:
        return self._aggregation.result(held)


class Folded(_Accumulated):
    """The user's aggregate function."""

    def __init__(
        self, function: AggregateFunction[Any, Any], schema: Any, result_names: Sequence[str], make_codec: Codecs
    ) -> None:
        self.schema = schema
        self._function = function
        self._result_names = result_names
        self._make_codec = make_codec

    def init(self, handle: Any) -> None:
        self._normalize = self._make_codec(self.schema, "the window's accumulator").normalize

    def added(self, group: RowGroup, held: Row | None) -> Row:
        add, normalize = self._function.add, self._normalize
        accumulator = normalize(self._function.createAccumulator()) if held is None else held
        for row in group.rows():
            accumulator = normalize(add(row, accumulator))
        return accumulator

    def merged(self, one: Row, other: Row) -> Row:
        return self._normalize(self._function.merge(one, other))

    def _result(self, held: Row) -> Row:
        result = self._function.getResult(held)
        if isinstance(result, tuple) and len(result) == len(self._result_names):
            return result
        raise ProcessorError(
            f"getResult() of {type(self._function).__name__} returned {type(result).__name__} {result!r:.80}, which is"
            f" no tuple of the result's fields ({', '.join(self._result_names)}).",
            kind=ErrorKind.OUTPUT_MISMATCH,
            hint="Return a tuple with a value for each; wrap a single one as (value,).",
        )


class Reduced(_Accumulated):
    """Values, reduced to one by the user's function."""

    def __init__(
        self,
        function: Callable[[Row, Row], Row],
        schema: Any,
        value_of: Callable[[Any], Row],
        make_codec: Codecs,
    ) -> None:
        self.schema = schema
        self._function = function
        self._value_of = value_of
        self._make_codec = make_codec

    def init(self, handle: Any) -> None:
        self._normalize = self._make_codec(self.schema, "the window's value").normalize

    def added(self, group: RowGroup, held: Row | None) -> Row:
        normalize, value_of, function = self._normalize, self._value_of, self._function
        rows = group.rows()
        value = normalize(value_of(next(rows))) if held is None else held
        for row in rows:
            value = normalize(function(value, normalize(value_of(row))))
        return value

    def merged(self, one: Row, other: Row) -> Row:
        return self._normalize(self._function(one, other))

    def _result(self, held: Row) -> Row:
        return held


class Collected(Contents):
    """Stores each row once, by time and order of arrival; the accumulator is the number of rows."""

    def __init__(
        self, processor: WindowProcessor, schema: Any, row_schema: Any, make_rows: Callable[[list[Row]], list[Any]]
    ) -> None:
        self.schema = schema
        self._row_schema = row_schema
        self._processor = processor
        self._make_rows = make_rows

    def init(self, handle: Any) -> None:
        self._rows = handle.getMapState(ROWS_STATE, "time_ms long, ordinal long", self._row_schema)
        self._processor.init(WindowHandle(handle))

    def added(self, group: RowGroup, held: Row | None) -> Row:
        first = 0 if held is None else held[0]
        put = self._rows.updateValue
        for ordinal, (time_ms, row) in enumerate(zip(group.times_ms(), group.stored_rows(), strict=True), first):
            put((time_ms, ordinal), row)
        return (first + len(group),)

    def merged(self, one: Row, other: Row) -> Row:
        return (one[0] + other[0],)

    def results(
        self, key: Row, window: TimeWindow | None, held: Sequence[Row], context: WindowContext
    ) -> Iterable[Any]:
        rows = self._in_order()
        if window is not None:
            rows = rows[bisect_left(rows, (window.start_ms,)) : bisect_left(rows, (window.end_ms,))]
        return self._processor.process(key, window, self._as_given(rows), context)

    def _in_order(self) -> list[Row]:
        """All rows of the key as (time, ordinal, row), sorted."""
        return sorted((*entry, row) for entry, row in self._rows.iterator())

    def _as_given(self, rows: list[Row]) -> Iterator[Any]:
        return iter(self._make_rows([row for _, _, row in rows]))

    def remove(self, start_ms: int, end_ms: int) -> None:
        for time_ms, ordinal in list(self._rows.keys()):
            if start_ms <= time_ms < end_ms:
                self._rows.removeKey((time_ms, ordinal))

    def clear(self) -> None:
        self._rows.clear()

    def close(self) -> None:
        self._processor.close()
