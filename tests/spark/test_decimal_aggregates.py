"""Random decimals, many at the limits of their precision, against Spark's own sums and means.

Spark's and statelog's aggregates are branches of one query, so they get the same batches.
"""

from __future__ import annotations

import datetime
import itertools
import random
from collections import Counter
from decimal import Context, Decimal
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import statelog
from statelog.shown import REDACTED

pytestmark = pytest.mark.spark

UTC = datetime.UTC
EXACT = Context(prec=38)
MOST_DIGITS = 38
SOME_PRECISIONS = (1, 10, 18, 19, 28, 29, 34, 35, 37, 38)
"""Those next to a limit of Spark's or of ours; all of them take Spark longer to generate code for."""
ALL_PRECISIONS = tuple(range(1, MOST_DIGITS + 1))
BATCHES = 4
"""Two in each window, and the query is started anew after the first."""
WINDOW_S = 60


def columns_of(rng: random.Random, precisions: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Precision and scale of each column, one for each precision."""
    digits = ((precision, rng.randint(0, precision)) for precision in precisions)
    return {f"d{precision}": (precision, scale) for precision, scale in digits}


def limit_of(precision: int, scale: int, *, fits: bool) -> int:
    """The greatest unscaled value; if it `fits`, so do the sums and means of a hundred of them."""
    digits = precision
    if fits:
        of_mean = MOST_DIGITS - min(scale + 4, MOST_DIGITS) + scale
        digits = max(1, min(precision, MOST_DIGITS - 2, of_mean - 2))
    return int(10**digits) - 1


def batch_of(rng: random.Random, columns: dict[str, tuple[int, int]], number: int, *, fits: bool) -> list[pa.Table]:
    """The rows of a batch, in two files.

    What Spark makes of sums that fit after a batch, and do not fit in between, depends on the order of its rows. So the
    values that a key has in a window have one sign.
    """
    window = number // 2
    files = []
    for file in range(2):
        keys = [rng.choice("abc") for _ in range(6)]
        second = window * WINDOW_S + number * 2 + file
        rows: dict[str, Any] = {
            "k": pa.array(keys),
            "t": pa.array(
                [datetime.datetime(2026, 1, 1, tzinfo=UTC) + datetime.timedelta(seconds=second)] * len(keys),
                pa.timestamp("us", "UTC"),
            ),
        }
        for name, (precision, scale) in columns.items():
            limit = limit_of(precision, scale, fits=fits)
            sizes = [rng.choice([None, 0, 1, limit // 2 + 1, limit, limit, rng.randint(0, limit)]) for _ in keys]
            signs = [1 if (ord(key) + window + precision) % 2 else -1 for key in keys]
            values = [
                None if size is None else Decimal(sign * size).scaleb(-scale, EXACT)
                for sign, size in zip(signs, sizes, strict=True)
            ]
            rows[name] = pa.array(values, pa.decimal128(precision, scale))
        files.append(pa.table(rows))
    return files


def aggregates(columns: dict[str, tuple[int, int]]) -> tuple[list[statelog.Aggregate], list[Column]]:
    """The sum and the mean of each column, statelog's and Spark's."""
    own: list[statelog.Aggregate] = []
    of_spark: list[Column] = []
    for name in columns:
        own += [statelog.Sum(name).alias(f"sum_{name}"), statelog.Mean(name).alias(f"mean_{name}")]
        of_spark += [F.sum(name).alias(f"sum_{name}"), F.avg(name).alias(f"mean_{name}")]
    return own, of_spark


def joined(frames: dict[str, DataFrame]) -> DataFrame:
    """The rows of several frames that have the same columns, with the frame's name."""
    (first, *others) = frames.values()
    for other in others:
        assert [(field.name, field.dataType) for field in other.schema] == [
            (field.name, field.dataType) for field in first.schema
        ]
    named = [frame.repartition(1).withColumn("source", F.lit(name)) for name, frame in frames.items()]
    return reduce(DataFrame.union, named)


class Story:
    """A query over all input so far, started anew each time."""

    def __init__(self, spark: SparkSession, root: Path, columns: dict[str, tuple[int, int]]) -> None:
        self.root = root
        self.columns = columns
        self.batches: list[dict[str, Counter[Any]]] = []
        (root / "input").mkdir()
        self._files = itertools.count()
        schema = ", ".join(f"{name} decimal({precision},{scale})" for name, (precision, scale) in columns.items())
        stream = spark.readStream.schema(f"k string, t timestamp, {schema}").option("maxFilesPerTrigger", 2)
        self.rows = stream.parquet(str(root / "input")).withWatermark("t", "0 seconds")

    def add(self, tables: list[pa.Table]) -> None:
        for table in tables:
            pq.write_table(table, self.root / "input" / f"{next(self._files):03}.parquet")

    def run(self, df: DataFrame, mode: str = "update") -> None:
        def collect(batch: DataFrame, number: int) -> None:
            rows: dict[str, Counter[Any]] = {}
            for *values, source in batch.collect():
                rows.setdefault(source, Counter())[tuple(values)] += 1
            self.batches.append(rows)

        writer = df.writeStream.foreachBatch(collect).outputMode(mode)
        writer.option("checkpointLocation", str(self.root / "checkpoint")).trigger(
            availableNow=True
        ).start().awaitTermination()


@pytest.fixture
def ansi(spark: SparkSession, request: pytest.FixtureRequest) -> Any:
    """The ANSI mode of the test."""
    before = spark.conf.get("spark.sql.ansi.enabled")
    spark.conf.set("spark.sql.ansi.enabled", str(request.param).lower())
    yield request.param
    spark.conf.set("spark.sql.ansi.enabled", str(before))


def by_key(rows: Counter[Any] | None, names: list[str]) -> dict[tuple[Any, str], Any]:
    """The values by key and column, each with its digits: equal decimals may have other ones."""
    found = {(row[0], name): value for row in rows or () for name, value in zip(names, row, strict=True)}
    assert len(found) == len(names) * sum((rows or Counter()).values())
    return {place: value.as_tuple() if isinstance(value, Decimal) else value for place, value in found.items()}


def compare_keys(
    spark: SparkSession, root: Path, seed: int, *, fits: bool, precisions: tuple[int, ...] = SOME_PRECISIONS
) -> bool:
    """Compare each batch, over a restart with another parallelism; returns whether a value has become null."""
    rng = random.Random(seed)
    story = Story(spark, root, columns_of(rng, precisions))
    own, of_spark = aggregates(story.columns)
    for numbers in ((0,), range(1, BATCHES)):
        for number in numbers:
            story.add(batch_of(rng, story.columns, number, fits=fits))
        frames = {
            "spark": story.rows.groupBy("k").agg(*of_spark),
            "own": statelog.key_by(story.rows, "k", uid="own", parallelism=1 + len(numbers)).agg(*own),
            "combined": statelog.key_by(story.rows, "k", uid="combined", parallelism=2).agg(*own, combine=True),
        }
        story.run(joined(frames))
    assert len(story.batches) >= BATCHES
    before: dict[Any, Any] = {}
    has_lost = False
    names = ["k", *(one.output_name for one in own)]
    for rows in story.batches:
        expected = by_key(rows.get("spark"), names)
        for source in ("own", "combined"):
            assert by_key(rows.get(source), names) == expected
        has_lost |= any(value is None and before.get(place) is not None for place, value in expected.items())
        before |= expected
    return has_lost


def compare_windows(
    spark: SparkSession,
    root: Path,
    seed: int,
    windows: Any,
    of_spark: Column,
    precisions: tuple[int, ...] = SOME_PRECISIONS,
) -> None:
    """Compare what is returned for each window when it is complete, over a restart."""
    rng = random.Random(seed)
    story = Story(spark, root, columns_of(rng, precisions))
    own, columns = aggregates(story.columns)
    for numbers in ((0,), range(1, BATCHES + 1)):
        for number in numbers:  # the last one closes the windows
            story.add(batch_of(rng, story.columns, number if number < BATCHES else 1000, fits=False))
        grouped = story.rows.groupBy("k", of_spark.alias("w")).agg(*columns)
        frames = {
            "spark": grouped.select(
                "k", "w.start", "w.end", *(f"{kind}_{name}" for name in story.columns for kind in ("sum", "mean"))
            ),
            "own": statelog.key_by(story.rows, "k", uid="own", parallelism=2)
            .window(windows)
            .agg(*own)
            .withColumnsRenamed({"window_start": "start", "window_end": "end"}),
        }
        story.run(joined(frames), "append")
    found: dict[str, Counter[Any]] = {"spark": Counter(), "own": Counter()}
    for rows in story.batches:
        for source, counted in rows.items():
            found[source] += counted
    assert len(found["spark"]) >= BATCHES
    assert found["own"] == found["spark"]


@pytest.mark.parametrize("ansi", [False], indirect=True)
def test_keys_over_a_restart(spark: SparkSession, tmp_path: Path, ansi: bool) -> None:
    assert compare_keys(spark, tmp_path, 1, fits=False)


@pytest.mark.parametrize("ansi", [True], indirect=True)
def test_keys_over_a_restart_in_ansi_mode(spark: SparkSession, tmp_path: Path, ansi: bool) -> None:
    compare_keys(spark, tmp_path, 1, fits=True)


@pytest.mark.parametrize("ansi", [False], indirect=True)
def test_windows_over_a_restart(spark: SparkSession, tmp_path: Path, ansi: bool) -> None:
    compare_windows(spark, tmp_path, 2, statelog.TumblingWindows(1000 * WINDOW_S), F.window("t", f"{WINDOW_S} seconds"))


@pytest.mark.parametrize("ansi", [False], indirect=True)
@pytest.mark.parametrize("seed", range(3, 8))
def test_many_stories(spark: SparkSession, tmp_path: Path, ansi: bool, seed: int) -> None:
    for kind in ("keys", "sliding", "sessions"):
        (tmp_path / kind).mkdir()
    compare_keys(spark, tmp_path / "keys", seed, fits=False, precisions=ALL_PRECISIONS)
    half = WINDOW_S // 2
    sliding = statelog.SlidingWindows(1000 * WINDOW_S, 1000 * half)
    of_spark = F.window("t", f"{WINDOW_S} seconds", f"{half} seconds")
    compare_windows(spark, tmp_path / "sliding", seed, sliding, of_spark, ALL_PRECISIONS)
    sessions = statelog.SessionWindows(1000 * half)
    of_spark = F.session_window("t", f"{half} seconds")
    compare_windows(spark, tmp_path / "sessions", seed, sessions, of_spark, ALL_PRECISIONS)


@pytest.mark.parametrize("combine", [False, True])
@pytest.mark.parametrize("ansi", [False, True], indirect=True)
def test_one_value_at_its_limit(spark: SparkSession, ansi: bool, combine: bool) -> None:
    """A mean that does not fit its type, although its sum does."""
    df = spark.createDataFrame([("a", Decimal("9" * 36)), ("b", Decimal(5))], "k string, x decimal(38,0)")
    own = statelog.key_by(df, "k", parallelism=2).agg(mean=statelog.Mean("x"), combine=combine)
    of_spark = df.groupBy("k").agg(F.avg("x").alias("mean"))
    if not ansi:
        assert sorted(own.collect()) == sorted(of_spark.collect()) == [("a", None), ("b", Decimal("5.0000"))]
        return
    with pytest.raises(Exception, match="NUMERIC_VALUE_OUT_OF_RANGE"):
        of_spark.collect()
    with pytest.raises(Exception, match=r"key \('a',\): a mean is out of range for decimal\(38,4\)"):
        own.collect()


@pytest.mark.parametrize("ansi", [True], indirect=True)
def test_an_overflow_before_the_shuffle_names_operator_and_key(spark: SparkSession, ansi: bool) -> None:
    df = spark.createDataFrame([("a", 1), ("b", 2**62), ("b", 2**62)], "k string, x long").coalesce(1)
    for options, shown in ((statelog.Options(), r"\('b',\)"), (statelog.Options(redact_keys=True), REDACTED)):
        own = statelog.key_by(df, "k", uid="sums", options=options).agg(total=statelog.Sum("x"), combine=True)
        with pytest.raises(Exception, match=f"operator 'sums': the step before the shuffle failed: key {shown}: a sum"):
            own.collect()
