"""A life in the queries lane: a query of several operators, in processes that are killed.

Spark's part is played here: stages, kept outputs of their tasks, several actions, two attempts of a task at a time,
outputs that are lost, restarts and rewinds, batches that Spark commits although an operator has not run. Drivers that
were superseded go on beside the newer one, requests of dead processes reach the store late, clocks differ and jump.
Others read, pin, follow changes, branch, rename and collect garbage meanwhile. After every batch the output and what is
stored are compared with the same batch in plain Python.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Final

from statelog import FencedError, Options
from statelog.errors import ErrorKind
from statelog.testing.query import ManualClock, new_directory
from tests.model.query_actions import Action, Job, Task, random_actions, whole_action
from tests.model.query_driver import Driver
from tests.model.query_engine import SparkNotes, TaskPlace
from tests.model.query_graph import GRAPHS, KEYS, Row, by_key
from tests.soak.moves import Mood, random_harm, random_mood, random_options, random_task_harm
from tests.soak.processes import Died, Failed, Remote, first_answer
from tests.soak.query_servers import QueryDriver, QueryRun, QueryTask, QueryWorker, host_folder, surroundings
from tests.soak.query_tools import Outsiders, QueryModel
from tests.soak.report import Difference, live_on
from tests.soak.servers import Harm, carry_out

_MAX_FAILURES: Final = 4
"""Spark's spark.task.maxFailures."""
_START_CALLS: Final = 60
_TASK_STEPS: Final = 25
_HEAD_START_S: Final = 100.0
"""By which the clocks are ahead: objects are always older than they say."""
_HOSTS: Final = 3
_MOST_FORMER: Final = 2
_MOST_QUERIES: Final = 3
_EARLY_S: Final = 50.0
"""If the driver's clock is further ahead, the pins of consumers expire before their time."""
_FENCED: Final = {ErrorKind.NEWER_EPOCH, ErrorKind.STALE_RUN, ErrorKind.STALE_BATCH, ErrorKind.RPC}
"""How an attempt fails whose driver was superseded or is gone."""
_OWNER_UNKNOWN: Final = "has deleted it could not be found out"
"""So does one that lacks a file, and cannot ask its driver who owns the location."""
_INCOMPLETE: Final = {ErrorKind.CHECKPOINT_MISSING, ErrorKind.CHECKPOINT_INCOMPLETE}


class DriverDied(Exception):
    """The driver is gone, and what was to be done is not done."""


class QueryFailed(Exception):
    """A task has failed too often by faults of the store."""


@dataclass
class Former:
    """A driver that is cut off from Spark's checkpoint and does not know it, with its workers: it continues."""

    run: QueryRun
    query: QueryModel
    port: int
    driver: Remote
    workers: dict[Remote, Task | None]
    """What each of them runs."""
    batch: int
    job: Job | None = None


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
        self._query = QueryModel(SparkNotes(self.directory / "0" / "checkpoint", "query"), self._graph.uids)
        self._notes.make()
        self._others: list[QueryModel] = []
        """Queries that stand still: branches, and those that have branches."""
        self._is_asynchronous = rng.random() < 0.3
        """Whether Spark stores its commits later, and goes back to the last stored one when the driver ends."""
        self._was_rewound = False
        self._length = rng.randint(20, 60)
        self._clock_start_s = time.time() + _HEAD_START_S
        self._began_s = time.monotonic()
        self._jumps = rng.random() < 0.4
        """Whether clocks differ, and jump."""
        self._ahead_s = [0.0] * (_HOSTS + 1)
        """How far the clock of each host, and at last the driver's, is ahead."""
        self._options: dict[str, Any] = {}
        self._run: QueryRun | None = None
        self._driver: Remote | None = None
        self._workers: dict[tuple[int, int], Remote] = {}
        self._former: list[Former] = []
        self._outsiders = Outsiders(counts, self.moves.append)
        self._port = self._runs = self._steps = self._attempts = self._branches = 0

    def run(self) -> None:
        """Live to the end; raises Difference if something is not as in plain Python."""
        live_on(self._go_on, lambda: f"batch {self._notes.next_batch}", self._close)

    @property
    def _notes(self) -> SparkNotes:
        return self._query.notes

    def _go_on(self) -> bool:
        if self._notes.next_batch >= self._length:
            self._end()
            return False
        self._steps += 1
        rng = Random(f"{self._seed}/{self._steps}")
        self._run_batch(rng)
        self._after_batch(rng)
        return True

    # ---- Runs ----

    def _start(self, rng: Random) -> None:
        if not self._options or rng.random() < 0.5:
            every = rng.choice([{}, {0.05: 600.0}, {0.02: 0.03, 0.1: 600.0}])
            self._options = random_options(rng, appends=self._appends) | {"retained_s": every}
        self._mood = self._only_mood or random_mood(rng)
        self._query.retained = min(self._query.retained, self._options["retained_checkpoints"])
        self._runs += 1
        parallelism = {uid: rng.randint(1, 3) for uid in self._graph.uids}
        run = QueryRun(self._runs, parallelism, self._notes.next_batch, self._options)
        self.moves.append(
            f"run {self._runs} from batch {run.first_batch}, {parallelism}, {self._mood}, {self._options}"
        )
        if self._driver is None:
            self._driver = Remote(partial(QueryDriver, self._notes, self._clock_start_s, self._appends))
        if self._jumps:
            self._jump(rng)
        self._port = self._of_driver(
            "start",
            run,
            self._now_s,
            self._ahead_s[-1],
            self._stored_commit,
            random_harm(rng, self._mood, _START_CALLS),
        )
        self._run = run
        self._counts["runs"] += 1

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def _stored_commit(self) -> int | None:
        return self._notes.stored_commit if self._is_asynchronous else None

    def _jump(self, rng: Random) -> None:
        """Set the clocks of the driver and of the hosts to other times."""
        self._ahead_s = [rng.choice([0.0, 0.0, -3600.0, 50.0, 7200.0]) for _ in self._ahead_s]
        self.moves.append(f"clocks are ahead by {self._ahead_s} s")
        self._counts["jumps of clocks"] += 1

    def _stop(self, rng: Random) -> None:
        had_run, self._run = self._run is not None, None
        self.moves.append("stop")
        if had_run:
            try:
                self._of_driver("stop", random_harm(rng, self._mood, 10))
            except (DriverDied, QueryFailed):
                self._lose()
        self._lose_commits()

    def _lose_commits(self) -> None:
        """The driver has ended: Spark continues after the last commit that it has stored."""
        if self._notes.lose_unstored():
            to = self._notes.stored_commit
            self.moves.append(f"Spark goes back to batch {to}")
            self._counts["lost commits"] += 1
            self._query.lose_commits(to)

    def _close(self) -> None:
        self._lose()
        self._outsiders.close()
        while self._former:
            self._end_former(self._former.pop(), in_order=False)

    def _cut_off(self, batch: int, job: Job | None = None, busy: Mapping[Remote, Task] | None = None) -> None:
        """Spark loses the driver and its workers, which continue: a newer start takes over beside them.

        One that has not tried to claim the log yet is killed: if it did so later, nothing would show that it is older.
        """
        if self._driver is None or self._run is None:
            return
        try:
            if not self._of_driver("has_claimed"):
                self._lose()
                return
        except DriverDied:
            return
        workers = {worker: (busy or {}).get(worker) for worker in self._workers.values()}
        self._former.append(Former(self._run, self._query, self._port, self._driver, workers, batch, job))
        self._driver, self._run = None, None
        self._workers.clear()
        self._lose_commits()
        self.moves.append("the driver is cut off, and continues")
        self._counts["drivers cut off"] += 1
        if len(self._former) > _MOST_FORMER:
            self._end_former(self._former.pop(0), in_order=True)

    def _lose(self) -> None:
        """All processes of the newest start end."""
        self._run = None
        if self._driver is not None:
            self._driver.end()
            self._driver = None
        self._lose_workers()
        self._lose_commits()

    def _lose_workers(self) -> None:
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()

    def _lose_hosts(self) -> None:
        self._lose_workers()
        for host in range(_HOSTS):
            shutil.rmtree(host_folder(self._notes, host), ignore_errors=True)
        self._counts["hosts lost"] += _HOSTS

    # ---- Those that were superseded ----

    def _have_former_act(self, rng: Random) -> None:
        """A start that was cut off continues with its batch, and with the next ones, as if it were alone."""
        for former in self._former:
            if former.query is not self._query or rng.random() < 0.5:
                continue
            if former.job is None:
                source = {
                    uid: [(rng.randrange(KEYS), rng.randrange(1000)) for _ in range(4)] for uid in self._graph.uids
                }
                former.job = Job.of(whole_action(self._graph), self._graph, former.run.parallelism, source, rng)
            free = [worker for worker, task in former.workers.items() if task is None]
            ready = former.job.ready()
            for worker, task in zip(free, rng.sample(ready, len(ready)), strict=False):
                former.workers[worker] = task
                self._ask(worker, former.run, former.port, task, former.batch, former.job.input_of(task), rng)
                self._counts["attempts of superseded starts"] += 1

    def _whole_job(self, run: QueryRun, source: Mapping[str, list[Row]]) -> Job:
        return Job.of(whole_action(self._graph), self._graph, run.parallelism, source, Random(0))

    def _hear_former(self) -> None:
        """An attempt of a superseded start may succeed while nothing newer has begun; else it says why it cannot."""
        for former in self._former:
            for worker, task in list(former.workers.items()):
                if task is None:
                    continue
                try:
                    rows = worker.answer()
                except Died:
                    del former.workers[worker]
                    continue
                except Failed as failure:
                    self._require_fenced(failure)
                else:
                    self._counts["attempts of superseded starts that succeeded"] += 1
                    if former.job is not None:
                        former.job.outputs.setdefault(task, rows)
                former.workers[worker] = None
            job = former.job
            if job is not None and not job.tasks - job.outputs.keys():
                is_done = job.is_whole and len(job.uids) == len(self._graph.uids)
                former.job = None if is_done else self._whole_job(former.run, job.source)
                former.batch += is_done

    def _require_fenced(self, failure: Failed) -> None:
        is_fenced = failure.kind in _FENCED or failure.is_injected or _OWNER_UNKNOWN in failure.text
        # Where Spark lost commits, or after a rewind, the newer start has planned the batch anew, at another time.
        is_anew = self._is_asynchronous or self._was_rewound
        is_fenced |= is_anew and failure.kind == ErrorKind.STALE_DATAFRAME
        self._require(is_fenced, f"a superseded start fails with {failure.kind}: {failure}")

    def _end_former(self, former: Former, *, in_order: bool) -> None:
        """A driver that was cut off ends by itself, or is killed."""
        if in_order:
            try:
                former.driver.call("stop", Harm())
            except Died:
                pass
            except Failed as failure:
                self._require_fenced(failure)
        for process in (former.driver, *former.workers):
            process.end()

    def _carry_out_late(self, rng: Random) -> None:
        """The store gets to some requests of processes that are dead."""
        for request in sorted(self.directory.glob("*/late/*")):
            if request.suffix != ".tmp" and rng.random() < 0.5:
                carry_out(request, self._appends)
                self._counts["late requests"] += 1

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
        query = self._query
        states, outputs = self._graph.run(query.states[batch - 1], source)
        query.time_ms += 10
        for attempt in range(100):
            try:
                if self._run is None:
                    self._start(rng)
                self._mood = Mood() if attempt > 5 else self._mood
                self._begin_batch(batch, rng)
                finish = self._outsiders.begin(query, rng)
                try:
                    for action in random_actions(rng, self._graph, is_partial=False):
                        assert self._run is not None
                        job = Job.of(action, self._graph, self._run.parallelism, source, rng)
                        self._run_job(job, batch, rng)
                        self._compare_output(job, outputs)
                finally:
                    finish()
                break
            except DriverDied:
                self.moves.append("the driver died")
            except QueryFailed:
                self.moves.append("the query failed")
                self._counts["failed queries"] += 1
                self._stop(rng)
            if self._notes.next_batch != batch:
                return
        else:
            raise Difference(f"batch {batch} is never done")
        self._require_durable(batch)
        query.note_pins(batch, states)
        if rng.random() < self._mood.unrest / 4:
            self._counts["repeated batches"] += 1
            self.moves.append("the driver is lost before Spark commits")
            query.lost[batch] = states
            self._lose_or_cut_off(batch + 1, rng)
            return
        self._notes.commit(batch, is_stored=not self._is_asynchronous or rng.random() < 0.4)
        self._counts["batches"] += 1
        query.states[batch] = states
        query.retained = min(query.retained + 1, self._options["retained_checkpoints"])

    def _begin_batch(self, batch: int, rng: Random) -> None:
        self._hear_former()
        self._carry_out_late(rng)
        self._have_former_act(rng)
        if self._jumps and rng.random() < 0.05:
            self._jump(rng)
        if not self._options["changelog"] or self._ahead_s[-1] > _EARLY_S:
            self._query.unkept = batch
        self._notes.offer(batch, self._query.time_ms)
        harm = random_harm(rng, self._mood, 20 * len(self._graph.uids))
        self._of_driver("begin", self._now_s, self._ahead_s[-1], self._stored_commit, harm)

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
        newest = max(self._query.states)
        if newest >= 0 and rng.random() < 0.2:
            self._outsiders.read(self._query, rng.choice(self._graph.uids), newest)
        if newest >= 0 and rng.random() < 0.04 and len(self._graph.uids) > 1:
            self._leave_incomplete(rng)
        if self._notes.stored_commit >= 0 and rng.random() < 0.04:
            self._branch(rng)
        if rng.random() >= self._mood.unrest:
            return
        match rng.randrange(8):
            case 0:
                self._stop(rng)
            case 1 | 2:
                self._lose_or_cut_off(self._notes.next_batch, rng)
            case 3:
                self.moves.append("everything is killed, and all local files are lost")
                self._lose()
                self._lose_hosts()
            case 4:
                self._rename(rng)
            case 5:
                self._go_over(rng)
            case _:
                self._go_back(rng)

    def _lose_or_cut_off(self, batch: int, rng: Random) -> None:
        """The driver goes away before it begins a batch."""
        if rng.random() < 0.5:
            self._cut_off(batch)
        else:
            self.moves.append("everything is killed")
            self._counts["kills of drivers"] += 1
            self._lose()

    def _go_back(self, rng: Random) -> None:
        """Rewind by some batches."""
        self._stop(rng)
        newest = self._notes.next_batch - 1
        # The driver may have gone on with the next batch, and have given up what that does not retain.
        most = min(self._query.retained - 2, newest)
        if most < 1:
            return
        self._rewind(newest - rng.randint(1, most), rng)

    def _rewind(self, to: int, rng: Random) -> None:
        next_batch = self._outsiders.until_done(rng, "rewind", str(self._notes.folder), to)
        self.moves.append(f"back to batch {to}")
        is_right = self._notes.next_batch == next_batch == to + 1
        self._require(is_right, f"a rewind to {to} makes {self._notes.next_batch} the next one")
        self._query.go_back(to)
        self._was_rewound = True
        self._counts["rewinds"] += 1

    def _leave_incomplete(self, rng: Random) -> None:
        """Spark commits a batch in which an operator has not run; the query does not continue until it is set back."""
        uid = rng.choice(self._graph.uids)
        is_whole = len(self._graph.needed([uid])) == len(self._graph.uids)
        if self._run is None or is_whole or self._is_asynchronous:
            return
        batch = self._notes.next_batch
        self.moves.append(f"batch {batch} runs only for {uid}")
        self._query.time_ms += 10
        source: dict[str, list[Row]] = {one: [(1, 1)] for one in self._graph.uids}
        try:
            self._begin_batch(batch, rng)
            job = Job.of(Action([uid]), self._graph, self._run.parallelism, source, rng)
            self._run_job(job, batch, rng)
            self._notes.commit(batch)
            self._require_refused(batch + 1, rng)
        except (DriverDied, QueryFailed):
            self.moves.append("the driver died, or the query failed")
        self._stop(rng)
        if self._notes.next_batch > batch:
            self._rewind(batch - 1, rng)
            self._counts["incomplete batches"] += 1

    def _require_refused(self, batch: int, rng: Random) -> None:
        """No attempt of a batch after an incomplete one begins."""
        assert self._run is not None
        self._begin_batch(batch, rng)
        job = Job.of(Action(self._graph.ends), self._graph, self._run.parallelism, {}, rng)
        task = job.ready()[0]
        job.source = {task[0]: []}
        worker = self._send(task, batch, job, {}, rng)
        try:
            worker.answer()
        except Died:
            self._workers = {place: one for place, one in self._workers.items() if one is not worker}
        except Failed as failure:
            is_refused = failure.kind in _INCOMPLETE or failure.is_injected or failure.is_lost
            self._require(is_refused, f"after an incomplete batch an attempt fails with {failure.kind}: {failure}")
        else:
            raise Difference(f"batch {batch} begins after an incomplete one")

    # ---- Several queries ----

    def _branch(self, rng: Random) -> None:
        """Make a branch, and continue with it at once or later."""
        if len(self._others) + 1 >= _MOST_QUERIES:
            return
        self._branches += 1
        root = self.directory / str(self._branches)
        made = self._outsiders.branch(self._query, root / "checkpoint", rng)
        self.moves.append(f"branch {root.name} at batch {max(made.states)}" if made else "no branch")
        if made is not None:
            self._others.append(made)
            if rng.random() < 0.5:
                self._go_over(rng)

    def _go_over(self, rng: Random) -> None:
        """Continue with another query, and drop this one if it is a branch without branches."""
        if not self._others:
            return
        self._stop(rng)
        self._lose()
        left, self._query = self._query, self._others.pop()
        self.moves.append(f"continue with {self._query.notes.folder.parent.name}")
        needed = any(other.parent is left for other in (self._query, *self._others))
        if left.parent is None or needed or rng.random() < 0.5:
            self._others.insert(0, left)
            return
        for former in [one for one in self._former if one.query is left]:
            self._former.remove(former)
            self._end_former(former, in_order=True)
        shutil.rmtree(left.notes.folder.parent)
        self._outsiders.until_done(rng, "collect", left.parent.location, 0.0)
        self._counts["branches dropped"] += 1

    def _rename(self, rng: Random) -> None:
        """Rename an operator, several times, and back."""
        self._stop(rng)
        first = uid = rng.choice(self._graph.uids)
        names = [f"{first}-{number}" for number in rng.choices(range(3), k=rng.randint(1, 3))]
        for new in [*names, first]:
            if new != uid:
                self._outsiders.until_done(rng, "rename", str(self._notes.folder), uid, new)
                uid = new
            if rng.random() < 0.3:
                self._outsiders.until_done(rng, "collect", self._query.location, 0.0)
        self.moves.append(f"renamed {first}: {names}")
        self._query.unkept = max(self._query.states)
        self._counts["renames"] += 1
        newest = max(self._query.states)
        if newest >= 0:
            self._outsiders.read(self._query, first, newest)

    def _end(self) -> None:
        """Continue without local files, and read everything, pins too; other queries can be started as well."""
        for query in [self._query, *self._others]:
            self._lose()
            self._query = query
            self._lose_hosts()
            self._only_mood = Mood(unrest=0.0)
            self._run_batch(Random(f"{self._seed}/end"))
            for uid in self._graph.uids:
                self._outsiders.read(query, uid, max(query.states))
                for pin in query.lasting & query.pinned.keys():
                    self._outsiders.read(query, uid, pin)
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
                if rng.random() < 0.3:
                    self._cut_off(batch, job, busy)
                    raise DriverDied
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
        self._ask(self._workers[at], self._run, self._port, task, batch, job.input_of(task), rng, host)
        return self._workers[at]

    def _ask(
        self,
        worker: Remote,
        run: QueryRun,
        port: int,
        task: Task,
        batch: int,
        rows: list[Row],
        rng: Random,
        host: int | None = None,
    ) -> None:
        """Have a worker run an attempt, on a host."""
        self._attempts += 1
        place = TaskPlace(task[0], batch, task[1], self._attempts)
        host = rng.randrange(_HOSTS) if host is None else host
        harm = random_task_harm(rng, self._mood, _TASK_STEPS)
        self._counts["full disks"] += harm.disk_bytes > 0
        is_slow, ahead_s = self._mood.is_slow, self._ahead_s[host]
        try:
            time_ms = self._notes.time(batch).time_ms
        except FencedError:
            time_ms = self._query.time_ms  # a superseded start is ahead of Spark
        worker.ask("run", QueryTask(run, port, host, place, time_ms, self._now_s, ahead_s, is_slow, rows, harm))

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
