"""Which of Hadoop's settings statelog's own client of S3 uses, and what it refuses."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping

import pytest

from statelog.errors import ConfigurationError, ErrorKind
from statelog.storage import open_store
from statelog.storage.s3a import S3aSettings, adopt_s3a, credentials_source
from tests.storage.object_store_support import Service

SECRET = "a-secret-of-hadoop-s"
KEYS = {"fs.s3a.access.key": "hadoop-s-key", "fs.s3a.secret.key": SECRET}
ADDED = {"AWS_ACCESS_KEY_ID": "hadoop-s-key", "AWS_SECRET_ACCESS_KEY": SECRET}


def added(properties: Mapping[str, str], environment: Mapping[str, str] | None = None) -> dict[str, str]:
    return S3aSettings.of(properties).added("bucket", environment or {})


@pytest.fixture(name="adopted")
def adopt() -> Iterator[S3aSettings]:
    settings = S3aSettings.of({**KEYS, "fs.s3a.endpoint": "127.0.0.1:1", "fs.s3a.connection.ssl.enabled": "false"})
    adopt_s3a(settings)
    yield settings
    adopt_s3a(None)


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        (KEYS, ADDED),
        ({**KEYS, "fs.s3a.session.token": "t"}, {**ADDED, "AWS_SESSION_TOKEN": "t"}),
        ({**KEYS, "fs.s3a.endpoint.region": "eu-1"}, {**ADDED, "AWS_REGION": "eu-1"}),
        ({**KEYS, "fs.s3a.aws.credentials.provider": "x.SimpleAWSCredentialsProvider"}, ADDED),
        ({**KEYS, "fs.s3a.aws.credentials.provider": " x.IAMInstanceCredentialsProvider "}, {}),
        ({"fs.s3a.access.key": "without a secret"}, {}),
        ({**KEYS, "fs.s3a.endpoint": "s3.amazonaws.com"}, ADDED),
        ({"other.access.key": "x", "fs.s3a.my.secret.key.file": "x"}, {}),
    ],
)
def test_keys_and_region(properties: dict[str, str], expected: dict[str, str]) -> None:
    assert added(properties) == expected


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        (
            {"endpoint": "host:9000"},
            {"AWS_ENDPOINT_URL": "https://bucket.host:9000", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"},
        ),
        ({"endpoint": "host:9000", "path.style.access": "true"}, {"AWS_ENDPOINT_URL": "https://host:9000"}),
        (
            {"endpoint": "host:9000", "path.style.access": "true", "connection.ssl.enabled": "false"},
            {"AWS_ENDPOINT_URL": "http://host:9000", "AWS_ALLOW_HTTP": "true"},
        ),
        (
            {"endpoint": "http://host:9000", "path.style.access": "True"},
            {"AWS_ENDPOINT_URL": "http://host:9000", "AWS_ALLOW_HTTP": "true"},
        ),
    ],
)
def test_an_endpoint(properties: dict[str, str], expected: dict[str, str]) -> None:
    assert added({f"fs.s3a.{name}": value for name, value in properties.items()}) == expected


def test_a_bucket_s_own_settings_count_more() -> None:
    settings = S3aSettings.of({**KEYS, "fs.s3a.bucket.my.bucket.access.key": "mine", "fs.s3a.bucket.b.secret.key": "b"})
    assert settings.added("my.bucket", {})["AWS_ACCESS_KEY_ID"] == "mine"
    assert settings.added("bucket", {}) == ADDED
    assert settings.added("b", {})["AWS_SECRET_ACCESS_KEY"] == "b"


@pytest.mark.parametrize(
    "name",
    [
        "AWS_ACCESS_KEY_ID",
        "AWS_PROFILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    ],
)
def test_credentials_of_the_environment_count_more(name: str, adopted: S3aSettings) -> None:
    assert added({**KEYS, "fs.s3a.endpoint.region": "eu-1"}, {name: "x"}) == {"AWS_REGION": "eu-1"}
    assert name in credentials_source("bucket", {name: "x"})
    assert credentials_source("bucket", {}) == "Hadoop's fs.s3a.access.key"


def test_region_and_endpoint_of_the_environment_count_more() -> None:
    both = {**KEYS, "fs.s3a.endpoint.region": "eu-1", "fs.s3a.endpoint": "host"}
    assert added(both, {"AWS_REGION": "us-1", "AWS_ENDPOINT_URL": "https://other"}) == ADDED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fs.s3a.aws.credentials.provider", "org.apache.hadoop.fs.s3a.auth.AssumedRoleCredentialProvider"),
        ("fs.s3a.aws.credentials.provider", "x.SimpleAWSCredentialsProvider,com.example.Vault"),
        ("fs.s3a.bucket.bucket.aws.credentials.provider", "com.example.Vault"),
        ("fs.s3a.encryption.algorithm", "SSE-KMS"),
        ("fs.s3a.server-side-encryption-algorithm", "AES256"),
    ],
)
def test_what_the_client_cannot_do_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError) as failure:
        added({**KEYS, name: value})
    assert failure.value.kind == ErrorKind.UNSUPPORTED_SETTING
    assert SECRET not in str(failure.value)
    environment = {"AWS_ACCESS_KEY_ID": "x", "AWS_SERVER_SIDE_ENCRYPTION": "AES256"}
    assert added({**KEYS, name: value}, environment) == {}, "the environment says it"


def test_values_are_not_shown(adopted: S3aSettings) -> None:
    assert SECRET not in repr(adopted) + str(adopted) + f"{[adopted]}"
    assert pickle.loads(pickle.dumps(adopted)) == adopted


def test_a_process_s_clients_have_them_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    service, store = Service(), open_store("s3a://bucket/folder")
    service.answer = lambda request, handler: handler.reply(200, b"data")
    own = {"fs.s3a.bucket.bucket.access.key": "bucket-s-key", "fs.s3a.path.style.access": "true"}
    adopt_s3a(S3aSettings.of({**KEYS, **own, "fs.s3a.endpoint": service.address, "fs.s3a.endpoint.region": "eu-1"}))
    try:
        assert store.read("x") == b"data"
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "own-key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "own-secret")
        assert store.read("x") == b"data"
    finally:
        adopt_s3a(None)
        service.close()
    first, second = (request.headers["authorization"] for request in service.requests)
    assert "Credential=bucket-s-key/" in first
    assert "/eu-1/s3/" in first
    assert "Credential=own-key/" in second, "a key of the environment counts more"
