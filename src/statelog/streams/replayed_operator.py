"""Makes the operator of a replay: from a sample's description and the user's arguments, without a session."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from pyspark.sql.types import StructType

from statelog.checkpoint.keyed_task import as_stored
from statelog.checkpoint.sample import Frames, SampledOperator
from statelog.convert.arrow import ArrowProcessor
from statelog.convert.codecs import ArrowCodecs, FrameCodecs, ProcessorCodecs, RowCodecs
from statelog.convert.ddl import parse_ddl
from statelog.convert.times import TimeMode
from statelog.errors import ConfigurationError, ErrorKind
from statelog.operators.event_time import EventTime
from statelog.operators.keyed.operator import KeyedOperator
from statelog.options import Options
from statelog.reading.batch_of_key import BatchOfKey
from statelog.runs.evolution import require_evolution
from statelog.runs.schema import StateDescriptor
from statelog.spark.checks import parse_output
from statelog.spark.declare import declare_keyed
from statelog.spark.event_times import time_domains
from statelog.spark.keyed_plan import check_processor
from statelog.spark.keyed_spec import KeyedSpec
from statelog.spark.worker import pickled_processor
from statelog.streams.debugged import Debugged


@dataclass(frozen=True)
class OperatorArguments:
    """The user's arguments that describe the operator; None where the sample's description counts."""

    output: StructType | str | None
    pandas: bool | None
    event_time: str | None
    session_zone: str | None


def described(
    found: BatchOfKey, sampled: SampledOperator | None, columns: Sequence[str] | None, given: OperatorArguments
) -> SampledOperator:
    """The description of the operator; `columns` are those of given rows, `sampled` is that of a sample.

    Raises ConfigurationError if neither the arguments nor a sample tell the output, or a column is missing.
    """
    if sampled is None:
        names = found.codec.schema.names
        columns = names if columns is None else list(columns)
        if given.output is None:
            raise ConfigurationError(
                f"{found.name}: there is no sample that tells the output type.",
                hint="Pass output=, and pandas=, eventTime= and sessionTimeZone= if the query has them. With"
                " Options(sample_batches=K) a query stores them.",
            )
        sampled = SampledOperator(
            columns=columns,
            key_columns=[_place(columns, name, found) for name in names],
            output="",
            session_zone="UTC",
            time_mode=str(found.checkpoint.settings.get("timeMode", TimeMode.NONE)),
        )
    changed: dict[str, Any] = {}
    if given.output is not None:
        changed["output"] = parse_output(given.output, parse_ddl).json()
    if given.pandas is not None:
        frames = FrameCodecs()
        changed["frames"] = Frames(frames.max_rows, frames.max_bytes, frames.keeps_integers) if given.pandas else None
    if given.event_time is not None:
        changed["event_time"] = _event_time(found, sampled, given.event_time)
    if given.session_zone is not None:
        changed["session_zone"] = given.session_zone
    return msgspec.structs.replace(sampled, **changed)


def _place(columns: Sequence[str], name: str, found: BatchOfKey) -> int:
    if name not in columns:
        raise ConfigurationError(
            f"{found.name}: the rows have no column '{name}'.",
            kind=ErrorKind.OTHER_SCHEMA,
            hint=f"They have {', '.join(columns)}.",
        )
    return columns.index(name)


def _event_time(found: BatchOfKey, sampled: SampledOperator, column: str) -> EventTime | None:
    """The event time of the rows, as the plan of a query has it."""
    is_event_time, is_own = sampled.time_mode == TimeMode.EVENT_TIME, bool(found.checkpoint.max_event_ms)
    place = _place(sampled.columns, column, found)
    return EventTime(place, drops_late=is_event_time, inputs=int(is_own)) if is_own or is_event_time else None


def make_operator(found: BatchOfKey, described: SampledOperator, processor: object, *, stops: bool) -> KeyedOperator:
    """The operator with a processor, which stops in the debugger if it `stops`.

    Raises ConfigurationError if the processor is not of the kind that the query had, or its states do not fit those of
    the checkpoint; ProcessorError if its `init` fails.
    """
    takes_columns = isinstance(processor, ArrowProcessor)
    if not takes_columns:
        check_processor(processor, "processor must be")
    codecs = _codecs(described, takes_columns=takes_columns)
    mode, uid = TimeMode.parse(described.time_mode), found.checkpoint.uid
    pickled = pickled_processor(Debugged(processor) if stops else processor, uid)
    event_time = described.event_time
    own_watermark = event_time if event_time is not None and event_time.inputs else None
    declared = declare_keyed(pickled, uid, time_domains(mode, own_watermark), parse_ddl)
    operator = KeyedSpec(
        uid=uid,
        instance="",
        parallelism=found.checkpoint.parallelism,
        columns=described.columns,
        output_schema=StructType.fromJson(json.loads(described.output)),
        processor=pickled,
        options=Options(),
        key_schema=found.codec.schema,
        session_zone=described.session_zone,
        key_columns=described.key_columns,
        initial_columns=described.initial_columns,
        initial_key_columns=described.initial_key_columns,
        codecs=codecs,
        time_mode=mode,
        event_time=event_time,
        output_event_time=described.output_event_time,
        states=declared.by_name(),
    ).operator()
    own = {binding.name: binding.descriptor for binding in operator.states}
    for stored in map(StateDescriptor.from_stored, found.checkpoint.states):
        if stored.name in own:
            require_evolution(stored, own[stored.name], found.source.name)
    expires_by = {stored.name: stored.expires_by for stored in found.checkpoint.states if stored.expires_by}
    return as_stored(operator, found.checkpoint.generations, expires_by)


def _codecs(described: SampledOperator, *, takes_columns: bool) -> ProcessorCodecs:
    if takes_columns:
        return ArrowCodecs()
    frames = described.frames
    if frames is not None:
        return FrameCodecs(max_rows=frames.max_rows, max_bytes=frames.max_bytes, keeps_integers=frames.keeps_integers)
    return RowCodecs()
