"""Gives an operator of a stopped query another uid; its state stays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from statelog.errors import ConfigurationError, ErrorKind
from statelog.history.query_history import QueryHistory
from statelog.queries.stopped import News, read_query
from statelog.spark.checkpoint.location import open_checkpoint
from statelog.spark.plan.checks import checked_uid

_RUN: Final = "rename"
"""The run id of the claim; no start of a query has it."""


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
        The query's newest checkpoint.
    folder : str
        The operator's folder, which stays as it is.
    """

    uid: str
    former_uid: str
    batch: int
    folder: str


def rename(checkpoint_location: str | Path, uid: str, new_uid: str, *, location: str | None = None) -> Renamed:
    """Give an operator of a stopped query another uid, for a program that names it so from now on.

    This is one entry in the query's log: no state is copied, and all checkpoints of the operator have the new name from
    then on. A query that still runs loses the log and fails.

    Parameters
    ----------
    checkpoint_location : str or Path
        The query's checkpointLocation: a directory or a folder in an object store, or with an active session in any
        file system that Spark reaches.
    uid, new_uid : str
        The operator's uid, and its new one, which no operator of the query has.
    location : str, optional
        The location of the state, if the query's operators were given one.

    Returns
    -------
    Renamed

    Raises
    ------
    ConfigurationError
        If there is no such query or operator, or the new uid is taken.
    CorruptionError, StorageError
        If state cannot be read, or the location cannot be written.

    Examples
    --------
    >>> statelog.rename("/data/checkpoints/flights", "delays", "late flights")  # doctest: +SKIP
    Renamed(uid='late flights', former_uid='delays', batch=41, ...)
    """
    checked_uid(new_uid)
    spark = open_checkpoint(str(checkpoint_location), SparkSession.getActiveSession())
    query = read_query(spark, location)
    query.require_state()
    identity, latest = _identity(query.history, uid, new_uid, query.location), query.history.latest
    assert latest is not None, "the query has state"
    query.claim(_RUN, lambda newest: News(renames=((_identity(newest, uid, new_uid, query.location), new_uid),)))
    return Renamed(new_uid, uid, latest.batch, f"{query.location}/{identity}")


def _identity(history: QueryHistory, uid: str, new_uid: str, location: str) -> str:
    """The operator to rename; ConfigurationError if there is none, or the new uid is another operator's."""
    names = history.names
    if uid not in names:
        raise ConfigurationError(
            f"{location}: the query has no operator '{uid}'; it has {', '.join(map(repr, sorted(names))) or 'none'}.",
            kind=ErrorKind.INVALID_OPTION,
            hint="Pass the uid of one of these.",
        )
    if new_uid in names:
        raise ConfigurationError(
            f"{location}: the query has an operator '{new_uid}'.",
            kind=ErrorKind.OTHER_OWNER,
            hint="Choose another uid, or give that operator's state up: statelog.forget(checkpointLocation, uid).",
        )
    return names[uid]
