"""A store in a folder of HDFS, accessed through the REST interface WebHDFS, which needs no JVM."""

from __future__ import annotations

import http.client
import json
import secrets
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal
from urllib.parse import quote, urlencode, urlsplit

from statelog.errors import ConfigurationError, ErrorKind, StorageError
from statelog.storage.hadoop import Cluster, find_cluster
from statelog.storage.location import HdfsLocation, is_hdfs_path
from statelog.storage.store import ObjectInfo, Store

Method = Literal["GET", "PUT", "DELETE"]


# ---- Requests: first to the active NameNode, which redirects those with data to a DataNode ----


_CONNECT_S: Final = 5.0
_ROUNDS: Final = 8
"""How often a NameNode is asked for a DataNode; for ten minutes it may consider a dead one alive."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The cluster's answer to a request that it has granted."""

    status: int
    body: bytes

    def json(self, *keys: str) -> Any:
        """The value at a path of keys in a JSON object."""
        found = json.loads(self.body)
        for key in keys:
            found = found[key]
        return found


class RefusedError(Exception):
    """The cluster's answer to a request that it has not granted."""

    def __init__(self, status: int, exception: str, reason: str) -> None:
        super().__init__(f"{status} {exception}: {reason}" if exception else f"{status} {reason}")
        self.status = status
        self.exception = exception
        """Simple name of the Java exception; empty if the answer has none."""
        self.reason = reason
        """The cluster's message, on one line."""


class UnansweredError(Exception):
    """No answer came: the request may take effect nevertheless, or later."""


_ABSENT: Final = frozenset(("FileNotFoundException", "ParentNotDirectoryException"))
_INACTIVE: Final = frozenset(("StandbyException", "ObserverRetryOnActiveException"))


_ACTIVE: Final[dict[tuple[str, ...], int]] = {}
"""For the NameNodes of a cluster, the index of the one that this process asks first."""


class Requests:
    """Makes requests to a cluster. Each request has its own connections, which wait no longer than `timeout_s`."""

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s

    def make(self, method: Method, path: str, operation: str, body: memoryview | None = None, **how: str) -> Reply:
        """Make a request to the active NameNode; with a body, or for ``OPEN``, data is exchanged with a DataNode.

        The next NameNode gets the request if one accepts no connection or is not active. A DataNode may also report
        that the NameNode is not active, because an inactive NameNode redirects writes to it. The NameNode that has
        answered is asked first the next time, and one that does not answer is asked last.
        """
        nodes, parameters = self._cluster.name_nodes, {"op": operation, **how}
        first = _ACTIVE.get(nodes, 0)
        failure: Exception = UnansweredError("there is no NameNode")
        for number in (*range(first, len(nodes)), *range(first)):
            try:
                reply = self._exchange(nodes[number], method, path, parameters, body)
                _ACTIVE[nodes] = number
                return reply
            except _NoConnectionError as error:
                failure = UnansweredError(str(error))
            except UnansweredError:
                _ACTIVE[nodes] = (number + 1) % len(nodes)
                raise
            except RefusedError as error:
                if error.exception not in _INACTIVE:
                    raise
                failure = error
        raise failure

    def _exchange(
        self, address: str, method: Method, path: str, parameters: dict[str, str], body: memoryview | None
    ) -> Reply:
        """Make a request to one NameNode; while the DataNodes that it names are unreachable, ask for another."""
        unreachable: set[str] = set()
        failure = ""
        for _ in range(_ROUNDS):
            asked = {"excludedatanodes": ",".join(sorted(unreachable)), **parameters} if unreachable else parameters
            query = urlencode([*asked.items(), *self._cluster.identity])
            reply, target = self._send(method, f"{address}/webhdfs/v1{quote(path)}?{query}", None)
            if not target and body is not None:
                raise RefusedError(reply.status, "", "the answer names no DataNode for the data")
            if not target:
                return reply
            try:
                return self._send(method, target, body)[0]
            except _NoConnectionError as error:
                unreachable.add(str(urlsplit(target).hostname))
                failure = str(error)
        raise UnansweredError(f"none of the DataNodes that the NameNode names accepts a connection: {failure}")

    def _send(self, method: Method, url: str, body: memoryview | None) -> tuple[Reply, str]:
        """Send a request to one address. The text is the address that the request is redirected to, if any."""
        where = urlsplit(url)
        host = f"{where.hostname}:{where.port}"
        kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
        with closing(kind(str(where.hostname), where.port, timeout=_CONNECT_S)) as connection:
            try:
                connection.connect()
            except ssl.SSLError as error:
                raise RefusedError(0, "", f"no TLS connection to {host}: {error.reason}") from None
            except OSError as error:
                raise _NoConnectionError(f"no connection to {host}: {error.strerror or error}") from None
            connection.sock.settimeout(self._timeout_s)
            try:
                headers = {"Content-Type": "application/octet-stream"}
                connection.request(method, f"{where.path}?{where.query}", body, headers)
                answer = connection.getresponse()
                data = answer.read()
            except (OSError, http.client.HTTPException) as error:
                said = f"no answer in {self._timeout_s:g} s" if isinstance(error, TimeoutError) else "connection lost"
                raise UnansweredError(f"{said}: {host}") from None
        if answer.status == 307:
            return Reply(answer.status, data), answer.headers["Location"]
        if answer.status >= 300:
            raise _refusal(answer.status, answer.reason, data)
        return Reply(answer.status, data), ""


class _NoConnectionError(Exception):
    """The request was not sent."""


def _refusal(status: int, reason: str, body: bytes) -> RefusedError:
    with suppress(ValueError, KeyError, TypeError):
        told = json.loads(body)["RemoteException"]
        return RefusedError(status, str(told["exception"]), _one_line(str(told["message"])))
    return RefusedError(status, "", reason)


def _one_line(message: str) -> str:
    """The first line of a message, without the Java stack trace that follows."""
    return message.partition("\n")[0][:_LONGEST].rstrip(". ")


# ---- The store ----


# Hadoop's default block size.
_BLOCK_BYTES: Final = 128 << 20
_WHOLE_BLOCKS: Final = 1 << 20
_LONGEST: Final = 300


class HdfsStore(Store):
    """Objects as files below a folder of HDFS, which the first write creates.

    An object is written as one block to a temporary file in the same directory. Every DataNode that gets a copy syncs
    the block to its disk when the block is closed. Then the file is renamed. The NameNode renames atomically and, if
    asked to, without overwriting a file. Temporary files of killed writers stay until :meth:`remove_unfinished`:
    :meth:`list` hides them. `new_token` makes their names. Files and directories are private to their owner.

    Each process reads Hadoop's settings and credentials from its environment, anew for each call. A pickled store
    carries only its location and `timeout_s`, the longest wait for an answer.

    A call is made once; :class:`statelog.storage.retry.RetryingStore` knows which ones may be repeated. If the answer
    to a rename is lost, the file at its target shows the outcome.
    """

    def __init__(
        self, location: str, *, timeout_s: float = 60.0, new_token: Callable[[], str] = secrets.token_hex
    ) -> None:
        where = HdfsLocation.parse(location)
        self._location = location.rstrip("/")
        self._authority = where.authority
        self._root = f"/{where.folder}" if where.folder else ""
        self._timeout_s = timeout_s
        self._new_token = new_token
        self._has_root = False

    def __repr__(self) -> str:
        return f"HdfsStore({self._location!r})"

    def __str__(self) -> str:
        return self._location

    def __reduce__(self) -> tuple[object, ...]:
        return (partial(HdfsStore, timeout_s=self._timeout_s, new_token=self._new_token), (self._location,))

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        path = self._path(name)
        with self._requests("read", name, missing=True) as requests:
            if length == 0:
                _require_file(requests, path)
                return b""
            part = {} if length is None else {"length": str(length)}
            try:
                return requests.make("GET", path, "OPEN", None, offset=str(offset), **part).body
            except RefusedError as error:
                if "out of the range" in error.reason:  # the range begins after the last byte
                    return b""
                raise

    def size_bytes(self, name: str) -> int:
        path = self._path(name)
        with self._requests("size", name, missing=True) as requests:
            return _require_file(requests, path)

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._write("put", name, data, overwrites=True)

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        return self._write("put_if_absent", name, data, overwrites=False)

    def delete(self, names: list[str]) -> None:
        paths = {self._path(name): name for name in names}
        for path, name in paths.items():
            with self._requests("delete", name) as requests:
                _remove(requests, path)
        # Directories count toward a quota, so they are removed as soon as they are empty.
        for directory in sorted({path.rpartition("/")[0] for path in paths}):
            with self._requests("delete from", directory[len(self._root) + 1 :]) as requests:
                while directory != self._root and _remove(requests, directory):
                    directory = directory.rpartition("/")[0]

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        folder, slash, start = prefix.rpartition("/")
        if start == ".." or (slash and not folder):
            raise _bad_name(prefix)
        top = self._path(folder) if folder else self._root
        with self._requests("list", prefix) as requests:
            found = [one for one in _walk(requests, top, start) if not _is_temporary(one.name)]
        infos = (ObjectInfo(one.name[len(self._root) + 1 :], one.size_bytes, one.modified_s) for one in found)
        return sorted(infos, key=lambda info: info.name)

    def remove_unfinished(self, prefix: str, before_s: float) -> None:
        top = self._path(prefix.rstrip("/")) if prefix else self._root
        with self._requests("remove unfinished files of", prefix) as requests:
            for one in list(_walk(requests, top, "")):
                if _is_temporary(one.name) and one.modified_s < before_s:
                    _remove(requests, one.name)

    def _path(self, name: str) -> str:
        path = f"{self._root}/{name}"
        if not is_hdfs_path(path[1:]) or not is_hdfs_path(name) or _is_temporary(name):
            raise _bad_name(name)
        return path

    def _write(self, operation: str, name: str, data: bytes | memoryview, *, overwrites: bool) -> bool:
        """Write an object; False if a file has its name and must not be overwritten."""
        path, view = self._path(name), memoryview(data).cast("B")
        temporary = f"{path.rpartition('/')[0]}/.{self._new_token()}.tmp"
        with self._requests(operation, name) as requests:
            if not self._has_root:
                requests.make("PUT", self._root or "/", "MKDIRS", permission="700")
                self._has_root = True
            try:
                _create(requests, temporary, view)
                is_renamed = _rename(requests, temporary, path, view, overwrites)
            except RefusedError:
                with suppress(RefusedError, UnansweredError):
                    _remove(requests, temporary)
                raise
            if not is_renamed:
                _remove(requests, temporary)
            return is_renamed

    @contextmanager
    def _requests(self, operation: str, name: str, *, missing: bool = False) -> Iterator[Requests]:
        """Provide the means for requests, and turn their errors into StorageErrors.

        With `missing`, the error of a missing file is of kind ``object-missing``.
        """
        where = f"{operation} {self._location}/{name}"
        try:
            yield Requests(find_cluster(self._authority), self._timeout_s)
        except UnansweredError as error:
            raise StorageError(
                f"{where} failed: {error}.",
                kind=ErrorKind.STORE_UNAVAILABLE,
                hint="If this persists, check the location's host, dfs.namenode.http-address in the files of"
                " HADOOP_CONF_DIR on this host, and whether this host can reach WebHDFS; see docs/hdfs.md.",
            ) from None
        except RefusedError as error:
            if missing and error.exception in _ABSENT:
                kind, hint = ErrorKind.OBJECT_MISSING, "Check the location: it is wrong, or the object was deleted."
            else:
                kind, hint = _judge(error)
            raise StorageError(f"{where} failed: {error}.", kind=kind, hint=hint) from None


def _bad_name(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name!r} is not a valid object name in HDFS.",
        hint="Use a relative name with '/' between its parts, without colons or control characters. No part may be"
        " empty, '.', '..' or '.snapshot'.",
    )


def _is_temporary(path: str) -> bool:
    base_name = path.rpartition("/")[2]
    return base_name.startswith(".") and base_name.endswith(".tmp")


def _require_file(requests: Requests, path: str) -> int:
    """The size of a file."""
    status = requests.make("GET", path, "GETFILESTATUS").json("FileStatus")
    if status["type"] != "FILE":
        raise RefusedError(404, "FileNotFoundException", "it is a directory")
    return int(status["length"])


def _create(requests: Requests, path: str, data: memoryview) -> None:
    """Write a file and sync it. A missing directory is created with the permissions of its parent.

    The file is one block, because HDFS syncs a block when it is closed.
    """
    blocks = -(-len(data) // _WHOLE_BLOCKS) * _WHOLE_BLOCKS
    requests.make(
        *("PUT", path, "CREATE", data),
        createflag="CREATE,SYNC_BLOCK",
        blocksize=str(max(blocks, _BLOCK_BYTES)),
        permission="600",
    )


def _rename(requests: Requests, source: str, target: str, data: memoryview, overwrites: bool) -> bool:
    """Rename a file whose content is `data`; False if the target exists and must not be overwritten."""
    try:
        requests.make("PUT", source, "RENAME", destination=target, renameoptions="OVERWRITE" if overwrites else "NONE")
        return True
    except RefusedError as error:
        if error.exception == "FileAlreadyExistsException" and not overwrites:
            return False
        raise
    except UnansweredError:
        with suppress(RefusedError):
            found = requests.make("GET", target, "OPEN").body
            if found == data:
                return True
            if not overwrites:
                return False
        raise


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    size_bytes: int
    modified_s: float


def _walk(requests: Requests, directory: str, start: str) -> Iterator[_File]:
    """The files in and below a directory whose path from there begins with `start`."""
    folders, after = [], ""
    while True:
        try:
            listed = requests.make("GET", directory or "/", "LISTSTATUS_BATCH", startafter=after)
        except RefusedError as error:
            if error.exception not in _ABSENT:
                raise
            break  # also if the directory has vanished in the meantime
        part = listed.json("DirectoryListing")
        for status in part["partialListing"]["FileStatuses"]["FileStatus"]:
            after = status["pathSuffix"]
            if not after or not after.startswith(start):
                continue
            if status["type"] == "DIRECTORY":
                folders.append(f"{directory}/{after}")
            else:
                yield _File(f"{directory}/{after}", int(status["length"]), int(status["modificationTime"]) / 1000)
        if not after or not part["remainingEntries"]:
            break
    for folder in folders:
        yield from _walk(requests, folder, "")


def _remove(requests: Requests, path: str) -> bool:
    """Remove a file or an empty directory; False if it is not there, or not empty."""
    try:
        return bool(requests.make("DELETE", path, "DELETE", recursive="false").json("boolean"))
    except RefusedError as error:
        if error.exception in _ABSENT or error.exception == "PathIsNotEmptyDirectoryException":
            return False
        if error.exception == "AccessControlException" and "(is not a directory)" in error.reason:
            return False  # the path leads through a file
        raise


def _judge(error: RefusedError) -> tuple[ErrorKind, str]:
    """The kind of a refusal, and what to do about it."""
    name = error.exception
    if name == "RetriableException" and "too busy" in error.reason:
        return ErrorKind.STORE_BUSY, "Reduce the load: the NameNode asks for fewer requests."
    if name == "SafeModeException" or "safe mode" in error.reason:
        return ErrorKind.STORE_UNAVAILABLE, "Run hdfs dfsadmin -safemode get: the safe mode may be temporary."
    if name in _INACTIVE or name == "RetriableException":
        return ErrorKind.STORE_UNAVAILABLE, "No NameNode is active, perhaps briefly: hdfs haadmin -getAllServiceState."
    if "minReplication nodes" in error.reason or "Failed to find datanode" in error.reason:
        return ErrorKind.STORE_UNAVAILABLE, "Too few DataNodes are alive, or they are full: run hdfs dfsadmin -report."
    if name.endswith("QuotaExceededException") or name == "QuotaByStorageTypeExceededException":
        return ErrorKind.STORE_FAILED, "Raise the quota (hdfs dfsadmin -setQuota, -setSpaceQuota), or delete files."
    if error.status == 401 or name in ("InvalidToken", "SecurityException", "AuthenticationException"):
        return ErrorKind.STORE_FAILED, (
            "The cluster requires Kerberos: set HADOOP_CONF_DIR to the folder of its settings, and"
            " HADOOP_TOKEN_FILE_LOCATION to a file with a delegation token that is still valid; see docs/hdfs.md."
        )
    if name == "AccessControlException":
        return ErrorKind.STORE_FAILED, "Make that user the owner, or allow the user to read and write the folder."
    if error.status >= 500 and name not in ("IllegalArgumentException", "UnsupportedOperationException"):
        return ErrorKind.STORE_UNAVAILABLE, "If this persists, see the NameNode's and the DataNodes' logs."
    return ErrorKind.STORE_FAILED, "See the NameNode's log, and docs/hdfs.md."
