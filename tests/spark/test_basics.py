"""What must simply work: states of every kind, keys of every type, any parallelism, every sink."""

from __future__ import annotations

import datetime
import decimal
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.accumulators import Accumulator
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

import statelog
from statelog import Options, Tuning
from tests.spark.support import LEDGER, Job, Ledger, ledger_model, make_orders, start_driver

pytestmark = pytest.mark.spark

VARIANTS = {
    "defaults": Options(),
    "memory table": Options(table="memory"),
    "RocksDB table": Options(table="rocksdb", tuning=Tuning(merge_fan_in=2)),
    "object log": Options(file_merging="within"),
    "uploads": Options(inline_budget_bytes=0),
    "much merging": Options(tuning=Tuning(merge_fan_in=2)),
    "all at once": Options(table="memory", file_merging="within", inline_budget_bytes=0, tuning=Tuning(merge_fan_in=2)),
}


@pytest.mark.parametrize("variant", [pytest.param("defaults", marks=pytest.mark.smoke), *list(VARIANTS)[1:]])
def test_any_parallelism_at_every_start(spark: SparkSession, tmp_path: Path, variant: str) -> None:
    job = Job(tmp_path)
    for leg, parallelism in enumerate((2, 3, 1, 5)):
        job.add(make_orders(3, seed=80 + leg))
        job.run(job.ledger(spark, parallelism, VARIANTS[variant]))

    job.require_exact()
    assert (job.checkpoint / "statelog" / "log").is_dir()
    assert any(job.state.glob("*/changes")) == (VARIANTS[variant].inline_budget_bytes == 0)


class Counting(Ledger):
    def __init__(self, rows: Accumulator[int]) -> None:
        super().__init__()
        self._rows = rows

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        held = list(rows)
        self._rows.add(len(held))
        return super().handleInputRows(key, iter(held), timerValues)


def test_accumulators_count_in_every_batch(spark: SparkSession, tmp_path: Path) -> None:
    job, counted = Job(tmp_path).add(make_orders(3)), spark.sparkContext.accumulator(0)
    job.run(job.ledger(spark, 2, processor=Counting(counted)))
    assert counted.value == 90
    job.require_exact()


def test_options_may_change_from_run_to_run(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path, uid="orders of users/1", location=str(tmp_path / "some where"))
    for leg, options in enumerate(
        [
            Options(table="memory"),
            Options(table="rocksdb", inline_budget_bytes=0),
            Options(table="memory", tuning=Tuning(merge_fan_in=2)),
            Options(),
            Options(table="rocksdb"),
        ]
    ):
        job.add(make_orders(3, seed=85 + leg))
        job.run(job.ledger(spark, 2, options))

    job.require_exact()
    assert not (job.checkpoint / "statelog").exists()
    names = sorted(path.name for path in (tmp_path / "some where").iterdir())
    assert names[0] == "log"
    assert [re.fullmatch(r"orders%20of%20users%2F1-[0-9a-f]{16}", name) is not None for name in names[1:]] == [True]


# ---- Keys ----


class Counts(StatefulProcessor):
    """Counts the rows of a key and returns the key's fields as text."""

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "count long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        (count,) = self._count.get() or (0,)
        count += sum(1 for _ in rows)
        self._count.update((count,))
        yield Row(key=show(key), count=count)

    def close(self) -> None:
        pass


def show(key: Any) -> str:
    """A key as text, equal for equal keys."""
    return "|".join(_show(value) for value in key)


def _show(value: Any) -> str:
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else repr(value + 0.0)
    if isinstance(value, datetime.datetime):
        return str(value.timestamp())
    return repr(value)


_NAN_OF_OTHER_BITS = math.copysign(math.nan, -1)
KEYS: dict[str, list[tuple[Any, ...]]] = {
    "null and long": [(None, 5), (5, None), (None, None), (0, 0), (5, 5), (-1, 2**62)],
    "string": [("",), (None,), ("a",), ("a\0",), ("ä\N{GRINNING FACE}",), ("b" * 300,)],
    "two strings": [("a", "bc"), ("ab", "c"), ("", "abc"), (None, "abc"), ("abc", None), ("", "")],
    "decimal": [(decimal.Decimal(text),) for text in ("0.00", "-0.01", "1.10", "99999999999999.99")],
    "timestamp": [
        (datetime.datetime(1969, 12, 31, tzinfo=datetime.UTC),),
        (datetime.datetime(2026, 3, 29, 1, 30, tzinfo=datetime.UTC),),
    ],
    "double": [(0.0,), (-0.0,), (math.nan,), (_NAN_OF_OTHER_BITS,), (math.inf,), (-math.inf,), (1e-320,), (None,)],
    "date, boolean, bytes": [(datetime.date(1960, 1, 1), True, b""), (None, False, b"\0"), (None, False, b"")],
}
KEY_TYPES: dict[str, list[pa.DataType]] = {
    "null and long": [pa.int64(), pa.int64()],
    "string": [pa.string()],
    "two strings": [pa.string(), pa.string()],
    "decimal": [pa.decimal128(16, 2)],
    "timestamp": [pa.timestamp("us", tz="UTC")],
    "double": [pa.float64()],
    "date, boolean, bytes": [pa.date32(), pa.bool_(), pa.binary()],
}


@pytest.mark.parametrize("kind", KEYS)
def test_equal_keys_share_their_state_and_others_do_not(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    job = Job(tmp_path)
    job.input.mkdir()
    names = [f"k{number}" for number in range(len(KEY_TYPES[kind]))]
    schema = pa.schema(list(zip(names, KEY_TYPES[kind], strict=True)))
    counts: Counter[str] = Counter()
    for number, parallelism in enumerate((2, 3)):
        rows = KEYS[kind] * (number + 1)
        table = pa.Table.from_pylist([dict(zip(names, key, strict=True)) for key in rows], schema=schema)
        pq.write_table(table, job.input / f"{number}.parquet")
        stream = spark.readStream.schema(spark.read.parquet(str(job.input)).schema).parquet(str(job.input))
        df = statelog.key_by(stream, *names, parallelism=parallelism).transformWithState(
            Counts(), "key string, count long", "update", "None"
        )
        job.run(df)
        counts.update(show(key) for key in rows)
        assert job.results()[number] == sorted([key, count] for key, count in counts.items())
    assert counts_in(statelog.read_state(job.checkpoint)) == counts
    few = pa.Table.from_pylist([dict(zip(names, KEYS[kind][0], strict=True))], schema=schema)
    of_one = show(KEYS[kind][0])
    assert counts_in(statelog.read_state(job.checkpoint, keys=few)) == {of_one: counts[of_one]}


def counts_in(rows: pa.RecordBatchReader) -> dict[str, int]:
    """The counts of keys, as somebody else reads them."""
    *keys, count = rows.read_all().to_pydict().values()
    return dict(zip(map(show, zip(*keys, strict=True)), count, strict=True))


def test_timestamps_keep_their_moment_in_any_time_zone(tmp_path: Path) -> None:
    job = Job(tmp_path)
    batches = [[(0, 600), (0, 1200), (3600, 4000)], [(0, 300), (3600, 5000)]]
    job.add([[{"hour": _iso(hour), "at": _iso(at)} for hour, at in rows] for rows in batches])
    driver = start_driver("zones", tmp_path, {}, env={"TZ": "Asia/Kathmandu"})

    assert driver.wait() == 0, driver.end
    # In each row: the key, the batch's last time, the first and the latest time in the state; and whether all
    # were datetimes without a zone, in local time, as everywhere in PySpark.
    assert job.results() == {
        0: [[0, 1200, 600, 1200, True], [3600, 4000, 4000, 4000, True]],
        1: [[0, 300, 600, 1200, True], [3600, 5000, 4000, 5000, True]],
    }


def _iso(seconds: int) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


# ---- Batch queries, several operators, sinks ----


def test_a_batch_dataframe_starts_empty_and_keeps_nothing(spark: SparkSession, tmp_path: Path) -> None:
    orders = make_orders(1, seed=90)
    job = Job(tmp_path).add(orders)
    rows = spark.read.schema(job.read(spark).schema).json(str(job.input))
    location = tmp_path / "state"
    for parallelism in (1, 3, None):
        df = statelog.key_by(rows, "user", parallelism=parallelism, location=str(location)).transformWithState(
            Ledger(), LEDGER, "update", "None"
        )
        assert sorted(list(row) for row in df.collect()) == ledger_model(orders)[0]
    assert not location.exists()


class Tags(StatefulProcessor):
    """Returns what the rows hold in columns whose names need quoting."""

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "`a.b` long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        tags = sorted(row["odd`name"] for row in rows)
        self._count.update((len(tags),))
        yield Row(key=key[0], tags=tags, count=self._count.get()[0])

    def close(self) -> None:
        pass


def test_columns_may_have_any_name(spark: SparkSession) -> None:
    rows = spark.createDataFrame([(1, "x"), (2, "y"), (1, "z")], ["a.b", "odd`name"])
    df = statelog.key_by(rows, "`a.b`", parallelism=2).transformWithState(
        Tags(), "key long, tags array<string>, count long", "update", "None"
    )
    assert sorted(tuple(row) for row in df.collect()) == [(1, ["x", "z"], 2), (2, ["y"], 1)]


def test_two_chained_operators(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path, uid="users")

    def plan(first: int, second: int) -> DataFrame:
        users = job.ledger(spark, first)
        return statelog.key_by(users, "items", uid="baskets", parallelism=second).transformWithState(
            Counts(), "key string, count long", "update", "None"
        )

    for leg, parallelism in enumerate((2, 3)):
        job.add(make_orders(3, seed=91 + leg))
        job.run(plan(parallelism, 4 - parallelism))

    counts: Counter[str] = Counter()
    for batch, answer in ledger_model(job.batches()).items():
        baskets = [show([row[4]]) for row in answer]
        counts.update(baskets)
        assert job.results()[batch] == sorted([key, counts[key]] for key in set(baskets)), f"batch {batch}"
    assert sorted(path.name for path in (job.checkpoint / "statelog").iterdir()) == ["log"]


def test_two_operators_side_by_side(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path, uid="users")

    def plan(parallelism: int) -> DataFrame:
        items = statelog.key_by(job.read(spark), "item", uid="items", parallelism=2).transformWithState(
            Counts(), "key string, count long", "update", "None"
        )
        users = job.ledger(spark, parallelism).selectExpr("user AS key", "count")
        return users.repartition(2).union(items.repartition(2))

    for leg, parallelism in enumerate((3, 1)):
        job.add(make_orders(2, seed=93 + leg))
        job.run(plan(parallelism))

    items: Counter[str] = Counter()
    for batch, orders in enumerate(job.batches()):
        items.update(show([order["item"]]) for order in orders)
        expected = [[show([item]), items[show([item])]] for item in {order["item"] for order in orders}]
        expected += [row[:2] for row in ledger_model(job.batches())[batch]]
        assert job.results()[batch] == sorted(expected), f"batch {batch}"


@pytest.mark.parametrize("sink", ["memory", "parquet"])
def test_sinks_that_spark_writes_itself(spark: SparkSession, tmp_path: Path, sink: str) -> None:
    job = Job(tmp_path)
    expected: list[list[Any]] = []
    # Spark's memory sink in append mode cannot be started again on its checkpoint.
    for leg in range(2 if sink == "parquet" else 1):
        job.add(make_orders(3, seed=96 + leg))
        writer = job.ledger(spark, 2 + leg).writeStream.outputMode("append").trigger(availableNow=True)
        writer = writer.option("checkpointLocation", str(job.checkpoint))
        if sink == "memory":
            writer.format("memory").queryName("ledger").start().awaitTermination()
        else:
            writer.format("parquet").option("path", str(job.output)).start().awaitTermination()
    rows = spark.table("ledger") if sink == "memory" else spark.read.parquet(str(job.output))
    for answer in ledger_model(job.batches()).values():
        expected.extend(answer)

    assert sorted(list(row) for row in rows.collect()) == sorted(expected)
