"""Drivers that start, fail, stall, come back and crash, one store operation at a time, in a seeded order.

Whatever the order: what was acknowledged to an epoch is seen by every later one, all of them agree on
what came before, and nothing is ever damaged.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from statelog.checkpoint.entry import Checkpoint, Claim, Entry
from statelog.checkpoint.log import Log
from statelog.checkpoint.numbered_log import NumberedLog
from statelog.clock import ManualClock
from statelog.errors import FencedError, StorageError
from statelog.storage import LocalStore, Store
from statelog.storage.faults import Call, Fault, FaultPlan, FaultStore
from statelog.testing.log_contract import PREFIX, latest_by_batch, make_checkpoint, make_claim, read_segment

DRIVERS = 4
MakeLog = Callable[[Store, str], Log]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes the machine, and syncing would take most of the time."""
    for target in ("os.fsync", "statelog.storage.local.sync_data", "statelog.storage.posix.sync_data"):
        monkeypatch.setattr(target, lambda fd: None)


class Crash(BaseException):
    """The process is gone."""


class Turns:
    """Lets one thread run at a time, and picks the next one at random."""

    def __init__(self, rng: random.Random, actors: list[Callable[[Turns, int], None]]) -> None:
        self._rng = rng
        self._turn = [threading.Semaphore(0) for _ in actors]
        self._back = threading.Semaphore(0)
        self._running = set(range(len(actors)))
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._act, args=(number, actor)) for number, actor in enumerate(actors)
        ]

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        while self._running:
            self._turn[self._rng.choice(sorted(self._running))].release()
            self._back.acquire()
        for thread in self._threads:
            thread.join()
        for error in self._errors:
            raise error

    def next(self, number: int) -> None:
        self._back.release()
        self._turn[number].acquire()

    def _act(self, number: int, actor: Callable[[Turns, int], None]) -> None:
        self._turn[number].acquire()
        try:
            actor(self, number)
        except Crash:
            pass
        except BaseException as error:
            self._errors.append(error)
        self._running.discard(number)
        self._back.release()


class TurnPlan(FaultPlan):
    """Waits for its turn at every operation; then there may be a fault or a crash."""

    def __init__(self, turns: Turns, number: int, rng: random.Random) -> None:
        self._turns = turns
        self._number = number
        self._rng = rng
        self._faults = FaultPlan.seeded(rng.randrange(1 << 30), rate=rng.choice((0, 0.05, 0.2)))

    def fault(self, call: Call) -> Fault | None:
        self._turns.next(self._number)
        if self._rng.random() < 0.01:
            raise Crash
        return self._faults.fault(call)


@dataclass
class Epoch:
    """What one driver was told."""

    number: int
    seen: list[Entry]
    acked: list[Checkpoint] = field(default_factory=list)


@dataclass
class Simulation:
    """Some drivers on one log."""

    make_log: MakeLog
    root: Path
    seed: int
    epochs: list[Epoch] = field(default_factory=list)

    def run(self) -> None:
        rng = random.Random(self.seed)
        Turns(rng, [self._drive] * DRIVERS).run()

    def _drive(self, turns: Turns, number: int) -> None:
        rng = random.Random(self.seed * DRIVERS + number)
        for life in range(3):
            store = FaultStore(LocalStore(self.root), TurnPlan(turns, number, rng))
            log = self.make_log(store, PREFIX)
            try:
                self._live(log, f"driver {number}, life {life}", rng)
            except FencedError:
                continue

    def _live(self, log: Log, run: str, rng: random.Random) -> None:
        claimed: list[int] = []

        def make(epoch: int) -> Claim:
            claimed.append(epoch)
            return make_claim(run)(epoch)

        while True:
            try:
                seen = log.claim(make)
                break
            except StorageError:
                continue
        epoch = Epoch(claimed[-1], seen)
        self.epochs.append(epoch)
        for batch in range(rng.randrange(6)):
            token = ""
            while True:
                try:
                    epoch.acked.append(log.append(*make_checkpoint(run, epoch.number, batch, token)))
                    break
                except StorageError:
                    token = rng.choice((token, "revised" * rng.randrange(30)))
        while rng.random() < 0.5:
            try:
                log.close()
                break
            except StorageError:
                continue

    def check(self) -> None:
        store = LocalStore(self.root)
        history = self.make_log(store, PREFIX).read()
        self.epochs.sort(key=lambda epoch: epoch.number)
        for later, epoch in enumerate(self.epochs):
            before = [entry for entry in history if entry.epoch < epoch.number]
            assert without_first_claim(before) == without_first_claim(epoch.seen)
            own = [e for e in history if isinstance(e, Checkpoint) and e.epoch == epoch.number]
            assert latest_by_batch(own)[: len(epoch.acked)] == epoch.acked
            for following in self.epochs[later + 1 :]:
                assert all(entry in following.seen for entry in epoch.acked)
            for entry in epoch.acked:
                texts = [read_segment(store, segment) for segment in entry.segments]
                assert texts == [entry.token, b"\0" * 40 + entry.token]


def without_first_claim(entries: list[Entry]) -> list[Entry]:
    """Leave out the claim that closing may remove, and that a stalled run may then make anew."""
    return [entry for entry in entries if isinstance(entry, Checkpoint) or entry.epoch > 1]


def _appends(store: Store, prefix: str) -> Log:
    return NumberedLog(store, prefix, ManualClock(), appends=True)


def _starts_files_often(store: Store, prefix: str) -> Log:
    return NumberedLog(store, prefix, ManualClock(), appends=True, max_file_bytes=700)


def _writes_files(store: Store, prefix: str) -> Log:
    return NumberedLog(store, prefix, ManualClock(), appends=False)


@pytest.mark.parametrize("make_log", [_appends, _starts_files_often, _writes_files])
@pytest.mark.parametrize("group", range(8))
def test_any_order_of_operations(tmp_path: Path, make_log: MakeLog, group: int) -> None:
    for seed in range(group * 5, group * 5 + 5):
        simulation = Simulation(make_log, tmp_path / str(seed), seed)
        try:
            simulation.run()
            simulation.check()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
