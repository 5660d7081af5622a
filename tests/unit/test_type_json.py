"""Descriptions of columns that come from a store: Spark's own types, and no code."""

from __future__ import annotations

import base64
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    CalendarIntervalType,
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
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
    VariantType,
    YearMonthIntervalType,
)

from statelog.convert.ddl import parse_type_json
from statelog.errors import CorruptionError, ErrorKind
from statelog.log.references import SegmentRef
from statelog.runs import digests
from statelog.spark.worker.specs import output_columns
from statelog.storage import LocalStore
from statelog.tasks.output_task import StoredRows

PLAIN: list[DataType] = [
    *(BinaryType(), BooleanType(), ByteType(), CalendarIntervalType(), CharType(3), DateType(), DayTimeIntervalType()),
    *(DayTimeIntervalType(1, 2), DecimalType(), DecimalType(38, 18), DoubleType(), FloatType(), IntegerType()),
    *(LongType(), NullType(), ShortType(), StringType(), StringType("UNICODE_CI"), TimestampNTZType()),
    *(TimestampType(), VarcharType(5), VariantType(), YearMonthIntervalType(), YearMonthIntervalType(1)),
]
NAME = "op-1/changes/1/0/1-x.run"


class Evil:
    """Leaves a mark when it is unpickled."""

    mark: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def columns_of(kind: object) -> str:
    field = {"name": "x", "type": kind, "nullable": True, "metadata": {}}
    return json.dumps({"type": "struct", "fields": [field]})


def user_defined(mark: Path) -> dict[str, Any]:
    """A user-defined type whose class is pickled, or imported, by Spark's own parser."""
    Evil.mark = mark
    (mark.parent / "left_in_a_bucket.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    code = base64.b64encode(pickle.dumps(Evil())).decode()
    return {
        "type": "udt",
        "class": None,
        "pyClass": "left_in_a_bucket.Type",
        "serializedClass": code,
        "sqlType": "long",
    }


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.simpleString())
def test_every_type_of_sparks_comes_back(kind: DataType) -> None:
    nested = StructType([StructField("in", MapType(LongType(), kind, False)), StructField("a b", kind, False)])
    whole = StructType(
        [
            StructField("x", kind, False, {"comment": "a text"}),
            StructField("y", ArrayType(ArrayType(kind, False))),
            StructField("z", ArrayType(MapType(StringType(), ArrayType(nested)))),
        ]
    )
    assert parse_type_json(whole.json(), "x") == whole


@pytest.mark.parametrize("place", ["column", "element", "value", "field"])
def test_the_class_of_a_user_defined_type_is_neither_unpickled_nor_imported(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    mark = tmp_path / "mark"
    kind: Any = user_defined(mark)
    if place == "element":
        kind = {"type": "array", "elementType": kind, "containsNull": True}
    if place == "value":
        kind = {"type": "map", "keyType": "string", "valueType": kind, "valueContainsNull": True}
    if place == "field":
        kind = json.loads(columns_of(kind))
    with pytest.raises(CorruptionError, match="output: .* user-defined type is code") as caught:
        parse_type_json(columns_of(kind), "output")
    assert caught.value.kind is ErrorKind.FORMAT
    assert not mark.exists()
    assert "left_in_a_bucket" not in sys.modules


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '"long"', '{"type":"struct"}', '{"type":"struct","fields":[1]}', "[" * 100_000,
        '{"type":"struct","fields":[{"name":1,"type":"long"}]}', columns_of("array<long>"),
        columns_of("struct<a: int>"),
        columns_of("class"), columns_of("decimal(99,1)"), columns_of(None), columns_of({"type": "object"}),
        columns_of({"type": "array", "elementType": "long"}), columns_of("long; import os"),
        columns_of({"type": "array", "elementType": "long", "containsNull": "yes"}),
    ],
)  # fmt: skip
def test_any_other_text_is_damage(text: str) -> None:
    with pytest.raises(CorruptionError, match="output: the description of its columns"):
        parse_type_json(text, "output")


def stored_output(root: Path, columns: str) -> SegmentRef:
    """A batch's output as `write_ahead` stores it, with some description of its columns."""
    rows = StoredRows(columns)
    rows.add(pa.record_batch({"c0": [1]}))
    data, count = rows.take_part(None)
    LocalStore(root).put(NAME, data)
    return SegmentRef(0, 1, digests.checksum(data), 0, len(data), count, count, NAME)


def test_the_columns_of_stored_output_are_those_that_it_was_written_with(tmp_path: Path) -> None:
    written = StructType([StructField("x", LongType())])
    segment = stored_output(tmp_path, written.json())
    assert output_columns(str(tmp_path), segment, written) is written
    assert output_columns(str(tmp_path), segment, StructType([StructField("y", LongType())])) == written


def test_stored_output_with_another_description_runs_no_code(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    segment = stored_output(tmp_path, columns_of(user_defined(mark)))
    with pytest.raises(CorruptionError, match=NAME):
        output_columns(str(tmp_path), segment, StructType([StructField("x", LongType())]))
    assert not mark.exists()
