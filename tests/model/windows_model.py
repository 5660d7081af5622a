"""What windows must return, computed from all events at once; and a query with windows in the harness."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Row

import statelog
from statelog import CountWindows, SessionWindows, SlidingWindows
from statelog.convert.ddl import parse_ddl
from statelog.convert.times import TimeMode
from statelog.testing import Harness
from statelog.testing.rows import read_schema
from statelog.windows.build import WindowDefinition, WindowPlan

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
class Setting:
    """The windows that a run has, and the lateness that it allows."""

    windows: Any
    lateness_ms: int = 0


@dataclass(frozen=True)
class Batch:
    """Rows, what windows are complete, and the setting of the run.

    Windows are complete up to `now_ms` in this batch, and up to `before_ms` in the one before.
    """

    events: list[Event]
    now_ms: int
    before_ms: int
    setting: Setting


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
    open: list[Returned]
    """The windows that still take rows after the batch, with the rows that they have."""


def answers(batches: Sequence[Batch]) -> list[Answer]:
    """What must come of each batch; all of them have windows of one kind."""
    match batches[0].setting.windows:
        case CountWindows():
            return _counted(batches)
        case SessionWindows():
            return _sessions(batches)
        case _:
            return _timed(batches)


def grid(windows: Any) -> tuple[int, int, int]:
    """Size, slide and offset of windows of time."""
    slide_ms = windows.slide_ms if isinstance(windows, SlidingWindows) else windows.size_ms
    return windows.size_ms, slide_ms, windows.offset_ms


def closed(batches: Sequence[Batch], number: int) -> int:
    """Up to when windows are closed in a batch: by its own lateness, or by that of a batch before."""
    own = batches[number]
    earlier = [batch.now_ms - batch.setting.lateness_ms for batch in batches[:number]]
    return max([own.before_ms - own.setting.lateness_ms, *earlier])


def _timed(batches: Sequence[Batch]) -> list[Answer]:
    """Look at every window that could have a row, and ask in which batches it is returned with what."""
    answer = [Answer([], [], []) for _ in batches]
    times = [event.time_ms for batch in batches for event in batch.events if event.time_ms is not None]
    taken: list[Event] = []
    for number, batch in enumerate(batches):
        size, slide, offset = grid(batch.setting.windows)
        closed_ms = closed(batches, number)
        ends_of: dict[int, list[int]] = {
            time: [start + size for start in range(time - size + 1, time + 1) if (start - offset) % slide == 0]
            for time in times
        }
        new: list[Event] = []
        for event in batch.events:
            ends = [] if event.time_ms is None else ends_of[event.time_ms]
            if event.time_ms is None or (ends and ends[-1] <= closed_ms):
                answer[number].late.append(event)
            elif ends:
                new.append(event)
        taken += new
        for user in {event.user for event in taken}:
            own = [event for event in taken if event.user == user]
            for end in sorted({end for event in own for end in ends_of[event.time_ms or 0]}):
                inside = [event for event in own if end - size <= _time_of(event)[0] < end]
                is_updated = closed_ms < end <= batch.before_ms and any(event in new for event in inside)
                window = Returned(user, (end - size, end), _by_time(inside))
                if batch.before_ms < end <= batch.now_ms or is_updated:
                    answer[number].returned.append(window)
                if end > max(closed_ms, batch.now_ms - batch.setting.lateness_ms):
                    answer[number].open.append(window)
    return answer


def _sessions(batches: Sequence[Batch]) -> list[Answer]:
    """Put all rows that count together anew in every batch; each has the gap that it came with."""
    answer: list[Answer] = []
    live: list[Event] = []
    gaps: dict[Event, int] = {}
    for number, batch in enumerate(batches):
        closed_ms = closed(batches, number)
        after_ms = max(closed_ms, batch.now_ms - batch.setting.lateness_ms)
        late = [event for event in batch.events if event.time_ms is None]
        returned: list[Returned] = []
        open_ones: list[Returned] = []
        new = {event for event in batch.events if event.time_ms is not None}
        gaps |= {event: batch.setting.windows.gap_ms for event in new}
        live = [event for user_rows in _by_user(live) for event in _open_rows(user_rows, gaps, closed_ms)]
        kept: list[Event] = []
        for rows in _by_user([*live, *new]):
            for session in _apart(rows, gaps):
                end = _end_of(session, gaps)
                fresh = [event for event in session if event in new]
                if fresh and end <= closed_ms:
                    late += fresh
                    continue
                window = Returned(session[0].user, (_time_of(session[0])[0], end), tuple(session))
                if batch.before_ms < end <= batch.now_ms or (fresh and end <= batch.before_ms):
                    returned.append(window)
                if end > after_ms:
                    open_ones.append(window)
                    kept += session
        live = kept
        answer.append(Answer(returned, late, open_ones))
    return answer


def _by_user(events: list[Event]) -> list[list[Event]]:
    """The rows of each user, in order of time."""
    users = {event.user for event in events}
    return [sorted((event for event in events if event.user == user), key=_time_of) for user in users]


def _open_rows(rows: list[Event], gaps: dict[Event, int], closed_ms: int) -> list[Event]:
    """Rows of sessions that are not closed: a smaller lateness closes some at once."""
    sessions = [session for session in _apart(rows, gaps) if _end_of(session, gaps) > closed_ms]
    return [event for session in sessions for event in session]


def _end_of(session: list[Event], gaps: dict[Event, int]) -> int:
    return max(_time_of(event)[0] + gaps[event] for event in session)


def _apart(rows: list[Event], gaps: dict[Event, int]) -> Iterator[list[Event]]:
    session: list[Event] = []
    for row in rows:
        if session and _time_of(row)[0] > _end_of(session, gaps):
            yield session
            session = []
        session.append(row)
    if session:
        yield session


def _counted(batches: Sequence[Batch]) -> list[Answer]:
    """Give every row to its user's window, and return that when it has enough."""
    answer: list[Answer] = []
    windows: dict[str | None, list[Event]] = {}
    for batch in batches:
        returned: list[Returned] = []
        for event in batch.events:
            window = windows.setdefault(event.user, [])
            window.append(event)
            if len(window) >= batch.setting.windows.size:
                returned.append(Returned(event.user, None, tuple(window)))
                window.clear()
        open_ones = [Returned(user, None, tuple(window)) for user, window in windows.items() if window]
        answer.append(Answer(returned, [], open_ones))
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
        self._windows = handle.getValueState("returned", "count long")

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
            statelog.Last("time", by="n"),
        ]
    ),
    "reduce": lambda windows: windows.reduced(_joined, "total long, last long", lambda row: (row.n, row.n)),
    "aggregate": lambda windows: windows.folded(Hash(), "squares long, rows long", "squares long, rows long"),
}


def window_definition(
    windows: Any, *, is_event_time: bool = True, lateness_ms: int = 0, late_column: str | None = None
) -> WindowDefinition:
    """Windows of the input."""
    mode = TimeMode.EVENT_TIME if is_event_time else TimeMode.PROCESSING_TIME
    if isinstance(windows, CountWindows):
        mode = TimeMode.NONE
    column = "time" if mode is TimeMode.EVENT_TIME else None
    return WindowDefinition(
        read_schema(INPUT, "input"), ["user"], "UTC", windows, mode, column, lateness_ms, late_column, parse=parse_ddl
    )


def window_operator(windows: Any, kind: str, **more: Any) -> WindowPlan:
    """An operator with windows; the other arguments are those of :func:`window_definition`."""
    return KINDS[kind](window_definition(windows, **more))


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
    plan = window_operator(windows, kind, is_event_time=is_event_time, lateness_ms=lateness_ms, late_column=late_column)
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
        _naive(max(events, key=lambda event: event.n).time_ms),
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
