"""Brings tables to the state that a batch starts from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from statelog.errors import CorruptionError, ErrorKind, StorageError
from statelog.local.runs import ROCKSDB_FOLDER, LocalRun, LocalRuns
from statelog.log_fields import get_logger
from statelog.runs.merge import Garbage
from statelog.runs.reader import Run
from statelog.tables.memory import MemoryTable
from statelog.tables.rocksdb import RocksTable

_log = get_logger(__name__)


class MemoryTables:
    """The memory tables that a process keeps from batch to batch."""

    def __init__(self) -> None:
        self._tables: dict[Path, tuple[bytes, MemoryTable]] = {}

    def at(self, local: LocalRuns, runs: Sequence[tuple[LocalRun, Run]], head: bytes, garbage: Garbage) -> MemoryTable:
        """The subtask's table, brought to a digest: from its last state if runs lead from there, otherwise made anew.

        The parameters are those of :func:`open_rocksdb`.
        """
        left_at, table = self._tables.pop(local.directory, (None, MemoryTable()))
        chain = None if left_at is None else local.chain(left_at, head)
        if chain is None:
            table, applied = MemoryTable(), [run for _, run in runs]
        else:
            applied = [local.open(local_run) for local_run in chain]
        table.apply(applied)
        table.drop_deleted(garbage.generations)
        # As many rows as in a RocksDB table, for the same reason.
        table.drop_expired(garbage.moment, max(local.policy.expiry_rows, 2 * sum(run.rows for run in applied)))
        self._tables[local.directory] = (head, table)
        return table

    def forget(self, directory: Path) -> None:
        """Release the table of a subtask's directory."""
        self._tables.pop(directory, None)


class Filling(Protocol):
    """Progress of a table that is brought to a state."""

    def begin_table(self, size_bytes: int) -> None:
        """Note how many bytes of runs are to be added to the table."""

    def added(self, size_bytes: int) -> None:
        """Note how many bytes have been added so far; an exception ends the work."""


def open_rocksdb(
    local: LocalRuns, runs: Sequence[tuple[LocalRun, Run]], head: bytes, garbage: Garbage, filling: Filling
) -> RocksTable | None:
    """Open a subtask's RocksDB table and bring it to a state.

    It continues from the state that it holds, if local runs lead from there to `head`, the digest of the wanted state.
    Otherwise it is made anew from that state's `runs`, oldest first: after another history, damage, or a crash in the
    middle of a large run. Local runs that are not part of the state may be removed only afterwards.

    None if the table is open already, because another attempt of the subtask is still alive.
    """
    table = RocksTable.open(local.directory / ROCKSDB_FOLDER, local.policy)
    if table is None:
        return None
    try:
        applied = None
        try:
            chain = None if table.digest is None else local.chain(table.digest, head)
            if chain is not None:
                applied = _apply(table, [(local_run, local.open(local_run)) for local_run in chain], filling)
        except (CorruptionError, StorageError, FileNotFoundError, pa.ArrowInvalid) as error:
            if isinstance(error, StorageError) and error.kind is ErrorKind.RESTORE_DEADLINE:
                raise
            _log.warning("a RocksDB table is rebuilt: %s", error)
        if applied is None:
            table.reset(runs[0][0].before if runs else head)
            applied = _apply(table, runs, filling)
        table.drop_deleted(garbage.generations)
        # Twice as many rows as were added, so that expired rows stay a bounded part of the whole.
        table.drop_expired(garbage.moment, max(local.policy.expiry_rows, 2 * applied))
        return table
    except BaseException:
        table.close()
        raise


def _apply(table: RocksTable, runs: Sequence[tuple[LocalRun, Run]], filling: Filling) -> int:
    """Apply runs, oldest first, and return their number of rows."""
    filling.begin_table(sum(run.size_bytes for _, run in runs))
    before_bytes = 0
    for local_run, run in runs:

        def note_rows(rows: int, run: Run = run, before_bytes: int = before_bytes) -> None:
            filling.added(before_bytes + run.size_bytes * rows // run.rows)

        table.advance(run, local_run.after, note_rows)
        before_bytes += run.size_bytes
    return sum(run.rows for _, run in runs)
