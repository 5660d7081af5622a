"""A table in RocksDB: on disk and with its own index, for states that are read entry by entry."""

from __future__ import annotations

import fcntl
import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statelog.errors import ConfigurationError, CorruptionError, ErrorKind, ProcessorError, StorageError
from statelog.local.policy import MERGE_POLICY, MergePolicy
from statelog.local.use import disk_error
from statelog.runs.reader import Run
from statelog.runs.schema import Operation, StateDescriptor, StateKind, TimeDomain, is_deleted
from statelog.runs.times import Moment
from statelog.sealed import MALFORMED
from statelog.tables.rocksdb_format import (
    CONTENTS_KEY,
    VERSION,
    EntriesInRocks,
    HeldState,
    SortedFiles,
    TableHeader,
    after,
    decode_expiry,
    decode_values,
    encode_values,
    key_prefixes,
    of_state,
    row_keys,
    split_by_time,
    time_entry,
    timer_keys,
)
from statelog.tables.runs import BranchedTable
from statelog.tables.table import (
    EntryCounts,
    EntryRange,
    EntryRows,
    KeyBatch,
    KeyEntries,
    StateTable,
    TimerRows,
    ValueRows,
)

_WRITE_BUFFER_BYTES: Final = 8 << 20
_CACHE_BYTES: Final = 16 << 20
_COUNTED_ENTRIES: Final = 4096
_COUNTED_BYTES: Final = 4 << 20
_VERY_MANY: Final = 1 << 31
_DELETED_ONE_BY_ONE: Final = 1000

_Row = tuple[bytes, bytes]
_Add = Callable[[Any, pa.RecordBatch, StateDescriptor, int, int], None]
"""Adds rows of a state, given with its number and that of its description, to a batch of writes."""

_NEW: Final = "new"
"""The folder of files that RocksDB ingests."""

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(TableHeader)


class RocksTable(StateTable):
    """The state in a RocksDB database.

    The order of calls is :meth:`open`; :meth:`advance` or :meth:`apply`; then reading; then :meth:`close`. A process
    that dies leaves the state after one of its earlier calls, or a digest of None: there is no write-ahead log and no
    sync, because local runs hold the same state.
    """

    def __init__(self, folder: Path, lock: IO[bytes], policy: MergePolicy) -> None:
        self._folder = folder
        self._policy = policy
        self._lock = lock
        self._rocksdict = rocksdict_library()
        self._unlogged = self._rocksdict.WriteOptions()
        self._unlogged.disable_wal = True
        try:
            self._open()
        except StorageError:
            self.reset()

    @classmethod
    def open(cls, folder: Path, policy: MergePolicy = MERGE_POLICY) -> RocksTable | None:
        """Open the table of a folder, or make it; None if it is open already, here or in another process.

        Raises ConfigurationError if rocksdict is not installed, StorageError if the database can be neither opened nor
        made.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / "lock").open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder / _NEW, ignore_errors=True)  # of a process that was killed
            return cls(folder / "data", lock, policy)
        except BlockingIOError:
            lock.close()
            return None
        except StorageError:
            shutil.rmtree(folder / "data", ignore_errors=True)
            lock.close()
            raise
        except BaseException:
            lock.close()
            raise

    def _open(self) -> None:
        self._is_broken = self._is_closed = False
        with self._translated():
            self._database = self._rocksdict.Rdict(str(self._folder), self._options())
            held = self._database.get(CONTENTS_KEY)
        try:
            self._contents = TableHeader() if held is None else _decoder.decode(held)
            self._forms = [StateDescriptor.from_stored(form) for form in self._contents.forms]
        except (*MALFORMED, CorruptionError):
            self._contents = TableHeader()
        if self._contents.version != VERSION:
            self._contents = TableHeader()
        self._forms = [StateDescriptor.from_stored(form) for form in self._contents.forms]

    def _options(self) -> Any:
        library = self._rocksdict
        options = library.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
        options.set_max_write_buffer_number(2)
        options.set_compression_type(library.DBCompressionType.lz4())
        options.set_skip_stats_update_on_db_open(True)
        options.set_keep_log_file_num(1)
        blocks = library.BlockBasedOptions()
        blocks.set_block_cache(library.Cache(_CACHE_BYTES))
        blocks.set_cache_index_and_filter_blocks(True)
        blocks.set_bloom_filter(10, False)
        options.set_block_based_table_factory(blocks)
        return options

    @property
    def digest(self) -> bytes | None:
        """Chain digest of the state in the table; None if it is unknown, or the table is of another version."""
        return self._contents.digest

    def reset(self, digest: bytes | None = None) -> None:
        """Start over with an empty table; `digest` is the chain digest of its state."""
        with suppress(Exception):  # it is not open, or closing fails: its content is not needed
            self._database.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._open()
        self._contents.digest = digest
        with self._translated():
            self._write(self._new_batch())

    def close(self) -> None:
        """Close the database, so that others can open it; one that has failed is removed."""
        self._is_closed = True
        with suppress(Exception):  # whichever state it then holds, its digest names it
            self._database.close()
        if self._is_broken:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    # ---- Writing ----

    def apply(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self.advance(run, None)

    def advance(self, run: Run, digest: bytes | None, note_rows: Callable[[int], object] = lambda rows: None) -> int:
        """Add the changes of a run, which lead to a digest, and return their number.

        While a run takes several batches of writes, the table's digest is None. `note_rows` is called with the number
        of rows added so far; an exception from it ends the work.
        """
        fills = not self._contents.states and run.size_bytes > self._policy.table_batch_bytes
        self._contents.digest = None
        with self._translated():
            last = self._fill(run, note_rows) if fills else self._put(run, note_rows, self._add)
            self._contents.digest = digest
            self._write(last)
        return run.rows

    def _put(self, run: Run, note_rows: Callable[[int], object], add: _Add) -> Any:
        """Write the changes of a run except for the last ones, and return those as a batch of writes."""
        batch, count = self._new_batch(), 0
        for rows, state, number, form in self._chunks(run):
            add(batch, rows, state, number, form)
            if batch.size_in_bytes() >= self._policy.table_batch_bytes:
                self._write(batch)
                batch = self._new_batch()
            count += rows.num_rows
            note_rows(count)
        return batch

    def _fill(self, run: Run, note_rows: Callable[[int], object]) -> Any:
        """Like :meth:`_put`, for an empty table: ingests sorted files, and writes only rows that these cannot hold."""
        # Ingested files are permanent at once, so no older digest may be found alongside them.
        self._write(self._new_batch())
        self._database.flush()
        files = SortedFiles(self._folder.parent / _NEW, lambda: self._rocksdict.SstFileWriter(self._options()))

        def add(batch: Any, rows: pa.RecordBatch, state: StateDescriptor, number: int, form: int) -> None:
            # The table is empty, so there is nothing to remove.
            puts = rows.filter(pc.equal(rows.column(3), pa.scalar(Operation.PUT, pa.uint8())))
            for key, value in files.add(self._rows(puts, state, number, form)):
                batch.put(key, value)
            if state.kind is StateKind.TIMER:
                for key in timer_keys(number, puts):
                    batch.put(key, b"")

        try:
            last = self._put(run, note_rows, add)
            if paths := files.finish():
                taken_over = self._rocksdict.IngestExternalFileOptions()
                taken_over.set_move_files(True)
                self._database.ingest_external_file(paths, taken_over)
        finally:
            files.remove()
        return last

    def _chunks(self, run: Run) -> Iterator[tuple[pa.RecordBatch, StateDescriptor, int, int]]:
        """The rows of a run in order, in chunks, as :data:`_Add` takes them."""
        chunk_rows = self._policy.table_chunk_rows
        for section in run.sections.values():
            number, form = self._number(section.state)
            for block in section.blocks:
                rows = block.load()
                for start in range(0, rows.num_rows, chunk_rows):
                    yield rows.slice(start, chunk_rows), section.state, number, form

    def drop_deleted(self, generations: Mapping[str, int]) -> None:
        """Remove deleted states; `generations` says how often each state was deleted."""
        batch = self._new_batch()
        for number, state in enumerate(self._contents.states):
            if state.name and is_deleted(state.name, generations):
                for prefix in of_state(number):
                    batch.delete_range(prefix, after(prefix))
                state.name = ""
        if len(batch):
            with self._translated():
                self._write(batch)

    def drop_expired(self, moment: Moment, rows: int) -> None:
        """Check the next `rows` rows of the states with a TTL, in turn, and remove those that have expired."""
        contents = self._contents
        mortal = {
            of_state(number)[0]: TimeDomain(form.expires_by)
            for number, state in enumerate(contents.states)
            if state.name and (form := contents.forms[state.newest]).expires_by
        }
        if not mortal:
            return
        batch = self._new_batch()
        seen = 0
        for key, value in itertools.islice(self._rows_from(contents.looked_at, sorted(mortal)), rows):
            seen += 1
            contents.looked_at = key
            expiry = decode_expiry(value)
            if expiry is not None and expiry <= moment.now_ms(mortal[key[: len(of_state(0)[0])]]):
                batch.delete(key)
        if seen < rows:
            contents.looked_at = b""
        with self._translated():
            self._write(batch)

    def _rows_from(self, start: bytes, prefixes: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
        for prefix in prefixes:
            if start < after(prefix):
                yield from self.scan(prefix, max(prefix, start))

    def _number(self, state: StateDescriptor) -> tuple[int, int]:
        """The numbers of a state and of its description; new ones if it has none yet."""
        contents, stored = self._contents, state.to_stored()
        if stored not in contents.forms:
            contents.forms.append(stored)
            self._forms.append(state)
        form = contents.forms.index(stored)
        number = self._known(state.name)
        if number is None:
            number = len(contents.states)
            contents.states.append(HeldState(state.name, form))
        contents.states[number].newest = form
        return number, form

    def _known(self, name: str) -> int | None:
        return next((number for number, state in enumerate(self._contents.states) if state.name == name), None)

    def _add(self, batch: Any, rows: pa.RecordBatch, state: StateDescriptor, number: int, form: int) -> None:
        operations = rows.column(3).to_pylist()
        for (key, value), operation in zip(self._rows(rows, state, number, form), operations, strict=True):
            if operation == Operation.PUT:
                batch.put(key, value)
            elif operation == Operation.DELETE:
                batch.delete(key)
            else:
                # The key's other rows in this batch of writes come later, so the scan sees all rows to remove.
                self._clear(batch, key)
        if state.kind is StateKind.TIMER:
            for key, operation in zip(timer_keys(number, rows), operations, strict=True):
                if operation == Operation.PUT:
                    batch.put(key, b"")
                else:
                    batch.delete(key)

    def _rows(self, rows: pa.RecordBatch, state: StateDescriptor, number: int, form: int) -> Iterator[_Row]:
        return zip(row_keys(number, rows), encode_values(rows, state, form), strict=True)

    def _clear(self, batch: Any, prefix: bytes) -> None:
        for count, (key, _) in enumerate(self.scan(prefix, prefix)):
            if count == _DELETED_ONE_BY_ONE:
                batch.delete_range(prefix, after(prefix))
                return
            batch.delete(key)

    def _new_batch(self) -> Any:
        return self._rocksdict.WriteBatch(raw_mode=True)

    def _write(self, batch: Any) -> None:
        batch.put(CONTENTS_KEY, _encoder.encode(self._contents))
        self._database.write(batch, self._unlogged)

    # ---- Reading ----

    def get_many(self, state: StateDescriptor, keys: KeyBatch) -> ValueRows:
        number = self._known(state.name)
        found: list[bytes | None] = []
        if number is not None and len(keys):
            with self._translated():
                found = self._database.get(list(key_prefixes(number, keys)))
        positions = [position for position, value in enumerate(found) if value is not None]
        values, expiry = decode_values([value for value in found if value is not None], self._forms, state)
        return ValueRows(np.array(positions, np.int64), values, expiry)

    def entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryRows:
        positions: list[int] = []
        rows: list[_Row] = []
        for position, prefix in self._prefixes(state, keys):
            found = [(key[len(prefix) :], value) for key, value in self.scan(prefix, prefix)]
            rows += found
            positions += [position] * len(found)
        return self.entry_rows(state, rows, positions)

    def count_entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryCounts:
        counts, size_bytes = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
        for position, prefix in self._prefixes(state, keys):
            count = seen_bytes = 0
            for key, value in self.scan(prefix, prefix):
                count += 1
                seen_bytes += len(key) - len(prefix) + len(value)
                if count > _COUNTED_ENTRIES or seen_bytes > _COUNTED_BYTES:
                    count = _VERY_MANY
                    break
            counts[position], size_bytes[position] = count, seen_bytes
        return EntryCounts(counts, size_bytes)

    def entries_of(self, state: StateDescriptor, key_hash: int, key: bytes) -> KeyEntries:
        keys = KeyBatch(np.array([key_hash], np.uint64), pa.array([key], pa.binary()))
        return EntriesInRocks(self, state, next((prefix for _, prefix in self._prefixes(state, keys)), None))

    def value_at(self, key: bytes) -> bytes | None:
        """The encoded value of a row key; None if there is none."""
        self._require_open()
        with self._translated():
            value: bytes | None = self._database.get(key)
        return value

    def entry_rows(
        self, state: StateDescriptor, rows: Sequence[_Row], positions: Sequence[int] | None = None
    ) -> EntryRows:
        """Entries and their encoded values as the answer of a table; without `positions` these are 0."""
        columns, expiry = decode_values([value for _, value in rows], self._forms, state)
        entries = pa.chunked_array([[entry for entry, _ in rows]], pa.binary())
        at = np.zeros(len(rows), np.int64) if positions is None else np.array(positions, np.int64)
        return EntryRows(at, columns, expiry, entries)

    def _require_open(self) -> None:
        if self._is_closed:
            raise ProcessorError(
                "An iterator of a list, a map or timers was used after its batch.",
                kind=ErrorKind.STATE_USAGE,
                hint="Consume it in the call that asked for it, or keep a list of its elements.",
            )

    def due_timers(self, state: StateDescriptor, after_ms: int, until_ms: int) -> TimerRows:
        number = self._known(state.name)
        due: list[tuple[int, bytes, int]] = []
        if number is not None and after_ms < until_ms:
            _, prefix = of_state(number)
            for row, _ in self.scan(prefix, prefix + time_entry(after_ms + 1)):
                timer = split_by_time(row)
                if timer[2] > until_ms:
                    break
                due.append(timer)
        hashes, keys, times = zip(*sorted(due), strict=True) if due else ((), (), ())
        batch = KeyBatch(np.array(hashes, np.uint64), pa.array(keys, pa.binary()))
        return TimerRows(batch, np.array(times, np.int64))

    def branch(self, run: Run) -> BranchedTable:
        return BranchedTable(self, [run])

    def _prefixes(self, state: StateDescriptor, keys: KeyBatch) -> Iterator[tuple[int, bytes]]:
        number = self._known(state.name)
        return iter(()) if number is None else enumerate(key_prefixes(number, keys))

    def scan(self, prefix: bytes, start: bytes) -> Iterator[_Row]:
        """Row keys that begin with a prefix, from `start` on, with their encoded values."""
        self._require_open()
        with self._translated():
            rows = self._database.iter()
            rows.seek(start)
            while rows.valid():
                key = rows.key()
                if not key.startswith(prefix):
                    break
                yield key, rows.value()
                rows.next()
            rows.status()

    def scan_between(self, prefix: bytes, wanted: EntryRange) -> Iterator[_Row]:
        """Entries in a range with their encoded values, from the end that is read first."""
        self._require_open()
        first, end = prefix + wanted.first, prefix + wanted.end
        with self._translated():
            rows = self._database.iter()
            if wanted.from_end:
                rows.seek_for_prev(end)
            else:
                rows.seek(first)
            while rows.valid() and first <= (key := rows.key()) <= end:
                if key < end:
                    yield key[len(prefix) :], rows.value()
                if wanted.from_end:
                    rows.prev()
                else:
                    rows.next()
            rows.status()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn errors of RocksDB, which are plain exceptions, into StorageError."""
        try:
            yield
        except Exception as error:
            if type(error) is not Exception:
                raise
            self._is_broken = True
            raise disk_error(self._folder, f"the RocksDB table failed: {error}") from error


def rocksdict_library() -> Any:
    """The optional module rocksdict, needed by this table only; raises ConfigurationError if it is not installed."""
    try:
        import rocksdict
    except ImportError as error:
        raise ConfigurationError(
            "Option table is 'rocksdb', but the package rocksdict is not installed.",
            hint="Install it for the driver and the tasks (pip install statelog[rocksdb]), or choose another table.",
        ) from error
    return rocksdict
