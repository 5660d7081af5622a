"""Where the credentials of an object store come from: profiles of AWS, and the services that give them out."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from statelog.errors import ConfigurationError, ErrorKind, StorageError
from statelog.storage import open_store
from statelog.storage.objects import profile_arguments
from tests.storage.object_store_support import Handler, Request, Service

ROLE = "[profile work]\nrole_arn = arn:aws:iam::1:role/x\nsource_profile = base\nregion = eu-work-1\n"
KEYS = "aws_access_key_id = {}\naws_secret_access_key = very-secret\n"


@pytest.fixture(name="service")
def start_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Service]:
    """A service that takes everybody; this process has no credentials, and a home of its own."""
    service = Service()
    service.answer = lambda request, handler: handler.reply(200, b"data")
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "GCE_", "IDENTITY_")):
            monkeypatch.delenv(name)
    for name, value in {
        "HOME": str(tmp_path),
        "NO_PROXY": "127.0.0.1",
        "AWS_ENDPOINT_URL": service.address,
        "AWS_ALLOW_HTTP": "true",
        "AWS_METADATA_ENDPOINT": service.address,
        "AWS_EC2_METADATA_DISABLED": "true",  # for botocore, which has another name for the endpoint
        "GOOGLE_BASE_URL": service.address,
        "GOOGLE_ALLOW_HTTP": "true",
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_ENDPOINT": service.address,
        "AZURE_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    yield service
    service.close()


def used(service: Service, scheme: str = "s3") -> str:
    """The credentials of a request."""
    assert open_store(f"{scheme}://bucket/folder").read("x") == b"data"
    [request] = [request for request in service.requests if request.name.endswith("/bucket/folder/x")]
    service.requests.clear()
    return request.headers["authorization"]


# ---- Profiles of AWS ----


@pytest.fixture(name="write")
def write_files(tmp_path: Path) -> Callable[[str, str], None]:
    """Writes ``~/.aws/config`` and ``~/.aws/credentials``."""
    pytest.importorskip("boto3", reason="boto3, which reads AWS profiles, is not installed")
    (tmp_path / ".aws").mkdir()

    def write(name: str, text: str) -> None:
        (tmp_path / ".aws" / name).write_text(text)

    return write


def test_the_profile_that_the_environment_names_is_used(
    service: Service, monkeypatch: pytest.MonkeyPatch, write: Callable[[str, str], None]
) -> None:
    write("credentials", f"[default]\n{KEYS.format('default')}[work]\n{KEYS.format('work')}")
    write("config", f"[profile work]\nregion = eu-work-1\n[profile sub]\n{KEYS.format('sub')}region = eu-sub-1\n")
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert "Credential=work/" in (sent := used(service))
    assert "/eu-work-1/s3/" in sent
    monkeypatch.setenv("AWS_PROFILE", "sub")
    assert "Credential=sub/" in (sent := used(service))
    assert "/eu-sub-1/s3/" in sent
    monkeypatch.setenv("AWS_REGION", "eu-environment-1")
    assert "/eu-environment-1/s3/" in used(service)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    assert "Credential=key/" in used(service), "a key of the environment counts more"


def test_the_endpoint_of_a_profile_is_used(
    service: Service, monkeypatch: pytest.MonkeyPatch, write: Callable[[str, str], None]
) -> None:
    write("credentials", f"[work]\n{KEYS.format('work')}")
    write("config", f"[profile work]\nendpoint_url = {service.address}\n")
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert "Credential=work/" in used(service)
    write("config", "[profile work]\nendpoint_url = 127.0.0.1:9000\n")
    monkeypatch.setenv("AWS_REGION", "eu-another-1")  # a change, after which the files are read again
    with pytest.raises(ConfigurationError, match="profile's AWS_ENDPOINT_URL does not start with http://"):
        used(service)


def test_without_a_name_no_profile_is_used(
    service: Service, monkeypatch: pytest.MonkeyPatch, write: Callable[[str, str], None]
) -> None:
    write("credentials", f"[default]\n{KEYS.format('default')}")
    service.say(404)
    for name in ("", None):
        if name is None:
            monkeypatch.delenv("AWS_PROFILE")
        else:
            monkeypatch.setenv("AWS_PROFILE", name)
        with pytest.raises(StorageError, match="no credentials"):
            open_store("s3://bucket/folder").read("x")
    assert {request.name for request in service.requests} == {"/latest/api/token"}, "the instance is asked alone"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("", r"The config profile \(work\) could not be found"),
        ("[profile work]\nregion = eu-work-1\n", "it provides no credentials"),
        ("[profile work]\naws_access_key_id = key\n", "missing: aws_secret_access_key"),
        ("[profile work]\nrole_arn = arn:aws:iam::1:role/x\nsource_profile = nobody\n", '"nobody".*does not exist'),
        ("[profile work\n", "Unable to parse config file"),
    ],
)
def test_a_profile_that_cannot_be_used_is_named(
    service: Service, monkeypatch: pytest.MonkeyPatch, write: Callable[[str, str], None], config: str, reason: str
) -> None:
    write("config", config)
    monkeypatch.setenv("AWS_PROFILE", "work")
    with pytest.raises(
        ConfigurationError, match=f"The profile 'work' that AWS_PROFILE names cannot.*{reason}"
    ) as raised:
        open_store("s3://bucket/folder").read("x")
    assert "aws sso login" in raised.value.hint
    assert service.requests == []


def test_a_process_that_gives_no_credentials_is_asked_again(
    service: Service, monkeypatch: pytest.MonkeyPatch, write: Callable[[str, str], None], tmp_path: Path
) -> None:
    script = tmp_path / "credentials.py"
    write("config", f"[profile work]\ncredential_process = {sys.executable} {script}\n")
    monkeypatch.setenv("AWS_PROFILE", "work")
    script.write_text("raise SystemExit('log in first')")
    store = open_store("s3://bucket/folder")
    with pytest.raises(ConfigurationError, match=r"AWS_PROFILE names cannot be used: .*log in first\."):
        store.read("x")
    keys = {"Version": 1, "AccessKeyId": "process", "SecretAccessKey": "very-secret"}
    script.write_text(f"print({json.dumps(json.dumps(keys))})")
    assert "Credential=process/" in used(service)


def test_a_service_of_credentials_that_is_out_of_reach_may_come_back(
    service: Service, monkeypatch: pytest.MonkeyPatch, write: Callable[[str, str], None]
) -> None:
    write("config", ROLE)
    write("credentials", f"[base]\n{KEYS.format('base')}")
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StorageError, match="provides no credentials: .*Could not connect") as raised:
        open_store("s3://bucket/folder").read("x")
    assert raised.value.kind is ErrorKind.STORE_UNAVAILABLE
    assert raised.value.is_transient


def test_the_role_of_a_profile_is_taken(
    service: Service, monkeypatch: pytest.MonkeyPatch, write: Callable[[str, str], None]
) -> None:
    write("config", ROLE)
    write("credentials", f"[base]\n{KEYS.format('base')}")
    monkeypatch.setenv("AWS_PROFILE", "work")
    given = "<AccessKeyId>role</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>"
    role = (
        '<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult><Credentials>'
        f"{given}<Expiration>2126-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleResult></AssumeRoleResponse>"
    )

    def answer(request: Request, handler: Handler) -> None:
        handler.reply(200, role.encode() if request.method == "POST" else b"data")

    service.answer = answer
    assert "Credential=role/" in used(service)
    given_until = profile_arguments(os.environ)[1]["credential_provider"]()["expires_at"]
    assert given_until - datetime.now(UTC) < timedelta(minutes=10), "as long as botocore promises"
    monkeypatch.setenv("AWS_REGION", "eu-another-1")
    service.say(403, "AccessDenied", "not allowed to assume the role")
    with pytest.raises(StorageError, match="AWS_PROFILE names provides no credentials: .*AssumeRole") as raised:
        open_store("s3://bucket/folder").read("x")
    assert raised.value.kind is ErrorKind.STORE_FAILED
    assert "very-secret" not in str(raised.value)


def test_without_boto3_the_error_says_what_to_install(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(
        ConfigurationError, match="profile 'work', but boto3, which reads profiles, cannot be imported"
    ) as raised:
        open_store("s3://bucket/folder").read("x")
    assert "statelog[aws]" in raised.value.hint
    open_store("gs://bucket/folder")  # another service does not mind


# ---- Services that give credentials out ----


@dataclass(frozen=True)
class Source:
    """A source of credentials: the variables that lead to it, its answers by path, and what is sent then."""

    scheme: str
    settings: dict[str, str]
    answers: dict[str, str]
    sent: str
    files: dict[str, str] = field(default_factory=dict)


AWS_KEYS = json.dumps(
    {
        "AccessKeyId": "given",
        "SecretAccessKey": "s",
        "Token": "t",
        "Expiration": "2126-01-01T00:00:00Z",
        "Code": "Success",
        "Type": "AWS-HMAC",
        "LastUpdated": "2026-01-01T00:00:00Z",
    }
)
TOKEN = json.dumps({"access_token": "given", "expires_in": 9999, "token_type": "Bearer"})
AZURE_TOKEN = json.dumps(
    {"access_token": "given", "expires_in": "9999", "expires_on": "4926265200", "resource": "r", "token_type": "Bearer"}
)
SOURCES = {
    "AWS: instance": Source(
        "s3",
        {},
        {
            "/latest/api/token": "session",
            "/latest/meta-data/iam/security-credentials/": "role",
            "/latest/meta-data/iam/security-credentials/role": AWS_KEYS,
        },
        "Credential=given/",
    ),
    "AWS: pod identity": Source(
        "s3",
        {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "{}/pod", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "{files}/token"},
        {"/pod": AWS_KEYS},
        "Credential=given/",
        {"token": "pod's"},
    ),
    "Google: instance": Source(
        "gs",
        {"GCE_METADATA_HOST": "{host}"},
        {"/computeMetadata/v1/instance/service-accounts/default/token": TOKEN},
        "Bearer given",
    ),
    "Azure: managed identity": Source(
        "az",
        {"AZURE_MSI_ENDPOINT": "{}/msi"},
        {"/msi": AZURE_TOKEN},
        "Bearer given",
    ),
    "Azure: client secret": Source(
        "az",
        {
            "AZURE_CLIENT_ID": "client",
            "AZURE_CLIENT_SECRET": "s",
            "AZURE_TENANT_ID": "tenant",
            "AZURE_AUTHORITY_HOST": "{}",
        },
        {"/tenant/oauth2/v2.0/token": TOKEN},
        "Bearer given",
    ),
    "Azure: workload identity": Source(
        "az",
        {
            "AZURE_CLIENT_ID": "client",
            "AZURE_TENANT_ID": "tenant",
            "AZURE_FEDERATED_TOKEN_FILE": "{files}/token",
            "AZURE_AUTHORITY_HOST": "{}",
        },
        {"/tenant/oauth2/v2.0/token": TOKEN},
        "Bearer given",
        {"token": "pod's"},
    ),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_credentials_are_asked_for(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Source
) -> None:
    for name, text in source.files.items():
        (tmp_path / name).write_text(text)
    for name, value in source.settings.items():
        filled = value.format(service.address, files=tmp_path, host=service.address.removeprefix("http://"))
        monkeypatch.setenv(name, filled)

    def answer(request: Request, handler: Handler) -> None:
        handler.reply(200, source.answers.get(request.name, "data").encode())

    service.answer = answer
    assert source.sent in used(service, source.scheme)


def test_the_command_line_of_azure_is_asked_if_a_variable_says_so(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    token = {"accessToken": "given", "expiresOn": "2126-01-01 00:00:00.000000", "subscription": "s", "tenant": "t"}
    command = tmp_path / "az"
    command.write_text(f"#!/bin/sh\necho '{json.dumps({**token, 'tokenType': 'Bearer', 'expires_on': 4926265200})}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("AZURE_USE_AZURE_CLI", "true")
    assert used(service, "az") == "Bearer given"


@pytest.fixture(name="account_file")
def make_account(tmp_path: Path) -> Path:
    """The file of a Google service account."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl, which makes the account's key")
    key = subprocess.run(["openssl", "genrsa", "2048"], capture_output=True, text=True, check=True).stdout
    path = tmp_path / "account.json"
    account = {"type": "service_account", "client_email": "job@project", "private_key": key, "private_key_id": "1"}
    path.write_text(json.dumps(account))
    return path


@pytest.mark.parametrize(
    "way",
    [
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "gcloud's own file",
    ],
)
def test_a_service_account_of_google_signs_for_itself(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, account_file: Path, way: str
) -> None:
    if way.startswith("GOOGLE"):
        monkeypatch.setenv(way, account_file.read_text() if way.endswith("KEY") else str(account_file))
    else:
        (tmp_path / ".config" / "gcloud").mkdir(parents=True)
        account_file.rename(tmp_path / ".config" / "gcloud" / "application_default_credentials.json")
    token = used(service, "gs").removeprefix("Bearer ")
    claims = token.split(".")[1]
    assert json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["iss"] == "job@project"


def test_a_file_of_google_s_that_the_client_does_not_know_is_an_error_of_the_settings(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "federated.json"
    path.write_text(json.dumps({"type": "external_account", "audience": "a"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    with pytest.raises(ConfigurationError, match="bucket cannot be used: .*external_account"):
        used(service, "gs")
