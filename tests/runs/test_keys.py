"""Canonical key bytes: columns and single keys agree, equal keys are equal, others differ."""

from __future__ import annotations

import datetime
import itertools
import math
import re
import struct
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statelog import ConfigurationError, ErrorKind
from statelog.runs.key_groups import KEY_GROUPS, hash_range, subtasks_of
from statelog.runs.keys import KeyCodec

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
    "local time": (pa.timestamp("us"), st.datetimes()),
    "interval": (pa.duration("us"), st.timedeltas(-datetime.timedelta(10**8), datetime.timedelta(10**8))),
    "time": (pa.time64("ns"), st.times()),
    "nothing": (pa.null(), st.none()),
}
FEW: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "double": (pa.float64(), st.sampled_from([0.0, -0.0, math.nan, -math.nan, 1.5])),
    "int32": (pa.int32(), st.sampled_from([0, 1])),
    "text": (pa.string(), st.sampled_from(["", "a", "ab"])),
    "nothing": (pa.null(), st.none()),
}


def comparable(kind: pa.DataType, value: Any) -> Any:
    """The value with what must count as equal made equal."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return tuple(comparable(field.type, value[field.name]) for field in kind.fields)
    if pa.types.is_list(kind):
        return tuple(comparable(kind.value_type, element) for element in value)
    if pa.types.is_map(kind):
        pairs = ((comparable(kind.key_type, key), comparable(kind.item_type, item)) for key, item in value)
        return frozenset(pairs)
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def comparables(schema: pa.Schema, keys: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [tuple(comparable(field.type, value) for field, value in zip(schema, key, strict=True)) for key in keys]


def flat(fields: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]]) -> st.SearchStrategy[Any]:
    """Pairs of a type and a strategy of its values, null included."""
    return st.sampled_from([(kind, st.none() | values) for kind, values in fields.values()])


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(inner.map(_array_of), st.lists(inner, min_size=1, max_size=3).map(_struct_of), inner.map(_map_to))


def _array_of(element: tuple[pa.DataType, st.SearchStrategy[Any]]) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    kind, values = element
    return pa.list_(kind), st.none() | st.lists(values, max_size=3)


def _struct_of(
    fields: list[tuple[pa.DataType, st.SearchStrategy[Any]]],
) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    kind = pa.struct([(f"f{index}", kind) for index, (kind, _) in enumerate(fields)])
    return kind, st.none() | st.fixed_dictionaries({f"f{i}": values for i, (_, values) in enumerate(fields)})


def _map_to(item: tuple[pa.DataType, st.SearchStrategy[Any]]) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    kind, values = item
    pairs = st.lists(st.tuples(st.sampled_from("abc"), values), max_size=3, unique_by=lambda pair: pair[0])
    return pa.map_(pa.string(), kind), st.none() | pairs


@st.composite
def key_lists(draw: st.DrawFn) -> tuple[pa.Schema, list[tuple[Any, ...]]]:
    # Keys of few values are often equal, those of many types often are not.
    any_kind = flat(FIELDS) | st.recursive(flat(FEW), nested, max_leaves=4)
    fields = draw(st.lists(any_kind, min_size=1, max_size=3))
    schema = pa.schema([(f"k{index}", kind) for index, (kind, _) in enumerate(fields)])
    key = st.tuples(*(values for _, values in fields))
    return schema, draw(st.lists(key, max_size=8))


@settings(max_examples=300)
@given(key_lists(), st.integers(0, 3))
def test_columns_and_single_keys_agree(case: tuple[pa.Schema, list[tuple[Any, ...]]], skip: int) -> None:
    schema, keys = case
    codec = KeyCodec(schema)
    columns = [pa.array([key[index] for key in keys], field.type).slice(skip) for index, field in enumerate(schema)]
    encoded = codec.encode_columns(columns).to_pylist()
    keys = keys[skip:]
    assert encoded == [codec.encode(key) for key in keys]
    expected = comparables(schema, keys)
    assert comparables(schema, [codec.decode(data) for data in encoded]) == expected
    decoded = codec.decode_columns(pa.array([b"before", *encoded], pa.binary()).slice(1))
    assert [column.type for column in decoded] == schema.types
    rows = [tuple(column[row].as_py() for column in decoded) for row in range(len(keys))]
    assert comparables(schema, rows) == expected
    assert comparables(schema, codec.decode_all(encoded)) == expected
    for (first, first_data), (second, second_data) in itertools.product(zip(expected, encoded, strict=True), repeat=2):
        assert (first_data == second_data) == (first == second)


def test_decoded_keys_are_what_arrow_gives() -> None:
    kind = pa.struct([("at", pa.timestamp("us", "UTC")), ("tags", pa.list_(pa.string())), ("n", pa.int8())])
    rows = [{"at": datetime.datetime(2026, 1, 2, tzinfo=UTC), "tags": ["a", None], "n": None}, None]
    column = pa.array(rows, kind)
    pairs = pa.array([[("b", 1), ("a", None)], []], pa.map_(pa.string(), pa.int32()))
    codec = KeyCodec(pa.schema([("s", kind), ("m", pairs.type)]))
    first, second = (codec.decode(data) for data in codec.encode_columns([column, pairs]).to_pylist())
    assert first == (column[0].as_py(), [("a", None), ("b", 1)])
    assert second == (None, [])


def test_decoded_lists_belong_to_the_caller() -> None:
    codec = KeyCodec(pa.schema([("tags", pa.list_(pa.int64()))]))
    data = codec.encode(([1, 2],))
    codec.decode(data)[0].append(3)
    assert codec.decode(data) == ([1, 2],)


def test_what_a_null_hides_does_not_count() -> None:
    hidden = pa.array([False, True, True])
    numbers = pa.array([1, 2, None], pa.int32())
    structs = pa.StructArray.from_arrays([numbers], names=["n"], mask=hidden)
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 3, 3], pa.int32()), numbers, mask=hidden)
    for column, value in ((structs, {"n": 1}), (lists, [1])):
        codec = KeyCodec(pa.schema([("k", column.type)]))
        assert codec.encode_columns([column]).to_pylist() == [codec.encode((value,)), b"\0", b"\0"]


def test_key_bytes_are_as_documented() -> None:
    kind = pa.struct([("x", pa.float64()), ("tags", pa.list_(pa.string()))])
    counts = pa.map_(pa.string(), pa.int8())
    codec = KeyCodec(pa.schema([("s", kind), ("m", counts)]))
    encoded = codec.encode(({"x": -0.0, "tags": ["é", None]}, [("b", 1), ("a", -1)]))
    assert encoded == (
        b"\x01" + b"\x01" + bytes(8) + b"\x01\0\0\0\x02" + b"\x01\0\0\0\x02\xc3\xa9" + b"\0"
        b"\x01\0\0\0\x02" + b"\x01\0\0\0\x01a" + b"\x01\x7f" + b"\x01\0\0\0\x01b" + b"\x01\x81"
    )


def test_zeros_and_nans_are_one_key() -> None:
    codec = KeyCodec(pa.schema([("x", pa.float64())]))
    other_nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0001))[0]
    zero, minus_zero, nan, odd_nan = codec.encode_columns(
        [pa.array(np.array([0.0, -0.0, math.nan, other_nan]))]
    ).to_pylist()
    assert zero == minus_zero == codec.encode((-0.0,))
    assert nan == odd_nan == codec.encode((other_nan,))


@pytest.mark.parametrize(
    "kind", [pa.month_day_nano_interval(), pa.list_(pa.month_day_nano_interval()), pa.struct([("n", pa.uint8())])]
)
def test_unsupported_type_is_refused_by_name(kind: pa.DataType) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"'tags' has type {kind}")) as caught:
        KeyCodec(pa.schema([("tags", kind)]))
    assert caught.value.kind is ErrorKind.UNSUPPORTED_KEY_TYPE


def test_maps_are_refused_where_they_cannot_be() -> None:
    schema = pa.schema([("k", pa.list_(pa.map_(pa.string(), pa.int32())))])
    KeyCodec(schema)
    with pytest.raises(ConfigurationError, match="map key of state 'x' 'k' has type list"):
        KeyCodec(schema, "map key of state 'x'", with_maps=False)


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
