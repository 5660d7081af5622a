"""``branch`` begins a new query with the state of another one, without copying it."""

from __future__ import annotations

import secrets
import uuid
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from statelog.checkpoint.held_pin import HeldPin
from statelog.clock import SystemClock
from statelog.errors import PinExpiredError, StateMissingError
from statelog.log.entry import Parent
from statelog.numbers import checked_batch
from statelog.options import Options
from statelog.savepoints.branch import branch_query
from statelog.savepoints.load import RestoreTarget
from statelog.savepoints.spark_checkpoint import SparkCheckpoint
from statelog.savepoints.stopped import StoppedQuery
from statelog.savepoints.target import require_apart
from statelog.spark.checkpoint_location import open_checkpoint, read_query, state_location
from statelog.storage.open import absolute
from statelog.streams.save_restore import Restored

_ATTEMPTS: Final = 5


def branch(
    checkpoint: str | Path,
    new_checkpoint: str | Path,
    *,
    at: int | None = None,
    location: str | None = None,
    new_location: str | None = None,
    options: Options | None = None,
) -> Restored:
    """Write a checkpointLocation with which a new query goes on from another query's state, without copying it.

    The other query, the parent, may be running or stopped, and neither notices the other. The branch reads the parent's
    files until it has materialized all state anew; a pin, which does not expire, keeps them so long. So the parent's
    files must not be deleted by other means meanwhile. This takes seconds for state of any size.

    Parameters
    ----------
    checkpoint : str or Path
        The checkpointLocation of the parent: a directory or a folder in an object store, or with an active session in
        any file system that Spark reaches.
    new_checkpoint : str or Path
        The checkpointLocation of the branch: an empty directory, or a folder in an object store. With an active session
        also one in any other file system that Spark reaches; then `new_location` is needed.
    at : int, optional
        The batch after which the branch goes on: one that Spark has committed and whose checkpoint is retained; by
        default the newest.
    location : str, optional
        The location of the parent's state, if its operators were given one.
    new_location : str, optional
        The location for the branch's state, if its operators are given one; by default below `new_checkpoint`.
    options : Options, optional
        Options for writing the branch's first log entries.

    Returns
    -------
    Restored
        The new query. Its operators must have the same names as the parent's, and may have any parallelism.

    Raises
    ------
    ConfigurationError
        If there is no such query or state, a new location is not empty or within the parent's, or the query has
        stateful operators of Spark's.
    StateMissingError
        If the operators or Spark no longer have the batch.
    CorruptionError, StorageError
        If the parent cannot be read, or a location cannot be written. Remove the new location then: it is incomplete.

    Examples
    --------
    >>> statelog.branch("/data/checkpoints/flights", "/data/checkpoints/flights-new")  # doctest: +SKIP
    Restored(checkpoint_location='/data/checkpoints/flights-new', query_id='...', next_batch=42)
    """
    at = checked_batch(at, "at")
    session = SparkSession.getActiveSession()
    parent, spark = open_checkpoint(str(checkpoint), session), open_checkpoint(str(new_checkpoint), session)
    parent.require_no_other_state()
    state = new_location or state_location(spark, new_location)
    spark.require_empty()
    query, batch, pin = _pinned(parent, location, at, spark, absolute(state))
    try:
        offsets, commits = parent.offsets(batch), parent.commits(batch)
        sources = parent.source_files(offsets[str(batch)])
        target = RestoreTarget(
            location=state,
            query_id=str(uuid.UUID(bytes=secrets.token_bytes(16), version=4)),
            run_id="branch",
            batch=batch,
            options=options or Options(),
            clock=SystemClock(),
            new_token=lambda: secrets.token_bytes(16),
        )
        branch_query(query.history, Parent(absolute(query.location), batch, pin.name), target)
    except BaseException:
        pin.release()
        raise
    # From here on the branch may exist, whatever error comes: its pin stays.
    spark.write(sources, offsets, commits, query_id=target.query_id, clock_id=secrets.token_hex(8))
    return Restored(str(new_checkpoint), target.query_id, batch + 1)


def _pinned(
    parent: SparkCheckpoint, location: str | None, at: int | None, spark: SparkCheckpoint, state: str
) -> tuple[StoppedQuery, int, HeldPin]:
    """Choose the batch, and pin its checkpoint for the branch at `spark` and `state`."""
    attempts = _ATTEMPTS if at is None else 1
    for attempt in range(attempts):
        try:
            # Before the log is read, so that it has all batches that are found here.
            committed = parent.committed() if at is None else [at]
            query = read_query(parent, location)
            batch = query.choose(committed[-1] if committed else None)
            folders = [*parent.folders, query.location]
            require_apart(spark.location, folders, "The checkpointLocation")
            require_apart(state, folders, "The location of the branch's state")
            pin = HeldPin(
                query.store,
                query.history,
                batch,
                owner=f"branch {state}",
                lasts_s=None,
                is_shared=True,
                branch=state,
            )
        except (PinExpiredError, StateMissingError):
            # A running query may give a checkpoint up meanwhile; then a newer one is there.
            if attempt + 1 < attempts:
                continue
            raise
        return query, batch, pin
    raise AssertionError("unreachable")
