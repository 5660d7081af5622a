"""The coordinator of a query of several operators: one entry for all, and which calls wait for it.

Nothing is processed here: tests begin and ack for the subtasks.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
from msgspec.structs import replace

from statelog import (
    CheckpointMetrics,
    ConfigurationError,
    CorruptionError,
    ErrorKind,
    FencedError,
    Observer,
    Options,
    ProcessorError,
    ProtocolError,
    StateMissingError,
    Step,
    StorageError,
    Tuning,
)
from statelog.coordinator.admission import OperatorConfig
from statelog.coordinator.batch import BatchTime
from statelog.coordinator.coordinator import Coordinator
from statelog.history.footprint import Footprint
from statelog.history.pins import Consumer, Pin, pin_name, write_pin
from statelog.history.query_history import QueryHistory, read_history
from statelog.local.policy import MERGE_POLICY, MergePolicy
from statelog.log.entry import Claim, QueryCheckpoint
from statelog.log.open import open_log
from statelog.log.references import Level, StoredRun
from statelog.metrics import Measurements, Metric, meanings
from statelog.rpc.messages import (
    Acked,
    Begin,
    Begun,
    CheckOwner,
    Fetch,
    Kept,
    ReadProgress,
    Reply,
    TaskId,
    TaskRequest,
)
from statelog.runs import digests
from statelog.runs.key_groups import hash_range
from statelog.storage import LocalStore, Store
from statelog.storage.store import StoreWrapper
from statelog.testing.faults import Call, Fault, FaultPlan, FaultStore
from statelog.testing.query import ManualClock
from tests.acks import make_ack
from tests.stores import WholeObjects

_T = TypeVar("_T")

LONG_S: Final = 20.0
"""For what must happen."""
SHORT_S: Final = 0.05
"""For what must not."""
CHAIN: Final = ("a", "b")
FIVE: Final = ("a", "b", "c", "d", "e")
WHOLE = hash_range(0, 1)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes the machine, and syncing would take most of the time."""
    for target in ("os.fsync", "statelog.storage.local.sync_data"):
        monkeypatch.setattr(target, lambda fd: None)


class Gate(StoreWrapper):
    """A store whose appends wait while it is shut."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.appends = 0
        self._arrived = threading.Semaphore(0)
        self._is_open = threading.Event()
        self._is_open.set()

    def append(self, name: str, parts: list[bytes | memoryview], *, at: int) -> None:
        self.appends += 1
        self._arrived.release()
        assert self._is_open.wait(LONG_S)
        super().append(name, parts, at=at)

    def shut(self) -> None:
        while self._arrived.acquire(blocking=False):
            pass  # those that have passed
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()

    def wait_for_one(self) -> None:
        """Return once an append waits at the gate."""
        assert self._arrived.acquire(timeout=LONG_S)


class Told(Observer):
    """What the coordinator tells of one operator, or of several; each step takes a second."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.steps: list[tuple[Step, int]] = []
        self.metrics: list[CheckpointMetrics] = []

    def step(self, step: Step, batch: int, subtask: int) -> None:
        self.steps.append((step, batch))
        self._clock.advance(1)

    def checkpoint(self, metrics: CheckpointMetrics) -> None:
        self.metrics.append(metrics)


class Query:
    """The starts of a query, one after the other; batch n takes place at 1000 + n ms.

    All operators are keyed, and have `parallelism` subtasks.
    """

    def __init__(self, directory: Path, uids: Sequence[str], parallelism: int = 1) -> None:
        self.directory = directory
        self.uids = list(uids)
        self.parallelism = parallelism
        self.gate = Gate(LocalStore(directory))
        self.store: Store = self.gate
        self.clock = ManualClock(10**10)
        self.told = Told(self.clock)
        self.options = Options(
            observer=self.told, tuning=Tuning(materialization=False, orphan_min_age_s=0, log_min_age_s=0)
        )
        self.own: dict[str, dict[str, Any]] = {}
        """Values of the operators' configurations."""
        self.number = 0
        self.measurements = Measurements()
        self._attempts = itertools.count(1)
        self._tokens = itertools.count(1)
        self._begun: dict[tuple[str, int], int] = {}

    def start(
        self,
        first_batch: int,
        *,
        policy: MergePolicy = MERGE_POLICY,
        keeps: Callable[[QueryHistory], bool] | None = None,
    ) -> None:
        self.number += 1
        self.coordinator = Coordinator(
            [self.config(uid) for uid in self.uids],
            store=self.store,
            location=str(self.directory),
            log=open_log(self.store, self.options, self.clock),
            options=self.options,
            clock=self.clock,
            new_token=lambda: next(self._tokens).to_bytes(16),
            batch_time=lambda batch: BatchTime(1000 + batch, 0),
            measurements=self.measurements,
            deletes_in_background=False,
            slots=10,
            merge_policy=policy,
        )
        self.coordinator.open(first_batch, keeps=keeps)

    def config(self, uid: str) -> OperatorConfig:
        made = OperatorConfig(
            "query", f"run-{self.number}", uid, self.parallelism, b"keys", [], options=self.options, instance=uid
        )
        return dataclasses.replace(made, **self.own.get(uid, {}))

    # ---- Calls ----

    def task(self, uid: str, batch: int, subtask: int = 0, attempt: int | None = None) -> TaskId:
        """The attempt that has begun last, or another one."""
        number = self._begun.get((uid, subtask), 0) if attempt is None else attempt
        return TaskId("query", f"run-{self.number}", uid, uid, batch, subtask, number)

    def begin(self, uid: str, batch: int, subtask: int = 0, attempt: int | None = None) -> Begun:
        """Begin in the next attempt, or in another one."""
        self._begun[uid, subtask] = next(self._attempts) if attempt is None else attempt
        reply = self.call(Begin(self.task(uid, batch, subtask), subtask, 0, None, f"of {subtask}"))
        assert isinstance(reply, Begun)
        return reply

    def call(self, request: TaskRequest, payload: bytes = b"") -> Reply:
        return self.coordinator.handle(request, payload)

    def ack(self, uid: str, batch: int, data: bytes = b"data", subtask: int = 0, **more: Any) -> Acked:
        """The ack of the attempt that has begun last."""
        task = more.pop("task", self.task(uid, batch, subtask))
        behind = more.pop("behind", b"")
        reply = self.call(make_ack(task, digests.checksum(data), len(data), 1, **more), data + behind)
        assert isinstance(reply, Acked)
        return reply

    def run(self, uid: str, batch: int, data: bytes = b"data") -> Acked:
        """Run all subtasks of an operator."""
        for subtask in range(self.parallelism):
            self.begin(uid, batch, subtask)
            reply = self.ack(uid, batch, data, subtask)
        return reply

    def batch(self, batch: int, data: bytes = b"data") -> None:
        for uid in self.uids:
            self.run(uid, batch, data)

    # ---- What is stored ----

    @property
    def entries(self) -> list[QueryCheckpoint]:
        read = open_log(LocalStore(self.directory), self.options, self.clock).read()
        return [entry for entry in read if isinstance(entry, QueryCheckpoint)]

    def results(self) -> list[dict[str, list[bytes]]]:
        """The stored changes of each entry, by operator and subtask."""
        return [
            {
                section.uid: [
                    LocalStore(self.directory).read(one.name, offset=one.offset, length=one.length)
                    for one in section.segments
                ]
                for section in entry.sections
            }
            for entry in self.entries
        ]

    def names(self, folder: str) -> list[str]:
        return [info.name for info in LocalStore(self.directory).list(folder)]


@pytest.fixture
def chain(tmp_path: Path) -> Query:
    """A query of two operators with two subtasks each, the second behind the first."""
    made = Query(tmp_path, CHAIN, parallelism=2)
    made.own["b"] = {"in_front": frozenset("a")}
    return made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(20) as made:
        yield made


def waits(*calls: Future[Any]) -> bool:
    """Whether none of some calls returns."""
    return not wait(calls, SHORT_S, "FIRST_COMPLETED").done


def answered(pool: ThreadPoolExecutor, call: Callable[[], _T]) -> _T:
    """The answer to a call that must not wait for anything."""
    return pool.submit(call).result(LONG_S)


@contextmanager
def hanging(query: Query, pool: ThreadPoolExecutor, call: Callable[[], _T]) -> Iterator[Future[_T]]:
    """Make a call whose append hangs during the block."""
    query.gate.shut()
    try:
        made = pool.submit(call)
        query.gate.wait_for_one()
        yield made
    finally:
        query.gate.open()


# ---- One entry for all ----


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("uids", [CHAIN, FIVE], ids=len)
def test_an_entry_is_written_when_the_last_subtask_of_the_last_operator_has_acked(
    tmp_path: Path, uids: Sequence[str], parallelism: int
) -> None:
    """In whatever order they do."""
    query = Query(tmp_path, uids, parallelism)
    query.start(0)
    subtasks = list(itertools.product(uids, range(parallelism)))
    for batch, seed in enumerate(range(5)):
        order = random.Random(seed).sample(subtasks, len(subtasks))
        for uid, subtask in order:
            assert len(query.entries) == batch
            query.begin(uid, batch, subtask)
            query.ack(uid, batch, f"{uid} {subtask}".encode(), subtask)
        assert query.results()[-1] == {
            uid: [f"{uid} {subtask}".encode() for subtask in range(parallelism)] for uid in uids
        }
    assert query.gate.appends == 5
    assert [[section.uid for section in entry.sections] for entry in query.entries] == [list(uids)] * 5
    first, second, *_ = query.entries
    assert (first.id, first.follows, second.follows) == (first.token, b"", first.id)
    assert [section.begins for section in first.sections + second.sections] == [True] * len(uids) + [False] * len(uids)


def test_the_roster_may_be_in_any_order(tmp_path: Path) -> None:
    query = Query(tmp_path, FIVE[::-1])
    query.start(0)
    query.batch(0)
    assert [section.uid for section in query.entries[0].sections] == list(FIVE)


def test_every_operator_has_state_of_its_own(chain: Query) -> None:
    chain.start(0)
    chain.batch(0)
    begun = [chain.begin(uid, 1) for uid in CHAIN]
    assert len({one.view.identity for one in begun}) == 2
    assert len({one.view.genesis for one in begun}) == 2
    assert len({one.view.head for one in begun}) == 2
    folders = [one.permit.upload_prefix for one in begun]
    assert folders == [f"{one.view.identity}/changes/1/0" for one in begun]
    parts = [chain.coordinator.fetch(Fetch(chain.task(uid, 1), [])).missing.segments for uid in CHAIN]
    own = [[section.segments[0]] for section in chain.entries[0].sections]
    assert [[part.segment for part in one] for one in parts] == own


def test_a_checkpoint_is_that_of_all_operators_or_of_none(chain: Query, pool: ThreadPoolExecutor) -> None:
    chain.start(0)
    chain.run("a", 0)
    with pytest.raises(StateMissingError):
        chain.coordinator.durable_checkpoint("a", 0)
    with pytest.raises(StateMissingError):
        chain.coordinator.require_committed(0)
    chain.run("b", 0)
    assert [chain.coordinator.durable_checkpoint(uid, 0).identity for uid in CHAIN] == [
        section.identity for section in chain.entries[0].sections
    ]
    chain.coordinator.require_committed(0)


# ---- Who waits ----


@pytest.mark.parametrize("uids", [CHAIN, FIVE], ids=len)
def test_no_task_of_an_earlier_operator_waits(tmp_path: Path, uids: Sequence[str], pool: ThreadPoolExecutor) -> None:
    """Neither for the entry nor for another task: a stage would never end, since the next one needs its output."""
    query = Query(tmp_path, uids, parallelism=2)
    query.start(0)
    query.gate.shut()
    try:
        for uid, subtask in list(itertools.product(uids, range(2)))[:-1]:
            answered(pool, partial(query.begin, uid, 0, subtask))
            answered(pool, partial(query.ack, uid, 0, b"x", subtask))
        assert query.gate.appends == 0
    finally:
        query.gate.open()


def test_an_equal_ack_waits_for_the_append_in_flight_and_makes_none(chain: Query, pool: ThreadPoolExecutor) -> None:
    """A copy of a task that Spark no longer waits for has completed the batch; Spark's own attempt comes now."""
    chain.start(0)
    chain.run("a", 0)
    for subtask in range(2):
        chain.begin("b", 0, subtask)
    chain.ack("b", 0, subtask=0)
    with hanging(chain, pool, lambda: chain.ack("b", 0, subtask=1)) as first:
        chain.begin("b", 0, 1)
        second = pool.submit(lambda: chain.ack("b", 0, subtask=1))
        chain.begin("a", 0, 0)
        third = pool.submit(lambda: chain.ack("a", 0, subtask=0))
        assert waits(first, second, third)
        assert chain.entries == []
    for call in (first, second, third):
        call.result(LONG_S)
    assert (chain.gate.appends, len(chain.entries)) == (1, 1)


def test_a_revising_ack_waits_for_its_own_revision(chain: Query, pool: ThreadPoolExecutor) -> None:
    chain.start(0)
    chain.batch(0)
    chain.begin("a", 0, 1)
    with hanging(chain, pool, lambda: chain.ack("a", 0, b"other", subtask=1)) as revising:
        assert waits(revising)
        assert len(chain.entries) == 1
    revising.result(LONG_S)
    first, second = chain.entries
    assert (first.revision, second.revision, second.id, second.follows) == (0, 1, first.id, b"")
    assert chain.results()[-1] == {"a": [b"data", b"other"], "b": [b"data", b"data"]}


def test_a_result_that_comes_during_an_append_makes_the_next_one(chain: Query, pool: ThreadPoolExecutor) -> None:
    """One for all that have come by then, whose acks all wait for it."""
    chain.start(0)
    chain.run("a", 0)
    for subtask in range(2):
        chain.begin("b", 0, subtask)
    chain.ack("b", 0, subtask=0)
    with hanging(chain, pool, lambda: chain.ack("b", 0, subtask=1)) as completing:
        revising = []
        for uid, subtask in itertools.product(CHAIN, range(2)):
            chain.begin(uid, 0, subtask)
            task, data = chain.task(uid, 0, subtask), f"{uid} {subtask}".encode()
            revising.append(pool.submit(chain.ack, uid, 0, data, subtask, task=task))
        assert waits(completing, *revising)
    for call in (completing, *revising):
        call.result(LONG_S)
    assert chain.results() == [
        {"a": [b"data"] * 2, "b": [b"data"] * 2},
        {"a": [b"a 0", b"a 1"], "b": [b"b 0", b"b 1"]},
    ]
    assert chain.gate.appends == 2


def test_an_ack_that_returns_is_durable_whoever_has_written_it(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """Two attempts of every subtask of five operators, all at once."""
    for seed in range(10):
        query = Query(tmp_path / str(seed), FIVE, parallelism=2)
        rng = random.Random(seed)
        query.start(0)
        attempts = [(uid, subtask, number) for number in range(2) for uid in FIVE for subtask in range(2)]
        tasks: dict[tuple[str, int, int], TaskId] = {}
        for uid, subtask, number in attempts:
            query.begin(uid, 0, subtask)
            tasks[uid, subtask, number] = query.task(uid, 0, subtask)
        acked: list[tuple[str, int]] = []

        def send(
            one: tuple[str, int, int],
            query: Query = query,
            tasks: dict[tuple[str, int, int], TaskId] = tasks,
            acked: list[tuple[str, int]] = acked,
        ) -> None:
            uid, subtask, number = one
            data = f"{uid} {subtask}, {'same' if subtask else number}".encode()
            query.ack(uid, 0, data, subtask, task=tasks[one])
            is_complete, entries = len({*acked, (uid, subtask)}) == 10, query.entries
            acked.append((uid, subtask))
            if entries:
                [segment] = [section.segments[subtask] for section in entries[-1].sections if section.uid == uid]
                is_own = segment.checksum == digests.checksum(data)
                assert is_own or segment.attempt > tasks[one].attempt
            else:
                assert not is_complete, "all subtasks have returned"

        for call in [pool.submit(send, one) for one in rng.sample(attempts, len(attempts))]:
            call.result(LONG_S)
        last = query.results()[-1]
        assert last == {uid: [f"{uid} 0, 1".encode(), f"{uid} 1, same".encode()] for uid in FIVE}
        assert [entry.revision for entry in query.entries] == list(range(len(query.entries)))


def test_whoever_asks_is_answered_while_an_append_hangs(chain: Query, pool: ThreadPoolExecutor) -> None:
    chain.start(0)
    chain.batch(0)
    chain.run("a", 1)
    chain.begin("b", 1, 0)
    chain.begin("b", 1, 1)
    chain.ack("b", 1, subtask=0)
    with hanging(chain, pool, lambda: chain.ack("b", 1, subtask=1)) as completing:
        begun = answered(pool, lambda: chain.begin("a", 1, 1))
        assert begun.permit.epoch == 1
        task = chain.task("a", 1, 1)
        fetched = answered(pool, lambda: chain.coordinator.fetch(Fetch(task, [])))
        assert len(fetched.missing.segments) == 1
        assert answered(pool, lambda: chain.call(ReadProgress(task, 1, 2))) == Acked()
        refused: list[tuple[type[Exception], Callable[[], object]]] = [
            (FencedError, lambda: chain.ack("a", 1, task=replace(task, attempt=99))),
            (FencedError, lambda: chain.begin("a", 0)),
            (CorruptionError, lambda: chain.call(make_ack(task, b"sum", 4, 1), b"data")),
            (ProtocolError, lambda: chain.call(make_ack(task, b"sum", is_unchanged=True))),
        ]
        for error, call in refused:
            with pytest.raises(error):
                answered(pool, call)
        assert chain.coordinator.history.latest is not None
        assert chain.coordinator.history.latest.batch == 0
        assert waits(completing)
    completing.result(LONG_S)


def test_a_result_counts_as_soon_as_it_has_come(chain: Query, pool: ThreadPoolExecutor) -> None:
    """Also while an append hangs: an earlier attempt's does not count any more."""
    chain.start(0)
    chain.batch(0)
    tasks = []
    for _ in range(3):
        chain.begin("a", 0, 0)
        tasks.append(chain.task("a", 0, 0))
    with hanging(chain, pool, lambda: chain.ack("a", 0, b"first", task=tasks[0])):
        later = pool.submit(chain.ack, "a", 0, b"third", task=tasks[2])
        assert waits(later)
        earlier = pool.submit(chain.ack, "a", 0, b"second", task=tasks[1])
        assert waits(earlier), "what counts instead is not durable yet"
    later.result(LONG_S)
    earlier.result(LONG_S)
    assert [one["a"][0] for one in chain.results()] == [b"data", b"first", b"third"]


def test_the_next_batch_waits_for_an_append_in_flight(chain: Query, pool: ThreadPoolExecutor) -> None:
    """Whatever counts of the batch before has to be durable."""
    chain.start(0)
    chain.batch(0)
    chain.begin("b", 0, 1)
    with hanging(chain, pool, lambda: chain.ack("b", 0, b"other", subtask=1)) as revising:
        begin = pool.submit(chain.begin, "a", 1)
        assert waits(begin, revising)
    expected = digests.extend(begin.result(LONG_S).view.genesis, 0, [digests.checksum(b"data")])
    assert begin.result().view.head == expected
    revising.result(LONG_S)
    assert chain.results()[-1]["b"] == [b"data", b"other"]
    assert chain.gate.appends == 2


def test_a_run_ends_after_the_append_in_flight(chain: Query, pool: ThreadPoolExecutor) -> None:
    chain.start(0)
    chain.batch(0)
    chain.begin("b", 0, 1)
    with hanging(chain, pool, lambda: chain.ack("b", 0, b"other", subtask=1)) as revising:
        closing = pool.submit(chain.coordinator.close)
        assert waits(closing)
    closing.result(LONG_S)
    revising.result(LONG_S)
    assert len(chain.entries) == 2
    with pytest.raises(FencedError, match="is over"):
        chain.begin("a", 1)


# ---- Appends that fail ----


def fail_to_append(chain: Query, when: Any) -> None:
    """Complete batch 0, whose entry cannot be written."""
    chain.store = FaultStore(chain.gate, FaultPlan.at("append", when=when))
    chain.start(0)
    chain.run("a", 0)
    chain.begin("b", 0, 0)
    chain.ack("b", 0, subtask=0)
    chain.begin("b", 0, 1)
    with pytest.raises(StorageError):
        chain.ack("b", 0, subtask=1)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failed_append_is_made_by_the_next_ack(chain: Query, when: Any) -> None:
    """The entry may be in the log already; then there are two, and the second counts."""
    fail_to_append(chain, when)
    with pytest.raises(StateMissingError):
        chain.coordinator.require_committed(0)
    chain.begin("a", 0, 0)
    chain.ack("a", 0, subtask=0)
    chain.coordinator.require_committed(0)
    latest = read_history(LocalStore(chain.directory)).latest
    assert latest is not None
    assert chain.coordinator.durable_checkpoint("b", 0).token == latest.token
    chain.batch(1)
    assert [entry.batch for entry in read_history(LocalStore(chain.directory)).entries] == [0, 1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failed_append_is_made_by_the_next_batch(chain: Query, when: Any) -> None:
    """If an action has ignored the error, and Spark has committed the batch."""
    fail_to_append(chain, when)
    with pytest.raises(StateMissingError, match="the entry could not be written to the log") as caught:
        chain.coordinator.require_committed(0)
    assert caught.value.kind is ErrorKind.CHECKPOINT_INCOMPLETE
    chain.batch(1)
    assert [entry.batch for entry in read_history(LocalStore(chain.directory)).entries] == [0, 1]


def test_an_append_that_fails_fails_no_ack_but_its_own(chain: Query, pool: ThreadPoolExecutor) -> None:
    """Those that wait for it make the next."""
    chain.store = FaultStore(chain.gate, FaultPlan.at("append", call=2, when="after"))
    chain.start(0)
    chain.batch(0)
    chain.begin("a", 0, 0)
    with hanging(chain, pool, lambda: chain.ack("a", 0, b"other")) as failing:
        chain.begin("a", 0, 0)
        waiting = pool.submit(chain.ack, "a", 0, b"other")
        assert waits(waiting, failing)
    with pytest.raises(StorageError):
        failing.result(LONG_S)
    waiting.result(LONG_S)
    assert chain.results()[-1]["a"] == [b"other", b"data"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_next_batch_settles_what_is_in_doubt_of_the_one_before(chain: Query, when: Any) -> None:
    """Its first task does; and nobody has waited for the copy of a task whose ack failed."""
    chain.store = FaultStore(chain.gate, FaultPlan.at("append", call=2, when=when))
    chain.start(0)
    chain.batch(0)
    chain.begin("b", 0, 1)
    with pytest.raises(StorageError):
        chain.ack("b", 0, b"other", subtask=1)
    begun = chain.begin("b", 1, 1)
    assert chain.results()[-1]["b"] == [b"data", b"other"]
    assert begun.view.head == digests.extend(begun.view.genesis, 0, [digests.checksum(b"other")])
    latest = chain.coordinator.history.latest
    assert latest is not None
    assert (latest.batch, latest.revision, latest.token) == (0, 1, chain.entries[-1].token)


def test_the_next_batch_does_not_begin_while_the_log_cannot_be_written(chain: Query) -> None:
    class Failing(FaultPlan):
        def fault(self, call: Call) -> Fault | None:
            return Fault() if is_failing and call.operation in ("append", "put_if_absent") else None

    is_failing = False
    chain.store = FaultStore(chain.gate, Failing())
    chain.start(0)
    chain.batch(0)
    chain.begin("b", 0, 1)
    is_failing = True
    with pytest.raises(StorageError):
        chain.ack("b", 0, b"other", subtask=1)
    for _ in range(2):
        with pytest.raises(StorageError):
            chain.begin("a", 1)
    is_failing = False
    chain.batch(1)
    assert [(entry.batch, entry.revision) for entry in chain.entries][-2:] == [(0, 1), (1, 0)]
    assert chain.results()[-2]["b"] == [b"data", b"other"]


def test_a_newer_start_stops_all_operators(chain: Query) -> None:
    chain.start(0)
    chain.batch(0)
    for uid, subtask in itertools.product(CHAIN, range(2)):
        chain.begin(uid, 1, subtask)
    older, number = chain.coordinator, chain.number
    chain.start(1)
    chain.coordinator, newer, chain.number = older, chain.coordinator, number
    for uid, subtask in (("a", 0), ("a", 1), ("b", 0)):
        chain.ack(uid, 1, subtask=subtask)
    for _ in range(2):
        with pytest.raises(FencedError, match="does not own the log"):
            chain.ack("b", 1, subtask=1)
    with pytest.raises(FencedError, match="does not own the log"):
        chain.begin("a", 1)
    chain.coordinator, chain.number = newer, number + 1
    chain.batch(1, b"newer")
    assert chain.results()[-1] == {uid: [b"newer"] * 2 for uid in CHAIN}


# ---- What is refused ----


def test_two_operators_of_one_uid_are_refused(tmp_path: Path) -> None:
    query = Query(tmp_path, ["a", "b", "a"])
    with pytest.raises(ConfigurationError, match="two stateful operators named 'a'") as caught:
        query.start(0)
    assert caught.value.kind is ErrorKind.UID_REQUIRED
    assert query.names("") == []


def test_tasks_of_operators_outside_of_the_roster_are_refused(chain: Query) -> None:
    """Of another uid, or of one in another place of the program."""
    chain.start(0)
    chain.begin("a", 0)
    known = chain.task("a", 0)
    for task in (replace(known, uid="c"), replace(known, instance="elsewhere")):
        requests = (
            Begin(task, 0, 0, None, "token"),
            Fetch(task, []),
            ReadProgress(task, 1, 2),
            CheckOwner(task),
            make_ack(task, b"sum"),
        )
        for request in requests:
            with pytest.raises(ConfigurationError, match=f"a task of operator '{task.uid}' ran in query") as caught:
                chain.call(request)
            assert caught.value.kind is ErrorKind.STALE_DATAFRAME
    chain.run("a", 0)
    chain.run("b", 0)
    assert len(chain.entries) == 1


def test_a_task_may_run_a_subtask_of_each_operator(chain: Query) -> None:
    """Attempts are counted by operator. Of one operator a task runs only one subtask."""
    chain.start(0)
    chain.begin("a", 0, 0, attempt=7)
    chain.begin("b", 0, 1, attempt=7)
    with pytest.raises(ConfigurationError, match="subtask 1 of 2 ran as partition 1 of task attempt 7, which had"):
        chain.begin("a", 0, 1, attempt=7)
    with pytest.raises(FencedError, match="operator 'b' .* attempt 7 of subtask 0 has not begun batch 0"):
        chain.ack("b", 0, task=chain.task("b", 0, 0, attempt=7))
    chain.ack("a", 0, b"a 0", 0, task=chain.task("a", 0, 0, attempt=7))
    chain.ack("b", 0, b"b 1", 1, task=chain.task("b", 0, 1, attempt=7))
    chain.begin("a", 0, 1, attempt=8)
    chain.begin("b", 0, 0, attempt=8)
    chain.ack("a", 0, b"a 1", 1, task=chain.task("a", 0, 1, attempt=8))
    chain.ack("b", 0, b"b 0", 0, task=chain.task("b", 0, 0, attempt=8))
    assert chain.results() == [{"a": [b"a 0", b"a 1"], "b": [b"b 0", b"b 1"]}]


def test_an_operator_that_did_not_run_stops_the_next_batch(chain: Query) -> None:
    """Its name and its subtasks are told."""
    chain.start(0)
    chain.batch(0)
    chain.run("a", 1)
    chain.begin("b", 1, 1)
    chain.ack("b", 1, subtask=1)
    with pytest.raises(StateMissingError, match=r"did not run to completion: operator 'b': 0\. The query") as caught:
        chain.begin("a", 2)
    assert caught.value.kind is ErrorKind.CHECKPOINT_INCOMPLETE
    with pytest.raises(StateMissingError, match=r"did not run to completion: operator 'b': 0\."):
        chain.coordinator.require_committed(1)
    chain.begin("b", 1, 0)
    chain.ack("b", 1, subtask=0)
    chain.batch(2)


def test_several_actions_complete_a_batch_together(chain: Query) -> None:
    """A later action runs an operator again, or only some of them."""
    chain.start(0)
    chain.run("a", 0)
    chain.run("a", 0)
    assert chain.entries == []
    chain.run("b", 0)
    chain.run("a", 0, b"in another action")
    assert chain.results() == [
        {"a": [b"data"] * 2, "b": [b"data"] * 2},
        {"a": [b"in another action", b"data"], "b": [b"data"] * 2},
        {"a": [b"in another action"] * 2, "b": [b"data"] * 2},
    ]


# ---- The bytes that come with the acks ----


def test_what_may_come_with_the_acks_is_divided_among_all_operators(chain: Query) -> None:
    chain.options = dataclasses.replace(chain.options, inline_budget_bytes=1000)
    chain.start(0)
    assert [chain.begin("a", 0, subtask).permit.inline_bytes for subtask in range(2)] == [250, 250]
    chain.ack("a", 0, b"x" * 10, subtask=0)
    chain.ack("a", 0, b"x" * 250, subtask=1)
    assert chain.begin("b", 0, 0).permit.inline_bytes == (1000 - 260) // 2
    chain.ack("b", 0, b"", subtask=0)
    assert chain.begin("b", 0, 1).permit.inline_bytes == 1000 - 260
    assert chain.begin("a", 0, 0).permit.inline_bytes == 250, "so that a repetition is cut alike"
    chain.ack("a", 0, b"x" * 250, subtask=0)
    assert chain.begin("b", 0, 0).permit.inline_bytes == 370
    chain.ack("b", 0, b"", subtask=1, task=chain.task("b", 0, 1))
    assert chain.begin("b", 1, 0).permit.inline_bytes == 250, "each batch has a budget of its own"


def test_changes_that_do_not_come_with_the_ack_take_nothing_of_it(chain: Query) -> None:
    chain.options = dataclasses.replace(chain.options, inline_budget_bytes=1000)
    chain.start(0)
    begun = chain.begin("a", 0, 0)
    name = f"{begun.permit.upload_prefix}/0-a.run"
    chain.gate.put(name, b"x" * 5000)
    chain.call(make_ack(chain.task("a", 0), b"sum", 5000, 1, 0, name))
    assert chain.begin("a", 0, 1).permit.inline_bytes == 1000 // 3


# ---- Stored output ----


def write_ahead(tmp_path: Path) -> Query:
    """Two operators in a row, and one that stores the output of the second; one subtask each."""
    query = Query(tmp_path, ["a", "b", "output"])
    query.own = {
        "b": {"in_front": frozenset("a")},
        "output": {"in_front": frozenset("ab"), "stores_output": True, "key_schema": b""},
    }
    return query


def revise(query: Query, uid: str, batch: int = 0) -> None:
    query.begin(uid, batch)
    query.ack(uid, batch, b"another result")


def test_a_result_may_change_until_an_operator_behind_it_has_begun(tmp_path: Path) -> None:
    query = write_ahead(tmp_path)
    query.start(0)
    query.run("a", 0)
    revise(query, "a")
    query.begin("b", 0)
    query.begin("a", 0)
    with pytest.raises(ProcessorError, match="operator 'a' .* gave a different result in batch 0") as caught:
        query.ack("a", 0, b"a third")
    assert caught.value.kind is ErrorKind.RESULT_CHANGED
    query.begin("a", 0)
    query.ack("a", 0, b"another result")
    query.begin("b", 0)
    query.ack("b", 0, b"data")
    revise(query, "b")
    query.begin("output", 0)
    for uid in ("a", "b"):
        query.begin(uid, 0)
        with pytest.raises(ProcessorError, match=f"operator '{uid}'"):
            query.ack(uid, 0, b"too late")
    query.begin("output", 0)
    query.ack("output", 0, b"rows")
    assert query.results() == [{"a": [b"another result"], "b": [b"another result"], "output": [b"rows"]}]


@pytest.mark.parametrize("uid", ["a", "b", "output"])
def test_no_result_changes_once_the_batch_is_durable(tmp_path: Path, uid: str) -> None:
    query = write_ahead(tmp_path)
    query.start(0)
    query.batch(0)
    with pytest.raises(ProcessorError, match=f"operator '{uid}' .* gave a different result"):
        revise(query, uid)
    query.begin(uid, 0)
    query.ack(uid, 0)
    assert len(query.entries) == 1
    query.batch(1)


def test_operators_side_by_side_are_not_behind_each_other(tmp_path: Path) -> None:
    query = Query(tmp_path, ["a", "b", "output"])
    query.own["output"] = {"in_front": frozenset("ab"), "stores_output": True, "key_schema": b""}
    query.start(0)
    query.run("a", 0)
    query.run("b", 0)
    revise(query, "a")
    revise(query, "b")
    query.run("output", 0)
    assert query.results()[-1] == {"a": [b"another result"], "b": [b"another result"], "output": [b"data"]}


def test_without_stored_output_an_operator_behind_keeps_no_result(chain: Query) -> None:
    chain.start(0)
    chain.batch(0)
    chain.begin("a", 0)
    chain.ack("a", 0, b"another result")
    assert chain.entries[-1].revision == 1


def test_a_batch_whose_checkpoint_stays_is_not_run_again(tmp_path: Path) -> None:
    """An operator that the start adds begins with the next batch."""
    query = write_ahead(tmp_path)
    query.start(0)
    query.batch(0)
    seen: list[int] = []

    def keeps(history: QueryHistory) -> bool:
        assert history.latest is not None
        seen.append(history.latest.batch)
        return True

    query.uids.append("new")
    query.start(0, keeps=keeps)
    assert (seen, query.coordinator.kept_batch) == ([0], 0)
    for uid in query.uids:
        assert query.call(Begin(query.task(uid, 0, attempt=1), 0, 0, None, "token")) == Kept()
    query.coordinator.require_committed(0)
    assert query.coordinator.durable_checkpoint("a", 0).token == query.entries[0].token
    query.batch(1)
    first, second = query.entries
    assert [section.uid for section in first.sections] == ["a", "b", "output"]
    assert [(section.uid, section.begins) for section in second.sections] == [
        ("a", False),
        ("b", False),
        ("new", True),
        ("output", False),
    ]


def test_a_batch_whose_checkpoint_does_not_stay_is_run_again(tmp_path: Path) -> None:
    query = write_ahead(tmp_path)
    query.start(0)
    query.batch(0)
    before = {section.uid: section.identity for section in query.entries[0].sections}
    query.start(0, keeps=lambda history: False)
    assert query.coordinator.kept_batch is None
    assert read_history(LocalStore(tmp_path)).latest is None, "nobody reads it any more"
    query.batch(0, b"again")
    assert query.results()[-1] == {uid: [b"again"] for uid in query.uids}
    assert not {section.identity for section in query.entries[-1].sections} & set(before.values()), "they start over"


# ---- What is told ----


def number(reply: Acked, name: str) -> float | None:
    return reply.numbers[list(meanings()).index(name)]


def test_an_operator_that_ends_early_is_told_its_own_numbers_and_the_last_one_those_of_the_entry(
    tmp_path: Path,
) -> None:
    query = Query(tmp_path, FIVE, parallelism=2)
    query.options = dataclasses.replace(query.options, file_merging="within")
    query.start(0)
    query.begin("b", 0, 0)
    query.begin("b", 0, 1)
    assert query.ack("b", 0, b"first", 0).numbers == [], "not all of its subtasks have acked"
    early = query.ack("b", 0, b"second", 1)
    assert [number(early, name) for name in ("changes", "changed_bytes", "commit_s", "objects")] == [2, 11, 0, 0]
    for uid in "aec":
        query.run(uid, 0)
    last = query.run("d", 0, b"12345")
    assert [number(last, name) for name in ("changes", "changed_bytes", "commit_s", "objects")] == [2, 10, 1, 1]
    assert [one.uid for one in query.told.metrics] == list(FIVE)
    told = {one.uid: one for one in query.told.metrics}
    assert (told["b"].changed_bytes, told["b"].commit_s, told["b"].objects) == (11, 0, 0)
    assert (told["d"].changed_bytes, told["d"].commit_s, told["d"].objects) == (10, 1, 1)
    assert query.coordinator.operator("b").metrics.newest is told["b"]


def test_an_operator_whose_result_changes_before_the_entry_is_told_anew(chain: Query) -> None:
    chain.start(0)
    chain.run("a", 0)
    chain.begin("a", 0, 0)
    assert number(chain.ack("a", 0, b"longer than before"), "changed_bytes") == 18 + 4
    chain.run("b", 0)
    assert [(one.uid, one.changed_bytes) for one in chain.told.metrics] == [("a", 22), ("b", 8)]


class Interrupted(ManualClock):
    """Calls a function once, when somebody looks for the second time."""

    def __init__(self, start_s: float) -> None:
        super().__init__(start_s)
        self.calls: list[Callable[[], object]] = []

    def monotonic_s(self) -> float:
        if self.calls:
            self.calls.pop()()
        return super().monotonic_s()


def test_an_operator_whose_numbers_are_not_counted_yet_when_the_entry_is_written_has_its_own(chain: Query) -> None:
    """Its last ack has come just before that of the operator that completes the batch."""
    clock = Interrupted(10**10)
    chain.clock, chain.options = clock, dataclasses.replace(chain.options, observer=Told(clock), file_merging="within")
    told = chain.options.observer
    assert isinstance(told, Told)
    chain.start(0)
    chain.measurements.count(Metric.STATE_FETCHES)
    chain.begin("a", 0, 0)
    chain.ack("a", 0, subtask=0)
    chain.begin("a", 0, 1)
    clock.calls = [lambda: chain.run("b", 0), lambda: None]
    first = chain.ack("a", 0, b"12345", subtask=1)
    assert len(chain.entries) == 1
    assert [number(first, name) for name in ("changed_bytes", "commit_s", "objects")] == [9, 0, 0]
    assert [(one.uid, one.changed_bytes, one.commit_s, one.objects) for one in told.metrics] == [
        ("a", 9, 0, 0),
        ("b", 8, 1, 1),
    ]
    assert [one.measured.counts for one in told.metrics] == [{}, {Metric.STATE_FETCHES: 1}]


def test_a_revision_is_told_of_the_operator_that_it_is_of(chain: Query) -> None:
    chain.start(0)
    chain.batch(0)
    chain.begin("a", 0, 0)
    chain.ack("a", 0, b"other")
    assert [(one.uid, one.revision) for one in chain.told.metrics] == [("a", 0), ("b", 0), ("a", 1)]


def test_each_observer_is_told_of_a_step_once(chain: Query) -> None:
    other = Told(chain.clock)
    chain.uids.append("c")
    chain.own["c"] = {"options": dataclasses.replace(chain.options, observer=other)}
    chain.start(0)
    chain.batch(0)
    assert chain.told.steps == other.steps == [(Step.LAST_ACK, 0), (Step.DURABLE, 0)]
    assert [[one.uid for one in told.metrics] for told in (chain.told, other)] == [["a", "b"], ["c"]]


def test_what_the_driver_has_measured_is_told_once(chain: Query) -> None:
    """By the operator whose ack has completed the batch."""
    chain.start(0)
    chain.measurements.count(Metric.STATE_FETCHES)
    chain.batch(0)
    assert [one.measured.counts for one in chain.told.metrics] == [{}, {Metric.STATE_FETCHES: 1}]


# ---- The start of the log ----


SMALL = dataclasses.replace(MERGE_POLICY, small_log_bytes=1000)


def materialized(query: Query, uid: str, begun: Begun, batch: int) -> dict[str, Any]:
    """An ack that brings the state before its batch, in one object."""
    assert begun.permit.maintenance is not None
    grant = begun.permit.maintenance.grant
    assert grant is not None
    run = StoredRun(f"{grant.folder}/{batch}-a-0.run", 0, 10, b"sum", 1, WHOLE.first, WHOLE.last)
    query.gate.put(run.name, b"0123456789")
    first = grant.known[-1].last + 1 if grant.known else 0
    level = Level(first, batch - 1, grant.base, begun.view.head, WHOLE.first, WHOLE.last, [run])
    return {"levels": [*grant.known, level], "job": grant.job}


def test_an_operator_that_holds_back_the_log_has_to_materialize_its_state(tmp_path: Path) -> None:
    """Its own changes are few, and would be no reason: the log is large by those of the other."""
    query = Query(tmp_path, CHAIN)
    query.options = dataclasses.replace(
        query.options,
        materialization_interval_s=1e9,
        replay_budget_s=1e9,
        retained_checkpoints=2,
        file_merging="within",
        tuning=dataclasses.replace(query.options.tuning, materialization=True, max_log_to_base=0.0),
    )
    query.start(0, policy=SMALL)
    asked: list[int] = []
    for batch in range(12):
        for uid, data in (("a", b"1"), ("b", b"x" * 600)):
            begun = query.begin(uid, batch)
            maintenance = begun.permit.maintenance
            is_due = maintenance is not None and maintenance.is_due
            more = materialized(query, uid, begun, batch) if is_due else {}
            query.ack(uid, batch, data, **more)
            if uid == "a" and is_due:
                asked.append(batch)
    assert asked
    assert len(asked) < 6, "only when it holds back much of the log"
    kept = len(query.names("log/"))
    assert kept <= 6, "the log begins later"


def test_without_much_of_the_log_nobody_is_asked(tmp_path: Path) -> None:
    query = Query(tmp_path, CHAIN)
    query.options = dataclasses.replace(
        query.options,
        materialization_interval_s=1e9,
        replay_budget_s=1e9,
        tuning=dataclasses.replace(query.options.tuning, materialization=True),
    )
    query.start(0)
    for batch in range(5):
        for uid in CHAIN:
            assert query.begin(uid, batch).permit.maintenance is None
            query.ack(uid, batch)


# ---- What is needed ----


def run_with_objects(query: Query, batch: int) -> None:
    """A batch in which each operator stores its changes in an object, with the state before it at times."""
    for uid in query.uids:
        begun = query.begin(uid, batch)
        name = f"{begun.permit.upload_prefix}/{batch}-a.run"
        query.gate.put(name, b"data")
        maintenance = begun.permit.maintenance
        more = materialized(query, uid, begun, batch) if maintenance is not None and maintenance.is_due else {}
        ack = make_ack(query.task(uid, batch), digests.checksum(b"data"), 4, 1, 0, name, **more)
        query.call(ack)


def changes_of(query: Query, uid: str) -> list[int]:
    """The batches whose changes of an operator are stored."""
    names = query.names(f"{query.coordinator.operator(uid).identity}/changes/")
    return sorted(int(name.rpartition("/")[2].partition("-")[0]) for name in names)


def test_a_consumer_of_one_operator_keeps_no_object_of_another(tmp_path: Path) -> None:
    query = Query(tmp_path, CHAIN)
    query.options = dataclasses.replace(
        query.options,
        materialization_interval_s=0,
        retained_checkpoints=2,
        tuning=dataclasses.replace(query.options.tuning, materialization=True),
    )
    query.start(0)
    for batch in range(3):
        run_with_objects(query, batch)
    history = read_history(query.gate).histories[query.coordinator.operator("a").identity]
    made = Pin.on(Footprint.of_changes(history, 2, since=1), Consumer(1 << 20), owner="test", made_ms=0, lasts_s=None)
    write_pin(query.gate, pin_name(2, b"consumer"), made)
    for batch in range(3, 20):
        run_with_objects(query, batch)
    assert changes_of(query, "a") == list(range(1, 20))
    assert min(changes_of(query, "b")) > 5


def forget(query: Query, uid: str) -> None:
    """Give up an operator's state, as ``statelog.forget`` does."""
    log = open_log(LocalStore(query.directory), query.options, query.clock)
    identity = QueryHistory(log.read()).names[uid]
    log.claim(lambda epoch: Claim(epoch, "query", "forget", b"forget", 0, ended=[identity]))
    log.close()


def test_the_objects_of_an_operator_that_has_left_go_when_no_retained_checkpoint_has_it(tmp_path: Path) -> None:
    query = Query(tmp_path, CHAIN)
    query.options = dataclasses.replace(query.options, retained_checkpoints=2)
    query.start(0)
    for batch in range(3):
        run_with_objects(query, batch)
    left = query.coordinator.operator("b").identity
    forget(query, "b")
    query.uids.remove("b")
    query.start(3)
    assert query.names(f"{left}/") == [], "it has ended, so no rewind brings it back"
    for batch in range(3, 6):
        run_with_objects(query, batch)
    assert [section.uid for section in query.entries[-1].sections] == ["a"]
    assert [entry.ended for entry in query.entries[-3:]] == [[left]] * 3, (
        "the changes of the other are in the same entries"
    )


# ---- Operators that come ----


@pytest.mark.parametrize("is_bucket", [False, True])
def test_an_operator_that_is_added_begins_anew_whenever_its_first_batch_is_repeated(
    tmp_path: Path, is_bucket: bool
) -> None:
    query = Query(tmp_path, ["a"])
    if is_bucket:
        query.store = WholeObjects(query.gate)
    query.start(0)
    query.batch(0)
    query.uids.append("new")
    identities: set[str] = set()
    for data in (b"first", b"second"):
        query.start(1)
        begun = query.begin("new", 1)
        assert begun.view.head == begun.view.genesis
        identities.add(begun.view.identity)
        query.batch(1, data)
        assert [section.begins for section in query.entries[-1].sections] == [False, True]
    assert len(identities) == 2
    query.start(2)
    begun = query.begin("new", 2)
    assert begun.view.head == digests.extend(begun.view.genesis, 1, [digests.checksum(b"second")])
    query.batch(2)
    assert query.results()[-1] == {"a": [b"data"], "new": [b"data"]}
