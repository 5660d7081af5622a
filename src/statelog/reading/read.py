"""Reads a state as Arrow columns, without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from statelog.convert.state_tables import ElementColumns, StateColumns
from statelog.errors import ConfigurationError
from statelog.local.restore import read_segment
from statelog.operators.unkeyed.snapshot import Snapshot
from statelog.operators.unkeyed.states import OperatorStateMode
from statelog.progress import tracked
from statelog.reading.lookup import Keys, Lookup
from statelog.reading.pinned import open_pinned, reading
from statelog.reading.savepoint import SavedSource, open_saved, saved_rows
from statelog.reading.scan import ReadPart, cut_parts, part_sizes, scan_part
from statelog.reading.source import At, Source, StoredOperator, checked_at, is_savepoint, open_source
from statelog.reading.states import StateTable, chosen_columns, chosen_table
from statelog.runs.schema import StateDescriptor, StateSchema, decode_schema


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
        The state; needed if there are several. ``"timers"`` are the operator's timers, ``"windows"`` its open windows.
    at : int, datetime or str, optional
        The batch whose checkpoint is read; or a time with its zone: then the newest checkpoint whose batch is not
        later; or the name of a pin, see :func:`list_pins`. A time may be a text in ISO 8601, in UTC if it has no zone.
        Only a pin's name tells a checkpoint that was taken back, or one of an operator whose state was given up. By
        default the newest one. A savepoint has one batch.
    keys : pyarrow.Table, pyarrow.RecordBatch or sequence, optional
        Only the rows of these keys: a table with the key's fields, or for each key a tuple, a dict or, if the key has
        one field, a value. A datetime without a zone is what Spark's ``collect()`` returns: for a timestamp the local
        time of this process, for a ``timestamp_ntz`` the time itself. A table's columns without a zone are in UTC. Few
        blocks are read for them, and nothing else; of a savepoint the files with their hashes.
    columns : sequence of str, optional
        The columns to read, in this order; by default all but ``hash``.

    Returns
    -------
    pyarrow.RecordBatchReader
        A row per key, or per entry of a list or map. Columns are ``key_<field>``, ``value_<field>`` and, by kind,
        ``mapkey_<field>``, ``position``, ``time_ms`` (milliseconds since the Unix epoch), ``expires_ms`` and
        ``subtask``; ``hash`` is the key hash. Windows have ``window_start``, ``window_end``, ``is_complete`` and
        ``rows``. Rows of keyed state are in order of their key hash. Files are read as the reader is.

    Raises
    ------
    ConfigurationError
        If there is no such operator, state or column, if several fit, or if the keys do not fit the key's fields.
    StateMissingError
        If the operator has no such checkpoint, or the savepoint is of another batch.
    PinExpiredError
        If the checkpoint is given up before or, without the right to write a pin, while it is read; or if the reader
        is not read for five minutes.
    ProcessorError
        While rows are read: if a sum or list of a window is too large to be put together.
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
        table = chosen_table(source, state)
        return select_columns(source, table, columns), open_rows(source, table, keys)

    return open_pinned(make, is_fixed=isinstance(checked_at(at), int | str))


def _read_saved(
    source: SavedSource, state: str | None, keys: Keys | None, columns: Sequence[str] | None
) -> pa.RecordBatchReader:
    table = chosen_table(source, state)
    schema = select_columns(source, table, columns)
    if keys is not None:
        _require_keys(source)
    if table.windows is None:
        rows = saved_rows(source, table.stored, table.schema, schema.names, keys)
    else:
        made = table.rows(_saved_entries(source, table.stored, keys))
        rows = (batch.select(schema.names) for batch in made)
    return pa.RecordBatchReader.from_batches(schema, rows)


def _saved_entries(source: SavedSource, stored: StateSchema, keys: Keys | None) -> Iterator[pa.RecordBatch]:
    """The entries of a saved keyed state, or of some keys, as puts in run order, which is that of the files."""
    columns = StateColumns(decode_schema(source.key_schema), StateDescriptor.from_stored(stored))
    for rows in saved_rows(source, stored, columns.schema, columns.schema.names, keys):
        yield from columns.to_changes(pa.Table.from_batches([rows]))


def select_columns(source: StoredOperator, table: StateTable, columns: Sequence[str] | None) -> pa.Schema:
    """The columns of a state that a user has named; ConfigurationError if there is no such column."""
    return chosen_columns(table.schema, columns, f"State '{table.name}' of {source.name}")


def open_rows(
    source: Source, table: StateTable, keys: Keys | None = None, part: ReadPart | None = None
) -> Iterator[pa.RecordBatch | None]:
    """The rows of a state, of some keys or of a part; the first step pins the checkpoint and yields None."""
    with reading(source) as keep:
        found = found_rows(source, table, keys, part)
        yield None
        keep()
        for rows in found:
            yield rows
            keep()


def found_rows(
    source: Source,
    table: StateTable,
    keys: Keys | None = None,
    part: ReadPart | None = None,
    lookup: Lookup | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a state, of some keys or of a part, without a pin; `lookup` may have been used before."""
    if isinstance(table.columns, ElementColumns):
        if keys is not None:
            _require_keys(source)
        return _elements(source, table.stored, table.columns)
    if keys is None:
        return table.rows(_entries(source, table.stored, part))
    return table.rows((lookup or Lookup(source, table.stored)).find(keys))


def _require_keys(source: StoredOperator) -> None:
    """Refuse keys for an operator that has none."""
    if not source.key_schema:
        raise ConfigurationError(
            f"{source.name} has no keys: its state is kept by subtask.", hint="Read it without keys=."
        )


def _entries(source: Source, stored: StateSchema, part: ReadPart | None) -> Iterator[pa.RecordBatch]:
    """The entries of a keyed state, or of a part of it, as puts in run order."""
    for one in tracked(cut_parts(source.history, source.checkpoint) if part is None else [part], part_sizes):
        for _, changes in scan_part(source.store, one, source.checkpoint, [stored.name]):
            yield changes


def _elements(source: Source, stored: StateSchema, table: ElementColumns) -> Iterator[pa.RecordBatch]:
    """The rows of a state of an unkeyed operator."""
    segments = source.checkpoint.segments
    for subtask, segment in enumerate(segments[:1] if stored.kind == OperatorStateMode.BROADCAST else segments):
        section = Snapshot(read_segment(source.store, segment), segment.name).sections.get(stored.name)
        if section is not None and section.count:
            yield table.to_rows(section.rows, subtask)
