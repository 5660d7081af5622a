"""The log that a branch begins with: another query's entries, whose objects stay where they are."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from statelog import ConfigurationError, ErrorKind, Options, StorageError
from statelog.checkpoint.history import History
from statelog.checkpoint.parent import Parent, read_parent
from statelog.log.entry import Checkpoint, Claim, Entry, QueryOperators
from statelog.log.open import open_location, open_log
from statelog.log.references import Base, BaseRange, Level, SegmentRef
from statelog.runs import digests
from statelog.savepoints import branch as branch_module
from statelog.savepoints.branch import branch_operator
from statelog.savepoints.load import RestoreTarget
from statelog.storage import LocalStore, Store
from statelog.storage.links import LinkedStore, link
from statelog.testing.clock import ManualClock
from statelog.testing.faults import FaultPlan, FaultStore
from tests.short_log import ShortLog, base, changes

PARENT = Parent("/parent", 5, "op/pins/5.json")
OPERATORS = QueryOperators(7, {"op": ""})
FOLDER = "uid"


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes the machine, and syncing would take most of the time."""
    for target in ("os.fsync", "statelog.storage.local.sync_data", "statelog.storage.posix.sync_data"):
        monkeypatch.setattr(target, lambda fd: None)


def target(location: Path, batch: int = 5, **options: Any) -> RestoreTarget:
    tokens = (b"token %d" % number for number in itertools.count(1))
    return RestoreTarget(
        location=str(location),
        query_id="branch",
        run_id="branching",
        batch=batch,
        options=Options(**options),
        clock=ManualClock(5),
        new_token=lambda: next(tokens),
        operators=OPERATORS,
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
        made.run(batch, revision=1, base_ranges=ranges, bases=bases, **values)
    return made


def read(location: Path) -> list[Entry]:
    return open_log(LocalStore(location), FOLDER, Options(), ManualClock(5)).read()


def checkpoints(location: Path) -> list[Checkpoint]:
    return [entry for entry in read(location) if isinstance(entry, Checkpoint)]


def test_a_branch_begins_with_the_entries_that_its_checkpoint_needs(tmp_path: Path) -> None:
    parent = parents_log()
    branch_operator(parent.history(), PARENT, target(tmp_path, max_file_bytes=1))
    [claim, *_] = read(tmp_path)
    assert claim == Claim(2, "branch", "branching", "uid", b"token 4", 5000)
    found, originals = checkpoints(tmp_path), list(parent.history().between(3, 5))
    assert [entry.batch for entry in found] == [3, 4, 5]
    for entry, original, token in zip(found, originals, (b"token 1", b"token 2", b"token 3"), strict=True):
        assert entry == replace(
            original,
            epoch=2,
            query_id="branch",
            run_id="branching",
            revision=0,
            segments=[replace(part, name=link("/parent", part.name)) for part in original.segments],
            bases=[],
            base_ranges=entry.base_ranges,
            token=token,
            log_start=1,
            retained_from=5,
            operators=OPERATORS,
            number=entry.number,
            offset=entry.offset,
        )
    assert [entry.base_ranges is None for entry in found] == [False, True, True]
    assert len({entry.number for entry in found}) == 3, "the files are as large as the options say"


@pytest.mark.parametrize("batch", [5, 6])
def test_a_branch_restores_what_its_parent_would_from_links(tmp_path: Path, batch: int) -> None:
    parent = parents_log()
    branch_operator(parent.history(), PARENT, target(tmp_path, batch))
    history = History(read(tmp_path))
    assert history.oldest == history.latest
    assert history.has_batch(batch)
    genesis = digests.genesis("branch", "uid", 0, 1)
    plan = history.missing_segments(genesis, 0, 1, batch, set())
    expected = parent.history().missing_segments(b"", 0, 1, batch, set())
    assert [clipped.segment.name for clipped in plan.segments] == [
        link("/parent", clipped.segment.name) for clipped in expected.segments
    ]
    assert [level.runs for level in plan.levels] == [
        [replace(run, name=link("/parent", run.name)) for run in level.runs] for level in expected.levels
    ]
    assert [level.before for level in plan.levels] == [genesis, *(level.before for level in expected.levels[1:])]
    assert [level.after for level in plan.levels] == [level.after for level in expected.levels]
    assert (plan.first_batch, plan.since) == (expected.first_batch, expected.since)


def test_the_objects_of_the_parents_own_parent_are_named_where_they_are(tmp_path: Path) -> None:
    parent, there = ShortLog(), link("/grandparent", changes(0))
    parent.run(0, segments=[SegmentRef(0, 1, b"", 0, 10, 1, 1, there)])
    branch_operator(parent.history(), replace(PARENT, batch=0), target(tmp_path, 0))
    assert [[part.name for part in entry.segments] for entry in checkpoints(tmp_path)] == [[there]]


def test_of_whole_state_one_entry_is_enough(tmp_path: Path) -> None:
    parent = ShortLog(key_schema=b"")
    for batch in (3, 4, 5):
        parent.run(batch)
    branch_operator(parent.history(), PARENT, target(tmp_path))
    [entry] = checkpoints(tmp_path)
    assert (entry.batch, entry.base_ranges, entry.retained_from) == (5, None, 5)
    assert [part.name for part in entry.segments] == [
        link("/parent", part.name) for entry in parent.history().between(5, 5) for part in entry.segments
    ]


def test_a_location_with_state_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    parent = parents_log()
    branch_operator(parent.history(), PARENT, target(tmp_path))
    before = read(tmp_path)
    with pytest.raises(ConfigurationError, match=f"{tmp_path}/{FOLDER} holds state already") as refused:
        branch_operator(parent.history(), replace(PARENT, batch=6), target(tmp_path, 6))
    assert refused.value.kind is ErrorKind.OTHER_OWNER
    assert read(tmp_path) == before
    assert read_parent(LocalStore(tmp_path), FOLDER) == PARENT


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_branch_that_is_not_finished_is_none_or_names_its_parent(
    tmp_path: Path, when: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the note nobody would know that it relies on the pin. One without a checkpoint can be made again."""
    history, outcomes = parents_log().history(), []
    for number in itertools.count(1):
        location = tmp_path / str(number)
        faults = FaultStore(LocalStore(location), FaultPlan.at(call=number, when=when))
        monkeypatch.setattr(branch_module, "open_location", lambda _, faults=faults: LinkedStore(faults, refuse))
        try:
            branch_operator(history, PARENT, target(location))
        except StorageError:
            outcomes.append(len(checkpoints(location)))
            if outcomes[-1]:
                assert read_parent(LocalStore(location), FOLDER) == PARENT
            else:
                monkeypatch.setattr(branch_module, "open_location", open_location)
                branch_operator(history, PARENT, target(location))
                assert len(checkpoints(location)) == 3
        if faults.calls < number:
            break
    assert set(outcomes) == {0, 1, 2, 3}


def refuse(location: str) -> Store:
    raise AssertionError(location)


def test_an_error_leaves_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The location is as empty as before."""
    store = FaultStore(LocalStore(tmp_path), FaultPlan.at("put"))
    monkeypatch.setattr(branch_module, "open_location", lambda location: LinkedStore(store, refuse))
    with pytest.raises(StorageError):
        branch_operator(parents_log().history(), PARENT, target(tmp_path))
    assert LocalStore(tmp_path).list() == []
