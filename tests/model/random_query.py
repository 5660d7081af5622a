"""A query with random input on the harness, compared with plain dictionaries, and what its location holds."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from statelog.testing import Harness
from statelog.testing.harness import parts_of
from statelog.testing.query import ManualClock
from tests.model.engine import Command, CommandProcessor, Key, Model
from tests.model.stored_files import StoredFiles
from tests.options import make_options

KEYS: list[Key] = [(number, text) for number in range(20) for text in ("a", "b")]


@dataclass
class RandomQuery:
    """A harness and a model that go through the same random batches.

    Parameters
    ----------
    seed : int
        Chooses everything.
    hosts : int
        An attempt runs on any of so many.
    parallelism : int
        Number of subtasks.
    options : dict
        Options.
    """

    seed: int
    hosts: int = 1
    parallelism: int = 2
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.model = Model()
        small = {"inline_budget_bytes": 0, "log_min_age_s": 0, "orphan_min_age_s": 0, "merge_fan_in": 5}
        self.harness = Harness(
            CommandProcessor(),
            input="a long, b string, command string",
            output="json string",
            keys=["a", "b"],
            parallelism=self.parallelism,
            options=make_options(**(small | self.options)),
        )
        self._at: dict[int, int] = {}
        self.moves = 0
        parts_of(self.harness).query.place = self._place

    def _place(self, subtask: int) -> int:
        before = self._at.setdefault(subtask, 0)
        self._at[subtask] = self.random.randrange(self.hosts)
        self.moves += self._at[subtask] != before
        return self._at[subtask]

    @property
    def clock(self) -> ManualClock:
        clock = parts_of(self.harness).query.clock
        assert isinstance(clock, ManualClock)
        return clock

    @property
    def retained(self) -> int:
        return parts_of(self.harness).query.options.retained_checkpoints

    @property
    def files(self) -> StoredFiles:
        return StoredFiles(parts_of(self.harness).query)

    def _rows(self, batch: int) -> list[tuple[Key, Command]]:
        """Mostly few rows, so that what is materialized is large beside them, and is kept; the first batch fills it."""
        if batch == 0:
            return [(key, ("append", *map(str, range(5)))) for key in KEYS]
        chosen = self.random.sample(KEYS, self.random.choice([1, 2, 2, 3, 3, len(KEYS)]))
        return [(key, self._command(batch)) for key in chosen]

    def _command(self, batch: int) -> Command:
        name, entry = f"{batch}-{self.random.randrange(1000)}", f"e{self.random.randrange(5)}"
        writes: list[Command] = [("set", batch), ("append", name), ("put", entry, batch), ("remove", entry)]
        return self.random.choice([*writes * 3, ("replace", name), ("wipe",), ("read",), ("unset",)])

    def run_batch(self, batch: int, actions: int = 1) -> None:
        """One micro-batch, whose output several actions ask for."""
        rows = self._rows(batch)
        answers = self.harness.push([(*key, json.dumps(command)) for key, command in rows])
        for _ in range(actions - 1):
            self.harness.repeatBatch()
        expected = [[list(key), self.model.run(key, command)] for key, command in rows]
        found = [json.loads(answer.json) for answer in answers]
        assert sorted(found, key=str) == sorted(expected, key=str), f"batch {batch}, seed {self.seed}"

    def compare_all(self) -> None:
        """Read all state in a run that finds no local files; nothing is missing then, and nothing is left over."""
        self.harness.restart(self.parallelism, keepLocal=False)
        assert self.files.missing(self.retained) == {}, f"seed {self.seed}"
        assert self.files.unreferenced == [], f"seed {self.seed}: not removed at the start"
        answers = self.harness.push([(*key, json.dumps(("read",))) for key in KEYS])
        found = {tuple(key): read for key, read in (json.loads(answer.json) for answer in answers)}
        assert found == {key: json.loads(json.dumps(self.model.run(key, ("read",)))) for key in KEYS}, self.seed
        parts_of(self.harness).batches.stop()
        assert self.files.unreferenced == [], f"seed {self.seed}: not removed at the end"
