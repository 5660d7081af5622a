"""Timers: the times at which the processor wants to be called for a key."""

from __future__ import annotations

import heapq
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Final

import numpy as np
import pyarrow as pa

from statelog.errors import ErrorKind, ProcessorError
from statelog.operators.keyed.changes import ChangeBuffer
from statelog.operators.keyed.cursor import EntryWindow, KeyCursor
from statelog.runs.key_columns import differs_from_previous
from statelog.runs.schema import Operation, StateDescriptor, StateKind, TimeDomain
from statelog.runs.values import FieldCodec, RowCodec
from statelog.tables.table import TimerRows

TIMERS: Final = "$timers"
"""The stored name of the timers; no state of a user can have it."""

_ENTRY: Final = struct.Struct(">Q")
_SIGN: Final = 1 << 63


def timer_descriptor(domain: TimeDomain) -> StateDescriptor:
    """The stored description of timers; it differs by domain, so timers of one cannot be read as those of the other."""
    return StateDescriptor(TIMERS, StateKind.TIMER, pa.schema([(f"{domain}_ms", pa.int64())]))


class Timers:
    """The timers of the cursor's current key."""

    def __init__(self, cursor: KeyCursor, domain: TimeDomain) -> None:
        self.state = timer_descriptor(domain)
        self._cursor = cursor
        self._codec = RowCodec([FieldCodec(f"{domain}_ms", pa.int64(), int)], "timers")
        self.lowest_ms: int | None = None
        """The earliest time registered since due timers were last read from the table."""

    def open(self) -> None:
        """Start on a new key chunk: forget everything read and written so far."""
        self._stored = EntryWindow(self._cursor, self.state, self._codec)
        self._writes: defaultdict[int, dict[bytes, bool]] = defaultdict(dict)

    def register(self, time_ms: int) -> None:
        """Register a timer; the same time registered twice is one timer."""
        entry = self._entry(time_ms)
        if self.lowest_ms is None or time_ms < self.lowest_ms:
            self.lowest_ms = time_ms
        self._writes[self._cursor.require("A timer")][entry] = True

    def delete(self, time_ms: int) -> None:
        """Delete a timer; nothing happens if there is none."""
        entry = self._entry(time_ms)
        self._writes[self._cursor.require("A timer")][entry] = False

    def was_deleted(self, time_ms: int) -> bool:
        """Whether a due timer was deleted since the key chunk began."""
        writes = self._writes.get(self._cursor.position)
        return writes is not None and writes.get(_ENTRY.pack(time_ms + _SIGN)) is False

    def note_fired(self, time_ms: int) -> None:
        """Delete a timer of the current key, which has fired."""
        self._writes[self._cursor.position][_ENTRY.pack(time_ms + _SIGN)] = False

    def list(self) -> Iterator[int]:
        """The times of the key's timers, ascending."""
        position = self._cursor.require("listTimers()")
        writes = self._writes.get(position, {})
        if not self._stored.is_large(position):
            if not writes:
                return iter([_ENTRY.unpack(entry)[0] - _SIGN for entry in self._stored.of(position)])
            held = dict.fromkeys(self._stored.of(position), True) | writes
            return iter([_ENTRY.unpack(entry)[0] - _SIGN for entry in sorted(held) if held[entry]])
        written = writes.copy()
        stored = (entry for page in self._stored.pages(position) for entry, _ in page if entry not in written)
        added = sorted(entry for entry, is_set in written.items() if is_set)
        return (_ENTRY.unpack(entry)[0] - _SIGN for entry in heapq.merge(stored, added))

    def flush(self, changes: ChangeBuffer) -> None:
        """Add the changes of the key chunk to those of the batch."""
        positions: list[int] = []
        entries: list[bytes] = []
        operations: list[int] = []
        put, delete = Operation.PUT, Operation.DELETE
        for position, writes in sorted(self._writes.items()):
            known_empty = self._stored.is_known_empty(position)
            for entry, is_set in sorted(writes.items()):
                if is_set or not known_empty:
                    positions.append(position)
                    entries.append(entry)
                    operations.append(put if is_set else delete)
        # A deletion carries its time too, so that a search by time finds it.
        times = [(_ENTRY.unpack(entry)[0] - _SIGN,) for entry in entries]
        changes.add(self.state, self._codec, self._cursor.keys, positions, entries, times, operations)

    def _entry(self, time_ms: int) -> bytes:
        if type(time_ms) is int and -_SIGN <= time_ms < _SIGN:
            return _ENTRY.pack(time_ms + _SIGN)
        is_whole = isinstance(time_ms, Integral) and not isinstance(time_ms, bool)
        if not is_whole or not -_SIGN <= time_ms < _SIGN:
            raise ProcessorError(
                f"A timer's time is {time_ms!r}.",
                kind=ErrorKind.STATE_USAGE,
                hint="It must be a whole number of milliseconds since the Unix epoch.",
            )
        return _ENTRY.pack(int(time_ms) + _SIGN)


def key_stretches(due: TimerRows, max_keys: Callable[[], int]) -> Iterator[tuple[int, int]]:
    """Cut due timers into stretches of at most `max_keys` keys; the timers of a key stay together."""
    starts = np.append(np.flatnonzero(differs_from_previous(due.keys.keys)), len(due.keys))
    first = 0
    while first < len(starts) - 1:
        end = min(first + max_keys(), len(starts) - 1)
        yield int(starts[first]), int(starts[end])
        first = end
