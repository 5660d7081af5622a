"""Names of columns that aggregates are given, as Spark understands them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import statelog
from statelog import ConfigurationError
from statelog.aggregates.accumulators import resolved
from statelog.aggregates.build import KeyedDefinition, plan_latest, plan_top
from statelog.convert.types import key_schema
from statelog.testing.rows import read_schema

SCHEMA = read_schema(
    "user string, `v.1` long, `a``b` long, `at` timestamp, Size long, size long, Price double", "input"
)


@pytest.mark.parametrize(
    ("given", "column"),
    [
        ("v.1", "v.1"),
        ("`v.1`", "v.1"),
        ("`a``b`", "a`b"),
        ("a`b", "a`b"),
        ("PRICE", "Price"),
        ("`price`", "Price"),
        ("size", "size"),
        ("Size", "Size"),
    ],
)
def test_all_aggregates_find_a_column_by_the_names_that_spark_takes(given: str, column: str) -> None:
    for made, expected in (
        (statelog.Sum(given), statelog.Sum(column)),
        (statelog.Count(given), statelog.Count(column)),
        (statelog.Last(given, by=given), statelog.Last(column, by=column)),
        (statelog.ApproxCountDistinct(given, rsd=0.1), statelog.ApproxCountDistinct(column, rsd=0.1)),
        (statelog.Quantiles(given, [0.5]).alias("q"), statelog.Quantiles(column, [0.5]).alias("q")),
    ):
        found = resolved(made, SCHEMA, is_case_sensitive=False)
        assert found == expected
        assert found.output_name == expected.output_name
    definition = KeyedDefinition(
        SCHEMA, [0], key_schema([SCHEMA["user"]]), None, is_streaming=True, ansi=True, is_case_sensitive=False
    )
    planners: list[Callable[[str], Any]] = [
        lambda by: plan_latest(definition, by, None, combine=False),
        lambda by: plan_top(definition, 2, by, None, combine=False),
    ]
    for plan in planners:
        settings = plan(given).operator.codecs.settings
        assert settings == plan(column).operator.codecs.settings


@pytest.mark.parametrize(
    ("given", "is_case_sensitive"), [("SIZE", False), ("PRICE", True), ("v", False), ("``", False), ("`v.1", False)]
)
def test_a_name_of_no_column_or_of_several_is_refused(given: str, is_case_sensitive: bool) -> None:
    for made in (statelog.Sum(given), statelog.Last("user", by=given)):
        with pytest.raises(
            ConfigurationError, match=r"there is no such column.*user, v\.1, a`b, at, Size, size, Price"
        ):
            resolved(made, SCHEMA, is_case_sensitive=is_case_sensitive)
    with pytest.raises(ConfigurationError, match="no such column"):
        resolved(statelog.Sum(None), SCHEMA, is_case_sensitive=is_case_sensitive)
