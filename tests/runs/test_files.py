"""Runs: what is written is read, damage is recognised, merges keep the newest."""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from statelog import CorruptionError
from statelog.runs.key_groups import HashRange
from statelog.runs.merge import Garbage, choose_merge, merge_runs
from statelog.runs.reader import Run, RunBlock
from statelog.runs.schema import Operation, StateDescriptor, StateKind, TimeDomain, change_schema, stored_name
from statelog.runs.times import Moment
from statelog.runs.writer import RunWriter, StateChanges, encode_run
from statelog.tables.memory import MemoryTable
from tests.contract.table_contract import MAP, VALUE, Change, make_keys, make_run

MIXED = StateDescriptor(
    "mixed", StateKind.VALUE, pa.schema([("n", pa.int64()), ("t", pa.string()), ("l", pa.list_(pa.int32()))])
)


def rows_of(run: Run) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [row for block in section.blocks for row in block.load().to_pylist()]
        for name, section in run.sections.items()
    }


def mixed_batch(count: int) -> pa.RecordBatch:
    rows = [
        {"hash": n // 2, "key": b"%05d" % n, "entry": b"", "op": 0, "v0": n, "v1": None if n % 3 else "x", "v2": [n]}
        for n in range(count)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=change_schema(MIXED))


@pytest.mark.parametrize("compression", ["lz4", "zstd", None])
@pytest.mark.parametrize("block_rows", [1, 3, 1000])
def test_round_trip(compression: str | None, block_rows: int) -> None:
    batch = mixed_batch(11)
    data = encode_run([StateChanges(MIXED, [batch])], compression=compression, block_rows=block_rows)
    run = Run(pa.py_buffer(data), "x")
    assert rows_of(run) == {"mixed": batch.to_pylist()}
    assert run.rows == 11
    bounds = [(block.first_hash, block.last_hash) for block in run.sections["mixed"].blocks]
    assert all(left[1] < right[0] for left, right in itertools.pairwise(bounds)), "a hash is parted"


def test_blocks_are_compressed_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """These take longer to begin, some 50 microseconds, than a small block takes to compress."""
    new_stream, options = pa.ipc.new_stream, []

    def keep(*given: Any, **named: Any) -> Any:
        options.append(named["options"])
        return new_stream(*given, **named)

    monkeypatch.setattr(pa.ipc, "new_stream", keep)
    encode_run([StateChanges(MIXED, [mixed_batch(11)])], compression="lz4", block_rows=4)
    assert [each.use_threads for each in options] == [False] * len(options)
    assert options


@pytest.mark.parametrize("slice_rows", [1, 4, 7, 100])
@pytest.mark.parametrize("within", [None, HashRange(0, 3), HashRange(5, 9), HashRange(100, 200)], ids=str)
def test_one_run_is_copied_block_by_block(
    slice_rows: int, within: HashRange | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = mixed_batch(30)
    run = Run(pa.py_buffer(encode_run([StateChanges(MIXED, [batch])], compression="lz4", block_rows=4)), "x")
    loaded: list[int] = []
    original = RunBlock.load

    def load(block: RunBlock) -> pa.RecordBatch:
        loaded.append(block.first_hash)
        return original(block)

    monkeypatch.setattr(RunBlock, "load", load)
    sink = pa.BufferOutputStream()
    writer = RunWriter(sink, compression=None, block_rows=1000)
    merge_runs([run], writer, is_bottom=False, within=within, slice_rows=slice_rows)
    if slice_rows >= 4:
        assert len(loaded) == len(set(loaded)), "a block was read twice"
    monkeypatch.undo()
    expected = [row for row in batch.to_pylist() if within is None or within.first <= row["hash"] <= within.last]
    assert rows_of(Run(sink.getvalue(), "y")).get("mixed", []) == expected


def test_empty_run() -> None:
    run = Run(pa.py_buffer(encode_run([], compression="lz4", block_rows=10)), "x")
    assert run.rows == 0
    assert run.section(VALUE) is None


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("hash", [0, 1, 0, 1], "its hashes are not in order"),
        ("hash", [1, 1, 0, 0], "its hashes are not in order"),
        ("key", [b"a", None, b"b", b"c"], "a key is null"),
        ("entry", [b"", b"", b"", None], "a key is null"),
        ("op", [0, 1, 2, 9], "it has unknown operations"),
    ],
)
def test_a_block_that_cannot_be_searched_is_damaged(column: str, values: list[Any], message: str) -> None:
    """Its checksum is right, but only another program can have written it."""
    rows = mixed_batch(4)
    place = rows.schema.get_field_index(column)
    rows = rows.set_column(place, rows.schema.field(place), pa.array(values, rows.schema.field(place).type))
    run = Run(pa.py_buffer(encode_run([StateChanges(MIXED, [rows])], compression=None, block_rows=10)), "x")
    with pytest.raises(CorruptionError, match=f"are not rows of its state: {message}"):
        run.verify()


@pytest.mark.parametrize("compression", ["lz4", "zstd", None])
def test_every_flipped_byte_is_recognised(compression: str | None) -> None:
    data = encode_run([StateChanges(MIXED, [mixed_batch(4)])], compression=compression, block_rows=2)
    expected = rows_of(Run(pa.py_buffer(data), "x"))
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x41
        try:
            found = rows_of(Run(pa.py_buffer(bytes(damaged)), "some/file", 100))
        except CorruptionError as error:
            assert "some/file" in str(error)
            assert "offset" in str(error)
        else:
            assert found == expected, f"byte {position} changed the rows"


def test_every_truncation_is_recognised() -> None:
    data = encode_run([StateChanges(MIXED, [mixed_batch(4)])], compression="lz4", block_rows=2)
    for length in range(len(data)):
        with pytest.raises(CorruptionError, match="some/file"):
            Run(pa.py_buffer(data[:length]), "some/file")


@given(st.binary(max_size=200), st.integers(0, 300))
def test_reader_survives_any_bytes(noise: bytes, at: int) -> None:
    data = bytearray(encode_run([StateChanges(MIXED, [mixed_batch(3)])], compression=None, block_rows=2))
    data[at : at + len(noise)] = noise
    with contextlib.suppress(CorruptionError):
        Run(pa.py_buffer(bytes(data)), "x").verify()


def test_other_schema_is_refused() -> None:
    run = make_run(VALUE, [(1, b"a", b"", Operation.PUT, "x")])
    other = StateDescriptor("value", StateKind.VALUE, pa.schema([("text", pa.int64())]))
    with pytest.raises(CorruptionError, match="text string.*where.*text int64"):
        run.section(other)


hashes = st.sampled_from([0, 1, 2**49, 2**63, 2**64 - 1])
keys = st.sampled_from([b"a", b"b", b"c"])


def key_of(key_hash: int, key: bytes) -> bytes:
    """A key has one hash; a hash has three keys."""
    return key_hash.to_bytes(8, "big") + key


value_changes = st.dictionaries(st.tuples(hashes, keys), st.none() | st.text(max_size=2), max_size=8).map(
    lambda held: [
        (h, key_of(h, k), b"", Operation.DELETE if t is None else Operation.PUT, t) for (h, k), t in held.items()
    ]
)
map_changes = st.dictionaries(
    st.tuples(hashes, keys, st.sampled_from([b"", b"\x01", b"\x02"])), st.none() | st.text(max_size=2), max_size=10
).map(
    lambda held: [
        (
            h,
            key_of(h, k),
            e,
            Operation.CLEAR if not e else Operation.DELETE if t is None else Operation.PUT,
            t if e else None,
        )
        for (h, k, e), t in held.items()
    ]
)


def contents(runs: list[Run], state: StateDescriptor) -> str:
    table = MemoryTable()
    table.apply(runs)
    batch = make_keys(*((h, key_of(h, k)) for h in (0, 1, 2**49, 2**63, 2**64 - 1) for k in (b"a", b"b", b"c")))
    found = table.entries(state, batch)
    columns = (found.positions.tolist(), [e.hex() for e in found.entries.to_pylist()], found.values.to_pylist())
    return json.dumps(list(zip(*columns, strict=True)))


@settings(max_examples=150)
@given(
    state=st.sampled_from([VALUE, MAP]),
    data=st.data(),
    slice_rows=st.sampled_from([1, 4, 1000]),
    is_bottom=st.booleans(),
)
def test_merging_any_adjacent_runs_changes_nothing(
    state: StateDescriptor, data: st.DataObject, slice_rows: int, is_bottom: bool
) -> None:
    changes = map_changes if state is MAP else value_changes
    runs = [make_run(state, data.draw(changes), block_rows=2) for _ in range(data.draw(st.integers(1, 5)))]
    first = 0 if is_bottom else data.draw(st.integers(0, len(runs) - 1))
    last = data.draw(st.integers(first + 1, len(runs)))
    merged = merged_run(runs[first:last], is_bottom=is_bottom, slice_rows=slice_rows)
    assert contents([*runs[:first], merged, *runs[last:]], state) == contents(runs, state)
    if is_bottom:
        operations = {row["op"] for rows in rows_of(merged).values() for row in rows}
        assert operations <= {Operation.PUT}, "removals are kept at the bottom"
    for section in merged.sections.values():
        order = [
            (row["hash"], row["key"], row["entry"]) for block in section.blocks for row in block.load().to_pylist()
        ]
        assert order == sorted(set(order)), "not in run order"


def merged_run(
    runs: list[Run],
    *,
    is_bottom: bool,
    slice_rows: int = 1000,
    within: HashRange | None = None,
    garbage: Garbage | None = None,
) -> Run:
    sink = pa.BufferOutputStream()
    writer = RunWriter(sink, compression=None, block_rows=3)
    merge_runs(runs, writer, is_bottom=is_bottom, slice_rows=slice_rows, within=within, garbage=garbage)
    return Run(sink.getvalue(), "merged")


def test_merge_keeps_only_the_wanted_hashes() -> None:
    changes: list[Change] = [(h, b"k", b"", Operation.PUT, str(h)) for h in range(20)]
    merged = merged_run([make_run(VALUE, changes, block_rows=4)], is_bottom=True, within=HashRange(5, 11))
    assert [row["hash"] for row in rows_of(merged)["value"]] == list(range(5, 12))


@given(st.lists(st.integers(0, 10**7), max_size=60), st.integers(2, 8))
@example([0, 0, 16_385, 0, 0, 16_385, 0, 0, 49_153, 0, 0, 16_385, 0], 3)
@example([size for _ in range(20) for size in (*[0] * 7, 20_000)], 8)
def test_compaction_leaves_few_runs(sizes: list[int], fan_in: int) -> None:
    runs: list[int] = []
    for size in sizes:
        runs.append(size)
        while newest := choose_merge(runs, fan_in, 16_384):
            assert 2 <= newest <= len(runs)
            runs[-newest:] = [sum(runs[-newest:])]
    tiers = 1 + max(0, int(np.ceil(np.log(max(sum(sizes), 1) / 16_384) / np.log(fan_in))))
    assert len(runs) <= fan_in * tiers


MORTAL = StateDescriptor("mortal", StateKind.MAP, VALUE.value_schema, VALUE.value_schema, TimeDomain.PROCESSING)


@pytest.mark.parametrize("is_bottom", [True, False])
def test_expired_rows_go_when_nothing_older_is_left_to_hide(is_bottom: bool) -> None:
    expired = make_run(MORTAL, [(1, b"a", b"e", Operation.PUT, "expired")], expiry_ms=10)
    alive = make_run(
        MORTAL, [(1, b"a", b"f", Operation.PUT, "alive"), (2, b"b", b"e", Operation.PUT, "alive")], expiry_ms=11
    )
    garbage = Garbage(Moment(10, 99), {})
    merged = merged_run([expired, alive], is_bottom=is_bottom, garbage=garbage)
    kept = [row["v0"] for row in rows_of(merged)["mortal"]]
    assert kept == (["alive", "alive"] if is_bottom else ["expired", "alive", "alive"])


def test_rows_of_a_deleted_state_go_at_any_level() -> None:
    names = [stored_name("map", generation) for generation in range(3)]
    runs = [make_run(replace(MAP, name=name), [(1, b"a", b"e", Operation.PUT, name)]) for name in (*names, "other")]
    for generation in range(4):
        garbage = Garbage(Moment(0, 0), {"map": generation})
        merged = merged_run(runs, is_bottom=False, garbage=garbage)
        assert sorted(merged.sections) == sorted([*names[generation:], "other"])
