"""The start of a query: which of its operators go on from a checkpoint, and which begin their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from statelog.checkpoint.active_operator import ActiveOperator
from statelog.checkpoint.admission import OperatorConfig, admit
from statelog.checkpoint.batch import BatchTime
from statelog.checkpoint.garbage import Inventory
from statelog.checkpoint.query_history import QueryHistory
from statelog.checkpoint.views import given_base
from statelog.clock import Clock
from statelog.errors import FencedError
from statelog.local.policy import MergePolicy
from statelog.log.entry import Checkpoint
from statelog.log.open import new_identity
from statelog.log.references import BaseRange, StoredRun
from statelog.log_fields import get_logger

_log: Final = get_logger(__name__)


@dataclass(frozen=True)
class QueryStart:
    """A start of a query, before its first batch; the fields are those of :class:`Coordinator`."""

    roster: Sequence[OperatorConfig]
    location: str
    batch_time: Callable[[int], BatchTime]
    new_token: Callable[[], bytes]
    inventory: Inventory
    clock: Clock
    slots: int
    merge_policy: MergePolicy
    inline_bytes: int
    """New materialized runs of up to so many bytes travel with the acks."""

    def admit(self, history: QueryHistory, first_batch: int) -> dict[str, str]:
        """Check that the start may use the log; see :func:`admit`."""
        time_ms = self._known_time_ms(first_batch - 1)
        return admit(history, self.roster, first_batch, time_ms, self.location)

    def _known_time_ms(self, batch: int) -> int | None:
        """Spark's time of a batch before this start; None if there was none, or Spark has forgotten it."""
        try:
            return None if batch < 0 else self.batch_time(batch).time_ms
        except FencedError:
            return None

    def go_on(self, config: OperatorConfig, identity: str, first_batch: int) -> ActiveOperator:
        """An operator that has state before the start's first batch."""
        before = self.inventory.query.histories[identity].at(first_batch - 1)
        return self._active(config, identity, before, first_batch, begins_at=None, given=None)

    def begin(
        self,
        config: OperatorConfig,
        identity: str | None,
        first_batch: int,
        given: Mapping[int, Sequence[StoredRun]],
    ) -> ActiveOperator:
        """An operator that begins its state with the first batch, anew whenever the batch is repeated.

        `given` is its materialized state by subtask; `identity` is None unless one was made for it.
        """
        identity = identity or new_identity(config.uid, self.new_token())
        base: list[BaseRange] | None = None
        if config.has_keys and given:
            base = given_base(identity, config.parallelism, first_batch - 1, given)
        if first_batch > 0:
            state = "with the state of its initialTables" if base else "empty"
            _log.info(
                "%s: it is new in the query as of batch %d, and starts %s", self._name(config), first_batch, state
            )
        return self._active(config, identity, None, first_batch, begins_at=first_batch, given=base)

    def _name(self, config: OperatorConfig) -> str:
        return f"operator '{config.uid}' at {self.location}"

    def _active(
        self,
        config: OperatorConfig,
        identity: str,
        before: Checkpoint | None,
        first_batch: int,
        *,
        begins_at: int | None,
        given: Sequence[BaseRange] | None,
    ) -> ActiveOperator:
        return ActiveOperator(
            config,
            identity,
            before,
            name=self._name(config),
            first_batch=first_batch,
            begins_at=begins_at,
            given=given,
            inventory=self.inventory,
            clock=self.clock,
            slots=self.slots,
            merge_policy=self.merge_policy,
            inline_bytes=self.inline_bytes,
        )
