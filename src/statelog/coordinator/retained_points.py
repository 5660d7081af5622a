"""Keeps checkpoints at intervals of time, by pins, when newer ones have taken their place."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from statelog.clock import Clock
from statelog.errors import PinExpiredError
from statelog.history.footprint import Footprint
from statelog.history.pins import HeldPin, has_expired, read_pin
from statelog.history.query_history import QueryHistory
from statelog.log.entry import QueryCheckpoint
from statelog.log.open import PINS_FOLDER
from statelog.log_fields import get_logger
from statelog.storage import Store

_log = get_logger(__name__)

OWNER: Final = "retained_s"
"""The owner of these pins: the option that asks for them."""


@dataclass(frozen=True)
class _Point:
    """A checkpoint that is to be pinned, and the history that names its files."""

    query: QueryHistory
    lasts_s: float


class RetainedPoints:
    """Pins the first checkpoint of each interval of batch time.

    `retained_s` has the length of an interval and the time that its checkpoint is kept, both in seconds. A checkpoint
    whose pin is not written yet must stay retained (`pending`), so a crash loses none.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        retained_s: Mapping[float, float],
        clock: Clock,
    ) -> None:
        self._store = store
        self._name = name
        self._retained_s = dict(retained_s)
        self._clock = clock
        self._kept: dict[float, float] = dict.fromkeys(self._retained_s, -math.inf)
        """The newest interval of each length that has its checkpoint."""
        # Filled under the coordinator's lock and emptied by the thread that deletes.
        self._pending: dict[int, _Point] = {}
        self._refused: set[int] = set()
        """Batches whose pin could not be written, and that have been warned of."""

    @property
    def pending(self) -> list[int]:
        """The batches of the checkpoints that are to be pinned."""
        return list(self._pending)

    def open(self, query: QueryHistory, first_batch: int) -> None:
        """Go on with the pins of earlier starts, and with the retained checkpoints before the first batch.

        Raises StorageError if the pins cannot be listed.
        """
        if not self._retained_s:
            return
        now_s = self._clock.now_s()
        for info in self._store.list(f"{PINS_FOLDER}/"):
            try:
                pin = read_pin(self._store, info.name)
            except Exception:
                continue  # whoever deletes says so
            if pin is None or not pin.holds or pin.owner != OWNER or has_expired(pin, info, now_s):
                continue
            if not pin.is_on_line(query):
                continue
            for every_s, lasts_s in self._retained_s.items():
                if pin.lasts_s is None or pin.lasts_s >= lasts_s:
                    self._keep(every_s, pin.batch_time_ms)
        for entry in query.entries:
            if entry.batch < first_batch and query.has_batch(entry.batch):
                self.add(query, entry)

    def add(self, query: QueryHistory, entry: QueryCheckpoint) -> bool:
        """Whether a certain checkpoint is the first of an interval, so that it will be pinned."""
        due = [
            (every_s, lasts_s)
            for every_s, lasts_s in self._retained_s.items()
            if _interval(every_s, entry.batch_time_ms) > self._kept[every_s]
        ]
        for every_s, _ in due:
            self._keep(every_s, entry.batch_time_ms)
        if due:
            lasts_s = max(lasts_s for _, lasts_s in due)
            self._pending[entry.batch] = _Point(query.copy(), lasts_s)
        return bool(due)

    def _keep(self, every_s: float, time_ms: int) -> None:
        self._kept[every_s] = max(_interval(every_s, time_ms), self._kept[every_s])

    def pin(self) -> None:
        """Pin the checkpoints that wait for it; those whose pin cannot be written wait for the next call."""
        for batch, point in list(self._pending.items()):
            try:
                HeldPin(
                    self._store,
                    Footprint.of(point.query, batch),
                    owner=OWNER,
                    lasts_s=point.lasts_s,
                    is_shared=True,
                    clock=self._clock,
                )
            except PinExpiredError:
                # A newer start owns the location, and has given the checkpoint up or made another one.
                _log.info("%s: checkpoint %d is not retained any more, so it is not pinned", self._name, batch)
            except Exception as error:
                level = logging.DEBUG if batch in self._refused else logging.WARNING
                _log.log(level, "%s: checkpoint %d cannot be pinned yet: %s", self._name, batch, error)
                self._refused.add(batch)
                continue
            self._refused.discard(batch)
            del self._pending[batch]


def _interval(every_s: float, time_ms: int) -> int:
    return int(time_ms // (every_s * 1000))
