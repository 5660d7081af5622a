"""What Spark reads in the tables of a savepoint, and what becomes of it when the tables are loaded again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

import statelog
from tests.spark.inputs import add_json

pytestmark = pytest.mark.spark

KEYS = {
    "bool boolean": "n % 2 = 0",
    "tiny byte": "tinyint(n - 2)",
    "small short": "smallint(n * -8000)",
    "int int": "int(n * 500000000)",
    "long long": "n * 2000000000000000000",
    "float float": "float(n / 3)",
    "double double": "n / 3",
    "price decimal(20,3)": "cast(-0.001 * n AS decimal(20,3))",
    "text string": "if(n = 1, null, repeat('ü', int(n)))",
    "bytes binary": "unhex(repeat('ff00', int(n)))",
    "day date": "date_add(date'1582-10-01', int(n * 7))",
    "at timestamp": "timestamp'2024-11-03 05:30:00Z' + make_dt_interval(0, int(n))",
    "local timestamp_ntz": "timestamp_ntz'2024-03-10 01:30:00' + make_dt_interval(0, int(n))",
    "length interval day to second": "make_dt_interval(-1, 0, 0, n / 1000000)",
    "clock time(6)": "time'23:59:59.999999' - make_dt_interval(0, int(n))",
    "nothing void": "null",
    "place struct<clock: time(6), list: array<interval day to second>, none: void>": (
        "named_struct('clock', time'00:00:01', 'list', array(make_dt_interval(0, int(n)), null), 'none', null)"
    ),
}
TYPES = KEYS | {
    "places map<string, array<timestamp>>": "map('a', array(timestamp'2024-11-03 06:30:00Z', null), 'b', null)"
}
FIELDS = [field.split()[0] for field in TYPES]


class Keep(StatefulProcessor):
    """Keeps the last row of a key, in a map by itself too."""

    def init(self, handle: Any) -> None:
        self._last = handle.getValueState("last", ", ".join(TYPES))
        self._rows = handle.getMapState("rows", ", ".join(KEYS), "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self._last.update((*(row[field] for field in FIELDS[: len(KEYS)]), dict(row.places)))
            self._rows.updateValue(tuple(row[field] for field in FIELDS[: len(KEYS)]), (row.n,))
        return iter(())

    def close(self) -> None:
        pass


def run(spark: SparkSession, root: Path, numbers: list[int], tables: dict[str, DataFrame] | None = None) -> Path:
    """Run a query over some numbers; return the states' tables in a savepoint of it."""
    add_json(root / "input", [[{"n": number} for number in numbers]])
    rows = spark.readStream.schema("n long").json(str(root / "input"))
    keyed = rows.selectExpr("n", *(f"{value} AS {name}" for name, value in zip(FIELDS, TYPES.values(), strict=True)))
    kept = statelog.key_by(keyed, *FIELDS[: len(KEYS)], parallelism=1).transformWithState(
        Keep(), "n long", "update", "None", initialState=tables
    )
    query = kept.writeStream.format("noop").option("checkpointLocation", str(root / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination()
    statelog.savepoint(root / "checkpoint", root / "savepoint")
    return root / "savepoint" / "operators" / "main" / "states"


def test_spark_reads_every_type_of_a_savepoint_and_loads_it_again(spark: SparkSession, tmp_path: Path) -> None:
    spark.conf.set("spark.sql.timeType.enabled", "true")
    try:
        states = run(spark, tmp_path / "one", [0, 1, 2, 3, 4])
        last, rows = (spark.read.parquet(str(states / name)) for name in ("last", "rows"))
        expected = spark.range(5).withColumnRenamed("id", "n").selectExpr(*TYPES.values()).toDF(*FIELDS)
        of_value = last.select(*[F.col(f"value_{name}").alias(name) for name in FIELDS])
        for name in FIELDS:
            found, wanted = of_value.schema[name].dataType, expected.schema[name].dataType
            assert found.simpleString() == wanted.simpleString(), "the type is the state's"
        assert sorted(map(repr, of_value.collect())) == sorted(map(repr, expected.collect()))
        for frame, prefix in ((last, "key"), (rows, "key"), (rows, "mapkey")):
            of_key = frame.select(*[F.col(f"{prefix}_{name}").alias(name) for name in FIELDS[: len(KEYS)]])
            keys = expected.select(*FIELDS[: len(KEYS)])
            assert sorted(map(repr, of_key.collect())) == sorted(map(repr, keys.collect()))
        again = run(spark, tmp_path / "two", [], {"last": last, "rows": rows})
        for name, frame in (("last", last), ("rows", rows)):
            assert sorted(map(repr, spark.read.parquet(str(again / name)).collect())) == sorted(
                map(repr, frame.collect())
            )
    finally:
        spark.conf.unset("spark.sql.timeType.enabled")
