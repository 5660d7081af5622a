"""Loads DataFrames as states: before a query's first batch, each becomes runs of materialized state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import DataType, StructField

from statelog.convert.types import key_schema
from statelog.errors import ConfigurationError, ErrorKind
from statelog.log.references import StoredRun
from statelog.options import Options
from statelog.runs import digests
from statelog.runs.key_groups import hash_range
from statelog.runs.schema import StateDescriptor, StateKind, StateSchema, decode_schema
from statelog.savepoint.load import encode_tables
from statelog.savepoint.tables import EXPIRES, HASH, StateColumns
from statelog.spark.lossless_casts import converted_columns, did_you_mean, require_convertible
from statelog.spark.worker_process import worker_process

_STORED = "subtask int, name string, length long, checksum binary, rows long"


@dataclass(frozen=True)
class InitialTable:
    """A DataFrame that is loaded as a state."""

    state: StateSchema
    rows: DataFrame
    """Have the key hash as the last column, and are in the partitions of their subtasks."""
    names: list[str]
    """Names of the columns without the key hash, in order."""


def checked_table(df: DataFrame, keys: Sequence[StructField], state: StateDescriptor, uid: str) -> DataFrame:
    """The columns of a DataFrame that make up a state, the key's first, converted to the state's types.

    `keys` are the stream's grouping columns. Raises ConfigurationError if the DataFrame is streaming, if it lacks a
    column or has another one, and if a conversion could lose something.
    """
    subject = f"operator '{uid}': initialTables['{state.name}']"
    if df.isStreaming:
        raise ConfigurationError(f"{subject} is a streaming DataFrame.", hint="It must be a batch DataFrame.")
    schema = StateColumns(key_schema(keys), state).schema
    wanted: dict[str, DataType] = {field.name: from_arrow_type(field.type) for field in schema if field.name != HASH}
    wanted |= {f"key_{field.name}": field.dataType for field in keys}
    if EXPIRES in wanted and EXPIRES not in df.columns:
        df = df.withColumn(EXPIRES, F.lit(None).cast("long"))
    _require_columns(df.columns, list(wanted), subject, state)
    columns = [(df.columns.index(name), name, kind) for name, kind in wanted.items()]
    for place, name, kind in columns:
        owner = "the stream's" if name.startswith("key_") else "the state's"
        require_convertible(df.schema[place].dataType, kind, name, subject, owner)
    return converted_columns(df, columns)


def _require_columns(found: list[str], wanted: list[str], subject: str, state: StateDescriptor) -> None:
    """Refuse missing, unknown and duplicate columns."""
    unknown = [name for name in found if name not in (*wanted, HASH)]
    missing = [name for name in wanted if name not in found]
    doubled = [name for name in wanted if found.count(name) > 1]
    if missing:
        misfit, meant = f"has no column {missing[0]!r}; its columns are {', '.join(found)}", (missing[0], unknown)
    elif unknown:
        misfit, meant = f"has a column {unknown[0]!r}, which is none of the state's", (unknown[0], wanted)
    elif doubled:
        misfit, meant = f"has two columns {doubled[0]!r}", ("", [])
    else:
        return
    raise ConfigurationError(
        f"{subject} {misfit}.",
        kind=ErrorKind.OTHER_SCHEMA,
        hint=f"{did_you_mean(*meant)}{state} takes the columns {', '.join(wanted)}.",
    )


def store_initial_table(
    table: InitialTable, key_schema: bytes, parallelism: int, location: str, folder: str, run_id: str, options: Options
) -> dict[int, StoredRun]:
    """Store a table as runs, one for each subtask that has rows; return them by subtask.

    `key_schema` is the Arrow IPC schema message of the key's fields. Below `folder`, each subtask has a folder of its
    own. Task attempts are unique only within a start, so names contain the `run_id` too.
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
        _require_elements(rows, StateDescriptor.from_stored(state))
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
                    "checksum": digests.checksum(data),
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


def _require_elements(rows: pa.Table, state: StateDescriptor) -> None:
    """Refuse null elements where the state declares that there are none; the types of a table do not tell."""
    if state.kind is StateKind.TIMER:
        return
    for field in state.value_schema:
        if any(_lacks_element(chunk, field.type) for chunk in rows.column(f"value_{field.name}").chunks):
            raise ConfigurationError(
                f"The rows of {state}: column 'value_{field.name}' holds a null within {field.type}.",
                kind=ErrorKind.OTHER_SCHEMA,
                hint="Replace it yourself, with transform and coalesce, or declare that there may be nulls.",
            )


def _lacks_element(values: pa.Array, kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        parts = [(values.flatten(), kind.value_field)]
    elif pa.types.is_map(kind):
        parts = [(values.keys, kind.key_field), (values.items, kind.item_field)]
    elif pa.types.is_struct(kind):
        parts = list(zip(values.flatten(), kind.fields, strict=True))
    else:
        return False
    return any((part.null_count and not field.nullable) or _lacks_element(part, field.type) for part, field in parts)


def joined_runs(tables: Iterable[Mapping[int, StoredRun]]) -> dict[int, list[StoredRun]]:
    """The runs of several tables, by subtask."""
    joined: dict[int, list[StoredRun]] = {}
    for runs in tables:
        for subtask, run in runs.items():
            joined.setdefault(subtask, []).append(run)
    return joined
