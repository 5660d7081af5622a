"""Delegation tokens: as Hadoop writes them, and as the credentials of a cluster with Kerberos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from statelog.errors import ConfigurationError, ErrorKind, StorageError
from statelog.storage import Store, open_store
from statelog.storage.hadoop import find_cluster, read_tokens
from tests.hdfs.cluster import HdfsCluster

pytest_plugins = ("tests.hdfs.plugin",)


def make_token(hdfs: HdfsCluster, service: str, identifier_bytes: int) -> Any:
    """A token of Hadoop's with some content; its length is written as one byte up to 127."""
    text = hdfs.classes.org.apache.hadoop.io.Text
    return hdfs.classes.org.apache.hadoop.security.token.Token(
        bytes(range(256))[:identifier_bytes], b"a secret", text("HDFS_DELEGATION_TOKEN"), text(service)
    )


@pytest.mark.parametrize("file_format", ["WRITABLE", "PROTOBUF"])
def test_tokens_are_read_and_sent_as_hadoop_does(
    hdfs: HdfsCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_format: str
) -> None:
    hadoop = hdfs.classes.org.apache.hadoop
    tokens = {
        "ha-hdfs:one": make_token(hdfs, "ha-hdfs:one", 5),
        "127.0.0.1:9000": make_token(hdfs, "127.0.0.1:9000", 200),
    }
    credentials = hadoop.security.Credentials()
    for service, token in tokens.items():
        credentials.addToken(hadoop.io.Text(service), token)
    target = hdfs.classes.java.io.DataOutputStream(hdfs.classes.java.io.FileOutputStream(str(tmp_path / "tokens")))
    formats = hdfs.classes.java.lang.Class.forName("org.apache.hadoop.security.Credentials$SerializedFormat")
    credentials.writeTokenStorageToStream(
        target, next(one for one in formats.getEnumConstants() if one.name() == file_format)
    )
    target.close()

    read = {one.service: one for one in read_tokens((tmp_path / "tokens").read_bytes())}
    assert {service: one.text for service, one in read.items()} == {
        service: str(token.encodeToUrlString()) for service, token in tokens.items()
    }
    hdfs.write_settings(tmp_path / "conf", {"hadoop.security.authentication": "kerberos"})
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "conf"))
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(tmp_path / "tokens"))
    assert find_cluster("one").identity == (("delegation", read["ha-hdfs:one"].text),)
    assert find_cluster("localhost:9000").identity == (("delegation", read["127.0.0.1:9000"].text),)


@pytest.mark.usefixtures("hdfs_is_installed")
def test_a_cluster_with_kerberos_lets_a_token_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HdfsCluster(has_kerberos=True) as cluster:
        cluster.write_settings(tmp_path / "conf")
        monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "conf"))
        monkeypatch.delenv("HADOOP_TOKEN_FILE_LOCATION", raising=False)
        store = open_store(f"{cluster.location}/folder")
        with pytest.raises(ConfigurationError, match="names no file with a delegation token"):
            store.list()
        token = cluster.write_token(tmp_path / "tokens")
        monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(tmp_path / "tokens"))
        assert store.put_if_absent("a/x", b"first")
        assert not store.put_if_absent("a/x", b"second")
        store.put("large", bytes(3 << 20))
        assert store.read("large") == bytes(3 << 20)
        assert {info.name: info.size_bytes for info in store.list()} == {"a/x": 5, "large": 3 << 20}
        store.delete(["large"])
        assert cluster.files.getFileStatus(cluster.path("/folder/a/x")).getOwner() == "hdfs", "the token's owner"

        cluster.write_settings(tmp_path / "conf", {"hadoop.security.authentication": "simple"})
        refused = refusal(store, "x")
        assert "401" in refused.message
        assert "requires Kerberos" in refused.hint
        cluster.write_settings(tmp_path / "conf")
        cluster.nodes.getNameNodeRpc().cancelDelegationToken(token)
        refused = refusal(store, "x")
        assert refused.kind is ErrorKind.STORE_FAILED
        assert "InvalidToken" in refused.message
        assert "still valid" in refused.hint
        assert token.encodeToUrlString() not in str(refused)


def refusal(store: Store, name: str) -> StorageError:
    with pytest.raises(StorageError) as raised:
        store.put(name, b"1")
    return raised.value
