"""Spark's files on file systems of Hadoop: every operation on them, and a death at every step of a change."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pyspark.sql import SparkSession

import statelog
from statelog.errors import ConfigurationError
from statelog.spark.checkpoint.location import HadoopFiles, open_checkpoint
from statelog.spark.driver import internals
from statelog.spark.driver.query_clocks import fit_clock_offsets
from tests.coordinator.crash_points_support import Killed, When
from tests.spark.file_systems import KEEPING, SHELF, VIEW, Mount, mounted
from tests.stored_query import StoredQuery, saved_values

pytestmark = pytest.mark.spark

_T = TypeVar("_T")


@pytest.fixture(
    name="place", params=[SHELF, *(pytest.param(one, marks=pytest.mark.extended) for one in (VIEW, KEEPING))]
)
def mount_place(spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Mount]:
    with mounted(spark, request.param, tmp_path) as made:
        yield made


@pytest.mark.parametrize(
    "name", ["../other/job.conf", "commits/../../other/job.conf", "/job.conf", "commits//5", "commits/.", ""]
)
def test_no_name_leads_out_of_the_location(spark: SparkSession, place: Mount, tmp_path: Path, name: str) -> None:
    """Hadoop follows dots: a file of a savepoint must not be written elsewhere, whatever a manifest calls it."""
    other = tmp_path / "other" / "job.conf"
    other.parent.mkdir()
    other.write_text("good")
    files = HadoopFiles(spark, place.of(tmp_path / "checkpoint"))
    with pytest.raises(ConfigurationError, match="is not a name of a file"):
        files.write(name, b"EVIL")
    with pytest.raises(ConfigurationError, match="is not a name of a file"):
        files.read(name)
    assert other.read_text() == "good"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [other]


# ---- Every operation ----


@pytest.fixture(name="query")
def make_query(tmp_path: Path) -> StoredQuery:
    """A stopped query with state in a directory, whose last batch has no checkpoint as ``b`` did not end."""
    query = StoredQuery(tmp_path / "query", tmp_path / "state").run(["a", "b"], range(3))
    return query.run(["a", "b"], range(3, 5), lacks_last=True)


def test_every_operation_reaches_spark_s_files(query: StoredQuery, place: Mount, tmp_path: Path) -> None:
    checkpoint, state = place.of(query.checkpoint), str(tmp_path / "state")
    assert statelog.rewind(checkpoint, location=state).taken_back == [4]
    assert statelog.rewind(checkpoint, location=state, to=2).taken_back == [3]
    assert sorted(path.name for path in (query.checkpoint / "commits").glob("[0-9]*")) == ["0", "1", "2"]
    aside = query.checkpoint / "statelog-rewound"
    assert sorted(path.name for path in aside.rglob("[0-9]") if path.is_file()) == ["3", "4", "4"]

    assert statelog.savepoint(checkpoint, tmp_path / "saved", location=state).batch == 2
    assert saved_values(tmp_path / "saved") == {"a": 2, "b": 2}
    other = tmp_path / "restored"
    assert statelog.restore(tmp_path / "saved", place.of(other), location=str(tmp_path / "copy")).next_batch == 3
    assert (
        statelog.branch(
            place.of(other),
            place.of(tmp_path / "branch"),
            location=str(tmp_path / "copy"),
            new_location=str(tmp_path / "own"),
        ).next_batch
        == 3
    )
    assert json.loads((tmp_path / "branch" / "metadata").read_text())["id"] != "query"

    assert statelog.rename(checkpoint, "a", "c", location=state).batch == 2
    assert statelog.forget(checkpoint, "b", location=state).batch == 2
    statelog.savepoint(checkpoint, tmp_path / "last", location=state)
    assert saved_values(tmp_path / "last") == {"c": 2}


def test_a_query_with_damaged_state_falls_back(query: StoredQuery, place: Mount, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    done = statelog.fall_back(place.of(query.checkpoint), location=state)
    assert (done.taken_back, done.damages) == ([4], ())
    assert not (query.checkpoint / "commits" / "4").exists()


# ---- Deaths ----


class Death:
    """The process dies before or after step `number` of all steps that change a file."""

    def __init__(self, number: int, when: When) -> None:
        self._left = number
        self._when = when
        self.is_dead = False

    def step(self, effect: Callable[[], _T]) -> _T:
        self._left -= 1
        if self.is_dead or (self._left == 0 and self._when == "before"):
            self.is_dead = True
            raise Killed
        result = effect()
        if self._left == 0:
            self.is_dead = True
            raise Killed
        return result


class MortalManager:
    """Spark's file manager of a process that dies."""

    def __init__(self, manager: Any, death: Death) -> None:
        self._manager = manager
        self._death = death

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)  # those that read

    def mkdirs(self, path: Any) -> None:
        self._death.step(lambda: self._manager.mkdirs(path))

    def delete(self, path: Any) -> None:
        self._death.step(lambda: self._manager.delete(path))

    def createAtomic(self, path: Any, overwrites: bool) -> MortalStream:
        return MortalStream(self._death.step(lambda: self._manager.createAtomic(path, overwrites)), self._death)


class MortalStream:
    """A file that such a process writes."""

    def __init__(self, stream: Any, death: Death) -> None:
        self._stream = stream
        self._death = death

    def write(self, data: bytes) -> None:
        self._death.step(lambda: self._stream.write(data))

    def close(self) -> None:
        self._death.step(self._stream.close)


def deaths(
    monkeypatch: pytest.MonkeyPatch, begin: Callable[[], None], change: Callable[[], object], every: int
) -> Iterator[None]:
    """Begin, make a change with a death before or after a step, and yield; again with a death some steps later."""
    whole = internals.checkpoint_files
    whens: tuple[When, ...] = ("before", "after")
    for number, when in enumerate(itertools.cycle(whens), 2):
        death = Death((number // 2 - 1) * every + 1, when)

        def dying(session: SparkSession, location: str, death: Death = death) -> Any:
            manager, path, qualified = whole(session, location)
            return MortalManager(manager, death), path, qualified

        begin()
        with monkeypatch.context() as patched:
            patched.setattr(internals, "checkpoint_files", dying)
            try:
                change()
            except Killed:
                pass
            else:
                assert number * every > 16, "there are more steps than these"
                return
        yield


def names(folder: Path) -> set[str]:
    """The files of a folder and below, without those that Spark passes over."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name[0] != "."}


@pytest.fixture(
    name="every",
    params=[pytest.param(1, marks=[pytest.mark.extended, pytest.mark.timeout(900)]), 7],
    ids=["every step", "some steps"],
)
def choose_steps(request: pytest.FixtureRequest) -> int:
    """The distance of the steps at which the process dies."""
    return int(request.param)


@pytest.fixture(
    name="shaky", params=[*(pytest.param(one, marks=pytest.mark.extended) for one in (VIEW, SHELF)), KEEPING]
)
def mount_shaky(spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Mount]:
    with mounted(spark, request.param, tmp_path) as made:
        yield made


def test_a_rewind_that_dies_can_be_repeated(
    query: StoredQuery, shaky: Mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    before = tmp_path / "before"
    shutil.copytree(query.checkpoint, before)
    contents = {name: (before / name).read_bytes() for name in names(before)}
    rewind = partial(statelog.rewind, shaky.of(query.checkpoint), location=str(tmp_path / "state"), to=1)

    def begin() -> None:
        shutil.rmtree(query.checkpoint)
        shutil.copytree(before, query.checkpoint)

    for _ in deaths(monkeypatch, begin, rewind, every):
        found = names(query.checkpoint)
        for name, data in contents.items():
            copies = [query.checkpoint / one for one in found if one == name or one.endswith(f"/{name}")]
            assert copies, f"{name} is lost"
            assert {copy.read_bytes() for copy in copies} == {data}
        rewind()
        kept = {"metadata", "commits/0", "commits/1", "offsets/0", "offsets/1", "offsets/2"}
        assert {name for name in names(query.checkpoint) if not name.startswith("statelog-rewound/")} == kept
        assert rewind().taken_back == []


def test_a_restore_that_dies_leaves_no_checkpoint_that_spark_would_take(
    query: StoredQuery, shaky: Mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    saved, new, state = tmp_path / "saved", tmp_path / "new", tmp_path / "copy"
    statelog.savepoint(query.checkpoint, saved, location=str(tmp_path / "state"), batch=2)

    def begin() -> None:
        for folder in (new, state):
            shutil.rmtree(folder, ignore_errors=True)

    restore = partial(statelog.restore, saved, shaky.of(new), location=str(state))
    for _ in deaths(monkeypatch, begin, restore, every):
        written = names(new) if new.exists() else set()
        assert "metadata" not in written or written == {"metadata", "commits/2", "offsets/1", "offsets/2"}


@pytest.mark.parametrize("had_clock", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_spark_s_offsets_survive_a_death_while_the_clock_is_added_or_removed(
    spark: SparkSession, shaky: Mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, had_clock: bool, every: int
) -> None:
    folder = tmp_path / "query"
    source, clock = '{"logOffset":4}', json.dumps({"clock": "id", "tick": 3})
    old = ["v1", "{}", source, *([clock] if had_clock else [])]

    def begin() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("offsets", "commits"):
            (folder / name).mkdir(parents=True)
        for batch in range(3):
            (folder / "offsets" / str(batch)).write_text("\n".join(old))
            (folder / "commits" / str(max(batch - 1, 0))).write_text("v1\n{}")

    def fit() -> list[int]:
        return fit_clock_offsets(open_checkpoint(shaky.of(folder), spark), [False] if had_clock else [False, True])

    for _ in deaths(monkeypatch, begin, fit, every):
        fit()
        lines = [(folder / "offsets" / str(batch)).read_text().split("\n")[2:] for batch in range(3)]
        assert lines[0] == old[2:]
        assert lines[1] == lines[2]
        assert lines[1][0] == source
        assert len(lines[1]) == (1 if had_clock else 2)
        assert fit() == []
