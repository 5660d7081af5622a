"""Stores the state that a query begins with, before its first batch.

The rows of an initial state are for the processor: they become one object per subtask. Tables are states already: they
become runs of materialized state. A streaming plan can hold neither. So Spark jobs store them when the query starts:
Spark calls a listener then, and waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import DataType, StructField

from statelog.convert.state_tables import EXPIRES, HASH, StateColumns, encode_tables
from statelog.convert.types import key_schema
from statelog.errors import ConfigurationError, ErrorKind
from statelog.log.references import StoredRun
from statelog.options import Options
from statelog.runs import digests
from statelog.runs.key_groups import hash_range
from statelog.runs.schema import StateDescriptor, StateKind, StateSchema, decode_schema
from statelog.spark.plan.lossless_casts import converted_columns, did_you_mean, require_convertible
from statelog.spark.worker.worker import with_stores, worker_process

_STORED = "subtask long, name string, length long, checksum binary, rows long"


@dataclass(frozen=True)
class InitialTable:
    """A DataFrame that is loaded as a state."""

    state: StateSchema
    rows: DataFrame
    """Have the key hash as the last column, and are in the partitions of their subtasks."""
    names: list[str]
    """Names of the columns without the key hash, in order."""


@dataclass(frozen=True)
class InitialPlace:
    """The place in the store where a start of a query stores initial state."""

    location: str
    folder: str
    """Within the location."""
    run_id: str
    options: Options

    def put(self, name: str, data: bytes) -> None:
        """Store an object; to be called in a worker."""
        worker_process().open_store(self.location, self.options).put(name, data)


def _store_parts(
    rows: DataFrame, columns: str, store: Callable[[list[pa.RecordBatch], TaskContext], dict[str, Any]]
) -> list[Row]:
    """Store the rows of each partition that has any; return a row with the values that `store` has returned of each."""

    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held = [batch for batch in batches if batch.num_rows]
        context = TaskContext.get()
        if held and context is not None:
            yield pa.RecordBatch.from_pylist([store(held, context)])

    return rows.mapInArrow(with_stores(write), columns).collect()


# ---- Rows for the processor ----


def store_rows(rows: DataFrame, parallelism: int, place: InitialPlace) -> list[str]:
    """Store the rows of an initial state; return the object of each subtask, an empty name for one without rows.

    `rows` have the key hash as the last column, each in the partition of its subtask.
    """

    def store(held: list[pa.RecordBatch], context: TaskContext) -> dict[str, Any]:
        name = f"{place.folder}/{context.partitionId()}-{context.taskAttemptId()}.arrow"
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, held[0].schema) as writer:
            for batch in held:
                writer.write_batch(batch)
        place.put(name, sink.getvalue().to_pybytes())
        return {"subtask": context.partitionId(), "name": name}

    names = {row.subtask: row.name for row in _store_parts(rows, "subtask long, name string", store)}
    return [names.get(subtask, "") for subtask in range(parallelism)]


# ---- Tables ----


def checked_table(df: DataFrame, keys: Sequence[StructField], state: StateDescriptor, uid: str) -> DataFrame:
    """The columns of a DataFrame that make up a state, the key's first, converted to the state's types.

    `keys` are the stream's grouping columns. Raises ConfigurationError if the DataFrame is streaming, if it lacks a
    column or has an additional one, or if a conversion could lose information.
    """
    subject = f"operator '{uid}': initialState['{state.name}']"
    if df.isStreaming:
        raise ConfigurationError(f"{subject} is a streaming DataFrame.", hint="Pass a batch DataFrame.")
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
        misfit, meant = f"has a column {unknown[0]!r}, which the state does not have", (unknown[0], wanted)
    elif doubled:
        misfit, meant = f"has two columns {doubled[0]!r}", ("", [])
    else:
        return
    raise ConfigurationError(
        f"{subject} {misfit}.",
        kind=ErrorKind.OTHER_SCHEMA,
        hint=f"{did_you_mean(*meant)}{state} takes the columns {', '.join(wanted)}.",
    )


def store_tables(
    tables: Iterable[InitialTable], key_schema: bytes, parallelism: int, place: InitialPlace
) -> dict[int, list[StoredRun]]:
    """Store tables as runs, one for each subtask that has rows of a table; return them by subtask.

    `key_schema` is the Arrow IPC schema message of the key's fields. In the folder of `place` each subtask has its own
    folder. Task attempts are unique only within a start, so names contain the run id too.
    """
    runs: dict[int, list[StoredRun]] = {}
    for table in tables:
        for row in _store_parts(table.rows, _STORED, _table_store(table, key_schema, place)):
            within = hash_range(row.subtask, parallelism)
            run = StoredRun(row.name, 0, row.length, bytes(row.checksum), row.rows, within.first, within.last)
            runs.setdefault(row.subtask, []).append(run)
    return runs


def _table_store(
    table: InitialTable, key_schema: bytes, place: InitialPlace
) -> Callable[[list[pa.RecordBatch], TaskContext], dict[str, Any]]:
    state, names = table.state, [*table.names, HASH]  # the table itself cannot be pickled

    def store(held: list[pa.RecordBatch], context: TaskContext) -> dict[str, Any]:
        rows = pa.Table.from_batches(held).rename_columns(names)
        _require_elements(rows, StateDescriptor.from_stored(state))
        data, count = encode_tables(decode_schema(key_schema), [(state, rows)], place.options.codec)
        subtask = context.partitionId()
        name = f"{place.folder}/{subtask}/{place.run_id}-{context.taskAttemptId()}.run"
        place.put(name, data)
        checksum = digests.checksum(data)
        return {"subtask": subtask, "name": name, "length": len(data), "checksum": checksum, "rows": count}

    return store


def _require_elements(rows: pa.Table, state: StateDescriptor) -> None:
    """Refuse null elements where the state declares that there are none; the types of a table do not show it."""
    if state.kind is StateKind.TIMER:
        return
    for field in state.value_schema:
        if any(_lacks_element(chunk, field.type) for chunk in rows.column(f"value_{field.name}").chunks):
            raise ConfigurationError(
                f"The rows of {state}: column 'value_{field.name}' holds a null within {field.type}.",
                kind=ErrorKind.OTHER_SCHEMA,
                hint="Replace the null yourself, with transform and coalesce, or declare that there may be nulls.",
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
