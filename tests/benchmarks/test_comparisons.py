"""Benchmarks that compare statelog with Spark or itself in several cases: the output they expect, and their figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from benchmarks import aggregate, checkpointing, dedup, join
from benchmarks.discarding import SCHEME, DiscardingStore
from benchmarks.frame import Result
from benchmarks.query import BatchSide, Recorder
from benchmarks.sliding import SPARK_WINDOWS, SlidingSide
from statelog.storage import LocalStore

FILES = dict.fromkeys(("files_live", "bytes_live", "files_seen", "bytes_seen"), 0)


def measured(side: BatchSide, duration_ms: float, subtask_s: float = 0.0) -> dict[str, Any]:
    """The measurements of a side whose batches take so long."""
    checkpoint = {"changes": 1, "changed_bytes": 1, "subtask_s": subtask_s, "commit_s": 0.0}
    return {
        "batches": [{"batch": batch, "triggerExecution": duration_ms} for batch in range(side.batches)],
        "checkpoints": [{"batch": batch, **checkpoint} for batch in range(side.batches) if subtask_s],
        **FILES,
    }


def outcomes(result: Result) -> list[tuple[str, float | None, bool]]:
    return [(each.name, each.value and round(each.value, 6), each.met) for each in result.targets]


class TestAggregate:
    @pytest.fixture
    def run(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
        durations_ms = {
            aggregate.CEILING: 100,
            aggregate.STATELOG: 200,
            aggregate.COMBINING: 400,
            aggregate.SPARK: 500,
            SPARK_WINDOWS: 700,
        }
        for side in (aggregate.AggregateSide, SlidingSide):
            monkeypatch.setattr(side, "run", lambda side, place: measured(side, durations_ms[side.side]))
        return lambda **settings: aggregate.run(aggregate.Settings(rows_per_batch=(10,), **settings), tmp_path)

    def test_of_keys(self, run: Callable[..., Result]) -> None:
        assert outcomes(run(skew=("uniform", "hot"))) == [
            ("10 rows, uniform: statelog / Spark groupBy", 2.5, False),
            ("10 rows, uniform: statelog / stateless ceiling", 0.5, False),
            ("10 rows, hot: statelog / Spark groupBy", 2.5, False),
            ("10 rows, hot: statelog / stateless ceiling", 0.5, False),
        ]

    def test_of_windows(self, run: Callable[..., Result]) -> None:
        result = run(skew=("zipf",), windows=True)

        assert outcomes(result) == [("10 rows, zipf: statelog / Spark window groupBy", 3.5, True)]
        assert [row["side"] for row in result.rows] == ["statelog", "Spark window groupBy"]


def test_expected_windows_against_every_window_of_every_row() -> None:
    side = SlidingSide(side="statelog", parallelism=2, rows_per_batch=40, batches=8, keys=5, skew="uniform")
    source = np.random.default_rng(3)
    origin_s = side.start_ms // 1000
    windows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    batches, wanted, watermark_ms = [], [], 0
    for number in range(side.batches):
        batch_ms = side.start_ms + number * 5_000
        rows = {
            "key": source.integers(0, 5, 40),
            "time": batch_ms - source.integers(0, 5_000, 40),
            "x": source.integers(0, 1_000, 40),
            "y": source.integers(0, 7, 40).astype(np.float64),
        }
        batches.append(pa.table(rows))
        for key, time_ms, x, y in zip(*(column.tolist() for column in rows.values()), strict=True):
            for start_s in range(time_ms // 1000 - 9, time_ms // 1000 + 1):
                assert 1000 * (start_s + 10) > watermark_ms or number == 0, "no row is late"
                windows[key, start_s].append((x, int(y)))
        due = [each for each in windows if 1000 * (each[1] + 10) <= watermark_ms]
        ended = [(key, start_s, windows.pop((key, start_s))) for key, start_s in due]
        wanted.append(
            {
                "windows": len(ended),
                "n": sum(len(held) for _, _, held in ended),
                "x": sum(x for _, _, held in ended for x, _ in held),
                "y": sum(y for _, _, held in ended for _, y in held),
                "by_key": sum((key + 1) * x for key, _, held in ended for x, _ in held),
                "by_start": sum((start_s - origin_s) * len(held) for _, start_s, held in ended),
            }
        )
        watermark_ms = max(watermark_ms, int(rows["time"].max()))

    assert list(side.expected_windows(batches)) == wanted
    assert wanted[0]["windows"] == 0
    assert all(each["windows"] > 10 for each in wanted[2:])


@pytest.mark.spark
@pytest.mark.parametrize(("repeated", "skew"), [("new", "uniform"), ("half", "zipf")])
def test_expected_first_rows_are_those_that_spark_adds(spark: SparkSession, repeated: str, skew: str) -> None:
    side = dedup.DedupSide(
        side=dedup.SPARK, parallelism=2, rows_per_batch=100, batches=3, keys=30, skew=skew, repeated=repeated
    )
    totals = []
    for rows in (0, 100, 200, 300):
        first = side.output(spark.range(rows).select(F.col("id").alias("value")), Recorder())
        keys = [row.key for row in first.collect()]
        totals.append((len(keys), sum(key % 1_000_003 for key in keys)))

    assert list(side.expected(spark)) == [
        {"keys": after[0] - before[0], "sum": after[1] - before[1]} for before, after in pairwise(totals)
    ]
    new = {"new": 285, "half": 150}[repeated]
    assert new < totals[-1][0] <= new + 30


def test_dedup_compares_with_spark_in_every_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    durations_ms = {dedup.CEILING: 100, dedup.STATELOG: 200, dedup.SPARK: 500}
    monkeypatch.setattr(dedup.DedupSide, "run", lambda side, place: measured(side, durations_ms[side.side]))

    result = dedup.run(dedup.Settings(skew=("uniform", "hot")), tmp_path)

    assert outcomes(result) == [
        (f"200,000 rows, {repeated}, {skew}: statelog / Spark dropDuplicates", 2.5, False)
        for repeated in ("new", "half")
        for skew in ("uniform", "hot")
    ]


@pytest.mark.spark
@pytest.mark.parametrize(("how", "skew"), [(join.INNER, "uniform"), (join.LEFT, "uniform"), (join.INNER, "zipf")])
def test_expected_pairs_are_those_that_spark_adds(spark: SparkSession, how: str, skew: str) -> None:
    side = join.JoinSide.of(
        join.Settings(keys=25), side=join.SPARK, rows_per_batch=40, batches=4, how=how, skew=skew, value_bytes=20
    )
    found = []
    for batches in (1, 2, 3, 4):
        numbers = spark.range(40 * batches).select(F.col("id").alias("value"))
        source = numbers.withColumn("timestamp", F.timestamp_seconds(F.floor(F.col("value") / 40)))
        pairs = side.output(source, Recorder()).where("right_key IS NOT NULL")
        found.append(pairs.select(*side.checks()).collect()[0].asDict())
    counted = [{name: value or 0 for name, value in checks.items()} for checks in found]
    assert list(side.expected(spark)) == [
        counted[0],
        *({name: after[name] - before[name] for name in after} for before, after in pairwise(counted)),
    ]
    assert counted[3]["pairs"] == 120 if skew == "zipf" else counted[3]["pairs"] > 120


def test_join_compares_with_spark_in_every_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    durations_ms = {join.STATELOG: 200, join.SPARK: 500}
    cpu_s = {join.STATELOG: 2.0, join.SPARK: 3.0}

    def run(side: join.JoinSide, place: Path) -> dict[str, Any]:
        # The time of the tenth batch was not read; the first nine are left out.
        read = {batch: 100 + batch * cpu_s[side.side] for batch in range(-1, 14) if batch != 10}
        return {**measured(side, durations_ms[side.side]), "cpu_s": read | {5: 0}}

    monkeypatch.setattr(join.JoinSide, "run", run)

    result = join.run(join.Settings(rows_per_batch=(10,)), tmp_path)

    assert outcomes(result) == [
        (f"10 + 10 rows, uniform, {how}: statelog / Spark join, format 4{by}", ratio, ratio > 2)
        for how in ("inner", "left")
        for by, ratio in ((", by CPU time", 1.5), ("", 2.5))
    ]


class TestCheckpointing:
    def test_ratio_and_its_bound(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        asked: list[tuple[str, bool]] = []

        def run(side: BatchSide, place: Path) -> dict[str, Any]:
            asked.append((type(side).__name__, side.is_durable))
            return measured(side, 500 if side.is_durable else 480, 0.030 if side.is_durable else 0.010)

        monkeypatch.setattr(BatchSide, "run", run)
        result = checkpointing.run(checkpointing.Settings(rounds=1), tmp_path)

        assert asked == [
            (name, is_durable) for name in ("CountSide", "AggregateSide", "DedupSide") for is_durable in (True, False)
        ]
        assert outcomes(result) == [
            (f"{query}: stored / dropped", 0.96, True) for query in ("count", "aggregate", "dedup")
        ]
        # 480 ms less the 10 that the subtask still spends on its changes.
        assert result.figures["lower_bounds"] == {query: 0.94 for query in ("count", "aggregate", "dedup")}

    def test_the_store_keeps_its_log_and_drops_changesets(self, tmp_path: Path) -> None:
        store = DiscardingStore(f"{SCHEME}:{tmp_path}")
        assert store.put_if_absent("log/1", b"claim")
        store.append("log/1", [b"one", b"two"], at=5)
        store.append("log/1", [b"2"], at=8)
        store.put("changes/1", b"many")

        kept = LocalStore(tmp_path)
        assert [info.name for info in kept.list()] == ["log/1"]
        assert kept.read("log/1") == b"claimone2"
