"""An attempt of a subtask without keys: what it starts from, what it tells the coordinator, and what it leaves."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from statelog import CorruptionError, ErrorKind, Observer, OperatorContext, ProtocolError, Step
from statelog.local.runs import LocalSnapshots
from statelog.local.use import SPARE_BATCHES, in_use
from statelog.log.references import SegmentRef
from statelog.metrics import Metric, Recorded
from statelog.operators.unkeyed.subtask import UnkeyedInput, UnkeyedOperator, UnkeyedSubtask
from statelog.rpc.messages import Ack, Acked, Begin, Begun, Reply, Request, SnapshotSlice, TaskId, TaskTimes
from statelog.runs import digests
from statelog.storage import LocalStore
from statelog.tasks.attempt import Attempt, WorkerMemory
from statelog.tasks.unkeyed_task import UnkeyedTask
from tests.model.operator_engine import Commands, JsonOutput, OperatorEngine, _to_rows


@dataclass
class NotingEngine(OperatorEngine):
    """Notes the calls of tasks, and may answer in the coordinator's place."""

    acks: list[tuple[Ack, bytes]] = field(default_factory=list)
    begins: list[Begin] = field(default_factory=list)
    answer: Any = None

    def call(self, request: Request, payload: bytes) -> Reply:
        if isinstance(request, Ack):
            self.acks.append((request, payload))
        if isinstance(request, Begin):
            self.begins.append(request)
            return super().call(request, payload) if self.answer is None else self.answer(self, request)
        return super().call(request, payload)

    @property
    def ack(self) -> Ack:
        return self.acks[-1][0]


@pytest.fixture
def engine(tmp_path: Path) -> NotingEngine:
    return NotingEngine(tmp_path)


def local_of(engine: NotingEngine, parallelism: int, subtask: int = 0) -> Path:
    return engine.directory / f"host-{engine.host}" / engine.identity / str(parallelism) / str(subtask)


def add(engine: NotingEngine, batch: int, *elements: str, subtask: int = 0) -> None:
    engine.run_subtask(batch, subtask, [["add", "items", element] for element in elements])


# ---- What it tells ----


def test_an_ack_says_what_the_snapshot_holds(engine: NotingEngine) -> None:
    engine.start(1, 0)
    engine.run_subtask(0, 0, [["add", "items", "x"], ["addAll", "units", "y", "z"]], broadcast=[["put", "a", 1]])
    ack, payload = engine.acks[-1]
    assert (ack.last.checksum, ack.last.length, ack.last.name) == (digests.checksum(payload), len(payload), "")
    assert (ack.last.rows, ack.last.input_rows, ack.is_unchanged) == (4, 3, False)
    assert ack.element_counts == {"items": 1, "more": 0, "units": 2, "rules": 1}
    assert list(ack.broadcast_checksums) == ["rules"], "one rule is enough"
    for batch, commands in enumerate(([["read"], ["read"]], [["update", "items", "x"], ["read"]]), 1):
        engine.run_subtask(batch, 0, commands)
        later, payload = engine.acks[-1]
        same = SegmentRef(0, later.task.attempt, ack.last.checksum, 0, length=0, rows=0, input_rows=2)
        assert (later.segments, payload) == ([same], b"")
        assert later.is_unchanged, "although it was written, the second time"
        assert (later.element_counts, later.broadcast_checksums) == (ack.element_counts, ack.broadcast_checksums)
        assert engine.begins[-1].input_rows == 2


def test_a_snapshot_is_sent_up_to_the_limit_and_written_above_it(tmp_path: Path) -> None:
    sizes: list[int] = []
    for number, budget in enumerate((1 << 20, None, None)):
        limit = budget if budget is not None else sizes[0] - (number - 1)
        engine = NotingEngine(tmp_path / str(number), inline_budget_bytes=limit)
        engine.start(1, 0)
        add(engine, 0, "x")
        sizes.append(engine.ack.last.length)
        assert bool(engine.ack.last.name) == (number == 2)
    assert len(set(sizes)) == 1


def test_an_ack_says_where_the_time_went(engine: NotingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[Step, int, int, int]] = []

    class Slow(Observer):
        def step(self, step: Step, batch: int, subtask: int) -> None:
            steps.append((step, batch, subtask, len(engine.acks)))
            engine.clock.advance(1000.0)

    def slow(owner: type, name: str, seconds: float) -> None:
        method = getattr(owner, name)

        def later(self: Any, *arguments: Any) -> Any:
            engine.clock.advance(seconds)
            return method(self, *arguments)

        monkeypatch.setattr(owner, name, later)

    engine.start(2, 0)
    engine.clock.advance(5000.0)
    engine.options = dataclasses.replace(engine.options, observer=Slow())
    slow(UnkeyedSubtask, "process", 2.0)
    slow(UnkeyedSubtask, "sections", 0.25)
    slow(LocalSnapshots, "write", 0.5)
    add(engine, 0, "x", subtask=1)
    assert engine.ack.times == TaskTimes(processor_s=2.0, encode_s=0.75)
    assert engine.ack.subtask_s == 0.75
    assert {name: rows for name, (rows, _) in engine.ack.state_sizes.items()}["items"] == 1
    assert engine.ack.state_sizes["items"][1] > 0
    assert steps == [(Step.RESTORED, 0, 1, 0), (Step.ACKING, 0, 1, 0), (Step.ACKED, 0, 1, 1)]


def test_the_last_rows_come_after_the_ack_and_all_others_as_they_are_made(engine: NotingEngine) -> None:
    class Many(Commands):
        def process(self, rows: Iterator[Any], context: OperatorContext) -> Iterator[Any]:
            yield from (str(number) for number in range(200_000))

    engine.start(1, 0)
    task = task_of(engine, Many())
    acked, texts = [], []
    for output in task.run(UnkeyedInput([], None, 0, None)):
        acked.append(bool(engine.acks))
        texts += output.column(0).to_pylist()
    assert acked == [False] * (len(acked) - 1) + [True]
    assert len(acked) > 1
    assert texts == [str(number) for number in range(200_000)]


def task_of(engine: NotingEngine, processor: Commands, batch: int = 0) -> UnkeyedTask:
    engine.attempts += 1
    operator = UnkeyedOperator(engine.uid, processor, engine.states, _to_rows, _to_rows, JsonOutput())
    attempt = Attempt(
        task=TaskId("query", f"run-{engine.runs}", "op", "instance", batch, 0, engine.attempts),
        partition=0,
        parallelism=engine.parallelism,
        options=engine.options,
        call=engine.call,
        memory=WorkerMemory(),
        local_of=lambda identity: local_of(engine, engine.parallelism),
        open_store=LocalStore,
        clock=engine.clock,
        token=f"attempt-{engine.attempts}",
    )
    return UnkeyedTask(attempt, operator)


def test_a_processor_is_told_where_and_when_it_runs(engine: NotingEngine) -> None:
    told: list[OperatorContext] = []

    class Noting(Commands):
        def process(self, rows: Iterator[Any], context: OperatorContext) -> Iterator[Any]:
            told.append(context)
            return iter([])

    engine.processor = Noting
    engine.start(2, 0)
    engine.run_subtask(0, 0)
    engine.run_subtask(0, 1)
    engine.run_subtask(1, 1)
    assert told == [
        OperatorContext(subtask, 2, batch, 1000 + batch, isRestored=False, isRedistributed=False)
        for batch, subtask in ((0, 0), (0, 1), (1, 1))
    ]


# ---- What it starts from ----


def test_fetches_are_counted_where_the_snapshot_is_not_at_hand(engine: NotingEngine) -> None:
    """Nor does a repetition fetch what its batch started from, on a host that has gone on."""
    engine.start(1, 0)
    add(engine, 0, "a")
    add(engine, 1, "b")
    for _ in range(2):
        add(engine, 2, "c")
        assert engine.ack.measured == Recorded()
    engine.start(1, 3, keep_local=False)
    add(engine, 3, "d")
    assert engine.ack.measured.counts == {Metric.STATE_FETCHES: 1}


def test_only_the_snapshots_before_and_after_the_batch_stay_on_a_host(engine: NotingEngine) -> None:
    engine.start(1, 0)
    for batch in range(4):
        add(engine, batch, "a")
    held = {f"{ack.last.checksum.hex()}.snapshot" for ack, _ in engine.acks[-2:]}
    assert {name for name in os.listdir(local_of(engine, 1)) if name.endswith(".snapshot")} == held


def test_with_another_parallelism_the_copies_of_the_old_one_go(engine: NotingEngine) -> None:
    engine.start(2, 0)
    for subtask in (0, 1):
        add(engine, 0, "a", subtask=subtask)
    engine.start(1, 1)
    assert local_of(engine, 2).exists()
    add(engine, 1, "b")
    assert not local_of(engine, 2).exists()


def test_directories_of_subtasks_that_are_elsewhere_go_in_their_turn(engine: NotingEngine) -> None:
    engine.start(1, 0)
    add(engine, 0, "a")
    other = local_of(engine, 1, 7)
    other.mkdir()
    with in_use(other, 0):
        pass  # a subtask that has run here once
    for batch in range(1, 2 * SPARE_BATCHES + 2):
        assert other.exists() or batch > SPARE_BATCHES
        add(engine, batch)
    assert not other.exists()


@pytest.mark.parametrize("piece", [("items", 1, 2), ("items", 3, 1), ("items", 0, 3), ("unknown", 0, 1)])
def test_a_snapshot_with_fewer_elements_than_the_log_says_is_damaged(
    engine: NotingEngine, piece: tuple[str, int, int]
) -> None:
    engine.start(1, 0)
    add(engine, 0, "a", "b")

    def answer(engine: NotingEngine, request: Begin) -> Begun:
        begun = engine.coordinator.begin(request)
        assert begun.view.snapshot_view is not None
        slices = [SnapshotSlice(0, "items", 0, 2), SnapshotSlice(0, *piece)]
        view = replace(begun.view, snapshot_view=replace(begun.view.snapshot_view, slices=slices))
        return replace(begun, view=view)

    engine.answer = answer
    with pytest.raises(CorruptionError, match=f"does not hold the {piece[2]} elements of state '{piece[0]}'") as raised:
        add(engine, 1)
    assert raised.value.kind is ErrorKind.FORMAT


@pytest.mark.parametrize("is_begun", [False, True], ids=["no answer to begin", "of keyed state"])
def test_an_answer_of_another_kind_is_refused(engine: NotingEngine, is_begun: bool) -> None:
    engine.start(1, 0)

    def answer(engine: NotingEngine, request: Begin) -> Reply:
        begun = engine.coordinator.begin(request)
        return replace(begun, view=replace(begun.view, snapshot_view=None)) if is_begun else Acked()

    engine.answer = answer
    with pytest.raises(ProtocolError, match="answered begin with"):
        add(engine, 0)
