"""State handles: reading one's own writes, converting values, and what is logged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import ArrayType, LongType, StructType

from statelog import ErrorKind, ProcessorError
from statelog.convert.types import row_codec
from statelog.operators.keyed.changes import ChangeBuffer, ListPosition
from statelog.operators.keyed.collections import ListState, MapState
from statelog.operators.keyed.cursor import KeyCursor
from statelog.operators.keyed.values import ValueState
from statelog.runs.byte_slices import BUDGET, Budget
from statelog.runs.reader import Run
from statelog.runs.schema import Operation, StateDescriptor, StateKind
from statelog.runs.times import Moment
from statelog.runs.writer import LOCAL_BLOCK_ROWS, encode_run
from statelog.tables.runs import RunsTable
from statelog.tables.table import StateTable
from tests.contract.table_contract import make_keys

NUMBERS = row_codec(StructType().add("n", "integer"), "state 'numbers'")
TEXTS = row_codec(StructType().add("t", "string"), "map key of state 'numbers'")
LISTS = row_codec(StructType().add("l", ArrayType(LongType())), "state 'lists'")
FLOATS = row_codec(StructType().add("f", "double"), "state 'floats'")


class Window:
    """Handles of one batch of the keys a, b and c, over the changes of earlier windows."""

    def __init__(self, table: StateTable | None = None, batch: int = 0, budget: Budget = BUDGET) -> None:
        self.table = table or RunsTable()
        self.cursor = KeyCursor(
            self.table, ListPosition(1, batch), make_keys((1, b"a"), (2, b"b"), (2, b"c")), Moment(0, 0), budget=budget
        )
        self.value = ValueState(self.cursor, StateDescriptor("value", StateKind.VALUE, NUMBERS.schema), NUMBERS)
        self.list = ListState(self.cursor, StateDescriptor("list", StateKind.LIST, NUMBERS.schema), NUMBERS)
        self.map = MapState(
            self.cursor,
            StateDescriptor("map", StateKind.MAP, NUMBERS.schema, TEXTS.schema),
            NUMBERS,
            TEXTS,
            lambda row: row,
        )
        for state in (self.value, self.list, self.map):
            state.open()
        self.cursor.position = 0

    def flush(self) -> list[tuple[str, bytes, bytes, int, Any]]:
        changes = ChangeBuffer()
        for state in (self.value, self.list, self.map):
            state.flush(changes)
        data = encode_run(changes.take(), compression=None, block_rows=LOCAL_BLOCK_ROWS)
        self.run = Run(pa.py_buffer(data), "run")
        return [
            (name, row["key"], row["entry"], row["op"], row["v0"])
            for name, section in self.run.sections.items()
            for block in section.blocks
            for row in block.load().to_pylist()
        ]

    def next(self, budget: Budget = BUDGET) -> Window:
        self.flush()
        self.table.apply([self.run])
        return Window(self.table, self.cursor.list_position.batch + 1, budget)


def test_reads_log_nothing() -> None:
    window = Window()
    assert window.value.get() is None
    assert not window.value.exists()
    assert list(window.list.get()) == []
    assert window.map.getValue(("x",)) is None
    assert list(window.map.keys()) == []
    assert window.flush() == []


def test_only_the_last_of_several_updates_is_logged() -> None:
    window = Window()
    for number in range(5):
        window.value.update((number,))
        window.map.updateValue(("x",), (number,))
    [logged_map, logged_value] = window.flush()
    assert logged_value == ("value", b"a", b"", Operation.PUT, 4)
    assert logged_map[3:] == (Operation.PUT, 4)


def test_appending_logs_only_the_elements_and_reads_nothing() -> None:
    first = Window()
    first.list.appendList([(1,), (2,)])
    second = first.next()
    second.list.appendValue((3,))
    [(_, key, entry, operation, value)] = second.flush()
    assert (key, operation, value) == (b"a", Operation.PUT, 3)
    assert entry == bytes.fromhex("00000001000000000000000100000000")
    third = second.next()
    assert list(third.list.get()) == [(1,), (2,), (3,)]


def test_elements_of_several_keys_stay_with_their_keys() -> None:
    window = Window()
    window.list.appendList([(1,), (2,), (3,)])
    window.cursor.position = 2
    window.list.appendValue((4,))
    assert [(key, value) for _, key, _, _, value in window.flush()] == [(b"a", 1), (b"a", 2), (b"a", 3), (b"c", 4)]


def test_removing_what_is_known_to_be_absent_logs_nothing() -> None:
    window = Window()
    assert not window.value.exists()
    window.value.clear()
    assert not window.list.exists()
    window.list.clear()
    assert not window.map.exists()
    window.map.clear()
    window.map.removeKey(("x",))
    assert window.flush() == []


def test_removing_without_looking_logs_the_removal() -> None:
    window = Window()
    window.value.clear()
    window.list.clear()
    window.map.removeKey(("x",))
    assert [(name, operation) for name, _, _, operation, _ in window.flush()] == [
        ("list", Operation.CLEAR),
        ("map", Operation.DELETE),
        ("value", Operation.DELETE),
    ]


def test_own_writes_are_read_and_other_keys_are_not_touched() -> None:
    window = Window()
    window.value.update((1,))
    window.map.updateValue(("x",), (1,))
    window.cursor.position = 1
    assert window.value.get() is None
    assert not window.map.containsKey(("x",))
    window.cursor.position = 0
    assert window.value.get() == (1,)
    assert list(window.map.iterator()) == [(("x",), (1,))]
    window.map.clear()
    window.map.updateValue(("y",), (2,))
    assert list(window.map.keys()) == [("y",)]
    assert list(window.map.values()) == [(2,)]


def test_iterators_do_not_see_later_changes() -> None:
    window = Window()
    window.list.appendValue((1,))
    window.map.updateValue(("x",), (1,))
    elements, keys = window.list.get(), window.map.keys()
    window.list.appendValue((2,))
    window.map.removeKey(("x",))
    assert list(elements) == [(1,)]
    assert list(keys) == [("x",)]


def test_large_maps_are_read_entry_by_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Window()
    for number in range(50):
        first.map.updateValue((f"{number:02}",), (number,))
    second = first.next(Budget(prefetch_entries=10))
    monkeypatch.setattr(second.table, "entries", lambda *_: pytest.fail("all entries were read"))
    assert second.map.getValue(("07",)) == (7,)
    assert second.map.getValue(("99",)) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, 2), r"takes a tuple of 1 \(n int\), not tuple \(1, 2\) of 2 values"),
        ({"n": 7}, r"takes a tuple of 1 \(n int\), not dict"),
        (None, "not NoneType None"),
        (("x",), "str 'x' does not fit field 'n' of type int: it is not a number"),
        ("x", "str 'x' does not fit field 'n' of type int"),
        ((1.5,), "float 1.5 does not fit field 'n' of type int: it is not a whole number"),
    ],
)
def test_values_that_do_not_fit_are_refused_at_once(value: Any, message: str) -> None:
    with pytest.raises(ProcessorError, match=message) as caught:
        Window().value.update(value)
    assert caught.value.kind is ErrorKind.VALUE_MISMATCH


def test_a_bare_value_is_that_of_the_only_field() -> None:
    window = Window()
    window.value.update(7)  # type: ignore[arg-type]  # Spark takes it, too
    window.map.updateValue("a", 1)  # type: ignore[arg-type]  # as above
    assert window.value.get() == (7,)
    assert window.map.getValue(("a",)) == window.map.getValue("a") == (1,)  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 2**63])
def test_a_map_key_beyond_its_type_is_refused(number: int) -> None:
    state = MapState(
        Window().cursor,
        StateDescriptor("map", StateKind.MAP, NUMBERS.schema, NUMBERS.schema),
        NUMBERS,
        row_codec(StructType().add("n", "integer"), "map key of state 'map'"),
        lambda row: row,
    )
    state.open()
    with pytest.raises(
        ProcessorError, match=f"map key of state 'map': int {number} does not fit field 'n' of type int"
    ):
        state.updateValue((number,), (1,))


def test_overflow_is_refused_with_the_key() -> None:
    changes, keys = ChangeBuffer(), Window().cursor.keys
    changes.describe_key = lambda position: f"<key {position}>"
    state = StateDescriptor("numbers", StateKind.VALUE, NUMBERS.schema)
    with pytest.raises(ProcessorError, match=r"state 'numbers' of key <key 2>: int 2147483648 does not fit"):
        changes.add(state, NUMBERS, keys, [0, 2], None, [(1,), (2**31,)])


def test_numbers_become_the_fields_type() -> None:
    assert FLOATS.normalize((1,)) == (1.0,)
    assert type(FLOATS.normalize((1,))[0]) is float
    assert type(NUMBERS.normalize((np.int64(3),))[0]) is int
    assert NUMBERS.normalize((None,)) == (None,)


def test_mutable_values_are_not_shared_with_the_user() -> None:
    window = Window()
    state = ValueState(window.cursor, StateDescriptor("lists", StateKind.VALUE, LISTS.schema), LISTS)
    state.open()
    given = [1, 2]
    state.update((given,))
    given.append(3)
    got = state.get()
    assert got == ([1, 2],)
    got[0].append(4)
    assert state.get() == ([1, 2],)


def test_empty_lists_are_not_put() -> None:
    window = Window()
    for call in (window.list.put, window.list.appendList):
        with pytest.raises(ProcessorError, match="at least one tuple") as caught:
            call([])
        assert caught.value.kind is ErrorKind.STATE_USAGE


def test_state_is_not_used_outside_of_a_key() -> None:
    window = Window()
    window.cursor.position = -1
    for use in (window.value.get, window.value.clear, window.list.exists, window.map.clear):
        with pytest.raises(ProcessorError, match="while no key was processed"):
            use()
