"""The log's entries read as a stack: which checkpoints exist, what each builds on, what a subtask reads for it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from statelog.history.operator_history import History, Record, overlapping
from statelog.history.query_history import QueryHistory
from statelog.history.restore_plan import SHARED_BYTES, Extent
from statelog.log.entry import INITIAL_BATCH, encode_frame
from statelog.log.references import Base, BaseRange, Level, SegmentRef, StoredRun
from statelog.runs.key_groups import KEY_GROUPS, hash_range
from tests.entries import checkpoint_of, entry_of
from tests.history.operator_history_support import base, checkpoint, digest, segment

# ---- What subtasks of a host read together ----


def record_of(*segments: SegmentRef) -> Record:
    [record] = History([checkpoint(0, *segments, parallelism=len(segments))]).records
    return record


def test_changesets_that_stand_together_are_read_together() -> None:
    """From the first of them to the last, whatever lies elsewhere."""
    elsewhere = [segment(number, f"op/changes/1/{number}/0") for number in (0, 5, 6)]
    together = [segment(1, offset=100), segment(2, offset=110, length=20), segment(3, offset=130, length=5)]
    record = record_of(elsewhere[0], *together, segment(4, "op/changes/1/4/0", 0, 50), *elsewhere[1:])
    for is_shared in (False, True):
        assert [record.extent_of(one, is_shared) for one in together] == [Extent("log/1", 100, 35)] * 3
    assert record.extent_of(elsewhere[0], False) is None, "nobody else needs it"
    assert record.extent_of(elsewhere[0], True) == Extent("op/changes/1/0/0", 0, 10)


def test_the_changes_of_all_operators_in_an_entry_are_read_together() -> None:
    """And nothing of another object, whose bytes of the same offsets are others."""
    file, elsewhere = f"log/{1:020}.log", segment(0, "op/changes/1/0/0", 120)
    own, others = [segment(1, file, 100), segment(2, file, 110)], [segment(0, file, 120, 30)]
    sections = [checkpoint_of(0, [elsewhere, *own], parallelism=3), checkpoint_of(0, others, identity="other-1")]
    [record] = QueryHistory([entry_of(*sections, number=1, offset=10)]).histories["op-1"].records
    assert [record.extent_of(one, False) for one in own] == [Extent(file, 100, 50)] * 2
    assert record.extent_of(elsewhere, False) is None


def test_two_changesets_are_together_and_one_is_not() -> None:
    alone, other = segment(0, offset=7), segment(1, offset=17)
    assert record_of(alone).extent_of(alone, False) is None
    assert record_of(alone, other).extent_of(alone, False) == Extent("log/1", 7, 20)


def test_large_changesets_are_read_by_who_needs_them() -> None:
    for length, is_read_at_once in ((SHARED_BYTES, True), (SHARED_BYTES + 1, False)):
        alone = segment(0, "op/changes/1/0/0", 3, length)
        expected = Extent("op/changes/1/0/0", 3, length) if is_read_at_once else None
        assert record_of(alone).extent_of(alone, True) == expected
        first, second = segment(0, offset=0, length=10), segment(1, offset=10, length=length - 10)
        expected = Extent("log/1", 0, length) if is_read_at_once else None
        assert record_of(first, second).extent_of(first, False) == expected


# ---- What there is ----


def ranges(counting: Base) -> list[BaseRange]:
    return [BaseRange(counting.within.first, counting.within.last, counting)]


def batches(records: Iterable[Record]) -> list[int]:
    return [record.batch for record in records]


def names(runs: Iterable[StoredRun]) -> list[str]:
    return [run.name for run in runs]


def test_a_later_entry_replaces_its_batch_and_everything_after() -> None:
    history = History([checkpoint(0), checkpoint(1), *(checkpoint(batch, number=batch) for batch in (2, 3, 4))])
    assert batches(history.records) == [0, 1, 2, 3, 4]
    assert batches(history.add(checkpoint(2, number=9))) == [4, 3, 2]
    assert [one.number for one in history.checkpoints] == [0, 0, 9]
    assert history.latest is not None
    assert history.latest_record is not None
    assert (history.latest.number, history.latest_record.batch) == (9, 2)
    assert (history.at(1), history.at(3)) == (checkpoint(1), None)
    assert list(history.between(1, 1)) == [checkpoint(1)]
    assert [one.batch for one in history.between(0, 5)] == [0, 1, 2]
    assert batches(history.add(checkpoint(0, number=10))) == [2, 1, 0]
    assert (History().latest, History().latest_record, History().oldest) == (None, None, None)


def test_what_comes_after_a_batch_can_be_taken_back() -> None:
    """Also all of it; then the state starts over."""
    history = History([checkpoint(0), replace(checkpoint(1), bases=[base(0)]), *map(checkpoint, (2, 3))])
    assert batches(history.settle(2)) == [0, 1, 2]
    assert batches(history.cut(1)) == [3, 2]
    assert history.cut(1) == []
    assert (history.first_batch, history.latest) == (0, replace(checkpoint(1), bases=[base(0)]))
    history.add(checkpoint(2))
    assert batches(history.settle(2)) == [2], "it is another one"
    assert batches(history.cut(INITIAL_BATCH)) == [2, 1, 0]
    assert (history.first_batch, history.latest) == (None, None)
    history.add(checkpoint(0))
    assert history.levels(b"origin", 0, 1, 0) == []


def test_a_copy_stays_as_it_is() -> None:
    history = History([checkpoint(0), replace(checkpoint(1), bases=[base(0)]), checkpoint(2)])
    history.retain(2)
    history.settle(1)
    copied = history.copy()
    history.add(checkpoint(3))
    assert batches(copied.records) == [0, 1, 2]
    assert copied.settle(2) == history.settle(2)
    assert copied.object_names() == {"op/runs/1/0/0"}


def test_what_is_materialized_counts_from_its_entry_on_until_more_is() -> None:
    history = History([checkpoint(0), checkpoint(1)])
    for batch, through in ((2, 0), (3, 2)):
        history.add(replace(checkpoint(batch), bases=[base(through)]))
    assert [names(record.added_runs) for record in history.records] == [[], [], ["op/runs/1/0/0"], ["op/runs/1/0/2"]]
    assert [names(record.removed_runs) for record in history.records] == [[], [], [], ["op/runs/1/0/0"]]
    assert [record.needed_from for record in history.records] == [0, 0, 0, 0], "only the older entries tell the base"
    history.add(replace(checkpoint(4), base_ranges=ranges(base(2))))
    history.add(replace(checkpoint(5), bases=[base(4)]))
    assert [record.needed_from for record in history.records][4:] == [3, 4]
    assert [names(record.added_runs) for record in history.records][4:] == [[], ["op/runs/1/0/4"]], (
        "a repetition adds none"
    )


def test_the_first_entry_of_a_log_adds_what_it_repeats() -> None:
    repeated = replace(checkpoint(4), base_ranges=ranges(base(3)))
    [record] = History([repeated]).records
    assert names(record.added_runs) == ["op/runs/1/0/3"]
    [record] = History([replace(checkpoint(4), bases=[base(3)])]).records
    assert (record.base_map, record.added_runs) == (None, []), "of the other keys nothing is known"


@pytest.mark.parametrize("first", [0, 3])
def test_state_begins_with_the_batch_that_says_so(first: int) -> None:
    beginning = replace(checkpoint(first), begins=True)
    history = History([beginning, checkpoint(first + 1)])
    assert [record.needed_from for record in history.records] == [first, first]
    assert history.has_batch(first + 1)
    assert history.levels(b"origin", 0, 1, first + 1) == []
    history.add(replace(beginning, revision=1))
    [record] = history.records
    assert (record.checkpoint.revision, record.added_runs, record.removed_runs) == (1, [], [])
    history.add(replace(checkpoint(first + 1), bases=[base(first)]))
    assert [record.needed_from for record in history.records] == [first, first]
    history.add(replace(checkpoint(first + 2), base_ranges=ranges(base(first))))
    assert [record.needed_from for record in history.records] == [first, first, first + 1]


def test_state_that_was_given_counts_from_the_batch_that_begins_with_it() -> None:
    """Also if that is revised, or repeats it later."""
    given = replace(checkpoint(3), begins=True, base_ranges=ranges(base(2)))
    history = History([given])
    for beginning in (given, replace(given, revision=1)):
        history.add(beginning)
        [record] = history.records
        assert names(record.added_runs) == ["op/runs/1/0/2"]
        assert record.needed_from == 3
        assert history.levels(b"origin", 0, 1, 3) == base(2).levels
    history.add(replace(checkpoint(4), base_ranges=ranges(base(2))))
    assert [names(record.added_runs) for record in history.records] == [["op/runs/1/0/2"], []]


def test_keys_without_a_base_have_their_first_changes_in_the_batch_that_begins() -> None:
    """If only one of two subtasks has materialized its state."""
    history = History([replace(checkpoint(4, parallelism=2), begins=True), checkpoint(5, parallelism=2)])
    history.add(replace(checkpoint(6, parallelism=2), bases=[base(5, subtask=1, parallelism=2)]))
    found = [history.missing_segments(b"origin", subtask, 2, 6, set()) for subtask in range(2)]
    assert [(plan.since, plan.first_batch) for plan in found] == [(b"origin", 4), (b"1 of 2 after 5", 6)]
    assert history.retain(6) == []


# ---- What can be restored ----


def test_a_checkpoint_can_be_restored_if_all_that_it_builds_on_is_there() -> None:
    base_map = ranges(base(1))
    history = History([*map(checkpoint, (3, 4)), replace(checkpoint(5), base_ranges=base_map), checkpoint(6)])
    assert history.oldest is None, "batch 2 is not there"
    assert history.first_missing == 2
    assert not history.has_batch(6)
    history = History([*map(checkpoint, (2, 3, 4)), replace(checkpoint(5), base_ranges=base_map), checkpoint(6)])
    assert history.oldest == history.at(5)
    assert history.first_missing is None
    assert [history.has_batch(batch) for batch in range(1, 8)] == [False] * 4 + [True, True, False]
    assert History(map(checkpoint, (2, 3))).first_missing == 0, "nobody knows what it builds on"
    assert (History().first_missing, History([checkpoint(0)]).first_missing) == (None, None)
    assert [History(map(checkpoint, (2, 3))).at(batch) for batch in (1, 4)] == [None, None]


def test_with_a_gap_nothing_can_be_restored() -> None:
    history = History(map(checkpoint, (0, 1, 3, 4)))
    assert history.first_missing == 2
    assert not any(map(history.has_batch, range(5)))


def test_what_the_newest_entry_gives_up_cannot_be_restored() -> None:
    entries = [replace(checkpoint(batch), retained_from=max(batch - 2, 0)) for batch in range(6)]
    history = History(entries)
    assert history.retained_from == 3
    assert history.oldest == history.at(3)
    assert [history.has_batch(batch) for batch in range(6)] == [False] * 3 + [True] * 3
    assert History().retained_from == INITIAL_BATCH
    assert History(map(checkpoint, range(3))).oldest == checkpoint(0), "nothing is given up"


def test_changes_of_a_state_count_from_it_on_whatever_was_materialized_meanwhile() -> None:
    entries = [checkpoint(4, number=4), replace(checkpoint(5), bases=[base(4)], base_ranges=ranges(base(3)))]
    history = History.on_base(ranges(base(2)), [*entries, checkpoint(6)])
    assert batches(history.records) == [4, 5, 6]
    assert [record.base_map and list(record.base_map.ranges) for record in history.records] == [ranges(base(2))] * 3
    assert [one.number for one in history.checkpoints] == [4, 0, 0]


def test_changes_are_all_there_from_a_first_batch_before_which_nothing_was() -> None:
    begun = replace(checkpoint(3), begins=True)
    for first in (checkpoint(0), begun):
        assert History([first, checkpoint(first.batch + 1)]).begins_empty
    for entries in (
        [],
        [checkpoint(1)],
        [replace(begun, base_ranges=ranges(base(2)))],
        [replace(checkpoint(0), bases=[base(0)])],
    ):
        assert not History(entries).begins_empty
    assert not History.on_base([], [checkpoint(5)]).begins_empty


# ---- What goes ----


def test_every_checkpoint_is_settled_once_unless_it_is_made_again() -> None:
    history = History(map(checkpoint, range(6)))
    assert batches(history.settle(1)) == [0, 1]
    assert batches(history.settle(3)) == [2, 3]
    assert history.settle(3) == history.settle(2) == []
    for batch in (3, 4):
        history.add(checkpoint(batch))
    assert batches(history.settle(4)) == [3, 4]
    assert batches(History([checkpoint(0)]).settle(5)) == [0]


def test_only_checkpoints_that_later_ones_do_not_build_on_are_given_up() -> None:
    entries = [checkpoint(batch, number=10 + batch) for batch in range(4)]
    entries += [replace(checkpoint(4), bases=[base(2)]), replace(checkpoint(5), base_ranges=ranges(base(2)), number=15)]
    history = History([*entries, checkpoint(6)])
    assert [history.log_start(oldest, 7) for oldest in (0, 4, 5, 6)] == [10, 10, 13, 13]
    assert history.log_start(4, 0) is None, "the entry is its own start"
    assert history.retain(4) == []
    assert batches(history.retain(5)) == [0, 1, 2]
    assert batches(history.records) == [3, 4, 5, 6]
    assert history.levels(b"origin", 0, 1, 6) == base(2).levels
    assert (History().retain(3), History().log_start(3, 4)) == ([], None)


def test_changes_that_a_consumer_needs_stay_with_all_later_ones() -> None:
    for changes_from, kept in ((None, [3, 4, 5, 6]), (5, [3, 4, 5, 6]), (2, [2, 3, 4, 5, 6]), (-1, list(range(7)))):
        entries = [checkpoint(batch, number=10 + batch) for batch in range(4)]
        entries += [replace(checkpoint(4), bases=[base(2)]), replace(checkpoint(5), base_ranges=ranges(base(2)))]
        history = History([*entries, checkpoint(6)])
        assert history.log_start(5, 7, changes_from) == 10 + kept[0]
        assert batches(history.retain(5, changes_from)) == [batch for batch in range(7) if batch not in kept]
        assert batches(history.records) == kept


def test_changes_are_there_from_the_first_batch_on_that_a_retained_checkpoint_builds_on() -> None:
    entries = [*map(checkpoint, range(4)), replace(checkpoint(4), base_ranges=ranges(base(2)))]
    assert History([*entries, checkpoint(5)]).changes_from == 0
    assert History([*entries, replace(checkpoint(5), retained_from=4)]).changes_from == 3


def test_changes_take_their_bytes_and_about_as_many_as_their_entries() -> None:
    """Also those of a batch that has none, and those of a batch that is repeated only once."""
    segments = [segment(subtask, length=5000) for subtask in range(40)]
    written = [checkpoint(0, *segments[:parts], parallelism=parts) for parts in (0, 1, 7, 40)]
    taken: list[int] = []
    for whole in written:
        history = History([whole, replace(whole, batch=1)])
        own = history.changes_bytes(1)
        assert history.changes_bytes(0) == 2 * own
        assert history.changes_bytes(2) == 0
        taken.append(own)
        history.add(checkpoint(2))
        for _ in range(2):
            history.add(replace(whole, batch=2))
        assert [history.changes_bytes(batch) for batch in range(4)] == [3 * own, 2 * own, own, 0]
        history.retain(2)
        assert history.changes_bytes(2) == own
    for whole, own in zip(written, taken, strict=True):
        entry = entry_of(replace(whole, token=bytes(16), run_id=16 * "run"))
        entry_bytes = sum(map(len, encode_frame(entry, [])))
        assert entry_bytes / 2 < own - 5000 * len(whole.segments) < 2 * entry_bytes


def test_what_cannot_be_restored_is_not_kept() -> None:
    entries = [*map(checkpoint, (2, 3)), replace(checkpoint(4), base_ranges=ranges(base(3)), number=7)]
    history = History(entries)
    assert history.log_start(2, 5) == 7
    assert batches(history.retain(2)) == [2, 3]
    unknown = History(map(checkpoint, (2, 3)))
    assert unknown.retain(3) == [], "nobody knows what it builds on"


def test_of_an_operator_that_has_left_the_query_nothing_is_needed_once_its_last_checkpoint_is_given_up() -> None:
    history = History([*map(checkpoint, range(3)), replace(checkpoint(3), bases=[base(2)])])
    assert history.needed_from(3) == 0
    assert history.needed_from(4) == 4
    assert history.log_start(4, 9) is None
    assert batches(history.retain(4, changes_from=2)) == [0, 1]
    assert batches(history.retain(4)) == [2, 3]


def test_an_entry_that_is_written_again_is_not_needed_for_itself() -> None:
    history = History([replace(checkpoint(batch, number=10 + batch), key_schema=b"") for batch in range(4)])
    assert history.log_start(2, 3) == 12
    assert history.log_start(3, 3) is None


# ---- What a subtask reads ----


def test_a_subtask_reads_the_changes_that_its_materialized_state_lacks() -> None:
    parts = [[segment(subtask, f"op/changes/{batch}", 10 * subtask) for subtask in range(2)] for batch in range(5)]
    history = History([checkpoint(batch, *parts[batch], parallelism=2) for batch in range(3)])
    counting = base(1, subtask=1, parallelism=2)
    history.add(replace(checkpoint(3, *parts[3], parallelism=2), bases=[counting]))
    history.add(checkpoint(4, *parts[4], parallelism=2))
    assert history.digest(b"origin", 1, 2, -1) == b"origin"
    assert history.levels(b"origin", 1, 2, -1) == history.levels(b"origin", 1, 2, 2) == []
    assert history.digest(b"origin", 0, 2, 3) == digest(b"origin", *((b, parts[b][:1]) for b in range(4)))
    after = [digest(counting.digest, *((b, parts[b][1:]) for b in range(2, last + 1))) for last in (2, 3)]
    assert history.digest(b"origin", 1, 2, 3) == after[1]

    def missing(*known: bytes) -> tuple[bytes, int, list[SegmentRef], list[Level]]:
        found = history.missing_segments(b"origin", 1, 2, 3, set(known))
        return found.since, found.first_batch, [clip.segment for clip in found.segments], found.levels

    changes = [parts[2][1], parts[3][1]]
    assert missing() == (counting.digest, 2, changes, counting.levels)
    assert missing(b"another") == missing()
    assert missing(counting.digest) == (counting.digest, 2, changes, [])
    assert missing(after[0]) == missing(counting.digest, after[0]) == (after[0], 3, changes[1:], [])
    assert missing(after[0], after[1]) == (after[1], 4, [], [])


def test_of_the_levels_only_those_are_read_that_the_subtask_lacks() -> None:
    own = hash_range(0, 1)
    levels = [Level(batch, batch, b"", b"after %d" % batch, own.first, own.last, []) for batch in range(3)]
    history = History(
        [replace(checkpoint(5, segment(0)), base_ranges=[BaseRange(own.first, own.last, Base(0, 1, levels))])]
    )
    for known, lacking in (("", levels), ("after 0", levels[1:]), ("after 1", levels[2:]), ("after 2", [])):
        found = history.missing_segments(b"origin", 0, 1, 5, {known.encode(), b"another"})
        assert (found.levels, found.since) == (lacking, b"after 2")


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
@pytest.mark.parametrize("before", [1, 2, 3, 5])
def test_a_subtask_reads_all_changesets_that_may_hold_its_keys_and_no_others(parallelism: int, before: int) -> None:
    stored = [segment(subtask) for subtask in range(before) for _ in range(1 + subtask % 2)]
    made = checkpoint(0, *stored, parallelism=before)
    for subtask in range(parallelism):
        own = hash_range(subtask, parallelism)
        ranges = [hash_range(one.subtask, before) for one in stored]
        expected = [
            one
            for one, other in zip(stored, ranges, strict=True)
            if other.first <= own.last and own.first <= other.last
        ]
        assert overlapping(made, subtask, parallelism) == expected
        found = History([made]).missing_segments(b"origin", subtask, parallelism, 0, set())
        assert [(clip.segment, clip.within) for clip in found.segments] == [(one, own) for one in expected]
        assert {clip.is_shared for clip in found.segments} == {parallelism != before}
        assert [clip.extent for clip in found.segments] == [
            record_of(*stored).extent_of(one, parallelism != before) for one in expected
        ]


def test_no_key_group_at_a_boundary_is_left_out() -> None:
    stored = [segment(group) for group in (0, KEY_GROUPS // 2 - 1, KEY_GROUPS // 2, KEY_GROUPS - 1)]
    made = checkpoint(0, *stored, parallelism=KEY_GROUPS)
    assert [overlapping(made, subtask, 2) for subtask in range(2)] == [stored[:2], stored[2:]]
