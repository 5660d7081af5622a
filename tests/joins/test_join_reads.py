"""What joins read, write and return at once: only what is near or due, however many rows a key has."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statelog.clock import SystemClock
from statelog.joins.build import JoinPlan
from statelog.joins.pairs import joined_ranges
from statelog.operators.keyed.operator import BatchContext, KeyedRows
from statelog.operators.keyed.subtask import KeyedSubtask
from statelog.options import Options
from statelog.runs.byte_slices import BUDGET, Budget
from statelog.runs.key_groups import row_hashes
from statelog.runs.reader import Run
from statelog.runs.times import NO_TIME_MS, Moment
from statelog.spark.worker.specs import NO_ROWS
from statelog.stopwatch import Stopwatch
from statelog.testing.keyed import KeyedQuery
from statelog.testing.rows import OperatorArguments
from tests.counting_table import Counting
from tests.joins.joins_model import asof_plan, join_plan

POOLS: list[pa.MemoryPool] = []
"""They must outlive what is allocated in them, also in a test that fails."""
COUNT = 30_000
A_FEW = 600
"""Entries of some small pages."""
LEFT, RIGHT = 0, 1
NEVER = -(1 << 60)
"""A watermark before all rows."""


class Stream:
    """A subtask over runs, batch by batch; all rows have one key."""

    def __init__(self, plan: JoinPlan, budget: Budget = BUDGET, value: str = "v") -> None:
        arguments = OperatorArguments(
            input=plan.input, output=plan.output, keys=["k"], timeMode="EventTime", eventTime="__statelog_time"
        )
        self.query = KeyedQuery(plan.operator, arguments, Options())
        self.value = value
        self.budget = budget
        self.keeps_output = True
        self.runs: list[Run] = []
        self.read: dict[str, int] = {}
        self.now_ms = self.arrivals_to_ms = NO_TIME_MS
        self.batch = 0

    def push(
        self,
        watermark_ms: int,
        left_ms: object = (),
        right_ms: object = (),
        *,
        processing_ms: int = 0,
        arrivals_after_ms: int | None = None,
    ) -> list[pa.RecordBatch]:
        """Run a batch with rows at these times; arrivals up to a time are not looked for, by default the last ack's."""
        parts = [self._rows(side, np.array(times, np.int64)) for side, times in ((LEFT, left_ms), (RIGHT, right_ms))]
        rows = pa.Table.from_batches([part for part in parts if part.num_rows], parts[0].schema).combine_chunks()
        read = NO_ROWS
        if rows.num_rows:
            whole = rows.to_batches()[0]
            read = KeyedRows(whole, row_hashes([whole.column(0)]))
        moment = Moment(processing_ms, watermark_ms, self.now_ms)
        after_ms = self.arrivals_to_ms if arrivals_after_ms is None else arrivals_after_ms
        context = BatchContext(1, self.batch, moment, self.now_ms, after_ms)
        self.read.clear()
        operator = replace(self.query.operator.make(), budget=self.budget)
        subtask = KeyedSubtask(operator, Counting(self.runs, self.read), context, Stopwatch(SystemClock()))
        self.returned = 0
        found: list[pa.RecordBatch] = []
        for batch in subtask.process(read):
            self.returned += batch.num_rows
            if self.keeps_output and batch.num_rows:
                found.append(batch)
        sink = pa.BufferOutputStream()
        subtask.changes.write_local(sink)
        self.changes, self.phases = subtask.changes.rows, subtask.changes.phase + 1
        self.arrivals_to_ms = subtask.arrivals_to_ms
        self.runs = [*self.runs, Run(sink.getvalue(), "run")]
        self.now_ms, self.batch = watermark_ms, self.batch + 1
        return found

    def peak_bytes(self, *arguments: Any, **more: Any) -> int:
        """Run a batch as :meth:`push`, whose output is not kept, and return what it has allocated at most at a time."""
        self.keeps_output = False
        usual = pa.default_memory_pool()
        pool = pa.proxy_memory_pool(usual)
        POOLS.append(pool)
        pa.set_memory_pool(pool)
        try:
            self.push(*arguments, **more)
        finally:
            pa.set_memory_pool(usual)
        return int(pool.max_memory())

    def _rows(self, side: int, times_ms: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.RecordBatch:
        count = len(times_ms)
        at = pa.array(times_ms * 1000).cast(pa.timestamp("us", "UTC"))
        numbers, nothing = pa.array(times_ms), pa.nulls(count, pa.int64())
        texts = pa.array([self.value] * count, pa.string())
        no_time = pa.nulls(count, at.type)
        left = [at, numbers, texts] if side == LEFT else [no_time, nothing, pa.nulls(count, pa.string())]
        right = [at, numbers] if side == RIGHT else [no_time, nothing]
        columns = [pa.array(["a"] * count, pa.string()), pa.array([side] * count, pa.int32()), at, *left, *right]
        return pa.RecordBatch.from_arrays(columns, names=[f"c{place}" for place in range(len(columns))])


def numbers(found: list[pa.RecordBatch]) -> list[tuple[int | None, int | None]]:
    """The times of the rows that make the output's pairs."""
    return [pair for batch in found for pair in zip(batch[2].to_pylist(), batch[5].to_pylist(), strict=True)]


@pytest.mark.parametrize("how", ["inner", "left", "right", "full"])
def test_rows_of_a_large_key_meet_only_those_near_them(how: str) -> None:
    stream = Stream(join_plan(how, 0, 5))
    stream.push(0, 10 * np.arange(COUNT), 10 * np.arange(COUNT) + 7)
    found = stream.push(0, [100_007, 250_004], [100_002, 250_001])
    assert sorted(numbers(found)) == [(100_000, 100_002), (100_007, 100_007), (250_000, 250_001), (250_004, 250_007)]
    assert sum(stream.read.values()) < 4 * A_FEW
    # Four rows with a timer, and the marks of those that matched for the first time.
    assert stream.changes <= 4 + 1 + {"inner": 0, "left": 2, "right": 2, "full": 4}[how]


def test_only_rows_that_are_due_leave_a_large_key() -> None:
    stream = Stream(join_plan("left", 0, 5))
    stream.push(0, 10 * np.arange(COUNT), [3, 150_003])
    found = numbers(stream.push(10 * COUNT // 2))
    assert sorted(found) == [(time_ms, None) for time_ms in range(10, 10 * COUNT // 2, 10)]
    for number in range(COUNT // 2, COUNT // 2 + 5):
        now_ms = 10 * number + 5
        expected = [] if now_ms == 150_005 else [(10 * number, None)]
        assert numbers(stream.push(now_ms)) == expected
        assert sum(stream.read.values()) < A_FEW
        assert stream.changes < 6
    found = numbers(stream.push(100 * COUNT))
    assert len(found) == COUNT // 2 - 5
    assert stream.changes < 6  # the rest of the key is removed as a whole
    assert numbers(stream.push(200 * COUNT)) == []
    assert not sum(stream.read.values())


def test_rows_of_an_inner_join_are_removed_unread() -> None:
    stream = Stream(join_plan("inner", 0, 5))
    stream.push(0, 10 * np.arange(COUNT), 10 * np.arange(COUNT) + 7)
    assert stream.push(20 * COUNT) == []
    assert sum(stream.read.values()) < A_FEW
    assert stream.changes < 6


@given(st.lists(st.integers(0, 40), min_size=1))
def test_ranges_are_joined_if_they_overlap_or_touch(firsts: list[int]) -> None:
    first_ms = np.array(sorted(firsts))
    joined = list(joined_ranges(first_ms, first_ms + 3))
    covered = [time_ms for first, last in joined for time_ms in range(first, last + 1)]
    assert covered == sorted({int(first) + place for first in first_ms for place in range(4)})
    assert all(later[0] > before[1] + 1 for before, later in pairwise(joined))


def test_pairs_are_returned_in_parts_of_bounded_size() -> None:
    """A thousand rows on each side make a million pairs, here of a kilobyte each."""
    stream = Stream(join_plan("inner", -5000, 5000), Budget(slice_bytes=1 << 20), value="v" * 1000)
    found = stream.push(0, np.arange(1000), np.arange(1000))
    assert sum(batch.num_rows for batch in found) == 1_000_000
    assert max(batch.nbytes for batch in found) < 2 << 20


def test_rows_without_a_match_are_returned_in_parts_of_bounded_size() -> None:
    stream = Stream(join_plan("anti", 0, 5), Budget(slice_bytes=1 << 20), value="v" * 1000)
    stream.push(0, np.arange(5000))
    found = stream.push(10_000)
    assert sum(batch.num_rows for batch in found) == 5000
    assert max(batch.nbytes for batch in found) < 2 << 20


MANY = 30_000
"""Rows of one key that wait, a kilobyte each: 30 MB."""


@pytest.mark.parametrize(
    ("how", "batch", "returned"),
    [
        pytest.param("inner", {"watermark_ms": NEVER, "right_ms": [MANY]}, MANY, id="all are met"),
        pytest.param("left", {"watermark_ms": NEVER, "right_ms": [MANY]}, MANY, id="all are met, and marked"),
        pytest.param("anti", {"watermark_ms": 10 * MANY}, MANY, id="all are due"),
        pytest.param("left", {"watermark_ms": 2 * MANY + 9}, 10, id="some are due"),
        pytest.param("left", {"watermark_ms": NEVER, "processing_ms": 100}, MANY, id="all time out"),
    ],
)
def test_a_batch_of_a_key_with_many_waiting_rows_takes_bounded_memory(
    how: str, batch: dict[str, Any], returned: int
) -> None:
    """The bound is that of the bytes that are worked on at once, a megabyte here, and the changes of the batch."""
    timeout_ms = 100 if how != "inner" else None
    stream = Stream(join_plan(how, 0, 2 * MANY, timeout_ms), Budget(slice_bytes=1 << 20), value="v" * 1000)
    stream.push(NEVER, np.arange(MANY))
    peak_bytes = stream.peak_bytes(**batch)
    assert stream.returned == returned
    written_bytes = stream.runs[-1].size_bytes
    assert peak_bytes < (4 << 20) + 3 * written_bytes


def test_pairs_take_bounded_memory() -> None:
    """A thousand new rows of a kilobyte meet a thousand others, which makes a gigabyte of output."""
    stream = Stream(join_plan("inner", -5000, 5000), Budget(slice_bytes=1 << 20), value="v" * 1000)
    assert stream.peak_bytes(NEVER, np.arange(1000), np.arange(1000)) < 24 << 20
    assert stream.returned == 1_000_000


@pytest.mark.parametrize("how", ["inner", "left", "semi"])
def test_a_key_with_more_rows_than_fit_into_one_batch(how: str) -> None:
    """Its rows come in several parts, each of which meets all parts of the other side, and the rows that wait."""
    stream = Stream(join_plan(how, 0, 0), Budget(input_bytes=4000, slice_bytes=4000))
    stream.push(-10, np.arange(100, 300), np.arange(0, 200))
    found = stream.push(-10, np.arange(0, 100), np.arange(150, 250))
    if how == "semi":
        times = [at for batch in found for at in batch[2].to_pylist()]
        # Those up to 199 have left, as they matched before.
        assert sorted(times) == [*range(100), *range(200, 250)]
        return
    expected = [(time_ms, time_ms) for time_ms in [*range(100), *range(150, 250)]]
    assert sorted(numbers(found)) == expected


def test_a_waiting_row_leaves_once_however_many_parts_it_meets() -> None:
    stream = Stream(join_plan("semi", -1000, 1000), Budget(input_bytes=4000, slice_bytes=4000))
    stream.push(-2000, np.arange(200))
    found = stream.push(-2000, [], np.arange(300))
    assert sorted(at for batch in found for at in batch[2].to_pylist()) == list(range(200))


# ---- Timeouts ----


def test_rows_of_a_large_key_that_time_out_leave_and_the_others_stay() -> None:
    stream = Stream(join_plan("left", 0, 5, timeout=100))
    stream.push(NEVER, 10 * np.arange(COUNT), 20 * np.arange(COUNT // 2))
    stream.push(NEVER, 10 * np.arange(COUNT) + 7, processing_ms=50)
    found = numbers(stream.push(NEVER, processing_ms=100))
    assert sorted(found) == [(time_ms, None) for time_ms in range(10, 10 * COUNT, 20)]
    found = numbers(stream.push(NEVER, processing_ms=150))
    assert COUNT // 2 < stream.changes < COUNT // 2 + 10
    assert sorted(found) == [(time_ms, None) for time_ms in [*range(7, 10 * COUNT, 20), 10 * COUNT - 3]]
    assert stream.push(NEVER, processing_ms=10_000) == []
    assert not sum(stream.read.values())
    # Those that have matched wait for more.
    assert numbers(stream.push(NEVER, [], [23], processing_ms=10_000)) == [(20, 23)]
    assert stream.push(20 * COUNT, processing_ms=10_000) == []


def test_a_large_key_whose_rows_all_time_out_is_removed_as_a_whole() -> None:
    stream = Stream(join_plan("left", 0, 5, timeout=100))
    stream.push(NEVER, 10 * np.arange(COUNT))
    assert len(numbers(stream.push(NEVER, processing_ms=100))) == COUNT
    assert stream.changes == 3  # the rows, their timer, and their arrival
    stream.push(NEVER, [10], [12])
    assert stream.push(NEVER, processing_ms=200) == []


def test_arrivals_are_not_looked_for_again() -> None:
    stream = Stream(join_plan("left", 0, 5, timeout=100))
    stream.push(NEVER, [10])
    assert stream.push(NEVER, processing_ms=100, arrivals_after_ms=0) == []
    assert stream.arrivals_to_ms == 0
    assert numbers(stream.push(NEVER, processing_ms=101, arrivals_after_ms=-1)) == [(10, None)]
    assert stream.arrivals_to_ms == 1


def test_a_batch_in_which_nothing_is_due_has_one_phase() -> None:
    """The changes are encoded once, although timers are registered."""
    stream = Stream(join_plan("left", 0, 5, timeout=100))
    stream.push(0, [10], [12])
    assert stream.phases == 1
    stream.push(1000, processing_ms=99)
    assert stream.phases == 2
    stream.push(1000, [2000], processing_ms=99)
    assert stream.phases == 1
    stream.push(1000, processing_ms=199)
    assert stream.phases == 2


# ---- As-of joins ----


def as_of(tolerance_ms: int | None = None, *, wait: bool, **more: Any) -> Stream:
    return Stream(asof_plan("left", tolerance_ms, wait=wait), **more)


def test_rows_answered_at_once_read_only_what_is_near_them() -> None:
    stream = as_of(wait=False)
    stream.push(NEVER, [], 10 * np.arange(COUNT))
    found = numbers(stream.push(NEVER, [150_005, 150_010], [150_010, 150_020]))
    assert sorted(found) == [(150_005, 150_000), (150_010, 150_010)]
    assert sum(stream.read.values()) < A_FEW
    assert stream.changes == 2 + 1  # two right rows and a timer


def test_rows_that_wait_read_only_what_the_watermark_has_passed() -> None:
    stream = as_of(wait=True)
    stream.push(NEVER, 10 * np.arange(COUNT) + 5, 10 * np.arange(COUNT))
    found = numbers(stream.push(100_000))
    assert sorted(found) == [(time_ms + 5, time_ms) for time_ms in range(0, 100_000, 10)]
    for number in range(10_000, 10_005):
        assert numbers(stream.push(10 * number + 5)) == [(10 * number + 5, 10 * number)]
        assert numbers(stream.push(10 * number + 10)) == []
        assert sum(stream.read.values()) < A_FEW
        assert stream.changes < 6
    assert len(numbers(stream.push(20 * COUNT))) == COUNT - 10_005
    # The newest right row stays, and no left row: these are removed as a whole.
    assert COUNT - 10_006 <= stream.changes < COUNT - 10_006 + 6
    assert numbers(stream.push(30 * COUNT, [30 * COUNT])) == [(30 * COUNT, 10 * (COUNT - 1))]


def test_right_rows_out_of_the_tolerance_are_removed_as_a_whole() -> None:
    stream = as_of(1000, wait=False)
    stream.push(NEVER, [], 10 * np.arange(COUNT))
    assert stream.push(20 * COUNT) == []
    assert stream.changes < 6
    assert stream.push(30 * COUNT) == []
    assert not sum(stream.read.values())


def test_answers_are_returned_in_parts_of_bounded_size() -> None:
    stream = as_of(wait=True, budget=Budget(slice_bytes=1 << 20), value="v" * 1000)
    stream.push(NEVER, np.arange(5000), np.arange(0, 5000, 7))
    found = stream.push(10_000)
    assert numbers(found) == [(time_ms, time_ms - time_ms % 7) for time_ms in range(5000)]
    assert max(batch.nbytes for batch in found) < 2 << 20


@pytest.mark.parametrize("wait", [True, False])
def test_an_asof_join_of_a_key_with_more_rows_than_fit_into_one_batch(wait: bool) -> None:
    """Its rows come in several parts, each of which meets all parts of the other side, and the rows of the state."""
    stream = as_of(wait=wait, budget=Budget(input_bytes=4000, slice_bytes=4000))
    first = numbers(stream.push(NEVER, np.arange(100, 300), np.arange(0, 400, 2)))
    assert sorted(first) == ([] if wait else [(time_ms, time_ms - time_ms % 2) for time_ms in range(100, 300)])
    found = numbers(stream.push(1000, np.arange(300, 500), np.arange(1, 400, 2)))
    expected = [(time_ms, min(399, time_ms)) for time_ms in range(100 if wait else 300, 500)]
    assert sorted(found) == expected
