"""A query on the hosts that is harmed again and again: how long until it goes on, and whether its results are exact."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Self

from tests.cluster.hosts import Host, wait_until
from tests.cluster.spark_hosts import EXECUTORS, PYTHON_DAEMON, WORKER, WORKERS, Driver, SparkHosts
from tests.cluster.totals import Answer, Model

RECOVERY_S: Final = 300.0
"""Within which a query must go on after a harm is over."""


class Difference(AssertionError):
    """Output or state is not as the model has it."""


@dataclass(frozen=True)
class Harm:
    """Something bad that happens to hosts.

    Parameters
    ----------
    text : str
        What happens.
    does : callable
        Does it to a life. A generator: it yields how many seconds to wait before it goes on.
    errors : frozenset of str
        The kinds of statelog's errors with which the query may end meanwhile, and start again.
    needs_kafka : bool
        Whether there must be a broker.
    """

    text: str
    does: Callable[[Life], Iterator[float]]
    errors: frozenset[str] = frozenset()
    needs_kafka: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a harm has led to.

    Parameters
    ----------
    lasts_s : float
        From its beginning to its end.
    recovery_s : float
        From its beginning until a batch was committed that began after it.
    longest_pause_s : float
        The longest time between two commits, from the last one before the harm to the first after its end.
    errors : list of str
        The kinds of the errors with which the query has ended, each time; empty for errors of Spark's own.
    starts : int
        How many drivers were started.
    batches : int
        How many batches have been compared so far.
    """

    lasts_s: float
    recovery_s: float
    longest_pause_s: float
    errors: list[str]
    starts: int
    batches: int


class Life:
    """A query from its first batch to its end, as a context manager.

    A driver that has ended is started again, as a supervisor would, on the host `home` with its clock `clock_ahead_s`
    ahead.
    """

    def __init__(self, cluster: SparkHosts) -> None:
        self.cluster = cluster
        self.home = "driver"
        self.clock_ahead_s = 0
        self.drivers: list[Driver] = []
        self._model = Model()
        self._answers: list[Answer] = []
        self._compared: set[Path] = set()
        self._written: dict[str, dict[int, float]] = {"offsets": {}, "commits": {}}

    @property
    def driver(self) -> Driver:
        """The one that was started last."""
        return self.drivers[-1]

    def __enter__(self) -> Self:
        self.start_driver()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.driver.stop()

    def suffer(self, harm: Harm) -> Outcome:
        """Do harm, and wait until the query goes on; raise Difference if its results are not exact then."""
        self.settle()
        drivers, failures = len(self.drivers), len(self._failures())
        began_s = time.time()
        for seconds in harm.does(self):
            self.wait(seconds)
        ended_s = time.time()
        last_s = self.await_batch(ended_s)
        self.require_exact()
        commits_s = sorted(self._times("commits").values())
        before_s = max(at_s for at_s in commits_s if at_s <= began_s)
        until_end = [at_s for at_s in commits_s if before_s <= at_s <= last_s]
        return Outcome(
            lasts_s=round(ended_s - began_s, 1),
            recovery_s=round(self._committed_s(began_s) - began_s, 1),
            longest_pause_s=round(max(later - earlier for earlier, later in pairwise(until_end)), 1),
            errors=[str(failure["kind"]) for failure in self._failures()[failures:]],
            starts=len(self.drivers) - drivers,
            batches=len(self._answers),
        )

    def settle(self) -> None:
        """Bring back what earlier harm has taken, and wait until all executors run and a batch is committed."""
        hosts = self.cluster.network.hosts
        self.cluster.add_driver_hosts()
        self.cluster.start_workers(
            *[name for name in WORKERS if name not in hosts or not hosts[name].processes(WORKER)]
        )
        self.wait_until(lambda: len(self.driver.executors) == EXECUTORS, "all executors")
        self.await_batch(time.time())

    def start_driver(self) -> Driver:
        """Start another driver, whatever the others do."""
        driver = self.cluster.start_driver(self.home, self.clock_ahead_s)
        self.drivers.append(driver)
        return driver

    def busy_worker(self) -> Host:
        """The worker's host with most of the query's Python processes, and so with subtasks."""

        def counts() -> dict[str, int]:
            return {host.name: len(host.processes(PYTHON_DAEMON)) for host in self.cluster.workers}

        self.wait_until(lambda: any(counts().values()), "a host with subtasks")
        found = counts()
        return self.cluster.host(max(sorted(found), key=lambda name: found[name]))

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        end_s = time.monotonic() + seconds
        self.wait_until(lambda: time.monotonic() >= end_s, "time to pass", seconds + 60)

    def wait_until(self, is_done: Callable[[], bool], what: str, timeout_s: float = RECOVERY_S) -> None:
        """Wait for something, and start the driver meanwhile whenever it has ended."""

        def look() -> bool:
            if self.driver.process.poll() is not None:
                self.start_driver()
            for log in self._written:
                self._times(log)
            return is_done()

        try:
            wait_until(look, what, timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.cluster.ends_of_logs()}") from None

    def await_batch(self, since_s: float) -> float:
        """Wait for the commit of a batch that began after a time, and return its time."""
        self.wait_until(lambda: self._committed_s(since_s) < float("inf"), "the next batch")
        return self._committed_s(since_s)

    def require_exact(self) -> None:
        """Compare the output of every batch of every driver, and the newest state."""
        newest = max(self._times("commits"))
        self._advance(newest)
        found = set()
        for driver in self.drivers:
            for batch, path in driver.outputs.items():
                found.add(batch)
                if batch <= newest and path not in self._compared:
                    _compare(f"the output of batch {batch}", json.loads(path.read_text()), self._answers[batch])
                    self._compared.add(path)
        _compare("the batches with output", sorted(found & set(range(newest + 1))), list(range(newest + 1)))
        program = f"import json, tests.cluster.totals as t; print(json.dumps(t.read_newest({self.cluster.location!r})))"
        batch, states = json.loads(self.cluster.run_python(program))
        self._advance(batch)
        _compare(f"the state of batch {batch}", states, self._model.state())

    def _advance(self, batch: int) -> None:
        while len(self._answers) <= batch:
            self._answers.append(self._model.next_answer())

    def _failures(self) -> list[dict[str, object]]:
        return [failure for driver in self.drivers for failure in driver.failures]

    def _committed_s(self, since_s: float) -> float:
        """When the first batch was committed that began after a time; infinite if none was."""
        commits_s = self._times("commits")
        begun = (batch for batch, at_s in self._times("offsets").items() if at_s > since_s)
        return min((commits_s[batch] for batch in begun if batch in commits_s), default=float("inf"))

    def _times(self, log: str) -> dict[int, float]:
        """When each file of one of Spark's logs was written; Spark deletes old ones."""
        written, folder = self._written[log], self.cluster.checkpoint / log
        for path in folder.iterdir() if folder.exists() else ():
            if path.name.isdecimal():
                with suppress(FileNotFoundError):
                    written[int(path.name)] = path.stat().st_mtime
        return written


def _compare(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise Difference(f"{what} is {found}, and must be {expected}")
