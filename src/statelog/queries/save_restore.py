"""Savepoints: ``savepoint`` copies the state of a query, ``restore`` begins a new query with the copy."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, StatelogError, StateMissingError
from statelog.history.pins import retry_given_up
from statelog.history.query_history import QueryHistory
from statelog.log.open import open_location
from statelog.numbers import checked_batch
from statelog.options import Options
from statelog.queries.load import RestoreTarget, restore_operators
from statelog.queries.save import begin_target, finish_target, require_apart, require_new, save_operator
from statelog.queries.stopped import StoppedQuery, read_query
from statelog.reading.rows import PART_BYTES, RunAll, one_by_one
from statelog.reading.savepoint import MANIFEST, Manifest, SavedOperator
from statelog.spark.checkpoint.location import open_checkpoint, state_location
from statelog.spark.driver import internals
from statelog.spark.driver.endpoint import known_endpoint
from statelog.spark.worker.worker import with_stores
from statelog.storage.names import distinct_parts

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Savepoint:
    """A savepoint that :func:`savepoint` has written.

    Parameters
    ----------
    target : str
        Location of the savepoint.
    batch : int
        The last batch that is part of its state.
    query_id : str
        Id of the query that was saved.
    rows : dict of str to (dict of str to int)
        For each operator, the number of rows of each state.
    """

    target: str
    batch: int
    query_id: str
    rows: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Restored:
    """A new query that :func:`restore`, :func:`branch` or :func:`migrate` has prepared.

    Parameters
    ----------
    checkpoint_location : str
        The checkpointLocation to start the query with.
    query_id : str
        The id that the query will have.
    next_batch : int
        The batch that Spark runs first.
    """

    checkpoint_location: str
    query_id: str
    next_batch: int


def savepoint(
    query: StreamingQuery | str | Path, target: str | Path, *, location: str | None = None, batch: int | None = None
) -> Savepoint:
    """Copy all state of a query, and the positions of its sources, into a separate directory.

    The copy is self-contained: no running query owns or changes it. All operators are saved as of the same batch. The
    tables are Parquet files; docs/savepoints.md describes them.

    Parameters
    ----------
    query : StreamingQuery, str or Path
        A running query of this application, which keeps running; or the checkpointLocation of a stopped query: a
        directory or a folder in an object store or, with an active session, in any file system that Spark can access.
    target : str or Path
        A directory that does not exist or is empty, or a folder in an object store. With an active session and much
        state, the executors write the files, so they must be able to access the directory.
    location : str, optional
        The location of the state, if the query's operators were given one. Only for a stopped query.
    batch : int, optional
        The retained checkpoint to save, instead of the newest one. Only for a stopped query.

    Returns
    -------
    Savepoint
        The new savepoint.

    Raises
    ------
    ConfigurationError
        If there is no such query or state, the target is not empty, or the query has Spark's own stateful operators.
    StateMissingError
        If the operators or Spark no longer have the batch.
    CorruptionError, StorageError
        If the state cannot be read, or the target cannot be written. The target then holds no manifest.

    Examples
    --------
    >>> statelog.savepoint("/data/checkpoints/flights", "/data/savepoints/flights-1")  # doctest: +SKIP
    Savepoint(target='/data/savepoints/flights-1', batch=41, query_id='...', rows={'main': {'count': 3310}})
    """
    place = str(target)
    require_new(open_location(place), place)
    if isinstance(query, StreamingQuery):
        if location is not None or batch is not None:
            raise ConfigurationError(
                "location and batch have no meaning for a running query.",
                hint="Omit them: the operators' locations are known, and the newest committed batch is saved.",
            )
        return _save_running(query, place)
    return save_stopped(str(query), place, location, checked_batch(batch, "batch"))


def restore(
    source: str | Path,
    checkpoint_location: str | Path,
    *,
    location: str | None = None,
    claim: bool = False,
    options: Options | None = None,
) -> Restored:
    """Write a checkpointLocation from a savepoint; a query started with it continues after the savepoint's batch.

    This is a new query with its own id, and it does not need the savepoint afterwards. Its operators must have the same
    names as the saved ones, and may have any parallelism.

    Parameters
    ----------
    source : str or Path
        The savepoint.
    checkpoint_location : str or Path
        An empty directory, or a folder in an object store. With an active session, also one in any other file system
        that Spark can access; then `location` is required.
    location : str, optional
        The location for the state, if the new query gives its operators one; by default below `checkpoint_location`.
    claim : bool
        Whether to remove the savepoint's files once everything is restored.
    options : Options, optional
        Options for writing the state's files.

    Returns
    -------
    Restored
        The new query.

    Raises
    ------
    ConfigurationError
        If there is no savepoint, or one of the locations is not empty or within the savepoint.
    CorruptionError
        If the savepoint is damaged.
    StorageError
        If the savepoint cannot be read, or a location cannot be written. In this case, remove the location: it is
        incomplete.

    Examples
    --------
    >>> statelog.restore("/data/savepoints/flights-1", "/data/checkpoints/flights-2")  # doctest: +SKIP
    Restored(checkpoint_location='/data/checkpoints/flights-2', query_id='...', next_batch=42)
    """
    saved_location, root = str(source), str(checkpoint_location)
    saved = open_location(saved_location)
    manifest = Manifest.read(saved, saved_location)
    session = SparkSession.getActiveSession()
    spark = open_checkpoint(root, session)
    state = location or state_location(spark, location)
    require_apart(spark.location, [saved_location], "The checkpointLocation")
    require_apart(state, [saved_location], "The operators' location")
    require_apart(saved_location, [*spark.folders, state], "The savepoint")
    spark.require_empty()
    query_id = str(uuid.UUID(bytes=secrets.token_bytes(16), version=4))
    where = RestoreTarget(
        location=state,
        query_id=query_id,
        run_id="restore",
        batch=manifest.batch,
        options=options or Options(),
        clock=SystemClock(),
        new_token=lambda: secrets.token_bytes(16),
    )
    restore_operators(manifest.operators, saved_location, where, _run_all(session))
    spark.restore(manifest, saved, saved_location, query_id=query_id, clock_id=secrets.token_hex(8))
    if claim:
        # The manifest goes first, so that the remains of a crash are not mistaken for a savepoint.
        saved.delete([MANIFEST])
        saved.delete(manifest.file_names)
    return Restored(root, query_id, manifest.batch + 1)


# ---- Saving ----


def save_stopped(
    checkpoint: str, target: str, location: str | None = None, batch: int | None = None, part_bytes: int = PART_BYTES
) -> Savepoint:
    """Save a stopped query; the tables are written in parts of about `part_bytes` of stored state."""
    session = SparkSession.getActiveSession()
    query = read_query(open_checkpoint(checkpoint, session), location)
    chosen = query.choose(batch)
    return _write(query, chosen, target, session, part_bytes)


def _save_running(query: StreamingQuery, target: str) -> Savepoint:
    if not query.isActive:
        raise ConfigurationError(
            f"Query {query.id} is no longer running.", hint="Pass its checkpointLocation instead of the query."
        )
    endpoint = known_endpoint()
    running = None if endpoint is None else endpoint.running_query(query)
    if running is None:
        raise ConfigurationError(
            f"Query {query.id} has no statelog operators.",
            hint="Pass a query with statelog operators: a savepoint holds their state.",
        )
    spark = open_checkpoint(internals.checkpoint_location(query), running.session)
    with ExitStack() as held:

        def hold() -> tuple[int, QueryHistory]:
            committed = spark.committed()
            history = held.enter_context(running.coordinator.holding(committed[-1])) if committed else None
            if history is None:
                raise StateMissingError(
                    f"Query {query.id}: there is no batch yet that Spark has committed and that has a checkpoint.",
                    hint="Try again after the next batch.",
                )
            return committed[-1], history

        batch, history = retry_given_up(hold, errors=(StateMissingError,))
        stopped = StoppedQuery(spark, str(query.id), open_location(running.location), running.location, history)
        return _write(stopped, batch, target, running.session)


def _write(
    query: StoppedQuery,
    batch: int,
    target: str,
    session: SparkSession | None,
    part_bytes: int = PART_BYTES,
) -> Savepoint:
    spark = query.spark
    spark.require_no_other_state()
    require_apart(target, [*spark.folders, query.location], "The savepoint")
    offsets, commits = spark.offsets(batch), spark.commits(batch)
    store = open_location(target)
    begin_target(store, target, secrets.token_bytes(16))
    run_all = _run_all(session)
    names = query.history.names_at(batch)
    folders = distinct_parts(names)
    operators: list[SavedOperator] = [
        save_operator(
            query.history.histories[identity],
            batch,
            folders[uid],
            location=query.location,
            target=target,
            run_all=run_all,
            part_bytes=part_bytes,
        )
        for uid, identity in sorted(names.items())
    ]
    manifest = Manifest(
        batch=batch,
        query_id=query.query_id,
        taken_ms=int(SystemClock().now_s() * 1000),
        offsets=offsets,
        commits=commits,
        sources=spark.copy_sources(store, offsets[str(batch)]),
        operators=operators,
    )
    manifest.write(store)
    finish_target(store)
    rows = {one.uid: {state.schema.name: state.rows for state in one.states} for one in operators}
    return Savepoint(target, batch, query.query_id, rows)


# ---- Parallel work ----


def _run_all(session: SparkSession | None) -> RunAll:
    """Run items as the tasks of a Spark job; without a session, or with fewer than two items, run them here."""
    if session is None:
        return one_by_one

    def run(
        work: Callable[[_Item], _Result], items: Sequence[_Item], sizes: Callable[[Sequence[_Item]], Sequence[int]]
    ) -> list[_Result]:
        if len(items) < 2:
            return one_by_one(work, items, sizes)
        outcomes: list[Any] = (
            session.sparkContext.parallelize(list(items), len(items)).map(with_stores(_reporting(work))).collect()
        )
        for outcome in outcomes:
            if isinstance(outcome, StatelogError):
                raise outcome
        return outcomes

    return run


def _reporting(work: Callable[[_Item], _Result]) -> Callable[[_Item], Any]:
    """Return errors as values, so that they arrive unchanged and Spark does not repeat the task."""

    def run(item: _Item) -> Any:
        try:
            return work(item)
        except StatelogError as error:
            return error

    return run
