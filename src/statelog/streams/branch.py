"""``branch`` begins a new query with the state of another one, without copying it."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from statelog.checkpoint.held_pin import HeldPin
from statelog.checkpoint.parent import Parent
from statelog.checkpoint.query_operators import OperatorLog, noted_location
from statelog.clock import SystemClock
from statelog.errors import PinExpiredError, StateMissingError
from statelog.log.entry import QueryOperators
from statelog.log.open import open_location
from statelog.options import Options
from statelog.savepoints.branch import branch_operator
from statelog.savepoints.load import RestoreTarget
from statelog.savepoints.spark_checkpoint import SparkCheckpoint
from statelog.savepoints.stopped import StoppedQuery
from statelog.savepoints.target import require_apart
from statelog.spark.checkpoint_location import open_checkpoint, read_logs, state_location
from statelog.storage.links import link
from statelog.storage.names import name_part
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
        The location of one of the parent's operators, if it gave all of them one; the others are found from there.
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
    session = SparkSession.getActiveSession()
    parent, spark = open_checkpoint(str(checkpoint), session), open_checkpoint(str(new_checkpoint), session)
    parent.require_no_other_state()
    state = new_location or state_location(spark, new_location)
    spark.require_empty()
    batch, found, pins = _pinned(parent, location, at, spark, state)
    try:
        offsets, commits = parent.offsets(batch), parent.commits(batch)
        sources = parent.source_files(offsets[str(batch)])
        clock = SystemClock()
        places = {log.uid: noted_location(new_location) for log in found}
        target = RestoreTarget(
            location=state,
            query_id=str(uuid.UUID(bytes=secrets.token_bytes(16), version=4)),
            run_id="branch",
            batch=batch,
            options=options or Options(),
            clock=clock,
            new_token=lambda: secrets.token_bytes(16),
            operators=QueryOperators(int(clock.now_s() * 1000), places),
        )
        for log, pin in zip(found, pins, strict=True):
            branch_operator(log.history, Parent(noted_location(log.location), batch, pin.name), target)
    except BaseException:
        _release(pins)
        raise
    # From here on the branch may exist, whatever error comes: its pins stay.
    spark.write(sources, offsets, commits, query_id=target.query_id, clock_id=secrets.token_hex(8))
    return Restored(str(new_checkpoint), target.query_id, batch + 1)


def _pinned(
    parent: SparkCheckpoint, location: str | None, at: int | None, spark: SparkCheckpoint, state: str
) -> tuple[int, list[OperatorLog], list[HeldPin]]:
    """Choose the batch, and pin the checkpoint of each operator for the branch at `spark` and `state`."""
    attempts = _ATTEMPTS if at is None else 1
    for attempt in range(attempts):
        pins: list[HeldPin] = []
        try:
            # Before the logs are read, so that they have all batches that are found here.
            committed = parent.committed() if at is None else [at]
            query = StoppedQuery(parent, read_logs(parent, location))
            batch, found = query.choose(committed[-1] if committed else None)
            for log in found:
                folders = [*parent.folders, f"{log.location.rstrip('/')}/{log.root}"]
                require_apart(spark.location, folders, "The checkpointLocation")
                require_apart(f"{state.rstrip('/')}/{name_part(log.uid)}", folders, "The operators' location")
            for log in found:
                pins.append(hold_for_branch(log, batch, state, log.uid))
        except BaseException as error:
            _release(pins)
            # A running query may give a checkpoint up meanwhile; then a newer one is there.
            if isinstance(error, PinExpiredError | StateMissingError) and attempt + 1 < attempts:
                continue
            raise
        return batch, found, pins
    raise AssertionError("unreachable")


def hold_for_branch(log: OperatorLog, batch: int, location: str, uid: str) -> HeldPin:
    """Pin a checkpoint of an operator for the branch of it at a location."""
    folder = link(noted_location(location), name_part(uid))
    store, owner = open_location(log.location), f"branch {folder}"
    return HeldPin(store, log.root, log.history, batch, owner=owner, lasts_s=None, is_shared=True, branch=folder)


def _release(pins: Iterable[HeldPin]) -> None:
    for pin in pins:
        pin.release()
