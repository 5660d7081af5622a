"""The histories once more, computed by a plain Spark batch query, and compared with the job's row for row."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from pyspark.sql import SparkSession

__all__ = ["History", "batch_histories", "differences", "streamed_histories"]

History = dict[str, Any]

_BATCH_QUERY = """
WITH judged AS (
  SELECT *, coalesce(arr_delay <= 15, false) AS is_on_time, dep_delay IS NOT NULL AS has_departed
  FROM flights
),
-- Flights with the same number of unpunctual flights up to them belong to one streak.
streaks AS (
  SELECT *, count_if(NOT is_on_time) OVER (PARTITION BY tailnum ORDER BY scheduled, carrier, flight, origin) AS streak
  FROM judged
),
measured AS (
  SELECT *, count_if(is_on_time) OVER (PARTITION BY tailnum, streak) AS streak_flights
  FROM streaks
),
gathered AS (
  SELECT
    tailnum,
    count(*) AS flights,
    sum(greatest(coalesce(arr_delay, 0), 0)) AS minutes_late,
    max(streak_flights) AS longest_streak,
    collect_list(origin) FILTER (WHERE has_departed) AS origins,
    collect_list(struct(scheduled, carrier, flight, origin, dest)) FILTER (WHERE has_departed) AS departed
  FROM measured
  GROUP BY tailnum
)
SELECT
  tailnum, flights, minutes_late, longest_streak,
  map_from_entries(transform(array_distinct(origins), o -> struct(o, size(filter(origins, p -> p = o))))) AS departures,
  transform(reverse(slice(sort_array(departed, false), 1, 10)), f -> concat(f.origin, '-', f.dest)) AS last_routes
FROM gathered
"""


def batch_histories(spark: SparkSession, flights: str) -> list[History]:
    """The history of every aircraft, by a batch query over all flights."""
    spark.read.parquet(flights).createOrReplaceTempView("flights")
    return [row.asDict() for row in spark.sql(_BATCH_QUERY).collect()]


def streamed_histories(spark: SparkSession, histories: str) -> list[History]:
    """The newest history of every aircraft that the job emitted."""
    spark.read.parquet(histories).createOrReplaceTempView("updates")
    # Each batch emits an aircraft at most once; a second row of the newest batch would show up as a difference.
    newest = spark.sql("SELECT *, rank() OVER (PARTITION BY tailnum ORDER BY batch DESC) AS age FROM updates")
    return [row.asDict() for row in newest.where("age = 1").drop("age", "batch").collect()]


def differences(streamed: Iterable[History], expected: Iterable[History]) -> list[str]:
    """Compare two results row for row.

    Returns
    -------
    list of str
        One line per row that only one of them has, by aircraft; empty if they are equal.
    """
    ours, theirs = Counter(map(_canonical, streamed)), Counter(map(_canonical, expected))
    only = [(row, "only streamed") for row in (ours - theirs).elements()]
    only += [(row, "only batch") for row in (theirs - ours).elements()]
    return [f"{label}: {row}" for row, label in sorted(only)]


def _canonical(history: History) -> str:
    """The row as text, with columns and map entries in a fixed order; the aircraft comes first."""
    rest = {name: value for name, value in history.items() if name != "tailnum"}
    return json.dumps([history["tailnum"], rest], sort_keys=True)


@click.command()
@click.option("--flights", required=True)
@click.option("--histories", required=True)
@click.option("--result", required=True, type=click.Path(path_type=Path), help="File that gets the result, as JSON.")
def main(flights: str, histories: str, result: Path) -> None:
    """Compare the job's output with the batch query's; fail if they differ."""
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .getOrCreate()
    )
    expected = batch_histories(spark, flights)
    found = differences(streamed_histories(spark, histories), expected)
    spark.stop()
    result.write_text(json.dumps({"aircraft": len(expected), "differences": found}))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
