"""agg() against Spark's own groupBy().agg(): values, types, nulls and overflow, in batch queries and in streams."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F

import statelog
from statelog import Aggregate, ConfigurationError, Ttl, Watermark
from tests.spark.inputs import add_json

pytestmark = pytest.mark.spark

UTC = datetime.UTC
SCHEMA = (
    "k string, f double, b byte, s short, i int, l long, x float, y double, d decimal(12,3), w decimal(38,6),"
    " t string, bin binary, flag boolean, day date, at timestamp, local timestamp_ntz, place long"
)
GROUPS: list[tuple[Any, ...]] = [
    ("a", 0.0, range(5), math.nan),
    ("a", -0.0, range(3, 6), 1.0),
    ("b", math.nan, range(1, 9), math.inf),
    (None, None, (1,), 0.0),
    ("nulls", 1.0, (2,), 0.0),
]
ROWS = [
    (
        key,
        float_key,
        *(None if number == 2 else number for _ in range(4)),
        *(special if number == 3 else number / 7 for _ in range(2)),
        Decimal(number) / 8,
        Decimal(number) * 10**20 / 3 if number != 4 else None,
        None if number == 1 else f"t{number}",
        bytes([number]),
        number % 2 == 0,
        datetime.date(2026, 1, 1 + number),
        datetime.datetime(2026, 1, 1, number, tzinfo=UTC),
        datetime.datetime(2026, 1, 1, number),
        10 * number + group,
    )
    for group, (key, float_key, numbers, special) in enumerate(GROUPS)
    for number in numbers
]
COLUMNS = ["k", "f", "b", "s", "i", "l", "x", "y", "d", "w", "t", "bin", "flag", "day", "at", "local"]
QUANTILES = (0.0, 0.2, 0.5, 0.9, 1.0)
NUMBERS = ("b", "s", "i", "l", "x", "y", "d", "w")


def _pairs() -> dict[str, tuple[Aggregate, Column]]:
    """Aggregates and what they are in Spark, by output column."""
    pairs: dict[str, tuple[Aggregate, Column]] = {"rows": (statelog.Count(), F.count("*"))}
    for name in COLUMNS[2:]:
        pairs[f"count_{name}"] = (statelog.Count(name), F.count(name))
        pairs[f"min_{name}"] = (statelog.Min(name), F.min(name))
        pairs[f"max_{name}"] = (statelog.Max(name), F.max(name))
        pairs[f"distinct_{name}"] = (statelog.CountDistinct(name), F.count_distinct(name))
        pairs[f"about_{name}"] = (statelog.ApproxCountDistinct(name), F.count_distinct(name))  # exact for few values
        pairs[f"last_{name}"] = (statelog.Last(name, by="place"), F.max_by(name, "place"))
        pairs[f"first_{name}"] = (statelog.First(name, by="place"), F.min_by(name, "place"))
        pairs[f"all_{name}"] = (statelog.Collect(name), F.collect_list(name))
    for name in NUMBERS:
        pairs[f"sum_{name}"] = (statelog.Sum(name), F.sum(name))
        pairs[f"mean_{name}"] = (statelog.Mean(name), F.avg(name))
        if name not in "xy":  # with NaN, Spark's depend on the order of the rows
            spark_quantiles = F.percentile_approx(F.col(name).cast("double"), list(QUANTILES), 10**6)
            pairs[f"quantiles_{name}"] = (statelog.Quantiles(name, QUANTILES), spark_quantiles)
        pairs[f"var_{name}"] = (statelog.Variance(name), F.var_samp(name))
        pairs[f"varp_{name}"] = (statelog.Variance(name, population=True), F.var_pop(name))
        pairs[f"std_{name}"] = (statelog.StandardDeviation(name), F.stddev_samp(name))
        pairs[f"stdp_{name}"] = (statelog.StandardDeviation(name, population=True), F.stddev_pop(name))
    return pairs


def _comparable(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(sorted(map(_comparable, value), key=repr))
    if isinstance(value, float):
        return "nan" if math.isnan(value) else float(f"{value:.9g}")
    return value


def _rows(df: DataFrame) -> Counter[Any]:
    return Counter(tuple(map(_comparable, row)) for row in df.collect())


@pytest.mark.parametrize(("keys", "combines"), [(["k"], False), (["f", "k"], True), (["i", "day"], True)])
def test_values_and_types_are_those_of_spark(spark: SparkSession, keys: list[str], combines: bool) -> None:
    """With an aggregate that depends on the order of arrival rows are not combined before the shuffle."""
    df = spark.createDataFrame(ROWS, SCHEMA).repartition(3)
    pairs = {name: pair for name, pair in _pairs().items() if not (combines and name.startswith("all_"))}
    for column in keys:
        pairs = {name: pair for name, pair in pairs.items() if not name.endswith(f"_{column}")}
    aggregates = [one.alias(name) for name, (one, _) in pairs.items()]
    own = statelog.key_by(df, *keys, parallelism=2).agg(*aggregates, combine=combines)
    spark_own = df.groupBy(*keys).agg(*[column.alias(name) for name, (_, column) in pairs.items()])
    assert [(field.name, field.dataType.simpleString()) for field in own.schema] == [
        (field.name, field.dataType.simpleString()) for field in spark_own.schema
    ]
    found, expected = _rows(own), _rows(spark_own)
    assert found == expected


@pytest.mark.parametrize("kind", ["long", "decimal(38,0)"])
def test_overflow_is_that_of_the_ansi_mode(spark: SparkSession, kind: str) -> None:
    most = 2**63 - 1 if kind == "long" else Decimal(10**38 - 1)
    df = spark.createDataFrame([("a", most), ("a", most), ("b", most)], f"k string, n {kind}")
    before = spark.conf.get("spark.sql.ansi.enabled")
    try:
        for ansi in ("false", "true"):
            spark.conf.set("spark.sql.ansi.enabled", ansi)
            own = statelog.key_by(df, "k", parallelism=2).agg(total=statelog.Sum("n"), combine=True)
            if ansi == "false":
                assert _rows(own) == _rows(df.groupBy("k").agg(F.sum("n").alias("total")))
                continue
            with pytest.raises(Exception, match="ARITHMETIC_OVERFLOW"):
                df.groupBy("k").agg(F.sum("n")).collect()
            with pytest.raises(Exception, match=f"a sum is out of range for {kind[:4]}"):
                own.collect()
    finally:
        spark.conf.set("spark.sql.ansi.enabled", str(before))


def _stream(spark: SparkSession, root: Path) -> DataFrame:
    schema = "user string, time timestamp, n long"
    stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(root / "input"))
    return stream.withWatermark("time", "10 seconds")


def _run(df: DataFrame, root: Path, mode: str) -> list[list[Row]]:
    """Run a query over all input that is there; returns its output by batch, without batches that have none."""
    output: list[list[Row]] = []

    def collect(batch: DataFrame, number: int) -> None:
        if rows := batch.collect():
            output.append(rows)

    writer = df.writeStream.foreachBatch(collect).outputMode(mode)
    query = writer.option("checkpointLocation", str(root / f"checkpoint-{mode}")).trigger(availableNow=True).start()
    query.awaitTermination()
    return output


def _events(batch: int) -> list[dict[str, Any]]:
    start = datetime.datetime(2026, 1, 1, tzinfo=UTC)
    return [
        {
            "user": "abc"[number % 3],
            "time": (start + datetime.timedelta(seconds=20 * batch + number * 3 % 40 - 10)).isoformat(),
            "n": number,
        }
        for number in range(30)
    ]


@pytest.mark.parametrize("mode", ["update", "append"])
def test_a_stream_by_time_returns_what_spark_returns(spark: SparkSession, tmp_path: Path, mode: str) -> None:
    """Grouped by the column with the watermark, over a restart with another parallelism that no longer combines."""
    found: list[list[Row]] = []
    expected: list[list[Row]] = []
    for start in range(2):
        add_json(tmp_path / "input", [_events(2 * start), _events(2 * start + 1)])
        stream = _stream(spark, tmp_path)
        own = statelog.key_by(stream, "user", "time", parallelism=2 + start).agg(
            rows=statelog.Count(), total=statelog.Sum("n"), outputMode=mode, combine=start == 0
        )
        grouped = stream.groupBy("user", "time").agg(F.count("*").alias("rows"), F.sum("n").alias("total"))
        found += _run(own, tmp_path / "own", mode)
        expected += _run(grouped, tmp_path / "spark", mode)
    assert [Counter(map(tuple, rows)) for rows in found] == [Counter(map(tuple, rows)) for rows in expected]
    assert expected


@pytest.mark.parametrize("mode", ["update", "append"])
def test_a_stream_by_a_window_of_spark_returns_what_spark_returns(
    spark: SparkSession, tmp_path: Path, mode: str
) -> None:
    """Both the window and the time in front of it, of which it is made, have the watermark."""
    add_json(tmp_path / "input", [_events(batch) for batch in range(3)])
    stream = _stream(spark, tmp_path).withColumn("w", F.window("time", "20 seconds"))
    own = statelog.key_by(stream, "user", "w", parallelism=2).agg(rows=statelog.Count(), outputMode=mode)
    found = _run(own, tmp_path / "own", mode)
    expected = _run(stream.groupBy("user", "w").agg(F.count("*").alias("rows")), tmp_path / "spark", mode)
    assert [Counter(map(tuple, rows)) for rows in found] == [Counter(map(tuple, rows)) for rows in expected]
    assert expected


def test_a_key_is_returned_once_when_its_time_is_over(spark: SparkSession, tmp_path: Path) -> None:
    add_json(tmp_path / "input", [_events(batch) for batch in range(4)])
    own = statelog.key_by(_stream(spark, tmp_path), "user", parallelism=2).agg(
        statelog.Count(), outputMode="append", ttl=Ttl(5_000, "event"), combine=True
    )
    assert _run(own, tmp_path, "append") == []
    late = [{"user": "z", "time": datetime.datetime(2026, 1, 2, tzinfo=UTC).isoformat(), "n": 0}]
    add_json(tmp_path / "input", [late])
    (rows,) = _run(own, tmp_path, "append")
    assert sorted(map(tuple, rows)) == [("a", 40), ("b", 40), ("c", 40)]


def test_an_aggregate_is_added_and_one_removed(spark: SparkSession, tmp_path: Path) -> None:
    add_json(tmp_path / "input", [_events(0)])
    stream = _stream(spark, tmp_path)
    by_user = statelog.key_by(stream, "user", parallelism=2)
    _run(by_user.agg(rows=statelog.Count(), least=statelog.Min("n"), combine=True), tmp_path, "update")
    add_json(tmp_path / "input", [_events(1)])
    added = statelog.key_by(stream, "user", parallelism=3).agg(
        most=statelog.Max("n"), mean=statelog.Mean("n"), rows=statelog.Count()
    )
    (rows,) = _run(added, tmp_path, "update")
    assert sorted(map(tuple, rows)) == [("a", 27, 13.5, 20), ("b", 28, 14.5, 20), ("c", 29, 15.5, 20)]
    add_json(tmp_path / "input", [_events(2)])
    with pytest.raises(StreamingQueryException, match="aggregate rows"):
        _run(by_user.agg(rows=statelog.Sum("n")), tmp_path, "update")


def test_rows_of_keys(spark: SparkSession, tmp_path: Path) -> None:
    """Over a restart with another parallelism, against plain computations over all rows."""
    found: dict[str, list[list[Row]]] = {"dedup": [], "within": [], "latest": [], "top": []}
    duplicates: list[list[Row]] = []
    for start in range(2):
        add_json(tmp_path / "input", [_events(2 * start), _events(2 * start + 1)])
        stream = _stream(spark, tmp_path)
        by_user = statelog.key_by(stream, "user", parallelism=1 + start)
        by_row = statelog.key_by(stream, "user", "n", parallelism=1 + start)
        for name, df in {
            "dedup": by_user.dedup(),
            "within": by_row.dedup(within_watermark=True),
            "latest": by_user.latest("n", combine=True),
            "top": by_user.top(2, "n", combine=True),
        }.items():
            found[name] += _run(df, tmp_path / name, "append" if name in ("dedup", "within") else "update")
        duplicates += _run(stream.dropDuplicatesWithinWatermark(["user", "n"]), tmp_path / "spark", "append")
    assert sorted(row.user for rows in found["dedup"] for row in rows) == ["a", "b", "c"]
    assert [Counter(map(tuple, rows)) for rows in found["within"]] == [Counter(map(tuple, rows)) for rows in duplicates]
    assert [sorted((row.user, row.n) for row in rows) for rows in found["latest"]] == [
        [("a", 27), ("b", 28), ("c", 29)]
    ] * 4
    assert sorted((row.user, row.rank, row.n) for row in found["top"][0]) == [
        ("a", 1, 27),
        ("a", 2, 24),
        ("b", 1, 28),
        ("b", 2, 25),
        ("c", 1, 29),
        ("c", 2, 26),
    ]
    assert sorted((row.user, row.rank, row.n) for row in found["top"][3]) == [
        (user, rank, n) for user, n in (("a", 27), ("b", 28), ("c", 29)) for rank in (1, 2)
    ]


def test_what_does_not_go_together_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    add_json(tmp_path / "input", [_events(0)])
    stream = _stream(spark, tmp_path)
    by_user, by_time = statelog.key_by(stream, "user"), statelog.key_by(stream, "user", "time")
    total = statelog.Sum("n")
    with pytest.raises(ConfigurationError, match="nothing says when that is"):
        by_user.agg(total, outputMode="append")
    with pytest.raises(ConfigurationError, match="so a ttl has no effect"):
        by_time.agg(total, ttl=1000)
    with pytest.raises(ConfigurationError, match="outputMode is 'complete'"):
        by_user.agg(total, outputMode="complete")
    with pytest.raises(ConfigurationError, match="no such column"):
        by_user.agg(statelog.Sum("m"))
    with pytest.raises(ConfigurationError, match="two output columns are named 'user'"):
        by_user.agg(user=total)
    with pytest.raises(ConfigurationError, match="not n='sum'"):
        by_user.agg(n="sum")  # type: ignore[arg-type]  # the mistake
    with pytest.raises(ConfigurationError, match="ttl is str '1 month'"):
        by_user.agg(total, ttl="1 month")
    with pytest.raises(ConfigurationError, match="at least one aggregate"):
        by_user.agg()
    with pytest.raises(ConfigurationError, match="by is 'user', which is not a column of the input besides"):
        by_user.latest("user")
    with pytest.raises(ConfigurationError, match="n is 0"):
        by_user.top(0, "n")
    of_inputs = statelog.key_by(stream, "user", watermark=Watermark("time", inputs=2, input_column="n"))
    with pytest.raises(ConfigurationError, match="cannot be combined before the shuffle"):
        of_inputs.agg(total, combine=True)
    with pytest.raises(ConfigurationError, match="cannot be combined before the shuffle"):
        statelog.key_by(stream, "user", watermark=Watermark("time", max_ahead=1)).agg(total, combine=True)
    with pytest.raises(ConfigurationError, match="the ttl is the watermark's delay"):
        by_user.dedup(1000, within_watermark=True)
    with pytest.raises(ConfigurationError, match="within_watermark needs a watermark"):
        statelog.key_by(spark.readStream.schema("user string").json(str(tmp_path)), "user").dedup(within_watermark=True)
