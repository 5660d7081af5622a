"""Large changesets: parts written while the batch runs, what bounds them, and what becomes of them after a failure."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from statelog import Options, ProcessorError, Step, StorageError
from statelog.metrics import Measurements, Metric
from statelog.options import TABLES, Tuning
from statelog.runs.byte_slices import Budget
from statelog.storage import LocalStore, Store
from statelog.storage.store import StoreWrapper
from statelog.tasks.changeset import Uploads
from statelog.tasks.keyed_task import BatchInput, KeyedTask
from statelog.testing import Harness
from statelog.testing.faults import Call, Fault, FaultPlan, FaultStore
from statelog.testing.harness import parts_of
from statelog.testing.keyed import LocalKeyedOperator

EVENTS: list[int | str] = []
"""The keys that were processed, and the objects that were written."""


class Watched(StoreWrapper):
    """Counts writes by name, and holds them back until it is told."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.go_on = threading.Event()
        self.written: Counter[str] = Counter()
        self.running = self.most_running = 0
        self._counting = threading.Lock()

    def put(self, name: str, data: bytes | memoryview) -> None:
        with self._counting:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        self.go_on.wait(20)
        super().put(name, data)
        with self._counting:
            self.written[name] += 1
            self.running -= 1


# ---- Bounds ----


def make_uploads(store: Store, *, max_bytes: int = 1000, threads: int = 2) -> tuple[Uploads, Measurements]:
    measured = Measurements()
    return Uploads(lambda: store, max_bytes=max_bytes, threads=threads, recorder=measured), measured


def test_adding_waits_while_too_much_is_under_way(tmp_path: Path) -> None:
    store = Watched(LocalStore(tmp_path))
    uploads, measured = make_uploads(store)
    uploads.add("a", bytes(600))
    uploads.add("b", bytes(600))
    waiting = threading.Thread(target=uploads.add, args=("c", bytes(600)))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive(), "1,200 bytes are under way"
    store.go_on.set()
    waiting.join(20)
    uploads.finish()
    assert store.written == {"a": 1, "b": 1, "c": 1}
    queue = measured.take().samples[Metric.UPLOAD_QUEUE_BYTES]
    assert queue[:2] == [600, 1200]
    assert queue[2] <= 1200


def test_one_object_may_be_larger_than_the_limit(tmp_path: Path) -> None:
    store = Watched(LocalStore(tmp_path))
    store.go_on.set()
    uploads, _ = make_uploads(store, max_bytes=10)
    for name in "abc":
        uploads.add(name, bytes(100))
    uploads.finish()
    assert len(store.list()) == 3


def test_adding_waits_at_the_limit_and_not_below_it(tmp_path: Path) -> None:
    store = Watched(LocalStore(tmp_path))
    uploads, measured = make_uploads(store, max_bytes=10)
    uploads.add("a", bytes(9))
    uploads.add("b", bytes(1))
    waiting = threading.Thread(target=uploads.add, args=("c", b""))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    store.go_on.set()
    waiting.join(20)
    uploads.finish()
    assert measured.take().samples[Metric.UPLOAD_QUEUE_BYTES][:2] == [9, 10]


def test_no_more_threads_than_allowed(tmp_path: Path) -> None:
    store = Watched(LocalStore(tmp_path))
    uploads, _ = make_uploads(store, threads=3)
    for number in range(9):
        uploads.add(str(number), b"x")
    store.go_on.set()
    uploads.finish()
    assert store.most_running == 3


def test_a_failure_stops_the_attempt_and_what_was_written_is_removed(tmp_path: Path) -> None:
    store = FaultStore(LocalStore(tmp_path), FaultPlan.at("put", call=2))
    uploads, _ = make_uploads(store, threads=1)
    uploads.add("a", b"x")
    uploads.add("b", b"x")
    with pytest.raises(StorageError, match="put b failed"):
        uploads.finish()
    with pytest.raises(StorageError, match="put b failed"):
        uploads.add("c", b"x")
    uploads.abandon()
    assert store.list() == []


def test_what_a_failed_attempt_cannot_remove_is_left_to_the_coordinator(tmp_path: Path) -> None:
    """It finds it when the batch is over; the attempt's own error is the one to report."""
    store = FaultStore(LocalStore(tmp_path), FaultPlan.at("delete"))
    uploads, _ = make_uploads(store)
    uploads.add("a", b"x")
    uploads.abandon()
    assert [info.name for info in store.list()] == ["a"]


def test_capacity_comes_back_after_failures(tmp_path: Path) -> None:
    class Failing(FaultPlan):
        def fault(self, call: Call) -> Fault | None:
            return Fault() if call.operation == "put" else None

    uploads, _ = make_uploads(FaultStore(LocalStore(tmp_path), Failing()), max_bytes=10, threads=1)
    uploads.add("a", bytes(100))
    with pytest.raises(StorageError):
        uploads.add("b", bytes(100))
    uploads.abandon()


def test_an_upload_that_cannot_be_started_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    uploads, _ = make_uploads(LocalStore(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            uploads.add("a", b"x")
    uploads.abandon()
    assert LocalStore(tmp_path).list() == []


@pytest.mark.parametrize("end", [Uploads.finish, Uploads.abandon])
def test_no_thread_is_left(tmp_path: Path, end: Callable[[Uploads], None]) -> None:
    before = set(threading.enumerate())
    uploads, _ = make_uploads(LocalStore(tmp_path))
    for name in "abc":
        uploads.add(name, b"x")
    end(uploads)
    assert set(threading.enumerate()) <= before


def test_nothing_is_opened_before_it_is_needed() -> None:
    def open_store() -> Store:
        raise AssertionError("nothing was added")

    uploads = Uploads(open_store, max_bytes=1, threads=1, recorder=Measurements())
    uploads.finish()
    uploads.abandon()


def test_an_upload_that_could_not_be_started_is_not_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool has taken it before it tries to start another thread, so it may be written and must be removed."""
    is_written = threading.Event()

    class Telling(Watched):
        def put(self, name: str, data: bytes | memoryview) -> None:
            super().put(name, data)
            if name == "b":
                is_written.set()

    store = Telling(LocalStore(tmp_path))
    uploads = Uploads(lambda: store, max_bytes=1000, threads=2, recorder=Measurements())
    uploads.add("a", b"x")

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError):
            uploads.add("b", b"x")
    store.go_on.set()
    assert is_written.wait(20)
    uploads.abandon()
    assert [info.name for info in store.list()] == []


# ---- Batches ----


class Sizes(StatefulProcessor):
    """Keeps a text of a length for each key, and a list of all lengths; a key ``fail`` fails."""

    def init(self, handle: Any) -> None:
        self._text = handle.getValueState("text", "text string")
        self._sizes = handle.getListState("sizes", "n long")
        self._handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if row.n < 0:
                raise RuntimeError("no such length")
            # Random enough not to be compressed away.
            self._text.update(("".join(map(str, range(row.n // 4))),))
            self._sizes.appendValue((row.n,))
        EVENTS.append(key[0])
        self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 1)
        yield Row(k=key[0], n=len(list(self._sizes.get())))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        self._text.update(("due",))
        yield from ()

    def close(self) -> None:
        pass


def make_harness(part_bytes: int, *, inline_bytes: int = 8 << 20, parallelism: int = 2, **more: Any) -> Harness:
    harness = Harness(
        Sizes(),
        input="k long, n long",
        keys=["k"],
        output="k long, n long",
        timeMode="ProcessingTime",
        parallelism=parallelism,
        options=Options(
            inline_budget_bytes=inline_bytes,
            max_in_flight_bytes=1,
            tuning=Tuning(upload_part_bytes=part_bytes, orphan_min_age_s=0),
        ),
        **more,
    )
    # Ten keys at a time, so that a batch has many windows.
    operator = parts_of(harness).query.operator
    assert isinstance(operator, LocalKeyedOperator)
    parts_of(harness).query.operator = operator.with_budget(Budget(window_keys=10))
    return harness


def uploads_of(harness: Harness) -> list[str]:
    query = parts_of(harness).query
    return [info.name for info in LocalStore(query.location).list(f"{query.identity}/changes/")]


def lost_uploads(harness: Harness) -> list[str]:
    """Uploads that no checkpoint names."""
    named = parts_of(harness).batches.history().object_names()
    return [name for name in uploads_of(harness) if name not in named]


ROWS = [(key, 400 + key) for key in range(60)]


def state_of(harness: Harness) -> list[Any]:
    return [(harness.value("text", key), harness.list("sizes", key), harness.timers(key)) for key, _ in ROWS]


def test_parts_are_written_while_the_batch_runs() -> None:
    EVENTS.clear()

    class Recording(FaultPlan):
        def fault(self, call: Call) -> Fault | None:
            if call.operation == "put":
                EVENTS.append(call.name)
            return None

    with make_harness(4000, inline_bytes=0, parallelism=1, storeFaults=Recording()) as harness:
        harness.push(ROWS)
        puts = [event for event in EVENTS if isinstance(event, str)]
        assert len(puts) == len(set(puts)) == len(uploads_of(harness)) > 2, "each is written once"
        assert EVENTS.index(puts[0]) < max(place for place, event in enumerate(EVENTS) if isinstance(event, int))
        assert harness.checkpoints[-1].objects >= len(puts)
        assert harness.checkpoints[-1].changes >= 3 * len(ROWS)


def test_a_changeset_holds_what_its_batch_has_changed() -> None:
    with make_harness(1 << 30) as harness:
        for rows, time_ms in ((ROWS, 1000), (ROWS[:2], 1000), ([], 1000), ([], 1001)):
            harness.push(rows, time_ms)
        # A text, an element and a timer per key; what only fires has a text and the timer.
        assert [metrics.changes for metrics in harness.checkpoints] == [180, 6, 0, 120]


@pytest.mark.parametrize("keeps_local", [True, False])
def test_a_checkpoint_tells_what_was_fetched_of_the_state_before(keeps_local: bool) -> None:
    with make_harness(1 << 30, parallelism=1) as harness:
        for _ in range(2):
            harness.push(ROWS)
        changed_bytes = sum(metrics.changed_bytes for metrics in harness.checkpoints)
        harness.restart(keepLocal=keeps_local)
        for _ in range(2):
            harness.push(ROWS)
        fetched_bytes = [metrics.restored_bytes for metrics in harness.checkpoints]
        assert fetched_bytes == [0, 0, 0 if keeps_local else changed_bytes, 0]
        fetches = [metrics.measured.counts.get(Metric.STATE_FETCHES, 0) for metrics in harness.checkpoints]
        assert fetches == [0, 0, 0 if keeps_local else 1, 0]


@pytest.mark.parametrize("inline_bytes", [0, 8 << 20])
@pytest.mark.parametrize("table", TABLES)
def test_a_changeset_in_parts_is_the_same_changeset(inline_bytes: int, table: str) -> None:
    """Also of several phases: the timers that a batch fires change what its rows have written."""
    found = []
    for part_bytes in (1, 2000, 1 << 30):
        with make_harness(part_bytes, inline_bytes=inline_bytes) as harness:
            harness.push(ROWS, 1000)
            harness.push(ROWS[::2], 1001)
            written = len(uploads_of(harness))
            harness.restart(3, keepLocal=False)
            harness.push(ROWS[::3], 1002)
            found.append(state_of(harness))
            assert (written > 8) == (part_bytes < 1 << 30 and inline_bytes == 0)
    assert found[0] == found[1] == found[2]
    assert found[0][2] == (("due",), [(402,), (402,)], [])


def test_a_failing_attempt_removes_what_it_has_written() -> None:
    with make_harness(1, inline_bytes=0, parallelism=1) as harness:
        with pytest.raises(ProcessorError, match="no such length"):
            harness.push([*ROWS, (99, -1)])
        assert uploads_of(harness) == []
        harness.push(ROWS)
        assert lost_uploads(harness) == []


def test_an_attempt_whose_output_is_not_read_to_its_end_removes_what_it_has_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = KeyedTask.run

    def read_a_little(task: KeyedTask, read: BatchInput) -> Iterator[pa.RecordBatch]:
        outputs = process(task, read)
        yield next(outputs)
        EVENTS.extend(uploads_of(harness))
        assert isinstance(outputs, Generator)
        outputs.close()

    EVENTS.clear()
    with make_harness(1, inline_bytes=0, parallelism=1) as harness:
        monkeypatch.setattr(KeyedTask, "run", read_a_little)
        harness.push(ROWS)
        assert [event for event in EVENTS if isinstance(event, str)]
        assert uploads_of(harness) == []


@pytest.mark.parametrize("step", [Step.RESTORED, Step.ACKING, Step.ACKED])
def test_what_a_killed_attempt_has_written_goes_with_the_next_batch(step: Step) -> None:
    with make_harness(1, inline_bytes=0) as harness:
        harness.push(ROWS)
        harness.crash(step, subtask=0)
        harness.push(ROWS)
        assert harness.crashes == 1
        lost = lost_uploads(harness)
        assert bool(lost) == (step is not Step.RESTORED)
        assert state_of(harness)[0][1] == [(400,), (400,)]
        harness.push(ROWS[:1])
        assert lost_uploads(harness) == []


def test_a_failing_store_changes_nothing() -> None:
    for seed in range(8):
        with make_harness(1, inline_bytes=0, storeFaults=0.02, seed=seed) as harness:
            for _ in range(3):
                harness.push(ROWS[:20])
            assert [harness.list("sizes", key) for key in range(20)] == [[(400 + key,)] * 3 for key in range(20)]


def test_nothing_is_uploaded_where_nothing_has_changed() -> None:
    """Neither by idle subtasks, nor after parts that have taken all changes."""
    with make_harness(1, inline_bytes=0, parallelism=2) as harness:
        harness.push(ROWS, 1000)
        before = uploads_of(harness)
        harness.push([], 1000)
        after = uploads_of(harness)
        query = parts_of(harness).query
        sizes = [info.size_bytes for info in LocalStore(query.location).list(f"{query.identity}/changes/")]
        assert (sorted(set(after) - set(before)), min(sizes) > 41) == ([], True)
