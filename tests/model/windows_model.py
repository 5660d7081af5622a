"""What windows must return, computed from all events at once; and a query with windows in the harness."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Row

import statelog
from statelog import CountWindows, SessionWindows, SlidingWindows
from statelog.spark.ddl import parse_ddl
from statelog.spark.times import TimeMode
from statelog.testing import Harness
from statelog.windows.definition import WindowDefinition, WindowPlan

Window = tuple[int, int] | None
INPUT = "user string, time timestamp, n long"
BEFORE_ALL = -(1 << 63)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def instant(time_ms: int | None) -> datetime.datetime | None:
    return None if time_ms is None else _EPOCH + datetime.timedelta(milliseconds=time_ms)


@dataclass(frozen=True)
class Event:
    """A row; `n` is its place in the order of arrival."""

    user: str | None
    time_ms: int | None
    n: int


@dataclass(frozen=True)
class Batch:
    """Rows, and what windows are complete: up to `now_ms` in this batch, and up to `before_ms` in the one before."""

    events: list[Event]
    now_ms: int
    before_ms: int


@dataclass(frozen=True)
class Returned:
    """A window as it is returned: its key, bounds and rows in order of time."""

    user: str | None
    window: Window
    events: tuple[Event, ...]


@dataclass
class Answer:
    """What must come of a batch."""

    returned: list[Returned]
    late: list[Event]


def answers(batches: Sequence[Batch], windows: statelog.CountWindows | Any, lateness_ms: int) -> list[Answer]:
    """What must come of each batch."""
    if isinstance(windows, CountWindows):
        return _counted(batches, windows.size)
    if isinstance(windows, SessionWindows):
        return _sessions(batches, windows.gap_ms, lateness_ms)
    slide_ms = windows.slide_ms if isinstance(windows, SlidingWindows) else windows.size_ms
    return _timed(batches, windows.size_ms, slide_ms, windows.offset_ms, lateness_ms)


def _timed(batches: Sequence[Batch], size: int, slide: int, offset: int, lateness: int) -> list[Answer]:
    """Look at every window that could have a row, and ask in which batches it is returned with what."""
    answer = [Answer([], []) for _ in batches]
    times = [event.time_ms for batch in batches for event in batch.events if event.time_ms is not None]
    users = {event.user for batch in batches for event in batch.events}
    starts = sorted({start for time in times for start in range(time - size + 1, time + 1)})
    all_windows = [(start, start + size) for start in starts if (start - offset) % slide == 0]
    for user in users:
        for start, end in all_windows:
            taken: list[Event] = []
            for number, batch in enumerate(batches):
                new = [
                    event
                    for event in batch.events
                    if event.user == user and event.time_ms is not None and start <= event.time_ms < end
                ]
                is_open = batch.before_ms < end + lateness
                taken += new if is_open else []
                is_complete_now = batch.before_ms < end <= batch.now_ms
                is_updated = batch.before_ms >= end and is_open and new
                if taken and (is_complete_now or is_updated):
                    answer[number].returned.append(Returned(user, (start, end), _by_time(taken)))
    for number, batch in enumerate(batches):
        for event in batch.events:
            ends = [end for start, end in all_windows if event.time_ms is not None and start <= event.time_ms < end]
            if event.time_ms is None or (ends and all(end + lateness <= batch.before_ms for end in ends)):
                answer[number].late.append(event)
    return answer


def _sessions(batches: Sequence[Batch], gap: int, lateness: int) -> list[Answer]:
    """Put all rows that count together anew in every batch."""
    answer: list[Answer] = []
    live: list[Event] = []
    for batch in batches:
        late = [event for event in batch.events if event.time_ms is None]
        returned: list[Returned] = []
        new = {event for event in batch.events if event.time_ms is not None}
        kept: list[Event] = []
        for user in {event.user for event in [*live, *new]}:
            rows = sorted((event for event in [*live, *new] if event.user == user), key=_time_of)
            for session in _apart(rows, gap):
                end = _time_of(session[-1])[0] + gap
                fresh = [event for event in session if event in new]
                if fresh and end + lateness <= batch.before_ms:
                    late += fresh
                    continue
                if batch.before_ms < end <= batch.now_ms or (fresh and end <= batch.before_ms):
                    returned.append(Returned(user, (_time_of(session[0])[0], end), tuple(session)))
                if end + lateness > batch.now_ms:
                    kept += session
        live = kept
        answer.append(Answer(returned, late))
    return answer


def _apart(rows: list[Event], gap: int) -> Iterator[list[Event]]:
    session: list[Event] = []
    for row in rows:
        if session and _time_of(row)[0] - _time_of(session[-1])[0] > gap:
            yield session
            session = []
        session.append(row)
    if session:
        yield session


def _counted(batches: Sequence[Batch], size: int) -> list[Answer]:
    answer: list[Answer] = []
    all_before: list[Event] = []
    for batch in batches:
        returned: list[Returned] = []
        for user in {event.user for event in batch.events}:
            before = sum(event.user == user for event in all_before)
            rows = [event for event in [*all_before, *batch.events] if event.user == user]
            for first in range(before // size * size, len(rows) - size + 1, size):
                returned.append(Returned(user, None, tuple(rows[first : first + size])))
        all_before += batch.events
        answer.append(Answer(returned, []))
    return answer


def _time_of(event: Event) -> tuple[int, int]:
    assert event.time_ms is not None
    return event.time_ms, event.n


def _by_time(events: list[Event]) -> tuple[Event, ...]:
    return tuple(sorted(events, key=_time_of))


# ---- The operators ----


class Rows(statelog.WindowProcessor):
    """Returns the rows of a window, and how many windows its key has had."""

    def init(self, handle: Any) -> None:
        self._windows = handle.getValueState("windows", "count long")

    def process(self, key: Any, window: Any, rows: Any, context: Any) -> Iterator[Row]:
        (count,) = self._windows.get() or (0,)
        self._windows.update((count + 1,))
        held = list(rows)
        assert all(row.user == key[0] for row in held)
        yield Row(
            user=key[0],
            start=None if window is None else window.start_ms,
            end=None if window is None else window.end_ms,
            rows=[row.n for row in held],
            times=[row.time for row in held],
            windows=count + 1,
        )


class Hash(statelog.AggregateFunction[Any, Any]):
    """A sum of squares and a count."""

    def createAccumulator(self) -> tuple[Any, ...]:
        return (0, 0)

    def add(self, value: Any, accumulator: Any) -> tuple[Any, ...]:
        return (accumulator[0] + value.n * value.n, accumulator[1] + 1)

    def getResult(self, accumulator: Any) -> tuple[Any, ...]:
        return tuple(accumulator)

    def merge(self, one: Any, other: Any) -> tuple[Any, ...]:
        return (one[0] + other[0], one[1] + other[1])


def _joined(one: Any, other: Any) -> tuple[Any, ...]:
    return (one[0] + other[0], max(one[1], other[1]))


KINDS: dict[str, Callable[[WindowDefinition], WindowPlan]] = {
    "process": lambda windows: windows.processed(
        Rows(), "user string, start long, end long, rows array<long>, times array<timestamp>, windows long"
    ),
    "agg": lambda windows: windows.aggregated(
        [
            statelog.Count(),
            statelog.Sum("n"),
            statelog.Min("n"),
            statelog.Max("time"),
            statelog.First("n"),
            statelog.Last("time"),
            statelog.Collect("n"),
            statelog.CountDistinct("time"),
            statelog.Mean("n"),
        ]
    ),
    "reduce": lambda windows: windows.reduced(_joined, "total long, last long", lambda row: (row.n, row.n)),
    "aggregate": lambda windows: windows.folded(Hash(), "squares long, rows long", "squares long, rows long"),
}


def window_harness(
    windows: Any,
    kind: str,
    *,
    is_event_time: bool = True,
    lateness_ms: int = 0,
    late_column: str | None = None,
    **more: Any,
) -> Harness:
    """A query with windows; in event time with a watermark of its own unless `eventTime` is among `more`."""
    mode = TimeMode.EVENT_TIME if is_event_time else TimeMode.PROCESSING_TIME
    if isinstance(windows, CountWindows):
        mode = TimeMode.NONE
    column = "time" if mode is TimeMode.EVENT_TIME else None
    definition = WindowDefinition(
        parse_ddl(INPUT), ["user"], "UTC", windows, mode, column, lateness_ms, late_column, parse=parse_ddl
    )
    plan = KINDS[kind](definition)
    return Harness(plan.operator, input=INPUT, output=plan.output, keys=["user"], timeMode=plan.time_mode, **more)


def expected_rows(answer: Answer, kind: str) -> list[tuple[Any, ...]]:
    """The output rows of an answer without the late ones; of a process without the count of windows."""
    return [_EXPECTED[kind](returned) for returned in answer.returned]


def _result(returned: Returned, *values: Any) -> tuple[Any, ...]:
    bounds = () if returned.window is None else tuple(map(_naive, returned.window))
    return (returned.user, *bounds, *values)


def _naive(time_ms: int | None) -> datetime.datetime | None:
    """As Spark's collect() returns an instant: local time."""
    at = instant(time_ms)
    return None if at is None else at.astimezone().replace(tzinfo=None)


def _aggregates(returned: Returned) -> tuple[Any, ...]:
    events = returned.events
    numbers = [event.n for event in events]
    times = [event.time_ms for event in events if event.time_ms is not None]
    first, last = (events[0], events[-1])
    return _result(
        returned,
        len(events),
        sum(numbers),
        min(numbers),
        _naive(max(times, default=None)),
        first.n,
        _naive(last.time_ms),
        sorted(numbers),
        len(set(times)),
        sum(numbers) / len(numbers),
    )


_EXPECTED: dict[str, Callable[[Returned], tuple[Any, ...]]] = {
    "process": lambda returned: (
        returned.user,
        *(returned.window or (None, None)),
        [event.n for event in returned.events],
        [_naive(event.time_ms) for event in returned.events],
    ),
    "agg": _aggregates,
    "reduce": lambda returned: _result(
        returned, sum(event.n for event in returned.events), max(event.n for event in returned.events)
    ),
    "aggregate": lambda returned: _result(returned, sum(event.n**2 for event in returned.events), len(returned.events)),
}


def found_rows(output: Sequence[Any], kind: str) -> list[tuple[Any, ...]]:
    """Output rows in the form of :func:`expected_rows`."""
    if kind == "process":
        return [tuple(row[:5]) for row in output]
    if kind == "agg":
        return [tuple(sorted(value) if isinstance(value, list) else value for value in row) for row in output]
    return [tuple(row) for row in output]
