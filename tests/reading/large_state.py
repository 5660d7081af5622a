"""A query with a state that is much larger than what its batches change."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from statelog.history.operator_history import History
from statelog.log.references import SegmentRef, StoredRun
from statelog.runs import digests
from statelog.runs.key_groups import subtasks_of
from statelog.storage import LocalStore, Store
from tests.model.engine import Key
from tests.reading.story import Story, hash_of
from tests.stores import WholeObjects

PARALLELISM = 2
LEVELS = (range(4000), range(4000, 5800))
"""The keys of each level of the base."""


def objects(location: str) -> Store:
    return WholeObjects(LocalStore(location))


def key_of(number: int) -> Key:
    return number, random.Random(number).randbytes(700).hex()


class LargeState(Story):
    """A query whose state is in two levels of large runs per subtask; the batches since are in the log only."""

    def __init__(self, directory: Path, open_store: Callable[[str], Store] = objects, **options: Any) -> None:
        options |= {"file_merging": "within", "retained_checkpoints": 20}
        super().__init__(directory, parallelism=PARALLELISM, open_store=open_store, merge_fan_in=8, **options)
        self._materialize(0)
        for numbers in LEVELS:
            self.run_keys([key_of(number) for number in numbers])
            for _ in range(3):
                self.run_keys([key_of(numbers[0])])
        self._materialize(1e9)
        self.run_keys([key_of(0)])

    def _materialize(self, interval_s: float) -> None:
        options = replace(
            self.engine.options,
            materialization_interval_s=interval_s,
            tuning=replace(self.engine.options.tuning, max_log_to_base=interval_s),
        )
        self.engine.options = options
        self.start()

    def run_keys(self, keys: list[Key]) -> None:
        """Run a batch that sets the value of some keys."""
        batch = len(self.models)
        self.run(batch, [(key, ("set", batch)) for key in keys])


def levels_of(history: History, subtask: int) -> list[list[StoredRun]]:
    """The runs of each level of a subtask's base at the newest checkpoint."""
    checkpoint = history.latest
    assert checkpoint is not None
    genesis = digests.genesis(checkpoint.identity, subtask, PARALLELISM)
    return [level.runs for level in history.levels(genesis, subtask, PARALLELISM, checkpoint.batch)]


def subtask_of(key: Key) -> int:
    [subtask] = subtasks_of(np.array([hash_of(key)], np.uint64), PARALLELISM).tolist()
    return int(subtask)


def changes_since(history: History, subtask: int) -> list[SegmentRef]:
    """The changes of a subtask since its base, up to the newest checkpoint."""
    record = history.latest_record
    assert record is not None
    assert record.base_map is not None
    first = record.base_map.view_of(b"", subtask, PARALLELISM).first_batch
    found = [
        one for checkpoint in history.between(first, record.batch) for one in checkpoint.segments_of(subtask, subtask)
    ]
    return [segment for segment in found if segment.rows]
