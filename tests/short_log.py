"""An operator's log in memory, for tests of those who work beside its query."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from statelog.checkpoint.history import History
from statelog.log.entry import INITIAL_BATCH, Checkpoint
from statelog.log.open import open_log
from statelog.log.references import Base, BaseRange, Level, SegmentRef, StoredRun
from statelog.options import Options
from statelog.runs.key_groups import hash_range
from statelog.storage import Store
from statelog.testing.clock import ManualClock
from tests.contract.log_contract import make_claim
from tests.stores import MemoryStore

ROOT = "op"
NOW_S = 10_000.0
WHOLE = hash_range(0, 1)


def changes(batch: int) -> str:
    """The object with the changes of a batch."""
    return f"{ROOT}/changes/1/0/{batch}"


def base(through: int) -> Base:
    """The materialized state after a batch."""
    run = StoredRun(f"{ROOT}/runs/1/0/{through}", 0, 100, b"%d" % through, 1, WHOLE.first, WHOLE.last)
    return Base(0, 1, [Level(0, through, b"", b"after %d" % through, WHOLE.first, WHOLE.last, [run])])


def base_range(through: int) -> BaseRange:
    return BaseRange(WHOLE.first, WHOLE.last, base(through))


class ShortLog:
    """A keyed operator of one subtask, whose query writes an entry per batch and retains what `retained_from` says.

    A batch has 10 bytes of changes in an object, and 5 in its entry.
    """

    def __init__(self, batches: int = 0, *, max_file_bytes: int = 32 << 20, key_schema: bytes = b"keys") -> None:
        self.clock = ManualClock(NOW_S)
        self.store = MemoryStore(self.clock)
        self.retained_from = INITIAL_BATCH
        self._options = Options(max_file_bytes=max_file_bytes)
        self._key_schema = key_schema
        self._log = open_log(self.store, ROOT, self._options, self.clock)
        self._log.claim(make_claim("run"))
        self._entries = 0
        for batch in range(batches):
            self.run(batch)

    def run(self, batch: int, **values: Any) -> Checkpoint:
        """Write the entry of a batch, with some other values."""
        self._entries += 1
        parts = [
            SegmentRef(0, 1, b"outside %d" % batch, 0, 10, 1, 1, changes(batch)),
            SegmentRef(0, 1, b"inside %d" % batch, 0, 5, 1, 1),
        ]
        token = b"token %d" % self._entries
        entry = Checkpoint(
            *(1, batch, 0, "query", "run", "uid", 1, parts, self._key_schema, [], 1000 * batch, 0, token),
            retained_from=self.retained_from,
        )
        return self._log.append(replace(entry, **values), [b"bytes"])

    def history(self, store: Store | None = None) -> History:
        """The log as a reader finds it now."""
        return History(open_log(store or self.store, ROOT, self._options, self.clock).read())
