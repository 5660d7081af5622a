"""States as tables: typed columns for keys and values, as other tools read them.

Fields of the key become columns ``key_<field>``, fields of a map's keys ``mapkey_<field>``, and fields of values
``value_<field>``, or ``before_<field>`` if they are former values. Columns without a prefix are statelog's own:
``hash``, ``position`` (of an element), ``time_ms`` (of a timer), ``expires_ms``, and ``subtask`` (of unkeyed state).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.errors import ConfigurationError, ErrorKind
from statelog.operators.unkeyed.snapshot import section_schema
from statelog.operators.unkeyed.states import OperatorStateDescriptor
from statelog.runs.byte_slices import BUDGET, cut_rows, gather_rows, join_rows
from statelog.runs.key_groups import Hashes
from statelog.runs.keys import KeyCodec
from statelog.runs.schema import (
    EXPIRY_COLUMN,
    VALUE_COLUMN,
    Operation,
    StateDescriptor,
    StateKind,
    StateSchema,
    change_schema,
)
from statelog.runs.writer import STORED_BLOCK_BYTES, STORED_BLOCK_ROWS, RunWriter

HASH: Final = "hash"
_ENTRY_COLUMNS: Final = [0, 1, 2]
"""Hash, key and entry of a change, which give the order of changes."""
POSITION: Final = "position"
SUBTASK: Final = "subtask"
TIME: Final = "time_ms"
EXPIRES: Final = "expires_ms"
BEFORE: Final = "before"
"""Begins the names of columns with a former value."""
_MOST_ELEMENTS: Final = 1 << 30
"""A list's ordinals have two bits for the phase of the batch."""
_SIGN: Final = np.uint64(1 << 63)


class StateColumns:
    """Converts the changes of one keyed state, all of them puts, to a table with the columns `schema`, and back."""

    def __init__(self, key_schema: pa.Schema, state: StateDescriptor) -> None:
        self._state = state
        self._keys = KeyCodec(key_schema)
        self._map_keys = map_keys(state)
        key_fields = prefixed("key", key_schema)
        self._key_names = [field.name for field in key_fields]
        entry_fields = map_key_fields(state)
        value_fields = prefixed("value", state.value_schema)
        if state.kind is StateKind.LIST:
            entry_fields = [pa.field(POSITION, pa.int64())]
        elif state.kind is StateKind.TIMER:
            entry_fields = [pa.field(TIME, pa.int64())]
            value_fields = []
        self._entry_names = [field.name for field in entry_fields]
        self._value_names = [field.name for field in value_fields]
        expiry = [pa.field(EXPIRES, pa.int64())] if state.expires_by is not None else []
        self.schema = pa.schema([pa.field(HASH, pa.int64()), *key_fields, *entry_fields, *value_fields, *expiry])

    # ---- Changes to rows ----

    def to_rows(self, changes: pa.RecordBatch, positions: Positions) -> pa.RecordBatch:
        """Make rows from puts in run order; pass the same `positions` with all batches of a state."""
        columns = [changes.column(0).view(pa.int64()), *self._keys.decode_columns(changes.column(1))]
        match self._state.kind:
            case StateKind.MAP:
                assert self._map_keys is not None
                columns += self._map_keys.decode_columns(changes.column(2))
            case StateKind.LIST:
                columns.append(pa.array(positions.of(changes)))
            case StateKind.TIMER:
                columns.append(changes.column(VALUE_COLUMN))
        if self._value_names:
            columns += changes.columns[VALUE_COLUMN:]
        if self._state.expires_by is not None:
            columns.append(changes.column(EXPIRY_COLUMN))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    # ---- Rows to changes ----

    def to_changes(self, rows: pa.Table, max_bytes: int = BUDGET.slice_bytes) -> Iterator[pa.RecordBatch]:
        """Make puts, in run order, from rows in any order.

        Works on `max_bytes` at once, because all rows together may exceed Arrow's offsets. Raises ConfigurationError if
        a column is missing or has another type, or if two rows are for one entry.
        """
        yield from self.distinct(_in_run_order(list(self.to_puts(rows, max_bytes)), max_bytes))

    def to_puts(self, rows: pa.Table, max_bytes: int = BUDGET.slice_bytes) -> Iterator[pa.RecordBatch]:
        """Make puts in the order of the rows; otherwise as :meth:`to_changes`."""
        columns = [self._column(rows, name) for name in self.schema.names]
        checked = pa.Table.from_arrays(columns, self.schema.names)
        for batch in checked.to_batches():
            yield from map(self._puts, cut_rows(batch, max_bytes))

    def distinct(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The changes of batches in run order; raises ConfigurationError if two are for one entry."""
        last: list[pa.RecordBatch] = []
        for batch in batches:
            entries = batch.select(_ENTRY_COLUMNS)
            self._require_distinct(pa.concat_batches([*last, entries]))
            last = [entries.slice(entries.num_rows - 1)]
            yield batch

    def _puts(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = dict(zip(self.schema.names, rows.columns, strict=True))
        is_timer = self._state.kind is StateKind.TIMER
        changes = [
            columns[HASH].view(pa.uint64()),
            self._keys.encode_columns([columns[name] for name in self._key_names]),
            self._entry_bytes(columns, rows.num_rows),
            pa.array(np.full(rows.num_rows, Operation.PUT, np.uint8)),
            columns.get(EXPIRES, pa.nulls(rows.num_rows, pa.int64())),
            *(columns[name] for name in ([TIME] if is_timer else self._value_names)),
        ]
        if is_timer:
            changes.append(pa.nulls(rows.num_rows, pa.uint32()))  # the writer fills it in
        return pa.RecordBatch.from_arrays(changes, schema=change_schema(self._state))

    def _column(self, rows: pa.Table, name: str) -> pa.ChunkedArray:
        wanted = self.schema.field(name).type
        place = rows.schema.get_field_index(name)
        if place < 0:
            raise self._misfit(
                f" have the columns {', '.join(rows.schema.names)}; '{name}' is missing.",
                hint=f"They must be {', '.join(self.schema.names)}.",
            )
        column = rows.column(place)
        try:
            cast = column if column.type == wanted else column.cast(wanted)
        except pa.ArrowException as error:
            raise self._misfit(
                f": column '{name}' has type {column.type}, not {wanted}: {error}.", hint="Cast it."
            ) from error
        if name in (POSITION, TIME) and cast.null_count:
            raise self._misfit(f": column '{name}' holds nulls.", hint="Give each row a number.")
        return cast

    def _misfit(self, problem: str, hint: str) -> ConfigurationError:
        return ConfigurationError(f"The rows of {self._state}{problem}", kind=ErrorKind.OTHER_SCHEMA, hint=hint)

    def _entry_bytes(self, columns: dict[str, pa.Array], count: int) -> pa.Array:
        match self._state.kind:
            case StateKind.MAP:
                assert self._map_keys is not None
                return self._map_keys.encode_columns([columns[name] for name in self._entry_names])
            case StateKind.LIST:
                return self.element_entries(columns[POSITION].to_numpy())
            case StateKind.TIMER:
                times = columns[TIME].to_numpy().view(np.uint64) ^ _SIGN
                return _fixed(_big_endian(times, ">u8"))
        return _fixed(np.zeros((count, 0), np.uint8))

    def element_entries(self, positions: npt.NDArray[np.int64]) -> pa.Array:
        """The entries of a list's elements; raises ConfigurationError for a position that is out of range."""
        count = len(positions)
        if count and not 0 <= positions.min() <= positions.max() < _MOST_ELEMENTS:
            raise self._misfit(
                f": a position is not between 0 and {_MOST_ELEMENTS - 1}.",
                hint="Number the elements of each key from 0.",
            )
        # Epoch and batch are 0, so elements that are appended later come after these.
        return _fixed(np.concatenate([np.zeros((count, 12), np.uint8), _big_endian(positions, ">u4")], axis=1))

    def _require_distinct(self, changes: pa.RecordBatch) -> None:
        hashes = changes.column(0).to_numpy()
        again = np.flatnonzero(hashes[1:] == hashes[:-1])
        if not len(again):
            return
        first, second = changes.take(pa.array(again)), changes.take(pa.array(again + 1))
        same = pc.and_(pc.equal(first.column(1), second.column(1)), pc.equal(first.column(2), second.column(2)))
        if same.true_count:
            key = self._keys.decode(first.column(1)[same.index(True).as_py()].as_py())
            raise self._misfit(
                f": key {key!r} has two rows for one entry.",
                hint="A value has one row per key, a map one per key and map key, a list one per key and position.",
            )


class ElementColumns:
    """Converts the sections of one unkeyed state, one per subtask, to a table and back.

    The columns are the subtask, the element's position in it, and the element's fields.
    """

    def __init__(self, stored: StateSchema) -> None:
        self._stored = stored
        state = OperatorStateDescriptor.from_stored(stored)
        self._map_keys = map_keys(state)
        entry_fields = map_key_fields(state)
        self._entry_names = [field.name for field in entry_fields]
        value_fields = prefixed("value", state.value_schema)
        self._value_names = [field.name for field in value_fields]
        places = [pa.field(SUBTASK, pa.int32()), pa.field(POSITION, pa.int64())]
        self.schema = pa.schema([*places, *entry_fields, *value_fields])

    def to_rows(self, elements: pa.RecordBatch, subtask: int) -> pa.RecordBatch:
        """Make rows from a subtask's elements."""
        count = elements.num_rows
        columns = [pa.array(np.full(count, subtask, np.int32)), pa.array(np.arange(count))]
        values = elements.columns
        if self._map_keys is not None:
            columns += self._map_keys.decode_columns(values[0])
            values = values[1:]
        return pa.RecordBatch.from_arrays([*columns, *values], schema=self.schema)

    def to_elements(self, rows: pa.Table, subtask: int) -> pa.RecordBatch:
        """Make a subtask's elements, in order, from the rows of all subtasks, as read from the files."""
        own = rows.filter(pc.equal(rows.column(SUBTASK), subtask)).sort_by(POSITION).combine_chunks()
        own = own.cast(self.schema)
        columns = [own.column(name).combine_chunks() for name in self._value_names]
        if self._map_keys is not None:
            entries = self._map_keys.encode_columns([own.column(name).combine_chunks() for name in self._entry_names])
            columns.insert(0, entries)
        return pa.RecordBatch.from_arrays(columns, schema=section_schema(self._stored))


def prefixed(prefix: str, schema: pa.Schema) -> list[pa.Field]:
    """The fields of a schema, named as columns of a table."""
    return [pa.field(f"{prefix}_{field.name}", field.type) for field in schema]


def map_keys(state: StateDescriptor | OperatorStateDescriptor) -> KeyCodec | None:
    """The codec of a map's keys; None for other states."""
    if state.entry_schema is None:
        return None
    return KeyCodec(state.entry_schema, f"map key of state '{state.name}'", with_maps=False)


def map_key_fields(state: StateDescriptor | OperatorStateDescriptor) -> list[pa.Field]:
    """The columns of a map's keys."""
    return [] if state.entry_schema is None else prefixed("mapkey", state.entry_schema)


class Positions:
    """Numbers the elements of each list across batches in run order: a list may continue in the next batch."""

    def __init__(self) -> None:
        self._last: tuple[int, bytes] | None = None
        self._next = 0

    def of(self, changes: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """The position of each element of the next batch."""
        if not changes.num_rows:
            return np.zeros(0, np.int64)
        ranks = _ranks(changes)
        if _key_at(changes, 0) == self._last:
            ranks[ranks == np.arange(len(ranks))] += self._next
        self._last, self._next = _key_at(changes, len(ranks) - 1), int(ranks[-1]) + 1
        return ranks


def _key_at(changes: pa.RecordBatch, row: int) -> tuple[int, bytes]:
    return changes.column(0)[row].as_py(), changes.column(1)[row].as_py()


def _ranks(changes: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """The position of each row among the rows of its key."""
    rows = np.arange(changes.num_rows)
    return rows - np.maximum.accumulate(np.where(first_rows(changes), rows, 0))


def first_rows(changes: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Mask of the rows whose key is not that of the row before."""
    count = changes.num_rows
    is_first = np.ones(count, bool)
    if count > 1:
        hashes = changes.column(0).to_numpy()
        keys = changes.column(1)
        same = pc.equal(keys.slice(1), keys.slice(0, count - 1)).to_numpy(zero_copy_only=False)
        is_first[1:] = ~same | (hashes[1:] != hashes[:-1])
    return is_first


def _in_run_order(batches: Sequence[pa.RecordBatch], max_bytes: int) -> Iterator[pa.RecordBatch]:
    if not batches:
        return
    entries = pa.Table.from_batches([batch.select(_ENTRY_COLUMNS) for batch in batches])
    hashes: Hashes = entries.column(0).to_numpy()
    if bool((hashes[1:] > hashes[:-1]).all()):
        yield from join_rows(batches, max_bytes)
        return
    order = pc.sort_indices(entries, sort_keys=[(name, "ascending") for name in entries.column_names])
    yield from gather_rows(batches, order.to_numpy().astype(np.int64), max_bytes)


def _big_endian(values: npt.NDArray[Any], kind: str) -> npt.NDArray[np.uint8]:
    return values.astype(kind).view(np.uint8).reshape(len(values), np.dtype(kind).itemsize)


def _fixed(matrix: npt.NDArray[np.uint8]) -> pa.Array:
    """A binary array of rows of equal length."""
    count, width = matrix.shape
    offsets = np.arange(0, width * count + 1, width, dtype=np.int32) if width else np.zeros(count + 1, np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(matrix))]
    return pa.Array.from_buffers(pa.binary(), count, buffers)


def encode_tables(
    key_schema: pa.Schema,
    tables: Sequence[tuple[StateSchema, pa.Table]],
    compression: str | None,
    slice_bytes: int = BUDGET.slice_bytes,
) -> tuple[bytes, int]:
    """Encode tables with the columns of :class:`StateColumns` as one run; returns its bytes and number of rows."""
    sink = pa.BufferOutputStream()
    writer = RunWriter(sink, compression=compression, block_rows=STORED_BLOCK_ROWS, whole_bytes=STORED_BLOCK_BYTES)
    for stored, rows in tables:
        state = StateDescriptor.from_stored(stored)
        for changes in StateColumns(key_schema, state).to_changes(rows, slice_bytes):
            writer.add(state, changes)
    rows_written = writer.finish()
    return sink.getvalue().to_pybytes(), rows_written
