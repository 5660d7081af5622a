"""A query that gets and loses stateful operators between its starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

import statelog
from statelog import (
    ConfigurationError,
    OperatorContext,
    OperatorHandle,
    OperatorProcessor,
    Options,
    RestoreMetrics,
    Step,
    Tuning,
)
from tests.spark.inputs import add_json

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

OUTPUT = "k string, counts string"
Counts = dict[str, int]
"""By key."""


class Count(StatefulProcessor):
    """Counts the rows of each key, and adds the count to each row; an initial state says where to begin."""

    def __init__(self, uid: str) -> None:
        self._uid = uid

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "n long")

    def handleInitialState(self, key: Any, initialState: Row, timerValues: Any) -> None:
        self._count.update((initialState.start,))

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[tuple[str, str]]:
        count = (self._count.get() or (0,))[0]
        for row in rows:
            count += 1
            yield row.k, f"{row.counts} {self._uid}={count}"
        self._count.update((count,))

    def close(self) -> None:
        pass


class Total(OperatorProcessor):
    """Counts all rows."""

    def init(self, handle: OperatorHandle) -> None:
        self._rows = handle.getListState("rows", "n long")

    def process(self, rows: Iterator[Row], context: OperatorContext) -> Iterator[tuple[str, str]]:
        count = sum(n for (n,) in self._rows.get())
        for row in rows:
            count += 1
            yield row.k, f"{row.counts} total={count}"
        self._rows.update([(count,)])


class Restores(statelog.Observer):
    """Notes the starts of operators, and fails once at a step of a batch."""

    def __init__(self, at: Step | None = None, batch: int = -1) -> None:
        self.begun: dict[str, bool] = {}
        self._at, self._batch = at, batch

    def __reduce__(self) -> tuple[type[Restores], tuple[()]]:
        return Restores, ()  # workers need none of it

    def restore(self, metrics: RestoreMetrics) -> None:
        self.begun[metrics.uid] = metrics.begins

    def step(self, step: Step, batch: int, subtask: int) -> None:
        if step == self._at and batch == self._batch:
            self._at = None
            raise RuntimeError("the driver fails here")


_SILENT = statelog.Observer()


class Query:
    """A query over files, one per batch, whose operators see each row one after the other."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self._spark = spark
        self._root = root
        self.checkpoint = root / "checkpoint"

    def add(self, *batches: str) -> None:
        """Add batches; each letter is a row."""
        add_json(self._root / "input", [[{"k": letter} for letter in batch] for batch in batches])

    def sources(self, batch: int) -> int:
        """The number of sources in Spark's offsets of a batch."""
        return len((self.checkpoint / "offsets" / str(batch)).read_text().splitlines()) - 2

    def run(
        self,
        *uids: str,
        fails: bool = False,
        observer: statelog.Observer = _SILENT,
        parallelism: int = 2,
        heartbeat_s: float | None = None,
        initial: Any = None,
        **more: Any,
    ) -> dict[int, dict[str, Counts]]:
        """Run all input through operators; return the last counts of each batch by operator and key.

        `initial` is the initial state of the last operator, and `more` its other arguments.
        """
        found: dict[int, dict[str, Counts]] = {}

        def keep(rows: DataFrame, batch: int) -> None:
            held = found.setdefault(batch, {uid: {} for uid in uids})
            for row in rows.collect():
                for uid, count in (part.split("=") for part in row.counts.split()):
                    counts, key = held[uid], "all" if uid == "total" else row.k
                    counts[key] = max(counts.get(key, 0), int(count))
            if fails:
                raise RuntimeError("the sink is broken")

        stream = self._spark.readStream.schema("k string").option("maxFilesPerTrigger", 1)
        rows = stream.json(str(self._root / "input")).withColumn("counts", F.lit(""))
        for uid in uids:
            own: dict[str, Any] = {
                "uid": uid,
                "options": Options(observer=observer, heartbeat_s=heartbeat_s, tuning=Tuning(orphan_min_age_s=0)),
            }
            if uid == uids[-1]:
                own |= more
            if uid == "total":
                rows = statelog.process(rows, Total(), OUTPUT, parallelism=1, **own)
            else:
                keyed = statelog.key_by(rows, "k", parallelism=parallelism, **own)
                rows = keyed.transformWithState(
                    Count(uid), OUTPUT, "append", "None", initialState=initial if uid == uids[-1] else None
                )
        query = rows.writeStream.foreachBatch(keep).option("checkpointLocation", str(self.checkpoint))
        query.trigger(availableNow=True).start().awaitTermination()
        return found


@pytest.fixture
def query(spark: SparkSession, tmp_path: Path) -> Query:
    """A query that has run two batches with operator ``a``."""
    query = Query(spark, tmp_path)
    query.add("xy", "x")
    assert query.run("a") == {0: {"a": {"x": 1, "y": 1}}, 1: {"a": {"x": 2}}}
    return query


@pytest.mark.smoke
def test_added_operators_begin_empty_beside_those_that_go_on(query: Query, caplog: pytest.LogCaptureFixture) -> None:
    query.add("xz")
    restores = Restores()
    caplog.set_level("INFO", "statelog")
    found = query.run("a", "b", "total", observer=restores)
    assert found == {2: {"a": {"x": 3, "z": 1}, "b": {"x": 1, "z": 1}, "total": {"all": 2}}}
    assert restores.begun == {"a": False, "b": True, "total": True}
    assert "new in the query as of batch 2, and starts empty" in caplog.text
    query.add("xy")
    found = query.run("b", "a", "total", parallelism=3)
    assert found == {3: {"a": {"x": 4, "y": 2}, "b": {"x": 2, "y": 1}, "total": {"all": 4}}}


@pytest.mark.parametrize("step", [Step.LAST_ACK, Step.DURABLE, None])
def test_a_crash_in_the_first_batch_of_an_added_operator(query: Query, spark: SparkSession, step: Step | None) -> None:
    """It begins again with its initial state; with another number of subtasks, too."""
    initial = statelog.key_by(spark.createDataFrame([("x", 100), ("q", 7)], "k string, start long"), "k")
    query.add("xz")
    failing = Restores(step, 2)
    with pytest.raises(StreamingQueryException, match="fails here|is broken"):
        query.run("a", "b", fails=step is None, observer=failing, initial=initial)
    assert failing.begun.get("b", True)
    found = query.run("a", "b", parallelism=3, initial=initial)
    assert found == {2: {"a": {"x": 3, "z": 1}, "b": {"x": 101, "z": 1}}}
    query.add("xq")
    restores = Restores()
    assert query.run("a", "b", observer=restores, initial=initial)[3]["b"] == {"x": 102, "q": 8}
    assert restores.begun == {"a": False, "b": False}


def test_an_added_operator_may_need_a_clock(query: Query) -> None:
    query.add("x")
    assert query.run("a", "b", heartbeat_s=60) == {2: {"a": {"x": 3}, "b": {"x": 1}}}
    assert query.sources(2) == 2
    query.add("x")
    assert query.run("a", "b") == {3: {"a": {"x": 4}, "b": {"x": 2}}}
    assert query.sources(3) == 1


def test_a_rewind_to_a_batch_before_the_operator_was_added(query: Query) -> None:
    query.add("x", "x")
    assert query.run("a", "b")[3] == {"a": {"x": 4}, "b": {"x": 2}}
    for batch, counts in ((2, {"a": {"x": 4}, "b": {"x": 2}}), (1, {"a": {"x": 3}, "b": {"x": 1}})):
        rewound = statelog.rewind(query.checkpoint, to=batch)
        assert rewound.next_batch == batch + 1
        assert rewound.operators == (["a", "b"] if batch == 2 else ["a"])
        assert query.run("a", "b")[batch + 1] == counts


def test_an_added_operator_that_was_tried_only_can_be_left_out_again(query: Query) -> None:
    query.add("x")
    with pytest.raises(StreamingQueryException, match="fails here"):
        query.run("a", "b", observer=Restores(Step.LAST_ACK, 2))
    assert query.run("a") == {2: {"a": {"x": 3}}}


def test_an_added_operator_begins_with_its_tables(query: Query, spark: SparkSession) -> None:
    table = spark.createDataFrame([("x", 40), ("q", 7)], "key_k string, value_n long")
    query.add("xq", "x")
    found = query.run("a", "b", initial={"count": table})
    assert [found[batch]["b"] for batch in (2, 3)] == [{"x": 41, "q": 8}, {"x": 42}]


def test_an_operator_is_left_out_only_after_its_state_was_given_up(query: Query) -> None:
    query.add("x")
    query.run("a", "b")
    query.add("x")
    with pytest.raises(StreamingQueryException, match=r"at batch 2 the query also has an operator 'b'.*forget"):
        query.run("a")
    assert statelog.forget(query.checkpoint, "b", dry_run=True).batch == 2
    with pytest.raises(StreamingQueryException, match="operator-removed"):
        query.run("a")
    forgotten = statelog.forget(query.checkpoint, "b")
    assert (forgotten.uid, forgotten.batch) == ("b", 2)
    assert Path(forgotten.folder).parent == query.checkpoint / "statelog"
    assert Path(forgotten.folder).name.startswith("b-")
    assert query.run("a") == {3: {"a": {"x": 4}}}
    query.add("x")
    assert query.run("a", "b") == {4: {"a": {"x": 5}, "b": {"x": 1}}}, "it may come back"


def test_a_renamed_operator_is_not_taken_for_a_new_one(query: Query) -> None:
    query.add("x")
    with pytest.raises(StreamingQueryException, match="the query also has an operator 'a'"):
        query.run("renamed")
    assert statelog.rename(query.checkpoint, "a", "renamed").batch == 1
    with pytest.raises(StreamingQueryException, match="the query also has an operator 'renamed'"):
        query.run("a")
    assert query.run("renamed", parallelism=3) == {2: {"renamed": {"x": 3}}}
    query.add("y")
    assert query.run("renamed", "a") == {3: {"renamed": {"y": 2}, "a": {"y": 1}}}, "the old uid is free again"


def test_the_only_operator_begins_anew_if_its_state_is_given_up(query: Query) -> None:
    assert statelog.forget(query.checkpoint, "a").batch == 1
    query.add("xz")
    assert query.run("a") == {2: {"a": {"x": 1, "z": 1}}}
    query.add("x")
    assert query.run("a", parallelism=3) == {3: {"a": {"x": 2}}}


def test_the_first_operator_of_a_query_without_any(spark: SparkSession, tmp_path: Path) -> None:
    query = Query(spark, tmp_path)
    query.add("xy")
    plain = spark.readStream.schema("k string").json(str(tmp_path / "input")).writeStream.format("noop")
    plain.option("checkpointLocation", str(query.checkpoint)).trigger(availableNow=True).start().awaitTermination()
    query.add("x")
    with pytest.raises(StreamingQueryException, match=r"needs checkpoint 0, but there is no checkpoint.*forget"):
        query.run("a")
    assert statelog.forget(query.checkpoint, "a").batch is None
    assert query.run("a") == {1: {"a": {"x": 1}}}


def test_an_unknown_operator_is_not_given_up(query: Query) -> None:
    with pytest.raises(ConfigurationError, match="has no operator 'aa'; it has 'a'"):
        statelog.forget(query.checkpoint, "aa")
    query.add("x")
    assert query.run("a") == {2: {"a": {"x": 3}}}
