"""Decides whether a start of a query may continue from a location's state."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from statelog.checkpoint.history import History
from statelog.checkpoint.settings import require_convertible
from statelog.errors import ConfigurationError, CorruptionError, ErrorKind, StateMissingError
from statelog.log.entry import Checkpoint, QueryOperators, Settings
from statelog.operators.unkeyed.states import OperatorStateDescriptor
from statelog.operators.watermark import WatermarkPolicy
from statelog.runs.evolution import require_evolution
from statelog.runs.schema import StateDescriptor, StateSchema, decode_schema


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
    operators: QueryOperators | None = None
    """All operators of the query; None if unknown."""
    settings: Settings = field(default_factory=dict)
    """The settings on which the stored state of a keyed operator depends."""

    @property
    def has_keys(self) -> bool:
        """Whether the operator is keyed."""
        return bool(self.key_schema)


def require_admission(
    config: OperatorConfig, history: History, first_batch: int, time_before_ms: int | None, name: str
) -> None:
    """Check that a location's state belongs to this operator and reaches up to Spark's first batch.

    `time_before_ms` is Spark's time of the batch before that one; None if Spark has forgotten it.

    Raises ConfigurationError if another query, another operator or another copy of the query wrote the state, or if its
    keys, states or settings do not fit this start's; StateMissingError if the checkpoint before `first_batch` does not
    exist; CorruptionError if one before the newest is lost.
    """
    require_complete(history, name)
    latest = history.latest
    if latest is not None and (latest.query_id, latest.uid) != (config.query_id, config.uid):
        raise ConfigurationError(
            f"{name}: the state there belongs to operator '{latest.uid}' of query {latest.query_id},"
            f" not to query {config.query_id}.",
            kind=ErrorKind.OTHER_OWNER,
            hint="Give this query another location, or start it with the checkpointLocation that the state belongs to.",
        )
    if first_batch == 0:
        return
    before = history.at(first_batch - 1) if history.has_batch(first_batch - 1) else None
    if before is None:
        raise _missing(history, first_batch, name)
    if time_before_ms is not None and before.batch_time_ms != time_before_ms:
        raise _of_a_copy(before, time_before_ms, name)
    _require_same_schemas(config, before, name)


def require_complete(history: History, name: str) -> None:
    """Raise CorruptionError if a checkpoint before the newest is lost."""
    missing = history.first_missing
    if missing is not None:
        raise CorruptionError(
            f"{name}: the log lacks checkpoint {missing}, which later ones build on: files of it are gone.",
            kind=ErrorKind.OBJECT_MISSING,
            hint="Restore the log's folder from a copy; the state cannot be rebuilt without them.",
        )


def _of_a_copy(before: Checkpoint, time_before_ms: int, name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name}: checkpoint {before.batch} is that of a batch at {_moment(before.batch_time_ms)}, but batch"
        f" {before.batch} in Spark's checkpoint was at {_moment(time_before_ms)}: another copy of the query wrote it.",
        kind=ErrorKind.OTHER_OWNER,
        hint="Was the checkpointLocation copied? Go on with the other copy, or give this one a location of its own with"
        " a copy of the state that is as old as Spark's checkpoint. statelog.savepoint and restore make an independent"
        " copy of a query.",
    )


def _moment(time_ms: int) -> str:
    return f"{datetime.fromtimestamp(time_ms / 1000, tz=UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"


def _missing(history: History, batch: int, name: str) -> StateMissingError:
    latest, oldest = history.latest, history.oldest
    if oldest is not None and batch <= oldest.batch:
        return StateMissingError(
            f"{name}: Spark wants to run batch {batch}, which needs checkpoint {batch - 1}, but the oldest that is"
            f" retained is checkpoint {oldest.batch}.",
            hint="Was Spark's checkpoint restored from an older copy? Use the newer one, or restore the location from a"
            " copy of the same time. Options(retained_checkpoints=...) keeps more.",
        )
    found = "there is no checkpoint" if latest is None else f"the newest is checkpoint {latest.batch}"
    hint = (
        "Was the uid or the location changed, or the operator added to a query that had already run? Use"
        " the old ones, or start with a new checkpointLocation."
        + (
            " Or did the first batch run no action on the operator's output? Then run"
            " statelog.rewind(checkpointLocation)."
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
            f"{name}: the location holds {'keyed' if before.key_schema else 'operator'} state, and the operator is one"
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
            f" this query by ({_fields(config.key_schema)}).",
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
                f"{name}: the location holds {stored}, the processor declares {own[stored.name]}.",
                kind=ErrorKind.OTHER_SCHEMA,
                hint="Declare the state as it was, or use another name for the new one.",
            )


def _fields(schema: bytes) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in decode_schema(schema))
