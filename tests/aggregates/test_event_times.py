"""The event time of ready-made operators of keys: which column it is, when keys are complete, which rows are late."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

import statelog
from statelog import ProcessorError, Ttl
from statelog.aggregates.build import KeyedDefinition, KeyedPlan, plan_aggregates, plan_deduplication, plan_latest
from statelog.convert.codecs import recorded_settings
from statelog.convert.types import key_schema
from statelog.spark.plan.keyed_plan import WATERMARK_DELAY, watermark_column
from statelog.testing import Harness
from tests.model.aggregates_model_support import INPUT, defined, planned

MARK = {WATERMARK_DELAY: 10_000}
WINDOW = StructType([StructField("start", TimestampType()), StructField("end", TimestampType())])
SCHEMA = StructType(
    [
        StructField("user", StringType()),
        StructField("time", TimestampType(), metadata=MARK),
        StructField("w", WINDOW, metadata=MARK),
        StructField("n", LongType()),
    ]
)
"""A stream with a watermark, and with Spark's window of the time: Spark marks both columns."""


def at(second: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(second, datetime.UTC)


@pytest.mark.parametrize(
    ("keys", "column"),
    [
        (["user", "w"], "w"),
        (["w", "user"], "w"),
        (["user", "time"], "time"),
        (["w", "time"], "time"),
        (["user"], "time"),
        (["n"], "time"),
    ],
)
def test_of_the_columns_with_the_watermark_a_grouping_column_counts(keys: list[str], column: str) -> None:
    place = watermark_column(SCHEMA, keys)
    assert place is not None
    assert SCHEMA.names[place] == column


def test_a_stream_without_a_watermark_has_no_column_with_one() -> None:
    assert watermark_column(StructType([SCHEMA["user"], SCHEMA["n"]]), ["user"]) is None


def test_a_key_with_a_window_is_complete_when_the_watermark_passes_its_end() -> None:
    keys = ["user", "w"]
    place = watermark_column(SCHEMA, keys)
    assert place is not None
    definition = KeyedDefinition(
        SCHEMA,
        [SCHEMA.names.index(name) for name in keys],
        key_schema([SCHEMA[name] for name in keys]),
        SCHEMA.names[place],
        is_streaming=True,
        ansi=True,
    )
    rows = {"rows": statelog.Count()}
    plan = plan_aggregates(definition, [], rows, output_mode="append", ttl=None, combine=False)
    window = (at(0), at(60))
    with Harness(
        plan.operator, input=SCHEMA, output=plan.output, keys=keys, timeMode=plan.time_mode, eventTime="time"
    ) as harness:
        assert harness.push([("ann", at(5), window, 1), ("ann", at(50), window, 2)]) == []
        assert harness.advanceWatermark(59_999) == []
        (row,) = harness.advanceWatermark(60_000)
        assert (row.user, row.rows) == ("ann", 2)


# ---- Event time of the output ----


ROWS: dict[str, Callable[[Ttl | None, bool], KeyedPlan]] = {
    "dedup": lambda ttl, drops: plan_deduplication(defined(["user"], "time"), ttl, None, drops_late=drops),
    "latest": lambda ttl, drops: plan_latest(defined(["user"], "time"), "time", ttl, combine=False, drops_late=drops),
}


def with_output_time(plan: KeyedPlan, column: str, time_mode: str) -> Harness:
    """A query whose output has an event time, for a later operator."""
    return Harness(
        plan.operator,
        input=INPUT,
        output=plan.output,
        keys=["user"],
        timeMode=time_mode,
        eventTime="time",
        eventTimeColumnName=column,
    )


def users(output: list[Any]) -> list[str]:
    return sorted(row.user for row in output)


@pytest.mark.parametrize("ttl", [None, Ttl(60_000), Ttl(60_000, "event")], ids=["no ttl", "processing", "event"])
@pytest.mark.parametrize("method", ROWS)
def test_late_rows_that_would_be_returned_late_are_dropped_and_counted(method: str, ttl: Ttl | None) -> None:
    plan = ROWS[method](ttl, True)
    with with_output_time(plan, "time", plan.time_mode) as harness:
        assert users(harness.push([("ann", at(1), 1, 0.0)])) == ["ann"]
        harness.advanceWatermark(5_000)
        assert users(harness.push([("bob", at(2), 2, 0.0), ("cem", at(6), 3, 0.0)])) == ["cem"]
        assert harness.checkpoints[-1].late_rows == 1
        assert users(harness.push([("bob", at(7), 4, 0.0)])) == ["bob"]


@pytest.mark.parametrize("ttl", [None, Ttl(60_000), Ttl(60_000, "event")], ids=["no ttl", "processing", "event"])
@pytest.mark.parametrize("method", ROWS)
def test_the_state_does_not_depend_on_whether_late_rows_are_dropped(method: str, ttl: Ttl | None) -> None:
    """So the output may have an event time from any start on, and no longer."""
    plain, dropping = [ROWS[method](ttl, drops) for drops in (False, True)]
    assert recorded_settings(dropping.time_mode, dropping.operator.codecs) == recorded_settings(
        plain.time_mode, plain.operator.codecs
    )


def test_an_aggregate_that_is_returned_late_is_told_to_go_without_an_event_time() -> None:
    plan = planned(["user"], aggregates={"newest": statelog.Max("time")})
    with with_output_time(plan, "newest", "EventTime") as harness:
        harness.push([("ann", at(1), 1, 0.0)])
        harness.advanceWatermark(5_000)
        with pytest.raises(ProcessorError, match="in column 'newest', which is late.* omit its eventTimeColumnName"):
            harness.push([("ann", at(2), 2, 0.0)])
