"""What a task has to know of windows beside the operator itself: how it is given rows, and how it returns them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, ClassVar, Final
from zoneinfo import ZoneInfo

from pyspark.sql.types import ArrayType, DataType, StructType, TimestampNTZType, TimestampType

from statelog.convert.input import RowInput
from statelog.convert.python_values import row_maker
from statelog.log.entry import Settings
from statelog.operators.event_time import EventTime
from statelog.windows.output import WindowOutput
from statelog.windows.panes import Cut, WindowInput

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NAIVE_EPOCH: Final = datetime(1970, 1, 1)


@dataclass(frozen=True)
class WindowCodecs:
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
    settings : dict
        What the windows' state depends on.
    """

    event_time: EventTime | None
    cut: Cut | None
    kept: list[int]
    returns_late: bool
    settings: Settings

    drops_late: ClassVar[bool] = False
    """A late row may belong to a window that is still open."""
    batch_watermark_ms: ClassVar[int] = (1 << 63) - 1
    """All rows have come, so every window is complete."""

    def input(self, columns: list[str]) -> WindowInput:
        """The codec of input rows with these columns."""
        return WindowInput(RowInput(columns), self.event_time, self.cut)

    def output(self, schema: StructType, zone: str, uid: str) -> WindowOutput:
        """The codec of output rows of a schema; times without a zone are in the process's."""
        return WindowOutput(schema, self.kept, returns_late=self.returns_late, uid=uid)


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
        columns: list[Any] = list(zip(*rows, strict=True))
        for index, convert in self._converted.items():
            columns[index] = [None if value is None else convert(value) for value in columns[index]]
        made: list[Any] = self._make(columns)
        return made

    @cached_property
    def _make(self) -> Any:
        return row_maker(self._schema.names)

    @cached_property
    def _converted(self) -> dict[int, Callable[[Any], Any]]:
        """How values are made of the columns that are stored as something else."""
        converters = {
            index: _converter(field.dataType, ZoneInfo(self._zone)) for index, field in enumerate(self._schema)
        }
        return {index: convert for index, convert in converters.items() if convert is not None}


def _converter(kind: DataType, zone: ZoneInfo) -> Callable[[Any], Any] | None:
    if isinstance(kind, TimestampType):
        return lambda us: (_EPOCH + timedelta(microseconds=us)).astimezone(zone)
    if isinstance(kind, TimestampNTZType):
        return lambda us: _NAIVE_EPOCH + timedelta(microseconds=us)
    of_element = _converter(kind.elementType, zone) if isinstance(kind, ArrayType) else None
    if of_element is None:
        return None
    return lambda values: [None if value is None else of_element(value) for value in values]
