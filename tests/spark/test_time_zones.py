"""Session time zones by all the names that Spark takes."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

import statelog
from statelog import ConfigurationError
from statelog.time_zones import time_zone
from tests.core.time_zones_support import OFFSETS_S, SHORT, UNKNOWN

pytestmark = pytest.mark.spark

ZONE = "spark.sql.session.timeZone"
NOON = datetime.datetime(2024, 7, 1, 12, tzinfo=datetime.UTC)


@pytest.fixture(name="session")
def make_session(spark: SparkSession) -> Iterator[SparkSession]:
    before = spark.conf.get(ZONE)
    yield spark
    spark.conf.set(ZONE, str(before))


def test_names_mean_what_they_mean_to_spark(session: SparkSession) -> None:
    differing = {}
    for name in [*OFFSETS_S, *SHORT, *UNKNOWN, "EST", "HST", "AET", "BST", "SST"]:
        in_spark, here = clock_of_spark(session, name), clock(name)
        if in_spark != here:
            differing[name] = (in_spark, here)
    assert not differing


def clock_of_spark(session: SparkSession, name: str) -> str:
    try:
        session.conf.set(ZONE, name)
    except Exception:
        return "unknown"
    return str(session.sql("SELECT CAST(timestamp_seconds(1719835200) AS string)").collect()[0][0])


def clock(name: str) -> str:
    try:
        return str(NOON.astimezone(time_zone(name)).replace(tzinfo=None))
    except ConfigurationError:
        return "unknown"


class Clocks(StatefulProcessor):
    """Returns what clocks show: of the key and a column as the processor sees them, and of the column once more."""

    def init(self, handle: Any) -> None:
        self._last = handle.getValueState("last", "at timestamp")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            if isinstance(row, pd.DataFrame):
                seen = f"{key[0]} {row['at'].iloc[0]}"
                yield pd.DataFrame({"seen": [seen], "at": [row["at"].iloc[0]]})
            else:
                self._last.update((row.at,))
                seen = f"{key[0].replace(tzinfo=None)} {row.at.replace(tzinfo=None)}"
                yield Row(seen=seen, at=self._last.get()[0])

    def close(self) -> None:
        pass


@pytest.mark.parametrize("method", ["transformWithState", "transformWithStateInPandas"])
@pytest.mark.parametrize("zone", ["GMT+2", "Z", "+2", "UTC-02:30", "PST", "+02:00:10", "Europe/Berlin"])
def test_processors_see_the_clock_of_the_session(session: SparkSession, zone: str, method: str) -> None:
    session.conf.set(ZONE, zone)
    df = session.sql("SELECT timestamp_seconds(1719835200) AS k, timestamp_seconds(1719838800) AS at")
    transformed = getattr(statelog.key_by(df, "k"), method)(Clocks(), "seen string, at timestamp", "append", "None")
    [row] = transformed.selectExpr("seen", "unix_seconds(at) AS at").collect()
    [(k, at)] = df.selectExpr("CAST(k AS string)", "CAST(at AS string)").collect()
    assert row == Row(seen=f"{k} {at}", at=1719838800)
