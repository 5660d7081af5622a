"""What a directory store has written is there after the machine has lost power, with its name and its folders."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from statelog.errors import StorageError
from statelog.storage import LocalStore


class Disk:
    """What a power loss would leave: files as of their last sync, names as of the last sync of their folder."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._files: dict[int, bytes] = {}
        self._folders: dict[str, dict[str, int]] = {}
        for target in ("os.fsync", "statelog.storage.local.sync_data", "statelog.storage.local.sync_data"):
            monkeypatch.setattr(target, self._sync)

    def _sync(self, fd: int) -> None:
        path, status = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(path) as entries:
                self._folders[path] = {entry.name: entry.inode() for entry in entries}
        else:
            self._files[status.st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()

    def read(self, name: str) -> bytes | None:
        """A file's content after a power loss now; None if its name is lost."""
        path = self._root / name
        for parent, child in zip(path.parents, (path, *path.parents), strict=False):
            if child.name not in self._folders.get(str(parent), {}):
                return None
            if child == self._root:
                break
        return self._files.get(self._folders[str(path.parent)][path.name], b"nothing of it")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path / "store", monkeypatch)


def test_objects(tmp_path: Path, disk: Disk) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("a/b/x", b"one")
    assert disk.read("a/b/x") == b"one"
    store.put("a/b/x", b"another")
    assert disk.read("a/b/x") == b"another"
    assert store.put_if_absent("a/c/y", b"two")
    assert disk.read("a/c/y") == b"two"
    store.delete(["a/b/x", "a/c/y"])
    assert disk.read("a/b/x") is None
    assert disk.read("a/c/y") is None
    store.put("a/b/x", b"again, in a folder that was gone")
    assert disk.read("a/b/x") == b"again, in a folder that was gone"


def test_a_file_that_others_keep_in_the_folder_stays(tmp_path: Path, disk: Disk) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("a/x", b"one")
    store.put("a/y", b"two")
    store.delete(["a/x"])
    assert [disk.read("a/x"), disk.read("a/y")] == [None, b"two"]


def test_appends(tmp_path: Path, disk: Disk) -> None:
    store = LocalStore(tmp_path / "store")
    store.put_if_absent("log/1", b"head")
    store.append("log/1", [b"one", b"two"], at=4)
    assert disk.read("log/1") == b"headonetwo"
    store.append("log/1", [b"three"], at=7)
    assert disk.read("log/1") == b"headonethree"
    store.append("log/1", [], at=4)
    assert disk.read("log/1") == b"head"


def test_what_is_read_of_others_can_be_made_durable(tmp_path: Path, disk: Disk) -> None:
    """A writer may have died between its write and its sync."""
    store = LocalStore(tmp_path / "store")
    store.put("log/1", b"head")
    with (tmp_path / "store/log/1").open("ab") as other:
        other.write(b" and more")
    assert disk.read("log/1") == b"head"
    store.sync("log/1", start=4, end=13)
    assert disk.read("log/1") == b"head and more"


def test_what_others_failed_to_sync_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has given it up, so that a sync alone would find nothing to do."""
    store, pwritev = LocalStore(tmp_path), os.pwritev
    more = bytes(range(256)) * 5000
    store.put("log", b"head" + more)
    steps: list[Any] = []

    def noted(fd: int, views: Sequence[memoryview], at: int) -> int:
        steps.append((at, b"".join(views)))
        return pwritev(fd, views, at)

    monkeypatch.setattr(os, "pwritev", noted)
    monkeypatch.setattr("statelog.storage.local.sync_data", lambda fd: steps.append("sync"))
    store.sync("log", start=7, end=4 + len(more))
    *writes, last = steps
    assert last == "sync"
    assert b"".join(data for at, data in writes) == more[3:]
    assert [at for at, _ in writes] == [
        7 + sum(len(data) for _, data in writes[:number]) for number in range(len(writes))
    ]
    assert store.read("log") == b"head" + more
    with pytest.raises(StorageError, match="it ends at offset 1280004, before 1280005"):
        store.sync("log", start=7, end=5 + len(more))
    assert store.size_bytes("log") == 4 + len(more)


@pytest.mark.parametrize(("start", "end"), [(7, 20), (700_000, 700_100)])
def test_what_is_made_durable_ends_where_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, end: int
) -> None:
    """Behind it another process may be writing; its bytes must not be written as they were."""
    store, pwritev = LocalStore(tmp_path), os.pwritev
    data = bytes(range(256)) * 5000
    store.put("log", data)
    written: list[tuple[int, bytes]] = []

    def noted(fd: int, views: Sequence[memoryview], at: int) -> int:
        written.append((at, b"".join(views)))
        return pwritev(fd, views, at)

    monkeypatch.setattr(os, "pwritev", noted)
    store.sync("log", start=start, end=end)
    assert written == [(start, data[start:end])]


def test_who_loses_a_race_knows_that_the_winner_stays(tmp_path: Path, disk: Disk) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("log/1", b"head")
    (tmp_path / "store/log/2").write_bytes(b"made by a process that has not synced the folder yet")
    assert not store.put_if_absent("log/2", b"ours")
    assert disk.read("log/2") is not None


def test_folders_that_another_process_made_are_durable_too(tmp_path: Path, disk: Disk) -> None:
    LocalStore(tmp_path / "store").put("a/x", b"one")
    (tmp_path / "store/a/b/c").mkdir(parents=True)
    LocalStore(tmp_path / "store").put("a/b/c/y", b"two")
    assert disk.read("a/b/c/y") == b"two"


def test_an_append_beyond_the_end_writes_nothing(tmp_path: Path, disk: Disk) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("log/1", b"head")
    store.append("log/1", [b"!"], at=4)
    with pytest.raises(StorageError, match="5 bytes end before offset 6"):
        store.append("log/1", [b"?"], at=6)
    assert store.read("log/1") == b"head!"


def test_a_folder_that_went_and_came_back_is_synced_again(tmp_path: Path, disk: Disk) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("a/b/x", b"one")
    store.put("a/y", b"stays")
    store.delete(["a/b/x"])
    (tmp_path / "store/a/b").mkdir()
    store.put("a/b/x", b"two")
    assert disk.read("a/b/x") == b"two"
