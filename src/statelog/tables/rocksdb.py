"""A table in RocksDB: on disk and with an index of its own, for states that are read entry by entry."""

from __future__ import annotations

import fcntl
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.errors import ConfigurationError, StorageError
from statelog.local.policy import MERGE_POLICY, MergePolicy
from statelog.runs.byte_slices import BUDGET
from statelog.runs.format import Operation
from statelog.runs.reader import Run
from statelog.runs.schema import StateDescriptor, StateKind, TimeDomain, is_deleted
from statelog.runs.times import Moment
from statelog.tables.rocksdb_format import (
    CONTENTS_KEY,
    VERSION,
    HeldState,
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
from statelog.tables.table import EntryPage, EntryRange, EntryRows, KeyBatch, StateTable, TimerRows, ValueRows

_WRITE_BUFFER_BYTES: Final = 8 << 20
_CACHE_BYTES: Final = 16 << 20
_FILE_BYTES: Final = 64 << 20
_COUNTED_ENTRIES: Final = 4096
_VERY_MANY: Final = 1 << 31
_DELETED_ONE_BY_ONE: Final = 1000
_PART_OF_SLICE: Final = 4

_Row = tuple[bytes, bytes]
_Add = Callable[[Any, pa.RecordBatch, StateDescriptor, int, int], None]
"""Adds rows of a state, given with its number and that of its description, to a batch of writes."""

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(TableHeader)


class RocksTable(StateTable):
    """The state in a RocksDB database.

    The order of calls is :meth:`open`; :meth:`advance` or :meth:`apply`; then reading; then :meth:`close`. A process
    that dies leaves the state after some earlier call of these, or a digest of None: there is no write-ahead log and no
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
            return cls(folder / "data", lock, policy)
        except BlockingIOError:
            lock.close()
            return None
        except BaseException:
            lock.close()
            raise

    def _open(self) -> None:
        self._is_broken = False
        with self._translated():
            self._database = self._rocksdict.Rdict(str(self._folder), self._options())
            held = self._database.get(CONTENTS_KEY)
        try:
            self._contents = TableHeader() if held is None else _decoder.decode(held)
        except msgspec.MsgspecError:
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
        """Begin anew with an empty table; `digest` is the chain digest of its state."""
        with suppress(Exception):  # it is not open, or fails: its content is not needed
            self._database.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._open()
        self._contents.digest = digest
        with self._translated():
            self._write(self._new_batch())

    def close(self) -> None:
        """Close the database, so that others can open it; one that has failed is removed."""
        with suppress(Exception):  # whatever state it holds then, its digest names it
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
        """As :meth:`_put`, for an empty table: it ingests sorted files, and writes only rows that these cannot hold."""
        # Ingested files are there for good at once, so no older digest may be found beside them.
        self._write(self._new_batch())
        self._database.flush()
        files = _SortedFiles(self._folder.parent / "new", lambda: self._rocksdict.SstFileWriter(self._options()))

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
        """Remove deleted states; `generations` says how often each state that was ever deleted has been."""
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
        """Look at the next `rows` rows of the states with a TTL, in turn, and remove those that have expired."""
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
                yield from self._scan(prefix, max(prefix, start))

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
        for count, (key, _) in enumerate(self._scan(prefix, prefix)):
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

    def get_many(self, state: StateDescriptor, keys: KeyBatch, entry: bytes = b"") -> ValueRows:
        number = self._known(state.name)
        found: list[bytes | None] = []
        if number is not None and len(keys):
            with self._translated():
                found = self._database.get([prefix + entry for prefix in key_prefixes(number, keys)])
        positions = [position for position, value in enumerate(found) if value is not None]
        values, expiry = decode_values([value for value in found if value is not None], self._forms, state)
        return ValueRows(np.array(positions, np.int64), values, expiry)

    def entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryRows:
        positions: list[int] = []
        entries: list[bytes] = []
        values: list[bytes] = []
        for position, prefix in self._prefixes(state, keys):
            for key, value in self._scan(prefix, prefix):
                positions.append(position)
                entries.append(key[len(prefix) :])
                values.append(value)
        columns, expiry = decode_values(values, self._forms, state)
        return EntryRows(np.array(positions, np.int64), columns, expiry, pa.chunked_array([entries], pa.binary()))

    def count_entries(self, state: StateDescriptor, keys: KeyBatch) -> npt.NDArray[np.int64]:
        counts = np.zeros(len(keys), np.int64)
        for position, prefix in self._prefixes(state, keys):
            for count, _ in enumerate(self._scan(prefix, prefix), 1):
                if count > _COUNTED_ENTRIES:
                    counts[position] = _VERY_MANY
                    break
                counts[position] = count
        return counts

    def entries_between(self, state: StateDescriptor, key: KeyBatch, wanted: EntryRange) -> EntryPage:
        found: list[tuple[bytes, bytes]] = []
        rest, left_bytes = None, BUDGET.slice_bytes // _PART_OF_SLICE
        for _, prefix in self._prefixes(state, key):
            for row, value in self._scan_between(prefix + wanted.first, prefix + wanted.end, from_end=wanted.from_end):
                left_bytes -= len(value)
                if found and (len(found) == wanted.most or left_bytes < 0):
                    _, rest = wanted.cut(found[-1][0] if wanted.from_end else row[len(prefix) :])
                    break
                found.append((row[len(prefix) :], value))
        if wanted.from_end:
            found.reverse()
        columns, expiry = decode_values([value for _, value in found], self._forms, state)
        entries = pa.chunked_array([[entry for entry, _ in found]], pa.binary())
        return EntryPage(EntryRows(np.zeros(len(found), np.int64), columns, expiry, entries), rest)

    def due_timers(self, state: StateDescriptor, after_ms: int, until_ms: int) -> TimerRows:
        number = self._known(state.name)
        due: list[tuple[int, bytes, int]] = []
        if number is not None and after_ms < until_ms:
            _, prefix = of_state(number)
            for row, _ in self._scan(prefix, prefix + time_entry(after_ms + 1)):
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

    def _scan(self, prefix: bytes, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The rows whose keys begin with a prefix, from the key `start` on."""
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

    def _scan_between(self, first: bytes, end: bytes, *, from_end: bool) -> Iterator[tuple[bytes, bytes]]:
        """The rows with keys from `first` up to, not including, `end`, in order or from the last one backwards."""
        with self._translated():
            rows = self._database.iter()
            if from_end:
                rows.seek_for_prev(end)
            else:
                rows.seek(first)
            while rows.valid() and first <= rows.key() <= end:
                if rows.key() < end:
                    yield rows.key(), rows.value()
                if from_end:
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
            raise StorageError(
                f"The RocksDB table in {self._folder} failed: {error}.",
                hint="Nothing is lost: it is made again from the local runs. Is the disk full, or failing?",
            ) from error


class _SortedFiles:
    """Writes rows to sorted files, which RocksDB ingests without buffering, flushing and compacting their rows.

    A row that does not sort after all rows before it is left out. The folder is emptied first.
    """

    def __init__(self, folder: Path, new_writer: Callable[[], Any]) -> None:
        self._folder = folder
        self._new_writer = new_writer
        self._writer: Any = None
        self._paths: list[str] = []
        self._last = b""
        self.remove()
        folder.mkdir(parents=True)

    def add(self, rows: Iterable[_Row]) -> list[_Row]:
        """Add rows (non-empty key, value), and return those that were left out."""
        last = self._last
        left_out: list[_Row] = []
        for key, value in rows:
            if key <= last:
                left_out.append((key, value))
                continue
            if self._writer is None:
                self._begin()
            self._writer[key] = value
            last = key
        self._last = last
        if self._writer is not None and self._writer.file_size() >= _FILE_BYTES:
            self._finish()
        return left_out

    def _begin(self) -> None:
        self._paths.append(str(self._folder / f"{len(self._paths)}.sst"))
        self._writer = self._new_writer()
        self._writer.open(self._paths[-1])

    def _finish(self) -> None:
        self._writer.finish()
        self._writer = None

    def finish(self) -> list[str]:
        """End the last file, and return the paths of all."""
        if self._writer is not None:
            self._finish()
        return self._paths

    def remove(self) -> None:
        """Remove files that were not ingested."""
        shutil.rmtree(self._folder, ignore_errors=True)


def rocksdict_library() -> Any:
    """The optional module rocksdict, needed by this table only; raises ConfigurationError if it is not installed."""
    try:
        import rocksdict
    except ImportError as error:
        raise ConfigurationError(
            "Option table is 'rocksdb', and the package rocksdict is not installed.",
            hint="Install it for the driver and the tasks (pip install statelog[rocksdb]), or choose another table.",
        ) from error
    return rocksdict
