"""Bringing a table to the state that a batch starts from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import pyarrow as pa

from statelog.errors import CorruptionError, ErrorKind, StorageError
from statelog.local.runs import ROCKSDB_FOLDER, LocalRun, LocalRuns
from statelog.runs.merge import Garbage
from statelog.runs.reader import Run
from statelog.tables.memory import MemoryTable
from statelog.tables.rocksdb import RocksTable

_log = logging.getLogger(__name__)

_LOOKED_AT_ROWS: Final = 1000


class MemoryTables:
    """The memory tables that a process keeps from batch to batch."""

    def __init__(self) -> None:
        self._tables: dict[Path, tuple[bytes, MemoryTable]] = {}

    def at(self, local: LocalRuns, runs: Sequence[tuple[LocalRun, Run]], head: bytes) -> MemoryTable:
        """A table brought to a digest, from where it was left if that is on the way, or else of the state's runs.

        Parameters are those of :func:`open_rocksdb`.
        """
        left_at, table = self._tables.pop(local.directory, (None, MemoryTable()))
        chain = None if left_at is None else local.chain(left_at, head)
        if chain is None:
            table = MemoryTable()
            table.apply([run for _, run in runs])
        else:
            table.apply([local.open(local_run) for local_run in chain])
        self._tables[local.directory] = (head, table)
        return table

    def forget(self, directory: Path) -> None:
        """Release the table of a subtask's directory."""
        self._tables.pop(directory, None)


class Filling(Protocol):
    """Is told how far a table is brought to a state."""

    def begin_table(self, size_bytes: int) -> None:
        """So much is to be added to it."""

    def added(self, size_bytes: int) -> None:
        """So much of it is added so far; what this raises ends the work."""


def open_rocksdb(
    local: LocalRuns, runs: Sequence[tuple[LocalRun, Run]], head: bytes, garbage: Garbage, filling: Filling
) -> RocksTable | None:
    """Open a subtask's RocksDB table and bring it to a state.

    It goes on from the state that it holds, if local runs lead from there to the wanted one, and is made anew if not:
    after another history, damage, or a death in the middle of a large run.

    Parameters
    ----------
    local : LocalRuns
        The subtask's local runs, before those that are not of the state are removed.
    runs : sequence of (LocalRun, Run)
        The state, oldest first.
    head : bytes
        Its chain digest.
    garbage : Garbage
        What need not be kept.
    filling : Filling
        Is told how far it is.

    Returns
    -------
    RocksTable or None
        The table; None if it is open already: another attempt of the subtask is still alive.
    """
    table = RocksTable.open(local.directory / ROCKSDB_FOLDER)
    if table is None:
        return None
    try:
        try:
            applied = _advance(table, local, head, filling)
        except (CorruptionError, StorageError, FileNotFoundError, pa.ArrowInvalid) as error:
            if isinstance(error, StorageError) and error.kind is ErrorKind.RESTORE_DEADLINE:
                raise
            _log.warning("a RocksDB table is made anew: %s", error)
            applied = None
        if applied is None:
            table.reset(runs[0][0].before if runs else head)
            applied = _apply(table, runs, filling)
        table.drop_deleted(garbage.generations)
        # Twice as many as could have expired since, so that what has expired stays a part of the whole.
        table.drop_expired(garbage.moment, max(_LOOKED_AT_ROWS, 2 * applied))
        return table
    except BaseException:
        table.close()
        raise


def _advance(table: RocksTable, local: LocalRuns, head: bytes, filling: Filling) -> int | None:
    """Apply the runs from where the table is to a digest: how many rows they had; None if no runs lead there."""
    chain = None if table.digest is None else local.chain(table.digest, head)
    if chain is None:
        return None
    return _apply(table, [(local_run, local.open(local_run)) for local_run in chain], filling)


def _apply(table: RocksTable, runs: Sequence[tuple[LocalRun, Run]], filling: Filling) -> int:
    filling.begin_table(sum(run.size_bytes for _, run in runs))
    before_bytes = 0
    for local_run, run in runs:

        def note_rows(rows: int, run: Run = run, before_bytes: int = before_bytes) -> None:
            filling.added(before_bytes + run.size_bytes * rows // run.rows)

        table.advance(run, local_run.after, note_rows)
        before_bytes += run.size_bytes
    return sum(run.rows for _, run in runs)
