from __future__ import annotations

import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from statelog.errors import ConfigurationError, ErrorKind, StatelogError, StorageError
from statelog.storage import LocalStore, Store, open_store
from statelog.storage.location import ObjectLocation
from statelog.storage.objects import Answer, Bucket, Clients, ObjectStore, storage_error
from statelog.storage.open import check_put_if_absent, local_path, require_shared
from statelog.storage.store import StoreWrapper
from statelog.testing.faults import FaultPlan, FaultStore
from tests.storage.object_store_support import Handler, Request, Service

SECRET = "c2VjcmV0c2VjcmV0"
SETTINGS = {
    "s3": {
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": SECRET,
        "AWS_ENDPOINT_URL": "{}",
        "AWS_ALLOW_HTTP": "true",
    },
    "gs": {"GOOGLE_BEARER_TOKEN": SECRET, "GOOGLE_BASE_URL": "{}", "GOOGLE_ALLOW_HTTP": "true"},
    "az": {
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_SAS_KEY": f"sv=2020&sig={SECRET}",
        "AZURE_ENDPOINT": "{}",
        "AZURE_ALLOW_HTTP": "true",
    },
}
CALLS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read("x"),
    "read a range": lambda store: store.read("x", offset=1, length=2),
    "size": lambda store: store.size_bytes("x"),
    "put": lambda store: store.put("x", b"1"),
    "put_if_absent": lambda store: store.put_if_absent("x", b"1"),
    "delete": lambda store: store.delete(["x"]),
    "list": lambda store: store.list("x"),
}


DELETED = b"<DeleteResult><Deleted><Key>folder/x</Key></Deleted></DeleteResult>"


# ---- A service on loopback that answers as a test says ----


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """The service, and an environment that leads to it for every scheme."""
    service = Service()
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for settings in SETTINGS.values():
        for name, value in settings.items():
            monkeypatch.setenv(name, value.format(service.address))
    yield service
    service.close()


def make_store(scheme: str = "s3") -> ObjectStore:
    return ObjectStore(f"{scheme}://bucket/folder", timeout_s=5.0)


def failure(call: Callable[[], object]) -> StorageError:
    with pytest.raises(StorageError) as raised:
        call()
    return raised.value


# ---- What errors mean ----


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "SlowDown", ErrorKind.STORE_BUSY),
        (503, "ServerBusy", ErrorKind.STORE_BUSY),
        (503, "", ErrorKind.STORE_BUSY),
        (429, "TooManyRequests", ErrorKind.STORE_BUSY),
        (503, "ServiceUnavailable", ErrorKind.STORE_UNAVAILABLE),
        (500, "InternalError", ErrorKind.STORE_UNAVAILABLE),
        (502, "", ErrorKind.STORE_UNAVAILABLE),
        (400, "RequestTimeout", ErrorKind.STORE_UNAVAILABLE),
        (409, "OperationAborted", ErrorKind.STORE_UNAVAILABLE),
        (403, "AccessDenied", ErrorKind.STORE_FAILED),
        (400, "InvalidArgument", ErrorKind.STORE_FAILED),
        (404, "NoSuchBucket", ErrorKind.STORE_FAILED),
        (404, "ContainerNotFound", ErrorKind.STORE_FAILED),
        (301, "PermanentRedirect", ErrorKind.STORE_FAILED),
    ],
)
def test_kinds_of_failure(service: Service, scheme: str, status: int, code: str, kind: ErrorKind) -> None:
    service.say(status, code, "The store's own words.")
    for call in CALLS.keys() - {"size"}:
        error = failure(partial(CALLS[call], make_store(scheme)))
        assert error.kind == kind, call
        assert error.hint
        assert f"{call.split()[0]} {scheme}://bucket/folder/x failed: " in error.message
        if status != 301:
            assert f"failed: {f'{status} {code}'.strip()}" in error.message
            assert ("The store's own words." in error.message) == bool(code)
    assert len(service.requests) == len(CALLS) - 1, "whether a request is repeated must be left to others"


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_kinds_of_failure_without_a_body(service: Service, scheme: str) -> None:
    """As every answer to HEAD is; the code is not known then."""
    for status, kind in [
        (503, ErrorKind.STORE_BUSY),
        (429, ErrorKind.STORE_BUSY),
        (500, ErrorKind.STORE_UNAVAILABLE),
        (403, ErrorKind.STORE_FAILED),
        (400, ErrorKind.STORE_FAILED),
        (404, ErrorKind.OBJECT_MISSING),
    ]:
        service.say(status, "NoSuchBucket")
        error = failure(lambda: make_store(scheme).size_bytes("x"))
        assert error.kind == kind, status
        assert f"size {scheme}://bucket/folder/x failed: {status}." in error.message


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        (401, "the permissions"),
        (403, "the permissions"),
        (404, "buckets are not created"),
        (400, "Check the bucket's name, its region and the endpoint."),
    ],
)
def test_hints_are_about_what_was_answered(service: Service, status: int, hint: str) -> None:
    service.say(status, "Code")
    assert hint in failure(lambda: make_store().put("x", b"1")).hint


def test_a_failure_without_an_answer_keeps_the_first_line_of_what_is_known() -> None:
    error = storage_error(ValueError("strange https://host/x?sig=1 thing\nand details"), "put", "s3://bucket/x")
    assert error.message == "put s3://bucket/x failed: ValueError: strange (address) thing."


def test_only_where_it_was_asked_for_a_missing_object_is_an_answer() -> None:
    assert storage_error(FileNotFoundError("x"), "read", "x", missing=True).kind == ErrorKind.OBJECT_MISSING
    assert storage_error(FileNotFoundError("x"), "put", "x").kind == ErrorKind.STORE_FAILED


def test_interrupts_are_no_failures_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def head(self, key: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setattr(Clients, "get", lambda self, bucket: Interrupted())
    with pytest.raises(KeyboardInterrupt):
        make_store().size_bytes("x")


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_missing_objects(service: Service, scheme: str) -> None:
    service.say(404, "BlobNotFound" if scheme == "az" else "NoSuchKey")
    store = make_store(scheme)
    for call in ("read", "read a range", "size"):
        assert failure(partial(CALLS[call], store)).kind == ErrorKind.OBJECT_MISSING
    assert failure(lambda: store.read("x", length=0)).kind == ErrorKind.OBJECT_MISSING
    assert failure(lambda: store.put("x", b"1")).kind == ErrorKind.STORE_FAILED


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("how", "words"),
    [("reset", "connection lost: Connection reset"), ("hang up", "connection lost"), ("hang", "no answer in time")],
)
def test_no_answer(service: Service, call: str, how: str, words: str) -> None:
    def answer(request: Request, handler: Handler) -> None:
        if how == "hang":
            service.released.wait(30)
        elif how == "reset":
            handler.reset()
        else:
            handler.hang_up()

    service.answer = answer
    store = ObjectStore("s3://bucket/folder", timeout_s=0.2 if how == "hang" else 20.0)
    start = time.monotonic()
    error = failure(lambda: CALLS[call](pickle.loads(pickle.dumps(store))))
    assert error.kind == ErrorKind.STORE_UNAVAILABLE
    assert error.is_transient
    assert words in error.message
    assert not error.message.endswith(": ."), "it says why only if it knows"
    assert time.monotonic() - start < 5.0
    assert len(service.requests) == 1


@pytest.mark.parametrize("call", ["read", "list"])
def test_answers_that_are_cut_off(service: Service, call: str) -> None:
    def answer(request: Request, handler: Handler) -> None:
        handler.reply(200, b"half of it", length=100)
        handler.hang_up()

    service.answer = answer
    assert failure(lambda: CALLS[call](make_store())).kind == ErrorKind.STORE_UNAVAILABLE


def test_nobody_listens(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        error = failure(lambda: make_store().read("x"))
    assert error.kind == ErrorKind.STORE_UNAVAILABLE
    assert "s3://bucket/folder/x" in error.message
    assert "Connection refused" in error.message


def test_endpoints_that_cannot_work(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store()
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    error = failure(lambda: store.read("x"))
    assert error.kind == ErrorKind.STORE_FAILED
    assert "AWS_ALLOW_HTTP=true" in error.hint
    assert "failed: an http:// endpoint needs permission." in error.message
    monkeypatch.setenv("AWS_ENDPOINT_URL", service.address.replace("http:", "https:"))
    error = failure(lambda: store.read("x"))
    assert error.kind == ErrorKind.STORE_FAILED
    assert "no TLS connection" in error.message
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9000")
    with pytest.raises(ConfigurationError, match="AWS_ENDPOINT_URL does not start with http://"):
        store.read("x")
    # The client asserts what it finds; the assertion must not get through as it is.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://")
    assert failure(lambda: store.read("x")).kind == ErrorKind.STORE_FAILED


def test_settings_that_are_not_enough(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigurationError, match=r"bucket cannot be used: Missing SecretAccessKey.*AWS_\*"):
        make_store().read("x")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(ConfigurationError, match="Account must be specified"):
        make_store("az").read("x")


def test_without_credentials_the_error_says_so(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", service.address)
    service.say(404)
    error = failure(lambda: make_store().read("x"))
    # In particular it does not say that the object is missing.
    assert error.kind == ErrorKind.STORE_FAILED
    assert "no credentials" in error.message
    assert "environment of driver and executors" in error.hint


# ---- Requests ----


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_objects_are_created_by_one_conditional_request(service: Service, scheme: str) -> None:
    store = make_store(scheme)
    data = bytes(6 << 20)
    assert store.put_if_absent("a/x", data)
    store.put("a/x", data)
    conditional, plain = service.requests
    condition = ("x-goog-if-generation-match", "0") if scheme == "gs" else ("if-none-match", "*")
    assert condition in conditional.headers.items()
    assert condition not in plain.headers.items()
    for request in service.requests:
        assert (request.method, request.name) == ("PUT", "/bucket/folder/a/x")
        assert request.body == data


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_only_a_certain_conflict_means_that_an_object_exists(service: Service, scheme: str) -> None:
    store = make_store(scheme)
    service.say(412, "PreconditionFailed")
    assert not store.put_if_absent("x", b"1")
    service.say(409, "BlobAlreadyExists")
    assert not store.put_if_absent("x", b"1")
    service.say(409, "ConditionalRequestConflict", "Another request for the object is under way.")
    assert failure(lambda: store.put_if_absent("x", b"1")).kind == ErrorKind.STORE_UNAVAILABLE
    service.say(409, "ContainerBeingDeleted")
    assert failure(lambda: store.put_if_absent("x", b"1")).kind == ErrorKind.STORE_FAILED
    service.say(409)
    assert failure(lambda: store.put_if_absent("x", b"1")).kind == ErrorKind.STORE_FAILED


@pytest.mark.parametrize(
    ("status", "code", "is_taken"),
    [
        (412, "", True),
        (409, "BlobAlreadyExists", True),
        (409, "OperationAborted", False),
        (409, "", False),
        (0, "BlobAlreadyExists", False),
    ],
)
def test_answers_that_an_object_exists(status: int, code: str, is_taken: bool) -> None:
    assert Answer(status, code).is_taken == is_taken


def test_a_range_behind_the_end_takes_one_request(service: Service) -> None:
    service.say(416, "InvalidRange")
    store = make_store()
    assert store.read("x", offset=300, length=10) == b""
    assert store.read("x", offset=300) == b""
    assert store.read("x", length=5) == b""
    assert [request.headers["range"] for request in service.requests] == ["bytes=300-309", "bytes=300-", "bytes=0-4"]


def test_an_empty_range_at_the_very_end_may_be_an_answer(service: Service) -> None:
    """Azurite gives it."""
    service.answer = lambda request, handler: handler.reply(206, b"", Content_Range="bytes 4-3/4")
    for scheme in ("az", "s3", "gs"):
        assert make_store(scheme).read("x", offset=4) == b""
        assert make_store(scheme).read("x", offset=4, length=1) == b""


def test_many_objects_are_deleted_by_few_requests(service: Service) -> None:
    service.answer = lambda request, handler: handler.reply(200, DELETED)
    names = [f"name-{number:03d}-" for number in range(600)]
    make_store().delete([*names, names[0]])
    assert len(service.requests) == 3
    sent = b"".join(request.body for request in service.requests).decode()
    assert [sent.count(name) for name in names] == [1] * 600


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("AccessDenied", ErrorKind.STORE_FAILED),
        ("SlowDown", ErrorKind.STORE_BUSY),
        ("InternalError", ErrorKind.STORE_UNAVAILABLE),
    ],
)
def test_an_object_that_could_not_be_deleted_with_others(service: Service, code: str, kind: ErrorKind) -> None:
    body = (
        "<DeleteResult><Deleted><Key>folder/a</Key></Deleted>"
        f"<Error><Key>folder/b</Key><Code>{code}</Code><Message>words</Message></Error></DeleteResult>"
    )
    service.answer = lambda request, handler: handler.reply(200, body.encode())
    error = failure(lambda: make_store().delete(["a", "b"]))
    assert error.kind == kind
    assert f"failed: {code}: words." in error.message


def answer_batch(
    request: Request, handler: Handler, exist: set[str], otherwise: str = "404 The specified blob does not exist."
) -> None:
    """As Azure answers a batch of deletes."""
    parts = []
    for number, line in enumerate(line for line in request.body.split(b"\r\n") if line.startswith(b"DELETE ")):
        path = line.split()[1].decode().partition("?")[0]
        status = "202 Accepted" if path in exist else otherwise
        exist.discard(path)
        head = f"--b\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
        parts.append(f"{head}HTTP/1.1 {status}\r\nx-ms-version: 2023-11-03\r\n\r\n\r\n")
    handler.reply(202, ("".join(parts) + "--b--\r\n").encode(), Content_Type="multipart/mixed; boundary=b")


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_missing_objects_are_passed_over_and_the_others_deleted(service: Service, scheme: str) -> None:
    exist = {f"/bucket/folder/{name}" for name in "bdez"}

    def answer(request: Request, handler: Handler) -> None:
        if request.method == "POST":
            answer_batch(request, handler, exist)
        elif request.name in exist:
            exist.remove(request.name)
            handler.reply(204)
        else:
            handler.reply(404, b"<Error><Code>NoSuchKey</Code></Error>")

    service.answer = answer
    make_store(scheme).delete(list("abcde"))
    assert exist == {"/bucket/folder/z"}
    make_store(scheme).delete(["a", "z"])
    assert exist == set()


def test_a_missing_object_among_those_deleted_does_not_hide_the_others(service: Service) -> None:
    """Some servers name it as a failure, where S3 itself passes it over."""
    missing = b"<Error><Key>folder/a</Key><Code>NoSuchKey</Code><Message>words</Message></Error>"
    deleted: list[bytes] = []

    def answer(request: Request, handler: Handler) -> None:
        keys = re.findall(rb"<Key>([^<]+)</Key>", request.body)
        if b"folder/a" in keys:
            handler.reply(200, b"<DeleteResult>%b</DeleteResult>" % missing)
        else:
            deleted.extend(keys)
            handler.reply(200, b"<DeleteResult><Deleted><Key>%b</Key></Deleted></DeleteResult>" % keys[0])

    service.answer = answer
    make_store().delete(["a", "b"])
    assert deleted == [b"folder/b"]


@pytest.mark.parametrize(
    ("status", "kind"), [("503 Busy", ErrorKind.STORE_BUSY), ("403 Forbidden", ErrorKind.STORE_FAILED)]
)
def test_one_of_a_batch_has_a_status_of_its_own(service: Service, status: str, kind: ErrorKind) -> None:
    service.answer = lambda request, handler: answer_batch(request, handler, set(), status)
    error = failure(lambda: make_store("az").delete(["a", "b"]))
    assert error.kind == kind
    assert f"failed: {status.split()[0]}" in error.message


def test_listing_asks_for_the_folder_and_filters(service: Service) -> None:
    found = "".join(
        f"<Contents><Key>folder/{name}</Key><Size>{size}</Size><LastModified>2026-11-21T10:00:00.5Z</LastModified>"
        "<ETag>1</ETag></Contents>"
        for name, size in [("log/", 0), ("log/10", 7), ("log/1", 5), ("log/2", 6)]
    )
    body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"
    service.answer = lambda request, handler: handler.reply(200, body.encode())
    listed = make_store().list("log/1")
    assert [(info.name, info.size_bytes, info.modified_s) for info in listed] == [
        ("log/1", 5, 1795255200.5),
        ("log/10", 7, 1795255200.5),
    ]
    assert "prefix=folder%2Flog%2F" in service.requests[0].path
    # An empty object of the folder's own name, as consoles make it, is nothing in the folder.
    assert [info.name for info in make_store().list("log/")] == ["log/1", "log/10", "log/2"]


def test_a_location_without_folder(service: Service) -> None:
    store = ObjectStore("gs://bucket/")
    store.put("x", b"1")
    assert service.requests[0].path == "/bucket/x"
    body = (
        "<ListBucketResult><Contents><Key>a/x</Key><Size>1</Size><LastModified>2026-11-21T10:00:00Z</LastModified>"
        "<ETag>1</ETag></Contents></ListBucketResult>"
    )
    service.answer = lambda request, handler: handler.reply(200, body.encode())
    assert [info.name for info in store.list()] == ["a/x"]


@pytest.mark.parametrize("name", ["a\nb", "a\x7f", "a\0", "", "/etc/x", "../x", "a/../x", "a//b", "./a", "a/", "a/."])
def test_what_is_no_name_is_not_asked_for(service: Service, name: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a valid object name"):
        make_store().put(name, b"")
    assert service.requests == []


@pytest.mark.parametrize("prefix", ["..", "/", "/a", "../a", "a/../b"])
def test_what_is_no_prefix_is_not_asked_for(service: Service, prefix: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a valid object name"):
        make_store().list(prefix)
    assert service.requests == []


def test_backslashes_are_refused_where_they_would_become_slashes(service: Service) -> None:
    make_store("s3").put("a\\b", b"")
    assert len(service.requests) == 1
    with pytest.raises(ConfigurationError, match="Azure, which treats a backslash as a slash"):
        make_store("az").put("a\\b", b"")
    for scheme in ("az", "abfs"):
        with pytest.raises(ConfigurationError, match="holds a backslash, which Azure treats as a slash"):
            open_store(f"{scheme}://container/a\\b")
    open_store("s3://bucket/a\\b")
    assert len(service.requests) == 1


def test_names_may_hold_spaces(service: Service) -> None:
    make_store().put("a b", b"")
    assert service.requests[0].name == "/bucket/folder/a b"


def test_append_is_refused(service: Service) -> None:
    store = make_store()
    assert not store.can_append
    assert "cannot append" in failure(lambda: store.append("x", [b"1"], at=0)).message
    assert service.requests == []


# ---- Locations and settings ----


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("s3://bucket/some/folder", "/bucket/some/folder/x"),
        ("s3a://bucket/some folder//", "/bucket/some folder/x"),
        ("S3://bucket/a%20b", "/bucket/a%20b/x"),
        ("gs://bucket", "/bucket/x"),
        ("az://container/a", "/container/a/x"),
        ("abfs://container/a", "/container/a/x"),
        ("abfss://container@account.dfs.core.windows.net/a", "/container/a/x"),
    ],
)
def test_open_store(service: Service, location: str, name: str) -> None:
    store = open_store(location)
    store.put("x", b"1")
    assert isinstance(store, ObjectStore)
    assert service.requests[0].name == name


def test_the_account_of_a_location_is_used(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the environment's: the host that is asked for is made of it."""
    monkeypatch.delenv("AZURE_ENDPOINT")
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("HTTPS_PROXY", service.address)
    failure(lambda: open_store("abfss://container@mine.dfs.core.windows.net/a").read("x"))
    assert service.requests[0].path == "mine.blob.core.windows.net:443"


@pytest.mark.parametrize(
    "location",
    ["s3:", "s3:b/x", "s3://", "s3:///x", "s3://b//x", "gs://b/a/../c", "az://b/.", "abfs://@a.dfs.core.windows.net"],
)
def test_malformed_locations(location: str) -> None:
    with pytest.raises(ConfigurationError, match="s3://bucket/folder") as raised:
        open_store(location)
    assert location in raised.value.message


@pytest.mark.parametrize(
    "location",
    [
        f"s3://id:{SECRET}@bucket/x",
        f"s3://{SECRET}@bucket/x",
        f"s3://id:{SECRET}/x",
        f"s3://{SECRET}@account.dfs.core.windows.net/x",
        f"abfss://{SECRET}@host/x",
        f"az://c/x?sig={SECRET}",
        f"gs://c/x#{SECRET}",
    ],
)
def test_locations_with_credentials_are_refused_and_not_shown(location: str) -> None:
    with pytest.raises(ConfigurationError, match="taken from the environment") as raised:
        open_store(location)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("location", ["s3", "s3:bucket/x", "/s3/bucket", "file:///bucket/x", "hdfs://bucket/x", ""])
def test_locations_elsewhere_are_none_in_an_object_store(location: str) -> None:
    with pytest.raises(ConfigurationError, match="is not in an object store") as raised:
        ObjectLocation.parse(location)
    assert raised.value.kind == ErrorKind.UNSUPPORTED_FEATURE


def test_a_directory_is_needed_elsewhere() -> None:
    with pytest.raises(ConfigurationError, match="a directory is required") as raised:
        local_path("s3a://bucket/x")
    assert raised.value.kind == ErrorKind.UNSUPPORTED_FEATURE


def test_stores_of_one_bucket_share_connections(service: Service) -> None:
    for number in range(20):
        pickle.loads(pickle.dumps(ObjectStore(f"s3://bucket/{number}"))).put("x", b"1")
    assert len(service.requests) == 20
    # Not exactly one, as a request may come before the connection is free again.
    assert service.connections < 10
    before = service.connections
    ObjectStore("s3://bucket/1").close()
    ObjectStore("s3://bucket/2").put("x", b"1")
    assert service.connections > before


def test_a_pickled_store_keeps_its_limit() -> None:
    assert pickle.dumps(ObjectStore("s3://bucket", timeout_s=1.0)) != pickle.dumps(ObjectStore("s3://bucket"))
    copy = pickle.loads(pickle.dumps(ObjectStore("s3://bucket", timeout_s=1.0)))
    assert pickle.dumps(copy) == pickle.dumps(ObjectStore("s3://bucket", timeout_s=1.0))


@pytest.mark.parametrize(
    ("scheme", "setting"),
    [("s3", "AWS_ENDPOINT_URL"), ("s3", "AWS_ENDPOINT"), ("gs", "GOOGLE_BASE_URL"), ("az", "AZURE_ENDPOINT")],
)
def test_addresses_without_a_scheme_are_refused(
    service: Service, monkeypatch: pytest.MonkeyPatch, scheme: str, setting: str
) -> None:
    monkeypatch.setenv(setting, "127.0.0.1:9000")
    with pytest.raises(ConfigurationError, match=f"{setting} does not start with http://"):
        make_store(scheme).read("x")
    assert service.requests == []


def test_settings_of_others_do_not_matter(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_BASE_URL", "127.0.0.1:9000")
    monkeypatch.setenv("SOME_ENDPOINT", "127.0.0.1:9000")
    make_store().put("x", b"1")
    assert len(service.requests) == 1


def test_changed_settings_are_used(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store()
    store.put("x", b"1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    store.put("x", b"1")
    assert ["Credential=another/" in request.headers["authorization"] for request in service.requests] == [False, True]


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_credentials_are_nowhere(
    service: Service, scheme: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    store = make_store(scheme)

    def echo(request: Request, handler: Handler) -> None:
        sent = "".join(f"<Sent>{text}</Sent>" for text in (request.path, *request.headers.values()))
        handler.reply(403, f"<Error><Code>AccessDenied</Code>{sent.replace('&', '&amp;')}</Error>".encode())

    service.answer = echo
    shown = [repr(store), str(vars(store)), pickle.dumps(store).decode("latin-1")]
    for call in CALLS.values():
        try:
            call(store)
        except StatelogError as error:
            shown += [repr(error), pickle.dumps(error).decode("latin-1"), *traceback.format_exception(error)]
    assert len(shown) > 3 + 2 * len(CALLS)
    shown += [pickle.dumps(store).decode("latin-1"), caplog.text, *capfd.readouterr()]
    assert any(SECRET in str(request) for request in service.requests)
    assert [text for text in shown if SECRET in text] == []


# ---- Processes ----


def run_in_child(action: Callable[[], None]) -> int:
    """Run it in a fork that has some seconds; 0 if it returns."""
    pid = os.fork()
    if pid == 0:
        # A hang is one outside of Python, where a handler, such as the test runner's own, would not be called.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_after_use_is_told_so(service: Service) -> None:
    store = make_store()
    store.put("x", b"1")

    def child() -> None:
        for other in (store, ObjectStore("s3://bucket/another"), ObjectStore("gs://bucket")):
            for call in CALLS.values():
                error = failure(partial(call, other))
                assert "is a fork of one that has used an object store" in error.message
                assert not error.is_transient
        store.close()
        assert run_in_child(lambda: child_of_child(store)) == 0

    assert run_in_child(child) == 0
    store.put("x", b"2")
    assert [request.body for request in service.requests] == [b"1", b"2"]


def test_clients_are_made_for_a_process(service: Service) -> None:
    clients, bucket = Clients(), Bucket("s3", "bucket", 5.0)

    def usable() -> None:
        assert clients.get(bucket) is clients.get(bucket)

    def refused() -> None:
        for _ in range(2):
            assert "is a fork" in failure(lambda: clients.get(bucket)).message

    def refused_here_and_below() -> None:
        refused()
        assert run_in_child(refused) == 0

    assert run_in_child(usable) == 0
    client = clients.get(bucket)
    assert clients.get(bucket) is client
    assert run_in_child(refused_here_and_below) == 0
    assert clients.get(bucket) is client
    clients.forget(bucket)
    assert clients.get(bucket) is not client


def test_a_fork_is_told_apart_by_whether_clients_were_used(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_forks: list[Callable[[], None]] = []
    monkeypatch.setattr(os, "register_at_fork", lambda *, after_in_child: begin_forks.append(after_in_child))
    clients, bucket = Clients(), Bucket("s3", "bucket", 5.0)
    [begin_fork] = begin_forks

    begin_fork()
    assert clients.get(bucket) is clients.get(bucket)
    for _ in range(2):
        begin_fork()
        assert "is a fork" in failure(lambda: clients.get(bucket)).message


def test_a_fork_keeps_the_clients_that_it_cannot_use(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """To end a client takes a lock of its library, which a thread of the parent may have held: a fork would hang."""
    begin_forks: list[Callable[[], None]] = []
    monkeypatch.setattr(os, "register_at_fork", lambda *, after_in_child: begin_forks.append(after_in_child))
    clients, bucket = Clients(), Bucket("s3", "bucket", 5.0)
    client = clients.get(bucket)
    references = sys.getrefcount(client)
    begin_forks[0]()
    clients.forget(bucket)
    assert sys.getrefcount(client) == references


def child_of_child(store: Store) -> None:
    assert "is a fork" in failure(lambda: store.read("x")).message


FORKS_BEFORE_USE = """
import os, signal, statelog

threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
from statelog.storage.objects import ObjectStore

store = ObjectStore("s3://bucket/folder")
assert len(os.listdir("/proc/self/task")) == threads, "importing has started threads"
assert len(os.listdir("/proc/self/fd")) == files, "importing has opened something"
for _ in range(2):
    if (pid := os.fork()) == 0:
        signal.alarm(20)
        store.put("child", b"1")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
store.put("parent", b"1")
"""


def test_a_fork_before_use_works(service: Service) -> None:
    subprocess.run([sys.executable, "-c", FORKS_BEFORE_USE], check=True, timeout=60, stderr=subprocess.PIPE)
    names = [request.path.rpartition("/")[2] for request in service.requests]
    assert names == ["child", "child", "parent"]


# ---- The probe ----


class IgnoresConditions(StoreWrapper):
    """Takes a condition and overwrites all the same."""

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        self.put(name, data)
        return True


class CreatesNothing(StoreWrapper):
    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        return False


def test_probe(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path / "root")
    inner.put("x", b"1")
    check_put_if_absent(inner)
    with pytest.raises(ConfigurationError, match="not safe.*Two drivers could both commit") as raised:
        check_put_if_absent(IgnoresConditions(inner))
    assert raised.value.kind == ErrorKind.STORE_UNSAFE
    with pytest.raises(ConfigurationError, match="did not create probe/") as raised:
        check_put_if_absent(CreatesNothing(inner))
    assert raised.value.kind == ErrorKind.STORE_UNSAFE
    assert [info.name for info in inner.list()] == ["x"]


def test_a_place_is_shared_if_what_the_driver_has_written_is_seen_there(tmp_path: Path) -> None:
    driver, host = LocalStore(tmp_path / "driver"), LocalStore(tmp_path / "host")
    driver.put("log/1", b"head and more")

    def look(store: Store, head: bytes = b"head") -> None:
        require_shared(store, "log/1", head, host="worker-7", who="operator 'main'")

    look(driver)
    with pytest.raises(ConfigurationError, match="operator 'main': host worker-7 does not see log/1 in ") as raised:
        look(host)
    assert raised.value.kind is ErrorKind.LOCATION_NOT_SHARED
    assert "executors mount under one path" in raised.value.hint
    host.put("log/1", b"heap and more")
    with pytest.raises(ConfigurationError, match="sees a different object in place of log/1"):
        look(host)
    with pytest.raises(StorageError):
        look(FaultStore(driver, FaultPlan.at("read", call=1, when="before")))
    assert [info.name for info in driver.list()] == ["log/1"], "nothing is left there"


def test_probe_of_a_store_that_fails_leaves_nothing(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    store = FaultStore(inner, FaultPlan.at("put_if_absent", call=2, when="after"))
    with pytest.raises(StorageError):
        check_put_if_absent(store)
    assert inner.list() == []


def test_probe_names_the_location(service: Service) -> None:
    service.answer = lambda request, handler: handler.reply(200, DELETED)
    with pytest.raises(ConfigurationError, match="s3://bucket/folder"):
        check_put_if_absent(make_store())
