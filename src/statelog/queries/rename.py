"""Gives an operator of a stopped query another uid (rename), or gives up its state (forget)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession

from statelog.errors import ConfigurationError, ErrorKind
from statelog.history.query_history import QueryHistory
from statelog.queries.stopped import News, StoppedQuery, read_query
from statelog.spark.checkpoint.checkpoint import COMMITS
from statelog.spark.checkpoint.location import open_checkpoint
from statelog.spark.plan.checks import checked_uid


@dataclass(frozen=True)
class Forgotten:
    """The state that :func:`forget` gave up, or would give up.

    Parameters
    ----------
    uid : str
        The operator.
    folder : str
        The operator's folder. The query's next start deletes the objects there that no pin keeps.
    batch : int or None
        The newest checkpoint that was given up; None if there was none.
    """

    uid: str
    folder: str
    batch: int | None


def forget(
    checkpoint_location: str | Path, uid: str, *, location: str | None = None, dry_run: bool = False
) -> Forgotten:
    """Give up the state of one operator of a stopped query.

    After that, the query can start without the operator. If it still has the operator, the operator begins with its
    next batch, empty or with its ``initialState``. The other operators keep their state, and the sources continue where
    they were. Checkpoints of the operator that a pin or a branch keeps stay readable through it.

    This writes one entry to the query's log. If the query is still running, it loses the log and fails.

    Parameters
    ----------
    checkpoint_location : str or Path
        The query's checkpointLocation: a directory or a folder in an object store or, with an active session, in any
        file system that Spark can access.
    uid : str
        The operator. In a query without statelog operators, the operator that will be added.
    location : str, optional
        The location of the state, if the query's operators were given one.
    dry_run : bool
        Report without giving up anything.

    Returns
    -------
    Forgotten

    Raises
    ------
    ConfigurationError
        If there is no Spark checkpoint, or if the query has operators and `uid` is none of them.
    CorruptionError
        If the log is damaged.
    StorageError
        If the location cannot be read or written.

    Examples
    --------
    >>> statelog.forget("/data/checkpoints/flights", "delays")  # doctest: +SKIP
    Forgotten(uid='delays', folder='/data/checkpoints/flights/statelog/delays', batch=41)
    """
    spark = open_checkpoint(str(checkpoint_location), SparkSession.getActiveSession())
    query = read_query(spark, location)
    history, identity = query.history, query.history.names.get(uid)
    next_batch = max(spark.batches(COMMITS), default=-1) + 1
    if history.latest is None or (not history.names and history.latest.batch + 1 < next_batch):
        if not dry_run:
            query.claim("forget", lambda newest: _beginning(newest, query, uid, next_batch))
        return Forgotten(uid, query.location, None)
    if identity is None:
        ended = [one for one in history.ended if history.name_of(one) == uid]
        if ended:
            return Forgotten(uid, f"{query.location}/{ended[-1]}", None)  # an earlier call has given it up
        raise _unknown(history, query, uid)
    if not dry_run:
        query.claim("forget", lambda newest: News(ended=(_named(newest, query, uid),)))
    return Forgotten(uid, f"{query.location}/{identity}", history.latest.batch)


def _beginning(history: QueryHistory, query: StoppedQuery, uid: str, batch: int) -> News:
    """Let a query begin its state with a batch. The batches before it had no operator, and have no checkpoints."""
    if history.names:
        raise _unknown(history, query, uid)
    return News(follows=b"", begins_at=batch)


def _named(history: QueryHistory, query: StoppedQuery, uid: str) -> str:
    identity = history.names.get(uid)
    if identity is None:
        raise _unknown(history, query, uid)
    return identity


def _unknown(history: QueryHistory, query: StoppedQuery, uid: str) -> ConfigurationError:
    names = ", ".join(map(repr, sorted(history.names))) or "none"
    return ConfigurationError(
        f"{query.location}: the query has no operator '{uid}'; it has {names}.",
        kind=ErrorKind.INVALID_OPTION,
        hint="Pass the uid of one of these. An operator that is added to a query with others needs no call.",
    )


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
    """Give an operator of a stopped query another uid, for a program that uses this uid from now on.

    This writes one entry to the query's log: no state is copied, and all checkpoints of the operator have the new name
    from then on. If the query is still running, it loses the log and fails.

    Parameters
    ----------
    checkpoint_location : str or Path
        The query's checkpointLocation: a directory or a folder in an object store or, with an active session, in any
        file system that Spark can access.
    uid, new_uid : str
        The operator's uid, and the new one, which no operator of the query may have.
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
    query.claim("rename", lambda newest: News(renames=((_identity(newest, uid, new_uid, query.location), new_uid),)))
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
            f"{location}: the query already has an operator '{new_uid}'.",
            kind=ErrorKind.OTHER_OWNER,
            hint="Choose another uid, or give up that operator's state: statelog.forget(checkpointLocation, uid).",
        )
    return names[uid]
