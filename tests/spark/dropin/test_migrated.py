"""Queries that begin on Spark's operator and go on with statelog's: every later batch must be as without the change.

Scenarios are those of :mod:`tests.spark.dropin.test_same_as_spark`. Their first leg runs on Spark's operator, the
others on both: on Spark's with its own checkpoint, on statelog's with the migrated one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, GroupedData, SparkSession

import statelog
from statelog import Options
from tests.spark.dropin import processors
from tests.spark.dropin.scenarios import SPARK, STATELOG, Leg, Run, Scenario, add_input, rows, settings
from tests.spark.dropin.test_same_as_spark import ROCKSDB, SCENARIOS, require_same

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(not hasattr(GroupedData, "transformWithState"), reason="Spark 4.0 runs no processors of rows"),
]


V2 = {"spark.sql.streaming.stateStore.checkpointFormatVersion": "2"}


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> Iterator[SparkSession]:
    with settings(spark, {"spark.sql.streaming.stateStore.providerClass": ROCKSDB}):
        yield spark


# ---- Equal batches ----


@dataclass(frozen=True)
class Story:
    """A scenario with at least two legs, and its migration after the first.

    Parameters
    ----------
    scenario : Scenario
        The scenario.
    fails_in : int or None
        The batch that the first leg begins and does not commit.
    options : Options
        Those of the migration and of the query.
    """

    scenario: Scenario
    fails_in: int | None = None
    options: Options = field(default_factory=Options)


class Failing(Run):
    """A run whose sink fails in a batch."""

    fails_in: int | None = None

    def _save(self, df: DataFrame, batch: int) -> None:
        super()._save(df, batch)
        if batch == self.fails_in:
            raise ValueError("the sink is full")


def _cut(name: str, after: int = 1) -> Scenario:
    """A scenario whose first leg is cut in two."""
    scenario = SCENARIOS[name]()
    first, *others = scenario.legs
    return replace(scenario, legs=[Leg(first.batches[:after]), Leg(first.batches[after:]), *others])


def _keys() -> Scenario:
    scenario = _cut("keys of all types")
    return replace(scenario, conf={"spark.sql.shuffle.partitions": "3"})


STORIES: dict[str, Callable[[], Story]] = {
    "states in pandas mode": lambda: Story(SCENARIOS["states in pandas mode"]()),
    "event time, a batch with rows was begun": lambda: Story(SCENARIOS["event time"](), fails_in=2),
    "event time, a batch without rows was begun": lambda: Story(SCENARIOS["event time"](), fails_in=4),
    "event time with a delay, in pandas mode": lambda: Story(_cut("event time with a delay, in pandas mode", 2)),
    "timers of processing time": lambda: Story(SCENARIOS["timers of processing time"]()),
    "expiry, with a heartbeat": lambda: Story(SCENARIOS["expiry"](), options=Options(heartbeat_s=60)),
    "many entries": lambda: Story(_many_entries()),
    "keys of all types": lambda: Story(_keys()),
}


@pytest.mark.parametrize("name", STORIES)
def test_every_later_batch_is_the_same(session: SparkSession, tmp_path: Path, name: str) -> None:
    story = STORIES[name]()
    first, *later = story.scenario.legs
    assert later
    engine = replace(STATELOG, own_arguments=lambda uid: {"uid": "own", "parallelism": 2, "options": story.options})
    (tmp_path / "input").mkdir()
    with settings(session, story.scenario.conf):
        sparks = Failing(session, story.scenario, SPARK, tmp_path)
        sparks.fails_in = story.fails_in
        _run(tmp_path, story.scenario, first, [sparks], fails=story.fails_in is not None)
        committed = max(int(path.name) for path in (tmp_path / "spark" / "commits").glob("[0-9]*"))
        assert story.fails_in in (None, committed + 1)
        before = _contents(tmp_path / "spark")
        done = statelog.migrate(tmp_path / "spark", tmp_path / "statelog", uid="own", options=story.options)
        assert _contents(tmp_path / "spark") == before, "the old checkpoint is only read"
        assert done.next_batch == committed + 1
        sparks.fails_in = None
        sparks.answer.clear()
        own = Run(session, story.scenario, engine, tmp_path)
        for leg in later:
            _run(tmp_path, story.scenario, leg, [sparks, own])
    assert sparks.answer
    require_same(sparks.answer, own.answer)
    assert not statelog.delete_orphans(tmp_path / "statelog", min_age_s=-60, dry_run=True)


def _run(folder: Path, scenario: Scenario, leg: Leg, runs: list[Any], *, fails: bool = False) -> None:
    add_input(folder, scenario.schema, leg.batches)
    queries = [run.start(leg) for run in runs]
    for query in queries:
        if fails:
            with pytest.raises(Exception, match="the sink is full"):
                query.awaitTermination()
        else:
            query.awaitTermination()


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _many_entries() -> Scenario:
    legs = [Leg([rows(("a", f"collections_{name}"))]) for name in ("filled", "read")]
    return Scenario(legs, processors.Collections, conf=V2)
