"""Gives an operator of a stopped query another uid; its state stays."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from statelog.checkpoint.parent import Parent, read_parent
from statelog.checkpoint.query_operators import OperatorLog, QueryLogs, noted_location
from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, ErrorKind
from statelog.log.entry import QueryOperators
from statelog.log.open import open_location
from statelog.options import Options
from statelog.savepoints.branch import branch_operator
from statelog.savepoints.load import RestoreTarget
from statelog.savepoints.stopped import StoppedQuery
from statelog.spark.checkpoint_location import open_checkpoint, read_logs
from statelog.spark.checks import checked_uid
from statelog.storage import Store
from statelog.storage.names import name_part
from statelog.streams.branch import hold_for_branch
from statelog.streams.forget import give_up

_RUN: Final = "rename"
"""The run id of the first entries; no start of a query has it."""


@dataclass(frozen=True)
class Renamed:
    """The change that :func:`rename` made.

    Parameters
    ----------
    uid : str
        The new uid.
    former_uid : str
        The old one.
    batch : int
        The checkpoint that the operator goes on from.
    folder : str
        The operator's new folder. Until all state is materialized anew, it needs objects of the old one.
    former_folder : str
        The old folder. Once the query has run, ``gc`` deletes the objects there that are not needed any more.
    """

    uid: str
    former_uid: str
    batch: int
    folder: str
    former_folder: str


def rename(checkpoint_location: str | Path, uid: str, new_uid: str, *, location: str | None = None) -> Renamed:
    """Give an operator of a stopped query another uid, for a program that names it so from now on.

    The state is not copied: this takes seconds for state of any size. The operator keeps its newest checkpoint that
    Spark has committed, and no older one. An interrupted call is to be repeated.

    Parameters
    ----------
    checkpoint_location : str or Path
        The query's checkpointLocation: a directory or a folder in an object store, or with an active session in any
        file system that Spark reaches.
    uid, new_uid : str
        The operator's uid, and its new one, which no operator of the query has.
    location : str, optional
        The operators' location, if the query gives them one.

    Returns
    -------
    Renamed

    Raises
    ------
    ConfigurationError
        If there is no such query or operator, or the new uid is taken.
    StateMissingError
        If an operator lacks the checkpoint of the newest batch that Spark has committed.
    CorruptionError, StorageError
        If state cannot be read, or the location cannot be written.

    Examples
    --------
    >>> statelog.rename("/data/checkpoints/flights", "delays", "late flights")  # doctest: +SKIP
    Renamed(uid='late flights', former_uid='delays', batch=41, ...)
    """
    checked_uid(new_uid)
    spark = open_checkpoint(str(checkpoint_location), SparkSession.getActiveSession())
    logs = read_logs(spark, location)
    batch, found = StoppedQuery(spark, logs).choose(None)
    log = _operator(found, uid)
    store, root = open_location(log.location), name_part(new_uid)
    _clear(store, root, logs, log, new_uid)
    pin = hold_for_branch(log, batch, log.location, new_uid)
    clock = SystemClock()
    target = RestoreTarget(
        location=log.location,
        query_id=logs.query_id,
        run_id=_RUN,
        batch=batch,
        options=Options(),
        clock=clock,
        new_token=lambda: secrets.token_bytes(16),
        operators=_note(log, batch, found, new_uid),
    )
    branch_operator(log.history, Parent(noted_location(log.location), batch, pin.name), target, uid=new_uid)
    # Until here the operator goes on under its old uid, and the new log does not count.
    give_up(store, log.root, logs.query_id, uid, run_id=_RUN, renamed_to=new_uid)
    return Renamed(new_uid, uid, batch, f"{log.location}/{root}", f"{log.location}/{log.root}")


def _operator(found: list[OperatorLog], uid: str) -> OperatorLog:
    for log in found:
        if log.uid == uid:
            return log
    raise ConfigurationError(
        f"The query has no operator '{uid}'; it has {', '.join(repr(log.uid) for log in found)}.",
        kind=ErrorKind.INVALID_OPTION,
        hint="Pass the uid of one of these.",
    )


def _clear(store: Store, root: str, logs: QueryLogs, log: OperatorLog, new_uid: str) -> None:
    """Void the log that an interrupted call has left; ConfigurationError if the new uid is another operator's."""
    taken = logs.of(new_uid)
    if taken is None:
        return
    parent = read_parent(store, root)
    is_leftover = (
        (taken.location, taken.root) == (log.location, root)
        and parent is not None
        and parent.location == noted_location(log.location)
        and parent.pin.startswith(f"{log.root}/")
        and taken.runs == {_RUN}
    )
    if not is_leftover:
        raise ConfigurationError(
            f"{taken.name}: the query has, or had, an operator of this uid.",
            kind=ErrorKind.OTHER_OWNER,
            hint="Choose another uid, or give that operator's state up: statelog.forget(checkpointLocation, uid).",
        )
    give_up(store, root, logs.query_id, new_uid, run_id=_RUN)


def _note(log: OperatorLog, batch: int, found: list[OperatorLog], new_uid: str) -> QueryOperators:
    """The query's operators with the new uid, as the new log's entries note them."""
    checkpoint = log.history.at(batch)
    noted = checkpoint.operators if checkpoint else None
    locations = dict(noted.locations) if noted else {one.uid: noted_location(one.location) for one in found}
    place = locations.pop(log.uid, noted_location(log.location))
    # Older than any note of a start: those that know the old uid count as long as its log does.
    return QueryOperators(0, {**locations, new_uid: place})
