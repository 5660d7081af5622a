"""What an operator's location holds, compared with what its log names."""

from __future__ import annotations

from statelog.checkpoint.history import History, Record
from statelog.storage import LocalStore
from statelog.testing.query import LocalQuery


def needed_objects(history: History, record: Record) -> set[str]:
    """Every object that a restart from a checkpoint may read, besides the log's own entries."""
    segments = [part for one in history.between(record.needed_from, record.batch) for part in one.segments]
    ranges = record.base_map.ranges if record.base_map else ()
    return {part.name for part in segments} | {run.name for base_range in ranges for run in base_range.runs}


class StoredFiles:
    """The objects and the checkpoints of a query's operator as they are now, read without its coordinator."""

    def __init__(self, query: LocalQuery) -> None:
        self._root = f"{query.operator.uid}/"
        store = LocalStore(query.location)
        self.names = {info.name for info in store.list(self._root)}
        self.entries = query.open_log(store).read()
        store.close()
        self.history = History(self.entries)

    def missing(self, retained: int) -> dict[int, list[str]]:
        """For each of so many newest checkpoints the objects that are gone although it needs them, if there are any."""
        newest = list(self.history.records)[-retained:]
        lacking = {record.batch: needed_objects(self.history, record) - self.names for record in newest}
        return {batch: sorted(names) for batch, names in lacking.items() if names}

    @property
    def unreferenced(self) -> list[str]:
        """Objects that no entry names: changesets, materialized runs and initial rows."""
        others = [name for name in self.names if not name.startswith(f"{self._root}log/")]
        return sorted(set(others) - self.history.object_names())

    def count(self, folder: str) -> int:
        """Objects in one of the operator's folders."""
        return sum(name.startswith(f"{self._root}{folder}/") for name in self.names)
