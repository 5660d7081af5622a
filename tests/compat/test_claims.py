"""Claims of tools: state that was given up, another name, and a way back."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest

from statelog import ConfigurationError, StateMissingError
from statelog.history.query_history import QueryHistory
from statelog.log.entry import Claim
from statelog.storage import LocalStore
from tests.compat.fixtures_support import fixture_hash
from tests.model.engine import Engine, Key

FIXTURES: Final = Path(__file__).parent / "claims"
KEYS: Final[list[Key]] = [(1, None), (2, "b")]
NEWS: Final = ("forgotten", "anew", "renamed", "rewound")

each_fixture = pytest.mark.parametrize("fixture", sorted(FIXTURES.glob("*")), ids=lambda path: path.name)


def write(directory: Path) -> None:
    """Write the fixture: each log ends with a claim, but for `anew`, where the operator has begun again."""
    for name in NEWS:
        with tempfile.TemporaryDirectory() as scratch:
            engine = Engine(Path(scratch), fixture_hash, file_merging="within")
            engine.start(2, 0)
            for batch in range(3):
                run(engine, batch, ("set", batch))
            engine.release()
            claim(engine, name)
            if name == "anew":
                engine.start(3, 3)
                run(engine, 3, ("set", 40))
                engine.coordinator.close()
            shutil.copytree(engine.location, directory / name)


def claim(engine: Engine, name: str) -> None:
    """Append the claim of a tool."""
    log = engine.open_log(LocalStore(engine.location))
    query = QueryHistory(log.read())
    first, identity = query.at(0), query.names["op"]
    assert first is not None
    news: dict[str, Any] = {"ended": [identity]}
    if name == "renamed":
        news = {"renames": {identity: "other"}}
    elif name == "rewound":
        news = {"follows": first.id}
    log.claim(lambda epoch: Claim(epoch, "query", name, b"token of a claim", 1_000, **news))
    log.close()


def run(engine: Engine, batch: int, command: tuple[Any, ...]) -> None:
    for subtask, part in enumerate(engine.parts([(key, command) for key in KEYS])):
        engine.run_commands(batch, subtask, part)


def values(engine: Engine, batch: int) -> list[Any]:
    """The value of each key, read in a batch."""
    parts = engine.parts([(key, ("read",)) for key in KEYS])
    answers = [answer for subtask, part in enumerate(parts) for answer in engine.run_commands(batch, subtask, part)]
    return [read[0] for _, read in answers]


def engine_of(fixture: Path, directory: Path, uid: str = "op") -> Engine:
    shutil.copytree(fixture, directory / "location")
    engine = Engine(directory, fixture_hash, uid=uid)
    engine.runs = 10  # so that its tokens are new
    return engine


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


@each_fixture
def test_a_renamed_operator_goes_on(fixture: Path, tmp_path: Path) -> None:
    engine = engine_of(fixture / "renamed", tmp_path, "other")
    engine.start(3, 3)
    assert values(engine, 3) == [[2], [2]]
    run(engine, 4, ("set", 50))
    engine.start(1, 5, keep_local=False)
    assert values(engine, 5) == [[50], [50]]


@each_fixture
def test_the_old_name_is_refused(fixture: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="also has an operator 'other', which this start lacks"):
        engine_of(fixture / "renamed", tmp_path).start(1, 3)


@each_fixture
def test_a_rewound_query_goes_on_from_its_checkpoint(fixture: Path, tmp_path: Path) -> None:
    engine = engine_of(fixture / "rewound", tmp_path)
    with pytest.raises(StateMissingError, match="the newest is checkpoint 0"):
        engine.start(1, 3)
    engine.start(3, 1)
    assert values(engine, 1) == [[0], [0]]
    run(engine, 2, ("set", 50))
    engine.start(1, 3, keep_local=False)
    assert values(engine, 3) == [[50], [50]]
