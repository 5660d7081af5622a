"""The base of the state handles, through which a processor reads and writes its states.

The handles have the methods of ``pyspark.sql.streaming``'s ValueState, ListState and MapState. A handle is opened on a
key chunk and then moved from key to key. On the first access it reads the table for many keys of the chunk at once,
and it collects its changes until :meth:`KeyedState.flush`.
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
"""Stands for a key that was not written; None stands for a removed value."""


class KeyedState(ABC):
    """A state of the cursor's current key."""

    def __init__(self, cursor: KeyCursor, state: StateDescriptor, codec: RowCodec, ttl: Ttl | None = None) -> None:
        self._cursor = cursor
        self._state = state
        self._codec = codec
        self._ttl = ttl
        self._renews = ttl is not None and ttl.renew_on_read

    @abstractmethod
    def open(self) -> None:
        """Start on a new key chunk: forget everything read and written so far."""

    @abstractmethod
    def flush(self, changes: ChangeBuffer) -> None:
        """Add the changes of the key chunk to those of the batch."""

    def _require(self) -> int:
        return self._cursor.require(self._codec.subject)

    def _expiry_ms(self, positions: Sequence[int]) -> int | Sequence[int | None] | None:
        return None if self._ttl is None else self._cursor.expiry_ms(self._ttl, positions)
