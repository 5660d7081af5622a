"""A life in the queries lane: a query of several operators, in processes that are killed.

Spark's part is played here: stages, kept outputs of their tasks, several actions, two attempts of a task at a time,
outputs that are lost, restarts and rewinds. After every batch the output and what is stored are compared with the same
batch in plain Python.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter, deque
from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any, Final

import statelog
from statelog import Options
from statelog.testing.query import ManualClock, new_directory
from tests.model.query_actions import Job, Task, random_actions
from tests.model.query_driver import Driver
from tests.model.query_engine import SparkNotes, TaskPlace
from tests.model.query_graph import GRAPHS, KEYS, Row, State, by_key, operator_of
from tests.soak.moves import Mood, random_harm, random_mood, random_options, random_task_harm
from tests.soak.processes import Died, Failed, Remote, first_answer
from tests.soak.query_servers import QueryDriver, QueryRun, QueryTask, QueryWorker, host_folder, surroundings
from tests.soak.report import Difference, live_on

_MAX_FAILURES: Final = 4
"""Spark's spark.task.maxFailures."""
_START_CALLS: Final = 60
_TASK_STEPS: Final = 25
_HEAD_START_S: Final = 100.0
"""By which the clocks are ahead: objects are always older than they say."""
_HOSTS: Final = 3


class DriverDied(Exception):
    """The driver is gone, and what was to be done is not done."""


class QueryFailed(Exception):
    """A task has failed too often by faults of the store."""


class QueryLife:
    """One query from its first batch to its end.

    Parameters
    ----------
    seed : str
        Everything is drawn from it, but when a process is killed depends on the machine too.
    counts : Counter
        Counts what happens.
    mood : Mood, optional
        That of all runs; otherwise each has its own.
    """

    def __init__(self, seed: str, counts: Counter[str], mood: Mood | None = None) -> None:
        rng = Random(seed)
        self.moves: deque[str] = deque(maxlen=60)
        self.directory = new_directory()
        self._seed = seed
        self._appends = rng.random() < 0.7
        counts["stores without append"] += not self._appends
        self._counts = counts
        self._only_mood = mood
        self._mood = Mood()
        self._graph = GRAPHS[rng.choice(list(GRAPHS))]
        self._notes = SparkNotes(self.directory / "checkpoint", "query")
        self._notes.make()
        self._length = rng.randint(20, 60)
        self._clock_start_s = time.time() + _HEAD_START_S
        self._began_s = time.monotonic()
        self._options: dict[str, Any] = {}
        self._run: QueryRun | None = None
        self._driver: Remote | None = None
        self._workers: dict[tuple[int, int], Remote] = {}
        self._port = self._runs = self._attempts = 0
        self._states: dict[int, Mapping[str, State]] = {-1: {}}
        """The states after the batches that can be gone back to."""
        self._retained = 0
        """How many checkpoints can be gone back to."""
        self._time_ms = 1000

    def run(self) -> None:
        """Live to the end; raises Difference if something is not as in plain Python."""
        live_on(self._go_on, lambda: f"batch {self._notes.next_batch}", self._lose)

    def _go_on(self) -> bool:
        if self._notes.next_batch >= self._length:
            self._end()
            return False
        rng = Random(f"{self._seed}/{self._notes.next_batch}/{self._runs}")
        self._run_batch(rng)
        self._after_batch(rng)
        return True

    # ---- Runs ----

    def _start(self, rng: Random) -> None:
        if not self._options or rng.random() < 0.5:
            self._options = random_options(rng, appends=self._appends)
        self._mood = self._only_mood or random_mood(rng)
        self._retained = min(self._retained, self._options["retained_checkpoints"])
        self._runs += 1
        parallelism = {uid: rng.randint(1, 3) for uid in self._graph.uids}
        run = QueryRun(self._runs, parallelism, self._notes.next_batch, self._options)
        self.moves.append(
            f"run {self._runs} from batch {run.first_batch}, {parallelism}, {self._mood}, {self._options}"
        )
        if self._driver is None:
            self._driver = Remote(partial(QueryDriver, self._notes, self._clock_start_s, self._appends))
        self._port = self._of_driver("start", run, self._now_s, random_harm(rng, self._mood, _START_CALLS))
        self._run = run
        self._counts["runs"] += 1

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    def _stop(self, rng: Random) -> None:
        had_run, self._run = self._run is not None, None
        self.moves.append("stop")
        if had_run:
            try:
                self._of_driver("stop", random_harm(rng, self._mood, 10))
            except (DriverDied, QueryFailed):
                self._lose()

    def _lose(self) -> None:
        """All processes end."""
        self._run = None
        if self._driver is not None:
            self._driver.end()
            self._driver = None
        self._lose_workers()

    def _lose_workers(self) -> None:
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()

    def _lose_hosts(self) -> None:
        self._lose_workers()
        for host in range(_HOSTS):
            shutil.rmtree(host_folder(self._notes, host), ignore_errors=True)
        self._counts["hosts lost"] += _HOSTS

    def _of_driver(self, method: str, *arguments: Any) -> Any:
        assert self._driver is not None
        try:
            return self._driver.call(method, *arguments)
        except Died:
            raise self._driver_died() from None
        except Failed as failure:
            if failure.is_injected:
                raise QueryFailed from None
            raise

    def _driver_died(self) -> DriverDied:
        self._counts["kills of drivers"] += 1
        self._lose()
        return DriverDied()

    # ---- Batches ----

    def _run_batch(self, rng: Random) -> None:
        batch = self._notes.next_batch
        source = {
            uid: [(rng.randrange(KEYS), rng.randrange(1000)) for _ in range(rng.choice([0, 2, 4, 8]))]
            for uid in self._graph.uids
        }
        states, outputs = self._graph.run(self._states[batch - 1], source)
        self._time_ms += 10
        for attempt in range(100):
            try:
                if self._run is None:
                    self._start(rng)
                self._mood = Mood() if attempt > 5 else self._mood
                self._notes.offer(batch, self._time_ms)
                self._of_driver("begin", self._now_s, random_harm(rng, self._mood, 20 * len(self._graph.uids)))
                for action in random_actions(rng, self._graph, is_partial=False):
                    assert self._run is not None
                    job = Job.of(action, self._graph, self._run.parallelism, source, rng)
                    self._run_job(job, batch, rng)
                    self._compare_output(job, outputs)
                break
            except DriverDied:
                self.moves.append("the driver died")
            except QueryFailed:
                self.moves.append("the query failed")
                self._counts["failed queries"] += 1
                self._stop(rng)
        else:
            raise Difference(f"batch {batch} is never done")
        self._require_durable(batch)
        if rng.random() < self._mood.unrest / 4:
            self._counts["repeated batches"] += 1
            self.moves.append("the driver is killed before Spark commits")
            self._lose()
            return
        self._notes.commit(batch)
        self._counts["batches"] += 1
        self._states[batch] = states
        self._retained = min(self._retained + 1, self._options["retained_checkpoints"])

    def _compare_output(self, job: Job, outputs: Mapping[str, list[Row]]) -> None:
        if job.is_whole:
            for uid in job.uids:
                found, expected = by_key(job.output_of(uid)), by_key(outputs[uid])
                self._require(found == expected, f"the output of {uid} is {found}, not {expected}")

    def _require_durable(self, batch: int) -> None:
        """When Spark commits, every operator has its checkpoint; now and then their states are compared, too."""
        around = surroundings(self._notes, Options(), ManualClock())
        found = Driver.checkpoints(around).get(batch, {})
        self._require(found.keys() == set(self._graph.uids), f"batch {batch} is done, and stored for {set(found)} only")

    def _after_batch(self, rng: Random) -> None:
        batch = self._notes.next_batch - 1
        if batch >= 0 and rng.random() < 0.2:
            self._compare_states(rng.sample(self._graph.uids, 1))
        if rng.random() >= self._mood.unrest:
            return
        match rng.randrange(6):
            case 0 | 1:
                self._stop(rng)
            case 2:
                self.moves.append("everything is killed")
                self._counts["kills of drivers"] += 1
                self._lose()
            case 3:
                self.moves.append("everything is killed, and all local files are lost")
                self._lose()
                self._lose_hosts()
            case _:
                self._go_back(rng)

    def _go_back(self, rng: Random) -> None:
        """Rewind by some batches."""
        newest = self._notes.next_batch - 1
        # The driver may have gone on with the next batch, and have given up what that does not retain.
        most = min(self._retained - 2, newest)
        if most < 1:
            return
        self._stop(rng)
        count = rng.randint(1, most)
        to = newest - count
        statelog.rewind(self._notes.folder, to=to)
        self.moves.append(f"back to batch {to}")
        self._require(self._notes.next_batch == to + 1, f"a rewind to {to} makes {self._notes.next_batch} the next one")
        self._retained -= count
        self._states = {of: states for of, states in self._states.items() if of <= to}
        self._counts["rewinds"] += 1

    def _compare_states(self, uids: list[str]) -> None:
        """The stored states of operators, read from outside."""
        batch = self._notes.next_batch - 1
        location = surroundings(self._notes, Options(), ManualClock()).location
        for uid in uids:
            found, expected = operator_of(uid).stored(location, batch), self._states[batch][uid]
            self._require(found == expected, f"the state of {uid} is {found}, not {expected}")
        self._counts["looks"] += 1

    def _end(self) -> None:
        """Go on without local files, and read everything."""
        self._lose()
        self._lose_hosts()
        self._only_mood = Mood(unrest=0.0)
        self._run_batch(Random(f"{self._seed}/end"))
        self._compare_states(self._graph.uids)
        self._counts["lives"] += 1

    # ---- Tasks ----

    def _run_job(self, job: Job, batch: int, rng: Random) -> None:
        """Run an action, as many tasks at a time as the mood says."""
        busy: dict[Remote, Task] = {}
        failures: Counter[Task] = Counter()
        mood, losses = self._mood, 0
        kill_at_s = time.monotonic() + rng.uniform(0, 0.03) if rng.random() < mood.death_rate else None
        while (ready := self._to_run(job, busy, rng)) or busy:
            while ready and len(busy) < mood.width:
                task = ready.pop(rng.randrange(len(ready)))
                busy[self._send(task, batch, job, busy, rng)] = task
            worker = first_answer(list(busy), 300.0 if kill_at_s is None else max(0.0, kill_at_s - time.monotonic()))
            if worker is None:
                self._require(kill_at_s is not None, "no worker answers")
                assert self._driver is not None
                rng.choice([self._driver, *busy]).kill()
                kill_at_s = None
                continue
            task = busy.pop(worker)
            try:
                rows = worker.answer()
            except (Died, Failed) as failure:
                self._note_failure(failure, worker)
                failures[task] += 1
                if failures[task] >= _MAX_FAILURES:
                    self._lose_workers()
                    raise QueryFailed from None
                continue
            job.outputs.setdefault(task, rows)
            self._counts["tasks"] += 1
            if losses < 3 and rng.random() < 0.05 and (lost := job.can_be_lost()):
                losses += 1
                del job.outputs[rng.choice(lost)]
                self._counts["lost outputs"] += 1
        self._counts["actions"] += 1

    def _to_run(self, job: Job, busy: Mapping[Remote, Task], rng: Random) -> list[Task]:
        """The tasks that can run now; now and then one that runs already, as a speculative attempt."""
        running, ready = set(busy.values()), job.ready()
        waiting = [task for task in ready if task not in running]
        if running.intersection(ready) and rng.random() < 0.05:
            self._counts["speculative attempts"] += 1
            waiting.append(rng.choice(sorted(running.intersection(ready))))
        return waiting

    def _send(self, task: Task, batch: int, job: Job, busy: Mapping[Remote, Task], rng: Random) -> Remote:
        """Have an attempt run by a worker that is free."""
        assert self._run is not None
        host = rng.randrange(self._mood.hosts)
        free = [place for place in range(self._mood.width + 1) if self._workers.get((host, place)) not in busy]
        at = host, rng.choice(free)
        if at not in self._workers:
            self._workers[at] = Remote(partial(QueryWorker, self._notes, self._clock_start_s, self._appends))
        self._attempts += 1
        place = TaskPlace(task[0], batch, task[1], self._attempts)
        harm = random_task_harm(rng, self._mood, _TASK_STEPS)
        self._counts["full disks"] += harm.disk_bytes > 0
        time_ms = self._notes.time(batch).time_ms
        is_slow = self._mood.is_slow
        rows = job.input_of(task)
        self._workers[at].ask(
            "run", QueryTask(self._run, self._port, host, place, time_ms, self._now_s, is_slow, rows, harm)
        )
        return self._workers[at]

    def _note_failure(self, failure: Died | Failed, worker: Remote) -> None:
        """A worker has died, or its task has failed; find out whether the driver's death is why."""
        if isinstance(failure, Died):
            self._counts["kills of workers"] += 1
            self._workers = {place: one for place, one in self._workers.items() if one is not worker}
        elif failure.is_lost and self._driver is not None and self._driver.is_dead(within_s=5):
            raise self._driver_died() from None
        elif not failure.is_injected:
            raise failure
        else:
            self._counts["failed tasks"] += 1

    def _require(self, is_right: bool, text: str) -> None:
        if not is_right:
            raise Difference(f"batch {self._notes.next_batch}: {text}")
