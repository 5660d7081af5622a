"""Reads states as Arrow columns, without Spark: once, or repeatedly from an open checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa

from statelog.errors import ConfigurationError, CorruptionError, PinExpiredError, StorageError
from statelog.history.pins import retry_given_up
from statelog.reading.checkpoints import LoggedPoint
from statelog.reading.keys import Keys
from statelog.reading.open import open_logged, open_point
from statelog.reading.point import At, Point, is_settled
from statelog.reading.states import StateTable, chosen_columns, chosen_table, shown_name, tables_of


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

    Neither Spark nor the query is needed, and a running query is not affected. The reader passes its rows to other
    tools without copying them: DuckDB, Polars, pandas and Ray accept it directly.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given: a directory, or a folder in an
        object store or in HDFS. Or a savepoint.
    uid : str, optional
        The operator; required if there are several.
    state : str, optional
        The state; required if there are several. ``"timers"`` are the operator's timers, ``"windows"`` its open
        windows.
    at : int, datetime or str, optional
        The batch whose checkpoint is read; or a time with its zone: then the newest checkpoint whose batch is not
        later; or the name of a pin, see :func:`list_pins`. A time may be a text in ISO 8601, in UTC if it has no zone.
        Only a pin's name selects a checkpoint that was taken back, or one of an operator whose state was given up. By
        default the newest one. A savepoint has one batch.
    keys : pyarrow.Table, pyarrow.RecordBatch or sequence, optional
        Only the rows of these keys: a table with the key's fields, or for each key a tuple, a dict or, if the key has
        one field, a value. A datetime without a zone is interpreted as Spark's ``collect()`` returns it: for a
        timestamp as the local time of this process, for a ``timestamp_ntz`` as the time itself. A table's columns
        without a zone are in UTC. Only the few blocks that may have these keys are read; in a savepoint, the files that
        may have them.
    columns : sequence of str, optional
        The columns to read, in this order; by default all but ``hash``.

    Returns
    -------
    pyarrow.RecordBatchReader
        A row per key, or per entry of a list or map. Columns are ``key_<field>``, ``value_<field>`` and, by kind,
        ``mapkey_<field>``, ``position``, ``time_ms`` (milliseconds since the Unix epoch), ``expires_ms`` and
        ``subtask``; ``hash`` is the key hash. Windows have ``window_start``, ``window_end``, ``is_complete`` and
        ``rows``. Rows of keyed state are in order of their key hash. Files are read while the reader is read.

    Raises
    ------
    ConfigurationError
        If there is no such operator, state or column, if several match, or if the keys do not fit the key's fields.
    StateMissingError
        If the operator has no such checkpoint, or the savepoint is of another batch.
    PinExpiredError
        If the checkpoint is deleted before or, without the right to write a pin, while it is read; or if the reader
        is not read for five minutes.
    ProcessorError
        While rows are read: if a sum or list of a window is too large to be computed.
    CorruptionError, StorageError
        If the state is damaged or cannot be read; also while rows are read.

    Examples
    --------
    >>> counts = statelog.read_state("/data/checkpoints/flights", state="count")  # doctest: +SKIP
    >>> duckdb.sql("SELECT * FROM counts ORDER BY value_n DESC LIMIT 10")  # doctest: +SKIP
    """

    def make() -> tuple[pa.Schema, Iterator[pa.RecordBatch | None]]:
        point = open_point(str(location), uid, at)
        table = chosen_table(point, state)
        schema = select_columns(point, table, columns)
        return schema, open_rows(point, table, schema.names, keys)

    return open_reader(make, is_fixed=is_settled(at))


def select_columns(point: Point, table: StateTable, columns: Sequence[str] | None) -> pa.Schema:
    """The columns of a state that a user has named; ConfigurationError if there is no such column."""
    return chosen_columns(table.schema, columns, f"State '{table.name}' of {point.name}")


def open_rows(
    point: Point, table: StateTable, chosen: Sequence[str], keys: Keys | None = None
) -> Iterator[pa.RecordBatch | None]:
    """The rows of a state, or of some keys; the first step makes sure that the point is kept, and yields None."""
    with point.held() as keep:
        found = table.rows(point, chosen, keys)
        yield None
        keep()
        for rows in found:
            yield rows
            keep()


def open_reader(
    make: Callable[[], tuple[pa.Schema, Iterator[pa.RecordBatch | None]]], *, is_fixed: bool
) -> pa.RecordBatchReader:
    """Make a reader of rows, which have the schema's columns among theirs and perhaps others.

    `make` finds the checkpoint and returns its schema and rows; the first step of the rows pins the checkpoint and
    yields None. Unless it `is_fixed` which checkpoint it is, another one is used if it is deleted meanwhile.
    """

    def begun() -> tuple[pa.Schema, Iterator[pa.RecordBatch | None]]:
        schema, rows = make()
        next(rows)  # the pin goes with the generator
        return schema, rows

    schema, rows = retry_given_up(begun, is_fixed=is_fixed)
    return pa.RecordBatchReader.from_batches(
        schema, (batch.select(schema.names) for batch in rows if batch is not None)
    )


class StateReader:
    """Reads the states of one checkpoint repeatedly: what a look-up has read of the files stays in memory.

    Created by :func:`open_state`; use it in a ``with`` statement, or call :meth:`close`. Its checkpoint stays readable
    while the reader is used; after five minutes without a read, the query may delete the checkpoint. Only one thread
    may use a reader.

    Parameters
    ----------
    point : LoggedPoint
        The checkpoint.
    """

    def __init__(self, point: LoggedPoint) -> None:
        self._point = point
        self._pin = ExitStack()
        self._is_closed = False
        self._hold()

    def _hold(self) -> None:
        self._pin.close()
        self._keep = self._pin.enter_context(self._point.held())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def batch(self) -> int:
        """The checkpoint's batch."""
        return self._point.batch

    @property
    def batch_time_ms(self) -> int:
        """Spark's time of the batch, in milliseconds since the Unix epoch."""
        return self._point.batch_time_ms

    @property
    def states(self) -> list[str]:
        """The names of the states."""
        return [table.name for table in tables_of(self._point)]

    def read(
        self, state: str | None = None, *, keys: Keys | None = None, columns: Sequence[str] | None = None
    ) -> pa.RecordBatchReader:
        """Read a state.

        Parameters
        ----------
        state : str, optional
            The state; required if there are several.
        keys : pyarrow.Table, pyarrow.RecordBatch or sequence, optional
            Only the rows of these keys, as in :func:`read_state`.
        columns : sequence of str, optional
            The columns to read, in this order; by default all but ``hash``.

        Returns
        -------
        pyarrow.RecordBatchReader
            As for :func:`read_state`. Files are read while the reader is read.

        Raises
        ------
        ConfigurationError, PinExpiredError, CorruptionError, StorageError
            As for :func:`read_state`; ConfigurationError also if the reader is closed.
        """
        self._require_open()
        table = chosen_table(self._point, state)
        schema = select_columns(self._point, table, columns)
        try:
            self._keep()
        except PinExpiredError:
            self._hold()  # nothing is gone if the checkpoint is still retained
        rows = self._rows(table, schema.names, keys)
        return pa.RecordBatchReader.from_batches(schema, (batch.select(schema.names) for batch in rows))

    def _rows(self, table: StateTable, chosen: Sequence[str], keys: Keys | None) -> Iterator[pa.RecordBatch]:
        try:
            for rows in table.rows(self._point, chosen, keys):
                yield rows
                self._require_open()
                self._keep()
        except (CorruptionError, StorageError) as error:
            self._point.require_kept(error)
            raise

    def _require_open(self) -> None:
        if self._is_closed:
            raise ConfigurationError(f"The reader of {self._point.name} is closed.", hint="Open another one.")

    def close(self) -> None:
        """Release the checkpoint."""
        self._is_closed = True
        self._pin.close()


def stored_states(reader: StateReader) -> list[str]:
    """The states that the checkpoint stores; windows are computed from one of them."""
    return [shown_name(stored) for stored in reader._point.states]


def open_state(location: str | Path, uid: str | None = None, *, at: At | None = None) -> StateReader:
    """Open a checkpoint of an operator for many reads, such as look-ups.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given.
    uid : str, optional
        The operator; required if there are several.
    at : int, datetime or str, optional
        The checkpoint, as in :func:`read_state`. The reader stays at it, whatever the query does.

    Returns
    -------
    StateReader
        A reader; close it after use.

    Raises
    ------
    ConfigurationError, StateMissingError, PinExpiredError, CorruptionError, StorageError
        As for :func:`read_state`.

    Examples
    --------
    >>> with statelog.open_state("/data/checkpoints/flights") as reader:  # doctest: +SKIP
    ...     found = reader.read("count", keys=["a1b2c3"]).read_all()
    """
    return retry_given_up(lambda: StateReader(open_logged(str(location), uid, at)), is_fixed=is_settled(at))
