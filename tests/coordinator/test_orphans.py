"""What a new run removes of those that crashed: only what no checkpoint names and no live writer can still name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from statelog.coordinator.deletion import find_orphans
from statelog.history.query_history import QueryHistory
from statelog.log.entry import Checkpoint
from statelog.log.references import Base, Level, SegmentRef, StoredRun
from statelog.runs.key_groups import hash_range
from statelog.storage import LocalStore
from statelog.testing.query import ManualClock
from tests.entries import checkpoint_of, entry_of, query_of

NOW_S = 10_000
MIN_AGE_S = 60.0
EPOCH = 12
IDENTITY = "op-1"


def checkpoint(batch: int, name: str = "", *, base: Base | None = None) -> Checkpoint:
    segment = SegmentRef(0, 0, b"c", 0, 1, 1, 1, name)
    bases = [] if base is None else [base]
    return checkpoint_of(batch, [segment], bases=bases, begins=batch == 0, identity=IDENTITY)


def base(through: int, name: str) -> Base:
    own = hash_range(0, 1)
    run = StoredRun(name, 0, 1, b"c", 1, own.first, own.last)
    return Base(0, 1, [Level(0, through, b"", b"%d" % through, own.first, own.last, [run])])


def orphans(
    root: Path, query: QueryHistory, ages_s: dict[str, float], *, epoch: int = EPOCH, **values: Sequence[str]
) -> list[str]:
    store = LocalStore(root)
    for name, age_s in ages_s.items():
        store.put(name, b"x")
        os.utime(root / name, (NOW_S - age_s, NOW_S - age_s))
    clock = ManualClock(NOW_S)
    return find_orphans(store, query, epoch=epoch, run_id="run-2", min_age_s=MIN_AGE_S, clock=clock, **values)


@pytest.mark.parametrize("folder", ["changes", "runs"])
def test_only_epochs_that_are_over_have_orphans(tmp_path: Path, folder: str) -> None:
    ages_s = {f"op-1/{folder}/{epoch}/0/x": 1000.0 for epoch in (1, 9, EPOCH - 1, EPOCH, EPOCH + 1)}
    expected = sorted(f"op-1/{folder}/{epoch}/0/x" for epoch in (1, 9, EPOCH - 1))
    assert orphans(tmp_path, QueryHistory(), ages_s) == expected


def test_what_no_epoch_wrote_is_an_orphan(tmp_path: Path) -> None:
    assert orphans(tmp_path, QueryHistory(), {"op-1/changes/x/0/y": 1000.0}, epoch=1) == ["op-1/changes/x/0/y"]


def test_a_young_object_may_be_of_a_writer_that_does_not_know_yet(tmp_path: Path) -> None:
    ages_s = {"op-1/changes/1/0/young": MIN_AGE_S - 1, "op-1/changes/1/0/old": MIN_AGE_S, "op-1/initial/run-1/0": 0.0}
    assert orphans(tmp_path, QueryHistory(), ages_s) == ["op-1/changes/1/0/old"]


def test_nothing_that_a_checkpoint_names_is_an_orphan(tmp_path: Path) -> None:
    query = query_of(
        [
            checkpoint(0, "op-1/changes/1/0/first"),
            checkpoint(1, "op-1/changes/1/0/second", base=base(0, "op-1/runs/1/0/replaced")),
            checkpoint(2, "op-1/changes/1/0/third", base=base(1, "op-1/runs/1/0/newest")),
        ]
    )
    named = ["changes/1/0/first", "changes/1/0/second", "changes/1/0/third", "runs/1/0/replaced", "runs/1/0/newest"]
    ages_s = {f"op-1/{name}": 1000.0 for name in (*named, "changes/1/0/lost", "runs/1/0/lost")}
    assert orphans(tmp_path, query, ages_s) == ["op-1/changes/1/0/lost", "op-1/runs/1/0/lost"]


def test_what_the_oldest_checkpoint_starts_from_is_no_orphan(tmp_path: Path) -> None:
    query = query_of([checkpoint(0), checkpoint(1, base=base(1, "op-1/runs/1/0/base")), checkpoint(2)])
    history = query.histories[IDENTITY]
    repeated = history.latest_record
    assert repeated is not None
    assert repeated.base_map is not None
    query.add(entry_of(structs.replace(checkpoint(3), base_ranges=list(repeated.base_map.ranges))))
    query.add(entry_of(checkpoint(4)))
    assert [record.batch for record in query.retain(4, {})[0]] == [0, 1], "the entry that brought the base"
    assert orphans(tmp_path, query, {"op-1/runs/1/0/base": 1000.0}) == []


def test_the_initial_state_of_the_run_stays(tmp_path: Path) -> None:
    ages_s = {f"op-1/initial/{run}/0.arrow": 1000.0 for run in ("run-1", "run-2", "run-20")}
    assert orphans(tmp_path, QueryHistory(), ages_s) == ["op-1/initial/run-1/0.arrow", "op-1/initial/run-20/0.arrow"]


def test_the_initial_state_of_a_fenced_run_goes_at_once(tmp_path: Path) -> None:
    """One that is in no claim may be about to claim; its name may begin with that of another."""
    ages_s = {f"op-1/initial/{run}/0.arrow": 0.0 for run in ("run-1", "run-10", "run-2", "run-3")}
    assert orphans(tmp_path, QueryHistory(), ages_s, fenced_runs=["run-1"]) == ["op-1/initial/run-1/0.arrow"]
    assert orphans(tmp_path, QueryHistory(), {}, fenced_runs=["run-1", "run-3"]) == [
        "op-1/initial/run-1/0.arrow",
        "op-1/initial/run-3/0.arrow",
    ]


def test_what_operators_are_given_to_begin_with_is_no_orphan(tmp_path: Path) -> None:
    """No entry names it before their first one."""
    ages_s = {f"op-1/runs/1/0/{name}": 1000.0 for name in ("given", "lost")}
    assert orphans(tmp_path, QueryHistory(), ages_s, given=["op-1/runs/1/0/given"]) == ["op-1/runs/1/0/lost"]


def test_what_no_retained_checkpoint_has_of_any_operator_goes(tmp_path: Path) -> None:
    """Also of an operator that the query does not have any more, and not of what is not an operator's."""
    query = query_of([checkpoint(0, "op-1/changes/1/0/named")])
    gone = ["op-1/changes/1/0/x", "op-2/changes/1/0/x", "other-1/runs/1/0/1-2/x"]
    stay = ["op-1/changes/1/0/named", "log/1.log", "pins/1-a.json", "op-1/changes.old/1/x", "changes/1/0/x"]
    assert orphans(tmp_path, query, dict.fromkeys([*gone, *stay], 1000.0)) == gone
