"""Materialization: what is stored when, what goes from the log, and what happens when it fails."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from statelog import ConfigurationError, CorruptionError, ErrorKind, Options, StorageError, Tuning
from statelog.coordinator.materialization import MaterializationSchedule
from statelog.history.operator_history import Record
from statelog.local.materializer import Grant, MaintenanceRequest, Materializer
from statelog.local.policy import MERGE_POLICY, MergePolicy
from statelog.local.runs import LocalRun, LocalRuns
from statelog.log.entry import Checkpoint, QueryCheckpoint
from statelog.runs.byte_slices import Budget
from statelog.runs.key_groups import hash_range
from statelog.runs.merge import Garbage
from statelog.runs.schema import Operation, TimeDomain
from statelog.runs.times import Moment
from statelog.storage import LocalStore
from statelog.testing import Harness
from statelog.testing.faults import Call, Fault, FaultPlan
from statelog.testing.harness import parts_of
from statelog.testing.query import ManualClock
from tests.contract.table_contract import VALUE, encode_changes, write_run
from tests.options import make_options

LONG_S = 10_000.0
"""Longer than any interval with its jitter."""


class Texts(StatefulProcessor):
    """Appends texts to the list of their key; an empty one clears it."""

    def init(self, handle: Any) -> None:
        self._texts = handle.getListState("texts", "text string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if row.text:
                self._texts.appendValue((row.text,))
            else:
                self._texts.clear()
        yield Row(k=key[0], n=len(list(self._texts.get())))

    def close(self) -> None:
        pass


def texts(faults: FaultPlan | None = None, parallelism: int = 1, **options: Any) -> Harness:
    defaults: dict[str, Any] = {"retained_checkpoints": 2, "log_min_age_s": 0, "orphan_min_age_s": 0}
    return Harness(
        Texts(),
        input="k long, text string",
        output="k long, n long",
        keys=["k"],
        parallelism=parallelism,
        storeFaults=faults or 0,
        options=make_options(**(defaults | options)),
    )


class Reads(FaultPlan):
    """Notes what is read."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def fault(self, call: Call) -> Fault | None:
        if call.operation == "read":
            self._names.append(call.name)
        return None

    def of_tasks(self) -> list[str]:
        """The objects that tasks have read."""
        return [name for name in self._names if not name.startswith("log/")]


def clock_of(harness: Harness) -> ManualClock:
    clock = parts_of(harness).query.clock
    assert isinstance(clock, ManualClock)
    return clock


def stored(harness: Harness, folder: str) -> list[str]:
    """The batch of every object in one of the operator's folders, by name."""
    return sorted(name.rpartition("/")[2].partition("-")[0] for name in objects(harness, folder))


def objects(harness: Harness, folder: str) -> dict[str, int]:
    """The objects in one of the operator's folders, and their sizes."""
    query = parts_of(harness).query
    found = LocalStore(query.location).list(f"{query.identity}/{folder}/")
    return {info.name: info.size_bytes for info in found}


def newest(harness: Harness) -> Record:
    record = parts_of(harness).batches.history().latest_record
    assert record is not None
    return record


def entries(harness: Harness) -> list[Checkpoint]:
    """The operator's checkpoints in all entries of the log."""
    read = parts_of(harness).query.open_log(LocalStore(parts_of(harness).query.location)).read()
    found = [entry for entry in read if isinstance(entry, QueryCheckpoint)]
    return [Checkpoint.of(entry, section) for entry in found for section in entry.sections]


def listed(harness: Harness, key: int) -> list[str]:
    return [text for (text,) in harness.list("texts", key)]


# ---- What is stored, and what goes ----


def test_the_worked_example_of_flip_158() -> None:
    """A list gets a, b, c, d; while c is written, a and b become one run; then their changesets go, not before."""
    with texts(file_merging="off") as harness:
        harness.push([(1, "a")])
        harness.push([(1, "b")])
        assert (stored(harness, "changes"), stored(harness, "runs")) == (["0", "1"], [])
        clock_of(harness).advance(LONG_S)
        harness.push([(1, "c")])  # the first checkpoint before the materialization: a, b, c
        assert (stored(harness, "changes"), stored(harness, "runs")) == (["0", "1", "2"], ["1"])
        assert newest(harness).base_map is not None
        assert newest(harness).added == []
        harness.push([(1, "d")])  # the first after it: (a, b) materialized, c, d
        base_map = newest(harness).base_map
        assert base_map is not None
        assert [base_range.base.through for base_range in base_map.ranges] == [1]
        assert stored(harness, "changes") == ["0", "1", "2", "3"], "the checkpoint before needs a and b"
        harness.push([])
        harness.push([])
        assert (stored(harness, "changes"), stored(harness, "runs")) == (["2", "3"], ["1"])
        harness.restart(1, keepLocal=False)
        assert listed(harness, 1) == ["a", "b", "c", "d"]


def test_a_materialization_that_goes_on_for_long_keeps_the_log() -> None:
    """It ends in its own time, in slices between batches; until an entry names it, nothing is cut."""

    class Slow(ManualClock):
        def monotonic_s(self) -> float:
            self.advance(0.2)
            return super().monotonic_s()

    with texts() as harness:
        for number in range(40):
            harness.push([(key, f"{number}") for key in range(5)])
        parts_of(harness).query.clock = Slow(clock_of(harness).now_s() + LONG_S)
        parts_of(harness).query.policy = MergePolicy(stored_run_bytes=2000, slice_rows=8)
        harness.restart(1, keepLocal=True)
        clock_of(harness).advance(LONG_S)
        harness.push([])
        batches = 0
        while not newest(harness).added:
            assert len(entries(harness)) == 41 + batches
            parts_of(harness).query.new_workers()
            harness.push([(1, "more")])
            batches += 1
            assert batches < 100
        assert batches > 3
        [base_range] = newest(harness).added
        assert len(base_range.runs) > 1, "in several objects"
        harness.push([])
        harness.push([])
        assert len(entries(harness)) < 41
        harness.restart(3, keepLocal=False)
        assert listed(harness, 1) == [str(number) for number in range(40)] + ["more"] * batches


def test_only_new_runs_are_stored_again() -> None:
    with texts(file_merging="off", materialization_interval_s=0) as harness:
        harness.push([(key, "x" * 20 + str(key)) for key in range(40_000)])
        for _ in range(4):
            harness.push([(1, "y")])
        large = max(objects(harness, "runs").values())
        before = set(objects(harness, "runs"))
        for parallelism in (1, 2, 1):
            harness.restart(parallelism, keepLocal=False)
            for _ in range(10):
                harness.push([(1, "y")])
        after = objects(harness, "runs")
        assert [size for name, size in after.items() if name not in before and size > large / 2] == []
        assert large in after.values(), "the large run is still there, also for another number of subtasks"
        assert len(listed(harness, 1)) == 35


def test_the_log_and_what_is_kept_of_it_stay_bounded() -> None:
    """Thousands of checkpoints of one event each, with restarts in between."""
    with texts(replay_budget_s=0.5, merge_fan_in=4) as harness:
        count = 1500
        for number in range(count):
            harness.push([(number % 7, "" if number % 50 < 7 else "t")])
            if number % 450 == 449:
                harness.restart(1 + number % 3, keepLocal=number % 2 == 0)
        assert len(entries(harness)) < 350
        [history] = parts_of(harness).query.coordinator.history.histories.values()
        assert len(list(history.records)) < 350
        store = LocalStore(parts_of(harness).query.location)
        assert sum(info.size_bytes for info in store.list()) < 2 << 20
        assert len(store.list()) < 20
        expected = len([number for number in range(count) if number % 7 == 3 and number % 50 >= 7])
        cleared = [number for number in range(count) if number % 7 == 3 and number % 50 < 7]
        expected = len([n for n in range(cleared[-1], count) if n % 7 == 3 and n % 50 >= 7])
        assert len(listed(harness, 3)) == expected


def test_without_materialization_the_log_stays() -> None:
    with texts(materialization=False, materialization_interval_s=0, max_log_to_base=0) as harness:
        for _ in range(20):
            harness.push([(1, "t")])
        assert len(entries(harness)) == 20
        assert [entry.bases for entry in entries(harness)] == [[]] * 20


@pytest.mark.parametrize("parallelism", [2, 3])
def test_the_changelog_is_switched_off_and_on(parallelism: int) -> None:
    with texts(parallelism=2) as harness:
        total = 0
        for changelog in (True, False, False, True, False, True):
            query = parts_of(harness).query
            query.options = Options(
                retained_checkpoints=2, tuning=Tuning(log_min_age_s=0, orphan_min_age_s=0, changelog=changelog)
            )
            harness.restart(parallelism if total else 2, keepLocal=total % 2 == 0)
            for _ in range(3):
                harness.push([(key, "t") for key in range(20)])
                total += 1
            [*_, last] = entries(harness)
            assert bool(last.segments) == changelog
            assert bool(last.bases) == (not changelog)
            assert listed(harness, 7) == ["t"] * total


def test_changesets_count_only_where_the_base_lacks_them() -> None:
    """Of one subtask the newest state is materialized, of the other only its log exists; then both become one."""
    with texts(parallelism=2) as harness:
        harness.push([(key, "old") for key in range(20)])
        parts_of(harness).query.options = replace(
            parts_of(harness).query.options, tuning=replace(parts_of(harness).query.options.tuning, changelog=False)
        )
        harness.restart(2)
        harness.push([(1, ""), (1, "new")])
        assert len(newest(harness).added) == 1
        harness.restart(1, keepLocal=False)
        harness.push([])
        assert listed(harness, 1) == ["new"]
        assert [listed(harness, key) for key in (0, 2, 3, 19)] == [["old"]] * 4


def test_local_runs_of_an_idle_subtask_stay_few() -> None:
    with texts(parallelism=2, changelog=False) as harness:
        for _ in range(40):
            harness.push([(1, "t")])
        query = parts_of(harness).query
        for folder in (query.local / query.identity / "2").glob("*"):
            assert len(list(folder.glob("*.run"))) < 15


def test_without_changelog_only_the_newest_state_is_kept() -> None:
    with texts(changelog=False, file_merging="off") as harness:
        for number in range(50):
            harness.push([(key, "t" * 50) for key in range(30)] if number % 3 else [])
        assert stored(harness, "changes") == []
        levels = [level for base_range in newest(harness).added for level in base_range.base.levels]
        size = sum(objects(harness, "runs").values())
        assert size <= 3 * sum(level.length for level in levels)
        assert len(levels) < 8


def test_a_normal_stop_leaves_nothing_that_no_checkpoint_names() -> None:
    with texts(file_merging="off", materialization_interval_s=0, parallelism=2) as harness:
        for _ in range(8):
            harness.push([(key, "t") for key in range(9)])

        def unnamed() -> set[str]:
            store = LocalStore(parts_of(harness).query.location)
            named = parts_of(harness).batches.history().object_names()
            return {info.name for info in store.list() if not info.name.startswith("log/")} - named

        assert unnamed(), "materialized, and not yet told the coordinator"
        parts_of(harness).batches.stop()
        assert unnamed() == set()
        harness.restart(2)
        assert listed(harness, 3) == ["t"] * 8


# ---- Failures ----


class FailingRuns(FaultPlan):
    """Fails so many writes of materialized runs."""

    def __init__(self, count: int) -> None:
        self.left = count

    def fault(self, call: Call) -> Fault | None:
        if call.operation == "put" and "/runs/" in call.name and self.left:
            self.left -= 1
            return Fault("after", reason="no room")
        return None


def test_a_failed_materialization_is_tried_again() -> None:
    plan = FailingRuns(3)
    with texts(plan, file_merging="off", materialization_interval_s=0) as harness:
        for _ in range(12):
            harness.push([(1, "t")])
        assert plan.left == 0
        assert len(entries(harness)) < 12, "and the log is cut after it"
        assert listed(harness, 1) == ["t"] * 12
        named = parts_of(harness).batches.history().object_names()
        left = set(objects(harness, "runs")) - named
        assert len(left) <= 1, "one that the next checkpoint will name"


def test_too_many_failures_in_a_row_fail_the_query_and_nothing_is_lost() -> None:
    plan = FailingRuns(1000)
    options: dict[str, Any] = {
        "file_merging": "off",
        "materialization_interval_s": 0,
        "materialization_max_failures": 2,
    }
    with texts(plan, **options) as harness:
        for _ in range(6):
            harness.push([(1, "t")])
        pushed = 6
        with pytest.raises(
            StorageError, match="materialization of subtask 0 failed more than 2 times.*no room"
        ) as found:
            harness.push([(1, "t")])
        assert found.value.kind is ErrorKind.MATERIALIZATION
        assert len(entries(harness)) == pushed, "the log of retained checkpoints is never cut"
        plan.left = 0
        for _ in range(6):
            harness.push([(1, "t")])
        assert listed(harness, 1) == ["t"] * (pushed + 6)
        assert len(entries(harness)) < pushed + 6


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_run_is_named(damage: str) -> None:
    with texts(file_merging="off", materialization_interval_s=0) as harness:
        for _ in range(5):
            harness.push([(1, "t")])
        store = LocalStore(parts_of(harness).query.location)
        base_map = newest(harness).base_map
        assert base_map is not None
        name = base_map.ranges[0].runs[0].name
        data = bytearray(store.read(name))
        data[len(data) // 2] ^= 1
        if damage == "remove":
            store.delete([name])
        else:
            store.put(name, bytes(data) if damage == "flip" else store.read(name)[:-1])
        harness.restart(1, keepLocal=False)
        with pytest.raises(CorruptionError, match=name):
            harness.push([(1, "t")])


def test_a_valid_local_copy_is_used_again() -> None:
    """After a restart on the host tasks read nothing; on another host everything that is needed, each once."""
    reads = Reads()
    with texts(reads, file_merging="off", materialization_interval_s=0) as harness:
        for _ in range(9):
            harness.push([(1, "t")])
        harness.restart(1, keepLocal=True)
        harness.push([(1, "t")])
        assert reads.of_tasks() == []
        harness.restart(1, keepLocal=False)
        harness.push([(1, "t")])
        fetched = reads.of_tasks()
        assert len(fetched) == len(set(fetched)) > 1
        assert any("/runs/" in name for name in fetched)
        assert any("/changes/" in name for name in fetched)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("changelog", "off"),
        ("materialization", 0),
        ("materialization_interval_s", -1),
        ("materialization_max_failures", -1),
        ("replay_budget_s", float("nan")),
        ("compression", "gzip"),
    ],
)
def test_wrong_options_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"Option {option} is {value!r}\. Hint: It must be"):
        make_options(**{option: value})


# ---- When ----


def schedule(slots: int = 1, parallelism: int = 4, **options: Any) -> MaterializationSchedule:
    return MaterializationSchedule(make_options(**options), MERGE_POLICY, "query/op", parallelism, slots, 0.0)


def commit(planned: MaterializationSchedule, size: int, parallelism: int = 4) -> None:
    planned.committed([size] * parallelism, [False] * parallelism)


def test_subtasks_materialize_at_different_times() -> None:
    planned = schedule(slots=99, materialization_interval_s=100)
    commit(planned, 1)
    first: dict[int, int] = {}
    for now_s in range(0, 300):
        for subtask in range(4):
            if planned.grant(subtask, now_s, now_s):
                first.setdefault(subtask, now_s)
    assert len(set(first.values())) == 4
    assert all(100 <= now_s <= 200 for now_s in first.values())


def test_no_more_subtasks_than_run_at_a_time() -> None:
    planned = schedule(slots=2, materialization_interval_s=0)
    commit(planned, 1)
    assert [planned.grant(subtask, 1, 50.0) for subtask in range(4)] == [True, True, None, None]
    assert [planned.grant(subtask, 1, 50.0) for subtask in range(4)] == [True, True, None, None], "a repetition"
    assert planned.grant(3, 2, 50.0) is None, "the others are not done yet"
    planned.materialized(0, 10, 0, 50.0)
    assert planned.grant(3, 3, 50.0) is True
    assert not planned.failed(1, 50.0)
    commit(planned, 1)
    assert [planned.grant(subtask, 4, 50.0) for subtask in range(4)] == [None, True, None, True], (
        "the first has fewer changesets than those that wait"
    )


def test_starts_count_in_their_batch_and_last_until_the_state_counts() -> None:
    planned = schedule(slots=2, materialization_interval_s=0)
    commit(planned, 1)
    assert planned.duration_s(0, 50.0) == 0
    for _ in range(2):  # a repetition
        assert [planned.grant(subtask, 1, 50.0) for subtask in range(4)] == [True, True, None, None]
        assert planned.started == {0, 1}
    assert planned.grant(0, 2, 57.0) is True, "goes on"
    assert planned.started == set()
    assert (planned.duration_s(0, 60.0), planned.duration_s(3, 60.0)) == (10.0, 0.0)
    planned.materialized(0, 10, 0, 60.0)
    assert planned.duration_s(0, 61.0) == 11.0, "until another one starts"


def test_large_local_merges_take_turns() -> None:
    planned = schedule(slots=1)
    planned.committed([1] * 4, [False, True, True, False])
    assert [planned.grant(subtask, 1, 0.0) for subtask in range(4)] == [None, False, None, None]


@pytest.mark.parametrize(
    ("options", "size", "commits", "expected"),
    [
        ({}, 3 << 20, 1, None),
        ({}, (3 << 20) + (1 << 19), 1, True),
        ({"max_log_to_base": 0.5}, 3 << 20, 1, True),
        ({"max_log_to_base": 0}, 1 << 19, 1, None),
        ({"replay_budget_s": 0.1}, 1, 10, None),
        ({"replay_budget_s": 0.1}, 1, 30, True),
        ({"replay_budget_s": 0.01}, 1 << 20, 1, True),
        ({"materialization": False, "replay_budget_s": 0}, 5 << 20, 9, None),
    ],
)
def test_a_large_log_materializes_earlier(
    options: dict[str, Any], size: int, commits: int, expected: bool | None
) -> None:
    planned = schedule(parallelism=1, **options)
    commit(planned, 1, parallelism=1)
    assert planned.grant(0, 0, 0.0, is_forced=True) or not options.get("materialization", True)
    planned.materialized(0, 4 << 20, 0, 0.0)
    for _ in range(commits):
        commit(planned, size, parallelism=1)
    assert planned.grant(0, 1, 0.0) is expected


def test_a_job_of_another_run_is_void(tmp_path: Path) -> None:
    """Its run may have had another location, with the same query and the same epoch."""
    local, store = LocalRuns(tmp_path / "local"), LocalStore(tmp_path / "store")
    local_run = LocalRun(0, 0, bytes(16), bytes(range(16)))
    local.directory.mkdir()
    write_run(local, local_run, encode_changes(VALUE, [(1, b"k", b"", Operation.PUT, "v")]), "token")

    def of_run(run_id: str) -> Materializer:
        return Materializer(
            local=local,
            within=hash_range(0, 1),
            genesis=local_run.before,
            run_id=run_id,
            compression=None,
            garbage=Garbage(Moment(0, 0), {}),
            max_space_amplification=2.0,
            open_store=lambda: store,
            monotonic_s=lambda: 0.0,
            token=run_id,
        )

    grant = Grant("1-7", local_run.before, [], "runs/1/0/1-7")
    of_run("one").work(MaintenanceRequest(1.0, 0, grant, is_due=True), [local_run], [])
    done = of_run("one").result(grant)
    assert done is not None
    assert [run.name for run in done.levels[0].runs] == ["runs/1/0/1-7/0-one-0.run"]
    assert of_run("one").result(Grant("1-8", local_run.before, [], "runs/1/0/1-8")) is None, (
        "one of another grant neither"
    )
    assert of_run("two").result(grant) is None


def test_a_merge_leaves_out_what_was_garbage_when_it_began(tmp_path: Path) -> None:
    """Its result serves a start that goes back to the batch after its last, whichever later batch has ended it."""
    genesis, middle, head = bytes(16), bytes([1]) * 16, bytes([2]) * 16
    local_runs = [LocalRun(0, 0, genesis, middle), LocalRun(1, 1, middle, head)]
    local = LocalRuns(tmp_path, Budget(slice_bytes=2000))
    state = replace(VALUE, expires_by=TimeDomain.EVENT)
    for local_run in local_runs:
        keys = range(local_run.first, 200, 2)
        changes = [(key << 56, b"%d" % key, b"", Operation.PUT, "text") for key in keys]
        write_run(local, local_run, encode_changes(state, changes, expiry_ms=1000 + local_run.first), "token")
    seconds = itertools.count(0, 0.3)

    def at(watermark_ms: int) -> Materializer:
        return Materializer(
            local=LocalRuns(tmp_path, Budget(slice_bytes=2000)),
            within=hash_range(0, 1),
            genesis=genesis,
            run_id="run",
            compression=None,
            garbage=Garbage(Moment(0, watermark_ms), {}),
            max_space_amplification=2.0,
            open_store=lambda: LocalStore(tmp_path / "store"),
            monotonic_s=lambda: next(seconds),
            token="token",
        )

    slices = 0
    while len(local.local_runs()) > 1:
        at(1000 if slices == 0 else 5000).work(MaintenanceRequest(0.5, 0, None, is_due=True), local_runs, local_runs)
        slices += 1

    assert slices > 3
    assert local.open(LocalRun(0, 1, genesis, head)).rows == 100, "those that had expired when the merge began are gone"


class Burst(StatefulProcessor):
    """Writes to a state of some kind, whose entries live for a second, if at all for a limited time."""

    def __init__(self, kind: str, ttl_ms: int | None) -> None:
        self._kind = kind
        self._ttl_ms = ttl_ms

    def init(self, handle: Any) -> None:
        match self._kind:
            case "value":
                self._state = handle.getValueState("state", "text string", self._ttl_ms)
            case "list":
                self._state = handle.getListState("state", "text string", self._ttl_ms)
            case _:
                self._state = handle.getMapState("state", "name string", "text string", self._ttl_ms)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            text = (row.text,)
            if not row.text:
                self._state.clear()
            elif self._kind == "value":
                self._state.update(text)
            elif self._kind == "list":
                self._state.appendValue(text)
            else:
                self._state.updateValue(("name",), text)
        yield from ()

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("table", "kind", "ttl_ms"),
    [
        *(("runs", kind, 1000) for kind in ("value", "list", "map")),
        ("runs", "value", None),
        *((table, "value", 1000) for table in ("memory", "rocksdb")),
    ],
)
def test_state_that_has_ended_goes_although_nobody_touches_it(table: str, kind: str, ttl_ms: int | None) -> None:
    with Harness(
        Burst(kind, ttl_ms),
        input="k long, text string",
        keys=["k"],
        output="k long",
        timeMode="ProcessingTime",
        options=Options(
            table=table, materialization_interval_s=0, retained_checkpoints=2, tuning=Tuning(log_min_age_s=0)
        ),
    ) as harness:
        numbers = random.Random(1)
        harness.push([(key, numbers.randbytes(50).hex()) for key in range(5000)], processingTimeMs=0)
        for _ in range(3):
            harness.push([(-1, "x")], processingTimeMs=1)
        burst_bytes = harness.checkpoints[-1].base_bytes
        assert burst_bytes > 100_000
        if ttl_ms is None:
            harness.push([(key, "") for key in range(5000)], processingTimeMs=2)
        for batch in range(6):
            harness.push([(-1 - batch % 2, "x")], processingTimeMs=5000 + batch * 10)
        assert harness.checkpoints[-1].base_bytes < burst_bytes / 20
        local = sum(path.stat().st_size for path in parts_of(harness).query.local.rglob("*.run"))
        assert local < burst_bytes / 5


def test_large_merges_are_done_in_slices() -> None:
    """By whichever process runs the subtask; what is merged is the same, and is not fetched again."""

    class Slow(ManualClock):
        def monotonic_s(self) -> float:
            self.advance(0.03)
            return super().monotonic_s()

    reads = Reads()
    with texts(reads, file_merging="off", merge_fan_in=2, materialization=False) as harness:
        parts_of(harness).query.clock = Slow(1e10)
        parts_of(harness).query.policy = MergePolicy(at_once_rows=100, slice_rows=30)
        sliced = 0
        for number in range(30):
            harness.push([(key, f"{number}") for key in range(40)])
            parts_of(harness).query.new_workers()
            sliced += len(list(parts_of(harness).query.local.rglob("job/merge.part")))
        assert sliced > 3
        for _ in range(30):
            harness.push([])
        assert len(list(parts_of(harness).query.local.rglob("*.run"))) < 10, "no merge is given up"
        assert not list(parts_of(harness).query.local.rglob("job/merge.part"))
        assert reads.of_tasks() == []
        assert listed(harness, 39) == [str(number) for number in range(30)]


def test_a_slice_of_a_merge_takes_a_part_of_a_block() -> None:
    """Local runs have large blocks; a batch waits for some of their rows only."""

    class Slow(ManualClock):
        def monotonic_s(self) -> float:
            self.advance(0.2)
            return super().monotonic_s()

    reads = Reads()
    with texts(reads, file_merging="off", merge_fan_in=2, materialization=False) as harness:
        parts_of(harness).query.policy = MergePolicy(at_once_rows=100, slice_rows=100)
        for text in "ab":
            harness.push([(key, text) for key in range(1000)])
        parts_of(harness).query.clock = Slow(1e10)
        harness.restart(1)
        batches = 0
        harness.push([])
        while list(parts_of(harness).query.local.rglob("job/merge.part")) or not batches:
            harness.push([])
            batches += 1
            assert batches <= 40
        assert batches >= 10
        assert reads.of_tasks() == []
        assert listed(harness, 77) == ["a", "b"]


@pytest.mark.parametrize("name", ["job.json", "inline.run"])
def test_a_damaged_job_is_begun_again(name: str) -> None:
    """What it has reached lies on a disk without a checksum of its own; a flipped bit must not name another state."""
    with texts(materialization_interval_s=0) as harness:
        for _ in range(4):
            harness.push([(1, "t")])
        damaged = 0
        for number in range(12):
            for path in parts_of(harness).query.local.rglob(f"job/{name}"):
                data = bytearray(path.read_bytes())
                data[(number * 37) % len(data)] ^= 1 << number % 8
                path.write_bytes(data)
                damaged += 1
            harness.push([(1, "t")])
        assert damaged > 3
        for _ in range(4):
            harness.push([(1, "t")])
        assert newest(harness).base_map is not None
        harness.restart(1, keepLocal=False)
        assert listed(harness, 1) == ["t"] * 20
