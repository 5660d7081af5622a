"""Finds the checkpoint to which all operators of a query can rewind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from statelog.checkpoint.admission import require_complete
from statelog.checkpoint.history import History
from statelog.checkpoint.query_operators import BatchOperators, OperatorLog, QueryLogs
from statelog.errors import ConfigurationError, ErrorKind, StateMissingError
from statelog.log.references import SegmentRef, StoredRun
from statelog.storage import Store
from statelog.storage.links import is_link
from statelog.storage.store import if_present


@dataclass(frozen=True)
class RewindTarget:
    """The checkpoint to rewind to, and the operators that it concerns."""

    batch: int
    """The newest checkpoint that every operator of the query has; -1 if one of them has none."""
    operators: list[OperatorLog]
    former: list[OperatorLog]
    """Operators that the query no longer has."""

    def require_restorable(self, open_location: Callable[[str], Store]) -> None:
        """Raise StateMissingError unless every operator's checkpoint is retained and all its objects exist."""
        for log in self.operators if self.batch >= 0 else []:  # Batch 0 starts with empty state.
            if not log.history.has_batch(self.batch):
                oldest = log.history.oldest
                kept = "it has none" if oldest is None else f"the oldest that is retained is checkpoint {oldest.batch}"
                raise StateMissingError(
                    f"{log.name}: the query would have to go back to checkpoint {self.batch}, but {kept}.",
                    hint="Restore the state of the operators that are behind from a newer copy, or start with a new"
                    " checkpointLocation. Options(retained_checkpoints=...) keeps more.",
                )
            missing = _missing_objects(open_location(log.location), log.root, log.history, self.batch)
            if missing:
                shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
                raise StateMissingError(
                    f"{log.name}: the query would have to go back to checkpoint {self.batch}, but {len(missing)} of its"
                    f" objects are gone or too short: {shown}.",
                    kind=ErrorKind.OBJECT_MISSING,
                    hint="Restore them from a copy, or start with a new checkpointLocation.",
                )


def _missing_objects(store: Store, root: str, history: History, batch: int) -> list[str]:
    """The objects that a restart after a batch would read and that are gone or too short, by name."""
    checkpoint = history.at(batch)
    assert checkpoint is not None
    needed: list[SegmentRef | StoredRun] = list(checkpoint.segments)
    for subtask in range(0 if checkpoint.is_whole else checkpoint.parallelism):
        wanted = history.missing_segments(b"", subtask, checkpoint.parallelism, batch, set())
        needed += [clipped.segment for clipped in wanted.segments]
        needed += [run for level in wanted.levels for run in level.runs]
    sizes = {info.name: info.size_bytes for info in store.list(f"{root}/")}
    for name in {one.name for one in needed if is_link(one.name)}:
        sizes[name] = if_present(partial(store.size_bytes, name)) or 0
    return sorted({one.name for one in needed if sizes.get(one.name, -1) < one.offset + one.length})


def find_target(
    logs: QueryLogs, commits: Sequence[int], time_ms: Callable[[int], int | None], uids: Sequence[str] | None
) -> RewindTarget:
    """Find the newest checkpoint that all operators of a query have.

    `commits` are the batches that Spark has committed, in order. `time_ms` gives Spark's time of a batch; None if Spark
    has forgotten it. `uids` are the query's operators; None to take them from the checkpoints.

    Raises ConfigurationError if an operator has no state, or if the logs do not tell whether the query still has one;
    CorruptionError if an operator has lost a checkpoint before its newest; StateMissingError if one has no checkpoint
    of a batch that Spark has committed.
    """
    committed = max(commits, default=-1)
    found = _of_query(logs, committed, time_ms) if uids is None else _named(logs, uids)
    # A start that ends before its first checkpoint leaves none. So after Spark's first commit a missing checkpoint is
    # normal; later it means that the state is elsewhere or gone.
    is_first = list(commits) == [0]
    for uid, location in () if is_first else found.missing.items():
        raise ConfigurationError(
            f"The query has an operator '{uid}', and {location} holds no state of it that belongs to query"
            f" {logs.query_id}.",
            kind=ErrorKind.CHECKPOINT_MISSING,
            hint="Was it moved? Pass location= with the place where it is.",
        )
    if not (found.operators or is_first):
        raise ConfigurationError(
            f"{logs.given or logs.home} holds no state of statelog that belongs to query {logs.query_id}.",
            kind=ErrorKind.CHECKPOINT_MISSING,
            hint="Pass location= if the operators were given one.",
        )
    for log in found.operators:
        require_complete(log.history, log.name)
    newest = min((_newest_of_query(log, committed, time_ms) for log in found.operators), default=-1)
    if found.missing:
        newest = -1
    if newest == -1 and not is_first and commits:
        raise StateMissingError(
            f"{logs.given or logs.home}: an operator has no checkpoint of any batch that Spark has committed.",
            hint="Restore the state from a copy of the same time, or start with a new checkpointLocation.",
        )
    return RewindTarget(newest, found.operators, found.former)


def target_at(logs: QueryLogs, target: RewindTarget, batch: int, time_ms: Callable[[int], int | None]) -> RewindTarget:
    """The target of a rewind to an earlier batch: the operators that the query had then; those added since begin anew.

    `target` is the newest one, whose operators count if no checkpoint of the batch notes them.
    """
    found = logs.at(batch, time_ms(batch))
    if not found.is_noted or found.missing:
        return replace(target, batch=batch)
    return RewindTarget(batch, found.operators, found.former)


def _newest_of_query(log: OperatorLog, committed: int, time_ms: Callable[[int], int | None]) -> int:
    """The newest checkpoint of a batch that Spark has committed; -1 if there is none.

    A checkpoint with another time than Spark's is from a batch that was taken back, or from another copy of the query.
    """
    batches = [one for one in log.history.checkpoints if one.batch <= committed]
    if not batches:
        return committed  # The state is ahead of Spark: there is nothing to take back.
    for checkpoint in reversed(batches):
        if time_ms(checkpoint.batch) in (None, checkpoint.batch_time_ms):
            return checkpoint.batch
    return -1


def _named(logs: QueryLogs, uids: Sequence[str]) -> BatchOperators:
    chosen = {uid: logs.of(uid) for uid in sorted(set(uids))}
    return BatchOperators(
        operators=[log for log in chosen.values() if log is not None],
        missing={uid: logs.given or logs.home for uid, log in chosen.items() if log is None},
        former=[],
        is_noted=True,
    )


def _of_query(logs: QueryLogs, committed: int, time_ms: Callable[[int], int | None]) -> BatchOperators:
    """The operators of the query's newest start, as its checkpoints note them, or as a guess."""
    checkpoints = [checkpoint for log in logs.found for checkpoint in log.history.checkpoints]
    for batch in sorted({one.batch for one in checkpoints if one.batch <= committed + 1}, reverse=True):
        found = logs.at(batch, time_ms(batch))
        if found.is_noted:
            return found
    newest = logs.newest(committed)
    if newest is None:
        return BatchOperators(operators=list(logs.found), missing={}, former=[], is_noted=False)
    found = logs.at(newest, time_ms(newest))
    _require_clear(found, newest)
    return found


def _require_clear(found: BatchOperators, batch: int) -> None:
    """Raise ConfigurationError if the starts that operators took part in speak against a guess.

    The guess: an operator that lacks more than the newest batch has left the query. But if it took part in the start of
    that batch, its log may be an older copy. And an operator that lacks just that batch, and did not take part in that
    start, may have left the query.
    """
    everyone = [*found.operators, *found.former]
    runs = {checkpoint.run_id for log in everyone if (checkpoint := log.history.at(batch)) is not None}
    unclear = [log for log in found.operators if log.newest < batch and not runs & log.runs]
    unclear += [log for log in found.former if runs & log.runs]
    if unclear:
        names = ", ".join(f"'{log.uid}' (newest checkpoint {log.newest})" for log in unclear)
        raise ConfigurationError(
            f"The logs do not tell whether the query still has these operators: {names}. The newest checkpoint of the"
            f" others is {batch}.",
            kind=ErrorKind.UID_REQUIRED,
            hint="Name all operators that the query has: rewind(..., operators=[...]).",
        )
