"""Windows whose results the user's own functions compute row by row, as each version has stored them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql.types import DoubleType, LongType, StringType, StructField, StructType

import statelog
from statelog.testing import Harness
from statelog.windows.build import WindowPlan
from tests.compat.stored import read_query, write_query
from tests.compat.windows_support import FIRST, SECOND, WINDOWS, definition, in_windows, make_harness, rows_at

FIXTURES: Final = Path(__file__).parent / "window-results"


class Average(statelog.AggregateFunction[Any, Any]):
    def createAccumulator(self) -> tuple[int, int]:
        return (0, 0)

    def add(self, row: Any, accumulator: tuple[Any, ...]) -> tuple[Any, ...]:
        return (accumulator[0] + row.value, accumulator[1] + 1)

    def getResult(self, accumulator: tuple[Any, ...]) -> Any:
        return (accumulator[0] / accumulator[1],)

    def merge(self, one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
        return (one[0] + other[0], one[1] + other[1])


class Join(statelog.WindowProcessor):
    def process(self, key: Any, window: Any, rows: Iterator[Any], context: Any) -> Iterator[Any]:
        yield (",".join(str(row.value) for row in rows),)


def add(one: Any, other: Any) -> tuple[int]:
    return (one[0] + other[0],)


EXPECTED: Final[dict[str, Callable[[list[int]], Any]]] = {
    "reduce": sum,
    "aggregate": lambda values: sum(values) / len(values),
    "process": lambda values: ",".join(map(str, values)),
}


def plan(windows: str, results: str) -> WindowPlan:
    defined = definition(windows)
    if results == "reduce":
        return defined.reduced(add, _fields(value=LongType()), None)
    if results == "aggregate":
        return defined.folded(Average(), _fields(total=LongType(), n=LongType()), _fields(mean=DoubleType()))
    return defined.processed(Join(), _fields(values=StringType()))


def _fields(**types: Any) -> StructType:
    return StructType([StructField(name, each) for name, each in types.items()])


def write(directory: Path) -> None:
    """Write the fixture: one batch, after which every kind of window has rows."""
    for windows in WINDOWS:
        for results in EXPECTED:
            with make_harness(windows, plan(windows, results)) as harness:
                harness.push(rows_at(FIRST), 1_000)
                write_query(directory / windows / results, harness)


@pytest.mark.parametrize("results", EXPECTED)
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("fixture", sorted(FIXTURES.glob("*")), ids=lambda path: path.name)
def test_open_windows_go_on(fixture: Path, windows: str, results: str) -> None:
    made = plan(windows, results)
    snapshot = read_query(fixture / windows / results, make_harness(windows, made), [1_000])
    with Harness.restore(snapshot, made.operator, parallelism=3) as harness:
        found = harness.push(rows_at(SECOND), 2_000)
        found += [] if windows == "count" else harness.advanceWatermark(1_000)
    assert sorted((row[-1] for row in found), key=str) == sorted(map(EXPECTED[results], in_windows(windows)), key=str)
