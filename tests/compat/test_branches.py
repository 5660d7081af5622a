"""Branches: logs with links and the name of the parent, and the pins that keep the parent's files.

Links are absolute, so the locations of these fixtures have a scheme that leads to a test's folder.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

import statelog
from statelog.history.query_history import read_history
from statelog.log.open import open_location
from statelog.storage import LocalStore, Store
from tests.compat.fixtures_support import fixture_hash
from tests.model.engine import Engine, Key

FIXTURES: Final = Path(__file__).parent / "branches"
KEYS: Final[list[Key]] = [(1, None), (2, "b"), (3, "c")]
BATCHES: Final = range(3)
PLACES: Final[list[Path]] = []
"""The folder that the locations are in, last."""


def open_place(location: str) -> Store:
    return LocalStore(str(PLACES[-1] / location.removeprefix("compat:/")))


class Placed(Engine):
    """An operator at a location of the fixture."""

    def __init__(self, folder: str, *, scratch: Path, query_id: str = "query") -> None:
        own = scratch / f"scratch-{folder}"
        super().__init__(own, fixture_hash, query_id=query_id, open_store=open_location)
        self.folder = folder

    @property
    def location(self) -> str:
        return f"compat:/{self.folder}"

    def run(self, batch: int, command: tuple[Any, ...]) -> list[Any]:
        """Run a command for each key in a batch."""
        parts = self.parts([(key, command) for key in KEYS])
        return [answer for subtask, part in enumerate(parts) for answer in self.run_commands(batch, subtask, part)]

    def elements(self, batch: int) -> list[list[str]]:
        """The list of each key, read in a batch."""
        return [read[1] for _, read in self.run(batch, ("read",))]


def write(directory: Path) -> None:
    """Write the fixture: a query and its branch."""
    directory.mkdir(parents=True)
    statelog.register_store("compat", open_place)
    with tempfile.TemporaryDirectory() as scratch:
        PLACES.append(directory)
        operator = Placed("parent", scratch=Path(scratch))
        operator.start(2, 0)
        for batch in BATCHES:
            operator.run(batch, ("append", str(batch)))
        operator.coordinator.close()
        checkpoint, new = Path(scratch) / "checkpoint", Path(scratch) / "branch"
        _write_spark_files(checkpoint)
        made = statelog.branch(checkpoint, new, location=operator.location, new_location="compat:/branch")
        (directory / "query-id").write_text(made.query_id)


def _write_spark_files(checkpoint: Path) -> None:
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "commits").mkdir()
    (checkpoint / "metadata").write_text('{"id":"query"}')
    for batch in BATCHES:
        times = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 1000 + batch})
        (checkpoint / "offsets" / str(batch)).write_text(f'v1\n{times}\n{{"value":0}}')
        (checkpoint / "commits" / str(batch)).write_text("v1\n{}")


@pytest.fixture(params=sorted(FIXTURES.glob("*")), ids=lambda path: path.name)
def fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a fixture's copy."""
    statelog.register_store("compat", open_place)
    shutil.copytree(request.param, tmp_path, dirs_exist_ok=True)
    PLACES.append(tmp_path)
    return tmp_path


def require_goes_on(operator: Placed, own: str) -> None:
    former = [str(batch) for batch in BATCHES]
    operator.start(3, 3)
    assert operator.elements(3) == [former] * 3
    operator.run(4, ("append", own))
    operator.start(1, 5, keep_local=False)
    assert operator.elements(5) == [[*former, own]] * 3
    operator.coordinator.close()


def branch_of(fixture: Path) -> Placed:
    return Placed("branch", query_id=(fixture / "query-id").read_text(), scratch=fixture)


def test_a_branch_and_its_parent_go_on(fixture: Path) -> None:
    [pin] = statelog.list_pins("compat:/parent")
    assert pin.batch == BATCHES[-1]
    assert not statelog.verify("compat:/branch").damages
    require_goes_on(Placed("parent", scratch=fixture), "parent")
    require_goes_on(branch_of(fixture), "branch")


def test_a_branch_gives_its_parents_files_back(fixture: Path) -> None:
    branch = branch_of(fixture)
    branch.options = replace(
        branch.options,
        retained_checkpoints=2,
        materialization_interval_s=0,
        tuning=replace(branch.options.tuning, max_log_to_base=0, log_min_age_s=0),
    )
    branch.start(1, 3)
    for batch in range(3, 20):
        branch.clock.advance(100)
        branch.run(batch, ("append", str(batch)))
    assert statelog.list_pins("compat:/parent") == []
    assert read_history(open_location("compat:/branch")).parent is None
    shutil.rmtree(fixture / "parent")
    branch.start(2, 20, keep_local=False)
    assert branch.elements(20) == [[str(number) for number in range(20)]] * 3
