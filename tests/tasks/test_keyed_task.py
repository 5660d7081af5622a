"""An attempt of a subtask with keys: what it tells the coordinator and when, and which answers it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace

from statelog import Observer, ProtocolError, Step
from statelog.local.materializer import Materialized, Materializer
from statelog.local.restore import SHARED_FOLDER
from statelog.local.runs import LocalRuns
from statelog.local.use import SPARE_BATCHES, in_use
from statelog.metrics import Metric, Recorded
from statelog.operators.keyed.changes import ChangeBuffer
from statelog.operators.keyed.operator import BatchContext, KeyedOperator, KeyedRows
from statelog.operators.keyed.subtask import KeyedSubtask
from statelog.rpc.messages import Ack, Acked, Begin, Begun, Fetch, JobOutcome, Reply, Request, TaskTimes
from statelog.runs import digests
from statelog.runs.byte_slices import Budget
from statelog.runs.schema import TimeDomain, stored_name
from statelog.runs.times import Moment
from statelog.stopwatch import Stopwatch
from statelog.storage import LocalStore
from statelog.tables.rocksdb import RocksTable
from statelog.tables.runs import RunsTable
from statelog.tables.table import StateTable
from statelog.tasks import keyed_task
from statelog.tasks.changeset import Uploads
from statelog.tasks.keyed_task import BatchInput, KeyedTask, Maintenance, as_stored, read_initial
from statelog.testing.keyed import LocalKeyedOperator
from tests.model.engine import Command, Engine, Key

KEY: Key = (1, None)


class NotingEngine(Engine):
    """Notes the calls of tasks, and may answer in the coordinator's place."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, lambda key: 0, **options)
        self.acks: list[tuple[Ack, bytes]] = []
        self.begins: list[Begin] = []
        self.begun: list[Begun] = []
        self.answers: dict[type[Request], Reply] = {}
        self.waits: dict[type[Request], float] = {}

    def call(self, request: Request, payload: bytes) -> Reply:
        if isinstance(request, Ack):
            self.acks.append((request, payload))
        if isinstance(request, Begin):
            self.begins.append(request)
        self.clock.advance(self.waits.get(type(request), 0.0))
        reply = self.answers.get(type(request)) or super().call(request, payload)
        if isinstance(reply, Begun):
            self.begun.append(reply)
        return reply

    @property
    def ack(self) -> Ack:
        return self.acks[-1][0]


@pytest.fixture
def engine(tmp_path: Path) -> NotingEngine:
    return NotingEngine(tmp_path)


def run(engine: Engine, batch: int, *commands: Command) -> list[Any]:
    return engine.run_commands(batch, 0, [(KEY, command) for command in commands])


# ---- What it tells ----


def test_an_ack_says_what_has_changed(engine: NotingEngine) -> None:
    engine.start(1, 0)
    run(engine, 0, ("set", 1), ("append", "a", "b"), ("read",))
    ack, payload = engine.acks[-1]
    assert (ack.last.checksum, ack.last.length, ack.last.name) == (digests.checksum(payload), len(payload), "")
    assert (ack.last.rows, ack.last.input_rows, ack.has_changeset, ack.has_backlog) == (3, 3, True, False)
    assert (ack.levels, ack.job, ack.materialization_failure, len(ack.segments)) == ([], "", "", 1)
    assert (engine.begins[-1].input_rows, engine.begins[-1].batch_time_ms) == (3, 1000)


@pytest.mark.parametrize("adds_floats", [False, True])
def test_an_ack_says_whether_another_attempt_may_give_other_last_digits(
    engine: NotingEngine, adds_floats: bool
) -> None:
    assert isinstance(engine.operator, LocalKeyedOperator)
    make = engine.operator.make
    engine.operator = dataclasses.replace(
        engine.operator, make=lambda: dataclasses.replace(make(), adds_floats=adds_floats)
    )
    engine.start(1, 0)
    run(engine, 0, ("set", 1))
    assert engine.ack.adds_floats is adds_floats


def advancing(engine: NotingEngine, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, seconds: float) -> None:
    """Let each call of a method take so long."""
    method = getattr(owner, name)

    def slow(self: Any, *arguments: Any, **named: Any) -> Any:
        engine.clock.advance(seconds)
        return method(self, *arguments, **named)

    monkeypatch.setattr(owner, name, slow)


def test_an_ack_says_where_the_time_went(engine: NotingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[Step, int, int, int]] = []

    class Slow(Observer):
        def step(self, step: Step, batch: int, subtask: int) -> None:
            if subtask >= 0:
                steps.append((step, batch, subtask, len(engine.acks)))
            engine.clock.advance(1000.0)

    engine.start(1, 0)
    run(engine, 0, ("set", 1))
    engine.clock.advance(5000.0)
    engine.options = dataclasses.replace(engine.options, observer=Slow())
    engine.waits[Begin] = 8.0
    advancing(engine, monkeypatch, RunsTable, "get_many", 2.0)
    advancing(engine, monkeypatch, ChangeBuffer, "add", 0.125)
    advancing(engine, monkeypatch, LocalRuns, "write_new", 0.25)
    advancing(engine, monkeypatch, Uploads, "finish", 4.0)
    advancing(engine, monkeypatch, KeyedSubtask, "_fire_timers", 16.0)
    run(engine, 1, ("read",), ("set", 2))
    times = engine.ack.times
    assert times == TaskTimes(read_s=times.read_s, processor_s=16.0, encode_s=0.625, upload_s=4.0, wait_s=8.0)
    assert times.read_s >= 2.0
    assert times.read_s % 2.0 == 0, "nothing but reads of the table"
    assert engine.ack.subtask_s == 4.625
    assert steps[:3] == [(Step.RESTORED, 1, 0, 1), (Step.ACKING, 1, 0, 1), (Step.ACKED, 1, 0, 2)]


def test_an_ack_tells_sizes_of_states_and_the_hottest_keys(engine: NotingEngine) -> None:
    engine.start(1, 0)
    engine.run_commands(0, 0, [(KEY, ("set", 1)), (KEY, ("set", 2)), ((2, None), ("set", 3))])
    first = engine.ack
    assert [(rows, bool(key)) for rows, _, key in first.hot_keys] == [(2, True)]
    assert first.hot_key_groups == [(3, 0)], "all keys have the same hash"
    sizes = {name: rows for name, (rows, _) in first.state_sizes.items()}
    assert sizes["value"] == 2
    assert all(size_bytes > 0 for rows, size_bytes in first.state_sizes.values() if rows)
    engine.options = dataclasses.replace(engine.options, redact_keys=True)
    engine.run_commands(1, 0, [(KEY, ("set", 1)), (KEY, ("set", 2))])
    assert engine.ack.hot_keys == [(2, first.hot_keys[0][1], b"")]
    assert engine.ack.state_sizes["value"][0] == 3, "the replaced row counts until it is merged"


def test_a_restore_is_measured_from_the_answer_to_begin_until_the_state_can_be_read(engine: NotingEngine) -> None:
    engine.start(1, 0)
    run(engine, 0, ("set", 1))
    assert (engine.ack.measured, engine.ack.restored_bytes) == (Recorded(), 0)
    engine.start(1, 1, keep_local=False)
    engine.waits[Fetch] = 0.5
    run(engine, 1, ("set", 2))
    assert engine.ack.restore_s == pytest.approx(0.5)
    assert engine.ack.measured.counts == {Metric.STATE_FETCHES: 1}
    assert engine.ack.restored_bytes == len(engine.acks[0][1])
    run(engine, 2, ("set", 3))
    assert (engine.ack.measured, engine.ack.restored_bytes) == (Recorded(), 0)


def test_the_last_rows_come_after_the_ack_and_all_others_as_they_are_made(
    engine: NotingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    acked: list[bool] = []
    run_task = KeyedTask.run

    def noted(self: KeyedTask, read: BatchInput) -> Iterator[Any]:
        for output in run_task(self, read):
            acked.append(bool(engine.acks))
            yield output

    monkeypatch.setattr(KeyedTask, "run", noted)
    engine.start(1, 0)
    keys: list[Key] = [(number, None) for number in range(30_000)]
    assert len(engine.run_commands(0, 0, [(key, ("read",)) for key in keys])) == len(keys)
    assert acked == [False] * (len(acked) - 1) + [True]
    assert len(acked) > 1


def test_without_changelog_no_part_of_one_is_written(engine: NotingEngine) -> None:
    engine.options = dataclasses.replace(
        engine.options,
        inline_budget_bytes=0,
        tuning=dataclasses.replace(engine.options.tuning, changelog=False, upload_part_bytes=1),
    )
    assert isinstance(engine.operator, LocalKeyedOperator)
    engine.operator = engine.operator.with_budget(Budget(window_keys=10))
    engine.start(1, 0)
    engine.run_commands(0, 0, [((number, None), ("set", number)) for number in range(100)])
    assert not engine.ack.has_changeset
    assert LocalStore(engine.location).list(f"{engine.identity}/changes/") == []


def test_a_batch_has_the_times_that_the_coordinator_tells(
    engine: NotingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a repetition fires the same timers, and looks for none that an earlier batch has fired."""
    contexts: list[BatchContext] = []

    class Noted(KeyedSubtask):
        def __init__(
            self, operator: KeyedOperator, table: StateTable, context: BatchContext, stopwatch: Stopwatch
        ) -> None:
            contexts.append(context)
            super().__init__(operator, table, context, stopwatch)

    monkeypatch.setattr(keyed_task, "KeyedSubtask", Noted)
    engine.start(1, 0)
    run(engine, 0, ("set", 1))
    begun = engine.begun[-1]
    times = {"watermark_ms": 950, "late_watermark_ms": 900, "timers_after_ms": 850, "arrivals_after_ms": 700}
    told = Begun(replace(begun.view, closed_ms=800), replace(begun.permit, epoch=7, batch_time_ms=1000, **times))
    engine.answers = {Begin: told, Ack: Acked()}
    run(engine, 0, ("set", 1))
    assert contexts[-1] == BatchContext(7, 0, Moment(1000, 950, 900), 850, 700, closed_ms=800)


def test_an_ack_says_what_the_next_batches_have_to_know(engine: NotingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which timers have fired, and whether merges wait for their turn."""

    class Noted(KeyedSubtask):
        def process(self, read: KeyedRows, initial: KeyedRows | None = None) -> Iterator[pa.RecordBatch]:
            yield from super().process(read, initial)
            self.timers_to_ms, self.arrivals_to_ms = 850, 700

    monkeypatch.setattr(keyed_task, "KeyedSubtask", Noted)
    monkeypatch.setattr(Maintenance, "has_backlog", property(lambda maintenance: True))
    engine.start(1, 0)
    run(engine, 0, ("set", 1))
    assert (engine.ack.timers_to_ms, engine.ack.arrivals_to_ms, engine.ack.has_backlog) == (850, 700, True)


def test_the_rows_of_an_initial_state_are_read_where_the_coordinator_says(
    engine: NotingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[KeyedRows | None] = []

    class Noted(KeyedSubtask):
        def process(self, read: KeyedRows, initial: KeyedRows | None = None) -> Iterator[pa.RecordBatch]:
            found.append(initial)
            return super().process(read, None)

    monkeypatch.setattr(keyed_task, "KeyedSubtask", Noted)
    engine.start(1, 0)
    LocalStore(engine.location).put("op/initial/a", initial_of(3))
    engine.coordinator.operator(engine.uid).offer_initial_rows(["op/initial/a"])
    for batch in range(2):
        run(engine, batch, ("set", 1))
    assert [initial and initial.rows.num_rows for initial in found] == [3, None]


def test_states_are_stored_under_the_names_and_with_the_expiry_that_the_coordinator_tells(
    engine: NotingEngine,
) -> None:
    assert isinstance(engine.operator, LocalKeyedOperator)
    operator = engine.operator.make()
    first, *others = [binding.name for binding in operator.states]
    for generations, expires_by in (({}, {}), ({first: 2}, {}), ({}, {first: "event"}), ({first: 2}, {first: "event"})):
        made = as_stored(operator, generations, expires_by)
        assert [binding.name for binding in made.states] == [first, *others]
        stored = [binding.descriptor for binding in made.states]
        before = [binding.descriptor for binding in operator.states]
        assert stored[0].name == stored_name(first, generations.get(first, 0))
        assert stored[0].expires_by == (TimeDomain.EVENT if expires_by else before[0].expires_by)
        assert stored[1:] == before[1:]


def test_a_state_is_materialized_after_the_ack(engine: NotingEngine) -> None:
    engine.options = dataclasses.replace(engine.options, materialization_interval_s=0)
    engine.start(1, 0)
    for batch in range(4):
        run(engine, batch, ("set", batch))
    assert any(ack.levels for ack, _ in engine.acks)


# ---- Answers that are refused ----


@pytest.mark.parametrize(
    ("request_", "answer", "what"),
    [
        (Begin, Acked(), "answered begin with Acked"),
        (Fetch, Acked(), "answered fetch with Acked"),
        (Ack, None, "answered an ack with Begun"),
    ],
)
def test_an_answer_to_another_call_is_refused(
    engine: NotingEngine, request_: type[Request], answer: Reply | None, what: str
) -> None:
    engine.start(1, 0)
    run(engine, 0, ("set", 1))
    engine.start(1, 1, keep_local=False)
    if answer is None:
        engine.attempts += 1
        answer = engine.coordinator.begin(Begin(engine.task_id(1, 0, engine.attempts), 0, 0, None, "token"))
    engine.answers[request_] = answer
    with pytest.raises(ProtocolError, match=what):
        run(engine, 1, ("set", 2))


# ---- What it leaves ----


@pytest.mark.parametrize("table", ["runs", "memory", "rocksdb"])
def test_every_table_holds_the_state_before_the_batch(tmp_path: Path, table: str) -> None:
    engine = NotingEngine(tmp_path, table=table)
    engine.start(1, 0)
    run(engine, 0, ("set", 1))
    run(engine, 1, ("set", 2))
    for _ in range(2):
        [[_, found]] = run(engine, 2, ("read",))
        assert found[0] == [2]
    engine.start(1, 2)
    [[_, found]] = run(engine, 2, ("read",))
    assert found[0] == [2]
    folder = engine.local / engine.identity / "1" / "0" / "rocksdb"
    assert folder.exists() == (table == "rocksdb")


@pytest.mark.parametrize("table", ["runs", "memory", "rocksdb"])
def test_a_repetition_finds_what_its_batch_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    """What the batch in progress builds on is swept only when a later one has made it certain."""
    kept: list[int] = []
    sweep = LocalRuns.sweep

    def noted(self: LocalRuns, path: Any, *, certain: int, keeps_rocksdb: bool) -> None:
        kept.append(certain)
        sweep(self, path, certain=certain, keeps_rocksdb=keeps_rocksdb)

    monkeypatch.setattr(LocalRuns, "sweep", noted)
    engine = NotingEngine(tmp_path, table=table)
    engine.start(1, 0)
    for batch in (0, 1, 1, 2):
        run(engine, batch, ("append", str(batch)))
    assert kept == [-1, 0, 0, 1]
    assert all(ack.measured == Recorded() for ack, _ in engine.acks), "nothing was fetched"


def test_what_is_fetched_is_kept_as_the_state_after_the_batch_before(engine: NotingEngine) -> None:
    """It can be merged and materialized at once: that batch is certain."""
    engine.start(1, 0)
    for batch in range(3):
        run(engine, batch, ("append", str(batch)))
    engine.start(1, 3, keep_local=False)
    run(engine, 3, ("append", "3"))
    local_runs = LocalRuns(engine.local / engine.identity / "1" / "0").local_runs()
    assert sorted((local_run.first, local_run.last) for local_run in local_runs)[-1] == (3, 3)
    assert max(local_run.last for local_run in local_runs if local_run.first < 3) == 2


def test_directories_of_subtasks_that_are_elsewhere_go_in_their_turn(engine: NotingEngine) -> None:
    engine.start(1, 0)
    run(engine, 0, ("append", "0"))
    other = engine.local / engine.identity / "1" / "7"
    other.mkdir()
    with in_use(other, 0):
        pass  # a subtask that has run here once
    for batch in range(1, 2 * SPARE_BATCHES + 2):
        assert other.exists() or batch > SPARE_BATCHES
        run(engine, batch, ("append", str(batch)))
    assert not other.exists()


def test_a_table_that_another_attempt_has_open_is_not_waited_for_and_can_go_on(tmp_path: Path) -> None:
    """The state is read from the local runs meanwhile, and those that lead on from the table stay."""
    engine = NotingEngine(tmp_path, table="rocksdb")
    engine.start(1, 0)
    for batch in range(3):
        run(engine, batch, ("append", str(batch)))
    local = LocalRuns(engine.local / engine.identity / "1" / "0")
    table = RocksTable.open(local.directory / "rocksdb")
    assert table is not None, "a batch closes its table"
    for batch in range(3, 9):
        [_, [_, found]] = run(engine, batch, ("append", str(batch)), ("read",))
        assert found[1] == [str(number) for number in range(batch + 1)]
    held = table.digest
    assert held is not None
    assert local.chain(held, max(local.local_runs(), key=lambda local_run: local_run.last).after) is not None
    table.close()
    run(engine, 9, ("append", "9"))
    table = RocksTable.open(local.directory / "rocksdb")
    assert table is not None
    assert table.digest != held
    table.close()


def test_shared_reads_stay_until_every_subtask_of_their_batch_has_its_state(engine: NotingEngine) -> None:
    engine.start(1, 0)
    run(engine, 0, ("append", "0"))
    folder = engine.local / SHARED_FOLDER
    folder.mkdir()
    for batch in range(4):
        (folder / f"{batch}-of-a-start").touch()
    run(engine, 1, ("append", "1"))
    run(engine, 2, ("append", "2"))
    assert sorted(path.name[0] for path in folder.iterdir()) == ["2", "3"]


@pytest.mark.parametrize(
    ("outcome", "ended"), [(JobOutcome.ACCEPTED, ["job"]), (JobOutcome.VOID, ["job"]), (JobOutcome.OPEN, [])]
)
def test_a_job_goes_when_its_grant_has_ended(
    engine: NotingEngine, monkeypatch: pytest.MonkeyPatch, outcome: JobOutcome, ended: list[str]
) -> None:
    """Nothing else is merged after a batch that offers one."""
    gone: list[str] = []
    monkeypatch.setattr(Materializer, "result", lambda self, grant: Materialized([], "job", failure="disk full"))
    monkeypatch.setattr(Materializer, "end", lambda self, job: gone.append(job))
    monkeypatch.setattr(Maintenance, "work", lambda self: gone.append("inputs"))
    engine.start(1, 0)
    engine.answers[Ack] = Acked(outcome)
    run(engine, 0, ("append", "0"))
    assert (engine.ack.job, engine.ack.materialization_failure) == ("job", "disk full")
    assert gone == ended


@pytest.mark.parametrize("table", ["memory", "rocksdb"])
def test_a_batch_reads_the_table_of_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    monkeypatch.setattr(keyed_task, "RunsTable", None)
    engine = NotingEngine(tmp_path, table=table)
    engine.start(1, 0)
    run(engine, 0, ("append", "0"))
    [[_, found]] = run(engine, 1, ("read",))
    assert found[1] == ["0"]


def test_no_rows_of_an_initial_state_are_none() -> None:
    assert read_initial(initial_of(0), "initial") is None
    found = read_initial(initial_of(3), "initial")
    assert found is not None
    assert found.rows.num_rows == 3
    assert found.hashes.tolist() == [2**64 - 1, 0, 1]


def initial_of(count: int) -> bytes:
    """The rows of an initial state as they are stored; hashes are signed, as Spark's."""
    rows = pa.table({"n": pa.array(range(count), pa.int64()), "hash": pa.array(range(-1, count - 1), pa.int64())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return bytes(sink.getvalue())
