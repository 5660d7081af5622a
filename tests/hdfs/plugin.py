"""Fixtures for tests on a real HDFS; a module that wants them says ``pytest_plugins = ("tests.hdfs.plugin",)``."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.hdfs.cluster import HdfsCluster
from tests.jars import HDFS, missing_server


@pytest.fixture(scope="session")
def hdfs_is_installed() -> None:
    """Tests that use it are skipped where HDFS is not installed."""
    if missing := missing_server(HDFS):
        pytest.skip(f"no HDFS ({missing}); ./dev hdfs installs it")


@pytest.fixture(scope="session")
def hdfs(hdfs_is_installed: None) -> Iterator[HdfsCluster]:
    """The cluster of this session."""
    with HdfsCluster() as started:
        started.write_settings(started.directory / "conf")
        yield started


@pytest.fixture
def hdfs_location(hdfs: HdfsCluster, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty location, of this test only.

    This process and its children find the cluster by their environment, but not the JVM of Spark's shared session: it
    would take paths for those of HDFS.
    """
    for name in list(os.environ):
        if name.startswith("HADOOP_") or name == "SPARK_USER":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HADOOP_CONF_DIR", str(hdfs.directory / "conf"))
    number = request.session.stash.get(_NUMBER, 0) + 1
    request.session.stash[_NUMBER] = number
    return f"{hdfs.location}/tests/{number}"


_NUMBER = pytest.StashKey[int]()
