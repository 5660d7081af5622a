"""The memory tables that a process keeps: each is brought from where it was left to the state that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from statelog.local.policy import MergePolicy
from statelog.local.runs import LocalRun, LocalRuns
from statelog.runs.merge import Garbage
from statelog.runs.reader import Run
from statelog.runs.schema import Operation, StateDescriptor, TimeDomain, stored_name
from statelog.runs.times import Moment
from statelog.tables.memory import MemoryTable
from statelog.tables.open import MemoryTables
from tests.contract.table_contract import VALUE, encode_changes, make_keys, write_run

NOTHING = Garbage(Moment(0, 0), {})
"""What is garbage before anything expires or is deleted."""
BRIEF = replace(VALUE, name="brief", expires_by=TimeDomain.PROCESSING)


def digest(name: str) -> bytes:
    return name.encode().ljust(16)


@pytest.fixture
def local(tmp_path: Path) -> LocalRuns:
    """Two histories: start, one, two; and start, one, other."""
    made = LocalRuns(tmp_path)
    for batch, before, after, key in (
        (0, "start", "one", b"a"),
        (1, "one", "two", b"b"),
        (1, "one", "other", b"c"),
    ):
        changes: list[Any] = [(1, key, b"", Operation.PUT, after)]
        write_run(made, LocalRun(batch, batch, digest(before), digest(after)), encode_changes(VALUE, changes), "token")
    return made


def held(table: MemoryTable) -> list[str]:
    found = table.get_many(VALUE, make_keys((1, b"a"), (1, b"b"), (1, b"c"))).values.column(0).to_pylist()
    return [str(text) for text in found]


def runs_to(local: LocalRuns, head: str) -> list[tuple[LocalRun, Run]]:
    chain = local.chain(digest("start"), digest(head))
    assert chain is not None
    return [(local_run, local.open(local_run)) for local_run in chain]


def at(tables: MemoryTables, local: LocalRuns, head: str, garbage: Garbage = NOTHING) -> MemoryTable:
    return tables.at(local, runs_to(local, head), digest(head), garbage)


def test_a_table_goes_on_from_where_it_was_left(local: LocalRuns) -> None:
    tables = MemoryTables()
    empty = at(tables, local, "start")
    assert held(empty) == []
    for head, expected in (("one", ["one"]), ("one", ["one"]), ("two", ["one", "two"])):
        assert at(tables, local, head) is empty
        assert held(empty) == expected


def test_a_table_of_another_history_is_made_anew(local: LocalRuns) -> None:
    tables = MemoryTables()
    assert held(at(tables, local, "two")) == ["one", "two"]
    assert held(at(tables, local, "other")) == ["one", "other"]
    assert held(at(tables, local, "one")) == ["one"], "a batch that is repeated"


def test_a_table_has_the_restored_state_even_if_its_files_have_gone_since(local: LocalRuns) -> None:
    """Another attempt may find one of them damaged, and remove it."""
    runs = runs_to(local, "two")
    local.remove(local_run.file_name for local_run, _ in runs)
    assert held(MemoryTables().at(local, runs, digest("two"), NOTHING)) == ["one", "two"]


def test_a_process_keeps_a_table_for_each_subtask_until_it_forgets_it(local: LocalRuns, tmp_path: Path) -> None:
    tables = MemoryTables()
    first = at(tables, local, "one")
    other = LocalRuns(tmp_path / "another subtask's")
    assert held(tables.at(other, [], digest("start"), NOTHING)) == []
    assert at(tables, local, "one") is first
    tables.forget(tmp_path)
    tables.forget(tmp_path)
    again = at(tables, local, "one")
    assert again is not first
    assert held(again) == ["one"]


def keys_of(batch: int, count: int) -> list[tuple[int, bytes]]:
    """Hashes and keys that a batch writes."""
    return [(1000 * batch + number, b"%d" % (1000 * batch + number)) for number in range(count)]


def write_batches(local: LocalRuns, *batches: tuple[StateDescriptor, int, int | None]) -> None:
    """Write a run for each batch, with so many keys of a state that expire at a time; the heads are 1, 2 and so on."""
    for batch, (state, count, expiry_ms) in enumerate(batches):
        changes: list[Any] = [(key_hash, key, b"", Operation.PUT, "x") for key_hash, key in keys_of(batch, count)]
        before, after = ("start" if batch == 0 else str(batch)), str(batch + 1)
        local_run = LocalRun(batch, batch, digest(before), digest(after))
        write_run(local, local_run, encode_changes(state, changes, expiry_ms=expiry_ms), "token")


def count(table: MemoryTable, state: StateDescriptor, keys: Sequence[tuple[int, bytes]]) -> int:
    """The entries that the table holds, expired or not."""
    return int(table.count_entries(state, make_keys(*keys)).entries.sum())


def test_what_has_expired_is_removed_a_part_at_a_time(tmp_path: Path) -> None:
    """At least so much at a time, or twice as much as has come: so what has expired stays a part of the whole."""
    local = LocalRuns(tmp_path, policy=MergePolicy(expiry_rows=30))
    write_batches(local, (BRIEF, 100, 1000), (BRIEF, 50, 9000), (VALUE, 1, None))
    first, second, tables = keys_of(0, 100), keys_of(1, 50), MemoryTables()
    before, after = Garbage(Moment(999, 0), {}), Garbage(Moment(1000, 0), {})
    table = at(tables, local, "1", before)
    assert count(table, BRIEF, first) == 100
    assert at(tables, local, "1", after) is table
    assert count(table, BRIEF, first) == 70
    assert at(tables, local, "2", after) is table
    assert count(table, BRIEF, first) == 0, "50 rows have come, so 100 were looked at"
    for _ in range(5):
        assert at(tables, local, "3", Garbage(Moment(8999, 0), {})) is table
    assert count(table, BRIEF, second) == 50
    for _ in range(3):
        at(tables, local, "3", Garbage(Moment(9000, 0), {}))
    assert count(table, BRIEF, second) == 0
    assert count(table, VALUE, keys_of(2, 1)) == 1


def test_rows_expire_by_the_clock_of_the_newest_description_of_their_state(tmp_path: Path) -> None:
    """A state may get a TTL; what it has stored before stays."""
    local = LocalRuns(tmp_path)
    by_watermark = replace(VALUE, expires_by=TimeDomain.EVENT)
    write_batches(local, (VALUE, 2, None), (by_watermark, 2, 1000), (by_watermark, 2, 2000))
    table = at(MemoryTables(), local, "3", Garbage(Moment(5000, 1000), {}))
    assert [count(table, VALUE, keys_of(batch, 2)) for batch in range(3)] == [2, 0, 2]


def test_a_deleted_state_is_removed(tmp_path: Path) -> None:
    local = LocalRuns(tmp_path)
    newer = replace(VALUE, name=stored_name("value", 1))
    write_batches(local, (VALUE, 5, None), (newer, 3, None))
    tables = MemoryTables()
    table = at(tables, local, "2")
    assert count(table, VALUE, keys_of(0, 5)) == 5
    assert at(tables, local, "2", Garbage(Moment(0, 0), {"value": 1})) is table
    assert count(table, VALUE, keys_of(0, 5)) == 0
    assert count(table, newer, keys_of(1, 3)) == 3
