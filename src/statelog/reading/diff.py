"""Compares a state at two checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from statelog.convert.state_tables import BEFORE, EXPIRES, HASH, TIME, map_key_fields, map_keys, prefixed
from statelog.errors import ConfigurationError, ErrorKind
from statelog.history.operator_history import overlapping
from statelog.local.stored_reader import read_run, read_threads
from statelog.log.entry import Checkpoint
from statelog.log.references import SegmentRef
from statelog.progress import tracked
from statelog.reading.before import FormerValues, PairedChanges
from statelog.reading.changes import change_sizes, change_table, changeset_name, other_state, plans_of
from statelog.reading.checkpoints import LoggedPoint
from statelog.reading.open import open_query
from statelog.reading.point import At, is_settled
from statelog.reading.read import open_reader
from statelog.reading.rows import PART_BYTES, ReadPart, merged_rows, part_sizes, scan_part
from statelog.reading.states import chosen_columns, chosen_state, is_same_state, shown_name
from statelog.runs.key_groups import HashRange, hash_range
from statelog.runs.keys import KeyCodec
from statelog.runs.merge import Garbage
from statelog.runs.reader import Run
from statelog.runs.schema import (
    EXPIRY_COLUMN,
    VALUE_COLUMN,
    Operation,
    StateDescriptor,
    StateKind,
    StateSchema,
    change_schema,
)
from statelog.runs.times import Moment
from statelog.storage.store import read_ahead

CHANGE: Final = "change"
_ENTRY: Final = ["hash", "key", "entry"]
MOST_CHANGED_BYTES: Final = 256 << 20
"""Stored changes that a difference is made of; with more of them both states are read."""

_Mask = npt.NDArray[np.bool_]


def read_diff(
    location: str | Path,
    before: At,
    after: At | None = None,
    uid: str | None = None,
    state: str | None = None,
    *,
    columns: Sequence[str] | None = None,
) -> pa.RecordBatchReader:
    """Read the differences in a state of an operator between two checkpoints.

    If the log has the changes between them, these are read, and their keys are looked up in the older state; otherwise
    both states are read.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given.
    before, after : int, datetime or str
        The two checkpoints, as in :func:`read_state`; `after` is by default the newest one. They may be in any order.
    uid : str, optional
        The operator; required if there are several.
    state : str, optional
        The state; required if there are several.
    columns : sequence of str, optional
        The columns to read, in this order; by default all but ``hash``.

    Returns
    -------
    pyarrow.RecordBatchReader
        A row per entry that differs, with the columns ``change`` (``added``, ``changed`` or ``removed``), those of
        key, map key or time, ``before_<field>`` and ``value_<field>``, and ``before_expires_ms`` and ``expires_ms`` for
        state that expires. An element of a list never changes: an old one is removed, or a new one is added.

    Raises
    ------
    ConfigurationError, StateMissingError, PinExpiredError, CorruptionError, StorageError
        As :func:`read_changes`; ConfigurationError also if the operator's keys, or the state's kind, map key or the
        types of its fields, differ between the checkpoints.

    Examples
    --------
    >>> statelog.read_diff("/data/checkpoints/flights", 1200, state="count").read_all()  # doctest: +SKIP
    """

    def make() -> tuple[pa.Schema, Iterator[pa.RecordBatch | None]]:
        query = open_query(str(location))
        new, old = query.point(uid, after), query.point(uid, before)
        stored, changes = change_table(new, state)
        former = chosen_state(old, shown_name(stored))
        if old.key_schema != new.key_schema:
            raise ConfigurationError(
                f"{new.name} has other keys at batch {new.batch} than at batch {old.batch}: its state was given up.",
                kind=ErrorKind.OTHER_SCHEMA,
                hint="Read each checkpoint with read_state.",
            )
        if not is_same_state(former, stored):
            raise other_state(new.name, former, old.batch, stored, new.batch)
        table = _DiffColumns(changes.keys, StateDescriptor.from_stored(stored))
        schema = chosen_columns(table.schema, columns, f"The difference of state '{shown_name(stored)}' of {new.name}")
        expires = any(StateDescriptor.from_stored(one).expires_by is not None for one in (former, stored))
        return schema, _rows(old, new, stored, table, expires)

    return open_reader(make, is_fixed=is_settled(before, after))


class _DiffColumns:
    """Pairs the entries of two states, and makes typed columns of those that differ."""

    def __init__(self, keys: KeyCodec, state: StateDescriptor) -> None:
        self._state = state
        self._keys = keys
        self._map_keys = map_keys(state)
        self._changes = change_schema(state)
        entry_fields, value_schema = map_key_fields(state), state.value_schema
        if state.kind is StateKind.TIMER:
            entry_fields, value_schema = [pa.field(TIME, pa.int64())], pa.schema([])
        self._value_columns = list(range(VALUE_COLUMN, VALUE_COLUMN + len(value_schema)))
        values = [*prefixed(BEFORE, value_schema), *prefixed("value", value_schema)]
        if state.expires_by is not None:
            values += [pa.field(f"{BEFORE}_{EXPIRES}", pa.int64()), pa.field(EXPIRES, pa.int64())]
        start = [pa.field(HASH, pa.int64()), pa.field(CHANGE, pa.string())]
        self.schema = pa.schema([*start, *prefixed("key", keys.schema), *entry_fields, *values])

    def compare(self, old: Iterable[pa.RecordBatch], new: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The entries that differ among all entries of the same keys, as puts, before and after."""
        sides = [pa.Table.from_batches(list(batches), self._changes) for batches in (old, new)]
        rows = pa.concat_tables(sides).combine_chunks()
        if not rows.num_rows:
            return
        side = np.repeat([0, 1], [table.num_rows for table in sides])
        entries = rows.select(_ENTRY).append_column("side", pa.array(side))
        by = [(name, "ascending") for name in entries.column_names]
        order = pc.sort_indices(entries, sort_keys=by).to_numpy()
        ordered = entries.take(pa.array(order))
        is_pair = np.zeros(len(order), bool)
        is_pair[:-1] = np.logical_and.reduce(
            [pc.equal(ordered[name].slice(0, len(order) - 1), ordered[name].slice(1)).to_numpy() for name in _ENTRY]
        )
        is_second = np.zeros(len(order), bool)
        is_second[1:] = is_pair[:-1]
        first = np.flatnonzero(~is_second)
        has_pair = is_pair[first]
        is_old, is_new = side[order[first]] == 0, (side[order[first]] == 1) | has_pair
        last = first + has_pair
        before = rows.take(pa.array(order[first], mask=~is_old))
        after = rows.take(pa.array(order[last], mask=~is_new))
        yield from self._different(rows.take(pa.array(order[first])), before, after, is_old, is_new)

    def changed(self, paired: PairedChanges, *, is_backwards: bool) -> Iterator[pa.RecordBatch]:
        """The entries that differ among those of some changes; with `is_backwards`, before and after are exchanged."""
        is_new = paired.rows.column(3).to_numpy() == Operation.PUT
        is_old = paired.former.column(0).is_valid().to_numpy(zero_copy_only=False)
        after = paired.rows.take(pa.array(np.arange(len(is_new)), mask=~is_new))
        entries, *sides = (pa.Table.from_batches([rows]) for rows in (paired.rows, paired.former, after))
        masks = [is_old, is_new]
        if is_backwards:
            sides, masks = sides[::-1], masks[::-1]
        yield from self._different(entries, *sides, *masks)

    def _different(
        self, entries: pa.Table, before: pa.Table, after: pa.Table, is_old: _Mask, is_new: _Mask
    ) -> Iterator[pa.RecordBatch]:
        """The rows of those entries that differ, given both sides, whose columns are null where there is no entry."""
        differs = is_old != is_new
        for number in [*self._value_columns, *([EXPIRY_COLUMN] if self._state.expires_by is not None else [])]:
            differs |= ~_equal(before.column(number), after.column(number))
        if not differs.any():
            return
        names = np.where(is_old & is_new, "changed", np.where(is_new, "added", "removed"))
        chosen = pa.array(differs)
        yield from self._shown(
            entries.filter(chosen), before.filter(chosen), after.filter(chosen), pa.array(names[differs])
        ).to_batches()

    def _shown(self, entries: pa.Table, before: pa.Table, after: pa.Table, names: pa.Array) -> pa.Table:
        columns: list[Any] = [entries.column(0).cast(pa.uint64()).combine_chunks().view(pa.int64()), names]
        columns += self._keys.decode_columns(entries.column(1).combine_chunks())
        if self._map_keys is not None:
            columns += self._map_keys.decode_columns(entries.column(2).combine_chunks())
        elif self._state.kind is StateKind.TIMER:
            columns.append(entries.column(VALUE_COLUMN))
        columns += [side.column(number) for side in (before, after) for number in self._value_columns]
        if self._state.expires_by is not None:
            columns += [side.column(EXPIRY_COLUMN) for side in (before, after)]
        return pa.Table.from_arrays(columns, schema=self.schema)


def _equal(first: pa.ChunkedArray, second: pa.ChunkedArray) -> _Mask:
    """Whether values are equal, nulls and NaNs among them."""
    if pa.types.is_nested(first.type):
        pairs = zip(first.to_pylist(), second.to_pylist(), strict=True)
        return np.array([repr(one) == repr(other) for one, other in pairs], bool)
    same = pc.fill_null(pc.equal(first, second), False).to_numpy()
    same |= pc.and_(pc.is_null(first), pc.is_null(second)).to_numpy()
    if pa.types.is_floating(first.type):
        same |= pc.fill_null(pc.and_(pc.is_nan(first), pc.is_nan(second)), False).to_numpy()
    return np.asarray(same, bool)


def _rows(
    old: LoggedPoint, new: LoggedPoint, stored: StateSchema, table: _DiffColumns, expires: bool
) -> Iterator[pa.RecordBatch | None]:
    """The rows of the difference; the first step pins both checkpoints and yields None.

    `expires`: entries may have expired between the checkpoints, which leaves no change.
    """
    if (old.identity, old.checkpoint.token) == (new.identity, new.checkpoint.token):
        yield None
        return
    newer, older = (new, old) if new.batch >= old.batch else (old, new)
    changes = None if expires else _changes(older, newer, stored)
    since = None if changes is None else older.batch + 1
    with (
        newer.held(since) as keep_newer,
        older.held() as keep_older,
    ):
        yield None
        if changes is None:
            found = _scanned(old, new, stored, table)
        else:
            paired = _paired(older, newer, changes, stored)
            found = (rows for pair in paired for rows in table.changed(pair, is_backwards=older is new))
        for rows in found:
            yield rows
            keep_newer()
            keep_older()


def _changes(older: LoggedPoint, newer: LoggedPoint, stored: StateSchema) -> list[Checkpoint] | None:
    """The checkpoints with the changes between two; None if these are incomplete, gone or too many."""
    if not newer.follows(older):
        return None  # one of them was taken back
    first = older.batch + 1
    # The deletion of a whole state leaves no change.
    if _generation(older, stored) != _generation(newer, stored) or newer.history.changes_from > first:
        return None
    found = list(newer.history.between(first, newer.batch))
    is_complete = all(checkpoint.segments for checkpoint in found)
    return found if is_complete and _changed_bytes(found) <= MOST_CHANGED_BYTES else None


def _changed_bytes(checkpoints: Sequence[Checkpoint]) -> int:
    return sum(change_sizes(checkpoints))


def _generation(point: LoggedPoint, stored: StateSchema) -> int:
    return point.checkpoint.generations.get(stored.name, 0)


def _paired(
    older: LoggedPoint, newer: LoggedPoint, changes: Sequence[Checkpoint], stored: StateSchema
) -> Iterator[PairedChanges]:
    """The changes between two checkpoints, as if of one batch, with their former values."""
    former = FormerValues(older.store, stored, plans_of(older))
    yield from former.pair([(newer.checkpoint, _merged(newer, changes, stored))])


def _merged(newer: LoggedPoint, changes: Sequence[Checkpoint], stored: StateSchema) -> Iterator[pa.RecordBatch]:
    """The newest change of each entry, and the clears, in run order."""
    checkpoint, store = newer.checkpoint, newer.store
    garbage = Garbage(Moment(checkpoint.batch_time_ms, checkpoint.watermark_ms), checkpoint.generations)
    declared = {stored.name: StateDescriptor.from_stored(stored)}
    size_bytes = _changed_bytes(changes)
    count = max(1, -(-size_bytes // PART_BYTES))
    for number in tracked(range(count), lambda numbers: [size_bytes // count] * len(numbers)):
        within = hash_range(number, count)
        segments = [one for checkpoint in changes for one in overlapping(checkpoint, number, count) if one.rows]

        def read(segment: SegmentRef, within: HashRange = within) -> Run:
            return read_run(store, segment, changeset_name(segment), within, states=[stored.name])

        runs = list(read_ahead(segments, read, read_threads(store)))
        for _, rows in merged_rows(runs, declared, is_bottom=False, within=within, garbage=garbage):
            yield rows


def _scanned(old: LoggedPoint, new: LoggedPoint, stored: StateSchema, table: _DiffColumns) -> Iterator[pa.RecordBatch]:
    """The difference of two whole states, part by part."""
    sources = (old, new)
    count = max(len(point.cut()) for point in sources)
    parts = [point.cut(count) for point in sources]
    for both in tracked(list(zip(*parts, strict=True)), _sizes):
        yield from table.compare(*(_entries(point, part, stored) for point, part in zip(sources, both, strict=True)))


def _sizes(pairs: Sequence[Sequence[ReadPart]]) -> list[int]:
    shares = part_sizes([part for pair in pairs for part in pair])
    return [first + second for first, second in zip(shares[::2], shares[1::2], strict=True)]


def _entries(point: LoggedPoint, part: ReadPart, stored: StateSchema) -> Iterator[pa.RecordBatch]:
    """The entries of a part, with the fields of the state as `stored` says."""
    checkpoint = replace(point.checkpoint, states=[stored])
    for _, changes in scan_part(point.store, part, checkpoint, [stored.name]):
        yield changes
