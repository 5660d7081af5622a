"""An open checkpoint, for many reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa

from statelog.errors import ConfigurationError, CorruptionError, PinExpiredError, StorageError
from statelog.history.held_pin import gone
from statelog.reading.lookup import Keys, Lookup
from statelog.reading.pinned import is_given_up, reading
from statelog.reading.read import found_rows, select_columns
from statelog.reading.source import At, Source, checked_at, open_source
from statelog.reading.states import StateTable, chosen_table, shown_name, tables_of

_ATTEMPTS = 5


class StateReader:
    """Reads the states of one checkpoint again and again: what a look-up has read of the files stays in memory.

    Made by :func:`open_state`; use it in a ``with`` statement, or call :meth:`close`. Its checkpoint stays readable
    while it is used; after five minutes without a read the query may give it up. Only one thread may use a reader.

    Parameters
    ----------
    source : Source
        The checkpoint.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lookups: dict[str, Lookup] = {}
        self._pin = ExitStack()
        self._is_closed = False
        self._hold()

    def _hold(self) -> None:
        self._pin.close()
        self._keep = self._pin.enter_context(reading(self._source))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def batch(self) -> int:
        """The checkpoint's batch."""
        return self._source.checkpoint.batch

    @property
    def batch_time_ms(self) -> int:
        """Spark's time of the batch, in milliseconds since the Unix epoch."""
        return self._source.checkpoint.batch_time_ms

    @property
    def states(self) -> list[str]:
        """The names of the states."""
        return [table.name for table in tables_of(self._source)]

    def read(
        self, state: str | None = None, *, keys: Keys | None = None, columns: Sequence[str] | None = None
    ) -> pa.RecordBatchReader:
        """Read a state.

        Parameters
        ----------
        state : str, optional
            The state; needed if there are several.
        keys : pyarrow.Table, pyarrow.RecordBatch or sequence, optional
            Only the rows of these keys, as in :func:`read_state`.
        columns : sequence of str, optional
            The columns to read, in this order; by default all but ``hash``.

        Returns
        -------
        pyarrow.RecordBatchReader
            As of :func:`read_state`. Files are read as the reader is.

        Raises
        ------
        ConfigurationError, PinExpiredError, CorruptionError, StorageError
            As of :func:`read_state`; ConfigurationError also if the reader is closed.
        """
        self._require_open()
        table = chosen_table(self._source, state)
        schema = select_columns(self._source, table, columns)
        try:
            self._keep()
        except PinExpiredError:
            self._hold()  # nothing is gone if the checkpoint is still retained
        rows = self._rows(table, keys)
        return pa.RecordBatchReader.from_batches(schema, (batch.select(schema.names) for batch in rows))

    def _rows(self, table: StateTable, keys: Keys | None) -> Iterator[pa.RecordBatch]:
        source = self._source
        lookup = None
        if keys is not None and not source.checkpoint.is_whole:
            lookup = self._lookups.setdefault(table.stored.name, Lookup(source, table.stored))
        try:
            for rows in found_rows(source, table, keys, lookup=lookup):
                yield rows
                self._require_open()
                self._keep()
        except (CorruptionError, StorageError) as error:
            if is_given_up(error, source):
                raise gone(source.needs()) from error
            raise

    def _require_open(self) -> None:
        if self._is_closed:
            raise ConfigurationError(f"The reader of {self._source.name} is closed.", hint="Open another one.")

    def close(self) -> None:
        """Let the checkpoint go."""
        self._is_closed = True
        self._pin.close()


def stored_states(reader: StateReader) -> list[str]:
    """The states that the checkpoint stores; windows are made of one of them."""
    return [shown_name(stored) for stored in reader._source.states]


def open_state(location: str | Path, uid: str | None = None, *, at: At | None = None) -> StateReader:
    """Open a checkpoint of an operator for many reads, such as look-ups.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given.
    uid : str, optional
        The operator; needed if there are several.
    at : int, datetime or str, optional
        The checkpoint, as in :func:`read_state`. The reader stays at it, whatever the query does.

    Returns
    -------
    StateReader
        A reader, to be closed.

    Raises
    ------
    ConfigurationError, StateMissingError, PinExpiredError, CorruptionError, StorageError
        As of :func:`read_state`.

    Examples
    --------
    >>> with statelog.open_state("/data/checkpoints/flights") as reader:  # doctest: +SKIP
    ...     found = reader.read("count", keys=["a1b2c3"]).read_all()
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return StateReader(open_source(str(location), uid, at))
        except PinExpiredError:
            if isinstance(checked_at(at), int | str):
                raise
    return StateReader(open_source(str(location), uid, at))
