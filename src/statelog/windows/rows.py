"""What windows hold for the user's processor: all their rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import cached_property, partial
from itertools import chain
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.types import ArrayType, DataType, LongType, StructField, StructType, TimestampNTZType, TimestampType

from statelog.aggregates.groups import Groups, stored_column
from statelog.aggregates.kernels import Columns
from statelog.convert.output import RowOutput
from statelog.convert.python_values import row_maker
from statelog.convert.types import arrow_type, from_storage
from statelog.history.settings import ROWS_STATE
from statelog.operators.keyed.column_caller import KeyFailure
from statelog.operators.keyed.indexing import Int64s
from statelog.operators.keyed.outputs import Outputs, rare_garbage_collection
from statelog.operators.keyed.time_columns import TimeColumns, TimeRows
from statelog.shown import shown_key
from statelog.time_zones import time_zone
from statelog.windows.contents import Contents, KeyOf, Returned, TimedRows
from statelog.windows.pane_columns import pair_codes
from statelog.windows.processor import TimeWindow, WindowHandle, WindowProcessor

_COUNTED: Final = StructType([StructField("rows", LongType())])
_BLOCK_ROWS: Final = 1024
_BLOCK_BYTES: Final = 1 << 20
_BLOCKS: Final = 64


@dataclass
class Rows(Contents):
    """Stores each row once, by time and order of arrival; the accumulator is the number of rows."""

    processor: WindowProcessor
    row_schema: StructType
    make_rows: GivenRows
    are_shared: bool
    """Whether a row may belong to several windows."""
    output: StructType
    schema: StructType = _COUNTED

    merges: ClassVar[bool] = False

    def init(self, handle: Any) -> None:
        self._rows: TimeColumns = handle.getTimeColumns(ROWS_STATE, "time_ms long, ordinal long", self.row_schema)
        self._stored_as = pa.schema([(field.name, arrow_type(field.dataType, "a row")) for field in self.row_schema])
        self._is_copied = self.are_shared and any(pa.types.is_nested(field.type) for field in self._stored_as)
        self._output = RowOutput(self.output, type(self.processor).__name__)
        handle.declares_by_key = True
        self.processor.init(WindowHandle(handle))

    def begin(self) -> None:
        self._read: tuple[Int64s, TimeRows] | None = None
        self._page: _Page | None = None

    def add(self, stored: Columns, known: Int64s, rows: TimedRows, groups: Groups, key_of: KeyOf) -> Columns:
        self.begin()  # what was read is no longer the newest
        counts = np.zeros(groups.count, np.int64)
        counts[known] = stored[0].to_numpy()
        ordinals = np.empty(len(rows), np.int64)
        firsts = np.cumsum(groups.sizes) - groups.sizes
        ordinals[groups.order] = np.arange(len(rows)) - np.repeat(firsts - counts, groups.sizes)
        for part, owners, times_ms, own in rows.by_part(rows.owners, rows.times_ms, ordinals):
            columns = [
                stored_column(column).cast(field.type)
                for column, field in zip(part.columns, self._stored_as, strict=True)
            ]
            self._rows.put(TimeRows(owners, times_ms, columns, ordinals=own))
        return [pa.array(counts + groups.sizes)]

    def merge(self, held: Columns, groups: Groups, key_of: KeyOf) -> Columns:
        return [pa.array(groups.sums(held[0].to_numpy()))]

    def stored(self, held: Columns, key_of: KeyOf) -> Columns:
        return held

    # ---- Results ----

    def results(self, windows: Returned) -> Iterator[Columns]:
        outputs = Outputs(self._output, self._rows.budget)
        keys = windows.keys()

        called = 0

        def calls() -> Iterator[Iterable[Any]]:
            nonlocal called
            bounds = [at_ms.tolist() for at_ms in windows.bounds]
            visits = zip(windows.owners.tolist(), keys, *bounds, self._rows_of(windows), strict=True)
            for called, (owner, key, start_ms, end_ms, rows) in enumerate(visits):  # noqa: B007 - read at a failure
                self._rows.visit(owner)
                outputs.starts.append(len(outputs.taken))
                window = TimeWindow(start_ms, end_ms) if windows.has_bounds else None
                yield self.processor.process(key, window, rows, windows.context)

        outputs.begin(calls(), lambda call: f"key {shown_key(windows.key_of(call))}", self.processor.process)
        has_more = True
        try:
            while has_more:
                with rare_garbage_collection():
                    try:
                        has_more = outputs.take()
                    except Exception as error:
                        raise KeyFailure("process", windows.key_of(called), error) from error
                    batches = outputs.encoded(is_last=not has_more)
                for batch in batches:
                    if batch.num_rows:
                        yield batch.columns
        finally:
            outputs.end()

    def _rows_of(self, windows: Returned) -> Iterator[Iterator[Any]]:
        """The rows of each window."""
        owners, (starts_ms, ends_ms) = windows.owners, windows.bounds
        has_few = self._rows.few()
        found = np.unique(owners)
        stored = self._of_few(found[has_few[found]])
        count = len(has_few)
        held, firsts, lasts = pair_codes(
            count, (stored.key_index, stored.times_ms), (owners, starts_ms), (owners, ends_ms)
        )
        first, last = np.searchsorted(held, firsts), np.searchsorted(held, lasts)
        covered = np.bincount(first, minlength=len(held) + 1) - np.bincount(last, minlength=len(held) + 1)
        is_wanted = np.cumsum(covered[:-1]) > 0
        before = np.concatenate(([0], np.cumsum(is_wanted)))
        places = before[first].tolist(), before[last].tolist()
        blocks = self._blocks(stored.take(is_wanted))
        times = starts_ms.tolist(), ends_ms.tolist()
        for owner, first, last, start_ms, end_ms in zip(owners.tolist(), *places, *times, strict=True):
            yield iter(blocks.rows(first, last)) if has_few[owner] else self._of_large(owner, start_ms, end_ms)

    def _of_few(self, owners: Int64s) -> TimeRows:
        """All rows of keys that have few."""
        if self._read is None or not np.isin(owners, self._read[0]).all():
            self._read = owners, self._rows.read(owners, with_changes=True)
        return self._read[1]

    def _of_large(self, owner: int, start_ms: int, end_ms: int) -> Iterator[Any]:
        """The rows of a key between two times; the page that the last ones were in is kept."""
        page = self._page
        if page is None or page.owner != owner or start_ms < page.start_ms or page.until_ms < end_ms:
            rows = next(self._rows.pages(owner, start_ms, with_changes=True))
            if rows.until_ms < end_ms:
                pages = self._rows.pages(owner, start_ms, end_ms, with_changes=True)
                return chain.from_iterable(self._blocks(rows).rows(0, len(rows)) for rows in pages if len(rows))
            page = _Page(owner, start_ms, rows.until_ms, rows.times_ms.tolist(), self._blocks(rows))
            self._page = page
        first = bisect_left(page.times, start_ms)
        return iter(page.blocks.rows(first, bisect_left(page.times, end_ms, first)))

    def _blocks(self, rows: TimeRows) -> RowBlocks:
        columns = pa.RecordBatch.from_arrays(rows.values, schema=self._stored_as)
        return RowBlocks(columns, self.make_rows, are_shared=self._is_copied)

    # ---- Removal ----

    def remove(self, owners: Int64s, before_ms: Int64s) -> None:
        if not len(owners):
            return
        has_few = self._rows.few()
        few = owners[has_few[owners]]
        if len(few):
            rows = self._rows.read(few)
            limits = np.zeros(int(few[-1]) + 1, np.int64)
            limits[owners[has_few[owners]]] = before_ms[has_few[owners]]
            self._delete(rows.take(rows.times_ms < limits[rows.key_index]))
        for owner, limit_ms in zip(owners.tolist(), before_ms.tolist(), strict=True):
            if not has_few[owner]:
                for page in self._rows.pages(owner, end_ms=limit_ms):
                    self._delete(page)

    def _delete(self, rows: TimeRows) -> None:
        self._rows.remove(rows.key_index, rows.times_ms, rows.ordinals)

    def clear(self, owners: Int64s) -> None:
        self._rows.clear(owners)

    def close(self) -> None:
        self.processor.close()


class RowBlocks:
    """Rows made from columns in blocks, when they are first asked for.

    The last blocks are kept, unless the rows `are_shared`: then they are made anew each time, so that none of several
    readers sees the changes of another.
    """

    def __init__(
        self, columns: pa.RecordBatch, make_rows: Callable[[pa.RecordBatch], list[Any]], *, are_shared: bool
    ) -> None:
        self._columns = columns
        self._make_rows = make_rows
        self._are_shared = are_shared
        self._block_rows = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES * columns.num_rows // max(1, columns.nbytes)))
        self._blocks: dict[int, list[Any]] = {}

    def rows(self, start: int, end: int) -> Iterable[Any]:
        """The rows from `start` up to, not including, `end`; those of a second block are made while they are read."""
        number = start // self._block_rows
        if end <= (number + 1) * self._block_rows:
            return self._part(number, start, end)
        return (row for number in range(number, -(-end // self._block_rows)) for row in self._part(number, start, end))

    def _part(self, number: int, start: int, end: int) -> list[Any]:
        """The rows that are also in a block."""
        at = number * self._block_rows
        first, last = max(start, at), min(end, at + self._block_rows)
        if self._are_shared:
            return self._make_rows(self._columns.slice(first, last - first))
        block = self._blocks.get(number)
        if block is None:
            if len(self._blocks) == _BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            block = self._blocks[number] = self._make_rows(self._columns.slice(at, self._block_rows))
        return block[first - at : last - at]


@dataclass(frozen=True)
class _Page:
    """All rows of a key from one time up to, not including, another."""

    owner: int
    start_ms: int
    until_ms: int
    times: list[int]
    blocks: RowBlocks


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NAIVE_EPOCH: Final = datetime(1970, 1, 1)
_MICROSECOND: Final = timedelta(microseconds=1)
_DAY: Final = timedelta(days=1)
_FIRST_US: Final = (datetime.min + _DAY - _NAIVE_EPOCH) // _MICROSECOND
_LAST_US: Final = (datetime.max - _DAY - _NAIVE_EPOCH) // _MICROSECOND


@dataclass(frozen=True)
class GivenRows:
    """Makes the rows that a user sees from columns in stored form; timestamps are in the time zone `zone`."""

    schema: StructType
    zone: str

    def __call__(self, columns: pa.RecordBatch) -> list[Any]:
        pairs = zip(self._converters, columns.columns, strict=True)
        return self._make([convert(column) for convert, column in pairs])

    @cached_property
    def _make(self) -> Callable[[list[Any]], list[Any]]:
        return row_maker(self.schema.names)

    @cached_property
    def _converters(self) -> list[Callable[[Any], list[Any]]]:
        return [_converter(field.dataType, self.zone) for field in self.schema]


def _converter(kind: DataType, zone: str) -> Callable[[Any], list[Any]]:
    """What makes values that a user sees of a column in stored form."""
    if isinstance(kind, TimestampType):
        return partial(_instants, time_zone(zone))
    of_value = _instant_converter(kind, zone) or from_storage(kind)

    def convert(column: Any) -> list[Any]:
        values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
        return values if of_value is None else [None if value is None else of_value(value) for value in values]

    return convert


def _instants(zone: tzinfo, column: Any) -> list[Any]:
    """Timestamps from microseconds."""
    if column.null_count or not len(column):
        return [None if us is None else _instant(us, zone) for us in column.to_pylist()]
    numbers = column.to_numpy()
    if numbers.min() < _FIRST_US or numbers.max() > _LAST_US:  # some are beyond Python's datetimes
        return [_instant(us, zone) for us in numbers.tolist()]
    offset = zone.utcoffset(None)
    if offset is None:
        return [at.replace(tzinfo=UTC).astimezone(zone) for at in numbers.view("M8[us]").tolist()]
    local = numbers + offset // _MICROSECOND
    return [at.replace(tzinfo=zone) for at in local.view("M8[us]").tolist()]


def _instant(us: int, zone: tzinfo) -> datetime:
    return (_EPOCH + timedelta(microseconds=us)).astimezone(zone)


def _instant_converter(kind: DataType, zone: str) -> Callable[[Any], Any] | None:
    """What makes a timestamp, or an array of them, from the stored form; None for other types."""
    if isinstance(kind, TimestampType):
        return partial(_instant, zone=time_zone(zone))
    if isinstance(kind, TimestampNTZType):
        return lambda us: _NAIVE_EPOCH + timedelta(microseconds=us)
    of_element = _instant_converter(kind.elementType, zone) if isinstance(kind, ArrayType) else None
    if of_element is None:
        return None
    return lambda values: [None if value is None else of_element(value) for value in values]
