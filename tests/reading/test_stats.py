"""``statelog.stats``: every number is compared with one that is computed from files, changes or the model."""

from __future__ import annotations

import itertools
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest

import statelog
from statelog import CorruptionError, OperatorProcessor, OperatorStats, Options, StatelogError, StateStats
from statelog.runs.schema import TAIL, Footer, StoredBlock, plain_name
from statelog.storage import LocalStore
from statelog.testing import Harness
from statelog.testing.faults import Call, Fault, FaultPlan, FaultStore
from statelog.testing.harness import parts_of
from tests.model.engine import Key
from tests.reading.story import STATES, Story, hash_of, map_rows, value_rows

GROUPS = 32_768
RANGES = 128


def stats(query: Story, **arguments: Any) -> OperatorStats:
    [found] = statelog.stats(query.location, **arguments)
    return found


def state(found: OperatorStats, name: str) -> StateStats:
    [one] = [one for one in found.states if one.state == name]
    return one


@pytest.fixture
def in_files(tmp_path: Path) -> Story:
    """A query that stores each changeset in a file of its own, and materializes nothing."""
    made = Story(tmp_path / "query", inline_budget_bytes=0, file_merging="off", retained_checkpoints=3)
    made.run_batches(6, random.Random(1))
    return made


@pytest.fixture
def materialized(tmp_path: Path) -> Story:
    """A query that materializes all the time, retains as little as it can, and deletes what it can at once."""
    made = Story(
        tmp_path / "query",
        inline_budget_bytes=0,
        file_merging="off",
        retained_checkpoints=2,
        materialization_interval_s=0.0,
        max_log_to_base=0.0,
        max_file_bytes=1,
        log_min_age_s=0.0,
    )
    made.run_batches(12, random.Random(2))
    return made


# ---- Stored files, by their bytes ----


def run_files(query: Story, folder: str) -> list[Path]:
    return sorted((Path(query.location) / query.identity / folder).rglob("*.run"))


def footer_of(file: Path) -> Footer:
    data = file.read_bytes()
    length, _, _ = TAIL.unpack(data[-TAIL.size :])
    return msgspec.msgpack.decode(data[-TAIL.size - length : -TAIL.size], type=Footer)


def blocks_of(files: Iterable[Path]) -> Iterator[tuple[str, StoredBlock]]:
    for file in files:
        footer = footer_of(file)
        for block in footer.blocks:
            yield plain_name(footer.states[block.state].name), block


def require_sums(found: OperatorStats, files: list[Path]) -> None:
    """The states' numbers are the sums of the blocks of some files."""
    rows, stored, uncompressed = Counter[str](), Counter[str](), Counter[str]()
    for name, block in blocks_of(files):
        rows[name] += block.rows
        stored[name] += block.length
        uncompressed[name] += block.size_bytes
    measured = {one.state: (one.stored_rows, one.stored_bytes, one.uncompressed_bytes) for one in found.states}
    assert measured == {name: (rows[name], stored[name], uncompressed[name]) for name in STATES}
    assert all(numbers > (0, 0, 0) for numbers in measured.values())


def size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def test_changes_are_counted_by_state(in_files: Story) -> None:
    found, files = stats(in_files), run_files(in_files, "changes")
    assert (found.uid, found.batch, found.batch_time_ms, found.parallelism) == ("op", 5, 1005, 3)
    assert (found.oldest_batch, found.oldest_batch_time_ms, found.checkpoints) == (3, 1003, 3)
    assert (found.base_bytes, found.runs, found.levels) == (0, 0, 0)
    assert (found.log_bytes, found.changesets) == (size(files), len(files))
    assert found.state_bytes == found.log_bytes
    assert found.files == len(files) + 6, "every batch has a log file"
    require_sums(found, files)
    changes = statelog.read_changes(in_files.location, state="map").read_all()
    assert state(found, "map").stored_rows == changes.num_rows


def needed(query: Story, batches: range, copy: Path) -> list[Path]:
    """The files of a query without which one of some checkpoints cannot be read."""
    files = sorted(path for path in Path(query.location).rglob("*") if path.is_file())
    shutil.copytree(query.location, copy)
    found: list[Path] = []
    for file in files:
        hidden = copy / file.relative_to(query.location)
        data = hidden.read_bytes()
        hidden.unlink()
        try:
            for batch in batches:
                statelog.read_state(copy, state="map", at=batch).read_all()
        except StatelogError:
            found.append(file)
        hidden.write_bytes(data)
    shutil.rmtree(copy)
    return found


def test_what_a_checkpoint_needs_is_counted(materialized: Story, tmp_path: Path) -> None:
    found, newest = stats(materialized), len(materialized.models) - 1
    files = needed(materialized, range(newest, newest + 1), tmp_path / "copy")
    runs = [file for file in files if "runs" in file.parts]
    assert (found.batch, found.checkpoints, found.oldest_batch) == (newest, 2, newest - 1)
    assert (found.runs, found.base_bytes) == (len(runs), size(runs))
    assert found.runs / found.parallelism <= found.levels <= found.runs
    measured = materialized.engine.crash_point.checkpoints[-1]
    assert (found.base_bytes, found.log_bytes) == (measured.base_bytes, measured.log_bytes)
    assert found.state_bytes == found.base_bytes + found.log_bytes
    assert found.base_bytes > 0 < found.log_bytes
    retained = needed(materialized, range(newest - 1, newest + 1), tmp_path / "copy")
    assert found.retained_bytes == size(retained)


def test_objects_are_counted_by_what_keeps_them(materialized: Story) -> None:
    made = statelog.pin(materialized.location, at=len(materialized.models) - 1, lasts_s=None, owner="audit")
    materialized.run_batches(12, random.Random(3))
    found = stats(materialized)
    files = {path for path in Path(materialized.location).rglob("*") if path.is_file()}
    assert found.stored_bytes == size(files)
    assert found.pins == 1
    pinned, _, newest = statelog.list_checkpoints(materialized.location)
    assert pinned.kept_by == ("audit",)
    assert found.pinned_bytes == pinned.own_bytes > 0
    assert newest.own_bytes <= found.retained_bytes < found.stored_bytes
    assert found.space_amplification is not None
    assert found.space_amplification >= 1

    statelog.unpin(materialized.location, made.name)
    assert (stats(materialized).pins, stats(materialized).pinned_bytes) == (0, 0)


# ---- Skew ----


def brute_force(files: Iterable[Path], count: int) -> list[Fraction]:
    """The bytes in each of `count` ranges of key groups, if those of a block are spread over its hashes."""
    bounds = [-(-number * GROUPS // count) << 49 for number in range(count + 1)]
    found = [Fraction(0)] * count
    for _, block in blocks_of(files):
        for number in range(count):
            first, last = max(bounds[number], block.first_hash), min(bounds[number + 1] - 1, block.last_hash)
            if first <= last:
                found[number] += Fraction(block.length * (last - first + 1), block.last_hash - block.first_hash + 1)
    return found


def require_skew(found: OperatorStats, files: list[Path]) -> None:
    subtasks, ranges = brute_force(files, found.parallelism), brute_force(files, RANGES)
    assert found.largest_subtask == subtasks.index(max(subtasks))
    assert found.subtask_skew == pytest.approx(float(max(subtasks) / median(subtasks)))
    largest, width = ranges.index(max(ranges)), GROUPS // RANGES
    assert found.largest_groups == (largest * width, largest * width + width - 1)
    assert found.group_skew == pytest.approx(float(max(ranges) / median(ranges)))


def test_skew_is_that_of_the_blocks(in_files: Story) -> None:
    require_skew(stats(in_files), run_files(in_files, "changes"))
    in_files.start(5)
    in_files.run_batches(2, random.Random(4))
    found = stats(in_files)
    assert found.parallelism == 5
    require_skew(found, run_files(in_files, "changes"))


@pytest.mark.parametrize("key", [(3, "a"), (11, None), (None, "a")])
def test_a_large_key_is_found_by_its_subtask_and_key_group(in_files: Story, key: Key) -> None:
    text = "".join(random.Random(5).choices("0123456789abcdef", k=200_000))
    in_files.run(6, [(key, ("append", text))])
    found = stats(in_files)
    group = hash_of(key) % (1 << 64) >> 49
    assert found.largest_subtask == group * 3 // GROUPS
    assert found.subtask_skew is not None
    assert found.subtask_skew > 5
    assert found.largest_groups is not None
    assert found.largest_groups[0] <= group <= found.largest_groups[1]


def test_what_is_empty_has_no_skew(tmp_path: Path) -> None:
    query = Story(tmp_path / "query")
    query.run(0, [])
    found = stats(query, scan=True)
    assert found.state_bytes == 0
    assert (found.space_amplification, found.largest_subtask, found.subtask_skew) == (None, None, None)
    assert (found.largest_groups, found.group_skew) == (None, None)
    assert state(found, "map") == StateStats("map", "map", 0, 0, 0, 0, 0, 0, 0, 0, ())


# ---- Reading all ----


def key_bytes(key: Key) -> int:
    """Bytes of an encoded key, docs/format.md, behind an offset of four."""
    number, text = key
    return 4 + (1 if number is None else 9) + (1 if text is None else 5 + len(text))


ENTRY_BYTES = {"value": 4, "list": 4 + 16, "map": 4 + 1 + 4 + 1}
"""Of an encoded map key or list position behind its offset; map keys have one letter."""


def value_bytes(value: int | str) -> int:
    return 8 if isinstance(value, int) else 4 + len(value)


@pytest.mark.parametrize("kind", ["in_files", "materialized"])
def test_a_scan_counts_rows_and_keys(kind: str, request: pytest.FixtureRequest) -> None:
    query: Story = request.getfixturevalue(kind)
    found = stats(query, scan=True)
    for name, rows_of in STATES.items():
        measured, rows = state(found, name), rows_of(query.models[-1])
        sizes, counts = Counter[Key](), Counter[Key]()
        for row in rows:
            key = row[:2]
            counts[key] += 1
            sizes[key] += key_bytes(key) + ENTRY_BYTES[name] + value_bytes(row[-1])
        assert (measured.rows, measured.keys) == (len(rows), len(counts))
        assert measured.most_rows == max(counts.values())
        assert measured.key_bytes == sum(key_bytes(row[:2]) + ENTRY_BYTES[name] for row in rows)
        assert measured.value_bytes == sum(value_bytes(row[-1]) for row in rows)
        largest = measured.largest_keys
        assert largest is not None
        assert [one.size_bytes for one in largest] == sorted(sizes.values(), reverse=True)[:20]
        assert all(one.key and (one.rows, one.size_bytes) == (counts[one.key], sizes[one.key]) for one in largest)
        assert len({one.key for one in largest}) == min(20, len(counts))
        assert measured.stored_rows > len(rows)


def test_without_a_scan_nothing_of_it_is_there(in_files: Story) -> None:
    for one in stats(in_files).states:
        assert (one.rows, one.keys, one.most_rows, one.key_bytes, one.value_bytes, one.largest_keys) == (None,) * 6


class Reads(FaultPlan):
    """Counts the reads of runs, and calls a function before a request."""

    def __init__(self, number: int = 0, then: Any = None) -> None:
        self.number, self.then = number, then
        self.requests = 0

    def fault(self, call: Call) -> Fault | None:
        self.requests += 1
        return Fault(action=self.then) if self.requests == self.number else None


def test_only_footers_are_read_without_a_scan(in_files: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(6)
    in_files.run(6, [((number % 20, None), ("append", rng.randbytes(4000).hex())) for number in range(400)])
    read = 0

    class Counted(LocalStore):
        def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
            nonlocal read
            data = super().read(name, offset=offset, length=length)
            read += len(data) if name.endswith(".run") else 0
            return data

    monkeypatch.setattr("statelog.reading.open.open_location", Counted)
    found = stats(in_files)
    files = run_files(in_files, "changes")
    assert found.state_bytes == size(files) > 1 << 20
    assert read <= sum(min(file.stat().st_size, (64 << 10) + 8) for file in files) < found.state_bytes / 4


def test_changesets_side_by_side_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are a hundred in ten objects of the log."""
    query = Story(tmp_path / "query", parallelism=10, file_merging="within")
    query.run_batches(10, random.Random(7))
    reads = Reads()
    monkeypatch.setattr("statelog.reading.open.open_location", lambda location: FaultStore(LocalStore(location), reads))
    statelog.list_checkpoints(query.location)
    of_the_log = reads.requests
    found = stats(query)
    assert found.changesets > 60
    # The log is read again once the pin is written; then comes one request for each object.
    assert reads.requests - of_the_log <= 2 * of_the_log + 10 + 10


# ---- Beside the query ----


def test_it_is_right_however_fast_the_query_forgets(
    materialized: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    materialized.engine.coordinator.close()
    for number in itertools.count(1, 5):
        query = materialized.copied(tmp_path / str(number))
        query.start(keep_local=False)
        stop = Reads(number, lambda query=query: query.run_batches(3, random.Random(2)))
        monkeypatch.setattr(
            "statelog.reading.open.open_location",
            lambda location, stop=stop: FaultStore(LocalStore(location), stop),
        )
        found = stats(query, scan=True)
        model = query.models[found.batch]
        assert state(found, "value").rows == len(value_rows(model))
        assert state(found, "map").rows == len(map_rows(model))
        if stop.requests < number:
            break
    assert number > 20
    assert statelog.list_pins(query.location) == []


def test_damage_is_named(in_files: Story) -> None:
    file = run_files(in_files, "changes")[-1]
    data = bytearray(file.read_bytes())
    data[-TAIL.size - 1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match=file.name):
        stats(in_files)


class Numbers(OperatorProcessor):
    """Keeps the latest numbers, or with `keeps` the first."""

    def init(self, handle: Any) -> None:
        self._numbers = handle.getListState("numbers", "n long")

    def process(self, rows: Iterator[Any], *_: Any) -> Iterator[Any]:
        for row in rows:
            self._numbers.update([(row.n + place,) for place in range(50)])
        yield from ()

    def close(self) -> None:
        pass


def test_space_amplification_is_the_garbage_in_files_whatever_the_operator(tmp_path: Path) -> None:
    """As the driver measures it, once it has given up what it no longer retains."""
    options = Options(retained_checkpoints=2, file_merging="across", max_space_amplification=1.5)
    with Harness(Numbers(), input="n long", output="n long", parallelism=2, options=options) as harness:
        for number in range(12):
            harness.push([(number,)] if number % 5 == 0 else [])
        [found] = statelog.stats(parts_of(harness).query.location)
        harness.push([])
        measured = harness.checkpoints[-1]
        assert found.space_amplification is not None
        assert found.space_amplification > 1
        assert found.space_amplification == pytest.approx(measured.space_amplification, rel=0.2)
    keyed = Story(tmp_path / "keyed", parallelism=2, inline_budget_bytes=0, retained_checkpoints=2)
    keyed.run_batches(6, random.Random(1))
    [found] = statelog.stats(keyed.location)
    measured = keyed.engine.crash_point.checkpoints[-1]
    assert found.space_amplification == measured.space_amplification == 1.0
