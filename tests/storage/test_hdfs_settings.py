"""How a cluster is found by Hadoop's settings, and who asks it; without a cluster."""

from __future__ import annotations

import getpass
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

import pytest

from statelog.errors import ConfigurationError, ErrorKind, StorageError
from statelog.storage import Store, open_store
from statelog.storage.hadoop import Token, find_cluster, read_tokens
from statelog.storage.hdfs import HdfsStore
from statelog.storage.location import HdfsLocation


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HADOOP_CONF_DIR", "HADOOP_HOME", "HADOOP_USER_NAME", "HADOOP_TOKEN_FILE_LOCATION", "SPARK_USER"):
        monkeypatch.delenv(name, raising=False)


def write_site(path: Path, settings: Mapping[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    properties = (
        f"<property><name>{name}</name>\n<value> {value} </value></property>" for name, value in settings.items()
    )
    path.write_text(f"<?xml version='1.0'?>\n<configuration>{''.join(properties)}</configuration>")


# ---- Locations ----


@pytest.mark.parametrize(
    ("location", "authority", "folder"),
    [
        ("hdfs://cluster/a/b", "cluster", "a/b"),
        ("HDFS://host:8020/a b%20c/", "host:8020", "a b%20c"),
        ("hdfs://cluster", "cluster", ""),
        ("hdfs://[::1]:9000/a", "[::1]:9000", "a"),
    ],
)
def test_locations(location: str, authority: str, folder: str) -> None:
    assert HdfsLocation.parse(location) == HdfsLocation(authority, folder)


@pytest.mark.parametrize(
    "location",
    [
        *("hdfs:", "hdfs:/a", "hdfs:///a", "hdfs://", "s3://cluster/a", "/a"),
        *("hdfs://c//a", "hdfs://c/a/../b", "hdfs://c/.", "hdfs://c/a:b", "hdfs://c/a\nb"),
        *("hdfs://c/a/.snapshot/b", "hdfs://c/.reserved/raw"),
    ],
)
def test_malformed_locations_are_refused(location: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        HdfsLocation.parse(location)
    assert "hdfs://nameservice/folder" in refused.value.hint


def test_credentials_in_a_location_are_refused_and_not_shown() -> None:
    with pytest.raises(ConfigurationError) as refused:
        open_store("hdfs://user:secret@cluster/a")
    assert "secret" not in str(refused.value)
    assert "environment" in refused.value.hint


# ---- Addresses ----


HA: Final = {
    "dfs.ha.namenodes.cluster": "nn1, nn2",
    "dfs.namenode.rpc-address.cluster.nn1": "one:8020",
    "dfs.namenode.rpc-address.cluster.nn2": "two:8020",
}


@pytest.mark.parametrize(
    ("authority", "settings", "expected"),
    [
        ("host:8020", {}, ("http://host:9870",)),
        ("host", {"dfs.http.policy": "HTTPS_ONLY"}, ("https://host:9871",)),
        ("cluster", HA, ("http://one:9870", "http://two:9870")),
        (
            "cluster",
            {
                **HA,
                "dfs.namenode.http-address.cluster.nn1": "web:1",
                "dfs.namenode.http-address.cluster.nn2": "0.0.0.0:2",
            },
            ("http://web:1", "http://two:2"),
        ),
        (
            "cluster",
            {**HA, "dfs.http.policy": "HTTPS_ONLY", "dfs.namenode.https-address.cluster.nn1": "web:1"},
            ("https://web:1", "https://two:9871"),
        ),
        ("single", {"dfs.namenode.rpc-address.single": "one:8020"}, ("http://one:9870",)),
        ("host", {"fs.defaultFS": "hdfs://host:8020/", "dfs.namenode.http-address": "web:1"}, ("http://web:1",)),
        ("other", {"fs.defaultFS": "hdfs://host:8020/", "dfs.namenode.http-address": "web:1"}, ("http://other:9870",)),
    ],
)
def test_where_name_nodes_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    authority: str,
    settings: dict[str, str],
    expected: tuple[str, ...],
) -> None:
    monkeypatch.setenv("HADOOP_HOME", str(tmp_path))
    in_core = {name: value for name, value in settings.items() if name.startswith("fs.")}
    write_site(tmp_path / "etc/hadoop/core-site.xml", in_core)
    if len(in_core) < len(settings):
        write_site(tmp_path / "etc/hadoop/hdfs-site.xml", {**settings, "unknown": "x"})
    assert find_cluster(authority).name_nodes == expected


def test_settings_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "core-site.xml").write_text("<configuration>")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    with pytest.raises(ConfigurationError, match="core-site.xml cannot be read") as refused:
        open_store("hdfs://cluster/folder").list()
    assert "HADOOP_CONF_DIR" in refused.value.hint


# ---- Who asks ----


def test_without_kerberos_a_name_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_cluster("host").identity == (("user.name", getpass.getuser()),)
    monkeypatch.setenv("SPARK_USER", "driver")
    assert find_cluster("host").identity == (("user.name", "driver"),)
    monkeypatch.setenv("HADOOP_USER_NAME", "another")
    assert find_cluster("host").identity == (("user.name", "another"),)


# Two tokens in the older format; tests/hdfs/test_tokens.py reads both formats as Hadoop writes them.
OLDER: Final = bytes.fromhex(
    "4844545300020561206f6e65036964310370773115484446535f44454c45474154494f4e5f544f4b454e0f68612d686466733a636c7573746572"
    "05612074776f8fc8" + "ab" * 200 + "037077320a4f544845525f4b494e4400"
)


def test_a_token_file_is_read_and_damage_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = read_tokens(OLDER)
    assert first == Token(b"id1", b"pw1", "HDFS_DELEGATION_TOKEN", "ha-hdfs:cluster")
    assert second == Token(b"\xab" * 200, b"pw2", "OTHER_KIND", "")
    assert "pw1" not in repr(first)
    for data in (b"", b"HDTS", b"HDTS\x02", b"XXXX\x00\x00", *(OLDER[:end] for end in range(6, len(OLDER)))):
        with pytest.raises(ValueError, match="token file|tokens|damaged|negative"):
            read_tokens(data)


@pytest.fixture
def kerberos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the token file is, of a process whose settings ask for Kerberos."""
    write_site(tmp_path / "conf/core-site.xml", {"hadoop.security.authentication": "kerberos"})
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "conf"))
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(tmp_path / "tokens"))
    return tmp_path / "tokens"


def test_with_kerberos_a_request_has_the_token_of_the_cluster(kerberos: Path) -> None:
    kerberos.write_bytes(OLDER)
    [(name, value)] = find_cluster("cluster").identity
    assert name == "delegation"
    assert value == read_tokens(OLDER)[0].text
    # The only token counts for a cluster that it names otherwise, by an address for example.
    assert find_cluster("localhost:8020").identity == ((name, value),)


def test_without_a_token_kerberos_is_explained(kerberos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read") as refused:
        open_store("hdfs://cluster/a").list()
    assert "fetchdt" in refused.value.hint
    kerberos.write_bytes(b"HDTS\x00\x00")
    with pytest.raises(ConfigurationError, match="has no delegation token for hdfs://cluster"):
        open_store("hdfs://cluster/a").list()
    monkeypatch.delenv("HADOOP_TOKEN_FILE_LOCATION")
    with pytest.raises(ConfigurationError, match="hdfs://cluster requires Kerberos"):
        open_store("hdfs://cluster/a").put("x", b"1")


# ---- Answers that a cluster gives seldom ----


class Service(ThreadingHTTPServer):
    """A NameNode that gives one answer."""

    answer: tuple[int, bytes] = (200, b"")


class Handler(BaseHTTPRequestHandler):
    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline()
        if self.raw_requestline and self.parse_request():
            assert isinstance(self.server, Service)
            status, body = self.server.answer
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with Service(("127.0.0.1", 0), Handler) as server:
        address = f"127.0.0.1:{server.server_address[1]}"
        write_site(
            tmp_path / "core-site.xml", {"fs.defaultFS": "hdfs://host:8020", "dfs.namenode.http-address": address}
        )
        monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_name_node_that_does_not_answer_is_asked_last(service: Service, tmp_path: Path) -> None:
    """A request of which no one knows whether it was done is not repeated here; the next one goes to another."""
    service.answer = 200, b'{"FileStatus": {"type": "FILE", "length": 7}}'
    with socket.create_server(("127.0.0.1", 0)) as silent:
        web = "dfs.namenode.http-address.cluster"
        addresses = {f"{web}.nn1": silent.getsockname()[1], f"{web}.nn2": service.server_address[1]}
        write_site(
            tmp_path / "hdfs-site.xml", {**HA, **{name: f"127.0.0.1:{port}" for name, port in addresses.items()}}
        )
        store = HdfsStore("hdfs://cluster/folder", timeout_s=0.3)
        with pytest.raises(StorageError, match="no answer in 0.3 s") as raised:
            store.size_bytes("x")
        assert raised.value.is_transient
        assert [store.size_bytes("x") for _ in range(2)] == [7, 7]
    assert store.size_bytes("x") == 7


def remote(exception: str, message: str) -> bytes:
    return json.dumps({"RemoteException": {"exception": exception, "message": message}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (401, b"<html>Authentication required</html>", ErrorKind.STORE_FAILED, "delegation token"),
        (403, remote("InvalidToken", "token (owner=a) is expired"), ErrorKind.STORE_FAILED, "still valid"),
        (403, remote("StandbyException", "not in standby"), ErrorKind.STORE_UNAVAILABLE, "active"),
        (403, remote("RetriableException", "Server is too busy"), ErrorKind.STORE_BUSY, "fewer requests"),
        (500, b"", ErrorKind.STORE_UNAVAILABLE, "If this persists"),
        (403, remote("IOException", "could only be written to 0 of the 1 minReplication nodes.\n\tat a.b(C.java:1)"),
         ErrorKind.STORE_UNAVAILABLE, "DataNodes"),
        (400, remote("IllegalArgumentException", "Invalid value"), ErrorKind.STORE_FAILED, "docs/hdfs.md"),
    ],
)  # fmt: skip
def test_kinds_of_refusals(service: Service, status: int, body: bytes, kind: ErrorKind, words: str) -> None:
    service.answer = status, body
    store: Store = open_store("hdfs://host/folder")
    with pytest.raises(StorageError) as raised:
        store.read("x")
    assert raised.value.kind is kind
    assert words in raised.value.hint
    assert f"read hdfs://host/folder/x failed: {status}" in raised.value.message
    assert "C.java" not in str(raised.value)


def test_data_that_no_data_node_has_got_is_not_taken_for_written(service: Service) -> None:
    service.answer = 200, b'{"boolean": true}'
    with pytest.raises(StorageError, match="names no DataNode"):
        open_store("hdfs://host/folder").put("x", b"1")
