"""Savepoints written by every version of the layout can be restored."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.compat.fixtures_support import KEYS, SCRIPT, expected
from tests.compat.savepoints_support import BATCH, FIXTURES, WORDS, collecting, keyed, restored, runner
from tests.model.engine import command_rows
from tests.reading.saved import save


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
