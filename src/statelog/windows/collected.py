"""The contents of windows for the user's processor: all their rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from pyspark.sql.types import LongType, StructField, StructType

from statelog.history.window_settings import ROWS_STATE
from statelog.windows.accumulators import Bounds, Contents
from statelog.windows.codec import GivenRows
from statelog.windows.panes import RowGroup
from statelog.windows.processor import TimeWindow, WindowContext, WindowHandle, WindowProcessor

_COUNTED: Final = StructType([StructField("rows", LongType())])

Row = tuple[Any, ...]


@dataclass
class Collected(Contents):
    """Stores each row once, by time and order of arrival; the accumulator is the number of rows."""

    processor: WindowProcessor
    row_schema: StructType
    make_rows: GivenRows
    are_shared: bool
    """Whether a row may belong to several windows."""
    schema: StructType = _COUNTED

    merges: ClassVar[bool] = False

    def init(self, handle: Any) -> None:
        self._rows = handle.getTimedRows(
            ROWS_STATE, "time_ms long, ordinal long", self.row_schema, self.make_rows, self.are_shared
        )
        self.processor.init(WindowHandle(handle))

    def added(self, group: RowGroup, held: Row | None) -> Row:
        first: int = 0 if held is None else held[0]
        self._rows.add(group.batch, group.start, group.end, first, group.first_ms or 0)
        return (first + len(group),)

    def merged(self, one: Row, other: Row) -> Row:
        return (one[0] + other[0],)

    def results(self, key: Row, bounds: Bounds | None, held: Row, context: WindowContext) -> Iterable[Any]:
        if bounds is None:
            return self.processor.process(key, None, self._rows.between(), context)
        return self.processor.process(key, TimeWindow(*bounds), self._rows.between(*bounds), context)

    def remove(self, start_ms: int, end_ms: int) -> None:
        self._rows.remove(start_ms, end_ms)

    def clear(self) -> None:
        self._rows.clear()

    def close(self) -> None:
        self.processor.close()
