"""Aggregates of keys of random streams, with crashes, restarts and repeated batches, against plain computations."""

from __future__ import annotations

import datetime
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import statelog
from statelog import Step, Ttl
from statelog.aggregates.build import AggregatePlan, KeyedDefinition, plan_aggregates
from statelog.convert.types import key_schema
from statelog.testing import Harness
from statelog.testing.arguments import read_schema

INPUT = "user string, time timestamp, n long, x double"
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
AGGREGATES = {
    "rows": statelog.Count(),
    "total": statelog.Sum("n"),
    "least": statelog.Min("x"),
    "newest": statelog.Max("time"),
    "first": statelog.First("n"),
    "last": statelog.Last("n", by="time"),
    "all": statelog.Collect("n"),
    "distinct": statelog.CountDistinct("x"),
}


def instant(time_ms: int | None) -> datetime.datetime | None:
    return None if time_ms is None else EPOCH + datetime.timedelta(milliseconds=time_ms)


def planned(
    keys: list[str],
    *,
    output_mode: str = "update",
    ttl: int | Ttl | None = None,
    event_time: str | None = None,
    aggregates: dict[str, Any] | None = None,
    combine: bool = False,
) -> AggregatePlan:
    schema = read_schema(INPUT, "input")
    definition = KeyedDefinition(
        schema,
        [schema.names.index(name) for name in keys],
        key_schema([schema[name] for name in keys]),
        event_time,
        is_streaming=True,
        ansi=True,
    )
    named = AGGREGATES if aggregates is None else aggregates
    return plan_aggregates(definition, [], named, output_mode=output_mode, ttl=ttl, combine=combine)


def harness(plan: AggregatePlan, keys: list[str], **more: Any) -> Harness:
    return Harness(plan.operator, input=INPUT, output=plan.output, keys=keys, timeMode=plan.time_mode, **more)


@dataclass(frozen=True)
class Event:
    user: str | None
    time_ms: int | None
    n: int | None
    x: float | None

    @property
    def row(self) -> tuple[Any, ...]:
        return (self.user, instant(self.time_ms), self.n, self.x)


def values(events: list[Event]) -> tuple[Any, ...]:
    """What :data:`AGGREGATES` are of events in order of arrival."""
    numbers = [event.n for event in events if event.n is not None]
    xs = [event.x for event in events if event.x is not None]
    times = [event.time_ms for event in events if event.time_ms is not None]
    ordered = [event for event in reversed(events) if event.time_ms is not None]
    last = max(ordered, key=lambda event: event.time_ms or 0).n if ordered else None
    return (
        len(events),
        sum(numbers) if numbers else None,
        min(xs, default=None),
        local(max(times, default=None)),
        events[0].n,
        last,
        sorted(numbers),
        len(set(xs)),
    )


def local(time_ms: int | None) -> datetime.datetime | None:
    """As Spark's collect() returns an instant: local time."""
    at = instant(time_ms)
    return None if at is None else at.astimezone().replace(tzinfo=None)


def found(rows: list[Any]) -> dict[Any, Any]:
    """The output by key, collected values sorted, as the rows of a batch have no order."""
    output: dict[Any, Any] = {}
    for row in rows:
        key, held = tuple(row[:-8]), [sorted(value) if isinstance(value, list) else value for value in row[-8:]]
        assert key not in output
        output[key] = tuple(held)
    return output


@dataclass(frozen=True)
class Batch:
    """Rows, and what happens: the clock's advance, a crash, a restart before, a repetition after."""

    events: list[Event]
    advance_ms: int
    crash: tuple[Step, int] | None
    restart: tuple[int, bool] | None
    repeats: bool


EVENTS = st.builds(
    Event,
    st.sampled_from(["a", "b", "c", None]),
    st.none() | st.integers(1, 12),
    st.none() | st.integers(-5, 5),
    st.none() | st.sampled_from([0.0, 1.5, -2.0]),
)
STORIES = st.lists(
    st.builds(
        Batch,
        st.lists(EVENTS, max_size=6),
        st.integers(0, 4),
        st.none() | st.tuples(st.sampled_from(list(Step)), st.integers(0, 1)),
        st.none() | st.tuples(st.integers(1, 4), st.booleans()),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@dataclass
class Model:
    """Keeps the events of each key that is not forgotten."""

    held: dict[Any, list[Event]] = field(default_factory=lambda: defaultdict(list))
    ends_ms: dict[Any, int] = field(default_factory=dict)

    def take(self, key: Any, event: Event) -> None:
        self.held[key].append(event)

    def forget(self, now_ms: int) -> dict[Any, Any]:
        """Forget the keys that are complete; returns their values."""
        over = [key for key, end_ms in self.ends_ms.items() if end_ms <= now_ms]
        for key in over:
            del self.ends_ms[key]
        return {key: values(self.held.pop(key)) for key in over}


def run(query: Harness, story: list[Batch], model: Any) -> None:
    """Tell the story to a query, and compare each batch's output with the model's."""
    for batch in story:
        if batch.restart is not None:
            query.restart(batch.restart[0], keepLocal=batch.restart[1])
        if batch.crash is not None:
            query.crash(batch.crash[0], batch.crash[1])
        assert found(model(query, batch)[0]) == model.expected
        if batch.repeats:
            query.repeatBatch()


class Updates:
    """Without an end, or with a TTL in processing time: changed keys come with each batch."""

    def __init__(self, ttl_ms: int | None) -> None:
        self._ttl_ms = ttl_ms
        self._now_ms = 0
        self._model = Model()
        self.expected: dict[Any, Any] = {}

    def __call__(self, query: Harness, batch: Batch) -> Any:
        self._now_ms += batch.advance_ms
        self._model.forget(self._now_ms)
        changed = {(event.user,) for event in batch.events}
        for event in batch.events:
            self._model.take((event.user,), event)
        for key in changed:
            if self._ttl_ms is not None:
                self._model.ends_ms[key] = self._now_ms + self._ttl_ms
        self.expected = {key: values(self._model.held[key]) for key in changed}
        return query.push([event.row for event in batch.events], self._now_ms), None


class Appends:
    """A key comes once, when its time after the last row is over."""

    def __init__(self, ttl_ms: int) -> None:
        self._ttl_ms = ttl_ms
        self._now_ms = 0
        self._model = Model()
        self.expected: dict[Any, Any] = {}

    def __call__(self, query: Harness, batch: Batch) -> Any:
        self._now_ms += batch.advance_ms
        for event in batch.events:
            self._model.take((event.user,), event)
            self._model.ends_ms[(event.user,)] = self._now_ms + self._ttl_ms
        self.expected = self._model.forget(self._now_ms)
        return query.push([event.row for event in batch.events], self._now_ms), None


class ByTime:
    """Grouped by the column with the watermark, which advances in batches without rows: late keys do not count."""

    def __init__(self, *, appends: bool) -> None:
        self._appends = appends
        self._watermark_ms = 0
        self._model = Model()
        self.expected: dict[Any, Any] = {}

    def __call__(self, query: Harness, batch: Batch) -> Any:
        changed = set()
        for event in batch.events:
            if event.time_ms is None or event.time_ms > self._watermark_ms:
                key = (event.user, local(event.time_ms))
                self._model.take(key, event)
                changed.add(key)
                if event.time_ms is not None:
                    self._model.ends_ms[key] = event.time_ms
        updates = {key: values(self._model.held[key]) for key in changed}
        output = query.push([event.row for event in batch.events])
        assert found(output) == ({} if self._appends else updates)
        self._watermark_ms += batch.advance_ms
        over = self._model.forget(self._watermark_ms)
        self.expected = over if self._appends else {}
        return query.advanceWatermark(self._watermark_ms), None


@settings(max_examples=60)
@given(STORIES, st.none() | st.integers(1, 6), st.sampled_from([None, 2]))
def test_updates(story: list[Batch], ttl_ms: int | None, few: int | None) -> None:
    plan = planned(["user"], ttl=ttl_ms)
    hashes = None if few is None else (lambda key: len(str(key)) % few)
    with harness(plan, ["user"], keyHash=hashes) as query:
        run(query, story, Updates(ttl_ms))


@settings(max_examples=60)
@given(STORIES, st.integers(1, 6))
def test_appends(story: list[Batch], ttl_ms: int) -> None:
    plan = planned(["user"], ttl=ttl_ms, output_mode="append")
    with harness(plan, ["user"]) as query:
        run(query, story, Appends(ttl_ms))


@settings(max_examples=60)
@given(STORIES, st.booleans())
def test_keys_with_a_time(story: list[Batch], appends: bool) -> None:
    plan = planned(["user", "time"], output_mode="append" if appends else "update", event_time="time")
    with harness(plan, ["user", "time"], eventTime="time") as query:
        run(query, story, ByTime(appends=appends))


class EventTtl(Updates):
    """A TTL in event time; the watermark advances in batches without rows."""

    def __init__(self, ttl_ms: int, *, appends: bool) -> None:
        super().__init__(ttl_ms)
        self._appends = appends
        self._lasts_ms: dict[Any, int] = {}

    def __call__(self, query: Harness, batch: Batch) -> Any:
        assert self._ttl_ms is not None
        if not self._appends:
            self._model.forget(self._now_ms)
        changed: dict[Any, list[int]] = {}
        for event in batch.events:
            self._model.take((event.user,), event)
            changed.setdefault((event.user,), []).append(0 if event.time_ms is None else event.time_ms)
        for key, times_ms in changed.items():
            newest = max(self._now_ms, *times_ms) + self._ttl_ms
            if any(times_ms) or self._now_ms or self._appends:
                kept = self._model.ends_ms.get(key, newest) if self._appends else newest
                self._model.ends_ms[key] = max(kept, newest)
            else:
                self._model.ends_ms.pop(key, None)  # neither a row's time nor a watermark yet: it stays
        updates = {key: values(self._model.held[key]) for key in changed}
        over = self._model.forget(self._now_ms) if self._appends else {}
        output = query.push([event.row for event in batch.events])
        assert found(output) == (over if self._appends else updates)
        self._now_ms += batch.advance_ms
        self.expected = self._model.forget(self._now_ms)
        if not self._appends:
            self.expected = {}
        return query.advanceWatermark(self._now_ms), None


@settings(max_examples=60)
@given(STORIES, st.integers(1, 6), st.booleans())
def test_a_ttl_in_event_time(story: list[Batch], ttl_ms: int, appends: bool) -> None:
    plan = planned(["user"], ttl=Ttl(ttl_ms, "event"), output_mode="append" if appends else "update", event_time="time")
    with harness(plan, ["user"], eventTime="time") as query:
        run(query, story, EventTtl(ttl_ms, appends=appends))
