"""Sums and means of decimals that do not fit: of keys and windows, combined, over restarts, in both ANSI modes."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

import statelog
from statelog import CountWindows, ProcessorError, SessionWindows, SlidingWindows, TumblingWindows
from statelog.aggregates.build import KeyedDefinition, KeyedPlan, plan_aggregates
from statelog.convert.ddl import parse_ddl
from statelog.convert.times import TimeMode
from statelog.convert.types import arrow_type, key_schema
from statelog.runs.key_groups import row_hashes
from statelog.testing import Harness
from statelog.testing.rows import read_schema
from statelog.windows.build import WindowDefinition

MOST, LEAST = Decimal(10**38 - 1), Decimal(1 - 10**38)
SCHEMA = "user string, x decimal(38,0)"
TIMED = "user string, time timestamp, x decimal(38,0)"
AGGREGATES: dict[str, statelog.Aggregate] = {"total": statelog.Sum("x"), "mean": statelog.Mean("x")}


def planned(*, ansi: bool, combine: bool = False, schema: str = SCHEMA, **aggregates: statelog.Aggregate) -> KeyedPlan:
    columns = read_schema(schema, "input")
    definition = KeyedDefinition(columns, [0], key_schema([columns["user"]]), None, is_streaming=True, ansi=ansi)
    named = aggregates or AGGREGATES
    return plan_aggregates(definition, [], named, output_mode="update", ttl=None, combine=combine)


def of_keys(plan: KeyedPlan, **more: Any) -> Harness:
    return Harness(plan.operator, input=SCHEMA, output=plan.output, keys=["user"], timeMode=plan.time_mode, **more)


def rows_of(output: list[Any]) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, output))


def test_a_sum_that_has_overflowed_stays_null_over_a_restart() -> None:
    with of_keys(planned(ansi=False)) as query:
        found = query.push([("a", MOST), ("a", MOST), ("b", MOST)])
        assert rows_of(found) == [("a", None, None), ("b", MOST, None)]
        assert query.push([("a", Decimal(5))]) == [("a", None, None)]
        query.restart(3, keepLocal=False)
        found = query.push([("a", LEAST), ("b", Decimal(-1)), ("c", None)])
        assert rows_of(found) == [("a", None, None), ("b", Decimal(10**38 - 2), None), ("c", None, None)]
        assert query.push([("b", LEAST)]) == [("b", Decimal(-1), Decimal("-0.3333"))]
        assert query.push([("c", Decimal(1))]) == [("c", Decimal(1), Decimal(1))]


def test_a_mean_that_does_not_fit_is_null_and_comes_back() -> None:
    """Its sum fits: only the mean needs four more digits."""
    large = Decimal(10**36)
    with of_keys(planned(ansi=False)) as query:
        assert query.push([("a", large)]) == [("a", large, None)]
        assert query.push([("a", Decimal(0))] * 999) == [("a", large, Decimal(10**33))]


@pytest.mark.parametrize(
    ("values", "what"), [([MOST, MOST], r"a sum is out of range for decimal\(38,0\)"), ([MOST], "a mean")]
)
def test_in_ansi_mode_the_error_names_the_key(values: list[Decimal], what: str) -> None:
    with of_keys(planned(ansi=True), parallelism=1) as query:
        query.push([("a", Decimal(1))])
        with pytest.raises(ProcessorError, match=rf"key \('b',\): {what}"):
            query.push([("a", Decimal(1)), *(("b", value) for value in values)])


def test_a_sum_that_overflowed_without_ansi_mode_is_refused_with_it() -> None:
    with of_keys(planned(ansi=False)) as query:
        query.push([("a", MOST), ("a", MOST)])
        after = planned(ansi=True)
        with (
            Harness.restore(query.snapshot(), after.operator) as changed,
            pytest.raises(ProcessorError, match=r"key \('a',\): a sum is out of range"),
        ):
            changed.push([("a", Decimal(1))])


# ---- Windows ----


@pytest.mark.parametrize(
    "windows", [TumblingWindows(100), SlidingWindows(100, 10), SessionWindows(100), CountWindows(4)], ids=str
)
@pytest.mark.parametrize("ansi", [False, True])
def test_windows_keep_an_overflow(windows: Any, ansi: bool) -> None:
    is_counted = isinstance(windows, CountWindows)
    plan = WindowDefinition(
        read_schema(TIMED, "input"),
        ["user"],
        "UTC",
        windows,
        TimeMode.NONE if is_counted else TimeMode.EVENT_TIME,
        None if is_counted else "time",
        ansi=ansi,
        parse=parse_ddl,
    ).aggregated([one.alias(name) for name, one in AGGREGATES.items()])
    at = [datetime(2026, 1, 1, 0, 0, 0, 1000 * number, tzinfo=UTC) for number in (11, 12, 13, 14)]
    more: dict[str, Any] = {} if is_counted else {"eventTime": "time"}
    with Harness(
        plan.operator, input=TIMED, output=plan.output, keys=["user"], timeMode=plan.time_mode, **more
    ) as query:

        def run() -> list[Any]:
            output = query.push([("a", at[0], MOST)])
            output += query.push([("a", at[1], MOST)])
            query.restart(2, keepLocal=False)
            output += query.push([("a", at[2], LEAST), ("a", at[3], Decimal(5))])
            return output if is_counted else output + query.advanceWatermark(int(at[0].timestamp()) * 1000 + 1000)

        if ansi:
            with pytest.raises(ProcessorError, match=r"key \('a',\): a sum is out of range"):
                run()
            return
        assert {tuple(row)[-2:] for row in run()} == {(None, None)}


def test_a_window_whose_mean_does_not_fit_names_its_key() -> None:
    """The sum fits, so nothing is wrong until the window is returned."""
    definition = WindowDefinition(
        read_schema(TIMED, "input"), ["user"], "UTC", TumblingWindows(10), TimeMode.EVENT_TIME, "time", parse=parse_ddl
    )
    plan = definition.aggregated([statelog.Mean("x").alias("mean")])
    with Harness(
        plan.operator, input=TIMED, output=plan.output, keys=["user"], timeMode=plan.time_mode, eventTime="time"
    ) as query:
        at = datetime(1970, 1, 1, 0, 0, 0, 1000, tzinfo=UTC)
        query.push([("a", at, Decimal(1)), ("b", at, MOST)])
        with pytest.raises(ProcessorError, match=r"key \('b',\): a mean is out of range for decimal\(38,4\)"):
            query.advanceWatermark(100)


# ---- Before the shuffle ----


def combined(plan: KeyedPlan, tasks: list[list[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    """The partial aggregates of tasks."""
    assert plan.step is not None
    step = plan.step(None)
    partials: list[tuple[Any, ...]] = []
    columns = read_schema(SCHEMA, "input")
    for rows in tasks:
        arrays = [
            pa.array(values, arrow_type(field.dataType, "x"))
            for values, field in zip(zip(*rows, strict=True), columns, strict=True)
        ]
        hashes = row_hashes(arrays[:1]).view(np.int64)
        batch = pa.RecordBatch.from_arrays([*arrays, pa.array(hashes)], names=["user", "x", "hash"])
        for part in step.run([batch]):
            partials += zip(*(column.to_pylist() for column in part.columns[:-1]), strict=True)
    return partials


def test_an_overflow_in_one_task_goes_along() -> None:
    plan = planned(ansi=False, combine=True)
    assert plan.step is not None
    output = StructType([StructField("user", StringType()), *plan.output.fields[1:]])
    with Harness(plan.operator, input=plan.step(None).output, output=output, keys=["p0"]) as query:
        partials = combined(plan, [[("a", MOST), ("a", MOST), ("b", MOST)], [("a", LEAST), ("b", LEAST)]])
        assert rows_of(query.push(partials)) == [("a", None, None), ("b", Decimal(0), Decimal(0))]
        assert query.push(combined(plan, [[("a", Decimal(1))]])) == [("a", None, None)]


@pytest.mark.parametrize("kind", ["bigint", "decimal(38,0)"])
def test_an_overflow_before_the_shuffle_names_the_key(kind: str) -> None:
    plan = planned(ansi=True, combine=True, schema=f"user string, x {kind}", total=statelog.Sum("x"))
    assert plan.step is not None
    numbers = [2**62, 1, 2**62] if kind == "bigint" else [MOST, Decimal(1), MOST]
    kinds = [pa.string(), pa.int64() if kind == "bigint" else pa.decimal128(38, 0)]
    arrays = [pa.array(values, own) for values, own in zip((["b", "a", "b"], numbers), kinds, strict=True)]
    hashes = pa.array(row_hashes(arrays[:1]).view(np.int64))
    batch = pa.RecordBatch.from_arrays([*arrays, hashes], names=["user", "x", "hash"])
    with pytest.raises(ProcessorError, match=r"^key \('b',\): a sum is out of range"):
        list(plan.step(None).run([batch]))
