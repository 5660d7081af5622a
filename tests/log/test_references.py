"""What a materialized state says of itself."""

from __future__ import annotations

import pytest

from statelog.log.references import Base, Level, StoredRun
from statelog.runs.key_groups import hash_range


def run(first_hash: int, last_hash: int, *, length: int = 1, rows: int = 1) -> StoredRun:
    return StoredRun("runs/x", 0, length, b"c" * 16, rows, first_hash, last_hash)


@pytest.mark.parametrize(
    ("first", "last", "has_part"),
    [(10, 20, False), (12, 15, False), (9, 20, True), (10, 21, True), (0, 99, True), (0, 15, True), (15, 99, True)],
)
def test_a_level_has_part_of_a_run_with_keys_that_do_not_count(first: int, last: int, has_part: bool) -> None:
    """As those of the other subtasks after a change of the parallelism: restored with them, state would be twice."""
    assert Level(0, 3, b"", b"", 10, 20, []).has_part_of(run(first, last)) == has_part


def test_the_state_is_as_of_its_newest_level_and_as_large_as_all() -> None:
    own = hash_range(1, 3)
    levels = [
        Level(0, 3, b"origin", b"after 3", own.first, own.last, [run(0, 1, length=5, rows=50)]),
        Level(4, 5, b"after 3", b"after 5", own.first, own.last, [run(0, 1, length=2), run(2, 3, length=1)]),
        Level(6, 6, b"after 5", b"after 6", own.first, own.last, []),
    ]
    base = Base(1, 3, levels)
    assert (base.through, base.digest, base.length, base.within) == (6, b"after 6", 8, own)
    assert [level.rows for level in levels] == [50, 2, 0]
    assert {level.within for level in levels} == {own}
