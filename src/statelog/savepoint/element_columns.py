"""The elements of unkeyed state as a table; columns are named as in :mod:`statelog.savepoint.columns`."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statelog.operators.unkeyed.snapshot import section_schema
from statelog.operators.unkeyed.states import OperatorStateDescriptor
from statelog.runs.keys import KeyCodec
from statelog.runs.schema import StateSchema
from statelog.savepoint.columns import prefixed

_SUBTASK: Final = "subtask"
_POSITION: Final = "position"


class ElementColumns:
    """Converts the sections of one state, one per subtask, to a table and back.

    The columns are the subtask, the element's position in it, and the element's fields.
    """

    def __init__(self, stored: StateSchema) -> None:
        self._stored = stored
        state = OperatorStateDescriptor.from_stored(stored)
        self._entries: KeyCodec | None = None
        entry_fields: list[pa.Field] = []
        if state.entry_schema is not None:
            self._entries = KeyCodec(state.entry_schema, f"map key of state '{state.name}'", with_maps=False)
            entry_fields = prefixed("mapkey", state.entry_schema)
        self._entry_names = [field.name for field in entry_fields]
        value_fields = prefixed("value", state.value_schema)
        self._value_names = [field.name for field in value_fields]
        places = [pa.field(_SUBTASK, pa.int32()), pa.field(_POSITION, pa.int64())]
        self.schema = pa.schema([*places, *entry_fields, *value_fields])

    def to_rows(self, elements: pa.RecordBatch, subtask: int) -> pa.RecordBatch:
        """Make rows from a subtask's elements."""
        count = elements.num_rows
        columns = [pa.array(np.full(count, subtask, np.int32)), pa.array(np.arange(count))]
        values = elements.columns
        if self._entries is not None:
            keys = [self._entries.decode(key) for key in values[0].to_pylist()]
            for field, column in zip(self._entries.schema, zip(*keys, strict=True), strict=True):
                columns.append(pa.array(column, field.type))
            values = values[1:]
        return pa.RecordBatch.from_arrays([*columns, *values], schema=self.schema)

    def to_elements(self, rows: pa.Table, subtask: int) -> pa.RecordBatch:
        """Make a subtask's elements, in order, from the rows of all subtasks, as read from the files."""
        own = rows.filter(pc.equal(rows.column(_SUBTASK), subtask)).sort_by(_POSITION).combine_chunks()
        own = own.cast(self.schema)
        columns = [own.column(name).combine_chunks() for name in self._value_names]
        if self._entries is not None:
            entries = self._entries.encode_columns([own.column(name).combine_chunks() for name in self._entry_names])
            columns.insert(0, entries)
        return pa.RecordBatch.from_arrays(columns, schema=section_schema(self._stored))
