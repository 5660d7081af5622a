"""Savepoints written by every version of the layout can be restored."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog.log.open import open_location
from statelog.options import Options, Tuning
from statelog.queries.load import RestoreTarget, restore_operators
from statelog.reading.rows import one_by_one
from statelog.reading.savepoint import Manifest
from statelog.testing.keyed import KeyedQuery
from statelog.testing.query import ManualClock
from statelog.testing.rows import OperatorArguments
from statelog.testing.unkeyed import UnkeyedQuery
from tests.compat.test_fixtures import KEYS, SCRIPT, expected, fixture_hash
from tests.model.engine import command_query, command_rows
from tests.query_runner import QueryRunner
from tests.reading.saved import save

FIXTURES = Path(__file__).parent / "savepoints"
BATCH = len(SCRIPT) - 1
WORDS = ["a", "b", "c", "d", "e", "f"]
OPTIONS = Options(file_merging="across", tuning=Tuning(merge_fan_in=2, orphan_min_age_s=0))


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


def restored(target: Path, directory: Path) -> Manifest:
    """Restore all operators of a savepoint for a query named ``query``."""
    manifest = Manifest.read(open_location(str(target)), str(target))
    where = RestoreTarget(
        str(directory / "location"), "query", "restore", manifest.batch, Options(), ManualClock(), lambda: b"t" * 16
    )
    restore_operators(manifest.operators, str(target), where, one_by_one)
    return manifest


def keyed() -> KeyedQuery:
    return command_query("op", fixture_hash, OPTIONS)


def collecting() -> UnkeyedQuery:
    arguments = OperatorArguments(
        input="word string", output="json string", broadcast="name string, n long", uid="words"
    )
    return UnkeyedQuery(Collect(), arguments, OPTIONS)


def runner(directory: Path) -> QueryRunner:
    """A query of both operators."""
    return QueryRunner(directory, OPTIONS, open_store=open_location)


def write(directory: Path) -> None:
    """Write the fixture: a savepoint of both operators."""
    with tempfile.TemporaryDirectory() as scratch:
        query, op, words = runner(Path(scratch)), keyed(), collecting()
        query.start([op.operator, words.operator], 2, 0)
        for batch, rows in enumerate(SCRIPT):
            query.run_operator("op", batch, command_rows(op, rows))
            new, rules = {0: (WORDS[:4], [("x", 1)]), BATCH: (WORDS[4:], [("y", 2)])}.get(batch, ([], []))
            query.run_operator("words", batch, words.data([(word,) for word in new], rules))
        query.stop()
        offsets, commits = {str(BATCH): "v1\n{}\n{}"}, {str(BATCH): "v1\n{}"}
        save(query.location, directory, BATCH, offsets=offsets, commits=commits)


@pytest.mark.parametrize("fixture", sorted(FIXTURES.glob("*")), ids=lambda path: path.name)
@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_all_state_is_restored(fixture: Path, parallelism: int, tmp_path: Path) -> None:
    """Keyed state, and operator state, which is dealt out to the subtasks."""
    assert restored(fixture, tmp_path).batch == BATCH
    query, op, words = runner(tmp_path), keyed(), collecting()
    query.start([op.operator, words.operator], parallelism, BATCH + 1)
    model = expected()
    outputs = query.run_operator("op", BATCH + 1, command_rows(op, [(key, ("read",)) for key in KEYS]))
    found = [json.loads(text) for output in outputs for text in output.column(0).to_pylist()]
    wanted = [[list(key), model.run(key, ("read",))] for key in KEYS]
    assert sorted(found, key=json.dumps) == sorted(wanted, key=json.dumps)
    outputs = query.run_operator("words", BATCH + 1, words.data([], []))
    states = [json.loads(text) for output in outputs for text in output.column(0).to_pylist()]
    assert len(states) == parallelism
    assert sorted(word for own, _, _ in states for word in own) == WORDS
    assert all(sorted(union) == WORDS for _, union, _ in states)
    assert all(rules == {"x": 1, "y": 2} for _, _, rules in states)
    query.stop()
