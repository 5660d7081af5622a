"""Checks a location, from the driver and from executors; everything is written to one folder, which is removed."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from statelog.clock import Clock
from statelog.errors import ConfigurationError, ErrorKind, StatelogError, StorageError
from statelog.storage import Store
from statelog.storage.hadoop import says_sync_on_close
from statelog.storage.location import HDFS, OBJECT_STORES, ObjectLocation, scheme_of
from statelog.storage.open import check_put_if_absent, local_path
from statelog.storage.store import if_present
from statelog.tools.doctor.finding import Finding, Findings, Place

CHECK: Final = "location"
SHARED: Final = "location-shared"
DURABILITY: Final = "durability"

_CLOCK_LIMIT_S: Final = 60.0
_DENIED: Final = re.compile(r"failed: 40[13]\b")
_NOT_SHARED: Final = (
    "Name an object store, or a directory that the driver and all executors mount under one path; for NFS see"
    " docs/limits.md."
)


@dataclass(frozen=True)
class Probe:
    """The folder below a location in which a diagnosis writes, and the objects in it that all processes look at."""

    location: str
    folder: str

    @property
    def witness(self) -> str:
        """The object that the driver writes and executors read."""
        return f"{self.folder}/witness"

    @property
    def race(self) -> str:
        """The object that each executor tries to create."""
        return f"{self.folder}/race"

    @property
    def content(self) -> bytes:
        """The content of the objects, except the race's; no other diagnosis has the same content."""
        return self.folder.encode()


@dataclass(frozen=True)
class Marks:
    """What an executor has done in the probe's folder, for the driver to compare."""

    written: str
    """An object with the probe's content."""
    won: bool
    """Whether it has created the race's object."""


@dataclass
class Traces:
    """What a diagnosis may have to remove at its end."""

    made: list[Path] = field(default_factory=list)
    """The directories of the location that its first write makes, the innermost first."""
    is_written: bool = False
    """Whether anything was written for certain."""


def new_probe(location: str) -> Probe:
    """A probe that no other diagnosis has."""
    return Probe(location, f"probe/doctor-{secrets.token_hex(8)}")


# ---- From the driver ----


def check_from_driver(store: Store, probe: Probe, place: Place, clock: Clock, traces: Traces) -> Findings:
    """Leave the witness for executors, check that the store keeps its contract, and compare the clocks.

    `traces` notes what is to be removed.
    """
    path = _path(probe.location)
    if path is not None:
        if path.exists() and not path.is_dir():
            yield place.error(CHECK, f"{path} is not a directory.", "Name a directory; it is created if it is missing.")
            return
        traces.made += [one for one in (path, *path.parents) if not one.exists()]
    try:
        store.put_if_absent(probe.witness, probe.content)
        now_s = clock.now_s()
        traces.is_written = True
        listed = store.list(probe.witness)
    except StatelogError as error:
        yield _failed(place, probe.location, error)
        return
    yield from check_store(store, probe, place)
    if scheme_of(probe.location) == HDFS:
        yield _durability_finding(place)
    if listed:
        yield _clock_finding(place, listed[0].modified_s - now_s)


def check_store(store: Store, probe: Probe, place: Place) -> Generator[Finding, None, bool]:
    """Check that a store keeps its contract, as far as one process can see; return whether it does."""
    name = f"{probe.folder}/{secrets.token_hex(8)}"
    try:
        try:
            store.put_if_absent(name, probe.content)
            check_put_if_absent(store, probe.folder)
        except StatelogError as error:
            yield _failed(place, probe.location, error)
            return False
        is_kept = True
        for step in (_read, _append, _list, _delete):
            try:
                step(store, name, probe)
            except StatelogError as error:
                is_kept = False
                yield _failed(place, probe.location, error)
        if is_kept:
            done = "creates an object only if it is absent, reads, appends to, lists and deletes it"
            yield place.ok(CHECK, f"{probe.location} {done if store.can_append else done.replace(' appends to,', '')}.")
        return is_kept
    finally:
        with suppress(StatelogError):
            store.delete([name])


def _read(store: Store, name: str, probe: Probe) -> None:
    content = probe.content
    _require(store.read(name) == content, probe, f"{name} was written, but other bytes were read")
    _require(store.read(name, offset=1, length=2) == content[1:3], probe, f"a part of {name} has other bytes")
    _require(store.size_bytes(name) == len(content), probe, f"{name} has another size than what was written")


def _append(store: Store, name: str, probe: Probe) -> None:
    if store.can_append:
        content = probe.content
        store.append(name, [b"1", b"23"], at=len(content))
        store.append(name, [b"4"], at=len(content) + 1)
        store.sync(name, start=0, end=len(content) + 2)
        _require(store.read(name) == content + b"14", probe, f"bytes were appended to {name}, but others were read")


def _list(store: Store, name: str, probe: Probe) -> None:
    listed = [info.name for info in store.list(f"{probe.folder}/")]
    _require(name in listed, probe, f"{name} was written, but is not listed")


def _delete(store: Store, name: str, probe: Probe) -> None:
    store.delete([name])
    try:
        store.read(name)
    except StorageError as error:
        if error.kind is ErrorKind.OBJECT_MISSING:
            return
        raise StorageError(
            f"{probe.location} does not report a deleted object as missing: {error.message}",
            hint="S3 needs the permission to list the bucket to do so.",
        ) from error
    _require(False, probe, f"{name} was deleted, but can still be read")


def _require(is_kept: bool, probe: Probe, broken: str) -> None:
    if not is_kept:
        raise ConfigurationError(
            f"{probe.location} is not safe: {broken}.",
            kind=ErrorKind.STORE_UNSAFE,
            hint="Use a store that keeps the promises in docs/stores.md; for NFS see docs/limits.md.",
        )


def _durability_finding(place: Place) -> Finding:
    synced = "DataNodes sync each object to their disks"
    if says_sync_on_close():
        return place.ok(DURABILITY, f"{synced}, and the folders that the objects are in.")
    return place.warning(
        DURABILITY,
        f"{synced} but, according to the settings of this host, not the folders that the objects are in.",
        "If all copies can lose power at once, set dfs.datanode.synconclose=true for the DataNodes, and in the settings"
        " of this host; see docs/hdfs.md.",
    )


def _clock_finding(place: Place, ahead_s: float) -> Finding:
    off = f"The clock of the location is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the driver's."
    if abs(ahead_s) <= _CLOCK_LIMIT_S:
        return place.ok("clock", off)
    return place.warning(
        "clock", off, "Use NTP to set the clocks: the ages of orphans and pins are measured between the two."
    )


def _failed(place: Place, location: str, error: StatelogError) -> Finding:
    found = place.failed(CHECK, error)
    remedy = f"{found.remedy} {_remedy(location, error.message)}".strip()
    return place.error(CHECK, found.found, remedy)


def _remedy(location: str, message: str) -> str:
    """What a denied request needs at this location; empty for any other failure."""
    scheme = scheme_of(location)
    if scheme == HDFS:
        return ""  # the cluster's message names the user
    if scheme not in OBJECT_STORES:
        is_denied = "Permission denied" in message or "Operation not permitted" in message
        return f"The process runs as user {os.geteuid()}, group {os.getegid()}." if is_denied else ""
    if not _DENIED.search(message):
        return ""
    where = ObjectLocation.parse(location)
    objects = f"{where.bucket}/{where.folder}/*" if where.folder else f"{where.bucket}/*"
    return {
        "s3": f"Grant s3:GetObject, s3:PutObject and s3:DeleteObject for arn:aws:s3:::{objects}, and s3:ListBucket"
        f" for arn:aws:s3:::{where.bucket}.",
        "gs": f"Grant the role Storage Object User for the bucket {where.bucket}.",
        "az": f"Grant the role Storage Blob Data Contributor for the container {where.bucket}.",
    }[where.service]


# ---- From an executor ----


def check_from_executor(store: Store, probe: Probe, place: Place, leave: Callable[[Marks], None]) -> Findings:
    """Check that this process sees the driver's object, and all that the driver has checked; leave marks for it.

    If the driver's object is not seen here, nothing is written: this is another location.
    """
    try:
        seen = if_present(lambda: store.read(probe.witness))
    except StatelogError as error:
        yield _failed(place, probe.location, error)
        return
    if seen != probe.content:
        yield place.error(
            SHARED, f"{probe.witness} in {probe.location}, which the driver has written, is not seen here.", _NOT_SHARED
        )
        return
    token = secrets.token_hex(8)
    is_fit = yield from check_store(store, probe, place)
    # Not after the driver has removed the folder: Spark does not stop a Python worker at once.
    if is_fit and if_present(lambda: store.read(probe.witness)) == probe.content:
        written = f"{probe.folder}/mark-{token}"
        won = store.put_if_absent(probe.race, token.encode())
        store.put(written, probe.content)
        leave(Marks(written, won))


def check_marks(store: Store, probe: Probe, place: Place, marks: list[tuple[Place, Marks]]) -> Findings:
    """Check that the driver sees what the executors have written, and that one of them has won the race."""
    unseen = [where for where, one in marks if if_present(lambda: store.read(one.written)) != probe.content]  # noqa: B023 - called at once
    for where in unseen:
        yield place.error(
            SHARED,
            f"{probe.location} does not show the driver what {where.where} ({where.host}) has written.",
            _NOT_SHARED,
        )
    winners = [where for where, one in marks if one.won]
    if len(winners) > 1:
        who = ", ".join(f"{where.where} ({where.host})" for where in winners)
        yield place.error(
            CHECK,
            f"{probe.location} is not safe: {who} have created the same object.",
            "Two drivers could both commit there. Use a store from docs/object-stores.md, or a file system whose hard"
            " links work between hosts.",
        )
    if marks and not unseen and len(winners) <= 1:
        seen = ", ".join(where.where for where, _ in marks)
        yield place.ok(SHARED, f"The driver and {seen} see each other's objects, and no two created the same one.")


# ---- The end ----


def _path(location: str) -> Path | None:
    """The directory of a location; None if it is elsewhere."""
    return Path(local_path(location)) if scheme_of(location) in ("", "file") else None


def remove_probe(store: Store, probe: Probe, place: Place, traces: Traces) -> Findings:
    """Remove everything that the diagnosis has written: its folder, and directories that it has made, if empty.

    A failure is a finding only if anything was written.
    """
    path = _path(probe.location)
    try:
        store.delete([info.name for info in store.list(f"{probe.folder}/")])
        if path is not None:  # files that a killed process has not finished are not listed
            shutil.rmtree(path / probe.folder, ignore_errors=True)
    except StatelogError as error:
        if traces.is_written:
            told = f"{probe.folder} in {probe.location} could not be removed: {error.message}"
            yield place.warning(CHECK, told, f"Remove {probe.folder} yourself.")
    if path is not None:
        for directory in [(path / probe.folder).parent, *traces.made]:
            with suppress(OSError):
                directory.rmdir()
