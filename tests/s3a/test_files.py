"""Spark's files in a bucket: the same through Hadoop and by statelog's own client; and credentials of Hadoop's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from pyspark.sql import SparkSession

import statelog
from statelog.errors import ConfigurationError, ErrorKind, StorageError
from statelog.spark.checkpoint.checkpoint import StoreFiles
from statelog.spark.checkpoint.location import HadoopFiles
from statelog.storage import open_store
from statelog.storage.s3a import adopt_s3a
from tests.s3.server import RadosGateway
from tests.s3a.settings import MANAGER, MANAGERS

pytest_plugins = ("tests.s3.plugin", "tests.s3a.plugin")
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

WRONG = "not-the-secret"
Configure = Callable[[Mapping[str, str]], SparkSession]


@pytest.fixture(name="files", params=sorted(MANAGERS))
def open_files(configure_s3a: Configure, s3a_location: str, request: pytest.FixtureRequest) -> HadoopFiles:
    session = configure_s3a({})
    before = session.conf.get(MANAGER)
    assert before is not None
    session.conf.set(MANAGER, MANAGERS[request.param])
    try:
        return HadoopFiles(session, s3a_location)
    finally:
        session.conf.set(MANAGER, before)


def test_files_are_the_same_through_hadoop_and_without(files: HadoopFiles) -> None:
    """Hadoop marks folders with objects, also empty ones, which are no files."""
    own = StoreFiles(open_store(files.location))
    files.write("sources/0/1", b"one")
    files.write("sources/1/gone", b"")
    files.delete("sources/1/gone")
    own.write("sources/0/2", b"two")
    files.move("sources/0/1", "statelog-rewound/1/sources/0/1")
    for one in (files, own):
        assert one.list("sources") == ["sources/0/2"]
        assert one.list("statelog-rewound") == ["statelog-rewound/1/sources/0/1"]
        assert one.list("offsets") == []
        assert one.read("sources/0/2") == b"two"


def test_a_file_that_is_there_is_not_replaced_unasked(files: HadoopFiles) -> None:
    files.create("offsets/0", b"first")
    with pytest.raises(StorageError, match="already exists"):
        files.create("offsets/0", b"second")
    assert files.read("offsets/0") == b"first"
    files.write("offsets/0", b"third")
    assert files.read("offsets/0") == b"third"


def test_hadoop_s_credentials_are_not_shown(
    configure_s3a: Configure,
    s3_server: RadosGateway,
    s3a_location: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither those that are wrong nor those that cannot be used."""
    for name in s3_server.environment:
        monkeypatch.delenv(name)
    shown: list[str] = []

    def failure_of(settings: Mapping[str, str]) -> statelog.StatelogError:
        session = configure_s3a({"fs.s3a.secret.key": WRONG, **settings})
        try:
            with caplog.at_level("DEBUG"):
                statelog.use_s3a_settings(session)
                with pytest.raises(statelog.StatelogError) as failure:
                    open_store(s3a_location).put("x", b"")
        finally:
            adopt_s3a(None)
        shown.append(f"{failure.value!r} {failure.value} {failure.value.hint} {failure.getrepr()}")
        return failure.value

    assert "403 SignatureDoesNotMatch" in failure_of({}).message
    refused = failure_of({"fs.s3a.aws.credentials.provider": "com.example.Vault"})
    assert refused.kind == ErrorKind.UNSUPPORTED_SETTING
    assert isinstance(refused, ConfigurationError)
    assert WRONG not in "".join([*shown, caplog.text])


def test_a_session_without_such_settings_is_refused(
    spark: SparkSession, configured: Callable[[str, str], None]
) -> None:
    """Spark itself takes keys of its environment for Hadoop's."""
    for name in ("access.key", "secret.key", "session.token", "endpoint", "endpoint.region"):
        configured(f"fs.s3a.{name}", "")
    with pytest.raises(ConfigurationError, match="has no keys, region or endpoint") as failure:
        statelog.use_s3a_settings(spark)
    assert "spark.hadoop.fs.s3a.access.key" in failure.value.hint
