"""``statelog.delete_orphans`` beside a query: no checkpoint that can be read or restored loses an object."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog import CorruptionError, StateMissingError, Step
from statelog.clock import Clock
from statelog.history.footprint import log_file
from statelog.history.pins import MARGIN_S
from statelog.history.query_history import read_history
from statelog.log.entry import QueryCheckpoint
from statelog.log.open import PINS_FOLDER
from statelog.storage import LocalStore
from statelog.testing.faults import FaultStore
from statelog.testing.query import Crash, ManualClock
from tests.reading.pins_support import Stop
from tests.reading.story import Story, random_commands, rows, value_rows

RETAINED = 2


def story(directory: Path, **options: Any) -> Story:
    """A query that retains as little as it can and materializes as often; its starts leave all orphans alone."""
    made = Story(
        directory,
        parallelism=2,
        retained_checkpoints=RETAINED,
        materialization_interval_s=0,
        max_log_to_base=0,
        max_file_bytes=4000,
        log_min_age_s=0,
        orphan_min_age_s=10**9,
        **options,
    )
    made.run_batches(3, random.Random(1))
    return made


def delete(location: str, *, min_age_s: float = 0, clock: Clock | None = None, dry_run: bool = False) -> list[str]:
    """Delete orphans of any age."""
    clock = clock or ManualClock(time.time() + 60)
    found = statelog.delete_orphans(location, min_age_s=min_age_s, clock=clock, dry_run=dry_run)
    return [info.name for info in found]


class Check:
    """Deletes orphans, and checks that the same checkpoints can be read as before."""

    def __init__(self, query: Story, directory: Path) -> None:
        self.query = query
        self.pins: dict[str, int] = {}
        self.deleted = 0
        self._directory = directory
        self._copies = itertools.count()

    def delete(self) -> None:
        before = readable(self.query, self.query.location)
        assert set(self.pins.values()) <= set(before)
        self.deleted += len(delete(self.query.location))
        assert readable(self.query, self.query.location) == before

    def delete_before_sync(self) -> None:
        """Delete when an entry has just been appended, and then lose it with the machine."""
        location = self.query.location
        lost = without_newest_entry(location, self._directory / f"lost-{next(self._copies)}")
        before = readable(self.query, lost)
        self.delete()
        for info in LocalStore(lost).list():
            if not (Path(location) / info.name).exists():
                os.remove(Path(lost) / info.name)
        assert readable(self.query, lost) == before

    def crash(self, step: Step, rng: random.Random) -> None:
        """Have the query crash at a step of a batch, and start again."""
        query, commands = self.query, random_commands(rng, 40)
        query.engine.crash_point.arm(step)
        try:
            query.run(len(query.models), commands)
        except Crash:
            if step is Step.DURABLE:
                self.delete_before_sync()
            else:
                self.delete()
            query.start(rng.choice([1, 2, 3]), keep_local=False)
            self.delete()
            query.run(len(query.models), commands)
        query.engine.crash_point.arm(None)


def newest(location: str) -> QueryCheckpoint:
    found = read_history(LocalStore(location)).latest
    assert found is not None
    return found


def readable(query: Story, location: str) -> list[int]:
    """The batches that can be read; each is compared with the model."""
    found: list[int] = []
    for batch, model in enumerate(query.models):
        with contextlib.suppress(StateMissingError):
            assert rows(statelog.read_state(location, state="value", at=batch).read_all()) == value_rows(model)
            found.append(batch)
    return found


def without_newest_entry(location: str, directory: Path) -> str:
    """A copy of a location whose newest checkpoint was lost with the machine."""
    copied = Path(shutil.copytree(location, directory))
    last = newest(location)
    file = copied / log_file(last.number)
    if last.offset:
        os.truncate(file, last.offset)
    else:
        file.unlink()
    return str(copied)


STEPS = [Step.ACKING, Step.LAST_ACK, Step.DURABLE, Step.ACKED, Step.MATERIALIZING]


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_in_a_random_story(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    query = story(
        tmp_path / "query",
        file_merging=["across", "within", "off"][seed % 3],
        inline_budget_bytes=rng.choice([0, 0, None]),
    )
    check = Check(query, tmp_path)
    for _ in range(25):
        match rng.choice(["run", "crash", "crash", "pin", "unpin", "start"]):
            case "run":
                query.run_batches(rng.randint(1, 3), rng)
            case "crash":
                check.crash(rng.choice(STEPS), rng)
            case "pin":
                at = rng.choice(readable(query, query.location))
                check.pins[statelog.pin(query.location, at=at, lasts_s=3600, owner="test").name] = at
            case "unpin" if check.pins:
                name, _ = check.pins.popitem()
                statelog.unpin(query.location, name)
            case "start":
                query.start(rng.choice([1, 2, 3]), keep_local=rng.random() < 0.5)
        check.delete()
    query.start(keep_local=False)
    query.run_batches(1, rng)
    assert readable(query, query.location)[-1] == len(query.models) - 1
    assert check.deleted > 3


def test_nothing_is_lost_when_others_work_between_two_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = story(tmp_path / "query", inline_budget_bytes=0)
    made.start(keep_local=False)
    made.run_batches(1, random.Random(2))
    pinned = len(made.models) - 1
    for number in itertools.count(1):
        query = made.copied(tmp_path / str(number))
        query.start(keep_local=False)

        def work(query: Story = query) -> None:
            statelog.pin(query.location, at=pinned, lasts_s=None, owner="test")
            query.run_batches(8, random.Random(3))

        stop = Stop(number, work)
        with monkeypatch.context() as patched:
            patched.setattr(
                "statelog.reading.open.open_location",
                lambda location, stop=stop: FaultStore(LocalStore(location), stop),
            )
            delete(query.location)
        if stop.requests < number:
            break
        last = len(query.models) - 1
        assert readable(query, query.location) == [pinned, last - 1, last]
    assert number > 5


# ---- Pins ----


def with_unused_pins(tmp_path: Path, *lasts_s: float | None) -> tuple[Story, int, list[str]]:
    """A query, a batch that it has long given up, and pins of that batch which last so long."""
    query = story(tmp_path / "query", inline_budget_bytes=0)
    batch = len(query.models) - 1
    pins = [statelog.pin(query.location, at=batch, lasts_s=given, owner="test").name for given in lasts_s]
    query.start(keep_local=False)
    query.run_batches(RETAINED + 2, random.Random(2))
    query.start(keep_local=False)
    query.run_batches(1, random.Random(3))
    return query, batch, pins


def test_expired_pins_go_and_what_only_they_kept(tmp_path: Path) -> None:
    query, batch, [pinned, forever] = with_unused_pins(tmp_path, 3600, None)
    assert delete(query.location) == []
    expired = ManualClock(time.time() + 3600 + MARGIN_S + 1)
    assert delete(query.location, min_age_s=10**6, clock=expired) == [pinned], "at any age"
    assert batch in readable(query, query.location)
    statelog.unpin(query.location, forever)
    assert any(name.startswith(f"{query.identity}/changes/") for name in delete(query.location))
    assert readable(query, query.location) == [len(query.models) - RETAINED, len(query.models) - 1]


def test_nothing_goes_while_a_pin_cannot_be_read(tmp_path: Path) -> None:
    query, _, [pin] = with_unused_pins(tmp_path, None)
    statelog.unpin(query.location, pin)
    [first, *_] = delete(query.location, dry_run=True)
    name = f"{PINS_FOLDER}/{0:020}-damaged.json"
    LocalStore(query.location).put(name, b"{}")
    with pytest.raises(CorruptionError, match="because a pin cannot be read.*statelog unpin LOCATION"):
        delete(query.location)
    assert (Path(query.location) / first).exists()
    statelog.unpin(query.location, name)
    assert first in delete(query.location)
