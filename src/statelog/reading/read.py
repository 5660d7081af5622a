"""Reads a state as Arrow columns, without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa

from statelog.errors import ConfigurationError
from statelog.local.restore import read_segment
from statelog.operators.keyed.timers import TIMERS
from statelog.operators.unkeyed.snapshot import Snapshot
from statelog.operators.unkeyed.states import OperatorStateMode
from statelog.progress import tracked
from statelog.reading.lookup import Keys, Lookup
from statelog.reading.pinned import open_pinned, reading
from statelog.reading.savepoint import SavedSource, open_saved, saved_rows
from statelog.reading.scan import ReadPart, cut_parts, part_sizes, scan_part
from statelog.reading.source import At, Source, StoredOperator, is_savepoint, open_source
from statelog.reading.tables import HASH, ElementColumns, Positions, StateColumns
from statelog.runs.schema import StateDescriptor, StateSchema, decode_schema

TIMERS_NAME: Final = "timers"
"""The name under which users read an operator's timers."""


def read_state(
    location: str | Path,
    uid: str | None = None,
    state: str | None = None,
    *,
    at: At | None = None,
    keys: Keys | None = None,
    columns: Sequence[str] | None = None,
) -> pa.RecordBatchReader:
    """Read a state of an operator at a checkpoint, while its query runs or later.

    Neither Spark nor the query is needed, and the query does not notice. The reader passes its rows to other tools
    without copying them: DuckDB, Polars, pandas and Ray take it as it is.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given: a directory or a folder in an
        object store. Or a savepoint.
    uid : str, optional
        The operator; needed if there are several.
    state : str, optional
        The state; needed if there are several. ``"timers"`` are the operator's timers.
    at : int or datetime, optional
        The batch whose checkpoint is read, or a time with its zone: then the newest checkpoint whose batch is not
        later. By default the newest one. A savepoint has one batch.
    keys : pyarrow.Table, pyarrow.RecordBatch or sequence, optional
        Only the rows of these keys: a table with the key's fields, or for each key a tuple, a dict or, if the key has
        one field, a value. Few blocks are read for them, and nothing else; of a savepoint the files with their hashes.
    columns : sequence of str, optional
        The columns to read, in this order; by default all but ``hash``.

    Returns
    -------
    pyarrow.RecordBatchReader
        A row per key, or per entry of a list or map. Columns are ``key_<field>``, ``value_<field>`` and, by kind,
        ``mapkey_<field>``, ``position``, ``time_ms`` (milliseconds since the Unix epoch), ``expires_ms`` and
        ``subtask``; ``hash`` is the key hash. Rows of keyed state are in order of their key hash. Files are read as
        the reader is.

    Raises
    ------
    ConfigurationError
        If there is no such operator, state or column, if several fit, or if the keys do not fit the key's fields.
    StateMissingError
        If the operator has no such checkpoint, or the savepoint is of another batch.
    PinExpiredError
        If the checkpoint is given up before or, without the right to write a pin, while it is read; or if the reader
        is not read for five minutes.
    CorruptionError, StorageError
        If the state is damaged or cannot be read; also while rows are read.

    Examples
    --------
    >>> counts = statelog.read_state("/data/checkpoints/flights", state="count")  # doctest: +SKIP
    >>> duckdb.sql("SELECT * FROM counts ORDER BY value_n DESC LIMIT 10")  # doctest: +SKIP
    """
    if is_savepoint(str(location)):
        return _read_saved(open_saved(str(location), uid, at), state, keys, columns)

    def make() -> tuple[pa.Schema, Iterator[pa.RecordBatch | None]]:
        source = open_source(str(location), uid, at)
        stored = chosen_state(source, state)
        return select_columns(source, stored, columns), open_rows(source, stored, keys)

    return open_pinned(make, is_fixed=isinstance(at, int))


def _read_saved(
    source: SavedSource, state: str | None, keys: Keys | None, columns: Sequence[str] | None
) -> pa.RecordBatchReader:
    stored = chosen_state(source, state)
    schema = select_columns(source, stored, columns)
    if keys is not None:
        _require_keys(source)
    rows = saved_rows(source, stored, _table_of(source, stored).schema, schema.names, keys)
    return pa.RecordBatchReader.from_batches(schema, rows)


def select_columns(source: StoredOperator, stored: StateSchema, columns: Sequence[str] | None) -> pa.Schema:
    """The columns of a state that a user has named; ConfigurationError if there is no such column."""
    return chosen_columns(_table_of(source, stored).schema, columns, f"State '{shown_name(stored)}' of {source.name}")


def read_schema(source: StoredOperator, stored: StateSchema) -> pa.Schema:
    """The columns that a reader of a state returns by default."""
    schema = _table_of(source, stored).schema
    return pa.schema([field for field in schema if field.name != HASH])


_Table = StateColumns | ElementColumns


def _table_of(source: StoredOperator, stored: StateSchema) -> _Table:
    if not source.key_schema:
        return ElementColumns(stored)
    return StateColumns(decode_schema(source.key_schema), StateDescriptor.from_stored(stored))


def chosen_columns(schema: pa.Schema, columns: Sequence[str] | None, name: str) -> pa.Schema:
    """The columns that a user has named, by default all but the hash; ConfigurationError if there is no such column."""
    if columns is None:
        columns = [field for field in schema.names if field != HASH]
    if unknown := [column for column in columns if column not in schema.names]:
        raise ConfigurationError(
            f"{name} has no column {_quoted(unknown)}.", hint=f"Its columns are {_quoted(schema.names)}."
        )
    return pa.schema([schema.field(column) for column in columns])


def open_rows(
    source: Source, stored: StateSchema, keys: Keys | None = None, part: ReadPart | None = None
) -> Iterator[pa.RecordBatch | None]:
    """The rows of a state, of some keys or of a part; the first step pins the checkpoint and yields None."""
    with reading(source.store, source.root, source.history, source.checkpoint.batch) as keep:
        found = found_rows(source, stored, keys, part)
        yield None
        keep()
        for rows in found:
            yield rows
            keep()


def found_rows(
    source: Source,
    stored: StateSchema,
    keys: Keys | None = None,
    part: ReadPart | None = None,
    lookup: Lookup | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a state, of some keys or of a part, without a pin; `lookup` may have been used before."""
    table = _table_of(source, stored)
    if isinstance(table, ElementColumns):
        if keys is not None:
            _require_keys(source)
        return _elements(source, stored, table)
    if keys is None:
        return _entries(source, stored, table, part)
    positions = Positions()
    return (table.to_rows(changes, positions) for changes in (lookup or Lookup(source, stored)).find(keys))


def _require_keys(source: StoredOperator) -> None:
    """Refuse keys for an operator that has none."""
    if not source.key_schema:
        raise ConfigurationError(
            f"{source.name} has no keys: its state is kept by subtask.", hint="Read it without keys=."
        )


def chosen_state(source: StoredOperator, name: str | None) -> StateSchema:
    """The state that a user has named; ConfigurationError if there is none, or several and no name."""
    own = {stored.name: stored for stored in source.states}
    timers = own.pop(TIMERS, None)
    # A user's state of this name is the one that is meant.
    known = own if timers is None else {TIMERS_NAME: timers} | own
    if name is None and own:
        known = own
    if name is None and len(known) == 1:
        return next(iter(known.values()))
    if name is None:
        raise ConfigurationError(
            f"{source.name} has {f'the states {_quoted(known)}' if known else 'no states'}.",
            hint="Pass one of them as state." if known else "There is nothing to read.",
        )
    if name not in known:
        raise ConfigurationError(f"{source.name} has no state '{name}'.", hint=f"It has {_quoted(known) or 'none'}.")
    return known[name]


def shown_name(stored: StateSchema) -> str:
    """The name under which users read a state."""
    return TIMERS_NAME if stored.name == TIMERS else stored.name


def _quoted(names: Sequence[str] | dict[str, StateSchema]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _entries(
    source: Source, stored: StateSchema, table: StateColumns, part: ReadPart | None
) -> Iterator[pa.RecordBatch]:
    """The rows of a keyed state, or of a part of it."""
    positions = Positions()
    for one in tracked(cut_parts(source.history, source.checkpoint) if part is None else [part], part_sizes):
        for _, changes in scan_part(source.store, one, source.checkpoint, [stored.name]):
            yield table.to_rows(changes, positions)


def _elements(source: Source, stored: StateSchema, table: ElementColumns) -> Iterator[pa.RecordBatch]:
    """The rows of a state of an unkeyed operator."""
    segments = source.checkpoint.segments
    for subtask, segment in enumerate(segments[:1] if stored.kind == OperatorStateMode.BROADCAST else segments):
        section = Snapshot(read_segment(source.store, segment), segment.name).sections.get(stored.name)
        if section is not None and section.count:
            yield table.to_rows(section.rows, subtask)
