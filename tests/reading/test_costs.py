"""What reading costs: requests and bytes, counted at a store that cannot append, as object stores cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

import statelog
from statelog.history.operator_history import History
from statelog.history.restore_plan import SHARED_BYTES
from statelog.log.references import SegmentRef
from statelog.reading.open import open_logged
from statelog.runs.writer import STORED_BLOCK_BYTES
from statelog.storage import Store
from statelog.storage.store import StoreWrapper
from tests.reading.large_state import (
    LEVELS,
    PARALLELISM,
    LargeState,
    changes_since,
    key_of,
    levels_of,
    objects,
    subtask_of,
)
from tests.reading.story import hash_of
from tests.stores import CountedStore, Requests

_T = TypeVar("_T")
DIFF = ["key_a", "change", "before_field", "value_field"]
TAIL_BYTES = 64 << 10


@pytest.fixture(scope="module")
def query(tmp_path_factory: pytest.TempPathFactory) -> LargeState:
    return LargeState(tmp_path_factory.mktemp("large"))


@pytest.fixture
def store(query: LargeState, monkeypatch: pytest.MonkeyPatch) -> CountedStore:
    """The store from which readers read."""
    return counted(query, monkeypatch)


def test_a_look_up_makes_two_requests_per_level_and_one_per_log_file_since(
    query: LargeState, store: CountedStore
) -> None:
    for number in range(5):
        query.run_keys([key_of(number)])
    source = open_logged(query.location, None, None)
    for subtask in range(PARALLELISM):
        found = levels_of(source.history, subtask)
        assert len(found) == len(LEVELS)
        assert min(run.length for runs in found for run in runs) > SHARED_BYTES
    levels = len(LEVELS)
    with statelog.open_state(query.location) as reader:
        store.take()
        seen: set[int] = set()
        for number in (7, 4011, 8, 12, 7):
            subtask = subtask_of(key_of(number))
            since = len(changes_since(source.history, subtask))
            most = levels if subtask in seen else 2 * levels + since
            seen.add(subtask)
            [value] = reader.read("value", keys=[key_of(number)]).read_all()["value_field"].to_pylist()
            assert value == query.models[-1].keys[key_of(number)][0]
            requests = store.take()
            assert {operation for operation, _, _ in requests.calls} <= {"read"}
            assert requests.reads <= most
            blocks = levels * (STORED_BLOCK_BYTES + TAIL_BYTES)
            assert requests.read_bytes() <= blocks + since * 10_000


class Together(StoreWrapper):
    """A store whose first reads wait for each other."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.barrier: threading.Barrier | None = None
        self.left = 0

    def hold(self, count: int) -> None:
        self.barrier, self.left = threading.Barrier(count), count

    def _call(self, operation: str, name: str, effect: Callable[[], _T]) -> _T:
        if operation == "read" and self.left and self.barrier is not None:
            self.left -= 1
            self.barrier.wait(60)
        return effect()


def test_the_requests_of_a_look_up_are_made_at_once(query: LargeState, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Together(objects(query.location))
    monkeypatch.setattr("statelog.reading.open.open_location", lambda location: made)
    key = key_of(0)
    query.run_keys([key])
    history = open_logged(query.location, None, None).history
    last = len(query.models) - 1
    since = changes_since(history, subtask_of(key))
    assert since
    with statelog.open_state(query.location) as reader:
        made.hold(min(16, len(LEVELS) + len(since)))
        assert reader.read("value", keys=[key]).read_all()["value_field"].to_pylist() == [last]
    assert made.left == 0


# ---- Differences ----


@pytest.fixture(scope="module")
def in_objects(tmp_path_factory: pytest.TempPathFactory) -> LargeState:
    """A query whose changes and state are in objects of their own, so that they are told from the log."""
    return LargeState(tmp_path_factory.mktemp("objects"), inline_budget_bytes=0)


def difference(query: LargeState, before: int, after: int | None = None) -> list[tuple[Any, ...]]:
    rows = statelog.read_diff(query.location, before, after, state="value", columns=DIFF).read_all()
    return sorted(zip(*rows.to_pydict().values(), strict=True))


def counted(query: LargeState, monkeypatch: pytest.MonkeyPatch) -> CountedStore:
    made = CountedStore(objects(query.location))
    monkeypatch.setattr("statelog.reading.open.open_location", lambda location: made)
    return made


def state_reads(requests: Requests) -> list[tuple[str, str, int]]:
    """The requests for stored changes and states."""
    return [call for call in requests.calls if call[0] == "read" and call[1].startswith("op-")]


def test_a_difference_reads_its_changes_once_and_one_block_per_key(
    in_objects: LargeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = in_objects
    before = len(query.models) - 1
    query.run_keys([key_of(number) for number in range(10)])
    query.run_keys([key_of(number) for number in range(8, 18)])
    store = counted(query, monkeypatch)
    history = open_logged(query.location, None, None).history
    changes = [one for batch in (before + 1, before + 2) for one in stored_changes(history, batch)]
    state = [run for subtask in range(PARALLELISM) for runs in levels_of(history, subtask) for run in runs]
    since = {one.name for batch in range(before + 1) for one in stored_changes(history, batch)}
    for sides in ((before, None), (before + 2, before)):
        store.take()
        found = difference(query, *sides)
        assert len(found) == 18
        requests = store.take()
        assert sum(count for _, name, count in state_reads(requests) if name in {one.name for one in changes}) == sum(
            one.length for one in changes
        )
        of_state = [call for call in state_reads(requests) if call[1] in {run.name for run in state}]
        assert len(of_state) <= len(state) + 18 * len(LEVELS)
        assert sum(count for _, _, count in of_state) <= len(state) * TAIL_BYTES + 18 * len(LEVELS) * STORED_BLOCK_BYTES
        assert len(state_reads(requests)) <= len(of_state) + len(changes) + len(since)


def stored_changes(history: History, batch: int) -> list[SegmentRef]:
    return [one for checkpoint in history.between(batch, batch) for one in checkpoint.segments if one.rows]


def test_a_difference_of_much_reads_at_most_three_times_its_changes(
    in_objects: LargeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of neighbouring keys, whose blocks are the same: here those of a range of hashes."""
    query = in_objects
    known = sorted((key_of(number) for numbers in LEVELS for number in numbers), key=hash_of)
    before = len(query.models) - 1
    query.run_keys(known[:1200])
    store = counted(query, monkeypatch)
    history = open_logged(query.location, None, None).history
    store.take()
    assert len(difference(query, before)) == 1200
    changed = sum(one.length for one in stored_changes(history, before + 1))
    read = sum(count for _, _, count in state_reads(store.take()))
    whole = sum(run.length for subtask in range(PARALLELISM) for runs in levels_of(history, subtask) for run in runs)
    assert read <= 3 * changed < whole


def test_equal_checkpoints_and_untouched_subtasks_read_no_state(
    in_objects: LargeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = in_objects
    before = len(query.models) - 1
    query.run_keys([])
    key = key_of(3)
    query.run_keys([key])
    store = counted(query, monkeypatch)
    history = open_logged(query.location, None, None).history
    for sides in ((before, before), (before, before + 1), (before + 2, before + 2)):
        store.take()
        assert difference(query, *sides) == []
        assert state_reads(store.take()) == []
    subtask = subtask_of(key)
    other = {run.name for runs in levels_of(history, 1 - subtask) for run in runs}
    stored = [one for batch in range(before + 3) for one in stored_changes(history, batch)]
    other |= {one.name for one in stored if one.subtask != subtask}
    store.take()
    assert difference(query, before) == [(3, "changed", query.models[before].keys[key][0], before + 2)]
    requests = store.take()
    assert state_reads(requests)
    assert not {name for _, name, _ in state_reads(requests)} & other
