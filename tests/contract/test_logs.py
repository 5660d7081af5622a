from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from statelog.errors import ConfigurationError, CorruptionError, FencedError, StorageError
from statelog.log.entry import FRAME_HEADER_BYTES, Entry, decode_header, encode_frame
from statelog.log.numbered import NumberedLog, base_name
from statelog.log.open import open_log
from statelog.log.references import SegmentRef
from statelog.options import Options
from statelog.runs import digests
from statelog.storage import LocalStore, Store
from statelog.testing.faults import FaultPlan, FaultStore
from statelog.testing.query import ManualClock
from tests.contract.log_contract import (
    PREFIX,
    Action,
    LogContract,
    checkpoints,
    claim_for,
    make_checkpoint,
    make_claim,
    one_section,
    read,
    steps,
)
from tests.entries import segments_in
from tests.stores import WholeObjects


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes the machine, and syncing would take most of the time."""
    for target in ("os.fsync", "statelog.storage.local.sync_data"):
        monkeypatch.setattr(target, lambda fd: None)


class TestLogThatAppends(LogContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: LocalStore(tmp_path)

    def make_log(self, store: Store) -> NumberedLog:
        return NumberedLog(store, PREFIX, ManualClock(), appends=True)

    @pytest.mark.parametrize("zeros", [0, 1, 31, 32, 5000])
    def test_torn_tails_of_every_length(self, tmp_path: Path, zeros: int) -> None:
        log = self.make_log(LocalStore(tmp_path))
        log.claim(make_claim("a"))
        path = tmp_path / PREFIX / "00000000000000000001.log"
        ends = [path.stat().st_size]
        entries = [*read(self.make_log(LocalStore(tmp_path)))]
        for batch in range(2):
            entries.append(log.append(*make_checkpoint("a", 1, batch)))
            ends.append(path.stat().st_size)
        whole = path.read_bytes()
        for length in range(ends[-1], ends[0] - 1, -1) if zeros == 0 else ends:
            path.write_bytes(whole[:length] + bytes(zeros))
            complete = sum(end <= length for end in ends)
            assert read(self.make_log(LocalStore(tmp_path))) == entries[:complete]
        path.write_bytes(whole[: ends[0] - 1])
        with pytest.raises(CorruptionError, match="do not begin with a complete log entry"):
            read(self.make_log(LocalStore(tmp_path)))

    @pytest.mark.parametrize("page_bytes", [512, 4096])
    def test_any_pages_of_the_last_append_may_be_missing(self, tmp_path: Path, page_bytes: int) -> None:
        """Header, index or payload: the entry was never acknowledged, and the next start continues without it."""
        log = self.make_log(LocalStore(tmp_path))
        log.claim(make_claim("a"))
        log.append(*make_checkpoint("a", 1, 0))
        path = tmp_path / PREFIX / base_name(1)
        before = read(self.make_log(LocalStore(tmp_path)))
        start = path.stat().st_size
        log.append(*make_checkpoint("a", 1, 1, "long" * 900))
        whole, after = path.read_bytes(), read(self.make_log(LocalStore(tmp_path)))
        pages = range(start // page_bytes, -(-len(whole) // page_bytes))
        rng = random.Random(page_bytes)
        lost = [{page} for page in pages] + [{*rng.sample(pages, rng.randint(1, len(pages)))} for _ in range(30)]
        for missing in [set(), *lost]:
            data = bytearray(whole)
            for page in missing:
                first, last = max(start, page * page_bytes), min((page + 1) * page_bytes, len(whole))
                data[first:last] = bytes(last - first)
            path.write_bytes(data)
            assert read(self.make_log(LocalStore(tmp_path))) == (before if missing else after), missing
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(tmp_path / "query", copy / "query")
            newer = self.make_log(LocalStore(copy))
            assert claim_for(newer, "b") == (before if missing else after)
            written = newer.append(*make_checkpoint("b", 2, 1))
            assert read(self.make_log(LocalStore(copy)))[-1] == written

    def test_a_page_that_is_missing_before_an_entry_is_damage(self, tmp_path: Path) -> None:
        log = self.make_log(LocalStore(tmp_path))
        log.claim(make_claim("a"))
        path = tmp_path / PREFIX / base_name(1)
        start = path.stat().st_size
        log.append(*make_checkpoint("a", 1, 0, "long" * 900))
        end = path.stat().st_size
        log.append(*make_checkpoint("a", 1, 1, "long" * 200))
        whole = path.read_bytes()
        for first in range(start // 512 * 512, end, 512):
            data = bytearray(whole)
            lost = slice(max(start, first), min(first + 512, end))
            data[lost] = bytes(lost.stop - lost.start)
            path.write_bytes(data)
            with suppress(CorruptionError):
                assert len(read(self.make_log(LocalStore(tmp_path)))) == 3, "the damage is in the payload"
                for part in segments_in(checkpoints(read(self.make_log(LocalStore(tmp_path))))[0]):
                    found = LocalStore(tmp_path).read(part.name, offset=part.offset, length=part.length)
                    if digests.checksum(found) != part.checksum:
                        raise CorruptionError("damaged")
                raise AssertionError(f"nothing was found at {first}")

    def test_other_damage_of_the_last_entry_is_damage(self, tmp_path: Path) -> None:
        """No crash flips bits or leaves other bytes than zeros."""
        log = self.make_log(LocalStore(tmp_path))
        log.claim(make_claim("a"))
        path = tmp_path / PREFIX / base_name(1)
        start = path.stat().st_size
        log.append(*make_checkpoint("a", 1, 0))
        whole = path.read_bytes()
        index_bytes = decode_header(whole[start : start + FRAME_HEADER_BYTES], name="", offset=0).index_bytes
        for offset in range(start, start + FRAME_HEADER_BYTES + index_bytes):
            path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 4]) + whole[offset + 1 :])
            with pytest.raises((CorruptionError, ConfigurationError), match=base_name(1)):
                read(self.make_log(LocalStore(tmp_path)))

    @pytest.mark.parametrize("behind", [100, 5000])
    def test_changes_in_a_log_file_of_another_location_are_not_looked_for_in_the_own_one(
        self, tmp_path: Path, behind: int
    ) -> None:
        """The first entry of a branch refers to its parent's file, which may have the same number.

        Wherever a sector ends in the entry: if only zeros are in its last one, the entry may be torn.
        """
        path = tmp_path / PREFIX / base_name(1)
        link = f"/data/parent!/log/{base_name(1)}"
        for padding in range(600):
            log = self.make_log(LocalStore(tmp_path))
            log.claim(make_claim("a"))
            entry = one_section([SegmentRef(0, 10, b"-" * 16, path.stat().st_size + behind, 100, 1, 1, link)])
            written = log.append(replace(entry, run_id="r" * padding), [])
            assert read(self.make_log(LocalStore(tmp_path))) == [make_claim("a")(1), written]
            assert claim_for(self.make_log(LocalStore(tmp_path)), "b") == [make_claim("a")(1), written]
            shutil.rmtree(path.parent)

    def test_a_torn_tail_is_replaced_by_a_shorter_entry(self, tmp_path: Path) -> None:
        entry, payload = make_checkpoint("a", 1, 0, "long" * 50)
        size = sum(map(len, payload)) + 300
        for torn_bytes in range(0, size, 40):
            store = LocalStore(tmp_path / str(torn_bytes))
            log = self.make_log(FaultStore(store, FaultPlan.at("append", torn_bytes=torn_bytes)))
            log.claim(make_claim("a"))
            with pytest.raises(Exception, match="injected"):
                log.append(entry, payload)
            assert read(self.make_log(store)) == [make_claim("a")(1)]
            written = log.append(*make_checkpoint("a", 1, 0))
            assert read(self.make_log(store)) == [make_claim("a")(1), written]

    def test_entries_before_a_fence_cannot_get_lost_unnoticed(self, tmp_path: Path) -> None:
        for epoch in (1, 2):
            log = self.make_log(LocalStore(tmp_path))
            log.claim(make_claim("a"))
            log.append(*make_checkpoint("a", epoch, epoch))
        path = tmp_path / PREFIX / "00000000000000000001.log"
        whole = path.read_bytes()
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            with pytest.raises(CorruptionError, match=r"00000000000000000001\.log"):
                read(self.make_log(LocalStore(tmp_path)))
        path.write_bytes(whole + b"written by a fenced run")
        assert len(read(self.make_log(LocalStore(tmp_path)))) == 4

    def test_a_writer_notices_that_its_file_is_gone(self, tmp_path: Path) -> None:
        name = f"{PREFIX}/00000000000000000001.log"
        for step in steps():
            store = LocalStore(tmp_path / str(step))
            remove = Action(partial(LocalStore(tmp_path / str(step)).delete, [name]))
            log = self.make_log(FaultStore(store, FaultPlan.at(call=step, action=remove)))
            with suppress(FencedError):
                log.claim(make_claim("a"))
            is_claimed = not remove.is_called
            with suppress(FencedError):
                log.append(*make_checkpoint("a", 1, 0))
                assert not (is_claimed and remove.is_called)
            if not remove.is_called:
                break

    def test_a_replaced_file_is_not_taken_for_the_own(self, tmp_path: Path) -> None:
        log = self.make_log(LocalStore(tmp_path))
        log.claim(make_claim("a"))
        log.append(*make_checkpoint("a", 1, 0))
        (tmp_path / PREFIX / "00000000000000000001.log").unlink()
        other = self.make_log(LocalStore(tmp_path))
        other.claim(make_claim("b"))
        with pytest.raises(FencedError):
            log.append(*make_checkpoint("a", 1, 1))
        assert read(other) == [make_claim("b")(1)]

    def test_a_writer_whose_file_was_changed_is_fenced_for_good(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        name = f"{PREFIX}/{1:020}.log"
        cut = Action(lambda: store.append(name, [], at=store.size_bytes(name) - 1))
        log = self.make_log(FaultStore(store, FaultPlan.at("size_bytes", call=4, action=cut)))
        log.claim(make_claim("a"))
        for _ in range(2):
            with pytest.raises(FencedError, match="its file was deleted or replaced"):
                log.append(*make_checkpoint("a", 1, 0))
        assert cut.is_called

    def test_closing_removes_no_other_runs_file(self, tmp_path: Path) -> None:
        """Of two files the newer one is gone, or the only one was replaced while it was claimed."""
        first, second = (self.make_log(LocalStore(tmp_path / "gone")) for _ in range(2))
        first.claim(make_claim("a"))
        written = first.append(*make_checkpoint("a", 1, 0))
        second.claim(make_claim("b"))
        LocalStore(tmp_path / "gone").delete([second.file_name])
        second.close()
        assert read(self.make_log(LocalStore(tmp_path / "gone"))) == [make_claim("a")(1), written]
        for step in steps():
            root = tmp_path / str(step)

            def replace_it(root: Path = root) -> Entry:
                LocalStore(root).delete([f"{PREFIX}/{1:020}.log"])
                other = self.make_log(LocalStore(root))
                other.claim(make_claim("b"))
                return other.append(*make_checkpoint("b", 1, 0))

            replaced = Action(replace_it)
            log = self.make_log(FaultStore(LocalStore(root), FaultPlan.at(call=step, action=replaced)))
            claimed = Action(partial(claim_for, log, "a"))
            claimed()
            if claimed.results and log.number == 1:
                break  # that came after the claim's last look
            log.close()
            found = checkpoints(read(self.make_log(LocalStore(root))))
            assert all(entry in found for entry in replaced.results)

    def test_a_tail_that_vanishes_while_it_is_read_does_not_count(self, tmp_path: Path) -> None:
        for step in steps():
            store = LocalStore(tmp_path / str(step))
            log = self.make_log(store)
            log.claim(make_claim("a"))
            name = f"{PREFIX}/00000000000000000001.log"
            end = store.size_bytes(name)
            written = log.append(*make_checkpoint("a", 1, 0))
            cut = Action(partial(store.append, name, [], at=end))
            reader = self.make_log(FaultStore(store, FaultPlan.at(call=step, action=cut)))
            found = Action(partial(read, reader))
            found()
            if not cut.is_called:
                assert found.results == [[make_claim("a")(1), written]]
                break
            assert found.results in ([], [[make_claim("a")(1)]])

    def test_older_files_are_synced_before_they_are_fenced(self, tmp_path: Path) -> None:
        older = self.make_log(LocalStore(tmp_path))
        older.claim(make_claim("a"))
        written = older.append(*make_checkpoint("a", 1, 0))
        newer = self.make_log(FaultStore(LocalStore(tmp_path), FaultPlan.at("sync", call=2)))
        with pytest.raises(StorageError, match=r"sync query/log/00000000000000000001\.log"):
            newer.claim(make_claim("b"))
        claim = b"".join(encode_frame(make_claim("b")(2), []))
        assert (tmp_path / PREFIX / "00000000000000000002.log").read_bytes() == claim
        assert claim_for(newer, "b") == [make_claim("a")(1), written, make_claim("b")(2)]

    def test_a_new_claim_leaves_the_doubts_of_the_one_before(self, tmp_path: Path) -> None:
        log = self.make_log(FaultStore(LocalStore(tmp_path), FaultPlan.at("append")))
        log.claim(make_claim("a"))
        with pytest.raises(StorageError):
            log.append(*make_checkpoint("a", 1, 0))
        log.claim(make_claim("a"))
        assert log.append(*make_checkpoint("a", 2, 0)).number == 2

    def test_a_claim_that_failed_ends_the_one_before(self, tmp_path: Path) -> None:
        for step in steps():
            store = LocalStore(tmp_path / str(step))
            log = self.make_log(FaultStore(store, FaultPlan.at(call=step)))
            failed = [False, False]
            for number in range(2):
                try:
                    log.claim(make_claim("a"))
                except StorageError:
                    failed[number] = True
            if failed[1]:
                with pytest.raises(FencedError, match="its claim failed"):
                    log.append(*make_checkpoint("a", 2, 0))
            elif not failed[0]:
                break

    def test_the_newest_file_is_never_removable(self, tmp_path: Path) -> None:
        log = NumberedLog(LocalStore(tmp_path), PREFIX, ManualClock(), appends=False, min_age_s=0)
        log.claim(make_claim("a"))
        for batch in range(3):
            log.append(*make_checkpoint("a", 1, batch))
        assert log.removable(99) == [log.name_of(number) for number in (1, 2, 3)]

    def test_a_fence_that_was_cut_off_is_damage(self, tmp_path: Path) -> None:
        """Also where its file is not the last one of its run, and each entry has a file."""
        for run, epoch in (("a", 1), ("b", 2)):
            log = NumberedLog(LocalStore(tmp_path), PREFIX, ManualClock(), appends=False)
            log.claim(make_claim(run))
            log.append(*make_checkpoint(run, epoch, epoch))
        fenced = tmp_path / PREFIX / f"{3:020}.log"
        claim_bytes = sum(map(len, encode_frame(make_claim("b")(2), [])))
        whole = fenced.read_bytes()
        for length in range(claim_bytes + 1, len(whole)):
            fenced.write_bytes(whole[:length])
            with pytest.raises(CorruptionError, match=r"3\.log: its \d+ bytes are not a whole number of log entries"):
                read(self.make_log(LocalStore(tmp_path)))

    @pytest.mark.parametrize("appends", [True, False])
    def test_only_the_last_file_of_the_newest_run_is_still_open(self, tmp_path: Path, appends: bool) -> None:
        """What an older fence covers, and what a run finished before it made another file, need not be synced again."""
        for run, epoch in (("a", 1), ("b", 2)):
            log = NumberedLog(LocalStore(tmp_path), PREFIX, ManualClock(), appends=appends)
            log.claim(make_claim(run))
            for batch in range(3):
                log.append(*make_checkpoint(run, epoch, batch))
        synced = Action(lambda: None)
        store = FaultStore(LocalStore(tmp_path), FaultPlan.at("sync", call=2, action=synced))
        assert len(self.make_log(FaultStore(store, FaultPlan.at("sync", call=3))).claim(make_claim("c"))) == 8
        assert synced.is_called


class TestLogOfObjects(LogContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: LocalStore(tmp_path)

    def make_log(self, store: Store) -> NumberedLog:
        return NumberedLog(store, PREFIX, ManualClock(), appends=False)

    def test_an_incomplete_object_is_damage(self, tmp_path: Path) -> None:
        log = self.make_log(LocalStore(tmp_path))
        log.claim(make_claim("a"))
        log.append(*make_checkpoint("a", 1, 0))
        path = tmp_path / PREFIX / f"{2:020}.log"
        whole = path.read_bytes()
        for damaged in (*(whole[:length] for length in range(len(whole))), whole + b"x", bytes(len(whole))):
            path.write_bytes(damaged)
            with pytest.raises(CorruptionError, match=f"{2:020}.log"):
                read(self.make_log(WholeObjects(LocalStore(tmp_path))))

    def test_only_an_entry_that_was_in_doubt_is_taken_for_the_own(self, tmp_path: Path) -> None:
        """Any other file that turns up, as of a copy that somebody put there, is another run's."""
        entry = encode_frame(*make_checkpoint("b", 1, 0))
        other_epoch = encode_frame(*make_checkpoint("b", 2, 0))
        claim = encode_frame(make_claim("b")(1), [])
        for root, frame, plan in (
            (tmp_path / "entry", entry, FaultPlan()),
            (tmp_path / "claim", claim, FaultPlan()),
            (tmp_path / "claim in doubt", claim, FaultPlan.at("put_if_absent", call=2)),
            (tmp_path / "other epoch in doubt", other_epoch, FaultPlan.at("put_if_absent", call=2)),
        ):
            log = self.make_log(FaultStore(LocalStore(root), plan))
            log.claim(make_claim("a"))
            if root.name.endswith("doubt"):
                with pytest.raises(StorageError):
                    log.append(*make_checkpoint("a", 1, 0))
            assert LocalStore(root).put_if_absent(log.name_of(2), b"".join(frame))
            with pytest.raises(FencedError, match="entry 2 is another run's"):
                log.append(*make_checkpoint("a", 1, 0))

    def test_entries_of_an_older_epoch_after_a_claim_are_void(self, tmp_path: Path) -> None:
        older, newer = (self.make_log(LocalStore(tmp_path)) for _ in range(2))
        older.claim(make_claim("a"))
        newer.claim(make_claim("b"))
        folder = tmp_path / PREFIX
        (folder / f"{2:020}.log").rename(folder / "moved")
        older.append(*make_checkpoint("a", 1, 0))
        (folder / f"{2:020}.log").rename(folder / f"{3:020}.log")
        (folder / "moved").rename(folder / f"{2:020}.log")
        assert read(self.make_log(LocalStore(tmp_path))) == [make_claim("a")(1), make_claim("b")(2)]


class TestLogThatStartsFilesOften(LogContract):
    """Every second entry or so goes to another file."""

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: LocalStore(tmp_path)

    def make_log(self, store: Store) -> NumberedLog:
        return NumberedLog(store, PREFIX, ManualClock(), appends=True, max_file_bytes=1000)


class TestLogOfChangingWriters(LogContract):
    """What one writer appends another one writes as files, in turn."""

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: LocalStore(tmp_path)

    def make_log(self, store: Store) -> NumberedLog:
        self._made = getattr(self, "_made", 0) + 1
        return NumberedLog(store, PREFIX, ManualClock(), appends=self._made % 2 == 0)


class TestLogOnAStoreThatCannotAppend(LogContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: WholeObjects(LocalStore(tmp_path))

    def make_log(self, store: Store) -> NumberedLog:
        return NumberedLog(store, PREFIX, ManualClock(), appends=False)


def test_files_are_merged_as_the_store_can(tmp_path: Path) -> None:
    for number, (merging, can_append, files) in enumerate(
        [("auto", True, 1), ("within", True, 4), ("off", True, 4), ("across", True, 1), ("auto", False, 4)]
    ):
        store: Store = LocalStore(tmp_path / str(number))
        log = open_log(store if can_append else WholeObjects(store), Options(file_merging=merging), ManualClock())
        log.claim(make_claim("a"))
        for batch in range(3):
            log.append(*make_checkpoint("a", 1, batch))
        assert log.files_made == files
        assert [info.name for info in store.list()] == [f"log/{base_name(file)}" for file in range(1, files + 1)]
    with pytest.raises(ConfigurationError, match="cannot append"):
        open_log(WholeObjects(LocalStore(tmp_path)), Options(file_merging="across"), ManualClock())
