"""The attempts of a query's tasks, and their acks: in time, late, twice, two at a time, or of a former start.

After every ack that is answered, what is complete is compared with what is stored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Final, NoReturn

from statelog.errors import FencedError, StatelogError, StorageError
from statelog.metrics import Step
from statelog.rpc.messages import Ack, Begin, Reply, TaskRequest
from statelog.testing.query import Crash
from tests.model.query_actions import Task
from tests.model.query_driver import Driver
from tests.model.query_engine import DRIVER_STEPS, TASK_STEPS, QueryEngine, TaskPlace
from tests.model.query_graph import Effect, Row, by_key, operator_of
from tests.model.query_journal import Journal
from tests.model.query_oracle import Oracle, Result

_MAX_FAILURES: Final = 4
"""Spark's spark.task.maxFailures."""
_MOST_LATE: Final = 6
_LONGEST_WAIT_S: Final = 0.01
"""How long the write of an entry waits for an ack that comes meanwhile, and that has to wait for the entry."""


class DriverDied(Exception):
    """The driver dies between two calls."""


class Stalled(Exception):
    """An attempt hangs before its ack, which comes later if at all."""


@dataclass(frozen=True)
class LateAck:
    """An ack as it is sent, or will be."""

    place: TaskPlace
    run: int
    driver: Driver
    ack: Ack
    payload: bytes
    effect: Effect


class Attempts:
    """Runs the attempts of a query's tasks.

    Attributes
    ----------
    is_random : bool
        Whether the processors are not deterministic.
    batch : int
        The batch that runs.
    former : Driver or None
        The driver of the start before, if it was cut off and is still there.
    """

    def __init__(
        self, engine: QueryEngine, oracle: Oracle, random: Random, journal: Journal, *, is_random: bool
    ) -> None:
        self._engine = engine
        self._oracle = oracle
        self._random = random
        self._journal = journal
        self.is_random = is_random
        self.batch = 0
        self.former: Driver | None = None
        self._late: list[LateAck] = []
        self._own: set[str] = set()
        """The operators that have begun a batch in the present start."""
        self._rosters: dict[int, set[frozenset[str]]] = {}
        """The operators with which a batch has been tried."""

    def begin_start(self) -> None:
        """A start of the query has begun: no operator has begun a batch in it."""
        self._own.clear()

    def begin_batch(self, batch: int) -> None:
        """A batch is tried, for the first time or again."""
        self.batch = batch
        self._rosters.setdefault(batch, set()).add(frozenset(self._engine.graph.uids))

    # ---- Tasks ----

    def run_task(self, task: Task, part: list[Row], *, is_calm: bool) -> list[Row]:
        """Run attempts of a subtask until one has ended; return its output."""
        failures = 0
        while True:
            try:
                if is_calm:
                    return self._run_attempt(self._next_place(task), self._as_processed(part), self._send)
                return self._run_somehow(task, part)
            except Stalled:
                if self._random.random() < 0.3:
                    self._send_late(self._late.pop(), is_made_good=True)
            except Crash as crash:
                if crash.step in DRIVER_STEPS or self._random.random() < 0.1:
                    raise DriverDied from crash
                self._journal.counts["deaths of tasks"] += 1
            except StorageError as error:
                failures += 1
                self._journal.note(f"  an attempt of {task} fails: {error}")
                if failures == _MAX_FAILURES:
                    raise

    def _run_somehow(self, task: Task, part: list[Row]) -> list[Row]:
        """Run an attempt of a subtask to whose ack something may happen."""
        place, rows, draw = self._next_place(task), self._as_processed(part), self._random.random()
        if draw < 0.06:
            self._stall(place, rows)
        if draw < 0.1:
            # A speculative attempt has the higher number, and hangs.
            with suppress(Stalled):
                self._stall(self._next_place(task), self._as_processed(part))
        sends = [(0.16, self._send_with_another), (0.2, self._send_and_lose_reply), (0.24, self._send_twice)]
        send = next((one for limit, one in sends if 0.1 <= draw < limit), self._send)
        return self._run_attempt(place, rows, send)

    def _next_place(self, task: Task) -> TaskPlace:
        return TaskPlace(task[0], self.batch, task[1], self._engine.new_attempt())

    def _as_processed(self, part: list[Row]) -> list[Row]:
        """The rows, or in a query that is not deterministic others in each attempt."""
        salt = self._random.choice([0, 0, 1, 2]) if self.is_random else 0
        return [(key, number + salt) for key, number in part]

    def _stall(self, place: TaskPlace, rows: list[Row]) -> NoReturn:
        """An attempt comes up to its ack and hangs."""

        def keep(late: LateAck) -> Reply:
            del self._late[: 1 - _MOST_LATE]
            self._late.append(late)
            self._journal.note(f"  {place} hangs")
            raise Stalled

        self._run_attempt(place, rows, keep)
        raise AssertionError("a task ends without an ack")

    def _run_attempt(self, place: TaskPlace, rows: list[Row], send: Callable[[LateAck], Reply]) -> list[Row]:
        driver, run = self._engine.driver, self._engine.runs
        assert driver is not None
        effects: list[Effect] = []

        def call(request: TaskRequest, payload: bytes) -> Reply:
            if isinstance(request, Ack):
                return send(LateAck(place, run, driver, request, payload, effects[0]))
            reply = driver.handle(request, payload)
            if isinstance(request, Begin):
                self._begin(place)
                effects.append(operator_of(place.uid).effect(self._oracle.before(place.batch, place.uid), rows))
            return reply

        output = self._engine.run_task(place, rows, call)
        found, expected = by_key(output), by_key(effects[0].output)
        self._journal.require(found == expected, f"{place} returned {found}, not {expected}")
        return output

    def _begin(self, place: TaskPlace) -> None:
        """A task has begun a batch: the one before is certain, and was complete."""
        self._own.add(place.uid)
        before = place.batch - 1
        for uid in self._engine.graph.uids if Driver.is_atomic else [place.uid]:
            missing = self._oracle.missing(before, uid)
            self._journal.require(
                not missing, f"{place} begins, and subtasks {missing} of {uid} have not done {before}"
            )
            self._oracle.settle(before, uid)

    # ---- Acks ----

    def _send(self, late: LateAck) -> Reply:
        """Send an ack; afterwards what is complete is durable."""
        place, result = late.place, self._register(late)
        try:
            reply = late.driver.handle(late.ack, late.payload)
        except Crash as crash:
            if crash.step is Step.LAST_ACK:
                self._oracle.take_back(place.batch, place.uid, place.subtask, place.attempt)
            raise
        except FencedError:
            self._oracle.take_back(place.batch, place.uid, place.subtask, place.attempt)
            raise
        result.is_accepted = True
        self._require_durable(place.batch, place.uid)
        return reply

    def _register(self, late: LateAck) -> Result:
        """An ack is on its way, for the first time or again."""
        place, result = late.place, Result(late.effect.changes, late.ack.checksums)
        return self._oracle.send(place.batch, place.uid, place.subtask, place.attempt, result)

    def _send_twice(self, late: LateAck) -> Reply:
        """The answer is lost, and the client asks again."""
        self._journal.counts["acks sent twice"] += 1
        self._send(late)
        return self._send(late)

    def _send_and_lose_reply(self, late: LateAck) -> Reply:
        """The answer is lost, and the attempt fails."""
        self._journal.counts["lost answers"] += 1
        self._send(late)
        raise StorageError("The driver's answer is lost.")

    def _send_with_another(self, late: LateAck) -> Reply:
        """While the ack's entry is written, another ack comes in another thread: a late one, or the same again."""
        self._register(late)
        usable = [one for one in self._late if one.run == late.run and self._is_open(one)]
        other = self._random.choice([late, *usable, *usable])
        errors: list[BaseException] = []

        def send_other() -> None:
            try:
                self._send(other)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=send_other)

        def meanwhile() -> None:
            thread.start()
            thread.join(_LONGEST_WAIT_S)

        self._engine.next_append.cancel()
        self._engine.crash_point.arm(None)
        self._engine.next_append.meanwhile = meanwhile
        self._engine.next_append.fails = self._random.choice(["", "", "before", "after"])
        try:
            return self._send(late)
        finally:
            self._engine.next_append.cancel()
            if thread.ident is not None:
                thread.join()
                self._journal.note(f"  {other.place} acks during {late.place}")
                self._journal.counts["acks at a time"] += 1
                if other is not late:
                    self._late.remove(other)
            for error in errors:
                raise error

    def _is_open(self, late: LateAck) -> bool:
        """Whether an ack of an attempt of the present start can still count."""
        place = late.place
        return (
            self._can_send(late) and place.batch == self.batch and not self._oracle.is_settled(place.batch, place.uid)
        )

    def _can_send(self, late: LateAck) -> bool:
        place = late.place
        is_passed = self._oracle.is_passed_by_equal(place.batch, place.uid, place.subtask, place.attempt)
        return Driver.notes_equal_attempts or not is_passed

    def something_happens(self) -> None:
        """Between two tasks."""
        draw = self._random.random()
        if draw < 0.12:
            self.send_late_acks()
        elif draw < 0.14:
            self._engine.crash_point.arm(self._random.choice([*DRIVER_STEPS, *TASK_STEPS]))
        elif draw < 0.18:
            self._engine.next_append.fails = self._random.choice(["before", "after"])
            self._journal.counts["failed writes"] += 1
        elif draw < 0.21:
            self._begin_late()
        elif draw < 0.22:
            raise DriverDied

    def _begin_late(self) -> None:
        """An attempt of the batch before begins only now."""
        uid, batch = self._random.choice(self._engine.graph.uids), self.batch - 1
        if batch < 0 or uid not in self._own or not self._oracle.is_settled(batch, uid):
            return
        place = TaskPlace(uid, batch, self._random.randrange(self._engine.parallelism[uid]), self._engine.new_attempt())
        driver = self._engine.driver
        assert driver is not None
        with suppress(FencedError):
            self._engine.run_task(place, [], driver.handle)
            self._journal.require(False, f"{place} begins, and its batch is over")
        self._journal.counts["refused attempts"] += 1

    def send_late_acks(self) -> None:
        """Attempts that had hung send their acks after all."""
        self._random.shuffle(self._late)
        for _ in range(min(len(self._late), self._random.randint(1, 2))):
            self._send_late(self._late.pop())

    def _send_late(self, late: LateAck, *, is_made_good: bool = False) -> None:
        """Send an ack that comes late; if the write fails it is sent again, unless a later attempt makes that good."""
        place = late.place
        self._journal.note(f"  {place} of run {late.run} acks late")
        if late.run != self._engine.runs:
            self._send_to_other_run(late)
            return
        if not self._can_send(late):
            return
        is_over = self._oracle.is_settled(place.batch, place.uid)
        for _ in range(1 if is_made_good else 3):
            try:
                self._send(late)
            except StorageError:
                continue
            except FencedError:
                self._journal.require(is_over, f"{place} is refused, and its batch is not over")
                self._journal.counts["refused acks"] += 1
                return
            break
        self._journal.require(not is_over, f"{place} is accepted, and its batch is over")
        self._journal.counts["late acks"] += 1

    def _send_to_other_run(self, late: LateAck) -> None:
        """An attempt of a former start calls the present driver, or its own, which may still be there."""
        before, place = self._engine.checkpoints(), late.place
        is_own = late.driver is self.former
        driver = self.former if is_own else self._engine.driver
        # Until the present start has claimed the log the former one may still write to it.
        has_claimed = bool(self._own) if Driver.is_atomic else place.uid in self._own
        if driver is None or (is_own and not has_claimed):
            return
        try:
            driver.handle(late.ack, late.payload)
        except (StatelogError, Crash):
            self._journal.counts["refused acks"] += 1
        else:
            self._journal.require(is_own, f"{place} of run {late.run} is accepted by a later start")
        self._journal.require(self._engine.checkpoints() == before, f"{place} of run {late.run} changes a checkpoint")

    # ---- Requirements ----

    def _require_durable(self, batch: int, uid: str) -> None:
        """After an ack: if it has found its batch complete, the checkpoint is stored."""
        uids = self._engine.graph.uids if Driver.is_atomic else [uid]
        if Driver.is_atomic and (results := self._engine.checkpoints().get(batch)) is not None:
            rosters = self._rosters[batch]
            self._journal.require(
                frozenset(results) in rosters, f"checkpoint {batch} has {set(results)}, not one of {rosters}"
            )
        if self._oracle.is_complete(batch, uids):
            # An ack in another thread may be stored, and its answer come, after the log was read here.
            before = {one: self._oracle.possible(batch, one) for one in uids}
            stored = self._engine.checkpoints(uids).get(batch, {})
            for one in uids:
                self.require_stored(stored.get(one), one, batch, before[one])

    def require_stored(
        self,
        found: Sequence[list[bytes]] | None,
        uid: str,
        batch: int,
        before: Sequence[list[list[bytes]]] | None = None,
    ) -> None:
        """Require that the results which are stored count, or counted before the log was read."""
        self._journal.require(found is not None, f"batch {batch} of {uid} is complete, and not stored")
        assert found is not None
        now = self._oracle.possible(batch, uid)
        for subtask, (checksums, *possible) in enumerate(zip(found, before or now, now, strict=True)):
            self._journal.require(
                checksums in possible[0] + possible[1],
                f"batch {batch} of {uid}: another result of subtask {subtask} counts",
            )
