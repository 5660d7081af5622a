"""Delegation tokens as Hadoop writes them; a cluster without Kerberos does not ask for any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
