"""Loading DataFrames as states: each becomes runs of materialized state before a query's first batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from statelog.changelog import chain
from statelog.changelog.base import StoredRun
from statelog.errors import ConfigurationError, ErrorKind
from statelog.options import Options
from statelog.savepoints.columns import EXPIRES, HASH, StateColumns
from statelog.savepoints.load import encode_tables
from statelog.spark.types import arrow_type
from statelog.spark.worker_process import worker_process
from statelog.state.key_groups import hash_range
from statelog.state.schema import StateDescriptor, StateSchema, decode_schema

__all__ = ["InitialTable", "checked_table", "joined_runs", "store_initial_table"]

_STORED = "subtask int, name string, length long, checksum binary, rows long"


@dataclass(frozen=True)
class InitialTable:
    """The rows of a state.

    Parameters
    ----------
    state : StateSchema
        The state.
    rows : DataFrame
        The rows with the key hash as the last column, each in the partition of its subtask.
    names : list of str
        What the other columns are called, in order.
    """

    state: StateSchema
    rows: DataFrame
    names: list[str]


def checked_table(df: DataFrame, key_schema: pa.Schema, state: StateDescriptor, uid: str) -> DataFrame:
    """The columns of a DataFrame that make up a state.

    Parameters
    ----------
    df : DataFrame
        The table.
    key_schema : pyarrow.Schema
        The key's fields.
    state : StateDescriptor
        The state.
    uid : str
        The operator, for messages.

    Raises
    ------
    ConfigurationError
        If it is a streaming DataFrame, or a column is missing or of a type that cannot become the state's.
    """
    subject = f"operator '{uid}': initialTables['{state.name}']"
    if df.isStreaming:
        raise ConfigurationError(f"{subject} is a streaming DataFrame.", hint="It must be a batch DataFrame.")
    wanted = [field for field in StateColumns(key_schema, state).schema if field.name != HASH]
    if EXPIRES in [field.name for field in wanted] and EXPIRES not in df.columns:
        df = df.withColumn(EXPIRES, F.lit(None).cast("long"))
    missing = [field.name for field in wanted if field.name not in df.columns]
    if missing:
        raise ConfigurationError(
            f"{subject} has no column {missing[0]!r}; its columns are {', '.join(df.columns)}.",
            kind=ErrorKind.OTHER_SCHEMA,
            hint=f"{state} takes the columns {', '.join(field.name for field in wanted)}.",
        )
    for field in wanted[len(key_schema) :]:
        own = arrow_type(df.schema[field.name].dataType, f"{subject}, column '{field.name}',")
        try:
            pa.array([], own).cast(field.type)
        except pa.ArrowException as error:
            raise ConfigurationError(
                f"{subject}: column '{field.name}' is {own}, and the state's is {field.type}.",
                kind=ErrorKind.OTHER_SCHEMA,
                hint="Cast it.",
            ) from error
    return df.select(*[f"`{field.name.replace('`', '``')}`" for field in wanted])


def store_initial_table(
    table: InitialTable, key_schema: bytes, parallelism: int, location: str, folder: str, run_id: str, options: Options
) -> dict[int, StoredRun]:
    """Store a table as runs.

    Parameters
    ----------
    table : InitialTable
        The table.
    key_schema : bytes
        Arrow IPC schema message of the key's fields.
    parallelism : int
        Number of subtasks.
    location, folder : str
        Where the runs go; below the folder each subtask has its own.
    run_id : str
        The query's run; attempts are only unique in it.
    options : Options
        How files are written, and requests attempted.

    Returns
    -------
    dict of int to StoredRun
        By subtask; those without rows have none.
    """
    written = table.rows.mapInArrow(_writer(table, key_schema, location, folder, run_id, options), _STORED).collect()
    runs: dict[int, StoredRun] = {}
    for row in written:
        within = hash_range(row.subtask, parallelism)
        runs[row.subtask] = StoredRun(row.name, 0, row.length, bytes(row.checksum), row.rows, within.first, within.last)
    return runs


def _writer(
    table: InitialTable, key_schema: bytes, location: str, folder: str, run_id: str, options: Options
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    state, names = table.state, [*table.names, HASH]

    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held = [batch for batch in batches if batch.num_rows]
        context = TaskContext.get()
        if not held or context is None:
            return
        rows = pa.Table.from_batches(held).rename_columns(names)
        data, count = encode_tables(decode_schema(key_schema), [(state, rows)], options.codec)
        subtask = context.partitionId()
        name = f"{folder}/{subtask}/{run_id}-{context.taskAttemptId()}.run"
        worker_process().open_store(location, options).put(name, data)
        yield pa.RecordBatch.from_pylist(
            [
                {
                    "subtask": subtask,
                    "name": name,
                    "length": len(data),
                    "checksum": chain.checksum(data),
                    "rows": count,
                }
            ],
            schema=pa.schema(
                [
                    ("subtask", pa.int32()),
                    ("name", pa.string()),
                    ("length", pa.int64()),
                    ("checksum", pa.binary()),
                    ("rows", pa.int64()),
                ]
            ),
        )

    return write


def joined_runs(tables: Iterable[Mapping[int, StoredRun]]) -> dict[int, list[StoredRun]]:
    """The runs of several tables, by subtask."""
    joined: dict[int, list[StoredRun]] = {}
    for runs in tables:
        for subtask, run in runs.items():
            joined.setdefault(subtask, []).append(run)
    return joined
