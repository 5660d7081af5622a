"""What becomes of Python values, beside what Spark makes of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pyspark.sql import SparkSession

import statelog
from tests.conversions import page
from tests.conversions.answers import SPARK, SPARK_INPUTS, STATELOG, Answers, read
from tests.conversions.cases import INPUTS, ZONE
from tests.conversions.differences import by_rule, differences
from tests.conversions.probes import FrameInputProbe, InputProbe, WholeNumbersProbe
from tests.conversions.spark import input_rows
from tests.conversions.statelog_answers import ask


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = os.environ.get("TZ")
    monkeypatch.setenv("TZ", ZONE)
    time.tzset()
    yield
    if before is None:
        monkeypatch.delenv("TZ")
    else:
        monkeypatch.setenv("TZ", before)
    time.tzset()


def test_values_become_what_is_written_down(zone: None) -> None:
    written, found = read(STATELOG), ask()
    assert {case: (found[case], written.get(case)) for case in found if found[case] != written.get(case)} == {}


def test_every_difference_from_spark_has_a_reason_and_every_reason_a_difference() -> None:
    found = by_rule(differences(read(SPARK), read(STATELOG)))
    unexplained = found.pop(None)
    assert unexplained == []
    assert [rule.title for rule, cases in found.items() if rule is not None and not cases] == []


def test_the_page_is_printed_from_the_answers() -> None:
    assert page.PAGE.read_text() == page.page(), "run ./dev python -m tests.conversions.page"


@pytest.mark.spark
@pytest.mark.parametrize("in_pandas", [False, True], ids=["rows", "frames"])
def test_columns_and_keys_reach_processors_as_spark_gives_them(spark: SparkSession, in_pandas: bool) -> None:
    found: Answers = {}
    with _settings(spark, {"spark.sql.session.timeZone": ZONE, "spark.sql.timeType.enabled": "true"}):
        for kind in INPUTS:
            found |= _of_inputs(spark, kind, in_pandas=in_pandas)
    expected = read(SPARK_INPUTS)
    different = {case: (expected[case], seen) for case, seen in found.items() if seen != expected[case]}
    assert {case: pair for case, pair in different.items() if not _is_known(*case, *pair)} == {}


@pytest.mark.spark
@pytest.mark.parametrize("prefers", ["false", "true"])
def test_whole_numbers_beside_nulls_are_in_frames_what_the_session_says(spark: SparkSession, prefers: str) -> None:
    prefer = "spark.sql.execution.pythonUDF.pandas.preferIntExtensionDtype"
    with _settings(spark, {prefer: prefers, "spark.sql.shuffle.partitions": "1"}):
        rows = [("a", 1), ("a", 2), ("b", 3), ("b", None), ("c", None)]
        df = spark.createDataFrame(rows, "k string, n int").coalesce(1)
        seen = [
            sorted(row.seen for row in keyed.transformWithStateInPandas(*arguments).collect())
            for keyed in (df.groupBy("k"), statelog.key_by(df, "k"))
            for arguments in [(WholeNumbersProbe(), "seen string", "append", "None")]
        ]
    assert seen[0] == seen[1]
    assert seen[0][0] == ("a: int32 [1, 2]" if prefers == "true" else "a: float64 [1.0, 2.0]")


@contextmanager
def _settings(spark: SparkSession, settings: dict[str, str]) -> Iterator[None]:
    before = {name: spark.conf.get(name) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, old in before.items():
            spark.conf.set(name, str(old))


def _of_inputs(spark: SparkSession, kind: str, *, in_pandas: bool) -> Answers:
    found: Answers = {}
    for column in ("text", "f"):
        way = (
            f"{'key of ' if column == 'f' else 'input '}{'frame' if in_pandas else 'row'}{'s' if column == 'f' else ''}"
        )
        texts = [*INPUTS[kind], "null"]
        try:
            keyed = statelog.key_by(input_rows(spark, kind), column, parallelism=1)
            apply = keyed.transformWithStateInPandas if in_pandas else keyed.transformWithState
            probe = FrameInputProbe() if in_pandas else InputProbe()
            rows = apply(probe, "seen string", "append", "None").collect()
        except Exception:
            found |= {(kind, way, text): "refused" for text in texts}
            continue
        for text, in_column, in_key in (row.seen.split("\t") for row in rows):
            found[kind, way, text] = in_key if column == "f" else in_column
    return found


def _is_known(kind: str, way: str, text: str, spark: str, seen: str) -> bool:
    """Whether a difference is one of those that docs/coming-from-spark.md names."""
    if way.startswith("key") and kind.startswith("string collate"):
        return seen == "refused"
    if way.startswith("key") and kind.startswith(("array", "map", "timestamp")):
        return spark == "refused"
    if way == "key of frames" and text == "null":
        return seen == "NoneType None"
    if way == "key of frames" and kind in ("tinyint", "smallint", "int", "bigint"):
        return seen.startswith("int") and (kind == "bigint" or spark == seen.replace("int", "float") + ".0")
    return (kind, spark, way) in {
        ("interval", "refused", "input frame"),
        ("interval day to second", "pandas._libs.tslibs.nattype.NaTType NaTType NaT in datetime64[ns]", "input frame"),
    }
