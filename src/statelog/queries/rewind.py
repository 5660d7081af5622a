"""Sets a stopped query back: to an earlier batch (rewind), or to its newest undamaged checkpoint (fall_back)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from statelog.errors import ConfigurationError, ErrorKind, StateMissingError
from statelog.history.query_history import QueryHistory
from statelog.numbers import checked_batch
from statelog.queries.stopped import News, StoppedQuery, read_query
from statelog.reading.verify import Damage, verify
from statelog.spark.checkpoint.checkpoint import COMMITS, OFFSETS, free_folder
from statelog.spark.checkpoint.location import open_checkpoint
from statelog.storage.links import is_link
from statelog.storage.store import if_present

_RUN: Final = "rewind"
"""The run id of the claim; no start of a query has it."""


@dataclass(frozen=True)
class Rewound:
    """The changes that :func:`rewind` made, or would make.

    Parameters
    ----------
    next_batch : int
        The batch that Spark runs first at the query's next start.
    taken_back : list of int
        Batches that Spark had committed and will repeat.
    removed : list of str
        Files taken out of Spark's checkpoint, in order.
    moved_to : str
        The folder that now contains these files; empty if there are none. You may delete it once the query runs.
    operators : list of str
        The operators that the query has in that checkpoint.
    """

    next_batch: int
    taken_back: list[int]
    removed: list[str]
    moved_to: str
    operators: list[str]


def rewind(
    checkpoint_location: str | Path,
    *,
    location: str | None = None,
    to: int | None = None,
    dry_run: bool = False,
) -> Rewound:
    """Make Spark repeat the batches that it committed although their state is missing, or all batches after a batch.

    State is missing if an action did not run every subtask to its end (such as ``limit`` in foreachBatch), or if the
    state was restored from an older copy. The query must be stopped. Sinks see the repeated batches under the same
    batch ids. If a sink skips ids that it has seen, as Spark's file sink does, set it back as well.

    Nothing changes unless the query can continue from the batch: its checkpoint must be retained, and all of the
    checkpoint's objects must exist. Then the log records that the query goes back, and the files that Spark must forget
    are moved aside, not deleted. If a call was interrupted, repeat it; until then, the query does not start. Later
    checkpoints can be read only through pins.

    Parameters
    ----------
    checkpoint_location : str or Path
        The query's checkpointLocation: a directory or a folder in an object store or, with an active session, in any
        file system that Spark can access.
    location : str, optional
        The location of the state, if the query's operators were given one.
    to : int, optional
        The batch to go back to: the query continues with the batch after it. Its checkpoint must be retained. By
        default, the newest batch that Spark has committed and that has a checkpoint.
    dry_run : bool
        Report the changes without making them.

    Returns
    -------
    Rewound
        The changes; there are none if Spark and the state agree.

    Raises
    ------
    ConfigurationError
        If there is no Spark checkpoint, or no state, or if `to` is after the newest checkpoint of a committed batch.
    StateMissingError
        If the checkpoint to go back to is no longer complete, or Spark no longer knows the input of the batches to
        repeat.
    CorruptionError
        If the log is damaged.

    Examples
    --------
    >>> statelog.rewind("/data/checkpoints/flights", dry_run=True)  # doctest: +SKIP
    Rewound(next_batch=41, taken_back=[41], removed=['offsets/42', 'commits/41'], ...)
    """
    to = checked_batch(to, "to", -1)
    query = open_stopped(checkpoint_location, location)
    return rewind_to(query, query.rewind_target() if to is None else to, dry_run=dry_run)


def open_stopped(checkpoint_location: str | Path, location: str | None) -> StoppedQuery:
    """Read a query's files; takes the arguments of :func:`rewind`, and raises its errors."""
    spark = open_checkpoint(str(checkpoint_location), SparkSession.getActiveSession())
    if not spark.batches(OFFSETS):
        raise ConfigurationError(
            f"{spark.location} holds no checkpoint of a Spark query.", hint="Pass the query's checkpointLocation."
        )
    return read_query(spark, location)


def rewind_to(query: StoppedQuery, batch: int, *, dry_run: bool) -> Rewound:
    """Make a query continue after a batch; raises the errors of :func:`rewind`."""
    spark = query.spark
    offsets, commits = spark.batches(OFFSETS), spark.batches(COMMITS)
    newest = query.rewind_target()
    if batch != newest:
        _require_choice(query, batch, newest)
    operators = sorted(query.history.names_at(batch))
    taken_back = [committed for committed in commits if committed > batch]
    if not taken_back:
        return Rewound(max(commits, default=-1) + 1, [], [], "", operators)
    _require_input(query, batch, offsets, commits)
    query.require_restorable(batch)
    # The offsets go first: after a crash in between, Spark and the state still visibly disagree. In the other order,
    # Spark would skip a batch.
    doomed = [f"{OFFSETS}/{offset}" for offset in reversed(offsets) if offset > batch + 1]
    doomed += [f"{COMMITS}/{committed}" for committed in reversed(taken_back)]
    aside = spark.free_aside()
    if not dry_run:
        query.claim(_RUN, lambda history: News(follows=_id_at(history, query, batch)))
        spark.set_aside(doomed)
    return Rewound(batch + 1, taken_back, doomed, f"{spark.location}/{aside}", operators)


def _id_at(history: QueryHistory, query: StoppedQuery, batch: int) -> bytes:
    """The id of the checkpoint to go back to; StateMissingError if the query has continued since it was read."""
    entry, meant = history.at(batch), query.history.at(batch)
    if (entry and entry.id) != (meant and meant.id):
        raise StateMissingError(
            f"{query.location}: checkpoint {batch} was replaced meanwhile.",
            hint="If the query is running, stop it first.",
        )
    return b"" if entry is None else entry.id


def _require_choice(query: StoppedQuery, batch: int, newest: int) -> None:
    """Check that a user can have the query go back to a batch."""
    if not 0 <= batch <= newest:
        raise ConfigurationError(
            f"The query cannot go back to batch {batch}: the newest checkpoint of a batch that Spark has committed"
            f" is {newest}.",
            kind=ErrorKind.INVALID_OPTION,
            hint="Pass the batch of a checkpoint that list_checkpoints shows as retained.",
        )
    if query.history.has_batch(batch) and not query.is_of_batch(batch):
        raise StateMissingError(
            f"{query.location}: checkpoint {batch} does not belong to the batch {batch} that Spark has committed,"
            " because the batch was repeated since then.",
            hint="Choose another batch.",
        )


def _require_input(query: StoppedQuery, newest: int, offsets: list[int], commits: list[int]) -> None:
    """Check that Spark can continue after a batch, for which it reads its records of that batch and of the next one."""
    location = query.spark.location
    if newest + 1 not in offsets:
        raise StateMissingError(
            f"{location}: the newest checkpoint of the state is {newest}, but Spark no longer knows the input of batch"
            f" {newest + 1}: its oldest is {offsets[0]}.",
            hint="Restore the state from a newer copy, or start with a new checkpointLocation.",
        )
    if newest >= 0 and not (newest in offsets and newest in commits):
        raise StateMissingError(
            f"{location}: the newest checkpoint of the state is {newest}, but Spark no longer knows where batch"
            f" {newest} ended: its oldest commit is {commits[0]}.",
            hint="Restore the state from a newer copy, or start with a new checkpointLocation.",
        )


_ASIDE: Final = "statelog-damaged"
"""Folder in a location of state; it holds no operator, since nothing in it is called like a log."""


@dataclass(frozen=True)
class FellBack(Rewound):
    """The changes that :func:`fall_back` made, or would make.

    Parameters
    ----------
    damages : tuple of Damage
        Everything that is damaged or missing.
    copies : list of str
        Copies of the damaged objects. You may delete them; the query deletes the objects themselves when it no longer
        needs them.
    """

    damages: tuple[Damage, ...]
    copies: list[str]


def fall_back(
    checkpoint_location: str | Path,
    *,
    location: str | None = None,
    dry_run: bool = False,
) -> FellBack:
    """Set a stopped query back to its newest undamaged checkpoint, after which Spark repeats the later batches.

    Everything that the query's checkpoints consist of is read and checked, as by :func:`verify`. Then Spark is set
    back, as by :func:`rewind`. Sinks see the repeated batches under the same batch ids.

    Parameters
    ----------
    checkpoint_location, location
        As for :func:`rewind`.
    dry_run : bool
        Report the damage and the changes without making them.

    Returns
    -------
    FellBack
        The changes; there are none if the newest checkpoint is undamaged.

    Raises
    ------
    ConfigurationError, StateMissingError, CorruptionError
        As for :func:`rewind`. StateMissingError also if every retained checkpoint is damaged, CorruptionError if a log
        is damaged: then only a savepoint or a copy helps.

    Examples
    --------
    >>> statelog.fall_back("/data/checkpoints/flights", dry_run=True)  # doctest: +SKIP
    FellBack(next_batch=41, taken_back=[41, 42], ..., damages=(Damage(uid='main', kind='checksum', ...),), copies=[])
    """
    query = open_stopped(checkpoint_location, location)
    newest = query.rewind_target()
    damages = tuple(verify(query.location).damages) if query.history.latest is not None else ()
    if not damages:
        return FellBack(**asdict(rewind_to(query, newest, dry_run=dry_run)), damages=(), copies=[])
    damaged = {batch for damage in damages for batch in damage.batches}
    batches = [] if any(damage.is_general for damage in damages) else range(newest + 1)
    whole = [batch for batch in batches if batch not in damaged and query.is_of_batch(batch)]
    if not whole:
        problems = "; ".join(damage.problem for damage in damages[:3])
        raise StateMissingError(
            f"{query.spark.location}: every retained checkpoint is damaged: {problems}.",
            kind=ErrorKind.CHECKPOINT_MISSING,
            hint="Restore a savepoint, or the damaged objects from a copy. 'statelog verify' lists all damage.",
        )
    # The copies come first: once Spark's files are moved, the call must not fail.
    copies = [] if dry_run else _copied(query, damages)
    return FellBack(**asdict(rewind_to(query, max(whole), dry_run=dry_run)), damages=damages, copies=copies)


def _copied(query: StoppedQuery, damages: Sequence[Damage]) -> list[str]:
    """Copy those damaged objects that exist, except those of a branch's parent."""
    store = query.store
    names = sorted({damage.name for damage in damages if damage.name and not is_link(damage.name)})
    folder = free_folder((info.name for info in store.list(f"{_ASIDE}/")), _ASIDE)
    copies = []
    for name in names:
        data = if_present(partial(store.read, name))
        if data is not None:
            store.put(f"{folder}/{name}", data)
            copies.append(f"{query.location}/{folder}/{name}")
    return copies
