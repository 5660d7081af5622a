"""Queries that begin on Spark's operator and continue with statelog's: every later batch must be as without the change.

Scenarios are those of :mod:`tests.spark.dropin.test_same_as_spark`. Their first leg runs on Spark's operator, the
others on both: on Spark's with its own checkpoint, on statelog's with the migrated one.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, GroupedData, SparkSession

import statelog
from statelog import ConfigurationError, ErrorKind, Options, StatelogError, StateMissingError
from statelog.__main__ import main
from statelog.queries import load, migrate
from statelog.queries.transform_with_state import SparkOperator, SparkState
from statelog.spark.checkpoint import location as checkpoint_location
from statelog.spark.checkpoint.checkpoint import DirectoryFiles
from statelog.storage import LocalStore, Store
from statelog.testing.faults import Call, Fault, FaultPlan, FaultStore, When
from tests.coordinator.crash_points_support import Killed
from tests.spark.dropin import processors
from tests.spark.dropin.same_as_spark_support import ROCKSDB, SCENARIOS, require_same
from tests.spark.dropin.scenarios import SPARK, STATELOG, Answer, Leg, Run, Scenario, add_input, rows, settings
from tests.spark.file_systems import SHELF, mounted

pytestmark = pytest.mark.spark

V2 = {"spark.sql.streaming.stateStore.checkpointFormatVersion": "2"}


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> Iterator[SparkSession]:
    with settings(spark, {"spark.sql.streaming.stateStore.providerClass": ROCKSDB}):
        yield spark


def require_runnable(scenario: Scenario) -> None:
    if hasattr(GroupedData, "transformWithState"):
        return
    if not scenario.uses_frames:
        pytest.skip("Spark 4.0 runs no processors of rows")
    if scenario.processor is processors.Frames:
        pytest.skip("the state server of Spark 4.0 fails with some of these values")


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
    scheme : str
        If not empty, the state has a location of its own, and the new checkpoint is reached by this scheme.
    expiring : tuple of str
        States whose expirations are compared with those that Spark reads.
    """

    scenario: Scenario
    fails_in: int | None = None
    options: Options = field(default_factory=Options)
    scheme: str = ""
    expiring: tuple[str, ...] = ()


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
    "timers of processing time": lambda: Story(SCENARIOS["timers of processing time"](), scheme=SHELF),
    "expiry, with a heartbeat": lambda: Story(
        SCENARIOS["expiry"](),
        options=Options(heartbeat_s=60),
        expiring=("long value", "long list", "long map"),
    ),
    "many entries": lambda: Story(_many_entries()),
    "keys of all types": lambda: Story(_keys()),
}


@pytest.mark.parametrize("name", STORIES)
def test_every_later_batch_is_the_same(session: SparkSession, tmp_path: Path, name: str) -> None:
    story = STORIES[name]()
    require_runnable(story.scenario)
    first, *later = story.scenario.legs
    assert later
    own_arguments: dict[str, Any] = {"uid": "own", "options": story.options}
    if story.scheme:
        own_arguments["location"] = str(tmp_path / "state")
    engine = replace(STATELOG, own_arguments=lambda uid: {**own_arguments, "parallelism": 2})
    (tmp_path / "input").mkdir()
    with settings(session, story.scenario.conf):
        sparks = Failing(session, story.scenario, SPARK, tmp_path)
        sparks.fails_in = story.fails_in
        _run(tmp_path, story.scenario, first, [sparks], fails=story.fails_in is not None)
        committed = max(int(path.name) for path in (tmp_path / "spark" / "commits").glob("[0-9]*"))
        assert story.fails_in in (None, committed + 1)
        before = _contents(tmp_path / "spark")
        with mounted(session, story.scheme, tmp_path) if story.scheme else nullcontext() as place:
            new = tmp_path / "statelog"
            done = statelog.migrate(tmp_path / "spark", place.of(new) if place else new, **own_arguments)
        assert _contents(tmp_path / "spark") == before, "the old checkpoint is only read"
        assert done.next_batch == committed + 1
        for state in story.expiring:
            own_state = statelog.read_state(tmp_path / "statelog", state=state).read_all()
            assert sorted(own_state.column("expires_ms").to_pylist()) == _expirations(
                session, tmp_path / "spark", state
            )
        sparks.fails_in = None
        sparks.answer.clear()
        own = Run(session, story.scenario, engine, tmp_path)
        for leg in later:
            _run(tmp_path, story.scenario, leg, [sparks, own])
    assert sparks.answer
    require_same(sparks.answer, own.answer)
    location = tmp_path / ("state" if story.scheme else "statelog")
    assert not statelog.verify(location).damages
    assert not statelog.delete_orphans(location, min_age_s=-60, dry_run=True)


def _expirations(session: SparkSession, checkpoint: Path, state: str) -> list[int]:
    """The expirations of all values, elements or entries of a state, as Spark reads them."""
    reader = session.read.format("statestore").option("stateVarName", state).option("flattenCollectionTypes", "true")
    rows = reader.load(str(checkpoint)).collect()
    found = [
        value["ttlExpirationMs"]
        for row in rows
        for value in row
        if "ttlExpirationMs" in getattr(value, "__fields__", ())
    ]
    assert len(found) == len(rows) > 0
    return sorted(found)


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


# ---- Interruptions and refusals ----


@dataclass(frozen=True)
class Stopped:
    """A query that has run on Spark's operator for a leg, and its answer in the next leg, whose input is there.

    Parameters
    ----------
    folder : Path
        Holds the input, and the checkpoint ``kept``.
    scenario : Scenario
        The query.
    later : Answer
        Spark's output in the second leg.
    """

    folder: Path
    scenario: Scenario
    later: Answer

    @property
    def kept(self) -> Path:
        return self.folder / "kept"

    def go_on(self, session: SparkSession, name: str) -> Answer:
        """The output of statelog in the second leg, from the checkpoint of a name."""
        run = Run(session, self.scenario, replace(STATELOG, name=name), self.folder)
        run.start(self.scenario.legs[1]).awaitTermination()
        return run.answer


@pytest.fixture(scope="module")
def stopped(session: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "input").mkdir()
    scenario = SCENARIOS["event time"]()
    require_runnable(scenario)
    run = Run(session, scenario, SPARK, folder)
    _run(folder, scenario, scenario.legs[0], [run])
    shutil.copytree(folder / "spark", folder / "kept")
    run.answer.clear()
    _run(folder, scenario, scenario.legs[1], [run])
    return Stopped(folder, scenario, run.answer)


class DeathAtANewWrite(FaultPlan):
    """Kills the driver at the first write that is not yet known, and notes it.

    Parameters
    ----------
    known : set of tuple
        The known writes: operation, object, and how often it has been done before.
    when : {"before", "after"}
        Whether the write still takes effect.
    """

    def __init__(self, known: set[tuple[str, str, int]], when: When) -> None:
        self._known = known
        self._when = when
        self._seen: Counter[tuple[str, str]] = Counter()
        self.is_dead = False

    def fault(self, call: Call) -> Fault | None:
        if self.is_dead:
            raise Killed
        if call.operation not in ("put", "put_if_absent", "append", "delete"):
            return None
        write = (call.operation, re.sub(r"\d{20}", "N", call.name))
        self._seen[write] += 1
        if (*write, self._seen[write]) in self._known:
            return None
        self._known.add((*write, self._seen[write]))
        return Fault(self._when, action=self._die)

    def _die(self) -> None:
        self.is_dead = True
        raise Killed


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_migration_that_dies_at_any_write_is_repeated(
    session: SparkSession, stopped: Stopped, monkeypatch: pytest.MonkeyPatch, when: When
) -> None:
    """All attempts have the same target, so each finds what those before have left."""
    monkeypatch.setattr(SparkState, "operator", _once(SparkState.operator))
    target = stopped.folder / f"dies-{when}"
    known: set[tuple[str, str, int]] = set()
    for _ in range(100):
        plan = DeathAtANewWrite(known, when)

        def opened(location: str, plan: FaultPlan = plan) -> Store:
            return FaultStore(LocalStore(location), plan)

        with monkeypatch.context() as patched:
            for module in (load, migrate, checkpoint_location):
                patched.setattr(module, "open_location", opened)
            try:
                statelog.migrate(stopped.kept, target)
                break
            except Killed:
                assert plan.is_dead
    written = {(operation, name.split("/")[0]) for operation, name, _ in known}
    assert written >= {("put_if_absent", "log"), ("append", "log")}
    assert written >= {("put", name) for name in ("sources", "offsets", "commits", "metadata")}
    require_same(stopped.later, stopped.go_on(session, target.name))


def _once(plan: Callable[..., SparkOperator]) -> Callable[..., SparkOperator]:
    """Plans the reads of the state once, which takes a second."""
    planned: list[SparkOperator] = []

    def operator(*arguments: Any) -> SparkOperator:
        planned[:] = planned or [plan(*arguments)]
        return planned[0]

    return operator


def test_a_failure_of_the_tasks_is_told_and_repeated_on_the_command_line(
    session: SparkSession,
    stopped: Stopped,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = stopped.folder / "command"
    monkeypatch.setattr(migrate, "new_identity", lambda uid, token: f"{uid}-0")
    runs = target / "statelog" / "main-0" / "runs"
    runs.parent.mkdir(parents=True)
    runs.write_bytes(b"a file in the place of a folder")
    assert main(["migrate", str(stopped.kept), str(target)]) == 1
    assert "[store-failed]" in capsys.readouterr().err
    runs.unlink()
    assert main(["migrate", str(stopped.kept), str(target), "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["checkpoint_location"], done["next_batch"]) == (str(target), min(stopped.later))
    assert main(["migrate", str(stopped.kept), str(target), "--uid", "other"]) == 1
    assert "already holds a checkpoint of a Spark query" in capsys.readouterr().err

    before = _contents(target)
    assert statelog.migrate(stopped.kept, target).query_id == done["query_id"]
    assert _contents(target) == before, "there is nothing left to do"
    other = Run(session, stopped.scenario, replace(STATELOG, name="command"), stopped.folder)
    declares = functools.partial(processors.Declares, ["times"], [])
    with pytest.raises(Exception, match=r"list state 'times'.*\[other-schema\]"):
        other.start(Leg([], declares)).awaitTermination()
    require_same(stopped.later, stopped.go_on(session, "command"))
    with pytest.raises(ConfigurationError, match="already holds a checkpoint of a Spark query"):
        statelog.migrate(stopped.kept, target)


class Copy:
    """A copy of a checkpoint that is harmed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = DirectoryFiles(LocalStore(str(path)), path)
        self.batch = max(int(found.name) for found in (path / "commits").glob("[0-9]*"))

    def remove(self, pattern: str) -> None:
        for found in list(self.path.glob(pattern)):
            shutil.rmtree(found) if found.is_dir() else found.unlink()

    def replace(self, name: str, old: str, new: str) -> None:
        text = self.files.read(name).decode()
        assert old in text
        self.files.write(name, text.replace(old, new).encode())

    def metadata(self, operator: str) -> list[str]:
        names = self.files.list(f"state/{operator}/_metadata")
        return [name for name in names if not Path(name).name.startswith(".")]

    def second_operator(self) -> None:
        shutil.copytree(self.path / "state" / "0", self.path / "state" / "1")
        for name in self.metadata("1"):
            self.replace(
                name,
                '"operatorId":0,"operatorName":"transformWithStateInPySparkExec"',
                '"operatorId":1,"operatorName":"dedupe"',
            )

    def other_operator(self) -> None:
        for name in self.metadata("0"):
            self.replace(name, "transformWithStateInPySparkExec", "dedupe")


HARMS: dict[str, tuple[Callable[[Copy], object], type[StatelogError], str]] = {
    "no batch": (lambda copy: copy.remove("commits/*"), StateMissingError, "has committed no batch"),
    "a batch too many": (
        lambda copy: copy.files.write(f"offsets/{copy.batch + 2}", b"v1\n{}"),
        StateMissingError,
        "the last batch that it has committed",
    ),
    "no offsets": (lambda copy: copy.remove(f"offsets/{copy.batch}"), StateMissingError, "offsets/4 is gone"),
    "no state": (lambda copy: copy.remove("state"), ConfigurationError, "no Spark state"),
    "another operator": (Copy.other_operator, ConfigurationError, "no Python transformWithState; .*: dedupe"),
    "a second operator": (
        Copy.second_operator,
        ConfigurationError,
        "several stateful operators: dedupe, transformWith",
    ),
    "another provider": (
        lambda copy: copy.replace(f"offsets/{copy.batch}", "RocksDBStateStoreProvider", "HDFSBackedStateStoreProvider"),
        ConfigurationError,
        "kept by HDFSBackedStateStoreProvider",
    ),
    "no partition": (lambda copy: copy.remove("state/0/1"), StateMissingError, "partition 1 of 2 has no files"),
    "no files of the batch": (
        lambda copy: copy.remove("state/0/0/*.zip"),
        StateMissingError,
        "Spark cannot read .* batch 4",
    ),
    "no metadata": (lambda copy: copy.remove("state/0/_metadata"), ConfigurationError, "stateful operators: none"),
}


@pytest.mark.parametrize("name", HARMS)
def test_what_cannot_be_read_is_refused_by_name(
    session: SparkSession, stopped: Stopped, tmp_path: Path, name: str
) -> None:
    harm, error, message = HARMS[name]
    shutil.copytree(stopped.kept, tmp_path / "old")
    harm(Copy(tmp_path / "old"))
    with pytest.raises(error, match=message) as refused:
        statelog.migrate(tmp_path / "old", tmp_path / "new")
    assert refused.value.hint
    assert not (tmp_path / "new" / "metadata").exists()


def test_a_wrong_place_and_a_running_query_are_refused(session: SparkSession, stopped: Stopped, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="within"):
        statelog.migrate(stopped.kept, stopped.kept / "new")
    with pytest.raises(ConfigurationError, match="within"):
        statelog.migrate(stopped.kept, tmp_path / "new", location=str(stopped.kept / "state"))
    (tmp_path / "new" / "offsets").mkdir(parents=True)
    (tmp_path / "new" / "offsets" / "0").write_text("v1\n{}")
    with pytest.raises(ConfigurationError, match="already") as refused:
        statelog.migrate(stopped.kept, tmp_path / "new")
    assert refused.value.kind is ErrorKind.OTHER_OWNER
    with pytest.raises(ConfigurationError, match="no checkpoint of a Spark query"):
        statelog.migrate(tmp_path / "nothing", tmp_path / "new")
    run = Run(session, stopped.scenario, replace(SPARK, name="running"), stopped.folder)
    shutil.copytree(stopped.kept, stopped.folder / "running")
    writer = run.plan(stopped.scenario.processor).writeStream.format("noop")
    query = writer.option("checkpointLocation", str(stopped.folder / "running")).start()
    try:
        with pytest.raises(ConfigurationError, match="is running"):
            statelog.migrate(stopped.kept, tmp_path / "other")
    finally:
        query.stop()
