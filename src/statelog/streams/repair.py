"""Takes back Spark's commits of batches that have no checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from statelog.checkpoint.rewind_target import find_target
from statelog.errors import ConfigurationError, StateMissingError
from statelog.log.open import open_location
from statelog.savepoints.spark_checkpoint import COMMITS, OFFSETS
from statelog.savepoints.spark_files import SparkFiles
from statelog.streams.checkpoint_location import open_checkpoint, read_logs

_ASIDE: Final = "statelog-rewound"
"""Folder for the files that are moved away; Spark ignores folders whose names it does not know."""


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
        The folder that has these files now; empty if there are none. You may delete it once the query runs.
    operators : list of str
        The operators whose checkpoints decided.
    former_operators : list of str
        Operators that the query no longer has although the location holds their state; their checkpoints did not count.
    """

    next_batch: int
    taken_back: list[int]
    removed: list[str]
    moved_to: str
    operators: list[str]
    former_operators: list[str]


def rewind(
    checkpoint_location: str | Path,
    *,
    location: str | None = None,
    operators: Sequence[str] | None = None,
    dry_run: bool = False,
) -> Rewound:
    """Make Spark repeat the batches that it committed although their state is missing.

    State is missing if an action did not run every subtask to its end (``limit`` in foreachBatch, say), or if it was
    restored from an older copy. The query must be stopped. Sinks see the repeated batches under the same batch ids.

    Nothing changes unless every operator can go on from the same batch: its checkpoint must be retained, and all of
    the checkpoint's objects must exist. The files that Spark must forget are moved aside, not deleted.

    Parameters
    ----------
    checkpoint_location : str or Path
        The query's checkpointLocation: a directory or a folder in an object store, or with an active session in any
        file system that Spark reaches.
    location : str, optional
        The operators' location, if the query gave them one.
    operators : sequence of str, optional
        The uids of all operators that the query has. By default its newest checkpoints tell; checkpoints of older
        versions of statelog do not always.
    dry_run : bool
        Report the changes without making them.

    Returns
    -------
    Rewound
        The changes; there are none if Spark and the state agree.

    Raises
    ------
    ConfigurationError
        If there is no Spark checkpoint, or no state, or `operators` is needed.
    StateMissingError
        If the checkpoint to go back to is no longer complete, or Spark no longer knows the input of the batches to
        repeat.
    CorruptionError
        If a log is damaged.

    Examples
    --------
    >>> statelog.rewind("/data/checkpoints/flights", dry_run=True)  # doctest: +SKIP
    Rewound(next_batch=41, taken_back=[41], removed=['offsets/42', 'commits/41'], ...)
    """
    if operators is not None and (isinstance(operators, str) or not operators):
        raise ConfigurationError(f"operators is {operators!r}.", hint="It must be a list of uids, or None.")
    spark = open_checkpoint(str(checkpoint_location), SparkSession.getActiveSession())
    offsets, commits = spark.batches(OFFSETS), spark.batches(COMMITS)
    if not offsets:
        raise ConfigurationError(
            f"{spark.location} holds no checkpoint of a Spark query.", hint="Pass the query's checkpointLocation."
        )
    logs = read_logs(spark, location)
    target = find_target(logs, commits, lambda batch: spark.time_ms(batch) if batch in offsets else None, operators)
    newest, names = target.batch, ([log.uid for log in target.operators], [log.uid for log in target.former])
    taken_back = [batch for batch in commits if batch > newest]
    if not taken_back:
        return Rewound(max(commits, default=-1) + 1, [], [], "", *names)
    _require_input(spark.location, newest, offsets, commits)
    target.require_restorable(open_location)
    # The offsets go first: after a crash in between, Spark and the state still disagree visibly. In the other order
    # Spark would skip a batch.
    doomed = [f"{OFFSETS}/{batch}" for batch in reversed(offsets) if batch > newest + 1]
    doomed += [f"{COMMITS}/{batch}" for batch in reversed(taken_back)]
    aside = _free_folder(spark.files)
    if not dry_run:
        for name in doomed:
            spark.files.move(name, f"{aside}/{name}")
    return Rewound(newest + 1, taken_back, doomed, f"{spark.location}/{aside}", *names)


def _require_input(location: str, newest: int, offsets: Sequence[int], commits: Sequence[int]) -> None:
    """Check that Spark can go on after a batch, for which it reads its records of that batch and of the next one."""
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


def _free_folder(files: SparkFiles) -> str:
    """The next numbered folder. Every call gets a new one, so nothing in them is ever replaced."""
    numbers = (name.split("/")[1] for name in files.list(_ASIDE))
    return f"{_ASIDE}/{max((int(number) for number in numbers if number.isdecimal()), default=0) + 1}"
