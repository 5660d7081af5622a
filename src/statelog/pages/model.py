"""The page: all operators of a query, or the tables of a savepoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import unquote

from statelog.clock import SystemClock
from statelog.errors import StatelogError
from statelog.metrics import CheckpointMetrics
from statelog.pages.operator_model import OperatorModel, read_operator
from statelog.reading.savepoint import read_manifest
from statelog.reading.source import find_operators, is_savepoint


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
    """Operators that could not be read at all, and why."""
    savepoint: SavedModel | None = None


def read_page(locations: Sequence[str], metrics: Mapping[str, Sequence[CheckpointMetrics]] | None = None) -> PageModel:
    """Read all that the page shows of some locations.

    `metrics` are those of a running query's operators, by uid. Raises ConfigurationError if a location has no state;
    what is damaged or cannot be read is on the page.
    """
    now_s = SystemClock().now_s()
    shown, made_ms = ", ".join(locations), int(now_s * 1000)
    if len(locations) == 1 and is_savepoint(locations[0]):
        return PageModel(shown, made_ms, savepoint=_read_savepoint(locations[0]))
    operators: list[OperatorModel] = []
    unread: list[tuple[str, str]] = []
    for store, place, root in [operator for location in locations for operator in find_operators(location)]:
        try:
            one = read_operator(store, place, root, unquote(root), now_s)
        except StatelogError as error:
            unread.append((unquote(root), error.message))
            continue
        operators.append(replace(one, metrics=tuple((metrics or {}).get(one.uid, ()))))
    return PageModel(shown, made_ms, tuple(sorted(operators, key=lambda one: one.uid)), tuple(sorted(unread)))


def _read_savepoint(location: str) -> SavedModel:
    _, manifest = read_manifest(location)
    tables = [
        SavedTable(
            operator.uid, state.schema.name, state.rows, len(state.files), sum(file.length for file in state.files)
        )
        for operator in manifest.operators
        for state in operator.states
    ]
    return SavedModel(manifest.batch, manifest.query_id, manifest.taken_ms, tuple(tables))
