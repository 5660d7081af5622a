"""States as tables and back, for every type that a key, a map key or a value can have."""

from __future__ import annotations

import datetime
import json
import math
import random
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from statelog import ConfigurationError
from statelog.convert.state_tables import Positions, StateColumns, encode_tables
from statelog.history.query_history import read_history
from statelog.operators.keyed.timers import timer_descriptor
from statelog.queries.load import keyed_loads, load_keyed
from statelog.queries.save import TableFile, file_schema, save_operator
from statelog.reading.rows import one_by_one
from statelog.runs.keys import KeyCodec
from statelog.runs.reader import Run
from statelog.runs.schema import (
    VALUE_COLUMN,
    Operation,
    StateDescriptor,
    StateKind,
    TimeDomain,
    change_schema,
    decode_schema,
)
from statelog.storage import LocalStore
from statelog.testing.harness import parts_of
from tests.joins.joins_model import Event, join_harness, join_plan
from tests.model.engine import Engine, Key

UTC, at = datetime.UTC, datetime.datetime
NULLS = {"a": None, "b": None}
TYPES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.null(), [None, None, None]),
    (pa.bool_(), [True, False, None]),
    (pa.int8(), [-128, 127, None]),
    (pa.int16(), [-(2**15), 0, None]),
    (pa.int32(), [-(2**31), 7, None]),
    (pa.int64(), [-(2**63), 2**63 - 1, None]),
    (pa.float32(), [1.5, math.inf, None]),
    (pa.float64(), [0.1, -math.inf, None]),
    (pa.decimal128(38, 18), [Decimal("-1.5"), Decimal(10**19), None]),
    (pa.string(), ["", "ü\0", None]),
    (pa.binary(), [b"", b"\xff\0", None]),
    (pa.date32(), [datetime.date(1, 1, 1), datetime.date(9999, 12, 31), None]),
    (pa.timestamp("us", tz="UTC"), [at(1969, 1, 1, tzinfo=UTC), at(2262, 5, 1, 1, 2, 3, 4, UTC), None]),
    (pa.timestamp("us"), [at(1, 1, 1), at(2024, 1, 1, 0, 0, 0, 1), None]),
    (pa.duration("us"), [datetime.timedelta(days=-1), datetime.timedelta(microseconds=1), None]),
    (pa.time64("ns"), [datetime.time(0, 0), datetime.time(23, 59, 59, 999999), None]),
    (pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))]), [{"a": 1, "b": ["x", None]}, NULLS, None]),
    (pa.list_(pa.field("element", pa.int32())), [[1, None], [], None]),
    (pa.map_(pa.string(), pa.int64()), [[("a", 1), ("b", None)], [], None]),
]  # fmt: skip
BY_NAME = pytest.mark.parametrize(("kind", "values"), TYPES, ids=[str(kind) for kind, _ in TYPES])


def changes(
    state: StateDescriptor, keys: pa.Array, entries: pa.Array, values: list[pa.Array], expiry: list[int | None]
) -> pa.RecordBatch:
    """Puts with ascending hashes."""
    count = len(keys)
    columns = [
        pa.array(np.arange(count, dtype=np.uint64) << np.uint64(62)),
        keys,
        entries,
        pa.array([Operation.PUT] * count, pa.uint8()),
        pa.array(expiry, pa.int64()),
        *values,
    ]
    if state.kind is StateKind.TIMER:
        columns.append(pa.nulls(count, pa.uint32()))
    return pa.RecordBatch.from_arrays(columns, schema=change_schema(state))


def stored_and_read(rows: pa.RecordBatch) -> pa.Table:
    """What comes back of rows from a file of a savepoint, in another order."""
    with tempfile.TemporaryDirectory() as folder:
        file = TableFile(rows.schema)
        file.write(rows)
        table = pq.read_table(Path(folder) / file.store(LocalStore(folder), "state", 0).name)
    return table.take(list(reversed(range(table.num_rows))))


def changes_of(columns: StateColumns, rows: pa.Table) -> pa.RecordBatch:
    [changes] = columns.to_changes(rows)
    return changes


def test_files_say_what_spark_calls_their_types() -> None:
    """In Parquet's own words an interval is a number and void an int."""
    fields = [pa.field(f"f{place}", kind, nullable=place % 2 == 0) for place, (kind, _) in enumerate(TYPES)]
    nested = [pa.list_(pa.field("element", fields[-4].type, nullable=False)), pa.map_(pa.int8(), pa.struct(fields))]
    schema = file_schema(pa.schema([*fields, pa.field("n", nested[0]), pa.field("m", nested[1])]))
    noted = json.loads(schema.metadata[b"org.apache.spark.sql.parquet.row.metadata"])
    assert StructType.fromJson(noted) == from_arrow_schema(schema)
    assert schema.field("n").type == pa.list_(pa.field("element", pa.time64("us")))


@BY_NAME
def test_keys_of_every_type_come_back(kind: pa.DataType, values: list[Any]) -> None:
    keys = pa.schema([("k", kind), ("n", pa.int32())])
    encoded = KeyCodec(keys).encode_columns([pa.array(values, kind), pa.array([1, 2, 3], pa.int32())])
    state = StateDescriptor("s", StateKind.VALUE, pa.schema([("n", pa.int64())]))
    before = changes(state, encoded, pa.array([b""] * 3, pa.binary()), [pa.array([1, None, 3])], [None] * 3)
    columns = StateColumns(keys, state)
    rows = columns.to_rows(before, Positions())
    assert rows.schema.names == ["hash", "key_k", "key_n", "value_n"]
    assert rows.column("key_k").to_pylist() == pa.array(values, kind).to_pylist()
    assert changes_of(columns, stored_and_read(rows)).equals(before)


@BY_NAME
def test_values_of_every_type_come_back(kind: pa.DataType, values: list[Any]) -> None:
    keys = pa.schema([("value", pa.string())])
    encoded = KeyCodec(keys).encode_columns([pa.array(["a", "b", None])])
    state = StateDescriptor("s", StateKind.VALUE, pa.schema([("hash", kind), ("value", kind)]), None, TimeDomain.EVENT)
    own = pa.array(values, kind)
    before = changes(state, encoded, pa.array([b""] * 3, pa.binary()), [own, own], [5, None, -1])
    columns = StateColumns(keys, state)
    rows = columns.to_rows(before, Positions())
    assert rows.schema.names == ["hash", "key_value", "value_hash", "value_value", "expires_ms"]
    assert changes_of(columns, stored_and_read(rows)).equals(before)


@pytest.mark.parametrize(("kind", "values"), [one for one in TYPES if not pa.types.is_map(one[0])])
def test_map_keys_of_every_type_come_back(kind: pa.DataType, values: list[Any]) -> None:
    keys, entry = pa.schema([("k", pa.string())]), pa.schema([("e", kind)])
    state = StateDescriptor("s", StateKind.MAP, pa.schema([("n", pa.int64())]), entry)
    encoded = KeyCodec(keys).encode_columns([pa.array(["a", "b", "c"])])
    entries = KeyCodec(entry).encode_columns([pa.array(values, kind)])
    before = changes(state, encoded, entries, [pa.array([1, 2, 3])], [None] * 3)
    columns = StateColumns(keys, state)
    assert changes_of(columns, stored_and_read(columns.to_rows(before, Positions()))).equals(before)


def test_elements_keep_their_order_and_come_before_later_ones() -> None:
    keys = pa.schema([("k", pa.string())])
    state = StateDescriptor("s", StateKind.LIST, pa.schema([("n", pa.int64())]))
    table = pa.table({"hash": [3, 3, 3], "key_k": ["b", "a", "a"], "position": [0, 300, 2], "value_n": [1, 2, 3]})
    found = changes_of(StateColumns(keys, state), table)
    assert found.column(5).to_pylist() == [3, 2, 1], "sorted by key and position"
    epoch_1 = b"\0\0\0\1" + bytes(12)
    assert all(entry.as_py() < epoch_1 and len(entry.as_py()) == 16 for entry in found.column(2))
    rows = StateColumns(keys, state).to_rows(found, Positions())
    assert rows.column("position").to_pylist() == [0, 1, 0]


def test_timers_of_any_time_come_back_and_can_be_searched() -> None:
    keys = pa.schema([("k", pa.int64())])
    state = timer_descriptor(TimeDomain.EVENT)
    times = [-(2**63), -1, 0, 2**63 - 1]
    table = pa.table({"hash": [1, 2, 3, 4], "key_k": [1, 2, 3, 4], "time_ms": times})
    data, rows = encode_tables(keys, [(state.to_stored(), table)], "lz4")
    run = Run(pa.py_buffer(data), "run")
    section = run.section(state)
    assert section is not None
    assert rows == 4
    assert section.blocks[0].due(-2, 0).tolist() == [1, 2]
    assert (
        StateColumns(keys, state).to_rows(section.blocks[0].load(), Positions()).column("time_ms").to_pylist() == times
    )


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"hash": [1], "key_k": ["a"], "value_n": [1]}, "'position' is missing"),
        ({"hash": [1], "key_k": ["a"], "position": [None], "value_n": [1]}, "column 'position' holds nulls"),
        ({"hash": [1], "key_k": ["a"], "position": [-1], "value_n": [1]}, "position is not between 0 and"),
        ({"hash": [1], "key_k": ["a"], "position": [2**30], "value_n": [1]}, "position is not between 0 and"),
        ({"hash": [1], "key_k": ["a"], "position": [0], "value_n": ["x"]}, "column 'value_n' has type string"),
        ({"hash": [1] * 2, "key_k": ["a"] * 2, "position": [0] * 2, "value_n": [1, 2]}, r"key \('a',\) has two rows"),
    ],
)
def test_rows_that_are_no_state_are_refused(columns: dict[str, list[Any]], message: str) -> None:
    keys = pa.schema([("k", pa.string())])
    state = StateDescriptor("s", StateKind.LIST, pa.schema([("n", pa.int64())]))
    with pytest.raises(ConfigurationError, match=message):
        changes_of(StateColumns(keys, state), pa.table(columns))


# ---- Tables that are worked on in parts ----


def test_a_table_of_many_parts_becomes_one_run() -> None:
    """In any order of its rows, also where keys share a hash and a key has more than a part."""
    chance = random.Random(7)
    keys = pa.schema([("k", pa.string())])
    columns = StateColumns(keys, StateDescriptor("s", StateKind.LIST, pa.schema([("text", pa.string())])))
    rows = [(key // 2, f"key {key}", at, "x" * chance.randint(0, 400)) for key in range(40) for at in range(key % 7)]
    rows += [(3, "hot", at, f"{at} " * 50) for at in range(200)]

    def table(rows: list[tuple[int, str, int, str]]) -> pa.Table:
        return pa.Table.from_arrays([list(column) for column in zip(*rows, strict=True)], columns.schema.names)

    names = pa.array(sorted({row[1] for row in rows}))
    place = dict(zip(names.to_pylist(), KeyCodec(keys).encode_columns([names]).to_pylist(), strict=True))
    in_run_order = sorted(rows, key=lambda row: (row[0], place[row[1]], row[2]))
    for given in (in_run_order, sorted(rows, key=lambda row: chance.random())):
        parts = [table(given[start : start + 30]) for start in range(0, len(given), 30)]
        found = list(columns.to_changes(pa.concat_tables(parts), max_bytes=3_000))
        assert max(batch.nbytes for batch in found) < 4_000
        positions = Positions()
        again = pa.Table.from_batches([columns.to_rows(batch, positions) for batch in found])
        assert list(zip(*[column.to_pylist() for column in again.columns], strict=True)) == in_run_order

    twice = [(3, "hot", at // 2, "x" * 300) for at in range(1, 9)]
    with pytest.raises(ConfigurationError, match=r"key \('hot',\) has two rows"):
        list(columns.to_changes(table(twice), max_bytes=300))


def test_a_list_larger_than_a_slice_is_saved_and_loaded_whole(tmp_path: Path) -> None:
    def hash_of(key: Key) -> int:
        assert key[0] is not None
        return key[0] % 3

    engine = Engine(tmp_path, hash_of)
    engine.start(1, 0)
    held: dict[int, list[str]] = {number: [] for number in range(6)}
    for batch in range(3):
        commands: list[tuple[tuple[int, str | None], tuple[str, str]]] = []
        for number in range(6):
            for at in range(100 if number == 4 else 7):
                held[number].append(f"{number}.{batch}.{at} " * 5)
                commands.append(((number, None), ("append", held[number][-1])))
        engine.run_commands(batch, 0, commands)
    location, target = str(engine.location), str(tmp_path / "saved")
    history = read_history(LocalStore(location)).of(engine.uid)
    assert history is not None
    latest = history.latest
    assert latest is not None

    saved = save_operator(
        history, latest.batch, "op", location=location, target=target, run_all=one_by_one, slice_bytes=1_000
    )
    [load] = keyed_loads(saved, "op/base")
    stored = load_keyed(saved.key_schema, "lz4", target, target, load, slice_bytes=1_000)

    run = Run(pa.py_buffer(LocalStore(target).read(stored.name)), "loaded", is_stored=True)
    [section] = [section for name, section in run.sections.items() if "list" in section.state.kind]
    assert len(section.blocks) > 10, "the case is one"
    found: dict[int, list[str]] = {}
    for block in section.blocks:
        changed = block.load()
        for key, value in zip(changed.column(1).to_pylist(), changed.column(VALUE_COLUMN).to_pylist(), strict=True):
            found.setdefault(KeyCodec(decode_schema(saved.key_schema)).decode(key)[0], []).append(value)
    assert found == held


def test_arrivals_and_timers_come_back_each_from_a_table_of_its_own(tmp_path: Path) -> None:
    """A join with a timeout has both."""
    target = str(tmp_path / "saved")
    with join_harness(join_plan("left", 0, 10, timeout=1000)) as harness:
        harness.push([Event(0, "a", 100_000, 1).row, Event(0, "b", 200_000, 2).row], 77)
        location = parts_of(harness).query.location
        history = read_history(LocalStore(location)).of(parts_of(harness).query.operator.uid)
        assert history is not None
        latest = history.latest
        assert latest is not None
        saved = save_operator(history, latest.batch, "op", location=location, target=target, run_all=one_by_one)
    found: dict[str, list[int]] = {}
    for load in keyed_loads(saved, "op/base"):
        stored = load_keyed(saved.key_schema, "lz4", target, target, load)
        run = Run(pa.py_buffer(LocalStore(target).read(stored.name)), "loaded", is_stored=True)
        for section in run.sections.values():
            if section.state.kind is StateKind.TIMER:
                times = [
                    time_ms for block in section.blocks for time_ms in block.load().column(VALUE_COLUMN).to_pylist()
                ]
                found.setdefault(section.state.name, []).extend(times)
    assert {name: sorted(times) for name, times in found.items()} == {"$timers": [110, 210], "join.arrivals": [77, 77]}
