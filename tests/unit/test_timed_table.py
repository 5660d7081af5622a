"""A table whose reads are timed gives what the table gives, and counts the time of each read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from statelog.stopwatch import Part, Stopwatch
from statelog.tables.table import TimedTable
from tests.unit.test_stopwatch import SetClock

Call = tuple[str, tuple[Any, ...]]


class SlowTable:
    """Answers each call with the call itself, after a second."""

    def __init__(self, clock: SetClock) -> None:
        self.clock = clock

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def answer(*arguments: Any) -> Call:
            self.clock.run(1)
            return name, arguments

        return answer

    def entries_of(self, *arguments: Any) -> Any:
        self.clock.run(1)
        return SlowTable(self.clock)

    def branch(self, *arguments: Any) -> SlowTable:
        self.clock.run(100)
        return SlowTable(self.clock)

    def apply(self, runs: list[str]) -> None:
        self.applied = runs

    def pages(self, *arguments: Any) -> Iterator[Any]:
        self.asked = arguments
        return self._pages()

    def _pages(self) -> Iterator[Any]:
        for page in ("first", "second"):
            self.clock.run(1)
            yield page


@pytest.fixture(name="timed")
def make_table() -> tuple[Any, Stopwatch]:
    clock = SetClock()
    stopwatch = Stopwatch(clock)
    table: Any = SlowTable(clock)
    return TimedTable(table, stopwatch), stopwatch


READS = [
    ("get_many", 2), ("entries", 2), ("count_entries", 2), ("due_timers", 3),
]  # fmt: skip


@pytest.mark.parametrize("is_branched", [False, True])
def test_each_read_is_passed_on_and_timed(timed: tuple[Any, Stopwatch], is_branched: bool) -> None:
    table, stopwatch = timed
    if is_branched:
        table = table.branch("run")
    for number, (name, count) in enumerate(READS, 1):
        arguments = tuple(range(count))
        assert getattr(table, name)(*arguments) == (name, arguments)
        assert stopwatch.spent_s(Part.READ) == number


def test_the_entries_of_a_key_are_read_as_they_are_asked_for(timed: tuple[Any, Stopwatch]) -> None:
    table, stopwatch = timed
    entries = table.entries_of("state", 1, b"key")
    assert entries.find(b"entry") == ("find", (b"entry",))
    assert entries.between("range", 1, 2) == ("between", ("range", 1, 2))
    assert stopwatch.spent_s(Part.READ) == 3
    pages = entries.pages(7, 8)
    assert entries.entries.asked == (7, 8), "a page shows the state as of the call"
    assert next(pages) == "first"
    assert stopwatch.spent_s(Part.READ) == 4
    assert list(pages) == ["second"]
    assert stopwatch.spent_s(Part.READ) == 5


def test_what_reads_nothing_is_not_timed(timed: tuple[Any, Stopwatch]) -> None:
    table, stopwatch = timed
    assert table.mean_bytes("state") == ("mean_bytes", ("state",))
    table.apply(["run"])
    assert table.table.applied == ["run"]
    assert stopwatch.spent_s(Part.READ) == 0
