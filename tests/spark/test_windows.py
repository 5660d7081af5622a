"""Windows in Spark: against Spark's own windows of the same rows in a batch, with restarts, late rows and errors."""

from __future__ import annotations

import datetime
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F

import statelog
from statelog import ConfigurationError, Options, SessionWindows, SlidingWindows, TumblingWindows
from statelog.streams.windowed import WindowedStream
from tests.spark.inputs import add_json

pytestmark = pytest.mark.spark

SCHEMA = "user string, time timestamp, n long"
START = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
Event = tuple[str, float, int]
Apply = Callable[[WindowedStream, dict[str, Any]], DataFrame]


def _events(*, seed: int, batches: int) -> list[list[Event]]:
    """Rows of some users, 40 seconds a batch, up to 20 seconds out of order; the last batch is much later."""
    rng = random.Random(seed)
    made = [
        [(rng.choice("abcd"), round(batch * 40 + rng.uniform(-20, 40), 3), rng.randrange(100)) for _ in range(30)]
        for batch in range(1, batches + 1)
    ]
    return [*made, [("z", 10_000.0, 0)]]


def _write(root: Path, batches: list[list[Event]]) -> None:
    """Add input, a file per batch."""
    for events in batches:
        rows = [
            {"user": user, "time": (START + datetime.timedelta(seconds=second)).isoformat(), "n": n}
            for user, second, n in events
        ]
        add_json(root / "input", [rows])


def _stream(spark: SparkSession, root: Path) -> DataFrame:
    return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(root / "input"))


def _run(df: DataFrame, root: Path) -> list[Row]:
    """Run a query over all input that is there, and return its output."""
    output: list[Row] = []

    def collect(batch: DataFrame, number: int) -> None:
        output.extend(batch.collect())

    writer = df.writeStream.foreachBatch(collect).option("checkpointLocation", str(root / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return output


def _by_spark(rows: DataFrame, window: Column) -> Counter[Any]:
    """The windows of all users but z, computed by Spark."""
    grouped = rows.where("user != 'z'").groupBy("user", window.alias("w"))
    found = grouped.agg(F.count("*"), F.sum("n"), F.min("time"), F.array_sort(F.collect_list("n")))
    return Counter((row[0], row.w.start, row.w.end, row[2], row[3], row[4], tuple(row[5])) for row in found.collect())


def _found(output: list[Row]) -> Counter[Any]:
    return Counter((*row[:6], tuple(sorted(row[6]))) for row in output)


AGGREGATES = (statelog.Count(), statelog.Sum("n"), statelog.Min("time"), statelog.Collect("n"))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("windows", "window"),
    [
        (TumblingWindows(30_000, 5_000), lambda: F.window("time", "30 seconds", startTime="5 seconds")),
        (SlidingWindows(30_000, 12_000), lambda: F.window("time", "30 seconds", "12 seconds")),
        (SessionWindows(3_000), lambda: F.session_window("time", "3 seconds")),
    ],
    ids=["tumbling", "sliding", "session"],
)
def test_windows_are_those_of_spark(
    spark: SparkSession, tmp_path: Path, windows: Any, window: Callable[[], Column]
) -> None:
    batches = _events(seed=1, batches=4)
    _write(tmp_path, batches[:2])

    def aggregated(parallelism: int) -> DataFrame:
        stream = _stream(spark, tmp_path).withWatermark("time", "60 seconds")
        return statelog.key_by(stream, "user", parallelism=parallelism).window(windows).agg(*AGGREGATES)

    output = _run(aggregated(2), tmp_path)
    _write(tmp_path, batches[2:])
    output += _run(aggregated(3), tmp_path)
    output += _run(aggregated(2), tmp_path)  # nothing, but on Spark 4.1 the last windows (docs/time.md)

    all_rows = spark.read.schema(SCHEMA).json(str(tmp_path / "input"))
    expected = _by_spark(all_rows, window())
    assert _found(output) == expected
    in_batch = statelog.key_by(all_rows, "user").window(windows, time_column="time").agg(*AGGREGATES)
    assert _found(in_batch.where("user != 'z'").collect()) == expected


def test_open_windows_are_a_dataframe(spark: SparkSession, tmp_path: Path) -> None:
    """Those that Spark computes of the same rows, as far as their end is after the watermark."""
    batches = _events(seed=3, batches=4)[:-1]
    for parallelism, some in ((2, batches[:2]), (3, batches[2:])):
        _write(tmp_path, some)
        stream = _stream(spark, tmp_path).withWatermark("time", "60 seconds")
        windowed = statelog.key_by(stream, "user", parallelism=parallelism).window(SlidingWindows(30_000, 12_000))
        _run(windowed.agg(*AGGREGATES), tmp_path)

    checkpoint = str(tmp_path / "checkpoint")
    watermark_ms = statelog.list_checkpoints(checkpoint)[-1].watermark_ms
    assert watermark_ms is not None
    all_rows = spark.read.schema(SCHEMA).json(str(tmp_path / "input"))
    grouped = all_rows.groupBy("user", F.window("time", "30 seconds", "12 seconds").alias("w"))
    computed = grouped.agg(F.count("*"), F.sum("n"), F.min("time"), F.array_sort(F.collect_list("n")))
    is_open = F.unix_millis("w.end") > watermark_ms
    expected = Counter((row[0], *row.w, *row[2:5], tuple(row[5])) for row in computed.where(is_open).collect())
    assert 0 < len(expected) < computed.count()

    spark.dataSource.register(statelog.StateSource)
    source = spark.read.format("statelog")
    frame = source.option("state", "windows").load(checkpoint)
    assert frame.columns[:4] == ["key_user", "window_start", "window_end", "is_complete"]
    found = frame.where("not is_complete").drop("is_complete")
    assert Counter((*row[:6], tuple(sorted(row[6]))) for row in found.collect()) == expected
    assert frame.count() == found.count()
    chosen = source.option("columns", "window_start,value_count").load(checkpoint)  # the windows are the only state
    assert Counter(map(tuple, chosen.collect())) == Counter(
        (start, count) for (_, start, _, count, *_), times in expected.items() for _ in range(times)
    )


class Orders(statelog.WindowProcessor):
    """Returns what a window has of each user, and what was in those before."""

    def init(self, handle: Any) -> None:
        self._before = handle.getValueState("before", "rows long")

    def process(self, key: Any, window: Any, rows: Iterator[Row], context: Any) -> Iterator[Row]:
        held = [(row.time, row.n) for row in rows]
        assert held == sorted(held, key=lambda one: one[0].timestamp() * 1000 // 1)
        (before,) = self._before.get() or (0,)
        self._before.update((before + len(held),))
        yield Row(user=key[0], start=window.start, rows=len(held), before=before)

    def close(self) -> None:
        pass


def test_late_rows_are_returned_in_a_column(spark: SparkSession, tmp_path: Path) -> None:
    _write(
        tmp_path,
        [
            [("a", 5.0, 1), ("a", 12.0, 2)],
            [("a", 31.0, 3)],
            [("a", 31.5, 3)],  # its watermark is 31, and that of the next batch's late rows
            [("a", 6.0, 4), ("a", 32.0, 5), ("b", 15.0, 6)],  # 0 to 10 and 10 to 20 were returned before
            [("a", 100.0, 7)],
        ],
    )
    stream = _stream(spark, tmp_path).withWatermark("time", "0 seconds")
    windows = statelog.key_by(stream, "user").window(TumblingWindows(10_000), late_column="too late")
    output: dict[str, list[Any]] = {"on time": [], "late": []}

    def collect(batch: DataFrame, number: int) -> None:
        output["on time"] += statelog.on_time(batch, "too late").collect()
        output["late"] += statelog.late(batch, "too late").collect()

    result = windows.process(Orders(), "user string, start timestamp, rows long, before long")
    assert result.schema["too late"].dataType.simpleString() == "struct<user:string,time:timestamp,n:bigint>"
    query = (
        result.writeStream.foreachBatch(collect)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert [(row.user, row.start.minute * 60 + row.start.second, *row[2:]) for row in output["on time"]] == [
        ("a", 0, 1, 0),
        ("a", 10, 1, 1),
        ("a", 30, 3, 2),
    ]
    assert [tuple(row) for row in output["late"]] == [
        ("a", datetime.datetime(2024, 1, 1, 0, 0, 6), 4),
        ("b", datetime.datetime(2024, 1, 1, 0, 0, 15), 6),
    ]


class CountLate(statelog.Observer):
    """Counts late rows on the driver."""

    late_rows = 0

    def checkpoint(self, metrics: statelog.CheckpointMetrics) -> None:
        CountLate.late_rows += metrics.late_rows


def test_late_rows_are_counted_and_update_windows_while_they_are_allowed(spark: SparkSession, tmp_path: Path) -> None:
    CountLate.late_rows = 0
    _write(
        tmp_path,
        [
            [("a", second, n)]
            for second, n in ((5.0, 1), (21.0, 2), (22.0, 3), (6.0, 10), (31.0, 4), (32.0, 5), (7.0, 100))
        ],
    )
    totals = (
        statelog.key_by(
            _stream(spark, tmp_path),
            "user",
            options=Options(observer=CountLate()),
            watermark=statelog.Watermark("time"),
        )
        .window(TumblingWindows(10_000), allowed_lateness="15 seconds")
        .reduce(lambda one, other: (one[0] + other[0],), "n long")
    )
    found = [(row.window_start.second, row.n) for row in _run(totals, tmp_path)]
    assert found == [(0, 1), (0, 11), (20, 5)]
    assert CountLate.late_rows == 1


def test_a_start_with_other_settings_converts_or_refuses(spark: SparkSession, tmp_path: Path) -> None:
    def totals(windows: Any, lateness_ms: int) -> DataFrame:
        marked = _stream(spark, tmp_path).withWatermark("time", "0 seconds")
        keyed = statelog.key_by(marked, "user").window(windows, allowed_lateness=lateness_ms)
        return keyed.reduce(lambda one, other: (one[0] + other[0],), "n long")

    _write(tmp_path, [[("a", 5.0, 1), ("a", 15.0, 2)], [("a", 22.0, 3)]])
    assert [row.n for row in _run(totals(TumblingWindows(10_000), 0), tmp_path)] == [1, 2]
    _write(tmp_path, [[("a", 6.0, 10), ("a", 23.0, 4)], [("a", 31.0, 5)], [("a", 32.0, 5)], [("a", 24.0, 6)]])
    with pytest.raises(StreamingQueryException) as caught:
        _run(totals(TumblingWindows(20_000), 0), tmp_path)
    assert "size_ms=10000" in str(caught.value)
    assert "[other-settings]" in str(caught.value)
    found = [(row.window_start.second, row.n) for row in _run(totals(TumblingWindows(10_000), 60_000), tmp_path)]
    assert found == [(20, 7), (20, 13)]


def test_windows_of_windows(spark: SparkSession, tmp_path: Path) -> None:
    batches = _events(seed=2, batches=3)
    _write(tmp_path, batches)
    stream = _stream(spark, tmp_path).withWatermark("time", "60 seconds")
    per_user = (
        statelog.key_by(stream, "user", uid="per-user")
        .window(TumblingWindows(10_000))
        .agg(statelog.Count().alias("rows"), eventTimeColumnName="window_end")
        .select("user", "window_end", "rows")
    )
    totals = (
        statelog.key_by(per_user.withColumn("all", F.lit(True)), "all", uid="totals")
        .window(TumblingWindows(60_000, 1))  # a window that ends at 60 s belongs to the first minute
        .agg(statelog.Sum("rows").alias("rows"))
    )
    found = {round(row.window_start.timestamp() - START.timestamp()): row.rows for row in _run(totals, tmp_path)}
    expected = Counter(int(second // 60) * 60 for events in batches[:-1] for _, second, _ in events)
    assert found == dict(expected)


def test_counted_windows_and_processing_time(spark: SparkSession, tmp_path: Path) -> None:
    _write(tmp_path, [[("a", 1.0, 1), ("a", 2.0, 2), ("b", 1.0, 3)], [("a", 3.0, 4), ("a", 4.0, 5), ("b", 2.0, 6)]])
    keyed = statelog.key_by(_stream(spark, tmp_path), "user")
    pairs = keyed.window(statelog.CountWindows(2)).agg(statelog.First("n"), statelog.Last("n"), statelog.Max("time"))
    assert sorted(tuple(row[:3]) for row in _run(pairs, tmp_path / "pairs")) == [
        ("a", 1, 2),
        ("a", 4, 5),
        ("b", 3, 6),
    ]
    windows = keyed.window(TumblingWindows(1), timeMode="ProcessingTime").agg(statelog.Sum("n").alias("n"))
    found = _run(windows, tmp_path / "processing")
    assert {row.user: row.n for row in found} == {"a": 3, "b": 3}, "the second batch's windows end after it"


def test_mistakes_are_told_before_the_query_starts(spark: SparkSession, tmp_path: Path) -> None:
    _write(tmp_path, [[("a", 1.0, 1)]])
    stream = _stream(spark, tmp_path)
    marked = statelog.key_by(stream.withWatermark("time", "1 second"), "user")
    minute = TumblingWindows(60_000)
    batch = statelog.key_by(spark.read.schema(SCHEMA).json(str(tmp_path / "input")), "user")
    mistakes: list[tuple[Callable[[], Any], str]] = [
        (lambda: statelog.key_by(stream, "user").window(minute), "need a watermark.*withWatermark"),
        (lambda: marked.window(minute, time_column="n"), "time_column is 'n', but column 'time' has the watermark"),
        (lambda: batch.window(minute), "need a time column.*time_column"),
        (lambda: batch.window(minute, "ProcessingTime"), "the DataFrame is a batch"),
        (lambda: marked.window(minute, "None"), "timeMode is 'None'"),
        (lambda: marked.window(minute, "Sometime"), "timeMode is 'Sometime'"),
        (lambda: marked.window(minute, "ProcessingTime", "time"), "in event time only"),
        (lambda: marked.window(statelog.CountWindows(1), "EventTime"), "do not depend on time"),
        (
            lambda: statelog.key_by(stream, "user", watermark=statelog.Watermark("at")).window(minute),
            "'at', which is not a timestamp column",
        ),
        (lambda: marked.window(minute).reduce(max, "n lnog"), "value_schema 'n lnog' cannot be parsed"),
        (
            lambda: (
                statelog.key_by(stream.withWatermark("time", "1 second"), "user", parallelism=0)
                .window(minute)
                .agg(statelog.Count())
            ),
            "parallelism is 0",
        ),
        (
            lambda: marked.window(minute, allowed_lateness=1).agg(statelog.Count(), eventTimeColumnName="window_end"),
            "allowed_lateness of 1 ms, and eventTimeColumnName is 'window_end'.*would be late.*Omit allowed_lateness",
        ),
        (lambda: statelog.late(stream, "late"), "no column 'late' of late rows"),
    ]
    for act, message in mistakes:
        with pytest.raises(ConfigurationError, match=f"(?s){message}"):
            act()
