"""Iceberg: the batch id is among the properties of the snapshot that adds the rows."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table
from pyiceberg.table.snapshots import ancestors_of
from pyspark.sql import DataFrame

__all__ = ["IcebergSink", "newest_batch"]

_QUERY: Final = "streamed.query"
_BATCH: Final = "streamed.batch"
_RETRIES: Final = "commit.retry.num-retries"


class IcebergSink:
    """A function for ``foreachBatch`` that appends rows to an Iceberg table.

    Parameters
    ----------
    table : str
        The table, with its namespace. It has the rows' columns, ``query string`` and ``batch long``, and the property
        ``commit.retry.num-retries`` = 0.
    catalog : str
        The catalog's name.
    **properties : str
        Its properties, as ``load_catalog`` takes them; none if PyIceberg's configuration file has them.
    """

    def __init__(self, table: str, catalog: str, **properties: str) -> None:
        self._table = table
        self._catalog = catalog
        self._properties = properties

    def __call__(self, rows: DataFrame, batch: int) -> None:
        query = rows.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        assert query is not None, "in foreachBatch only"
        table = self._load()
        if batch <= newest_batch(table, query):
            return
        found = rows.toArrow()
        if found.num_rows == 0:
            return
        found = found.append_column("query", pa.repeat(query, found.num_rows))
        found = found.append_column("batch", pa.repeat(batch, found.num_rows))
        # Without retries this commit fails if another driver has added a snapshot since the table was loaded.
        table.append(found, snapshot_properties={_QUERY: query, _BATCH: str(batch)})

    def take_back(self, query: str, first: int) -> None:
        """Remove what a query has written from batch `first` on: what ``statelog.rewind`` makes it repeat."""
        written = f"query = '{query}' AND batch >= {first}"
        self._load().delete(written, snapshot_properties={_QUERY: query, _BATCH: str(first - 1)})

    def _load(self) -> Table:
        table = load_catalog(self._catalog, **self._properties).load_table(self._table)
        if table.properties.get(_RETRIES) != "0":
            raise ValueError(f"Set {_RETRIES} of {self._table} to 0: a retry would not see another driver's batch.")
        return table


def newest_batch(table: Table, query: str) -> int:
    """The newest batch of a query in the table; -1 if there is none."""
    for snapshot in ancestors_of(table.current_snapshot(), table.metadata):
        if snapshot.summary is not None and snapshot.summary.get(_QUERY) == query:
            return int(str(snapshot.summary[_BATCH]))
    return -1
