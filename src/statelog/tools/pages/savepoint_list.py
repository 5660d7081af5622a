"""Finds the savepoints of a query in folders: no query knows where its savepoints are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from statelog.errors import StatelogError, StorageError
from statelog.log.open import STATE_FOLDER, open_location
from statelog.queries.save import UNFINISHED
from statelog.reading.savepoint import MANIFEST, Manifest
from statelog.storage import ObjectInfo, Store

FOLDER: Final = "savepoints"
"""Where they are looked for beside the state."""
_READ: Final = 200
"""Manifests that are read, at most."""


@dataclass(frozen=True)
class SavepointRow:
    """A savepoint."""

    place: str
    query_id: str
    batch: int
    taken_ms: int
    operators: tuple[str, ...]
    rows: int
    size_bytes: int


@dataclass(frozen=True)
class SavepointList:
    """The savepoints in some folders."""

    folders: tuple[str, ...]
    found: tuple[SavepointRow, ...] = ()
    """Those of the query, the newest first."""
    others: int = 0
    """Number of those of other queries."""
    unfinished: tuple[str, ...] = ()
    """Places that a savepoint is being written to, or that an interrupted one has left."""
    problems: tuple[str, ...] = ()
    """Folders and manifests that cannot be read."""
    unread: int = 0
    """Older ones beyond the number that is read."""


class SavepointFolders:
    """Some folders; what was read of them once is not read again."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = [folder.rstrip("/") or folder for folder in folders]
        for folder in self._folders:
            open_location(folder)  # a name that is not a location is an error at once
        self._rows: dict[tuple[str, ObjectInfo], SavepointRow] = {}

    def find(self, locations: Sequence[str], query_ids: Collection[str]) -> SavepointList:
        """Find the savepoints of a query in the folders, and beside its state at `locations`."""
        folders = list(dict.fromkeys([*self._folders, *(_beside(location) for location in locations)]))
        manifests: list[tuple[Store, str, ObjectInfo]] = []
        unfinished: list[str] = []
        problems: list[str] = []
        for folder in folders:
            store = open_location(folder)
            try:
                infos = [info for info in store.list() if info.name.count("/") <= 1]
            except StorageError as error:
                problems.append(error.message)
                continue
            manifests += [(store, folder, info) for info in infos if info.name.rpartition("/")[2] == MANIFEST]
            unfinished += [_place(folder, info) for info in infos if info.name.rpartition("/")[2] == UNFINISHED]
        manifests.sort(key=lambda one: one[2].modified_s, reverse=True)
        # A savepoint may be given by itself, and be in another of the folders.
        rows = list({row.place: row for row in self._read(manifests[:_READ], problems)}.values())
        found = [row for row in rows if row.query_id in query_ids]
        return SavepointList(
            folders=tuple(folders),
            found=tuple(sorted(found, key=lambda row: row.taken_ms, reverse=True)),
            others=len(rows) - len(found),
            unfinished=tuple(dict.fromkeys(unfinished)),
            problems=tuple(problems),
            unread=max(0, len(manifests) - _READ),
        )

    def _read(self, manifests: Sequence[tuple[Store, str, ObjectInfo]], problems: list[str]) -> Iterator[SavepointRow]:
        for store, folder, info in manifests:
            known = self._rows.get((folder, info))
            if known is None:
                place = _place(folder, info)
                try:
                    known = _row(place, Manifest.read(store if place == folder else open_location(place), place))
                except StatelogError as error:
                    problems.append(error.message)
                    continue
                self._rows[folder, info] = known
            yield known


def _beside(location: str) -> str:
    """The folder of savepoints of a checkpointLocation, also if its folder of state is given."""
    home = location.rstrip("/")
    return f"{home.removesuffix(f'/{STATE_FOLDER}')}/{FOLDER}"


def _place(folder: str, info: ObjectInfo) -> str:
    """The savepoint that an object directly below its place belongs to."""
    name = info.name.rpartition("/")[0]
    return f"{folder}/{name}" if name else folder


def _row(place: str, manifest: Manifest) -> SavepointRow:
    states = [state for operator in manifest.operators for state in operator.states]
    return SavepointRow(
        place=place,
        query_id=manifest.query_id,
        batch=manifest.batch,
        taken_ms=manifest.taken_ms,
        operators=tuple(operator.uid for operator in manifest.operators),
        rows=sum(state.rows for state in states),
        size_bytes=sum(file.length for state in states for file in state.files)
        + sum(file.length for file in manifest.sources),
    )
