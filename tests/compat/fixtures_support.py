"""What the tests of :mod:`tests.compat.test_fixtures` and others share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import xxhash

from tests.model.engine import Command, Engine, Key, Model

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
