"""Which materialized state counts for which keys, against a table of key groups."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from statelog.history.bases import BaseMap
from statelog.log.references import Base, BaseRange, Level, StoredRun
from statelog.runs.key_groups import KEY_GROUPS, HashRange, hash_range

ORIGIN = b"origin"
GROUP = (1 << 64) // KEY_GROUPS
SAMPLES = range(0, KEY_GROUPS, 331)
_subtasks = st.integers(1, 9).flatmap(lambda count: st.tuples(st.integers(0, count - 1), st.just(count)))


def base(subtask: int, parallelism: int, through: int, number: int = 0) -> Base:
    own = hash_range(subtask, parallelism)
    middle = (own.first + own.last) // 2
    runs = [
        StoredRun(f"{number}-low", 0, 10, b"", 1, own.first, middle),
        StoredRun(f"{number}-high", 0, 10, b"", 1, middle + 1, own.last),
    ]
    return Base(subtask, parallelism, [Level(0, through, ORIGIN, b"%d" % number, own.first, own.last, runs)])


@given(st.lists(_subtasks, max_size=12), _subtasks)
def test_the_newest_base_counts_for_every_key(made: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    base_map = BaseMap()
    counts: dict[int, Base] = {}
    ranges: list[object] = []
    for number, (subtask, parallelism) in enumerate(made):
        new = base(subtask, parallelism, number, number)
        replacement = base_map.replace(new)
        for base_range in replacement.removed:
            ranges.remove(base_range)
        ranges += replacement.added
        base_map = replacement.base_map
        counts |= {group: new for group in SAMPLES if group * parallelism // KEY_GROUPS == subtask}
    assert sorted(map(id, ranges)) == sorted(map(id, base_map.ranges)), "what is added and removed is what is there"
    for base_range in base_map.ranges:
        number = base_range.base.levels[0].last
        assert [run.name for run in base_range.runs] == [f"{number}-low", f"{number}-high"]
    for group in SAMPLES:
        found = [
            base_range.base
            for base_range in base_map.ranges
            if base_range.first_hash <= group * GROUP <= base_range.last_hash
        ]
        assert found == [counts[group]] if group in counts else found == []
    assert all(one.last_hash < other.first_hash for one, other in pairwise(base_map.ranges))
    assert base_map.through == min((counts[g].through if g in counts else -1 for g in SAMPLES), default=-1)

    subtask, parallelism = asked
    own = hash_range(subtask, parallelism)
    view = base_map.view_of(ORIGIN, subtask, parallelism)
    assert all(
        own.first <= base_range.first_hash <= base_range.last_hash <= own.last for base_range in base_map.within(own)
    )
    edges = [own.first, *(window.last_hash + 1 for window in view.gaps)]
    assert [window.first_hash for window in view.gaps] == edges[:-1]
    assert edges[-1] == own.last + 1, "of every key it is known what is to be added"
    digest = ORIGIN
    for level in view.levels:
        assert level.before == digest
        assert own.first <= level.first_hash <= level.last_hash <= own.last
        assert level.runs, "a level without keys of its range"
        assert all(run.first_hash <= level.last_hash and level.first_hash <= run.last_hash for run in level.runs)
        digest = level.after
    assert digest == view.digest
    for group in (group for group in SAMPLES if own.first <= group * GROUP <= own.last):
        levels = [level for level in view.levels if level.first_hash <= group * GROUP <= level.last_hash]
        names = [run.name for level in levels for run in level.runs if run.first_hash <= group * GROUP <= run.last_hash]
        expected = [run.name for level in counts[group].levels for run in level.runs] if group in counts else []
        assert len(names) == min(len(expected), 1)
        assert set(names) <= set(expected)
        first_batch = counts[group].through + 1 if group in counts else 0
        for batch in range(len(made) + 1):
            counted = [one for one in view.ranges_of(batch) if one.first <= group * GROUP <= one.last]
            assert len(counted) == (batch >= first_batch), "changes count that the base lacks, and no others"


def test_a_subtask_that_made_its_base_goes_on_from_its_digest() -> None:
    base_map = BaseMap().replace(base(1, 3, 7, 5)).base_map
    assert base_map.view_of(ORIGIN, 1, 3).digest == b"5"
    assert base_map.base_of(1, 3) is not None
    other = base_map.replace(base(0, 2, 9, 6)).base_map
    assert other.base_of(1, 3) is None, "another one counts for a part of its keys"
    assert other.view_of(ORIGIN, 1, 3).digest not in (b"5", b"6", ORIGIN)
    assert other.view_of(ORIGIN, 1, 3) == other.view_of(ORIGIN, 1, 3)


def test_ranges_that_touch_are_read_as_one() -> None:
    quarters = [hash_range(subtask, 4) for subtask in range(4)]
    base_map = BaseMap()
    for subtask, through in ((0, 5), (1, 9), (2, 5)):
        base_map = base_map.replace(base(subtask, 4, through)).base_map
    view = base_map.view_of(ORIGIN, 0, 1)
    assert view.first_batch == 0, "the last quarter has no base"
    assert view.ranges_of(5) == [quarters[3]]
    assert view.ranges_of(6) == [quarters[0], HashRange(quarters[2].first, quarters[3].last)]
    assert view.ranges_of(10) == [HashRange(quarters[0].first, quarters[3].last)]


def test_a_base_that_counts_for_a_part_of_its_subtask_is_not_the_subtasks_state() -> None:
    made = base(1, 3, 7, 5)
    own, middle = made.within, made.levels[0].runs[0].last_hash
    for bounds in ((own.first, middle), (middle + 1, own.last)):
        base_map = BaseMap((BaseRange(*bounds, made),))
        assert base_map.base_of(1, 3) is None
        assert base_map.view_of(ORIGIN, 1, 3).digest != made.digest


def test_a_digest_says_for_which_keys_each_level_counts() -> None:
    made = base(0, 2, 7, 5)
    first, second = (hash_range(subtask, 4) for subtask in (0, 1))
    bounds = [(first.first, first.last), (second.first, second.last), (first.first, second.last)]
    covers = [BaseMap((BaseRange(*one, made),)) for one in bounds]
    assert len({base_map.view_of(ORIGIN, 0, 1).digest for base_map in covers}) == 3


def test_a_subtask_gets_the_levels_and_runs_that_may_hold_its_keys_and_no_others() -> None:
    """Levels of less than their subtask come from an earlier change of the parallelism; a run may be of one hash."""
    low, high = (hash_range(subtask, 2) for subtask in (0, 1))
    whole = hash_range(0, 1)
    edges = [(low.first, low.first), (low.last, low.last), (high.first, high.first), (high.last, high.last)]
    runs = [StoredRun(f"{number}", 0, 10, b"", 1, *bounds) for number, bounds in enumerate(edges)]
    levels = [
        Level(0, 3, b"", b"1", low.first, low.last, runs[:2]),
        Level(0, 3, b"1", b"2", high.first, high.last, runs[2:]),
        Level(4, 7, b"2", b"3", whole.first, whole.last, runs),
    ]
    base_map = BaseMap((BaseRange(whole.first, whole.last, Base(0, 1, levels)),))
    for subtask, own in ((0, runs[:2]), (1, runs[2:])):
        found = base_map.view_of(ORIGIN, subtask, 2).levels
        assert [(level.first, level.within, level.runs) for level in found] == [
            (first, hash_range(subtask, 2), own) for first in (0, 4)
        ]
