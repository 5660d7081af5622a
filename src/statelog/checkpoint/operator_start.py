"""Admits a start of an operator: it goes on from a checkpoint, or begins the operator's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from statelog.checkpoint.admission import OperatorConfig, begins_state, require_admission
from statelog.checkpoint.batch import BatchTime
from statelog.checkpoint.history import History
from statelog.checkpoint.query_operators import OperatorChanges
from statelog.checkpoint.views import initial_checkpoint, initial_entry
from statelog.errors import FencedError
from statelog.log.entry import INITIAL_BATCH, Checkpoint, Entry
from statelog.log.numbered import NumberedLog
from statelog.log.references import StoredRun
from statelog.log_fields import get_logger

_log: Final = get_logger(__name__)


@dataclass(frozen=True)
class OperatorStart:
    """A start of an operator, before its first batch."""

    config: OperatorConfig
    name: str
    """The operator's name in messages."""
    batch_time: Callable[[int], BatchTime]
    """Gives Spark's times of a batch; raises FencedError if it knows no such batch."""
    changes: OperatorChanges | None = None
    """Tells whether operators were added to the query or removed; None if that is not known."""

    def begins(self, entries: Sequence[Entry], first_batch: int) -> bool:
        """Whether the operator begins its state with this batch; raises as :meth:`OperatorChanges.has_added`."""

        def is_added() -> bool:
            batch, changes = first_batch - 1, self.changes
            return changes is not None and changes.has_added(
                self.config.uid, batch, self._known_time_ms(batch), self.name
            )

        return begins_state(entries, self.config.query_id, first_batch, is_added)

    def admit(self, entries: Sequence[Entry], first_batch: int) -> bool:
        """Check that this start may use the log; return whether the operator begins its state with the batch.

        Raises the errors of `require_admission` and of :meth:`OperatorChanges.require_none_removed`.
        """
        history, begins = History(entries), self.begins(entries, first_batch)
        time_before_ms = self._known_time_ms(first_batch - 1)
        require_admission(self.config, history, first_batch, time_before_ms, self.name, begins=begins)
        before = history.at(first_batch - 1)
        if self.changes is not None and before is not None:
            self.changes.require_none_removed(before, self.name)
        return begins

    def initial_entry(
        self,
        entries: Sequence[Entry],
        first_batch: int,
        given: Mapping[int, Sequence[StoredRun]],
        log: NumberedLog,
        token: bytes,
    ) -> list[Checkpoint]:
        """The checkpoint before the operator's first batch, if it needs one.

        Batch 0 needs none unless state is given. A later batch does: so the start that repeats it finds that it is the
        operator's first. `given` is the state by subtask, `log` is claimed, and `token` is 16 unique bytes.
        """
        batch = first_batch - 1
        if batch == INITIAL_BATCH and not given and not History(entries).at(batch):
            return []
        if batch != INITIAL_BATCH:
            state = "with the state of its initialTables" if given else "empty"
            _log.info("%s: it is new in the query as of batch %d, and starts %s", self.name, first_batch, state)
        entry = initial_entry(
            self.config,
            batch,
            self._known_time_ms(batch) or 0,
            epoch=log.epoch,
            token=token,
            log_start=log.number,
        )
        return [initial_checkpoint(entry, given) if self.config.has_keys else entry]

    def _known_time_ms(self, batch: int) -> int | None:
        """Spark's time of a batch before this start; None if there was none, or Spark has forgotten it."""
        try:
            return None if batch < 0 else self.batch_time(batch).time_ms
        except FencedError:
            return None
