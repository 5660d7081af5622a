"""The states of an operator, as it stores them and as users read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import pyarrow as pa

from statelog.convert.state_tables import HASH, ElementColumns, StateColumns
from statelog.errors import ConfigurationError
from statelog.history.settings import ROWS_STATE
from statelog.operators.keyed.timers import TIMERS
from statelog.reading.keys import Keys
from statelog.reading.point import Point
from statelog.reading.windows import PANES, WINDOWS, WindowColumns, window_columns
from statelog.runs.evolution import can_read
from statelog.runs.schema import StateDescriptor, StateSchema, decode_schema

TIMERS_NAME: Final = "timers"
"""The name under which users read an operator's timers."""

_State = TypeVar("_State")


@dataclass(frozen=True)
class StateTable:
    """A state as users read it."""

    name: str
    kind: str
    """That of the stored state, ``windows`` or ``panes``."""
    stored: StateSchema
    """The stored state that its rows are computed from."""
    columns: StateColumns | ElementColumns
    """The columns of the stored state."""
    windows: WindowColumns | None = None
    """Computes windows from it; None if its rows are those of the stored state."""

    @property
    def schema(self) -> pa.Schema:
        """All columns."""
        return self.columns.schema if self.windows is None else self.windows.schema

    @property
    def shown_schema(self) -> pa.Schema:
        """The columns that a reader returns by default."""
        return pa.schema([field for field in self.schema if field.name != HASH])

    def rows(self, point: Point, chosen: Sequence[str], keys: Keys | None = None) -> Iterator[pa.RecordBatch]:
        """The state's rows in a point, or those of some keys, with the `chosen` columns among theirs."""
        if keys is not None:
            point.require_keys()
        if self.windows is not None:
            return self.windows.rows(point.changes(self.stored, keys))
        return point.rows(self.stored, self.columns, chosen, keys)


def tables_of(point: Point) -> list[StateTable]:
    """What users read of an operator, by name."""
    tables = {name: _table(point, stored) for name, stored in _by_name(point).items()}
    windows = window_columns(point)
    if windows is not None:
        stored = windows.stored
        made = StateTable(windows.name, windows.name, stored, _table(point, stored).columns, windows)
        tables.setdefault(made.name, made)
    return [tables[name] for name in sorted(tables)]


def _table(point: Point, stored: StateSchema) -> StateTable:
    columns: StateColumns | ElementColumns
    if point.key_schema:
        columns = StateColumns(decode_schema(point.key_schema), StateDescriptor.from_stored(stored))
    else:
        columns = ElementColumns(stored)
    return StateTable(shown_name(stored), str(stored.kind), stored, columns)


def chosen_table(point: Point, name: str | None) -> StateTable:
    """The state that a user has named; ConfigurationError if there is no such state, or several and no name."""
    tables = tables_of(point)
    hidden = {TIMERS}
    for table in tables:
        if table.windows is not None:
            hidden |= {table.stored.name, ROWS_STATE}
    own = [table.name for table in tables if table.windows is not None or table.stored.name not in hidden]
    if name == WINDOWS and any(table.kind == PANES for table in tables):
        raise ConfigurationError(
            f"{point.name} has windows that overlap, and only the query's own functions can compute them.",
            hint=f"Read the state '{PANES}', which has the parts of the windows.",
        )
    return _chosen(point, name, {table.name: table for table in tables}, own)


def chosen_state(point: Point, name: str | None) -> StateSchema:
    """The stored state that a user has named; ConfigurationError if there is none, or several and no name."""
    known = _by_name(point)
    return _chosen(point, name, known, [each for each, stored in known.items() if stored.name != TIMERS])


def _by_name(point: Point) -> dict[str, StateSchema]:
    """The stored states by name; a state of the user's that has the name of the timers takes precedence over them."""
    timers_first = sorted(point.states, key=lambda stored: stored.name != TIMERS)
    return {shown_name(stored): stored for stored in timers_first}


def _chosen(point: Point, name: str | None, known: Mapping[str, _State], own: Sequence[str]) -> _State:
    """The named state; without a name the only one of the query's own, or the only one."""
    meant = own or list(known)
    if name is None and len(meant) == 1:
        return known[meant[0]]
    if name is None:
        raise ConfigurationError(
            f"{point.name} has {f'the states {quoted(meant)}' if known else 'no states'}.",
            hint="Pass one of them as state." if known else "There is nothing to read.",
        )
    if name not in known:
        raise ConfigurationError(f"{point.name} has no state '{name}'.", hint=f"It has {quoted(known) or 'none'}.")
    return known[name]


def is_same_state(one: StateSchema, other: StateSchema) -> bool:
    """Whether two descriptions of one name differ at most in fields that can be converted.

    If not, the state was deleted in between, and another one has its name.
    """
    if one == other:
        return True
    first, second = StateDescriptor.from_stored(one), StateDescriptor.from_stored(other)
    return can_read(first, second) or can_read(second, first)


def chosen_columns(schema: pa.Schema, columns: Sequence[str] | None, name: str) -> pa.Schema:
    """The columns that a user has named, by default all but the hash; ConfigurationError if there is no such column."""
    if columns is None:
        columns = [field for field in schema.names if field != HASH]
    if unknown := [column for column in columns if column not in schema.names]:
        raise ConfigurationError(
            f"{name} has no column {quoted(unknown)}.", hint=f"Its columns are {quoted(schema.names)}."
        )
    return pa.schema([schema.field(column) for column in columns])


def shown_name(stored: StateSchema) -> str:
    """The name under which users read a stored state."""
    return TIMERS_NAME if stored.name == TIMERS else stored.name


def quoted(names: Iterable[str]) -> str:
    """Names in quotation marks."""
    return ", ".join(f"'{name}'" for name in names)
