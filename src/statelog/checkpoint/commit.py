"""Builds the log entry of a checkpoint from the acks of its batch."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from statelog.checkpoint.admission import OperatorConfig
from statelog.checkpoint.bases import BaseMap
from statelog.checkpoint.batch import AcceptedAck, Batch
from statelog.log.entry import Checkpoint, Settings
from statelog.log.references import Base, Level, SegmentRef, StoredRun
from statelog.runs.evolution import recorded_schema
from statelog.runs.schema import StateSchema


def compose(
    config: OperatorConfig,
    batch: Batch,
    before: Checkpoint | None,
    *,
    epoch: int,
    token: bytes,
    generations: Mapping[str, int],
    log_start: int,
    retained_from: int,
    base_map: BaseMap | None,
    settings: Settings,
) -> tuple[Checkpoint, list[bytes]]:
    """Build the entry of a batch whose subtasks have all acked, and the payload that it carries.

    If the batch is already durable, the entry is its next revision. `token` is 16 unique bytes. `log_start` is the
    number of the first log file with a needed entry, `retained_from` the oldest batch that can be restored. `base_map`
    is the map before this batch, if the entry has to repeat it.
    """
    taken = [batch.acks[subtask] for subtask in range(config.parallelism)]
    segments, payload = _place_segments(taken)
    bases = _place_bases(config, taken, payload)
    states = _known_states(config, before)
    entry = Checkpoint(
        epoch=epoch,
        batch=batch.number,
        revision=0 if batch.durable is None else batch.durable.revision + 1,
        query_id=config.query_id,
        run_id=config.run_id,
        uid=config.uid,
        parallelism=config.parallelism,
        segments=segments,
        key_schema=config.key_schema,
        states=states,
        batch_time_ms=batch.time.time_ms,
        watermark_ms=batch.time.watermark_ms,
        token=token,
        max_event_ms=_max_event_ms(config, before, taken),
        element_counts=[] if config.has_keys else _element_counts(states, taken),
        generations=dict(generations),
        log_start=log_start,
        retained_from=retained_from,
        bases=bases,
        base_ranges=None if base_map is None else list(base_map.ranges),
        operators=config.operators,
        settings=dict(settings),
    )
    return entry, payload


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


def _max_event_ms(config: OperatorConfig, before: Checkpoint | None, taken: list[AcceptedAck]) -> list[int | None]:
    if config.watermark is None:
        return []
    seen = [] if before is None else [before.max_event_ms]
    return config.watermark.combine(seen + [one.ack.max_event_ms for one in taken])


def _element_counts(states: list[StateSchema], taken: list[AcceptedAck]) -> list[list[int]]:
    return [[one.ack.element_counts.get(state.name, 0) for state in states] for one in taken]


def _place_segments(taken: list[AcceptedAck]) -> tuple[list[SegmentRef], list[bytes]]:
    """Place the changesets that are not stored yet one after the other in an entry's payload."""
    segments: list[SegmentRef] = []
    payload: list[bytes] = []
    offset = 0
    for subtask, one in enumerate(taken):
        ack = one.ack
        if one.is_stored or not ack.has_changeset:
            segments.extend(one.stored)
            continue
        if one.unchanged_segment is not None:
            whose = {"subtask": subtask, "attempt": ack.task.attempt, "rows": 0, "input_rows": ack.input_rows}
            segment = replace(one.unchanged_segment, **whose)
            if one.rewritten_bytes:
                segment = replace(segment, name="", offset=offset)
                payload.append(one.rewritten_bytes)
                offset += len(one.rewritten_bytes)
            segments.append(segment)
            continue
        segments.extend(
            SegmentRef(subtask, ack.task.attempt, part.checksum, 0, part.length, part.rows, 0, part.name)
            for part in ack.parts
        )
        segment = SegmentRef(
            subtask=subtask,
            attempt=ack.task.attempt,
            checksum=ack.checksum,
            offset=0 if ack.name else offset,
            length=ack.length,
            rows=ack.rows,
            input_rows=ack.input_rows,
            name=ack.name,
        )
        segments.append(segment)
        if not ack.name:
            payload.append(one.payload)
            offset += ack.length
    return segments, payload


def _place_bases(config: OperatorConfig, taken: list[AcceptedAck], payload: list[bytes]) -> list[Base]:
    """Append the runs that came with the acks to an entry's payload, behind the changesets."""
    offset = sum(map(len, payload))
    bases: list[Base] = []
    for subtask, one in enumerate(taken):
        if not one.levels:
            continue
        levels: list[Level] = []
        for level in one.levels:
            runs: list[StoredRun] = []
            for stored in level.runs:
                if not stored.name:
                    runs.append(replace(stored, offset=offset))
                    offset += stored.length
                else:
                    runs.append(stored)
            levels.append(replace(level, runs=runs))
        payload.append(one.levels_payload)
        bases.append(Base(subtask, config.parallelism, levels))
    return bases
