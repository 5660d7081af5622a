"""Random stories of a query of several operators: what Spark, its tasks and the driver do, and the comparisons.

A micro-batch has one to three actions. An action runs the operators that its output needs, each as a stage whose tasks
begin once the stages in front have all their outputs. Spark commits the batch after the last action.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from statelog import Options, Tuning
from statelog.errors import StatelogError, StateMissingError, StorageError
from statelog.testing.query import Crash
from tests.model.query_actions import Action, Job, Task, random_actions, whole_action
from tests.model.query_attempts import Attempts, DriverDied
from tests.model.query_driver import Driver
from tests.model.query_engine import QueryEngine
from tests.model.query_graph import KEYS, Graph, Row, by_key, operator_of
from tests.model.query_journal import Difference, Journal
from tests.model.query_oracle import Oracle


class Story:
    """The life of one query; everything in it is drawn from its seed.

    Attributes
    ----------
    journal : Journal
        What has happened.
    """

    def __init__(self, directory: Path, seed: int, graph: Graph) -> None:
        self.journal = Journal()
        self._random = Random(seed)
        self._seed = seed
        self._graph = graph
        self._is_random = self._random.random() < 0.4
        options = Options(
            file_merging=self._random.choice(["across", "within", "off"]),
            inline_budget_bytes=self._random.choice([0, 8 << 20]),
            materialization_interval_s=self._random.choice([0.0, 600.0]),
            table=self._random.choice(["runs", "memory"]),
            retained_checkpoints=Driver.least_retained,
            tuning=Tuning(merge_fan_in=2, log_min_age_s=0, orphan_min_age_s=0),
        )
        is_asynchronous = Random(f"{seed} asynchronous").random() < 0.3
        self._engine = QueryEngine(directory, options, Random(seed + 1), is_asynchronous=is_asynchronous)
        self._oracle = Oracle()
        self._attempts = Attempts(self._engine, self._oracle, self._random, self.journal, is_random=self._is_random)
        self._tried: set[int] = set()
        """Batches that are not left incomplete: an earlier start may have a checkpoint of them, or an operator begins
        with them."""
        self._batch = 0
        self._oldest = 0
        """The oldest batch that the query can go back to, besides what is retained: state was given up then."""
        self._added = 0
        self._lost = 0
        """How often Spark has lost commits; the batches are planned anew then, and have other rows."""

    # ---- Lives ----

    def run(self, batches: int) -> None:
        """Run batches until so many are committed, and then read everything on hosts without files."""
        try:
            while self._engine.notes.next_batch < batches:
                self._run_batch()
                self._between_batches()
            self._end()
        except StatelogError as error:
            raise Difference(f"{type(error).__name__}: {error}") from error
        finally:
            self._engine.close()

    def _end(self) -> None:
        self._stop()
        self._run_batch(is_calm=True)
        for uid in self._graph.uids:
            self._compare_stored(uid)
        self._stop()

    def _between_batches(self) -> None:
        # More often after an incomplete batch: what is refused then must not depend on the memory of the driver.
        draw = self._random.random() / (1 if self._oracle.is_complete(self._newest) else 2)
        if draw < 0.15:
            self._stop()
            if not self._has_changed_graph():
                self._may_go_back()
        elif draw < 0.25:
            self._die()
        elif draw < 0.4:
            try:
                self._attempts.send_late_acks()
            except Crash:
                self._die()

    def _start(self, *, keep_local: bool) -> None:
        parallelism = {uid: self._random.randint(1, 3) for uid in self._graph.uids}
        self.journal.note(f"start from batch {self._engine.notes.next_batch}, {parallelism}")
        batch = self._engine.start(self._graph, parallelism, keep_local=keep_local)
        self._attempts.begin_start()
        self._oracle.start(batch, parallelism)
        self._batch = batch

    def _stop(self) -> None:
        self.journal.note("stop")
        self._engine.stop()
        self._oracle.stop(self._newest)
        self._attempts.former = None
        self._lose_commits()

    def _die(self) -> None:
        """The driver dies, or is cut off from Spark and stays."""
        self.journal.note("the driver dies")
        self.journal.counts["deaths of drivers"] += 1
        driver = self._engine.die()
        self._oracle.stop(self._newest)
        self._attempts.former = driver if self._random.random() < 0.5 else None
        self._lose_commits()

    def _lose_commits(self) -> None:
        """Spark goes back to the last commit that it has stored, if it does not store each."""
        if self._engine.notes.lose_unstored():
            self.journal.counts["lost commits"] += 1
            self.journal.note(f"Spark goes back to batch {self._newest}")
            self._lost += 1
            self._oldest = max(self._oldest, self._newest)
            self._oracle.rewind(self._newest + 1)

    def _has_changed_graph(self) -> bool:
        """The stopped query may get or lose an operator."""
        uids = self._graph.uids
        if not self._oracle.is_complete(self._newest) or self._random.random() < 0.5:
            return False
        self._tried.add(self._newest + 1)
        if len(uids) < 6 and self._random.random() < 0.6:
            self._added += 1
            uid = f"{self._random.choice(['added', 'total-added'])}-{self._added}"
            inputs = self._random.sample(uids, self._random.randint(0, min(2, len(uids))))
            self._graph = self._graph.with_one_more(uid, inputs)
            self.journal.counts["added operators"] += 1
            self.journal.note(f"operator {uid} is added behind {inputs}")
            return True
        uid = self._random.choice(uids)
        self._engine.forget(uid)
        self._oldest = self._newest
        self._oracle.give_up(uid)
        if len(uids) > 1 and self._random.random() < 0.7:
            self._graph = self._graph.without(uid)
            self.journal.counts["removed operators"] += 1
            self.journal.note(f"operator {uid} is removed")
        else:
            self.journal.counts["states given up"] += 1
            self.journal.note(f"the state of {uid} is given up")
        return True

    def _may_go_back(self) -> None:
        """The stopped query may be rewound by several batches."""
        newest = self._newest
        oldest = max(self._oldest, newest - Driver.least_retained + 1)
        if newest > oldest and self._oracle.is_complete(newest) and self._random.random() < 0.5:
            self._rewind(self._random.randint(oldest, newest - 1))

    def _rewind(self, to: int | None = None) -> None:
        # Its newest checkpoint may be that of the next batch.
        self._oldest = max(self._oldest, self._newest + 1 - Driver.least_retained + 1)
        found = self._engine.rewind(to)
        self.journal.note(f"rewind to {to}: batch {found} comes next")
        self.journal.counts["rewinds"] += 1
        self._oracle.rewind(found)
        if to is not None:
            self.journal.require(found == to + 1, f"a rewind to {to} makes batch {found} the next one")

    # ---- Batches ----

    def _run_batch(self, *, is_calm: bool = False) -> None:
        """Run the next batch until Spark commits it; if the one before is incomplete, that one.

        In a calm one nothing happens, and a start finds no local files.
        """
        for attempt in range(100):
            try:
                if self._engine.driver is None:
                    self._start(keep_local=not is_calm and self._random.random() < 0.7)
                self._run_actions(is_calm=is_calm or attempt > 10)
                if self._random.random() < 0.07 and not is_calm:
                    self.journal.note("all actions are done, and Spark does not commit")
                    raise DriverDied
                self._commit()
                return
            except (Crash, DriverDied):
                self._die()
            except StorageError as error:
                self.journal.note(f"the query fails: {error}")
                self.journal.counts["failed queries"] += 1
                self._stop()
            except StateMissingError:
                self._go_back_to_complete()
        raise Difference("a batch is never done")

    def _go_back_to_complete(self) -> None:
        """A batch is refused because the one before is incomplete: nothing but a rewind helps."""
        self._stop()
        incomplete = self._newest + 1
        while not self._oracle.is_complete(incomplete - 1):
            incomplete -= 1
        self.journal.require(incomplete <= self._newest, f"batch {self._newest} is refused as incomplete, and is not")
        self.journal.counts["refused batches"] += 1
        self._rewind()
        found = self._engine.notes.next_batch
        self.journal.require(
            found == incomplete, f"a rewind makes {found} the next batch, and {incomplete} is incomplete"
        )

    def _run_actions(self, *, is_calm: bool) -> None:
        self._batch = self._engine.notes.next_batch
        self._engine.offer(self._batch)
        source = self._source(self._batch)
        actions = [whole_action(self._graph)] if is_calm else self._actions()
        self._attempts.begin_batch(self._batch)
        self.journal.note(f"batch {self._batch}: {[(one.targets, one.is_cut) for one in actions]}")
        for action in actions:
            self._run_action(action, source, is_calm=is_calm)

    def _actions(self) -> list[Action]:
        """Those of the batch; now and then they leave it incomplete, unless an earlier try may have completed it."""
        is_new = self._batch not in self._tried
        self._tried.add(self._batch)
        is_partial = (
            not self._engine.is_asynchronous
            and is_new
            and self._oracle.is_complete(self._batch - 1)
            and self._random.random() < 0.12
        )
        actions = random_actions(self._random, self._graph, is_partial=is_partial)
        self.journal.counts["batches with several actions"] += len(actions) > 1
        return actions

    def _source(self, batch: int) -> dict[str, list[Row]]:
        """The rows of the sources, the same whenever the batch is run as it was planned."""
        rows: dict[str, list[Row]] = {}
        for uid in self._graph.uids:
            rng = Random(f"{self._seed}/{batch}/{uid}" + f"/{self._lost}" * (self._lost > 0))
            rows[uid] = [(rng.randrange(KEYS), rng.randrange(1000)) for _ in range(rng.choice([0, 2, 4, 8]))]
        return rows

    def _run_action(self, action: Action, source: dict[str, list[Row]], *, is_calm: bool) -> None:
        job = Job.of(action, self._graph, self._engine.parallelism, source, self._random)
        losses = 0
        while ready := job.ready():
            if not is_calm:
                self._attempts.something_happens()
            task = self._random.choice(ready)
            job.outputs[task] = self._attempts.run_task(task, job.input_of(task), is_calm=is_calm)
            if not is_calm and losses < 3 and self._random.random() < 0.08 and (lost := job.can_be_lost()):
                losses += 1
                self._lose(job, self._random.sample(lost, self._random.randint(1, min(2, len(lost)))))
        if not self._is_random and job.is_whole:
            self._compare_output(job)

    def _lose(self, job: Job, tasks: list[Task]) -> None:
        """The outputs of tasks that have ended are lost with their executor: Spark runs the tasks again."""
        self.journal.counts["lost outputs"] += 1
        self.journal.note(f"the outputs of {tasks} are lost")
        for task in tasks:
            del job.outputs[task]

    def _compare_output(self, job: Job) -> None:
        before = {uid: self._oracle.before(self._batch, uid) for uid in self._graph.uids}
        _, outputs = self._graph.run(before, job.source)
        for uid in job.uids:
            found, expected = by_key(job.output_of(uid)), by_key(outputs[uid])
            self.journal.require(
                found == expected, f"batch {self._batch}: the output of {uid} is {found}, not {expected}"
            )

    def _commit(self) -> None:
        """Spark commits: from now on it never runs the batch again by itself."""
        uids, batch = self._graph.uids, self._batch
        if self._oracle.is_complete(batch, uids):
            stored = self._engine.checkpoints().get(batch, {})
            for uid in uids:
                self._attempts.require_stored(stored.get(uid), uid, batch)
            if not self._is_random:
                self._compare_states(batch)
            self._engine.notes.commit(batch, is_stored=self._stores_commit())
            if self._random.random() < 0.3:
                self._compare_stored(self._random.choice(uids))
        else:
            self.journal.note(f"Spark commits batch {batch}, which is incomplete")
            self.journal.counts["incomplete batches"] += 1
            self._engine.notes.commit(batch)
        self.journal.counts["batches"] += 1

    def _stores_commit(self) -> bool:
        return not self._engine.is_asynchronous or self._random.random() < 0.3

    def _compare_states(self, batch: int) -> None:
        """The states that the acks lead to are those of the whole batch, computed at once."""
        before = {uid: self._oracle.before(batch, uid) for uid in self._graph.uids}
        states, _ = self._graph.run(before, self._source(batch))
        for uid, state in states.items():
            self.journal.require(
                self._oracle.after(batch, uid) == state, f"the state of {uid} is not that of batch {batch}"
            )

    def _compare_stored(self, uid: str) -> None:
        """The state in the newest checkpoint, read from outside."""
        batch = self._newest
        found, expected = operator_of(uid).stored(self._engine.location, batch), self._oracle.after(batch, uid)
        self.journal.require(found == expected, f"the state of {uid} after batch {batch} is {found}, not {expected}")

    @property
    def _newest(self) -> int:
        """The newest batch that Spark has committed; -1 before the first."""
        return self._engine.notes.next_batch - 1
