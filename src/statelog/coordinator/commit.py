"""Makes a log entry from the acks of a batch: a section for each operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from statelog.coordinator.admission import OperatorConfig
from statelog.coordinator.batch import AcceptedAck, Batch
from statelog.coordinator.garbage import Inventory
from statelog.errors import StorageError
from statelog.history.query_history import QueryHistory
from statelog.local.restore import read_segment
from statelog.log.entry import Checkpoint, Parent, QueryCheckpoint, Section, Settings
from statelog.log.references import Base, BaseRange, Level, SegmentRef, StoredRun
from statelog.log_fields import get_logger
from statelog.runs.evolution import recorded_schema
from statelog.runs.schema import StateSchema
from statelog.storage import Store

_log: Final = get_logger(__name__)


def compose_entry(
    batch: Batch,
    run: OperatorConfig,
    history: QueryHistory,
    sections: list[Section],
    *,
    epoch: int,
    token: bytes,
    log_start: int,
    retained_from: int,
    parent: Parent | None,
    stored_commit: int | None,
) -> QueryCheckpoint:
    """Build the entry of a batch, with a section for each operator: the first entry, or the next revision.

    `run` is any operator of the start, `history` has the batches before. `token` is 16 unique bytes. `log_start` is the
    number of the first log file with a needed entry, `retained_from` the oldest batch that can be restored.
    `stored_commit` is as in the entry.
    """
    before, former = history.at(batch.number - 1), batch.durable
    return QueryCheckpoint(
        epoch=epoch,
        batch=batch.number,
        revision=0 if former is None else former.revision + 1,
        id=token if former is None else former.id,
        follows=b"" if before is None else before.id,
        query_id=run.query_id,
        run_id=run.run_id,
        token=token,
        batch_time_ms=batch.time.time_ms,
        watermark_ms=batch.time.watermark_ms,
        sections=sections,
        log_start=log_start,
        retained_from=retained_from,
        parent=parent,
        ended=history.ended,
        cuts=list(history.cuts),
        stored_commit=stored_commit,
    )


def compose_section(
    config: OperatorConfig,
    identity: str,
    acks: Sequence[AcceptedAck],
    before: Checkpoint | None,
    *,
    watermark_ms: int | None,
    time_ms: int,
    generations: Mapping[str, int],
    base_ranges: Sequence[BaseRange] | None,
    settings: Settings,
    begins: bool,
    offset: int = 0,
) -> tuple[Section, list[bytes]]:
    """Build the section of an operator whose subtasks have all acked, and the payload that it carries.

    `acks` are those that count, in order of the subtasks; `before` is the operator's previous checkpoint; `time_ms` is
    the batch's processing time. `base_ranges` is the map before this batch, if the section has to repeat it. The
    payload begins at `offset` of the entry's.
    """
    segments, payload = _place_segments(acks, offset)
    bases = _place_bases(config, acks, payload, offset)
    states = _known_states(config, before)
    section = Section(
        identity=identity,
        uid=config.uid,
        parallelism=config.parallelism,
        segments=segments,
        key_schema=config.key_schema,
        states=states,
        watermark_ms=watermark_ms,
        max_event_ms=_max_event_ms(config, before, acks),
        silent_ms=_silent_ms(config, before, acks, time_ms),
        element_counts=[] if config.has_keys else _element_counts(states, acks),
        generations=dict(generations),
        bases=bases,
        base_ranges=None if base_ranges is None else list(base_ranges),
        settings=dict(settings),
        begins=begins,
    )
    return section, payload


def generations_of(config: OperatorConfig, before: Checkpoint | None) -> dict[str, int]:
    """How often each state was deleted, by name, deletions of this start included."""
    if before is None:
        return {}
    existing = {state.name for state in before.states}
    gone = [name for name in config.deleted if name in existing]
    return before.generations | {name: before.generations.get(name, 0) + 1 for name in gone}


def _known_states(config: OperatorConfig, before: Checkpoint | None) -> list[StateSchema]:
    """The declared states, and those that an earlier version of the processor left in the location."""
    states = {state.name: state for state in before.states} if before else {}
    for name in config.deleted:
        states.pop(name, None)
    for state in config.states:
        states[state.name] = recorded_schema(states.get(state.name, state), state)
    return [states[name] for name in sorted(states)]


def _max_event_ms(config: OperatorConfig, before: Checkpoint | None, acks: Sequence[AcceptedAck]) -> list[int | None]:
    if config.watermark is None:
        return []
    seen = [] if before is None else [before.max_event_ms]
    return config.watermark.combine(seen + [accepted.ack.max_event_ms for accepted in acks])


def _silent_ms(
    config: OperatorConfig, before: Checkpoint | None, acks: Sequence[AcceptedAck], time_ms: int
) -> list[int]:
    if config.watermark is None:
        return []
    silent_ms, gap_ms = ([], 0) if before is None else (before.silent_ms, time_ms - before.batch_time_ms)
    return config.watermark.silence(silent_ms, [accepted.ack.max_event_ms for accepted in acks], gap_ms)


def _element_counts(states: list[StateSchema], acks: Sequence[AcceptedAck]) -> list[list[int]]:
    return [[accepted.ack.element_counts.get(state.name, 0) for state in states] for accepted in acks]


def rewrite_snapshots(acks: Sequence[AcceptedAck], store: Store, inventory: Inventory, name: str) -> None:
    """Make the entry store unchanged snapshots again if they are in files that are mostly waste."""
    for accepted in acks:
        segment = accepted.unchanged_segment
        if segment is not None and segment.name in inventory.retention.wasteful:
            try:
                accepted.rewritten_bytes = read_segment(store, segment)
            except StorageError as error:
                # The snapshot may stay in its file; the next checkpoint tries again.
                _log.warning("%s: a snapshot could not be moved yet: %s", name, error)


def _place_segments(acks: Sequence[AcceptedAck], offset: int) -> tuple[list[SegmentRef], list[bytes]]:
    """Place the changesets that are not stored yet one after the other in an entry's payload, from an offset on."""
    segments: list[SegmentRef] = []
    payload: list[bytes] = []
    for subtask, accepted in enumerate(acks):
        ack = accepted.ack
        if accepted.is_stored or not ack.has_changeset:
            segments.extend(accepted.stored)
            continue
        *parts, last = ack.segments
        data = accepted.payload
        if accepted.unchanged_segment is not None:
            whose = {"subtask": subtask, "attempt": ack.task.attempt, "rows": 0, "input_rows": last.input_rows}
            last, data = replace(accepted.unchanged_segment, **whose), accepted.rewritten_bytes
            if data:
                last = replace(last, name="")
        if not last.name:
            last = replace(last, offset=offset)
            payload.append(data)
            offset += last.length
        segments += [*parts, last]
    return segments, payload


def _place_bases(config: OperatorConfig, acks: Sequence[AcceptedAck], payload: list[bytes], offset: int) -> list[Base]:
    """Append the runs that came with the acks to an entry's payload, after the changesets."""
    offset += sum(map(len, payload))
    bases: list[Base] = []
    for subtask, accepted in enumerate(acks):
        if not accepted.levels:
            continue
        levels: list[Level] = []
        for level in accepted.levels:
            runs: list[StoredRun] = []
            for stored in level.runs:
                if not stored.name:
                    runs.append(replace(stored, offset=offset))
                    offset += stored.length
                else:
                    runs.append(stored)
            levels.append(replace(level, runs=runs))
        payload.append(accepted.levels_payload)
        bases.append(Base(subtask, config.parallelism, levels))
    return bases
