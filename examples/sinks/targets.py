"""What the sinks write to: made empty, and read whole."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Protocol

import psycopg
import pyarrow as pa
import pyarrow.dataset
from deltalake import DeltaTable
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyspark.sql import DataFrame

from examples.sinks import delta, files, sqlite
from examples.sinks.delta import DeltaSink
from examples.sinks.files import FilesSink
from examples.sinks.iceberg import IcebergSink, newest_batch
from examples.sinks.postgres import BOOKKEEPING, PostgresSink

__all__ = ["TARGETS", "Target", "Total"]

Total = tuple[int, str, int]
"""A payment's number, its account, and the account's total."""

_COLUMNS: Final = ["seq", "account", "total"]
_WRITTEN: Final = pa.schema([("seq", pa.int64()), ("account", pa.string()), ("total", pa.int64())])
_SCHEMA: Final = _WRITTEN.append(pa.field("query", pa.string())).append(pa.field("batch", pa.int64()))


class Sink(Protocol):
    """A function for ``foreachBatch`` that can take batches back."""

    def __call__(self, rows: DataFrame, batch: int) -> None: ...

    def take_back(self, query: str, first: int) -> None: ...


class Target(Protocol):
    """A table of totals."""

    commit: tuple[Any, str]
    """The function by which the sink commits: its module or class, and its name there."""

    def create(self) -> None:
        """Make it, empty."""
        ...

    def sink(self) -> Sink:
        """The function for ``foreachBatch`` that writes to it."""
        ...

    def rows(self) -> list[Total]:
        """All its rows, in order."""
        ...

    def newest_batch(self, query: str) -> int:
        """The newest batch that it has of a query; -1 if it has none."""
        ...


class PostgresTarget:
    """A table in PostgreSQL; the address is the database's conninfo."""

    commit = (psycopg.Transaction, "__exit__")

    def __init__(self, address: str) -> None:
        self._conninfo = address

    def create(self) -> None:
        with psycopg.connect(self._conninfo) as connection:
            connection.execute(BOOKKEEPING)
            connection.execute("CREATE TABLE totals (seq bigint, account text, total bigint, query text, batch bigint)")

    def sink(self) -> Sink:
        return PostgresSink(self._conninfo, "totals")

    def rows(self) -> list[Total]:
        with psycopg.connect(self._conninfo) as connection:
            return sorted(connection.execute("SELECT seq, account, total FROM totals").fetchall())

    def newest_batch(self, query: str) -> int:
        newest = "SELECT coalesce(max(batch), -1) FROM streamed_batches WHERE query = %s"
        with psycopg.connect(self._conninfo) as connection:
            [(batch,)] = connection.execute(newest, (query,)).fetchall()
        return int(batch)


class SqliteTarget:
    """A table in SQLite; the address is the database's file."""

    commit = (sqlite, "commit")

    def __init__(self, address: str) -> None:
        self._path = address

    def create(self) -> None:
        with closing(sqlite3.connect(self._path)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(sqlite.BOOKKEEPING)
            connection.execute(
                "CREATE TABLE totals (seq INTEGER, account TEXT, total INTEGER, query TEXT, batch INTEGER)"
            )

    def sink(self) -> Sink:
        return sqlite.SqliteSink(self._path, "totals")

    def rows(self) -> list[Total]:
        with closing(sqlite3.connect(self._path)) as connection:
            return sorted(connection.execute("SELECT seq, account, total FROM totals").fetchall())

    def newest_batch(self, query: str) -> int:
        newest = "SELECT coalesce(max(batch), -1) FROM streamed_batches WHERE query = ?"
        with closing(sqlite3.connect(self._path)) as connection:
            [(batch,)] = connection.execute(newest, (query,)).fetchall()
        return int(batch)


class DeltaTarget:
    """A Delta table; the address is its folder."""

    commit = (delta, "write_deltalake")

    def __init__(self, address: str) -> None:
        self._uri = address

    def create(self) -> None:
        DeltaTable.create(self._uri, _SCHEMA)

    def sink(self) -> Sink:
        return DeltaSink(self._uri)

    def rows(self) -> list[Total]:
        return _totals(DeltaTable(self._uri).to_pyarrow_table())

    def newest_batch(self, query: str) -> int:
        newest = DeltaTable(self._uri).transaction_version(query)
        return -1 if newest is None else newest


class IcebergTarget:
    """An Iceberg table and its catalog, a SQLite database; the address is the folder of both."""

    commit = (SqlCatalog, "commit_table")

    def __init__(self, address: str) -> None:
        self._folder = Path(address)
        self._properties = {"type": "sql", "uri": f"sqlite:///{address}/catalog.db", "warehouse": f"file://{address}"}

    def create(self) -> None:
        self._folder.mkdir()
        catalog = self.catalog()
        catalog.create_namespace("bank")
        catalog.create_table("bank.totals", _SCHEMA, properties={"commit.retry.num-retries": "0"})

    def catalog(self) -> Catalog:
        """The catalog, opened again."""
        return load_catalog("local", **self._properties)

    def sink(self) -> Sink:
        return IcebergSink("bank.totals", "local", **self._properties)

    def rows(self) -> list[Total]:
        return _totals(self.catalog().load_table("bank.totals").scan().to_arrow())

    def newest_batch(self, query: str) -> int:
        return newest_batch(self.catalog().load_table("bank.totals"), query)


class FilesTarget:
    """A folder of Parquet files; the address is its path."""

    commit = (files, "replace")

    def __init__(self, address: str) -> None:
        self._folder = Path(address)

    def create(self) -> None:
        self._folder.mkdir()

    def sink(self) -> Sink:
        return FilesSink(self._folder)

    def rows(self) -> list[Total]:
        return _totals(pyarrow.dataset.dataset(self._folder, schema=_WRITTEN, format="parquet").to_table())

    def newest_batch(self, query: str) -> int:
        return max((int(path.stem) for path in self._folder.glob(f"query={query}/[0-9]*.parquet")), default=-1)


def _totals(table: pa.Table) -> list[Total]:
    rows: Iterable[tuple[Any, ...]] = zip(*(table[name].to_pylist() for name in _COLUMNS), strict=True)
    return sorted((seq, account, total) for seq, account, total in rows)


TARGETS: Final[dict[str, Callable[[str], Target]]] = {
    "postgres": PostgresTarget,
    "sqlite": SqliteTarget,
    "delta": DeltaTarget,
    "iceberg": IcebergTarget,
    "files": FilesTarget,
}
