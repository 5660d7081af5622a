"""The reasons to refuse a task's call, as checks and errors."""

from __future__ import annotations

from statelog.checkpoint.admission import OperatorConfig
from statelog.checkpoint.batch import Batch
from statelog.checkpoint.protocol import Ack, Begin, TaskId
from statelog.errors import ConfigurationError, ErrorKind, FencedError, ProtocolError, StateMissingError


def stale_run(what: str) -> FencedError:
    """The error for a task of a start that is over."""
    return FencedError(what, kind=ErrorKind.STALE_RUN, hint="The task is a leftover of an earlier run.")


def stale_task(task: TaskId, current: Batch, name: str) -> FencedError:
    """The error for a task of a batch that is over."""
    return FencedError(
        f"{name}: a task of batch {task.batch} called, but batch {current.number} has begun.",
        kind=ErrorKind.STALE_BATCH,
        hint="The task is a leftover of an earlier batch; its result is not needed.",
    )


def incomplete_batch(batch: int, current: Batch | None, parallelism: int, name: str) -> StateMissingError:
    """The error for a batch that is over for Spark but has no checkpoint.

    `current` is the newest batch that subtasks have begun.
    """
    if current is None or batch > current.number:
        what = f"no subtask ran in batch {batch}"
    else:
        missing = current.missing(parallelism)
        shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        what = f"of batch {batch} these subtasks did not run to their end: {shown}"
    return StateMissingError(
        f"{name}: checkpoint {batch} does not exist: {what}. An action of the query did not"
        " read the operator's whole output (limit, take, first, isEmpty, or no action at all in"
        " foreachBatch).",
        kind=ErrorKind.CHECKPOINT_INCOMPLETE,
        hint="Run an action that reads everything in every batch. Then stop the query, run"
        " statelog.rewind(checkpointLocation) and start it again: Spark repeats the batch.",
    )


def require_own_partition(request: Begin, batch: Batch, config: OperatorConfig, name: str) -> None:
    """Raise ConfigurationError for a partition that the operator has not made, or rows of another batch."""
    task = request.task
    is_misplaced = request.input_rows > 0 and request.partition != task.subtask
    if not 0 <= task.subtask < config.parallelism or is_misplaced or task.attempt in batch.begun:
        raise ConfigurationError(
            f"{name}: subtask {task.subtask} of {config.parallelism} ran as partition"
            f" {request.partition} of task attempt {task.attempt}"
            f"{', which had already run another one' if task.attempt in batch.begun else ''}. A"
            " coalesce or union directly after the operator has renumbered or joined its partitions.",
            kind=ErrorKind.PARTITIONS_RENUMBERED,
            hint="Put a repartition between the operator and the coalesce or union.",
        )
    if request.batch_time_ms is not None and request.batch_time_ms != batch.time.time_ms:
        raise ConfigurationError(
            f"{name}: rows of the batch of {request.batch_time_ms} ms ran as batch {batch.number}, whose"
            f" time is {batch.time.time_ms} ms.",
            kind=ErrorKind.STALE_DATAFRAME,
            hint="A DataFrame of an earlier batch was kept and run again; use each batch's DataFrame only in"
            " its own foreachBatch call.",
        )


def require_own_segments(ack: Ack, folder: str, name: str) -> None:
    """Raise ProtocolError for segments of another attempt or batch, or outside the subtask's folder."""
    task = ack.task
    for segment in ack.segments:
        is_own = (segment.subtask, segment.attempt) == (task.subtask, task.attempt)
        if not is_own or (segment.name and not segment.name.startswith(f"{folder}/{task.batch}-")):
            raise ProtocolError(
                f"{name}: subtask {task.subtask} named {segment.name or 'a segment'} as its changeset of batch"
                f" {task.batch}, which is not below {folder} or not of attempt {task.attempt}.",
                hint="Do driver and workers run the same version of statelog?",
            )
