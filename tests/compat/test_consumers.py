"""Pins of consumers: one keeps the changes since a batch (``max_bytes``), one also the state there (``state_at``).

The query has given up what they keep.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from statelog import Options, StateMissingError, Tuning
from statelog.history.pins import Pin, consumer_pins
from statelog.history.query_history import read_history
from statelog.reading.changes import changed_rows
from statelog.reading.consumer import ChangeConsumer, Position
from statelog.reading.open import open_logged
from statelog.storage import LocalStore
from statelog.testing import Harness
from statelog.testing.harness import parts_of
from statelog.testing.query import ManualClock
from tests.compat.stored import read_query, write_query
from tests.model.stored_files import is_pin

FIXTURES: Final = Path(__file__).parent / "consumers"
TIMES_MS: Final = [1_000 * (batch + 1) for batch in range(10)]
BEGINS_AFTER: Final = 4
"""The batch after which both consumers have stopped."""
OPTIONS: Final = Options(
    file_merging="off",
    retained_checkpoints=2,
    materialization_interval_s=0,
    tuning=Tuning(max_log_to_base=0, log_min_age_s=0),
)
PIN_S: Final = 1e10
"""The clock of the harness is in a far future, so the pins last longer."""


class Sum(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self._sum = handle.getValueState("sum", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self._sum.update(((self._sum.get() or (0,))[0] + sum(row.n for row in rows),))
        yield from ()

    def close(self) -> None:
        pass


def make_harness() -> Harness:
    return Harness(
        Sum(), input="user string, n long", keys=["user"], output="user string", parallelism=2, options=OPTIONS
    )


def input_of(batch: int) -> list[tuple[str, int]]:
    return [("ann", 1), (f"user-{batch % 3}", 10 + batch)]


def expected_changes(batches: range) -> list[dict[str, Any]]:
    """The changes of some batches, with the value before."""
    sums: dict[str, int] = {}
    changes: list[dict[str, Any]] = []
    for batch in range(batches.stop):
        for user, n in sorted(input_of(batch)):
            before, sums[user] = sums.get(user), sums.get(user, 0) + n
            changes.append({"batch": batch, "key_user": user, "value_n": sums[user], "before_n": before})
    return [change for change in changes if change["batch"] in batches]


def open_consumer(location: str, *, with_before: bool) -> ChangeConsumer:
    return ChangeConsumer(
        location,
        open_logged(location, None, None),
        "sum",
        pin_s=PIN_S,
        max_bytes=1 << 20,
        with_before=with_before,
        clock=ManualClock(time.time()),
    )


def write(directory: Path) -> None:
    """Write the fixture: two consumers, which have stopped, and the batches after them."""
    positions = {}
    with make_harness() as harness:
        for batch, time_ms in enumerate(TIMES_MS):
            harness.push(input_of(batch), time_ms)
            if batch == BEGINS_AFTER:
                for name in ("changes", "state"):
                    consumer = open_consumer(parts_of(harness).query.location, with_before=name == "state")
                    positions[name] = asdict(consumer.first(batch))
        write_query(directory / "location", harness)
    (directory / "positions").write_text(json.dumps(positions))


@pytest.fixture(params=sorted(FIXTURES.glob("*")), ids=lambda path: path.name)
def fixture(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def restored(fixture: Path) -> Harness:
    return Harness.restore(read_query(fixture / "location", make_harness(), TIMES_MS), Sum())


def position_of(fixture: Path, name: str) -> Position:
    return Position(**json.loads((fixture / "positions").read_text())[name])


def standing(location: str) -> list[Pin]:
    store = LocalStore(location)
    return [pin for _, pin in consumer_pins(store, read_history(store).names["main"], time.time())]


@pytest.mark.parametrize("name", ["changes", "state"])
def test_a_consumer_goes_on_where_it_has_stopped(fixture: Path, name: str) -> None:
    with restored(fixture) as harness:
        location = parts_of(harness).query.location
        assert sorted(pin.base is not None for pin in standing(location)) == [False, True]
        for batch in range(len(TIMES_MS), len(TIMES_MS) + 4):
            harness.push(input_of(batch))
        consumer, position = open_consumer(location, with_before=name == "state"), position_of(fixture, name)
        found: list[dict[str, Any]] = []
        while (end := consumer.newest(position)) != position:
            subtasks = consumer.changes(position, end)
            states = consumer.states(position, len(subtasks)) if name == "state" else [None] * len(subtasks)
            for own, state in zip(subtasks, states, strict=True):
                store = consumer.point.store
                batches = ((changes, changes.rows(store, consumer.state)) for changes in own)
                before = None if state is None else [state]
                for rows in changed_rows(store, consumer.state, consumer.table, batches, before):
                    found += rows.to_pylist()
            position = end
        assert position.batch == len(TIMES_MS) + 2  # the newest batch is certain with the next one
        wanted = expected_changes(range(BEGINS_AFTER + 1, position.batch + 1))
        names = [column for column in wanted[0] if column in found[0]]
        assert (name == "state") == ("before_n" in names)
        shown = [{column: row[column] for column in names} for row in found]
        wanted = [{column: row[column] for column in names} for row in wanted]
        assert sorted(shown, key=json.dumps) == sorted(wanted, key=json.dumps)


@pytest.mark.parametrize("name", ["changes", "state"])
def test_nothing_else_keeps_the_changes(fixture: Path, name: str) -> None:
    """Without the pins they are gone: the fixture's log has given them up."""
    snapshot = read_query(fixture / "location", make_harness(), TIMES_MS)
    objects = {path: data for path, data in snapshot.query.objects.items() if not is_pin(path)}
    unpinned = replace(snapshot, query=replace(snapshot.query, objects=objects))
    with Harness.restore(unpinned, Sum()) as harness:
        consumer = open_consumer(parts_of(harness).query.location, with_before=name == "state")
        with pytest.raises(StateMissingError):
            consumer.newest(position_of(fixture, name))
