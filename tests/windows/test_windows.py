"""Windows without time passing: assigners, aggregates, output, what is stored, and errors before a query starts."""

from __future__ import annotations

import datetime
import math
import statistics
import traceback
from collections.abc import Iterator
from dataclasses import replace
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import reduce
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import statelog
from statelog import ConfigurationError, ProcessorError
from statelog.clock import SystemClock
from statelog.convert.ddl import parse_ddl
from statelog.convert.times import TimeMode
from statelog.operators.keyed.indexing import IndexedRows
from statelog.operators.keyed.operator import BatchContext
from statelog.operators.keyed.subtask import KeyedSubtask
from statelog.runs.byte_slices import Budget
from statelog.runs.times import Moment
from statelog.stopwatch import Stopwatch
from statelog.tables.runs import RunsTable
from statelog.testing import Harness
from statelog.testing.keyed import KeyedQuery
from statelog.testing.rows import OperatorArguments, read_schema
from statelog.windows.build import WindowDefinition
from tests.model.windows_model import INPUT, KINDS, Rows, instant, window_harness
from tests.panes import ends_of, pane_of

MINUTE = 60_000


def definition(windows: Any = None, schema: str = INPUT, **more: Any) -> WindowDefinition:
    arguments: dict[str, Any] = {"time_mode": TimeMode.EVENT_TIME, "time_column": "time", **more}
    return WindowDefinition(
        read_schema(schema, "input"),
        ["user"],
        "UTC",
        statelog.TumblingWindows(10) if windows is None else windows,
        parse=parse_ddl,
        **arguments,
    )


# ---- Assigners ----


@given(
    size=st.integers(1, 40),
    slide=st.integers(1, 50),
    offset=st.integers(-60, 60),
    time=st.integers(-200, 200),
)
def test_the_windows_of_a_pane_are_those_of_its_rows(size: int, slide: int, offset: int, time: int) -> None:
    panes = statelog.SlidingWindows(size, slide, offset).panes()
    ends = [
        start + size for start in range(-400, 400) if (start - offset) % slide == 0 and start <= time < start + size
    ]
    pane = pane_of(panes, time)
    assert (pane is None) == (not ends)
    if pane is not None:
        assert pane <= time < pane + panes.width_ms
        assert ends_of(panes, pane) == ends
        assert panes.last_end_of(pane) == ends[-1]


@pytest.mark.parametrize(
    ("size", "slide", "width"), [(60, 60, 60), (60, 1, 1), (60, 25, 5), (10, 15, 10), (3_600_000, 60_000, 60_000)]
)
def test_the_width_of_panes(size: int, slide: int, width: int) -> None:
    assert statelog.SlidingWindows(size, slide).panes().width_ms == width


@pytest.mark.parametrize(
    "make",
    [
        lambda: statelog.TumblingWindows(0),
        lambda: statelog.TumblingWindows(1.5),  # type: ignore[arg-type]  # misuse
        lambda: statelog.TumblingWindows(10, "1"),
        lambda: statelog.SlidingWindows(10, 0),
        lambda: statelog.SlidingWindows(True, 1),
        lambda: statelog.SessionWindows(-1),
        lambda: statelog.SessionWindows(1 << 60),
        lambda: statelog.CountWindows(0),
    ],
)
def test_sizes_are_checked(make: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Windows: (size|slide|gap|offset)\w* is .* must be"):
        make()


# ---- What is stored ----


def _stored(windows: Any, kind: str) -> tuple[int, int]:
    """Rows and bytes of the changes of a batch of 600 rows of one key, spread over ten minutes."""
    with window_harness(windows, kind, watermark=statelog.Watermark("time", 0), parallelism=1) as harness:
        harness.push([("a", instant(second * 1000), second) for second in range(600)])
        (metrics,) = harness.checkpoints
        return metrics.changes, metrics.changed_bytes


def test_a_row_is_stored_once_however_many_windows_have_it() -> None:
    tumbling = _stored(statelog.TumblingWindows(MINUTE), "process")
    sliding = _stored(statelog.SlidingWindows(60 * MINUTE, MINUTE), "process")
    # The rows, the count of each of ten panes, and timers: of the new panes that windows share the first alone has one.
    assert tumbling[0] == 600 + 10 + 10
    assert sliding[0] == 600 + 10 + 1
    assert sliding[1] < 1.01 * tumbling[1]


@pytest.mark.parametrize("kind", ["agg", "aggregate", "reduce"])
def test_an_accumulator_per_pane_is_stored(kind: str) -> None:
    assert (
        _stored(statelog.SlidingWindows(60 * MINUTE, MINUTE), kind)[0] == 10 + 1
    )  # a timer for the first of the panes
    assert _stored(statelog.SessionWindows(MINUTE), kind)[0] == 1 + 1


def test_a_pane_is_kept_until_the_last_window_with_it_is_closed() -> None:
    with window_harness(statelog.SlidingWindows(30, 10), "agg", eventTime="time") as harness:
        harness.push([("a", instant(5), 1)])
        for watermark_ms, is_kept in ((10, True), (20, True), (29, True), (30, False)):
            output = harness.advanceWatermark(watermark_ms)
            assert len(output) == (0 if watermark_ms == 29 else 1)
            assert bool(harness.map("window.panes", "a")) == is_kept
        assert harness.timers("a") == []


# ---- Aggregates ----


def _aggregate(column_type: str, batches: list[list[Any]], *aggregates: Any) -> tuple[Any, ...]:
    """The aggregates of one window whose rows come in several batches."""
    schema = f"user string, time timestamp, value {column_type}"
    plan = definition(schema=schema).aggregated(aggregates)
    with Harness(
        plan.operator, input=schema, output=plan.output, keys=["user"], timeMode=plan.time_mode, eventTime="time"
    ) as harness:
        for values in batches:
            harness.push([("a", instant(1), value) for value in values])
        (row,) = harness.advanceWatermark(10)
        return tuple(row[3:])


VALUE_AGGREGATES = (
    statelog.Count(),
    statelog.Count("value"),
    statelog.Sum("value"),
    statelog.Min("value"),
    statelog.Max("value"),
    statelog.First("value"),
    statelog.Last("value"),
    statelog.Collect("value"),
    statelog.CountDistinct("value"),
)


def _by_hand(values: list[Any]) -> tuple[Any, ...]:
    held = [value for value in values if value is not None]
    return (
        len(values),
        len(held),
        reduce(Context(prec=60).add, held) if held and isinstance(held[0], Decimal) else sum(held) if held else None,
        min(held, default=None),
        max(held, default=None),
        values[0],
        values[-1],
        held,
        len(set(held)),
    )


@pytest.mark.parametrize(
    ("column_type", "elements"),
    [
        ("long", st.integers(-(1 << 55), 1 << 55)),
        ("int", st.integers(-(1 << 31), (1 << 31) - 1)),
        ("double", st.integers(-1000, 1000).map(lambda number: number / 4)),
        ("decimal(38,2)", st.integers(-(10**33), 10**33).map(lambda number: Decimal(number).scaleb(-2))),
    ],
)
def test_aggregates_of_numbers(column_type: str, elements: st.SearchStrategy[Any]) -> None:
    @settings(max_examples=25)
    @given(batches=st.lists(st.lists(st.none() | elements, min_size=1, max_size=5), min_size=1, max_size=3))
    def check(batches: list[list[Any]]) -> None:
        found = _aggregate(column_type, batches, *VALUE_AGGREGATES)
        assert found == _by_hand([value for batch in batches for value in batch])

    check()


@pytest.mark.parametrize(
    ("column_type", "values"),
    [
        ("string", ["b", None, "a", "b"]),
        ("boolean", [True, None, False]),
        ("date", [datetime.date(2024, 1, 2), datetime.date(2023, 1, 2), None]),
        ("binary", [b"b", b"a", b""]),
        ("timestamp_ntz", [datetime.datetime(2024, 1, 2, 3, 4, 5, 6), None, datetime.datetime(1969, 1, 1)]),
    ],
)
def test_aggregates_of_other_types(column_type: str, values: list[Any]) -> None:
    aggregates = [aggregate for aggregate in VALUE_AGGREGATES if not isinstance(aggregate, statelog.Sum)]
    held = [value for value in values if value is not None]
    expected = (len(values), len(held), min(held), max(held), values[0], values[-1], held, len(set(held)))
    assert _aggregate(column_type, [values[:2], values[2:]], *aggregates) == expected


def test_nested_values_are_collected() -> None:
    found = _aggregate(
        "array<timestamp>", [[[instant(5)]], [None, []]], statelog.Collect("value"), statelog.First("value")
    )
    local = instant(5).astimezone().replace(tzinfo=None)  # type: ignore[union-attr]  # it has a value
    assert found == ([[local], []], [local])
    assert _aggregate("struct<a:int>", [[{"a": 1}], [{"a": 2}]], statelog.Last("value")) == ((2,),)


@pytest.mark.parametrize(
    "windows", [statelog.TumblingWindows(10), statelog.SessionWindows(5), statelog.CountWindows(3)]
)
def test_structs_in_a_time_zone_are_added_to_those_that_are_stored(windows: Any) -> None:
    schema, zone = "user string, time timestamp, n int, visit struct<at:timestamp>", "America/New_York"
    is_counted = isinstance(windows, statelog.CountWindows)
    mode: dict[str, Any] = {"time_mode": TimeMode.NONE, "time_column": None} if is_counted else {}
    more: dict[str, Any] = {} if is_counted else {"eventTime": "time"}
    aggregates = [statelog.First("visit", by="n"), statelog.Last("visit"), statelog.Collect("visit")]
    plan = replace(definition(windows, schema, **mode), zone=zone).aggregated(aggregates)
    arguments: dict[str, Any] = {"keys": ["user"], "timeMode": plan.time_mode, "sessionTimeZone": zone, **more}
    times = [instant(at) for at in (1, 2, 3)]
    with Harness(plan.operator, input=schema, output=plan.output, **arguments) as harness:
        found = [row for n, at in enumerate(times) for row in harness.push([("a", at, n, {"at": at})])]
        found += [] if is_counted else harness.advanceWatermark(100)
    visits = [(at,) for at in _local(times)]
    assert [tuple(row[-3:]) for row in found] == [(visits[0], visits[2], visits)]


def test_nan_is_the_greatest_number_and_one_value() -> None:
    values = [[1.0, math.nan], [math.nan, -1.0]]
    least, greatest, distinct, total = _aggregate(
        "double",
        values,
        statelog.Min("value"),
        statelog.Max("value"),
        statelog.CountDistinct("value"),
        statelog.Sum("value"),
    )
    assert (least, distinct) == (-1.0, 3)
    assert math.isnan(greatest)
    assert math.isnan(total)


def test_a_sum_that_is_too_large_is_an_error() -> None:
    with pytest.raises(ProcessorError, match=r"key \('a',\): a sum is out of range for long"):
        _aggregate("long", [[1 << 62, 1 << 62]], statelog.Sum("value"))


def test_the_mean_of_nothing_is_null() -> None:
    assert _aggregate("int", [[None, None]], statelog.Mean("value")) == (None,)
    assert _aggregate("int", [[None, 1], [2]], statelog.Mean("value")) == (1.5,)


ALL_AGGREGATES = (
    statelog.Count(),
    statelog.Sum("x"),
    statelog.Mean("d"),
    statelog.Variance("x"),
    statelog.StandardDeviation("x", population=True),
    statelog.Min("x"),
    statelog.First("x", by="n"),
    statelog.Last("x", by="n"),
    statelog.First("n"),
    statelog.Last("n"),
    statelog.Collect("n"),
    statelog.CountDistinct("x"),
    statelog.ApproxCountDistinct("x"),
    statelog.Quantiles("x", [0.5, 1]),
)
NUMBERS = st.tuples(st.integers(0, 90), st.none() | st.integers(-20, 20))


@pytest.mark.parametrize(
    "windows",
    [
        statelog.TumblingWindows(20),
        statelog.SlidingWindows(40, 5),
        statelog.SlidingWindows(100, 1),
        statelog.SessionWindows(6),
        statelog.CountWindows(4),
    ],
    ids=["tumbling", "sliding", "many panes", "sessions", "counts"],
)
def test_every_aggregate_is_that_of_the_rows_of_its_window(windows: Any) -> None:
    """All times differ, so that the first and the last row are clear; rows come in several batches."""
    schema = "user string, time timestamp, n int, x double, d decimal(10,2)"
    is_counted = isinstance(windows, statelog.CountWindows)
    mode = {"time_mode": TimeMode.NONE, "time_column": None} if is_counted else {}
    plan = definition(windows, schema, **mode).aggregated(ALL_AGGREGATES)

    @settings(max_examples=15, deadline=None)
    @given(rows=st.lists(NUMBERS, min_size=1, max_size=24, unique_by=lambda row: row[0]), cut=st.integers(0, 24))
    def check(rows: list[tuple[int, int | None]], cut: int) -> None:
        more: dict[str, Any] = {} if is_counted else {"eventTime": "time"}
        with Harness(
            plan.operator, input=schema, output=plan.output, keys=["user"], timeMode=plan.time_mode, **more
        ) as harness:
            rows = sorted(rows[:cut]) + sorted(rows[cut:])  # values are collected in order of time in each batch
            values = [
                ("a", instant(at), at, None if x is None else x / 4, None if x is None else Decimal(x))
                for at, x in rows
            ]
            found = [row for part in (values[:cut], values[cut:]) if part for row in harness.push(part)]
            found += [] if is_counted else harness.advanceWatermark(1000)
        expected = [_aggregates_by_hand(inside, by_time=not is_counted) for inside in _windows_by_hand(windows, rows)]
        assert [tuple(row[1 if is_counted else 3 :]) for row in found] == expected

    check()


def _windows_by_hand(windows: Any, rows: list[tuple[int, int | None]]) -> list[list[tuple[int, int | None]]]:
    """The rows of each window, in order of arrival."""
    if isinstance(windows, statelog.CountWindows):
        return [rows[start : start + 4] for start in range(0, len(rows) - 3, 4)]
    if isinstance(windows, statelog.SessionWindows):
        sessions: list[list[int]] = []
        for at, _ in sorted(rows):
            if sessions and at - sessions[-1][-1] <= windows.gap_ms:
                sessions[-1].append(at)
            else:
                sessions.append([at])
        return [[row for row in rows if row[0] in session] for session in sessions]
    slide = windows.slide_ms if isinstance(windows, statelog.SlidingWindows) else windows.size_ms
    starts = range(-windows.size_ms - windows.size_ms % slide, 100, slide)
    found = [[row for row in rows if start <= row[0] < start + windows.size_ms] for start in starts]
    return [inside for inside in found if inside]


def _aggregates_by_hand(rows: list[tuple[int, int | None]], *, by_time: bool) -> tuple[Any, ...]:
    numbers = [x / 4 for _, x in rows if x is not None]
    ordered = sorted(rows)
    first, last = (None if x is None else x / 4 for _, x in (ordered[0], ordered[-1]))
    arrived = ordered if by_time else rows
    mean = statistics.fmean(numbers) if numbers else None
    digits = Decimal("0.000001")
    total = Decimal(sum(x for _, x in rows if x is not None))
    return (
        len(rows),
        sum(numbers) if numbers else None,
        None if mean is None else (total / len(numbers)).quantize(digits, ROUND_HALF_UP),
        pytest.approx(statistics.variance(numbers)) if len(numbers) > 1 else None,
        pytest.approx(statistics.pstdev(numbers)) if numbers else None,
        min(numbers, default=None),
        first,
        last,
        arrived[0][0],
        arrived[-1][0],
        [at for at, _ in rows] if not by_time else _Collected([at for at, _ in rows]),
        len(set(numbers)),
        len(set(numbers)),
        [sorted(numbers)[math.ceil(part * len(numbers)) - 1] for part in (0.5, 1)] if numbers else None,
    )


class _Collected(list[int]):
    """Values in any order: those of a session are merged before those of the batch, of a window by pane."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and sorted(self) == sorted(other)


def test_numbers_are_compared_and_added_as_in_keyed_aggregates() -> None:
    zeros = statelog.CountDistinct("value").alias("zeros")
    assert _aggregate("double", [[-0.0], [0.0]], zeros, statelog.Sum("value")) == (1, 0.0)
    infinite: list[list[Any]] = [[math.inf], [-math.inf, None]]
    least, total = _aggregate("double", infinite, statelog.Min("value"), statelog.Sum("value"))
    assert least == -math.inf
    assert math.isnan(total)


def test_a_sum_wraps_around_without_ansi_mode() -> None:
    schema = "user string, time timestamp, value long, d decimal(38,0)"
    plan = definition(schema=schema, ansi=False).aggregated([statelog.Sum("value"), statelog.Sum("d")])
    with Harness(
        plan.operator, input=schema, output=plan.output, keys=["user"], timeMode=plan.time_mode, eventTime="time"
    ) as harness:
        for _ in range(2):
            harness.push([("a", instant(1), 1 << 62, Decimal(10**38 - 1))])
        (row,) = harness.advanceWatermark(10)
    assert tuple(row[3:]) == (-(1 << 63), None)


@pytest.mark.parametrize(
    "windows", [statelog.SlidingWindows(30, 10), statelog.SessionWindows(5), statelog.CountWindows(3)]
)
def test_a_sum_that_is_too_large_names_its_key(windows: Any) -> None:
    """Of several keys, and in whichever step it is found."""
    is_counted = isinstance(windows, statelog.CountWindows)
    mode: dict[str, Any] = {"time_mode": TimeMode.NONE, "time_column": None} if is_counted else {}
    plan = definition(windows, **mode).aggregated([statelog.Sum("n")])
    more: dict[str, Any] = {} if is_counted else {"eventTime": "time"}
    times = (1, 11, 12) if isinstance(windows, statelog.SlidingWindows) else (1, 2, 3)
    with Harness(
        plan.operator, input=INPUT, output=plan.output, keys=["user"], timeMode=plan.time_mode, parallelism=1, **more
    ) as harness:
        rows = [(user, instant(at), 1 << 62 if user == "c" else 1) for user in "abcde" for at in times[:2]]
        is_sliding = isinstance(windows, statelog.SlidingWindows)
        if is_sliding:
            harness.push(rows)
        with pytest.raises(ProcessorError, match=r"key \('c',\): a sum is out of range for long"):
            harness.advanceWatermark(1000) if is_sliding else harness.push(rows)


def test_values_that_are_too_large_for_a_window_name_the_key() -> None:
    text = "x" * (33 << 20)
    with pytest.raises(ProcessorError, match=r"key \('a',\): its values take .* the limit is 67,108,864"):
        _aggregate("string", [[text], [text]], statelog.Collect("value"))


def test_names_and_types_of_aggregates() -> None:
    schema = "user string, time timestamp, d decimal(12,2), f float, i smallint"
    plan = definition(schema=schema).aggregated(
        [
            statelog.Count(),
            statelog.Count("d"),
            statelog.Sum("d").alias("total"),
            statelog.Sum("f"),
            statelog.Sum("i"),
            statelog.Max("time"),
            statelog.Collect("i"),
            statelog.CountDistinct("i"),
        ]
    )
    assert plan.output.simpleString() == (
        "struct<user:string,window_start:timestamp,window_end:timestamp,count:bigint,count(d):bigint,"
        "total:decimal(22,2),sum(f):double,sum(i):bigint,max(time):timestamp,collect(i):array<smallint>,"
        "count_distinct(i):bigint>"
    )


def test_an_aggregate_that_is_added_counts_from_then_on() -> None:
    windows = definition()
    before = windows.aggregated([statelog.Count(), statelog.Sum("n")])
    after = windows.aggregated([statelog.Max("n"), statelog.Sum("n"), statelog.Mean("n"), statelog.Collect("n")])
    with Harness(
        before.operator, input=INPUT, output=before.output, keys=["user"], timeMode="EventTime", eventTime="time"
    ) as harness:
        harness.push([("a", instant(1), 5), ("b", instant(1), 7)])
        snapshot = harness.snapshot()
    other = Harness.restore(_with_output(snapshot, after.output), after.operator)
    with other:
        other.push([("a", instant(2), 1)])
        rows = {row[0]: tuple(row[3:]) for row in other.advanceWatermark(10)}
    assert rows == {"a": (1, 6, 1.0, [1]), "b": (None, 7, None, [])}


def _with_output(snapshot: Any, output: Any) -> Any:
    from dataclasses import replace

    return replace(snapshot, arguments=replace(snapshot.arguments, output=output))


# ---- Errors before a query starts ----


class NoMerge(statelog.AggregateFunction[Any, Any]):
    def createAccumulator(self) -> tuple[Any, ...]:
        return (0,)

    def add(self, value: Any, accumulator: Any) -> tuple[Any, ...]:
        return (accumulator[0] + 1,)

    def getResult(self, accumulator: Any) -> Any:
        return accumulator[0]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: definition("10 seconds"), "window takes one of TumblingWindows, SlidingWindows"),
        (lambda: definition(time_column="n"), "'n', which is not a timestamp column.*n bigint"),
        (lambda: definition(time_column="nothing"), "'nothing', which is not a timestamp column"),
        (
            lambda: definition(time_mode=TimeMode.PROCESSING_TIME, time_column=None, late_column="late"),
            "in event time only",
        ),
        (lambda: definition().aggregated([]), "at least one"),
        (lambda: definition().aggregated(["n"]), "such as statelog.Sum"),  # type: ignore[list-item]  # misuse
        (lambda: definition().aggregated([statelog.Sum("x")]), r"Sum\('x'\): there is no such column.*user, time, n"),
        (lambda: definition().aggregated([statelog.Sum("user")]), r"Sum\('user'\): the column is string"),
        (lambda: definition().aggregated([statelog.Mean("time")]), r"Mean\('time'\): the column is timestamp"),
        (lambda: definition().aggregated([statelog.Sum("n"), statelog.Sum("n")]), r"named 'sum\(n\)'.*alias"),
        (lambda: definition().aggregated([statelog.Sum("n").alias("window_end")]), "columns.*named 'window_end'"),
        (lambda: definition(late_column="user").aggregated([statelog.Count()]), "columns.*named 'user'"),
        (lambda: definition().reduced(lambda a, b: a, "x long", None), "'x', which is not a column"),
        (lambda: definition().reduced("max", "n long", None), "reduce takes functions"),  # type: ignore[arg-type]  # misuse
        (lambda: definition().reduced(max, "n lnog", None), "value_schema 'n lnog' cannot be parsed"),
        (lambda: definition(statelog.SessionWindows(1)).folded(NoMerge(), "n long", "n long"), "has no merge"),
        (lambda: definition(statelog.SlidingWindows(2, 1)).folded(NoMerge(), "n long", "n long"), "has no merge"),
        (lambda: definition().folded(NoMerge, "n long", "n long"), "not the class"),  # type: ignore[arg-type]  # misuse
        (
            lambda: definition(statelog.SessionWindows(1)).reduced(max, "session_end_ms long", lambda row: (1,)),
            "'session_end_ms'.*a name that the windows use themselves",
        ),
        (lambda: definition().processed(Rows, "n long"), "not the class"),  # type: ignore[arg-type]  # misuse
        (lambda: statelog.Sum("n").alias(""), "is not a column name"),
    ],
)
def test_mistakes_are_told_before_the_query_starts(act: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        act()


def test_counted_windows_need_no_merge() -> None:
    windows = definition(statelog.CountWindows(2), time_mode=TimeMode.NONE, time_column=None)
    assert windows.folded(NoMerge(), "n long", "n long").output.names == ["user", "n"]


def test_a_result_that_is_no_tuple_is_an_error_of_the_function() -> None:
    plan = definition().folded(NoMerge(), "n long", "n long")
    with Harness(
        plan.operator, input=INPUT, output=plan.output, keys=["user"], timeMode="EventTime", eventTime="time"
    ) as harness:
        harness.push([("a", instant(1), 1)])
        with pytest.raises(ProcessorError, match=r"getResult\(\) of NoMerge returned int 1.*\(value,\)"):
            harness.advanceWatermark(10)


class WithTimer(statelog.WindowProcessor):
    def init(self, handle: Any) -> None:
        handle.registerTimer(1)

    def process(self, key: Any, window: Any, rows: Any, context: Any) -> Iterator[Any]:
        return iter(())


def test_a_window_processor_has_no_timers() -> None:
    plan = definition().processed(WithTimer(), "n long")
    with pytest.raises(ProcessorError, match="no timers of its own"):
        Harness(plan.operator, input=INPUT, output=plan.output, keys=["user"], timeMode="EventTime", eventTime="time")


class Times(statelog.WindowProcessor):
    def process(self, key: Any, window: Any, rows: Any, context: Any) -> Iterator[Any]:
        return ((str(row.time),) for row in rows)


def test_times_are_in_a_session_time_zone_that_is_an_offset() -> None:
    plan = replace(definition(), zone="+02:00").processed(Times(), "time string")
    arguments: dict[str, Any] = {
        "keys": ["user"],
        "timeMode": "EventTime",
        "eventTime": "time",
        "sessionTimeZone": "+02:00",
    }
    with Harness(plan.operator, input=INPUT, output=plan.output, **arguments) as harness:
        harness.push([("a", instant(1), 1)])
        assert harness.advanceWatermark(10) == [("1970-01-01 02:00:00.001000+02:00",)]


def test_a_window_knows_its_bounds() -> None:
    window = statelog.TimeWindow(-1, 86_400_000)
    assert (window.start, window.end) == (instant(-1), instant(86_400_000))
    assert set(KINDS) == {"process", "agg", "reduce", "aggregate"}


# ---- Rows and values ----


class Spoiled(statelog.WindowProcessor):
    """Returns the lists of a window's rows, and changes them."""

    def process(self, key: Any, window: Any, rows: Any, context: Any) -> Iterator[Any]:
        found = []
        for row in rows:
            found.append(str(row.list))
            row.list.append(0)
        yield (window.end_ms, " ".join(found))


@pytest.mark.parametrize("lateness_ms", [0, 100])
def test_a_window_does_not_see_what_another_has_done_to_a_row(lateness_ms: int) -> None:
    schema = "user string, time timestamp, list array<long>"
    windows = definition(statelog.SlidingWindows(30, 10), schema, allowed_lateness_ms=lateness_ms)
    plan = windows.processed(Spoiled(), "end long, lists string")
    with Harness(
        plan.operator, input=schema, output=plan.output, keys=["user"], timeMode="EventTime", eventTime="time"
    ) as harness:
        harness.push([("a", instant(5), [1]), ("a", instant(6), [2])])
        assert harness.advanceWatermark(30) == [(end, "[1] [2]") for end in (10, 20, 30)]
        late = harness.push([("a", instant(7), [3])])
        assert late == ([(end, "[1] [2] [3]") for end in (10, 20, 30)] if lateness_ms else [])


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ("n long", [(1,), (None,), (2,)]),
        ("n double", [(1.0,), (None,), (2.0,)]),
        ("name string, n long", [("b", 1), ("b", None), ("b", 2)]),
        ("times array<timestamp>, n int", [([], 1), (None, None), ([instant(5)], 2)]),
    ],
)
def test_values_made_of_columns_have_the_types_of_their_schema(schema: str, values: list[Any]) -> None:
    columns = "user string, time timestamp, name string, n long, times array<timestamp>"
    expected = [tuple(_local(part) for part in value) for value in values]

    def last(one: Any, other: Any) -> Any:
        for value in (one, other):
            [like] = [like for like in expected if like == value]
            assert list(map(type, value)) == list(map(type, like))
        return other

    plan = definition(statelog.TumblingWindows(1000), columns).reduced(last, schema, None)
    rows = [("a", instant(1), "b", 1, []), ("a", instant(2), "b", None, None), ("a", instant(3), "b", 2, [instant(5)])]
    with Harness(
        plan.operator, input=columns, output=plan.output, keys=["user"], timeMode="EventTime", eventTime="time"
    ) as harness:
        harness.push(rows)
        [(*_, value)] = harness.advanceWatermark(1000)
    assert value == values[-1][-1]


def _local(value: Any) -> Any:
    """Timestamps of state values are local times."""
    if isinstance(value, list):
        return [at.astimezone().replace(tzinfo=None) for at in value]
    return value


# ---- Errors of the user's functions ----


class Failing(statelog.AggregateFunction[Any, Any]):
    """Fails for one user: while rows are added, or when a result is made."""

    def __init__(self, *, at_result: bool) -> None:
        self._at_result = at_result

    def createAccumulator(self) -> tuple[Any, ...]:
        return (0, "")

    def add(self, value: Any, accumulator: Any) -> tuple[Any, ...]:
        if value.user == "c" and not self._at_result:
            raise ValueError("no such user")
        return (accumulator[0] + 1, value.user)

    def getResult(self, accumulator: Any) -> Any:
        if accumulator[1] == "c":
            raise ValueError("no such user")
        return accumulator[:1]


class FailingRows(statelog.WindowProcessor):
    def process(self, key: Any, window: Any, rows: Any, context: Any) -> Iterator[Any]:
        for row in rows:
            if row.user == "c":
                raise ValueError("no such user")
            yield (row.n,)


def _failing_reduce(one: Any, other: Any) -> Any:
    if one[1] == "c":
        raise ValueError("no such user")
    return one


@pytest.mark.parametrize("windows", [statelog.TumblingWindows(10), statelog.SessionWindows(5)])
@pytest.mark.parametrize(
    ("make", "method", "function"),
    [
        (
            lambda windows: windows.reduced(_failing_reduce, "n long, u string", lambda row: (row.n, row.user)),
            "reduce",
            "_failing_reduce",
        ),
        (lambda windows: windows.folded(_Merging(at_result=False), "n long, u string", "n long"), "aggregate", "add"),
        (
            lambda windows: windows.folded(_Merging(at_result=True), "n long, u string", "n long"),
            "aggregate",
            "getResult",
        ),
        (lambda windows: windows.processed(FailingRows(), "n long"), "process", "process"),
    ],
)
def test_an_error_of_a_function_names_the_key_and_keeps_its_traceback(
    windows: Any, make: Any, method: str, function: str
) -> None:
    plan = make(definition(windows))
    options: dict[str, Any] = {"timeMode": "EventTime", "eventTime": "time", "parallelism": 1}
    rows = [(user, instant(at), at) for user in "abcde" for at in (1, 2)]
    with Harness(plan.operator, input=INPUT, output=plan.output, keys=["user"], **options) as harness:
        is_at_result = function in ("getResult", "process")
        if is_at_result:
            harness.push(rows)
        with pytest.raises(ProcessorError) as caught:
            harness.advanceWatermark(100) if is_at_result else harness.push(rows)
    assert f"{method}() failed for key ('c',): ValueError: no such user" in str(caught.value)
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, ValueError):
        error = error.__cause__
    assert error is not None
    assert function in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


class _Merging(Failing):
    def merge(self, one: Any, other: Any) -> Any:
        return (one[0] + other[0], one[1])


class Remembering(statelog.WindowProcessor):
    """Counts the windows of a key that are not long ago."""

    def init(self, handle: Any) -> None:
        self._windows = handle.getValueState("windows", "n long", statelog.Ttl(50, "event"))
        self._ends = handle.getMapState("ends", "end long", "n long")

    def process(self, key: Any, window: Any, rows: Any, context: Any) -> Iterator[Any]:
        count = (self._windows.get() or (0,))[0] + 1
        self._windows.update((count,))
        self._ends.updateValue((window.end_ms,), (count,))
        yield (key[0], count, len(list(self._ends.keys())))


def test_states_of_a_processor_are_those_of_the_key_and_expire_in_event_time() -> None:
    plan = definition(allowed_lateness_ms=1000).processed(Remembering(), "user string, count long, ends long")
    with Harness(
        plan.operator, input=INPUT, output=plan.output, keys=["user"], timeMode="EventTime", eventTime="time"
    ) as harness:
        harness.push([("a", instant(1), 1), ("a", instant(11), 1), ("b", instant(1), 1)])
        assert sorted(harness.advanceWatermark(20)) == [("a", 1, 1), ("a", 2, 2), ("b", 1, 1)]
        assert harness.push([("a", instant(2), 1)]) == [("a", 3, 2)]
        assert harness.value("windows", "b") == (1,)
        harness.push([("a", instant(200), 1)])
        assert harness.advanceWatermark(300) == [("a", 1, 3)]


@pytest.mark.parametrize(("kind", "most_keys"), [("agg", 100), ("reduce", 7), ("aggregate", 7), ("process", 7)])
def test_rows_become_objects_for_fewer_keys_at_once(kind: str, most_keys: int) -> None:
    plan = KINDS[kind](definition())
    arguments = OperatorArguments(
        input=INPUT, output=plan.output, keys=["user"], timeMode="EventTime", eventTime="time"
    )
    query = KeyedQuery(plan.operator, arguments, statelog.Options())
    operator = replace(query.operator.make(), budget=Budget(window_keys=7, column_keys=100))
    sizes: list[int] = []
    process = operator.processor.process

    def counted(chunk: IndexedRows, moment: Moment) -> Any:
        sizes.append(len(chunk.keys))
        return process(chunk, moment)

    operator.processor.process = counted
    context = BatchContext(1, 0, Moment(0, 0))
    subtask = KeyedSubtask(operator, RunsTable(), context, Stopwatch(SystemClock()))
    assert not sum(rows.num_rows for rows in subtask.process(query.data([(str(n), instant(1), n) for n in range(20)])))
    assert sum(sizes) == 20
    assert max(sizes) == min(20, most_keys)
