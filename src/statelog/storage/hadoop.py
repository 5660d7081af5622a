"""Hadoop's settings and credentials, as far as a client of HDFS over HTTP needs them."""

from __future__ import annotations

import base64
import getpass
import os
import socket
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from statelog.errors import ConfigurationError
from statelog.storage.location import HDFS_PORT

_FILES: Final = ("core-site.xml", "hdfs-site.xml")
_WEB_PORTS: Final = {"http": 9870, "https": 9871}


@dataclass(frozen=True, slots=True)
class Cluster:
    """How a cluster is reached."""

    name_nodes: tuple[str, ...]
    """Addresses of the NameNodes, such as ``http://host:9870``; if there are several, one is active."""
    identity: tuple[tuple[str, str], ...]
    """Parameters of a request that say who makes it."""


def find_cluster(authority: str) -> Cluster:
    """Find the cluster of a location's name service, or of its host and port, in Hadoop's settings and the environment.

    Raises ConfigurationError if the settings cannot be read.
    """
    settings = _settings()
    return Cluster(tuple(_name_nodes(authority, settings)), _identity(authority, settings))


def says_sync_on_close() -> bool:
    """Whether DataNodes sync a block's folder when the block is closed, by this host's settings; theirs may differ."""
    return _settings().get("dfs.datanode.synconclose", "").lower() == "true"


# ---- Settings ----


def _settings() -> dict[str, str]:
    """The settings in the files of ``HADOOP_CONF_DIR``, or of the installation that ``HADOOP_HOME`` names."""
    folder = os.environ.get("HADOOP_CONF_DIR")
    if not folder and (home := os.environ.get("HADOOP_HOME")):
        folder = f"{home}/etc/hadoop"
    found = {}
    for path in (Path(folder, name) for name in _FILES) if folder else ():
        try:
            root = ElementTree.parse(path).getroot()
        except FileNotFoundError:
            continue
        except (OSError, ElementTree.ParseError) as error:
            raise ConfigurationError(
                f"Hadoop's settings in {path} cannot be read: {error}.",
                hint="Set HADOOP_CONF_DIR to a folder with Hadoop's core-site.xml and hdfs-site.xml.",
            ) from None
        for one in root.iter("property"):
            found[one.findtext("name", "").strip()] = one.findtext("value", "").strip()
    return found


def _name_nodes(authority: str, settings: Mapping[str, str]) -> Iterator[str]:
    scheme = "https" if settings.get("dfs.http.policy") == "HTTPS_ONLY" else "http"
    web, rpc = f"dfs.namenode.{scheme}-address", "dfs.namenode.rpc-address"
    ids = [one.strip() for one in settings.get(f"dfs.ha.namenodes.{authority}", "").split(",") if one.strip()]
    if ids or f"{rpc}.{authority}" in settings:
        for suffix in [f"{authority}.{one}" for one in ids] or [authority]:
            host = _host(settings.get(f"{rpc}.{suffix}", authority))
            yield _address(scheme, settings.get(f"{web}.{suffix}", ""), host)
        return
    own = {settings.get("fs.defaultFS", "").removeprefix("hdfs://").rstrip("/"), settings.get(rpc, "")}
    is_own = _with_port(authority) in {_with_port(one) for one in own if one}
    yield _address(scheme, settings.get(web, "") if is_own else "", _host(authority))


def _address(scheme: str, setting: str, host: str) -> str:
    """The address of a NameNode; `setting` may be empty, or have the host 0.0.0.0."""
    named, _, port = setting.rpartition(":")
    if named and named != "0.0.0.0":
        host = named
    return f"{scheme}://{host}:{port or _WEB_PORTS[scheme]}"


def _host(authority: str) -> str:
    host, colon, port = authority.rpartition(":")
    return host if colon and port.isdecimal() else authority


def _with_port(authority: str) -> str:
    return authority if _host(authority) != authority else f"{authority}:{HDFS_PORT}"


# ---- Credentials ----


def _identity(authority: str, settings: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    if settings.get("hadoop.security.authentication", "simple") == "simple":
        # Executors get the driver's user as SPARK_USER; the process may run as another user, as on YARN.
        named = os.environ.get("HADOOP_USER_NAME") or os.environ.get("SPARK_USER")
        return (("user.name", named or getpass.getuser()),)
    where = os.environ.get("HADOOP_TOKEN_FILE_LOCATION")
    hint = (
        "YARN gives its containers such a file. Elsewhere create one (hdfs fetchdt FILE) and name it in the environment"
        " of driver and executors; see docs/hdfs.md."
    )
    if not where:
        raise ConfigurationError(
            f"hdfs://{authority} requires Kerberos, but HADOOP_TOKEN_FILE_LOCATION names no file with a delegation"
            " token.",
            hint=hint,
        )
    try:
        tokens = [one for one in read_tokens(Path(where).read_bytes()) if one.kind == "HDFS_DELEGATION_TOKEN"]
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"The delegation tokens in {where} cannot be read: {error}.", hint=hint) from None
    services = _services(authority)
    fitting = [one for one in tokens if one.service in services] or (tokens if len(tokens) == 1 else [])
    if not fitting:
        raise ConfigurationError(f"{where} has no delegation token for hdfs://{authority}.", hint=hint)
    return (("delegation", fitting[0].text),)


def _services(authority: str) -> set[str]:
    """The names under which Hadoop keeps the token of a cluster."""
    full = _with_port(authority)
    found = {f"ha-hdfs:{authority}", full}
    host, _, port = full.rpartition(":")
    with suppress(OSError):
        found.add(f"{socket.gethostbyname(host)}:{port}")
    return found


@dataclass(frozen=True, slots=True)
class Token:
    """A delegation token; its password is a secret."""

    identifier: bytes
    password: bytes
    kind: str
    service: str

    @property
    def text(self) -> str:
        """The token as a parameter of a request, in Hadoop's encoding."""
        parts = (self.identifier, self.password, self.kind.encode(), self.service.encode())
        data = b"".join(_encode_length(len(part)) + part for part in parts)
        return base64.urlsafe_b64encode(data).decode().rstrip("=")

    def __repr__(self) -> str:
        return f"Token({self.kind!r}, {self.service!r})"


_MAGIC: Final = b"HDTS"


def read_tokens(data: bytes) -> list[Token]:
    """Read a file of tokens as Hadoop writes it, in its older or its newer format; ValueError if it is malformed."""
    if data[:4] != _MAGIC or len(data) < 5 or data[4] > 1:
        raise ValueError("the file is not a Hadoop token file")
    try:
        return list(_read_older(data) if data[4] == 0 else _read_newer(data))
    except (IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError("the file ends too early, or is damaged") from error


def _read_older(data: bytes) -> Iterator[Token]:
    number, at = _read_length(data, 5)
    for _ in range(number):
        parts = []
        for _ in range(5):  # an alias, and the four fields
            length, at = _read_length(data, at)
            parts.append(_cut(data, at, length))
            at += length
        yield Token(parts[1], parts[2], parts[3].decode(), parts[4].decode())


def _read_newer(data: bytes) -> Iterator[Token]:
    """Read the Protocol Buffers format: a list of tokens with their aliases. All fields are byte strings."""
    length, at = _read_varint(data, 5)
    for number, entry in _fields(_cut(data, at, length)):
        if number == 1:
            for inner_number, inner in _fields(entry):
                if inner_number == 2:
                    fields = dict(_fields(inner))
                    yield Token(fields[1], fields[2], fields[3].decode(), fields[4].decode())


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        if tag & 7 != 2:
            raise ValueError("the file has fields that are not byte strings")
        length, at = _read_varint(data, at)
        yield tag >> 3, _cut(data, at, length)
        at += length


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at


def _read_length(data: bytes, at: int) -> tuple[int, int]:
    """Read a length as Hadoop writes it: one byte up to 127, else a byte that says how many follow."""
    first = data[at]
    if first < 128:
        return first, at + 1
    size = 256 - first - 112
    if not 1 <= size <= 8:
        raise ValueError("the file has a negative length")
    return int.from_bytes(_cut(data, at + 1, size), "big"), at + 1 + size


def _encode_length(length: int) -> bytes:
    if length < 128:
        return bytes([length])
    size = (length.bit_length() + 7) // 8
    return bytes([256 - 112 - size]) + length.to_bytes(size, "big")


def _cut(data: bytes, at: int, length: int) -> bytes:
    if at + length > len(data):
        raise IndexError
    return data[at : at + length]
