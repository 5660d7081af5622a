"""Canonical key bytes: columns and single keys agree, equal keys are equal, others differ."""

from __future__ import annotations

import datetime
import itertools
import math
import struct
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statelog import ConfigurationError, ErrorKind
from statelog.state.key_groups import KEY_GROUPS, hash_range, subtasks_of
from statelog.state.keys import KeyCodec

UTC = datetime.UTC
FIELDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "bool": (pa.bool_(), st.booleans()),
    "int8": (pa.int8(), st.integers(-128, 127)),
    "int32": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "float": (pa.float32(), st.floats(width=32)),
    "double": (pa.float64(), st.floats()),
    "decimal": (pa.decimal128(10, 2), st.integers(-(10**10) + 1, 10**10 - 1).map(lambda n: Decimal(n) / 100)),
    "text": (pa.string(), st.text(max_size=5)),
    "binary": (pa.binary(), st.binary(max_size=5)),
    "date": (pa.date32(), st.dates()),
    "timestamp": (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(UTC))),
}


def comparable(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key with what must count as equal made equal."""
    return tuple("nan" if isinstance(value, float) and math.isnan(value) else value for value in key)


@st.composite
def key_lists(draw: st.DrawFn) -> tuple[pa.Schema, list[tuple[Any, ...]]]:
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=3))
    schema = pa.schema([(f"{index}{name}", FIELDS[name][0]) for index, name in enumerate(names)])
    key = st.tuples(*(st.none() | FIELDS[name][1] for name in names))
    return schema, draw(st.lists(key, max_size=8))


@given(key_lists(), st.integers(0, 3))
def test_columns_and_single_keys_agree(case: tuple[pa.Schema, list[tuple[Any, ...]]], skip: int) -> None:
    schema, keys = case
    codec = KeyCodec(schema)
    columns = [pa.array([key[index] for key in keys], field.type).slice(skip) for index, field in enumerate(schema)]
    encoded = codec.encode_columns(columns).to_pylist()
    assert encoded == [codec.encode(key) for key in keys[skip:]]
    for key, data in zip(keys[skip:], encoded, strict=True):
        assert comparable(codec.decode(data)) == comparable(key)
    for first, first_data in zip(keys[skip:], encoded, strict=True):
        for second, second_data in zip(keys[skip:], encoded, strict=True):
            assert (first_data == second_data) == (comparable(first) == comparable(second))


def test_zeros_and_nans_are_one_key() -> None:
    codec = KeyCodec(pa.schema([("x", pa.float64())]))
    other_nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0001))[0]
    zero, minus_zero, nan, odd_nan = codec.encode_columns(
        [pa.array(np.array([0.0, -0.0, math.nan, other_nan]))]
    ).to_pylist()
    assert zero == minus_zero == codec.encode((-0.0,))
    assert nan == odd_nan == codec.encode((other_nan,))


def test_unsupported_type_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="'tags' has type list") as caught:
        KeyCodec(pa.schema([("tags", pa.list_(pa.int64()))]))
    assert caught.value.kind is ErrorKind.UNSUPPORTED_KEY_TYPE


@given(st.integers(0, 2**64 - 1), st.integers(1, KEY_GROUPS))
def test_subtask_is_flips_formula_and_its_range(key_hash: int, parallelism: int) -> None:
    key_group = key_hash >> 49
    subtask = int(subtasks_of(np.array([key_hash], np.uint64), parallelism)[0])
    assert subtask == key_group * parallelism // KEY_GROUPS
    own = hash_range(subtask, parallelism)
    assert own.first <= key_hash <= own.last


@pytest.mark.parametrize("parallelism", [1, 2, 3, 7, 200, 32_767, 32_768])
def test_ranges_cover_all_hashes_once(parallelism: int) -> None:
    ranges = [hash_range(subtask, parallelism) for subtask in range(parallelism)]
    assert ranges[0].first == 0
    assert ranges[-1].last == 2**64 - 1
    assert all(left.last + 1 == right.first for left, right in itertools.pairwise(ranges))
