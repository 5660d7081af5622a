"""Locations of keyed state, written by every version of the format, are read as they were meant."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import xxhash

from statelog.options import TABLES
from tests.model.engine import Command, Engine, Key, Model

FIXTURES = Path(__file__).parent / "fixtures"
KEYS: list[Key] = [(None, None), (5, None), (None, "5"), (7, "ü"), (-1, "")]
SCRIPT: list[list[tuple[Key, Command]]] = [
    [(key, ("set", index * 10**12)) for index, key in enumerate(KEYS)],
    [((7, "ü"), ("append", "a", "b")), ((5, None), ("put", "x", 1)), ((5, None), ("put", "y", 2))],
    [],
    [((7, "ü"), ("append", "c")), ((5, None), ("remove", "x")), ((None, None), ("unset",))],
    [((-1, ""), ("replace", "only")), ((None, "5"), ("put", "", -(2**63))), ((5, None), ("append", "z"))],
    [((5, None), ("wipe",)), ((5, None), ("put", "z", 3)), ((-1, ""), ("set", -1))],
]


def fixture_hash(key: Key) -> int:
    return xxhash.xxh64_intdigest(repr(key).encode())


def expected() -> Model:
    model = Model()
    for batch in SCRIPT:
        for key, command in batch:
            model.run(key, command)
    return model


FORMS: Final = ("across", "within", "materialized")


def write(directory: Path) -> None:
    """Write the fixture: a location of each form."""
    for form in FORMS:
        with tempfile.TemporaryDirectory() as scratch:
            write_location(Path(scratch), form)
            shutil.copytree(f"{scratch}/location", directory / form)


def write_location(directory: Path, form: str) -> None:
    """Write a location with two epochs, a change of parallelism, and inline and uploaded changesets.

    The form ``materialized`` has bases beside them, also pieces of those of the first epoch.
    """
    file_merging = "across" if form == "materialized" else form
    engine = Engine(directory, fixture_hash, file_merging=file_merging)
    if form == "materialized":
        engine.options = replace(engine.options, materialization_interval_s=0, retained_checkpoints=2)
    engine.start(2, 0)
    for batch, rows in enumerate(SCRIPT):
        if batch == 3:
            engine.coordinator.close()
            engine.options = replace(engine.options, inline_budget_bytes=0)
            engine.start(3, batch)
        for subtask, part in enumerate(engine.parts(rows)):
            engine.run_commands(batch, subtask, part)
    engine.coordinator.close()


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
