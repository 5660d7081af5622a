"""The table of sizes and times that merging goes by takes no number that would stop it."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from statelog.local.policy import MERGE_POLICY, MergePolicy


@pytest.mark.parametrize("name", [field.name for field in fields(MergePolicy)])
@pytest.mark.parametrize("number", [0, -1])
def test_every_number_is_positive(name: str, number: int) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be positive, not {number}$"):
        replace(MERGE_POLICY, **{name: number})


def test_the_smallest_block_is_not_larger_than_the_largest() -> None:
    assert MergePolicy(least_block_rows=10, most_block_rows=10).block_rows(5) == 10
    with pytest.raises(ValueError, match="least_block_rows 11 is more than 10"):
        MergePolicy(least_block_rows=11, most_block_rows=10)


@pytest.mark.parametrize(("rows", "expected"), [(0, 10), (40, 10), (41, 11), (80, 20), (81, 20), (10**9, 20)])
def test_blocks_become_larger_once_a_run_has_many(rows: int, expected: int) -> None:
    assert MergePolicy(least_block_rows=10, most_block_rows=20, blocks=4).block_rows(rows) == expected
