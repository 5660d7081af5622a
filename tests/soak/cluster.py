"""The processes of one query, and the attempts of its batches; nobody here knows what the answers should be."""

from __future__ import annotations

import shutil
import time
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from statelog.coordinator.batch import BatchTime
from statelog.reading.savepoint import SavedOperator
from tests.model.keyed_model import Row
from tests.soak.moves import Mood, random_task_harm
from tests.soak.processes import Died, Failed, Remote, first_answer
from tests.soak.servers import Driver, Harm, Run, Stored, Subject, Task, Tool, Worker

_MAX_FAILURES = 4
"""Spark's spark.task.maxFailures."""
_DRIVER_STEPS, _TASK_STEPS = 30, 25


class DriverDied(Exception):
    """The driver is gone, and what was to be done is not done."""


class QueryFailed(Exception):
    """A task has failed too often by faults of the store; the query has ended, its driver has not."""


class Cluster:
    """A driver and its workers.

    Parameters
    ----------
    subject : Subject
        What they run.
    counts : Counter
        Counts what happens.

    Attributes
    ----------
    run : Run or None
        The current run; None if there is none.
    now_s : float
        The time of all clocks, from that of the begin on.
    """

    def __init__(self, subject: Subject, counts: Counter[str]) -> None:
        self._subject = subject
        self._counts = counts
        self._driver: Remote | None = None
        self._workers: dict[tuple[int, int], Remote] = {}
        self._tool: Remote | None = None
        self._outside: Remote | None = None
        self._port = 0
        self._is_saving = False
        self._attempts = 0
        self._hosts: dict[int, int] = {}
        self._faults = 0
        self.run: Run | None = None
        self.now_s = 0.0
        self._began_s = time.monotonic()

    # ---- Runs ----

    def start(self, run: Run, times: dict[int, BatchTime], harm: Harm) -> None:
        """Start a run, in the driver that is there or in a new one.

        Raises
        ------
        DriverDied, QueryFailed
            If it did not come to that.
        """
        self.run = None
        if self._driver is None:
            self._driver = Remote(partial(Driver, self._subject))
            self._faults = 0
        self._catch_up()
        self._port = self._of_driver("start", run, times, self.now_s, harm)
        self.run = run
        self._hosts.clear()

    def _catch_up(self) -> None:
        """Let no clock fall behind the file system's, which dates objects and pins."""
        self.now_s = max(self.now_s, time.monotonic() - self._began_s)

    def stop(self, harm: Harm) -> bool:
        """End the run in good order, if there is one; return whether the driver survived that."""
        had_run, self.run = self.run is not None, None
        if had_run:
            try:
                self._of_driver("stop", harm)
            except (DriverDied, QueryFailed):
                return False
        return True

    def lose(self) -> None:
        """All processes die."""
        self.run = None
        self._is_saving = False
        if self._driver is not None:
            self._driver.end()
            self._driver = None
        self._lose_workers()

    def kill_driver(self) -> None:
        """The driver dies, and so do its workers."""
        if self._driver is not None:
            self._counts["kills of drivers"] += 1
        self.lose()

    def close(self) -> None:
        """End all processes."""
        self.lose()
        for tool in (self._tool, self._outside):
            if tool is not None:
                tool.end()

    def lose_host(self, host: int) -> None:
        """A host's files are gone; its workers as well."""
        self._lose_workers()
        shutil.rmtree(Path(self._subject.directory, f"host-{host}"), ignore_errors=True)
        self._counts["hosts lost"] += 1

    def _lose_workers(self) -> None:
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()

    def _of_driver(self, method: str, *arguments: Any) -> Any:
        assert self._driver is not None
        if self._is_saving:  # the batch failed meanwhile
            with suppress(QueryFailed):
                self.end_save()
        self._driver.ask(method, *arguments)
        return self._answer_of_driver()

    def _answer_of_driver(self) -> Any:
        assert self._driver is not None
        try:
            return self._driver.answer()
        except Died:
            self._note_death_of_driver()
            raise DriverDied from None
        except Failed as failure:
            if failure.is_injected:
                raise QueryFailed from None
            raise

    def _note_death_of_driver(self) -> None:
        self._counts["kills of drivers"] += 1
        self.lose()

    # ---- Batches ----

    def begin(self, batch: int, at: BatchTime, harm: Harm) -> None:
        """Tell the driver of a batch that is about to run; raises what :meth:`start` does."""
        self._catch_up()
        faults = self._of_driver("begin", batch, at, self.now_s, harm)
        self._counts["faults of the store"] += faults - self._faults
        self._faults = faults

    def run_action(
        self, batch: int, at: BatchTime, rows: list[Row], subtasks: list[int], mood: Mood, rng: Random
    ) -> list[str]:
        """Run subtasks of a batch to their ends, as many at a time as the mood says; return their output.

        Raises
        ------
        DriverDied, QueryFailed
            If it did not come to that.
        """
        waiting, busy = deque(subtasks), dict[Remote, int]()
        failures: Counter[int] = Counter()
        output: list[str] = []
        kill_at_s = self._when_to_kill(mood, rng)
        while waiting or busy:
            while waiting and len(busy) < mood.width:
                subtask = waiting.popleft()
                busy[self._send(batch, at, rows, subtask, mood, rng, busy)] = subtask
            worker = self._await_answer(list(busy), kill_at_s, rng)
            kill_at_s = kill_at_s if worker else None
            if worker is None:
                continue
            subtask = busy.pop(worker)
            try:
                texts, faults = worker.answer()
            except (Died, Failed) as failure:
                self._note_failure(failure, worker, busy)
                failures[subtask] += 1
                if failures[subtask] >= _MAX_FAILURES:
                    self._fail(busy)
                waiting.append(subtask)
                continue
            output += texts
            self._counts["tasks"] += 1
            self._counts["faults of the store"] += faults
        self._counts["actions"] += 1
        return output

    def _when_to_kill(self, mood: Mood, rng: Random) -> float | None:
        """Where tasks run at a time, some process is killed after some milliseconds, whatever it is doing."""
        if mood.width == 1 or rng.random() >= mood.death_rate:
            return None
        return time.monotonic() + rng.uniform(0, 0.03)

    def _await_answer(self, busy: list[Remote], kill_at_s: float | None, rng: Random) -> Remote | None:
        """The next worker with an answer; None if a process was killed instead."""
        if kill_at_s is None:
            return first_answer(busy, 300) or busy[0]
        found = first_answer(busy, max(0.0, kill_at_s - time.monotonic()))
        if found is None:
            assert self._driver is not None
            rng.choice([self._driver, *busy]).kill()
        return found

    def _send(
        self, batch: int, at: BatchTime, rows: list[Row], subtask: int, mood: Mood, rng: Random, busy: dict[Remote, int]
    ) -> Remote:
        """Have an attempt run by a worker that is free."""
        assert self.run is not None
        before = self._hosts.get(subtask)
        host = before if before is not None and rng.random() < mood.stay else rng.randrange(mood.hosts)
        self._counts["host moves"] += before is not None and before != host
        self._hosts[subtask] = host
        free = [place for place in range(mood.width + 1) if self._workers.get((host, place)) not in busy]
        place = host, rng.choice(free)
        if place not in self._workers:
            self._workers[place] = Remote(partial(Worker, self._subject))
        self._attempts += 1
        harm = random_task_harm(rng, mood, _TASK_STEPS)
        self._counts["full disks"] += harm.disk_bytes > 0
        task = Task(
            self.run, self._port, host, batch, subtask, self._attempts, at.time_ms, self.now_s, mood.is_slow, rows, harm
        )
        self._workers[place].ask("run", task)
        return self._workers[place]

    def _note_failure(self, failure: Died | Failed, worker: Remote, busy: dict[Remote, int]) -> None:
        """A worker has died, or its task has failed; find out whether the driver's death is why."""
        if isinstance(failure, Died):
            self._counts["kills of workers"] += 1
            self._workers = {place: one for place, one in self._workers.items() if one is not worker}
        elif failure.is_lost and self._driver is not None and self._driver.is_dead(within_s=5):
            self._note_death_of_driver()
            raise DriverDied
        elif not failure.is_injected:
            raise failure
        else:
            self._counts["failed tasks"] += 1

    def _fail(self, busy: dict[Remote, int]) -> None:
        """The query ends with an error: what runs of it is killed."""
        self._counts["failed queries"] += 1
        for worker in busy:
            worker.end()
        self._workers = {place: one for place, one in self._workers.items() if one.pid}
        raise QueryFailed

    # ---- Savepoints and looking ----

    def begin_save(self, batch: int, target: str) -> None:
        """Have the driver write a savepoint while other things continue."""
        assert self._driver is not None
        self._driver.ask("save", batch, target)
        self._is_saving = True

    def end_save(self) -> Any:
        """The savepoint that the driver was to write; raises what :meth:`start` does."""
        self._is_saving = False
        return self._answer_of_driver()

    def begin_outside(self, method: str, *arguments: Any) -> None:
        """Have a process outside of the query do something while other things continue."""
        if self._outside is None:
            self._outside = Remote(partial(Tool, self._subject))
        self._outside.ask(method, *arguments)

    def end_outside(self) -> Any:
        """The result of that process."""
        assert self._outside is not None
        return self._outside.answer()

    def look(self, run: Run) -> Stored:
        """What the location of a run holds."""
        if self._tool is None:
            self._tool = Remote(partial(Tool, self._subject))
        stored: Stored = self._tool.call("look", run)
        return stored

    def restore(self, saved: SavedOperator, source: str, run: Run, dies_after_s: float | None) -> None:
        """Begin a run's location with a savepoint; raises what :meth:`branch` does."""
        self._begin_location(dies_after_s, "restore", saved, source, run)

    def branch(self, parent: Run, run: Run, dies_after_s: float | None) -> None:
        """Begin a run's location with the state of a parent.

        Raises
        ------
        Died
            If the process that does it was killed after some seconds.
        """
        self._begin_location(dies_after_s, "branch", parent, run)

    def _begin_location(self, dies_after_s: float | None, *call: Any) -> None:
        tool = Remote(partial(Tool, self._subject))
        try:
            tool.ask(*call)
            if dies_after_s is not None and first_answer([tool], dies_after_s) is None:
                tool.kill()
                self._counts["kills of tools"] += 1
            tool.answer()
        finally:
            tool.end()
