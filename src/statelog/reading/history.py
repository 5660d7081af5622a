"""The history of one key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from statelog.clock import SystemClock
from statelog.errors import PinExpiredError, StateMissingError
from statelog.history.pins import pins_of
from statelog.reading.changes import (
    BATCH,
    ChangeColumns,
    change_rows,
    change_table,
    first_of_state,
    first_with_changes,
)
from statelog.reading.checkpoints import LoggedPoint
from statelog.reading.keys import encoded_keys
from statelog.reading.open import open_logged
from statelog.reading.read import open_reader
from statelog.reading.states import chosen_columns, is_same_state, shown_name
from statelog.runs.schema import StateSchema

STATE: Final = "state"
"""The operation of a row that is not a change: the state at a checkpoint."""


def read_history(
    location: str | Path,
    key: Any,
    uid: str | None = None,
    state: str | None = None,
    *,
    columns: Sequence[str] | None = None,
) -> pa.RecordBatchReader:
    """Read what happened to one key: the changes that are still stored, and its state at earlier checkpoints.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given.
    key : tuple, dict or value
        The key, as in :func:`read_state`.
    uid : str, optional
        The operator; required if there are several.
    state : str, optional
        The state; required if there are several.
    columns : sequence of str, optional
        The columns to read, in this order; by default all but ``hash``.

    Returns
    -------
    pyarrow.RecordBatchReader
        The rows of :func:`read_changes` and, with the operation ``state``, the entries at the oldest retained
        checkpoint and at pinned checkpoints from before the changes. All are in order of their batches, the state after
        the changes of the same batch.

    Raises
    ------
    ConfigurationError, StateMissingError, PinExpiredError, CorruptionError, StorageError
        As :func:`read_changes`.

    Examples
    --------
    >>> statelog.read_history("/data/checkpoints/flights", "a1b2c3", state="count").read_all()  # doctest: +SKIP
    """

    def make() -> tuple[pa.Schema, Iterator[pa.RecordBatch | None]]:
        point = open_logged(str(location), uid, None)
        stored, table = change_table(point, state)
        schema = chosen_columns(table.schema, columns, f"State '{shown_name(stored)}' of {point.name}")
        encoded_keys([key], table.keys, point.name)  # a key that does not fit is named before anything is read
        return schema, _rows(point, stored, table, key)

    return open_reader(make, is_fixed=False)


def _rows(point: LoggedPoint, stored: StateSchema, table: ChangeColumns, key: Any) -> Iterator[pa.RecordBatch | None]:
    """The rows of a key; the first step pins the changes and yields None."""
    first = first_of_state(point, first_with_changes(point.history), stored)
    changes = change_rows(point, first, stored, table, encoded_keys([key], table.keys, point.name))
    yield next(changes)
    oldest = point.history.oldest
    assert oldest is not None, "the newest one can be restored"
    pins = pins_of(point.store, point.stored.history, point.identity, SystemClock().now_s())
    for batch in sorted({pin.batch for _, pin in pins if pin.batch < min(first, oldest.batch)}):
        yield from _at(point, batch, table, stored, key)
    is_told = False
    for rows in changes:
        assert rows is not None, "only the first step yields None"
        if not is_told and rows.column(BATCH)[0].as_py() > oldest.batch:
            yield from _at(point, oldest.batch, table, stored, key)
            is_told = True
        yield rows
    if not is_told:
        yield from _at(point, oldest.batch, table, stored, key)


def _at(
    point: LoggedPoint, batch: int, table: ChangeColumns, stored: StateSchema, key: Any
) -> Iterator[pa.RecordBatch]:
    """The state of a key at a checkpoint; nothing if the checkpoint is no longer retained, or had no such state.

    The rows have the fields of `stored`, as the changes have.
    """
    with ExitStack() as pins:
        try:
            then = point.before(batch)
            keep = pins.enter_context(then.held())
        except (StateMissingError, PinExpiredError):
            return
        if not any(own.name == stored.name and is_same_state(own, stored) for own in then.states):
            return
        for rows in then.changes(stored, [key]):
            keep()
            yield table.to_rows(rows, batch, then.batch_time_ms, STATE)
