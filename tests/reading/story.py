"""A query whose state others read, and the state as it should be after each batch."""

from __future__ import annotations

import random
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from statelog.history.query_history import QueryHistory, read_history
from statelog.log.entry import Claim
from statelog.log.open import open_location, open_log
from statelog.runs.key_groups import row_hashes
from statelog.storage import LocalStore, Store
from statelog.testing.query import ManualClock
from tests.model.engine import Command, Engine, Key, Model
from tests.options import changed_options

KEYS: list[Key] = [(number, text) for number in (*range(20), None) for text in ("a", "long " * 20, None)]


def hash_of(key: Key) -> int:
    """Spark's hash."""
    return int(row_hashes([pa.array([key[0]], pa.int64()), pa.array([key[1]], pa.string())])[0])


def random_commands(rng: random.Random, count: int, keys: Sequence[Key] = KEYS) -> list[tuple[Key, Command]]:
    made: list[tuple[Key, Command]] = []
    for number in range(count):
        command = rng.choice(
            [
                ("set", number),
                ("unset",),
                ("append", f"e{number}", "x"),
                ("empty",),
                ("put", rng.choice("pqr"), number),
                ("remove", rng.choice("pqr")),
                ("wipe",),
                ("replace", f"r{number}"),
            ]
        )
        made.append((rng.choice(keys), command))
    return made


class Story:
    """A query of some batches, and the state after each of them."""

    def __init__(
        self,
        directory: Path,
        *,
        parallelism: int = 3,
        open_store: Callable[[str], Store] = LocalStore,
        inline_budget_bytes: int | None = None,
        merge_fan_in: int = 2,
        keys: Sequence[Key] = KEYS,
        **options: Any,
    ) -> None:
        self.keys = keys
        self.engine = Engine(
            directory,
            hash_of,
            open_store=open_store,
            inline_budget_bytes=inline_budget_bytes,
            merge_fan_in=merge_fan_in,
        )
        self.engine.options = changed_options(self.engine.options, **options)
        self.engine.clock = ManualClock(time.time())  # pins have the file system's time
        self.location = self.engine.location
        self.parallelism = parallelism
        self.models: list[Model] = []
        """The state after each batch."""
        self.start()

    @property
    def identity(self) -> str:
        """The operator's identity."""
        return self.query().names["op"]

    def query(self) -> QueryHistory:
        """The log, as another process reads it now."""
        return read_history(open_location(self.location))

    def start(self, parallelism: int | None = None, *, keep_local: bool = True) -> None:
        """Start the query, or start it again."""
        self.parallelism = parallelism or self.parallelism
        self.engine.start(self.parallelism, len(self.models), keep_local=keep_local)

    def go_back(self, batch: int, parallelism: int | None = None) -> None:
        """Set the query back to a checkpoint as a tool does, -1 for the state before batch 0, and start it again."""
        store, target = open_location(self.location), self.query().at(batch)
        log = open_log(store, self.engine.options, self.engine.clock)
        log.claim(
            lambda epoch: Claim(
                epoch, self.engine.query_id, "tool", secrets.token_bytes(16), 0, b"" if target is None else target.id
            )
        )
        log.close()
        del self.models[batch + 1 :]
        self.start(parallelism)

    def copied(self, directory: Path, *, open_store: Callable[[str], Store] = LocalStore) -> Story:
        """The stopped query in another directory, where it continues from its files; it has not been started."""
        shutil.copytree(self.engine.directory, directory)
        story: Story = object.__new__(Story)
        story.__dict__ = self.__dict__ | {"models": list(self.models)}
        story.engine = Engine(directory, hash_of, open_store=open_store)
        story.engine.options = replace(self.engine.options, observer=story.engine.options.observer)
        story.engine.clock = ManualClock(time.time())
        story.location = story.engine.location
        return story

    def run_batches(self, count: int, rng: random.Random) -> None:
        """Run some batches of random commands."""
        for _ in range(count):
            self.run(len(self.models), random_commands(rng, 40, self.keys))

    def run(self, batch: int, commands: list[tuple[Key, Command]]) -> None:
        model = self.models[-1].copy() if self.models else Model()
        for key, command in commands:
            model.run(key, command)
        for subtask, part in enumerate(self.engine.parts(commands)):
            self.engine.run_commands(batch, subtask, part)
        self.models.append(model)


def rows(table: pa.Table) -> list[tuple[Any, ...]]:
    return sorted(zip(*table.to_pydict().values(), strict=True), key=repr)


def value_rows(model: Model) -> list[tuple[Any, ...]]:
    return sorted([(*key, value) for key, (value, _, _) in model.keys.items() if value is not None], key=repr)


def list_rows(model: Model) -> list[tuple[Any, ...]]:
    return sorted(
        [(*key, place, item) for key, (_, items, _) in model.keys.items() for place, item in enumerate(items)], key=repr
    )


def map_rows(model: Model) -> list[tuple[Any, ...]]:
    found = [(*key, entry, number) for key, (_, _, entries) in model.keys.items() for entry, number in entries.items()]
    return sorted(found, key=repr)


STATES = {"value": value_rows, "list": list_rows, "map": map_rows}
