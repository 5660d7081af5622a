"""What a processor returns, as columns: matched by name or position, and refused with the key and the column."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.types import (
    ArrayType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from statelog import ErrorKind, ProcessorError
from statelog.spark.output import FrameOutput, RowOutput

PLAIN = StructType([StructField("k", StringType()), StructField("n", LongType())])


def owner(index: int) -> str:
    return f"key ({index},)"


def test_rows_are_matched_by_name() -> None:
    rows = [Row(k="a", n=1), Row(n=2, k="b"), Row(k="c"), Row(n=4, k="d", more=5), ("e", 6)]
    assert RowOutput(PLAIN).encode(rows, owner).to_pylist() == [
        {"k": "a", "n": 1},
        {"k": "b", "n": 2},
        {"k": "c", "n": None},
        {"k": "d", "n": 4},
        {"k": "e", "n": 6},
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Row(x=1), ["Row(x=1)", "(k, n)"]),
        (("a",), ["tuple ('a',)"]),
        (None, ["NoneType None"]),
        ({"k": "a", "n": 1}, ["dict"]),
        (Row(k="a", n="one"), ["'one'", "'n'", "bigint"]),
        (Row(k="a", n=1.5), ["1.5", "whole number"]),
        (Row(k="a", n=2**63), ["'n'"]),
    ],
)
def test_a_row_that_does_not_fit_is_refused_with_its_key(row: Any, words: list[str]) -> None:
    with pytest.raises(ProcessorError) as failure:
        RowOutput(PLAIN).encode([Row(k="a", n=1), row], owner)
    assert failure.value.kind == ErrorKind.OUTPUT_MISMATCH
    for word in ["key (1,)", *words]:
        assert word in str(failure.value)


def frames_of(schema: StructType, *frames: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = FrameOutput(schema, "Asia/Kolkata").encode(frames, owner).to_pylist()
    return rows


def test_frames_are_matched_by_name_or_position() -> None:
    frames = [
        pd.DataFrame({"k": ["a"], "n": [1]}),
        pd.DataFrame({"n": [2, 3], "more": [0, 0], "k": ["b", None]}),
        pd.DataFrame([["c", 4, "more"]]),
        pd.DataFrame(),
        pd.DataFrame({"k": [], "n": []}),
        pd.DataFrame({"k": ["d"], "n": [np.nan]}, index=[7]),
        pd.DataFrame({"k": ["e"], "n": pd.array([None], "Int64")}),
        pd.DataFrame({"k": ["f"], "n": np.array([5], np.int8)}),
        pd.DataFrame({"k": ["g"], "n": [6.0]}),
    ]
    assert [tuple(row.values()) for row in frames_of(PLAIN, *frames)] == [
        ("a", 1),
        ("b", 2),
        (None, 3),
        ("c", 4),
        ("d", None),
        ("e", None),
        ("f", 5),
        ("g", 6),
    ]


def test_frames_of_other_types() -> None:
    schema = StructType(
        [
            StructField("at", TimestampType()),
            StructField("price", DecimalType(10, 2)),
            StructField("ratio", DoubleType()),
            StructField("list", ArrayType(IntegerType())),
            StructField("pair", PLAIN),
        ]
    )
    naive = pd.DataFrame(
        {
            "at": [pd.Timestamp("1970-01-01 05:30:00"), pd.NaT],
            "price": [Decimal("1.005"), 2],
            "ratio": [1, 2],
            "list": [[1, None], np.array([2])],
            "pair": [Row(k="a", n=1), {"k": "b", "n": 2}],
        }
    )
    aware = naive.assign(at=[pd.Timestamp("1970-01-01", tz="UTC"), None])
    objects = naive.assign(at=np.array([datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC), None], object))
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    for frame in (naive, aware, objects):
        first, second = frames_of(schema, frame)
        assert first == {
            "at": epoch,
            "price": Decimal("1.01"),
            "ratio": 1.0,
            "list": [1, None],
            "pair": {"k": "a", "n": 1},
        }
        assert second == {
            "at": None,
            "price": Decimal("2.00"),
            "ratio": 2.0,
            "list": [2],
            "pair": {"k": "b", "n": 2},
        }


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (pd.DataFrame({"k": ["a"]}), ["(k)", "(k, n)"]),
        (pd.DataFrame([["a"]]), ["(0)", "(k, n)"]),
        (Row(k="a", n=1), ["Row(k='a', n=1)", "not a pandas DataFrame"]),
        (None, ["NoneType None"]),
        (pd.DataFrame({"k": ["a", "b"], "n": [1, 1.5]}), ["1.5", "'n'"]),
        (pd.DataFrame({"k": ["a"], "n": ["one"]}), ["'one'", "'n'"]),
        (pd.DataFrame({"k": ["a"], "n": [2**63]}), ["'n'"]),
    ],
)
def test_a_frame_that_does_not_fit_is_refused_with_its_key(frame: Any, words: list[str]) -> None:
    good = pd.DataFrame({"k": ["a"], "n": [1]})
    with pytest.raises(ProcessorError) as failure:
        frames_of(PLAIN, good, frame)
    assert failure.value.kind == ErrorKind.OUTPUT_MISMATCH
    for word in ["key (1,)", *words]:
        assert word in str(failure.value)


def test_nothing_is_an_empty_batch() -> None:
    assert RowOutput(PLAIN).encode([], owner).num_rows == 0
    empty = FrameOutput(PLAIN, "UTC").encode([pd.DataFrame()], owner)
    assert empty.schema == pa.schema([("k", pa.string()), ("n", pa.int64())])


def test_a_held_row_that_does_not_fit_is_refused_with_its_key() -> None:
    output = RowOutput(StructType().add("k", "string").add("n", ArrayType(IntegerType())))
    assert output.hold is not None
    held = [output.hold(("a", [1])), output.hold(("b", [2**40]))]
    with pytest.raises(ProcessorError, match=r"key \(1,\) returned list \[1099511627776\] for output column 'n'"):
        output.encode(held, owner)
