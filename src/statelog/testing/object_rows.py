"""Rows that are a test's own objects: columns hold their numbers, and the processor gets the objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from statelog.operators.keyed.grouping import KeyChunk
from statelog.operators.keyed.subtask import KeyedRows
from statelog.runs.keys import KeyCodec
from statelog.testing.key_hashes import row_hashes

if TYPE_CHECKING:
    import pandas as pd

NUMBERED_KEY: Final = KeyCodec(pa.schema([("key", pa.int64())]))
TIME_COLUMN: Final = 2

_COLUMNS: Final = pa.schema([("key", pa.int64()), ("row", pa.int64()), ("time", pa.timestamp("us"))])
_US_PER_MS: Final = 1000


def stand_ins(columns: list[list[Any]]) -> KeyedRows:
    """Rows that stand for objects, from columns with the key's number, the row's number and its event time in ms."""
    if not columns:
        columns = [[], [], []]
    keys, rows, times = columns
    in_us = [None if time_ms is None else time_ms * _US_PER_MS for time_ms in times]
    arrays = [pa.array(keys, pa.int64()), pa.array(rows, pa.int64()), pa.array(in_us, _COLUMNS.field("time").type)]
    return KeyedRows(pa.RecordBatch.from_arrays(arrays, schema=_COLUMNS), row_hashes(arrays[:1]))


class RowPart:
    """A row, unchanged."""

    def __init__(self, row: Any) -> None:
        self.row = row

    @staticmethod
    def joined(parts: Sequence[RowPart]) -> list[Any]:
        return [part.row for part in parts]


class FramePart:
    """A row of a frame."""

    def __init__(self, frame: pd.DataFrame, place: int) -> None:
        self.frame = frame
        self.place = place

    @staticmethod
    def joined(parts: Sequence[FramePart]) -> list[Any]:
        return [parts[0].frame.iloc[[part.place for part in parts]].reset_index(drop=True)]


class ObjectInput:
    """An input codec that gives the processor the objects that rows stand for."""

    def __init__(self, keys: list[Any], parts: list[Any]) -> None:
        self._keys = keys
        self._parts = parts

    def keys(self, columns: list[pa.Array]) -> list[tuple[Any, ...]]:
        return [(self._keys[number],) for number in columns[0].to_pylist()]

    def by_key(self, window: KeyChunk) -> list[Iterator[Any]]:
        window = window.joined()
        numbers = window.rows.column(1).to_pylist()
        return [self._objects(numbers[start:end]) for start, end in pairwise(window.starts.tolist())]

    def _objects(self, numbers: list[int | None]) -> Iterator[Any]:
        parts = [self._parts[number] for number in numbers if number is not None]
        return iter(type(parts[0]).joined(parts) if parts else [])


class ObjectOutput:
    """An output codec that collects the processor's results in a list, and returns their numbers."""

    hold = None

    def __init__(self, outputs: list[Any]) -> None:
        self._outputs = outputs

    def encode(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> pa.RecordBatch:
        first = len(self._outputs)
        self._outputs.extend(rows)
        return pa.RecordBatch.from_pydict({"number": pa.array(range(first, len(self._outputs)), pa.int64())})
