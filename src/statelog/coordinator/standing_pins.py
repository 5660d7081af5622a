"""The pins of a query, as its coordinator sees them: what they keep, and those that it creates itself at intervals."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from statelog.clock import Clock
from statelog.errors import PinExpiredError, StorageError
from statelog.history.footprint import Footprint
from statelog.history.pins import HeldPin, Pin, has_expired, read_pin, read_pins
from statelog.history.query_history import QueryHistory
from statelog.log.entry import INITIAL_BATCH, EntryPlace, QueryCheckpoint
from statelog.log.open import PINS_FOLDER
from statelog.log_fields import get_logger
from statelog.storage import ObjectInfo, Store

OWNER: Final = "retained_s"
"""The owner of these pins: the option that asks for them."""


@dataclass(frozen=True)
class _Point:
    """A checkpoint to be pinned, and the history that names its files."""

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
        """Batches whose pin could not be written, after a warning about them."""

    @property
    def pending(self) -> list[int]:
        """The batches of the checkpoints to be pinned."""
        return list(self._pending)

    def open(self, query: QueryHistory, first_batch: int) -> None:
        """Continue with the pins of earlier starts, and with the retained checkpoints before the first batch.

        Raises StorageError if the pins cannot be listed.
        """
        if not self._retained_s:
            return
        now_s = self._clock.now_s()
        for info in self._store.list(f"{PINS_FOLDER}/"):
            try:
                pin = read_pin(self._store, info.name)
            except Exception:
                continue  # the deletion logs it
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
                # A newer start owns the location, and has dropped the checkpoint or written another one.
                _log.info("%s: checkpoint %d is no longer retained, so it is not pinned", self._name, batch)
            except Exception as error:
                level = logging.DEBUG if batch in self._refused else logging.WARNING
                _log.log(level, "%s: checkpoint %d cannot be pinned yet: %s", self._name, batch, error)
                self._refused.add(batch)
                continue
            self._refused.discard(batch)
            del self._pending[batch]


def _interval(every_s: float, time_ms: int) -> int:
    return int(time_ms // (every_s * 1000))


_log = get_logger(__name__)


class StandingPins:
    """The pins of a query, as the coordinator saw them last."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._pins: dict[str, Pin] = {}
        self._unreadable: set[str] = set()
        self._behind: set[str] = set()
        self._consumers_from: dict[str, int] = {}
        self._seen_through = INITIAL_BATCH - 1
        self.oldest_place = EntryPlace(0, 0)
        """No pin refers to an entry before this place that had been taken back when the pins were listed."""
        # All objects that pins name; None while a pin cannot be read. Replaced as a whole: other threads look here.
        self._names: frozenset[str] | None = frozenset()

    def look(self, query: QueryHistory) -> list[str]:
        """List the pins; return the names of those that are over. StorageError if they cannot be listed.

        A pin is over if it has expired, or if its consumer is too far behind according to the history up to now.
        """
        now_s = self._clock.now_s()
        latest = query.latest
        standing: dict[str, Pin] = {}
        places: list[EntryPlace] = []
        consumers: dict[str, int] = {}
        over: list[str] = []
        unreadable: set[str] = set()
        pins: list[tuple[ObjectInfo, Pin | Exception]] = read_pins(self._store, self._read)
        for info, pin in pins:
            try:
                if isinstance(pin, Exception):
                    raise pin
                place = pin.place
                if has_expired(pin, info, now_s) or self._is_behind(info.name, pin, query):
                    over.append(info.name)
                    continue
                if pin.changes_from is not None:
                    [own] = pin.operators
                    consumers[own.identity] = min(pin.changes_from, consumers.get(own.identity, pin.changes_from))
            except Exception as error:
                # Damaged, or of a form that no version writes: other pins must still count.
                unreadable.add(info.name)
                if info.name not in self._unreadable:
                    _log.warning("%s cannot be read, so nothing is deleted while it exists: %s", info.name, error)
                continue
            standing[info.name] = pin
            places.append(place)
        self._pins, self._unreadable = standing, unreadable
        self._names = None if unreadable else frozenset(name for pin in standing.values() for name in pin.objects)
        self._consumers_from = consumers
        if latest is not None:
            self._seen_through = latest.batch
            self.oldest_place = EntryPlace(0, 0) if unreadable else min([latest.place, *places])
        return over

    def _read(self, name: str) -> Pin | Exception | None:
        """A pin, or why it cannot be read; None if it is gone. Raises StorageError if the store fails."""
        try:
            return self._pins.get(name) or read_pin(self._store, name)
        except StorageError:
            raise
        except Exception as error:
            return error

    def _is_behind(self, name: str, pin: Pin, query: QueryHistory) -> bool:
        """Whether the changes that a consumer's pin keeps have become too many."""
        consumer = pin.consumer
        if consumer is None:
            return False
        assert pin.since is not None, "every consumer begins with some batch"
        # The changes up to the state that a consumer builds on are part of that state.
        first = pin.since if consumer.state_at is None else consumer.state_at + 1
        [own] = pin.operators
        history = query.histories.get(own.identity)
        kept_bytes = 0 if history is None else history.changes_bytes(first)
        if kept_bytes <= consumer.max_bytes:
            return False
        if name not in self._behind:
            self._behind.add(name)
            _log.warning(
                "%s, the pin of %s, is over: the changes since batch %d take %d bytes, but it keeps at most %d."
                " [consumer-behind]",
                name,
                pin.owner,
                first,
                kept_bytes,
                consumer.max_bytes,
            )
        return True

    def has_seen(self, batch: int) -> bool:
        """Whether the pins were listed since the checkpoint of a batch became durable."""
        return batch <= self._seen_through

    def changes_from(self, identity: str) -> int:
        """The first batch whose changes of an operator must stay.

        Some consumer needs them, or may need them because its pin has not been seen yet or cannot be read.
        """
        unseen = INITIAL_BATCH if self._unreadable else self._seen_through + 1
        return min(self._consumers_from.get(identity, unseen), unseen)

    def need(self, name: str) -> bool:
        """Whether a standing pin, or one that cannot be read, needs an object."""
        return self._names is None or name in self._names

    def need_any(self, is_meant: Callable[[str], bool]) -> bool:
        """Whether a standing pin needs an object of some kind, or a pin that cannot be read may need one."""
        return self._names is None or any(map(is_meant, self._names))
