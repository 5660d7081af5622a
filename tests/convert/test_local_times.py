"""Timestamps without a zone are local times of the process, in every zone and all years of Python."""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from zoneinfo import ZoneInfo

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given, settings

from statelog.convert.local_times import (
    local_times,
    only_readable,
    plain_or_readable,
    timestamp_column,
    to_local,
    to_utc,
)

UTC = datetime.UTC
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=UTC)
DAY = datetime.timedelta(days=1)
ZONES = [
    "UTC",
    "America/New_York",
    "Europe/Berlin",  # with seconds before 1893
    "Asia/Kathmandu",
    "Australia/Lord_Howe",  # whose clock goes back by half an hour
    "Africa/Monrovia",  # with seconds until 1972
    "Pacific/Apia",  # which left out a day
]

NAIVE = st.datetimes(datetime.datetime.min + 2 * DAY, datetime.datetime.max - 2 * DAY) | st.datetimes(
    datetime.datetime(1880, 1, 1), datetime.datetime(2110, 1, 1)
)
TURNS = [
    datetime.datetime(2024, 3, 10, 2),
    datetime.datetime(2024, 11, 3, 1),
    datetime.datetime(2024, 3, 31, 2),
    datetime.datetime(2024, 10, 27, 2),
    datetime.datetime(2024, 4, 7, 1, 30),
    datetime.datetime(2062, 3, 26, 2),
    datetime.datetime(1972, 1, 7),
    datetime.datetime(2011, 12, 30),
]
"""When clocks go forth or back."""
NEAR = st.builds(lambda turn, more: turn + more, st.sampled_from(TURNS), st.timedeltas(-DAY / 8, DAY / 8))
CLOCKS = st.builds(lambda at, fold: at.replace(fold=fold), NAIVE | NEAR, st.integers(0, 1))
"""What clocks show, or leave out."""


@pytest.fixture(params=ZONES)
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ZoneInfo]:
    """The zone of the process."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield ZoneInfo(request.param)
    time.tzset()


in_every_zone = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)


def instant(clock: datetime.datetime, zone: ZoneInfo) -> datetime.datetime:
    """The instant that Python finds with its own table of zones."""
    return clock.replace(tzinfo=zone).astimezone(UTC)


def clock(instant: datetime.datetime, zone: ZoneInfo) -> datetime.datetime:
    return instant.astimezone(zone).replace(tzinfo=None)


def micros(instant: datetime.datetime) -> int:
    return (instant - EPOCH) // datetime.timedelta(microseconds=1)


@in_every_zone
@given(at=CLOCKS)
def test_a_local_time_is_an_instant(zone: ZoneInfo, at: datetime.datetime) -> None:
    assert to_utc(at) == instant(at, zone)
    assert repr(to_local(at)) == repr(clock(instant(at, zone), zone))


@in_every_zone
@given(at=NAIVE | NEAR)
@example(at=datetime.datetime(1951, 9, 8, 14))  # clocks were put back in Tokyo
def test_an_instant_is_a_local_time(zone: ZoneInfo, at: datetime.datetime) -> None:
    for known in (UTC, datetime.timezone(datetime.timedelta(hours=-3)), ZoneInfo("Asia/Tokyo")):
        given = at.replace(tzinfo=UTC).astimezone(known)
        assert repr(to_local(given)) == repr(clock(given, zone))
        assert to_utc(given).utcoffset() == datetime.timedelta()
        # Python never finds times of two zones equal if one of them is ambiguous.
        assert to_utc(given) == given.astimezone(UTC)


@in_every_zone
@given(at=st.lists(NAIVE | NEAR))
def test_columns_have_local_times(zone: ZoneInfo, at: list[datetime.datetime]) -> None:
    instants = [each.replace(tzinfo=UTC) for each in at]
    found = local_times(np.array([micros(each) for each in instants], np.int64))
    assert list(map(repr, found)) == [repr(clock(each, zone)) for each in instants]


ZONES_OF_VALUES = st.sampled_from(
    [
        None,
        UTC,
        ZoneInfo("UTC"),
        ZoneInfo("America/New_York"),
        datetime.timezone(datetime.timedelta(hours=2)),
        datetime.timezone(datetime.timedelta(microseconds=-1)),
    ]
)


@in_every_zone
@given(at=st.lists(st.none() | CLOCKS), zones=st.lists(ZONES_OF_VALUES, min_size=1, max_size=2), pick=st.randoms())
def test_columns_are_made_of_local_times_and_of_times_in_zones(
    zone: ZoneInfo, at: list[datetime.datetime | None], zones: list[datetime.tzinfo | None], pick: random.Random
) -> None:
    values = [None if each is None else each.replace(tzinfo=pick.choice(zones)) for each in at]
    expected = [
        None if each is None else each.astimezone(UTC) if each.tzinfo else instant(each, zone) for each in values
    ]
    assert timestamp_column(values).to_pylist() == expected


def test_a_time_that_the_clock_leaves_out_is_later_and_fold_tells_the_second_of_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        missing, twice = datetime.datetime(2024, 3, 10, 2, 30), datetime.datetime(2024, 11, 3, 1, 30)
        assert to_local(missing) == datetime.datetime(2024, 3, 10, 3, 30)
        assert [to_utc(twice.replace(fold=fold)).hour for fold in (0, 1)] == [5, 6]
        values = [missing, twice, twice.replace(fold=1)]
        assert [at.hour for at in timestamp_column(values).to_pylist()] == [7, 5, 6]
        assert [to_local(at).fold for at in timestamp_column(values).to_pylist()] == [0, 0, 1]
    time.tzset()


EXTREMES = [
    datetime.datetime.min,
    datetime.datetime.min + DAY / 4,
    datetime.datetime.min + DAY,
    datetime.datetime.max - DAY,
    datetime.datetime.max - DAY / 4,
    datetime.datetime.max,
]
ANY_ZONE = [None, UTC, *(datetime.timezone(datetime.timedelta(hours=hours)) for hours in (-12, -5, 5, 12))]


def outcome(make: Callable[[], Any]) -> object:
    try:
        return repr(make())
    except (ValueError, OverflowError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("of_value", ANY_ZONE)
@pytest.mark.parametrize("at", EXTREMES)
def test_near_pythons_first_and_last_datetime_python_decides(
    zone: ZoneInfo, at: datetime.datetime, of_value: datetime.tzinfo | None
) -> None:
    value = at.replace(tzinfo=of_value)
    instant = outcome(lambda: value.astimezone(UTC))
    assert outcome(lambda: to_utc(value)) == instant
    for others in ([], [EPOCH], [EPOCH.replace(tzinfo=None)], [EPOCH.replace(tzinfo=ZoneInfo("Asia/Tokyo"))]):
        assert outcome(lambda: timestamp_column([*others, value])[-1].as_py().astimezone(UTC)) == instant  # noqa: B023  # called at once
    if of_value is UTC:
        local = outcome(lambda: value.astimezone().replace(tzinfo=None))
        assert outcome(lambda: to_local(value)) == local
        assert outcome(lambda: local_times(np.array([0, micros(value)]))[-1]) == local
        assert outcome(lambda: only_readable(to_utc)(value)) == (local if isinstance(local, tuple) else repr(value))


@pytest.mark.parametrize(
    "beyond", [micros(EXTREMES[0].replace(tzinfo=UTC)) - 1, micros(EXTREMES[-1].replace(tzinfo=UTC)) + 1]
)
def test_instants_beyond_pythons_datetimes_have_no_local_time(beyond: int) -> None:
    with pytest.raises(OverflowError):
        local_times(np.array([0, beyond]))


class Elsewhere(datetime.tzinfo):
    """A zone that changes its mind."""

    hours = 1

    def utcoffset(self, dt: datetime.datetime | None) -> datetime.timedelta:
        return datetime.timedelta(hours=self.hours)

    def dst(self, dt: datetime.datetime | None) -> None:
        return None

    def tzname(self, dt: datetime.datetime | None) -> str:
        return "elsewhere"


def test_only_datetimes_that_never_change_stay_as_they_are() -> None:
    hold = plain_or_readable(to_utc)
    noon = datetime.datetime(2024, 7, 1, 12)
    for plain in (noon, noon.replace(tzinfo=UTC), noon.replace(tzinfo=ZoneInfo("Asia/Tokyo"))):
        assert hold(plain) is plain
    elsewhere = Elsewhere()
    held = hold(noon.replace(tzinfo=elsewhere))
    elsewhere.hours = 2
    assert held == datetime.datetime(2024, 7, 1, 11, tzinfo=UTC)
    assert hold(pd.Timestamp(2024, 7, 1, 12, tz="UTC")).tzinfo is UTC
    assert plain_or_readable(lambda value: None)(noon.date()) is None
