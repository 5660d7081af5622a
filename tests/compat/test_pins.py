"""A pin as each version has stored it: the pinned checkpoint stays readable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import statelog
from statelog import Options, StateMissingError, Tuning
from statelog.testing import Harness
from statelog.testing.harness import parts_of
from tests.compat.stored import read_query, write_query

FIXTURES: Final = Path(__file__).parent / "pins"
TIMES_MS: Final = [1_000, 2_000, 3_000]
OPTIONS: Final = Options(
    file_merging="off", retained_checkpoints=4, materialization_interval_s=0, tuning=Tuning(log_min_age_s=0)
)


class Count(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self._seen = handle.getValueState("seen", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n = (self._seen.get() or (0,))[0] + sum(row.n for row in rows)
        self._seen.update((n,))
        yield Row(user=key[0], n=n)

    def close(self) -> None:
        pass


def make_harness() -> Harness:
    return Harness(
        Count(),
        input="user string, n long",
        keys=["user"],
        output="user string, n long",
        parallelism=2,
        options=OPTIONS,
    )


def write(directory: Path) -> None:
    """Write the fixture: three batches, the second of which somebody has pinned for ever."""
    with make_harness() as harness:
        for batch, time_ms in enumerate(TIMES_MS):
            harness.push([("ann", 1), ("bob", 10 + batch), ("ann", 2)], time_ms)
            if batch == 1:
                statelog.pin(parts_of(harness).query.location, at=1, lasts_s=None, owner="tests")
        write_query(directory, harness)


@pytest.mark.parametrize("fixture", sorted(FIXTURES.glob("*")), ids=lambda path: path.name)
def test_a_pin_keeps_its_checkpoint_until_it_is_removed(fixture: Path) -> None:
    with Harness.restore(read_query(fixture, make_harness(), TIMES_MS), Count()) as harness:
        location = parts_of(harness).query.location
        [pin] = statelog.list_pins(location)
        assert (pin.batch, pin.owner) == (1, "tests")
        for _ in range(9):
            harness.push([("ann", 1)])
        read = statelog.read_state(location, state="seen", at=1).read_all().to_pylist()
        assert sorted((row["key_user"], row["value_n"]) for row in read) == [("ann", 6), ("bob", 21)]
        statelog.unpin(location, pin.name)
        for _ in range(6):
            harness.push([("ann", 1)])
        with pytest.raises(StateMissingError):
            statelog.read_state(location, state="seen", at=1)
        assert harness.value("seen", "ann") == (24,)
