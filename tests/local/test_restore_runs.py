"""A restored state is what its levels and changesets say, whatever is here already and however much is read of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from statelog.errors import CorruptionError
from statelog.history.restore_plan import SHARED_BYTES, ClippedSegment, RestorePlan
from statelog.local import stored_reader
from statelog.local.restore import read_level, read_segments, restore_runs
from statelog.local.runs import LocalRun, LocalRuns
from statelog.local.stored_reader import read_threads
from statelog.log.references import Level, SegmentRef, StoredRun
from statelog.runs import digests
from statelog.runs.key_groups import HashRange, hash_range
from statelog.runs.merge import Garbage
from statelog.runs.reader import Run
from statelog.runs.schema import Operation, TimeDomain
from statelog.runs.times import Moment
from statelog.storage import LocalStore
from tests.contract.table_contract import VALUE, encode_changes

Changes = dict[int, str | None]
"""By key hash the new value; None removes it."""

EVERYTHING = hash_range(0, 1)
EXPIRING = replace(VALUE, expires_by=TimeDomain.PROCESSING)
HALVES = [hash_range(subtask, 2) for subtask in range(2)]
DIGESTS = [bytes([number]) * 16 for number in range(9)]
GENESIS = DIGESTS[0]


class ManyRequests(LocalStore):
    """A directory that is read like an object store, several objects at a time."""

    @property
    def can_append(self) -> bool:
        return False


def encoded(changes: Changes, expiry_ms: int | None = None) -> bytes:
    rows = [
        (key_hash, b"k%d" % key_hash, b"", Operation.DELETE if value is None else Operation.PUT, value)
        for key_hash, value in changes.items()
    ]
    return encode_changes(EXPIRING, rows, block_rows=100, expiry_ms=expiry_ms)


class Location:
    """Stored runs, and a subtask that lacks them."""

    def __init__(self, root: Path, *, is_directory: bool = True) -> None:
        self.store = (LocalStore if is_directory else ManyRequests)(root / "store")
        self.local = LocalRuns(root / "local")
        self.read = 0
        self._objects = 0

    def put(self, data: bytes) -> str:
        self._objects += 1
        self.store.put(f"{self._objects}", data)
        return f"{self._objects}"

    def level(self, number: int, *parts: Changes, within: HashRange = EVERYTHING) -> Level:
        runs = []
        for changes in parts:
            data = encoded(changes)
            checksum, bounds = digests.checksum(data), (min(changes), max(changes))
            runs.append(StoredRun(self.put(data), 0, len(data), checksum, len(changes), *bounds))
        return Level(number, number, DIGESTS[number], DIGESTS[number + 1], within.first, within.last, runs)

    def segment(
        self, changes: Changes, *ranges: HashRange, is_shared: bool = False, expiry_ms: int | None = None
    ) -> list[ClippedSegment]:
        data = encoded(changes, expiry_ms)
        ref = SegmentRef(0, 1, digests.checksum(data), 0, len(data), len(changes), 1, self.put(data))
        return [ClippedSegment(ref, one.first, one.last, is_shared) for one in ranges or (EVERYTHING,)]

    def restore(
        self,
        head: int,
        levels: Sequence[Level] = (),
        segments: Sequence[ClippedSegment] = (),
        *,
        since: int = 0,
        within: HashRange = EVERYTHING,
        time_ms: int = 0,
    ) -> list[dict[int, tuple[int, str | None]]]:
        """The restored runs, oldest first: operation and value by key hash."""

        def count() -> None:
            self.read += 1

        runs = restore_runs(
            self.local,
            genesis=GENESIS,
            head=DIGESTS[head],
            last_batch=head - 1,
            within=within,
            garbage=Garbage(Moment(time_ms, 0), {}),
            fetch=lambda known: RestorePlan(DIGESTS[since], since, list(segments), list(levels)),
            open_store=lambda: self.store,
            token="token",
            note_read=count,
        )
        return [rows_of(run) for _, run in runs]


def rows_of(run: Run) -> dict[int, tuple[int, str | None]]:
    blocks = [block.load() for section in run.sections.values() for block in section.blocks]
    rows = [row for block in blocks for row in block.to_pylist()]
    names = blocks[0].schema.names if blocks else []
    value = names[-1] if names else ""
    return {row["hash"]: (row["op"], row[value]) for row in rows}


def state_of(runs: Sequence[dict[int, tuple[int, str | None]]]) -> dict[int, str | None]:
    merged = {key_hash: row for run in runs for key_hash, row in run.items()}
    return {key_hash: value for key_hash, (operation, value) in merged.items() if operation == Operation.PUT}


def some(count: int, seed: int, size: int = 5) -> dict[int, str]:
    """Values of keys all over the hashes."""
    rng = random.Random(seed)
    return {rng.randrange(1 << 64): rng.randbytes(size).hex() for _ in range(count)}


def test_changesets_are_merged_in_order(tmp_path: Path) -> None:
    location = Location(tmp_path)
    segments = location.segment({1: "a", 2: "b"}) + location.segment({2: "c", 3: "d"}) + location.segment({1: None})
    [merged] = location.restore(3, segments=segments)
    assert merged == {2: (Operation.PUT, "c"), 3: (Operation.PUT, "d")}, "nothing is below, so removals go"
    assert location.read == 3


def test_a_removal_counts_for_what_is_here_already(tmp_path: Path) -> None:
    location = Location(tmp_path)
    location.restore(1, segments=location.segment({1: "old", 2: "old"}))
    runs = location.restore(3, segments=location.segment({1: "new"}) + location.segment({1: None}), since=1)
    assert state_of(runs) == {2: "old"}
    assert len(runs) == 2


def test_a_removal_in_a_level_counts_for_the_levels_below(tmp_path: Path) -> None:
    location = Location(tmp_path)
    levels = [
        location.level(0, {1: "old", 2: "old"}, {3: "old", 4: None}),
        location.level(1, {1: None, 5: "new"}),
        location.level(2, {5: None, 2: "new"}),
    ]
    runs = location.restore(4, levels, location.segment({3: None}), since=3)
    assert state_of(runs) == {2: "new"}
    assert 4 not in runs[0], "nothing is below the oldest"
    assert location.read == 5


def test_levels_alone_need_no_further_file(tmp_path: Path) -> None:
    location = Location(tmp_path)
    location.restore(2, [location.level(0, {1: "a"}), location.level(1, {2: "b"})], since=2)
    local_runs = [LocalRun(number, number, DIGESTS[number], DIGESTS[number + 1]).file_name for number in (0, 1)]
    assert sorted(path.name for path in location.local.directory.iterdir()) == sorted(local_runs)


def test_what_has_expired_is_not_kept(tmp_path: Path) -> None:
    location = Location(tmp_path)
    segments = location.segment({1: "a"}, expiry_ms=1000) + location.segment({2: "b"}, expiry_ms=3000)
    assert [set(run) for run in location.restore(2, segments=segments, time_ms=2000)] == [{2}]


def test_runs_that_are_read_ahead_do_not_share_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an object store several are read at a time, and each may be used until the next one is asked for."""
    monkeypatch.setattr(stored_reader, "SHARED_BYTES", 0)
    read = threading.Semaphore(0)

    class Noted(ManyRequests):
        def read_into(self, buffer: memoryview, name: str, *, offset: int = 0) -> int:
            length = super().read_into(buffer, name, offset=offset)
            read.release()
            return length

    location = Location(tmp_path)
    parts: list[Changes] = [{**some(20, seed)} for seed in range(4)]
    runs = read_level(Noted(tmp_path / "store"), location.level(0, *parts))
    first = next(runs)
    for _ in parts:
        assert read.acquire(timeout=20)
    found = [rows_of(run) for run in (first, *runs)]
    assert [state_of([rows]) for rows in found] == parts


@pytest.mark.parametrize("is_directory", [True, False])
@pytest.mark.parametrize("within", HALVES)
def test_a_subtask_gets_its_own_keys_of_a_changeset_and_no_others(
    tmp_path: Path, is_directory: bool, within: HashRange
) -> None:
    """Others would fire timers twice, and be listed twice."""
    location = Location(tmp_path, is_directory=is_directory)
    small, large = some(100, 1), some(2500, 2, 250)
    segments = location.segment(dict(small), within, is_shared=True) + location.segment(
        dict(large), within, is_shared=True
    )
    assert segments[1].segment.length > SHARED_BYTES
    [merged] = location.restore(2, segments=segments, within=within)
    expected = {
        key_hash: value for key_hash, value in (small | large).items() if within.first <= key_hash <= within.last
    }
    assert state_of([merged]) == expected
    assert set(merged) == set(expected), "no keys of others"


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("size", [5, 250])
def test_a_changeset_counts_only_for_the_keys_whose_base_lacks_it(tmp_path: Path, is_shared: bool, size: int) -> None:
    """The base of the second quarter, of another parallelism, holds the changes of the batch already."""
    location = Location(tmp_path)
    changes = some(2500, 3, size)
    quarters = [hash_range(subtask, 4) for subtask in range(4)]
    ranges = [quarters[0], HashRange(quarters[2].first, quarters[3].last)]
    segments = location.segment(dict(changes), *ranges, is_shared=is_shared)
    runs = location.restore(1, segments=segments)
    expected = {
        key_hash: value for key_hash, value in changes.items() if not quarters[1].first <= key_hash <= quarters[1].last
    }
    assert state_of(runs) == expected


@pytest.mark.parametrize("is_directory", [True, False])
@pytest.mark.parametrize("within", [EVERYTHING, *HALVES])
def test_the_large_runs_of_a_level_are_read_as_they_are(tmp_path: Path, is_directory: bool, within: HashRange) -> None:
    """Several at a time from an object store, and only what counts of those that others have a part of."""
    location = Location(tmp_path, is_directory=is_directory)
    rows = sorted(some(7500, 4, 250).items())
    parts: list[Changes] = [dict(rows[start : start + 2500]) for start in range(0, len(rows), 2500)]
    level = location.level(0, *parts, within=within)
    assert min(run.length for run in level.runs) > SHARED_BYTES
    runs = location.restore(1, [level], since=1, within=within)
    assert state_of(runs) == {key_hash: value for key_hash, value in rows if within.first <= key_hash <= within.last}
    assert len(runs) == 1
    assert set(runs[0]) == set(state_of(runs)), "no keys of others"


def test_many_small_changesets_are_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an object store: a log of many small entries is far away by one round trip for each of them."""
    location = Location(tmp_path, is_directory=False)
    segments = [clip for key_hash in range(64) for clip in location.segment({key_hash: "v"})]
    read, together = location.store.read, threading.Barrier(32, timeout=60)

    def read_together(name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        together.wait()
        return read(name, offset=offset, length=length)

    monkeypatch.setattr(location.store, "read", read_together)
    assert sum(run.rows for run in read_segments(location.store, segments, EVERYTHING)) == len(segments)


@pytest.mark.parametrize(("largest_bytes", "threads"), [(1, 32), (1 << 20, 32), (4 << 20, 8), (1 << 30, 4), (None, 4)])
def test_large_objects_are_read_a_few_at_a_time(tmp_path: Path, largest_bytes: int | None, threads: int) -> None:
    assert read_threads(ManyRequests(tmp_path), largest_bytes) == threads
    assert read_threads(LocalStore(tmp_path), largest_bytes) == 1


@pytest.mark.parametrize("size", [5, 250])
def test_damage_is_an_error_that_names_the_object(tmp_path: Path, size: int) -> None:
    location = Location(tmp_path)
    segments = location.segment(dict(some(2500, 5, size)))
    name = segments[0].segment.name
    location.store.put(name, location.store.read(name)[:-1] + b"?")
    with pytest.raises(CorruptionError, match=f"^{name}: the changeset of subtask 0"):
        location.restore(1, segments=segments)
    assert location.local.local_runs() == []
