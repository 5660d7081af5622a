"""Locations of keyed state, written by every version of the format, are read as they were meant."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Final

import pytest

from statelog.options import TABLES
from tests.compat.fixtures_support import KEYS, SCRIPT, expected, fixture_hash, write_location
from tests.model.engine import Command, Engine, Key, Model

FIXTURES = Path(__file__).parent / "fixtures"


FORMS: Final = ("across", "within", "materialized")


def write(directory: Path) -> None:
    """Write the fixture: a location of each form."""
    for form in FORMS:
        with tempfile.TemporaryDirectory() as scratch:
            write_location(Path(scratch), form)
            shutil.copytree(f"{scratch}/location", directory / form)


@pytest.mark.parametrize("fixture", sorted(FIXTURES.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}")
@pytest.mark.parametrize(("table", "parallelism"), [("runs", 1), *((table, n) for table in TABLES for n in (3, 4))])
def test_fixture_is_read_and_goes_on(fixture: Path, table: str, parallelism: int, tmp_path: Path) -> None:
    shutil.copytree(fixture, tmp_path / "location")
    engine = Engine(tmp_path, fixture_hash, table=table, file_merging="auto")
    model, batch = expected(), len(SCRIPT)
    engine.start(parallelism, batch)
    run_and_compare(engine, batch, [(key, ("read",)) for key in KEYS], model)
    run_and_compare(engine, batch + 1, [(key, ("append", "later")) for key in KEYS], model)
    engine.coordinator.close()
    engine.start(2, batch + 2)
    run_and_compare(engine, batch + 2, [(key, ("read",)) for key in KEYS], model)


def run_and_compare(engine: Engine, batch: int, rows: list[tuple[Key, Command]], model: Model) -> None:
    """Run a batch, and compare what it returns with the model."""
    found = [
        output
        for subtask, part in enumerate(engine.parts(rows))
        for output in engine.run_commands(batch, subtask, part)
    ]
    wanted = [[list(key), model.run(key, command)] for key, command in rows]
    assert sorted(found, key=json.dumps) == sorted(wanted, key=json.dumps)


def test_every_form_has_a_fixture() -> None:
    assert {path.name for path in FIXTURES.glob("v1/*")} == set(FORMS)
