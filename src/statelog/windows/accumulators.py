"""Accumulators: the stored state of a window, a pane or a session, and the results made from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.types import LongType, StructField, StructType

from statelog.aggregates.stored import stored_column
from statelog.convert.types import row_codec
from statelog.errors import ErrorKind, ProcessorError
from statelog.operators.keyed.values import AggregateFunction
from statelog.windows.kernels import Kernel
from statelog.windows.panes import Int64s, RowGroup
from statelog.windows.processor import TimeWindow, WindowContext, WindowHandle, WindowProcessor

ROWS_STATE: Final = "window.rows"
_US_PER_MS: Final = 1000
_COUNTED: Final = StructType([StructField("rows", LongType())])

Row = tuple[Any, ...]


class Contents(ABC):
    """Adds rows to an accumulator, which is one row of state, and makes output rows from accumulators."""

    schema: StructType
    """The accumulator's fields."""

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


@dataclass
class Aggregated(_Accumulated):
    """Ready-made aggregates, their accumulators side by side in one row.

    An accumulator whose fields are all null has no values: it was stored before the aggregate was added to the query.
    """

    schema: StructType
    kernels: list[tuple[Kernel, int | None, slice]]
    """For each aggregate the kernel, the position of its column, and its fields in the row.

    Only a count of rows has no column.
    """

    def added(self, group: RowGroup, held: Row | None) -> Row:
        partial = group.partial(self._partials)
        return partial if held is None else self.merged(held, partial)

    def _partials(self, columns: pa.RecordBatch, starts: Int64s, times_ms: Int64s | None) -> list[Row]:
        fields: list[Sequence[Any]] = []
        for kernel, position, _ in self.kernels:
            if position is None:
                fields.append(np.diff(starts).tolist())
            else:
                fields += kernel.partials(stored_column(columns.column(position)), starts, times_ms)
        return list(zip(*fields, strict=True))

    def merged(self, one: Row, other: Row) -> Row:
        merged: list[Any] = []
        for kernel, _, fields in self.kernels:
            left, right = one[fields], other[fields]
            if _is_null(left):
                merged += right
            elif _is_null(right):
                merged += left
            else:
                merged += kernel.merge(left, right)
        return tuple(merged)

    def _result(self, held: Row) -> Row:
        return tuple([kernel.result(held[fields]) for kernel, _, fields in self.kernels])


def _is_null(held: Row) -> bool:
    return all(value is None for value in held)


@dataclass
class Folded(_Accumulated):
    """The user's aggregate function."""

    schema: StructType
    function: AggregateFunction[Any, Any]
    result_names: list[str]

    def init(self, handle: Any) -> None:
        self._normalize = row_codec(self.schema, "the window's accumulator").normalize

    def added(self, group: RowGroup, held: Row | None) -> Row:
        add, normalize = self.function.add, self._normalize
        accumulator = normalize(self.function.createAccumulator()) if held is None else held
        for row in group.rows():
            accumulator = normalize(add(row, accumulator))
        return accumulator

    def merged(self, one: Row, other: Row) -> Row:
        return self._normalize(self.function.merge(one, other))

    def _result(self, held: Row) -> Row:
        result = self.function.getResult(held)
        if isinstance(result, tuple) and len(result) == len(self.result_names):
            return result
        raise ProcessorError(
            f"getResult() of {type(self.function).__name__} returned {type(result).__name__} {result!r:.80}, which is"
            f" no tuple of the result's fields ({', '.join(self.result_names)}).",
            kind=ErrorKind.OUTPUT_MISMATCH,
            hint="Return a tuple with a value for each; wrap a single one as (value,).",
        )


@dataclass
class Reduced(_Accumulated):
    """Values, reduced to one by the user's function."""

    schema: StructType
    function: Callable[[Row, Row], Row]
    value_of: Callable[[Any], Row]

    def init(self, handle: Any) -> None:
        self._normalize = row_codec(self.schema, "the window's value").normalize

    def added(self, group: RowGroup, held: Row | None) -> Row:
        normalize, value_of, function = self._normalize, self.value_of, self.function
        rows = group.rows()
        value = normalize(value_of(next(rows))) if held is None else held
        for row in rows:
            value = normalize(function(value, normalize(value_of(row))))
        return value

    def merged(self, one: Row, other: Row) -> Row:
        return self._normalize(self.function(one, other))

    def _result(self, held: Row) -> Row:
        return held


@dataclass
class Collected(Contents):
    """Stores each row once, by time and order of arrival; the accumulator is the number of rows."""

    processor: WindowProcessor
    row_schema: StructType
    make_rows: Callable[[list[Row]], list[Any]]
    """Makes the rows that the processor gets from stored ones."""
    schema: StructType = _COUNTED

    def init(self, handle: Any) -> None:
        self._rows = handle.getMapState(ROWS_STATE, "time_ms long, ordinal long", self.row_schema)
        self.processor.init(WindowHandle(handle))

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
        rows = sorted((*entry, row) for entry, row in self._rows.iterator())
        if window is not None:
            rows = rows[bisect_left(rows, (window.start_ms,)) : bisect_left(rows, (window.end_ms,))]
        given = self.make_rows([row for _, _, row in rows])
        return self.processor.process(key, window, iter(given), context)

    def remove(self, start_ms: int, end_ms: int) -> None:
        for time_ms, ordinal in list(self._rows.keys()):
            if start_ms <= time_ms < end_ms:
                self._rows.removeKey((time_ms, ordinal))

    def clear(self) -> None:
        self._rows.clear()

    def close(self) -> None:
        self.processor.close()
