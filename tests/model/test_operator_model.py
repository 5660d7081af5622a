"""Operator state: random batches, crashes, repetitions, restarts and rescales against plain lists."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from statelog import Step
from statelog.log.open import open_log
from statelog.storage import LocalStore
from statelog.testing.query import Crash
from tests.model.operator_engine import LISTS, Command, OperatorEngine, OperatorModel, Subtask
from tests.model.stored_files import give_up_state

names = st.sampled_from([*LISTS, "units"])
texts = st.sampled_from(["", "a", "b", "long " * 4, "ü"])
elements = st.lists(texts, max_size=4)
commands: st.SearchStrategy[Command] = st.one_of(
    st.tuples(names, elements).map(lambda it: ["update", it[0], *it[1]]),
    st.tuples(names, texts).map(lambda it: ["add", *it]),
    st.tuples(names, elements).map(lambda it: ["addAll", it[0], *it[1]]),
    names.map(lambda name: ["clear", name]),
    texts.map(lambda key: ["get", key]),
    st.just(["read"]),
)
broadcasts: st.SearchStrategy[Command] = st.one_of(
    st.tuples(texts, st.integers(-9, 9)).map(lambda it: ["put", *it]), texts.map(lambda key: ["remove", key])
)
batches = st.tuples(
    st.lists(st.lists(commands, max_size=3), min_size=5, max_size=5), st.one_of(st.just([]), st.lists(broadcasts))
)
merging = st.sampled_from(["across", "within", "off"])
Batch = tuple[list[list[Command]], list[Command]]


class OperatorMachine(RuleBasedStateMachine):
    """The engine beside the model. A batch is repeated until it is durable, as Spark would."""

    @initialize(
        parallelism=st.integers(1, 4),
        inline=st.sampled_from([0, 8 << 20]),
        merging=merging,
        file_bytes=st.sampled_from([1, 3000, 32 << 20]),
        retained=st.sampled_from([2, 3, 10]),
    )
    def begin(self, parallelism: int, inline: int, merging: str, file_bytes: int, retained: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="statelog-model-"))
        self.engine = OperatorEngine(
            self.directory,
            file_merging=merging,
            inline_budget_bytes=inline,
            max_file_bytes=file_bytes,
            retained_checkpoints=retained,
        )
        self.model = OperatorModel()
        self.batch = 0
        self._start(parallelism)

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            shutil.rmtree(self.directory)

    @rule(rows=batches)
    def run_batch(self, rows: Batch) -> None:
        self._complete(rows)

    @rule(text=texts, count=st.integers(1, 6), restarts=st.booleans())
    def only_one_subtask_changes(self, text: str, count: int, restarts: bool) -> None:
        """What the others have is older and older; on another host it is read from where it is stored."""
        for _ in range(count):
            self._complete(([[["add", "items", text]], [], [], [], []], []))
        if restarts:
            self._start(self.engine.parallelism, keep_local=False)
            self._complete(([[["read"]]] * 5, []))

    @rule(rows=batches, again=st.data())
    def repeat_subtasks(self, rows: Batch, again: st.DataObject) -> None:
        """Later attempts of some subtasks, before and after the batch is durable."""
        for subtask in range(self.engine.parallelism):
            if again.draw(st.booleans()):
                self._run(subtask, rows)
        self._complete(rows, advance=False)
        for subtask in range(self.engine.parallelism):
            if again.draw(st.booleans()):
                self._run(subtask, rows)
        self._advance(rows)

    @rule(rows=batches, step=st.sampled_from([Step.RESTORED, Step.ACKING, Step.ACKED]), subtask=st.integers(0, 3))
    def kill_task(self, rows: Batch, step: Step, subtask: int) -> None:
        """A worker dies; Spark tries the subtask again, in another process."""
        self.engine.observer.arm(step, subtask)
        self._complete(rows)
        self.engine.observer.arm(None)

    @rule(
        rows=batches,
        step=st.sampled_from([Step.LAST_ACK, Step.DURABLE]),
        parallelism=st.integers(1, 5),
        keep_local=st.booleans(),
    )
    def kill_driver(self, rows: Batch, step: Step, parallelism: int, keep_local: bool) -> None:
        """The driver dies around the commit; a new run repeats the batch with another parallelism."""
        self.engine.observer.arm(step)
        try:
            for subtask in range(self.engine.parallelism):
                self._run(subtask, rows)
        except Crash:
            pass
        self._start(parallelism, keep_local=keep_local)
        self._complete(rows)

    @rule(rows=batches, other=batches, parallelism=st.integers(1, 5))
    def other_result_in_next_run(self, rows: Batch, other: Batch, parallelism: int) -> None:
        """A batch is durable, but Spark did not commit it; the new run's rows are spread differently."""
        for subtask in range(self.engine.parallelism):
            self._run(subtask, other)
        self._start(parallelism)
        self._complete(rows)

    @rule(rows=batches)
    def other_result_of_later_attempts(self, rows: Batch) -> None:
        """Attempts that see the rows in another order; the last attempt of each subtask counts."""
        for subtask in range(self.engine.parallelism):
            self._run(subtask, ([part[::-1] for part in rows[0]], rows[1]))
        self._complete(rows)

    @rule(parallelism=st.integers(1, 5), keep_local=st.booleans(), merging=merging, closes=st.booleans())
    def restart(self, parallelism: int, keep_local: bool, merging: str, closes: bool) -> None:
        """The next run may merge files in another way; the one before it ended well, or was killed."""
        if closes:
            self.engine.coordinator.close()
        self.engine.file_merging = merging
        self._start(parallelism, keep_local=keep_local)

    @rule(parallelism=st.integers(1, 5), keep_local=st.booleans())
    def give_up(self, parallelism: int, keep_local: bool) -> None:
        """The state is given up between two runs; the next one begins as a new operator does."""
        engine, store = self.engine, LocalStore(self.engine.location)
        give_up_state(open_log(store, engine.options, engine.clock), engine.query_id, engine.uid)
        self.model = OperatorModel()
        self._start(parallelism, keep_local=keep_local)

    def _start(self, parallelism: int, *, keep_local: bool = True) -> None:
        self.engine.start(parallelism, self.batch, keep_local=keep_local)
        # A union grows by itself; nothing here narrows it, so it is cut before it explodes.
        self.subtasks = self.model.restored(parallelism)
        self.is_restored = bool(self.model.subtasks)
        self.is_redistributed = self.is_restored and len(self.model.subtasks) != parallelism
        # Nothing here narrows a union, so it grows with every restart.
        if any(len(subtask.lists["units"]) > 50 for subtask in self.subtasks):
            self._complete(([[["clear", "units"]]] * 5, []))

    def _run(self, subtask: int, rows: Batch) -> list[Any]:
        return self.engine.run_subtask(self.batch, subtask, rows[0][subtask], rows[1])

    def _complete(self, rows: Batch, *, advance: bool = True) -> None:
        for subtask in range(self.engine.parallelism):
            expected = self._expected(subtask, rows)[0]
            for _ in range(3):
                try:
                    assert self._run(subtask, rows) == expected
                    break
                except Crash:
                    continue
        if advance:
            self._advance(rows)

    def _expected(self, number: int, rows: Batch) -> tuple[list[Any], Subtask]:
        subtask, rules = self.subtasks[number].copy(), _ruled(self.model.rules, rows[1])
        flags = [number, self.engine.parallelism, self.is_restored, self.is_redistributed]
        answers = [subtask.run(command, rules) for command in rows[0][number]]
        return [flags, *json.loads(json.dumps(answers))], subtask

    def _advance(self, rows: Batch) -> None:
        self.subtasks = [self._expected(number, rows)[1] for number in range(self.engine.parallelism)]
        self.model = OperatorModel([subtask.copy() for subtask in self.subtasks], _ruled(self.model.rules, rows[1]))
        # What attempts lost in this batch is removed when the next one begins; the batch before has nothing left.
        lost = f"{self.engine.identity}/changes/{self.engine.epoch}/"
        leaked = [name for name in self.engine.leaked() if not (name.startswith(lost) and f"/{self.batch}-" in name)]
        assert leaked == []
        self.batch += 1
        self.is_restored = self.is_redistributed = False
        if self.batch % 4 == 0:
            self._complete(([[["read"]]] * 5, []))


def _ruled(rules: dict[str, int], broadcast: list[Command]) -> dict[str, int]:
    rules = dict(rules)
    for command in broadcast:
        match command:
            case ["put", key, value]:
                rules[key] = value
            case ["remove", key]:
                rules.pop(key, None)
    return rules


_settings = settings(
    phases=(Phase.generate,),
    max_examples=24,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


TestOperatorState = OperatorMachine.TestCase
TestOperatorState.settings = _settings
