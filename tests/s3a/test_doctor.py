"""The doctor on a location of s3a: what Spark's Hadoop lacks there, and statelog's own client."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

import pytest
from pyspark.sql import SparkSession

import statelog
from statelog import Finding
from statelog.storage import open_store
from statelog.storage.s3a import adopt_s3a
from tests.s3.server import BUCKET, RadosGateway
from tests.s3a.settings import MANAGER, MANAGERS

pytest_plugins = ("tests.s3.plugin", "tests.s3a.plugin")
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

Configure = Callable[[Mapping[str, str]], SparkSession]

# A session keeps the file system of a bucket with the settings that it had first; and it repeats requests for minutes.
ANEW: Final = {"fs.s3a.impl.disable.cache": "true", "fs.s3a.attempts.maximum": "1", "fs.s3a.retry.limit": "1"}


@pytest.fixture(autouse=True)
def tell_workers(spark: SparkSession, s3_server: RadosGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setitem(spark.sparkContext.environment, name, value)


def of_checkpoints(location: str) -> list[Finding]:
    return [one for one in statelog.doctor(location) if one.check == "checkpoint-location"]


def problem(location: str) -> Finding:
    [found] = [one for one in of_checkpoints(location) if one.level != "ok"]
    return found


def test_a_fit_location(configure_s3a: Configure, s3a_location: str) -> None:
    session = configure_s3a({})
    before = session.conf.get(MANAGER)
    assert before is not None
    session.conf.set(MANAGER, MANAGERS["rename"])
    try:
        found = statelog.doctor(s3a_location)
    finally:
        session.conf.set(MANAGER, before)
    assert [one for one in found if one.level != "ok"] == []
    credentials, files, manager = (one.found for one in found if one.check == "checkpoint-location")
    assert "from the environment's AWS_ACCESS_KEY_ID" in credentials
    assert "by FileContextBasedCheckpointFileManager, and statelog's own client sees them" in files
    assert "AbortableStreamBasedCheckpointFileManager" in manager
    assert open_store(s3a_location).list() == []


def test_credentials_of_hadoop_s_are_named(
    configure_s3a: Configure, s3_server: RadosGateway, s3a_location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = configure_s3a({})
    for name in s3_server.environment:
        monkeypatch.delenv(name)
    statelog.use_s3a_settings(session)
    try:
        found = statelog.doctor(s3a_location)
    finally:
        adopt_s3a(None)
    assert [one for one in found if one.level == "error"] == []
    assert any("from Hadoop's fs.s3a.access.key" in one.found for one in found)


def test_without_the_class_a_location_can_hold_state_only(configure_s3a: Configure, s3a_location: str) -> None:
    configure_s3a({**ANEW, "fs.s3a.impl": "org.example.Missing"})
    found = problem(s3a_location)
    assert found.level == "warning"
    assert "no class for s3a:" in found.found
    assert "org.apache.hadoop:hadoop-aws:3." in found.remedy


@pytest.mark.parametrize(
    ("settings", "found_words", "remedy_words"),
    [
        ({"fs.s3a.secret.key": "not-the-secret"}, "SignatureDoesNotMatch|403|Forbidden", "fs.s3a.access.key"),
        ({"fs.s3a.access.key": "", "fs.s3a.secret.key": ""}, "Credentials", "fs.s3a.aws.credentials.provider"),
        ({"fs.s3a.aws.credentials.provider": "org.example.Missing"}, "org.example.Missing", "hadoop-aws of version 3."),
        ({"fs.s3a.endpoint": "http://127.0.0.1:1"}, "Connection refused", "whether this host can reach the endpoint"),
        ({"fs.s3a.signing-algorithm": ""}, "400", "AWS4UnsignedPayloadSignerType"),
    ],
)
def test_what_hadoop_lacks_is_an_error_with_a_remedy(
    configure_s3a: Configure, s3a_location: str, settings: dict[str, str], found_words: str, remedy_words: str
) -> None:
    no_keys = {"fs.s3a.aws.credentials.provider": "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"}
    configure_s3a({**ANEW, **(no_keys if settings.get("fs.s3a.access.key") == "" else {}), **settings})
    found = problem(s3a_location)
    assert found.level == "error"
    assert re.search(found_words, found.found)
    assert remedy_words in found.remedy
    assert "not-the-secret" not in found.found + found.remedy


def test_a_missing_bucket_is_an_error(configure_s3a: Configure, s3a_location: str) -> None:
    configure_s3a(ANEW)
    found = problem(s3a_location.replace(BUCKET, "no-such-bucket"))
    assert found.level == "error"
    assert "Create the bucket" in found.remedy


@pytest.mark.extended
def test_buckets_of_one_name_on_two_servers_are_told_apart(
    configure_s3a: Configure, s3a_location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure_s3a({})
    with RadosGateway() as other:
        other.create_bucket(BUCKET)
        monkeypatch.setenv("AWS_ENDPOINT_URL", other.address)
        found = problem(s3a_location)
    assert found.level == "error"
    assert "another bucket of this name" in found.found
    assert "AWS_ENDPOINT_URL" in found.remedy
