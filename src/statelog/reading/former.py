"""Looks up what the entries that batches have changed were before.

Changes are taken in groups of bounded size, several batches or a slice of one, and the rows of their keys in the state
before the group are found at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statelog.history.restore_plan import RestorePlan
from statelog.reading.lookup import distinct_keys, rows_of
from statelog.reading.pairing import ChangedBatch, Changes, PairedChanges, pair_changes
from statelog.reading.run_search import FoundTooMuch, Keep, RunSearch, SearchedPart, parts_of, segment_parts
from statelog.runs.byte_slices import joined_column, size_of
from statelog.runs.format import Operation
from statelog.runs.key_groups import Hashes
from statelog.runs.schema import StateDescriptor, StateKind, StateSchema, stored_name
from statelog.storage import Store

GROUP_BYTES: Final = 16 << 20
"""Changes of a group, unless a slice of one batch is larger."""
FOUND_BYTES: Final = 64 << 20
"""Rows of the state that belong to a group, unless those of one key are more."""


class FormerValues:
    """Finds the former values of the changes of successive batches.

    `plans` are the state before the first of them, each of other keys; together of all keys that the batches may have.
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
        """Whether the state was not deleted as a whole between two batches."""
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
    """Slices in fewer and larger ones, of a group's size at most unless one is larger."""
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
