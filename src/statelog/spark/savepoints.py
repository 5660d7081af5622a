"""Taking savepoints of queries, and beginning queries with them."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from statelog.checkpoint.admission import require_complete
from statelog.checkpoint.history import History
from statelog.checkpoint.leftovers import operators_of
from statelog.checkpoint.open_log import open_log
from statelog.clock import Clock, SystemClock
from statelog.errors import (
    ConfigurationError,
    ErrorKind,
    StatelogError,
    StateMissingError,
)
from statelog.options import Options
from statelog.savepoints.manifest import MANIFEST, Manifest, SavedOperator
from statelog.savepoints.operators import (
    RestoreTarget,
    RunAll,
    one_by_one,
    open_location,
    restore_operator,
    save_operator,
)
from statelog.savepoints.spark_files import SparkCheckpoint
from statelog.spark import internals
from statelog.spark.arguments import operators_of_query
from statelog.spark.endpoint import STATE_FOLDER

__all__ = ["Restored", "Savepoint", "restore", "savepoint"]

_ATTEMPTS: Final = 5

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Savepoint:
    """What :func:`savepoint` has written.

    Parameters
    ----------
    target : str
        Where it is.
    batch : int
        The batch that its state is after.
    query_id : str
        The query that it was taken of.
    rows : dict of str to (dict of str to int)
        For each operator the number of rows of each state.
    """

    target: str
    batch: int
    query_id: str
    rows: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Restored:
    """What :func:`restore` has written.

    Parameters
    ----------
    checkpoint_location : str
        What the query is to be started with.
    query_id : str
        The id that it will have.
    next_batch : int
        The batch that Spark runs first.
    """

    checkpoint_location: str
    query_id: str
    next_batch: int


def savepoint(
    query: StreamingQuery | str | Path, target: str | Path, *, location: str | None = None, batch: int | None = None
) -> Savepoint:
    """Copy all state of a query, and where its sources stand, into a directory that belongs to nobody.

    The tables are Parquet; docs/savepoints.md describes them. All operators are saved as of the same batch.

    Parameters
    ----------
    query : StreamingQuery, str or Path
        A running query of this application, which goes on meanwhile; or the checkpointLocation of one that is
        stopped.
    target : str or Path
        Where it goes: a directory that does not exist or is empty, or a folder in an object store. With an active
        session and much state its executors write it, so they must see the directory.
    location : str, optional
        The operators' location, if they were given one; of a running query it is known.
    batch : int, optional
        Of a stopped query a retained checkpoint other than the newest.

    Returns
    -------
    Savepoint
        What was written.

    Raises
    ------
    ConfigurationError
        If there is no such query or state, the target is not empty, or the query has stateful operators of Spark's.
    StateMissingError
        If the operators or Spark do not have the batch any more.
    CorruptionError, StorageError
        If the state cannot be read, or the target cannot be written; then it holds no manifest.

    Examples
    --------
    >>> statelog.savepoint("/data/checkpoints/flights", "/data/savepoints/flights-1")  # doctest: +SKIP
    Savepoint(target='/data/savepoints/flights-1', batch=41, query_id='...', rows={'main': {'count': 3310}})
    """
    place = str(target)
    _require_new(place)
    if isinstance(query, StreamingQuery):
        if location is not None or batch is not None:
            raise ConfigurationError(
                "location and batch have no meaning for a running query.",
                hint="Its operators' locations are known, and its newest committed batch is saved.",
            )
        return _save_running(query, place)
    return _save_stopped(str(query), place, location, batch)


def restore(
    source: str | Path,
    checkpoint_location: str | Path,
    *,
    location: str | None = None,
    claim: bool = False,
    options: Options | None = None,
) -> Restored:
    """Begin a checkpointLocation with a savepoint, so that a query that is started with it goes on after its batch.

    It is a query of its own, with a new id, and does not need the savepoint any more. Its operators must have the names
    that they had, and may have any parallelism.

    Parameters
    ----------
    source : str or Path
        The savepoint.
    checkpoint_location : str or Path
        An empty directory, or a folder in an object store.
    location : str, optional
        Where the operators' state goes, if they will be given a location; by default below `checkpoint_location`.
    claim : bool
        Whether the savepoint is removed once all is restored.
    options : Options, optional
        How the state's files are written.

    Returns
    -------
    Restored
        What was written.

    Raises
    ------
    ConfigurationError
        If there is no savepoint, or one of the locations is not empty.
    CorruptionError
        If the savepoint is damaged.
    StorageError
        If it cannot be read, or a location cannot be written. Then the location is not complete; remove it.

    Examples
    --------
    >>> statelog.restore("/data/savepoints/flights-1", "/data/checkpoints/flights-2")  # doctest: +SKIP
    Restored(checkpoint_location='/data/checkpoints/flights-2', query_id='...', next_batch=42)
    """
    saved_location, root = str(source), str(checkpoint_location)
    saved = open_location(saved_location)
    manifest = Manifest.read(saved, saved_location)
    spark = SparkCheckpoint(open_location(root), root)
    spark.require_empty()
    query_id = str(uuid.UUID(bytes=secrets.token_bytes(16), version=4))
    state = location or f"{root.rstrip('/')}/{STATE_FOLDER}"
    where = RestoreTarget(
        location=state,
        query_id=query_id,
        run_id="restore",
        batch=manifest.batch,
        options=options or Options(),
        clock=SystemClock(),
        new_token=lambda: secrets.token_bytes(16),
    )
    run_all = _run_all(SparkSession.getActiveSession())
    for operator in manifest.operators:
        restore_operator(operator, saved_location, where, run_all)
    spark.write(manifest, saved, saved_location, query_id=query_id, clock_id=secrets.token_hex(8))
    if claim:
        saved.delete([MANIFEST])
        saved.delete([info.name for info in saved.list()])
    return Restored(root, query_id, manifest.batch + 1)


# ---- Saving ----


@dataclass(frozen=True)
class _Found:
    """An operator's checkpoints, and where they are."""

    history: History
    location: str
    root: str


def _save_stopped(checkpoint: str, target: str, location: str | None, batch: int | None) -> Savepoint:
    spark = SparkCheckpoint(open_location(checkpoint), checkpoint)
    query_id = spark.query_id()
    found = _stopped_operators(location or f"{checkpoint.rstrip('/')}/{STATE_FOLDER}", query_id)
    committed = [one for one in spark.committed() if all(operator.history.has_batch(one) for operator in found)]
    if not committed or (batch is not None and batch not in committed):
        asked = "There is no batch" if batch is None else f"Batch {batch} is none"
        kept = f" The first is {committed[0]}, the last {committed[-1]}." if committed else ""
        raise StateMissingError(
            f"{checkpoint}: {asked} that Spark has committed and all operators have a checkpoint of.{kept}",
            hint="Options(retained_checkpoints=...) keeps more of them."
            if committed
            else "Run the query until its first batch is over; if Spark and the state disagree, run"
            " statelog.rewind(checkpointLocation) first.",
        )
    chosen = committed[-1] if batch is None else batch
    return _write(found, spark, chosen, query_id, target, SparkSession.getActiveSession())


def _stopped_operators(location: str, query_id: str) -> list[_Found]:
    store = open_location(location)
    found: list[_Found] = []
    for root in operators_of(store):
        history = History(open_log(store, root, Options(), SystemClock()).read())
        if history.latest is not None and history.latest.query_id == query_id:
            require_complete(history, f"operator '{history.latest.uid}' at {location}/{root}")
            found.append(_Found(history, location, root))
    if not found:
        raise ConfigurationError(
            f"{location} holds no state of query {query_id}.",
            kind=ErrorKind.CHECKPOINT_MISSING,
            hint="Pass location= if the operators were given one.",
        )
    return found


def _save_running(query: StreamingQuery, target: str) -> Savepoint:
    if not query.isActive:
        raise ConfigurationError(
            f"Query {query.id} is not running any more.", hint="Pass its checkpointLocation instead of the query."
        )
    operators = operators_of_query(query)
    if not operators:
        raise ConfigurationError(
            f"Query {query.id} has no operators of statelog.",
            hint="A savepoint holds the state of statelog's operators.",
        )
    checkpoint = internals.checkpoint_location(query)
    spark = SparkCheckpoint(open_location(checkpoint), checkpoint)
    for _ in range(_ATTEMPTS):
        committed = spark.committed()
        if not committed:
            break
        with ExitStack() as held:
            found = [
                _Found(history, operator.location, operator.root)
                for operator in operators
                if (history := held.enter_context(operator.coordinator.holding(committed[-1]))) is not None
            ]
            if len(found) == len(operators):
                return _write(found, spark, committed[-1], str(query.id), target, operators[0].session)
        # So many batches have passed since that the checkpoint is not retained any more.
    raise StateMissingError(
        f"Query {query.id}: there is no batch yet that Spark has committed and all operators have a checkpoint of.",
        hint="Try again after the next batch.",
    )


def _write(
    found: Sequence[_Found],
    spark: SparkCheckpoint,
    batch: int,
    query_id: str,
    target: str,
    session: SparkSession | None,
) -> Savepoint:
    spark.require_no_other_state()
    offsets, commits = spark.offsets(batch), spark.commits(batch)
    store = open_location(target)
    run_all = _run_all(session)
    operators: list[SavedOperator] = [
        save_operator(
            operator.history, batch, operator.root, location=operator.location, target=target, run_all=run_all
        )
        for operator in found
    ]
    clock: Clock = SystemClock()
    manifest = Manifest(
        batch=batch,
        query_id=query_id,
        taken_ms=int(clock.now_s() * 1000),
        offsets=offsets,
        commits=commits,
        sources=spark.copy_sources(store, offsets[str(batch)]),
        operators=operators,
    )
    manifest.write(store)
    rows = {one.uid: {state.schema.name: state.rows for state in one.states} for one in operators}
    return Savepoint(target, batch, query_id, rows)


def _require_new(target: str) -> None:
    if open_location(target).list():
        raise ConfigurationError(f"{target} is not empty.", hint="Give each savepoint a directory of its own.")


# ---- Work for many ----


def _run_all(session: SparkSession | None) -> RunAll:
    """One by one without a session; with one the items of longer lists are tasks of a job."""
    if session is None:
        return one_by_one

    def run(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        if len(items) < 2:
            return one_by_one(work, items)
        outcomes = session.sparkContext.parallelize(list(items), len(items)).map(_reporting(work)).collect()
        return [_unpacked(outcome) for outcome in outcomes]

    return run


def _reporting(work: Callable[[_Item], _Result]) -> Callable[[_Item], Any]:
    """Errors travel as values, so that they arrive as they are and are not repeated."""

    def run(item: _Item) -> Any:
        try:
            return work(item)
        except StatelogError as error:
            return error

    return run


def _unpacked(outcome: Any) -> Any:
    if isinstance(outcome, StatelogError):
        raise outcome
    return outcome
