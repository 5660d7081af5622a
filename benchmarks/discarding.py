"""A store that drops changesets and syncs nothing: the state of a query whose checkpoints are not durable."""

from __future__ import annotations

from typing import Final

from statelog.storage import LocalStore
from statelog.storage.store import StoreWrapper

SCHEME: Final = "discarded"


class DiscardingStore(StoreWrapper):
    """A directory, of a location such as ``discarded:/some/directory``, that holds a log without its changesets.

    Whole objects that are put, which are changesets, are dropped. The log's entries are written, because the log reads
    its own file, but not synced. So a query can start and run; after a restart it cannot continue.
    """

    def __init__(self, location: str) -> None:
        self._root = location.removeprefix(f"{SCHEME}:")
        super().__init__(LocalStore(self._root))

    def put(self, name: str, data: bytes | memoryview) -> None:
        pass

    def append(self, name: str, parts: list[bytes | memoryview], *, at: int) -> None:
        with open(f"{self._root}/{name}", "r+b") as file:
            file.truncate(at)
            file.seek(at)
            file.writelines(parts)

    def sync(self, name: str, *, start: int, end: int) -> None:
        pass
