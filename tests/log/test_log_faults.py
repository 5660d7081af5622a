"""Drivers that start, fail, stall, come back and crash, one store operation at a time, in a seeded order.

Whatever the order: what was acknowledged to an epoch is seen by every later one, all of them agree on
what came before, and nothing is ever damaged. So it is where machines crash, and where files are removed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from statelog.errors import FencedError, StorageError
from statelog.log.entry import Claim, Entry, QueryCheckpoint
from statelog.log.numbered import NumberedLog
from statelog.runs import digests
from statelog.storage import LocalStore, Store
from statelog.testing.faults import Call, Fault, FaultPlan, FaultStore
from statelog.testing.query import ManualClock
from tests.contract.log_contract import PREFIX, latest_by_batch, make_checkpoint, make_claim, read_segment
from tests.entries import segments_in
from tests.storage.page_cache import Machine
from tests.stores import WholeObjects

DRIVERS = 4
MakeLog = Callable[[Store, str, ManualClock], NumberedLog]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes the machine, and syncing would take most of the time."""
    for target in ("os.fsync", "statelog.storage.local.sync_data"):
        monkeypatch.setattr(target, lambda fd: None)


class Crash(BaseException):
    """The process is gone."""


class Turns:
    """Lets one thread run at a time, and picks the next one at random.

    Parameters
    ----------
    rng : Random
        Picks.
    actors : list of callable
        What the threads do.
    in_a_row : int
        How many turns a thread has in a row, on average, while the others stall.
    """

    def __init__(self, rng: random.Random, actors: list[Callable[[Turns, int], None]], in_a_row: int = 1) -> None:
        self._rng = rng
        self._in_a_row = in_a_row
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
        current = -1
        while self._running:
            if current not in self._running or self._rng.random() * self._in_a_row < 1:
                current = self._rng.choice(sorted(self._running))
            self._turn[current].release()
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
    acked: list[QueryCheckpoint] = field(default_factory=list)

    @property
    def start(self) -> int:
        """The first file that its claim found to be needed."""
        checkpoints = [entry for entry in self.seen if isinstance(entry, QueryCheckpoint)]
        return checkpoints[-1].log_start if checkpoints else 0


@dataclass
class Simulation:
    """Some drivers on one log."""

    make_log: MakeLog
    open_store: Callable[[], Store]
    seed: int
    in_a_row: int = 1
    epochs: list[Epoch] = field(default_factory=list)

    def run(self) -> None:
        rng = random.Random(self.seed)
        Turns(rng, [self._drive] * DRIVERS, self.in_a_row).run()

    def _drive(self, turns: Turns, number: int) -> None:
        rng = random.Random(self.seed * DRIVERS + number)
        for life in range(3):
            store = FaultStore(self.open_store(), self.plan(turns, number, rng))
            clock = ManualClock()
            log = self.make_log(store, PREFIX, clock)
            try:
                self._live(Driver(log, store, clock, f"driver {number}, life {life} of {self.seed}", rng))
            except FencedError:
                continue

    def plan(self, turns: Turns, number: int, rng: random.Random) -> FaultPlan:
        """What happens to a driver's operations."""
        return TurnPlan(turns, number, rng)

    def _live(self, driver: Driver) -> None:
        epoch = driver.claim()
        self.claimed(epoch)
        self.epochs.append(epoch)
        for batch in range(driver.rng.randrange(6)):
            epoch.acked.append(driver.append(epoch, batch))
            self.committed(driver, epoch)
        driver.close()

    def claimed(self, epoch: Epoch) -> None:
        """A driver has claimed the log."""

    def committed(self, driver: Driver, epoch: Epoch) -> None:
        """A driver has appended an entry."""

    def check(self) -> None:
        store = self.open_store()
        history = self.make_log(store, PREFIX, ManualClock()).read()
        self.epochs.sort(key=lambda epoch: epoch.number)
        for later, epoch in enumerate(self.epochs):
            before = [entry for entry in history if entry.epoch < epoch.number]
            assert without_first_claim(before) == without_first_claim(epoch.seen)
            own = [e for e in history if isinstance(e, QueryCheckpoint) and e.epoch == epoch.number]
            assert latest_by_batch(own)[: len(epoch.acked)] == epoch.acked
            for following in self.epochs[later + 1 :]:
                assert all(entry in following.seen for entry in epoch.acked)
            for entry in epoch.acked:
                texts = [read_segment(store, segment) for segment in segments_in(entry)]
                copies = len(texts[0]) // len(entry.token)
                assert texts == [entry.token * copies, b"\0" * 40 + entry.token * copies]


@dataclass
class Driver:
    """A driver in one of its lives: it tries again until it is fenced off."""

    log: NumberedLog
    store: Store
    clock: ManualClock
    run: str
    rng: random.Random
    start: int = 0

    def claim(self) -> Epoch:
        claimed: list[int] = []

        def make(epoch: int) -> Claim:
            claimed.append(epoch)
            return make_claim(self.run)(epoch)

        while True:
            try:
                seen = self.log.claim(make)
                break
            except StorageError:
                continue
        epoch = Epoch(claimed[-1], seen)
        self.start = epoch.start
        return epoch

    def append(self, epoch: Epoch, batch: int) -> QueryCheckpoint:
        token = ""
        while True:
            copies = self.rng.choice((1, 1, 100, 500))
            entry, payload = make_checkpoint(self.run, epoch.number, batch, token, copies)
            try:
                return self.log.append(msgspec.structs.replace(entry, log_start=self.start), payload)
            except StorageError:
                token = self.rng.choice((token, "revised" * self.rng.randrange(30)))

    def close(self) -> None:
        while self.rng.random() < 0.5:
            try:
                self.log.close()
                break
            except StorageError:
                continue


def without_first_claim(entries: list[Entry]) -> list[Entry]:
    """Leave out the claim that closing may remove, and that a stalled run may then make anew."""
    return [entry for entry in entries if isinstance(entry, QueryCheckpoint) or entry.epoch > 1]


# A driver takes turns with the others: it reads one entry in a turn, not many at once.


def _appends(store: Store, prefix: str, clock: ManualClock) -> NumberedLog:
    return NumberedLog(store, prefix, clock, appends=True, reads_at_once=1)


def _starts_files_often(store: Store, prefix: str, clock: ManualClock) -> NumberedLog:
    return NumberedLog(store, prefix, clock, appends=True, max_file_bytes=1000, reads_at_once=1)


def _writes_files(store: Store, prefix: str, clock: ManualClock) -> NumberedLog:
    return NumberedLog(store, prefix, clock, appends=False, reads_at_once=1)


every_form = pytest.mark.parametrize("make_log", [_appends, _starts_files_often, _writes_files])


@every_form
@pytest.mark.parametrize("group", range(8))
def test_any_order_of_operations(tmp_path: Path, make_log: MakeLog, group: int) -> None:
    for seed in range(group * 5, group * 5 + 5):
        root = tmp_path / str(seed)
        simulation = Simulation(make_log, lambda root=root: LocalStore(root), seed)  # type: ignore[misc]  # a lambda with a default has no inferred type
        with noted(seed):
            simulation.run()
            simulation.check()


@contextmanager
def noted(seed: int) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


# ---- Machines that crash ----


class MachineDown(Crash):
    """All processes of a machine are gone."""


@dataclass
class OneMachine(Simulation):
    """Drivers on a machine that crashes, and whose disk fails now and then; then there are others."""

    operations_left: int = 0

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.machine = Machine(rng, partial(self._sync_fails, rng, 0.1), partial(self._sync_fails, rng, 0.01))
        self.open_store = self.machine.open_store

    def _sync_fails(self, rng: random.Random, crashes: float) -> bool:
        """Whether a sync fails; the machine may also crash in it."""
        if rng.random() < crashes:
            self.operations_left = -1
            raise MachineDown
        return rng.random() < 0.1

    def run(self) -> None:
        rng = random.Random(self.seed)
        for crash in range(6):
            self.operations_left = rng.randrange(20, 400)
            self.seed = self.seed * 6 + crash
            super().run()
            self.machine.crash()

    def claimed(self, epoch: Epoch) -> None:
        last = [entry for entry in epoch.seen if isinstance(entry, QueryCheckpoint)][-1:]
        for segment in [segment for entry in last for segment in segments_in(entry)]:
            data = self.open_store().read(segment.name, offset=segment.offset, length=segment.length)
            assert digests.checksum(data) == segment.checksum, "an entry counts with all of its payload"

    def plan(self, turns: Turns, number: int, rng: random.Random) -> FaultPlan:
        turn = TurnPlan(turns, number, rng)

        class UntilTheCrash(FaultPlan):
            def fault(plan, call: Call) -> Fault | None:
                fault = turn.fault(call)
                self.operations_left -= 1
                if self.operations_left < 0:
                    raise MachineDown
                return fault

        return UntilTheCrash()


@every_form
@pytest.mark.parametrize("group", range(4))
def test_any_order_of_operations_and_crashes_of_the_machine(make_log: MakeLog, group: int) -> None:
    for seed in range(group * 10, group * 10 + 10):
        simulation = OneMachine(make_log, lambda: LocalStore("."), seed, in_a_row=10)
        with noted(seed):
            simulation.run()
            simulation.check()


# ---- Files that are removed ----


class Truncating(Simulation):
    """Drivers whose entries are enough by themselves, so that the log before them goes at once.

    The clocks of a driver stand still while it waits for its turn, whatever the others do meanwhile.
    """

    def committed(self, driver: Driver, epoch: Epoch) -> None:
        if driver.rng.random() < 0.7:
            driver.start = epoch.acked[-1].number
        if epoch.acked[-1].log_start:
            driver.clock.advance(100)
            names = driver.log.removable(epoch.acked[-1].log_start)
            driver.log.forget(names)
            for name in driver.rng.sample(names, len(names)):
                with suppress(StorageError):
                    driver.store.delete([name])

    def check(self) -> None:
        self.make_log(self.open_store(), PREFIX, ManualClock()).read()
        self.epochs.sort(key=lambda epoch: epoch.number)
        assert all(one.number < other.number for one, other in pairwise(self.epochs) if one.acked)
        for later, epoch in enumerate(self.epochs):
            for following in self.epochs[later + 1 :]:
                needed = [entry for entry in epoch.acked if entry.number >= following.start]
                assert all(entry in following.seen for entry in needed)


@every_form
@pytest.mark.parametrize("group", range(8))
def test_any_order_of_operations_and_removals(make_log: MakeLog, group: int) -> None:
    for seed in range(group * 20, group * 20 + 20):
        machine = Machine(random.Random(seed))

        def open_store(machine: Machine = machine) -> Store:
            store = machine.open_store()
            return store if make_log is not _writes_files else WholeObjects(store)

        simulation = Truncating(make_log, open_store, seed, in_a_row=30)
        with noted(seed):
            simulation.run()
            simulation.check()
