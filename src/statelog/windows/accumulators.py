"""Accumulators: the stored state of a window, a pane or a session, and the results made from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from pyspark.sql.types import StructType

from statelog.convert.types import row_codec
from statelog.errors import ErrorKind, ProcessorError
from statelog.operators.keyed.values import AggregateFunction
from statelog.shown import shown_value
from statelog.windows.panes import RowGroup
from statelog.windows.processor import WindowContext

_US_PER_MS: Final = 1000

Row = tuple[Any, ...]
Bounds = tuple[int, int]
"""Start and end of a window of time, milliseconds."""


class Contents(ABC):
    """Adds rows to an accumulator, which is one row of state, and makes output rows from accumulators."""

    schema: StructType
    """The accumulator's fields."""
    merges: ClassVar[bool] = True
    """Whether the results of a window come from the merged accumulators of its panes."""

    def init(self, handle: Any) -> None:  # noqa: B027 - nothing by default
        """Declare further states."""

    @abstractmethod
    def added(self, group: RowGroup, held: Row | None) -> Row:
        """Add a group's rows to an accumulator; `held` is None if there is none yet."""

    @abstractmethod
    def merged(self, one: Row, other: Row) -> Row:
        """Merge two accumulators; `one` is the earlier."""

    @abstractmethod
    def results(self, key: Row, bounds: Bounds | None, held: Row, context: WindowContext) -> Iterable[Any]:
        """Make a window's output rows from its accumulator, which counts for nothing without :attr:`merges`."""

    def remove(self, start_ms: int, end_ms: int) -> None:  # noqa: B027 - nothing by default
        """Delete the rows of [start_ms, end_ms) that are stored besides the accumulator."""

    def clear(self) -> None:  # noqa: B027 - nothing by default
        """Delete all rows of the key that are stored besides the accumulators."""

    def close(self) -> None:  # noqa: B027 - nothing by default
        """End the batch."""


class _Accumulated(Contents):
    """Stores an accumulator only, and no rows."""

    def results(self, key: Row, bounds: Bounds | None, held: Row, context: WindowContext) -> Iterable[Any]:
        result = self._result(held)
        if bounds is None:
            return [(*key, *result)]
        start_ms, end_ms = bounds
        return [(*key, start_ms * _US_PER_MS, end_ms * _US_PER_MS, *result)]

    @abstractmethod
    def _result(self, held: Row) -> Row:
        """The fields of the result."""


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
            f"getResult() of {type(self.function).__name__} returned {shown_value(result)}, which is"
            f" no tuple of the result's fields ({', '.join(self.result_names)}).",
            kind=ErrorKind.OUTPUT_MISMATCH,
            hint="Return a tuple with a value for each; wrap a single one as (value,).",
        )


@dataclass
class Reduced(_Accumulated):
    """Values, reduced to one by the user's function."""

    schema: StructType
    function: Callable[[Row, Row], Row]
    value_of: Callable[[Any], Row] | None
    """Makes the value of a row; None if it consists of columns."""
    positions: tuple[int, ...]
    """These columns."""
    are_normal: bool
    """Whether they have the very types of the value."""

    def init(self, handle: Any) -> None:
        self._normalize = row_codec(self.schema, "the window's value").normalize

    def added(self, group: RowGroup, held: Row | None) -> Row:
        normalize, function = self._normalize, self.function
        values = group.tuples(self.positions) if self.value_of is None else map(self.value_of, group.rows())
        if not self.are_normal:
            values = map(normalize, values)
        value = next(values) if held is None else held
        for other in values:
            value = normalize(function(value, other))
        return value

    def merged(self, one: Row, other: Row) -> Row:
        return self._normalize(self.function(one, other))

    def _result(self, held: Row) -> Row:
        return held
