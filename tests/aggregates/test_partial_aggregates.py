"""Partial aggregates before the shuffle: nothing is lost, whatever is combined, and the same input decides alike."""

from __future__ import annotations

import datetime
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import DoubleType, LongType, StringType, StructField, StructType, TimestampType

import statelog
from statelog.aggregates.build import KeyedDefinition, PartialAggregates, plan_aggregates
from statelog.convert.types import arrow_type, key_schema
from statelog.operators.event_time import EventTime
from statelog.runs.key_groups import Hashes
from statelog.testing import Harness

SCHEMA = StructType(
    [
        StructField("n", LongType()),
        StructField("user", StringType()),
        StructField("time", TimestampType()),
        StructField("x", DoubleType()),
    ]
)
TYPES = [arrow_type(field.dataType, field.name) for field in SCHEMA]
UTC = datetime.UTC


def plan_of(aggregates: dict[str, Any], **more: Any) -> Any:
    definition = KeyedDefinition(SCHEMA, [1], key_schema([SCHEMA["user"]]), None, is_streaming=True, ansi=True)
    return plan_aggregates(definition, [], aggregates, output_mode="update", ttl=None, combine=True, **more)


def batches_of(rows: list[tuple[Any, ...]], hashes: Hashes, cuts: list[int]) -> list[pa.RecordBatch]:
    """The input of a task: rows with the hashes of their keys as the last column."""
    columns = [pa.array([row[index] for row in rows], kind) for index, kind in enumerate(TYPES)]
    whole = pa.RecordBatch.from_arrays([*columns, pa.array(hashes.view(np.int64))], names=list("abcde"))
    bounds = [0, *sorted(cuts), len(rows)]
    return [whole.slice(start, end - start) for start, end in pairwise(bounds)]


ROWS = st.lists(
    st.tuples(
        st.none() | st.integers(-5, 5),
        st.sampled_from(["a", "b", "c", None]),
        st.none() | st.integers(0, 5).map(lambda ms: datetime.datetime(2026, 1, 1, tzinfo=UTC)),
        st.none() | st.sampled_from([0.5, 1.5, float("nan")]),
    ),
    max_size=10,
)


@given(
    st.lists(st.lists(ROWS, min_size=1, max_size=3), min_size=1, max_size=3), st.lists(st.integers(0, 10), max_size=2)
)
def test_partials_of_tasks_make_the_same_aggregates(story: list[list[list[Any]]], cuts: list[int]) -> None:
    """Batches of several tasks, each of which reduces its rows before the operator gets them."""
    plan = plan_of(
        {
            "rows": statelog.Count(),
            "total": statelog.Sum("n"),
            "mean": statelog.Mean("n"),
            "most": statelog.Max("x"),
            "last": statelog.Last("n", by="n"),
            "distinct": statelog.CountDistinct("x"),
            "about": statelog.ApproxCountDistinct("x"),
            "median": statelog.Quantiles("n", [0.5]),
        }
    )
    step = plan.step(None)
    held: dict[Any, list[Any]] = defaultdict(list)
    output = StructType([StructField("user", StringType()), *plan.output.fields[1:]])
    with Harness(plan.operator, input=step.output, output=output, keys=["p0"]) as query:
        for batch in story:
            partials: list[tuple[Any, ...]] = []
            for rows in batch:
                hashes = np.array([len(str(row[1])) for row in rows], np.uint64)
                for part in step.run(batches_of(rows, hashes, [cut for cut in cuts if cut <= len(rows)])):
                    partials += zip(*(column.to_pylist() for column in part.columns[:-1]), strict=True)
            assert len(partials) <= sum(map(len, batch))
            changed = {row[1] for rows in batch for row in rows}
            for rows in batch:
                for row in rows:
                    held[row[1]].append(row)
            found = {row[0]: tuple(row[1:]) for row in query.push(partials)}
            assert found.keys() == changed
            for user in changed:
                numbers = [row[0] for row in held[user] if row[0] is not None]
                xs = [row[3] for row in held[user] if row[3] is not None]
                nan = any(x != x for x in xs)
                rows_, total, mean, most, last, distinct, about, median = found[user]
                assert rows_ == len(held[user])
                assert total == (sum(numbers) if numbers else None)
                assert mean == (pytest.approx(sum(numbers) / len(numbers)) if numbers else None)
                assert (most != most) if nan else most == max(xs, default=None)
                assert last == max(numbers, default=None)
                assert distinct == about == len({"nan" if x != x else x for x in xs})
                assert median == ([sorted(numbers)[(len(numbers) - 1) // 2]] if numbers else None)


def counted(step: PartialAggregates, keys: list[int], batch_rows: int = 10_000) -> tuple[int, Counter[str]]:
    """The number of partials of a task's rows, and how many rows they stand for, by key."""
    mixed = (np.array(keys, np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ np.uint64(0x5851F42D4C957F2D)
    hashes = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    rows = [(1, str(key), None, None) for key in keys]
    total: Counter[str] = Counter()
    count = 0
    for part in step.run(batches_of(rows, hashes, list(range(batch_rows, len(keys), batch_rows)))):
        assert part.schema.names[-1] == f"p{part.num_columns - 1}"
        count += part.num_rows
        for key, number in zip(part.column(0).to_pylist(), part.column(1).to_pylist(), strict=True):
            total[key] += number
    return count, total


def test_only_what_repeats_is_combined() -> None:
    step = plan_of({"rows": statelog.Count()}).step(None)
    distinct = list(range(20_000))
    repeated = [key % 500 for key in distinct]
    twice = [key % 10_000 for key in distinct]
    hot = [key if key % 5 else 0 for key in distinct]
    for keys, expected in ((distinct, 20_000), (twice, 20_000), (repeated, 500), (hot, 16_001)):
        count, total = counted(step, keys)
        assert total == Counter(map(str, keys))
        assert count == expected
    assert counted(step, list(range(100)))[0] == 100


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        (statelog.Sum("x"), True),
        (statelog.Mean("n"), True),
        (statelog.Variance("x"), True),
        (statelog.Quantiles("x", [0.5]), True),
        (statelog.ApproxCountDistinct("x"), False),
        (statelog.Sum("n"), False),
        (statelog.Max("x"), False),
    ],
)
def test_sums_of_floats_may_differ_in_a_retry(aggregate: statelog.Aggregate, expected: bool) -> None:
    assert plan_of({"value": aggregate}).operator.codecs.adds_floats is expected


def test_the_newest_time_and_the_number_of_rows_go_along() -> None:
    event_time = EventTime(2, drops_late=True)
    step = plan_of({"rows": statelog.Count()}).step(event_time)
    times = [None, datetime.datetime(2026, 1, 1, tzinfo=UTC), datetime.datetime(2026, 1, 2, tzinfo=UTC), None]
    rows = [(1, user, time, None) for user, time in zip("aaab", times, strict=True)]
    (part,) = step.run(batches_of(rows, np.array([1, 1, 1, 2], np.uint64), []))
    assert part.column(0).to_pylist() == ["a", "b"]
    assert part.column(1).to_pylist() == [times[2], None]
    assert part.column(2).to_pylist() == [3, 1]
    after = step.output_event_time
    assert after is not None
    assert after.times_us(part).to_pylist() == [int(times[2].timestamp()) * 10**6 if times[2] else 0, None]
    assert after.count(part, np.array([True, False])) == 3
