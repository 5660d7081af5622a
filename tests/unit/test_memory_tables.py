"""The memory tables that a process keeps: each is brought from where it was left to the state that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from statelog.local.runs import LocalRun, LocalRuns
from statelog.runs.reader import Run
from statelog.runs.schema import Operation
from statelog.tables.memory import MemoryTable
from statelog.tables.open import MemoryTables
from tests.contract.table_contract import VALUE, encode_changes, make_keys, write_run


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


def at(tables: MemoryTables, local: LocalRuns, head: str) -> MemoryTable:
    return tables.at(local, runs_to(local, head), digest(head))


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
    assert held(MemoryTables().at(local, runs, digest("two"))) == ["one", "two"]


def test_a_process_keeps_a_table_for_each_subtask_until_it_forgets_it(local: LocalRuns, tmp_path: Path) -> None:
    tables = MemoryTables()
    first = at(tables, local, "one")
    other = LocalRuns(tmp_path / "another subtask's")
    assert held(tables.at(other, [], digest("start"))) == []
    assert at(tables, local, "one") is first
    tables.forget(tmp_path)
    tables.forget(tmp_path)
    again = at(tables, local, "one")
    assert again is not first
    assert held(again) == ["one"]
