"""Queries whose sources have names: the clock has one too, and comes and goes as Spark lets named sources do."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import DataStreamReader, StatefulProcessor

import statelog
from statelog import Options, Watermark
from statelog.spark.checkpoint.logs import SOURCE_NAMES
from tests.spark.inputs import add_json
from tests.spark.support import Job

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(not hasattr(DataStreamReader, "name"), reason="this Spark has no names for sources"),
]

START = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
RESULT = "user string, n long"


@pytest.fixture
def named(spark: SparkSession) -> SparkSession:
    """A session whose queries name their sources."""
    session = spark.newSession()
    session.conf.set(SOURCE_NAMES, "true")
    return session


class Count(StatefulProcessor):
    """Counts the rows of a user; with `ttl_ms` it forgets them."""

    def __init__(self, ttl_ms: int | None = None) -> None:
        self._ttl_ms = ttl_ms

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "n long", self._ttl_ms)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n = (self._count.get() or (0,))[0] + len(list(rows))
        self._count.update((n,))
        yield Row(user=key[0], n=n)

    def close(self) -> None:
        pass


def second(at: int) -> str:
    return (START + datetime.timedelta(seconds=at)).isoformat()


def read(session: SparkSession, folder: Path, name: str) -> DataFrame:
    reader = session.readStream.schema("user string, at timestamp").option("maxFilesPerTrigger", 1)
    return reader.name(name).json(str(folder))


def count(rows: DataFrame, time_mode: str, ttl_ms: int | None = None, **own: Any) -> DataFrame:
    return statelog.key_by(rows, "user", parallelism=2, **own).transformWithState(
        Count(ttl_ms), RESULT, "update", time_mode
    )


def by_window(rows: DataFrame) -> DataFrame:
    windows = statelog.key_by(rows, "user", parallelism=2).window(statelog.TumblingWindows(10_000))
    return windows.agg(statelog.Count().alias("n")).select("user", "n")


BEATS = Options(heartbeat_s=60)
WAYS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "no clock": lambda rows: count(rows, "None"),
    "processing time": lambda rows: count(rows, "ProcessingTime"),
    "Spark's watermark": lambda rows: count(rows.withWatermark("at", "1 second"), "EventTime"),
    "a watermark of its own": lambda rows: count(rows, "EventTime", watermark=Watermark("at", 1000)),
    "a heartbeat": lambda rows: count(rows, "ProcessingTime", options=BEATS),
    "a TTL and a heartbeat": lambda rows: count(rows, "ProcessingTime", 10**9, options=BEATS),
    "a name of other characters": lambda rows: count(rows, "None", options=BEATS, uid="by user, ä/b"),
    "windows": lambda rows: by_window(rows.withWatermark("at", "1 second")),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_operator_runs_and_goes_on(named: SparkSession, tmp_path: Path, way: str) -> None:
    job = Job(tmp_path)
    found: list[list[Any]] = []
    for batch in ({"a": 5, "b": 6}, {"a": 65}, {"a": 165}):
        add_json(job.input, [[{"user": user, "at": second(at)} for user, at in batch.items()]])
        job.run(WAYS[way](read(named, job.input, "events")))
        found += [row for rows in job.results().values() for row in rows if row not in found]
    expected = [["a", 1], ["b", 1]] if way == "windows" else [["a", 1], ["b", 1], ["a", 2], ["a", 3]]
    assert sorted(found) == sorted(expected)


def test_the_clock_may_come_and_go(named: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path)
    for number, way in enumerate(["processing time", "a heartbeat", "processing time", "a heartbeat", "a heartbeat"]):
        add_json(job.input, [[{"user": "a", "at": second(number)}]])
        if number in (1, 2):  # the batch that is repeated has an entry without the change

            def broken_sink(rows: DataFrame, batch: int) -> None:
                rows.collect()
                raise RuntimeError("the sink is broken")

            before = "processing time" if number == 1 else "a heartbeat"
            assert "broken" in job.fail(WAYS[before](read(named, job.input, "events")), broken_sink)
        job.run(WAYS[way](read(named, job.input, "events")))
    counts = [n for _, rows in sorted(job.results().items()) for _, n in rows]
    assert counts == [1, 2, 3, 4, 5]


def test_operators_side_by_side_have_a_clock_each(named: SparkSession, tmp_path: Path) -> None:
    jobs = [Job(tmp_path / name) for name in ("one", "two")]
    for job in jobs:
        add_json(job.input, [[{"user": job.root.name, "at": second(1)}], [{"user": job.root.name, "at": second(60)}]])
    frames = [
        count(read(named, job.input, job.root.name), "EventTime", watermark=Watermark("at"), uid=job.root.name)
        for job in jobs
    ]
    jobs[0].run(frames[0].repartition(2).union(frames[1].repartition(2)))
    rows = sorted(row for rows in jobs[0].results().values() for row in rows)
    assert rows == [["one", 1], ["one", 2], ["two", 1], ["two", 2]]
    newest = max((jobs[0].checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name)).read_text()
    names = [line.partition(":")[0] for line in newest.splitlines()[2:]]
    assert sorted(names) == ["one", "statelog_clock_one", "statelog_clock_two", "two"]


@pytest.mark.parametrize("after", ["processing time", "a heartbeat"])
@pytest.mark.parametrize("before", ["processing time", "a heartbeat"])
@pytest.mark.parametrize("way", ["savepoint", "branch"])
def test_another_query_goes_on_with_a_clock_or_without(
    named: SparkSession, tmp_path: Path, way: str, before: str, after: str
) -> None:
    job = Job(tmp_path)
    add_json(job.input, [[{"user": "a", "at": second(5)}], [{"user": "a", "at": second(65)}]])
    job.run(WAYS[before](read(named, job.input, "events")))
    other = job.elsewhere("other")
    if way == "branch":
        statelog.branch(job.checkpoint, other.checkpoint)
    else:
        statelog.savepoint(job.checkpoint, tmp_path / "savepoint")
        statelog.restore(tmp_path / "savepoint", other.checkpoint)
    add_json(job.input, [[{"user": "a", "at": second(165)}], [{"user": "b", "at": second(166)}]])
    other.run(WAYS[after](read(named, other.input, "events")))
    assert [row for _, rows in sorted(other.results().items()) for row in rows] == [["a", 3], ["b", 1]]
    job.run(WAYS[before](read(named, job.input, "events")))
    assert [n for _, rows in sorted(job.results().items()) for user, n in rows if user == "a"] == [1, 2, 3]
