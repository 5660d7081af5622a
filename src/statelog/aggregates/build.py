"""Plans the aggregates of keys: checks the arguments, chooses the state, the clock and the step before the shuffle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from statelog.aggregates.accumulators import Accumulators, bind_aggregates
from statelog.aggregates.combine import PartialAggregates
from statelog.aggregates.functions import Aggregate
from statelog.aggregates.operator import Completion, KeyedAggregates
from statelog.convert.codecs import ColumnCodecs
from statelog.convert.times import TimeMode
from statelog.errors import ConfigurationError
from statelog.operators.event_time import EventTime
from statelog.runs.schema import TimeDomain
from statelog.runs.times import Ttl


@dataclass(frozen=True)
class KeyedDefinition:
    """The input of a keyed operator."""

    schema: StructType
    """The input columns."""
    keys: Sequence[int]
    """The grouping columns."""
    key_schema: pa.Schema
    """Names and storage types of the grouping columns."""
    event_time: str | None
    """The column with the watermark."""
    is_streaming: bool
    ansi: bool
    """Whether the session is in ANSI mode."""

    @property
    def key_time(self) -> int | None:
        """The position in the key of the column with the watermark; None if no grouping column has one."""
        names = [self.schema.names[index] for index in self.keys]
        return names.index(self.event_time) if self.event_time in names else None


@dataclass(frozen=True)
class AggregatePlan:
    """An operator of aggregates, ready to be planned like any stateful processor."""

    operator: KeyedAggregates
    output: StructType
    """The output columns."""
    time_mode: TimeMode
    _definition: KeyedDefinition
    _accumulators: Accumulators
    combines: bool
    """Whether rows are reduced before the shuffle."""

    def step(self, event_time: EventTime | None) -> PartialAggregates:
        """The step before the shuffle."""
        return PartialAggregates(self._definition.schema, self._definition.keys, self._accumulators, event_time)


def plan_aggregates(
    definition: KeyedDefinition,
    aggregates: Sequence[Aggregate],
    named: Mapping[str, Aggregate],
    *,
    output_mode: str,
    ttl: int | Ttl | None,
    combine: bool,
) -> AggregatePlan:
    """Plan the aggregates of each key; ConfigurationError if the arguments do not fit each other or the input."""
    bound = [*aggregates, *(_named(name, aggregate) for name, aggregate in named.items())]
    accumulators = bind_aggregates(bound, definition.schema, ansi=definition.ansi)
    keys = [definition.schema[index] for index in definition.keys]
    output = StructType([*keys, *accumulators.result.fields])
    doubled = [name for name in output.names if output.names.count(name) > 1]
    if doubled:
        raise ConfigurationError(
            f"agg: an aggregate and a grouping column are both named {doubled[0]!r}.",
            hint="Name the aggregate with .alias(name), or as the argument's name.",
        )
    completion = _completion(definition, output_mode, ttl)
    combines = combine and not accumulators.depends_on_arrival
    settings: dict[str, int | str] = {"results": "aggregates of keys", "outputMode": output_mode}
    settings |= {f"aggregate {one.output_name}": str(one) for one in bound}
    codecs = ColumnCodecs(
        settings=settings,
        drops_late=completion.key_time is not None,
        completes_in_batch=completion.is_append,
        adds_floats=accumulators.adds_floats,
    )
    places = range(len(definition.keys)) if combines else definition.keys
    operator = KeyedAggregates(accumulators, definition.key_schema, places, completion, codecs, takes_partials=combines)
    return AggregatePlan(operator, _plain(output), _time_mode(completion), definition, accumulators, combines)


def _named(name: str, aggregate: Any) -> Aggregate:
    if not isinstance(aggregate, Aggregate):
        raise ConfigurationError(
            f"agg takes aggregates such as n=statelog.Count(), not {name}={aggregate!r:.80}.",
            hint="Its other arguments are outputMode, ttl, combine, uid, parallelism, location, options, watermark.",
        )
    return aggregate.alias(name)


def _completion(definition: KeyedDefinition, output_mode: str, ttl: int | Ttl | None) -> Completion:
    if output_mode not in ("update", "append"):
        raise ConfigurationError(f"agg: outputMode is {output_mode!r}.", hint="It must be 'update' or 'append'.")
    lifetime = Ttl(ttl) if isinstance(ttl, int) else ttl
    if not isinstance(lifetime, Ttl | None):
        raise ConfigurationError(f"agg: ttl is {ttl!r:.80}.", hint="It must be milliseconds, or a statelog.Ttl.")
    key_time = definition.key_time if definition.is_streaming else None
    if key_time is not None and lifetime is not None:
        raise ConfigurationError(
            f"agg: a key is complete when the watermark passes its {definition.event_time!r}, so a ttl has no meaning.",
            hint="Leave ttl out, or group by other columns.",
        )
    if lifetime is not None and lifetime.renew_on_read:
        raise ConfigurationError("agg: renew_on_read has no meaning for aggregates.", hint="Each row renews its key.")
    if lifetime is not None and lifetime.domain is TimeDomain.EVENT and definition.event_time is None:
        raise ConfigurationError(
            "agg: the ttl is in event time, and the input has no watermark.",
            hint="Call withWatermark(column, delay) on the DataFrame before key_by, or pass watermark=.",
        )
    if not definition.is_streaming:
        return Completion()
    if output_mode == "append" and lifetime is None and key_time is None:
        raise ConfigurationError(
            "agg: in outputMode 'append' a key is returned once it is complete, and nothing says when that is.",
            hint="Give a ttl, the time after its last row; group by the column with the watermark; or use 'update'.",
        )
    return Completion(lifetime, key_time, output_mode == "append")


def _time_mode(completion: Completion) -> TimeMode:
    if completion.key_time is not None or (completion.ttl and completion.ttl.domain is TimeDomain.EVENT):
        return TimeMode.EVENT_TIME
    return TimeMode.PROCESSING_TIME if completion.has_timers else TimeMode.NONE


def _plain(schema: StructType) -> StructType:
    """The columns without their metadata, all nullable."""
    plain = StructType()
    for field in schema:
        plain = plain.add(field.name, field.dataType)
    return plain
