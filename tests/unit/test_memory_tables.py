"""The memory tables that a process keeps: what they go on from, when they are made anew, when they go."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest

from statelog.changelog.local_runs import LocalRuns
from statelog.checkpoint.tables import MemoryTables
from statelog.state.memory_table import MemoryTable
from statelog.testing.table_contract import VALUE, make_keys
from tests.unit.test_rocksdb_table import digest, local_runs


@pytest.fixture
def local(tmp_path: Path) -> LocalRuns:
    return local_runs(
        tmp_path,
        (0, "start", "one", [(b"a", "0")]),
        (1, "one", "two", [(b"b", "1")]),
        (1, "one", "other", [(b"c", "2")]),
        (2, "other", "last", [(b"a", None)]),
    )


def table_at(tables: MemoryTables, local: LocalRuns, head: str) -> MemoryTable:
    path = local.path(digest("start"), digest(head))
    assert path is not None
    return tables.at(local, [(edge, local.open(edge)) for edge in path], digest(head))


def held(table: MemoryTable) -> dict[int, str]:
    found = table.get_many(VALUE, make_keys((1, b"a"), (1, b"b"), (1, b"c")))
    return dict(zip(found.positions.tolist(), found.values.column(0).to_pylist(), strict=True))


def test_a_table_goes_on_from_where_it_was_left(local: LocalRuns) -> None:
    tables = MemoryTables()
    table = table_at(tables, local, "one")
    assert held(table) == {0: "0"}
    assert table_at(tables, local, "one") is table
    assert table_at(tables, local, "two") is table
    assert held(table) == {0: "0", 1: "1"}


def test_another_history_is_not_taken_over(local: LocalRuns) -> None:
    tables = MemoryTables()
    assert held(table_at(tables, local, "two")) == {0: "0", 1: "1"}
    assert held(table_at(tables, local, "other")) == {0: "0", 2: "2"}
    assert held(table_at(tables, local, "last")) == {2: "2"}
    assert held(table_at(tables, local, "one")) == {0: "0"}


def test_a_table_has_the_restored_state_even_if_its_files_have_gone_since(local: LocalRuns) -> None:
    """Another attempt may find one of them damaged, and remove it."""
    path = local.path(digest("start"), digest("two"))
    assert path is not None
    runs = [(edge, local.open(edge)) for edge in path]
    local.remove(edge.file_name for edge in path)
    assert held(MemoryTables().at(local, runs, digest("two"))) == {0: "0", 1: "1"}


def test_the_empty_state_needs_no_runs(local: LocalRuns) -> None:
    tables = MemoryTables()
    assert held(tables.at(local, [], digest("start"))) == {}
    assert held(table_at(tables, local, "one")) == {0: "0"}


def test_the_memory_of_a_subtask_that_has_moved_away_is_released(local: LocalRuns) -> None:
    tables = MemoryTables()
    left = weakref.ref(table_at(tables, local, "one"))
    assert left() is not None
    tables.forget(local.directory)
    assert left() is None
    tables.forget(local.directory)
