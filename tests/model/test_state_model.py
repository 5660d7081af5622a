"""Keyed state and timers: random batches, crashes, repetitions, restarts and rescales against plain dictionaries.

Every answer of the processor and all state is compared, so a timer that fires twice or not at all, across whatever
crashes, is a difference.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import defaultdict
from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from statelog import Options, Step, Ttl, Watermark
from statelog.coordinator.batch import BatchTime
from statelog.local.policy import MergePolicy
from statelog.log.open import INITIAL_FOLDER
from statelog.options import TABLES, Tuning
from statelog.queries.load import RestoreTarget, restore_operators
from statelog.queries.save import save_operator
from statelog.reading.rows import one_by_one
from statelog.storage import LocalStore
from statelog.testing import Harness
from statelog.testing.harness import parts_of
from tests.model.engine import TickingClock
from tests.model.keyed_commands import (
    INPUT,
    LISTS,
    MAPS,
    OUTPUT,
    READ_ALL,
    SUMS,
    VALUES,
    Command,
    Commands,
    as_input,
    colliding_hash,
    good_hash,
    json_like,
    write_all,
)
from tests.model.keyed_model import Key, Model, Row, Rules
from tests.model.stored_files import StoredFiles, folder_of, give_up_state
from tests.model.stored_state import nothing_stored, stored_state

keys: st.SearchStrategy[Key] = st.sampled_from([(None, None), (None, "x"), (5, None), (None, "5"), (-1, "é")])
texts = st.sampled_from(["", "a", "b", "long " * 4, "ü"])
numbers = st.integers(-(2**40), 2**40)
times_ms = st.integers(0, 120)
delays_ms = st.integers(-9, 15)


def _command(*parts: Any) -> st.SearchStrategy[Command]:
    """A command of fixed words and drawn arguments."""
    drawn = [part if isinstance(part, st.SearchStrategy) else st.just(part) for part in parts]
    return st.tuples(*drawn).map(list)


_some_texts = st.lists(texts, min_size=1, max_size=3)
_values, _lists, _maps = st.sampled_from(VALUES), st.sampled_from(LISTS), st.sampled_from(MAPS)
_sums, _any = st.sampled_from(SUMS), st.sampled_from((*VALUES, *LISTS, *MAPS, *SUMS))
commands: st.SearchStrategy[Command] = st.one_of(
    _command("set", _values, numbers),
    _command("get", _values),
    _command("add", _sums, numbers),
    _command("sum", _sums),
    st.tuples(_lists, _some_texts).map(lambda it: ["append", it[0], *it[1]]),
    st.tuples(_lists, _some_texts).map(lambda it: ["replace", it[0], *it[1]]),
    _command("elements", _lists),
    _command("put", _maps, texts, numbers),
    _command("remove", _maps, texts),
    _command("lookup", _maps, texts),
    _command("contains", _maps, texts),
    _command("entries", _maps),
    _command("exists", _any),
    _command("clear", _any),
    *[st.lists(delays_ms, min_size=1, max_size=5).map(lambda it: ["register", "+", *it])] * 3,
    _command("delete", "+", delays_ms),
    *[st.builds(write_all, texts, numbers)] * 3,
    *[st.just(READ_ALL)] * 6,
)
rows_of_batch: st.SearchStrategy[list[Row]] = st.lists(
    st.tuples(keys, st.one_of(st.none(), times_ms), commands), max_size=10
)
steps_ms = st.sampled_from([0, 1, 5, 10, 20])
rule_sets = st.builds(
    Rules,
    event_time=st.booleans(),
    delay_ms=st.sampled_from([None, 0, 10]),
    ttl_ms=st.sampled_from([1, 15, 30]),
    ttl_by_event=st.booleans(),
    renews=st.booleans(),
).filter(lambda rules: rules.event_time or (rules.delay_ms is None and not rules.ttl_by_event))


file_merging = st.sampled_from(["across", "within", "off"])
intervals_s = st.sampled_from([0.0, 0.0, 2.0, 600.0])
inline_budgets = st.sampled_from([0, 400, 8 << 20])
table_numbers = st.integers(0, 5)
"""Counts the tables of the machine."""


SMALL_SLICES = MergePolicy(slice_rows=4, stored_run_bytes=3000, at_once_rows=30)
"""A few rows are a large merge, and are stored as several runs."""


class StateMachine(RuleBasedStateMachine):
    """The harness beside the model.

    Attributes
    ----------
    moves : int
        How many savepoints the query has been moved by.
    moved_at : int
        The batch of the last of them, or of giving the state up, which cannot be repeated any more; -1 without one.
    begins_after : int
        The batch before the operator's first one: -1, or the batch after which its state was given up last.
    actions : int
        How many actions ask for the output of a batch.
    hosts : int
        On how many hosts an attempt may run.
    """

    tables: ClassVar[tuple[str, ...]] = ("runs",)
    """Those that a run of the query may read its state from."""

    @initialize(
        rules=rule_sets,
        collide=st.booleans(),
        parallelism=st.integers(1, 4),
        inline=inline_budgets,
        initial=st.one_of(st.none(), rows_of_batch),
        merging=file_merging,
        file_bytes=st.sampled_from([4000, 32 << 20]),
        part_bytes=st.sampled_from([1, 1000, 5 << 20]),
        interval_s=intervals_s,
        changelog=st.sampled_from([True, True, False]),
        table=table_numbers,
        retained=st.integers(2, 3),
        actions=st.integers(1, 3),
        hosts=st.integers(1, 3),
        seed=st.integers(0, 1 << 32),
    )
    def begin(
        self,
        rules: Rules,
        collide: bool,
        parallelism: int,
        inline: int,
        initial: list[Row] | None,
        merging: str,
        file_bytes: int,
        part_bytes: int,
        interval_s: float,
        changelog: bool,
        table: int,
        retained: int,
        actions: int,
        hosts: int,
        seed: int,
    ) -> None:
        self.actions, self.hosts = actions, hosts
        self.model = Model(rules)
        self.initial = initial or []
        self.moves, self.moved_at, self.begins_after = 0, -1, -1
        self.harness = Harness(
            Commands(
                Ttl(rules.ttl_ms, "event" if rules.ttl_by_event else "processing", rules.renews),
                by_watermark=rules.event_time,
            ),
            input=INPUT,
            output=OUTPUT,
            keys=["a", "b"],
            timeMode="EventTime" if rules.event_time else "ProcessingTime",
            eventTime="at" if rules.event_time and rules.delay_ms is None else None,
            watermark=None if rules.delay_ms is None else Watermark("at", rules.delay_ms),
            keyHash=colliding_hash if collide else good_hash,
            initialState=None if initial is None else (INPUT, [as_input(row) for row in initial]),
            parallelism=parallelism,
            options=Options(
                table=self._table(table),
                file_merging=merging,
                inline_budget_bytes=inline,
                retained_checkpoints=retained,
                materialization_interval_s=interval_s,
                tuning=Tuning(
                    max_file_bytes=file_bytes,
                    upload_part_bytes=part_bytes,
                    merge_fan_in=2,
                    orphan_min_age_s=0,
                    log_min_age_s=0,
                    changelog=changelog,
                    max_log_to_base=1e9,
                ),
            ),
        )
        parts_of(self.harness).query.clock = TickingClock(1e10)
        parts_of(self.harness).query.policy = SMALL_SLICES
        moves = random.Random(seed)
        parts_of(self.harness).query.place = lambda subtask: moves.randrange(hosts)

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.close()

    @rule(rows=rows_of_batch, step_ms=steps_ms)
    def run_batch(self, rows: list[Row], step_ms: int) -> None:
        self._push(rows, step_ms)

    @precondition(lambda self: self.model.rules.event_time and self.model.rules.delay_ms is None)
    @rule(step_ms=steps_ms)
    def move_watermark(self, step_ms: int) -> None:
        watermark_ms = self.harness.watermarkMs + step_ms
        before = self._next_model([], self.harness.processingTimeMs, watermark_ms)
        self._check(self.harness.advanceWatermark(watermark_ms), before)

    @rule(
        rows=rows_of_batch,
        step_ms=steps_ms,
        step=st.sampled_from([Step.RESTORED, Step.ACKING, Step.ACKED, Step.MERGING, Step.MATERIALIZING]),
        subtask=st.one_of(st.none(), st.integers(0, 3)),
    )
    def kill_task(self, rows: list[Row], step_ms: int, step: Step, subtask: int | None) -> None:
        """A worker dies; Spark tries the subtask again, in another process."""
        self.harness.crash(step, subtask)
        self._push(rows, step_ms)

    @rule(
        rows=rows_of_batch,
        step_ms=steps_ms,
        step=st.sampled_from(list(Step)),
        parallelism=st.integers(1, 5),
        keep_local=st.booleans(),
    )
    def kill_driver(self, rows: list[Row], step_ms: int, step: Step, parallelism: int, keep_local: bool) -> None:
        """The driver dies, with the task or alone; a new run repeats the batch with another parallelism."""
        self.harness.crash(step, driver=True, parallelism=parallelism, keepLocal=keep_local)
        self._push(rows, step_ms)

    @precondition(lambda self: self.harness.batchId > self.moved_at)
    @rule(restart=st.booleans())
    def repeat_batch(self, restart: bool) -> None:
        """Spark runs the batch again; that answers and state are the same is what the harness checks."""
        self.harness.repeatBatch(restart=restart)

    @rule(rows=rows_of_batch, other=rows_of_batch, step_ms=steps_ms, parallelism=st.integers(1, 5))
    def other_result_in_next_run(self, rows: list[Row], other: list[Row], step_ms: int, parallelism: int) -> None:
        """A batch is durable, but Spark did not note it as done; the new run's input differs."""
        now_ms = self.harness.processingTimeMs
        self.harness.push([as_input(row) for row in other], now_ms)
        parts_of(self.harness).batches.forget(parallelism)
        self._push(rows, step_ms)

    @rule(rows=rows_of_batch, step_ms=steps_ms, again=st.data())
    def other_result_of_earlier_attempts(self, rows: list[Row], step_ms: int, again: st.DataObject) -> None:
        """Attempts that see the rows in another order; the last attempt of each subtask counts."""
        order = again.draw(st.permutations(rows))
        now_ms = self.harness.processingTimeMs + step_ms
        parts = parts_of(self.harness)
        data = parts.description.data([as_input(row) for row in order], [])
        time = BatchTime(now_ms, self.harness.watermarkMs, parts.batches.last_time.watermark_ms)
        parts.batches.try_first(data, time)
        self._push(rows, step_ms)

    @rule(
        parallelism=st.integers(1, 5),
        keep_local=st.booleans(),
        merging=file_merging,
        interval_s=intervals_s,
        changelog=st.booleans(),
        table=table_numbers,
        inline=inline_budgets,
    )
    def restart(
        self,
        parallelism: int,
        keep_local: bool,
        merging: str,
        interval_s: float,
        changelog: bool,
        table: int,
        inline: int,
    ) -> None:
        query = parts_of(self.harness).query
        query.options = replace(
            query.options,
            file_merging=merging,
            materialization_interval_s=interval_s,
            table=self._table(table),
            inline_budget_bytes=inline,
            tuning=replace(query.options.tuning, changelog=changelog),
        )
        self.harness.restart(parallelism, keepLocal=keep_local)

    @precondition(lambda self: self.harness.batchId >= 0)
    @rule(parallelism=st.integers(1, 5))
    def open_anew(self, parallelism: int) -> None:
        """The query stops and starts on hosts without files; neither leaves anything that no entry names."""
        parts_of(self.harness).batches.stop()
        assert StoredFiles(parts_of(self.harness).query).unreferenced == []
        self.harness.restart(parallelism, keepLocal=False)
        unreferenced = StoredFiles(parts_of(self.harness).query).unreferenced
        if self.harness.batchId == self.begins_after:
            unreferenced = [name for name in unreferenced if folder_of(name) != INITIAL_FOLDER]
        assert unreferenced == []
        self._check_states()

    @precondition(lambda self: self.harness.batchId > self.begins_after)
    @rule(parallelism=st.integers(1, 5), keep_local=st.booleans())
    def move_by_savepoint(self, parallelism: int, keep_local: bool) -> None:
        """A savepoint is taken, and another query begins with it in the place of this one."""
        query, batch = parts_of(self.harness).query, self.harness.batchId
        self.moves += 1
        target = query.directory / f"savepoint-{self.moves}"
        saved = save_operator(
            parts_of(self.harness).batches.history(),
            batch,
            "main",
            location=query.location,
            target=str(target),
            run_all=one_by_one,
            part_bytes=8000,
        )
        parts_of(self.harness).batches.stop()
        shutil.rmtree(query.location)
        query.query_id = f"query-{self.moves}"
        where = RestoreTarget(
            query.location, query.query_id, "restore", batch, query.options, query.clock, lambda: b"0123456789abcdef"
        )
        restore_operators([saved], str(target), where, one_by_one)
        shutil.rmtree(target)
        self.harness.restart(parallelism, keepLocal=keep_local)
        self.moved_at = batch

    @precondition(lambda self: self.harness.batchId >= 0)
    @rule(parallelism=st.integers(1, 5), keep_local=st.booleans())
    def give_up(self, parallelism: int, keep_local: bool) -> None:
        """The state is given up while the query is stopped; the next batch begins as a new operator does."""
        parts_of(self.harness).batches.stop()
        query = parts_of(self.harness).query
        give_up_state(query.open_log(LocalStore(query.location)), query.query_id, query.operator.uid)
        self.model.give_up()
        self.moved_at = self.begins_after = self.harness.batchId
        self.harness.restart(parallelism, keepLocal=keep_local)

    @precondition(lambda self: self.harness.batchId > self.begins_after)
    @rule()
    def read_from_outside(self) -> None:
        """The newest checkpoint, read from the files alone."""
        found = stored_state(parts_of(self.harness).query.location)
        nothing = nothing_stored()
        assert set(found) <= set(self.model.keys)
        for key in self.model.keys:
            assert found.get(key, nothing) == self.model.seen(key)

    @invariant()
    def local_runs_stay_few(self) -> None:
        if hasattr(self, "harness"):
            for host in range(self.hosts):
                for folder in (parts_of(self.harness).query.local_of(host) / str(self.harness.parallelism)).glob("*/"):
                    assert len(list(folder.glob("*.run"))) <= 20

    @precondition(lambda self: self.harness.batchId >= 0)
    @invariant()
    def nothing_is_lost_or_left(self) -> None:
        """What can be gone back to is there, and what crashed runs have written is not."""
        files = StoredFiles(parts_of(self.harness).query)
        for record in list(files.history.records)[-2:]:
            assert files.history.has_batch(record.batch)
        assert files.missing(parts_of(self.harness).query.options.retained_checkpoints) == {}
        epoch = max(entry.epoch for entry in files.entries)
        for name in files.unreferenced:
            of_epoch = name.split("/")[2]
            assert folder_of(name) == INITIAL_FOLDER or int(of_epoch) >= epoch, name

    def _table(self, number: int) -> str:
        return self.tables[number % len(self.tables)]

    # ---- Comparing ----

    def _push(self, rows: list[Row], step_ms: int) -> None:
        now_ms = self.harness.processingTimeMs + step_ms
        expected = self._next_model(rows, now_ms, None)
        self._check(self.harness.push([as_input(row) for row in rows], now_ms), expected)
        for _ in range(self.actions - 1):
            self.harness.repeatBatch()

    def _next_model(self, rows: list[Row], now_ms: int, watermark_ms: int | None) -> dict[Key, list[Any]]:
        initial = self.initial if self.harness.batchId == self.begins_after else []
        return self.model.run(rows, now_ms, watermark_ms, initial)

    def _check(self, output: list[Any], expected: dict[Key, list[Any]]) -> None:
        found: dict[Key, list[Any]] = defaultdict(list)
        for (text,) in output:
            key, *answer = json.loads(text)
            found[tuple(key)].append(answer)
        assert found == json_like(expected)
        if self.harness.batchId % 5 == 0:
            self._check_states()

    def _check_states(self) -> None:
        for key in self.model.keys:
            assert parts_of(self.harness).view.look(key, _read_all) == self.model.seen(key)


def _read_all(handle: Any) -> dict[str, Any]:
    """Everything that a key has; Harness.value and the like read it one by one."""
    processor = Commands(Ttl(1))
    processor.init(handle)
    held: dict[str, Any] = {}
    for name in VALUES:
        held[name] = _listed(processor.states[name].get())
    for name in SUMS:
        state = processor.states[name]
        held[name] = _listed(state.getAccumulator() if name == "mean" else state.get())
    for name in LISTS:
        held[name] = [text for (text,) in processor.states[name].get()]
    for name in MAPS:
        held[name] = {text: n for (text,), (n,) in processor.states[name].iterator()}
    held["timers"] = sorted(handle.listTimers())
    return held


def _listed(row: tuple[Any, ...] | None) -> list[Any] | None:
    return None if row is None else list(row)


_settings = settings(
    phases=(Phase.generate,),
    max_examples=18,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class MemoryTableMachine(StateMachine):
    tables = ("memory",)


class RocksTableMachine(StateMachine):
    tables = ("rocksdb",)


class AllTablesMachine(StateMachine):
    tables = TABLES


TestRunsTable = StateMachine.TestCase
TestRunsTable.settings = _settings
TestMemoryTable = MemoryTableMachine.TestCase
TestMemoryTable.settings = settings(_settings, max_examples=12)
TestRocksTable = RocksTableMachine.TestCase
TestRocksTable.settings = settings(_settings, max_examples=7)
TestAllTables = AllTablesMachine.TestCase
TestAllTables.settings = settings(_settings, max_examples=12)
