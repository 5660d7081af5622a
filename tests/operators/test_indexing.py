"""The key index of rows: the keys and rows that sorting by canonical bytes finds, also where hashes collide."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statelog.operators.keyed.indexing import index_rows
from statelog.runs.byte_slices import Budget
from statelog.runs.keys import KeyCodec

KINDS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(0, 5)),
    (pa.float64(), st.sampled_from([0.0, -0.0, math.nan, -math.nan, 1.5])),
    (pa.string(), st.sampled_from(["", "a", "ab"])),
    (pa.timestamp("us", "UTC"), st.integers(0, 3)),
    (pa.list_(pa.float64()), st.lists(st.sampled_from([0.0, -0.0]), max_size=2)),
]


@st.composite
def columns_of_keys(draw: st.DrawFn) -> list[pa.Array]:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=2))
    count = draw(st.integers(1, 30))
    return [
        pa.array(draw(st.lists(st.none() | values, min_size=count, max_size=count)), kind) for kind, values in kinds
    ]


@given(
    columns_of_keys(),
    st.sampled_from([1, 7, 1 << 60]),
    st.sampled_from([200, 1 << 20]),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_rows_go_to_the_keys_of_their_bytes(
    columns: list[pa.Array], hashes_below: int, input_bytes: int, max_keys: int, random: Any
) -> None:
    codec = KeyCodec(pa.schema([(f"k{index}", column.type) for index, column in enumerate(columns)]))
    encoded = codec.encode_columns(columns).to_pylist()
    hash_of = {key: random.randrange(hashes_below) for key in sorted(set(encoded))}
    hashes = np.array([hash_of[key] for key in encoded], np.uint64)
    rows = pa.RecordBatch.from_arrays([pa.array(np.arange(len(encoded))), *columns], names=["row", *codec.schema.names])
    cut = random.randrange(len(encoded) + 1)
    batches = [batch for batch in (rows.slice(0, cut), rows.slice(cut)) if batch.num_rows]
    found: dict[bytes, list[int]] = {}
    order: list[tuple[int, bytes]] = []
    for whole in index_rows(batches, hashes, range(1, rows.num_columns), Budget(input_bytes=input_bytes)):
        for chunk in whole.cut(lambda: max_keys, input_bytes):
            numbers = np.concatenate([part.column(0).to_numpy() for part in chunk.rows])
            assert (np.diff(numbers) > 0).all()
            keys = chunk.keys.keys.to_pylist()
            order += zip(chunk.keys.hashes.tolist(), keys, strict=True)
            for key, row in zip(chunk.key_index.tolist(), numbers.tolist(), strict=True):
                found.setdefault(keys[key], []).append(row)
            assert codec.encode_columns(chunk.first_of_keys(range(1, rows.num_columns))).to_pylist() == keys
            assert [found[key][0] for key in keys] == numbers[chunk.firsts].tolist()
    assert found == {key: [row for row, own in enumerate(encoded) if own == key] for key in hash_of}
    assert order == sorted(order)
    assert len(order) == len(set(order))


@pytest.mark.parametrize("kind", [pa.int64(), pa.string()])
def test_a_collision_hidden_behind_equal_rows_is_seen(kind: pa.DataType) -> None:
    column = pa.array([1, 1, 2, 1]).cast(kind)
    rows = pa.RecordBatch.from_arrays([column], names=["k"])
    (indexed,) = index_rows([rows], np.zeros(4, np.uint64), [0], Budget())
    assert indexed.key_index.tolist() == [0, 0, 1, 0]
    assert indexed.firsts.tolist() == [0, 2]
