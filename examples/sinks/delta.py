"""Delta Lake: the batch id is the version of an application transaction (``txn``) in the commit that adds the rows."""

from __future__ import annotations

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyspark.sql import DataFrame

__all__ = ["DeltaSink"]


class DeltaSink:
    """A function for ``foreachBatch`` that appends rows to a Delta table.

    Parameters
    ----------
    uri : str
        The table. It has the rows' columns, and ``query string`` and ``batch long``.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def __call__(self, rows: DataFrame, batch: int) -> None:
        query = rows.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        assert query is not None, "in foreachBatch only"
        table = DeltaTable(self._uri)
        known = table.transaction_version(query)
        if known is not None and batch <= known:
            return
        found = rows.toArrow()
        if found.num_rows == 0:
            return
        found = found.append_column("query", pa.repeat(query, found.num_rows))
        found = found.append_column("batch", pa.repeat(batch, found.num_rows))
        # If another driver has committed a batch of the query since the table was opened, this commit fails.
        write_deltalake(table, found, mode="append", commit_properties=_batch_of(query, batch))

    def take_back(self, query: str, first: int) -> None:
        """Remove what a query has written from batch `first` on: what ``statelog.rewind`` makes it repeat."""
        written = f"query = '{query}' AND batch >= {first}"
        DeltaTable(self._uri).delete(written, commit_properties=_batch_of(query, first - 1))


def _batch_of(query: str, batch: int) -> CommitProperties:
    """Notes in a commit that it brings a query's rows to the end of a batch."""
    return CommitProperties(app_transactions=[Transaction(app_id=query, version=batch)])
