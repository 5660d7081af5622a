"""``branch`` begins a new query with the state of another one, without copying it."""

from __future__ import annotations

import secrets
import uuid
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace
from pyspark.sql import SparkSession

from statelog.clock import SystemClock
from statelog.errors import PinExpiredError, StateMissingError
from statelog.history.footprint import Footprint
from statelog.history.operator_history import Record
from statelog.history.pins import Branch, HeldPin, retry_given_up
from statelog.history.query_history import QueryHistory
from statelog.log.entry import Parent, Section
from statelog.log.references import BaseRange, SegmentRef, StoredRun
from statelog.numbers import checked_batch
from statelog.options import Options
from statelog.queries.load import RestoreTarget, new_log
from statelog.queries.save import require_apart
from statelog.queries.save_restore import Restored
from statelog.queries.stopped import StoppedQuery, read_query
from statelog.spark.checkpoint.checkpoint import SparkCheckpoint
from statelog.spark.checkpoint.location import open_checkpoint, state_location
from statelog.storage.links import link
from statelog.storage.open import absolute


def branch(
    checkpoint: str | Path,
    new_checkpoint: str | Path,
    *,
    at: int | None = None,
    location: str | None = None,
    new_location: str | None = None,
    options: Options | None = None,
) -> Restored:
    """Write a checkpointLocation with which a new query continues from another query's state, without copying it.

    The other query, the parent, may be running or stopped, and neither query affects the other. The branch reads the
    parent's files until it has materialized all of its state itself. Until then, a pin that does not expire keeps the
    files, and they must not be deleted by other means. This takes seconds for state of any size.

    Parameters
    ----------
    checkpoint : str or Path
        The checkpointLocation of the parent: a directory or a folder in an object store or, with an active session, in
        any file system that Spark can access.
    new_checkpoint : str or Path
        The checkpointLocation of the branch: an empty directory, or a folder in an object store. With an active
        session, also one in any other file system that Spark can access; then `new_location` is required.
    at : int, optional
        The batch after which the branch continues: one that Spark has committed and whose checkpoint is retained; by
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
        Spark's own stateful operators.
    StateMissingError
        If the operators or Spark no longer have the batch.
    CorruptionError, StorageError
        If the parent cannot be read, or a location cannot be written. In this case, remove the new location: it is
        incomplete.

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
    # From here on, the branch may exist even after an error, so its pin stays.
    spark.write(sources, offsets, commits, query_id=target.query_id, clock_id=secrets.token_hex(8))
    return Restored(str(new_checkpoint), target.query_id, batch + 1)


def _pinned(
    parent: SparkCheckpoint, location: str | None, at: int | None, spark: SparkCheckpoint, state: str
) -> tuple[StoppedQuery, int, HeldPin]:
    """Choose the batch, and pin its checkpoint for the branch at `spark` and `state`."""

    def choose() -> tuple[StoppedQuery, int, HeldPin]:
        # Before the log is read, so that the log has all batches that are found here.
        committed = parent.committed() if at is None else [at]
        query = read_query(parent, location)
        batch = query.choose(committed[-1] if committed else None)
        folders = [*parent.folders, query.location]
        require_apart(spark.location, folders, "The checkpointLocation")
        require_apart(state, folders, "The location of the branch's state")
        owner = f"branch {state}"
        needed = Footprint.of(query.history, batch)
        pin = HeldPin(query.store, needed, Branch(state), owner=owner, lasts_s=None, is_shared=True)
        return query, batch, pin

    return retry_given_up(choose, is_fixed=at is not None, errors=(PinExpiredError, StateMissingError))


# ---- The log of a branch: it refers to the parent's objects, where they are ----


def branch_query(query: QueryHistory, parent: Parent, target: RestoreTarget) -> None:
    """Begin a query's log with the entries that checkpoint `target.batch` of its parent's history needs.

    The operators keep their identities: their state continues. Raises ConfigurationError if the location already holds
    state.
    """
    records = [record for one in query.histories_at(target.batch) if (record := one.record(target.batch)) is not None]
    first = min(record.needed_from for record in records)
    newest = query.at(target.batch)
    assert newest is not None, f"checkpoint {target.batch} is not there"
    # A list's elements are in the order of the epochs that appended them, so those of the branch are later ones.
    with new_log(target, newest.epoch + 1) as log:
        start, follows = log.number, b""
        for batch in range(first, target.batch + 1):
            entry = query.at(batch)
            assert entry is not None, f"checkpoint {batch}, which a later one builds on, is not there"
            sections = [
                _section(query, record, batch, parent.location) for record in records if record.needed_from <= batch
            ]
            own = target.entry(
                log, batch, entry.batch_time_ms, sections, follows=follows, parent=parent, log_start=start
            )
            log.append(own, [])
            follows = own.id


def _section(query: QueryHistory, record: Record, batch: int, location: str) -> Section:
    """The section of an operator in the branch's entry of a batch; `record` is the operator's newest one."""
    checkpoint = query.histories[record.checkpoint.identity].at(batch)
    assert checkpoint is not None, f"checkpoint {batch}, which a later one builds on, is not there"
    section = replace(
        checkpoint.section,
        segments=[_linked(segment, location) for segment in checkpoint.segments],
        bases=[],
        base_ranges=None,
    )
    if batch == record.needed_from and not checkpoint.is_whole:
        assert record.base_map is not None, "the checkpoint can be restored"
        # Before all changes, so that the base map counts as one that the log begins with.
        ranges = [_linked_range(one, location) for one in record.base_map.ranges]
        section = replace(section, base_ranges=ranges)
    return section


_Part = TypeVar("_Part", SegmentRef, StoredRun)


def _linked(part: _Part, location: str) -> _Part:
    return replace(part, name=link(location, part.name))


def _linked_range(base_range: BaseRange, location: str) -> BaseRange:
    levels = [replace(level, runs=[_linked(run, location) for run in level.runs]) for level in base_range.base.levels]
    return replace(base_range, base=replace(base_range.base, levels=levels))
