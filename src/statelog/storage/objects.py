"""A store in a folder of a bucket: Amazon S3 and servers that speak its protocol, Google Cloud Storage, Azure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from obstore.exceptions import AlreadyExistsError, BaseError

from statelog.errors import ConfigurationError, ErrorKind, StorageError
from statelog.storage.location import ObjectLocation
from statelog.storage.object_client import Bucket, Client, Clients
from statelog.storage.object_errors import Answer, is_behind_end, storage_error
from statelog.storage.store import ObjectInfo, Store

# The client library's threads and connections belong to the process, so the clients do too.
_CLIENTS: Final = Clients()
# Azure takes no more in one request.
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
                # The library raises this for every conflict, also for one with a write or delete whose outcome is open.
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
                f"{name!r} is not a name of an object in Azure, which takes a backslash for a slash.",
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
        """Give the client, and turn its errors into StorageErrors; `missing` as in :func:`storage_error`."""
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
        f"{name!r} is not a name of an object.",
        hint="Names are relative, with '/' between their parts, without control characters, empty, '.' or '..' parts.",
    )
