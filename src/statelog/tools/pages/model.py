"""The page: all operators of a query, or the tables of a savepoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, ErrorKind, StatelogError
from statelog.reading.open import find_log, find_savepoint
from statelog.reading.savepoint import SavedQuery
from statelog.storage import Store
from statelog.tools.pages.live import LiveOperator, Watched
from statelog.tools.pages.operator_model import OperatorModel, read_operators
from statelog.tools.pages.savepoint_list import SavepointFolders, SavepointList


@dataclass(frozen=True)
class SavedTable:
    """A state in a savepoint."""

    uid: str
    state: str
    rows: int
    files: int
    size_bytes: int


@dataclass(frozen=True)
class SavedModel:
    """A savepoint."""

    batch: int
    query_id: str
    taken_ms: int
    tables: tuple[SavedTable, ...]


@dataclass(frozen=True)
class PageModel:
    """What the page shows."""

    location: str
    made_ms: int
    operators: tuple[OperatorModel, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    """Locations whose log could not be read at all, and why."""
    waiting: tuple[LiveOperator, ...] = ()
    """Operators of a running query that have no checkpoint yet."""
    savepoints: SavepointList | None = None
    """Those of the query."""
    savepoint: SavedModel | None = None
    """The savepoint that the page is about."""

    @property
    def is_underway(self) -> bool:
        """Whether an operator of a running query still waits or restores."""
        known = [*self.waiting, *(one.live for one in self.operators if one.live is not None)]
        return any(not live.has_begun or live.restoring is not None for live in known)

    def with_live(self, operators: Sequence[LiveOperator]) -> PageModel:
        """The page with what the driver knows now."""
        live = {} if self.unread else {one.uid: one for one in operators}
        shown = tuple(replace(one, live=live.pop(one.uid, None)) for one in self.operators)
        return replace(self, operators=shown, waiting=tuple(live.values()))


def read_page(watched: Watched, savepoints: SavepointFolders | None = None) -> PageModel:
    """Read all that the page shows.

    Raises ConfigurationError if a location has no state, unless a query that has just begun will write it there; what
    is damaged or cannot be read is on the page.
    """
    now_s = SystemClock().now_s()
    locations = watched.locations
    shown, made_ms = ", ".join(locations), int(now_s * 1000)
    if len(locations) == 1 and (saved := find_savepoint(locations[0])) is not None:
        return PageModel(shown, made_ms, savepoint=_saved_model(saved))
    operators: list[OperatorModel] = []
    unread: list[tuple[str, str]] = []
    for store, place in _found(watched):
        try:
            found = read_operators(store, place, now_s)
        except StatelogError as error:
            unread.append((place, error.message))
            continue
        operators += found.operators
        if not found.operators:
            unread += [(place, problem) for problem in found.problems]
    query_ids = {one.query_id for one in operators}
    page = PageModel(
        shown,
        made_ms,
        tuple(operators),
        tuple(unread),
        savepoints=(savepoints or SavepointFolders([])).find(locations, query_ids),
    )
    return page.with_live(watched.operators)


def _found(watched: Watched) -> list[tuple[Store, str]]:
    """The places of logs, with their stores."""
    found: list[tuple[Store, str]] = []
    for location in watched.locations:
        try:
            found.append(find_log(location))
        except ConfigurationError as error:
            if not watched.operators or error.kind is not ErrorKind.CHECKPOINT_MISSING:
                raise
    return found


def _saved_model(saved: SavedQuery) -> SavedModel:
    manifest = saved.manifest
    tables = [
        SavedTable(point.uid, state.schema.name, state.rows, len(state.files), sum(file.length for file in state.files))
        for point in saved.points()
        for state in point.tables
    ]
    return SavedModel(manifest.batch, manifest.query_id, manifest.taken_ms, tuple(tables))
