"""What a task has to know of windows beside the operator itself: how it is given rows, and how it returns them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from statelog.spark.input import RowInput
from statelog.spark.types import arrow_type, row_maker
from statelog.state.event_time import EventTime
from statelog.windows.output import WindowOutput
from statelog.windows.rows import Cut, WindowInput
from statelog.windows.stored import stored_arrow_type, to_given

__all__ = ["GivenRows", "WindowForm"]


@dataclass(frozen=True)
class WindowForm:
    """How a window operator is given rows, and returns them.

    Parameters
    ----------
    event_time : EventTime or None
        Where the rows have their event time; None in processing time and for counted windows.
    cut : Cut or None
        Where the rows of a key are cut.
    kept : list of int
        Output columns whose values come as they are kept.
    returns_late : bool
        Whether the last output column holds late rows.
    """

    event_time: EventTime | None
    cut: Cut | None
    kept: list[int]
    returns_late: bool

    def input(self, columns: list[str]) -> WindowInput:
        """The codec of input rows with these columns."""
        return WindowInput(RowInput(columns), self.event_time, self.cut)

    def output(self, schema: StructType) -> WindowOutput:
        """The codec of output rows of a schema."""
        return WindowOutput(schema, self.kept, returns_late=self.returns_late)


class GivenRows:
    """Makes the rows that a user sees from stored ones.

    Parameters
    ----------
    schema : StructType
        The input columns.
    zone : str
        The session's time zone, which timestamps come in.
    """

    def __init__(self, schema: StructType, zone: str) -> None:
        self._schema = schema
        self._zone = zone

    def __call__(self, rows: list[tuple[Any, ...]]) -> list[Any]:
        columns: list[list[Any]] = [list(values) for values in zip(*rows, strict=True)]
        for index, kind in self._converted.items():
            column = to_given(pa.array(columns[index], stored_arrow_type(kind)), kind)
            columns[index] = column.to_pylist()
        made: list[Any] = self._make(columns)
        return made

    @cached_property
    def _make(self) -> Any:
        return row_maker(self._schema.names)

    @cached_property
    def _converted(self) -> dict[int, pa.DataType]:
        """The columns that are stored in another type, with their own."""
        kinds = [_in_zone(arrow_type(field.dataType, field.name), self._zone) for field in self._schema]
        return {index: kind for index, kind in enumerate(kinds) if stored_arrow_type(kind) != kind}


def _in_zone(kind: pa.DataType, zone: str) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp("us", zone)
    return pa.list_(_in_zone(kind.value_type, zone)) if pa.types.is_list(kind) else kind
