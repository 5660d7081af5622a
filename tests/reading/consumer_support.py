"""What the tests of :mod:`tests.reading.test_consumer` and others share."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from statelog.reading.changes import changed_rows
from statelog.reading.consumer import ChangeConsumer
from statelog.reading.open import open_logged
from statelog.storage import LocalStore, Store
from statelog.testing.faults import FaultStore
from statelog.testing.query import ManualClock
from tests.reading.changes_support import Rows, replayed
from tests.reading.pins_support import Stop
from tests.reading.story import STATES, Story

FORGETFUL: dict[str, Any] = {
    "retained_checkpoints": 2,
    "materialization_interval_s": 0,
    "max_log_to_base": 0,
    "max_file_bytes": 4000,
    "log_min_age_s": 0,
}


class Feed:
    """A consumer, and the changes that it has read."""

    def __init__(
        self,
        location: str,
        state: str = "value",
        after: int | None = -1,
        *,
        pin_s: float = 600.0,
        max_bytes: int = 1 << 30,
        takes_last: bool = False,
        with_before: bool = False,
    ) -> None:
        self.clock = ManualClock(time.time())
        self._make = partial(
            _consumer,
            location,
            state,
            pin_s=pin_s,
            max_bytes=max_bytes,
            takes_last=takes_last,
            with_before=with_before,
            clock=self.clock,
        )
        self.state = state
        self.consumer = self._make()
        self.position = self.consumer.first(after)
        self.rows: Rows = []

    def restart(self) -> None:
        """Continue from the same position with another consumer."""
        self.consumer = self._make()

    def step(self, max_bytes: int | None = None) -> int:
        """Read on; returns how many batches there were."""
        source = self.consumer.point
        end = self.consumer.newest(self.position, max_bytes=max_bytes)
        found: Rows = []
        state, table = self.consumer.state, self.consumer.table
        subtasks = self.consumer.changes(self.position, end) if end != self.position else []
        states = self.consumer.states(self.position, len(subtasks)) if table.with_before else None
        for subtask, own in enumerate(subtasks):
            batches = ((changes, changes.rows(source.store, state)) for changes in own)
            for rows in changed_rows(
                source.store, state, table, batches, None if states is None else [states[subtask]]
            ):
                found += rows.to_pylist()
        self.rows += sorted(found, key=lambda row: row["batch"])
        count = end.batch - self.position.batch
        self.position = end
        return count

    def step_to_the_end(self) -> None:
        while self.step():
            pass


def _consumer(location: str, state: str, **arguments: Any) -> ChangeConsumer:
    return ChangeConsumer(location, open_logged(location, None, None), state, **arguments)


def require_all(feed: Feed, query: Story, before: int = -1) -> None:
    """The feed's changes, on top of the state after a batch, are the state at its position."""
    known = STATES[feed.state](query.models[before]) if before >= 0 else []
    assert {row["batch"] for row in feed.rows} == set(range(before + 1, feed.position.batch + 1))
    assert replayed(known, feed.rows, feed.state) == STATES[feed.state](query.models[feed.position.batch])


def files(query: Story) -> int:
    return sum(1 for path in Path(query.location).rglob("*") if path.is_file())


def stopping(stop: Stop, location: str) -> Store:
    return FaultStore(LocalStore(location), stop)
