"""Gives up the state of an operator, so that its query goes on without the operator, or with an empty one."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from statelog.checkpoint.query_operators import OperatorLog, QueryLogs
from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, ErrorKind
from statelog.log.entry import Claim
from statelog.log.open import open_location, open_log, operator_folder
from statelog.options import Options
from statelog.spark.checkpoint_location import open_checkpoint, read_logs, state_location
from statelog.storage import Store

_RUN: Final = "forget"
"""The run id of the claim; no start of a query has it."""


@dataclass(frozen=True)
class Forgotten:
    """The state that :func:`forget` gave up, or would give up.

    Parameters
    ----------
    uid : str
        The operator.
    folder : str
        The operator's folder. Its objects may be deleted with ``gc``, or with the folder if the operator is gone for
        good and the query has run without it.
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

    At its next start the query may lack the operator. If it still has it, the operator starts empty, or from its
    ``initialState`` and ``initialTables``, at the batch that comes next. The other operators keep their state, and the
    sources go on where they were. Checkpoints of the operator that a pin or a branch holds stay readable through it.

    A query that still runs loses the operator's log and fails.

    Parameters
    ----------
    checkpoint_location : str or Path
        The query's checkpointLocation: a directory or a folder in an object store, or with an active session in any
        file system that Spark reaches.
    uid : str
        The operator. In a query that had no operator of statelog's so far, the one that is added.
    location : str, optional
        The operator's location, if the query gives it one.
    dry_run : bool
        Report without giving up anything.

    Returns
    -------
    Forgotten

    Raises
    ------
    ConfigurationError
        If there is no Spark checkpoint, or if the query has operators and `uid` is none of them, or one that was
        renamed.
    CorruptionError
        If a log is damaged. Then remove the operator's folder, and call this function again.
    StorageError
        If the location cannot be read or written.

    Examples
    --------
    >>> statelog.forget("/data/checkpoints/flights", "delays")  # doctest: +SKIP
    Forgotten(uid='delays', folder='/data/checkpoints/flights/statelog/delays', batch=41)
    """
    spark = open_checkpoint(str(checkpoint_location), SparkSession.getActiveSession())
    logs = read_logs(spark, location)
    known = _require_known(logs, uid)
    place = known.location if known else location or state_location(spark, None)
    store = open_location(place)
    root = operator_folder(store, uid)
    if not dry_run:
        give_up(store, root, logs.query_id, uid, run_id=_RUN)
    return Forgotten(uid, f"{place}/{root}", known.newest if known else None)


def give_up(store: Store, root: str, query_id: str, uid: str, *, run_id: str, renamed_to: str = "") -> None:
    """Give up all checkpoints in the log of an operator; `renamed_to` is the uid under which it goes on, if it does."""
    clock = SystemClock()
    log = open_log(store, root, Options(), clock)
    now_ms = int(clock.now_s() * 1000)
    log.claim(
        lambda epoch: Claim(
            epoch, query_id, run_id, uid, secrets.token_bytes(16), now_ms, gives_up=True, renamed_to=renamed_to
        )
    )
    log.close()


def _require_known(logs: QueryLogs, uid: str) -> OperatorLog | None:
    """The operator's log, if it has one; raises ConfigurationError if the query has operators, but no such one."""
    newest = logs.newest()
    found = None if newest is None else logs.at(newest)
    log = logs.of(uid)
    uids = {other.uid for other in logs.found} | logs.given_up | (found.missing.keys() if found else set())
    if uids and uid not in uids:
        raise ConfigurationError(
            f"{logs.home}: the query has no operator '{uid}'; it has {', '.join(map(repr, sorted(uids)))}.",
            kind=ErrorKind.INVALID_OPTION,
            hint="Pass the uid of one of these. An operator that is new in a query with others needs no call.",
        )
    if log is None and uid in logs.renamed:
        # Giving up the old log once more would hide that the state is elsewhere.
        raise ConfigurationError(
            f"{logs.home}: operator '{uid}' was renamed to '{logs.renamed[uid]}'.",
            kind=ErrorKind.INVALID_OPTION,
            hint="Pass the new uid. An operator that is to use the old one beside it needs no call.",
        )
    return log
