"""Cutting rows by their size: nothing is lost, nothing is larger than it may be."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from statelog.runs.byte_slices import (
    Pace,
    RowsTooLarge,
    cut_rows,
    gather_rows,
    in_parts,
    join_rows,
    joined_column,
    row_ends,
    stretches,
)

SCHEMA = pa.schema(
    [
        ("number", pa.int64()),
        ("flag", pa.bool_()),
        ("nothing", pa.null()),
        ("price", pa.decimal128(10, 2)),
        ("nested", pa.struct([("text", pa.string()), ("maps", pa.list_(pa.map_(pa.string(), pa.binary())))])),
    ]
)


def random_rows(count: int, seed: int = 0) -> pa.RecordBatch:
    chance = random.Random(seed)

    def row(number: int) -> dict[str, Any]:
        maps = [
            [("k" * chance.randint(0, 9), b"v" * chance.randint(0, 99)) for _ in range(chance.randint(0, 3))]
            for _ in range(chance.randint(0, 3))
        ]
        nested = chance.choice([None, {"text": "t" * chance.randint(0, 50), "maps": maps}])
        return {"number": number, "flag": number % 2 == 0, "nothing": None, "price": None, "nested": nested}

    return pa.RecordBatch.from_pylist([row(number) for number in range(count)], schema=SCHEMA)


@pytest.mark.parametrize(("first", "count"), [(0, 300), (17, 100), (250, 50), (299, 1), (5, 0)])
def test_the_size_of_each_row_is_that_of_a_batch_with_it_alone(first: int, count: int) -> None:
    """Bitmaps aside, what Arrow counts itself."""
    rows = random_rows(300).slice(first, count)

    sizes = np.diff(row_ends(rows)).tolist()

    copies = [pa.RecordBatch.from_pylist(rows.slice(row, 1).to_pylist(), schema=SCHEMA) for row in range(count)]
    offsets_of_no_row = 8 * 4
    for size, copy in zip(sizes, copies, strict=True):
        assert abs(size - copy.nbytes) <= offsets_of_no_row


@pytest.mark.parametrize("max_bytes", [1, 700, 5000, 1 << 30])
def test_slices_are_bounded_and_lose_nothing(max_bytes: int) -> None:
    rows = random_rows(300)

    parts = list(cut_rows(rows, max_bytes))

    assert pa.Table.from_batches(parts).to_pylist() == rows.to_pylist()
    assert all(part.num_rows == 1 or row_ends(part)[-1] <= max_bytes for part in parts)
    assert all(
        row_ends(rows.slice(start, len(one) + 1))[-1] > max_bytes
        for start, one in zip(np.cumsum([0] + [len(part) for part in parts]).tolist(), parts[:-1], strict=False)
    ), "no slice is smaller than it must be"


def test_slices_have_few_rows() -> None:
    assert [part.num_rows for part in cut_rows(random_rows(25), 1 << 30, 10)] == [10, 10, 5]
    assert list(stretches(np.array([0, 5, 9, 30, 31]), 10)) == [(0, 2), (2, 3), (3, 4)]


@pytest.mark.parametrize("max_bytes", [1, 700, 5000, 1 << 30])
def test_rows_of_several_batches_are_joined_and_gathered(max_bytes: int) -> None:
    rows = random_rows(300)
    batches = [rows.slice(0, 100), rows.slice(100, 150), rows.slice(250)]
    order = np.array(random.Random(1).sample(range(300), 200))

    joined, gathered = list(join_rows(batches, max_bytes)), list(gather_rows(batches, order, max_bytes))

    assert pa.Table.from_batches(joined).to_pylist() == rows.to_pylist()
    assert pa.Table.from_batches(gathered).to_pylist() == rows.take(pa.array(order)).to_pylist()
    slack = 64  # bitmaps
    assert all(part.num_rows == 1 or part.nbytes <= max_bytes + slack for part in joined + gathered)


@pytest.mark.parametrize("max_bytes", [100, 1000, 1 << 30])
def test_what_does_not_fit_is_made_in_parts(max_bytes: int) -> None:
    """Columns that Arrow cannot make, and those that are larger than they may be."""
    rows = random_rows(100)

    def make(start: int, end: int) -> pa.RecordBatch:
        if end - start > 30:
            raise RowsTooLarge("more than fit")
        return rows.slice(start, end - start)

    parts = list(in_parts(100, make, max_bytes))

    assert pa.Table.from_batches(parts).to_pylist() == rows.to_pylist()
    assert all(part.num_rows == 1 or (part.num_rows <= 30 and part.nbytes <= max_bytes) for part in parts)


def test_a_row_that_does_not_fit_is_an_error() -> None:
    def make(start: int, end: int) -> pa.RecordBatch:
        if start <= 3 < end:
            raise RowsTooLarge("a row")
        return random_rows(8).slice(start, end - start)

    def made() -> Iterator[int]:
        for part in in_parts(8, make, 1 << 30):
            yield part.num_rows

    with pytest.raises(RowsTooLarge, match="a row"):
        list(made())


def test_columns_keep_small_offsets_while_these_do() -> None:
    parts = [pa.array([b"a"]), pa.array([b"b", b"c"])]
    assert joined_column(parts).equals(pa.array([b"a", b"b", b"c"]))
    assert joined_column([pa.array([1]), pa.array([2])]).to_pylist() == [1, 2]


def test_as_many_rows_are_converted_at_once_as_the_last_ones_suggest() -> None:
    pace = Pace(10_000, first_rows=10, most_rows=500)
    steps = [(10, 100), (40, 400), (7, 70), (160, 1600), (0, 4), (500, 50_000), (100, 500_000), (2, 10**6), (1, 0)]
    found = [pace.rows]
    for rows, size_bytes in steps:
        pace.learn(rows, size_bytes)
        found.append(pace.rows)
    assert found == [10, 40, 160, 160, 500, 500, 100, 2, 1, 4]
