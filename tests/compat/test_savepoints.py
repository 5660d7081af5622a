"""Savepoints written by every version of the layout can be restored.

``python -m tests.compat.test_savepoints NAME`` writes the fixture of a new version; a fixture is never changed.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog.checkpoint.history import History
from statelog.log.open import open_location, open_log
from statelog.options import Options
from statelog.reading.manifest import Manifest, SavedOperator
from statelog.reading.parts import one_by_one
from statelog.savepoints.load import RestoreTarget, restore_operator
from statelog.savepoints.save import save_operator
from statelog.testing import Harness
from statelog.testing.clock import ManualClock
from statelog.testing.harness import parts_of
from tests.compat.test_fixtures import KEYS, SCRIPT, expected, fixture_hash, write
from tests.model.engine import Engine

FIXTURES = Path(__file__).parent / "savepoints"
BATCH = len(SCRIPT) - 1
WORDS = ["a", "b", "c", "d", "e", "f"]


class Collect(statelog.OperatorProcessor):
    """Keeps every word, in a list and in a union list, and how often in a broadcast state."""

    def init(self, handle: statelog.OperatorHandle) -> None:
        self._words = handle.getListState("words", "word string")
        self._union = handle.getUnionListState("union", "word string")
        self._rules = handle.getBroadcastState("rules", "name string", "n long")

    def processBroadcast(self, rows: Iterator[Any], context: statelog.OperatorContext) -> None:
        for row in rows:
            self._rules.put((row.name,), (row.n,))

    def process(self, rows: Iterator[Any], context: statelog.OperatorContext) -> Iterator[Any]:
        for row in rows:
            self._words.add((row.word,))
            self._union.add((row.word,))
        rules = {name: n for (name,), (n,) in self._rules.items()}
        yield (json.dumps([[word for (word,) in self._words.get()], [word for (word,) in self._union.get()], rules]),)

    def close(self) -> None:
        pass


def collecting(parallelism: int) -> Harness:
    return Harness(
        Collect(),
        input="word string",
        output="json string",
        broadcast="name string, n long",
        parallelism=parallelism,
        uid="words",
    )


def save(location: str, uid: str, batch: int, target: Path) -> SavedOperator:
    store = open_location(location)
    history = History(open_log(store, uid, Options(), ManualClock()).read())
    return save_operator(history, batch, uid, location=location, target=str(target), run_all=one_by_one)


def restored(target: Path, directory: Path) -> Manifest:
    """Restore all operators of a savepoint for a query named ``query``."""
    manifest = Manifest.read(open_location(str(target)), str(target))
    where = RestoreTarget(
        str(directory / "location"), "query", "restore", manifest.batch, Options(), ManualClock(), lambda: b"t" * 16
    )
    for operator in manifest.operators:
        restore_operator(operator, str(target), where, one_by_one)
    return manifest


@pytest.mark.parametrize("fixture", sorted(FIXTURES.iterdir()), ids=lambda path: path.name)
@pytest.mark.parametrize("parallelism", [1, 3])
def test_keyed_state_is_restored(fixture: Path, parallelism: int, tmp_path: Path) -> None:
    assert restored(fixture, tmp_path).batch == BATCH
    engine = Engine(tmp_path, fixture_hash)
    engine.start(parallelism, BATCH + 1)
    model = expected()
    found = [
        output
        for subtask, part in enumerate(engine.parts([(key, ("read",)) for key in KEYS]))
        for output in engine.run_commands(BATCH + 1, subtask, part)
    ]
    wanted = [[list(key), model.run(key, ("read",))] for key in KEYS]
    assert sorted(found, key=json.dumps) == sorted(wanted, key=json.dumps)


@pytest.mark.parametrize("fixture", sorted(FIXTURES.iterdir()), ids=lambda path: path.name)
@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_operator_state_is_dealt_out(fixture: Path, parallelism: int, tmp_path: Path) -> None:
    restored(fixture, tmp_path)
    with collecting(1) as harness:
        for _ in range(BATCH + 1):
            harness.push([])
        query = parts_of(harness).query
        query.coordinator.close()
        query.release()
        shutil.rmtree(query.location)
        shutil.copytree(tmp_path / "location", query.location)
        harness.restart(parallelism)
        states = [json.loads(row.json) for row in harness.push([])]
    assert len(states) == parallelism
    assert sorted(word for words, _, _ in states for word in words) == WORDS
    assert all(sorted(union) == WORDS for _, union, _ in states)
    assert all(rules == {"x": 1, "y": 2} for _, _, rules in states)


def write_fixture(target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        write(Path(scratch), "across")
        operators = [save(f"{scratch}/location", "op", BATCH, target)]
    with collecting(2) as harness:
        harness.push([(word,) for word in WORDS[:4]], broadcast=[("x", 1)])
        for _ in range(BATCH - 1):
            harness.push([])
        harness.push([(word,) for word in WORDS[4:]], broadcast=[("y", 2)])
        operators.append(save(parts_of(harness).query.location, "words", BATCH, target))
    texts = {"offsets": {str(BATCH): "v1\n{}\n{}"}, "commits": {str(BATCH): "v1\n{}"}}
    Manifest(batch=BATCH, query_id="query", taken_ms=0, sources=[], operators=operators, **texts).write(
        open_location(str(target))
    )


if __name__ == "__main__":
    write_fixture(FIXTURES / sys.argv[1])
