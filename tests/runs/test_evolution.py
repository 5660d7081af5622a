"""State schemas that change: what is allowed, and that old rows read the same in every table, merged or not."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statelog import ConfigurationError, CorruptionError, ErrorKind
from statelog.coordinator.admission import OperatorConfig
from statelog.coordinator.admission import admit as admit_start
from statelog.log.entry import Checkpoint
from statelog.runs.evolution import recorded_schema, require_evolution
from statelog.runs.merge import merge_runs
from statelog.runs.reader import Run
from statelog.runs.schema import Operation, StateDescriptor, StateKind, TimeDomain, change_schema
from statelog.runs.writer import RunWriter, StateChanges, encode_run
from statelog.tables.memory import MemoryTable
from statelog.tables.runs import RunsTable
from statelog.tables.table import StateTable
from tests.contract.table_contract import make_keys
from tests.entries import checkpoint_of, query_of

I8, I16, I32, I64, F32, F64 = pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()
TEXT, BYTES = pa.string(), pa.binary()
WIDER: dict[pa.DataType, list[pa.DataType]] = {
    I8: [I16, I32, I64, F32, F64],
    I16: [I32, I64, F32, F64],
    I32: [I64, F32, F64],
    I64: [F32, F64],
    F32: [F64],
    TEXT: [BYTES],
    BYTES: [TEXT],
    pa.decimal128(5, 2): [pa.decimal128(9, 2)],
    pa.null(): [I32, TEXT, pa.list_(I8)],
    pa.bool_(): [],
    pa.date32(): [],
    F64: [],
    pa.decimal128(9, 2): [],
}
ALLOWED = [(old, new) for old, wider in WIDER.items() for new in wider] + [
    (pa.struct([("a", I32), ("b", TEXT)]), pa.struct([("b", BYTES), ("c", F64)])),
    (pa.list_(I32), pa.list_(F64)),
    (pa.list_(pa.struct([("a", I32)])), pa.list_(pa.struct([("b", I32)]))),
    (pa.map_(TEXT, I32), pa.map_(TEXT, I64)),
    (pa.list_(pa.field("element", I32, False)), pa.list_(pa.field("element", I32))),
]
REFUSED: list[tuple[pa.DataType, pa.DataType, str]] = [
    (I64, I32, "'x'.*is int64 in the location, but the processor declares int32"),
    (F64, F32, "'x'.*double.*float"),
    (F32, I64, "'x'.*float.*int64"),
    (I32, TEXT, "'x'.*int32.*string"),
    (TEXT, pa.timestamp("us", "UTC"), "'x'.*string.*timestamp"),
    (I32, pa.date32(), "'x'.*int32.*date32"),
    (pa.timestamp("us"), pa.timestamp("us", "UTC"), "'x'.*timestamp"),
    (pa.decimal128(9, 2), pa.decimal128(5, 2), "'x'.*9, 2.*5, 2"),
    (pa.decimal128(9, 2), pa.decimal128(12, 3), "'x'.*9, 2.*12, 3"),
    (I32, pa.null(), "'x'.*int32.*null"),
    (I32, pa.struct([("a", I32)]), "'x'.*int32.*struct"),
    (pa.list_(I32), pa.list_(TEXT), "'x.item'.*int32.*string"),
    (pa.list_(I32), I32, "'x'.*list"),
    (pa.struct([("a", pa.list_(I64))]), pa.struct([("a", pa.list_(I32))]), "'x.a.item'.*int64.*int32"),
    (pa.map_(TEXT, I64), pa.map_(TEXT, I32), "'x.value'.*int64.*int32"),
    (pa.map_(I32, I64), pa.map_(I64, I64), "'x'.*map"),
    (pa.list_(I32), pa.list_(pa.field("element", I32, False)), "'x.element'.*list<element: int32 not null>"),
]


def state_of(schema: pa.Schema | dict[str, pa.DataType], kind: StateKind = StateKind.VALUE) -> StateDescriptor:
    fields = schema if isinstance(schema, pa.Schema) else pa.schema(list(schema.items()))
    entry = pa.schema([("k", TEXT)]) if kind is StateKind.MAP else None
    return StateDescriptor("seen", kind, fields, entry)


# ---- What is allowed ----


@pytest.mark.parametrize(("old", "new"), ALLOWED, ids=str)
def test_allowed(old: pa.DataType, new: pa.DataType) -> None:
    require_evolution(state_of({"x": old}), state_of({"x": new}), "here")


@pytest.mark.parametrize(("old", "new", "message"), REFUSED, ids=str)
def test_refused(old: pa.DataType, new: pa.DataType, message: str) -> None:
    stored, declared = state_of({"a": I32, "x": old}), state_of({"x": new, "b": TEXT})
    with pytest.raises(ConfigurationError, match=f"here: field {message}") as caught:
        require_evolution(stored, declared, "here")
    assert caught.value.kind is ErrorKind.OTHER_SCHEMA
    assert "of value state 'seen'" in str(caught.value)
    assert "declare a field with another name" in str(caught.value)


def test_a_run_with_other_fields_is_damaged() -> None:
    # The start was refused, so such a run cannot belong to the state.
    with pytest.raises(CorruptionError, match="holds value state 'seen'"):
        config_of(state_of({"x": I64}), {0: {"x": 1}}).section(state_of({"x": I32}))


@pytest.mark.parametrize(
    "declared",
    [
        StateDescriptor("seen", StateKind.LIST, pa.schema([("x", I32)])),
        StateDescriptor("seen", StateKind.MAP, pa.schema([("x", I32)]), pa.schema([("k", TEXT)])),
    ],
    ids=str,
)
def test_other_kinds_are_refused(declared: StateDescriptor) -> None:
    with pytest.raises(ConfigurationError, match="the location holds value state 'seen'.*the processor declares"):
        require_evolution(state_of({"x": I32}), declared, "here")


def test_other_map_keys_are_refused() -> None:
    stored, declared = (
        StateDescriptor("m", StateKind.MAP, pa.schema([("x", I32)]), pa.schema([("k", kind)])) for kind in (I32, I64)
    )
    with pytest.raises(ConfigurationError, match=r"\(k int32\) to .*\(k int64\) to"):
        require_evolution(stored, declared, "here")


def test_fields_of_one_name_are_refused_once_something_changes() -> None:
    doubled = state_of(pa.schema([("x", I32), ("x", I32)]))
    require_evolution(doubled, doubled, "here")
    with pytest.raises(ConfigurationError, match="the row of value state 'seen'"):
        require_evolution(doubled, state_of({"x": I32}), "here")


# ---- Over several starts ----


def checkpoint(batch: int, state: StateDescriptor) -> Checkpoint:
    return checkpoint_of(
        batch, query_id="q", key_schema=b"key", states=[state.to_stored()], begins=batch == 0, identity="op-1"
    )


def admit(history: Sequence[StateDescriptor], declared: StateDescriptor, first_batch: int) -> None:
    run = OperatorConfig("q", "r2", "op", 1, b"key", [declared.to_stored()])
    entries = [checkpoint(batch, state) for batch, state in enumerate(history)]
    admit_start(query_of(entries), [run], first_batch, None, "here")


def test_a_start_is_compared_with_the_checkpoint_that_it_builds_on() -> None:
    narrow, wide = state_of({"n": I32}), state_of({"n": I64})
    admit([narrow, wide], wide, 2)
    admit([narrow, wide], narrow, 1)
    with pytest.raises(ConfigurationError, match="field 'n'.*int64.*int32"):
        admit([narrow, wide], narrow, 2)


def test_a_removed_field_is_remembered() -> None:
    nested = pa.struct([("a", I64), ("b", TEXT)])
    recorded = state_of({"n": I64, "s": nested}).to_stored()
    for declared in ({"s": pa.struct([("b", TEXT)])}, {"m": I8, "s": pa.struct([("c", I8)])}):
        recorded = recorded_schema(recorded, state_of(declared).to_stored())
    known = StateDescriptor.from_stored(recorded)
    expected = pa.struct([("c", I8), ("b", TEXT), ("a", I64)])
    assert known.value_schema == pa.schema([("m", I8), ("s", expected), ("n", I64)])
    require_evolution(known, state_of({"n": I64}), "here")
    with pytest.raises(ConfigurationError, match=r"field 's\.a'.*int64.*string"):
        require_evolution(known, state_of({"s": pa.struct([("a", TEXT)])}), "here")


# ---- Reading rows of earlier versions ----


def config_of(state: StateDescriptor, rows: dict[int, dict[str, Any] | None], block_rows: int = 2) -> Run:
    """A run that puts values, or removes them, by key."""
    changes = [
        {
            "hash": number,
            "key": b"%d" % number,
            "entry": b"" if state.entry_schema is None else b"e",
            "op": Operation.DELETE if values is None else Operation.PUT,
        }
        | ({} if values is None else {f"v{i}": values[name] for i, name in enumerate(state.value_schema.names)})
        for number, values in sorted(rows.items())
    ]
    batch = pa.RecordBatch.from_pylist(changes, schema=change_schema(state))
    return Run(pa.py_buffer(encode_run([StateChanges(state, [batch])], compression=None, block_rows=block_rows)), "run")


def merged(runs: Sequence[Run], *, is_bottom: bool) -> Run:
    sink = pa.BufferOutputStream()
    merge_runs(runs, RunWriter(sink, compression=None, block_rows=3), is_bottom=is_bottom, slice_rows=2)
    return Run(sink.getvalue(), "merged")


KEYS = range(5)


def contents(table: StateTable, state: StateDescriptor) -> dict[int, dict[str, Any]]:
    keys = make_keys(*((number, b"%d" % number) for number in KEYS))
    found = table.get_many(state, keys) if state.kind is StateKind.VALUE else table.entries(state, keys)
    assert found.values.schema == state.value_schema
    return dict(zip(found.positions.tolist(), found.values.to_pylist(), strict=True))


def converted(value: Any, old: pa.DataType, new: pa.DataType) -> Any:
    """What a value must be when it is read with another type, by plain Python."""
    if value is None or old == new:
        return value
    if pa.types.is_struct(new):
        held = {field.name: field.type for field in old.fields}
        return {
            field.name: converted(value[field.name], held[field.name], field.type) if field.name in held else None
            for field in new.fields
        }
    if pa.types.is_list(new):
        return [converted(element, old.value_type, new.value_type) for element in value]
    if pa.types.is_map(new):
        return [(key, converted(item, old.item_type, new.item_type)) for key, item in value]
    if new == F32:
        return float(np.float32(float(value)))
    if new == F64:
        return float(value)
    return value.encode() if new == BYTES else value.decode() if new == TEXT else value


ASCII = st.text(st.characters(max_codepoint=127), max_size=2)
VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    I8: st.integers(-(2**7), 2**7 - 1),
    I16: st.integers(-(2**15), 2**15 - 1),
    I32: st.integers(-(2**31), 2**31 - 1),
    I64: st.integers(-(2**63), 2**63 - 1),
    F32: st.floats(width=32, allow_nan=False),
    F64: st.floats(allow_nan=False),
    TEXT: ASCII,
    BYTES: ASCII.map(str.encode),
    pa.decimal128(5, 2): st.integers(-99999, 99999).map(lambda n: Decimal(n) / 100),
    pa.decimal128(9, 2): st.integers(-999999999, 999999999).map(lambda n: Decimal(n) / 100),
    pa.null(): st.none(),
    pa.bool_(): st.booleans(),
    pa.date32(): st.dates(datetime.date(1900, 1, 1)),
}


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_struct(kind):
        return st.none() | st.fixed_dictionaries({field.name: values_of(field.type) for field in kind.fields})
    if pa.types.is_list(kind):
        return st.none() | st.lists(values_of(kind.value_type), max_size=2)
    if pa.types.is_map(kind):
        pairs = st.tuples(st.sampled_from("ab"), values_of(kind.item_type))
        return st.none() | st.lists(pairs, max_size=2, unique_by=lambda pair: pair[0])
    return st.none() | VALUES[kind]


def nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    return st.one_of(
        inner.map(pa.list_),
        inner.map(lambda kind: pa.map_(TEXT, kind)),
        st.lists(inner, min_size=1, max_size=3).map(lambda kinds: pa.struct(list(zip("abc", kinds, strict=False)))),
    )


KINDS = st.recursive(st.sampled_from(list(WIDER)), nested, max_leaves=3)


@dataclass
class Versions:
    """Draws schemas that one after the other may declare a state."""

    data: st.DataObject
    added: int = 0

    def next_of(self, kind: pa.DataType) -> pa.DataType:
        """A type that values of a recorded type may be read with."""
        if pa.types.is_struct(kind):
            fields = [(field.name, self.next_of(field.type)) for field in kind.fields if self.data.draw(st.booleans())]
            if not fields or self.data.draw(st.booleans()):
                self.added += 1
                fields.append((f"n{self.added}", self.data.draw(KINDS)))
            return pa.struct(self.data.draw(st.permutations(fields)))
        if pa.types.is_list(kind):
            return pa.list_(self.next_of(kind.value_type))
        if pa.types.is_map(kind):
            return pa.map_(TEXT, self.next_of(kind.item_type))
        return self.data.draw(st.sampled_from([kind, *WIDER[kind]]))


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from([StateKind.VALUE, StateKind.MAP]))
def test_rows_of_every_version_are_read_with_the_last(data: st.DataObject, kind: StateKind) -> None:
    versions = Versions(data)
    declared = state_of(pa.schema(versions.next_of(pa.struct([])).fields), kind)
    recorded = declared.to_stored()
    expected: dict[int, tuple[StateDescriptor, dict[str, Any]]] = {}
    runs: list[Run] = []
    for number in range(data.draw(st.integers(1, 4))):
        if number:
            known = StateDescriptor.from_stored(recorded)
            declared = state_of(pa.schema(versions.next_of(pa.struct(known.value_schema)).fields), kind)
            require_evolution(known, declared, "here")
            recorded = recorded_schema(recorded, declared.to_stored())
        row = st.fixed_dictionaries({field.name: values_of(field.type) for field in declared.value_schema})
        rows = data.draw(st.dictionaries(st.sampled_from(KEYS), st.none() | row, max_size=5))
        runs.append(config_of(declared, rows))
        for key, values in rows.items():
            expected.pop(key, None)
            if values is not None:
                expected[key] = (declared, values)
    last = pa.struct(declared.value_schema)
    answer = {
        key: converted(values, pa.struct(written.value_schema), last)
        for key, (written, values) in sorted(expected.items())
    }
    memory = MemoryTable()
    memory.apply(runs)
    assert contents(memory, declared) == answer
    assert contents(RunsTable(runs), declared) == answer
    while len(runs) > 1:
        first = data.draw(st.integers(0, len(runs) - 2))
        end = data.draw(st.integers(first + 2, len(runs)))
        runs[first:end] = [merged(runs[first:end], is_bottom=first == 0)]
        assert contents(RunsTable(runs), declared) == answer


def test_a_field_that_comes_back_has_its_old_values_merged_or_not() -> None:
    both, one = state_of({"a": I32, "b": TEXT}), state_of({"a": I32})
    runs = [config_of(both, {0: {"a": 0, "b": "old"}, 1: {"a": 1, "b": "gone"}}), config_of(one, {1: {"a": 2}})]
    answer = {0: {"a": 0, "b": "old"}, 1: {"a": 2, "b": None}}
    assert contents(RunsTable(runs), both) == answer
    assert contents(RunsTable([merged(runs, is_bottom=True)]), both) == answer


def test_integers_and_floats_of_one_field_are_merged_without_loss() -> None:
    number = 2**24 + 1
    versions = [state_of({"n": kind}) for kind in (I32, F32, F64)]
    runs = [config_of(versions[0], {0: {"n": number}}), config_of(versions[1], {1: {"n": 0.5}})]
    table = RunsTable([merged(runs, is_bottom=True)])
    assert contents(table, versions[1]) == {0: {"n": float(number - 1)}, 1: {"n": 0.5}}
    assert contents(table, versions[2]) == {0: {"n": float(number)}, 1: {"n": 0.5}}


def test_bytes_that_are_no_text_are_an_error_and_stay_what_they_are() -> None:
    raw, text = state_of({"x": BYTES}), state_of({"x": TEXT})
    runs = [config_of(raw, {0: {"x": b"\xff"}}), config_of(text, {1: {"x": "ok"}})]
    for table in (RunsTable(runs), RunsTable([merged(runs, is_bottom=True)])):
        with pytest.raises(ConfigurationError, match="field 'x' of value state 'seen'.*not of type string"):
            contents(table, text)
        assert contents(table, raw) == {0: {"x": b"\xff"}, 1: {"x": b"ok"}}


def test_a_merge_has_the_newest_schema_and_expiry() -> None:
    older = state_of({"n": I32})
    newer = replace(state_of({"n": I64}), expires_by=TimeDomain.EVENT)
    [section] = merged(
        [config_of(older, {0: {"n": 1}}), config_of(newer, {1: {"n": 2}})], is_bottom=True
    ).sections.values()
    assert (section.state.to_stored(), section.rows) == (newer.to_stored(), 2)
