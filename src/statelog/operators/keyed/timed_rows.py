"""A map state with rows by time and ordinal, written and read as columns. Windows keep their input rows in it."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, repeat
from operator import itemgetter
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.operators.keyed.changes import ChangeBuffer
from statelog.operators.keyed.time_reader import AFTER_MS, FIRST_MS, Part, TimeReader, entry_keys, entry_numbers
from statelog.operators.keyed.values import KeyedState
from statelog.runs.byte_slices import Positions
from statelog.runs.format import Operation
from statelog.tables.table import EntryRows

_BLOCK_ROWS: Final = 1024
_BLOCK_BYTES: Final = 1 << 20
_BLOCKS: Final = 64
_PART_ROWS: Final = 65_536
_NO_ROW: Final = -1
_NOTHING: Final = np.zeros(0, np.int64)

Columns: TypeAlias = "pa.RecordBatch | pa.Table"
MakeRows = Callable[[Columns], list[Any]]
"""Makes rows from columns of the state's types."""


class RowSource(Protocol):
    """Rows in order of time."""

    @property
    def stored(self) -> Sequence[pa.Array]:
        """The values to store: a column per field, perhaps with types that have to be cast to those of the state."""

    @property
    def times_ms(self) -> Positions | None:
        """The time of each row; None if they all have the time that is given with them."""


_Added = tuple[int, int, int, int, int]
"""Rows that are not flushed yet: position of their key, their start and end in the source, ordinal and time of the
first."""
_TIME_OF: Final = itemgetter(4)


class RowBlocks:
    """Rows made from columns in blocks, when they are first asked for.

    The last blocks are kept, unless the rows `are_shared`: then they are made anew each time, so that none of several
    readers sees the changes of another.
    """

    def __init__(self, columns: Columns, make_rows: MakeRows, *, are_shared: bool) -> None:
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
class _Stored:
    times: list[int]
    numbers: list[Positions]
    """Times and ordinals as columns."""
    blocks: RowBlocks


class TimedRows(KeyedState):
    """Rows by time, of each key; those of one time by ordinal. The state has no TTL.

    Rows are added as columns, and become objects only where they are read.
    """

    def bind(self, make_rows: MakeRows, *, are_shared: bool) -> None:
        """Set what makes the rows that :meth:`between` returns, and whether one may be returned several times."""
        self._make_rows = make_rows
        self._are_shared = are_shared and self._codec.is_mutable

    def open(self) -> None:
        self._stored = TimeReader(self._cursor, self._state, self._decoded)
        self._source: RowSource | None = None
        self._columns: pa.RecordBatch | None = None
        self._blocks: RowBlocks | None = None
        self._added: list[_Added] = []
        self._first_added: dict[int, int] = {}
        self._deleted: list[tuple[int, Positions, Positions]] = []  # positions of keys, times, ordinals
        self._removed: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._cleared: set[int] = set()

    def _decoded(self, found: EntryRows) -> _Stored:
        numbers = entry_numbers(found.entries, 2)
        return _Stored(numbers[0].tolist(), numbers, self._blocks_of(found.values))

    def _blocks_of(self, columns: Columns) -> RowBlocks:
        return RowBlocks(columns, self._make_rows, are_shared=self._are_shared)

    def add(self, source: RowSource, start: int, end: int, first_ordinal: int, time_ms: int) -> None:
        """Add rows of a source from `start` up to, not including, `end`; `time_ms` is the time of the first.

        Their ordinals follow each other. All rows of a key chunk have one source; they are added one key after the
        other, and in order of time.
        """
        self._source = source
        position = self._require()
        self._first_added.setdefault(position, len(self._added))
        self._added.append((position, start, end, first_ordinal, time_ms))

    def between(self, first_ms: int = FIRST_MS, end_ms: int = AFTER_MS) -> Iterator[Any]:
        """The rows from one time up to, not including, another; most of them are made while they are asked for."""
        position = self._cursor.position
        parts = () if position in self._cleared else self._stored.parts(first_ms, end_ms)
        first = self._first_added.get(position)
        added: Sequence[_Added] = ()
        if first is not None:  # those of the current key are the last ones
            first = bisect_left(self._added, first_ms, first, key=_TIME_OF)
            added = self._added[first : bisect_left(self._added, end_ms, first, key=_TIME_OF)]
        removed = self._removed.get(position)
        if removed is None and not added:
            return chain.from_iterable(map(_rows_of, parts))
        if not parts:
            return chain.from_iterable(map(self._added_rows, added))
        return self._merged(parts, removed or (), added)

    def _merged(
        self, parts: Iterable[Part[_Stored]], removed: Sequence[tuple[int, int]], added: Iterable[_Added]
    ) -> Iterator[Any]:
        """The stored rows, without those that were removed, and the added ones, by time and ordinal."""
        stored = (
            (time_ms, ordinal, row)
            for loaded, start, end in parts
            for time_ms, ordinal, row in zip(
                loaded.times[start:end],
                loaded.numbers[1][start:end].tolist(),
                loaded.blocks.rows(start, end) if start < end else (),
                strict=True,
            )
            if not any(first_ms <= time_ms < end_ms for first_ms, end_ms in removed)
        )
        new = (
            item
            for rows in added
            for item in zip(self._added_times(rows), count(rows[3]), self._added_rows(rows), strict=False)
        )
        return (row for _, _, row in heapq.merge(stored, new, key=lambda item: item[:2]))

    def _added_rows(self, rows: _Added) -> Iterable[Any]:
        _, start, end, _, _ = rows
        if self._blocks is None:
            self._blocks = self._blocks_of(self._added_columns())
        return self._blocks.rows(start, end)

    def _added_times(self, rows: _Added) -> Iterable[int]:
        _, start, end, _, time_ms = rows
        assert self._source is not None
        own_ms = self._source.times_ms
        return repeat(time_ms, end - start) if own_ms is None else own_ms[start:end].tolist()

    def _added_columns(self) -> pa.RecordBatch:
        """The rows of the source in the types of the state."""
        if self._columns is None:
            assert self._source is not None
            schema = self._state.value_schema
            fitted = [column.cast(field.type) for column, field in zip(self._source.stored, schema, strict=True)]
            self._columns = pa.RecordBatch.from_arrays(fitted, schema=schema)
        return self._columns

    def remove(self, first_ms: int, end_ms: int) -> None:
        """Remove the stored rows from one time up to, not including, another."""
        position = self._require()
        if position in self._cleared:
            return
        for loaded, start, end in self._stored.parts(first_ms, end_ms):
            self._deleted.append((position, loaded.numbers[0][start:end], loaded.numbers[1][start:end]))
        self._removed[position].append((first_ms, end_ms))

    def clear(self) -> None:
        """Remove all rows."""
        position = self._require()
        self._cleared.add(position)
        if position in self._first_added:
            del self._added[self._first_added.pop(position) :]

    def flush(self, changes: ChangeBuffer) -> None:
        cleared = [position for position in sorted(self._cleared) if not self._stored.is_known_empty(position)]
        made = _in_order([_clears(cleared), self._deletes(), self._puts()])
        if not len(made.positions):
            return
        schema = self._state.value_schema
        columns = self._added_columns() if self._added else None

        for start in range(0, len(made.positions), _PART_ROWS):
            part = slice(start, start + _PART_ROWS)
            rows, operations = made.rows[part], made.operations[part]
            entries = entry_keys([made.times[part], made.ordinals[part]])
            is_clear = operations == Operation.CLEAR
            if is_clear.any():
                entries = pc.if_else(pa.array(is_clear), pa.scalar(b"", pa.binary()), entries)
            if columns is None or (rows == _NO_ROW).all():
                values = [pa.nulls(len(rows), field.type) for field in schema]
            elif rows[0] != _NO_ROW and (np.diff(rows) == 1).all():
                values = columns.slice(int(rows[0]), len(rows)).columns
            else:
                values = columns.take(pa.array(rows, mask=rows == _NO_ROW)).columns
            changes.add_columns(self._state, self._cursor.keys, made.positions[part], entries, values, operations)

    def _puts(self) -> _Changes:
        added = np.array(self._added, np.int64).reshape(-1, 5)
        positions, starts, ends, ordinals, times = added.T
        counts = ends - starts
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.repeat(starts, counts) + within
        own_ms = None if self._source is None else self._source.times_ms
        return _Changes(
            np.repeat(positions, counts),
            np.repeat(times, counts) if own_ms is None else own_ms[rows],
            np.repeat(ordinals, counts) + within,
            np.full(len(rows), Operation.PUT, np.uint8),
            rows,
        )

    def _deletes(self) -> _Changes:
        deleted = [rows for rows in self._deleted if rows[0] not in self._cleared]
        counts = [len(times) for _, times, _ in deleted]
        count = sum(counts)
        return _Changes(
            np.repeat(np.array([position for position, _, _ in deleted], np.int64), counts),
            np.concatenate([_NOTHING, *[times for _, times, _ in deleted]]),
            np.concatenate([_NOTHING, *[ordinals for _, _, ordinals in deleted]]),
            np.full(count, Operation.DELETE, np.uint8),
            np.full(count, _NO_ROW),
        )


def _rows_of(part: Part[_Stored]) -> Iterable[Any]:
    loaded, start, end = part
    return loaded.blocks.rows(start, end) if start < end else ()


@dataclass(frozen=True)
class _Changes:
    """Changes, as columns of equal length."""

    positions: Positions
    times: Positions
    ordinals: Positions
    operations: npt.NDArray[np.uint8]
    rows: Positions
    """The rows of the source that are put; `_NO_ROW` stands for none."""

    @property
    def columns(self) -> list[npt.NDArray[Any]]:
        return [self.positions, self.times, self.ordinals, self.operations, self.rows]


def _clears(positions: list[int]) -> _Changes:
    """A clear comes before all other changes of its key."""
    count = len(positions)
    return _Changes(
        np.array(positions, np.int64),
        np.full(count, FIRST_MS),
        np.full(count, -1),
        np.full(count, Operation.CLEAR, np.uint8),
        np.full(count, _NO_ROW),
    )


def _in_order(parts: list[_Changes]) -> _Changes:
    """The changes in the order of a run; of two changes of an entry the one in the later part counts."""
    columns = [np.concatenate(column) for column in zip(*(part.columns for part in parts), strict=True)]
    if not _ascends(*columns[:3]).all():
        order = np.lexsort(columns[2::-1])  # changes of one entry stay in the order of the parts
        columns = [column[order] for column in columns]
        is_last = np.append(_ascends(*columns[:3]), True)
        columns = [column[is_last] for column in columns]
    return _Changes(*columns)


def _ascends(positions: Positions, times: Positions, ordinals: Positions) -> npt.NDArray[np.bool_]:
    """Whether each entry is before the next."""
    later = ordinals[1:] > ordinals[:-1]
    for column in (times, positions):
        later = (column[1:] > column[:-1]) | ((column[1:] == column[:-1]) & later)
    return later
