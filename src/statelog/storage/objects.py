"""A store in a folder of a bucket: Amazon S3 and servers that speak its protocol, Google Cloud Storage, Azure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any, Final

from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from statelog.errors import ConfigurationError, ErrorKind, StorageError
from statelog.storage.location import AZURE_HOST, ObjectLocation
from statelog.storage.s3a import S3aSettings, adopted_s3a
from statelog.storage.store import ObjectInfo, Store

# ---- Clients: made at the first request, shared within a process, never used across a fork ----


Client = S3Store | GCSStore | AzureStore

_CLASSES: Final[dict[str, type[S3Store] | type[GCSStore] | type[AzureStore]]] = {
    "s3": S3Store,
    "gs": GCSStore,
    "az": AzureStore,
}
_CONNECT_TIMEOUT: Final = "5000 ms"
_SETTINGS: Final = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}


@dataclass(frozen=True, slots=True)
class Bucket:
    """The bucket of a client, and the limit of its requests."""

    service: str
    """``s3``, ``gs`` or ``az``."""
    name: str
    """The bucket; for ``az`` the container, or ``container@host of the account``."""
    timeout_s: float
    """Limit of a whole request."""


class Clients:
    """The clients of this process, one per bucket.

    Making a client takes about 10 ms, each of its connections needs a handshake, and stores are made for every task; so
    the stores of one bucket share a client. It is made again after the settings in the environment have changed.

    Clients may be called from any thread. Two threads may make a client at the same time without harm, so there is no
    lock that a fork could copy.
    """

    def __init__(self) -> None:
        self._made: dict[Bucket, tuple[tuple[dict[str, str], S3aSettings | None], Client]] = {}
        self._were_used = False
        self._is_fork = False
        os.register_at_fork(after_in_child=self._start_fork)

    def get(self, bucket: Bucket) -> Client:
        """Return the client for the next request.

        In a fork of a process that has made requests this raises StorageError: the client library's threads exist only
        in the parent, and any request would wait for them forever. Settings that are insufficient for a client
        raise ConfigurationError.
        """
        if self._is_fork:
            raise StorageError(
                f"{bucket.name} cannot be reached: this process is a fork of one that has used an object store.",
                hint="Start processes with the method 'spawn' of multiprocessing, or fork before the first request.",
            )
        prefix = _SETTINGS[bucket.service]
        settings = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
        hadoop = adopted_s3a() if bucket.service == "s3" else None
        made_with, client = self._made.get(bucket, (None, None))
        if client is None or made_with != (settings, hadoop):
            client = _make_client(bucket, settings, hadoop)
            self._were_used = True  # first, as another thread may fork at any time
            self._made[bucket] = (settings, hadoop), client
        return client

    def forget(self, bucket: Bucket) -> None:
        """Drop the client of a bucket; its connections end when the requests under way end."""
        if not self._is_fork:
            self._made.pop(bucket, None)

    def _start_fork(self) -> None:
        # The parent's clients stay: dropping one takes a lock, which a thread of the parent may have held at the fork.
        self._is_fork = self._were_used


def _require_addresses(settings: Mapping[str, str], whose: str) -> None:
    for name, value in settings.items():
        if ("ENDPOINT" in name or name.endswith("_URL")) and not value.startswith(("http://", "https://")):
            # The client library would fail with an assertion instead.
            raise ConfigurationError(
                f"The {whose} {name} does not start with http:// or https://.", hint="Write it as a URL."
            )


def _make_client(bucket: Bucket, settings: Mapping[str, str], hadoop: S3aSettings | None) -> Client:
    """Make a client. All but bucket and limits comes from the environment, the profile that it names, or Hadoop.

    `settings` are those of the environment.
    """
    _require_addresses(settings, "environment's")
    profile, credentials = profile_arguments(settings) if bucket.service == "s3" else ({}, {})
    _require_addresses(profile, "profile's")
    added = {} if hadoop is None else hadoop.added(bucket.name, {**settings, **profile})
    # Limits are passed among the settings: client_options would replace those of the environment.
    limits = {"timeout": f"{round(bucket.timeout_s * 1000)} ms", "connect_timeout": _CONNECT_TIMEOUT}
    config: Any = {**profile, **added, **limits}
    # No retries by the client: it would mistake an object that its own first attempt created for another writer's.
    name, _, account = bucket.name.partition("@")
    if account:
        config["account_name"] = account.removesuffix(AZURE_HOST)
    try:
        return _CLASSES[bucket.service](name, config=config, retry_config={"max_retries": 0}, **credentials)
    except Exception as error:
        reason = str(error).partition("\n")[0].rpartition("error: ")[2]
        raise ConfigurationError(
            f"The bucket {bucket.name} cannot be used: {reason}.",
            hint=f"Check the environment's {_SETTINGS[bucket.service]}* settings; see docs/object-stores.md.",
        ) from None


# ---- Credentials of a named AWS profile, which obstore does not read itself ----


_PROFILE: Final = "AWS_PROFILE"
_KEYS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT")
# botocore renews credentials at least 10 minutes before they expire, so those that it returns are valid that long.
_ASK_AGAIN: Final = timedelta(minutes=5)


def profile_arguments(settings: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    """The profile that the environment's `settings` name, for a client of S3: more settings, and its credentials.

    Both are empty if the environment names no profile, or has a key, which takes precedence. A region or endpoint of
    the environment takes precedence over the profile's. Raises ConfigurationError if the profile cannot be used.
    """
    name = settings.get(_PROFILE)
    if not name or any(key in settings for key in _KEYS):
        return {}, {}
    auth, botocore = _libraries(name)
    session = botocore.session.Session(profile=name)
    try:
        if session.get_credentials() is None:
            raise _unusable(name, "it provides no credentials")
        region = session.get_config_variable("region")
        endpoint = session.get_scoped_config().get("endpoint_url")
        provider = auth.Boto3CredentialProvider(session, ttl=_ASK_AGAIN)
    except botocore.exceptions.BotoCoreError as error:
        raise _unusable(name, " ".join(str(error).split()).rstrip(".")) from None
    found = {}
    if region and not any(one in settings for one in _REGIONS):
        found["AWS_REGION"] = region
    if endpoint and not any(one in settings for one in _ENDPOINTS):
        found["AWS_ENDPOINT_URL"] = endpoint
    return found, {"credential_provider": provider}


def _unusable(name: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"The profile {name!r} that AWS_PROFILE names cannot be used: {reason}.",
        hint="Correct it in ~/.aws/config or ~/.aws/credentials of this host, log in (aws sso login) if it uses"
        " IAM Identity Center, or unset AWS_PROFILE and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; see"
        " docs/object-stores.md.",
    )


def _libraries(name: str) -> tuple[Any, ModuleType]:
    try:
        import botocore.exceptions
        import botocore.session
        from obstore.auth import boto3 as auth
    except ImportError as error:
        raise ConfigurationError(
            f"AWS_PROFILE names the profile {name!r}, but boto3, which reads profiles, cannot be imported: {error}.",
            hint="Install statelog[aws] on the driver and all executors, or unset AWS_PROFILE and set"
            " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or rely on a role; see docs/object-stores.md.",
        ) from None
    return auth, botocore


# The client library's threads and connections belong to the process, so the clients do too.


# ---- The store ----


_CLIENTS: Final = Clients()
# Azure's limit for one request.
_DELETED_AT_ONCE: Final = 250


class ObjectStore(Store):
    """Objects below a folder of a bucket, which must exist.

    Each process reads credentials, region and endpoint from its environment. The store never keeps them: pickled, it
    carries only its location and limit. `timeout_s` limits a request from connecting to the last byte; it must suit
    the largest object.

    A request is made once; :class:`statelog.storage.retry.RetryingStore` knows which ones may be repeated.
    """

    def __init__(self, location: str, *, timeout_s: float = 60.0) -> None:
        where = ObjectLocation.parse(location)
        self._location = location.rstrip("/")
        self._folder = f"{where.folder}/" if where.folder else ""
        self._bucket = Bucket(where.service, where.bucket, timeout_s)

    def __repr__(self) -> str:
        return f"ObjectStore({self._location!r})"

    def __str__(self) -> str:
        return str(self._location)

    def __reduce__(self) -> tuple[object, ...]:
        return (partial(ObjectStore, timeout_s=self._bucket.timeout_s), (self._location,))

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        key = self._key(name)
        with self._request("read", name, missing=True) as client:
            if length == 0:
                # No request can ask for an empty range; a missing object is still an error.
                client.head(key)
                return b""
            try:
                if length is not None:
                    return bytes(client.get_range(key, start=offset, length=length))
                return bytes(client.get(key, options={"range": {"offset": offset}} if offset else {}).bytes())
            except BaseError as error:
                if is_behind_end(error):
                    return b""
                raise

    def size_bytes(self, name: str) -> int:
        key = self._key(name)
        with self._request("size", name, missing=True) as client:
            return client.head(key)["size"]

    def put(self, name: str, data: bytes | memoryview) -> None:
        key = self._key(name)
        with self._request("put", name) as client:
            # One request is atomic; an interrupted upload in parts would leave its parts behind.
            client.put(key, memoryview(data).cast("B"), use_multipart=False)

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        key = self._key(name)
        with self._request("put_if_absent", name) as client:
            try:
                client.put(key, memoryview(data).cast("B"), mode="create", use_multipart=False)
            except AlreadyExistsError as error:
                # The library raises this for every conflict, even with a write or delete whose outcome is still open.
                if Answer.of(error).is_taken:
                    return False
                raise
            return True

    def delete(self, names: list[str]) -> None:
        keys = list(dict.fromkeys(self._key(name) for name in names))
        for start in range(0, len(keys), _DELETED_AT_ONCE):
            self._delete(keys[start : start + _DELETED_AT_ONCE])

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        folder, slash, start = prefix.rpartition("/")
        if start == ".." or (slash and not folder):
            raise _bad_name(prefix)
        # The library lists whole folders only.
        top = self._key(folder) if folder else self._folder.rstrip("/")
        with self._request("list", prefix) as client:
            listed = client.list(top or None).collect()
        found = [
            ObjectInfo(meta["path"][len(self._folder) :], meta["size"], meta["last_modified"].timestamp())
            for meta in listed
            # Skips the marker that tools make for a folder: its name is the folder's own.
            if meta["path"].startswith(self._folder + prefix)
        ]
        return sorted(found, key=lambda info: info.name)

    def close(self) -> None:
        _CLIENTS.forget(self._bucket)

    def _key(self, name: str) -> str:
        if self._bucket.service == "az" and "\\" in name:
            raise ConfigurationError(
                f"{name!r} is not a valid object name in Azure, which treats a backslash as a slash.",
                hint="Choose a name without backslashes.",
            )
        if any(part in ("", ".", "..") for part in name.split("/")) or any(ord(c) < 32 or ord(c) == 127 for c in name):
            raise _bad_name(name)
        return self._folder + name

    def _delete(self, keys: Sequence[str]) -> None:
        """Delete keys in one request; one by one if the error of a missing object hides the others' outcome."""
        try:
            with self._request("delete", keys[0].removeprefix(self._folder), missing=True) as client:
                client.delete(keys)
        except StorageError as error:
            if error.kind != ErrorKind.OBJECT_MISSING:
                raise
            if len(keys) > 1:
                for key in keys:
                    self._delete([key])

    @contextmanager
    def _request(self, operation: str, name: str, *, missing: bool = False) -> Iterator[Client]:
        """Provide the client, and turn its errors into StorageErrors; `missing` as in :func:`storage_error`."""
        client = _CLIENTS.get(self._bucket)
        try:
            yield client
        except (BaseError, OSError, ValueError) as error:
            # Without the cause: its text can hold a whole request.
            raise storage_error(error, operation, f"{self._location}/{name}", missing=missing) from None
        except BaseException as error:
            # An assertion of the client library, for example about an endpoint without http://. The library does not
            # export the class.
            if type(error).__name__ != "PanicException":
                raise
            raise storage_error(error, operation, f"{self._location}/{name}") from None


def _bad_name(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name!r} is not a valid object name.",
        hint="Use a relative name with '/' between its parts, without control characters. No part may be empty, '.' or"
        " '..'.",
    )


# ---- The meaning of a failed request, read from the text of obstore's error, which has nothing else ----


_TEXT: Final = r'"((?:[^"\\]|\\.)*)"'
_STATUS: Final = re.compile(rf"\n\s+status: (\d{{3}}),\s+body: (?:None|(?:Some\(\s+)?{_TEXT})")
_PART: Final = re.compile(rf"DeleteFailed \{{\s+path: {_TEXT},\s+code: {_TEXT},\s+(?:message|reason): {_TEXT}")
_TRANSPORT: Final = re.compile(r"\bHttpError \{\s+kind: (\w+)")
_CAUSE: Final = re.compile(r'\b(?:message|error): "([^"]+)"')
_CODE: Final = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE: Final = re.compile(r"<Message>([^<]*)</Message>")
_CREDENTIALS: Final = re.compile(r"TokenRequest|/latest/(?:api/token|meta-data|dynamic)")
# The client library's words before the error of a profile's credentials, and botocore's without a connection.
_PROFILE_SAID: Final = re.compile(r"External AWS credential provider: ([^\n]+)")
_NO_CONNECTION: Final = re.compile(
    r"\b(?:EndpointConnection|Connect(?:ion)?Timeout|ReadTimeout|ConnectionClosed|HTTPClient)Error:"
)
_URL: Final = re.compile(r"https?://\S+")

_BUSY: Final = frozenset(("SlowDown", "ServerBusy", "Throttling", "ThrottlingException", "RequestLimitExceeded"))
# Transient, whatever the status; the first two mean that another request for the same object is under way.
_PASSING: Final = frozenset(
    ("ConditionalRequestConflict", "OperationAborted", "RequestTimeout", "InternalError", "ServiceUnavailable")
)
_NO_BUCKET: Final = frozenset(("NoSuchBucket", "ContainerNotFound"))
_LONGEST: Final = 300


@dataclass(frozen=True, slots=True)
class Answer:
    """The store's answer to a failed request, or the reason why there is none."""

    status: int = 0
    """HTTP status; 0 if there was no answer, an unreadable one, or an error despite a success status."""
    code: str = ""
    """The store's own code, such as ``SlowDown``; empty if the answer had none."""
    message: str = ""
    """The store's own message."""
    transport: str = ""
    """Without an answer: where the request ended, such as ``Connect`` or ``Timeout``; empty if none was sent."""
    cause: str = ""
    """Without an answer: the message of the operating system or of the TLS library."""

    @staticmethod
    def of(error: BaseException) -> Answer:
        """Read the answer from an error of obstore."""
        _, _, details = str(error).partition("\nDebug source:")
        if found := _STATUS.search(details):
            status, body = int(found[1]), (found[2] or "").replace('\\"', '"')
            return Answer(0 if status == 200 else status, _first(_CODE, body), _first(_MESSAGE, body)[:_LONGEST])
        if found := _PART.search(details):
            # One object of a request to delete many; Azure gives a status where S3 gives a code.
            status, code = (int(found[2]), "") if found[2].isdigit() else (0, found[2])
            return Answer(status, code, found[3][:_LONGEST])
        if transport := _TRANSPORT.search(details):
            if "kind: Builder" in details:
                return Answer(cause="an http:// endpoint needs permission")
            cause = "no TLS connection" if "InvalidData" in details else _first(_CAUSE, details)
            return Answer(transport=transport[1], cause=cause)
        return Answer()

    @property
    def is_taken(self) -> bool:
        """Whether the object was not created because its name exists."""
        return self.status == 412 or (self.status == 409 and self.code == "BlobAlreadyExists")


def is_behind_end(error: BaseException) -> bool:
    """Whether the requested range begins after the last byte; Azurite's answer is different at the very end."""
    return Answer.of(error).status == 416 or "Wanted range starting at" in str(error)


def storage_error(error: BaseException, operation: str, where: str, *, missing: bool = False) -> StorageError:
    """Turn an error of obstore into a StorageError; with `missing`, a missing object is of kind
    ``object-missing``.

    The error's text can hold a whole request. So the message shows only the store's own message or, if there is none,
    the first line, shortened and without addresses.
    """
    answer = Answer.of(error)
    # An object is missing, rather than the bucket or the source of credentials.
    is_gone = answer.code == "NoSuchKey" or (isinstance(error, FileNotFoundError) and answer.code not in _NO_BUCKET)
    if missing and is_gone:
        kind, hint = ErrorKind.OBJECT_MISSING, "Check the location: it is wrong, or the object was deleted."
    else:
        kind, hint = _judge(answer)
    reason = _reason(answer) or _first_line(error)
    if said := _first(_PROFILE_SAID, str(error)):
        is_transient = _NO_CONNECTION.search(said) is not None
        kind = ErrorKind.STORE_UNAVAILABLE if is_transient else ErrorKind.STORE_FAILED
        reason = f"the profile that AWS_PROFILE names provides no credentials: {_URL.sub('(address)', said)[:_LONGEST]}"
        hint = "Check the profile on this host, or log in again (aws sso login); see docs/object-stores.md."
    if _CREDENTIALS.search(str(error)):
        reason = f"no credentials, and the service that could provide them failed: {reason}"
        hint = "Set credentials in the environment of driver and executors; see docs/object-stores.md."
    return StorageError(f"{operation} {where} failed: {reason.rstrip('.')}.", kind=kind, hint=hint)


def _judge(answer: Answer) -> tuple[ErrorKind, str]:
    status, code = answer.status, answer.code
    # An answer to HEAD never has a code; for a 503 with a code, the code decides.
    if status == 429 or code in _BUSY or (status == 503 and not code):
        return ErrorKind.STORE_BUSY, "Send fewer requests; the store may allow more if they go to several folders."
    if status >= 500 or code in _PASSING or (answer.transport and answer.cause != "no TLS connection"):
        return ErrorKind.STORE_UNAVAILABLE, "This may be temporary; if it persists, check the network and the endpoint."
    if status in (401, 403):
        return ErrorKind.STORE_FAILED, "Check the credentials, and the permissions that docs/object-stores.md lists."
    if status == 404:
        return ErrorKind.STORE_FAILED, "Check the bucket's name, its region and the endpoint; buckets are not created."
    if answer.cause:
        return ErrorKind.STORE_FAILED, "Check the endpoint: http needs AWS_ALLOW_HTTP=true (GOOGLE_..., AZURE_...)."
    return ErrorKind.STORE_FAILED, "Check the bucket's name, its region and the endpoint."


def _reason(answer: Answer) -> str:
    if answer.status or answer.code:
        said = f"{answer.status or ''} {answer.code}".strip()
        return f"{said}: {answer.message}" if answer.message else said
    if not answer.transport:
        return answer.cause
    happened = {"Timeout": "no answer in time", "Connect": "no connection"}.get(answer.transport, "connection lost")
    return f"{happened}: {answer.cause}" if answer.cause else happened


def _first_line(error: BaseException) -> str:
    line = _URL.sub("(address)", str(error).partition("\n")[0])
    return f"{type(error).__name__}: {line[:_LONGEST]}"


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return "" if found is None else found[1]
