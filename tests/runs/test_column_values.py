"""Python values of whole columns are those that Arrow makes one by one."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

from statelog.runs.column_values import ColumnValues, MapsAsDicts

DAY_US = 86_400_000_000
FIRST_US, LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
"""Python's first and last datetime."""
LEAST, MOST = -(1 << 63), (1 << 63) - 1
TURNS_US = [1_729_990_800_000_000, 1_711_846_800_000_000, 2_866_755_600_000_000, -2_422_054_408_000_000]
"""Berlin's clock goes back, and forward, and back in 2060, and to its first zone in 1893."""
ZONES = [None, "UTC", "Etc/UTC", "+00:00", "+02:00", "-11:30", "Europe/Berlin", "America/New_York", "Asia/Kathmandu"]


def _decimals(precision: int, scale: int) -> st.SearchStrategy[Decimal]:
    digits = st.integers(-(10**precision) + 1, 10**precision - 1)
    return digits.map(lambda unscaled: Decimal(f"{unscaled}E-{scale}"))


TIMES = st.one_of(
    st.integers(FIRST_US, LAST_US),
    st.builds(lambda turn, more: turn + more, st.sampled_from(TURNS_US), st.integers(-DAY_US, DAY_US)),
    st.sampled_from([FIRST_US, LAST_US, FIRST_US - 1, LAST_US + 1, LEAST, MOST, -1, 0]),
)
INTEGERS = {
    pa.int64(): st.integers(LEAST, MOST),
    pa.date32(): st.integers(-719_162, 2_932_896) | st.sampled_from([-719_163, 2_932_897, 1 << 30]),
    pa.duration("us"): st.integers(LEAST, MOST) | st.just(LEAST),
    pa.duration("ms"): st.integers(-(10**12), 10**12),
    pa.time64("ns"): st.integers(0, 86_400_000_000).map(lambda us: us * 1000) | st.integers(0, DAY_US * 1000 - 1),
    pa.time64("us"): st.integers(0, DAY_US - 1),
    pa.timestamp("ms"): st.integers(FIRST_US // 1000, LAST_US // 1000),
    **{pa.timestamp("us", zone): TIMES for zone in ZONES},
}
"""Types whose values are integers in memory."""
OTHERS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.float64(): st.floats(),
    pa.string(): st.text(),
    pa.binary(): st.binary(),
    pa.null(): st.none(),
    **{pa.decimal128(*size): _decimals(*size) for size in ((5, 2), (18, 0), (18, 18), (38, 10))},
}


def nested(kinds: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    fields = st.lists(st.builds(lambda name, kind: (name, kind), st.sampled_from("abcd"), kinds), max_size=3)
    return st.one_of(
        st.builds(pa.list_, kinds),
        st.builds(pa.large_list, kinds),
        st.builds(pa.map_, st.sampled_from([*INTEGERS, pa.string()]), kinds),
        fields.map(pa.struct),
    )


KINDS = st.recursive(st.sampled_from([*INTEGERS, *OTHERS]), nested, max_leaves=4)


@st.composite
def columns(draw: st.DrawFn) -> pa.Array:
    """A column of any type, perhaps a slice of a longer one; what nulls hide are values, too."""
    size = draw(st.integers(0, 6))
    first = draw(st.integers(0, size))
    return _column(draw, draw(KINDS), size).slice(first, draw(st.integers(0, size - first)))


def _column(draw: st.DrawFn, kind: pa.DataType, size: int, *, has_nulls: bool = True) -> pa.Array:
    is_null = np.array(
        draw(st.lists(st.booleans() if has_nulls else st.just(False), min_size=size, max_size=size)), bool
    )
    if kind in INTEGERS:
        numbers = draw(st.lists(INTEGERS[kind], min_size=size, max_size=size))
        of_32_bits = pa.types.is_date32(kind)
        return pa.array(numbers, pa.int32() if of_32_bits else pa.int64(), mask=is_null).view(kind)
    if kind in OTHERS:
        values = draw(st.lists(OTHERS[kind], min_size=size, max_size=size))
        return pa.array([None if null else value for null, value in zip(is_null, values, strict=True)], kind)
    mask = pa.array(is_null)
    if pa.types.is_struct(kind):
        children = [_column(draw, field.type, size) for field in kind]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask) if children else pa.nulls(size, kind)
    lengths = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    offsets = np.cumsum([0, *lengths])
    if pa.types.is_map(kind):
        keys = _column(draw, kind.key_type, int(offsets[-1]), has_nulls=False)
        items = _column(draw, kind.item_type, int(offsets[-1]))
        return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), keys, items, type=kind, mask=mask)
    elements = _column(draw, kind.value_type, int(offsets[-1]))
    if pa.types.is_large_list(kind):
        return pa.LargeListArray.from_arrays(pa.array(offsets), elements, type=kind, mask=mask)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), elements, type=kind, mask=mask)


def outcome(make: Callable[[], list[Any]]) -> object:
    """The values as text, which shows types, zones and folds; or the kind of error, whose words may differ."""
    try:
        return repr(make())
    except Exception as error:
        return (type(error),)


@settings(max_examples=500)
@given(columns())
def test_values_are_those_of_arrow(column: pa.Array) -> None:
    assert outcome(lambda: ColumnValues().of(column)) == outcome(column.to_pylist)


@settings(max_examples=300)
@given(columns())
def test_maps_are_dicts(column: pa.Array) -> None:
    expected = outcome(lambda: column.to_pylist(maps_as_pydicts="strict"))
    found = outcome(lambda: MapsAsDicts().of(column))
    if isinstance(expected, tuple):  # in a struct, Arrow takes a key that a map has twice for a field
        assert isinstance(found, tuple)
    else:
        assert found == expected


def test_values_of_all_chunks() -> None:
    kind = pa.timestamp("us", "Europe/Berlin")
    chunked = pa.chunked_array([pa.array([turn, None], pa.int64()).view(kind) for turn in TURNS_US])
    assert repr(ColumnValues().of(chunked)) == repr(chunked.to_pylist())


def test_both_hours_of_a_clock_that_goes_back() -> None:
    column = pa.array([TURNS_US[0] - 1, TURNS_US[0]], pa.int64()).view(pa.timestamp("us", "Europe/Berlin"))
    assert [(at.hour, at.minute, at.fold) for at in ColumnValues().of(column)] == [(2, 59, 0), (2, 0, 1)]


@pytest.mark.parametrize("number", [FIRST_US - 1, LAST_US + 1, LEAST, MOST])
@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
def test_a_time_beyond_datetimes_is_an_error(number: int, zone: str | None) -> None:
    column = pa.array([0, number], pa.int64()).view(pa.timestamp("us", zone))
    with pytest.raises(OverflowError, match="date value out of range"):
        ColumnValues().of(column)
