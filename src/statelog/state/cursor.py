"""Where a subtask stands: the current key of a window, and the stored entries of the keys around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from statelog.errors import ErrorKind, ProcessorError
from statelog.state.changes import ListPosition
from statelog.state.schema import StateDescriptor
from statelog.state.table import KeyBatch, StateTable
from statelog.state.values import RowCodec

__all__ = ["EntryWindow", "KeyCursor"]

Row = tuple[Any, ...]

_PREFETCH_ENTRIES: Final = 100_000


@dataclass
class KeyCursor:
    """The window and the key that all handles of a subtask stand on."""

    table: StateTable
    list_position: ListPosition
    keys: KeyBatch
    position: int = -1

    def require(self, subject: str) -> int:
        """The position of the current key.

        Raises
        ------
        ProcessorError
            If no key is being processed.
        """
        if self.position < 0:
            raise ProcessorError(
                f"{subject} was used while no key is processed.",
                kind=ErrorKind.STATE_USAGE,
                hint="State can be read and written only inside handleInputRows.",
            )
        return self.position


class EntryWindow:
    """Stored entries of the window's keys, fetched for many keys at once.

    Keys are processed in order, so fetching a stretch from the current key on is enough. A key with very
    many entries is read entry by entry until someone asks for all of them.
    """

    def __init__(self, cursor: KeyCursor, state: StateDescriptor, codec: RowCodec) -> None:
        self._cursor = cursor
        self._state = state
        self._codec = codec
        self._counts: np.ndarray[Any, np.dtype[np.int64]] | None = None
        self._fetched = range(0)
        self._starts: list[int] = []
        self._entries: list[bytes] = []
        self._rows: list[Row] = []
        self._current: tuple[int, dict[bytes, Row]] = (-1, {})

    def of(self, position: int) -> dict[bytes, Row]:
        """All stored entries of a key, by entry key."""
        if self._current[0] != position:
            if position not in self._fetched:
                self._fetch(position)
            index = position - self._fetched.start
            part = slice(self._starts[index], self._starts[index + 1])
            entries = dict(zip(self._entries[part], self._rows[part], strict=True))
            self._current = (position, entries)
        return self._current[1]

    def get(self, position: int, entry: bytes) -> Row | None:
        """One stored entry of a key."""
        if self._current[0] != position and self._count(position) > _PREFETCH_ENTRIES:
            key = self._cursor.keys.slice(position, position + 1)
            rows = self._codec.decode(self._cursor.table.get_entry(self._state, key, entry).values)
            return rows[0] if rows else None
        return self.of(position).get(entry)

    def is_known_empty(self, position: int) -> bool:
        """Whether the key was looked up and has no stored entry."""
        return self._counts is not None and self._counts[position] == 0

    def _count(self, position: int) -> int:
        if self._counts is None:
            self._counts = self._cursor.table.count_entries(self._state, self._cursor.keys)
        return int(self._counts[position])

    def _fetch(self, position: int) -> None:
        self._count(position)
        assert self._counts is not None
        total = np.cumsum(self._counts[position:])
        end = position + max(1, int(np.searchsorted(total, _PREFETCH_ENTRIES, "right")))
        found = self._cursor.table.entries(self._state, self._cursor.keys.slice(position, end))
        self._fetched = range(position, end)
        self._starts = np.searchsorted(found.positions, np.arange(end - position + 1)).tolist()
        self._entries = found.entries.to_pylist()
        self._rows = self._codec.decode(found.values)
