"""Parquet files: one per batch, named by it, which appears as a whole and which a repeated batch replaces."""

from __future__ import annotations

import os
import uuid
from os import replace
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import DataFrame

__all__ = ["FilesSink"]


class FilesSink:
    """A function for ``foreachBatch`` that writes each batch to ``<folder>/query=<query id>/<batch>.parquet``.

    Parameters
    ----------
    folder : Path
        A folder on the driver's disk, or on one that hosts share.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, rows: DataFrame, batch: int) -> None:
        query = rows.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        assert query is not None, "in foreachBatch only"
        found = rows.toArrow()
        folder = self._folder_of(query)
        folder.mkdir(parents=True, exist_ok=True)
        hidden = folder / f".{batch}-{uuid.uuid4()}"  # two drivers never write to one file; readers leave dots out
        pq.write_table(found, hidden)
        _sync(hidden)
        replace(hidden, folder / f"{batch:020}.parquet")
        _sync(folder)

    def take_back(self, query: str, first: int) -> None:
        """Remove what a query has written from batch `first` on: what ``statelog.rewind`` makes it repeat."""
        for path in self._folder_of(query).glob("[0-9]*.parquet"):
            if int(path.stem) >= first:
                path.unlink()

    def _folder_of(self, query: str) -> Path:
        return self._folder / f"query={query}"


def _sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
