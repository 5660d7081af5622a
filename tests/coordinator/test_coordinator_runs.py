"""What a run takes over from the one before, what each task is told of it, and what the run leaves.

Nothing is processed here: tests begin and ack for the subtasks.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace

from statelog import (
    CheckpointMetrics,
    ConfigurationError,
    ErrorKind,
    FencedError,
    Observer,
    Options,
    ProcessorError,
    ProtocolError,
    RestoreMetrics,
    StateMissingError,
    Step,
    StorageError,
    Tuning,
)
from statelog.coordinator.admission import OperatorConfig
from statelog.coordinator.batch import BatchTime
from statelog.coordinator.coordinator import Coordinator
from statelog.log.entry import FRAME_HEADER_BYTES, Checkpoint, QueryCheckpoint
from statelog.log.numbered import NumberedLog
from statelog.log.open import open_log
from statelog.log.references import Level, SegmentRef, StoredRun
from statelog.metrics import Measurements, Metric
from statelog.operators.event_time import WatermarkPolicy
from statelog.rpc.messages import Begin, Begun, Fetch, JobOutcome, Permit, SnapshotView, TaskId, View, Witness
from statelog.runs import digests
from statelog.runs.key_groups import hash_range
from statelog.runs.schema import StateSchema, encode_schema
from statelog.runs.times import NO_TIME_MS
from statelog.storage import LocalStore, Store
from statelog.storage.store import StoreWrapper
from statelog.testing.faults import Call, Fault, FaultPlan, FaultStore
from statelog.testing.query import ManualClock
from tests.acks import make_ack
from tests.coordinator.inventory_support import PinsRefused

KEYED = OperatorConfig("query", "run", "op", 1, b"keys", [])
WITHOUT_KEYS = dataclasses.replace(KEYED, key_schema=b"")
WHOLE = hash_range(0, 1)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes the machine, and syncing would take most of the time."""
    for target in ("os.fsync", "statelog.storage.local.sync_data"):
        monkeypatch.setattr(target, lambda fd: None)


class Told(Observer):
    """What the coordinator tells, and when the clock said what."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.steps: list[tuple[Step, int, int]] = []
        self.metrics: list[CheckpointMetrics] = []
        self.restores: list[RestoreMetrics] = []

    def step(self, step: Step, batch: int, subtask: int) -> None:
        self.steps.append((step, batch, subtask))
        self.clock.advance(0.25)

    def checkpoint(self, metrics: CheckpointMetrics) -> None:
        self.metrics.append(metrics)

    def restore(self, metrics: RestoreMetrics) -> None:
        self.restores.append(metrics)


def state(name: str, expires_by: str = "") -> StateSchema:
    return StateSchema(name, "value", b"", encode_schema(pa.schema([("n", pa.int64())])), expires_by)


class Runs:
    """The runs of one operator, one after the other; batch n takes place at 1000 + n ms."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock(10**10)
        self.told = Told(self.clock)
        self.store: Store = LocalStore(directory)
        self.options = Options(
            observer=self.told, tuning=Tuning(materialization=False, orphan_min_age_s=0, log_min_age_s=0)
        )
        self.times: dict[int, BatchTime] = {batch: BatchTime(1000 + batch, 0) for batch in range(100)}
        self.number = 0
        self.attempts = 0

    def made(self, run: OperatorConfig, *, deletes_in_background: bool = False) -> Coordinator:
        self.number += 1
        self.run = dataclasses.replace(run, run_id=f"run-{self.number}")
        self.measurements = Measurements()
        self.coordinator = Coordinator(
            [dataclasses.replace(self.run, options=self.options, instance="instance")],
            store=self.store,
            location="location",
            log=open_log(self.store, self.options, self.clock),
            options=self.options,
            clock=self.clock,
            new_token=lambda: f"{self.number}-{self.attempts}".rjust(16).encode(),
            batch_time=lambda batch: self.times[batch],
            measurements=self.measurements,
            deletes_in_background=deletes_in_background,
            slots=1,
        )
        return self.coordinator

    def start(self, first_batch: int, run: OperatorConfig = KEYED, **more: bool) -> None:
        self.made(run, **more).open(first_batch)

    def task(self, batch: int, subtask: int = 0, attempt: int | None = None) -> TaskId:
        return TaskId("query", self.run.run_id, "op", "instance", batch, subtask, attempt or self.attempts)

    def begin(self, batch: int, subtask: int = 0) -> Begun:
        self.attempts += 1
        return self.coordinator.begin(Begin(self.task(batch, subtask), subtask, 0, None, "token"))

    def ack(self, batch: int, data: bytes = b"data", subtask: int = 0, **more: Any) -> JobOutcome:
        """The ack of the attempt that has begun last."""
        task = more.pop("task", self.task(batch, subtask))
        checksum, length = more.pop("checksum", digests.checksum(data)), more.pop("length", len(data))
        behind = more.pop("behind", b"")
        ack = make_ack(task, checksum, length, 1, **more)
        payload = b"" if ack.is_unchanged else data
        return self.coordinator.ack(ack, payload + behind).job

    def batch(self, batch: int, *data: bytes, **more: Any) -> Begun:
        for subtask, one in enumerate(data or [b"data"] * self.run.parallelism):
            begun = self.begin(batch, subtask)
            self.ack(batch, one, subtask, **more)
        return begun

    def batches(self, first: int, last: int) -> None:
        for batch in range(first, last + 1):
            self.batch(batch)

    @property
    def entries(self) -> list[Checkpoint]:
        """The operator's checkpoints in all entries of the log."""
        read = open_log(self.store, self.options, self.clock).read()
        found = [entry for entry in read if isinstance(entry, QueryCheckpoint)]
        return [Checkpoint.of(entry, section) for entry in found for section in entry.sections]

    @property
    def identity(self) -> str:
        """The operator's identity in the current run."""
        return self.coordinator.operator("op").identity

    @property
    def names(self) -> set[str]:
        return {info.name for info in self.store.list()}


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


# ---- The start ----


def test_a_start_tells_what_it_has_read_and_how_long_that_took(runs: Runs) -> None:
    runs.start(0, dataclasses.replace(KEYED, parallelism=2))
    runs.batches(0, 1)

    class Slow(StoreWrapper):
        def list(self, prefix: str = "") -> list[Any]:
            runs.clock.advance(0.5)
            return super().list(prefix)

    runs.store = Slow(runs.store)
    before_s = runs.clock.monotonic_s()
    runs.start(2, dataclasses.replace(KEYED, parallelism=3))
    [_, told] = runs.told.restores
    assert told == RestoreMetrics("query", "op", 2, 3, 3, runs.clock.monotonic_s() - before_s, begins=False)
    assert 0.5 <= told.log_s < 10


def test_a_location_that_another_query_has_taken_meanwhile_is_refused(runs: Runs, tmp_path: Path) -> None:
    """Between the look and the claim."""
    other = Runs(tmp_path)

    def take() -> None:
        other.start(0, dataclasses.replace(KEYED, query_id="other"))
        other.attempts += 1
        task = replace(other.task(0), query_id="other")
        other.coordinator.begin(Begin(task, 0, 0, None, "token"))
        other.ack(0, task=task)

    runs.store = FaultStore(runs.store, FaultPlan.at("put_if_absent", action=take))
    with pytest.raises(ConfigurationError, match="belongs to query other, not to query query") as raised:
        runs.start(0)
    assert raised.value.kind is ErrorKind.OTHER_OWNER


@pytest.mark.parametrize("first_batch", [1, 2])
def test_a_checkpoint_of_another_copy_of_the_query_is_refused_from_the_first_on(runs: Runs, first_batch: int) -> None:
    runs.start(0)
    runs.batches(0, first_batch - 1)
    runs.times = {batch: BatchTime(7000 + batch, 0) for batch in range(9)}
    with pytest.raises(ConfigurationError, match="another copy") as raised:
        runs.start(first_batch)
    assert raised.value.kind is ErrorKind.OTHER_OWNER


def given(name: str = "op-1/runs/1/0/given.run") -> dict[str, dict[int, list[StoredRun]]]:
    return {"op": {0: [StoredRun(name, 0, 5, digests.checksum(b"given"), 1, WHOLE.first, WHOLE.last)]}}


def names_to_read(runs: Runs) -> list[str]:
    """What the first batch's task lacks of the state before it."""
    runs.begin(0)
    missing = runs.coordinator.fetch(Fetch(runs.task(0), [])).missing
    assert not missing.segments
    return [run.name for level in missing.levels for run in level.runs]


def test_given_state_is_there_before_the_first_batch_and_once(runs: Runs) -> None:
    runs.made(KEYED).open(0, given())
    assert runs.entries == [], "the first checkpoint tells it"
    assert names_to_read(runs) == ["op-1/runs/1/0/given.run"]
    runs.ack(0)
    runs.batch(1)
    runs.start(1)
    assert [entry.batch for entry in runs.entries] == [0, 1]
    assert [entry.begins for entry in runs.entries] == [True, False]
    runs.begin(1)
    missing = runs.coordinator.fetch(Fetch(runs.task(1), [])).missing
    assert [run.name for level in missing.levels for run in level.runs] == ["op-1/runs/1/0/given.run"]
    runs.start(0)
    assert names_to_read(runs) == [], "a rerun that is given nothing has nothing"
    runs.start(0)
    assert names_to_read(runs) == []


@pytest.mark.parametrize("first_batch", [1, 2])
def test_a_repeated_batch_counts_the_log_before_it_only(runs: Runs, first_batch: int) -> None:
    runs.start(0)
    for batch in range(3):
        runs.batch(batch, b"x" * 10**batch)
    runs.start(first_batch)
    runs.batch(first_batch, b"")
    assert runs.told.metrics[-1].log_bytes == {1: 1, 2: 11}[first_batch]


def test_a_start_pins_the_points_in_time_that_the_one_before_could_not(runs: Runs) -> None:
    runs.options = dataclasses.replace(runs.options, retained_s={30: 10**11}, retained_checkpoints=2)
    runs.times = {batch: BatchTime(10_000 * batch, 0) for batch in range(9)}
    store = runs.store
    runs.store = PinsRefused(store)
    runs.start(0)
    runs.batches(0, 5)
    assert runs.entries[-1].retained_from == 0
    runs.store = store
    for first_batch in (6, 7):
        runs.start(first_batch)
        runs.batch(first_batch)
        pins = [int(Path(info.name).name.partition("-")[0]) for info in store.list("pins/")]
        assert pins == {6: [0, 3], 7: [0, 3, 6]}[first_batch]
    assert runs.entries[-1].retained_from == 6


# ---- What a task is told ----


def test_a_task_is_told_all_that_its_batch_depends_on(runs: Runs) -> None:
    states = [state("deleted"), state("brief", "processing")]
    settings: dict[str, int | str] = {"allowedLatenessMs": 100}
    first = dataclasses.replace(KEYED, parallelism=2, states=states, settings=settings)
    runs.start(0, first)
    runs.times = {0: BatchTime(1000, 900, 800), 1: BatchTime(2000, 1900, 900), 2: BatchTime(3000, 2900, 1900)}
    runs.batch(0, b"zero", b"one", timers_to_ms=850)
    runs.batch(1, b"zero", b"one", timers_to_ms=1850)
    runs.start(2, dataclasses.replace(first, states=[state("brief")], deleted=("deleted",)))
    runs.coordinator.operator("op").offer_initial_rows(["", "op/initial/1"])
    genesis = digests.genesis(runs.identity, 1, 2)
    head = digests.extend(genesis, 0, [digests.checksum(b"one")])
    newest = runs.store.list("log/")[-1].name
    assert runs.entries[0].identity == runs.identity
    view = View(
        identity=runs.identity,
        genesis=genesis,
        head=digests.extend(head, 1, [digests.checksum(b"one")]),
        generations={"deleted": 1},
        certain_generations={},
        closed_ms=1900 - 100,
        expires_by={"brief": "processing"},
        snapshot_view=None,
    )
    permit = Permit(
        epoch=2,
        inline_bytes=runs.options.inline_bytes(2),
        upload_prefix=f"{runs.identity}/changes/2/1",
        store="location",
        batch_time_ms=3000,
        watermark_ms=2900,
        late_watermark_ms=1900,
        timers_after_ms=NO_TIME_MS,
        arrivals_after_ms=NO_TIME_MS,
        initial="op/initial/1",
        maintenance=None,
        witness=Witness(newest, runs.store.read(newest, length=FRAME_HEADER_BYTES)),
    )
    assert runs.begin(2, 1) == Begun(view, permit)


def test_timers_that_fired_in_the_batch_before_are_not_looked_for(runs: Runs) -> None:
    runs.start(0)
    runs.batch(0, timers_to_ms=850, arrivals_to_ms=700)
    permit = runs.begin(1).permit
    assert (permit.timers_after_ms, permit.arrivals_after_ms) == (850, 700)


def test_a_deletion_is_certain_in_the_second_batch_that_has_it(runs: Runs) -> None:
    """In the first one, and in its repetitions, a run that does not delete may still take its place."""
    runs.start(0, dataclasses.replace(KEYED, states=[state("gone")]))
    runs.batch(0)
    runs.start(1, dataclasses.replace(KEYED, deleted=("gone",)))
    told = [runs.batch(1), runs.batch(1, b"other"), runs.batch(2), runs.batch(3)]
    assert [begun.view.generations for begun in told] == [{"gone": 1}] * 4
    assert [begun.view.certain_generations for begun in told] == [{}, {}, {"gone": 1}, {"gone": 1}]


def test_states_that_are_not_declared_any_more_stay_in_every_entry(runs: Runs) -> None:
    runs.start(0, dataclasses.replace(KEYED, states=[state("a"), state("b")]))
    runs.batch(0)
    runs.start(1, dataclasses.replace(KEYED, states=[state("b")]))
    runs.batches(1, 3)
    assert [[one.name for one in entry.states] for entry in runs.entries] == [["a", "b"]] * 4


def test_what_a_start_converts_is_recorded(runs: Runs) -> None:
    runs.start(0, dataclasses.replace(KEYED, settings={"size": 5}))
    runs.batch(0)
    assert runs.entries[-1].settings == {"size": 5}


# ---- Watermarks ----


def times_of(begun: Begun) -> tuple[int, int]:
    return begun.permit.late_watermark_ms, begun.permit.watermark_ms


def test_an_own_watermark_follows_what_the_batches_before_have_seen(runs: Runs) -> None:
    runs.start(0, dataclasses.replace(KEYED, watermark=WatermarkPolicy(10)))
    seen = [[500], [400], [None], [700]]
    told = [times_of(runs.batch(batch, max_event_ms=event_ms)) for batch, event_ms in enumerate(seen)]
    told.append(times_of(runs.begin(4)))
    assert told == [(NO_TIME_MS, NO_TIME_MS), (NO_TIME_MS, 490), (490, 490), (490, 490), (490, 690)]


def test_a_repeated_batch_has_the_watermark_of_the_first_time(runs: Runs) -> None:
    run = dataclasses.replace(KEYED, watermark=WatermarkPolicy(10))
    runs.start(0, run)
    for batch, event_ms in enumerate((500, 600)):
        runs.batch(batch, max_event_ms=[event_ms])
    runs.start(1, run)
    assert times_of(runs.begin(1)) == (NO_TIME_MS, 490)


def test_sparks_watermark_is_waited_for_where_an_own_one_was_ahead_of_it(runs: Runs) -> None:
    runs.start(0, dataclasses.replace(KEYED, watermark=WatermarkPolicy(10)))
    for batch in range(3):
        runs.batch(batch, max_event_ms=[500])
    runs.times |= {3: BatchTime(1003, 300, 200), 4: BatchTime(1004, 600, 300), 5: BatchTime(1005, 700, 600)}
    runs.start(3)
    assert [times_of(runs.batch(batch)) for batch in (3, 4, 5)] == [(490, 490), (490, 600), (600, 700)]


def test_sparks_watermark_is_taken_as_it_is_by_an_operator_that_never_had_its_own(runs: Runs) -> None:
    runs.times[0] = BatchTime(1000, -5, -7)
    runs.start(0)
    assert times_of(runs.begin(0)) == (-7, -5)


@pytest.mark.parametrize(("seen", "advances"), [([500, 500], [True, False]), ([500, 501], [True, True])])
def test_a_batch_that_moves_the_watermark_is_followed_by_another(
    runs: Runs, seen: list[int], advances: list[bool]
) -> None:
    runs.start(0, dataclasses.replace(KEYED, watermark=WatermarkPolicy(10)))
    assert not runs.coordinator.watermark_advances("op", 0), "it has no checkpoint"
    for batch, event_ms in enumerate(seen):
        runs.batch(batch, max_event_ms=[event_ms])
    assert [runs.coordinator.watermark_advances("op", batch) for batch in (0, 1)] == advances


def test_sparks_own_watermark_is_none_of_the_operators_business(runs: Runs) -> None:
    runs.start(0)
    runs.batch(0)
    assert not runs.coordinator.watermark_advances("op", 0)


# ---- The initial state ----


def offer(runs: Runs, **more: bool) -> None:
    runs.start(0, dataclasses.replace(KEYED, parallelism=2), **more)
    for name in ("op/initial/a", "op/initial/b"):
        runs.store.put(name, b"rows")
    runs.coordinator.operator("op").offer_initial_rows(["op/initial/a", ""])


def test_rows_of_an_initial_state_are_for_the_first_batch_and_go_with_the_second(runs: Runs) -> None:
    offer(runs)
    assert [runs.begin(0, subtask).permit.initial for subtask in (0, 1)] == ["op/initial/a", ""]
    runs.batch(0)
    assert runs.store.read("op/initial/a") == b"rows", "it may be repeated"
    assert runs.begin(1).permit.initial == ""
    assert {name for name in runs.names if "/initial/" in name} == {"op/initial/b"}, "that is of somebody else"


@pytest.mark.parametrize("deletes_in_background", [False, True])
def test_rows_of_an_initial_state_go_with_a_run_that_ends_in_its_first_batch(
    runs: Runs, deletes_in_background: bool
) -> None:
    offer(runs, deletes_in_background=deletes_in_background)
    runs.begin(0)
    runs.coordinator.close()
    assert {name for name in runs.names if "/initial/" in name} == {"op/initial/b"}


# ---- Batches in order ----


@pytest.mark.parametrize("later", [2, 3])
def test_a_batch_that_is_left_out_stops_the_query(runs: Runs, later: int) -> None:
    runs.start(0)
    runs.batch(0)
    with pytest.raises(StateMissingError, match=f"no subtask of operator 'op' ran in batch {later - 1}") as raised:
        runs.begin(later)
    assert raised.value.kind is ErrorKind.CHECKPOINT_INCOMPLETE


def test_a_first_batch_that_is_left_out_stops_the_query(runs: Runs) -> None:
    """A clock opens the coordinator before its first batch, whose tasks may never call."""
    runs.start(0)
    runs.batch(0)
    runs.start(1)
    with pytest.raises(StateMissingError, match="no subtask of operator 'op' ran in batch 1") as raised:
        runs.begin(2)
    assert raised.value.kind is ErrorKind.CHECKPOINT_INCOMPLETE
    runs.batch(1)


class Raising(Told):
    """Cannot take any metrics."""

    def checkpoint(self, metrics: CheckpointMetrics) -> None:
        raise RuntimeError("the metrics server is down")


def test_an_observer_that_raises_keeps_no_files(runs: Runs) -> None:
    observer = Raising(runs.clock)
    runs.options = dataclasses.replace(runs.options, observer=observer, file_merging="within", retained_checkpoints=2)
    runs.start(0, WITHOUT_KEYS)
    for batch in range(10):
        runs.begin(batch)
        with pytest.raises(RuntimeError, match="is down"):
            runs.ack(batch)
        runs.ack(batch)
    assert len([name for name in runs.names if name.startswith("log/")]) < 6


def test_the_log_is_asked_without_the_lock_of_other_calls(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may ask the store, which can hang."""
    waiting: list[bool] = []
    removable = NumberedLog.removable

    def ask(log: NumberedLog, start: int) -> list[str]:
        other = threading.Thread(target=runs.coordinator.require_committed, args=(0,), daemon=True)
        other.start()
        other.join(10)
        waiting.append(other.is_alive())
        return removable(log, start)

    monkeypatch.setattr(NumberedLog, "removable", ask)
    runs.start(0)
    runs.batch(0)
    assert waiting == [False]


def test_what_has_not_begun_is_refused(runs: Runs) -> None:
    runs.start(0, dataclasses.replace(KEYED, parallelism=2))

    def refused(task: TaskId) -> None:
        for call in (lambda: runs.ack(0, task=task), lambda: runs.coordinator.fetch(Fetch(task, []))):
            with pytest.raises(FencedError, match="has not begun batch") as raised:
                call()
            assert raised.value.kind is ErrorKind.STALE_RUN

    refused(runs.task(0, 0, 99))
    runs.begin(0)
    for task in (runs.task(0, 0, 99), runs.task(0, 1), runs.task(1, 0)):
        refused(task)


@pytest.mark.parametrize("how", ["closed", "fenced"])
def test_a_run_that_is_over_answers_nobody(runs: Runs, tmp_path: Path, how: str) -> None:
    runs.start(0)
    begun = runs.begin(0)
    task = runs.task(0)
    newer = Runs(tmp_path)
    if how == "fenced":
        newer.start(0)
        with pytest.raises(FencedError):
            runs.ack(0)
    runs.coordinator.close()
    calls = (lambda: runs.begin(0), lambda: runs.ack(0, task=task), lambda: runs.coordinator.fetch(Fetch(task, [])))
    for call in calls:
        with pytest.raises(FencedError) as raised:
            call()
        assert ("is over" in str(raised.value)) == (how == "closed"), "the first reason is the one that is told"
    assert begun.permit.epoch == 1
    if how == "fenced":
        newer.batch(0)
        assert [entry.run_id for entry in newer.entries] == ["run-1"], "the newer one continues"


# ---- What an entry becomes of ----


def test_steps_of_the_driver_are_told_as_nobodys(runs: Runs) -> None:
    runs.start(0)
    runs.batches(0, 1)
    assert runs.told.steps == [(step, batch, -1) for batch in (0, 1) for step in (Step.LAST_ACK, Step.DURABLE)]


def test_a_checkpoint_tells_how_long_it_took_since_the_last_ack(runs: Runs) -> None:
    runs.clock.advance(5000.0)
    runs.start(0)
    runs.batch(0)
    assert runs.told.metrics[-1].commit_s == pytest.approx(0.25), "and nothing of the observer's time after it"


def test_what_the_driver_has_measured_comes_with_the_next_checkpoint(runs: Runs) -> None:
    runs.start(0)
    runs.measurements.count(Metric.STATE_FETCHES)
    runs.batches(0, 1)
    counted = [metrics.measured.counts.get(Metric.STATE_FETCHES, 0) for metrics in runs.told.metrics]
    assert counted == [1, 0]


@pytest.mark.parametrize("merging", ["across", "within"])
def test_a_checkpoint_counts_the_files_of_the_log_that_were_made_for_it(runs: Runs, merging: str) -> None:
    runs.options = dataclasses.replace(runs.options, file_merging=merging)
    runs.start(0)
    runs.batches(0, 2)
    assert [metrics.objects for metrics in runs.told.metrics] == [int(merging == "within")] * 3


def test_materialized_runs_inside_an_entry_are_named_where_they_are_by_its_revisions(runs: Runs) -> None:
    """The bytes that came with the ack are written once."""
    runs.options = dataclasses.replace(
        runs.options,
        materialization_interval_s=0,
        tuning=dataclasses.replace(runs.options.tuning, materialization=True),
    )
    runs.start(0)
    runs.batch(0)
    begun = runs.begin(1)
    assert begun.permit.maintenance is not None
    assert begun.permit.maintenance.grant is not None
    run = StoredRun("", 0, 6, digests.checksum(b"merged"), 1, WHOLE.first, WHOLE.last)
    level = Level(0, 0, begun.view.genesis, begun.view.head, WHOLE.first, WHOLE.last, [run])
    assert (
        runs.ack(1, b"1", levels=[level], job=begun.permit.maintenance.grant.job, behind=b"merged")
        is JobOutcome.ACCEPTED
    )
    runs.batch(1, b"another result")
    first, second = (entry.bases[0].levels[0].runs[0] for entry in runs.entries[1:])
    assert runs.entries[-1].revision == 1
    assert first == second
    assert runs.store.read(second.name, offset=second.offset, length=second.length) == b"merged"
    assert sum(runs.store.read(info.name).count(b"merged") for info in runs.store.list("log/")) == 1


def test_checkpoints_that_are_not_retained_any_more_go(runs: Runs) -> None:
    runs.options = dataclasses.replace(runs.options, retained_checkpoints=2, file_merging="within")
    runs.start(0, WITHOUT_KEYS)
    for batch in range(6):
        begun = runs.begin(batch)
        runs.store.put(f"{begun.permit.upload_prefix}/{batch}-a", b"data")
        task = runs.task(batch)
        runs.coordinator.ack(make_ack(task, b"%d" % batch, 4, 1, 0, f"{begun.permit.upload_prefix}/{batch}-a"), b"")
    assert {name for name in runs.names if "/changes/" in name} == {
        f"{runs.identity}/changes/1/0/{batch}-a" for batch in (4, 5)
    }
    assert [entry.retained_from for entry in runs.entries][-1] == 4


# ---- What is held ----


@pytest.mark.parametrize(("batch", "is_held"), [(2, False), (3, True), (4, True), (5, False)])
def test_what_is_retained_and_durable_can_be_held(runs: Runs, batch: int, is_held: bool) -> None:
    runs.options = dataclasses.replace(runs.options, retained_checkpoints=2)
    runs.start(0)
    with runs.coordinator.holding(0) as history:
        assert history is None, "no batch has begun"
    runs.batches(0, 4)
    with runs.coordinator.holding(batch) as history:
        assert (history is not None) == is_held
        runs.batches(5, 7)
        assert runs.entries[-1].retained_from == (batch if is_held else 6)
        assert history is None or not history.has_batch(5), "as it was"
    runs.batch(8)
    assert runs.entries[-1].retained_from == 7


def test_what_the_batch_in_progress_gives_up_cannot_be_held(runs: Runs) -> None:
    """Its entry may be in the log already, although nobody knows."""
    runs.options = dataclasses.replace(runs.options, retained_checkpoints=2)
    runs.start(0)
    runs.batches(0, 4)
    runs.begin(5)
    with runs.coordinator.holding(3) as gone, runs.coordinator.holding(4) as held:
        assert gone is None
        assert held is not None


@pytest.mark.parametrize(("first_batch", "batches", "retained_from"), [(0, 6, -1), (1, 2, 0), (6, 6, 4)])
def test_what_was_given_up_does_not_come_back_but_with_a_rerun(
    runs: Runs, first_batch: int, batches: int, retained_from: int
) -> None:
    runs.options = dataclasses.replace(runs.options, retained_checkpoints=2)
    runs.start(0)
    runs.batches(0, batches - 1)
    runs.options = dataclasses.replace(runs.options, retained_checkpoints=20)
    runs.start(first_batch)
    runs.batch(first_batch)
    assert runs.entries[-1].retained_from == retained_from


def test_a_run_removes_what_it_has_left_before_it_gives_up_its_epoch(runs: Runs) -> None:
    """The next run may have the same number, and the same folder."""
    deleted: list[str] = []

    class Deletes(FaultPlan):
        def fault(self, call: Call) -> Fault | None:
            if call.operation == "delete":
                deleted.append(call.name)
            return None

    runs.store = FaultStore(runs.store, Deletes())
    runs.start(0)
    name = f"{runs.begin(0).permit.upload_prefix}/0-a.run"
    runs.store.put(name, b"data")
    runs.coordinator.close()
    assert deleted == [name, f"log/{1:020}.log"]
    assert runs.names == set()


def test_a_materialization_that_fails_too_often_stops_the_run(runs: Runs) -> None:
    runs.options = dataclasses.replace(
        runs.options,
        materialization_interval_s=0,
        tuning=dataclasses.replace(runs.options.tuning, materialization=True, materialization_max_failures=0),
    )
    runs.start(0)
    runs.batch(0)
    begun = runs.begin(1)
    assert begun.permit.maintenance is not None
    assert begun.permit.maintenance.grant is not None
    for _ in range(2):
        with pytest.raises(StorageError, match="failed more than 0 times in a row: no room") as raised:
            runs.ack(1, job=begun.permit.maintenance.grant.job, materialization_failure="no room")
        assert raised.value.kind is ErrorKind.MATERIALIZATION
    with pytest.raises(StorageError, match="no room"):
        runs.begin(1)


# ---- Operator state ----


def snapshot_ack(runs: Runs, batch: int, data: bytes, **more: Any) -> None:
    runs.begin(batch)
    runs.ack(batch, data, element_counts={}, **more)


def unchanged(runs: Runs, batch: int, data: bytes) -> None:
    snapshot_ack(runs, batch, data, is_unchanged=True, length=0)


def test_a_snapshot_that_is_called_unchanged_is_the_one_that_was_started_from(runs: Runs) -> None:
    runs.start(0, WITHOUT_KEYS)
    with pytest.raises(ProtocolError, match="subtask 0 refers to a snapshot that it did not start from"):
        unchanged(runs, 0, b"never was")
    snapshot_ack(runs, 0, b"snapshot")
    with pytest.raises(ProtocolError, match="did not start from"):
        unchanged(runs, 1, b"another")
    unchanged(runs, 1, b"snapshot")
    [before, after] = [entry.segments[0] for entry in runs.entries]
    assert (after.name, after.offset, after.checksum) == (before.name, before.offset, before.checksum)


LIST = StateSchema("s", "operator-list", b"", state("s").value_schema)


def test_a_snapshot_that_was_put_together_from_others_cannot_be_unchanged(runs: Runs) -> None:
    run = dataclasses.replace(WITHOUT_KEYS, states=[LIST])
    runs.start(0, run)
    runs.begin(0)
    runs.ack(0, b"both", element_counts={"s": 2})
    runs.start(1, dataclasses.replace(run, parallelism=2))
    begun = runs.begin(1)
    assert begun.view.snapshot_view is not None
    assert begun.view.snapshot_view.slices is not None
    with pytest.raises(ProtocolError, match="did not start from"):
        runs.ack(1, b"both", is_unchanged=True, length=0)


def test_copies_that_differ_are_refused_before_anything_else(runs: Runs) -> None:
    runs.start(0, dataclasses.replace(WITHOUT_KEYS, parallelism=2))
    for subtask in (0, 1):
        runs.begin(0, subtask)
        if subtask == 0:
            runs.ack(0, subtask=0, broadcast_checksums={"rules": b"0"})
    with pytest.raises(ProcessorError, match="'rules' differs"):
        runs.ack(0, subtask=1, broadcast_checksums={"rules": b"1"})
    assert runs.told.steps == []
    assert runs.entries == []


def test_a_snapshot_that_stays_is_moved_out_of_a_file_that_is_mostly_waste(runs: Runs) -> None:
    """If that fails it stays for now, and nothing else does."""

    class Unreadable(StoreWrapper):
        def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
            if length == len(b"stays") and is_failing:
                raise StorageError("read failed: no.")
            return super().read(name, offset=offset, length=length)

    is_failing = True
    runs.options = dataclasses.replace(
        runs.options, retained_checkpoints=2, tuning=dataclasses.replace(runs.options.tuning, max_file_bytes=2000)
    )
    runs.store = Unreadable(runs.store)
    runs.start(0, dataclasses.replace(WITHOUT_KEYS, parallelism=2))
    runs.batch(0, b"stays", b"0" * 100)
    places: list[SegmentRef] = []
    for batch in range(1, 30):
        is_failing = batch < 20
        runs.begin(batch, 0)
        runs.ack(batch, b"stays", is_unchanged=True, length=0)
        runs.begin(batch, 1)
        runs.ack(batch, b"%d" % batch * 100, subtask=1)
        places.append(runs.entries[-1].segments[0])
    assert len({place.name for place in places[:19]}) == 1
    moved = places[-1]
    assert moved.name != places[0].name
    assert runs.store.read(moved.name, offset=moved.offset, length=moved.length) == b"stays"


def test_keyed_state_is_never_unchanged(runs: Runs) -> None:
    runs.start(0)
    runs.batch(0)
    runs.begin(1)
    with pytest.raises(ProtocolError, match="did not start from"):
        runs.ack(1, b"data", is_unchanged=True, length=0)


@pytest.mark.parametrize("changelog", [False, True])
def test_an_operator_without_keys_gets_no_orders_and_counts_no_log(runs: Runs, changelog: bool) -> None:
    runs.options = dataclasses.replace(
        runs.options,
        materialization_interval_s=0,
        tuning=dataclasses.replace(runs.options.tuning, materialization=True, changelog=changelog),
    )
    runs.start(0, WITHOUT_KEYS)
    for batch in range(3):
        begun = runs.batch(batch, b"%d" % batch)
        assert begun.permit.maintenance is None
        assert begun.view.snapshot_view == (
            SnapshotView() if batch == 0 else SnapshotView([runs.entries[batch - 1].segments[0]], None)
        )
    assert [(metrics.log_bytes, metrics.base_bytes) for metrics in runs.told.metrics] == [(0, 0)] * 3
    assert [entry.base_ranges for entry in runs.entries] == [None] * 3


def test_only_large_operator_state_is_warned_of(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("statelog.coordinator.redistribution.LARGE_SNAPSHOT_BYTES", 4)
    monkeypatch.setattr(logging.getLogger("statelog.coordinator.redistribution"), "propagate", True)
    runs.start(0)
    runs.batch(0, b"12345")
    runs.start(0, WITHOUT_KEYS)
    snapshot_ack(runs, 0, b"12345")
    runs.start(0, dataclasses.replace(WITHOUT_KEYS, states=[LIST]))
    snapshot_ack(runs, 0, b"1234")
    assert "operator state" not in caplog.text
    snapshot_ack(runs, 1, b"12345")
    assert "operator state of subtask 0 has" in caplog.text
    snapshot_ack(runs, 2, b"123456")
    assert [record.levelname for record in caplog.records if "operator state" in record.getMessage()] == ["WARNING"]
