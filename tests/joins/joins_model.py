"""What an interval join must return, computed from all rows by brute force; and a query with a join in the harness."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from statelog import Watermark
from statelog.joins.build import (
    SIDE_COLUMN,
    TIME_COLUMN,
    AsofDefinition,
    IntervalDefinition,
    JoinInput,
    JoinPlan,
    JoinSides,
)
from statelog.runs.byte_slices import Budget
from statelog.testing import Harness
from statelog.testing.harness import parts_of
from statelog.testing.keyed import LocalKeyedOperator
from statelog.testing.rows import read_schema

LEFT = "k string, at timestamp, n long, v string"
RIGHT = "key string, seen timestamp, n long"
NO_WATERMARK = -(1 << 63)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def instant(time_us: int | None) -> datetime.datetime | None:
    return None if time_us is None else _EPOCH + datetime.timedelta(microseconds=time_us)


@dataclass(frozen=True)
class Event:
    """A row of one side; `n` is its place in the order of arrival."""

    side: int
    key: str | None
    time_us: int | None
    n: int

    @property
    def row(self) -> tuple[Any, ...]:
        """The row in the columns of the operator's input."""
        at = instant(self.time_us)
        left = (at, self.n, f"v{self.n}") if self.side == 0 else (None, None, None)
        right = (at, self.n) if self.side == 1 else (None, None)
        return (self.key, self.side, at, *left, *right)


@dataclass(kw_only=True)
class SidesModel:
    """Holds all rows that were not late, and the watermark of both sides."""

    how: str
    delays_ms: tuple[int, int] = (0, 0)
    idle_ms: int | None = None
    batches: int = 0
    watermark_ms: int = NO_WATERMARK
    silent_ms: list[int] = field(default_factory=lambda: [0, 0])
    held: tuple[list[Event], list[Event]] = field(default_factory=lambda: ([], []))
    late: int = 0
    newest_ms: list[int | None] = field(default_factory=lambda: [None, None])

    def take(self, events: Sequence[Event], gap_ms: int = 0) -> list[Event]:
        """Begin a batch that comes `gap_ms` of processing time after the one before; returns the rows on time."""
        if self.idle_ms is not None and self.batches:
            self.silent_ms = [silent_ms + min(gap_ms, (self.idle_ms + 1) // 2) for silent_ms in self.silent_ms]
        late_ms, self.watermark_ms = self.watermark_ms, self._advanced()
        self.batches += 1
        on_time: list[Event] = []
        for event in events:
            if event.time_us is not None:
                time_ms, newest_ms = event.time_us // 1000, self.newest_ms[event.side]
                self.newest_ms[event.side] = time_ms if newest_ms is None else max(newest_ms, time_ms)
                self.silent_ms[event.side] = 0
            if event.time_us is not None and late_ms != NO_WATERMARK and event.time_us <= late_ms * 1000:
                self.late += 1
            else:
                self.held[event.side].append(event)
                on_time.append(event)
        return on_time

    def has_passed(self, time_us: int) -> bool:
        """Whether the watermark has passed a time."""
        return self.watermark_ms != NO_WATERMARK and time_us <= self.watermark_ms * 1000

    def _advanced(self) -> int:
        reached = [
            None if newest_ms is None else newest_ms - delay_ms
            for newest_ms, delay_ms in zip(self.newest_ms, self.delays_ms, strict=True)
        ]
        is_idle = [self.idle_ms is not None and silent_ms >= self.idle_ms for silent_ms in self.silent_ms]
        awake = [time_ms for time_ms, idle in zip(reached, is_idle, strict=True) if not idle]
        if not awake:
            return max([self.watermark_ms, *(time_ms for time_ms in reached if time_ms is not None)])
        known = [time_ms for time_ms in awake if time_ms is not None]
        return max(self.watermark_ms, min(known)) if len(known) == len(awake) else self.watermark_ms


@dataclass(kw_only=True)
class JoinModel(SidesModel):
    """Looks at each pair of rows."""

    lower_ms: int
    upper_ms: int
    condition: Callable[[Event, Event], bool] = lambda left, right: True
    timeout_ms: int | None = None
    now_ms: int = 0
    arrived_ms: dict[int, int] = field(default_factory=dict)
    """When rows came that have a time limit, by number."""
    gone: set[int] = field(default_factory=set)
    """The rows that were returned without a match because of their time limit."""
    returned: set[tuple[int | None, int | None]] = field(default_factory=set)
    """Pairs by their numbers, None for the side that has no row."""

    def push(self, events: Sequence[Event], gap_ms: int = 0) -> Counter[Any]:
        """The output of a batch; see `returned`."""
        self.now_ms += gap_ms
        on_time = self.take(events, gap_ms)
        if self.timeout_ms is not None:
            self.arrived_ms |= {event.n: self.now_ms for event in on_time}
        left, right = [[event for event in of_side if event.n not in self.gone] for of_side in self.held]
        pairs = {(one.n, other.n) for one in left for other in right if self._match(one, other)}
        met = ({one for one, _ in pairs}, {other for _, other in pairs})
        found: set[tuple[int | None, int | None]] = set()
        if self.how in ("inner", "left", "right", "full"):
            found |= pairs
        if self.how == "semi":
            found |= {(number, None) for number in met[0]}
        for side, kinds in enumerate((("left", "full", "anti"), ("right", "full"))):
            if self.how in kinds:
                waiting = {event for event in (left, right)[side] if event.n not in met[side]}
                self.gone |= {event.n for event in waiting if self._has_timed_out(event) and not self._is_over(event)}
                alone = {event.n for event in waiting if event.n in self.gone or self._is_over(event)}
                found |= {(number, None) if side == 0 else (None, number) for number in alone}
        new = found - self.returned
        self.returned |= new
        return Counter(new)

    def _match(self, left: Event, right: Event) -> bool:
        if left.key is None or left.key != right.key or left.time_us is None or right.time_us is None:
            return False
        is_near = self.lower_ms * 1000 <= right.time_us - left.time_us <= self.upper_ms * 1000
        return is_near and self.condition(left, right)

    def _has_timed_out(self, event: Event) -> bool:
        if self.timeout_ms is None or event.n not in self.arrived_ms:
            return False
        return self.now_ms - self.arrived_ms[event.n] >= self.timeout_ms

    def _is_over(self, event: Event) -> bool:
        """Whether all rows that could match one would be late from the next batch on."""
        if event.key is None or event.time_us is None:
            return True
        last_ms = self.upper_ms if event.side == 0 else -self.lower_ms
        return self.has_passed(event.time_us + last_ms * 1000)


@dataclass(kw_only=True)
class AsofModel(SidesModel):
    """Looks for the right row of each left row among all that came, and says which rows the state must have."""

    tolerance_ms: int | None
    wait: bool
    waiting: list[Event] = field(default_factory=list)
    expired: set[int] = field(default_factory=set)
    """The right rows that no left row could need by the tolerance of some batch so far."""

    def push(self, events: Sequence[Event], gap_ms: int = 0) -> dict[int, set[int | None]]:
        """The left rows that a batch answers, by number, and the right rows that each may get; None for none.

        There are several only if the tolerance has changed: a row that has expired once may be gone.
        """
        self.waiting += [event for event in self.take(events, gap_ms) if event.side == 0]
        answered = [event for event in self.waiting if not self.wait or self._is_due(event)]
        self.waiting = [event for event in self.waiting if event not in answered]
        found: dict[int, set[int | None]] = {}
        for event in answered:
            number = self._newest(event)
            found[event.n] = {number, None} if number in self.expired else {number}
        self.expired |= {event.n for event in self.held[1] if self._has_expired(event)}
        return found

    def kept(self, key: str) -> tuple[list[int], list[int]]:
        """The numbers of a key's rows that the state has after the batch, of each side."""
        right = [event for event in self.held[1] if event.key == key and event.time_us is not None]
        past = [event for event in right if self.has_passed(event.time_us or 0)]
        newest = max(past, key=lambda event: (event.time_us, event.n), default=None)
        kept = [event.n for event in right if event not in past or (event == newest and not self._has_expired(event))]
        return sorted(event.n for event in self.waiting if event.key == key), sorted(kept)

    def _newest(self, left: Event) -> int | None:
        found = [
            (right.time_us, right.n)
            for right in self.held[1]
            if right.key == left.key is not None and right.time_us is not None and left.time_us is not None
            if right.time_us <= left.time_us
            and (self.tolerance_ms is None or left.time_us - right.time_us <= self.tolerance_ms * 1000)
        ]
        return max(found)[1] if found else None

    def _is_due(self, event: Event) -> bool:
        return event.key is None or event.time_us is None or self.has_passed(event.time_us)

    def _has_expired(self, event: Event) -> bool:
        if event.time_us is None or self.tolerance_ms is None:
            return False
        return self.has_passed(event.time_us + self.tolerance_ms * 1000)


def join_plan(how: str, lower: Any, upper: Any, timeout: Any = None, condition: Any = None) -> JoinPlan:
    """An interval join of two sides."""
    return IntervalDefinition(_sides("join_interval"), lower, upper, how, timeout, condition).plan()


def asof_plan(how: str, tolerance: Any, *, wait: bool) -> JoinPlan:
    """An as-of join of two sides."""
    return AsofDefinition(_sides("join_asof"), tolerance, how, wait).plan()


def _sides(method: str) -> JoinSides:
    one = JoinInput("left", read_schema(LEFT, "left"), ["k"], "at")
    other = JoinInput("right", read_schema(RIGHT, "right"), ["key"], "seen")
    return JoinSides(one, other, method)


def join_harness(plan: JoinPlan, delays_ms: Sequence[int] = (0, 0), idle_ms: int | None = None, **more: Any) -> Harness:
    """A query with a join."""
    return Harness(
        plan.operator,
        input=plan.input,
        keys=["k"],
        output=plan.output,
        timeMode=plan.time_mode,
        watermark=Watermark(TIME_COLUMN, list(delays_ms), inputs=2, input_column=SIDE_COLUMN, idle=idle_ms),
        **more,
    )


def with_budget(harness: Harness, budget: Budget) -> None:
    """Bound the bytes and entries that the query works on at once."""
    query = parts_of(harness).query
    assert isinstance(query.operator, LocalKeyedOperator)
    query.operator = query.operator.with_budget(budget)


def numbers(output: Sequence[Any], how: str) -> Counter[Any]:
    """The output as the model has it; checks that the other columns belong to the numbers."""
    found: Counter[Any] = Counter()
    for row in output:
        values = row.asDict()
        one, other = values.get("n_left", values.get("n")), values.get("n_right")
        if how in ("semi", "anti"):
            assert list(values) == ["k", "at", "n", "v"]
        else:
            assert list(values) == ["k", "at", "n_left", "v", "seen", "n_right"]
            assert (values["seen"] is None) >= (other is None)
        assert values["v"] == (None if one is None else f"v{one}")
        found[one, other] += 1
    return found
