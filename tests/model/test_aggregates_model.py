"""Aggregates of keys of random streams, with crashes, restarts and repeated batches, against plain computations."""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from statelog import Options, Step, Ttl, Watermark
from statelog.aggregates.build import (
    KeyedPlan,
    plan_deduplication,
    plan_latest,
    plan_top,
)
from statelog.testing import Harness
from tests.model.aggregates_model_support import AGGREGATES, INPUT, defined, planned
from tests.model.query_engine import DRIVER_STEPS

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def instant(time_ms: int | None) -> datetime.datetime | None:
    return None if time_ms is None else EPOCH + datetime.timedelta(milliseconds=time_ms)


def harness(plan: KeyedPlan, keys: list[str], **more: Any) -> Harness:
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
        len(set(xs)),
        [sorted(numbers)[(len(numbers) - 1) // 2]] if numbers else None,
    )


def local(time_ms: int | None) -> datetime.datetime | None:
    """As Spark's collect() returns an instant: local time."""
    at = instant(time_ms)
    return None if at is None else at.astimezone().replace(tzinfo=None)


def found(rows: list[Any]) -> dict[Any, Any]:
    """The output by key, collected values sorted, as the rows of a batch have no order."""
    output: dict[Any, Any] = {}
    for row in rows:
        width = len(AGGREGATES)
        key, held = tuple(row[:-width]), [sorted(value) if isinstance(value, list) else value for value in row[-width:]]
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
            step, subtask = batch.crash
            query.crash(step, None if step in DRIVER_STEPS else subtask)
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


@settings(max_examples=25)
@given(
    STORIES,
    st.none() | st.integers(1, 6),
    st.sampled_from([None, 2]),
    st.sampled_from(["runs", "memory", "rocksdb"]),
)
def test_updates(story: list[Batch], ttl_ms: int | None, few: int | None, table: Any) -> None:
    plan = planned(["user"], ttl=ttl_ms)
    hashes = None if few is None else (lambda key: len(str(key)) % few)
    with harness(plan, ["user"], keyHash=hashes, options=Options(table=table)) as query:
        run(query, story, Updates(ttl_ms))


@settings(max_examples=25)
@given(STORIES, st.integers(1, 6))
def test_appends(story: list[Batch], ttl_ms: int) -> None:
    plan = planned(["user"], ttl=ttl_ms, output_mode="append")
    with harness(plan, ["user"]) as query:
        run(query, story, Appends(ttl_ms))


@settings(max_examples=25)
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
            # Without a row's time and a watermark so far, a key that is updated stays.
            if any(times_ms) or self._now_ms or self._appends:
                newest = max(self._now_ms, *times_ms) + self._ttl_ms
                self._model.ends_ms[key] = max(self._model.ends_ms.get(key, newest), newest)
        updates = {key: values(self._model.held[key]) for key in changed}
        over = self._model.forget(self._now_ms) if self._appends else {}
        output = query.push([event.row for event in batch.events])
        assert found(output) == (over if self._appends else updates)
        self._now_ms += batch.advance_ms
        self.expected = self._model.forget(self._now_ms)
        if not self._appends:
            self.expected = {}
        return query.advanceWatermark(self._now_ms), None


LATE_ROW = [
    Batch([Event("a", 9, None, None)], 0, None, None, False),
    Batch([Event("a", 2, None, None)], 4, None, (2, False), False),
    Batch([Event("a", 5, None, None)], 5, None, None, False),
    Batch([Event("a", 12, None, None)], 4, None, None, False),
]
ROW_WITHOUT_TIME = [
    Batch([Event("a", 1, None, None)], 0, None, None, False),
    Batch([Event("a", None, None, None)], 1, None, None, False),
]


@settings(max_examples=25)
@given(STORIES, st.integers(1, 6), st.booleans())
@example(ROW_WITHOUT_TIME, 1, True)
@example(LATE_ROW, 1, False)
@example(LATE_ROW, 1, True)
def test_a_ttl_in_event_time(story: list[Batch], ttl_ms: int, appends: bool) -> None:
    plan = planned(["user"], ttl=Ttl(ttl_ms, "event"), output_mode="append" if appends else "update", event_time="time")
    with harness(plan, ["user"], eventTime="time") as query:
        run(query, story, EventTtl(ttl_ms, appends=appends))


# ---- Rows of keys ----


def rows_of(output: list[Any]) -> list[tuple[Any, ...]]:
    return sorted((tuple(row) for row in output), key=repr)


class Rows:
    """What comes of each key that has rows in a batch, from all its rows that are not forgotten."""

    def __init__(self, of_key: Callable[[list[Event]], list[tuple[Any, ...]]], ttl_ms: int | None) -> None:
        self._of_key = of_key
        self._ttl_ms = ttl_ms
        self._now_ms = 0
        self._model = Model()

    def check(self, query: Harness, batch: Batch) -> None:
        self._now_ms += batch.advance_ms
        self._model.forget(self._now_ms)
        for event in batch.events:
            self._model.take(event.user, event)
            if self._ttl_ms is not None:
                self._model.ends_ms[event.user] = self._now_ms + self._ttl_ms
        expected = [
            row for user in {event.user for event in batch.events} for row in self._of_key(self._model.held[user])
        ]
        output = query.push([event.row for event in batch.events], self._now_ms)
        assert rows_of(output) == sorted(expected, key=repr)


def tell(query: Harness, story: list[Batch], check: Callable[[Harness, Batch], None]) -> None:
    for batch in story:
        if batch.restart is not None:
            query.restart(batch.restart[0], keepLocal=batch.restart[1])
        if batch.crash is not None:
            step, subtask = batch.crash
            query.crash(step, None if step in DRIVER_STEPS else subtask)
        check(query, batch)
        if batch.repeats:
            query.repeatBatch()


def order(event: Event) -> int:
    return -1 if event.time_ms is None else event.time_ms


def newest(events: list[Event]) -> list[tuple[Any, ...]]:
    event = max(reversed(events), key=order)
    return [(event.user, local(event.time_ms), event.n, event.x)]


def greatest_two(events: list[Event]) -> list[tuple[Any, ...]]:
    best = sorted(events, key=lambda event: -order(event))[:2]
    return [(event.user, rank, local(event.time_ms), event.n, event.x) for rank, event in enumerate(best, 1)]


@settings(max_examples=20)
@given(STORIES, st.none() | st.integers(1, 6))
def test_the_newest_row(story: list[Batch], ttl_ms: int | None) -> None:
    plan = plan_latest(defined(["user"]), "time", ttl_ms, combine=False)
    with harness(plan, ["user"]) as query:
        tell(query, story, Rows(newest, ttl_ms).check)


@settings(max_examples=20)
@given(STORIES, st.none() | st.integers(1, 6))
def test_the_greatest_rows(story: list[Batch], ttl_ms: int | None) -> None:
    plan = plan_top(defined(["user"]), 2, "time", ttl_ms, combine=False)
    with harness(plan, ["user"]) as query:
        tell(query, story, Rows(greatest_two, ttl_ms).check)


@settings(max_examples=20)
@given(STORIES, st.none() | st.integers(1, 6))
def test_the_first_row(story: list[Batch], ttl_ms: int | None) -> None:
    now_ms = 0
    ends_ms: dict[Any, int | None] = {}

    def check(query: Harness, batch: Batch) -> None:
        nonlocal now_ms
        now_ms += batch.advance_ms
        expected = []
        for event in batch.events:
            end_ms = ends_ms.get(event.user, -1)
            if end_ms is not None and end_ms <= now_ms:
                expected.append((event.user, local(event.time_ms), event.n, event.x))
                ends_ms[event.user] = None if ttl_ms is None else now_ms + ttl_ms
        assert rows_of(query.push([event.row for event in batch.events], now_ms)) == sorted(expected, key=repr)

    with harness(plan_deduplication(defined(["user"]), ttl_ms, None), ["user"]) as query:
        tell(query, story, check)


@settings(max_examples=100)
@given(STORIES, st.integers(0, 4))
def test_the_first_row_within_the_watermark(story: list[Batch], delay_ms: int) -> None:
    """As Spark: rows up to the watermark of the batch before are late, and until then a key is remembered."""
    watermark_ms = late_ms = newest_ms = NEVER_BEFORE
    ends_ms: dict[Any, int] = {}

    def check(query: Harness, batch: Batch) -> None:
        nonlocal watermark_ms, late_ms, newest_ms
        late_ms, watermark_ms = watermark_ms, newest_ms - delay_ms
        in_time = [event for event in batch.events if event.time_ms is None or event.time_ms > late_ms]
        for user in [user for user, end_ms in ends_ms.items() if end_ms <= late_ms]:
            del ends_ms[user]
        expected = []
        for event in in_time:
            if event.user not in ends_ms:
                expected.append((event.user, local(event.time_ms), event.n, event.x))
                times_ms = [one.time_ms for one in in_time if one.user == event.user and one.time_ms is not None]
                newest = max([watermark_ms, *times_ms])
                ends_ms[event.user] = newest + max(1, delay_ms) if times_ms or watermark_ms > 0 else NEVER
        assert rows_of(query.push([event.row for event in batch.events])) == sorted(expected, key=repr)
        newest_ms = max([newest_ms, *(event.time_ms for event in batch.events if event.time_ms is not None)])

    plan = plan_deduplication(defined(["user"], "time"), None, delay_ms)
    with harness(plan, ["user"], watermark=Watermark("time", delay_ms)) as query:
        tell(query, story, check)


NEVER = 1 << 60
NEVER_BEFORE = -NEVER
