"""Reads a range of one key's entries out of runs: a page of bounded size, without the entries before and after it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statelog.runs.byte_slices import Budget, gather_rows, joined_column, row_ends
from statelog.runs.format import Operation
from statelog.runs.key_columns import differs_from_previous
from statelog.runs.reader import RunBlock, RunSection
from statelog.runs.schema import StateDescriptor
from statelog.tables.table import EntryPage, EntryRange, EntryRows, KeyBatch

_KEY: Final = 1
_ENTRY: Final = 2
_PART_OF_SLICE: Final = 4


def page_of_runs(
    state: StateDescriptor,
    sections: Iterable[RunSection],
    key: KeyBatch,
    wanted: EntryRange,
    budget: Budget,
    older: EntryPage | None = None,
) -> EntryPage:
    """A page of a key's entries out of the sections of a state, newest first, over a page of older entries."""
    sources: list[_Source] = []
    for section in sections:
        sources.append(_read(section, key, wanted, budget.slice_bytes // _PART_OF_SLICE))
        if sources[-1].is_cleared:
            older = None
            break
    if older is not None:
        rest = older.rest
        unread = None if rest is None else rest.end if wanted.from_end else rest.first
        sources.append(_Source(_as_rows(older.rows), unread))
    unread_ones = [source.unread for source in sources if source.unread is not None]
    page, left = wanted, None
    if unread_ones:  # on this side of all of them no source has more rows
        page, left = wanted.cut(max(unread_ones) if wanted.from_end else min(unread_ones))
    return EntryPage(_newest(state, [source.within(page) for source in sources], budget), left)


@dataclass
class _Source:
    """Rows of a key in one run: entry, operation, expiry and value."""

    rows: list[pa.RecordBatch] = field(default_factory=list)
    unread: bytes | None = None
    """Where the rows of the range begin that were not read, or where they end if it is read from its end."""
    is_cleared: bool = False
    """Whether the run removes the key's entries in older runs."""

    def within(self, page: EntryRange) -> list[pa.RecordBatch]:
        """The rows of a part of the range."""
        found: list[pa.RecordBatch] = []
        for rows in self.rows:
            entries = rows.column(0)
            first = _bisect(entries, page.first, 0, len(entries))
            end = _bisect(entries, page.end, first, len(entries))
            if first < end:
                found.append(rows.slice(first, end - first))
        return found


def _read(section: RunSection, key: KeyBatch, wanted: EntryRange, max_bytes: int) -> _Source:
    """Read rows of a run from one end of a range, up to a number and a size; at least one if there is any."""
    source, most = _Source(), wanted.most
    blocks = section.blocks_between(int(key.hashes[0]), int(key.hashes[0]))
    for block in reversed(blocks) if wanted.from_end else blocks:
        low, high = _rows_of_key(block, key)
        entries = block.batch.column(_ENTRY)
        if low < high and entries[low].as_py() == b"":
            source.is_cleared = True
        low = _bisect(entries, wanted.first, low, high)
        high = _bisect(entries, wanted.end, low, high)
        if low == high or source.unread is not None:
            continue
        count = min(high - low, max(1, most))
        rows = block.take(np.arange(high - count, high) if wanted.from_end else np.arange(low, low + count))
        fitting = _fitting(rows, most, max_bytes, from_end=wanted.from_end)
        if not source.rows:
            fitting = max(1, fitting)
        rows = rows.slice(count - fitting if wanted.from_end else 0, fitting)
        if fitting:
            columns = [rows.column(index) for index in range(_ENTRY, rows.num_columns)]
            source.rows.append(pa.RecordBatch.from_arrays(columns, rows.schema.names[_ENTRY:]))
        most -= fitting
        max_bytes -= rows.nbytes
        if fitting < high - low:
            entry = entries[high - fitting - 1 if wanted.from_end else low + fitting].as_py()
            source.unread = entry + b"\0" if wanted.from_end else entry
    return source


def _rows_of_key(block: RunBlock, key: KeyBatch) -> tuple[int, int]:
    """A key's first row in a block, and the one after its last."""
    low, high = (int(span[0]) for span in block.spans(key.hashes))
    keys, name = block.batch.column(_KEY), key.keys[0].as_py()
    if low < high and not keys[low].as_py() == keys[high - 1].as_py() == name:  # several keys have this hash
        low = _bisect(keys, name, low, high)
        high = _bisect(keys, name + b"\0", low, high)
    return low, high


def _bisect(values: pa.Array, value: bytes, low: int, high: int) -> int:
    """The first of ascending values from `low` up to `high` that is not less than `value`."""
    return bisect_left(range(high), value, low, key=lambda row: values[row].as_py())


def _fitting(rows: pa.RecordBatch, most: int, max_bytes: int, *, from_end: bool) -> int:
    """How many rows fit, counted from one end."""
    if rows.num_rows <= most and rows.nbytes <= max_bytes:
        return int(rows.num_rows)
    ends = row_ends(rows)
    sizes = ends[-1] - ends[:-1][::-1] if from_end else ends[1:]
    return min(most, int(np.searchsorted(sizes, max_bytes, "right")))


def _as_rows(found: EntryRows) -> list[pa.RecordBatch]:
    """The answer of a table as rows of a run."""
    batches: list[pa.RecordBatch] = []
    start = 0
    for values in found.values.to_batches():
        count = values.num_rows
        entries, expiry = found.entries.slice(start, count).combine_chunks(), found.expiry.slice(start, count)
        operations = pa.array(np.full(count, Operation.PUT, np.uint8))
        names = ["entry", "op", "expiry", *[f"v{index}" for index in range(values.num_columns)]]
        batches.append(pa.RecordBatch.from_arrays([entries, operations, expiry, *values.columns], names))
        start += count
    return batches


def _newest(state: StateDescriptor, sources: list[list[pa.RecordBatch]], budget: Budget) -> EntryRows:
    """The newest put of every entry, in order; the sources are the newest first."""
    batches = [rows for source in sources for rows in source]
    is_put = [rows.column(1).to_numpy() == Operation.PUT for rows in batches]
    if len(batches) > 1:
        ages = np.repeat(np.arange(len(sources)), [sum(rows.num_rows for rows in source) for source in sources])
        columns = {"entry": joined_column([rows.column(0) for rows in batches]), "age": ages}
        order = pc.sort_indices(pa.table(columns), [(name, "ascending") for name in columns])
        kept = differs_from_previous(columns["entry"].take(order)) & np.concatenate(is_put)[order.to_numpy()]
        batches = list(gather_rows(batches, order.to_numpy()[kept].astype(np.int64), budget.slice_bytes))
    elif batches and not is_put[0].all():
        batches = [batches[0].filter(pa.array(is_put[0]))]
    schema = state.value_schema
    values = [pa.RecordBatch.from_arrays(rows.columns[3 : 3 + len(schema)], schema=schema) for rows in batches]
    expiry = joined_column([rows.column(2) for rows in batches]) if batches else pa.array([], pa.int64())
    entries = pa.chunked_array([rows.column(0) for rows in batches], pa.binary())
    return EntryRows(np.zeros(len(entries), np.int64), pa.Table.from_batches(values, schema), expiry, entries)
