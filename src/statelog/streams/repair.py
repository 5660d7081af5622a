"""Takes back Spark's commits of batches that have no checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pyspark.sql import SparkSession

from statelog.checkpoint.query_operators import OperatorLog
from statelog.checkpoint.rewind_target import RewindTarget, find_target, target_at
from statelog.errors import ConfigurationError, ErrorKind, StateMissingError
from statelog.log.open import open_location
from statelog.savepoints.spark_checkpoint import COMMITS, OFFSETS, REWOUND, SparkCheckpoint
from statelog.spark.checkpoint_location import open_checkpoint, read_logs


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
    to: int | None = None,
    dry_run: bool = False,
) -> Rewound:
    """Make Spark repeat the batches that it committed although their state is missing, or all after a batch.

    State is missing if an action did not run every subtask to its end (``limit`` in foreachBatch, say), or if it was
    restored from an older copy. The query must be stopped. Sinks see the repeated batches under the same batch ids. If
    a sink leaves out ids that it has seen, as Spark's file sink does, set it back as well.

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
    to : int, optional
        The batch to go back to, whose checkpoint all operators retain: the query continues with the batch after it. By
        default the newest that all of them have.
    dry_run : bool
        Report the changes without making them.

    Returns
    -------
    Rewound
        The changes; there are none if Spark and the state agree.

    Raises
    ------
    ConfigurationError
        If there is no Spark checkpoint, or no state, if `operators` is needed, or if `to` is after the newest
        checkpoint of a committed batch.
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
    query = StoppedFiles.open(checkpoint_location, location, operators)
    return query.rewind_to(query.target.batch if to is None else to, dry_run=dry_run)


@dataclass(frozen=True)
class StoppedFiles:
    """The files of a stopped query: Spark's own, and the checkpoints of its operators."""

    spark: SparkCheckpoint
    offsets: list[int]
    commits: list[int]
    target: RewindTarget
    """The newest checkpoint to which the query can go back."""
    target_at: Callable[[int], RewindTarget]
    """Gives the target for an earlier batch."""

    @classmethod
    def open(
        cls, checkpoint_location: str | Path, location: str | None, operators: Sequence[str] | None
    ) -> StoppedFiles:
        """Read them; takes the arguments of :func:`rewind`, and raises its errors."""
        if operators is not None and (isinstance(operators, str) or not operators):
            raise ConfigurationError(f"operators is {operators!r}.", hint="It must be a list of uids, or None.")
        spark = open_checkpoint(str(checkpoint_location), SparkSession.getActiveSession())
        offsets, commits = spark.batches(OFFSETS), spark.batches(COMMITS)
        if not offsets:
            raise ConfigurationError(
                f"{spark.location} holds no checkpoint of a Spark query.", hint="Pass the query's checkpointLocation."
            )

        def time_ms(batch: int) -> int | None:
            return spark.time_ms(batch) if batch in offsets else None

        logs = read_logs(spark, location)
        newest = find_target(logs, commits, time_ms, operators)
        if operators is not None:
            return cls(spark, offsets, commits, newest, lambda batch: replace(newest, batch=batch))
        return cls(spark, offsets, commits, newest, lambda batch: target_at(logs, newest, batch, time_ms))

    def is_of_batch(self, log: OperatorLog, batch: int) -> bool:
        """Whether an operator retains the checkpoint that belongs to Spark's batch."""
        if not log.history.has_batch(batch):
            return False
        checkpoint = log.history.at(batch)
        assert checkpoint is not None
        return batch not in self.offsets or self.spark.time_ms(batch) == checkpoint.batch_time_ms

    def rewind_to(self, batch: int, *, dry_run: bool) -> Rewound:
        """Have the query go on after a batch; raises the errors of :func:`rewind`."""
        target = self.target
        if batch != target.batch:
            self._require_choice(batch)
            target = self.target_at(batch)
        names = [log.uid for log in target.operators], [log.uid for log in target.former]
        taken_back = [committed for committed in self.commits if committed > batch]
        if not taken_back:
            return Rewound(max(self.commits, default=-1) + 1, [], [], "", *names)
        _require_input(self.spark.location, batch, self.offsets, self.commits)
        target.require_restorable(open_location)
        # The offsets go first: after a crash in between, Spark and the state still disagree visibly. In the other order
        # Spark would skip a batch.
        doomed = [f"{OFFSETS}/{offset}" for offset in reversed(self.offsets) if offset > batch + 1]
        doomed += [f"{COMMITS}/{committed}" for committed in reversed(taken_back)]
        aside = free_folder(self.spark.files.list(REWOUND), REWOUND)
        if not dry_run:
            for name in doomed:
                self.spark.files.move(name, f"{aside}/{name}")
        return Rewound(batch + 1, taken_back, doomed, f"{self.spark.location}/{aside}", *names)

    def _require_choice(self, batch: int) -> None:
        """Check that a user can have the query go back to a batch."""
        newest = self.target.batch
        if not 0 <= batch <= newest:
            raise ConfigurationError(
                f"The query was to go back to batch {batch}; the newest checkpoint of a batch that Spark has committed"
                f" is {newest}.",
                kind=ErrorKind.INVALID_OPTION,
                hint="Pass the batch of a checkpoint that list_checkpoints shows as retained.",
            )
        for log in self.target.operators:
            if log.history.has_batch(batch) and not self.is_of_batch(log, batch):
                raise StateMissingError(
                    f"{log.name}: its checkpoint {batch} is not of the batch {batch} that Spark has committed, which"
                    " was repeated since.",
                    hint="Choose another batch.",
                )


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


def free_folder(names: Iterable[str], folder: str) -> str:
    """The next numbered folder in a folder with these files; so nothing in them is ever replaced."""
    numbers = (name.removeprefix(f"{folder}/").split("/")[0] for name in names)
    return f"{folder}/{max((int(number) for number in numbers if number.isdecimal()), default=0) + 1}"
