"""Stored output under random deaths: each batch's rows are the same in all deliveries, and agree with the state.

Two operators, one behind the other: commands on keyed state, whose results the second one stores as the query's
output. Every attempt of a batch gets other commands, as if its processor went by random numbers. So the rows that a
sink has got tell which commands count.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from statelog import Options, Step, Tuning
from statelog.history.query_history import QueryHistory
from statelog.local.stored_reader import read_stored
from statelog.log.entry import QueryCheckpoint
from statelog.log.open import LOG_FOLDER, open_log
from statelog.storage import LocalStore
from statelog.tasks.output_task import stored_batches, stored_columns
from statelog.testing.query import Crash, LocalOperator, new_directory
from tests.model.engine import Key, command_query, command_rows
from tests.model.write_ahead_model_support import KEYED, OUTPUT, OutputOperator
from tests.query_runner import QueryRunner
from tests.storage.page_cache import tear_last_frame

KEYS: list[Key] = [(number, None) for number in range(4)] + [(None, "a")]
TASK_STEPS = [Step.RESTORED, Step.ACKING, Step.ACKED, Step.MERGING, Step.MATERIALIZING]


class Death(Exception):
    """The driver dies while the sink has the batch."""


class Story:
    """A query of both operators, which dies and continues as a seed says."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = random.Random(seed)
        options = Options(
            file_merging=self.random.choice(["across", "within", "off"]),
            inline_budget_bytes=self.random.choice([0, 100, 8 << 20]),
            retained_checkpoints=2,
            tuning=Tuning(merge_fan_in=2, orphan_min_age_s=0, upload_part_bytes=200),
        )
        self.keyed = command_query(KEYED, lambda key: hash(key) % 2**64, options)
        self.query = QueryRunner(directory, options)
        self.batch = 0
        self.values: dict[Key, Any] = {}
        self.kept = self.torn = 0
        self.deliveries: list[Any] = []
        self.start()

    def start(self) -> None:
        """Start the query as a new driver does, with any parallelism, on the same hosts or on others."""

        def has_output(history: QueryHistory) -> bool:
            return history.latest is not None and history.latest.batch == self.batch

        if not self.deliveries and self.random.random() < 0.5:
            # The batch's entry, if it was written, was not acknowledged: the machine may have crashed.
            files = (Path(self.query.location) / LOG_FOLDER).glob("*.log")
            self.torn += self.entry_is_there() and tear_last_frame(max(files), self.random)
        self.query.keeps = has_output
        operators: list[LocalOperator] = [self.keyed.operator, OutputOperator()]
        parallelism = {one.uid: self.random.randint(1, 3) for one in operators}
        self.query.start(operators, parallelism, self.batch, keep_local=self.random.random() < 0.5)
        self.kept += self.query.coordinator.kept_batch == self.batch

    def entry_is_there(self) -> bool:
        """Whether the log has an entry of the batch."""
        log = open_log(LocalStore(self.query.location), self.query.options, self.query.clock)
        return any(isinstance(entry, QueryCheckpoint) and entry.batch == self.batch for entry in log.read()[-1:])

    def run(self, batches: int) -> None:
        """Run batches, each until Spark commits it."""
        for _ in range(batches):
            self.deliveries = []
            while True:
                self._arm()
                try:
                    self._attempt()
                except (Crash, Death):
                    self.start()
                else:
                    break
            self.batch += 1

    def stop(self) -> None:
        """Stop the query in good order."""
        self.query.stop()

    def _arm(self) -> None:
        for uid in self.query.operators:
            step = self.random.choice([None, None, None, Step.LAST_ACK, Step.DURABLE, *TASK_STEPS])
            self.query.crash_points[uid].arm(step)

    def _attempt(self) -> None:
        commands = [(key, ("set", self.random.randrange(1000))) for key in KEYS if self.random.random() < 0.7]
        reads = [(key, ("read",)) for key, _ in commands]
        outputs = self.query.run_operator(KEYED, self.batch, command_rows(self.keyed, [*reads, *commands, *reads]))
        rows = [json.loads(text) for output in outputs for text in output.column(0).to_pylist()]
        assert self.query.run_operator(OUTPUT, self.batch, rows) == []
        if self.random.random() < 0.2:
            raise Death
        self._deliver(sorted(self._stored()))
        if self.random.random() < 0.2:
            raise Death

    def _stored(self) -> Iterator[str]:
        checkpoint = self.query.coordinator.durable_checkpoint(OUTPUT, self.batch)
        store = LocalStore(self.query.location)
        for segment in checkpoint.segments:
            data = read_stored(store, segment, "output")
            assert stored_columns(data, "output") == "columns"
            yield from [row for batch in stored_batches(data, "output") for row in batch.column(0).to_pylist()]

    def _deliver(self, rows: list[str]) -> None:
        """The sink gets the rows: the same as before, and those that the state leads to and comes from."""
        if self.deliveries:
            assert rows == self.deliveries[0]
        else:
            reads: dict[Key, list[Any]] = defaultdict(list)
            for key, read in map(json.loads, rows):
                reads[tuple(key)] += [] if read is None else [read[0]]
            for key, values in reads.items():
                values.remove(self.values.get(key))  # the state before the batch is that of the rows before it
                [self.values[key]] = values
        self.deliveries.append(rows)


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 200), marks=pytest.mark.extended)], ids=str)
def test_every_delivery_of_a_batch_is_the_same(seeds: range) -> None:
    kept = torn = 0
    for seed in seeds:
        directory = new_directory()
        story = Story(directory, seed)
        story.run(8)
        story.stop()
        shutil.rmtree(directory)
        kept += story.kept
        torn += story.torn
    assert kept >= len(seeds) // 2, "hardly any batch was repeated after its output was stored"
    assert torn >= len(seeds) // 4, "hardly any entry was torn"
