"""Entries of version 3 of the log: state that was given up, and operators that begin anew.

``python -m tests.compat.test_given_up NAME`` writes the fixture of a new version; a fixture is never changed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest

from statelog.storage import LocalStore
from tests.compat.test_fixtures import fixture_hash
from tests.model.engine import Engine, Key
from tests.model.stored_files import give_up_state

FIXTURES: Final = Path(__file__).parent / "given-up"
KEYS: Final[list[Key]] = [(1, None), (2, "b")]

each_fixture = pytest.mark.parametrize("fixture", sorted(FIXTURES.iterdir()), ids=lambda path: path.name)


def write(directory: Path) -> None:
    """Write the fixture: `forgotten` ends with the claim that gives up, and `anew` has begun again."""
    for name in ("forgotten", "anew"):
        with tempfile.TemporaryDirectory() as scratch:
            engine = Engine(Path(scratch), fixture_hash, file_merging="within")
            engine.start(2, 0)
            for batch in range(3):
                run(engine, batch, ("set", batch))
            engine.release()
            give_up_state(engine.open_log(LocalStore(engine.location)), "query", "op")
            if name == "anew":
                engine.start(3, 3)
                run(engine, 3, ("set", 40))
                engine.coordinator.close()
            shutil.copytree(engine.location, directory / name)


def run(engine: Engine, batch: int, command: tuple[Any, ...]) -> None:
    for subtask, part in enumerate(engine.parts([(key, command) for key in KEYS])):
        engine.run_commands(batch, subtask, part)


def values(engine: Engine, batch: int) -> list[Any]:
    """The value of each key, read in a batch."""
    parts = engine.parts([(key, ("read",)) for key in KEYS])
    answers = [answer for subtask, part in enumerate(parts) for answer in engine.run_commands(batch, subtask, part)]
    return [read[0] for _, read in answers]


def engine_of(fixture: Path, directory: Path) -> Engine:
    shutil.copytree(fixture, directory / "location")
    return Engine(directory, fixture_hash)


@each_fixture
def test_given_up_state_is_not_read(fixture: Path, tmp_path: Path) -> None:
    engine = engine_of(fixture / "forgotten", tmp_path)
    engine.start(1, 3)
    assert values(engine, 3) == [None, None]
    run(engine, 4, ("set", 50))
    engine.start(2, 5, keep_local=False)
    assert values(engine, 5) == [[50], [50]]


@each_fixture
def test_an_operator_that_has_begun_anew_goes_on(fixture: Path, tmp_path: Path) -> None:
    engine = engine_of(fixture / "anew", tmp_path)
    engine.start(1, 4)
    assert values(engine, 4) == [[40], [40]]
    run(engine, 5, ("set", 50))
    engine.start(2, 6, keep_local=False)
    assert values(engine, 6) == [[50], [50]]


@each_fixture
def test_the_first_batch_of_an_operator_that_has_begun_anew_is_repeated(fixture: Path, tmp_path: Path) -> None:
    engine = engine_of(fixture / "anew", tmp_path)
    engine.start(2, 3)
    assert values(engine, 3) == [None, None]


if __name__ == "__main__":
    write(FIXTURES / sys.argv[1])
