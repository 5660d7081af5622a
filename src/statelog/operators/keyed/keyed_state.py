"""What all state handles share. A handle is what a processor reads and writes: prefetched in bulk, buffered per window.

The handles have the methods of ``pyspark.sql.streaming``'s ValueState, ListState and MapState. A handle is
opened on a window of keys and then moved from key to key; it reads the table once per window, on the first
access, and collects its changes until :meth:`KeyedState.flush`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

from statelog.operators.keyed.changes import ChangeBuffer
from statelog.operators.keyed.cursor import KeyCursor
from statelog.runs.schema import StateDescriptor
from statelog.runs.times import Ttl
from statelog.runs.values import RowCodec

Row = tuple[Any, ...]

MISSING: Final[Any] = object()
"""Tells a key that was not written from one whose value was removed."""


class KeyedState(ABC):
    """A state of the key that the cursor stands on.

    Parameters
    ----------
    cursor : KeyCursor
        Where the subtask stands.
    state : StateDescriptor
        The state.
    codec : RowCodec
        Converts its values.
    ttl : Ttl, optional
        How long its entries live.
    """

    def __init__(self, cursor: KeyCursor, state: StateDescriptor, codec: RowCodec, ttl: Ttl | None = None) -> None:
        self._cursor = cursor
        self._state = state
        self._codec = codec
        self._ttl = ttl
        self._renews = ttl is not None and ttl.renew_on_read

    @abstractmethod
    def open(self) -> None:
        """Start on the cursor's window."""

    @abstractmethod
    def flush(self, changes: ChangeBuffer) -> None:
        """Hand over the window's changes."""

    def _require(self) -> int:
        return self._cursor.require(self._codec.subject)

    def _expiry_ms(self, positions: Sequence[int]) -> int | Sequence[int | None] | None:
        return None if self._ttl is None else self._cursor.expiry_ms(self._ttl, positions)
