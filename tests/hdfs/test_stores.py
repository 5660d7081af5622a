"""The store of HDFS on a real cluster."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from statelog import Finding
from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, ErrorKind, StorageError
from statelog.storage import Store, open_store
from statelog.storage.hdfs import HdfsStore
from statelog.testing.contracts import StoreContract
from statelog.tools.doctor.finding import Place
from statelog.tools.doctor.location import Probe, Traces, check_from_driver, remove_probe
from tests.bucket_contract import BucketContract
from tests.hdfs.cluster import HdfsCluster
from tests.hdfs.losing_proxy import LosingProxy
from tests.spark.faults import wait_until

pytest_plugins = ("tests.hdfs.plugin",)


class TestHdfsStore(BucketContract):
    many = 250

    @pytest.fixture
    def store(self, hdfs_location: str) -> Store:
        return open_store(hdfs_location)


class TestHdfsStoreInAFolderWithAWidelyUsedName(StoreContract):
    """Files beside the folder, with names that start like it, are not the store's."""

    @pytest.fixture
    def store(self, hdfs_location: str) -> Store:
        above = open_store(hdfs_location.replace("hdfs:", "HDFS:"))
        for name in ("state-2/x", "state.log", "stat/x"):
            above.put(name, b"another's")
        return open_store(f"{hdfs_location}/state/")


def failure(call: Callable[[], object]) -> StorageError:
    with pytest.raises(StorageError) as raised:
        call()
    return raised.value


# ---- What a write leaves, and what it promises ----


def test_files_and_directories_are_private(hdfs: HdfsCluster, hdfs_location: str) -> None:
    open_store(hdfs_location).put("a/b/x", b"1")
    folder = hdfs_location.removeprefix(hdfs.location)
    for path, permission in ((folder, "rwx------"), (f"{folder}/a/b", "rwx------"), (f"{folder}/a/b/x", "rw-------")):
        assert hdfs.files.getFileStatus(hdfs.path(path)).getPermission().toString() == permission


def test_empty_directories_do_not_stay(hdfs: HdfsCluster, hdfs_location: str) -> None:
    """They would count for a quota of names."""
    store = open_store(hdfs_location)
    for name in ("a/b/c/x", "a/b/c/y", "a/d/x"):
        store.put(name, b"1")
    store.delete(["a/b/c/x", "a/b/c/y"])
    folder = hdfs_location.removeprefix(hdfs.location)
    assert not hdfs.files.exists(hdfs.path(f"{folder}/a/b"))
    assert hdfs.files.exists(hdfs.path(f"{folder}/a/d"))
    store.delete(["a/d/x"])
    assert [str(one.getPath().getName()) for one in hdfs.files.listStatus(hdfs.path(folder))] == []


def synced(hdfs: HdfsCluster) -> list[int]:
    """How often each DataNode has synced a file to its disk."""
    counts = []
    for node in hdfs.nodes.getDataNodes():
        field = node.getMetrics().getClass().getDeclaredField("fsyncCount")
        field.setAccessible(True)
        counts.append(int(field.get(node.getMetrics()).value()))
    return counts


@pytest.mark.parametrize("size_bytes", [1, 3 << 20])
def test_a_write_is_synced_by_every_data_node_and_is_one_block(
    hdfs: HdfsCluster, hdfs_location: str, size_bytes: int
) -> None:
    """The cluster's own blocks are of 1 MB."""
    store = open_store(hdfs_location)
    before = synced(hdfs)
    store.put("x", bytes(size_bytes))
    copies = len(list(hdfs.nodes.getDataNodes()))
    assert [after > count for after, count in zip(synced(hdfs), before, strict=True)] == [True] * copies
    status = hdfs.files.getFileStatus(hdfs.path(f"{hdfs_location.removeprefix(hdfs.location)}/x"))
    assert len(list(hdfs.files.getFileBlockLocations(status, 0, size_bytes))) == 1
    assert int(status.getReplication()) == copies


WRITER = """
import sys
from http.client import HTTPConnection
from urllib.parse import urlsplit

def send(url, size_bytes):
    url = urlsplit(url)
    connection = HTTPConnection(url.netloc)
    connection.putrequest("PUT", f"{url.path}?{url.query}")
    connection.putheader("Content-Length", str(size_bytes))
    connection.endheaders()
    return connection

to_data_node = send(send(sys.argv[1], 0).getresponse().headers["Location"], 600_000)
to_data_node.send(bytes(300_000))
print("written", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_writer_leaves_is_no_object_and_is_swept(hdfs: HdfsCluster, hdfs_location: str) -> None:
    store = open_store(hdfs_location)
    store.put("a/x", b"1")
    path = f"{hdfs_location.removeprefix(hdfs.location)}/a/.killed.tmp"
    url = f"http://{hdfs.web_address()}/webhdfs/v1{path}?op=CREATE&user.name={getpass.getuser()}"
    with subprocess.Popen([sys.executable, "-c", WRITER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        writer.kill()
    wait_until(lambda: hdfs.files.isFileClosed(hdfs.path(path)), "the DataNode to close the file")
    assert 0 < hdfs.files.getFileStatus(hdfs.path(path)).getLen() <= 300_000, "it is shorter than it was to become"
    assert [info.name for info in store.list()] == ["a/x"]
    with pytest.raises(ConfigurationError):
        store.read("a/.killed.tmp")
    store.remove_unfinished("a/", time.time() - 3600)
    assert hdfs.files.exists(hdfs.path(path)), "it may be of a writer that is at work"
    store.remove_unfinished("b/", time.time() + 60)
    assert hdfs.files.exists(hdfs.path(path)), "it is in another folder"
    store.remove_unfinished("a/", time.time() + 60)
    assert not hdfs.files.exists(hdfs.path(path))
    assert store.read("a/x") == b"1"


# ---- Lost answers ----


@pytest.fixture
def proxy(hdfs: HdfsCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LosingProxy]:
    """The way to the NameNode that the environment's settings name."""
    with LosingProxy(int(hdfs.web_address().rpartition(":")[2])) as started:
        hdfs.write_settings(tmp_path / "conf", {"dfs.namenode.http-address": f"127.0.0.1:{started.port}"})
        monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "conf"))
        yield started


def test_a_rename_whose_answer_was_lost_counts(hdfs: HdfsCluster, hdfs_location: str, proxy: LosingProxy) -> None:
    store = open_store(hdfs_location)
    proxy.lose_answer_to("RENAME")
    assert store.put_if_absent("x", b"first")
    assert proxy.losses == 1
    proxy.lose_answer_to("RENAME")
    assert not store.put_if_absent("x", b"second")
    assert proxy.losses == 2
    proxy.lose_answer_to("RENAME")
    store.put("y", b"third")
    assert proxy.losses == 3
    assert {info.name: store.read(info.name) for info in store.list()} == {"x": b"first", "y": b"third"}
    assert len(list(hdfs.files.listStatus(hdfs.path(hdfs_location.removeprefix(hdfs.location))))) == 2


@pytest.mark.parametrize("operation", ["MKDIRS", "CREATE"])
def test_a_lost_answer_before_the_rename_is_transient(hdfs_location: str, proxy: LosingProxy, operation: str) -> None:
    store = open_store(hdfs_location)
    proxy.lose_answer_to(operation)
    error = failure(lambda: store.put_if_absent("x", b"1"))
    assert error.is_transient
    assert "connection lost" in error.message
    assert store.put_if_absent("x", b"1")
    assert proxy.losses == 1
    assert [info.name for info in store.list()] == ["x"]


# ---- What the cluster refuses ----


@contextmanager
def user(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HADOOP_USER_NAME", name)
        yield


def test_a_folder_of_another_user(hdfs_location: str) -> None:
    store = open_store(hdfs_location)
    store.put("x", b"1")
    with user("another"):
        for call in (partial(store.read, "x"), partial(store.put, "y", b"1"), partial(store.delete, ["x"]), store.list):
            error = failure(call)
            assert error.kind is ErrorKind.STORE_FAILED
            assert hdfs_location in error.message
            assert "Permission denied: user=another" in error.message
    assert store.read("x") == b"1", "the environment's settings count at each call"


def test_safe_mode(hdfs: HdfsCluster, hdfs_location: str) -> None:
    store = open_store(hdfs_location)
    store.put("x", b"1")
    actions = hdfs.classes.org.apache.hadoop.hdfs.protocol.HdfsConstants.SafeModeAction
    hdfs.files.setSafeMode(actions.SAFEMODE_ENTER)
    try:
        error = failure(lambda: store.put("y", b"1"))
        assert store.read("x") == b"1"
    finally:
        hdfs.files.setSafeMode(actions.SAFEMODE_LEAVE)
    assert error.kind is ErrorKind.STORE_UNAVAILABLE
    assert f"put {hdfs_location}/y failed: 403 SafeModeException" in error.message
    assert "safemode" in error.hint
    store.put("y", b"1")


@pytest.mark.parametrize(("names", "space_bytes"), [(1, 1 << 40), (1 << 40, 1000)])
def test_a_quota(hdfs: HdfsCluster, hdfs_location: str, names: int, space_bytes: int) -> None:
    folder = hdfs.path(hdfs_location.removeprefix(hdfs.location))
    hdfs.files.mkdirs(folder)
    hdfs.files.setQuota(folder, names, space_bytes)
    error = failure(lambda: open_store(hdfs_location).put_if_absent("x", b"1"))
    assert error.kind is ErrorKind.STORE_FAILED
    assert "QuotaExceededException" in error.message
    assert "quota" in error.hint
    assert len(list(hdfs.files.listStatus(folder))) == 0, "the temporary file is removed"


def test_a_file_in_the_place_of_the_folder(hdfs_location: str) -> None:
    open_store(hdfs_location).put("state", b"1")
    error = failure(lambda: open_store(f"{hdfs_location}/state").put("x", b"1"))
    assert error.kind is ErrorKind.STORE_FAILED
    assert f"{hdfs_location}/state/x" in error.message


def test_no_name_node() -> None:
    error = failure(open_store("hdfs://127.0.0.1:1/folder").list)
    assert error.kind is ErrorKind.STORE_UNAVAILABLE
    assert "hdfs://127.0.0.1:1/folder" in error.message
    assert "no connection to 127.0.0.1:9870" in error.message


def test_a_name_service_that_no_setting_names() -> None:
    error = failure(open_store("hdfs://no-such-service.invalid/folder").list)
    assert "hdfs://no-such-service.invalid/folder" in error.message
    assert "HADOOP_CONF_DIR" in error.hint


def test_a_cluster_that_does_not_answer(hdfs: HdfsCluster, hdfs_location: str) -> None:
    store = HdfsStore(hdfs_location, timeout_s=1.0)
    store.put("x", b"1")
    hdfs.pause()
    try:
        for call in (partial(store.read, "x"), partial(store.put_if_absent, "y", b"1")):
            error = failure(call)
            assert error.is_transient
            assert "no answer in 1 s" in error.message
    finally:
        hdfs.resume()
    assert open_store(hdfs_location).read("x") == b"1"


def test_a_fork_after_use_goes_on_by_itself(hdfs_location: str) -> None:
    store = open_store(hdfs_location)
    store.put("x", b"1")
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        store.put("y", store.read("x"))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.read("y") == b"1"


# ---- The doctor ----


def diagnosed(location: str) -> list[Finding]:
    """The doctor's findings of a location, without Spark."""
    store, probe, place, traces = open_store(location), Probe(location, "probe/doctor-1"), Place("driver", ""), Traces()
    found = list(check_from_driver(store, probe, place, SystemClock(), traces))
    return found + list(remove_probe(store, probe, place, traces))


def test_the_doctor_says_what_a_power_failure_leaves(
    hdfs: HdfsCluster, hdfs_location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {one.check: one for one in diagnosed(hdfs_location)}
    assert {check: one.level for check, one in found.items()} == {
        "location": "ok",
        "durability": "warning",
        "clock": "ok",
    }
    assert "dfs.datanode.synconclose=true" in found["durability"].remedy
    assert open_store(hdfs_location).list() == []
    hdfs.write_settings(tmp_path / "conf", {"dfs.datanode.synconclose": "true"})
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "conf"))
    assert {one.level for one in diagnosed(hdfs_location)} == {"ok"}


def test_the_doctor_names_the_user_that_is_refused(hdfs_location: str) -> None:
    open_store(hdfs_location).put("x", b"1")
    with user("another"):
        [found] = diagnosed(hdfs_location)
    assert found.level == "error"
    assert "user=another" in found.found
    assert "Make that user the owner" in found.remedy


# ---- Name services, DataNodes ----


@pytest.mark.usefixtures("hdfs_is_installed")
def test_another_name_node_becomes_active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HdfsCluster(has_standby=True) as cluster:
        cluster.write_settings(tmp_path / "conf")
        monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "conf"))
        store = open_store(f"{cluster.location}/folder")
        assert store.put_if_absent("x", b"1")
        cluster.nodes.transitionToStandby(0)
        cluster.nodes.transitionToActive(1)
        assert not store.put_if_absent("x", b"2")
        assert store.put_if_absent("y", b"3")
        cluster.nodes.shutdownNameNode(0)
        assert open_store(f"{cluster.location}/folder").read("x") == b"1"
        cluster.nodes.stopDataNode(0)
        assert store.read("y") == b"3"
        store.put("z", b"4")
        assert {info.name: store.read(info.name) for info in store.list()} == {"x": b"1", "y": b"3", "z": b"4"}
