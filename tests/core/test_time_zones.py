"""Names of time zones mean what they mean to Spark."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any
from zoneinfo import ZoneInfo

import hypothesis.strategies as st
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from statelog import ConfigurationError
from statelog.testing import Harness
from statelog.time_zones import instants, local_clock, time_zone
from tests.core.time_zones_support import OFFSETS_S, SHORT, UNKNOWN

NOON = datetime.datetime(2024, 7, 1, 12, tzinfo=datetime.UTC)


@pytest.mark.parametrize("name", OFFSETS_S)
def test_offsets(name: str) -> None:
    zone = time_zone(name)
    assert zone.utcoffset(None) == datetime.timedelta(seconds=OFFSETS_S[name])


@given(st.integers(-18 * 3600, 18 * 3600))
def test_all_offsets(total_s: int) -> None:
    sign, (minutes, seconds) = "-" if total_s < 0 else "+", divmod(abs(total_s), 60)
    for name in (
        f"{sign}{minutes // 60:02}:{minutes % 60:02}:{seconds:02}",
        f"GMT{sign}{minutes // 60:02}{minutes % 60:02}{seconds:02}",
    ):
        assert time_zone(name) == datetime.timezone(datetime.timedelta(seconds=total_s))


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_names_are_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(ConfigurationError) as failure:
        time_zone(name)
    assert repr(name) in failure.value.message
    assert "'+02:00'" in failure.value.hint


@pytest.mark.parametrize(
    "name", ["UTC", "GMT", "Etc/UTC", "Europe/Berlin", "EST", "EST5EDT", "+02:00", "-11:30", "+00:00"]
)
def test_what_arrow_knows_are_the_objects_of_arrow(name: str) -> None:
    datetime_of_arrow = pa.scalar(0, pa.timestamp("us", name)).as_py()
    assert repr(time_zone(name)) == repr(datetime_of_arrow.tzinfo)
    assert type(time_zone(name)) is type(datetime_of_arrow.tzinfo)


@pytest.mark.parametrize("name", SHORT)
def test_short_names_are_regions(name: str) -> None:
    assert time_zone(name) is ZoneInfo(SHORT[name])


@pytest.mark.parametrize("name", ["PST", "Europe/Berlin", "UTC", "+02:00", "GMT-2:30", "+02:00:10", "Z"])
@pytest.mark.parametrize("unit", ["us", "ns"])
def test_clocks_and_instants(name: str, unit: str) -> None:
    times = pa.array([NOON, None, NOON.replace(year=1901)], pa.timestamp("us", name)).cast(pa.timestamp(unit, name))
    clock = local_clock(times)
    zone = time_zone(name)
    shown = [
        None if at is None else at.astimezone(zone).replace(tzinfo=None) for at in (NOON, None, NOON.replace(year=1901))
    ]
    assert clock.cast(pa.timestamp("us")).to_pylist() == shown
    assert instants(clock, name) == times.cast(pa.timestamp(unit, "UTC"))


def test_a_repeated_hour_is_the_later_one_and_a_missing_hour_ends() -> None:
    clock = pa.array([datetime.datetime(2024, 11, 3, 1, 30), datetime.datetime(2024, 3, 10, 2, 30)], pa.timestamp("us"))
    later = [
        datetime.datetime(2024, 11, 3, 9, 30, tzinfo=datetime.UTC),
        datetime.datetime(2024, 3, 10, 10, tzinfo=datetime.UTC),
    ]
    assert instants(clock, "PST").to_pylist() == later


class Times(StatefulProcessor):
    """Keeps times, and returns what it sees of them."""

    zone = ""

    def init(self, handle: Any) -> None:
        self._value = handle.getValueState("value", "at timestamp")
        self._handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            if isinstance(row, pd.DataFrame):
                at, many = row["at"].iloc[0], list(row["many"].iloc[0])
                self._value.update((at.tz_localize(time_zone(self.zone)),))
                yield pd.DataFrame({"key": [key[0]], "at": [at], "seen": [f"{key[0]} {at} {many[0]}"]})
            else:
                self._value.update((row.at,))
                yield Row(key=row.key, at=row.at, seen=f"{key[0]} {row.at} {row.many[0]}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        return iter(())

    def close(self) -> None:
        pass


@pytest.mark.parametrize("in_pandas", [False, True], ids=["rows", "frames"])
@pytest.mark.parametrize("name", ["GMT+2", "PST", "Z", "+02:00:10", "UTC-02:30", "+2"])
def test_operators_in_zones_that_arrow_does_not_know(name: str, in_pandas: bool) -> None:
    processor = Times()
    processor.zone = name
    columns, output = "key timestamp, at timestamp, many array<timestamp>", "key timestamp, at timestamp, seen string"
    arguments: dict[str, Any] = {"keys": ["key"], "output": output, "sessionTimeZone": name, "pandas": in_pandas}
    with Harness(processor, input=columns, **arguments) as harness:
        [row] = harness.push([(NOON, NOON, [NOON])])
        assert [at.astimezone(datetime.UTC) for at in (row.key, row.at)] == [NOON, NOON]
        shown = str(
            NOON.astimezone(time_zone(name)).replace(tzinfo=None) if in_pandas else NOON.astimezone(time_zone(name))
        )
        assert row.seen == f"{shown} {shown} {shown}"
        held = harness.value("value", NOON)
        assert held is not None
        assert held[0].astimezone(datetime.UTC) == NOON


def test_a_zone_that_nobody_knows_is_refused() -> None:
    arguments: dict[str, Any] = {"keys": ["key"], "output": "key timestamp, at timestamp, seen string"}
    with (
        pytest.raises(ConfigurationError, match="Moon/Base"),
        Harness(
            Times(),
            input="key timestamp, at timestamp, many array<timestamp>",
            sessionTimeZone="Moon/Base",
            **arguments,
        ) as harness,
    ):
        harness.push([(NOON, NOON, [NOON])])
