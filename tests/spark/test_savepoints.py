"""Savepoints: taken of running and stopped queries, read by other tools, and gone on from."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.query import StreamingQuery

import statelog
from statelog import ConfigurationError, CorruptionError, ErrorKind, Options, StateMissingError
from statelog.__main__ import main
from statelog.queries.save_restore import save_stopped
from statelog.reading.savepoint import Manifest
from statelog.sealed import seal
from statelog.storage import LocalStore
from tests.spark.faults import wait_until
from tests.spark.inputs import add_json
from tests.spark.support import Job, ledger_model, make_orders

pytestmark = pytest.mark.spark

Accounts = dict[str, tuple[int, int, list[int], dict[str, int]]]


def accounts(answers: dict[int, list[list[Any]]]) -> Accounts:
    """What is held of each user at the end, by the independent answer."""
    held: Accounts = {}
    for batch in sorted(answers):
        for user, count, amount, history, items in answers[batch]:
            pairs = [pair.split("=") for pair in items.split(",") if pair]
            held[user] = (
                count,
                amount,
                [int(one) for one in history.split(",") if one],
                {k: int(n) for k, n in pairs},
            )
    return held


def require_saved(target: Path, expected: Accounts, uid: str = "main") -> None:
    """The tables of a savepoint, read by pandas, hold exactly what is expected."""
    states = target / "operators" / uid / "states"
    account = pd.read_parquet(states / "account").set_index("key_user")
    history = pd.read_parquet(states / "history").sort_values(["key_user", "position"])
    items = pd.read_parquet(states / "items")
    live = {user: held for user, held in expected.items() if held[0]}
    found = {user: (row.value_count, row.value_amount) for user, row in account.iterrows()}
    assert found == {user: held[:2] for user, held in live.items()}
    lists = {user: list(rows.value_amount) for user, rows in history.groupby("key_user")}
    assert lists == {user: held[2] for user, held in expected.items() if held[2]}
    maps = {
        user: dict(zip(rows.mapkey_item, rows.value_count, strict=True)) for user, rows in items.groupby("key_user")
    }
    assert maps == {user: held[3] for user, held in expected.items() if held[3]}


@pytest.mark.smoke
def test_a_stopped_query_is_saved_and_gone_on_from_with_another_parallelism(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    orders = make_orders(9, seed=3)
    job = Job(tmp_path).add(orders[:5])
    job.run(job.ledger(spark, 2))
    target = tmp_path / "savepoint"
    saved = statelog.savepoint(job.checkpoint, target)
    assert (saved.batch, saved.target) == (4, str(target))
    expected = accounts(ledger_model(orders[:5]))
    require_saved(target, expected)
    assert saved.rows["main"]["account"] == sum(1 for held in expected.values() if held[0])
    typed = spark.read.parquet(str(target / "operators" / "main" / "states" / "account"))
    assert dict(typed.dtypes) == {
        "hash": "bigint", "key_user": "string", "value_count": "bigint", "value_amount": "bigint",
    }  # fmt: skip
    keyed = typed.select(F.xxhash64("key_user").alias("expected"), "hash").where("expected <> hash")
    assert keyed.count() == 0, "the hash is Spark's"

    before = _files(target)
    other = job.elsewhere("other")
    assert main(["restore", str(target), str(other.checkpoint), "--json"]) == 0
    restored = json.loads(capsys.readouterr().out)
    assert (restored["next_batch"], restored["query_id"] != saved.query_id) == (5, True)
    assert main(["restore", str(target), str(other.checkpoint)]) == 1
    assert "already holds a checkpoint of a Spark query" in capsys.readouterr().err
    job.add(orders[5:])
    other.run(other.ledger(spark, 5))
    job.run(job.ledger(spark, 3))
    answers = ledger_model(orders)
    assert other.results() == {batch: answers[batch] for batch in range(5, 9)}
    assert job.results() == answers, "the query continues as if nothing had been"
    assert _files(target) == before, "a restore changes nothing of a savepoint"
    again = tmp_path / "again"
    assert statelog.savepoint(other.checkpoint, again).batch == 8
    require_saved(again, accounts(answers))


@pytest.mark.smoke
def test_a_running_query_is_saved_without_a_stop(spark: SparkSession, tmp_path: Path) -> None:
    orders = make_orders(16, seed=4)
    job = Job(tmp_path).add(orders[:5])
    options = Options(retained_checkpoints=2, materialization_interval_s=0.2)
    frame = job.ledger(spark, 2, options)
    query = (
        frame.writeStream.outputMode("update")
        .foreachBatch(job.save)
        .option("checkpointLocation", str(job.checkpoint))
        .start()
    )
    try:
        wait_until(lambda: len(list(job.output.glob("*.json"))) >= 3, "three batches")
        job.add(orders[5:10])
        saved = [statelog.savepoint(query, tmp_path / f"savepoint-{number}") for number in range(2)]
        job.add(orders[10:])
        wait_until(lambda: len(list(job.output.glob("*.json"))) == 16, "all batches", 120)
    finally:
        query.stop()
    answers = ledger_model(orders)
    assert job.results() == answers
    for number, one in enumerate(saved):
        require_saved(tmp_path / f"savepoint-{number}", accounts(ledger_model(orders[: one.batch + 1])))
    other = job.elsewhere("other")
    statelog.restore(tmp_path / "savepoint-0", other.checkpoint, claim=True)
    assert not (tmp_path / "savepoint-0" / "manifest.json").exists(), "a claimed savepoint is gone"
    other.run(other.ledger(spark, 3))
    assert other.results() == {batch: answers[batch] for batch in range(saved[0].batch + 1, 16)}


class Remember(StatefulProcessor):
    """Counts, and returns each key's count again when its timer fires."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        (count,) = self._count.get() or (0,)
        times = [int(row.time.timestamp() * 1000) for row in rows]
        self._count.update((count + len(times),))
        self._handle.registerTimer(max(times) + 5000)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(key=key.key, n=self._count.get()[0])

    def close(self) -> None:
        pass


class Tally(statelog.OperatorProcessor):
    """Keeps what went by in each subtask."""

    def init(self, handle: Any) -> None:
        self._seen = handle.getListState("seen", "key string, n long")

    def process(self, rows: Iterator[Row], context: statelog.OperatorContext) -> Iterator[Row]:
        for row in rows:
            self._seen.add((row.key, row.n))
        held = list(self._seen.get())
        yield Row(elements=len(held), total=sum(n for _, n in held))

    def close(self) -> None:
        pass


class Chain:
    """A query of two operators: timers by key, then a tally without keys.

    Parameters
    ----------
    session : SparkSession
        The session.
    root : Path
        Holds the checkpoint.
    source : Path
        The input, a file per batch.
    location : Path, optional
        The location of the query's state.
    """

    def __init__(self, session: SparkSession, root: Path, source: Path, location: Path | None = None) -> None:
        self._session = session
        self.root = root
        self._source = source
        self._location = location
        self.found: dict[int, tuple[int, int]] = {}

    def run(self, parallelism: int, *, has_tally: bool = True) -> None:
        """Run it over all input that is there."""
        self.start(parallelism, has_tally=has_tally, availableNow=True).awaitTermination()

    def start(self, parallelism: int, *, has_tally: bool = True, **trigger: Any) -> StreamingQuery:
        source = self._session.readStream.schema("key string, time timestamp").option("maxFilesPerTrigger", 1)
        rows = source.json(str(self._source)).withWatermark("time", "0 seconds")
        own: Any = {"parallelism": parallelism, "location": None if self._location is None else str(self._location)}
        frame = statelog.key_by(rows, "key", uid="timers", **own).transformWithState(
            Remember(), "key string, n long", "append", "EventTime"
        )
        if has_tally:
            frame = statelog.process(
                frame,
                Tally(),
                "elements long, total long",
                uid=TALLY,
                **own,
            )

        def keep(frame: DataFrame, batch: int) -> None:
            rows = frame.collect()
            if has_tally:
                self.found[batch] = (sum(row.elements for row in rows), sum(row.total for row in rows))

        query = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(self.root / "checkpoint"))
        return (query.trigger(**trigger) if trigger else query).start()

    def clocks(self) -> set[str]:
        """The ids of the heartbeat's source in Spark's offset log."""
        texts = [path.read_text() for path in (self.root / "checkpoint" / "offsets").glob("[0-9]*")]
        return {clock for text in texts for clock in re.findall(r'"clock": ?"([^"]+)"', text)}


TALLY = "t\N{LATIN SMALL LETTER A WITH DIAERESIS}lly"


def timed_rows(first_s: int) -> list[dict[str, str]]:
    return [{"key": f"k{n}", "time": f"2024-01-01T00:00:{first_s + n % 3:02}Z"} for n in range(12)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("spark.sql.streaming.offsetLog.formatVersion", "1", marks=pytest.mark.extended),
        ("spark.sql.streaming.offsetLog.formatVersion", "2"),
        ("spark.sql.maxPlanStringLength", "60"),
    ],
)
def test_timers_watermark_and_operator_state_are_saved_as_of_one_batch(
    name: str, value: str, spark: SparkSession, tmp_path: Path, configured: Callable[[str, str], None]
) -> None:
    configured(name, value)
    source = tmp_path / "input"
    add_json(source, [timed_rows(0), timed_rows(8), timed_rows(16)])
    chain = Chain(spark, tmp_path / "first", source, tmp_path / "own")
    chain.run(2)
    target = tmp_path / "savepoint"
    saved = statelog.savepoint(chain.root / "checkpoint", target, location=str(tmp_path / "own"))
    assert set(saved.rows) == {"timers", TALLY}
    timers = pd.read_parquet(target / "operators" / "timers" / "timers")
    assert set(timers.columns) == {"hash", "key_key", "time_ms"}
    elements = pd.read_parquet(target / "operators" / "t%C3%A4lly" / "states" / "seen")
    assert (len(elements), int(elements.value_n.sum())) == chain.found[saved.batch]
    copy = Chain(spark, tmp_path / "copy", source)
    statelog.restore(target, copy.root / "checkpoint")
    assert len(copy.clocks()) == 1
    assert not copy.clocks() & chain.clocks(), "a clock belongs to one query"
    add_json(source, [timed_rows(24), timed_rows(32)])
    copy.run(3)
    chain.run(1)
    later = {batch: found for batch, found in chain.found.items() if batch > saved.batch}
    assert len(later) >= 2
    assert copy.found == later
    # The last batch without data is run for the watermark of 34 s, after four of five timers of each of 12 keys.
    assert chain.found[max(chain.found)][0] == 48


def test_all_operators_of_a_running_query_are_saved_however_long_its_plan_is(
    spark: SparkSession, tmp_path: Path, configured: Callable[[str, str], None]
) -> None:
    configured("spark.sql.maxPlanStringLength", "60")
    source = tmp_path / "input"
    add_json(source, [timed_rows(0), timed_rows(8)])
    chain = Chain(spark, tmp_path / "first", source, tmp_path / "own")
    query = chain.start(2)
    try:
        wait_until(lambda: len(chain.found) >= 2, "two batches", 120)
        saved = statelog.savepoint(query, tmp_path / "savepoint")
    finally:
        query.stop()
    assert set(saved.rows) == {"timers", TALLY}


def test_an_operator_that_was_given_up_does_not_take_the_savepoint_back(spark: SparkSession, tmp_path: Path) -> None:
    source = tmp_path / "input"
    add_json(source, [timed_rows(0), timed_rows(8)])
    chain = Chain(spark, tmp_path / "first", source, tmp_path / "own")
    chain.run(2)
    last = max(chain.found)
    add_json(source, [timed_rows(16)])
    statelog.forget(chain.root / "checkpoint", TALLY, location=str(tmp_path / "own"))
    chain.run(2, has_tally=False)
    saved = statelog.savepoint(chain.root / "checkpoint", tmp_path / "newest", location=str(tmp_path / "own"))
    assert saved.batch > last
    assert set(saved.rows) == {"timers"}
    before = statelog.savepoint(
        chain.root / "checkpoint", tmp_path / "before", location=str(tmp_path / "own"), batch=last
    )
    assert set(before.rows) == {"timers"}


def test_tables_are_loaded_however_long_the_plan_is(
    spark: SparkSession, tmp_path: Path, configured: Callable[[str, str], None]
) -> None:
    configured("spark.sql.maxPlanStringLength", "60")
    add_json(tmp_path / "input", [[{"key": "a", "time": "2024-01-01T00:00:01Z"}]])
    rows = spark.readStream.schema("key string, time timestamp").json(str(tmp_path / "input"))
    known = spark.createDataFrame([("a", 41), ("b", 1)], "key_key string, value_n long")
    frame = statelog.key_by(rows, "key").transformWithState(
        Remember(), "key string, n long", "append", "ProcessingTime", initialState={"count": known}
    )
    query = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination()
    statelog.savepoint(tmp_path / "checkpoint", tmp_path / "savepoint")
    counts = pd.read_parquet(tmp_path / "savepoint" / "operators" / "main" / "states" / "count")
    assert dict(zip(counts.key_key, counts.value_n, strict=True)) == {"a": 42, "b": 1}


@pytest.mark.parametrize(("version", "interval"), [("1", "3"), ("2", "3"), ("2", "10")])
def test_an_older_batch_is_gone_on_from_file_by_file(
    version: str, interval: str, spark: SparkSession, tmp_path: Path, configured: Callable[[str, str], None]
) -> None:
    configured("spark.sql.streaming.offsetLog.formatVersion", version)
    configured("spark.sql.streaming.fileSource.log.compactInterval", interval)
    configured("spark.sql.streaming.fileSource.log.cleanupDelay", "0")
    orders = make_orders(9, seed=8)
    job = Job(tmp_path).add(orders)
    job.run(job.ledger(spark, 1, Options(retained_checkpoints=9)))
    answers = ledger_model(orders)
    for batch in (3, 5):
        statelog.savepoint(job.checkpoint, tmp_path / f"savepoint-{batch}", batch=batch)
        other = job.elsewhere(f"other-{batch}")
        statelog.restore(tmp_path / f"savepoint-{batch}", other.checkpoint)
        other.run(other.ledger(spark, 1))
        assert other.results() == {later: answers[later] for later in range(batch + 1, 9)}


def test_ranges_are_written_by_tasks_and_restored(spark: SparkSession, tmp_path: Path) -> None:
    orders = make_orders(4, seed=5, users=60)
    job = Job(tmp_path).add(orders[:3])
    job.run(job.ledger(spark, 2))
    target = tmp_path / "savepoint"
    save_stopped(str(job.checkpoint), str(target), part_bytes=2000)
    operator = json.loads((target / "manifest.json").read_text())["operators"][0]
    assert operator["parts"] > 2
    require_saved(target, accounts(ledger_model(orders[:3])))
    files = sorted((target / "operators" / "main" / "states" / "account").iterdir())
    hashes = [pq.read_table(file).column("hash").to_numpy().view("uint64") for file in files]
    assert len(files) > 2
    assert all((one[1:] > one[:-1]).all() for one in hashes), "each file is sorted"
    assert all(one[-1] < two[0] for one, two in itertools.pairwise(hashes)), "and so are the files"
    other = job.elsewhere("other")
    statelog.restore(target, other.checkpoint)
    job.add(orders[3:])
    other.run(other.ledger(spark, 1))
    assert other.results() == {3: ledger_model(orders)[3]}
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptionError, match=r"part-0000.\.parquet"):
        statelog.restore(target, tmp_path / "damaged" / "checkpoint")


def test_mistakes_are_named(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(13, seed=6, rows=3))
    job.run(job.ledger(spark, 1, Options(retained_checkpoints=3)))
    target = tmp_path / "savepoint"
    with pytest.raises(ConfigurationError, match="holds no checkpoint of a Spark query"):
        statelog.savepoint(tmp_path / "nowhere", target)
    with pytest.raises(StateMissingError, match=r"Batch 13 is not one.*the last is 12\."):
        statelog.savepoint(job.checkpoint, target, batch=13)
    assert not target.exists()
    with pytest.raises(ConfigurationError, match="holds no state of statelog that belongs to query"):
        statelog.savepoint(job.checkpoint, target, location=str(tmp_path / "elsewhere"))
    assert statelog.savepoint(job.checkpoint, target, batch=10).batch == 10
    with pytest.raises(ConfigurationError, match="is not empty"):
        statelog.savepoint(job.checkpoint, target)
    with pytest.raises(ConfigurationError, match="already holds a checkpoint of a Spark query"):
        statelog.restore(target, job.checkpoint)
    with pytest.raises(ConfigurationError, match="holds no savepoint") as missing:
        statelog.restore(tmp_path / "nowhere", tmp_path / "new")
    assert missing.value.kind is ErrorKind.CHECKPOINT_MISSING
    with pytest.raises(ConfigurationError, match="already holds state"):
        statelog.restore(target, tmp_path / "new", location=str(job.checkpoint / "statelog"))
    stopped = job.start(job.ledger(spark, 1))
    stopped.awaitTermination()
    with pytest.raises(ConfigurationError, match="no longer running"):
        statelog.savepoint(stopped, tmp_path / "other")
    manifest = target / "manifest.json"
    text = manifest.read_text()
    manifest.write_bytes(seal(Manifest.read(LocalStore(str(target)), str(target)), "statelog savepoint", 2))
    with pytest.raises(ConfigurationError, match="has version 2, but this version of statelog reads up to 1"):
        statelog.restore(target, tmp_path / "new")
    manifest.write_text(text[: len(text) // 2])
    with pytest.raises(CorruptionError, match=r"manifest\.json: .*not those that were written"):
        statelog.restore(target, tmp_path / "new")
    shutil.rmtree(target)
    (job.checkpoint / "state" / "0" / "0").mkdir(parents=True)
    (job.checkpoint / "state" / "0" / "0" / "1.delta").write_text("")
    with pytest.raises(ConfigurationError, match="stateful operators of Spark"):
        statelog.savepoint(job.checkpoint, target)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_source_of_several_operators_is_gone_on_from_file_by_file(spark: SparkSession, tmp_path: Path) -> None:
    """Spark's offset log has a line for each operator that reads it, and its files are noted once."""
    for name, count in (("one", 2), ("other", 4)):
        add_json(tmp_path / name, [[{"key": name}]] * count)

    def run(root: Path) -> dict[str, int]:
        def read(name: str) -> DataFrame:
            files = spark.readStream.schema("key string").option("maxFilesPerTrigger", 1)
            return files.json(str(tmp_path / name))

        counted = []
        one, other = read("one"), read("other")
        for uid, rows in {"first": one, "second": one, "third": other}.items():
            counts = statelog.key_by(rows, "key", uid=uid, parallelism=2).agg(n=statelog.Count())
            counted.append(counts.select(F.lit(uid).alias("uid"), "n").repartition(1))
        found: dict[str, int] = {}

        def keep(frame: DataFrame, batch: int) -> None:
            found.update({row.uid: row.n for row in frame.collect()})

        writer = functools.reduce(DataFrame.union, counted).writeStream.outputMode("update").foreachBatch(keep)
        started = writer.option("checkpointLocation", str(root)).trigger(availableNow=True).start()
        started.awaitTermination()
        return found

    assert run(tmp_path / "checkpoint") == {"first": 2, "second": 2, "third": 4}
    statelog.savepoint(tmp_path / "checkpoint", tmp_path / "savepoint")
    statelog.restore(tmp_path / "savepoint", tmp_path / "restored")
    statelog.branch(tmp_path / "checkpoint", tmp_path / "branch")
    for name in ("one", "other"):
        add_json(tmp_path / name, [[{"key": name}]])
    for root in ("checkpoint", "restored", "branch"):
        assert run(tmp_path / root) == {"first": 3, "second": 3, "third": 5}
