"""Finds the earlier values of the entries that batches have changed.

Changes are taken in groups of bounded size, several batches or a slice of one, and the rows of their keys in the state
before the group are found at once. All rows of an entry stand one after the other, the state before the first batch in
front. A change replaces the row in front of it, unless that one is a removal, was cleared since, or has expired.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.history.restore_plan import RestorePlan
from statelog.log.references import SegmentRef
from statelog.reading.keys import distinct_keys
from statelog.reading.rows import FoundTooMuch, Keep, RunSearch, SearchedPart, parts_of, rows_of, segment_parts
from statelog.runs.byte_slices import BUDGET, Positions, gather_rows, joined_column, row_ends, size_of, stretches
from statelog.runs.key_columns import differs_from_previous
from statelog.runs.key_groups import Hashes
from statelog.runs.schema import (
    EXPIRY_COLUMN,
    Operation,
    StateDescriptor,
    StateKind,
    StateSchema,
    change_schema,
    stored_name,
)
from statelog.runs.times import NO_TIME_MS, Moment
from statelog.storage import Store

GROUP_BYTES: Final = 16 << 20
"""Changes of a group, unless a slice of one batch is larger."""
FOUND_BYTES: Final = 64 << 20
"""Rows of the state that belong to a group, unless those of one key are more."""
_NEVER: Final = np.iinfo(np.int64).max
_INDEX: Final = ["hash", "key", "entry", "order"]
_JOINED_BYTES: Final = 4 * BUDGET.slice_bytes
"""Rows that are joined once, and not for every batch."""

_Mask = npt.NDArray[np.bool_]


class ChangedBatch(Protocol):
    """A batch whose changes are read, or the part of one subtask."""

    @property
    def batch(self) -> int:
        """Spark's batch id."""
        ...

    @property
    def batch_time_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        ...

    @property
    def watermark_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        ...

    @property
    def generations(self) -> Mapping[str, int]:
        """How often each state was deleted, for states that were ever deleted."""
        ...

    @property
    def segments(self) -> Sequence[SegmentRef]:
        """The stored changes."""
        ...


class Changes(NamedTuple):
    """Changes of a batch, in run order."""

    of: ChangedBatch
    rows: pa.RecordBatch


@dataclass(frozen=True)
class PairedChanges:
    """Changes of a batch, in run order, and what their entries were before it."""

    of: ChangedBatch
    rows: pa.RecordBatch
    """A clear is followed by a removal of each entry that it has removed."""
    former: pa.RecordBatch
    """The entries before the batch; all columns are null where there was none."""


class FormerValues:
    """Finds the former values of the changes of successive batches.

    `plans` are the state before the first of these batches. Each plan has different keys; together they have all keys
    that the batches may have.
    """

    def __init__(self, store: Store, stored: StateSchema, plans: Sequence[RestorePlan]) -> None:
        self._declared = StateDescriptor.from_stored(stored)
        self._search = RunSearch(store)
        self._parts = [part for plan in plans for part in parts_of(plan)]

    def pair(self, batches: Iterable[tuple[ChangedBatch, Iterator[pa.RecordBatch]]]) -> Iterator[PairedChanges]:
        """The changes with their former values, batch after batch.

        Those of a batch come in slices, in run order. Raises the errors of :func:`read_stored`.
        """
        group: list[Changes] = []
        for batch, slices in batches:
            parts = _joined(slices)
            first = list(itertools.islice(parts, 2))
            is_whole = len(first) < 2
            size_bytes = size_of([changes.rows for changes in group]) + size_of(first)
            if group and not (is_whole and size_bytes <= GROUP_BYTES and self._has_same_name(group[-1].of, batch)):
                yield from self._paired(group, self._parts)
                self._parts = _after(self._parts, group)
                group = []
            if is_whole:
                group += [Changes(batch, rows) for rows in first]
                continue
            for rows in itertools.chain(first, parts):
                yield from self._paired([Changes(batch, rows)], self._parts)
            self._parts = [*self._parts, *segment_parts(batch.segments)]
        if group:
            yield from self._paired(group, self._parts)

    def _has_same_name(self, one: ChangedBatch, other: ChangedBatch) -> bool:
        """Whether the state was never deleted as a whole between two batches."""
        return self._name_in(one) == self._name_in(other)

    def _name_in(self, batch: ChangedBatch) -> str:
        """The name of the state in stored runs."""
        return stored_name(self._declared.name, batch.generations.get(self._declared.name, 0))

    def _paired(self, group: list[Changes], parts: list[SearchedPart]) -> Iterator[PairedChanges]:
        """The changes of a group; in smaller groups if too much of the state, which is in `parts`, belongs to them."""
        state = replace(self._declared, name=self._name_in(group[0].of))
        halves = _halves(group)
        try:
            found = self._found(state, group, parts, None if halves is None else FOUND_BYTES)
        except FoundTooMuch:
            assert halves is not None, "there was no limit"
            first, second = halves
            yield from self._paired(first, parts)
            # The halves of one batch have no key in common.
            yield from self._paired(second, parts if len(group) == 1 else _after(parts, first))
            return
        yield from pair_changes(state, group, found)

    def _found(
        self, state: StateDescriptor, group: Sequence[Changes], parts: list[SearchedPart], max_bytes: int | None
    ) -> list[pa.RecordBatch]:
        """The rows of the state that a group's changes may replace or clear, as puts; raises FoundTooMuch."""
        hashes = np.concatenate([changes.rows.column(0).to_numpy() for changes in group])
        keys = pa.chunked_array([changes.rows.column(1) for changes in group])
        clears = np.concatenate([changes.rows.column(3).to_numpy() for changes in group]) == Operation.CLEAR
        keep: Keep | None = None
        if state.kind is StateKind.LIST and state.expires_by is None:
            # An element is written once, unless its life is renewed, so only clears have something before them.
            hashes, keys = hashes[clears], keys.filter(pa.array(clears))
        elif state.kind.has_entries:
            entries = joined_column([changes.rows.column(2) for changes in group]).filter(pa.array(~clears))
            keep = _keep_entries(entries, np.unique(hashes[clears]))
        if not len(hashes):
            return []
        wanted = distinct_keys(hashes, keys)
        return list(rows_of(state, wanted, self._search.find(parts, state.name, wanted.hashes, keep, max_bytes)))


def _joined(slices: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Slices joined to fewer and larger ones, of at most a group's size unless a single one is larger."""
    held: list[pa.RecordBatch] = []
    for rows in slices:
        if held and size_of([*held, rows]) > GROUP_BYTES:
            yield pa.concat_batches(held)
            held = []
        held.append(rows)
    if held:
        yield pa.concat_batches(held)


def _after(parts: list[SearchedPart], group: Sequence[Changes]) -> list[SearchedPart]:
    """The stored runs of the state after a group, given those before."""
    return [*parts, *(part for changes in group for part in segment_parts(changes.of.segments))]


def _keep_entries(entries: pa.Array, cleared: Hashes) -> Keep:
    """Keeps the rows of some entries, and all rows of keys with some hashes."""
    wanted = entries.unique()

    def keep(rows: pa.RecordBatch) -> pa.Array:
        is_wanted = pc.is_in(rows.column(2), value_set=wanted).to_numpy(zero_copy_only=False)
        is_clear = rows.column(3).to_numpy() == Operation.CLEAR
        return pa.array(is_wanted | is_clear | np.isin(rows.column(0).to_numpy(), cleared))

    return keep


def _halves(group: list[Changes]) -> tuple[list[Changes], list[Changes]] | None:
    """A group in two: of fewer batches, or of fewer keys of one batch; None if it cannot be cut."""
    if len(group) > 1:
        return group[: len(group) // 2], group[len(group) // 2 :]
    [(batch, rows)] = group
    hashes = rows.column(0).to_numpy()
    middle = hashes[len(hashes) // 2]
    cut = int(np.searchsorted(hashes, middle, "left")) or int(np.searchsorted(hashes, middle, "right"))
    if cut == len(hashes):
        return None
    return [Changes(batch, rows.slice(0, cut))], [Changes(batch, rows.slice(cut))]


def pair_changes(
    state: StateDescriptor, group: Sequence[Changes], found: Sequence[pa.RecordBatch]
) -> Iterator[PairedChanges]:
    """The changes of a group, in order, with their former values.

    `found` are the rows of the state before the group, as puts, that its changes may replace or clear.
    """
    sources = [*found, *(changes.rows for changes in group)]
    sizes = np.concatenate([np.diff(row_ends(batch)) for batch in sources])
    orders = np.repeat([*[0] * len(found), *range(1, len(group) + 1)], [rows.num_rows for rows in sources])
    if size_of(sources) <= _JOINED_BYTES:
        sources = [pa.concat_batches(sources)]
    rows = _ordered(state, group, sources, orders)
    former, cleared_in = rows.former(), rows.cleared_in()
    own, cleared = np.flatnonzero(rows.orders > 0), np.flatnonzero(cleared_in > 0)
    shown, before = np.concatenate([own, cleared]), np.concatenate([former[own], cleared])
    order = np.concatenate([rows.orders[own], cleared_in[cleared]])
    is_removal = np.repeat([False, True], [len(own), len(cleared)])
    sorting = np.lexsort((shown, order))
    ends = np.searchsorted(order[sorting], np.arange(len(group) + 1), "right")
    for number, changes in enumerate(group):
        chosen = sorting[ends[number] : ends[number + 1]]
        at, before_at, had = rows.places[shown[chosen]], rows.places[before[chosen]], before[chosen] >= 0
        through = np.concatenate([[0], np.cumsum(sizes[at] + np.where(had, sizes[before_at], 0))])
        for start, end in stretches(through, BUDGET.slice_bytes):
            part = slice(start, end)
            made = _removals(_taken(sources, at[part]), is_removal[chosen[part]], state)
            yield PairedChanges(changes.of, made, _taken_if(sources, before_at[part], had[part]))


@dataclass(frozen=True)
class _Rows:
    """Rows by key, entry and order: 0 is the state, 1 the first batch of the group."""

    places: Positions
    """Where each row is in the sources."""
    orders: Positions
    keys: Positions
    """Equal for the rows of one key, ascending."""
    is_put: _Mask
    is_clear: _Mask
    follows: _Mask
    """Whether the row before is of the same entry."""
    expiry: Positions
    now_ms: Positions
    """The time of each order."""

    def former(self) -> Positions:
        """The row that each change replaces, or -1."""
        last = np.arange(len(self.orders)) - 1
        codes, clears = self._codes()
        before = np.searchsorted(clears, codes, "left") - 1
        cleared = np.where(before >= 0, clears[before], -1) if len(clears) else np.full(len(codes), -1)
        # A clear stands before the puts of its own batch.
        counts = self.follows & self.is_put[last] & (codes[last] >= cleared) & ~self.is_clear
        return np.where(counts & self._lives(last, self.orders), last, -1)

    def cleared_in(self) -> Positions:
        """The order of the clear that has removed each row; 0 without one, or if a change of its batch shows it."""
        codes, clears = self._codes()
        if not len(clears):
            return np.zeros(len(codes), np.int64)
        after = np.searchsorted(clears, codes, "right")
        clear = np.where(after < len(clears), clears[np.minimum(after, len(clears) - 1)], _NEVER)
        is_own = clear < (self.keys + 1) * len(self.now_ms)
        until = np.append(np.where(self.follows[1:], codes[1:], _NEVER), _NEVER)
        orders = np.where(is_own, clear % len(self.now_ms), 0)
        removed = self.is_put & is_own & (clear < until) & self._lives(np.arange(len(codes)), orders)
        return np.where(removed, orders, 0)

    def _codes(self) -> tuple[Positions, Positions]:
        """The number of each row by key and order, and those of the clears, which ascend."""
        codes = self.keys * len(self.now_ms) + self.orders
        return codes, codes[self.is_clear]

    def _lives(self, rows: Positions, orders: Positions) -> _Mask:
        """Whether some rows have not expired by the batches of some orders."""
        return self.expiry[rows] > self.now_ms[orders]


def _ordered(
    state: StateDescriptor, group: Sequence[Changes], sources: Sequence[pa.RecordBatch], orders: Positions
) -> _Rows:
    columns = [joined_column([rows.column(number) for rows in sources]) for number in range(EXPIRY_COLUMN + 1)]
    index = pa.table([*columns[:3], orders], names=_INDEX)
    places = pc.sort_indices(index, [(name, "ascending") for name in _INDEX])
    hashes = columns[0].take(places).to_numpy()
    is_new_key = differs_from_previous(columns[1].take(places))
    is_new_key[1:] |= hashes[1:] != hashes[:-1]
    operations = columns[3].to_numpy()[places]
    times = [Moment(changes.of.batch_time_ms, changes.of.watermark_ms) for changes in group]
    now_ms = [NO_TIME_MS if state.expires_by is None else time.now_ms(state.expires_by) for time in times]
    return _Rows(
        places=places.to_numpy().astype(np.int64),
        orders=orders[places],
        keys=np.cumsum(is_new_key).astype(np.int64),
        is_put=operations == Operation.PUT,
        is_clear=operations == Operation.CLEAR,
        follows=~(is_new_key | differs_from_previous(columns[2].take(places))),
        expiry=pc.fill_null(columns[EXPIRY_COLUMN], _NEVER).to_numpy()[places],
        now_ms=np.array([NO_TIME_MS, *now_ms]),
    )


def _taken(sources: Sequence[pa.RecordBatch], rows: Positions) -> pa.RecordBatch:
    """Some rows, at most a slice of them or a single one."""
    if len(sources) == 1:
        return sources[0].take(pa.array(rows))
    [taken] = gather_rows(sources, rows, BUDGET.slice_bytes)
    return taken


def _taken_if(sources: Sequence[pa.RecordBatch], rows: Positions, exists: _Mask) -> pa.RecordBatch:
    """Some rows; all columns of those that do not exist are null."""
    taken = _taken(sources, rows[exists]) if exists.any() else sources[0].slice(0, 0)
    return taken.take(pa.array(np.cumsum(exists) - 1, mask=~exists))


def _removals(rows: pa.RecordBatch, is_removal: _Mask, state: StateDescriptor) -> pa.RecordBatch:
    """The rows, some of them as removals of their entries."""
    if not is_removal.any():
        return rows
    kept = pa.array(np.arange(rows.num_rows), mask=is_removal)
    operations = np.where(is_removal, np.uint8(Operation.DELETE), rows.column(3).to_numpy())
    columns = [*rows.columns[:3], pa.array(operations), *(column.take(kept) for column in rows.columns[EXPIRY_COLUMN:])]
    return pa.RecordBatch.from_arrays(columns, schema=change_schema(state))
