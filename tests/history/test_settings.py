"""Starts with other settings: what continues, what is converted, and what is refused by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import Row

import statelog
from statelog import ConfigurationError, CountWindows, ErrorKind, SessionWindows, SlidingWindows, TumblingWindows
from statelog.aggregates.build import KeyedDefinition, KeyedPlan, plan_aggregates
from statelog.convert.ddl import parse_ddl
from statelog.convert.times import TimeMode
from statelog.convert.types import key_schema
from statelog.history.query_history import read_history
from statelog.history.settings import RULES, Verdict, WindowSettings, changes, inherit, require_convertible
from statelog.log.entry import Checkpoint
from statelog.queries.load import RestoreTarget, restore_operators
from statelog.queries.save import save_operator
from statelog.reading.rows import one_by_one
from statelog.reading.savepoint import SavedOperator
from statelog.runs.byte_slices import Budget
from statelog.runs.schema import StateSchema
from statelog.runs.times import NO_TIME_MS, Ttl
from statelog.storage import LocalStore
from statelog.testing import Harness
from statelog.testing.harness import parts_of
from statelog.testing.keyed import LocalKeyedOperator
from statelog.testing.query import ManualClock
from statelog.testing.rows import read_schema
from statelog.windows.build import WindowDefinition, WindowPlan
from tests.entries import checkpoint_of
from tests.joins.joins_model import asof_plan, join_plan
from tests.model.aggregates_model_support import planned
from tests.model.windows_model import INPUT, KINDS, instant, window_harness, window_operator


def checkpoint(
    watermark_ms: int = NO_TIME_MS, states: tuple[StateSchema, ...] = (), /, **settings: int | str
) -> Checkpoint:
    return checkpoint_of(0, states=list(states), watermark_ms=watermark_ms, settings=settings)


def state(name: str, expires_by: str) -> StateSchema:
    return StateSchema(name, "value", b"", b"", expires_by)


# ---- The table ----


def plan_of(windows: Any, kind: str = "agg", **more: Any) -> WindowPlan:
    return window_operator(windows, kind, **more)


def settings_of(windows: Any, kind: str = "agg", **more: Any) -> dict[str, int | str]:
    plan = plan_of(windows, kind, **more)
    return {"timeMode": str(plan.time_mode), **plan.operator.codecs.settings}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (TumblingWindows(200), TumblingWindows(200, 600), {}),
        (TumblingWindows(200), SlidingWindows(200, 200), {}),
        (SlidingWindows(100, 200), SlidingWindows(100, 200, -200), {}),
        (SlidingWindows(150, 50), SlidingWindows(100, 50), {"size_ms": Verdict.CONVERT}),
        (SlidingWindows(100, 50), TumblingWindows(50), {"size_ms": Verdict.CONVERT}),
        (TumblingWindows(50), SlidingWindows(100, 50), {"size_ms": Verdict.REFUSE}),
        (SlidingWindows(100, 50), SlidingWindows(150, 50), {"size_ms": Verdict.REFUSE}),
        (SlidingWindows(100, 50), SlidingWindows(75, 50), {"size_ms": Verdict.REFUSE}),
        (SlidingWindows(100, 50), SlidingWindows(100, 25), {"size_ms": Verdict.REFUSE}),
        (SlidingWindows(100, 50), SlidingWindows(50, 50, 10), {"size_ms": Verdict.REFUSE}),
        (SlidingWindows(100, 200), SlidingWindows(150, 200), {"size_ms": Verdict.REFUSE}),
        (SlidingWindows(300, 200), SlidingWindows(100, 200), {"size_ms": Verdict.REFUSE}),
        (TumblingWindows(200), SlidingWindows(100, 200), {"size_ms": Verdict.REFUSE}),
        (TumblingWindows(200), SlidingWindows(200, 100), {"size_ms": Verdict.REFUSE}),
        (TumblingWindows(200), TumblingWindows(100), {"size_ms": Verdict.REFUSE}),
        (TumblingWindows(200), TumblingWindows(200, 1), {"size_ms": Verdict.REFUSE}),
        (SessionWindows(5), SessionWindows(9), {"gap_ms": Verdict.CONVERT}),
        (CountWindows(5), CountWindows(2), {"size": Verdict.CONVERT}),
        (TumblingWindows(5), SessionWindows(5), {"windows": Verdict.REFUSE}),
        (SessionWindows(5), CountWindows(5), {"windows": Verdict.REFUSE, "timeMode": Verdict.REFUSE}),
        (CountWindows(5), TumblingWindows(5), {"windows": Verdict.REFUSE, "timeMode": Verdict.EQUAL}),
    ],
)
def test_what_other_windows_mean(old: Any, new: Any, expected: dict[str, Verdict]) -> None:
    found = {
        change.rule.names[0]: change.verdict
        for change in changes(settings_of(old), settings_of(new))
        if change.verdict is not Verdict.EQUAL or change.rule.names == ("timeMode",)
    }
    assert found == expected


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"lateness_ms": 5}, {"lateness_ms": 7}, {"allowedLatenessMs": Verdict.CONVERT}),
        ({}, {"late_column": "late"}, {}),
        ({}, {"is_event_time": False}, {"timeMode": Verdict.REFUSE}),
        ({"kind": "agg"}, {"kind": "reduce"}, {"results": Verdict.REFUSE}),
        ({"kind": "reduce"}, {"kind": "aggregate"}, {"results": Verdict.REFUSE}),
        ({"kind": "process"}, {"kind": "agg"}, {"results": Verdict.REFUSE}),
    ],
)
def test_what_other_arguments_of_windows_mean(
    old: dict[str, Any], new: dict[str, Any], expected: dict[str, Verdict]
) -> None:
    before, after = (settings_of(TumblingWindows(10), **more) for more in (old, new))
    assert {change.rule.names[0]: change.verdict for change in changes(before, after)} == expected


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (("left", 0, 1000), ("left", 0, "1 second"), {}),
        (("left", 0, 5), ("left", -1, 5), {"join_lower_ms": Verdict.CONVERT}),
        (("left", 0, 5), ("left", 0, 3), {"join_lower_ms": Verdict.CONVERT}),
        (("left", 0, 5), ("full", 0, 5), {"join": Verdict.REFUSE}),
        (("left", 0, 5, 1000), ("left", 0, 5, "1 second"), {}),
        (("left", 0, 5, None), ("left", 0, 5, 1000), {"join_timeout_ms": Verdict.CONVERT}),
        (("left", 0, 5, 7), ("left", 0, 5, None), {"join_timeout_ms": Verdict.CONVERT}),
    ],
)
def test_what_other_joins_mean(old: Any, new: Any, expected: dict[str, Verdict]) -> None:
    before, after = (join_plan(*join).operator.codecs.settings for join in (old, new))
    assert {change.rule.names[0]: change.verdict for change in changes(before, after)} == expected


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (("left", "1 second", True), ("left", 1000, True), {}),
        (("left", 5, True), ("left", None, True), {"join_tolerance_ms": Verdict.CONVERT}),
        (("left", None, True), ("left", 0, True), {"join_tolerance_ms": Verdict.CONVERT}),
        (("left", 5, True), ("inner", 5, True), {"join": Verdict.REFUSE}),
        (("left", 5, True), ("left", 5, False), {"join": Verdict.REFUSE}),
    ],
)
def test_what_other_asof_joins_mean(old: Any, new: Any, expected: dict[str, Verdict]) -> None:
    before, after = (
        asof_plan(how, tolerance, wait=wait).operator.codecs.settings for how, tolerance, wait in (old, new)
    )
    assert {change.rule.names[0]: change.verdict for change in changes(before, after)} == expected


def test_the_table_has_every_setting_that_is_recorded() -> None:
    recorded = [settings_of(windows, kind) for windows in (TumblingWindows(1), SessionWindows(1)) for kind in KINDS]
    recorded += [settings_of(CountWindows(1)), dict(planned(["user"]).operator.codecs.settings)]
    recorded.append(dict(join_plan("left", 0, 1).operator.codecs.settings))
    recorded.append(dict(asof_plan("left", 1, wait=True).operator.codecs.settings))
    names = {name for settings in recorded for name in settings}
    judged = {name for rule in RULES for name in rule.names}
    prefixes = ("aggregate ", "value of ", "column type of ")
    assert {name for name in names if not name.startswith(prefixes)} == judged - {*prefixes, "TTL of state "}
    assert {"size_ms", "gap_ms", "size", "allowedLatenessMs", "results", "windows", "timeMode"} <= names


def test_a_refusal_names_what_was_and_what_is_and_what_to_do() -> None:
    before = checkpoint(**settings_of(SlidingWindows(100, 200)))
    with pytest.raises(ConfigurationError) as caught:
        require_convertible(settings_of(SlidingWindows(150, 200)), [], before, "operator 'op' at /state")
    assert caught.value.kind is ErrorKind.OTHER_SETTINGS
    assert caught.value.message.startswith(
        "operator 'op' at /state: the state was written with offset_ms=0, size_ms=100, slide_ms=200,"
        " and the operator now has offset_ms=0, size_ms=150, slide_ms=200."
    )
    assert "Use the old setting" in (caught.value.hint or "")


def test_a_setting_is_judged_also_if_there_is_no_other() -> None:
    for more, others in (({}, {"timeMode": "None"}), ({"timeMode": "None"}, {})):
        [change] = changes({"gap_ms": 1, **more}, {"gap_ms": 2, **others})
        assert (change.rule.names, change.verdict) == (("gap_ms",), Verdict.CONVERT)


# ---- What is taken over ----


def test_only_the_runs_own_settings_are_recorded_and_aggregates_that_were_removed() -> None:
    removed = {"aggregate x": "quantiles(n)", "value of x": "0.5", "aggregate z": "d", "column type of z": "bigint"}
    before = checkpoint(gap_ms=5, size=7, **removed, **{"aggregate y": "count()"})
    taken = inherit({"size": 8, "aggregate y": "count()"}, [], before, "here")
    assert taken.settings == {"size": 8, "aggregate y": "count()", **removed}


def test_a_conversion_is_told_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, int | str] = {"size": 7, "timeMode": "None"}
    with caplog.at_level(logging.INFO):
        inherit({**settings, "timeMode": "EventTime"}, [], checkpoint(**settings), "here")
        assert caplog.text == ""
        inherit({**settings, "size": 8}, [], checkpoint(**settings), "here")
    assert "here: the state was written with size=7, and the operator now has size=8" in caplog.text


@pytest.mark.parametrize(
    "recorded",
    [
        {},
        {"windows": "none", "results": "agg"},
        {"windows": "counts", "results": "of a later version"},
    ],
)
def test_operators_without_windows_and_those_of_unknown_ones_have_no_windows_settings(
    recorded: dict[str, str],
) -> None:
    assert WindowSettings.of(recorded) is None


def test_windows_without_event_time_take_no_late_rows() -> None:
    read = WindowSettings.of({"windows": "counts", "results": "agg"})
    assert read is not None
    assert (read.is_event_time, read.lateness_ms, read.closed_ms) == (False, 0, NO_TIME_MS)
    assert (read.aggregates, read.value_details) == ({}, {})


def test_windows_stay_closed_over_any_number_of_runs() -> None:
    late = {"timeMode": "EventTime", "windows": "sessions"}
    first = inherit({**late, "allowedLatenessMs": 10}, [], None, "here")
    assert first.closed_ms == NO_TIME_MS
    second = inherit({**late, "allowedLatenessMs": 500}, [], checkpoint(100, **first.settings), "here")
    assert second.closed_ms == 90
    third = inherit({**late, "allowedLatenessMs": 0}, [], checkpoint(130, **second.settings), "here")
    assert third.closed_ms == 90
    fourth = inherit({**late, "allowedLatenessMs": 900}, [], checkpoint(150, **third.settings), "here")
    assert fourth.closed_ms == 150
    assert inherit(late, [], checkpoint(NO_TIME_MS, **late, allowedLatenessMs=5), "here").closed_ms == NO_TIME_MS


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("processing", "processing", None),
        ("", "event", Verdict.EQUAL),
        ("processing", "", Verdict.CONVERT),
        ("event", "", Verdict.CONVERT),
        ("processing", "event", Verdict.REFUSE),
        ("event", "processing", Verdict.REFUSE),
    ],
)
def test_what_another_ttl_means(old: str, new: str, verdict: Verdict | None) -> None:
    before = checkpoint(NO_TIME_MS, (state("seen", old), state("gone", "event")), timeMode="None")
    declared = [state("seen", new), state("added", "processing")]
    if verdict is Verdict.REFUSE:
        with pytest.raises(
            ConfigurationError, match=f"TTL of state 'seen'='{old}'.*now has TTL of state 'seen'='{new}'"
        ):
            require_convertible({"timeMode": "None"}, declared, before, "here")
        return
    require_convertible({"timeMode": "None"}, declared, before, "here")
    taken = inherit({"timeMode": "None"}, declared, before, "here")
    assert taken.expires_by == ({"seen": old} if verdict is Verdict.CONVERT else {})


# ---- Windows ----


def test_closed_windows_stay_closed_when_more_lateness_is_allowed() -> None:
    """The window from 0 to 10 was returned and is gone: a row for it must not return it with that row alone."""
    with window_harness(TumblingWindows(10), "agg", eventTime="time", late_column="late") as harness:
        harness.push([("a", instant(5), 1), ("a", instant(15), 2)])
        assert [row[3] for row in harness.advanceWatermark(12)] == [1]
        harness.restart(processor=plan_of(TumblingWindows(10), lateness_ms=100, late_column="late").operator)
        (late,) = harness.push([("a", instant(6), 3)])
        assert late.late.n == 3
        assert [row[3] for row in harness.advanceWatermark(20)] == [1]
        assert [row[3] for row in harness.push([("a", instant(16), 4)])] == [2]
        harness.restart()
        assert [row.late.n for row in harness.push([("a", instant(7), 5)])] == [5]
        harness.advanceWatermark(120)
        assert (harness.map("window.panes", "a"), harness.timers("a")) == ({}, [])


@pytest.mark.parametrize("windows", [TumblingWindows(10), SlidingWindows(20, 10), SessionWindows(10)])
@pytest.mark.parametrize(("old_ms", "new_ms"), [(20, 35), (35, 20), (20, 0)])
def test_nothing_is_left_behind_with_another_lateness(windows: Any, old_ms: int, new_ms: int) -> None:
    with window_harness(windows, "process", eventTime="time", lateness_ms=old_ms) as harness:
        harness.push([("a", instant(5), 1), ("b", instant(25), 2)])
        assert len(harness.advanceWatermark(30)) >= 1
        harness.restart(processor=plan_of(windows, "process", lateness_ms=new_ms).operator)
        harness.push([("c", instant(40), 3)])
        for watermark_ms in (36, 45, 58, 100):
            harness.advanceWatermark(watermark_ms)
        state_name = "window.sessions" if isinstance(windows, SessionWindows) else "window.panes"
        for key in ("a", "b", "c"):
            assert [harness.map(state_name, key), harness.map("window.rows", key), harness.timers(key)] == [{}, {}, []]


def test_a_row_does_not_return_a_closed_window_beside_an_open_one() -> None:
    """Its pane is there for the window that ends at 30; the first half of the one that ended at 20 is not."""
    with window_harness(SlidingWindows(20, 10), "agg", eventTime="time") as harness:
        harness.push([("a", instant(5), 1), ("a", instant(15), 2)])
        assert [row[3] for row in harness.advanceWatermark(22)] == [1, 2]
        harness.restart(processor=plan_of(SlidingWindows(20, 10), lateness_ms=100).operator)
        assert harness.push([("a", instant(16), 3)]) == []
        assert [row[3] for row in harness.advanceWatermark(30)] == [2]
        assert [row[3] for row in harness.push([("a", instant(17), 4)])] == [3]


@pytest.mark.parametrize("lateness_ms", [0, 50])
def test_windows_that_are_due_together_are_returned_once(lateness_ms: int) -> None:
    for windows in (TumblingWindows(10), SlidingWindows(20, 10), SessionWindows(3)):
        with window_harness(windows, "agg", eventTime="time", lateness_ms=lateness_ms) as harness:
            harness.push([("a", instant(time), time) for time in (5, 15, 25)])
            ends = [row[2] for row in harness.advanceWatermark(60)]
            assert len(ends) == len(set(ends)) == (4 if isinstance(windows, SlidingWindows) else 3)


def test_a_row_does_not_join_a_session_that_a_smaller_lateness_has_closed() -> None:
    with window_harness(SessionWindows(10), "process", eventTime="time", lateness_ms=20) as harness:
        harness.push([("a", instant(5), 1)])
        harness.advanceWatermark(30)
        harness.restart(processor=plan_of(SessionWindows(10), "process").operator)
        assert harness.push([("a", instant(14), 2)]) == []
        assert harness.checkpoints[-1].late_rows == 1


def test_smaller_counts_do_not_mix_rows_of_keys() -> None:
    with window_harness(CountWindows(5), "process") as harness:
        harness.push([("a", None, n) for n in range(4)] + [("b", None, 10)])
        harness.restart(processor=plan_of(CountWindows(2), "process").operator)
        rows = harness.push([("a", None, 4), ("a", None, 5), ("b", None, 11), ("a", None, 6), ("a", None, 7)])
        assert sorted((row.user, row.rows) for row in rows) == [
            ("a", [0, 1, 2, 3, 4]),
            ("a", [5, 6]),
            ("b", [10, 11]),
        ]


def test_shorter_windows_are_put_together_from_the_panes_that_are_there() -> None:
    with window_harness(SlidingWindows(30, 10), "reduce", eventTime="time") as harness:
        harness.push([("a", instant(time), time) for time in (5, 12, 27, 44)])
        assert [tuple(row)[3] for row in harness.advanceWatermark(10)] == [5]
        harness.restart(processor=plan_of(TumblingWindows(10), "reduce").operator)
        assert [tuple(row)[3] for row in harness.advanceWatermark(100)] == [12, 27, 44]
        assert (harness.map("window.panes", "a"), harness.timers("a")) == ({}, [])


@pytest.mark.parametrize("prefetch_entries", [Budget().prefetch_entries, 1])
def test_shorter_windows_that_end_one_after_the_other_are_all_returned(prefetch_entries: int) -> None:
    """The panes of overlapping windows share a timer; those of windows that do not overlap each need one."""
    with window_harness(SlidingWindows(30, 10), "reduce", eventTime="time") as harness:
        harness.push([("a", instant(time), time) for time in (5, 12, 27, 44)])
        assert [tuple(row)[3] for row in harness.advanceWatermark(10)] == [5]
        harness.restart(processor=plan_of(TumblingWindows(10), "reduce").operator)
        query = parts_of(harness).query
        assert isinstance(query.operator, LocalKeyedOperator)
        query.operator = query.operator.with_budget(Budget(prefetch_entries=prefetch_entries))
        for watermark_ms, totals in ((20, [12]), (30, [27]), (40, []), (50, [44])):
            assert [tuple(row)[3] for row in harness.advanceWatermark(watermark_ms)] == totals
        assert (harness.map("window.panes", "a"), harness.timers("a")) == ({}, [])


def aggregated(*aggregates: statelog.Aggregate) -> WindowPlan:
    definition = WindowDefinition(
        read_schema(INPUT, "input"), ["user"], "UTC", TumblingWindows(10), TimeMode.EVENT_TIME, "time", parse=parse_ddl
    )
    return definition.aggregated(aggregates)


def test_another_aggregate_of_the_same_name_is_refused_also_when_it_was_away() -> None:
    total, most = statelog.Sum("n").alias("x"), statelog.Max("n").alias("x")
    first = aggregated(statelog.Count(), total)
    with Harness(
        first.operator, input=INPUT, output=first.output, keys=["user"], timeMode="EventTime", eventTime="time"
    ) as harness:
        harness.push([("a", instant(1), 5)])
        with pytest.raises(ConfigurationError, match=r"aggregate x='sum\(n\)'.*aggregate x='max\(n\)'.*another alias"):
            harness.restart(processor=aggregated(statelog.Count(), most).operator)
        harness.restart(processor=aggregated(total.alias("y"), statelog.Count().alias("x2")).operator)
        harness.push([])
        with pytest.raises(ConfigurationError, match="aggregate x="):
            harness.restart(processor=aggregated(most).operator)


# ---- Other operators ----


class Seen:
    """Remembers numbers by key, for a time."""

    def __init__(self, ttl: Any) -> None:
        self.ttl = ttl

    def init(self, handle: Any) -> None:
        self.last = handle.getValueState("last", "n long", self.ttl)
        self.all = handle.getMapState("all", "n long", "at long", self.ttl)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        before = self.last.get()
        held = sorted(n for (n,), _ in self.all.iterator())
        for row in rows:
            if row.n:
                self.last.update((row.n,))
                self.all.updateValue((row.n,), (0,))
        yield Row(last=None if before is None else before[0], all=held)

    def close(self) -> None:
        pass


TTL_INPUT: dict[str, Any] = {"input": "user string, n long", "output": "last long, all array<long>", "keys": ["user"]}


@pytest.mark.parametrize("table", ["runs", "memory", "rocksdb"])
@pytest.mark.parametrize("keep_local", [True, False])
def test_what_has_expired_does_not_come_back_without_a_ttl(table: str, keep_local: bool) -> None:
    options = statelog.Options(table=table)
    with Harness(Seen(Ttl(100)), options=options, **TTL_INPUT) as harness:
        harness.push([("a", 1)], 0)
        harness.push([("a", 2)], 50)
        harness.restart(processor=Seen(None), keepLocal=keep_local)
        assert harness.push([("a", 3)], 110) == [Row(last=2, all=[2])]
        assert (harness.value("last", "a"), sorted(harness.map("all", "a"))) == ((3,), [(2,), (3,)])
        harness.restart()
        assert harness.push([("a", 0)], 1000) == [Row(last=3, all=[3])]
        harness.restart(processor=Seen(Ttl(10)))
        harness.push([("a", 4)], 2000)
        assert harness.push([("a", 0)], 2010) == [Row(last=None, all=[3])]


def test_what_expires_by_one_time_cannot_expire_by_the_other() -> None:
    arguments = {**TTL_INPUT, "input": INPUT, "watermark": statelog.Watermark("time")}
    with Harness(Seen(Ttl(100)), **arguments) as harness:
        harness.push([("a", instant(1), 1)])
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="TTL of state 'all'='processing'.*='event'"):
                harness.restart(processor=Seen(Ttl(5, time="event")))
            harness.restart(processor=Seen(None))
            assert harness.push([("a", instant(2), 0)]) == [Row(last=1, all=[1])]


@pytest.mark.parametrize("new", [Ttl(1_000), Ttl(10), Ttl(100, renew_on_read=True)])
def test_another_duration_counts_for_what_is_written_from_then_on(new: Ttl) -> None:
    with Harness(Seen(Ttl(100)), **TTL_INPUT) as harness:
        harness.push([("a", 1), ("b", 1)], 0)
        harness.restart(processor=Seen(new))
        assert harness.push([("a", 0), ("b", 2)], 99) == [Row(last=1, all=[1]), Row(last=1, all=[1])]
        renewed = Row(last=1, all=[1]) if new.renew_on_read else Row(last=None, all=[])
        assert harness.push([("a", 0)], 100) == [renewed]


class Alarm:
    """Rings at a row's time."""

    def init(self, handle: Any) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.handle.registerTimer(row.n)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(n=expiredTimerInfo.getExpiryTimeInMs())

    def close(self) -> None:
        pass


def again(harness: Harness, processor: Any, **arguments: Any) -> Harness:
    """The query of a harness, started with other arguments."""
    snapshot = harness.snapshot()
    return Harness.restore(replace(snapshot, arguments=replace(snapshot.arguments, **arguments)), processor)


@pytest.mark.parametrize("mode", ["ProcessingTime", "None"])
def test_timers_of_one_time_mode_are_not_forgotten_in_another(mode: str) -> None:
    with Harness(
        Alarm(), input=INPUT, output="n long", keys=["user"], timeMode="EventTime", eventTime="time"
    ) as harness:
        harness.push([("a", instant(5), 30)])
        with (
            again(harness, Alarm(), timeMode=mode, eventTime=None) as other,
            pytest.raises(ConfigurationError, match=f"timeMode='EventTime'.*now has timeMode='{mode}'"),
        ):
            other.push([])
        assert harness.advanceWatermark(30) == [Row(n=30)]


def test_an_operator_may_get_a_time_mode() -> None:
    with Harness(Seen(None), **TTL_INPUT) as harness:
        harness.push([("a", 1)], 0)
        with again(harness, Seen(1000), timeMode="ProcessingTime") as other:
            assert other.push([("a", 2)], 10) == [Row(last=1, all=[1])]


def test_windows_do_not_take_the_state_of_another_operator() -> None:
    with Harness(
        Alarm(), input=INPUT, output="n long", keys=["user"], timeMode="EventTime", eventTime="time"
    ) as harness:
        harness.push([("a", instant(5), 30)])
        plan = plan_of(TumblingWindows(10))
        with (
            again(harness, plan.operator, output=plan.output) as other,
            pytest.raises(ConfigurationError, match="windows='none'.*now has windows='of time'"),
        ):
            other.push([])


def test_the_watermark_does_not_go_back_when_it_is_sparks_from_now_on() -> None:
    arguments: dict[str, Any] = {"input": INPUT, "output": "n long", "keys": ["user"], "timeMode": "EventTime"}
    with Harness(Alarm(), watermark=statelog.Watermark("time"), **arguments) as harness:
        harness.push([("a", instant(35), 50)])
        harness.push([])
        with again(harness, Alarm(), watermark=None, eventTime="time") as other:
            assert other.push([("a", instant(35), 20), ("b", instant(36), 30)]) == [Row(n=30)]
            assert other.checkpoints[-1].late_rows == 1
            assert (other.advanceWatermark(20), other.advanceWatermark(40)) == ([], [])
            assert other.advanceWatermark(50) == [Row(n=50)]


# ---- Sketches ----


def counting(kind: str, name: str = "x") -> KeyedPlan:
    """Keys with about the number of different values of a column of a type."""
    schema = read_schema(f"user string, n {kind}", "input")
    definition = KeyedDefinition(schema, [0], key_schema([schema["user"]]), None, is_streaming=True, ansi=True)
    aggregate = {name: statelog.ApproxCountDistinct("n")}
    return plan_aggregates(definition, [], aggregate, output_mode="update", ttl=None, combine=False)


@contextmanager
def counted(kind: str, values: list[Any], kind_now: str, name: str = "x") -> Iterator[Harness]:
    """A query that has counted values of a type, and now gets those of another."""
    with Harness(
        counting(kind).operator, input=f"user string, n {kind}", output=counting(kind).output, keys=["user"]
    ) as old:
        old.push([("a", value) for value in values])
        now = counting(kind_now, name)
        with again(old, now.operator, input=f"user string, n {kind_now}", output=now.output, keys=["user"]) as harness:
            yield harness


@pytest.mark.parametrize(
    ("kind", "values", "kind_now", "values_now"),
    [
        ("tinyint", [1, 2], "bigint", [2, 3]),
        ("float", [1.5, 2.5], "double", [2.5, 3.5]),
        ("decimal(5,2)", [Decimal("1.25"), Decimal("2.5")], "decimal(9,2)", [Decimal("2.50"), Decimal("3.00")]),
    ],
)
def test_a_wider_type_counts_on(kind: str, values: list[Any], kind_now: str, values_now: list[Any]) -> None:
    with counted(kind, values, kind_now) as harness:
        assert harness.push([("a", value) for value in values_now]) == [Row(user="a", x=3)]


@pytest.mark.parametrize(
    ("kind", "values", "kind_now", "recorded"),
    [
        ("int", [1, 2], "double", "bigint'.*'double"),
        ("string", ["1"], "bigint", "string'.*'bigint"),
        ("date", [date(2020, 1, 1)], "timestamp", "date'.*'timestamp"),
        ("decimal(5,2)", [Decimal(1)], "decimal(6,3)", r"decimal\(38,2\)'.*'decimal\(38,3\)"),
    ],
)
def test_a_type_with_other_hashes_is_refused(kind: str, values: list[Any], kind_now: str, recorded: str) -> None:
    with (
        counted(kind, values, kind_now) as harness,
        pytest.raises(
            ConfigurationError, match=f"column type of x='{recorded}'.*values of the old type.*another alias"
        ),
    ):
        harness.push([])
    with counted(kind, values, kind_now, "y") as harness:
        assert harness.push([("a", None)]) == [Row(user="a", y=0)]


def test_windows_record_the_types_that_their_state_depends_on() -> None:
    plan = aggregated(
        statelog.ApproxCountDistinct("n"),
        statelog.ApproxCountDistinct("user").alias("users"),
        statelog.Max("time"),
        statelog.Last("user", by="n"),
        statelog.Max("user"),
    )
    recorded = {
        name: kind for name, kind in plan.operator.codecs.settings.items() if name.startswith("column type of ")
    }
    assert recorded == {
        "column type of approx_count_distinct(n)": "bigint",
        "column type of users": "string",
        "column type of max(time)": "timestamp",
        "column type of last(user by n)": "other by bigint",
    }


# ---- Names and types of aggregates ----


AT = datetime(2026, 1, 1, tzinfo=UTC)


def of_columns(kind: str, aggregates: dict[str, statelog.Aggregate], **more: Any) -> KeyedPlan:
    """Keys with aggregates of the column n of a type."""
    schema = read_schema(f"user string, n {kind}", "input")
    definition = KeyedDefinition(schema, [0], key_schema([schema["user"]]), None, is_streaming=True, ansi=True)
    arguments: dict[str, Any] = {"output_mode": "update", "ttl": None, "combine": False, **more}
    return plan_aggregates(definition, [], aggregates, **arguments)


def started(kind: str, aggregates: dict[str, statelog.Aggregate]) -> Harness:
    plan = of_columns(kind, aggregates)
    return Harness(plan.operator, input=f"user string, n {kind}", output=plan.output, keys=["user"])


def started_again(query: Harness, kind: str, aggregates: dict[str, statelog.Aggregate]) -> Harness:
    plan = of_columns(kind, aggregates)
    return again(query, plan.operator, input=f"user string, n {kind}", output=plan.output, keys=["user"])


@pytest.mark.parametrize(
    "aggregate",
    [
        statelog.Min("n"),
        statelog.Max("n"),
        statelog.First("n"),
        statelog.Last("n", by="n"),
        statelog.Last("user", by="n"),
        statelog.Collect("n"),
        statelog.CountDistinct("n"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("kind", "value", "kind_now"),
    [
        ("bigint", 5, "timestamp"),
        ("int", 5, "timestamp_ntz"),
        ("timestamp", AT, "timestamp_ntz"),
        ("timestamp_ntz", AT.replace(tzinfo=None), "bigint"),
    ],
)
def test_numbers_do_not_become_times(aggregate: statelog.Aggregate, kind: str, value: Any, kind_now: str) -> None:
    """They are stored alike, as longs."""
    with started(kind, {"x": aggregate}) as query:
        query.push([("a", value)])
        with (
            started_again(query, kind_now, {"x": aggregate}) as changed,
            pytest.raises(ConfigurationError, match=r"column type of x=.*values of the old type"),
        ):
            changed.push([])


def test_a_wider_type_goes_on_with_the_values() -> None:
    aggregates: dict[str, statelog.Aggregate] = {"x": statelog.Max("n"), "y": statelog.CountDistinct("n")}
    with started("int", aggregates) as query:
        query.push([("a", 5)])
        with started_again(query, "double", aggregates) as changed:
            assert changed.push([("a", 5.0), ("a", 2.5)]) == [Row(user="a", x=5.0, y=2)]


def test_an_aggregate_has_no_part_of_another_one_by_its_name() -> None:
    """The sum of a mean m is a stored field, and m.sum may be the name of an aggregate."""
    mean, most = statelog.Mean("n"), statelog.Max("n")
    with started("double", {"m": mean, "m.sum": most}) as query:
        assert query.push([("a", 1.0), ("a", 3.0)]) == [("a", 2.0, 3.0)]
    with started("double", {"m": mean}) as query:
        query.push([("a", 100.0), ("a", 100.0)])
        with started_again(query, "double", {"m.sum": most}) as changed:
            assert changed.push([("a", 1.0)]) == [("a", 1.0)]
    with started("double", {"m.sum": most}) as query:
        query.push([("a", 100.0)])
        with started_again(query, "double", {"m": mean}) as changed:
            assert changed.push([("a", 1.0)]) == [("a", 1.0)]


def test_an_aggregate_may_be_named_like_the_time_of_the_last_row() -> None:
    plan = of_columns("bigint", {"last_ms": statelog.Sum("n")}, output_mode="append", ttl=5)
    with Harness(
        plan.operator, input="user string, n bigint", output=plan.output, keys=["user"], timeMode=plan.time_mode
    ) as query:
        assert query.push([("a", 7)], 10) == []
        assert query.push([], 15) == [("a", 7)]


def test_the_name_of_a_removed_aggregate_is_not_given_to_another() -> None:
    counts: dict[str, statelog.Aggregate] = {"x": statelog.Count(), "y": statelog.Count()}
    with started("bigint", counts) as query:
        query.push([("a", 5)])
        with started_again(query, "bigint", {"y": statelog.Count()}) as changed:
            changed.push([("b", 5)])
            with (
                started_again(changed, "bigint", {"x": statelog.Max("n"), "y": statelog.Count()}) as later,
                pytest.raises(ConfigurationError, match=r"aggregate x='count'.*x='max\(n\)'"),
            ):
                later.push([])


# ---- What is stored ----


def test_a_savepoint_has_the_settings(tmp_path: Path) -> None:
    location, target = str(tmp_path / "restored"), str(tmp_path / "savepoint")
    with window_harness(SessionWindows(10), "agg", eventTime="time", lateness_ms=20) as harness:
        harness.push([("a", instant(5), 1)])
        harness.advanceWatermark(40)
        snapshot = harness.snapshot()
    source = LocalStore(str(tmp_path / "source"))
    for name, data in snapshot.query.objects.items():
        source.put(name, data)
    options, clock = statelog.Options(), ManualClock(0)
    history = read_history(source).of("main")
    assert history is not None
    saved = save_operator(history, 1, "main", location=str(tmp_path / "source"), target=target, run_all=one_by_one)
    stored = msgspec.json.decode(msgspec.json.encode(saved), type=SavedOperator)
    restore_operators(
        [stored], target, RestoreTarget(location, "q2", "r2", 1, options, clock, lambda: b"t" * 16), one_by_one
    )
    restored = read_history(LocalStore(location)).of("main")
    assert restored is not None
    first = restored.at(1)
    assert first is not None
    assert first.settings == {**settings_of(SessionWindows(10), lateness_ms=20)}
    with pytest.raises(ConfigurationError, match="windows='sessions'"):
        require_convertible(settings_of(TumblingWindows(10)), [], first, "here")
    assert inherit(settings_of(SessionWindows(10)), [], first, "here").closed_ms == 20
