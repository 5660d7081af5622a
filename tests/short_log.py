"""A query's log in memory, for tests of those who work beside the query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import replace

from statelog.history.operator_history import History
from statelog.history.query_history import QueryHistory
from statelog.log.entry import INITIAL_BATCH, Claim, QueryCheckpoint, Section
from statelog.log.open import open_log
from statelog.log.references import Base, BaseRange, Level, SegmentRef, StoredRun
from statelog.options import Options, Tuning
from statelog.runs.key_groups import hash_range
from statelog.storage import Store
from statelog.testing.query import ManualClock
from tests.contract.log_contract import make_claim
from tests.stores import MemoryStore

UID: Final = "op"
NOW_S = 10_000.0
WHOLE = hash_range(0, 1)


def identity_of(uid: str) -> str:
    """The identity of the operator that began with a uid."""
    return f"{uid}-1"


IDENTITY: Final = identity_of(UID)


def changes(batch: int, identity: str = IDENTITY) -> str:
    """The object with an operator's changes of a batch."""
    return f"{identity}/changes/1/0/{batch}"


def materialized(through: int, identity: str = IDENTITY) -> str:
    """The object with an operator's materialized state after a batch."""
    return f"{identity}/runs/1/0/{through}"


def base(through: int, identity: str = IDENTITY) -> Base:
    """The materialized state after a batch."""
    run = StoredRun(materialized(through, identity), 0, 100, b"%d" % through, 1, WHOLE.first, WHOLE.last)
    return Base(0, 1, [Level(0, through, b"", b"after %d" % through, WHOLE.first, WHOLE.last, [run])])


def base_range(through: int, identity: str = IDENTITY) -> BaseRange:
    return BaseRange(WHOLE.first, WHOLE.last, base(through, identity))


class ShortLog:
    """Keyed operators of one subtask, whose query writes an entry per batch and retains what `retained_from` says.

    A batch has 10 bytes of changes of each operator in an object, and 5 in its entry. `uids` are those of the next
    entries; an operator begins with the first of them.
    """

    def __init__(
        self,
        batches: int = 0,
        *,
        max_file_bytes: int = 32 << 20,
        key_schema: bytes = b"keys",
        uids: Sequence[str] = (UID,),
    ) -> None:
        self.clock = ManualClock(NOW_S)
        self.store = MemoryStore(self.clock)
        self.retained_from = INITIAL_BATCH
        self.uids = list(uids)
        self._options = Options(tuning=Tuning(max_file_bytes=max_file_bytes))
        self._key_schema = key_schema
        self.log = open_log(self.store, self._options, self.clock)
        """The query's, which writes the entries."""
        self.log.claim(make_claim("run"))
        self._entries = 0
        self._known: QueryHistory | None = None
        """What the writer knows; None if it has to read the log."""
        self._begun: dict[str, int] = {}
        for batch in range(batches):
            self.run(batch)

    def run(
        self, batch: int, *, entry: dict[str, Any] | None = None, others: dict[str, Any] | None = None, **values: Any
    ) -> QueryCheckpoint:
        """Write the entry of a batch; `values` are some of the first operator's section, `others` of the others'."""
        self._entries += 1
        known = self.query() if self._known is None else self._known
        before = known.at(batch - 1)
        token = b"token %d" % self._entries
        made = QueryCheckpoint(
            epoch=self.log.epoch,
            batch=batch,
            revision=0,
            id=token,
            follows=b"" if before is None else before.id,
            query_id="query",
            run_id="run",
            token=token,
            batch_time_ms=1000 * batch,
            watermark_ms=0,
            sections=[
                replace(self._section(uid, batch), **((others or {}) if number else values))
                for number, uid in enumerate(self.uids)
            ],
            retained_from=self.retained_from,
            cuts=list(known.cuts),
        )
        written = self.log.append(replace(made, **(entry or {})), [b"bytes"])
        known.add(written)
        self._known = known
        return written

    def _section(self, uid: str, batch: int) -> Section:
        identity = identity_of(uid)
        parts = [
            SegmentRef(0, 1, b"outside %d" % batch, 0, 10, 1, 1, changes(batch, identity)),
            SegmentRef(0, 1, b"inside %d" % batch, 0, 5, 1, 1),
        ]
        begins = self._begun.setdefault(identity, batch) >= batch
        return Section(identity, uid, 1, parts, self._key_schema, [], begins=begins)

    def claim(self, **news: Any) -> None:
        """Let a tool claim the location, or another start if it has no news; the query continues."""

        def make(epoch: int) -> Claim:
            return replace(make_claim("run")(epoch), **news)

        self.log.claim(make)
        self._known = None

    def query(self, store: Store | None = None) -> QueryHistory:
        """The log as a reader finds it now."""
        return QueryHistory(open_log(store or self.store, self._options, self.clock).read())

    def history(self, identity: str = IDENTITY) -> History:
        """An operator's checkpoints in it."""
        return self.query().histories[identity]
