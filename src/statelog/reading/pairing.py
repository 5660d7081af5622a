"""Pairs the changes of some batches with what their entries were before each batch.

All rows of an entry stand one after the other, the state before the first batch in front. A change replaces the row in
front of it, unless that one is a removal, was cleared since, or has expired.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.log.references import SegmentRef
from statelog.runs.byte_slices import BUDGET, Positions, gather_rows, joined_column, row_ends, size_of, stretches
from statelog.runs.format import EXPIRY_COLUMN, Operation, change_schema
from statelog.runs.key_columns import differs_from_previous
from statelog.runs.schema import StateDescriptor
from statelog.runs.times import NO_TIME_MS, Moment

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
        """How often each state that was ever deleted has been."""
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
    """Behind a clear there is a removal of each entry that it has removed."""
    former: pa.RecordBatch
    """The entries before the batch; all columns are null where there was none."""


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
        """The order of the clear that has removed each row; 0 without one, or if a change of its batch tells it."""
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
