"""Stored output: a sink gets the rows of a repeated batch again, and the state stays the one that they came from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import statelog
from statelog import ConfigurationError, FencedError, Options
from statelog.clock import SystemClock
from statelog.log.entry import Claim
from statelog.log.open import open_log
from statelog.storage import LocalStore
from tests.spark.support import Answer, Job, Order, Salted, make_orders

pytestmark = pytest.mark.spark

TOTALS = "user string, total long"


@dataclass
class Deliveries:
    """A sink that notes the rows of every call, and ends its query as the test says."""

    rows: dict[int, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    fails_before: int | None = None
    """The batch in which the query ends before its rows are read."""
    fails_after: int | None = None
    """The batch in which it ends after that, and before Spark's commit."""

    def __call__(self, df: DataFrame, batch: int) -> None:
        if batch == self.fails_before:
            self.rows[batch].append([])
            raise OSError("the sink is gone")
        self.rows[batch].append(sorted([list(row) for row in df.collect()]))
        if batch == self.fails_after:
            raise OSError("the sink is gone")


def salted(job: Job, spark: SparkSession, parallelism: int, options: Options | None = None) -> DataFrame:
    """Totals that depend on the moment at which they are computed, and on nothing else that a repetition has."""
    salt = str(job.root / "salt")
    return job.ledger(spark, parallelism, options, processor=Salted(salt), output=TOTALS)


def totals(batches: list[list[Order]], salts: dict[int, int]) -> dict[int, Answer]:
    """The output of each batch if it was computed with this salt."""
    held: dict[str, int] = defaultdict(int)
    found: dict[int, Answer] = {}
    for number, orders in enumerate(batches):
        for order in orders:
            held[order["user"]] += salts[number]
        found[number] = sorted([user, held[user]] for user in {order["user"] for order in orders})
    return found


def run(job: Job, df: DataFrame, sink: Callable[[DataFrame, int], None], **more: Any) -> None:
    """Run a query over all input that is there."""
    writer = statelog.write_ahead(df, sink, **more).outputMode("update")
    writer = writer.option("checkpointLocation", str(job.checkpoint)).trigger(availableNow=True)
    writer.start().awaitTermination()


def set_salt(job: Job, salt: int) -> None:
    (job.root / "salt").write_text(str(salt))


@pytest.mark.parametrize(("inline_bytes", "ends"), [(8 << 20, "after"), (0, "before")], ids=["inline", "uploaded"])
def test_a_repeated_batch_gives_the_sink_the_same_rows(
    spark: SparkSession, tmp_path: Path, inline_bytes: int, ends: str
) -> None:
    job = Job(tmp_path).add(make_orders(4, seed=81))
    options = Options(inline_budget_bytes=inline_bytes)
    set_salt(job, 7)
    first = Deliveries(fails_before=2) if ends == "before" else Deliveries(fails_after=2)
    with pytest.raises(StreamingQueryException, match="the sink is gone"):
        run(job, salted(job, spark, 2, options), first, parallelism=2, options=options)
    assert sorted(first.rows) == [0, 1, 2]

    set_salt(job, 1000)
    second = Deliveries()
    run(job, salted(job, spark, 3, options), second, parallelism=1, options=options)

    expected = totals(job.batches_of_spark(), {0: 7, 1: 7, 2: 7, 3: 1000})
    assert {batch: rows for batch, [rows] in second.rows.items()} == {2: expected[2], 3: expected[3]}
    assert first.rows[1] == [expected[1]]
    assert first.rows[2] == [expected[2] if ends == "after" else []]


def test_a_sink_that_lacks_what_the_new_owner_deleted_is_fenced(spark: SparkSession, tmp_path: Path) -> None:
    """The tasks that read stored rows know no driver to ask: the sink's errors are looked into where it was called."""
    job = Job(tmp_path).add(make_orders(1, seed=83))
    options = Options(inline_budget_bytes=0)
    set_salt(job, 7)

    def superseded(df: DataFrame, batch: int) -> None:
        log = open_log(LocalStore(job.state), Options(), SystemClock())
        log.claim(lambda epoch: Claim(epoch, "query", "run", bytes(16), 0))
        stored = [path for path in job.state.glob("output*/**/*") if path.is_file()]
        assert stored
        for path in stored:
            path.unlink()
        with pytest.raises(Exception, match="object-missing"):
            df.collect()
        df.collect()

    with pytest.raises(StreamingQueryException) as raised:
        run(job, salted(job, spark, 2, options), superseded, options=options)
    error = statelog.error_of(raised.value)
    assert isinstance(error, FencedError), error


def test_a_rewind_computes_the_batch_again(spark: SparkSession, tmp_path: Path) -> None:
    """In a query with two operators, whose first one is behind a shuffle."""
    job = Job(tmp_path).add(make_orders(3, seed=82))

    def rows() -> DataFrame:
        first = salted(job, spark, 2)
        return statelog.key_by(first, "user", uid="last", parallelism=1).agg(statelog.Last("total").alias("total"))

    set_salt(job, 7)
    first = Deliveries()
    run(job, rows(), first)
    state = job.checkpoint / "statelog"
    assert not statelog.verify(state).damages
    assert [list(measured.states) for measured in statelog.stats(state, uid="output", scan=True)] == [[]]
    saved = statelog.savepoint(job.checkpoint, tmp_path / "saved")
    assert saved.rows["output"] == {}
    statelog.restore(tmp_path / "saved", tmp_path / "restored")
    assert statelog.rewind(job.checkpoint, to=1).taken_back == [2]
    set_salt(job, 1000)
    second = Deliveries()
    run(job, rows(), second)

    expected = totals(job.batches_of_spark(), {0: 7, 1: 7, 2: 1000})
    assert {batch: found for batch, [found] in second.rows.items()} == {2: expected[2]}
    assert first.rows[2] != second.rows[2]


def test_after_a_rewind_a_batch_that_is_repeated_again_gives_the_same_rows(spark: SparkSession, tmp_path: Path) -> None:
    """What the rewind took back is not handed out, and what came in its place is."""
    job = Job(tmp_path).add(make_orders(3, seed=82))
    set_salt(job, 7)
    run(job, salted(job, spark, 2), Deliveries())
    assert statelog.rewind(job.checkpoint, to=1).taken_back == [2]
    set_salt(job, 1000)
    second = Deliveries(fails_after=2)
    with pytest.raises(StreamingQueryException, match="the sink is gone"):
        run(job, salted(job, spark, 2), second)
    set_salt(job, 5000)
    third = Deliveries()
    run(job, salted(job, spark, 3), third)

    expected = totals(job.batches_of_spark(), {0: 7, 1: 7, 2: 1000})
    assert second.rows[2] == third.rows[2] == [expected[2]]


def test_stored_rows_have_the_types_and_names_of_the_output(spark: SparkSession, tmp_path: Path) -> None:
    """They can be evaluated more than once; a batch may have none."""
    job = Job(tmp_path).add(make_orders(3, seed=83))
    computed = [
        F.col("user").alias("a name with `ticks`"),
        F.lit("1.25").cast("decimal(10,2)").alias("decimal"),
        F.struct(F.col("amount"), F.array(F.col("seq")).alias("many")).alias("nested"),
        F.timestamp_seconds("seq").alias("time"),
        F.create_map(F.col("item"), F.lit(None).cast("int")).alias("map"),
    ]

    def select(df: DataFrame) -> DataFrame:
        return df.where("seq < 50").select(*computed)

    found: dict[int, list[Any]] = {}

    def sink(df: DataFrame, batch: int) -> None:
        assert df.schema.simpleString() == select(static).schema.simpleString()
        assert df.count() == len(found.setdefault(batch, df.collect()))

    static = spark.read.schema(job.read(spark).schema).json(str(job.input))
    run(job, select(job.read(spark)), sink, parallelism=2)

    assert [len(found[batch]) for batch in range(3)] == [30, 20, 0]
    key = repr
    assert sorted([row for rows in found.values() for row in rows], key=key) == sorted(
        select(static).collect(), key=key
    )


def test_mistakes_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(1, seed=84))
    rows, sink = job.read(spark), Deliveries()
    static = spark.read.schema(rows.schema).json(str(job.input))

    with pytest.raises(ConfigurationError, match="takes a streaming DataFrame, not a batch DataFrame"):
        statelog.write_ahead(static, sink)
    with pytest.raises(ConfigurationError, match="sink is 'noop'"):
        statelog.write_ahead(rows, "noop")  # type: ignore[arg-type]  # a mistake
    for df, kind in [
        (rows.groupBy("user").count(), "Aggregate"),
        (rows.dropDuplicates(["user"]), "Deduplicate"),
        (rows.join(job.read(spark), "user"), "Join"),
    ]:
        with pytest.raises(ConfigurationError, match=f"stateful operator of Spark \\({kind}\\)"):
            statelog.write_ahead(df, sink)
    statelog.write_ahead(rows.join(static.groupBy("user").count(), "user"), sink)
