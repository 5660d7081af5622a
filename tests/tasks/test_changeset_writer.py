"""A changeset: what of it is written while the batch runs, what travels with the ack, and what the next batch finds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from statelog import Options, StorageError, Tuning
from statelog.local.runs import LocalRun, LocalRuns
from statelog.log.references import SegmentRef
from statelog.operators.keyed.changes import BatchChanges
from statelog.runs import digests
from statelog.runs.writer import encode_run
from statelog.storage import LocalStore, Store
from statelog.tables.runs import RunsTable
from statelog.tasks.changeset import ChangesetWriter
from statelog.testing.faults import FaultPlan, FaultStore
from tests.attempts import make_attempt, make_begun

HEAD = bytes(range(16))
LOCAL_RUN = encode_run([], compression=None, block_rows=1)


class Given(BatchChanges):
    """Changes whose stored form is given: each is of one row and of as many bytes in memory."""

    def __init__(self, count: int = 0) -> None:
        super().__init__(RunsTable([]))
        self.made = 0
        self.unstored: list[int] = []
        self.make(count)

    def make(self, *counts: int) -> None:
        self.made += sum(counts)
        self.unstored += counts

    @property
    def rows(self) -> int:
        return self.made

    @property
    def unstored_bytes(self) -> int:
        return sum(self.unstored)

    def take_part(self, compression: str | None, max_bytes: int | None = None) -> tuple[bytes, int]:
        rows = 0
        while self.unstored and (max_bytes is None or rows < max_bytes):
            rows += self.unstored.pop(0)
        return b"%b %d" % ((compression or "plain").encode(), rows) if rows else b"", rows

    def write_local(self, sink: pa.NativeFile) -> None:
        sink.write(LOCAL_RUN)


class Subtask:
    """An attempt that writes its changes."""

    def __init__(self, folder: Path, *, part_bytes: int = 100, inline_bytes: int = 0) -> None:
        self.store: Store = LocalStore(folder / "store")
        self.local = LocalRuns(folder / "local")
        self.changes = Given()
        options = Options(max_in_flight_bytes=1000, tuning=Tuning(upload_part_bytes=part_bytes, upload_threads=1))
        attempt = make_attempt(
            self.local.directory, 3, options=options, open_store=lambda location: self.store, token="a"
        )
        begun = make_begun(head=HEAD, inline_bytes=inline_bytes, upload_prefix="changes/1/0")
        self.writer = ChangesetWriter(self.changes, attempt, begun)

    @property
    def objects(self) -> dict[str, bytes]:
        return {info.name: self.store.read(info.name) for info in self.store.list()}

    def offer(self, counts: Sequence[int]) -> None:
        for count in counts:
            self.changes.make(count)
            self.writer.offer()

    def local_runs(self) -> dict[LocalRun, bytes]:
        return {
            local_run: (self.local.directory / local_run.file_name).read_bytes()
            for local_run in self.local.local_runs()
        }


@pytest.mark.parametrize(("inline_bytes", "parts"), [(0, [10, 12, 3]), (11, [19, 6])])
def test_parts_are_as_large_as_they_must_be_and_the_next_batch_finds_all(
    tmp_path: Path, inline_bytes: int, parts: list[int]
) -> None:
    """What may travel with the ack is no reason for a request to the store."""
    subtask = Subtask(tmp_path, part_bytes=10, inline_bytes=inline_bytes)
    subtask.offer([9, 1, 9, 3, 3])
    changeset = subtask.writer.finish(subtask.local, 50)
    stored = [b"lz4 %d" % rows for rows in parts]
    assert [(part.rows, part.length, part.checksum) for part in changeset.segments] == [
        (rows, len(data), digests.checksum(data)) for rows, data in zip(parts, stored, strict=True)
    ]
    assert [part.input_rows for part in changeset.segments] == [0] * (len(parts) - 1) + [50], "said once"
    assert {(part.subtask, part.attempt) for part in changeset.segments} == {(0, 7)}
    named = {f"changes/1/0/3-a-{number}.run": data for number, data in enumerate(stored)}
    if inline_bytes:
        assert (changeset.payload, changeset.segments[-1].name) == (named.popitem()[1], "")
    assert [part.name for part in changeset.segments if part.name] == list(named)
    assert subtask.objects == named
    after = digests.extend(HEAD, 3, [digests.checksum(data) for data in stored])
    assert subtask.local_runs() == {LocalRun(3, 3, HEAD, after): LOCAL_RUN}


def test_a_part_is_taken_as_soon_as_there_is_enough_for_it(tmp_path: Path) -> None:
    subtask = Subtask(tmp_path, part_bytes=10)
    left = []
    for count in (9, 1, 3):
        subtask.offer([count])
        left.append(subtask.changes.unstored_bytes)
    assert left == [9, 0, 3]


def test_changes_that_could_not_be_uploaded_leave_no_local_run(tmp_path: Path) -> None:
    """The next attempt would take it for that of a checkpoint."""
    subtask = Subtask(tmp_path)
    subtask.store = FaultStore(subtask.store, FaultPlan.seeded(0, rate=1.0))
    subtask.offer([7])
    with pytest.raises(StorageError):
        subtask.writer.finish(subtask.local, 50)
    assert [path.name for path in subtask.local.directory.glob("*") if path.is_file()] == []


@pytest.mark.parametrize(("inline_bytes", "is_object"), [(5, False), (4, True)])
def test_what_is_small_travels_with_the_ack(tmp_path: Path, inline_bytes: int, is_object: bool) -> None:
    subtask = Subtask(tmp_path, inline_bytes=inline_bytes)
    subtask.offer([7])
    changeset = subtask.writer.finish(subtask.local, 50)
    assert changeset.payload == (b"" if is_object else b"lz4 7")
    assert list(subtask.objects.values()) == ([b"lz4 7"] if is_object else [])


def test_nothing_is_written_to_the_store_for_no_changes(tmp_path: Path) -> None:
    subtask = Subtask(tmp_path, inline_bytes=-1)
    changeset = subtask.writer.finish(subtask.local, 50)
    assert changeset.segments == [SegmentRef(0, 7, digests.checksum(b""), 0, 0, 0, 50)]
    assert subtask.objects == {}


@pytest.mark.parametrize("rows", [0, 7])
def test_without_changelog_only_the_local_run_is_written(tmp_path: Path, rows: int) -> None:
    """Its checksum tells attempts with other changes apart; without changes the state is what it was."""
    subtask = Subtask(tmp_path)
    subtask.changes.make(rows)
    local_run, changeset = subtask.writer.finish_local(subtask.local, 50)
    checksum = digests.checksum(LOCAL_RUN)
    assert changeset.segments == [SegmentRef(0, 7, checksum, 0, 0, rows, 50)]
    assert changeset.payload == b""
    assert local_run == LocalRun(3, 3, HEAD, digests.extend(HEAD, 3, [checksum] if rows else []))
    assert subtask.local_runs() == {local_run: LOCAL_RUN}
    assert subtask.objects == {}
