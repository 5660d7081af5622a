"""Changes of a batch, collected column by column until they become a changeset."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from statelog.state.run_format import Operation, change_schema
from statelog.state.run_writer import Section, encode_run
from statelog.state.schema import StateDescriptor, StateKind
from statelog.state.table import KeyBatch
from statelog.state.values import RowCodec

__all__ = ["ChangeBuffer", "ListPosition"]

_LIST_PREFIX: Final = struct.Struct(">IQ")
_LIST_ORDINAL: Final = struct.Struct(">I")
_PHASE_SHIFT: Final = 30


@dataclass(frozen=True)
class ListPosition:
    """Where list elements of a batch stand among those of other batches.

    An element's entry key is (epoch, batch, ordinal), so appending reads nothing. The ordinal's two top bits are the
    phase of the batch, because each phase counts from zero.
    """

    epoch: int
    batch: int
    phase: int = 0

    def entries(self, first: int, count: int) -> list[bytes]:
        """Entry keys of `count` elements whose first is the `first`-th of this batch for its key."""
        prefix = _LIST_PREFIX.pack(self.epoch, self.batch)
        base = (self.phase << _PHASE_SHIFT) + first
        return [prefix + _LIST_ORDINAL.pack(ordinal) for ordinal in range(base, base + count)]


class ChangeBuffer:
    """The changes of one subtask in one batch, in run order.

    Attributes
    ----------
    rows : int
        Number of changes.
    unstored_bytes, unstored_rows : int
        Size in memory, and number, of the changes since the last part was taken.
    describe_key : callable
        Names the key at a position of the current window, for messages.
    """

    def __init__(self) -> None:
        self.describe_key: Callable[[int], str] = str
        self._batches: dict[str, list[pa.RecordBatch]] = {}
        self._states: dict[str, StateDescriptor] = {}
        self._stored: dict[str, int] = {}
        self.rows = 0
        self.unstored_bytes: int = 0
        self.unstored_rows: int = 0

    def add(
        self,
        state: StateDescriptor,
        codec: RowCodec,
        keys: KeyBatch,
        positions: Sequence[int],
        entries: Sequence[bytes] | None,
        values: Sequence[tuple[Any, ...] | None],
        operations: Sequence[int] | None = None,
        expiry_ms: int | Sequence[int | None] | None = None,
    ) -> None:
        """Add changes of keys that come after those of all calls before for this state.

        Parameters
        ----------
        state : StateDescriptor
            The state.
        codec : RowCodec
            Its values' codec.
        keys : KeyBatch
            The keys that `positions` count.
        positions : sequence of int
            The key of each change, ascending.
        entries : sequence of bytes or None
            The entry of each change, ascending within a key; None if all are empty.
        values : sequence of tuple or None
            The new value of each change; None where there is none.
        operations : sequence of int, optional
            What each change does; by default a put where there is a value, else a delete.
        expiry_ms : int or sequence of (int or None), optional
            From when on the changes no longer count: one time for all of them, or one for each.
        """
        count = len(positions)
        if count == 0:
            return
        if entries is None and count == len(keys):
            hashes, key_bytes = keys.hashes, keys.keys
        else:
            picked = np.asarray(positions, np.int64)
            hashes, key_bytes = keys.hashes[picked], keys.keys.take(pa.array(picked))
        if operations is None:
            has_value = np.fromiter((value is not None for value in values), bool, count)
            operation_column = np.where(has_value, Operation.PUT, Operation.DELETE).astype(np.uint8)
        else:
            operation_column = np.fromiter(operations, np.uint8, count)
        columns = [
            pa.array(hashes),
            key_bytes,
            _empty_entries(count) if entries is None else pa.array(entries, pa.binary()),
            pa.array(operation_column),
            _expiry_column(expiry_ms, count),
            *codec.encode(values, lambda index: self.describe_key(positions[index])),
        ]
        if state.kind is StateKind.TIMER:
            columns.append(pa.array(np.zeros(count, np.uint32)))  # filled in by the writer
        batch = pa.RecordBatch.from_arrays(columns, schema=change_schema(state))
        self._states[state.name] = state
        self._batches.setdefault(state.name, []).append(batch)
        self.rows += count
        self.unstored_rows += count
        self.unstored_bytes += batch.nbytes

    def encode(self, *, compression: str | None, block_rows: int) -> bytes:
        """Encode the changes as a run."""
        sections = [Section(self._states[name], batches) for name, batches in sorted(self._batches.items())]
        return encode_run(sections, compression=compression, block_rows=block_rows)

    def take_part(self, *, compression: str | None, block_rows: int) -> bytes:
        """Encode what was added since the last call as a run."""
        sections = [
            Section(self._states[name], batches[self._stored.get(name, 0) :])
            for name, batches in sorted(self._batches.items())
        ]
        self._stored = {name: len(batches) for name, batches in self._batches.items()}
        self.unstored_bytes = self.unstored_rows = 0
        return encode_run(sections, compression=compression, block_rows=block_rows)


def _expiry_column(expiry_ms: int | Sequence[int | None] | None, count: int) -> pa.Array:
    if expiry_ms is None:
        return pa.nulls(count, pa.int64())
    if isinstance(expiry_ms, int):
        return pa.array(np.full(count, expiry_ms, np.int64))
    return pa.array(expiry_ms, pa.int64())


def _empty_entries(count: int) -> pa.Array:
    offsets = pa.py_buffer(np.zeros(count + 1, np.int32))
    return pa.Array.from_buffers(pa.binary(), count, [None, offsets, pa.py_buffer(b"")])
