"""SIGKILL to the driver, or to a task, before and after every store operation of a query's life: nothing is lost.

The processes are real ones; :mod:`tests.coordinator.kill_points_process` has them. What
:mod:`tests.coordinator.test_crash_points` cannot see is seen here: what a process holds in memory and in open files is
gone with it, and calls break. The other ways of merging files are left to that module, for a process costs more time
than an exception.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from statelog.testing.query import LocalQuery, new_directory
from tests.coordinator.crash_points_support import leftovers
from tests.coordinator.kill_points_process import BATCHES, Kind, Outcome, Role, Rows, Scenario, When, rows_of

ROOT = Path(__file__).parents[2]
MAX_OPERATIONS = 500
OUTCOME_TIMEOUT_S = 100.0


class Forks:
    """A process that plays Spark and forks the query's processes; it and they are a process group of their own."""

    def __init__(self) -> None:
        self.connection, other_end = Pipe()
        command = f"from tests.coordinator.kill_points_process import main; main({other_end.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", command],
            cwd=ROOT,
            # Threads of a library would not be there in a fork.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            pass_fds=[other_end.fileno()],
            start_new_session=True,
        )
        other_end.close()

    def close(self) -> None:
        # Before its status is taken its id cannot be another's.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        self.connection.close()


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    made = new_directory()
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def all_forks(directory: Path) -> Iterator[list[Forks]]:
    """One for each of two cores; they end before their directory does."""
    started: list[Forks] = []
    try:
        for _ in range(2):
            started.append(Forks())
        yield started
    finally:
        for forks in started:
            forks.close()


def expected_output(kind: Kind) -> list[Rows]:
    """The output of all batches, of what the operators promise."""
    return expected_of_keyed() if kind == "keyed" else expected_of_unkeyed()


def expected_of_keyed() -> list[Rows]:
    sums: dict[int, int] = defaultdict(int)
    recent: dict[int, list[int]] = defaultdict(list)
    due: list[int] = []
    output: list[Rows] = []
    for rows in map(rows_of, range(BATCHES)):
        fired, due, seen = due, [], []
        for key, n in rows:
            sums[key] += n
            recent[key].append(n)
            if n % 3 == 0:
                due.append(key)
            seen.append((key, sums[key], len(recent[key]), sum(recent[key])))
        for key in fired:
            sums[key] *= 2
            recent[key] = []
            seen.append((key, sums[key], 0, 0))
        output.append(sorted(seen))
    return output


def expected_of_unkeyed() -> list[Rows]:
    return [sorted(row for batch in range(last + 1) for row in rows_of(batch)) for last in range(BATCHES)]


def require_exact(scenario: Scenario, outcome: Outcome) -> None:
    """The output is that of a query that nothing happened to, and the location holds what checkpoints name."""
    what = f"{scenario.role} {scenario.when} {scenario.number}: {scenario.killed_at or 'nobody was killed'}"
    assert not outcome.error, f"{what}\n{outcome.error}"
    assert outcome.deaths == (1 if scenario.killed_at else 0), what
    assert outcome.output == expected_output(scenario.kind), what
    query = LocalQuery(scenario.describe().operator, Path(scenario.directory), scenario.options)
    assert leftovers(query) == set(), what


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("role", ["driver", "task"])
@pytest.mark.parametrize(
    ("kind", "merging"),
    [("keyed", "across"), pytest.param("keyed", "off", marks=pytest.mark.extended), ("unkeyed", "within")],
)
def test_a_process_is_killed_at_every_store_operation(
    all_forks: list[Forks], directory: Path, kind: Kind, merging: str, role: Role, when: When
) -> None:
    kills = kill_at_every_operation(all_forks, Scenario(str(directory), kind, merging, role, when))
    assert kills >= 8, "hardly anything happened"


@pytest.mark.parametrize("kind", ["keyed", "unkeyed"])
def test_a_driver_is_killed_in_the_middle_of_every_append(all_forks: list[Forks], directory: Path, kind: Kind) -> None:
    kills = kill_at_every_operation(all_forks, Scenario(str(directory), kind, "across", "driver", "torn"))
    assert kills >= 3, "hardly anything happened"


def kill_at_every_operation(all_forks: list[Forks], scenario: Scenario) -> int:
    """Run a scenario with every number until nobody is killed any more, and return how often somebody was."""
    numbers = itertools.count(1)
    kills, is_over = 0, False
    idle, running = list(all_forks), dict[Connection, tuple[Forks, Scenario]]()
    try:
        while running or not is_over:
            while idle and not is_over:
                forks, one = idle.pop(), numbered(scenario, next(numbers))
                forks.connection.send(one)
                running[forks.connection] = (forks, one)
            for connection in ended(running):
                forks, one = running.pop(connection)
                require_exact(one, connection.recv())
                kills += bool(one.killed_at)
                is_over |= not one.killed_at
                shutil.rmtree(one.directory)
                idle.append(forks)
    finally:
        # After a failure: the next test must not get these outcomes.
        while running:
            for connection in ended(running):
                connection.recv()
                del running[connection]
    return kills


def numbered(scenario: Scenario, number: int) -> Scenario:
    """The scenario in which somebody dies at an operation, in a directory of its own."""
    assert number < MAX_OPERATIONS, "there is no end of operations"
    names = (scenario.kind, scenario.merging, scenario.role, scenario.when, str(number))
    directory = Path(scenario.directory, "-".join(names))
    directory.mkdir()
    return replace(scenario, directory=str(directory), number=number)


def ended(running: Collection[Connection]) -> list[Connection]:
    """Those of which an outcome is there; at least one."""
    found = [connection for connection in wait(running, OUTCOME_TIMEOUT_S) if isinstance(connection, Connection)]
    if not found:
        raise TimeoutError(f"no scenario has ended after {OUTCOME_TIMEOUT_S} s")
    return found
