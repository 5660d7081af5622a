"""The RocksDB table beside the local runs: what it continues from, when it is made anew, what it gets rid of."""

from __future__ import annotations

import datetime
import decimal
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import rocksdict
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from statelog import ConfigurationError, ErrorKind, Options, StorageError, Ttl
from statelog.local.policy import MERGE_POLICY, MergePolicy
from statelog.local.runs import ROCKSDB_FOLDER, LocalRun, LocalRuns
from statelog.runs.merge import Garbage
from statelog.runs.reader import Run
from statelog.runs.schema import Operation, StateDescriptor, StateKind, TimeDomain, change_schema
from statelog.runs.times import Moment
from statelog.tables import open as tables
from statelog.tables.open import open_rocksdb
from statelog.tables.rocksdb import RocksTable
from statelog.tables.rocksdb_format import decode_values, encode_values
from statelog.tasks.attempt import Restoring
from statelog.testing import Harness
from statelog.testing.harness import parts_of
from statelog.testing.query import ManualClock
from tests.attempts import make_attempt, telling
from tests.contract.table_contract import MAP, VALUE, encode_changes, make_keys, make_run, write_run
from tests.options import make_options

KEYS = [f"key {number}" for number in range(40)]
ROOT = Path(__file__).parents[2]


class Sums(StatefulProcessor):
    """A sum, one that expires, and every number in a map."""

    def init(self, handle: Any) -> None:
        self._sum = handle.getValueState("sum", "n long")
        self._brief = handle.getValueState("brief", "n long", Ttl(1_500))
        self._seen = handle.getMapState("seen", "n long", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self._sum.update(((self._sum.get() or (0,))[0] + row.n,))
            self._brief.update(((self._brief.get() or (0,))[0] + row.n,))
            self._seen.updateValue((row.n,), (row.n,))
        yield Row(k=key[0], n=self._sum.get()[0], brief=self._brief.get()[0], seen=len(list(self._seen.keys())))

    def close(self) -> None:
        pass


def make_harness(**options: Any) -> Harness:
    return Harness(
        Sums(),
        input="k string, n long",
        keys=["k"],
        output="k string, n long, brief long, seen long",
        timeMode="ProcessingTime",
        options=make_options(table="rocksdb", merge_fan_in=2, **options),
    )


class Expected:
    """What `Sums` returns, from all rows so far."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[int, int]]] = {}

    def of(self, rows: list[tuple[str, int]], now_ms: int) -> list[tuple[str, int, int, int]]:
        for key, n in rows:
            held = self._rows.setdefault(key, [])
            held.append((now_ms, n))
        found = []
        for key in sorted({key for key, _ in rows}):
            brief, until_ms = 0, -1
            for at_ms, n in self._rows[key]:
                brief = n if at_ms >= until_ms else brief + n
                until_ms = at_ms + 1_500
            numbers = [n for _, n in self._rows[key]]
            found.append((key, sum(numbers), brief, len(set(numbers))))
        return found


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[int | str]:
    """What happens to tables: the rows of each run that is applied, and "reset"."""
    happened: list[int | str] = []
    advance, reset = RocksTable.advance, RocksTable.reset

    def advance_noted(self: RocksTable, run: Run, digest: bytes | None, *notes: Any) -> int:
        happened.append(run.rows)
        return advance(self, run, digest, *notes)

    def reset_noted(self: RocksTable, digest: bytes | None = None) -> None:
        happened.append("reset")
        reset(self, digest)

    monkeypatch.setattr(RocksTable, "advance", advance_noted)
    monkeypatch.setattr(RocksTable, "reset", reset_noted)
    return happened


def push(harness: Harness, expected: Expected, batch: int) -> None:
    rows = [(key, batch) for key in KEYS[batch % 3 :: 3]]
    now_ms = 1_000 * (batch + 1)
    assert sorted(map(tuple, harness.push(rows, now_ms))) == expected.of(rows, now_ms)


def folder_of(harness: Harness, subtask: int = 0) -> Path:
    query = parts_of(harness).query
    found: Path = query.local / query.identity / str(harness.parallelism) / str(subtask) / ROCKSDB_FOLDER
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"changelog": False}, {"materialization_interval_s": 0.0}, {"inline_budget_bytes": 0}],
    ids=["defaults", "without changelog", "materialized all the time", "uploads"],
)
def test_every_change_is_applied_once(options: dict[str, Any], applied: list[int | str]) -> None:
    """Whatever is merged meanwhile, and whichever process has the task."""
    expected = Expected()
    with make_harness(**options) as harness:
        parts_of(harness).query.policy = MergePolicy(at_once_rows=100)
        for batch in range(12):
            push(harness, expected, batch)
    assert applied.count("reset") == 2  # each subtask's first batch
    rows = sum(count for count in applied if isinstance(count, int))
    # All but the last batch's: three states, a third of the keys a batch.
    assert rows == sum(3 * len(KEYS[batch % 3 :: 3]) for batch in range(11))


def test_a_table_that_another_attempt_has_open_is_left_alone(applied: list[int | str]) -> None:
    expected = Expected()
    with make_harness() as harness:
        for batch in range(3):
            push(harness, expected, batch)
        applied.clear()
        others = [RocksTable.open(folder_of(harness, subtask)) for subtask in range(2)]
        for batch in range(3, 8):
            push(harness, expected, batch)
        assert applied == []
        for other in others:
            assert other is not None
            other.close()
        for batch in range(8, 10):
            push(harness, expected, batch)
    assert "reset" not in applied
    assert len(applied) == 14  # of two subtasks, the runs of batches 2 to 8


def test_a_damaged_table_is_made_anew(applied: list[int | str]) -> None:
    expected = Expected()
    with make_harness() as harness:
        for batch in range(4):
            push(harness, expected, batch)
        applied.clear()
        for file in [*folder_of(harness, 0).rglob("*.sst"), *folder_of(harness, 1).rglob("MANIFEST-*")]:
            data = bytearray(file.read_bytes())
            data[: len(data) // 2] = os.urandom(len(data) // 2)
            file.write_bytes(data)
        for batch in range(4, 6):
            push(harness, expected, batch)
    assert applied.count("reset") >= 2


def digest(name: str) -> bytes:
    return name.encode().ljust(16)


def local_runs(
    directory: Path, *local_runs: tuple[int, str, str, list[Any]], policy: MergePolicy = MERGE_POLICY
) -> LocalRuns:
    """Local runs of one batch each: its number, the digests before and after, and the changes."""
    local = LocalRuns(directory, policy=policy)
    for batch, before, after, changes in local_runs:
        columns = [(1, key, b"", Operation.DELETE if text is None else Operation.PUT, text) for key, text in changes]
        local_run = LocalRun(batch, batch, digest(before), digest(after))
        write_run(local, local_run, encode_changes(VALUE, columns), "token")
    return local


def restoring() -> Restoring:
    return Restoring(make_attempt(Path()))


def state_of(local: LocalRuns, head: str) -> dict[int, str]:
    """What the table of a directory holds of the keys a, b and c once it is at a digest."""
    chain = local.chain(digest("start"), digest(head))
    assert chain is not None
    runs = [(local_run, local.open(local_run)) for local_run in chain]
    table = open_rocksdb(local, runs, digest(head), Garbage(Moment(0, 0), {}), restoring())
    assert table is not None
    assert table.digest == digest(head)
    found = table.get_many(VALUE, make_keys((1, b"a"), (1, b"b"), (1, b"c")))
    table.close()
    return dict(zip(found.positions.tolist(), found.values.column(0).to_pylist(), strict=True))


def test_another_history_is_not_taken_over(tmp_path: Path, applied: list[int | str]) -> None:
    local = local_runs(
        tmp_path,
        (0, "start", "one", [(b"a", "0")]),
        (1, "one", "two", [(b"b", "1")]),
        (1, "one", "other", [(b"c", "2")]),
        (2, "other", "last", [(b"a", None)]),
    )
    assert state_of(local, "two") == {0: "0", 1: "1"}
    assert state_of(local, "other") == {0: "0", 2: "2"}
    assert state_of(local, "last") == {2: "2"}
    assert applied == ["reset", 1, 1, "reset", 1, 1, 1]


def test_a_merge_across_the_state_that_a_table_holds(tmp_path: Path, applied: list[int | str]) -> None:
    """A merge from the empty state on has no removals, so it cannot be applied to a later state."""
    local = local_runs(
        tmp_path,
        (0, "start", "one", [(b"a", "0"), (b"b", "0")]),
        (1, "one", "two", [(b"a", None)]),
        (2, "two", "three", [(b"c", "2")]),
    )
    assert state_of(local, "one") == {0: "0", 1: "0"}
    chain = local.chain(digest("start"), digest("two"))
    assert chain is not None
    local.merge(chain, digest("start"), "token")
    assert state_of(local, "three") == {1: "0", 2: "2"}
    assert applied == ["reset", 2, "reset", 1, 1]


def test_a_table_that_is_open_already_is_not_waited_for(tmp_path: Path) -> None:
    local = local_runs(tmp_path)
    first = open_rocksdb(local, [], digest("start"), Garbage(Moment(0, 0), {}), restoring())
    assert first is not None
    assert first.digest == digest("start"), "that of the empty state, without any run"
    assert open_rocksdb(local, [], digest("start"), Garbage(Moment(0, 0), {}), restoring()) is None
    first.close()


def test_a_death_before_the_first_run_is_applied_leaves_a_table_that_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a table is made anew as is the empty state, and not yet the one that it is to have."""
    local = local_runs(tmp_path, (0, "start", "one", [(b"a", "0")]), (1, "one", "two", [(b"b", "1")]))

    def die(self: RocksTable, run: Run, *arguments: Any) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RocksTable, "advance", die)
        with pytest.raises(KeyboardInterrupt):
            state_of(local, "two")
    assert state_of(local, "two") == {0: "0", 1: "1"}


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_runs_that_cannot_be_gone_on_with_make_a_table_anew(
    tmp_path: Path, applied: list[int | str], damage: str
) -> None:
    """The state is at hand in runs that are open already; what leads to it from the table's own is not."""
    history = [(0, "start", "one", [(b"a", "0")]), (1, "one", "two", [(b"b", "1")])]
    local = local_runs(tmp_path, *history)
    assert state_of(local, "one") == {0: "0"}
    chain = local.chain(digest("start"), digest("two"))
    assert chain is not None
    whole = local_runs(tmp_path / "whole", *history)
    runs = [(local_run, whole.open(local_run)) for local_run in chain]
    other = LocalRuns(tmp_path)
    file = tmp_path / chain[1].file_name
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-7])
    other.local_runs = lambda: chain  # type: ignore[method-assign]  # of a file that somebody removes before it is opened
    if damage == "gone":
        file.unlink()
    table = open_rocksdb(other, runs, digest("two"), Garbage(Moment(0, 0), {}), restoring())
    assert table is not None
    assert len(table.get_many(VALUE, make_keys((1, b"a"), (1, b"b"))).positions) == 2
    table.close()
    assert applied == ["reset", 1, "reset", 1, 1]


def test_a_table_that_rocksdb_cannot_go_on_with_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the deadline of the restart ends it; another error of storage is one of the table that was there."""
    local = local_runs(tmp_path, (0, "start", "one", [(b"a", "0")]), (1, "one", "two", [(b"b", "1")]))
    assert state_of(local, "one") == {0: "0"}
    advance, tried = RocksTable.advance, []

    def fail_once(self: RocksTable, run: Run, *arguments: Any) -> int:
        tried.append(run)
        if len(tried) == 1:
            raise StorageError("RocksDB cannot write.", hint="Is the disk full?")
        return advance(self, run, *arguments)

    monkeypatch.setattr(RocksTable, "advance", fail_once)
    assert state_of(local, "two") == {0: "0", 1: "1"}
    assert len(tried) == 3


def test_what_was_deleted_and_some_of_what_has_expired_goes_when_a_table_is_opened(tmp_path: Path) -> None:
    """At least so much at a time, or twice as much as has come: so what has expired stays a part of the whole."""
    brief = replace(VALUE, name="brief", expires_by=TimeDomain.PROCESSING)
    local = LocalRuns(tmp_path, policy=MergePolicy(expiry_rows=30))
    heads = ["start", "one", "two", "three"]
    for batch, (name, count) in enumerate([("brief", 400), ("brief", 50), ("value", 5)]):
        keys = [(1000 * batch + number, b"%d" % (1000 * batch + number)) for number in range(count)]
        changes: list[Any] = [(key_hash, key, b"", Operation.PUT, "x") for key_hash, key in keys]
        state = brief if name == "brief" else VALUE
        local_run = LocalRun(batch, batch, digest(heads[batch]), digest(heads[batch + 1]))
        write_run(
            local, local_run, encode_changes(state, changes, expiry_ms=1000 if name == "brief" else None), "token"
        )

    def held(head: str, now_ms: int, generations: dict[str, int]) -> int:
        chain = local.chain(digest("start"), digest(head))
        assert chain is not None
        garbage = Garbage(Moment(now_ms, 0), generations)
        table = open_rocksdb(
            local, [(local_run, local.open(local_run)) for local_run in chain], digest(head), garbage, restoring()
        )
        assert table is not None
        table.close()
        return rows_held(tmp_path / ROCKSDB_FOLDER)

    assert held("one", 0, {}) == 400
    assert held("two", 2000, {}) == pytest.approx(450 - 100, abs=2)
    assert held("three", 2000, {}) == pytest.approx(450 - 100 - 30 + 5, abs=4)
    left = held("three", 0, {})
    assert held("three", 0, {"value": 1}) == left - 5


def test_a_table_that_cannot_be_brought_to_a_state_is_left_to_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = local_runs(tmp_path, (0, "start", "one", [(b"a", "0")]))

    def fail(self: RocksTable, moment: Moment, rows: int) -> None:
        raise RuntimeError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(RocksTable, "drop_expired", fail)
        with pytest.raises(RuntimeError) as raised:
            state_of(local, "one")
    assert state_of(local, "one") == {0: "0"}
    assert raised.tb, "although the first one's frames are still there"


class SlowRestoring(Restoring):
    """Every chunk of a run takes 0.4 s to be added."""

    def __init__(self, clock: ManualClock, deadline_s: float, told: list[tuple[int, int]]) -> None:
        options = Options(restore_deadline_s=deadline_s)
        super().__init__(make_attempt(Path(), options=options, call=telling(told), clock=clock))
        self.clock = clock

    def added(self, size_bytes: int) -> None:
        self.clock.advance(0.4)
        super().added(size_bytes)


def open_slowly(local: LocalRuns, head: str, deadline_s: float, told: list[tuple[int, int]]) -> RocksTable | None:
    chain = local.chain(digest("start"), digest(head))
    assert chain is not None
    runs = [(local_run, local.open(local_run)) for local_run in chain]
    progress = SlowRestoring(ManualClock(), deadline_s, told)
    table = open_rocksdb(local, runs, digest(head), Garbage(Moment(0, 0), {}), progress)
    progress.end()
    return table


def test_what_is_added_to_a_table_is_told_over_all_its_runs(tmp_path: Path) -> None:
    local = local_runs(tmp_path, (0, "start", "one", [(b"a", "0")]), (1, "one", "two", [(b"b", "1"), (b"c", "1")]))
    chain = local.chain(digest("start"), digest("two"))
    assert chain is not None
    runs = [(local_run, local.open(local_run)) for local_run in chain]
    told: list[int] = []

    class Noted:
        def begin_table(self, size_bytes: int) -> None:
            told.append(size_bytes)

        def added(self, size_bytes: int) -> None:
            told.append(size_bytes)

    table = open_rocksdb(local, runs, digest("two"), Garbage(Moment(0, 0), {}), Noted())
    assert table is not None
    table.close()
    first, second = (run.size_bytes for _, run in runs)
    assert told == [first + second, first, first + second]


def test_a_full_disk_under_rocksdb_is_named_with_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise Exception("IO error: No space left on device")

    monkeypatch.setattr(rocksdict, "Rdict", fail)
    with pytest.raises(StorageError, match=f"Host {re.escape(socket.gethostname())} .*No space left") as caught:
        RocksTable.open(tmp_path)
    assert caught.value.kind is ErrorKind.LOCAL_DISK


@pytest.mark.parametrize("is_new", [True, False], ids=["made anew", "gone on with"])
@pytest.mark.parametrize("batch_bytes", [1, 4 << 20], ids=["sorted files", "writes"])
def test_progress_and_deadline_of_a_restart_include_the_table(tmp_path: Path, is_new: bool, batch_bytes: int) -> None:
    local = local_runs(
        tmp_path,
        (0, "start", "one", [(b"a", "0")]),
        (1, "one", "two", [(bytes([number]), "1") for number in range(5)]),
        policy=MergePolicy(table_batch_bytes=batch_bytes, table_chunk_rows=1),
    )
    if not is_new:
        state_of(local, "one")
    told: list[tuple[int, int]] = []
    with pytest.raises(StorageError) as failure:
        open_slowly(local, "two", 1.0, told)
    assert failure.value.kind is ErrorKind.RESTORE_DEADLINE
    assert (
        "operator 'op', subtask 0, batch 1: after 1.2 s its state is not restored: its runs are here, but 0.0 of"
        in str(failure.value)
    )

    told.clear()
    table = open_slowly(local, "two", 10.0, told)
    assert table is not None
    assert (
        len(table.get_many(VALUE, make_keys((1, b"a"), *((1, bytes([number])) for number in range(5)))).positions) == 6
    )
    table.close()
    sizes = [run.size_bytes for run in map(local.open, local.local_runs())]
    known = told[-1][1]
    assert known in (sum(sizes), sizes[1])
    assert told[-1] == (known, known)
    assert 0 < told[0][0] < known


def test_a_table_that_is_not_used_any_more_is_removed() -> None:
    expected = Expected()
    with make_harness() as harness:
        push(harness, expected, 0)
        assert (folder_of(harness) / "data" / "CURRENT").exists()
        parts_of(harness).query.options = replace(parts_of(harness).query.options, table="runs")
        harness.restart()
        push(harness, expected, 1)
        assert not folder_of(harness).exists()


def rows_held(folder: Path) -> int:
    """The rows of states in the database of a table that is closed."""
    database = rocksdict.Rdict(str(folder / "data"), rocksdict.Options(raw_mode=True))
    try:
        return sum(key.startswith(b"\x01") for key, _ in database.items() if isinstance(key, bytes))
    finally:
        database.close()


def opened(folder: Path) -> RocksTable:
    table = RocksTable.open(folder)
    assert table is not None
    return table


def test_what_has_expired_goes(tmp_path: Path) -> None:
    state = replace(VALUE, name="brief", expires_by=TimeDomain.PROCESSING)
    table = opened(tmp_path)
    for second in range(10):
        keys = [(number, b"%d" % number) for number in range(100 * second, 100 * (second + 1))]
        changes: list[Any] = [(key_hash, key, b"", Operation.PUT, "x") for key_hash, key in keys]
        table.apply([make_run(state, changes, expiry_ms=1000 * second)])
    table.apply([make_run(VALUE, [(1, b"1", b"", Operation.PUT, "stays")])])
    table.close()
    assert rows_held(tmp_path) == 1001
    table = opened(tmp_path)
    for _ in range(5):
        table.drop_expired(Moment(4500, 0), 230)
    assert len(table.get_many(state, make_keys((450, b"450"), (550, b"550"))).positions) == 1
    table.close()
    assert rows_held(tmp_path) == 501
    table = opened(tmp_path)
    for _ in range(5):
        table.drop_expired(Moment(90_000, 0), 230)
    table.close()
    assert rows_held(tmp_path) == 1


def test_deleted_states_go(tmp_path: Path) -> None:
    table = opened(tmp_path)
    newer = replace(VALUE, name="$1$value")
    for state in (VALUE, newer, MAP):
        table.apply([make_run(state, [(1, b"a", b"e" if state is MAP else b"", Operation.PUT, state.name)])])
    table.drop_deleted({"value": 1})
    table.close()
    assert rows_held(tmp_path) == 2
    table = opened(tmp_path)
    assert table.get_many(newer, make_keys((1, b"a"))).values.column(0).to_pylist() == ["$1$value"]
    assert not len(table.get_many(VALUE, make_keys((1, b"a"))).positions)
    table.apply([make_run(VALUE, [(1, b"a", b"", Operation.PUT, "again")])])
    assert table.get_many(VALUE, make_keys((1, b"a"))).values.column(0).to_pylist() == ["again"]
    table.close()


def test_many_entries(tmp_path: Path) -> None:
    """More than are counted, and more than are removed one by one."""
    table = RocksTable.open(tmp_path)
    assert table is not None
    entries = [number.to_bytes(4, "big") for number in range(5000)]
    changes: list[Any] = [(9, key, entry, Operation.PUT, "x") for key in (b"k", b"l") for entry in entries]
    table.apply([make_run(MAP, changes)])
    assert table.count_entries(MAP, make_keys((9, b"k"), (9, b"m"))).entries.tolist() == [1 << 31, 0]
    table.apply([make_run(MAP, [(9, b"k", b"", Operation.CLEAR, None), (9, b"k", entries[7], Operation.PUT, "y")])])
    assert table.entries(MAP, make_keys((9, b"k"))).values.column(0).to_pylist() == ["y"]
    assert len(table.entries(MAP, make_keys((9, b"l"))).entries) == 5000
    table.close()


def test_large_entries_count_as_many(tmp_path: Path) -> None:
    """They are looked up, or read in pages."""
    table = opened(tmp_path)
    changes: list[Any] = [(9, b"k", bytes([number]), Operation.PUT, "x" * (1 << 20)) for number in range(6)]
    table.apply([make_run(MAP, [*changes, *((9, b"l", *change[2:]) for change in changes[:3])])])
    assert table.count_entries(MAP, make_keys((9, b"k"), (9, b"l"))).entries.tolist() == [1 << 31, 3]
    table.close()


TYPES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int8(), [-128, 127, None]),
    (pa.int64(), [-(2**63), 2**63 - 1, None]),
    (pa.float32(), [0.1, -0.0, float("inf"), None]),
    (pa.float64(), [0.1, -0.0, float("-inf"), None]),
    (pa.bool_(), [True, False, None]),
    (pa.string(), ["", "ü", None]),
    (pa.binary(), [b"", b"\xff\x00", None]),
    (pa.date32(), [datetime.date(1, 1, 1), datetime.date(9999, 12, 31), None]),
    (pa.timestamp("us", "UTC"), [datetime.datetime(2000, 1, 1, 0, 0, 0, 1, datetime.UTC), None]),
    (pa.timestamp("us"), [datetime.datetime(1, 1, 1), None]),
    (pa.duration("us"), [datetime.timedelta(microseconds=-1), None]),
    (pa.time64("ns"), [datetime.time(23, 59, 59, 999999), None]),
    (pa.decimal128(38, 18), [decimal.Decimal("-1.000000000000000001"), None]),
    (pa.null(), [None]),
    (pa.list_(pa.decimal128(5, 2)), [[], [decimal.Decimal("1.25"), None], None]),
    (pa.struct([("a", pa.date32()), ("b", pa.list_(pa.string()))]), [{"a": None, "b": ["x", None]}, None]),
    (pa.map_(pa.string(), pa.timestamp("us")), [[("z", None), ("a", datetime.datetime(2000, 1, 1))], [], None]),
    (pa.list_(pa.map_(pa.int32(), pa.struct([("x", pa.float32())]))), [[[(1, {"x": 0.5})], None], None]),
]


@pytest.mark.parametrize(("kind", "values"), TYPES, ids=[str(kind) for kind, _ in TYPES])
def test_values_of_every_type_come_back(kind: pa.DataType, values: list[Any]) -> None:
    state = StateDescriptor("s", StateKind.VALUE, pa.schema([("v", kind), ("w", pa.int64())]))
    # Not from the start of the arrays: rows are often parts of larger ones.
    array = pa.array([values[0], *values], kind)
    rows = len(array)
    columns = [
        pa.array(np.arange(rows, dtype=np.uint64)),
        pa.array([b"k"] * rows, pa.binary()),
        pa.array([b""] * rows, pa.binary()),
        pa.array([Operation.PUT] * rows, pa.uint8()),
        pa.array([None, *range(rows - 1)], pa.int64()),
        array,
        pa.array(range(rows), pa.int64()),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=change_schema(state)).slice(1)

    found, expiry = decode_values(encode_values(batch, state, 1), [state, state], state)

    assert found.column(0).combine_chunks().equals(array.slice(1))
    assert found.column(1).to_pylist() == list(range(1, rows))
    assert expiry.to_pylist() == list(range(rows - 1))


def test_rows_of_one_hash_that_runs_and_rocksdb_order_differently(tmp_path: Path) -> None:
    """In a run a key's bytes count, in RocksDB its length comes first; so not all of them can be in a sorted file."""
    keys = [b"aaa", b"b", b"bb", b"c", b"cccc", b"d"]
    changes: list[Any] = [(7, key, b"", Operation.PUT, key.decode()) for key in keys]
    table = RocksTable.open(tmp_path, MergePolicy(table_batch_bytes=100, table_chunk_rows=2))
    assert table is not None
    table.apply([make_run(VALUE, [*changes, (8, b"removed", b"", Operation.DELETE, None)])])
    found = table.get_many(VALUE, make_keys(*((7, key) for key in keys), (8, b"removed")))
    assert found.values.column(0).to_pylist() == ["aaa", "b", "bb", "c", "cccc", "d"]
    assert list(tmp_path.rglob("data/*.sst")), "the first run is in files"
    assert not (tmp_path / "new").exists()
    table.close()


KILLED = """
import os, signal, sys
from pathlib import Path
import rocksdict
from statelog.local.policy import MergePolicy
from statelog.tables.rocksdb import RocksTable
from tests.tables.rocksdb_table_support import large_run

folder, last, is_flushed = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "flushed"

class Dying:
    "A database whose process dies after so many writes; 0 is after files are taken over."
    def __init__(self, *arguments):
        self.database, self.writes = database(*arguments), 0
    def __getattr__(self, name):
        return getattr(self.database, name)
    def write(self, batch, options):
        self.database.write(batch, options)
        self.writes += 1
        if self.writes == last:
            if is_flushed:
                self.database.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    def ingest_external_file(self, paths, options):
        self.database.ingest_external_file(paths, options)
        if not last:
            os.kill(os.getpid(), signal.SIGKILL)

database, rocksdict.Rdict = rocksdict.Rdict, Dying
table = RocksTable.open(folder, MergePolicy(table_batch_bytes=1000, table_chunk_rows=100))
table.advance(large_run("old"), b"1" * 16)
table.advance(large_run("new"), b"2" * 16)
raise SystemExit(3)
"""


@pytest.mark.parametrize("is_flushed", ["flushed", "in memory"])
@pytest.mark.parametrize("writes", [0, 1, 2, 3, 8, 13])
def test_a_death_while_a_run_is_applied(writes: int, is_flushed: str, tmp_path: Path) -> None:
    """What is found afterwards is all of a state that the digest names, or no digest.

    The first run becomes sorted files, between the first write and the second; death 0 is after they are taken over.
    """
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(writes), is_flushed],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        timeout=100,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    table = RocksTable.open(tmp_path)
    assert table is not None
    keys = make_keys(*((number, b"%d" % number) for number in range(1000)))
    texts = set(table.get_many(VALUE, keys).values.column(0).to_pylist())
    if table.digest is not None:
        assert texts == {b"1" * 16: {"old"}, b"2" * 16: {"new"}}[table.digest]
        assert len(table.get_many(VALUE, keys).positions) == 1000
    if is_flushed == "flushed":
        assert table.digest == {2: b"1" * 16, 13: b"2" * 16}.get(writes)
    table.close()


def test_without_the_package_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    with pytest.raises(ConfigurationError, match=r"pip install statelog\[rocksdb\]"):
        open_rocksdb(LocalRuns(tmp_path), [], b"", Garbage(Moment(0, 0), {}), restoring())
    monkeypatch.undo()
    table = open_rocksdb(LocalRuns(tmp_path), [], b"", Garbage(Moment(0, 0), {}), restoring())
    assert table is not None, "the lock was not let go"
    table.close()


def test_the_package_is_not_imported_unless_the_table_is_used() -> None:
    code = f"import sys, {tables.__name__}, statelog.testing; sys.exit('rocksdict' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=100, check=False).returncode == 0
