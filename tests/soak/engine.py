"""A life in the engine lane: Spark's part in it, and the comparison with the model after every batch."""

from __future__ import annotations

import json
import pickle
import shutil
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final

from statelog.coordinator.batch import BatchTime
from statelog.testing.query import new_directory
from tests.model.keyed_commands import json_like
from tests.model.keyed_model import Key, Model, Row
from tests.model.stored_state import nothing_stored
from tests.soak.cluster import Cluster, DriverDied, QueryFailed
from tests.soak.moves import (
    BatchPlan,
    Mood,
    calm_options,
    random_batch,
    random_harm,
    random_mood,
    random_options,
    random_rules,
)
from tests.soak.processes import Died
from tests.soak.report import Difference, live_on
from tests.soak.servers import Harm, Run, Stored, Subject

_LOOKS_EVERY: Final = 6
"""Batches between two looks at what is stored."""
_CALM_BATCHES: Final = 12
_LAG: Final = 8
"""In a calm run whose subtasks materialize as often as they can, the newest base is at most so many batches old."""
_LEFT_PER_SUBTASK: Final = 6
"""Objects without an entry that names them, of jobs in progress, in a calm run."""
_START_CALLS: Final = 60
_HEAD_START_S: Final = 100.0
"""By which the clocks are ahead: objects are always older than they say, and pins of readers expire later."""

Answers = dict[Key, list[Any]]


class Life:
    """One query from its first batch to its end.

    Parameters
    ----------
    seed : str
        Everything is drawn from it.
    counts : Counter
        Counts what happens.
    mood : Mood, optional
        That of all runs; otherwise each has its own.

    Attributes
    ----------
    moves : deque of str
        What has happened last, for the message of a failure.
    """

    def __init__(self, seed: str, counts: Counter[str], mood: Mood | None = None) -> None:
        self._seed = seed
        self._only_mood = mood
        self._counts = counts
        self.moves: deque[str] = deque(maxlen=60)
        rng = Random(seed)
        self.directory = new_directory()
        rules = random_rules(rng)
        self._appends = rng.random() < 0.7
        counts["stores without append"] += not self._appends
        self._initial = self._initial_rows(rng) if rng.random() < 0.3 else None
        has_collisions = rng.random() < 0.2
        clock_start_s = time.time() + _HEAD_START_S
        self._subject = Subject(str(self.directory), rules, has_collisions, self._initial, clock_start_s, self._appends)
        self._cluster = Cluster(self._subject, counts)
        self._model = Model(rules)
        self._models: dict[int, Model] = {}
        """The models after the batches that can be gone back to."""
        self._length = rng.randint(40, 140)
        self._batch = 0
        self._now_ms = 0
        self._times: dict[int, BatchTime] = {}
        self._options = random_options(rng, appends=self._appends)
        self._parallelism = rng.randint(1, 4)
        self._mood = Mood()
        self._run = Run(0, "query-0", "location-0", self._parallelism, 0, self._options)
        self._runs = self._savepoints = self._queries = 0
        self._standing: tuple[Run, int, Model, dict[int, BatchTime]] | None = None
        """A branch that has not begun, its first batch, the model before it, and the times of its batches."""
        self._left: list[Path] = []
        """Locations of former queries; the present one may be their branch."""
        self._guaranteed = self._least = 0
        self._since_start = 0
        self._is_clean = False
        self._reads_all = False

    def _initial_rows(self, rng: Random) -> list[Row]:
        return random_batch(rng, 0, actions=1, fills=True).actions[0]

    def run(self) -> None:
        """Live to the end; raises Difference if something is not as the model has it."""
        live_on(self._go_on, lambda: f"batch {self._batch}", self._cluster.close)

    def _go_on(self) -> bool:
        if self._batch >= self._length:
            self._end()
            return False
        rng = Random(f"{self._seed}/{self._batch}/{self._runs}")
        self._run_batch(rng)
        self._after_batch(rng)
        return True

    # ---- Runs ----

    def _start(self, rng: Random) -> None:
        """Start a run for the next batch, again and again until it comes to that."""
        for attempt in range(1, 100):
            self._change_settings(rng)
            self._mood = self._only_mood or (random_mood(rng) if attempt < 4 else Mood())
            if self._mood.is_calm:
                self._options = calm_options(self._options)
            self._runs += 1
            run = Run(self._runs, self._run.query_id, self._run.location, self._parallelism, self._batch, self._options)
            harm = random_harm(rng, self._mood, _START_CALLS)
            self._note(f"run {self._runs} from batch {self._batch}, {self._parallelism} subtasks, {self._mood}, {harm}")
            try:
                self._cluster.start(run, self._times, harm)
                break
            except (DriverDied, QueryFailed) as failure:
                self._note(f"  {type(failure).__name__}")
        self._counts["runs"] += 1
        self._counts["restarts"] += self._runs > 1
        self._counts["rescales"] += self._run.number > 0 and run.parallelism != self._run.parallelism
        self._counts["settings changes"] += self._run.number > 0 and run.options != self._run.options
        self._run = run
        retained = self._options["retained_checkpoints"]
        self._guaranteed = min(self._guaranteed, retained)
        self._least = min(self._least, retained)
        self._since_start = 0
        self._is_clean = self._mood.fault_rate == 0
        self._reads_all = self._batch > 0
        if self._is_clean and self._batch > 0:
            self._require(not self._look().unreferenced, "a start leaves objects that no entry names")

    def _change_settings(self, rng: Random) -> None:
        if rng.random() < 0.5:
            self._options = random_options(rng, appends=self._appends)
            self._note(f"options {self._options}")
        if rng.random() < 0.4:
            self._parallelism = rng.randint(1, 5)
        for host in range(3):
            if rng.random() < 0.1:
                self._cluster.lose_host(host)

    def _stop(self, rng: Random) -> None:
        """Stop in good order; then nothing stays that no entry names."""
        had_run = self._cluster.run is not None
        survived = self._cluster.stop(random_harm(rng, self._mood, 10))
        self._note(f"stop, {'done' if survived else 'died'}")
        if had_run and survived and self._is_clean and self._batch > 0:
            self._require(not self._look().unreferenced, "a stop leaves objects that no entry names")

    # ---- Batches ----

    def _run_batch(self, rng: Random) -> None:
        """Run the next batch until it is done, and compare the output of every action."""
        actions = self._mood.actions or rng.choice([1, 1, 2, 3])
        self._now_ms += rng.choice([0, 1, 5, 10, 20])
        fills = self._batch == 0 or rng.random() < 0.03
        is_calm = self._mood.is_calm
        plan = random_batch(rng, self._now_ms, actions=actions, reads_all=self._reads_all, fills=fills, is_calm=is_calm)
        self._cluster.now_s += plan.seconds
        self._times[self._batch] = BatchTime(plan.now_ms, 0)
        self._least = self._options["retained_checkpoints"]
        before = self._model
        last = self._expected(before, plan.actions[-1], plan.now_ms)
        expected = [
            last if rows == plan.actions[-1] else self._expected(before, rows, plan.now_ms) for rows in plan.actions
        ]
        for attempt in range(1, 100):
            self._note(f"batch {self._batch}, {actions} actions, {len(plan.actions[-1])} rows")
            if self._try_batch(plan, [answers for _, answers in expected], rng):
                break
            # The entry of this batch may have been written, and have given the oldest checkpoint up.
            self._guaranteed = min(self._guaranteed, self._least - 1)
            self._mood = Mood() if attempt > 5 else self._mood
        self._counts["batches"] += 1
        self._guaranteed = min(self._guaranteed + 1, self._least)
        if rng.random() < self._mood.unrest / 4:
            self._repeat_in_new_run(plan, expected[-1][1], rng)
        self._model = self._models[self._batch] = expected[-1][0]
        self._models.pop(self._batch - max(self._guaranteed, 1), None)
        self._batch += 1
        self._since_start += 1
        self._reads_all = False

    def _expected(self, before: Model, rows: list[Row], now_ms: int) -> tuple[Model, Answers]:
        """The model after a batch with these rows, and what they answer."""
        after: Model = pickle.loads(pickle.dumps(before))
        initial = self._initial if self._batch == 0 else None
        return after, json_like(after.run(rows, now_ms, None, initial or []))

    def _try_batch(self, plan: BatchPlan, expected: list[Answers], rng: Random) -> bool:
        """Run the actions of a batch; return whether that has come to an end, or the query has."""
        try:
            if self._cluster.run is None:
                self._start(rng)
            at = self._times[self._batch]
            self._cluster.begin(self._batch, at, random_harm(rng, self._mood, 20 * self._parallelism))
            saves = self._batch > 0 and rng.random() < 0.03
            if saves:
                target = str(self.directory / f"savepoint-{self._savepoints}")
                self._cluster.begin_save(self._batch - 1, target)
            with self._outsiders(rng, may_delete=not saves):
                for place, (rows, answers) in enumerate(zip(plan.actions, expected, strict=True)):
                    self._run_action(plan, place, rows, answers, rng)
            if saves and self._cluster.end_save() is not None:
                self._counts["savepoints"] += 1
            return True
        except (DriverDied, QueryFailed) as failure:
            self._note(f"  {type(failure).__name__}")
            if isinstance(failure, QueryFailed):
                self._cluster.stop(Harm())
            return False

    @contextmanager
    def _outsiders(self, rng: Random, *, may_delete: bool) -> Iterator[None]:
        """Meanwhile somebody may read a checkpoint from outside, or delete orphans by hand."""
        does = rng.random() if self._models else 1.0
        at = rng.choice([*self._models, self._batch - 1])
        if does < 0.1:
            self._cluster.begin_outside("read", self._run, at)
        elif does < 0.15 and may_delete:
            self._cluster.begin_outside("delete_orphans", self._run)
        else:
            yield
            return
        try:
            yield
        finally:
            found = self._cluster.end_outside()
        if does < 0.1:
            self._compare_read(at, found)
            self._counts["reads from outside"] += 1
        else:
            self._counts["deletions by hand"] += 1
            self._counts["orphans deleted by hand"] += found

    def _compare_read(self, at: int, found: dict[Key, dict[str, Any]] | None) -> None:
        if found is None:
            self._require(at < self._batch - 1, f"the newest checkpoint {at} cannot be read from outside")
            return
        model, nothing = self._models[at], nothing_stored()
        self._require(set(found) <= set(model.keys), f"checkpoint {at} has other keys")
        for key in model.keys:
            stored, expected = found.get(key, nothing), model.seen(key)
            self._require(stored == expected, f"checkpoint {at}, {key}\n    stored   {stored}\n    expected {expected}")

    def _run_action(self, plan: BatchPlan, place: int, rows: list[Row], answers: Answers, rng: Random) -> None:
        subtasks = list(range(self._run.parallelism))
        if place in plan.partial:
            subtasks = subtasks[: int(plan.partial[place] * len(subtasks))]
        rng.shuffle(subtasks)
        mood = self._mood
        found = self._cluster.run_action(self._batch, self._times[self._batch], rows, subtasks, mood, rng)
        by_key: dict[Key, list[Any]] = defaultdict(list)
        for text in found:
            key, *answer = json.loads(text)
            by_key[tuple(key)].append(answer)
        is_whole = len(subtasks) == self._run.parallelism
        wanted = answers if is_whole else {key: held for key, held in answers.items() if key in by_key}
        if by_key != wanted:
            keys = [key for key in {**by_key, **wanted} if by_key.get(key) != wanted.get(key)]
            lines = [f"{key}\n    found    {by_key.get(key)}\n    expected {wanted.get(key)}" for key in keys[:3]]
            raise Difference(f"batch {self._batch}, action {place + 1}: {len(keys)} keys differ:\n" + "\n".join(lines))

    def _repeat_in_new_run(self, plan: BatchPlan, expected: Answers, rng: Random) -> None:
        """The driver dies before Spark has noted the batch as done, so a new run does it again."""
        self._note("the batch is repeated by a new run")
        self._cluster.kill_driver()
        self._counts["repeated batches"] += 1
        last = BatchPlan(plan.now_ms, 0, plan.actions[-1:])
        self._guaranteed -= 1  # the new run takes the batch's checkpoint back
        for attempt in range(1, 100):
            if self._try_batch(last, [expected], rng):
                break
            self._guaranteed = min(self._guaranteed, self._least - 1)  # as of any batch
            self._mood = Mood() if attempt > 5 else self._mood
        self._guaranteed = min(self._guaranteed + 1, self._least)

    def _after_batch(self, rng: Random) -> None:
        if self._batch % _LOOKS_EVERY == 0:
            self._look()
        if self._mood.is_calm and self._since_start < _CALM_BATCHES + 2:
            if self._since_start == _CALM_BATCHES:
                self._require_progress()
            return
        if rng.random() >= self._mood.unrest:
            return
        match rng.randrange(8):
            case 0 | 1:
                self._note("stop and start")
                self._stop(rng)
            case 2:
                self._note("everything is killed")
                self._cluster.kill_driver()
            case 3:
                self._note("everything is killed, and all local files are lost")
                self._cluster.kill_driver()
                for host in range(3):
                    self._cluster.lose_host(host)
            case 4:
                self._go_on_from_savepoint(rng)
            case 5 | 6:
                self._branch(rng)
            case _:
                self._go_back(rng)

    def _go_back(self, rng: Random) -> None:
        """Have Spark's part forget batches, down to one that can be gone back to; others take their place."""
        batch = rng.choice(list(self._models)[-self._guaranteed :])
        if batch == self._batch - 1:
            return
        self._note(f"back to batch {batch}")
        self._stop(rng)
        self._guaranteed -= self._batch - 1 - batch
        self._batch, self._model = batch + 1, self._models[batch]
        self._models = {one: model for one, model in self._models.items() if one <= batch}
        self._counts["rewinds"] += 1

    # ---- Savepoints and branches ----

    def _go_on_from_savepoint(self, rng: Random) -> None:
        """Save, stop, and have another query continue from the savepoint in another location."""
        if self._cluster.run is None:
            return
        target = str(self.directory / f"savepoint-{self._savepoints}")
        self._savepoints += 1
        self._note(f"savepoint {target}")
        try:
            self._cluster.begin(self._batch, self._times[self._batch - 1], Harm())
            self._cluster.begin_save(self._batch - 1, target)
            saved = self._cluster.end_save()
        except (DriverDied, QueryFailed):
            return
        self._require(saved is not None, "the newest checkpoint cannot be saved")
        self._stop(rng)
        run = self._new_query()
        self._until_alive(rng, lambda dies_after_s: self._cluster.restore(saved, target, run, dies_after_s))
        shutil.rmtree(target)
        self._go_over(run)
        self._counts["savepoints"] += 1
        self._counts["restores"] += 1

    def _branch(self, rng: Random) -> None:
        """Make a branch, and continue with it at once; or with its parent, and with the branch later."""
        if self._standing:
            self._note("the branch that stood still continues")
            self._stop(rng)
            run, self._batch, self._model, self._times = self._standing
            self._standing = None
            self._go_over(run)
            self._counts["branches that stood still"] += 1
            return
        run = self._new_query()
        self._note(f"a branch at {run.location}")
        self._until_alive(rng, lambda dies_after_s: self._cluster.branch(self._run, run, dies_after_s))
        self._counts["branches"] += 1
        if rng.random() < 0.5:
            self._standing = run, self._batch, self._model, dict(self._times)
        else:
            self._stop(rng)
            self._go_over(run)

    def _new_query(self) -> Run:
        """A run of another query at another location, from the next batch on."""
        self._queries += 1
        self._runs += 1
        who, place = f"query-{self._queries}", f"location-{self._queries}"
        return Run(self._runs, who, place, self._parallelism, self._batch, self._options)

    def _until_alive(self, rng: Random, begin: Callable[[float | None], None]) -> None:
        """Begin a location, again and again until the process that does it survives."""
        while True:
            dies_after_s = rng.uniform(0, 0.1) if rng.random() < 0.3 else None
            try:
                begin(dies_after_s)
                return
            except Died:
                self._note("  the process was killed, and starts over")

    def _go_over(self, run: Run) -> None:
        """Continue with another query, which may need the files of this one."""
        self._left.append(self.directory / self._run.location)
        self._run = run
        self._guaranteed = 1
        self._models = {self._batch - 1: self._model}

    # ---- Looking ----

    def _look(self) -> Stored:
        """What is stored; what must be restorable is."""
        stored: Stored = self._cluster.look(self._run)
        self._counts["looks"] += 1
        if self._left and not stored.is_branch and self._standing is None:
            for location in self._left:
                shutil.rmtree(location)
            self._left.clear()
            self._counts["locations left behind"] += 1
        self._require(not stored.missing, f"objects are missing: {stored.missing}")
        count, guaranteed = stored.checkpoints, self._guaranteed
        self._require(count >= guaranteed, f"{count} checkpoints can be restored, not {guaranteed}")
        return stored

    def _require_progress(self) -> None:
        """In a calm run materialization continues, and stored files are used."""
        stored = self._look()
        limit = _LEFT_PER_SUBTASK * self._run.parallelism
        left = [name for name in stored.unreferenced if "/initial/" not in name]
        self._require(len(left) <= limit, f"{len(left)} objects that no entry names: {left}")
        lag = stored.newest - stored.newest_base
        self._require(lag <= _LAG, f"the newest base is {lag} batches old")
        self._counts["calm runs"] += 1

    def _require(self, is_right: bool, text: str) -> None:
        if not is_right:
            raise Difference(f"batch {self._batch}: {text}")

    def _end(self) -> None:
        """Open the location with no local files, and read everything."""
        self._cluster.kill_driver()
        for host in range(3):
            shutil.rmtree(Path(self.directory, f"host-{host}"), ignore_errors=True)
        self._reads_all = True
        self._run_batch(Random(f"{self._seed}/end"))
        self._counts["lives"] += 1

    def _note(self, text: str) -> None:
        self.moves.append(text)
