"""One mutated file: its mutants, what became of each, and the tests that each needs."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.work_db import WorkDB
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkResult

from tests.mutation.lists import Mutant, function_at
from tests.mutation.operators import Provider

_PROVIDER = "statelog"
_START_S = 20.0


class Server:
    """The process that runs tests in a copy of the project; see `tests.mutation.server`."""

    def __init__(self, tree: Path) -> None:
        self._output = tree / "pytest.out"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutation.server"],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tree / "src"), os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, arguments: list[str], seconds: float, **more: Any) -> int | None:
        """Run pytest; None if the time was over."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"arguments": arguments, "seconds": seconds, "output": str(self._output), **more}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: int | None = json.loads(self._process.stdout.readline())
        return answer

    def output(self) -> str:
        """What the last run printed."""
        return self._output.read_text(errors="replace")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass(frozen=True)
class Coverage:
    """Which tests come through a line, and how long each takes."""

    seconds: dict[str, float]
    tests: dict[int, list[str]]

    def of(self, first: int, last: int, budget_s: float) -> list[str]:
        """The tests of some lines, the fast ones first, up to a time in total; all tests if a line is no test's own."""
        found = {test for line in range(first, last + 1) for test in self.tests.get(line, ())}
        chosen, total = [], 0.0
        for test in sorted(found or self.seconds, key=lambda test: (self.seconds[test], test)):
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
    """The mutants of one file, kept in a database; what was killed stays killed until the file changes."""

    def __init__(self, path: str, tests: list[str], folder: Path, tree: Path, server: Server) -> None:
        self._path, self._tests, self._tree, self._server = path, tests, tree, server
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
        self._coverage_file = folder / f"{name}.{digest}.{self._digest_of_tests()}.json"

    def _digest_of_tests(self) -> str:
        digest = hashlib.sha256()
        for test in self._tests:
            digest.update(Path(test).read_bytes())
        return digest.hexdigest()[:16]

    def run(self, budget_s: float, lines: range | None, say: Callable[[str], None]) -> Counts:
        """Try every mutant that was not killed before."""
        start = time.monotonic()
        coverage = self._cover()
        seen: set[str] = set()
        killed, survivors, total = 0, [], 0
        done = {item.job_id: result for item, result in self._db.completed_work_items}
        for job, spec, mutated in self._mutants():
            if mutated in seen or (lines is not None and spec.start_pos[0] not in lines):
                continue
            seen.add(mutated)
            total += 1
            before = done.get(job)
            if before is None or before.test_outcome is TestOutcome.SURVIVED:
                outcome = self._try(mutated, coverage.of(spec.start_pos[0], spec.end_pos[0], budget_s), coverage)
                self._db.set_result(job, WorkResult(WorkerOutcome.NORMAL, test_outcome=outcome))
            else:
                outcome = before.test_outcome
            if outcome is TestOutcome.SURVIVED:
                mutant = self.describe(mutated, spec)
                survivors.append(mutant)
                say(f"{self._path}:{mutant.line} survives: {mutant.after}")
            else:
                killed += 1
        self._db.close()
        return Counts(total, killed, tuple(survivors), time.monotonic() - start)

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

    def _cover(self) -> Coverage:
        if not self._coverage_file.exists():
            status = self._server.run(
                ["-q", "-x", *self._tests], 1800.0, coverage=str(self._coverage_file), sources=[str(self._file)]
            )
            if status != 0:
                self._coverage_file.unlink(missing_ok=True)
                raise SystemExit(f"The tests of {self._path} fail without a mutation:\n{self._server.output()[-3000:]}")
        recorded = json.loads(self._coverage_file.read_text())
        (lines,) = recorded["lines"].values()
        return Coverage(recorded["seconds"], {int(line): tests for line, tests in lines.items()})

    def _try(self, mutated: str, tests: list[str], coverage: Coverage) -> TestOutcome:
        try:
            compile(mutated, self._path, "exec")
        except SyntaxError:
            return TestOutcome.INCOMPETENT
        limit_s = _START_S + 5 * sum(coverage.seconds[test] for test in tests)
        self._file.write_text(mutated)
        try:
            status = self._server.run(["-q", "-x", "--no-header", *tests], limit_s)
        finally:
            self._file.write_text(self._source)
        if status == 4 or status == 5:
            return TestOutcome.KILLED  # what a test imports is no longer there
        return TestOutcome.SURVIVED if status == 0 else TestOutcome.KILLED

    def describe(self, mutated: str, spec: MutationSpec) -> Mutant:
        """The mutant by its changed lines, which survive an edit elsewhere in the file."""
        old, new = self._source.splitlines(), mutated.splitlines()
        removed, added = [], []
        for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            if tag != "equal":
                removed += old[i1:i2]
                added += new[j1:j2]
        return Mutant(
            self._path,
            function_at(self._source, spec.start_pos[0]),
            " ".join(" ".join(removed).split()),
            " ".join(" ".join(added).split()),
            spec.start_pos[0],
        )
