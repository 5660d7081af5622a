"""Decides whether a start of a query may continue from a location's state, and which calls of its tasks are refused."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from statelog.coordinator.batch import Batch, OperatorBatch
from statelog.errors import (
    ConfigurationError,
    ErrorKind,
    FencedError,
    ProtocolError,
    StateMissingError,
)
from statelog.history.query_history import QueryHistory
from statelog.history.settings import require_convertible
from statelog.log.entry import Checkpoint, QueryCheckpoint, Settings
from statelog.operators.event_time import WatermarkPolicy
from statelog.operators.unkeyed.states import OperatorStateDescriptor
from statelog.options import Options
from statelog.rpc.messages import Ack, Begin, TaskId
from statelog.runs.evolution import require_evolution
from statelog.runs.schema import StateDescriptor, StateSchema, decode_schema
from statelog.shown import utc_time


@dataclass(frozen=True)
class OperatorConfig:
    """One operator in one start of a query."""

    query_id: str
    run_id: str
    uid: str
    parallelism: int
    key_schema: bytes
    """Arrow IPC schema message of the grouping columns; empty for an unkeyed operator."""
    states: list[StateSchema]
    watermark: WatermarkPolicy | None = None
    """The operator's own watermark; None if it follows Spark's."""
    deleted: tuple[str, ...] = ()
    """States to delete if they exist."""
    settings: Settings = field(default_factory=dict)
    """The settings on which the stored state of a keyed operator depends."""
    options: Options = field(default_factory=Options)
    instance: str = ""
    """The operator's place in the driver program; it distinguishes two operators with the same uid."""
    in_front: frozenset[str] = frozenset()
    """The uids of the operators that its rows come from."""
    stores_output: bool = False
    """Whether it stores the query's output, for a sink that gets the stored rows."""

    @property
    def has_keys(self) -> bool:
        """Whether the operator is keyed."""
        return bool(self.key_schema)

    @property
    def has_operator_state(self) -> bool:
        """Whether the operator has state without keys; an operator that only stores its output has none."""
        return not self.has_keys and bool(self.states)


def require_distinct(roster: Sequence[OperatorConfig]) -> None:
    """Raise ConfigurationError if two operators of a query have one uid."""
    uids = [config.uid for config in roster]
    for uid in uids:
        if uids.count(uid) > 1:
            raise ConfigurationError(
                f"The query has two stateful operators named '{uid}'.",
                kind=ErrorKind.UID_REQUIRED,
                hint="Give each operator its own name: key_by(..., uid='...').",
            )


def admit(
    query: QueryHistory, roster: Sequence[OperatorConfig], first_batch: int, time_before_ms: int | None, name: str
) -> dict[str, str]:
    """Check that a start may continue with its first batch, and return the identities of its operators by uid.

    Operators that begin their state with this batch have none yet. `time_before_ms` is Spark's time of the batch before
    it; None if Spark no longer has it. `name` is the location, for messages.

    Raises ConfigurationError if another query or another copy of the query wrote the state, if the start lacks an
    operator, or if the keys, states or settings of one do not fit; StateMissingError if the checkpoint before
    `first_batch` does not exist; CorruptionError if one before the newest is lost.
    """
    query.require_complete(name)
    query_id = roster[0].query_id
    latest = query.latest
    if latest is not None and latest.query_id != query_id:
        raise ConfigurationError(
            f"{name}: the state there belongs to query {latest.query_id}, not to query {query_id}.",
            kind=ErrorKind.OTHER_OWNER,
            hint="Give this query another location, or start it with the checkpointLocation that the state belongs to.",
        )
    if first_batch == 0 or query.begins_at == (query_id, first_batch):
        return {}
    before = query.at(first_batch - 1) if query.has_batch(first_batch - 1) else None
    if before is None:
        raise _missing(query, first_batch, name)
    if time_before_ms is not None and before.batch_time_ms != time_before_ms:
        raise _of_a_copy(before, time_before_ms, name)
    names = query.names_at(before.batch)
    require_none_removed(names, {config.uid for config in roster}, before.batch, name)
    found: dict[str, str] = {}
    for config in roster:
        if config.uid not in names:
            continue
        found[config.uid] = names[config.uid]
        own = query.histories[names[config.uid]].at(before.batch)
        assert own is not None, "the checkpoint has a section of the operator"
        _require_same_schemas(config, own, f"operator '{config.uid}' at {name}")
    return found


def require_none_removed(names: Collection[str], roster: Collection[str], batch: int, name: str) -> None:
    """Raise ConfigurationError if a start lacks an operator of the checkpoint before its first batch."""
    for uid in sorted(set(names) - set(roster)):
        raise ConfigurationError(
            f"{name}: at batch {batch} the query also has an operator '{uid}', which this start lacks.",
            kind=ErrorKind.OPERATOR_REMOVED,
            hint=f"If the uid was changed, use '{uid}' or statelog.rename. To continue without the operator,"
            f" stop the query and give up its state: statelog.forget(checkpointLocation, '{uid}').",
        )


def _of_a_copy(before: QueryCheckpoint, time_before_ms: int, name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name}: checkpoint {before.batch} belongs to a batch at {_moment(before.batch_time_ms)}, but batch"
        f" {before.batch} in Spark's checkpoint was at {_moment(time_before_ms)}: another copy of the query wrote it.",
        kind=ErrorKind.OTHER_OWNER,
        hint="If the checkpointLocation was copied, continue with the other copy, or give this one its own location,"
        " with a copy of the state from the time of Spark's checkpoint. statelog.savepoint and restore make an"
        " independent copy of a query.",
    )


def _moment(time_ms: int) -> str:
    time = utc_time(time_ms)
    return f"{time_ms} ms" if time is None else f"{time:%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"


def _missing(query: QueryHistory, batch: int, name: str) -> StateMissingError:
    latest, oldest = query.latest, query.oldest
    if oldest is not None and batch <= oldest.batch:
        return StateMissingError(
            f"{name}: Spark wants to run batch {batch}, which needs checkpoint {batch - 1}, but the oldest that is"
            f" retained is checkpoint {oldest.batch}.",
            hint="If the query is running elsewhere, stop this run. If Spark's checkpoint was restored from an"
            " older copy, use the newer one, or restore the location from a copy made at the same time."
            " Options(retained_checkpoints=...) keeps more checkpoints.",
        )
    found = "there is no checkpoint" if latest is None else f"the newest is checkpoint {latest.batch}"
    hint = (
        "If the location was changed, use the old one, or start with a new checkpointLocation. If the query has had no"
        " statelog operator so far, stop it and run statelog.forget(checkpointLocation, uid): then the state"
        " starts empty."
        + (
            " If the first batch ran no action on the operator's output, run statelog.rewind(checkpointLocation)."
            if batch == 1
            else ""
        )
        if latest is None
        else "Stop the query, run statelog.rewind(checkpointLocation) and start it again: Spark then"
        " repeats the batches whose state is missing."
    )
    return StateMissingError(
        f"{name}: Spark wants to run batch {batch}, which needs checkpoint {batch - 1}, but {found}.",
        hint=hint,
    )


def _require_same_schemas(config: OperatorConfig, before: Checkpoint, name: str) -> None:
    if bool(before.key_schema) != config.has_keys:
        raise ConfigurationError(
            f"{name}: the location holds {'keyed' if before.key_schema else 'operator'} state, but the operator is one"
            f" {'with' if config.has_keys else 'without'} keys.",
            kind=ErrorKind.OTHER_SCHEMA,
            hint="Give the operator another uid, or start with a new checkpointLocation.",
        )
    if not config.has_keys:
        _require_same_operator_states(config, before, name)
        return
    if before.key_schema != config.key_schema:
        raise ConfigurationError(
            f"{name}: its state is keyed by ({_fields(before.key_schema)}),"
            f" but this query by ({_fields(config.key_schema)}).",
            kind=ErrorKind.OTHER_SCHEMA,
            hint="Group by the same columns, or start with a new checkpointLocation.",
        )
    require_convertible(config.settings, config.states, before, name)
    own = {state.name: StateDescriptor.from_stored(state) for state in config.states}
    for stored in map(StateDescriptor.from_stored, before.states):
        if stored.name in own:
            require_evolution(stored, own[stored.name], name)


def _require_same_operator_states(config: OperatorConfig, before: Checkpoint, name: str) -> None:
    own = {state.name: OperatorStateDescriptor.from_stored(state) for state in config.states}
    for stored in map(OperatorStateDescriptor.from_stored, before.states):
        if own.get(stored.name, stored) != stored:
            raise ConfigurationError(
                f"{name}: the location holds {stored}, but the processor declares {own[stored.name]}.",
                kind=ErrorKind.OTHER_SCHEMA,
                hint="Declare the state as it was, or use another name for the new one.",
            )


def _fields(schema: bytes) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in decode_schema(schema))


# ---- Calls of tasks ----


def stale_run(what: str) -> FencedError:
    """The error for a task of a start that is over."""
    return FencedError(what, kind=ErrorKind.STALE_RUN, hint="The task is left over from an earlier run.")


def stale_task(task: TaskId, current: Batch, name: str) -> FencedError:
    """The error for a task of a batch that is over."""
    return FencedError(
        f"{name}: a task of batch {task.batch} called, but batch {current.number} has begun.",
        kind=ErrorKind.STALE_BATCH,
        hint="The task is left over from an earlier batch; its result is not needed.",
    )


def foreign_task(task: TaskId, name: str) -> ConfigurationError:
    """The error for a task of an operator that is not in the start's roster."""
    return ConfigurationError(
        f"{name}: a task of operator '{task.uid}' ran in query {task.query_id}, which was started without this"
        " operator.",
        kind=ErrorKind.STALE_DATAFRAME,
        hint="Use a streaming DataFrame only in the query that it was built for, and give each operator its own uid.",
    )


def incomplete_batch(
    batch: int, current: Batch | None, roster: Sequence[OperatorConfig], name: str
) -> StateMissingError:
    """The error for a batch that is over for Spark but has no checkpoint.

    `current` is the newest batch that subtasks have begun.
    """
    if current is None or batch > current.number:
        uids = ", ".join(f"operator '{config.uid}'" for config in roster)
        what = f"no subtask of {uids} ran in batch {batch}"
    elif current.is_complete:
        return StateMissingError(
            f"{name}: checkpoint {batch} does not exist: all subtasks ran to completion, but the entry could not be"
            " written to the log, and the query went on after the error.",
            kind=ErrorKind.CHECKPOINT_INCOMPLETE,
            hint="Let the errors of actions in foreachBatch end the query. Then stop it, run"
            " statelog.rewind(checkpointLocation) and start it again: Spark repeats the batch.",
        )
    else:
        missing = {uid: own.missing for uid, own in current.operators.items()}
        shown = "; ".join(f"operator '{uid}': {_some(subtasks)}" for uid, subtasks in missing.items() if subtasks)
        what = f"these subtasks of batch {batch} did not run to completion: {shown}"
    return StateMissingError(
        f"{name}: checkpoint {batch} does not exist: {what}. The query did not"
        " read the operators' whole output (limit, take, first, isEmpty, or no action at all in"
        " foreachBatch).",
        kind=ErrorKind.CHECKPOINT_INCOMPLETE,
        hint="Run an action that reads everything in every batch. Then stop the query, run"
        " statelog.rewind(checkpointLocation) and start it again: Spark repeats the batch.",
    )


def _some(subtasks: Sequence[int]) -> str:
    return ", ".join(map(str, subtasks[:10])) + (", ..." if len(subtasks) > 10 else "")


def require_own_partition(request: Begin, batch: OperatorBatch, config: OperatorConfig, name: str) -> None:
    """Raise ConfigurationError for a partition that the operator did not create, or for rows of another batch."""
    task = request.task
    is_misplaced = request.input_rows > 0 and request.partition != task.subtask
    has_other = batch.tokens.get(task.attempt, request.token) != request.token
    if not 0 <= task.subtask < config.parallelism or is_misplaced or has_other:
        raise ConfigurationError(
            f"{name}: subtask {task.subtask} of {config.parallelism} ran as partition"
            f" {request.partition} of task attempt {task.attempt}"
            f"{', which had already run another one' if has_other else ''}. A"
            " coalesce or union directly after the operator has renumbered or joined its partitions.",
            kind=ErrorKind.PARTITIONS_RENUMBERED,
            hint="Put a repartition between the operator and the coalesce or union.",
        )
    if request.batch_time_ms is not None and request.batch_time_ms != batch.time.time_ms:
        raise ConfigurationError(
            f"{name}: rows of a batch with time {request.batch_time_ms} ms ran as batch {batch.number}, whose"
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
                hint="Make sure that driver and workers run the same version of statelog.",
            )
