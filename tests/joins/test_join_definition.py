"""The definitions of joins: its output columns, and mistakes that are refused before a query starts."""

from __future__ import annotations

import datetime
from typing import Any

import pyarrow.compute as pc
import pytest

from statelog import ConfigurationError
from statelog.joins.build import AsofDefinition, IntervalDefinition, JoinInput, JoinSides
from statelog.testing.rows import read_schema

COLUMNS = "k string, at timestamp, n long"


def sides(
    method: str = "join_interval",
    left: str = COLUMNS,
    right: str = COLUMNS,
    keys: tuple[list[str], list[str]] = (["k"], ["k"]),
    times: tuple[str, str] = ("at", "at"),
    **more: Any,
) -> JoinSides:
    one, other = [
        JoinInput(name, read_schema(schema, name), of_side, time)
        for name, schema, of_side, time in zip(("left", "right"), (left, right), keys, times, strict=True)
    ]
    return JoinSides(one, other, method, **more)


def definition(
    lower: Any = 0,
    upper: Any = "10 seconds",
    how: Any = "inner",
    timeout: Any = None,
    condition: Any = None,
    **of_sides: Any,
) -> IntervalDefinition:
    return IntervalDefinition(sides(**of_sides), lower, upper, how, timeout, condition)


def as_of(tolerance: Any = None, how: Any = "inner", wait: Any = True, **of_sides: Any) -> AsofDefinition:
    return AsofDefinition(sides("join_asof", **of_sides), tolerance, how, wait)


def columns(**arguments: Any) -> list[str]:
    return definition(**arguments).plan().output.names


def test_equal_names_get_suffixes() -> None:
    assert columns() == ["k", "at_left", "n_left", "at_right", "n_right"]
    assert columns(suffixes=("", "_b")) == ["k", "at", "n", "at_b", "n_b"]
    assert columns(right="k string, at timestamp, N long") == ["k", "at_left", "n", "at_right", "N"]
    insensitive = columns(right="k string, at timestamp, N long", is_case_sensitive=False)
    assert insensitive == ["k", "at_left", "n_left", "at_right", "N_right"]


def test_the_key_is_there_once_under_its_name_on_the_left() -> None:
    right = "id string, at timestamp, k int"
    assert columns(right=right, keys=(["k"], ["id"])) == ["k", "at_left", "n", "at_right", "k_right"]
    assert columns(right=right, keys=(["k"], ["id"]), how="anti") == ["k", "at", "n"]
    two = definition(
        left="b int, at timestamp, a string", right="a string, t timestamp, b int", keys=(["a", "b"], ["a", "b"]),
        times=("at", "t"),
    )  # fmt: skip
    assert two.plan().output.simpleString() == "struct<a:string,b:int,at:timestamp,t:timestamp>"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"how": "outer"}, "how is 'outer'"),
        ({"condition": "n_left > 5"}, "condition is 'n_left > 5'"),
        ({"condition": pc.field("n") > 5}, r"condition \(n > 5\) cannot be computed for a pair: No match for"),
        ({"condition": pc.field("n_left")}, "cannot be computed for a pair: it is of type int64, not bool"),
        ({"condition": pc.field("k") > pc.field("n_left")}, "cannot be computed for a pair: Function"),
        ({"condition": pc.field("n") > 5, "how": "anti"}, "cannot be computed for a pair"),
        ({"how": None}, "how is None"),
        ({"how": ["left"]}, r"how is \['left'\]"),
        ({"lower": 5, "upper": 4}, "lower, 5 ms, is after upper, 4 ms"),
        ({"lower": "1 month"}, "lower is str '1 month'"),
        ({"upper": 1.5}, "upper is float 1.5"),
        ({"upper": datetime.timedelta(microseconds=1)}, "upper is"),
        ({"suffixes": "_right"}, "suffixes is '_right'"),
        ({"suffixes": ("_right",)}, "suffixes is"),
        ({"suffixes": 5}, "suffixes is 5"),
        ({"suffixes": ("", "")}, "two output columns are named 'at'"),
        ({"left": "k string, at timestamp, at_right int"}, "two output columns are named 'at_right'"),
        ({"keys": (["k"], ["n"])}, r"keyed by \(k string\), the right one by \(n bigint\)"),
        ({"keys": (["k"], ["k", "n"])}, r"keyed by \(k string\), the right one by \(k string, n bigint\)"),
        ({"times": ("n", "at")}, "the watermark of the left side names column 'n'"),
        ({"times": ("at", "seen")}, "the watermark of the right side names column 'seen'"),
        ({"keys": (["at"], ["at"])}, "the event time of the left side, 'at', is a grouping column"),
        ({"right": "k string, at timestamp_ntz"}, "left side is a timestamp, that of the right side a timestamp_ntz"),
        ({"left": "k string, at timestamp, join_matched int", "how": "left"}, "left side has a column 'join_matched'"),
        (
            {"right": "k string, at timestamp, join_matched int", "how": "full"},
            "right side has a column 'join_matched'",
        ),
        ({"left": "k string, at timestamp, join_arrived_ms int", "how": "anti"}, "has a column 'join_arrived_ms'"),
        ({"timeout": 1000}, "timeout is given, but how='inner' returns no rows without a match"),
        ({"timeout": 1000, "how": "semi"}, "timeout is given, but how='semi' returns no rows without a match"),
        ({"timeout": 0, "how": "left"}, "timeout is int 0"),
        ({"timeout": "1 month", "how": "left"}, "timeout is str '1 month'"),
    ],
)
def test_mistakes_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        definition(**arguments).plan()
    assert caught.value.hint


def test_the_columns_of_the_state_are_reserved_only_where_they_are_stored() -> None:
    assert "join_matched" in columns(left="k string, at timestamp, join_matched int", how="right")
    assert "join_matched" in columns(left="k string, at timestamp, join_matched int", how="anti")
    assert "join_arrived_ms" in columns(left="k string, at timestamp, join_arrived_ms int", how="right")


def test_the_timeout_is_recorded() -> None:
    timeouts = [None, 1, "1.5 seconds", datetime.timedelta(days=1)]
    plans = [definition(how="left", timeout=timeout).plan() for timeout in timeouts]
    recorded = [plan.operator.codecs.settings["join_timeout_ms"] for plan in plans]
    assert recorded == ["none", 1, 1500, 86_400_000]


def test_bounds_may_be_given_as_any_duration() -> None:
    plans = [
        definition(lower=lower, upper=0).plan() for lower in (-1500, "-1.5 seconds", datetime.timedelta(seconds=-1.5))
    ]
    assert {plan.operator.codecs.settings["join_lower_ms"] for plan in plans} == {-1500}


def test_an_asof_join_returns_the_columns_of_both_sides() -> None:
    plan = as_of(right="id string, t timestamp, n int", keys=(["k"], ["id"]), times=("at", "t"), how="left").plan()
    assert plan.output.simpleString() == "struct<k:string,at:timestamp,n_left:bigint,t:timestamp,n_right:int>"
    # Its state has no field of its own.
    assert "join_matched" in as_of(left="k string, at timestamp, join_matched int", how="left").plan().output.names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"how": "right"}, "join_asof: how is 'right'"),
        ({"how": None}, "join_asof: how is None"),
        ({"tolerance": -1}, "join_asof: tolerance is int -1"),
        ({"tolerance": "1 month"}, "join_asof: tolerance is str '1 month'"),
        ({"tolerance": datetime.timedelta(microseconds=1)}, "join_asof: tolerance is"),
        ({"wait": "no"}, "join_asof: wait is 'no'"),
        ({"wait": 1}, "join_asof: wait is 1"),
        ({"suffixes": ("", "")}, "join_asof: two output columns are named 'at'"),
        ({"suffixes": 5}, "join_asof: suffixes is 5"),
        ({"keys": (["k"], ["n"])}, r"join_asof: the left side is keyed by \(k string\), the right one by \(n bigint\)"),
        ({"times": ("at", "n")}, "join_asof: the watermark of the right side names column 'n'"),
        ({"keys": (["at"], ["at"])}, "join_asof: the event time of the left side, 'at', is a grouping column"),
        ({"right": "k string, at timestamp_ntz"}, "join_asof: the event time of the left side is a timestamp"),
    ],
)
def test_mistakes_of_asof_joins_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        as_of(**arguments).plan()
    assert caught.value.hint


def test_the_tolerance_is_recorded() -> None:
    tolerances = [None, 0, "1.5 seconds", datetime.timedelta(days=1)]
    recorded = [as_of(tolerance).plan().operator.codecs.settings["join_tolerance_ms"] for tolerance in tolerances]
    assert recorded == ["none", 0, 1500, 86_400_000]
