"""One mutated file: its mutants, what became of each, and the tests that each needs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.work_db import WorkDB
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkResult

from tests.mutation.lists import Mutant, function_at, is_in_function
from tests.mutation.operators import Provider

_PROVIDER = "statelog"
_HANGING_S = 5.0
"""A test hangs if it needs so much longer than four times its time without a mutation."""


class Server:
    """The process that runs the tests of one file in a copy of the project; see `tests.mutation.server`."""

    def __init__(self, tree: Path, file: Path, tests: list[str]) -> None:
        self._output = tree / "pytest.out"
        here, theirs = os.pipe(), os.pipe()
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.mutation.server", str(file), str(here[0]), str(theirs[1]), *tests],
                cwd=tree,
                env=environment(tree),
                pass_fds=(here[0], theirs[1]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        os.close(here[0])
        os.close(theirs[1])
        self._requests, self._answers = os.fdopen(here[1], "w"), os.fdopen(theirs[0])
        if self._answers.readline() != "passed\n":
            raise SystemExit(f"The tests of {file} cannot be collected:\n{self.output()}")

    def cover(self, coverage: Path) -> str:
        """Run all tests, and write their times and lines to a file; how that ended."""
        return self._ask({"coverage": str(coverage)})

    def run(self, mutant: str, seconds: dict[str, float]) -> str:
        """Run tests with a mutant, with so many seconds for each; how that ended."""
        return self._ask({"mutant": mutant, "seconds": seconds})

    def _ask(self, request: dict[str, Any]) -> str:
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        return self._answers.readline().strip()

    def output(self) -> str:
        """The end of what was printed."""
        return self._output.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """End the process."""
        self._requests.close()
        self._process.wait()
        self._answers.close()


def environment(tree: Path) -> dict[str, str]:
    """The variables with which Python imports from a copy of the project."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree / "src"), os.environ.get("PYTHONPATH", "")])}


@dataclass(frozen=True)
class Coverage:
    """Which tests come through a line, and how long each takes."""

    seconds: dict[str, float]
    tests: dict[int, list[str]]

    def of(self, first: int, last: int, budget_s: float) -> list[str]:
        """The tests of some lines, the fast ones first, up to a time in total."""
        return self._fastest({test for line in range(first, last + 1) for test in self.tests.get(line, ())}, budget_s)

    def all(self, budget_s: float) -> list[str]:
        """All tests, the fast ones first, up to a time in total."""
        return self._fastest(set(self.seconds), budget_s)

    def _fastest(self, tests: set[str], budget_s: float) -> list[str]:
        chosen: list[str] = []
        total = 0.0
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            total += self.seconds[test]
            if chosen and total > budget_s:
                break
            chosen.append(test)
        return chosen


@dataclass(frozen=True)
class Counts:
    """What became of a file's mutants."""

    mutants: int
    killed: int
    survivors: tuple[Mutant, ...]
    seconds: float


class Session:
    """The mutants of one file, kept in a database.

    A killed mutant is not tried again until the file changes; an `explained` one that survived, until its tests change.
    """

    def __init__(self, path: str, tests: list[str], folder: Path, tree: Path, explained: Collection[Mutant]) -> None:
        self._path, self._tests, self._tree, self._explained = path, tests, tree, explained
        self._file = tree / path
        self._source = self._file.read_text()
        digest = hashlib.sha256(self._source.encode()).hexdigest()[:16]
        name = path.removeprefix("src/").replace("/", ".").removesuffix(".py")
        cosmic_ray.plugins.OPERATOR_PROVIDERS.clear()
        cosmic_ray.plugins.OPERATOR_PROVIDERS[_PROVIDER] = Provider()
        database = folder / f"{name}.{digest}.sqlite"
        is_new = not database.exists()
        self._db = WorkDB(str(database), WorkDB.Mode.create)
        if is_new or not self._db.num_work_items:
            init([self._file], self._db, {})
        self._tests_digest = self._digest_of_tests()
        self._coverage_file = folder / f"{name}.{digest}.{self._tests_digest}.json"

    def _digest_of_tests(self) -> str:
        digest = hashlib.sha256()
        for test in self._tests:
            digest.update(Path(test).read_bytes())
        return digest.hexdigest()[:16]

    def run(self, budget_s: float, lines: range | None, say: Callable[[str], None]) -> Counts:
        """Try every mutant that was not killed before."""
        start = time.monotonic()
        server = Server(self._tree, self._file, self._tests)
        coverage = self._cover(server)
        seen: set[str] = set()
        killed, survivors, total = 0, [], 0
        done = {item.job_id: result for item, result in self._db.completed_work_items}
        for job, spec, mutated in self._mutants():
            if mutated in seen or (lines is not None and spec.start_pos[0] not in lines):
                continue
            seen.add(mutated)
            total += 1
            before, mutant = done.get(job), self.describe(mutated, spec)
            if before is None or self._may_be_killed(mutant, before):
                outcome = self._try(server, coverage, mutated, (spec.start_pos[0], spec.end_pos[0]), budget_s)
                result = WorkResult(WorkerOutcome.NORMAL, output=self._tests_digest, test_outcome=outcome)
                self._db.set_result(job, result)
            else:
                outcome = before.test_outcome
            if outcome is TestOutcome.SURVIVED:
                survivors.append(mutant)
                say(f"{self._path}:{mutant.line} survives: {mutant.after}")
            else:
                killed += 1
        self._db.close()
        server.close()
        return Counts(total, killed, tuple(survivors), time.monotonic() - start)

    def _may_be_killed(self, mutant: Mutant, before: WorkResult) -> bool:
        """Whether a mutant that was tried is to be tried again."""
        is_settled = mutant in self._explained and before.output == self._tests_digest
        return before.test_outcome is TestOutcome.SURVIVED and not is_settled

    def _mutants(self) -> Iterator[tuple[str, MutationSpec, str]]:
        """Every mutant in the order of the lines, with its source."""
        items = sorted(self._db.work_items, key=lambda i: (i.mutations[0].start_pos, i.mutations[0].operator_name))
        for item in items:
            (spec,) = item.mutations
            operator = cosmic_ray.plugins.get_operator(spec.operator_name)()
            mutated = mutate_code(self._source, operator, spec.occurrence)
            if mutated is None or mutated == self._source:
                continue
            yield item.job_id, spec, mutated

    def _cover(self, server: Server) -> Coverage:
        if not self._coverage_file.exists() and server.cover(self._coverage_file) != "passed":
            raise SystemExit(f"The tests of {self._path} fail without a mutation:\n{server.output()}")
        recorded = json.loads(self._coverage_file.read_text())
        return Coverage(recorded["seconds"], {int(line): tests for line, tests in recorded["lines"].items()})

    def _try(
        self, server: Server, coverage: Coverage, mutated: str, lines: tuple[int, int], budget_s: float
    ) -> TestOutcome:
        try:
            compile(mutated, self._path, "exec")
        except SyntaxError:
            return TestOutcome.INCOMPETENT
        tests = coverage.of(*lines, budget_s)
        self._file.write_text(mutated)  # for tests that start processes
        try:
            seconds = {test: _HANGING_S + 4 * coverage.seconds[test] for test in tests}
            ended = server.run(mutated, seconds) if tests else "elsewhere"
            if ended == "elsewhere" and (tests or not is_in_function(self._source, lines[0])):
                ended = self._try_anew(coverage.all(budget_s))
        finally:
            self._file.write_text(self._source)
        return TestOutcome.SURVIVED if ended in ("passed", "elsewhere") else TestOutcome.KILLED

    def _try_anew(self, tests: list[str]) -> str:
        """Run tests in a new process: something changed that is made when the file is imported."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        try:
            done = subprocess.run(
                command, cwd=self._tree, env=environment(self._tree), capture_output=True, timeout=300
            )
        except subprocess.TimeoutExpired:
            return "hung"
        return "failed" if done.returncode else "passed"

    def describe(self, mutated: str, spec: MutationSpec) -> Mutant:
        """The mutant by its changed lines, which survive an edit elsewhere in the file."""
        old, new = self._source.splitlines(), mutated.splitlines()
        first = _equal(old, new)
        last = _equal(old[first:][::-1], new[first:][::-1])
        removed, added = old[first : len(old) - last], new[first : len(new) - last]
        return Mutant(
            self._path,
            function_at(self._source, spec.start_pos[0]),
            " ".join(" ".join(removed).split()),
            " ".join(" ".join(added).split()),
            spec.start_pos[0],
        )


def _equal(one: list[str], other: list[str]) -> int:
    """How many lines are the same from the start."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
