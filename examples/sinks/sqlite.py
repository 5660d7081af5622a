"""SQLite: the batch id is stored in the same transaction as the batch's rows."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Final

from pyspark.sql import DataFrame

__all__ = ["BOOKKEEPING", "SqliteSink"]

BOOKKEEPING: Final = """
CREATE TABLE IF NOT EXISTS streamed_batches (
  target TEXT NOT NULL, query TEXT NOT NULL, batch INTEGER NOT NULL, PRIMARY KEY (target, query)
)
"""

_IS_THERE: Final = "SELECT 1 FROM streamed_batches WHERE target = ? AND query = ? AND batch >= ?"

# Changes no row if the batch is there.
_NOTE_BATCH: Final = """
INSERT INTO streamed_batches (target, query, batch) VALUES (?, ?, ?)
ON CONFLICT (target, query) DO UPDATE SET batch = excluded.batch WHERE streamed_batches.batch < excluded.batch
"""

_TAKE_BACK: Final = "UPDATE streamed_batches SET batch = ? WHERE target = ? AND query = ? AND batch >= ?"


class SqliteSink:
    """A function for ``foreachBatch`` that appends rows to a table.

    Parameters
    ----------
    path : str
        The database's file, on a disk of the driver's machine. It has the table of :data:`BOOKKEEPING`.
    table : str
        The table. It has the rows' columns, and ``query TEXT`` and ``batch INTEGER``.
    """

    def __init__(self, path: str, table: str) -> None:
        self._path = path
        self._table = table

    def __call__(self, rows: DataFrame, batch: int) -> None:
        query = rows.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        assert query is not None, "in foreachBatch only"
        with closing(self._connect()) as connection:
            if connection.execute(_IS_THERE, (self._table, query, batch)).fetchone():
                return
            found = [(*row, query, batch) for row in rows.collect()]
            columns = ", ".join(map(_quoted, [*rows.columns, "query", "batch"]))
            places = ", ".join("?" * (len(rows.columns) + 2))
            connection.execute("BEGIN IMMEDIATE")  # A second driver waits here for the end of the transaction.
            if connection.execute(_NOTE_BATCH, (self._table, query, batch)).rowcount == 0:
                raise RuntimeError(f"Another driver of query {query} has written batch {batch} meanwhile.")
            connection.executemany(f"INSERT INTO {_quoted(self._table)} ({columns}) VALUES ({places})", found)
            commit(connection)

    def take_back(self, query: str, first: int) -> None:
        """Remove what a query has written from batch `first` on: what ``statelog.rewind`` makes it repeat."""
        with closing(self._connect()) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(f"DELETE FROM {_quoted(self._table)} WHERE query = ? AND batch >= ?", (query, first))
            connection.execute(_TAKE_BACK, (first - 1, self._table, query, first))
            commit(connection)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=60, isolation_level=None)


def commit(connection: sqlite3.Connection) -> None:
    """End the transaction; without it, SQLite takes the transaction back when the connection is closed."""
    connection.execute("COMMIT")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
