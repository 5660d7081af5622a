"""Conversions take short cuts: values become what the slow rules make of them, or are refused with the same words."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    TimeType,
)

from statelog.convert.types import field_codecs, row_codec
from statelog.errors import ProcessorError
from statelog.runs.values import MISFITS, FieldCodec, RowCodec
from tests.conversions import slow_rules
from tests.conversions.cases import VALUES, ZONE, value

ELEMENTS: list[DataType] = [
    BooleanType(),
    IntegerType(),
    LongType(),
    FloatType(),
    DoubleType(),
    DecimalType(5, 2),
    DecimalType(38, 18),
    StringType(),
    BinaryType(),
    DateType(),
    TimestampType(),
    TimestampNTZType(),
    DayTimeIntervalType(),
    TimeType(6),
]
TIMES = StructType([StructField("a", TimestampType()), StructField("b", ArrayType(TimestampType()))])
NESTED: list[DataType] = [
    *map(ArrayType, ELEMENTS),
    ArrayType(ArrayType(TimestampType())),
    ArrayType(TIMES),
    MapType(StringType(), IntegerType()),
    MapType(StringType(), TimestampType()),
    MapType(TimestampType(), ArrayType(DecimalType(5, 2))),
    StructType([StructField("a", IntegerType()), StructField("b", StringType())]),
    TIMES,
    StructType([StructField("a", MapType(TimestampType(), TIMES)), StructField("b", ArrayType(BinaryType()))]),
]
KINDS = [*ELEMENTS, *NESTED, NullType()]


@pytest.fixture(autouse=True)
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", ZONE)
        time.tzset()
        yield
    time.tzset()


DECIMALS = (
    st.decimals()
    | st.decimals(-1100, 1100, places=2)
    | st.sampled_from(
        [Decimal("999.994"), Decimal("999.995"), Decimal("-0"), Decimal("0E+50"), Decimal("1E+60"), Decimal("sNaN")]
    )
)
DATETIMES = st.builds(
    lambda at, fold, zone: at.replace(fold=fold, tzinfo=zone),
    st.datetimes()
    | st.datetimes(datetime.datetime(2024, 11, 3), datetime.datetime(2024, 11, 3, 3))
    | st.datetimes(datetime.datetime(2024, 3, 10), datetime.datetime(2024, 3, 10, 4))
    | st.sampled_from([datetime.datetime.min, datetime.datetime.max]),
    st.integers(0, 1),
    st.sampled_from(
        [None, None, datetime.UTC, ZoneInfo("Europe/Berlin"), datetime.timezone(datetime.timedelta(hours=5))]
    ),
)
GIVEN = st.sampled_from(VALUES).map(value)
"""The values of the cases, each made anew."""


def of(kind: DataType) -> st.SearchStrategy[Any]:
    """Values that a type takes, and some others."""
    if isinstance(kind, ArrayType):
        return st.lists(of(kind.elementType), max_size=3) | GIVEN
    if isinstance(kind, MapType):
        return st.dictionaries(of_keys(kind.keyType), of(kind.valueType), max_size=3) | GIVEN
    if isinstance(kind, StructType):
        return st.fixed_dictionaries({field.name: of(field.dataType) for field in kind}) | GIVEN
    if isinstance(kind, DecimalType):
        return DECIMALS | st.none() | GIVEN
    if isinstance(kind, (TimestampType, TimestampNTZType)):
        return DATETIMES | st.none() | GIVEN
    return st.none() | GIVEN


def of_keys(kind: DataType) -> st.SearchStrategy[Any]:
    return DATETIMES if isinstance(kind, TimestampType) else st.text(max_size=2)


@st.composite
def cases(draw: st.DrawFn) -> tuple[DataType, list[Any]]:
    kind = draw(st.sampled_from(KINDS))
    return kind, draw(st.lists(of(kind), min_size=1, max_size=4))


def outcome(make: Callable[..., Any], *given: Any) -> object:
    """A result as text, which shows types, zones and folds; or the error of a misfit."""
    try:
        made = make(*given)
        return (made.type, repr(made.to_pylist())) if isinstance(made, pa.Array) else repr(made)
    except MISFITS as error:
        return type(error), str(error)
    except ProcessorError as error:
        return error.message


def is_misfit(found: object) -> bool:
    return isinstance(found, tuple) and isinstance(found[0], type)


def codecs(kind: DataType) -> tuple[RowCodec, FieldCodec]:
    schema = StructType([StructField("f", kind)])
    return row_codec(schema, "state 'x'"), field_codecs(schema, "column")[0]


in_zone = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=400)


@in_zone
@given(cases())
def test_values_are_read_in_the_batch_as_the_rules_say(case: tuple[DataType, list[Any]]) -> None:
    kind, values = case
    codec, field = codecs(kind)
    expected = [outcome(lambda one: slow_rules.shown(kind, slow_rules.in_field(kind, one)), one) for one in values]
    assert [outcome(field.normalize, one) for one in values] == expected
    normalized = [outcome(codec.normalize, (one,)) for one in values]
    assert [outcome(lambda row: codec.read_held(codec.hold(row)), (one,)) for one in values] == normalized


@in_zone
@given(cases())
def test_columns_hold_what_the_rules_say(case: tuple[DataType, list[Any]]) -> None:
    kind, values = case
    codec, field = codecs(kind)
    expected = outcome(slow_rules.column, kind, values)
    made = outcome(field.to_array, values)
    if is_misfit(expected):
        assert is_misfit(made)
        assert any(field.misfit(one) is not None for one in values)
        return
    assert made == expected
    try:
        held = [codec.hold((one,)) for one in values]
    except ProcessorError as error:  # an output may have it, but nobody could read it from a state
        assert "out of range" in str(error)
        return
    [column] = codec.encode(held, str)
    assert outcome(lambda: column) == expected
    read = codec.decode(pa.RecordBatch.from_arrays([column], names=["f"]))
    shown = [slow_rules.shown(kind, one) for one in column.to_pylist(maps_as_pydicts="strict")]
    assert repr([one for (one,) in read]) == repr(shown)
    for rows in (read, list(map(codec.read_held, held)), list(map(codec.hold, read))):
        assert outcome(lambda rows: codec.encode(rows, str)[0], rows) == expected
