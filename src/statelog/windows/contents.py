"""What windows hold: ready-made aggregates, or accumulators of the user's functions. Rows are in `rows`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from statelog.aggregates.accumulators import Accumulators
from statelog.aggregates.groups import Groups
from statelog.aggregates.kernels import Columns
from statelog.aggregates.operator import key_named
from statelog.convert.input import RowInput
from statelog.convert.output import RowOutput
from statelog.convert.types import row_codec
from statelog.errors import ErrorKind, ProcessorError
from statelog.numbers import US_PER_MS
from statelog.operators.keyed.column_caller import KeyFailure
from statelog.operators.keyed.columns import Mask
from statelog.operators.keyed.cursor import Row
from statelog.operators.keyed.indexing import Int64s
from statelog.operators.keyed.outputs import rare_garbage_collection
from statelog.operators.keyed.values import AggregateFunction
from statelog.runs.byte_slices import BUDGET, gather_rows, in_parts
from statelog.shown import shown_key, shown_value
from statelog.windows.processor import WindowContext

_CHUNK_ROWS: Final = 65_536
"""So many rows become Python objects at once."""

KeyOf = Callable[[int], Row]
"""The key of a group, for messages."""


@dataclass(frozen=True)
class TimedRows:
    """Input rows with their keys and times."""

    parts: Sequence[pa.RecordBatch]
    """One batch, unless a single key has more rows than fit into one."""
    owners: Int64s
    """The position of each row's key in the chunk."""
    times_ms: Int64s
    has_time: Mask

    def __len__(self) -> int:
        return len(self.owners)

    def take(self, rows: Int64s | Mask) -> TimedRows:
        """Some of the rows, given by position or mask."""
        picked = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows.astype(np.int64, copy=False)
        if len(picked) == len(self) and (picked == np.arange(len(self))).all():
            return self
        parts = list(gather_rows(self.parts, picked, BUDGET.input_bytes))
        return TimedRows(parts, self.owners[picked], self.times_ms[picked], self.has_time[picked])

    def by_part(self, *columns: Int64s) -> Iterator[tuple[Any, ...]]:
        """Each batch of rows, with its part of columns of numbers."""
        start = 0
        for part in self.parts:
            yield (part, *[column[start : start + part.num_rows] for column in columns])
            start += part.num_rows


@dataclass(frozen=True)
class Returned:
    """Windows that are returned, by key and then by time."""

    key_columns: Columns
    """The grouping columns of the chunk's keys."""
    owners: Int64s
    """The position of each window's key."""
    held: Columns
    """Their accumulators, as :meth:`Contents.opened` makes them."""
    bounds: Sequence[Int64s]
    """Their starts and ends; of count windows, which have none, their numbers among those of their key."""
    has_bounds: bool
    context: WindowContext
    keys: Callable[[], list[Row]]
    """Makes the key of each, as the user sees it."""
    key_of: KeyOf

    def columns(self, start: int = 0, end: int | None = None) -> Columns:
        """The grouping columns of some windows, and their bounds if they have any."""
        part = slice(start, end)
        picked = pa.array(self.owners[part])
        columns = [column.take(picked) for column in self.key_columns]
        if self.has_bounds:
            times = [pa.array(at_ms[part] * US_PER_MS) for at_ms in self.bounds]
            columns += [at_us.cast(pa.timestamp("us", "UTC")) for at_us in times]
        return columns


class Contents(ABC):
    """Keeps accumulators of groups of rows, each a row of state, and makes output columns from them; picklable."""

    schema: StructType
    """The accumulator's fields."""
    depends_on_arrival: bool = True
    """Whether the result depends on the order in which rows are added."""
    merges: ClassVar[bool] = True
    """Whether the results of a window come from the merged accumulators of its panes."""

    def init(self, handle: Any) -> None:  # noqa: B027 - nothing by default
        """Declare further states."""

    def begin(self) -> None:  # noqa: B027 - nothing by default
        """Start on a new key chunk."""

    @abstractmethod
    def add(self, stored: Columns, known: Int64s, rows: TimedRows, groups: Groups, key_of: KeyOf) -> Columns:
        """The accumulators of groups; `known` are those that begin with the stored ones, and rows follow in order."""

    def opened(self, held: Columns) -> Columns:
        """Accumulators as :meth:`merge` takes and returns them, until the next call."""
        return held

    @abstractmethod
    def merge(self, held: Columns, groups: Groups, key_of: KeyOf) -> Columns:
        """Merge accumulators of each group, in their order; each group has some."""

    @abstractmethod
    def stored(self, held: Columns, key_of: KeyOf) -> Columns:
        """Opened accumulators as the state has them."""

    @abstractmethod
    def results(self, windows: Returned) -> Iterator[Columns]:
        """The output columns of windows, from their opened accumulators; these count for nothing without `merges`."""

    def remove(self, owners: Int64s, before_ms: Int64s) -> None:  # noqa: B027 - nothing by default
        """Delete what is stored for keys besides accumulators, up to a time for each."""

    def clear(self, owners: Int64s) -> None:  # noqa: B027 - nothing by default
        """Delete all that is stored for keys besides accumulators."""

    def close(self) -> None:  # noqa: B027 - nothing by default
        """End the batch."""


@dataclass
class Sums(Contents):
    """Ready-made aggregates."""

    accumulators: Accumulators
    has_times: bool
    """Whether times order rows where no column does; otherwise it is their order of arrival."""

    def __post_init__(self) -> None:
        self.schema = self.accumulators.schema
        self.depends_on_arrival = self.accumulators.depends_on_arrival

    def add(self, stored: Columns, known: Int64s, rows: TimedRows, groups: Groups, key_of: KeyOf) -> Columns:
        held, before = stored, known
        times_ms = rows.times_ms if self.has_times else np.zeros_like(rows.times_ms)
        for part, index, times in rows.by_part(groups.index, times_ms):
            lifted = self.accumulators.lift(part, pa.array(times))
            if len(before):
                lifted = [pa.concat_arrays(list(pair)) for pair in zip(held, lifted, strict=True)]
                index = np.concatenate([before, index])
            held = self.merge(lifted, Groups(index, groups.count), key_of)
            if len(rows.parts) > 1 and part is not rows.parts[-1]:
                before = np.unique(index)
                held = [column.take(pa.array(before)) for column in held]
        return held

    def merge(self, held: Columns, groups: Groups, key_of: KeyOf) -> Columns:
        with key_named(key_of):
            return self.accumulators.reduce(held, groups)

    def stored(self, held: Columns, key_of: KeyOf) -> Columns:
        return held

    def results(self, windows: Returned) -> Iterator[Columns]:
        with key_named(windows.key_of):
            yield [*windows.columns(), *self.accumulators.results(windows.held).columns]


class _Objects(Contents):
    """Accumulators that are tuples of Python objects while functions work on them.

    Opened accumulators are one column: their places in a list.
    """

    method: ClassVar[str]
    """What users call; messages name it."""
    subject: ClassVar[str]
    input_names: list[str]

    def init(self, handle: Any) -> None:
        self._codec = row_codec(self.schema, self.subject)
        self._input = RowInput(self.input_names)
        self._open: list[Row] = []

    def add(self, stored: Columns, known: Int64s, rows: TimedRows, groups: Groups, key_of: KeyOf) -> Columns:
        before: list[Row | None] = [None] * groups.count
        if len(known):
            for group, held in zip(known.tolist(), self._decoded(stored), strict=True):
                before[group] = held
        made: list[Row] = []
        with rare_garbage_collection(), _failing_at(made, key_of, self.method):
            made.extend(map(self._added, before, self._by_group(rows, groups)))
        return self._codec.encode(made, _name(key_of))

    def _by_group(self, rows: TimedRows, groups: Groups) -> Iterator[Iterator[Any]]:
        """The values of each group's rows."""
        order, sizes = groups.order, groups.sizes.tolist()
        chunks = (
            self._values(part)
            for start in range(0, len(order), _CHUNK_ROWS)
            for part in gather_rows(rows.parts, order[start : start + _CHUNK_ROWS], BUDGET.input_bytes)
        )
        values = chain.from_iterable(chunks)
        return (islice(values, size) for size in sizes)

    def opened(self, held: Columns) -> Columns:
        self._open = self._decoded(held)
        return [pa.array(np.arange(len(self._open)))]

    def merge(self, held: Columns, groups: Groups, key_of: KeyOf) -> Columns:
        opened, first = self._open, len(self._open)
        places = iter(held[0].to_numpy()[groups.order].tolist())
        made: list[Row] = []
        with _failing_at(made, key_of, self.method):
            for size in groups.sizes.tolist():
                merged = opened[next(places)]
                for place in islice(places, size - 1):
                    merged = self._merged(merged, opened[place])
                made.append(merged)
        opened += made
        return [pa.array(np.arange(first, len(opened)))]

    def stored(self, held: Columns, key_of: KeyOf) -> Columns:
        return self._codec.encode(self._of(held), _name(key_of))

    def _of(self, held: Columns) -> list[Row]:
        return [self._open[place] for place in held[0].to_pylist()]

    def _decoded(self, held: Columns) -> list[Row]:
        return self._codec.decode(pa.RecordBatch.from_arrays(held, schema=self._codec.schema))

    @abstractmethod
    def _values(self, rows: pa.RecordBatch) -> Iterable[Any]:
        """What of rows is added."""

    @abstractmethod
    def _added(self, held: Row | None, values: Iterator[Any]) -> Row:
        """Add values to an accumulator; None if there is none yet."""

    @abstractmethod
    def _merged(self, one: Row, other: Row) -> Row:
        """Merge two accumulators; `one` is the earlier."""


@dataclass
class Folded(_Objects):
    """The user's aggregate function."""

    schema: StructType
    function: AggregateFunction[Any, Any]
    result: StructType
    input_names: list[str]

    method: ClassVar[str] = "aggregate"
    subject: ClassVar[str] = "the window's accumulator"

    def init(self, handle: Any) -> None:
        super().init(handle)
        self._output = RowOutput(self.result, type(self.function).__name__)

    def _values(self, rows: pa.RecordBatch) -> Iterable[Any]:
        return self._input.rows(rows)

    def _added(self, held: Row | None, values: Iterator[Any]) -> Row:
        add, normalize = self.function.add, self._codec.normalize
        accumulator = normalize(self.function.createAccumulator()) if held is None else held
        for row in values:
            accumulator = normalize(add(row, accumulator))
        return accumulator

    def _merged(self, one: Row, other: Row) -> Row:
        return self._codec.normalize(self.function.merge(one, other))

    def results(self, windows: Returned) -> Iterator[Columns]:
        hold, made = self._output.hold, list[Any]()
        results = map(self._result, self._of(windows.held))
        with _failing_at(made, windows.key_of, self.method):
            made.extend(results if hold is None else map(hold, results))
        name = _name(windows.key_of)

        def encoded(start: int, end: int) -> pa.RecordBatch:
            values = self._output.encode(made[start:end], lambda window: name(start + window))
            columns = [*windows.columns(start, end), *values.columns]
            return pa.RecordBatch.from_arrays(columns, names=[""] * len(columns))

        for part in in_parts(len(made), encoded, BUDGET.slice_bytes):
            yield part.columns

    def _result(self, held: Row) -> Row:
        result, names = self.function.getResult(held), self.result.names
        if isinstance(result, tuple) and len(result) == len(names):
            return result
        raise ProcessorError(
            f"getResult() of {type(self.function).__name__} returned {shown_value(result)}, which is"
            f" not a tuple of the result's fields ({', '.join(names)}).",
            kind=ErrorKind.OUTPUT_MISMATCH,
            hint="Return a tuple with a value for each field; wrap a single value as (value,).",
        )


@dataclass
class Reduced(_Objects):
    """Values, reduced to one by the user's function."""

    schema: StructType
    function: Callable[[Row, Row], Row]
    value_of: Callable[[Any], Row] | None
    """Makes the value of a row; None if it consists of columns."""
    positions: tuple[int, ...]
    """These columns."""
    are_normal: bool
    """Whether they have exactly the types of the value."""
    input_names: list[str]

    method: ClassVar[str] = "reduce"
    subject: ClassVar[str] = "the window's value"

    def _values(self, rows: pa.RecordBatch) -> Iterable[Any]:
        if self.value_of is not None:
            return map(self.value_of, self._input.rows(rows))
        return self._input.keys([rows.column(position) for position in self.positions])

    def _added(self, held: Row | None, values: Iterator[Any]) -> Row:
        normalize, function = self._codec.normalize, self.function
        if not self.are_normal:
            values = map(normalize, values)
        value: Row = next(values) if held is None else held
        for other in values:
            value = normalize(function(value, other))
        return value

    def _merged(self, one: Row, other: Row) -> Row:
        return self._codec.normalize(self.function(one, other))

    def results(self, windows: Returned) -> Iterator[Columns]:
        yield [*windows.columns(), *self.stored(windows.held, windows.key_of)]


def key_of_some(key_of: KeyOf, groups: Int64s) -> KeyOf:
    """The keys of some of the groups."""
    return lambda place: key_of(int(groups[place]))


def _name(key_of: KeyOf) -> Callable[[int], str]:
    return lambda group: f"key {shown_key(key_of(group))}"


@contextmanager
def _failing_at(made: list[Any], key_of: KeyOf, method: str) -> Iterator[None]:
    """Name the key of the group that follows those that are made, if it fails."""
    try:
        yield
    except Exception as error:
        raise KeyFailure(method, key_of(len(made)), error) from error
