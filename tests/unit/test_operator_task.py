"""An attempt of a subtask without keys: what it starts from, what it tells the coordinator, what it leaves behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from statelog import CheckpointMetrics, CorruptionError, ErrorKind, Metric, Observer, OperatorContext, Step
from statelog.checkpoint.entry import Checkpoint
from statelog.checkpoint.protocol import Ack, Acked, Begun, Reply, Request
from statelog.checkpoint.redistribution import SnapshotSlice
from statelog.clock import ManualClock
from statelog.errors import ProtocolError
from statelog.testing.crashes import Crash, CrashPoint
from tests.model.operator_engine import Commands, OperatorEngine


class Overheard(OperatorEngine):
    """An engine whose acks a test sees, and whose answers to begin it can change."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.acks: list[Ack] = []
        self.answer: Callable[[Begun], Reply] = lambda begun: begun

    def call(self, request: Request, payload: bytes) -> Reply:
        reply = super().call(request, payload)
        if isinstance(request, Ack):
            self.acks.append(request)
        return self.answer(reply) if isinstance(reply, Begun) else reply

    def add(self, batch: int, subtask: int, *elements: str) -> None:
        self.run_subtask(batch, subtask, [["addAll", "items", *elements]])

    def items(self, batch: int, subtask: int = 0) -> list[str]:
        found: list[str] = self.run_subtask(batch, subtask, [["read"]])[1][0]["items"]
        return found

    def folder(self, subtask: int = 0) -> Path:
        return self.directory / f"host-{self.host}" / str(self.parallelism) / str(subtask)

    @property
    def batches(self) -> list[int]:
        return [entry.batch for entry in self.read_log() if isinstance(entry, Checkpoint)]

    @property
    def measured(self) -> CheckpointMetrics:
        return self.observer.checkpoints[-1]


@pytest.fixture
def engine(tmp_path: Path) -> Overheard:
    engine = Overheard(tmp_path)
    engine.start(1, 0)
    return engine


# ---- What it starts from ----


def test_a_subtask_knows_whether_its_state_was_restored_and_dealt_out_anew(engine: Overheard) -> None:
    found = [engine.run_subtask(batch, 0)[0][2:] for batch in (0, 1)]
    engine.start(1, 2)
    found += [engine.run_subtask(batch, 0)[0][2:] for batch in (2, 3)]
    engine.start(2, 4)
    found += [engine.run_subtask(4, subtask)[0][2:] for subtask in range(2)]
    assert found == [[False, False], [False, False], [True, False], [False, False], [True, True], [True, True]]


@pytest.mark.parametrize(
    "answer",
    [lambda begun: Acked(), lambda begun: msgspec.structs.replace(begun, start=None)],
    ids=["another reply", "keyed state"],
)
def test_a_begin_that_is_not_answered_with_a_start_is_refused(
    engine: Overheard, answer: Callable[[Begun], Reply]
) -> None:
    engine.answer = answer
    with pytest.raises(ProtocolError, match="answered begin with"):
        engine.run_subtask(0, 0)
    assert engine.acks == []


@pytest.mark.parametrize(
    "piece",
    [SnapshotSlice(0, "unknown", 0, 1), SnapshotSlice(0, "items", 1, 2)],
    ids=["a state that it does not have", "more elements than it has"],
)
def test_a_snapshot_that_lacks_what_the_log_entry_names_is_damage(engine: Overheard, piece: SnapshotSlice) -> None:
    def with_piece(begun: Begun) -> Begun:
        assert begun.start is not None
        return msgspec.structs.replace(begun, start=msgspec.structs.replace(begun.start, slices=[piece]))

    engine.add(0, 0, "a", "b")
    engine.answer = with_piece
    with pytest.raises(CorruptionError, match=f"state '{piece.state}' that the log entry names") as failure:
        engine.run_subtask(1, 0)
    assert failure.value.kind is ErrorKind.FORMAT
    assert engine.batches == [0]


# ---- Crashes, and the order of its steps ----


@pytest.mark.parametrize("step", [Step.RESTORED, Step.ACKING, Step.ACKED])
def test_an_attempt_counts_exactly_from_its_ack_on(engine: Overheard, step: Step) -> None:
    engine.add(0, 0, "a")
    engine.observer.arm(step)
    with pytest.raises(Crash):
        engine.add(1, 0, "lost unless acked")
    assert engine.batches == ([0, 1] if step is Step.ACKED else [0])
    engine.add(1, 0, "b")
    assert engine.items(2) == ["a", "b"]


def test_the_last_rows_come_after_the_ack_and_the_others_before(engine: Overheard) -> None:
    class Many(Commands):
        def process(self, rows: Iterator[Any], context: OperatorContext) -> Iterator[Any]:
            return map(str, range(25_000))

    engine.processor = Many
    outputs = engine.outputs(0, 0)
    found = [(output.column(0).to_pylist(), len(engine.acks)) for output in outputs]
    assert len(found) > 1
    assert [acks for _, acks in found] == [0] * (len(found) - 1) + [1]
    assert list(itertools.chain.from_iterable(rows for rows, _ in found)) == list(map(str, range(25_000)))


# ---- What it tells the coordinator ----


def test_only_what_has_changed_is_measured(engine: Overheard) -> None:
    engine.add(0, 0, "a", "b", "c")
    assert engine.measured.changes == 3
    assert engine.measured.changed_bytes == engine.acks[-1].length > 0
    engine.run_subtask(1, 0, [["update", "items", "a", "b", "c"]])
    engine.items(2)
    assert [ack.is_unchanged for ack in engine.acks] == [False, True, True]
    assert [(one.changes, one.changed_bytes) for one in engine.observer.checkpoints[1:]] == [(0, 0)] * 2


def test_the_time_of_a_checkpoint_begins_when_the_processor_has_ended(tmp_path: Path) -> None:
    clock = ManualClock(10**10)

    class Slow(Commands):
        def process(self, rows: Iterator[Any], context: OperatorContext) -> Iterator[Any]:
            clock.advance(100)
            return super().process(rows, context)

    class Encoding(Observer):
        def step(self, step: Step, batch: int, subtask: int) -> None:
            clock.advance(3 if step is Step.ACKING else 0)

    engine = Overheard(tmp_path, processor=Slow)
    engine.clock, engine.observer = clock, CrashPoint(Encoding())
    engine.start(1, 0)
    engine.add(0, 0, "a")
    assert engine.measured.subtask_s == 3


@pytest.mark.parametrize("spare_bytes", [0, -1])
def test_a_snapshot_goes_with_the_ack_up_to_the_size_that_begin_names(engine: Overheard, spare_bytes: int) -> None:
    engine.add(0, 0, "a")
    length = engine.acks[-1].length
    engine.answer = lambda begun: msgspec.structs.replace(begun, inline_bytes=length + spare_bytes)
    engine.run_subtask(1, 0, [["update", "items", "b"]])
    assert engine.acks[-1].length == length
    assert bool(engine.acks[-1].name) == (spare_bytes < 0)
    assert engine.items(2) == ["b"]


# ---- Its host ----


def fetches(engine: Overheard) -> list[int]:
    return [ack.measured.counts.get(Metric.STATE_FETCHES, 0) for ack in engine.acks]


def test_state_is_fetched_only_on_a_host_that_lacks_it(engine: Overheard) -> None:
    """A repeated batch starts from the snapshot before it, so that one stays here as well."""
    engine.add(0, 0, "a")
    for element in ("lost", "b"):
        engine.add(1, 0, element)
    engine.add(2, 0, "c")
    engine.start(1, 3, keep_local=False)
    for batch in (3, 4):
        assert engine.items(batch) == ["a", "b", "c"]
    assert fetches(engine) == [0, 0, 0, 0, 1, 0]


def test_a_host_keeps_the_snapshots_of_the_last_batch_and_of_the_one_before(engine: Overheard) -> None:
    for batch in range(6):
        engine.add(batch, 0, "a")
    assert len(list(engine.folder().iterdir())) == 2


def test_a_host_keeps_nothing_of_another_parallelism(engine: Overheard) -> None:
    engine.add(0, 0, "a")
    left = engine.folder()
    assert left.exists()
    engine.start(2, 1)
    engine.add(1, 0, "b")
    assert not left.exists()


def test_a_host_keeps_nothing_of_a_subtask_that_has_moved_away(engine: Overheard) -> None:
    engine.start(2, 0)
    for subtask in range(2):
        engine.add(0, subtask, "a")
    left = engine.folder(1)
    for batch in range(1, 21):
        engine.host = 1
        engine.add(batch, 1, "a")
        assert left.exists() or batch > 11, "it may come back"
        engine.host = 0
        engine.add(batch, 0, "a")
    assert not left.exists()
    assert engine.folder(0).exists()
