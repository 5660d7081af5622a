"""Reads runs, and searches them in place."""

from __future__ import annotations

import bisect
import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from statelog.errors import CorruptionError, ErrorKind
from statelog.runs.arrow_messages import MalformedMessage, read_batch
from statelog.runs.byte_slices import Positions, bytes_before
from statelog.runs.evolution import can_read, project
from statelog.runs.key_groups import Hashes, HashRange
from statelog.runs.schema import (
    MAGIC,
    ORDER_COLUMN,
    TAIL,
    TAIL_MAGIC,
    VALUE_COLUMN,
    Footer,
    Operation,
    StateDescriptor,
    StoredBlock,
    change_schema,
    plain_name,
)
from statelog.sealed import MALFORMED

_footer_decoder: Final = msgspec.msgpack.Decoder(Footer)
_NEVER_NULL: Final = (0, 1, 2, 3)
"""Columns of a batch of changes: hash, key, entry and operation."""


class RunBytes(Protocol):
    """The bytes of a run, read as they are needed; otherwise like an Arrow buffer."""

    @property
    def size(self) -> int:
        """Number of bytes."""
        ...

    def slice(self, offset: int = 0, length: int | None = None) -> pa.Buffer:
        """`length` bytes from `offset`, or all up to the end."""
        ...


class Run:
    """A run that can be searched; CorruptionError if its bytes are not a run or its footer is damaged.

    Blocks are checked when they are first read, and a memory map is read only where it is searched. `name` and `offset`
    say in messages where the bytes come from. Only blocks of a stored run (`is_stored`) may be compressed; those of
    others are not copied when they are read. `on_damage` is called for a damaged block, to remove a copy that can be
    fetched again. Of a run that `is_trusted`, because this host has written or verified it, only checksums are
    checked.
    """

    def __init__(
        self,
        buffer: pa.Buffer | RunBytes,
        name: str,
        offset: int = 0,
        *,
        is_stored: bool = False,
        on_damage: Callable[[], None] | None = None,
        is_trusted: bool = False,
    ) -> None:
        self.name = name
        self.size_bytes: int = buffer.size
        footer = self._read_footer(buffer, offset)
        source = _Source(buffer, name, offset, is_stored, on_damage, is_trusted)
        self.sections: dict[str, RunSection] = {}
        self._evolved: dict[str, RunSection] = {}
        descriptors = [StateDescriptor.from_stored(stored) for stored in footer.states]
        for index, state in enumerate(descriptors):
            schema = change_schema(state)
            blocks = [RunBlock(source, stored, schema) for stored in footer.blocks if stored.state == index]
            self.sections[state.name] = RunSection(state, blocks)
        self.rows = sum(stored.rows for stored in footer.blocks)

    def _read_footer(self, buffer: pa.Buffer | RunBytes, offset: int) -> Footer:
        where = f"{self.name}, run of {buffer.size} bytes at offset {offset}"
        if buffer.size < len(MAGIC) + TAIL.size:
            raise _damaged(f"{where}: it is too short for a run.", ErrorKind.FORMAT)
        # If a run is read in parts, its first bytes are not among those that are needed.
        if isinstance(buffer, pa.Buffer) and buffer.slice(0, len(MAGIC)).to_pybytes() != MAGIC:
            raise _damaged(f"{where}: no run of a known version starts here.", ErrorKind.FORMAT)
        tail_at = buffer.size - TAIL.size
        length, checksum, tail_magic = TAIL.unpack(buffer.slice(tail_at).to_pybytes())
        if tail_magic != TAIL_MAGIC or length > tail_at - len(MAGIC):
            raise _damaged(f"{where}: its last {TAIL.size} bytes are damaged.", ErrorKind.FORMAT)
        data = buffer.slice(tail_at - length, length).to_pybytes()
        if xxhash.xxh3_64_intdigest(data) != checksum:
            raise _damaged(f"{where}: its footer at {offset + tail_at - length} is damaged.")
        try:
            return _footer_decoder.decode(data)
        except MALFORMED as error:
            raise _damaged(f"{where}: its footer is of an unknown form: {error}.", ErrorKind.FORMAT) from error

    def section(self, state: StateDescriptor) -> RunSection | None:
        """The changes of one state, with the fields of `state`; None if the run has none.

        Raises CorruptionError if the run holds the state with another kind, or with fields that cannot become those of
        `state`.
        """
        section = self.sections.get(state.name)
        if section is None or section.state == state:
            return section
        evolved = self._evolved.get(state.name)
        if evolved is None or evolved.state != state:
            if not can_read(section.state, state):
                raise _damaged(f"{self.name}: it holds {section.state} where {state} is expected.", ErrorKind.FORMAT)
            blocks: list[RunBlock] = [_EvolvedBlock(block, section.state, state) for block in section.blocks]
            evolved = self._evolved[state.name] = RunSection(state, blocks)
        return evolved

    def of_states(self, names: Collection[str] | None) -> Run:
        """The run with only the states of these declared names; the run itself for None."""
        if names is None or all(plain_name(name) in names for name in self.sections):
            return self
        return self._with({name: section for name, section in self.sections.items() if plain_name(name) in names})

    def searched(self, name: str, hashes: Hashes, keep: Callable[[pa.RecordBatch], pa.Array] | None = None) -> Run:
        """The rows of one state that have some hashes, as a run in memory; the blocks are read one by one and not kept.

        The hashes ascend. `keep` makes a mask of the rows that are wanted among them.
        """
        section = self.sections.get(name)
        if section is None:
            return self._with({})
        found: list[RunBlock] = []
        for block, start, end in section.blocks_of(hashes):
            rows = _rows_of(block.load(), hashes[start:end])
            if keep is not None and rows.num_rows:
                rows = rows.filter(keep(rows))
            if rows.num_rows:
                found.append(_HeldBlock(block, rows))
        return self._with({name: RunSection(section.state, found)})

    def _with(self, sections: dict[str, RunSection]) -> Run:
        """The run with other sections."""
        found = copy.copy(self)
        found.sections, found._evolved = sections, {}
        found.rows = sum(section.rows for section in sections.values())
        return found

    def byte_ranges(self, within: HashRange | None = None) -> list[tuple[int, int]]:
        """The positions of the blocks that may hold hashes of a range: first byte, and the one after the last."""
        first, last = (0, (1 << 64) - 1) if within is None else (within.first, within.last)
        return [block.byte_range for section in self.sections.values() for block in section.blocks_between(first, last)]

    def verify(self) -> None:
        """Read and check every block."""
        for section in self.sections.values():
            for block in section.blocks:
                block.load()


class RunSection:
    """The changes of one state in a run, in blocks by hash."""

    def __init__(self, state: StateDescriptor, blocks: list[RunBlock]) -> None:
        self.state = state
        self.blocks = blocks
        self.rows = sum(block.rows for block in blocks)
        self.size_bytes = sum(block.size_bytes for block in blocks)

    def blocks_between(self, first: int, last: int) -> list[RunBlock]:
        """Blocks that may hold a hash from `first` to `last`."""
        low, high = self._between(first, last)
        return self.blocks[low:high]

    def _between(self, first: int, last: int) -> tuple[int, int]:
        low = bisect.bisect_left(self.blocks, first, key=lambda block: block.last_hash)
        return low, bisect.bisect_right(self.blocks, last, low, key=lambda block: block.first_hash)

    @cached_property
    def _bounds(self) -> tuple[Hashes, Hashes]:
        first = np.array([block.first_hash for block in self.blocks], np.uint64)
        return first, np.array([block.last_hash for block in self.blocks], np.uint64)

    def blocks_of(self, hashes: Hashes) -> Iterator[tuple[RunBlock, int, int]]:
        """Blocks that may hold some of `hashes`, which ascend.

        Each comes with the position of the first of these hashes, and the one after the last.
        """
        if not len(hashes):
            return
        low, high = self._between(int(hashes[0]), int(hashes[-1]))
        first, last = self._bounds
        starts, ends = hashes.searchsorted(first[low:high], "left"), hashes.searchsorted(last[low:high], "right")
        for index in np.flatnonzero(starts < ends).tolist():
            yield self.blocks[low + index], int(starts[index]), int(ends[index])


@dataclass(frozen=True)
class _Source:
    """The bytes of a run, and how to read its blocks."""

    buffer: pa.Buffer | RunBytes
    name: str
    offset: int
    is_stored: bool
    on_damage: Callable[[], None] | None
    is_trusted: bool


class RunBlock:
    """Rows of one state between two hashes; read and checked on first use."""

    def __init__(self, source: _Source, stored: StoredBlock, schema: pa.Schema) -> None:
        self.rows = stored.rows
        self.size_bytes = stored.size_bytes
        self.first_hash = stored.first_hash
        self.last_hash = stored.last_hash
        self._source = source
        self._stored = stored
        self._schema = schema

    def expired_rows(self, now_ms: int) -> int:
        """The number of rows that have expired at least, according to the run's footer."""
        return self._stored.expired_rows(now_ms)

    @property
    def byte_range(self) -> tuple[int, int]:
        """Position in the run: first byte, and the one after the last."""
        return self._stored.offset, self._stored.offset + self._stored.length

    @cached_property
    def batch(self) -> pa.RecordBatch:
        """The rows as they were written, kept after the first read."""
        return self.load()

    def take(self, rows: Positions, first_column: int = 0) -> pa.RecordBatch:
        """Some of the rows, in ascending order, without the columns before `first_column`."""
        batch = self.batch
        return _picked(batch.select(range(first_column, batch.num_columns)) if first_column else batch, rows)

    def load(self) -> pa.RecordBatch:
        """Read the rows without keeping them; CorruptionError if the bytes have changed since they were written."""
        source, stored = self._source, self._stored
        if stored.offset + stored.length > source.buffer.size:
            raise self._found_damaged("it reaches beyond the run's end", ErrorKind.FORMAT)
        data = source.buffer.slice(stored.offset, stored.length)
        if xxhash.xxh3_64_intdigest(memoryview(data)) != stored.checksum:
            raise self._found_damaged(f"its {stored.length} bytes are damaged", ErrorKind.CHECKSUM)
        if source.is_trusted:
            return pa.ipc.read_record_batch(data, self._schema)
        try:
            batch = read_batch(data, self._schema, stored.rows, stored.size_bytes if source.is_stored else None)
            self._require_ordered(batch)
        except MalformedMessage as error:
            raise self._found_damaged(
                f"its {stored.length} bytes are not rows of its state: {error}", ErrorKind.FORMAT
            ) from None
        return batch

    def _require_ordered(self, batch: pa.RecordBatch) -> None:
        """Raise MalformedMessage unless the rows can be searched."""
        columns = batch.columns
        hashes, operations = columns[0], columns[3]
        if any(columns[index].null_count for index in _NEVER_NULL):
            raise MalformedMessage("a key is null")
        own: Hashes = hashes.to_numpy()
        if not len(own) or (own[1:] < own[:-1]).any() or (own[0], own[-1]) != (self.first_hash, self.last_hash):
            raise MalformedMessage("its hashes are not in order")
        if operations.to_numpy().max() > Operation.CLEAR:
            raise MalformedMessage("it has unknown operations")
        if len(batch.schema) > VALUE_COLUMN and batch.schema.names[-1] == ORDER_COLUMN:
            order = columns[-1]
            if order.null_count or order.to_numpy().max() >= len(own):
                raise MalformedMessage("its times are not in order")

    def _found_damaged(self, what: str, kind: ErrorKind) -> CorruptionError:
        source = self._source
        message = f"{source.name}, block at offset {source.offset + self._stored.offset}: {what}."
        if source.on_damage is None:
            return _damaged(message, kind)
        source.on_damage()
        return CorruptionError(
            message, kind=kind, hint="The local copy was removed; the next attempt fetches it again."
        )

    def due(self, after_ms: int, until_ms: int) -> Positions:
        """Positions of timers later than `after_ms` and not later than `until_ms`, found by bisection."""
        times, by_time, earliest, latest = self._times
        if latest <= after_ms or until_ms < earliest:
            return by_time[:0].astype(np.int64)
        first = bisect.bisect_right(by_time, after_ms, key=lambda row: times[row])
        last = bisect.bisect_right(by_time, until_ms, key=lambda row: times[row])
        return np.sort(by_time[first:last]).astype(np.int64)

    @cached_property
    def _times(self) -> tuple[Positions, npt.NDArray[np.uint32], int, int]:
        """Times of timers, their rows in order of time, and the first and last time."""
        times, by_time = (self.batch.column(index).to_numpy() for index in (VALUE_COLUMN, VALUE_COLUMN + 1))
        return times, by_time, int(times[by_time[0]]), int(times[by_time[-1]])

    @cached_property
    def hashes(self) -> Hashes:
        """Key hashes of the rows, ascending."""
        hashes: Hashes = self.batch.column(0).to_numpy()
        return hashes

    @cached_property
    def operations(self) -> npt.NDArray[np.uint8]:
        """The :class:`~statelog.runs.schema.Operation` of each row."""
        operations: npt.NDArray[np.uint8] = self.batch.column(3).to_numpy()
        return operations

    def spans(self, hashes: Hashes) -> tuple[Positions, Positions]:
        """First row of each hash, and the row after its last; equal where the block has none. `hashes` ascend."""
        own = self.hashes
        low = np.searchsorted(own, hashes, "left")
        inside = np.minimum(low, len(own) - 1)
        high = low + (own[inside] == hashes)
        following = np.minimum(high, len(own) - 1)
        several = np.flatnonzero((high > low) & (following == high) & (own[following] == hashes))
        if len(several):
            high[several] = np.searchsorted(own, hashes[several], "right")
        return low, high

    def sizes(self, low: Positions, high: Positions) -> Positions:
        """Bytes of the rows from each of `low` up to, not including, each of `high`, found from offsets alone."""
        fixed_bytes, others = self._widths
        sizes = (high - low) * fixed_bytes
        for column in others:
            sizes += bytes_before(column, high) - bytes_before(column, low)
        return sizes

    @cached_property
    def _widths(self) -> tuple[int, list[pa.Array]]:
        """The bytes of a row in the columns whose values all have one size, and the other columns."""
        one, fixed_bytes, others = np.array([1]), 0, []
        for column in self.batch.columns:
            if pa.types.is_primitive(column.type):
                fixed_bytes += int(bytes_before(column, one)[0])
            else:
                others.append(column)
        return fixed_bytes, others

    def match(self, hashes: Hashes, keys: pa.Array) -> tuple[Positions, Positions]:
        """Find all rows of some keys, given by ascending hashes and the bytes of each key.

        Returns pairs of a position in `hashes` and a row of the block, both ascending. Only rows with equal key bytes
        match.
        """
        low, high = self.spans(hashes)
        queries = np.flatnonzero(high > low)
        rows = low[queries]
        counts = high[queries] - rows
        if len(counts) and counts.max() > 1:
            rows = expanded(rows, counts)
            queries = np.repeat(queries, counts)
        same = pc.equal(self.batch.column(1).take(pa.array(rows)), keys.take(pa.array(queries)))
        if same.true_count < len(rows):
            mask = same.to_numpy(zero_copy_only=False)
            queries, rows = queries[mask], rows[mask]
        return queries, rows


class _HeldBlock(RunBlock):
    """Some rows of a block, in memory."""

    def __init__(self, block: RunBlock, rows: pa.RecordBatch) -> None:
        super().__init__(block._source, block._stored, block._schema)
        hashes = rows.column(0)
        self.rows, self.size_bytes = rows.num_rows, rows.nbytes
        self.first_hash, self.last_hash = hashes[0].as_py(), hashes[-1].as_py()
        self._rows = rows

    def load(self) -> pa.RecordBatch:
        return self._rows


class _EvolvedBlock(RunBlock):
    """A block of a state whose fields have changed; values are converted when rows are taken or loaded."""

    def __init__(self, block: RunBlock, stored: StateDescriptor, wanted: StateDescriptor) -> None:
        super().__init__(block._source, block._stored, block._schema)
        self._block = block
        self._wanted = wanted
        # Other columns are not copied; a reader may ask for a few of them. One is needed for the number of rows.
        kept = [field for field in stored.value_schema if field.name in wanted.value_schema.names]
        kept = kept or list(stored.value_schema)[:1]
        self._was = replace(stored, value_schema=pa.schema(kept))
        self._values = [VALUE_COLUMN + stored.value_schema.get_field_index(field.name) for field in kept]

    @cached_property
    def batch(self) -> pa.RecordBatch:
        return self._block.batch

    def take(self, rows: Positions, first_column: int = 0) -> pa.RecordBatch:
        return self._converted(_picked(self._needed(self._block.batch, first_column), rows), first_column)

    def load(self) -> pa.RecordBatch:
        return self._converted(self._needed(self._block.load(), 0), 0)

    def _needed(self, rows: pa.RecordBatch, first_column: int) -> pa.RecordBatch:
        return rows.select([*range(first_column, VALUE_COLUMN), *self._values])

    def _converted(self, rows: pa.RecordBatch, first_column: int) -> pa.RecordBatch:
        before, schema = VALUE_COLUMN - first_column, change_schema(self._wanted)
        values = project(rows.columns[before:], self._was, self._wanted)
        fields = [schema.field(place) for place in range(first_column, len(schema))]
        return pa.RecordBatch.from_arrays([*rows.columns[:before], *values], schema=pa.schema(fields))


def _picked(rows: pa.RecordBatch, places: Positions) -> pa.RecordBatch:
    """Some rows, in ascending order."""
    if len(places) and places[-1] - places[0] == len(places) - 1:
        return rows.slice(int(places[0]), len(places))
    return rows.take(pa.array(places))


def _rows_of(rows: pa.RecordBatch, hashes: Hashes) -> pa.RecordBatch:
    """The rows with some hashes, which ascend, as a copy unless these are all."""
    own = rows.column(0).to_numpy()
    low, high = own.searchsorted(hashes, "left"), own.searchsorted(hashes, "right")
    wanted = np.flatnonzero(high > low)
    positions = expanded(low[wanted], high[wanted] - low[wanted])
    return rows if len(positions) == rows.num_rows else rows.take(pa.array(positions))


def expanded(starts: Positions, counts: Positions) -> Positions:
    """All positions of stretches, which have `counts` positions from `starts` on."""
    if not len(starts):
        return starts
    first = np.repeat(starts - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
    return first + np.arange(len(first))


def _damaged(message: str, kind: ErrorKind = ErrorKind.CHECKSUM) -> CorruptionError:
    return CorruptionError(message, kind=kind, hint="Restore the file from a copy; nothing was changed.")
