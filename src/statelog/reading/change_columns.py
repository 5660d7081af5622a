"""Turns the changes of a batch into typed columns."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from statelog.convert.state_tables import BEFORE, EXPIRES, HASH, TIME, map_key_fields, map_keys, prefixed
from statelog.runs.format import EXPIRY_COLUMN, VALUE_COLUMN, Operation
from statelog.runs.keys import KeyCodec
from statelog.runs.schema import StateDescriptor, StateKind

BATCH: Final = "batch"
BATCH_TIME: Final = "batch_time_ms"
OPERATION: Final = "operation"

_NAMES: Final = pa.array(["put", "delete", "clear"])
"""The operations as users read them, in order of :class:`Operation`."""


class ChangeColumns:
    """Converts the changes of one keyed state, of any operation, to a table with the columns `schema`.

    With `with_before` there are columns of the former values; timers have none.
    """

    def __init__(self, key_schema: pa.Schema, state: StateDescriptor, *, with_before: bool = False) -> None:
        self._state = state
        self.keys = KeyCodec(key_schema)
        self._map_keys = map_keys(state)
        entry_fields = map_key_fields(state)
        value_fields = prefixed("value", state.value_schema)
        if state.kind is StateKind.TIMER:
            entry_fields, value_fields = [pa.field(TIME, pa.int64())], []
        self._has_values = bool(value_fields)
        times = [pa.field(BATCH, pa.int64()), pa.field(BATCH_TIME, pa.int64()), pa.field(OPERATION, pa.string())]
        expiry = [pa.field(EXPIRES, pa.int64())] if state.expires_by is not None else []
        self.with_before = with_before and self._has_values
        if self.with_before:
            value_fields = [*prefixed(BEFORE, state.value_schema), *value_fields]
            expiry = [*(pa.field(f"{BEFORE}_{field.name}", field.type) for field in expiry), *expiry]
        keys = prefixed("key", key_schema)
        self.schema = pa.schema([pa.field(HASH, pa.int64()), *times, *keys, *entry_fields, *value_fields, *expiry])

    def to_rows(
        self,
        changes: pa.RecordBatch,
        batch: int,
        batch_time_ms: int,
        operation: str | None = None,
        former: pa.RecordBatch | None = None,
    ) -> pa.RecordBatch:
        """Make rows from changes in run order, and from the former values if the columns are there.

        `operation` is shown instead of theirs.
        """
        sides = [changes] if former is None else [former, changes]
        count = changes.num_rows
        columns = [
            changes.column(0).view(pa.int64()),
            pa.array(np.full(count, batch)),
            pa.array(np.full(count, batch_time_ms)),
            _NAMES.take(changes.column(3)) if operation is None else pa.array([operation] * count, pa.string()),
            *self.keys.decode_columns(changes.column(1)),
        ]
        if self._map_keys is not None:
            columns += self._decoded_map_keys(changes)
        elif self._state.kind is StateKind.TIMER:
            columns.append(changes.column(VALUE_COLUMN))
        if self._has_values:
            columns += [column for side in sides for column in side.columns[VALUE_COLUMN:]]
        if self._state.expires_by is not None:
            columns += [side.column(EXPIRY_COLUMN) for side in sides]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _decoded_map_keys(self, changes: pa.RecordBatch) -> list[pa.Array]:
        """The map keys; null where the whole map was cleared."""
        assert self._map_keys is not None
        has_entry = changes.column(3).to_numpy() != Operation.CLEAR
        places = pa.array(np.cumsum(has_entry) - 1, mask=~has_entry)
        return [
            column.take(places)
            for column in self._map_keys.decode_columns(changes.column(2).filter(pa.array(has_entry)))
        ]
