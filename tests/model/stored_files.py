"""What an operator's location holds, compared with what its log names."""

from __future__ import annotations

from itertools import filterfalse
from pathlib import Path

from statelog.checkpoint.history import History, Record
from statelog.checkpoint.pins import PINS_FOLDER, read_pin
from statelog.log.entry import Claim
from statelog.log.numbered import NumberedLog
from statelog.storage import LocalStore
from statelog.storage.links import is_link, split_link
from statelog.testing.query import LocalQuery


def needed_objects(history: History, record: Record) -> set[str]:
    """Every object that a restart from a checkpoint may read, besides the log's own entries."""
    segments = [part for one in history.between(record.needed_from, record.batch) for part in one.segments]
    ranges = record.base_map.ranges if record.base_map else ()
    return {part.name for part in segments} | {run.name for base_range in ranges for run in base_range.runs}


def give_up_state(log: NumberedLog, query_id: str, uid: str, renamed_to: str = "") -> None:
    """Give up all checkpoints of an operator's log, as ``statelog.forget`` does, or ``statelog.rename``."""

    def make(epoch: int) -> Claim:
        token = f"{epoch}".rjust(16).encode()
        return Claim(epoch, query_id, "forget", uid, token, 0, gives_up=True, renamed_to=renamed_to)

    log.claim(make)
    log.close()


def is_pin(name: str) -> bool:
    """Whether an object is a pin."""
    return f"/{PINS_FOLDER}/" in name


def _is_linked(name: str) -> bool:
    """Whether a name is that of an object in another location, and this is there."""
    return is_link(name) and Path(*split_link(name)).exists()


class StoredFiles:
    """The objects and the checkpoints of a query's operator as they are now, read without its coordinator."""

    def __init__(self, query: LocalQuery) -> None:
        self._root = f"{query.operator.uid}/"
        store = LocalStore(query.location)
        self.names = {info.name for info in store.list(self._root)}
        self.entries = query.open_log(store).read()
        self._pinned = {
            name for one in self.names if is_pin(one) and (pin := read_pin(store, one)) for name in pin.objects
        }
        store.close()
        self.history = History(self.entries)

    def missing(self, retained: int) -> dict[int, list[str]]:
        """For each of so many newest checkpoints the objects that are gone although it needs them, if there are any."""
        newest = list(self.history.records)[-retained:]
        lacking = {record.batch: needed_objects(self.history, record) - self.names for record in newest}
        return {
            batch: sorted(names) for batch, found in lacking.items() if (names := set(filterfalse(_is_linked, found)))
        }

    @property
    def is_branch(self) -> bool:
        """Whether the operator may need objects of its parent's."""
        return f"{self._root}parent.json" in self.names

    @property
    def unreferenced(self) -> list[str]:
        """Objects that no entry and no pin names: changesets, materialized runs and initial rows."""
        others = {
            name for name in self.names if name.removeprefix(self._root).startswith(("changes/", "runs/", "initial/"))
        }
        return sorted(others - self._pinned - self.history.object_names())

    def count(self, folder: str) -> int:
        """Objects in one of the operator's folders."""
        return sum(name.startswith(f"{self._root}{folder}/") for name in self.names)
