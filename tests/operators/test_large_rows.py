"""Rows that are large beside what is worked on at once: the bounds are lowered, so that no test needs gigabytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from statelog import OperatorProcessor, Options, ProcessorError, Tuning
from statelog.clock import SystemClock
from statelog.errors import ErrorKind
from statelog.local.runs import LocalRun, LocalRuns
from statelog.operators.keyed.grouping import key_chunks
from statelog.operators.keyed.operator import BatchContext, KeyedRows, OutputCodec
from statelog.operators.keyed.subtask import KeyedSubtask
from statelog.operators.unkeyed.processor import OperatorContext
from statelog.operators.unkeyed.snapshot import Elements as SectionElements
from statelog.operators.unkeyed.subtask import UnkeyedInput, UnkeyedOperator, UnkeyedSubtask
from statelog.runs.byte_slices import Budget, RowsTooLarge, size_of
from statelog.runs.merge import MergePosition, RunMerge, merge_runs
from statelog.runs.reader import Run
from statelog.runs.schema import Operation, StateDescriptor, StateKind, change_schema
from statelog.runs.times import Moment
from statelog.runs.writer import STORED_BLOCK_BYTES, RunWriter, StateChanges, encode_run
from statelog.stopwatch import Stopwatch
from statelog.tables.memory import MemoryTable
from statelog.tables.runs import RunsTable
from statelog.tables.table import EntryRows, KeyBatch, StateTable, ValueRows
from statelog.tasks.keyed_task import read_initial
from statelog.testing import Harness
from statelog.testing.harness import parts_of
from statelog.testing.keyed import KeyedQuery
from statelog.testing.rows import OperatorArguments
from statelog.testing.unkeyed import UnkeyedQuery

TEXTS = StateDescriptor("texts", StateKind.VALUE, pa.schema([("text", pa.string())]))
LISTS = StateDescriptor("lists", StateKind.LIST, pa.schema([("texts", pa.list_(pa.string()))]))
SLICE_BYTES = 20_000
SLACK_BYTES = 3_000
"""The largest row, and what the offsets and bitmaps of a batch take."""

Change = tuple[int, bytes, bytes, Operation, Any]


def config_of(state: StateDescriptor, changes: Sequence[Change], name: str = "run") -> Run:
    columns = ["hash", "key", "entry", "op", "v0"]
    rows = [dict(zip(columns, change, strict=True)) for change in sorted(changes, key=lambda change: change[:3])]
    batch = pa.RecordBatch.from_pylist(rows, schema=change_schema(state))
    data = encode_run(
        [StateChanges(state, [batch.slice(0, 7), batch.slice(7)])],
        compression=None,
        block_rows=1000,
        block_bytes=SLICE_BYTES,
    )
    return Run(pa.py_buffer(data), name)


def sizes_of(run: Run) -> list[int]:
    return [block.load().nbytes for section in run.sections.values() for block in section.blocks]


def text_runs() -> list[Run]:
    """Texts of 0 to 2,000 letters; some keys share a hash, and later runs replace and delete."""
    chance = random.Random(5)
    runs: list[Run] = []
    for number in range(4):
        keys = chance.sample(range(200), 120)
        changes = [
            (
                (key // 2) << 57,
                b"%03d" % key,
                b"",
                Operation.DELETE if number and key % 7 == number else Operation.PUT,
                None if number and key % 7 == number else f"{number}" * chance.randint(0, 2000),
            )
            for key in keys
        ]
        runs.append(config_of(TEXTS, changes, f"run {number}"))
    return runs


def list_runs() -> list[Run]:
    """Lists of two small keys and of one, of the same hash, that is much larger than a slice; run 2 clears it."""
    runs: list[Run] = []
    for number in range(4):
        changes: list[Change] = []
        for key, count in ((b"large", 150), (b"small", 3)):
            if number == 2:
                changes.append((0, key, b"", Operation.CLEAR, None))
            changes += [
                (0, key, b"%d-%04d" % (number, entry), Operation.PUT, [f"{number}.{entry} ", "x" * 500])
                for entry in range(count)
            ]
        changes.append((1 << 60, b"other", b"%d" % number, Operation.PUT, ["o"]))
        runs.append(config_of(LISTS, changes, f"run {number}"))
    return runs


def contents(state: StateDescriptor, runs: Sequence[Run]) -> dict[tuple[bytes, bytes], Any]:
    """What is left of changes, applied one after the other."""
    held: dict[tuple[bytes, bytes], Any] = {}
    for run in runs:
        for block in run.sections[state.name].blocks:
            for row in block.load().to_pylist():
                key, entry = row["key"], row["entry"]
                if row["op"] == Operation.CLEAR:
                    held = {at: value for at, value in held.items() if at[0] != key}
                elif row["op"] == Operation.DELETE:
                    held.pop((key, entry), None)
                else:
                    held[key, entry] = row["v0"]
    return held


# ---- Runs ----


@pytest.mark.parametrize(("state", "make"), [(TEXTS, text_runs), (LISTS, list_runs)], ids=["texts", "lists"])
def test_blocks_and_merges_are_bounded_in_bytes(
    state: StateDescriptor, make: Callable[[], list[Run]], tmp_path: Path
) -> None:
    local = LocalRuns(tmp_path, Budget(slice_bytes=SLICE_BYTES))
    runs, local_run = make(), LocalRun(0, 3, bytes(16), bytes(range(16)))
    assert all(size <= SLICE_BYTES + SLACK_BYTES for run in runs for size in sizes_of(run))

    local.write_merged(local_run, runs, "token", is_bottom=True)

    merged = local.open(local_run)
    assert contents(state, [merged]) == contents(state, runs)
    assert max(sizes_of(merged)) <= SLICE_BYTES + SLACK_BYTES
    assert sum(sizes_of(merged)) > 3 * SLICE_BYTES, "the case is one"
    rows = [row for block in merged.sections[state.name].blocks for row in block.load().to_pylist()]
    order = [(row["hash"], row["key"], row["entry"]) for row in rows]
    assert order == sorted(set(order))


@pytest.mark.parametrize(("state", "make"), [(TEXTS, text_runs), (LISTS, list_runs)], ids=["texts", "lists"])
@pytest.mark.parametrize("is_bottom", [True, False])
@pytest.mark.parametrize("count", [1, 4])
def test_what_a_merge_hands_on_is_bounded(
    state: StateDescriptor, make: Callable[[], list[Run]], is_bottom: bool, count: int
) -> None:
    """Also of a slice that is larger than it should be, as hashes are not spread evenly."""
    taken: list[pa.RecordBatch] = []

    class Sink:
        def add(self, of: StateDescriptor, batch: pa.RecordBatch) -> None:
            taken.append(batch)

    runs = make()[:count]
    slices = list(RunMerge(runs, is_bottom=is_bottom, slice_bytes=SLICE_BYTES).write(Sink()))

    assert max(batch.nbytes for batch in taken) <= 2 * SLICE_BYTES + SLACK_BYTES
    if state is TEXTS:
        assert len(slices) >= sum(sum(sizes_of(run)) for run in runs) / (2 * SLICE_BYTES), "no slice is large"
    kept = {(row["key"], row["entry"]): row["v0"] for batch in taken for row in batch.to_pylist() if row["op"] == 0}
    assert kept == contents(state, runs)


@pytest.mark.parametrize("make", [text_runs, list_runs])
@pytest.mark.parametrize("other_bytes", [SLICE_BYTES, 700, 10**9])
def test_a_merge_goes_on_also_with_other_slices(make: Callable[[], list[Run]], other_bytes: int) -> None:
    runs = make()
    whole = pa.BufferOutputStream()
    merge_runs(runs, RunWriter(whole, compression=None, block_rows=1000), is_bottom=True)
    sink = pa.BufferOutputStream()
    writer = RunWriter(sink, compression=None, block_rows=1000, block_bytes=SLICE_BYTES)
    position: MergePosition | None = None
    for size_bytes in (SLICE_BYTES, other_bytes, SLICE_BYTES, 10**9):
        written = RunMerge(runs, is_bottom=True, slice_bytes=size_bytes).write(writer, position)
        position = next(written, position)
        assert isinstance(written, Generator)
        written.close()
    for _ in RunMerge(runs, is_bottom=True, slice_bytes=other_bytes).write(writer, position):
        pass
    writer.finish()

    [state] = runs[0].sections.values()
    assert contents(state.state, [Run(sink.getvalue(), "parts")]) == contents(
        state.state, [Run(whole.getvalue(), "whole")]
    )


def test_a_key_is_found_in_several_blocks() -> None:
    runs = list_runs()
    assert max(len(run.sections["lists"].blocks) for run in runs) > 3
    tables: list[StateTable] = [RunsTable(runs, Budget(slice_bytes=SLICE_BYTES)), MemoryTable()]
    tables[1].apply(runs)
    expected = contents(LISTS, runs)
    keys = KeyBatch(np.array([0, 0, 1 << 60], np.uint64), pa.array([b"large", b"small", b"other"]))
    for table in tables:
        found = table.entries(LISTS, keys)
        names = keys.keys.take(pa.array(found.positions)).to_pylist()
        values = found.values.column(0).to_pylist()
        assert dict(zip(zip(names, found.entries.to_pylist(), strict=True), values, strict=True)) == expected
        for entry in (b"1-0149", b"2-0000", b"2-0149", b"3-0149", b"3-0150"):
            one = table.entries_of(LISTS, 0, b"large").find(entry)
            found_rows = [] if one is None else one.values.column(0).to_pylist()
            assert found_rows == [v for at, v in expected.items() if at == (b"large", entry)]
    assert max(batch.nbytes for batch in tables[0].entries(LISTS, keys).values.to_batches()) <= SLICE_BYTES


# ---- Batches ----


class Notes(StatefulProcessor):
    """Keeps a text, a list and a map per key, and returns what it has read and written, row by row."""

    def init(self, handle: Any) -> None:
        self._text = handle.getValueState("text", "text string")
        self._notes = handle.getListState("notes", "note string")
        self._by_number = handle.getMapState("byNumber", "number int", "note string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        held = self._text.get()
        texts = [row.text for row in rows]
        if texts == ["read"]:
            yield Row(key=key[0], text="".join(note for (note,) in self._notes.get()))
        elif texts == ["look up"]:
            yield Row(key=key[0], text=self._by_number.getValue((1,))[0])
        else:
            yield Row(key=key[0], text="" if held is None else held[0])
            self._text.update(("".join(texts),))
            self._notes.appendList([(text,) for text in texts])
            for number, text in enumerate(texts):
                self._by_number.updateValue((number,), (text,))
            for text in texts:
                yield Row(key=key[0], text=text)

    def handleInitialState(self, key: Any, initialState: Row, timerValues: Any) -> None:
        self._text.update((initialState.text,))

    def close(self) -> None:
        pass


class Watched(RunsTable):
    """Notes how much is looked up at once, and whose entries are fetched."""

    def __init__(self, runs: Sequence[Run], budget: Budget, found: list[int], fetched: list[int]) -> None:
        super().__init__(runs, budget)
        self.found = found
        self.fetched = fetched

    def get_many(self, state: StateDescriptor, keys: KeyBatch) -> ValueRows:
        values = super().get_many(state, keys)
        self.found.append(values.values.nbytes)
        return values

    def entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryRows:
        self.fetched.append(len(keys))
        return super().entries(state, keys)


class Engine:
    """Batches of a subtask whose state is the runs of those before."""

    def __init__(self, budget: Budget) -> None:
        described = OperatorArguments(input="key long, text string", output="key long, text string", keys=["key"])
        self._query = KeyedQuery(Notes(), described, Options())
        self._budget = budget
        self.runs: list[Run] = []
        self.output: list[pa.RecordBatch] = []
        self.found: list[int] = []
        self.fetched: list[int] = []

    def push(self, rows: Sequence[tuple[int, str]], batches: int = 1) -> list[tuple[int, str]]:
        data = self._query.data(rows)
        read = pa.Table.from_batches([data.rows.slice(at, batches) for at in range(0, len(rows), batches)])
        table = Watched(self.runs, self._budget, self.found, self.fetched)
        context = BatchContext(0, len(self.runs), Moment(0, 0))
        operator = self._query.operator.with_budget(self._budget).make()
        operator = replace(operator, output=Cramped(operator.output))
        subtask = KeyedSubtask(operator, table, context, Stopwatch(SystemClock()))
        self.output = list(subtask.process(KeyedRows(read if batches > 1 else data.rows, data.hashes)))
        part, _ = subtask.changes.take_part("lz4")
        local = local_run(subtask, f"batch {len(self.runs)}")
        stored = Run(pa.py_buffer(part), "stored", is_stored=True)
        assert contents_of_all(stored) == contents_of_all(local)
        self.runs.append(local)
        return [(row["key"], row["text"]) for batch in self.output for row in batch.to_pylist()]


def local_run(subtask: KeyedSubtask, name: str) -> Run:
    sink = pa.BufferOutputStream()
    subtask.changes.write_local(sink)
    return Run(sink.getvalue(), name)


def contents_of_all(run: Run) -> dict[str, Any]:
    return {name: contents(section.state, [run]) for name, section in run.sections.items()}


class Cramped:
    """An output whose columns take five rows."""

    hold = None

    def __init__(self, output: OutputCodec) -> None:
        self._output = output

    def encode(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> pa.RecordBatch:
        if len(rows) > 5:
            raise RowsTooLarge("more than five")
        return self._output.encode(rows, owner_of)


SMALL = Budget(slice_bytes=SLICE_BYTES, input_bytes=2 * SLICE_BYTES)


def rows_of_batch(number: int, chance: random.Random) -> list[tuple[int, str]]:
    """60 keys with some texts each, and key 0 with more than fit into what is grouped at once."""
    rows = [(key, f"{number}.{key}.{at} " * chance.randint(1, 150)) for key in range(60) for at in range(3)]
    rows += [(0, f"{number}.{at} " * 100) for at in range(300)]
    chance.shuffle(rows)
    return rows


@pytest.mark.parametrize("rows_at_once", [1, 10, 100, 1000])
def test_input_is_grouped_in_parts(rows_at_once: int) -> None:
    """Every key's rows in order of arrival; no more at once than there may be, also where keys share a hash."""
    chance = random.Random(rows_at_once)
    keys = [chance.choice([1, 2, 3, 3, 3, *range(40)]) for _ in range(1000)]
    texts = [f"{number} " * chance.randint(0, 30) for number in range(1000)]
    rows = pa.RecordBatch.from_pydict({"key": pa.array(keys), "text": texts})
    hashes = np.array([key // 2 for key in keys], np.uint64)
    budget = Budget(slice_bytes=3000, input_bytes=6000)
    encoded: list[int] = []

    def encode(part: pa.RecordBatch) -> pa.Array:
        encoded.append(part.nbytes)
        return pa.array([b"%d" % key for key in part.column(0).to_pylist()], pa.binary())

    batches = [rows.slice(start, rows_at_once) for start in range(0, 1000, rows_at_once)]
    found: dict[bytes, list[str]] = {}
    for window in key_chunks(batches, hashes, encode, budget, lambda: 100):
        assert len(window.keys) == 1 or window.rows.nbytes <= 3000
        texts_of_window = [text for part in window.chunks(7, 500) for text in part.column(1).to_pylist()]
        ends = [*window.starts[:-1].tolist()[1:], len(texts_of_window)]
        for key, start, end in zip(window.keys.keys.to_pylist(), window.starts.tolist(), ends, strict=False):
            assert key not in found, "a key has one window"
            found[key] = texts_of_window[start:end]

    assert found == {
        b"%d" % key: [text for at, text in zip(keys, texts, strict=True) if at == key] for key in set(keys)
    }
    assert max(encoded) <= 6000


@pytest.mark.parametrize("batches", [1, 37])
def test_batches_of_large_rows_are_worked_on_in_parts(batches: int) -> None:
    chance = random.Random(3)
    engine, held = Engine(SMALL), dict[int, str]()
    for number in range(3):
        rows = rows_of_batch(number, chance)
        by_key: dict[int, list[str]] = {}
        for key, text in rows:
            by_key.setdefault(key, []).append(text)

        output = engine.push(rows, batches)

        assert sorted(by_key) == sorted({key for key, _ in output})
        for key, texts in by_key.items():
            assert [text for at, text in output if at == key] == [held.get(key, ""), *texts]
            held[key] = "".join(texts)
        largest = max(map(len, held.values()))
        assert max(batch.nbytes for batch in engine.output) <= max(SLICE_BYTES, largest) + SLACK_BYTES
        assert max(sizes_of(engine.runs[-1])) <= max(SLICE_BYTES, largest) + SLACK_BYTES
    assert size_of(engine.output) > 10 * SLICE_BYTES, "the case is one"


def test_no_batch_of_an_initial_state_is_left_out() -> None:
    """They stay apart: together they may be more than Arrow's offsets reach."""
    rows = [(key, f"{key} " * (5 * key)) for key in range(150)]
    columns = "key long, text string"
    described = OperatorArguments(columns, columns, ["key"], initialState=(columns, rows))
    operator = KeyedQuery(Notes(), described, Options()).operator
    held = operator.initial
    assert held is not None
    stored = held.rows.append_column("hash", pa.array(held.hashes.view(np.int64)))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, stored.schema) as writer:
        for start in range(0, 150, 40):
            writer.write_batch(stored.slice(start, 40))

    initial = read_initial(sink.getvalue().to_pybytes(), "initial")

    assert initial is not None
    assert [len(batch) for batch in initial.rows.to_batches()] == [40, 40, 40, 30]
    nothing = KeyedRows(pa.RecordBatch.from_pylist([], schema=pa.schema([])), np.zeros(0, np.uint64))
    context = BatchContext(0, 0, Moment(0, 0))
    subtask = KeyedSubtask(operator.with_budget(SMALL).make(), RunsTable(), context, Stopwatch(SystemClock()))
    assert sum(batch.num_rows for batch in subtask.process(nothing, initial)) == 0
    [texts] = contents_of_all(local_run(subtask, "loaded")).values()
    assert sorted(texts.values()) == sorted(text for _, text in rows)


def test_windows_of_keys_have_few_keys_if_their_state_is_large() -> None:
    engine = Engine(SMALL)
    engine.push([(key, "x" * 1000) for key in range(300)])
    assert engine.push([(key, "y") for key in range(300)]) != []
    assert sum(engine.found) > 290_000
    assert max(engine.found) <= 1.2 * SLICE_BYTES


def test_a_value_that_is_too_large_is_refused_by_name() -> None:
    engine = Engine(Budget(slice_bytes=2000, row_bytes=5000))
    engine.push([(1, "x" * 4900)])
    with pytest.raises(ProcessorError, match=r"state '\w+' of key \(7,\): a value takes 5,[01]\d\d bytes") as failure:
        engine.push([(6, "x"), (7, "x" * 5001), (8, "x")])
    assert failure.value.kind is ErrorKind.TOO_LARGE
    assert "the limit is 5,000" in failure.value.message
    assert failure.value.hint


def test_a_key_of_many_slices_is_read_in_pages_and_can_be_looked_up() -> None:
    engine = Engine(SMALL)
    for number in range(5):
        engine.push([(key, f"{number}" * 9000) for key in (1, 2)] + [(2, f"{number}" * 9000)])
    engine.fetched.clear()
    assert engine.push([(1, "read")]) == [(1, "".join(f"{number}" * 9000 for number in range(5)))]
    assert engine.push([(2, "read")]) == [(2, "".join(f"{number}" * 18_000 for number in range(5)))]
    assert engine.push([(2, "look up")]) == [(2, "4" * 9000)]
    assert engine.fetched == [], "entries of a large key were fetched at once"


# ---- Operators without keys ----


class Elements(OperatorProcessor):
    """Keeps its rows in a list and its broadcast rows in a map, and returns all of both."""

    def init(self, handle: Any) -> None:
        self._texts = handle.getListState("texts", "text string")
        self._rules = handle.getBroadcastState("rules", "number long", "text string")

    def processBroadcast(self, rows: Iterator[Row], context: OperatorContext) -> None:
        for number, row in enumerate(rows):
            self._rules.put((number,), (row.text,))

    def process(self, rows: Iterator[Row], context: OperatorContext) -> Iterator[Row]:
        for row in rows:
            self._texts.add((row.text,))
        for (text,) in self._texts.get():
            yield Row(text=text)
        for _, (text,) in self._rules.items():
            yield Row(text=text)


def elements_operator(budget: Budget) -> UnkeyedOperator:
    arguments = OperatorArguments("text string", "text string", broadcast="text string")
    return replace(UnkeyedQuery(Elements(), arguments, Options()).operator.spec.operator(), budget=budget)


def elements_input(rows: Sequence[str], copies: Sequence[str] = (), rows_at_once: int = 40) -> UnkeyedInput:
    def batches(texts: Sequence[str]) -> list[pa.RecordBatch]:
        whole = pa.RecordBatch.from_pydict({"text": pa.array(texts, pa.string())})
        return [whole.slice(at, rows_at_once) for at in range(0, len(texts), rows_at_once)]

    return UnkeyedInput(batches(rows), batches(copies), 0, 0)


CONTEXT = OperatorContext(3, 4, batchId=0, batchTimeMs=0)


def test_an_operator_without_keys_reads_and_writes_in_parts() -> None:
    chance = random.Random(1)
    rows, copies = ([f"{kind}{at} " * chance.randint(1, 150) for at in range(300)] for kind in ("row", "copy"))
    operator = elements_operator(SMALL)
    read: list[int] = []

    def noted(to_rows: Callable[[pa.RecordBatch], list[Any]]) -> Callable[[pa.RecordBatch], list[Any]]:
        def note_and_convert(part: pa.RecordBatch) -> list[Any]:
            read.append(part.nbytes)
            return to_rows(part)

        return note_and_convert

    operator = replace(
        operator,
        to_rows=noted(operator.to_rows),
        to_broadcast_rows=noted(operator.to_broadcast_rows),
        output=Cramped(operator.output),
    )
    subtask = UnkeyedSubtask(operator, {}, CONTEXT)
    output = list(subtask.process(elements_input(rows, copies, rows_at_once=300)))

    assert [text for batch in output for text in batch.column(0).to_pylist()] == rows + copies
    assert SLICE_BYTES / 2 < max(batch.nbytes for batch in output) <= SLICE_BYTES
    assert max(read) <= SLICE_BYTES < sum(read) / 10
    assert [section.count for section in subtask.sections()] == [300, 300]


def test_an_output_row_that_is_too_large_is_refused() -> None:
    class Full:
        hold = None

        def encode(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> pa.RecordBatch:
            raise RowsTooLarge("more than there is room for")

    subtask = UnkeyedSubtask(replace(elements_operator(SMALL), output=Full()), {}, CONTEXT)
    with pytest.raises(
        ProcessorError, match=r"process\(\) returned a row or frame that does not fit .*: more"
    ) as failure:
        list(subtask.process(elements_input(["a", "b"])))
    assert failure.value.kind is ErrorKind.TOO_LARGE


@pytest.mark.parametrize("state", ["texts", "rules"])
def test_a_state_without_keys_that_is_too_large_is_refused_by_name(state: str) -> None:
    def written(texts: Sequence[str], stored: Any = None) -> UnkeyedSubtask:
        subtask = UnkeyedSubtask(elements_operator(Budget(elements_bytes=50_000)), stored or {}, CONTEXT)
        given = (texts, ()) if state == "texts" else ((), texts)
        for _ in subtask.process(elements_input(*given)):
            pass
        return subtask

    message = f"state '{state}' is limited to 50,000 bytes per subtask, but is larger in subtask 3: [0-9,]* bytes"
    with pytest.raises(ProcessorError, match=message) as failure:
        written(["x" * 1000] * 51).sections()
    assert failure.value.kind is ErrorKind.TOO_LARGE

    sections = written(["x" * 1000] * 30).sections()
    [held] = [section for section in sections if section.state.name == state]
    assert held.count == 30
    if state == "texts":  # elements that come together, from before and from other subtasks
        parts = [SectionElements.all_of(held)]
        with pytest.raises(ProcessorError, match=message):
            written(["x" * 1000] * 30, {state: parts}).sections()
        with pytest.raises(ProcessorError, match=message):
            written([], {state: 2 * parts}).sections()
        with pytest.raises(ProcessorError, match="state 'unknown' is limited to"):
            written([], {"unknown": 2 * parts}).sections()


def test_a_block_ends_before_the_hash_that_would_make_it_large() -> None:
    """But it has all rows of one hash, unless they are too many for any block."""
    counts = {hash_value: 1 for hash_value in range(40)} | {10: 4, 20: 20}
    changes = [
        (hash_value, b"%d %d" % (hash_value, number), b"", Operation.PUT, "x" * 1000)
        for hash_value, count in counts.items()
        for number in range(count)
    ]
    rows = [dict(zip(["hash", "key", "entry", "op", "v0"], change, strict=True)) for change in sorted(changes)]
    sink = pa.BufferOutputStream()
    writer = RunWriter(sink, compression=None, block_rows=1000, block_bytes=9_000, whole_bytes=3_000)
    batch = pa.RecordBatch.from_pylist(rows, schema=change_schema(TEXTS))
    writer.add(TEXTS, batch)
    writer.finish()
    blocks = Run(sink.getvalue(), "run").sections["texts"].blocks
    assert [row for block in blocks for row in block.load().to_pylist()] == batch.to_pylist()
    sizes: dict[tuple[int, int], list[int]] = {(block.first_hash, block.last_hash): [] for block in blocks}
    for block in blocks:
        sizes[block.first_hash, block.last_hash].append(block.rows)
    assert sizes[10, 10] == [4]
    assert sizes[20, 20] == [8, 8, 4]
    others = [count for (first, last), of in sizes.items() if first not in (10, 20) for count in of]
    assert max(others) == 2
    assert sum(others) == 38


class Keep(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self._text = handle.getValueState("text", "text string")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self._text.update((row.text,))
        yield from ()

    def close(self) -> None:
        pass


def test_stored_blocks_are_small_so_that_a_look_up_reads_little(tmp_path: Path) -> None:
    options = Options(inline_budget_bytes=0, materialization_interval_s=0, tuning=Tuning(merge_fan_in=2))
    with Harness(Keep(), input="k long, text string", output="k long", keys=["k"], options=options) as harness:
        for batch in range(4):
            harness.push([(key, f"{batch}" * 3000) for key in range(1000)])
        location = Path(parts_of(harness).query.location)
        for folder in ("changes", "runs"):
            paths = list(location.glob(f"*/{folder}/**/*.run"))
            assert paths
            for path in paths:
                run = Run(pa.py_buffer(path.read_bytes()), path.name)
                sizes = [block.size_bytes for section in run.sections.values() for block in section.blocks]
                assert len(sizes) > 1
                assert max(sizes) <= STORED_BLOCK_BYTES
