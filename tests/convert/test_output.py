"""What a processor returns, as columns: matched by name or position, and refused with the key and the column."""

from __future__ import annotations

import datetime
import warnings
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from statelog import ConfigurationWarning, ErrorKind, ProcessorError
from statelog.convert.output import FrameOutput, RowOutput
from statelog.testing import Harness

PLAIN = StructType([StructField("k", StringType()), StructField("n", LongType())])


class Two(NamedTuple):
    first: str
    second: int


class Three(NamedTuple):
    k: str
    n: int
    x: int


class WithMethod(Two):
    """Its instances have a ``__dict__``, as Rows have."""


def owner(index: int) -> str:
    return f"key ({index},)"


def test_rows_are_matched_by_name() -> None:
    rows = [Row(k="a", n=1), Row(n=2, k="b"), Row(k="c"), Row(n=4, k="d", more=5), ("e", 6)]
    with pytest.warns(ConfigurationWarning):
        found = RowOutput(PLAIN, "main").encode(rows, owner)
    assert found.to_pylist() == [
        {"k": "a", "n": 1},
        {"k": "b", "n": 2},
        {"k": "c", "n": None},
        {"k": "d", "n": 4},
        {"k": "e", "n": 6},
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Row(x=1), ["Row(x=1), which has none of the output columns (k, n)", "Row objects with these names"]),
        (("a",), ["tuple ('a',), which has 1 value; the output has 2 columns (k, n)", "for each column"]),
        (("a", 1, 2), ["which has 3 values; the output has 2 columns"]),
        # PySpark declares the names of columns only.
        (Row("a", 1, 2), ["which has 3 values; the output has 2 columns"]),  # type: ignore[call-overload]  # of any values
        (("a", 1, 2), ["returned tuple ('a', 1, 2), which has 3 values; the output has 2 columns (k, n)"]),
        (Three("a", 1, 2), ["Three(k='a', n=1, x=2), which has 3 values; the output has 2 columns"]),
        (Row("k", "n")("a"), ["which has 1 value; the output has 2 columns"]),
        (Row("k", "more", "n")("a"), ["which has 1 value; the output has 2 columns"]),
        (None, ["NoneType None, which is not a row", "Yield Row objects with the names (k, n)"]),
        ("text", ["str 'text', which is not a row"]),
        ({"k": "a", "n": 1}, ["dict {'k': 'a', 'n': 1}, which is not a row", "Yield Row(**values)"]),
        (["a", 1], ["list ['a', 1], which is not a row", "Yield each row separately"]),
        (pd.DataFrame({"k": ["a"]}), ["DataFrame k 0 a, which is not a row", "use transformWithStateInPandas"]),
        (Row(k="a", n="one"), ["'one'", "'n'", "bigint"]),
        (Row(k="a", n=1.5), ["1.5", "whole number"]),
        (Row(k="a", n=2**63), ["'n'"]),
    ],
)
def test_a_row_that_does_not_fit_is_refused_with_its_key(row: Any, words: list[str]) -> None:
    with pytest.raises(ProcessorError) as failure:
        RowOutput(PLAIN, "main").encode([Row(k="a", n=1), row], owner)
    assert failure.value.kind == ErrorKind.OUTPUT_MISMATCH
    for word in ["key (1,)", *words]:
        assert word in str(failure.value)


@pytest.mark.parametrize("column", [StringType(), ArrayType(StringType())])
@pytest.mark.parametrize("row", [Row("k", "n")("a"), ("a",), ("a", [], 2)])
def test_rows_that_are_held_are_refused_when_they_are_encoded(column: DataType, row: Any) -> None:
    output = RowOutput(StructType([StructField("k", StringType()), StructField("n", column)]), "main")
    held = [row if output.hold is None else output.hold(row)] * 2
    with pytest.raises(ProcessorError, match="the output has 2 columns"):
        output.encode(held, owner)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Row(k="a"), "there are output rows without (n), for which null is used."),
        (Row(k="a", n=1, x=1, y=2), "there are output rows with (x, y), whose values are ignored."),
        (Row(K="a", n=1), "output rows without (k), for which null is used, and with (K), whose values are ignored."),
        (pd.DataFrame({"n": [1], "x": [2], "k": ["a"]}), "there are output rows with (x), whose values are ignored."),
    ],
)
def test_names_that_are_not_those_of_the_output_are_told_once(row: Any, words: str) -> None:
    output = RowOutput(PLAIN, "main") if isinstance(row, Row) else FrameOutput(PLAIN, "UTC", "main")
    with pytest.warns(ConfigurationWarning) as told:
        assert [output.encode([row] * count, owner).num_rows for count in (3, 1)] == [3, 1]
    (warning,) = told
    assert words in str(warning.message)
    assert str(warning.message).startswith("operator 'main': ")
    assert "The output columns are (k, n)" in str(warning.message)


@pytest.mark.parametrize("kind", [StringType(), ArrayType(StringType())])
def test_tuples_are_matched_by_position(kind: DataType) -> None:
    """Named ones too, as in Spark; also beside rows, and where values could be changed later."""
    output = RowOutput(StructType([StructField("k", kind), StructField("n", LongType())]), "main")
    value: Any = "a" if kind == StringType() else ["a"]
    tuples = [(value, 1), Two(value, 2), WithMethod(value, 3), Row(value, 4)]  # type: ignore[call-overload]  # of any values
    for rows in (tuples, tuples[:2], tuples[1:2], [*tuples, Row(n=5, k=value)]):
        held = [row if output.hold is None else output.hold(row) for row in rows]
        expected = [{"k": value, "n": number} for number in (1, 2, 3, 4, 5)]
        first = 1 if rows == tuples[1:2] else 0
        assert output.encode(held, owner).to_pylist() == expected[first : first + len(rows)]


def test_rows_in_another_order_are_not_worth_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RowOutput(PLAIN, "main").encode([Row(n=1, k="a"), ("a", 1), Row(k="a", n=1)], owner)
        frames_of(PLAIN, pd.DataFrame({"n": [1], "k": ["a"]}), pd.DataFrame([["a", 1, 2]]))
        frames_of(PLAIN, pd.DataFrame([["a", 1, 2]], columns=["k", "n", "n"]))


def frames_of(schema: StructType, *frames: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = FrameOutput(schema, "Asia/Kolkata", "main").encode(frames, owner).to_pylist()
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
    with pytest.warns(ConfigurationWarning):
        found = frames_of(PLAIN, *frames)
    assert [tuple(row.values()) for row in found] == [
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
    moments: list[Any] = [pd.Timestamp("1970-01-01", tz="UTC"), None]
    aware = naive.assign(at=moments)
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
    assert RowOutput(PLAIN, "main").encode([], owner).num_rows == 0
    empty = FrameOutput(PLAIN, "UTC", "main").encode([pd.DataFrame()], owner)
    assert empty.schema == pa.schema([("k", pa.string()), ("n", pa.int64())])


def test_a_held_row_that_does_not_fit_is_refused_with_its_key() -> None:
    output = RowOutput(StructType().add("k", "string").add("n", ArrayType(IntegerType())), "main")
    assert output.hold is not None
    held = [output.hold(("a", [1])), output.hold(("b", [2**40]))]
    with pytest.raises(ProcessorError, match=r"key \(1,\) returned list \[1099511627776\] for output column 'n'"):
        output.encode(held, owner)


# ---- What a call returns ----


class Gives(StatefulProcessor):
    """Returns a value itself; or yields it."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        return self._value

    def close(self) -> None:
        pass


class Yields(Gives):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        yield self._value


class Fails(Gives):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        return iter(5)  # type: ignore[call-overload]  # of any values


def failure_of(processor: Gives, output: str = "k string, n long", *, pandas: bool = False) -> ProcessorError:
    with (
        Harness(processor, input="k string, n long", keys=["k"], output=output, pandas=pandas) as harness,
        pytest.raises(ProcessorError) as failure,
    ):
        harness.push([("a", 1)])
    return failure.value


FRAME = pd.DataFrame({"k": ["a"], "n": [1]})


@pytest.mark.parametrize(
    ("pandas", "value", "part"),
    [
        (False, Row(k="a", n=1), "str 'a', which is not a row"),
        (False, ("a", 1), "str 'a', which is not a row"),
        (False, {"k": "a", "n": 1}, "str 'k', which is not a row"),
        (False, FRAME, "str 'k', which is not a row"),
        (False, "text", "str 't', which is not a row"),
        (True, FRAME, "str 'k', not a pandas DataFrame"),
        (True, Row(k="a", n=1), "str 'a', not a pandas DataFrame"),
    ],
)
@pytest.mark.parametrize("output", ["k string, n long", "k string, n array<long>"])
def test_a_row_that_is_returned_and_not_yielded_is_recognized(pandas: bool, value: Any, part: str, output: str) -> None:
    error = failure_of(Gives(value), output, pandas=pandas)
    assert error.kind is ErrorKind.OUTPUT_MISMATCH
    assert error.message.startswith(f"operator 'main': key ('a',) returned {part}.")
    assert error.hint.startswith("Yield it, or return a list")


@pytest.mark.parametrize(
    ("processor", "hint"),
    [
        (Gives([{"k": "a"}]), "Yield Row(**values)"),
        (Yields({"k": "a"}), "Yield Row(**values)"),
        (Yields("text"), "Yield Row objects"),
        (Yields(FRAME), "Yield Row objects"),
    ],
)
def test_what_is_no_row_says_how_to_yield_one(processor: Gives, hint: str) -> None:
    assert failure_of(processor).hint.startswith(hint)


@pytest.mark.parametrize("pandas", [False, True])
@pytest.mark.parametrize(("value", "shown"), [(None, "None"), (5, "a value of type int")])
def test_a_call_that_returns_nothing_to_iterate_over_is_named(value: Any, shown: str, pandas: bool) -> None:
    error = failure_of(Gives(value), pandas=pandas)
    where = "operator 'main': handleInputRows() failed for key ('a',)"
    assert (error.message, error.kind) == (f"{where}: it returned {shown}, not rows.", ErrorKind.OUTPUT_MISMATCH)
    assert error.hint == "Yield rows, or return a list of them, empty if there are none."


def test_the_same_mistake_inside_the_processor_is_the_processors_own() -> None:
    assert failure_of(Fails(None)).message.endswith("TypeError: 'int' object is not iterable.")
