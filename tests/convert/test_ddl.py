"""The texts of types: read back as what they were written from, and refused with a position."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    CharType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    TimeType,
    VarcharType,
    VariantType,
    YearMonthIntervalType,
)

from statelog.convert.ddl import parse_ddl

_plain = st.sampled_from(
    [
        BinaryType(),
        BooleanType(),
        ByteType(),
        DateType(),
        DoubleType(),
        FloatType(),
        IntegerType(),
        LongType(),
        ShortType(),
        StringType(),
        TimestampNTZType(),
        TimestampType(),
        VariantType(),
        CharType(3),
        VarcharType(70),
        TimeType(0),
        TimeType(6),
    ]
)
_decimals = st.integers(1, 38).flatmap(lambda digits: st.integers(0, digits).map(lambda n: DecimalType(digits, n)))
_day_times = st.sampled_from([(0, 0), (0, 3), (1, 2), (3, 3)]).map(lambda units: DayTimeIntervalType(*units))
_year_months = st.sampled_from([(0, 0), (0, 1), (1, 1)]).map(lambda units: YearMonthIntervalType(*units))
_words = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}|[0-9][a-z]", fullmatch=True)
_names = st.one_of(_words, st.text(min_size=1, max_size=6))
_comments = st.one_of(st.none(), st.text(max_size=8))


def _structs(kinds: st.SearchStrategy[DataType], names: st.SearchStrategy[str]) -> st.SearchStrategy[StructType]:
    metadata = _comments.map(lambda text: None if text is None else {"comment": text})
    fields = st.builds(StructField, names, kinds, st.booleans(), metadata)
    return st.lists(fields, min_size=1, max_size=3).map(StructType)


def _types_with(names: st.SearchStrategy[str]) -> st.SearchStrategy[DataType]:
    return st.recursive(
        st.one_of(_plain, _decimals, _day_times, _year_months),
        lambda kinds: st.one_of(kinds.map(ArrayType), st.builds(MapType, kinds, kinds), _structs(kinds, names)),
        max_leaves=4,
    )


_types = _types_with(_names)


def written(kind: DataType) -> str:
    """A type as Spark's toDDL writes it."""
    if isinstance(kind, ArrayType):
        return f"ARRAY<{written(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"MAP<{written(kind.keyType)}, {written(kind.valueType)}>"
    if isinstance(kind, StructType):
        return f"STRUCT<{', '.join(written_field(field, ': ') for field in kind)}>"
    return kind.simpleString().upper()


def written_field(field: StructField, separator: str = " ") -> str:
    name = "`" + field.name.replace("`", "``") + "`"
    comment = field.metadata.get("comment")
    escaped = None if comment is None else comment.replace("\\", "\\\\").replace("'", "\\'")
    suffix = "" if field.nullable else " NOT NULL"
    return f"{name}{separator}{written(field.dataType)}{suffix}" + (
        f" COMMENT '{escaped}'" if comment is not None else ""
    )


@given(kind=_types)
@settings(max_examples=100)
def test_every_type_comes_back(kind: DataType) -> None:
    assert parse_ddl(written(kind)) == kind


@given(schema=_structs(_types, _names))
@settings(max_examples=100)
def test_columns_come_back_with_names_comments_and_nullability(schema: StructType) -> None:
    for separator in (" ", ": "):
        text = ",\n ".join(written_field(field, separator) for field in schema)
        parsed = parse_ddl(text)
        assert isinstance(parsed, StructType)
        assert parsed == schema
        assert [field.metadata for field in parsed] == [field.metadata for field in schema]


@given(schema=_structs(_types_with(_words), _words))
@settings(max_examples=100)
def test_simple_strings_come_back_as_nullable(schema: StructType) -> None:
    assert parse_ddl(schema.simpleString()).simpleString() == schema.simpleString()


def test_synonyms_and_case() -> None:
    parsed = parse_ddl("a BIGINT, b Long, c tinyint, d Byte, e SMALLINT, f integer, g real, h dec, i numeric(5)")
    assert isinstance(parsed, StructType)
    assert [field.dataType.simpleString() for field in parsed] == [
        *("bigint", "bigint", "tinyint", "tinyint", "smallint", "int", "float", "decimal(10,0)", "decimal(5,0)")
    ]


def test_columns_may_be_named_like_types_and_keywords() -> None:
    parsed = parse_ddl("date date, timestamp string, struct long, not int, comment array<int>, interval double")
    assert isinstance(parsed, StructType)
    assert parsed.names == ["date", "timestamp", "struct", "not", "comment", "interval"]
    assert parsed["date"].dataType == DateType()


def test_comments_in_both_quotes() -> None:
    quoted = ['"so ""it"" is"', "'tab\\t, ''quote'''"]
    parsed = parse_ddl(f"a int COMMENT {quoted[0]}, b int NOT NULL COMMENT {quoted[1]}")
    assert isinstance(parsed, StructType)
    assert [field.metadata["comment"] for field in parsed] == ['so "it" is', "tab\t, 'quote'"]
    assert [field.nullable for field in parsed] == [True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a name at position 1 of '', found the end of the text"),
        ("user", "expected a type at position 5"),
        ("user strng", "expected a type at position 6 of 'user strng', found 'strng'"),
        ("user string amount long", "expected ',' or the end of the text at position 13"),
        ("user string,", "expected a name at position 13"),
        ("a-b int", "expected a type at position 2 of 'a-b int', found '-'"),
        ("5 int", "expected a name at position 1"),
        ("a array<int", "expected '>' at position 12"),
        ("struct<a: int, b: it>", "expected a type at position 19"),
        ("a map<int>", "expected ',' at position 10"),
        ("a decimal(40, 2)", r"at most 38 digits.*\(40,2\) at position 11"),
        ("a decimal(4, 5)", "no more decimal places than digits"),
        ("a decimal(x)", "expected a number at position 11"),
        ("a int not", "expected NULL at position 10"),
        ("a int comment b", "expected a text in quotes at position 15"),
        ("a `b c", "expected a type at position 3"),
        ("a interval second to day", "expected a smaller unit of the interval at position 22"),
    ],
)
def test_errors_name_the_position(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_ddl(text)
