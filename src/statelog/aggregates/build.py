"""Plans the aggregates of keys: checks, state and clock, and partial aggregates before the shuffle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import LongType, StructField, StructType

from statelog.aggregates.accumulators import Reduction, bind_aggregates, column_place, column_types, resolved
from statelog.aggregates.functions import Aggregate, require_comparable
from statelog.aggregates.groups import Groups
from statelog.aggregates.kernels import Columns
from statelog.aggregates.operator import Completion, KeyedAggregates, key_named
from statelog.aggregates.rows import Deduplicate, LatestRow, TopRows
from statelog.convert.codecs import ColumnCodecs
from statelog.convert.times import TimeMode
from statelog.errors import ConfigurationError
from statelog.history.settings import AGGREGATE, COLUMN_TYPE
from statelog.numbers import Duration, checked_whole, in_milliseconds
from statelog.operators.event_time import EventTime
from statelog.operators.keyed.indexing import IndexedRows, index_rows
from statelog.runs.byte_slices import BUDGET, cut_rows
from statelog.runs.key_groups import Hashes
from statelog.runs.schema import TimeDomain
from statelog.runs.times import LAST_MS, NO_TIME_MS, Ttl


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
    """Whether the session distinguishes names of columns by case."""

    @property
    def others(self) -> list[int]:
        """The columns that are not grouping columns."""
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


def plan_latest(
    definition: KeyedDefinition, by: str, ttl: Duration | Ttl | None, *, combine: bool, drops_late: bool = False
) -> KeyedPlan:
    """Plan the newest row of each key; raises ConfigurationError like :func:`plan_aggregates`.

    `drops_late` says whether late rows are dropped, because a row that is returned for them would be late, too.
    """
    place = _ordering_column(definition, "latest", by)
    others = definition.others
    rows = StructType([definition.schema[index] for index in others])
    reduction = LatestRow(_plain(rows), others, others.index(place))
    completion = _completion(definition, "latest", "update", ttl)
    settings = {"results": "newest rows", "aggregate latest": definition.schema.names[place]}
    plan = _planned(definition, "latest", reduction, completion, settings, combine=combine)
    return _without_late_rows(plan) if drops_late and definition.is_streaming else plan


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


def plan_deduplication(
    definition: KeyedDefinition, ttl: Duration | Ttl | None, delay_ms: int | None, *, drops_late: bool = False
) -> KeyedPlan:
    """Plan the first row of each key; `delay_ms` is that of the watermark within which it is the only one.

    `drops_late` is that of :func:`plan_latest`; within the watermark, late rows are always dropped.
    """
    if delay_ms is not None and ttl is not None:
        raise ConfigurationError("dedup: with within_watermark, the ttl is the watermark's delay.", hint="Omit ttl.")
    lifetime = _lifetime(definition, "dedup", Ttl(max(1, delay_ms), "event") if delay_ms is not None else ttl)
    if lifetime is not None and not definition.is_streaming:
        lifetime = None
    codecs = ColumnCodecs(settings={"results": "first rows"}, drops_late=delay_ms is not None)
    is_event_time = lifetime is not None and lifetime.domain is TimeDomain.EVENT
    output = _plain(definition.schema)
    operator = Deduplicate(output, lifetime, codecs, lives_by_late_rows=is_event_time)
    plan = KeyedPlan(operator, output, TimeMode.EVENT_TIME if is_event_time else TimeMode.NONE)
    return _without_late_rows(plan) if drops_late and definition.is_streaming else plan


def _without_late_rows(plan: KeyedPlan) -> KeyedPlan:
    """The plan in event time, so that late rows are dropped before the operator sees them."""
    codecs: ColumnCodecs = plan.operator.codecs
    # The state of an operator without timers does not depend on this: a later start may keep late rows again.
    settings: dict[str, int | str] = {"timeMode": str(plan.time_mode), **codecs.settings}
    plan.operator.codecs = replace(codecs, settings=settings, drops_late=True)
    return replace(plan, time_mode=TimeMode.EVENT_TIME)


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
            f"{method}: two output columns are named {doubled[0]!r}; the columns are {', '.join(output.names)}.",
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
            f"{method}: by is {by!r}, which is not a column of the input besides the grouping columns.",
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
            " effect.",
            hint="Omit ttl, or group by other columns.",
        )
    if not definition.is_streaming:
        return Completion()
    if output_mode == "append" and lifetime is None and key_time is None:
        raise ConfigurationError(
            f"{method}: in outputMode 'append', a key is returned when it is complete, but nothing says when that is.",
            hint="Pass a ttl, the time after its last row; group by the column with the watermark; or use 'update'.",
        )
    return Completion(lifetime, key_time, output_mode == "append")


def _lifetime(definition: KeyedDefinition, method: str, ttl: object) -> Ttl | None:
    if ttl is None:
        return None
    lifetime = ttl if isinstance(ttl, Ttl) else Ttl(in_milliseconds(ttl, f"{method}: ttl", most=LAST_MS))
    if lifetime.renew_on_read:
        raise ConfigurationError(f"{method}: renew_on_read has no effect: keys are read with rows only.")
    if lifetime.domain is TimeDomain.EVENT and definition.is_streaming and definition.event_time is None:
        raise ConfigurationError(
            f"{method}: the ttl is in event time, but the input has no watermark.",
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


_SAMPLE: Final = 16
"""One in so many key hashes, or rows, is looked at."""
_HOT: Final = 0.01
_WORTH_IT: Final = 0.3
"""Rows are reduced if they have at most this share of distinct keys. At 0.43, of 2,000,000 rows, a batch took an eighth
longer than one whose rows were passed on."""
_SKEWED: Final = 0.1
"""Rows are reduced, too, if the hottest keys have more of them: one subtask would get them all."""
_OUTPUT_ROWS: Final = 65_536


@dataclass(frozen=True)
class PartialAggregates:
    """Reduces the rows of a task by key; picklable.

    The input has the columns `columns` and then the key hash. The output has the grouping columns, with an event time
    the newest one and the number of rows, the accumulators, and the key hash.
    """

    columns: StructType
    keys: Sequence[int]
    """The grouping columns."""
    reduction: Reduction
    event_time: EventTime | None
    """The event time of the input."""

    @property
    def output(self) -> StructType:
        """The output columns without the key hash; their names are arbitrary."""
        fields = [self.columns[index] for index in self.keys]
        if self.event_time is not None:
            fields += [self.columns[self.event_time.column], StructField("rows", LongType())]
        fields += self.reduction.schema.fields
        return StructType([StructField(f"p{index}", field.dataType) for index, field in enumerate(fields)])

    @property
    def output_keys(self) -> list[int]:
        """The grouping columns in the output."""
        return list(range(len(self.keys)))

    @property
    def output_event_time(self) -> EventTime | None:
        """The event time of the output."""
        count = len(self.keys)
        return None if self.event_time is None else replace(self.event_time, column=count, rows_column=count + 1)

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Reduce the rows of a task, in parts of bounded size.

        The first part decides whether this is worthwhile. So a retry on the same rows returns the same.
        """
        part: list[pa.RecordBatch] = []
        size_bytes, combines = 0, None
        for batch in batches:
            part.append(batch)
            size_bytes += batch.nbytes
            if size_bytes >= BUDGET.slice_bytes:
                combines = _is_worth_it(_hashes(part)) if combines is None else combines
                yield from self._partials(part, combines=combines)
                part, size_bytes = [], 0
        if sum(batch.num_rows for batch in part):
            yield from self._partials(part, combines=_is_worth_it(_hashes(part)) if combines is None else combines)

    def _partials(self, part: Sequence[pa.RecordBatch], *, combines: bool) -> Iterator[pa.RecordBatch]:
        rows = [batch for batch in part if batch.num_rows]
        if not combines:
            for batch in rows:
                yield self._made(
                    [batch.column(index) for index in self.keys],
                    None if self.event_time is None else batch.column(self.event_time.column),
                    np.ones(batch.num_rows, np.int64),
                    self._lifted(batch),
                    batch.column(batch.num_columns - 1),
                )
            return
        for indexed in index_rows(rows, _hashes(rows), self.keys, BUDGET):
            for reduced in self._reduced(indexed):
                yield from cut_rows(reduced, BUDGET.slice_bytes, _OUTPUT_ROWS)

    def _reduced(self, rows: IndexedRows) -> Iterator[pa.RecordBatch]:
        """The partial aggregates of keys: one for each, and more for a key with more rows than fit into a batch."""
        start, keys = 0, rows.first_of_keys(self.keys)
        for batch in rows.rows:
            groups = Groups(rows.key_index[start : start + batch.num_rows], len(rows.keys))
            start += batch.num_rows
            with key_named(lambda group: tuple(column[group].as_py() for column in keys)):
                held = self.reduction.reduce(self._lifted(batch), groups)
            yield self._made(
                keys,
                None if self.event_time is None else _newest(batch, self.event_time, groups),
                groups.sizes,
                held,
                pa.array(rows.keys.hashes.view(np.int64)),
            )

    def _lifted(self, rows: pa.RecordBatch) -> Columns:
        return self.reduction.lift(rows, pa.array(np.zeros(rows.num_rows, np.int64)))

    def _made(
        self,
        keys: Columns,
        time: pa.Array | None,
        rows: npt.NDArray[np.int64],
        held: Columns,
        hashes: pa.Array,
    ) -> pa.RecordBatch:
        times = [] if time is None else [time, pa.array(rows)]
        columns = [*keys, *times, *held, hashes]
        return pa.RecordBatch.from_arrays(columns, names=[f"p{index}" for index in range(len(columns))])


def _hashes(rows: Sequence[pa.RecordBatch]) -> Hashes:
    columns = [batch.column(batch.num_columns - 1).to_numpy() for batch in rows]
    hashes: Hashes = np.concatenate(columns).view(np.uint64)
    return hashes


def _newest(rows: pa.RecordBatch, event_time: EventTime, groups: Groups) -> pa.Array:
    """The event time column's value in the newest row of each group."""
    times_us = event_time.times_us(rows).fill_null(NO_TIME_MS).to_numpy()
    newest = np.full(groups.count, NO_TIME_MS)
    np.maximum.at(newest, groups.index, times_us)
    found, _ = groups.first_where(times_us == newest[groups.index])
    return rows.column(event_time.column).take(pa.array(found))


def _is_worth_it(hashes: Hashes) -> bool:
    """Whether rows have so few distinct keys that reducing them costs less than it saves, from two samples.

    A sample of the keys, all rows of one in sixteen, shows how many rows a key has; a sample of the rows, always the
    same, finds the hottest keys, which the first may miss.
    """
    of_keys = hashes[hashes % np.uint64(_SAMPLE) == 0]
    if len(of_keys) < _SAMPLE:
        return True
    distinct = len(np.unique(of_keys)) / len(of_keys)
    rows = np.random.default_rng(0).integers(0, len(hashes), len(hashes) // _SAMPLE)
    counts = np.unique(hashes[rows], return_counts=True)[1]
    share = counts / counts.sum()
    hot = share[share > _HOT].sum()
    return bool(hot > _SKEWED or distinct * (1 - hot) < _WORTH_IT)
