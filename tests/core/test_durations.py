"""Durations in all their forms, and what takes them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import statelog
from statelog import ArrowProcessor, ConfigurationError, Observer, Options, Ttl, Tuning, Watermark
from statelog.numbers import in_milliseconds, in_seconds
from statelog.testing import Harness, TwsTester
from tests.options import make_options

UNITS_MS = {"week": 604_800_000, "day": 86_400_000, "hour": 3_600_000, "minute": 60_000, "second": 1000}
NOW_MS = 1_800_000_000_000
FOREVER_MS = (1 << 63) - 1


@given(st.lists(st.tuples(st.integers(-1000, 1000), st.sampled_from(sorted(UNITS_MS))), min_size=1, max_size=5))
def test_words_add_up(parts: list[tuple[int, str]]) -> None:
    words = " ".join(f"{number} {unit}{'s' if number % 2 else ''}" for number, unit in parts)
    expected = sum(number * UNITS_MS[unit] for number, unit in parts)
    assert in_milliseconds(words, "it", least=-(10**13)) == expected
    assert in_seconds(words, "it") == expected / 1000


@pytest.mark.parametrize(
    ("given", "expected_ms"),
    [
        (90_000, 90_000),
        (np.int64(90_000), 90_000),
        (timedelta(minutes=1.5), 90_000),
        ("90 seconds", 90_000),
        (" INTERVAL 1 Minute\t30.000 SECONDS ", 90_000),
        ("2 minutes -30 seconds", 90_000),
        ("90000000 microseconds", 90_000),
    ],
)
def test_a_duration_has_several_forms(given: Any, expected_ms: int) -> None:
    assert in_milliseconds(given, "it") == expected_ms
    assert Ttl(given) == Ttl(expected_ms)
    assert Ttl(given).duration_ms == Watermark("at", given).delay_ms == expected_ms
    assert statelog.TumblingWindows(given, given).panes() == statelog.TumblingWindows(expected_ms, expected_ms).panes()
    assert statelog.SlidingWindows(given, given, given) == statelog.SlidingWindows(*[expected_ms] * 3)
    assert statelog.SessionWindows(given).gap_ms == expected_ms


NO_DURATIONS: list[Any] = [
    *(1.5, 10.0, True, None, b"10 seconds", np.timedelta64(5, "s"), {5}),
    *("", "10", "10seconds", "ten seconds", "1.5 minutes", "10 seconds ago", "1 second,", "interval"),
    *("1500 microseconds", timedelta(microseconds=1500)),
    *(-1, "-1 second", 1 << 60, timedelta(days=999_999_999)),
]


@pytest.mark.parametrize("given", NO_DURATIONS)
@pytest.mark.parametrize(
    ("make", "subject"),
    [
        (Watermark, "The watermark's delay"),
        (lambda _, given: statelog.TumblingWindows(given), "TumblingWindows: size"),
        (lambda _, given: statelog.SlidingWindows(5, given), "SlidingWindows: slide"),
        (lambda _, given: statelog.SessionWindows(given), "SessionWindows: gap"),
    ],
)
def test_what_is_no_duration_is_refused_by_name(make: Callable[[str, Any], Any], subject: str, given: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"^{subject} is {type(given).__name__} .*'10 seconds'"):
        make("at", given)


def test_months_have_no_length() -> None:
    with pytest.raises(ConfigurationError, match="'2 months'.*use days"):
        Ttl("2 months")


def test_options_take_durations_and_hold_seconds() -> None:
    observer = Observer()
    made = Options(
        heartbeat_s="500 milliseconds",
        driver_timeout_s=timedelta(minutes=2),
        retained_s={"1 minute": timedelta(hours=1), 3600: 86_400},
        observer=observer,
        tuning=Tuning(log_min_age_s=np.int64(4)),  # type: ignore[arg-type]  # a number all the same
    )
    retained_s = {60.0: 3600.0, 3600.0: 86_400.0}
    assert made == Options(
        heartbeat_s=0.5, driver_timeout_s=120, retained_s=retained_s, observer=observer, tuning=Tuning(log_min_age_s=4)
    )
    assert made.heartbeat_ms == 500
    assert made.retained_spans_s == {60: 3600, 3600: 86_400}
    copy = pickle.loads(pickle.dumps(replace(made, restore_deadline_s="1 hour")))
    assert (copy.restore_deadline_s, copy.driver_timeout_s) == (3600, 120)
    assert Options().restore_deadline_s is None


@pytest.mark.parametrize(
    "given",
    [
        {"driver_timeout_s": "5"},
        {"driver_timeout_s": None},
        {"driver_timeout_s": True},
        {"driver_timeout_s": "0 seconds"},
        {"heartbeat_s": "50 milliseconds"},
        {"heartbeat_s": "1 month"},
        {"retained_s": {"1 hour": "1 minute"}},
        {"retained_s": {"hour": "1 day"}},
        {"retained_s": 5},
        {"max_file_bytes": "5"},
    ],
)
def test_options_refuse_other_values_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"ption {next(iter(given))} is"):
        make_options(**given)


class Remembers(StatefulProcessor):
    """Tells which states have a value of the key, then writes all of them."""

    def __init__(self, ttl: Any) -> None:
        self._ttl = ttl

    def init(self, handle: Any) -> None:
        self._value = handle.getValueState("value", "n long", self._ttl)
        self._list = handle.getListState("list", "n long", self._ttl)
        self._map = handle.getMapState("map", "k long", "n long", self._ttl)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        found = (self._value.exists(), len(list(self._list.get())), self._map.containsKey((1,)))
        self._value.update((1,))
        self._list.appendValue((1,))
        self._map.updateValue((1,), (1,))
        yield (key[0], str(found))

    def close(self) -> None:
        pass


class RemembersColumns(ArrowProcessor):
    """The same in columns, with one key."""

    def __init__(self, ttl: Any) -> None:
        self._ttl = ttl

    def init(self, handle: Any) -> None:
        self._value = handle.getValueState("value", "n long", self._ttl)
        self._list = handle.getListState("list", "n long", self._ttl)
        self._map = handle.getMapState("map", "k long", "n long", self._ttl)

    def process(self, batch: Any) -> Any:
        found = (bool(self._value.exists()[0]), len(self._list.entries().key_index), len(self._map.entries().key_index))
        self._value.put({"n": [1]})
        self._list.append([0], {"n": [1]})
        self._map.put([0], {"k": [1]}, {"n": [1]})
        return pa.table({"user": batch.keys.column("user"), "found": [str((*found[:2], bool(found[2])))]})


@pytest.mark.parametrize("processor", [Remembers, RemembersColumns])
@pytest.mark.parametrize("table", ["runs", "memory", "rocksdb"])
@pytest.mark.parametrize("time", ["processing", "event"])
@pytest.mark.parametrize("duration", [1 << 31, 1 << 62, FOREVER_MS - NOW_MS, FOREVER_MS - 1, FOREVER_MS])
def test_a_ttl_that_ends_beyond_64_bits_never_ends(processor: Any, table: Any, time: Any, duration: int) -> None:
    at = datetime.fromtimestamp(NOW_MS / 1000, UTC)
    arguments: dict[str, Any] = {"keys": ["user"], "parallelism": 1, "options": Options(table=table)}
    arguments |= {"input": "user string, at timestamp", "output": "user string, found string"}
    arguments |= {"timeMode": "EventTime", "eventTime": "at"} if time == "event" else {"timeMode": "ProcessingTime"}
    with Harness(processor(Ttl(duration, time)), **arguments) as query:
        assert query.push([("a", at)], NOW_MS)[0].found == "(False, 0, False)"
        query.restart(2, keepLocal=False)
        later = at + timedelta(days=20)
        assert query.push([("a", later)], NOW_MS + 20 * 86_400_000)[0].found == "(True, 1, True)"
        query.restart(1, keepLocal=False)
        assert query.push([("a", later)], NOW_MS + 21 * 86_400_000)[0].found == "(True, 2, True)"


ZERO_OR_NOT = [(0, True), (np.int64(0), True), ("0 seconds", True), (np.int64(5), False), ("5 milliseconds", False)]


@pytest.mark.parametrize(("ttl", "kept"), ZERO_OR_NOT)
def test_a_ttl_of_zero_is_none(ttl: Any, kept: bool) -> None:
    tester = TwsTester(Remembers(ttl), timeMode="ProcessingTime")
    tester.setProcessingTime(1000)
    tester.test("a", [Row(n=1)])
    tester.setProcessingTime(1005)
    assert tester.test("a", [Row(n=1)])[0][1] == str((kept, int(kept), kept))


@pytest.mark.parametrize("ttl", [FOREVER_MS, np.int64(FOREVER_MS), 1 << 51])
def test_sparks_argument_takes_a_ttl_up_to_the_largest_number(ttl: Any) -> None:
    tester = TwsTester(Remembers(ttl), timeMode="ProcessingTime")
    tester.setProcessingTime(NOW_MS)
    tester.test("a", [Row(n=1)])
    tester.setProcessingTime(NOW_MS + (1 << 40))
    assert tester.test("a", [Row(n=1)])[0][1] == "(True, 1, True)"


@pytest.mark.parametrize("ttl", [1.5, "5", True, [5], np.array([1, 2]), -1])
def test_a_ttl_that_is_no_duration_is_refused_with_its_type(ttl: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"state 'value': its TTL is {type(ttl).__name__} "):
        TwsTester(Remembers(ttl), timeMode="ProcessingTime")
