"""Random batches, crashes, repetitions, restarts and rescales against plain dictionaries."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import xxhash
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from statelog import Step
from tests.model.engine import Command, Crash, Engine, Key, Model

keys: st.SearchStrategy[Key] = st.sampled_from(
    [(None, None), (None, "x"), (5, None), (None, "5"), (5, "x"), (-1, ""), (0, "é"), (7, "y"), (8, "z"), (9, "w")]
)
texts = st.sampled_from(["", "a", "b", "long " * 4, "ü"])
numbers = st.integers(-(2**63), 2**63 - 1)
commands: st.SearchStrategy[Command] = st.one_of(
    st.tuples(st.just("set"), numbers),
    st.just(("unset",)),
    st.lists(texts, min_size=1, max_size=3).map(lambda items: ("append", *items)),
    st.lists(texts, min_size=1, max_size=3).map(lambda items: ("replace", *items)),
    st.just(("empty",)),
    st.tuples(st.just("put"), texts, numbers),
    st.tuples(st.just("remove"), texts),
    st.just(("wipe",)),
    st.tuples(st.just("lookup"), texts),
    st.just(("read",)),
)
batches = st.lists(st.tuples(keys, commands), max_size=12)


def good_hash(key: Key) -> int:
    return xxhash.xxh64_intdigest(repr(key).encode())


def colliding_hash(key: Key) -> int:
    """Few hashes, so that different keys share one, spread over the key groups."""
    return (good_hash(key) % 4) * (1 << 62) + 17


class StateMachine(RuleBasedStateMachine):
    """The engine beside the model. A batch is repeated until it is durable, as Spark would."""

    table: ClassVar[str] = "runs"
    log_form: ClassVar[str] = "append"

    @initialize(collide=st.booleans(), parallelism=st.integers(1, 4), inline=st.sampled_from([0, 8 << 20]))
    def begin(self, collide: bool, parallelism: int, inline: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="statelog-model-"))
        self.engine = Engine(
            self.directory,
            colliding_hash if collide else good_hash,
            table=self.table,
            log_form=self.log_form,
            inline_budget_bytes=inline,
        )
        self.model = Model()
        self.batch = 0
        self.engine.start(parallelism, 0)

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            shutil.rmtree(self.directory)

    @rule(rows=batches)
    def run_batch(self, rows: list[tuple[Key, Command]]) -> None:
        self._complete(rows)

    @rule(rows=batches, again=st.data())
    def repeat_subtasks(self, rows: list[tuple[Key, Command]], again: st.DataObject) -> None:
        """Later attempts of some subtasks, before and after the batch is durable."""
        for subtask, part in enumerate(self.engine.parts(rows)):
            for _ in range(again.draw(st.integers(0, 1))):
                self.engine.run_subtask(self.batch, subtask, part)
        self._complete(rows, advance=False)
        for subtask, part in enumerate(self.engine.parts(rows)):
            if again.draw(st.booleans()):
                self.engine.run_subtask(self.batch, subtask, part)
        self._advance(rows)

    @rule(
        rows=batches,
        step=st.sampled_from([Step.RESTORED, Step.ACKING, Step.ACKED, Step.MERGING]),
        subtask=st.integers(0, 3),
    )
    def kill_task(self, rows: list[tuple[Key, Command]], step: Step, subtask: int) -> None:
        """A worker dies; Spark tries the subtask again, in another process."""
        self.engine.observer.at, self.engine.observer.subtask = step, subtask
        self._complete(rows)
        self.engine.observer.at = None

    @rule(
        rows=batches,
        step=st.sampled_from([Step.LAST_ACK, Step.DURABLE]),
        parallelism=st.integers(1, 5),
        keep_local=st.booleans(),
    )
    def kill_driver(self, rows: list[tuple[Key, Command]], step: Step, parallelism: int, keep_local: bool) -> None:
        """The driver dies around the commit; a new run repeats the batch with another parallelism."""
        self.engine.observer.at, self.engine.observer.subtask = step, -1
        try:
            for subtask, part in enumerate(self.engine.parts(rows)):
                self.engine.run_subtask(self.batch, subtask, part)
        except Crash:
            pass
        self.engine.start(parallelism, self.batch, keep_local=keep_local)
        self._complete(rows)

    @rule(rows=batches, parallelism=st.integers(1, 5))
    def other_result_in_next_run(self, rows: list[tuple[Key, Command]], parallelism: int) -> None:
        """A batch is durable, but Spark did not commit it; the new run's input order differs."""
        for subtask, part in enumerate(self.engine.parts(rows[::-1])):
            self.engine.run_subtask(self.batch, subtask, part)
        self.engine.start(parallelism, self.batch)
        self._complete(rows)

    @rule(rows=batches)
    def other_result_of_later_attempts(self, rows: list[tuple[Key, Command]]) -> None:
        """Attempts that see the rows in another order; the last attempt of each subtask counts."""
        for subtask, part in enumerate(self.engine.parts(rows)):
            self.engine.run_subtask(self.batch, subtask, part[::-1])
        self._complete(rows)

    @rule(parallelism=st.integers(1, 5), keep_local=st.booleans())
    def restart(self, parallelism: int, keep_local: bool) -> None:
        self.engine.start(parallelism, self.batch, keep_local=keep_local)

    @invariant()
    def local_runs_stay_few(self) -> None:
        if not hasattr(self, "engine"):
            return
        for folder in self.directory.glob(f"host-{self.engine.host}/{self.engine.parallelism}/*"):
            assert len(list(folder.glob("*.run"))) <= 8

    def _complete(self, rows: list[tuple[Key, Command]], *, advance: bool = True) -> None:
        outputs: list[Any] = []
        for subtask, part in enumerate(self.engine.parts(rows)):
            for _ in range(3):
                try:
                    outputs.extend(self.engine.run_subtask(self.batch, subtask, part))
                    break
                except Crash:
                    continue
        expected_model = self.model.copy()
        expected = [[list(key), expected_model.run(key, command)] for key, command in rows]
        assert sorted(outputs, key=json.dumps) == sorted(json.loads(json.dumps(expected)), key=json.dumps)
        if advance:
            self._advance(rows)

    def _advance(self, rows: list[tuple[Key, Command]]) -> None:
        for key, command in rows:
            self.model.run(key, command)
        self.batch += 1
        self._read_everything()

    def _read_everything(self) -> None:
        if self.batch % 4 == 0:
            self._complete([(key, ("read",)) for key in self.model.keys])


_settings = settings(
    phases=(Phase.generate,),
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class MemoryTableMachine(StateMachine):
    table = "memory"


class ObjectLogMachine(StateMachine):
    log_form = "object"


TestRunsTable = StateMachine.TestCase
TestRunsTable.settings = _settings
TestMemoryTable = MemoryTableMachine.TestCase
TestMemoryTable.settings = settings(_settings, max_examples=30)
TestObjectLog = ObjectLogMachine.TestCase
TestObjectLog.settings = settings(_settings, max_examples=30)
