"""``Options(retained_s=...)``: checkpoints that stay at intervals of time."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog import ConfigurationError, Options, StateMissingError, StorageError
from statelog.coordinator.batch import BatchTime
from statelog.history.pins import MARGIN_S
from statelog.log.open import PINS_FOLDER
from statelog.storage import LocalStore
from statelog.testing.faults import Call, Fault, FaultPlan, FaultStore
from tests.reading.story import Story, rows, value_rows

RETAINED = 2


def story(directory: Path, retained_s: dict[float, float], **options: Any) -> Story:
    """A query with a batch per second of Spark's time."""
    made = Story(
        directory,
        retained_checkpoints=RETAINED,
        retained_s=retained_s,
        materialization_interval_s=0.0,
        max_log_to_base=0.0,
        max_file_bytes=1,
        log_min_age_s=0.0,
        **options,
    )
    made.engine.times |= {batch: BatchTime(1000 * batch, 0) for batch in made.engine.times}
    return made


def run_batches(query: Story, count: int, seed: int = 1) -> None:
    query.run_batches(count, random.Random(seed))


def readable(query: Story) -> list[int]:
    """The batches that can be read; each is compared with the model."""
    found: list[int] = []
    for batch, model in enumerate(query.models):
        try:
            state = rows(statelog.read_state(query.location, state="value", at=batch).read_all())
        except StateMissingError:
            continue
        assert state == value_rows(model)
        found.append(batch)
    return found


def pins(query: Story) -> int:
    return len(LocalStore(query.location).list(f"{PINS_FOLDER}/"))


def test_the_first_checkpoint_of_each_interval_stays_until_its_time_is_over(tmp_path: Path) -> None:
    query = story(tmp_path, {4: 400, 12: 100_000})
    run_batches(query, 19)
    assert readable(query) == [0, 4, 8, 12, 16, 17, 18]
    query.engine.clock.advance(410 + MARGIN_S)
    run_batches(query, 4)
    # Files have the time of the machine, so the pin of checkpoint 20 is old already.
    assert readable(query) == [0, 12, 21, 22], "those of the longer intervals last longer"


def test_without_the_option_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    query = story(tmp_path, {})
    run_batches(query, 9)
    assert readable(query) == [7, 8]
    assert pins(query) == 0


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({4: 400.0}, [0, 4, 8, 11, 12]),
        ({2: 400.0}, [0, 4, 6, 8, 10, 11, 12]),
        ({4: 800.0}, [0, 4, 5, 8, 11, 12]),  # no pin of the first start lasts for so long
        ({}, [0, 4, 11, 12]),
    ],
    ids=str,
)
def test_a_restart_goes_on_with_the_points_of_earlier_starts(
    tmp_path: Path, changed: dict[float, float], expected: list[int]
) -> None:
    query = story(tmp_path, {4: 400})
    run_batches(query, 7)
    query.engine.options = replace(query.engine.options, retained_s=changed)
    query.start(parallelism=2, keep_local=False)
    run_batches(query, 6, seed=2)
    assert readable(query) == expected


def test_a_point_is_given_up_only_once_its_pin_is_written(tmp_path: Path) -> None:
    """While pins cannot be written, their checkpoints stay retained, also for a start that comes later."""
    refused = Refused()
    query = story(tmp_path, {4: 400}, open_store=lambda location: FaultStore(LocalStore(location), refused))
    refused.is_active = True
    run_batches(query, 7)
    assert pins(query) == 0
    assert readable(query) == list(range(7)), "nothing after the checkpoint that waits for its pin is given up"
    query.start(keep_local=False)
    refused.is_active = False
    run_batches(query, 5, seed=2)
    assert readable(query) == [0, 4, 8, 10, 11]


class Refused(FaultPlan):
    """Lets pins fail to be written."""

    is_active = False

    def fault(self, call: Call) -> Fault | None:
        return Fault() if self.is_active and call.operation == "put_if_absent" and PINS_FOLDER in call.name else None


@pytest.mark.parametrize("stop", range(1, 9))
def test_a_crash_at_any_request_loses_no_point(tmp_path: Path, stop: int) -> None:
    """The driver stops at its n-th request after a point is due, and another start continues."""
    crash = Crash(stop)
    query = story(tmp_path, {4: 400}, open_store=lambda location: FaultStore(LocalStore(location), crash))
    run_batches(query, 5)
    crash.is_active = True
    with contextlib.suppress(StorageError):
        run_batches(query, 3)
    crash.is_active = False
    query.start(keep_local=False)
    run_batches(query, 9 - len(query.models), seed=2)
    assert readable(query) == [0, 4, 7, 8]


class Crash(FaultPlan):
    """From the n-th request on, all fail."""

    def __init__(self, stop: int) -> None:
        self._left = stop
        self.is_active = False

    def fault(self, call: Call) -> Fault | None:
        if not self.is_active:
            return None
        self._left -= 1
        return Fault() if self._left < 0 else None


@pytest.mark.parametrize("value", [60, {60: 30}, {0: 10}, {"60": 3600}, {60: float("inf")}, {60: True}], ids=str)
def test_a_wrong_value_is_named(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="retained_s"):
        Options(retained_s=value)
