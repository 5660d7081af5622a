"""PostgreSQL: the batch id is stored in the same transaction as the batch's rows."""

from __future__ import annotations

from typing import Final

import psycopg
from psycopg import sql
from pyspark.sql import DataFrame

__all__ = ["BOOKKEEPING", "PostgresSink"]

BOOKKEEPING: Final = """
CREATE TABLE IF NOT EXISTS streamed_batches (
  target text NOT NULL, query text NOT NULL, batch bigint NOT NULL, PRIMARY KEY (target, query)
)
"""

_IS_THERE: Final = "SELECT 1 FROM streamed_batches WHERE target = %s AND query = %s AND batch >= %s"

# Changes no row if the batch is there; else a second driver waits at it for the end of the transaction.
_NOTE_BATCH: Final = """
INSERT INTO streamed_batches AS known (target, query, batch) VALUES (%s, %s, %s)
ON CONFLICT (target, query) DO UPDATE SET batch = excluded.batch WHERE known.batch < excluded.batch
"""

_TAKE_BACK: Final = "UPDATE streamed_batches SET batch = %s WHERE target = %s AND query = %s AND batch >= %s"


class PostgresSink:
    """A function for ``foreachBatch`` that appends rows to a table.

    Parameters
    ----------
    conninfo : str
        The database, as ``psycopg.connect`` takes it. It has the table of :data:`BOOKKEEPING`.
    table : str
        The table. It has the rows' columns, and ``query text`` and ``batch bigint``.
    """

    def __init__(self, conninfo: str, table: str) -> None:
        self._conninfo = conninfo
        self._table = table

    def __call__(self, rows: DataFrame, batch: int) -> None:
        query = rows.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        assert query is not None, "in foreachBatch only"
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            if connection.execute(_IS_THERE, (self._table, query, batch)).fetchone():
                return
            found = rows.collect()
            columns = sql.SQL(", ").join(map(sql.Identifier, [*rows.columns, "query", "batch"]))
            copy_rows = sql.SQL("COPY {} ({}) FROM STDIN").format(sql.Identifier(self._table), columns)
            with connection.transaction(), connection.cursor() as cursor:
                cursor.execute(_NOTE_BATCH, (self._table, query, batch))
                if cursor.rowcount == 0:
                    raise RuntimeError(f"Another driver of query {query} has written batch {batch} meanwhile.")
                with cursor.copy(copy_rows) as copy:
                    for row in found:
                        copy.write_row((*row, query, batch))

    def take_back(self, query: str, first: int) -> None:
        """Remove what a query has written from batch `first` on: what ``statelog.rewind`` makes it repeat."""
        removal = sql.SQL("DELETE FROM {} WHERE query = %s AND batch >= %s").format(sql.Identifier(self._table))
        with psycopg.connect(self._conninfo) as connection:
            connection.execute(removal, (query, first))
            connection.execute(_TAKE_BACK, (first - 1, self._table, query, first))
