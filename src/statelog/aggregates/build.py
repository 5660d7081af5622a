"""Plans the aggregates of keys: checks the arguments, chooses the state, the clock and the step before the shuffle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from statelog.aggregates.accumulators import Reduction, bind_aggregates, column_place, column_types, resolved
from statelog.aggregates.combine import PartialAggregates
from statelog.aggregates.functions import Aggregate, require_comparable
from statelog.aggregates.operator import Completion, KeyedAggregates
from statelog.aggregates.rows import Deduplicate, LatestRow, TopRows
from statelog.convert.codecs import ColumnCodecs
from statelog.convert.times import TimeMode
from statelog.durations import Duration, in_milliseconds
from statelog.errors import ConfigurationError
from statelog.history.settings import AGGREGATE, COLUMN_TYPE
from statelog.numbers import checked_whole
from statelog.operators.event_time import EventTime
from statelog.runs.schema import TimeDomain
from statelog.runs.times import LAST_MS, Ttl


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
    is_case_sensitive: bool = True
    """Whether the session tells names of columns apart by case."""

    @property
    def others(self) -> list[int]:
        """The columns that are no grouping columns."""
        return [index for index in range(len(self.schema)) if index not in self.keys]

    @property
    def key_time(self) -> int | None:
        """The position in the key of the column with the watermark; None if no grouping column has one."""
        names = [self.schema.names[index] for index in self.keys]
        return names.index(self.event_time) if self.event_time in names else None


@dataclass(frozen=True)
class KeyedPlan:
    """An operator on columns, ready to be planned like any stateful processor."""

    operator: Any
    """A processor of columns, with its codecs."""
    output: StructType
    """The output columns."""
    time_mode: TimeMode
    step: Callable[[EventTime | None], PartialAggregates] | None = None
    """Makes the step before the shuffle, if there is one."""


def plan_aggregates(
    definition: KeyedDefinition,
    aggregates: Sequence[Aggregate],
    named: Mapping[str, Aggregate],
    *,
    output_mode: str,
    ttl: Duration | Ttl | None,
    combine: bool,
) -> KeyedPlan:
    """Plan the aggregates of each key; ConfigurationError if the arguments do not fit each other or the input."""
    bound = [
        resolved(aggregate, definition.schema, is_case_sensitive=definition.is_case_sensitive)
        for aggregate in [*aggregates, *(_named(name, aggregate) for name, aggregate in named.items())]
    ]
    accumulators = bind_aggregates(bound, definition.schema, ansi=definition.ansi)
    settings: dict[str, int | str] = {"results": "aggregates of keys"}
    settings |= {AGGREGATE + one.output_name: str(one) for one in bound}
    settings |= {COLUMN_TYPE + name: kind for name, kind in column_types(bound, definition.schema).items()}
    completion = _completion(definition, "agg", output_mode, ttl)
    return _planned(definition, "agg", accumulators, completion, settings, combine=combine)


def plan_latest(definition: KeyedDefinition, by: str, ttl: Duration | Ttl | None, *, combine: bool) -> KeyedPlan:
    """Plan the newest row of each key; raises ConfigurationError like :func:`plan_aggregates`."""
    place = _ordering_column(definition, "latest", by)
    others = definition.others
    rows = StructType([definition.schema[index] for index in others])
    reduction = LatestRow(_plain(rows), others, others.index(place))
    completion = _completion(definition, "latest", "update", ttl)
    settings = {"results": "newest rows", "aggregate latest": definition.schema.names[place]}
    return _planned(definition, "latest", reduction, completion, settings, combine=combine)


def plan_top(
    definition: KeyedDefinition, size: int, by: str, ttl: Duration | Ttl | None, *, combine: bool
) -> KeyedPlan:
    """Plan the greatest rows of each key; raises ConfigurationError like :func:`plan_aggregates`."""
    size = checked_whole(size, "top: n", 1)
    place = _ordering_column(definition, "top", by)
    columns = [place, *(index for index in definition.others if index != place)]
    reduction = TopRows(_plain(StructType([definition.schema[index] for index in columns])), columns, size)
    completion = _completion(definition, "top", "update", ttl)
    settings: dict[str, int | str] = {
        "results": "greatest rows",
        "aggregate top": f"{size} by {definition.schema.names[place]}",
    }
    return _planned(definition, "top", reduction, completion, settings, combine=combine)


def plan_deduplication(definition: KeyedDefinition, ttl: Duration | Ttl | None, delay_ms: int | None) -> KeyedPlan:
    """Plan the first row of each key; `delay_ms` is that of the watermark within which it is the only one."""
    if delay_ms is not None and ttl is not None:
        raise ConfigurationError("dedup: within the watermark the ttl is the watermark's delay.", hint="Leave ttl out.")
    lifetime = _lifetime(definition, "dedup", Ttl(max(1, delay_ms), "event") if delay_ms is not None else ttl)
    if lifetime is not None and not definition.is_streaming:
        lifetime = None
    codecs = ColumnCodecs(settings={"results": "first rows"}, drops_late=delay_ms is not None)
    is_event_time = lifetime is not None and lifetime.domain is TimeDomain.EVENT
    output = _plain(definition.schema)
    operator = Deduplicate(output, lifetime, codecs, lives_by_late_rows=is_event_time)
    return KeyedPlan(operator, output, TimeMode.EVENT_TIME if is_event_time else TimeMode.NONE)


def _planned(
    definition: KeyedDefinition,
    method: str,
    reduction: Reduction,
    completion: Completion,
    settings: Mapping[str, int | str],
    *,
    combine: bool,
) -> KeyedPlan:
    keys = [definition.schema[index] for index in definition.keys]
    output = StructType([*keys, *reduction.result.fields])
    doubled = [name for name in output.names if output.names.count(name) > 1]
    if doubled:
        raise ConfigurationError(
            f"{method}: two output columns are named {doubled[0]!r}: they are {', '.join(output.names)}.",
            hint="Name an aggregate with .alias(name), or as the argument's name; rename a column of the input.",
        )
    codecs = ColumnCodecs(
        settings={**settings, "outputMode": "append" if completion.is_append else "update"},
        drops_late=completion.key_time is not None,
        completes_in_batch=completion.is_append,
        adds_floats=reduction.adds_floats,
    )
    combines = combine and not reduction.depends_on_arrival
    places = range(len(definition.keys)) if combines else definition.keys
    operator = KeyedAggregates(reduction, definition.key_schema, places, completion, codecs, takes_partials=combines)

    def step(event_time: EventTime | None) -> PartialAggregates:
        return PartialAggregates(definition.schema, definition.keys, reduction, event_time)

    return KeyedPlan(operator, _plain(output), _time_mode(completion), step if combines else None)


def _ordering_column(definition: KeyedDefinition, method: str, by: str) -> int:
    """The place of the ordering column in the input."""
    others = [definition.schema.names[index] for index in definition.others]
    place = column_place(by, others, is_case_sensitive=definition.is_case_sensitive)
    if place is None:
        raise ConfigurationError(
            f"{method}: by is {by!r}, which is no column of the input besides the grouping columns.",
            hint=f"These columns are {', '.join(others) or 'none'}.",
        )
    require_comparable(definition.schema[others[place]].dataType, f"{method}(by={by!r})")
    return definition.others[place]


def _named(name: str, aggregate: Any) -> Aggregate:
    if not isinstance(aggregate, Aggregate):
        raise ConfigurationError(
            f"agg takes aggregates such as n=statelog.Count(), not {name}={aggregate!r:.80}.",
            hint="Its other arguments are outputMode, ttl, combine, uid, parallelism, location, options, watermark.",
        )
    return aggregate.alias(name)


def _completion(definition: KeyedDefinition, method: str, output_mode: str, ttl: Duration | Ttl | None) -> Completion:
    if output_mode not in ("update", "append"):
        raise ConfigurationError(f"{method}: outputMode is {output_mode!r}.", hint="It must be 'update' or 'append'.")
    lifetime = _lifetime(definition, method, ttl)
    key_time = definition.key_time if definition.is_streaming else None
    if key_time is not None and lifetime is not None:
        raise ConfigurationError(
            f"{method}: a key is complete when the watermark passes its {definition.event_time!r}, so a ttl has no"
            " meaning.",
            hint="Leave ttl out, or group by other columns.",
        )
    if not definition.is_streaming:
        return Completion()
    if output_mode == "append" and lifetime is None and key_time is None:
        raise ConfigurationError(
            f"{method}: in outputMode 'append' a key is returned once it is complete, and nothing says when that is.",
            hint="Give a ttl, the time after its last row; group by the column with the watermark; or use 'update'.",
        )
    return Completion(lifetime, key_time, output_mode == "append")


def _lifetime(definition: KeyedDefinition, method: str, ttl: object) -> Ttl | None:
    if ttl is None:
        return None
    lifetime = ttl if isinstance(ttl, Ttl) else Ttl(in_milliseconds(ttl, f"{method}: ttl", most=LAST_MS))
    if lifetime.renew_on_read:
        raise ConfigurationError(f"{method}: renew_on_read has no meaning: keys are read with rows only.")
    if lifetime.domain is TimeDomain.EVENT and definition.is_streaming and definition.event_time is None:
        raise ConfigurationError(
            f"{method}: the ttl is in event time, and the input has no watermark.",
            hint="Call withWatermark(column, delay) on the DataFrame before key_by, or pass watermark=.",
        )
    return lifetime


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
