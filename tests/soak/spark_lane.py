"""A life in the spark lane: a real query, whose Python driver, JVM and Python workers are killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final

from statelog.testing.query import new_directory
from tests.soak.moves import random_options
from tests.soak.report import Difference, live_on
from tests.spark.support import REPOSITORY, Driver, Job, ledger_model, make_orders, start_driver

_LEG_TIMEOUT_S: Final = 300.0
_TOOL_TIMEOUT_S: Final = 120.0
_TOO_MANY_DEATHS: Final = "Python worker exited unexpectedly"


class SparkLife:
    """One query from its first batch to its end, in several drivers one after the other.

    Parameters
    ----------
    seed : str
        Everything is drawn from it, but when a process is killed depends on the machine too.
    counts : Counter
        Counts what happens.
    """

    def __init__(self, seed: str, counts: Counter[str]) -> None:
        self._random = Random(seed)
        self._counts = counts
        self.moves: deque[str] = deque(maxlen=60)
        self.directory = new_directory()
        self._job = Job(self.directory)
        self._files = self._compared = 0
        self._ends: dict[int, int] = {}
        self._parallelism = 0
        self._leg, self._legs = 0, self._random.randint(3, 5)
        self._driver: Driver | None = None

    def run(self) -> None:
        """Live to the end; raises Difference if something is not as the model has it."""
        live_on(self._go_on, lambda: f"leg {self._leg} of {self._legs}", self._end_driver)

    def _go_on(self) -> bool:
        is_last = self._leg == self._legs
        if self._leg and self._random.random() < 0.4:
            self._go_on_from_savepoint()
        self._add_input(3 if is_last else self._random.randint(10, 18))  # Spark keeps 100 batches of its log
        self._driver = self._start()
        self._finish(self._driver, was_killed=not is_last and self._kill_some(self._driver))
        self._end_driver()
        self._compare()
        self._leg += 1
        if is_last:
            self._end()
        return not is_last

    def _end_driver(self) -> None:
        if self._driver is not None:
            self._driver.process.kill()
            self._driver = None

    def _end(self) -> None:
        found, expected = len(self._job.results()), len(self._ends)
        if found != expected or self._ends[expected - 1] != self._files:
            raise Difference(f"{found} batches have a result; Spark read {self._files} files in {self._ends}")
        self._counts["lives"] += 1

    def _add_input(self, count: int) -> None:
        self._job.add(make_orders(count, seed=self._random.randrange(1 << 32), rows=40))
        self._files += count

    def _start(self) -> Driver:
        rng = self._random
        before, self._parallelism = self._parallelism, rng.randint(1, 4)
        options = random_options(rng)
        arguments: dict[str, Any] = {
            "parallelism": self._parallelism,
            "master": "local[2,8]",
            "actions": rng.choice([1, 1, 2, 3]),
            "options": options,
        }
        self.moves.append(f"a driver with {arguments}")
        self._counts["runs"] += 1
        self._counts["restarts"] += before > 0
        self._counts["rescales"] += before not in (0, self._parallelism)
        self._counts["settings changes"] += before > 0
        return start_driver("ledger", self.directory, arguments)

    def _kill_some(self, driver: Driver) -> bool:
        """Kill Python workers now and then, and in the end the driver or the JVM; return whether it came to that."""
        rng = self._random
        workers, end_s = rng.randint(0, 6), time.monotonic() + _LEG_TIMEOUT_S
        done = len(list(self._job.output.glob("*.json")))
        while len(list(self._job.output.glob("*.json"))) == done:
            if driver.process.poll() is not None or time.monotonic() > end_s:
                return False
            time.sleep(0.05)
        for _ in range(workers):
            time.sleep(rng.uniform(0.1, 1.0))
            self._kill_worker(driver)
        time.sleep(rng.uniform(0.0, 3.0))
        if driver.process.poll() is not None:
            return False
        victim = rng.choice(["drivers", "JVMs"])
        pid = driver.process.pid if victim == "drivers" else int(driver.jvm_pid_file.read_text())
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self._counts[f"kills of {victim}"] += 1
        self.moves.append(f"  one of the {victim} is killed")
        return True

    def _kill_worker(self, driver: Driver) -> None:
        """Kill a Python worker, or the process that forks them."""
        found = sorted(_python_below(int(driver.jvm_pid_file.read_text())))
        if found:
            with suppress(ProcessLookupError):
                os.kill(self._random.choice(found), signal.SIGKILL)
                self._counts["kills of Python workers"] += 1
                self.moves.append("  a Python worker is killed")

    def _finish(self, driver: Driver, was_killed: bool) -> None:
        try:
            code = driver.wait(_LEG_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise Difference(f"the query hangs:\n{driver.end}") from None
        if code and not was_killed and _TOO_MANY_DEATHS not in driver.text:
            raise Difference(f"the query failed:\n{driver.end}")

    def _compare(self) -> None:
        """Every batch that has a result has the right one."""
        self._ends.update(self._job.ends())  # a restored query has only the last ones
        expected = ledger_model(self._job.batches_up_to(self._ends))
        for batch, answer in self._job.results().items():
            if expected[batch] != answer:
                raise Difference(f"batch {batch}\n    found    {answer}\n    expected {expected[batch]}")
        self._counts["batches"] += len(self._job.results()) - self._compared
        self._compared = len(self._job.results())

    def _go_on_from_savepoint(self) -> None:
        """Save the query that is stopped, and have another one continue from that in its place."""
        checkpoint = self._job.checkpoint
        if not list(checkpoint.glob("commits/[0-9]*")):
            return
        target = self.directory / "savepoint"
        self._run_tool("savepoint", checkpoint, target)
        shutil.rmtree(checkpoint)
        self._run_tool("restore", target, checkpoint)
        shutil.rmtree(target)
        self._counts["savepoints"] += 1
        self._counts["restores"] += 1

    def _run_tool(self, command: str, source: Path, target: Path) -> None:
        self.moves.append(f"{command} {source} {target}")
        done = subprocess.run(
            [sys.executable, "-m", "statelog", command, str(source), str(target)],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=_TOOL_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise Difference(f"{command} failed:\n{done.stdout}{done.stderr}")


def _python_below(pid: int) -> list[int]:
    """All Python processes of Spark below one; it starts others too, such as chmod."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = list(children.get(pid, []))
    for one in found:
        found.extend(children.get(one, []))
    return [one for one in found if b"pyspark" in _command(one)]


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
