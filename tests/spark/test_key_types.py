"""Keys of nested and unusual types: equal keys share their state, and the processor sees them as Arrow gives them."""

from __future__ import annotations

import datetime
import decimal
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

import statelog
from statelog import ConfigurationError, ErrorKind
from statelog.streams.grouping import keyed_frame
from tests.spark.support import Job

pytestmark = pytest.mark.spark

STRUCT = pa.struct([("x", pa.float64()), ("tags", pa.list_(pa.string()))])
COLUMNS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "hours": (pa.int32(), [1, None]),
    "place": (STRUCT, [{"x": 0.0, "tags": []}, {"x": -0.0, "tags": None}, {"x": math.nan, "tags": ["a", None]}, None]),
    "more": (pa.string(), ["", None]),
    "path": (pa.list_(pa.float32()), [[], None, [0.0], [-0.0], [math.nan, None]]),
    "price": (pa.decimal128(20, 3), [decimal.Decimal("-0.001"), decimal.Decimal("12345678901234567.000")]),
    "counts": (pa.map_(pa.string(), STRUCT), [[("a", {"x": -0.0, "tags": []}), ("b", None)], [("a", None)], []]),
    "at": (pa.timestamp("us", tz="UTC"), [datetime.datetime(1969, 12, 31, 23, tzinfo=datetime.UTC), None]),
}
KEY = ["counts", "price", "nothing", "place", "length", "path", "at"]


def show(value: Any) -> str:
    """A value as text, equal for values that Spark takes as equal."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {show(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        parts = [show(item) for item in value]
        return f"[{', '.join(sorted(parts) if value and isinstance(value[0], tuple) else parts)}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(show, value))})"
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else repr(value + 0.0)
    return str(value.timestamp()) if isinstance(value, datetime.datetime) else repr(value)


class Counts(StatefulProcessor):
    """Counts the rows of a key in a value state, and in a map state by the key's struct and array."""

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "count long")
        schema = "place struct<x: double, tags: array<string>>, path array<float>"
        self._map = handle.getMapState("map", schema, "count long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        (count,) = self._count.get() or (0,)
        map_key = (key[3], key[5])
        for _ in rows:
            count += 1
            (held,) = self._map.getValue(map_key) or (0,)
            self._map.updateValue(map_key, (held + 1,))
        self._count.update((count,))
        [((place, path), (held,))] = self._map.iterator()
        assert held == count
        assert show((None if place is None else place.asDict(), path)) == show(map_key)
        yield Row(key=show(key), count=count)

    def close(self) -> None:
        pass


def test_nested_keys(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.input.mkdir()
    rng = random.Random(7)
    schema = pa.schema([(name, kind) for name, (kind, _) in COLUMNS.items()])
    counts: Counter[str] = Counter()
    for number, parallelism in enumerate((3, 2)):
        rows = [{name: rng.choice(values) for name, (_, values) in COLUMNS.items()} for _ in range(400)]
        for row in rows:
            rng.shuffle(row["counts"])
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), job.input / f"{number}.parquet")
        source = spark.readStream.schema(spark.read.parquet(str(job.input)).schema).parquet(str(job.input))
        stream = source.selectExpr("*", "null AS nothing", "make_dt_interval(0, hours) AS length")
        df = statelog.key_by(stream, *KEY, parallelism=parallelism).transformWithState(
            Counts(), "key string, count long", "update", "None"
        )
        job.run(df)
        keys = [
            show(tuple({**row, "nothing": None, "length": _interval(row["hours"])}[name] for name in KEY))
            for row in rows
        ]
        counts.update(keys)
        assert job.results()[number] == sorted([key, counts[key]] for key in set(keys))
    assert len(counts) < 400, "hardly any key was equal to another"


def _interval(hours: int | None) -> datetime.timedelta | None:
    return None if hours is None else datetime.timedelta(hours=hours)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("interval '1' year", "grouping column 'k' has type interval year"),
        ("make_interval(1, 2, 3)", "grouping column 'k' has type interval"),
        ("parse_json('1')", "grouping column 'k' has type variant"),
        ("array('a' COLLATE UTF8_LCASE)", "grouping column 'k' has type string collate UTF8_LCASE"),
        ("named_struct('a', 1, 'a', 2)", "grouping column 'k' has type struct<a:int,a:int>"),
    ],
)
def test_types_that_cannot_be_keys(spark: SparkSession, expression: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        statelog.key_by(spark.range(1).selectExpr(f"{expression} AS k"), "k")
    assert caught.value.kind is ErrorKind.UNSUPPORTED_KEY_TYPE


# ---- What names a key ----


class Rows(StatefulProcessor):
    """Returns each key with its number of rows and what the processor sees of it."""

    def init(self, handle: Any) -> None:
        pass

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        held = list(rows)
        yield Row(key=str(key[0]), rows=len(held), columns=",".join(held[0].__fields__))

    def close(self) -> None:
        pass


def groups(df: DataFrame, key: str | Column, initial: DataFrame | None = None) -> tuple[dict[str, int], set[str]]:
    """Keys with their numbers of rows, and the columns that the processor sees."""
    frame = statelog.key_by(df, key, parallelism=1).transformWithState(
        Rows(),
        "key string, rows long, columns string",
        "update",
        "None",
        None if initial is None else statelog.key_by(initial, key),
    )
    found = frame.collect()
    return {row.key: row.rows for row in found}, {row.columns for row in found}


@pytest.fixture(name="case_sensitive", params=["true", "false"])
def set_case_sensitive(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[bool]:
    """Both settings of ``spark.sql.caseSensitive``."""
    spark.conf.set("spark.sql.caseSensitive", request.param)
    yield request.param == "true"
    spark.conf.unset("spark.sql.caseSensitive")


NAMED = (
    "id AS n, id % 2 AS a, id % 3 AS `a.b`, id % 4 AS `my col`, id % 5 AS `odd``name`, named_struct('b', id % 6) AS s"
)
NAMES: list[Callable[[DataFrame], str | Column]] = [
    lambda df: "a",
    lambda df: "A",
    lambda df: F.col("A"),
    lambda df: df["A"],
    lambda df: "`a.b`",
    lambda df: "a.b",
    lambda df: F.col("a.b"),
    lambda df: df["`a.b`"],
    lambda df: "my col",
    lambda df: "`my col`",
    lambda df: F.col("`my col`"),
    lambda df: "`odd``name`",
    lambda df: "odd`name",
    lambda df: "s.b",
    lambda df: "S.B",
    lambda df: F.upper("a").alias("up"),
    lambda df: df.alias("t")["a"],
    lambda df: "*",
    lambda df: "s.*",
    lambda df: F.explode(F.array("a")),
    lambda df: F.row_number().over(Window.orderBy("n")),
]


@pytest.mark.parametrize("more", ["", ", id % 7 AS A", ", named_struct('b', id % 8, 'B', id % 9) AS A"])
def test_a_key_is_what_spark_groups_by(spark: SparkSession, case_sensitive: bool, more: str) -> None:
    df = spark.sql(f"SELECT {NAMED}{more} FROM range(1000)")
    of_spark: list[DataFrame] = []
    own: list[DataFrame] = []
    for name in NAMES:
        try:
            key = name(df)
            expected = df.groupBy(key).count()
        except AnalysisException:
            with pytest.raises((ConfigurationError, AnalysisException)):
                statelog.key_by(df, name(df))
            continue
        frame = keyed_frame(df, [key])
        assert frame.columns[0].lower() == expected.columns[0].lower()
        [place] = frame.key_columns
        assert len(frame.df.columns) == len(df.columns) or place == 0, "only what is computed is a column more"
        label = F.lit(f"{key} {len(own)}")
        of_spark.append(expected.toDF("value", "count").select(label, F.col("value").cast("string"), "count"))
        plain = frame.df.toDF(*[f"c{index}" for index in range(len(frame.df.columns))])
        own.append(plain.select(label, F.col(f"c{place}").cast("string")))
    assert len(own) >= 8
    counts = {(label, value): count for label, value, count in reduce(DataFrame.union, of_spark).collect()}
    assert Counter(map(tuple, reduce(DataFrame.union, own).collect())) == counts


def test_a_key_whose_name_differs_in_case_only_has_its_own_groups(spark: SparkSession) -> None:
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        df = spark.range(60).selectExpr("id % 2 AS a", "id % 3 AS A", "id % 5 AS `a.b`")
        for key, count in (("A", 3), (F.col("A"), 3), (df["A"], 3), ("`a.b`", 5), ("a", 2)):
            initial = df if isinstance(key, str) else None
            assert groups(df, key, initial) == ({str(one): 60 // count for one in range(count)}, {"a,A,a.b"})
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_a_column_with_a_dot_must_be_quoted_as_in_spark(spark: SparkSession) -> None:
    df = spark.range(1).selectExpr("id AS `a.b`")
    with pytest.raises(ConfigurationError, match=r"cannot be grouped by a\.b: .* Write `a\.b` for the column"):
        statelog.key_by(df, "a.b")
