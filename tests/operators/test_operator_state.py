"""Operator state: its handles, its snapshots, and what the log then holds. Redistribution has tests of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from statelog import ConfigurationError, CorruptionError, ErrorKind, OperatorContext, ProcessorError, Step
from statelog.convert.types import field_codecs
from statelog.coordinator import redistribution
from statelog.local.restore import read_segment
from statelog.log.entry import Checkpoint, QueryCheckpoint
from statelog.log.references import SegmentRef
from statelog.operators.unkeyed.snapshot import (
    Elements,
    Snapshot,
    StateElements,
    encode_snapshot,
    join_elements,
    section_schema,
    section_sizes,
)
from statelog.operators.unkeyed.states import (
    BroadcastState,
    OperatorListState,
    OperatorStateBinding,
    OperatorStateDescriptor,
    OperatorStateMode,
    Phase,
    Stage,
)
from statelog.runs.schema import StateSchema, encode_schema
from statelog.runs.values import RowCodec
from statelog.storage import LocalStore, Store
from statelog.tasks import unkeyed_task
from statelog.testing.query import Crash
from tests.model.operator_engine import Command, Commands, OperatorEngine, bindings

PAIR = pa.schema([("name", pa.string()), ("offset", pa.int64())])
LIST = StateSchema("units", "operator-list", b"", encode_schema(PAIR))
MAP = StateSchema("rates", "operator-broadcast", encode_schema(PAIR), encode_schema(PAIR))
Pair = tuple[str | None, int | None]


class CountingCodec(RowCodec):
    """Notes how many rows were decoded."""

    decoded = 0

    def decode(self, rows: pa.RecordBatch) -> list[tuple[Any, ...]]:
        self.decoded += rows.num_rows
        return super().decode(rows)


def codec() -> CountingCodec:
    return CountingCodec(field_codecs(StructType().add("name", "string").add("offset", "long"), "field"), "state 's'")


def section(pairs: Sequence[Pair], state: StateSchema = LIST) -> StateElements:
    names, offsets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return StateElements.of(state, [pa.RecordBatch.from_arrays([names, offsets], schema=section_schema(state))])


def phase(stage: Stage) -> Phase:
    made = Phase()
    made.stage = stage
    return made


def list_state(parts: Sequence[Elements] = (), stage: Stage = Stage.PROCESS) -> tuple[OperatorListState, CountingCodec]:
    counting = codec()
    return OperatorListState(LIST, counting, parts, phase(stage)), counting


def broadcast_state(
    stored: StateElements | None = None, stage: Stage = Stage.PROCESS_BROADCAST
) -> tuple[BroadcastState, CountingCodec]:
    counting = codec()
    parts = [] if stored is None else [Elements.all_of(stored)]
    return BroadcastState(MAP, counting, codec(), parts, phase(stage)), counting


# ---- List states ----


def test_list_methods_do_what_they_say() -> None:
    state, _ = list_state([Elements.all_of(section([("a", 1), ("b", None)]))])
    state.add(("c", 3))
    state.addAll([("d", 4), (None, 5)])
    assert list(state.get()) == [("a", 1), ("b", None), ("c", 3), ("d", 4), (None, 5)]
    state.update([("e", 6)])
    assert list(state.get()) == [("e", 6)]
    state.clear()
    assert list(state.get()) == []
    state.add(("f", 7))
    assert [row for part in [Elements.all_of(state.section())] for row in codec().decode(part.rows)] == [("f", 7)]


def test_an_iterator_shows_the_list_as_it_was() -> None:
    state, _ = list_state([Elements.all_of(section([("a", 1)]))])
    state.add(("b", 2))
    before = state.get()
    state.update([("c", 3)])
    assert list(before) == [("a", 1), ("b", 2)]


def test_elements_are_decoded_only_as_they_are_read() -> None:
    stored = section([(str(index), index) for index in range(10_000)])
    state, counting = list_state([Elements(stored, 2_000, 5_000)])
    elements = state.get()
    assert counting.decoded == 0
    assert next(elements) == ("2000", 2_000)
    assert counting.decoded < 1_000
    state.add(("new", 1))
    assert state.section().count == 5_001
    assert counting.decoded < 1_000, "what is only passed on is never decoded"


def test_a_list_that_was_only_read_keeps_its_bytes() -> None:
    stored = section([("a", 1)])
    state, _ = list_state([Elements.all_of(stored)])
    list(state.get())
    assert not state.is_changed
    assert state.section() is stored


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda state: state.add("text"), ErrorKind.VALUE_MISMATCH, "takes a tuple of 2"),
        (lambda state: state.addAll([("a", 1.5)]), ErrorKind.VALUE_MISMATCH, "does not fit field 'offset'"),
        (lambda state: state.update(state.get()), ErrorKind.STATE_USAGE, r"update\(\) takes a list of tuples"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_and_changes_nothing(call: Any, kind: ErrorKind, words: str) -> None:
    state, _ = list_state([Elements.all_of(section([("a", 1)]))])
    with pytest.raises(ProcessorError, match=words) as failure:
        call(state)
    assert failure.value.kind is kind
    assert list(state.get()) == [("a", 1)]


# ---- Broadcast states ----


def test_broadcast_methods_do_what_they_say() -> None:
    state, _ = broadcast_state()
    state.put(("x", 1), ("one", 1))
    state.put((None, 2), (None, 2))
    state.put(("x", 1), ("uno", 1))
    state.remove(("not there", 0))
    assert (state.get(("x", 1)), state.get((None, 2)), state.get(("x", 2))) == (("uno", 1), (None, 2), None)
    assert (state.contains((None, 2)), state.contains(("", 2))) == (True, False)
    assert dict(state.items()) == {("x", 1): ("uno", 1), (None, 2): (None, 2)}
    state.remove(("x", 1))
    assert dict(state.items()) == {(None, 2): (None, 2)}


def test_equal_maps_have_equal_bytes_whatever_their_history() -> None:
    first, _ = broadcast_state()
    for number in range(20):
        first.put((str(number), number), ("value", number))
    stored = first.section()
    second, _ = broadcast_state(stored)
    second.put(("extra", 0), (None, None))
    second.remove(("extra", 0))
    second.put(("3", 3), ("value", 3))
    third, _ = broadcast_state()
    for number in reversed(range(20)):
        third.put((str(number), number), ("value", number))
    assert stored.checksum == second.section().checksum == third.section().checksum


def test_broadcast_values_are_decoded_only_as_they_are_read() -> None:
    state, _ = broadcast_state()
    for number in range(500):
        state.put((str(number), number), ("value", number))
    again, counting = broadcast_state(state.section(), Stage.PROCESS)
    assert again.contains(("7", 7))
    assert counting.decoded == 0
    assert again.get(("7", 7)) == ("value", 7)
    assert counting.decoded == 1


def test_a_map_key_beyond_its_type_is_refused_by_name() -> None:
    state, _ = broadcast_state()
    uses: list[Callable[[Pair], object]] = [lambda key: state.put(key, ("one", 1)), state.get, state.contains]
    for use in uses:
        with pytest.raises(ProcessorError, match=f"int {2**63} does not fit field 'offset' of type bigint") as failure:
            use(("x", 2**63))
        assert failure.value.kind is ErrorKind.VALUE_MISMATCH
    assert list(state.items()) == []


@pytest.mark.parametrize("stage", [Stage.INIT, Stage.PROCESS, Stage.CLOSE])
def test_broadcast_is_written_only_where_all_see_the_same_rows(stage: Stage) -> None:
    state, _ = broadcast_state(stage=stage)
    writes: list[Callable[[], None]] = [lambda: state.put(("x", 1), ("y", 2)), lambda: state.remove(("x", 1))]
    for write in writes:
        with pytest.raises(ProcessorError, match=f"was written in {stage}") as failure:
            write()
        assert failure.value.kind is ErrorKind.STATE_USAGE
        assert "processBroadcast()" in failure.value.hint


@pytest.mark.parametrize("stage", [Stage.INIT, Stage.CLOSE])
def test_states_are_used_only_while_there_are_rows(stage: Stage) -> None:
    lists, broadcast = list_state(stage=stage)[0], broadcast_state(stage=stage)[0]
    for use in (lists.get, lists.clear, broadcast.items, lambda: broadcast.get(("x", 1))):
        with pytest.raises(ProcessorError, match=f"was used in {stage}") as failure:
            use()
        assert failure.value.kind is ErrorKind.STATE_USAGE


# ---- Snapshots ----


def test_a_snapshot_is_read_as_it_was_written() -> None:
    one, other = section([("a", 1), ("ü", -(2**63))]), section([], StateSchema("z", LIST.kind, b"", LIST.value_schema))
    data = encode_snapshot([one, other])
    read = Snapshot(data, "object").sections
    assert list(read) == ["units", "z"]
    assert codec().decode(read["units"].rows) == [("a", 1), ("ü", -(2**63))]
    assert (read["z"].count, read["z"].rows.num_rows) == (0, 0)
    assert encode_snapshot(list(read.values())) == data


@pytest.mark.parametrize("count", [1, 100])
def test_the_sizes_of_a_snapshot_are_read_from_its_index(count: int) -> None:
    """Also if that is longer than what is read at first."""
    states = [StateSchema(f"state {number:03}", "operator-list", b"", bytes(100)) for number in range(count)]
    sections = [StateElements(state, bytes(1000 + place), place, b"") for place, state in enumerate(states)]
    data, read = encode_snapshot(sections), 0

    def read_first(length: int) -> bytes:
        nonlocal read
        read += length
        return data[:length]

    assert section_sizes(read_first, "x") == {state.name: (place, 1000 + place) for place, state in enumerate(states)}
    assert read < 4096 + 200 * count


def test_slices_are_joined_in_order() -> None:
    first, second = section([("a", 1), ("b", 2), ("c", 3)]), section([("d", 4)])
    joined = join_elements(LIST, [Elements(first, 1, 2), Elements.all_of(second)])
    assert codec().decode(joined.rows) == [("b", 2), ("c", 3), ("d", 4)]
    assert join_elements(LIST, []).count == 0


def test_every_flipped_byte_and_every_truncation_is_noticed() -> None:
    data = encode_snapshot([section([("a", 1), ("b", 2)])])
    expected = [("a", 1), ("b", 2)]

    def read(damaged: bytes) -> list[tuple[Any, ...]] | None:
        try:
            return codec().decode(Snapshot(damaged, "object").sections["units"].rows)
        except CorruptionError as error:
            assert "object" in str(error)
            return None

    padding = 0
    for index in range(len(data)):
        found = read(data[:index] + bytes([data[index] ^ 0x40]) + data[index + 1 :])
        assert found in (None, expected)
        padding += found is not None
        shorter = read(data[:index])
        assert shorter in (None, expected)
    assert padding < 2 * 64, "only what lies between the parts may change unnoticed; the log's checksum covers it"


# ---- Checkpoints ----


def checkpoints(engine: OperatorEngine) -> list[Checkpoint]:
    """The operator's checkpoints in all entries of the log."""
    entries = [entry for entry in engine.read_log() if isinstance(entry, QueryCheckpoint)]
    return [Checkpoint.of(entry, section) for entry in entries for section in entry.sections]


def lists(engine: OperatorEngine, batch: int) -> list[dict[str, list[str]]]:
    """Run a batch that only reads."""
    outputs = [engine.run_subtask(batch, subtask, [["read"]]) for subtask in range(engine.parallelism)]
    return [output[1][0] for output in outputs]


def add(engine: OperatorEngine, batch: int, *parts: Sequence[str], name: str = "items") -> None:
    for subtask, elements in enumerate(parts):
        engine.run_subtask(batch, subtask, [["addAll", name, *elements]])


@pytest.mark.parametrize("file_merging", ["across", "within"])
@pytest.mark.parametrize("inline", [0, 1 << 20])
def test_a_snapshot_that_has_not_changed_is_not_written_again(tmp_path: Path, file_merging: str, inline: int) -> None:
    engine = OperatorEngine(tmp_path, file_merging=file_merging, inline_budget_bytes=inline)
    engine.start(2, 0)
    add(engine, 0, ["a"], ["b"])
    before = checkpoints(engine)[-1].segments
    for batch in (1, 2):
        lists(engine, batch)
    engine.run_subtask(3, 0, [["update", "items", "a"]])
    engine.run_subtask(3, 1, [["add", "items", "c"]])
    after = [entry.segments for entry in checkpoints(engine)]
    places = [[(it.name, it.offset, it.length, it.checksum) for it in segments] for segments in (before, *after[1:])]
    assert places[0] == places[1] == places[2]
    assert places[3][0] == places[0][0], "written, but with the same elements"
    assert places[3][1] != places[0][1]
    assert [segment.attempt for segment in after[1]] != [segment.attempt for segment in before]
    engine.start(2, 4, keep_local=False)
    assert [held["items"] for held in lists(engine, 4)] == [["a"], ["b", "c"]]


def test_entries_count_the_elements(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path)
    engine.start(2, 0)
    add(engine, 0, ["a", "b"], [])
    add(engine, 1, [], ["c"], name="units")
    entry = checkpoints(engine)[-1]
    assert [state.name for state in entry.states] == ["items", "more", "rules", "units"]
    assert entry.element_counts == [[2, 0, 0, 0], [0, 0, 0, 1]]
    assert entry.key_schema == b""


def test_rescaled_again_and_again(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path)
    engine.start(2, 0)
    add(engine, 0, ["a", "b"], ["c", "d"])
    found = []
    for batch, parallelism in enumerate((1, 4, 3, 3), 1):
        engine.start(parallelism, batch)
        found.append([held["items"] for held in lists(engine, batch)])
    assert found == [
        [["a", "b", "c", "d"]],
        [["a"], ["b"], ["c"], ["d"]],
        [["a", "b"], ["c"], ["d"]],
        [["a", "b"], ["c"], ["d"]],
    ]


def test_a_repeated_batch_starts_from_the_snapshot_before_it(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path)
    engine.start(1, 0)
    add(engine, 0, ["a"])
    engine.observer.arm(Step.DURABLE)
    with pytest.raises(Crash):
        engine.run_subtask(1, 0, [["add", "items", "lost"]])
    engine.start(2, 1)
    assert [held["items"] for held in lists(engine, 1)] == [["a"], []]


def test_only_the_first_batch_of_a_run_is_told_that_its_state_was_restored(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path)
    told = []
    for batch, parallelism in ((0, 2), (2, 2), (4, 1)):
        engine.start(parallelism, batch)
        for one in (batch, batch + 1):
            told.append([engine.run_subtask(one, subtask)[0] for subtask in range(parallelism)])
    later = [[0, 2, False, False], [1, 2, False, False]]
    assert told[:2] == [later, later]
    assert told[2:4] == [[[0, 2, True, False], [1, 2, True, False]], later]
    assert told[4:] == [[[0, 1, True, True]], [[0, 1, False, False]]]


def test_union_is_for_everyone_once_per_run(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path)
    engine.start(2, 0)
    add(engine, 0, ["a"], ["b"], name="units")
    assert [held["units"] for held in lists(engine, 1)] == [["a"], ["b"]]
    engine.start(2, 2)
    assert [held["units"] for held in lists(engine, 2)] == [["a", "b"], ["a", "b"]]


def test_large_snapshots_are_uploaded_and_orphans_removed(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path, inline_budget_bytes=0)
    engine.clock.advance(10**10)
    engine.start(1, 0)
    add(engine, 0, ["a"])
    lists(engine, 1)
    store = LocalStore(engine.location)
    [upload] = [info.name for info in store.list(f"{engine.identity}/changes/")]
    assert upload.startswith(f"{engine.identity}/changes/1/0/0-")
    store.put(f"{engine.identity}/changes/1/0/9-orphan.snapshot", b"left behind")
    engine.start(1, 2, keep_local=False)
    assert [info.name for info in store.list(f"{engine.identity}/changes/")] == [upload], "checkpoint 1 still needs it"
    assert lists(engine, 2)[0]["items"] == ["a"]


def test_replaced_upload_is_removed_but_never_an_earlier_checkpoints(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path, inline_budget_bytes=0)
    engine.start(1, 0)
    add(engine, 0, ["a"])
    engine.run_subtask(1, 0, [["add", "items", "b"]])
    engine.run_subtask(1, 0, [["read"]])
    engine.run_subtask(1, 0, [["add", "items", "c"]])
    engine.run_subtask(2, 0, [["read"]])
    names = [info.name for info in LocalStore(engine.location).list(f"{engine.identity}/changes/")]
    first, added, unchanged, last, _ = (entry.segments[0].name for entry in checkpoints(engine))
    assert first == unchanged
    assert added not in names
    assert sorted(names) == sorted([first, last])
    assert lists(engine, 2)[0]["items"] == ["a", "c"]


def test_a_damaged_local_copy_is_read_again_and_a_damaged_snapshot_is_an_error(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path, inline_budget_bytes=0)
    engine.start(1, 0)
    add(engine, 0, ["a"])
    copies = list(tmp_path.glob(f"host-0/{engine.identity}/1/0/*.snapshot"))
    assert copies
    for path in copies:
        path.write_bytes(b"x" * 500)
    assert lists(engine, 1)[0]["items"] == ["a"]
    [segment] = checkpoints(engine)[-1].segments
    stored = Path(engine.location) / segment.name
    stored.write_bytes(stored.read_bytes()[:-1] + b"x")
    engine.start(1, 2, keep_local=False)
    with pytest.raises(CorruptionError, match=segment.name):
        lists(engine, 2)


@pytest.mark.parametrize("inline_budget_bytes", [0, 8 << 20])
def test_a_snapshot_is_fetched_once_on_a_new_host(
    tmp_path: Path, inline_budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the batches after that do not change it."""
    engine = OperatorEngine(tmp_path, inline_budget_bytes=inline_budget_bytes)
    engine.start(1, 0)
    add(engine, 0, ["a"])
    engine.start(1, 1, keep_local=False)
    fetched: list[str] = []

    def counted(store: Store, segment: SegmentRef) -> bytes:
        fetched.append(segment.name)
        return read_segment(store, segment)

    monkeypatch.setattr(unkeyed_task, "read_segment", counted)
    for batch in (1, 2, 3):
        assert lists(engine, batch)[0]["items"] == ["a"]
    assert len(fetched) == 1


def test_a_large_state_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert redistribution.LARGE_SNAPSHOT_BYTES == 16 << 20
    monkeypatch.setattr("statelog.coordinator.redistribution.LARGE_SNAPSHOT_BYTES", 5_000)
    engine = OperatorEngine(tmp_path)
    engine.start(1, 0)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]  # only for the test
    monkeypatch.setattr(logging.getLogger("statelog.coordinator.redistribution"), "handlers", [handler])
    add(engine, 0, ["a"])
    assert warnings == []
    add(engine, 1, ["a" * 6_000])
    assert "operator state of subtask 0 has 0.0 MB" in warnings[0]


# ---- What is refused ----


def changed(name: str, **changes: Any) -> list[OperatorStateBinding]:
    """The states, one of them declared in another way."""
    made = []
    for binding in bindings():
        old = binding.descriptor
        if old.name == name:
            fields = {"mode": old.mode, "value_schema": old.value_schema, "entry_schema": old.entry_schema, **changes}
            binding = OperatorStateBinding(OperatorStateDescriptor(name, **fields), binding.codec, binding.entry_codec)
        made.append(binding)
    return made


@pytest.mark.parametrize(
    ("states", "words"),
    [
        (changed("items", mode=OperatorStateMode.UNION), "holds list state 'items'.*declares union state 'items'"),
        (changed("units", mode=OperatorStateMode.LIST), "holds union state 'units'.*declares list state 'units'"),
        (changed("items", value_schema=PAIR), "'items'.*declares list state 'items' .name string, offset int64"),
        (changed("rules", entry_schema=PAIR), "'rules'.*declares broadcast state 'rules'"),
    ],
    ids=["to union", "to list", "elements", "keys"],
)
def test_a_state_that_has_changed_is_refused_before_the_first_batch(
    tmp_path: Path, states: list[OperatorStateBinding], words: str
) -> None:
    engine = OperatorEngine(tmp_path)
    engine.start(1, 0)
    add(engine, 0, ["a"])
    engine.states = states
    with pytest.raises(ConfigurationError, match=words) as failure:
        engine.start(1, 1)
    assert failure.value.kind is ErrorKind.OTHER_SCHEMA
    engine.states = bindings()
    engine.start(1, 1)
    assert lists(engine, 1)[0]["items"] == ["a"]


def test_keyed_and_operator_state_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path)
    engine.start(1, 0)
    add(engine, 0, ["a"])
    engine.key_schema = encode_schema(PAIR)
    with pytest.raises(ConfigurationError, match="holds operator state, but the operator is one with keys") as failure:
        engine.start(1, 1)
    assert failure.value.kind is ErrorKind.OTHER_SCHEMA


def test_states_can_be_added_and_forgotten_ones_are_kept(tmp_path: Path) -> None:
    class Fewer(Commands):
        def init(self, handle: Any) -> None:
            self.lists = {"more": handle.getListState("more", None)}

        def process(self, rows: Iterator[Any], context: OperatorContext) -> Iterator[Any]:
            self.lists["more"].add(("new",))
            return iter([])

    engine = OperatorEngine(tmp_path)
    engine.start(2, 0)
    add(engine, 0, ["a"], ["b"])
    add(engine, 1, ["u"], ["v"], name="units")
    engine.states = [binding for binding in bindings() if binding.descriptor.name == "more"]
    engine.processor = Fewer
    for batch, parallelism in ((2, 2), (3, 1), (4, 3)):
        engine.start(parallelism, batch)
        for subtask in range(parallelism):
            engine.run_subtask(batch, subtask)
    engine.states, engine.processor = bindings(), Commands
    engine.start(3, 5)
    held = lists(engine, 5)
    assert sorted(element for one in held for element in one["items"]) == ["a", "b"]
    assert sorted(held[0]["units"]) == ["u", "v"], "every element once, however often the union was passed on"
    assert [len(one["more"]) for one in held] == [2, 2, 2]


class Diverging(Commands):
    """Lets each subtask write what it likes."""

    def processBroadcast(self, rows: Iterator[Any], context: OperatorContext) -> None:
        self.rules.put(("who",), (context.subtaskIndex if any(rows) else 0,))


def test_copies_of_a_broadcast_state_that_differ_are_refused(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path, processor=Diverging)
    engine.start(3, 0)
    for subtask in range(3):
        engine.run_subtask(0, subtask)
    rows: list[Command] = [["any"]]
    engine.run_subtask(1, 2, broadcast=rows)
    engine.run_subtask(1, 0, broadcast=rows)
    for _ in range(2):
        with pytest.raises(ProcessorError, match="'rules' differs between subtasks 0 and 1") as failure:
            engine.run_subtask(1, 1, broadcast=rows)
        assert failure.value.kind is ErrorKind.COPIES_DIFFER
    assert [entry.batch for entry in checkpoints(engine)] == [0]
    engine.processor = Commands
    engine.start(2, 1)
    assert [engine.run_subtask(1, subtask, [["read"]])[1][1] for subtask in range(2)] == [[["who", 0]]] * 2


def test_a_new_broadcast_state_is_the_same_everywhere_while_it_is_empty(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path, states=[one for one in bindings() if one.descriptor.name != "rules"])

    class WithoutRules(Commands):
        def init(self, handle: Any) -> None:
            self.lists = {name: handle.getListState(name, None) for name in ("items", "more")}

        def process(self, rows: Iterator[Any], context: OperatorContext) -> Iterator[Any]:
            return iter([])

    engine.processor = WithoutRules
    engine.start(2, 0)
    for subtask in range(2):
        engine.run_subtask(0, subtask)
    engine.states, engine.processor = bindings(), Commands
    engine.start(2, 1)
    engine.run_subtask(1, 0, [["add", "items", "a"]])
    engine.run_subtask(1, 1)
    assert [entry.batch for entry in checkpoints(engine)] == [0, 1]


def _raise(*_: Any) -> Any:
    raise KeyError("oops")


@pytest.mark.parametrize("method", ["init", "processBroadcast", "process", "close"])
def test_an_error_in_the_users_code_says_where(tmp_path: Path, method: str) -> None:
    engine = OperatorEngine(tmp_path, processor=type("Broken", (Commands,), {method: _raise}))
    engine.start(2, 0)
    with pytest.raises(ProcessorError) as failure:
        engine.run_subtask(0, 1, [["read"]])
    assert f"operator 'op': {method}() failed at subtask 1: KeyError: 'oops'" in str(failure.value)


def test_a_state_that_was_not_declared_on_the_driver_is_refused(tmp_path: Path) -> None:
    class Fickle(Commands):
        def init(self, handle: Any) -> None:
            handle.getListState("units", None)

    engine = OperatorEngine(tmp_path, processor=Fickle)
    engine.start(1, 0)
    with pytest.raises(ProcessorError, match=r"init\(\) failed at subtask 0: init\(\) asks for list state 'units'"):
        engine.run_subtask(0, 0)
