"""What a query's location holds, compared with what its log names."""

from __future__ import annotations

from itertools import filterfalse
from pathlib import Path

from statelog.history.operator_history import History, Record
from statelog.history.pins import read_pin
from statelog.history.query_history import QueryHistory
from statelog.log.entry import Claim
from statelog.log.numbered import NumberedLog
from statelog.log.open import CHANGES_FOLDER, INITIAL_FOLDER, PINS_FOLDER, RUNS_FOLDER
from statelog.storage import LocalStore
from statelog.storage.links import is_link, split_link
from statelog.testing.query import LocalQuery


def needed_objects(history: History, record: Record) -> set[str]:
    """Every object that a restart from a checkpoint may read, besides the log's own entries."""
    segments = [part for one in history.between(record.needed_from, record.batch) for part in one.segments]
    ranges = record.base_map.ranges if record.base_map else ()
    return {part.name for part in segments} | {run.name for base_range in ranges for run in base_range.runs}


def give_up_state(log: NumberedLog, query_id: str, uid: str) -> None:
    """Give up the state of an operator, as ``statelog.forget`` does; nothing happens if it has none."""
    identity = QueryHistory(log.read()).names.get(uid)
    if identity is not None:
        log.claim(lambda epoch: Claim(epoch, query_id, "forget", f"{epoch}".rjust(16).encode(), 0, ended=[identity]))
        log.close()


def is_pin(name: str) -> bool:
    """Whether an object is a pin."""
    return name.startswith(f"{PINS_FOLDER}/")


def folder_of(name: str) -> str:
    """The folder of an operator that an object is in; empty for one of the log, and for a pin."""
    parts = name.split("/")
    return parts[1] if len(parts) > 2 else ""


def _is_linked(name: str) -> bool:
    """Whether a name is that of an object in another location, and this is there."""
    return is_link(name) and Path(*split_link(name)).exists()


class StoredFiles:
    """The objects and the checkpoints of a query as they are now, read without its coordinator."""

    def __init__(self, query: LocalQuery) -> None:
        store = LocalStore(query.location)
        self.names = {info.name for info in store.list()}
        self.entries = query.open_log(store).read()
        self._pinned = {
            name for one in self.names if is_pin(one) and (pin := read_pin(store, one)) for name in pin.objects
        }
        store.close()
        self.query = QueryHistory(self.entries)
        self.history = self.query.of(query.operator.uid) or History()
        """Of the query's operator."""

    def missing(self, retained: int) -> dict[int, list[str]]:
        """For each of so many newest checkpoints the objects that are gone although it needs them, if there are any."""
        newest = list(self.history.records)[-retained:]
        lacking = {record.batch: needed_objects(self.history, record) - self.names for record in newest}
        return {
            batch: sorted(names) for batch, found in lacking.items() if (names := set(filterfalse(_is_linked, found)))
        }

    @property
    def is_branch(self) -> bool:
        """Whether the query may need objects of its parent's."""
        return self.query.parent is not None

    @property
    def unreferenced(self) -> list[str]:
        """Objects that no entry and no pin names: changesets, materialized runs and initial rows."""
        others = {name for name in self.names if folder_of(name) in (CHANGES_FOLDER, RUNS_FOLDER, INITIAL_FOLDER)}
        return sorted(others - self._pinned - self.query.object_names())

    def count(self, folder: str) -> int:
        """Objects in a folder of the operators."""
        return sum(folder_of(name) == folder for name in self.names)
