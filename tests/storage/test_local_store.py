from __future__ import annotations

import errno
import gc
import os
import pickle
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from statelog.errors import ConfigurationError, ErrorKind, StorageError
from statelog.files import WRITE_BYTES, write_file
from statelog.storage import LocalStore, open_store
from statelog.testing.faults import Call, Fault, FaultPlan, FaultStore


def files_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def run_in_child(action: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_directory_can_be_appended_to_and_is_read_from_its_beginning(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert store.can_append
    store.put("x", b"12345")
    buffer = bytearray(3)
    assert store.read_into(memoryview(buffer), "x") == 3
    assert buffer == b"123"


@pytest.mark.parametrize("root", ["nas://server/state", "slow:/data", "file:/data"])
def test_a_location_with_a_scheme_is_no_path(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=f"LocalStore was given {root}.* not a path"):
        LocalStore(root).put("name", b"")
    assert not list(tmp_path.iterdir())


def test_an_empty_root_is_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="LocalStore was given an empty root"):
        LocalStore("").put("name", b"")
    assert not list(tmp_path.iterdir())


def test_nothing_is_made_before_the_first_write(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    assert store.list() == []
    store.delete(["a/b"])
    store.close()
    assert files_below(tmp_path) == set()


def test_files_are_private_and_leave_no_temporary_files(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    store.put("a/b/x", b"1")
    assert not store.put_if_absent("a/b/x", b"2")
    assert files_below(tmp_path) == {"root", "root/a", "root/a/b", "root/a/b/x"}
    assert stat.S_IMODE((tmp_path / "root/a").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "root/a/b/x").stat().st_mode) == 0o600


def test_an_object_is_there_although_a_clock_that_is_ahead_has_its_temporary_file_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, store = os.link, LocalStore(tmp_path)

    def link_and_tidy_up(source: str, target: str) -> None:
        link(source, target)
        store.remove_unfinished("", time.time() + 7200)

    monkeypatch.setattr(os, "link", link_and_tidy_up)
    assert store.put_if_absent("x", b"data")
    assert store.read("x") == b"data"


def test_empty_folders_go_with_their_last_file(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    for name in ("a/b/c/1", "a/2"):
        store.put(name, b"")
    store.delete(["a/b/c/1"])
    assert files_below(tmp_path) == {"root", "root/a", "root/a/2"}
    store.delete(["a/2"])
    assert files_below(tmp_path) == {"root"}


def test_a_folder_that_is_removed_while_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It exists when it is to be made, and a moment later another process has deleted its last file."""
    mkdir = Path.mkdir
    removed: list[Path] = []

    def race(path: Path, *arguments: Any, **more: Any) -> None:
        if path.name == "folder" and not removed:
            removed.append(path)
            raise FileExistsError(errno.EEXIST, "File exists")
        mkdir(path, *arguments, **more)

    monkeypatch.setattr(Path, "mkdir", race)
    store = LocalStore(tmp_path)
    store.put("folder/x", b"1")
    assert store.read("folder/x") == b"1"
    assert removed


def test_a_folder_that_is_removed_and_made_again_while_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there, then not, and is there again: two looks that disagree are not a failure."""
    folder = str(tmp_path / "a")
    made: list[str] = []
    mkdir = Path.mkdir

    def already_there(path: Path, *arguments: Any, **more: Any) -> None:
        if str(path) == folder and not made:
            raise FileExistsError(errno.EEXIST, "another process has made it")
        mkdir(path, *arguments, **more)

    def gone_once(look: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def stat_of(path: Any, *arguments: Any, **more: Any) -> os.stat_result:
            if os.fspath(path) == folder and not made:
                made.append(folder)
                os.mkdir(folder)
                raise FileNotFoundError(errno.ENOENT, "another process has removed it")
            return look(path, *arguments, **more)

        return stat_of

    monkeypatch.setattr(Path, "mkdir", already_there)
    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, gone_once(getattr(os, name)))
    store = LocalStore(tmp_path)
    store.put("a/x", b"1")
    assert made == [folder]
    assert store.read("a/x") == b"1"


def test_a_folder_that_is_removed_after_it_was_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a folder in the one look that there is, and so is made again."""
    folder = tmp_path / "a"
    folder.mkdir()
    removed: list[object] = []
    look = os.lstat

    def look_once(path: Any, *arguments: Any, **more: Any) -> os.stat_result:
        found = look(path, *arguments, **more)
        if os.fspath(path) == str(folder) and not removed:
            removed.append(path)
            folder.rmdir()
        return found

    monkeypatch.setattr(os, "lstat", look_once)
    store = LocalStore(tmp_path)
    store.put("a/x", b"1")
    assert removed
    assert store.read("a/x") == b"1"


def test_a_folder_may_be_a_link_to_one(tmp_path: Path) -> None:
    """To another disk, say; so may be the root, and what is above it."""
    for name in ("disk", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("disk")
    (tmp_path / "disk/a").symlink_to(tmp_path / "other")
    for root in (tmp_path / "link", tmp_path / "link/b"):
        LocalStore(root).put("a/x", b"1")
    assert (tmp_path / "other/x").read_bytes() == b"1"
    assert (tmp_path / "disk/b/a/x").read_bytes() == b"1"


def test_a_file_where_a_folder_should_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(StorageError, match="File exists|Not a directory") as raised:
        LocalStore(tmp_path).put("folder/x", b"1")
    assert raised.value.kind == ErrorKind.STORE_FAILED


def test_a_write_that_lost_its_folder_is_no_missing_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(StorageError, match="put .* failed: No such file") as raised:
        LocalStore(tmp_path).put("x", b"1")
    assert raised.value.kind == ErrorKind.STORE_FAILED


def test_a_folder_that_another_process_removed_is_made_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/x", b"1")
    LocalStore(tmp_path).delete(["a/x"])
    store.put("a/y", b"2")
    assert store.read("a/y") == b"2"


class Vanishing:
    """What a folder lists of a file that is deleted a moment later."""

    name, path = "b", "b"

    def is_dir(self) -> bool:
        return False

    def stat(self) -> os.stat_result:
        raise FileNotFoundError(errno.ENOENT, "No such file")


def test_a_file_that_vanishes_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"1")
    with os.scandir(tmp_path) as entries:
        found = [*entries, Vanishing()]
    monkeypatch.setattr(os, "scandir", lambda _: nullcontext(found))
    assert [info.name for info in store.list()] == ["a"]


def test_what_has_replaced_a_file_that_vanishes_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("pins/1", b"1")
    scan = os.scandir

    def scan_and_replace(path: str) -> Any:
        with scan(path) as entries:
            found = [*entries]
        if found and found[0].name == "1":
            store.put("pins/2", b"2")
            os.unlink(found[0].path)
        return nullcontext(found)

    monkeypatch.setattr(os, "scandir", scan_and_replace)
    assert [info.name for info in store.list("pins/")] == ["pins/2"]


def test_a_file_is_kept_open_also_as_the_first_of_a_process(tmp_path: Path) -> None:
    """A process without standard input gives its number to the next file."""
    store = LocalStore(tmp_path)
    store.put("log", b"")
    store.append("log", [], at=0)

    def child() -> None:
        os.close(0)
        for at in range(3):
            store.append("log", [b"1"], at=at)
        assert list(open_files(tmp_path)) == ["0"]

    assert run_in_child(child) == 0


def test_known_folders_are_not_synced_again_and_what_is_not_there_is_deleted_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b/x", b"1")
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    store.put("a/b/y", b"1")
    assert len(synced) == 2, "the file and its name"
    store.delete(["a/b/z", "c/z"])
    assert len(synced) == 2


def test_temporary_files_of_crashed_writers_are_hidden(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, new_token=lambda: "token")
    left = tmp_path / "a" / f".{os.getpid()}.token.tmp"
    store.put("a/x", b"1")
    left.write_bytes(b"half")
    assert [info.name for info in store.list()] == ["a/x"]
    with pytest.raises(ConfigurationError):
        store.read(f"a/{left.name}")
    with pytest.raises(StorageError, match="exists"):
        store.put("a/y", b"1")


def _token() -> str:
    return "token"


def test_a_copy_in_another_process_makes_names_in_the_same_way(tmp_path: Path) -> None:
    copy = pickle.loads(pickle.dumps(LocalStore(tmp_path, new_token=_token)))
    (tmp_path / f".{os.getpid()}.token.tmp").write_bytes(b"half")
    with pytest.raises(StorageError, match="exists"):
        copy.put("x", b"1")


def test_only_hidden_names_with_the_ending_are_temporary(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for name in ("a.tmp", ".a"):
        store.put(name, b"1")
    assert [info.name for info in store.list()] == [".a", "a.tmp"]


def test_what_writers_that_were_killed_left_goes_when_it_is_old(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for name in ("a/b/x", "c/y"):
        store.put(name, b"1")
    files = {"a/.old.tmp": 99, "a/b/.old.tmp": 1, "a/.young.tmp": 100, "a/b/x": 1, "c/.other.tmp": 1}
    for name, modified_s in files.items():
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (modified_s, modified_s))
    store.remove_unfinished("a/", before_s=100)
    assert {name for name in files if (tmp_path / name).exists()} == {"a/.young.tmp", "a/b/x", "c/.other.tmp"}


@pytest.mark.parametrize("lost", [99, 100])
def test_a_folder_that_is_removed_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    """A writer does not try for ever, and the error is that of the store."""
    open_file = os.open
    races = iter(range(lost))

    def race(path: str, *more: int) -> int:
        if path.endswith(".tmp") and next(races, None) is not None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return open_file(path, *more)

    monkeypatch.setattr(os, "open", race)
    store = LocalStore(tmp_path)
    if lost < 100:
        store.put("folder/x", b"1")
        assert store.read("folder/x") == b"1"
    else:
        with pytest.raises(StorageError, match="put .*folder/x failed: No such file") as raised:
            store.put("folder/x", b"1")
        assert raised.value.kind == ErrorKind.STORE_FAILED, "no object is missing"


def test_a_folder_that_cannot_be_made_or_removed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = LocalStore(tmp_path)
    store.put("there/x", b"1")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", fail)
        with pytest.raises(StorageError, match="No space left on device"):
            store.put("new/x", b"1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", fail)
        with pytest.raises(StorageError, match="delete from .*there failed: No space left on device"):
            store.delete(["there/x"])


def test_only_what_is_missing_is_reported_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader takes a missing object for damage of the log; a disk that fails is none."""
    store = LocalStore(tmp_path)
    store.put("x", b"1")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(StorageError, match="Input/output error") as reading:
        store.read("x")
    assert reading.value.kind == ErrorKind.STORE_FAILED


@pytest.mark.parametrize("failing", ["fsync", "link", "replace"])
def test_a_failed_put_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    store = LocalStore(tmp_path)
    store.put("a/x", b"1")
    monkeypatch.setattr(os, failing, fail)
    operation = store.put_if_absent if failing == "link" else store.put
    with pytest.raises(StorageError, match=rf"{tmp_path}/a/y failed: No space left") as raised:
        operation("a/y", b"2")
    assert raised.value.kind == ErrorKind.STORE_FAILED
    assert isinstance(raised.value.__cause__, OSError)
    assert files_below(tmp_path) == {"a", "a/x"}


def test_a_folder_in_the_place_of_a_file_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process made it; a write that the file made fail has not settled its name."""
    (tmp_path / "a").write_text("a file")
    store = LocalStore(tmp_path)
    with pytest.raises(StorageError):
        store.put("a/x", b"1")
    (tmp_path / "a").unlink()
    (tmp_path / "a").mkdir()
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    store.put("a/x", b"1")
    assert str(tmp_path) in synced


def test_new_names_and_folders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    LocalStore(tmp_path / "root", new_token=lambda: "t").put_if_absent("a/b/x", b"1")
    root, file = tmp_path / "root", f"{tmp_path}/root/a/b/.{os.getpid()}.t.tmp"
    assert synced == [str(tmp_path), str(root), str(root / "a"), file, str(root / "a/b")]


def test_a_link_whose_answer_was_lost_is_a_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def link_twice(source: str, target: str) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    assert LocalStore(tmp_path).put_if_absent("x", b"1")


def test_short_writes_and_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, pread = os.pwritev, os.pread
    parts = [bytes([number]) * (number % 5) for number in range(100)]
    store = LocalStore(tmp_path)
    store.put("log", b"head")
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, [b"".join(views)[:7]], at))
    store.append("log", [*parts], at=4)
    monkeypatch.setattr(os, "pread", lambda fd, length, at: pread(fd, min(length, 3), at))
    assert store.read("log") == b"head" + b"".join(parts)
    assert store.read("log", length=10) == (b"head" + b"".join(parts))[:10]


def test_a_disk_that_writes_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, idle = os.pwritev, iter(range(3))
    store = LocalStore(tmp_path)
    store.put("log", b"head")
    monkeypatch.setattr(os, "pwritev", lambda *call: 0 if next(idle, None) is not None else pwritev(*call))
    with pytest.raises(StorageError, match="nothing was written"):
        store.append("log", [b"more"], at=4)


def test_a_log_that_could_not_be_opened_can_be_closed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(StorageError):
        store.append("log", [b"more"], at=4)
    store.close()
    store.put("log", b"head")
    store.append("log", [b"more"], at=4)
    assert store.read("log") == b"headmore"


def test_large_writes_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev = os.pwritev
    sizes: list[int] = []

    def noted(fd: int, views: Sequence[memoryview], at: int) -> int:
        sizes.append(sum(map(len, views)))
        return pwritev(fd, views, at)

    monkeypatch.setattr(os, "pwritev", noted)
    parts = [os.urandom(size) for size in (10, 2 * WRITE_BYTES + 1, 0, 300_000, WRITE_BYTES, *[50_000] * 40)]
    store = LocalStore(tmp_path)
    store.put("log", b"")
    store.append("log", [*parts], at=0)
    assert store.read("log") == b"".join(parts)
    assert max(sizes) <= WRITE_BYTES
    assert len(sizes) <= 2 * sum(sizes) / WRITE_BYTES + 1, "small parts are written together"
    write_file(tmp_path / "file", parts[1])
    assert (tmp_path / "file").read_bytes() == parts[1]
    write_file(tmp_path / "file", b"")
    assert (tmp_path / "file").read_bytes() == b""


def test_what_is_made_durable_is_all_that_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may just be appending behind it."""
    pwritev, written = os.pwritev, []

    def noted(fd: int, views: Sequence[memoryview], at: int) -> int:
        written.append((at, b"".join(views)))
        return pwritev(fd, views, at)

    store = LocalStore(tmp_path)
    store.put("log", b"0123456789")
    monkeypatch.setattr(os, "pwritev", noted)
    store.sync("log", start=2, end=5)
    assert written == [(2, b"234")]


def test_a_fork_opens_its_own_files(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for name in ("log", "other"):
        store.put(name, b"")
        store.append(name, [b"1"], at=0)
    ours = open_files(tmp_path)

    def child() -> None:
        assert open_files(tmp_path) == ours
        store.append("log", [b"child"], at=1)
        assert len(open_files(tmp_path)) == 1
        store.close()
        assert open_files(tmp_path) == {}

    assert run_in_child(child) == 0
    assert open_files(tmp_path) == ours
    store.append("log", [b"parent"], at=6)
    assert store.read("log") == b"1childparent"
    store.close()
    assert open_files(tmp_path) == {}


def open_files(root: Path) -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if target.startswith(str(root)):
            found[fd] = target
    return found


def test_a_replaced_file_is_not_appended_to(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("log", b"")
    store.append("log", [b"1"], at=0)
    LocalStore(tmp_path).delete(["log"])
    LocalStore(tmp_path).put("log", b"another log")
    with pytest.raises(StorageError) as raised:
        store.append("log", [b"2"], at=1)
    assert raised.value.kind == ErrorKind.OBJECT_MISSING
    assert store.read("log") == b"another log"


def test_a_relative_root_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = LocalStore("state")
    monkeypatch.chdir("/")
    store.put("x", b"1")
    assert (tmp_path / "state/x").read_bytes() == b"1"


@pytest.mark.parametrize("form", ["{}", "file:{}", "file://{}", "file://localhost{}", "FILE:{}/"])
def test_open_store(tmp_path: Path, form: str) -> None:
    (tmp_path / "a b%20").mkdir()
    (tmp_path / "a b%20/x").write_bytes(b"1")
    assert open_store(form.format(tmp_path / "a b%20")).read("x") == b"1"


@pytest.mark.parametrize("location", ["webhdfs:/x", "dbfs:/x", "memory:", "s3n://bucket/x", "https://host/x"])
def test_other_schemes_are_not_supported(location: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"not supported\. Hint: Supported locations: a directory.*s3://.*gs://"
    ) as raised:
        open_store(location)
    assert raised.value.kind == ErrorKind.UNSUPPORTED_FEATURE


@pytest.mark.parametrize("location", ["", "  ", "file:x", "file:", "file://host/x", "file://"])
def test_malformed_locations(location: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        open_store(location)
    assert raised.value.kind == ErrorKind.INVALID_OPTION


def test_faults_before_after_and_torn(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    store = FaultStore(inner, FaultPlan.at("put", call=2))
    store.put("a", b"1")
    with pytest.raises(StorageError, match="put b"):
        store.put("b", b"1")
    store.put("b", b"2")
    with pytest.raises(StorageError):
        FaultStore(inner, FaultPlan.at("put_if_absent", when="after")).put_if_absent("c", b"3")
    with pytest.raises(StorageError):
        FaultStore(inner, FaultPlan.at("append", torn_bytes=3)).append("a", [b"23", b"45"], at=1)
    seen: list[bytes] = []
    counting = FaultStore(inner, FaultPlan.at(call=2, action=lambda: seen.append(inner.read("b"))))
    assert [counting.size_bytes("b"), counting.read("b")] == [1, seen[0]]
    assert {info.name: inner.read(info.name) for info in inner.list()} == {
        "a": b"1234",
        "b": b"2",
        "c": b"3",
    }


def test_a_fault_is_at_one_call_of_an_operation_or_of_all() -> None:
    calls = [
        Call(operation, "x", number, position)
        for position, (operation, number) in enumerate([("put", 1), ("read", 1), ("put", 2), ("read", 2)], start=1)
    ]
    for plan, position in [
        (FaultPlan.at("read"), 2),
        (FaultPlan.at("read", call=2), 4),
        (FaultPlan.at(), 1),
        (FaultPlan.at(call=3), 3),
        (FaultPlan.at("delete"), None),
        (FaultPlan(), None),
    ]:
        assert [call.position for call in calls if plan.fault(call)] == ([] if position is None else [position])


def test_calls_are_counted_for_the_plan(tmp_path: Path) -> None:
    seen: list[Call] = []

    class Watching(FaultPlan):
        def fault(self, call: Call) -> None:
            seen.append(call)

    store = FaultStore(LocalStore(tmp_path), Watching())
    store.put("a", b"1")
    store.list("p")
    store.put("b", b"2")
    store.delete(["b", "a"])
    store.delete([])
    assert seen == [
        Call("put", "a", 1, 1),
        Call("list", "p", 1, 2),
        Call("put", "b", 2, 3),
        Call("delete", "b", 1, 4),
        Call("delete", "", 2, 5),
    ]
    assert store.calls == 5


def test_an_action_takes_the_place_of_a_failure(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    seen: list[int] = []

    def look() -> None:
        seen.append(len(inner.list()))

    assert FaultStore(inner, FaultPlan.at("put_if_absent", action=look)).put_if_absent("a", b"1")
    assert FaultStore(inner, FaultPlan.at("put_if_absent", when="after", action=look)).put_if_absent("b", b"2")
    assert seen == [0, 2]
    assert [inner.read("a"), inner.read("b")] == [b"1", b"2"]


def test_a_fault_takes_effect_before_after_or_in_part(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    inner.put("log", b"0")
    faults: dict[str, dict[str, Any]] = {"before": {}, "after": {"when": "after"}, "torn": {"torn_bytes": 1}}
    for when, arguments in faults.items():
        for operation, call in WRITES.items():
            store = FaultStore(inner, FaultPlan.at(operation, kind=ErrorKind.STORE_BUSY, **arguments))
            with pytest.raises(StorageError, match=f"{operation} .* failed: injected fault") as raised:
                call(store, f"{operation} {when}")
            assert raised.value.kind == ErrorKind.STORE_BUSY
    assert {info.name: inner.read(info.name) for info in inner.list()} == {
        "put after": b"123",
        "put torn": b"1",
        "put_if_absent after": b"123",
        "put_if_absent torn": b"1",
        "log": b"01",
    }
    # What cannot be done in part is not done.
    with pytest.raises(StorageError):
        FaultStore(inner, FaultPlan.at("delete", torn_bytes=1)).delete(["log"])
    assert inner.read("log") == b"01"


WRITES: dict[str, Callable[[FaultStore, str], object]] = {
    "put": lambda store, name: store.put(name, b"123"),
    "put_if_absent": lambda store, name: store.put_if_absent(name, b"123"),
    "append": lambda store, name: store.append("log", [b"12", b"3"], at=1),
}


@pytest.mark.parametrize("can_append", [True, False])
def test_faults_are_all_that_differs(tmp_path: Path, can_append: bool) -> None:
    told: list[object] = []

    class Told(LocalStore):
        @property
        def can_append(self) -> bool:
            return can_append

        def remove_unfinished(self, prefix: str, before_s: float) -> None:
            told.append((prefix, before_s))

        def close(self) -> None:
            told.append("close")

    store = FaultStore(Told(tmp_path), FaultPlan())
    store.remove_unfinished("runs/", 7.0)
    store.close()
    assert told == [("runs/", 7.0), "close"]
    assert store.can_append == can_append


def test_seeded_faults_repeat() -> None:
    def faults(seed: int, operation: str = "append", rate: float = 0.3) -> list[Fault | None]:
        plan = FaultPlan.seeded(seed, rate=rate, kind=ErrorKind.STORE_BUSY)
        return [plan.fault(Call(operation, "x", number, number)) for number in range(1000)]

    assert faults(1) == faults(1) != faults(2)
    assert set(faults(1, rate=0)) == {None}
    assert None not in faults(1, rate=1)
    happened = [fault for fault in faults(1) if fault is not None]
    assert 250 < len(happened) < 350
    assert {(fault.reason, fault.kind) for fault in happened} == {("seed 1", ErrorKind.STORE_BUSY)}
    torn = [fault.torn_bytes for fault in happened if fault.torn_bytes is not None]
    assert 0.3 < len(torn) / len(happened) < 0.5
    assert 0 <= min(torn) < 10 < 190 < max(torn) < 200
    # Only appends are torn, and others fail before and after their effect.
    others = {(fault.when, fault.torn_bytes) for fault in faults(1, "put") if fault is not None}
    assert others == {("before", None), ("after", None)}
    assert {fault.when for fault in happened if fault.torn_bytes is None} == {"before", "after"}
    assert {(fault.reason, fault.kind) for fault in faults(1, "put") if fault} == {("seed 1", ErrorKind.STORE_BUSY)}


def test_a_forgotten_store_closes_its_files(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        store = LocalStore(tmp_path / str(number))
        store.put("log", b"")
        store.append("log", [b"entry"], at=0)
        del store
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
