"""The log that a branch begins with: another query's entries, whose objects stay where they are."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from statelog import ConfigurationError, ErrorKind, Options, StorageError
from statelog.history.pins import pin_name
from statelog.history.query_history import QueryHistory
from statelog.log.entry import Checkpoint, Claim, Entry, Parent, QueryCheckpoint, Section
from statelog.log.open import open_location, open_log
from statelog.log.references import Base, BaseRange, Level, SegmentRef
from statelog.queries import load as load_module
from statelog.queries.branch import branch_query
from statelog.queries.load import RestoreTarget, new_log
from statelog.runs import digests
from statelog.runs.times import NO_TIME_MS
from statelog.storage import LocalStore, Store
from statelog.storage.links import LinkedStore, link
from statelog.testing.faults import FaultPlan, FaultStore
from statelog.testing.query import ManualClock
from tests.options import make_options
from tests.short_log import IDENTITY, ShortLog, base, base_range, changes, identity_of

PARENT = Parent("/parent", 5, pin_name(5, b"pin"))


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes the machine, and syncing would take most of the time."""
    for target in ("os.fsync", "statelog.storage.local.sync_data"):
        monkeypatch.setattr(target, lambda fd: None)


def target(location: Path, batch: int = 5, **options: Any) -> RestoreTarget:
    tokens = (b"token %d" % number for number in itertools.count(1))
    return RestoreTarget(
        location=str(location),
        query_id="branch",
        run_id="branching",
        batch=batch,
        options=make_options(**options),
        clock=ManualClock(5),
        new_token=lambda: next(tokens),
    )


def two_levels() -> Base:
    [first] = base(1).levels
    [run] = base(2).levels[0].runs
    return Base(0, 1, [first, Level(2, 2, first.after, b"after 2", first.first_hash, first.last_hash, [run])])


def parents_log(**values: Any) -> ShortLog:
    """Batches 0 to 6, revised once each; a base through batch 2 counts from batch 4 on."""
    made = ShortLog(max_file_bytes=1000)
    [whole] = [BaseRange(level.first_hash, level.last_hash, two_levels()) for level in two_levels().levels[:1]]
    for batch in range(7):
        ranges = [whole] if batch == 4 else None
        bases = [base(4)] if batch == 6 else []
        made.run(batch, entry={"revision": 1}, base_ranges=ranges, bases=bases, **values)
    return made


def read(location: Path) -> list[Entry]:
    return open_log(LocalStore(location), Options(), ManualClock(5)).read()


def checkpoints(location: Path) -> list[QueryCheckpoint]:
    return [entry for entry in read(location) if isinstance(entry, QueryCheckpoint)]


def linked(section: Section) -> Section:
    """The section of a branch, which has no base map yet, with the watermark of its entry."""
    segments = [replace(part, name=link("/parent", part.name)) for part in section.segments]
    return replace(section, segments=segments, bases=[], base_ranges=None, watermark_ms=0)


def test_a_branch_begins_with_the_entries_that_its_checkpoint_needs(tmp_path: Path) -> None:
    parent = parents_log().query()
    branch_query(parent, PARENT, target(tmp_path, max_file_bytes=1))
    [claim, *_] = read(tmp_path)
    assert claim == Claim(2, "branch", "branching", b"token 1", 5000, number=1)
    found = checkpoints(tmp_path)
    assert [entry.batch for entry in found] == [3, 4, 5]
    follows = b""
    for entry, token in zip(found, (b"token 2", b"token 3", b"token 4"), strict=True):
        original = parent.at(entry.batch)
        assert original is not None
        [section] = entry.sections
        assert entry == replace(
            original,
            epoch=2,
            query_id="branch",
            run_id="branching",
            revision=0,
            id=token,
            follows=follows,
            token=token,
            watermark_ms=NO_TIME_MS,
            sections=[replace(linked(original.sections[0]), base_ranges=section.base_ranges)],
            log_start=1,
            retained_from=5,
            parent=PARENT,
            cuts=[],
            number=entry.number,
            offset=entry.offset,
        )
        follows = token
    assert [entry.sections[0].base_ranges is None for entry in found] == [False, True, True]
    assert len({entry.number for entry in found}) == 3, "the files are as large as the options say"


@pytest.mark.parametrize("batch", [5, 6])
def test_a_branch_restores_what_its_parent_would_from_links(tmp_path: Path, batch: int) -> None:
    parent = parents_log()
    branch_query(parent.query(), PARENT, target(tmp_path, batch))
    query = QueryHistory(read(tmp_path))
    assert query.oldest == query.latest
    assert query.has_batch(batch)
    history = query.histories[IDENTITY]
    genesis = digests.genesis(IDENTITY, 0, 1)
    plan = history.missing_segments(genesis, 0, 1, batch, set())
    expected = parent.history().missing_segments(b"", 0, 1, batch, set())
    assert [clipped.segment.name for clipped in plan.segments] == [
        link("/parent", clipped.segment.name) for clipped in expected.segments
    ]
    assert [level.runs for level in plan.levels] == [
        [replace(run, name=link("/parent", run.name)) for run in level.runs] for level in expected.levels
    ]
    assert [(level.before, level.after) for level in plan.levels] == [
        (level.before, level.after) for level in expected.levels
    ]
    assert (plan.first_batch, plan.since) == (expected.first_batch, expected.since)


def test_the_objects_of_the_parents_own_parent_are_named_where_they_are(tmp_path: Path) -> None:
    parent, there = ShortLog(), link("/grandparent", changes(0))
    parent.run(0, segments=[SegmentRef(0, 1, b"", 0, 10, 1, 1, there)])
    branch_query(parent.query(), replace(PARENT, batch=0), target(tmp_path, 0))
    assert [[part.name for part in entry.sections[0].segments] for entry in checkpoints(tmp_path)] == [[there]]


def test_of_whole_state_one_entry_is_enough(tmp_path: Path) -> None:
    parent = ShortLog(key_schema=b"")
    for batch in (3, 4, 5):
        parent.run(batch)
    branch_query(parent.query(), PARENT, target(tmp_path))
    [entry] = checkpoints(tmp_path)
    [section] = entry.sections
    assert (entry.batch, section.base_ranges, entry.retained_from) == (5, None, 5)
    assert [part.name for part in section.segments] == [
        link("/parent", part.name) for entry in parent.history().between(5, 5) for part in entry.segments
    ]


def operators(location: Path) -> dict[int, list[str]]:
    """The operators of each entry of a branch."""
    return {entry.batch: [section.uid for section in entry.sections] for entry in checkpoints(location)}


def test_each_operator_is_in_the_entries_that_it_needs_itself(tmp_path: Path) -> None:
    """One has begun later, one has materialized its state, and one needs everything."""
    parent = ShortLog(uids=["a", "b"])
    for batch in range(6):
        if batch == 3:
            parent.uids.append("c")
        parent.run(batch, base_ranges=[base_range(3, identity_of("a"))] if batch == 4 else None)
    branch_query(parent.query(), PARENT, target(tmp_path))
    assert operators(tmp_path) == {0: ["b"], 1: ["b"], 2: ["b"], 3: ["b", "c"], 4: ["a", "b", "c"], 5: ["a", "b", "c"]}
    query, original = QueryHistory(read(tmp_path)), parent.query()
    assert query.names == original.names
    for uid in "abc":
        identity = identity_of(uid)
        own, theirs = (
            one.histories[identity].missing_segments(digests.genesis(identity, 0, 1), 0, 1, 5, set())
            for one in (query, original)
        )
        assert (own.first_batch, own.since) == (theirs.first_batch, theirs.since), uid
        assert [part.segment.name for part in own.segments] == [
            link("/parent", part.segment.name) for part in theirs.segments
        ]


def test_a_branch_has_the_operators_under_their_present_names_and_none_that_has_ended(tmp_path: Path) -> None:
    parent = ShortLog(4, uids=["a", "b", "c"])
    parent.claim(renames={identity_of("a"): "z"}, ended=[identity_of("b")])
    branch_query(parent.query(), replace(PARENT, batch=3), target(tmp_path, 3))
    assert operators(tmp_path) == {batch: ["c", "z"] for batch in range(4)}
    assert QueryHistory(read(tmp_path)).names == {"c": identity_of("c"), "z": identity_of("a")}


def test_a_watermark_of_an_operators_own_goes_on(tmp_path: Path) -> None:
    parent = ShortLog(uids=["a", "b"])
    for batch in range(3):
        parent.run(batch, entry={"watermark_ms": 10 * batch}, watermark_ms=batch, max_event_ms=[5 + batch])
    branch_query(parent.query(), replace(PARENT, batch=2), target(tmp_path, 2))
    [*_, newest] = checkpoints(tmp_path)
    own = [Checkpoint.of(newest, section) for section in newest.sections]
    assert [(one.watermark_ms, one.max_event_ms) for one in own] == [(2, [7]), (20, [])]


def test_a_location_with_state_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    parent = parents_log()
    branch_query(parent.query(), PARENT, target(tmp_path))
    before = read(tmp_path)
    with pytest.raises(ConfigurationError, match=f"{tmp_path} already holds state") as refused:
        branch_query(parent.query(), replace(PARENT, batch=6), target(tmp_path, 6))
    assert refused.value.kind is ErrorKind.OTHER_OWNER
    assert read(tmp_path) == before


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_branch_that_is_not_finished_is_none_or_names_its_parent(
    tmp_path: Path, when: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would record that the branch relies on the pin; without a checkpoint it can be made again."""
    query, outcomes = parents_log().query(), []
    for number in itertools.count(1):
        location = tmp_path / str(number)
        faults = FaultStore(LocalStore(location), FaultPlan.at(call=number, when=when))
        monkeypatch.setattr(load_module, "open_location", lambda _, faults=faults: LinkedStore(faults, refuse))
        try:
            branch_query(query, PARENT, target(location))
        except StorageError:
            outcomes.append(len(checkpoints(location)))
            if outcomes[-1]:
                assert {entry.parent for entry in checkpoints(location)} == {PARENT}
            else:
                monkeypatch.setattr(load_module, "open_location", open_location)
                branch_query(query, PARENT, target(location))
                assert len(checkpoints(location)) == 3
        if faults.calls < number:
            break
    assert set(outcomes) == {0, 1, 2, 3}


def refuse(location: str) -> Store:
    raise AssertionError(location)


def test_an_error_before_the_first_entry_leaves_no_claim(tmp_path: Path) -> None:
    """The location is as empty as before."""
    with pytest.raises(FileExistsError), new_log(target(tmp_path)):
        (tmp_path / "log").mkdir()
    assert LocalStore(tmp_path).list() == []
