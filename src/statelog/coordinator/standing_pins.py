"""The pins of a query, as its coordinator sees them: what they keep it from deleting."""

from __future__ import annotations

from collections.abc import Callable

from statelog.clock import Clock
from statelog.errors import StorageError
from statelog.history.pins import Pin, has_expired, read_pin
from statelog.history.query_history import QueryHistory
from statelog.log.entry import INITIAL_BATCH, EntryPlace
from statelog.log.open import PINS_FOLDER
from statelog.log_fields import get_logger
from statelog.storage import Store

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
        """No pin means an entry in front of this place that had been taken back when the pins were listed."""
        # Of all objects that pins name; None while a pin cannot be read. Replaced as a whole: other threads look here.
        self._names: frozenset[str] | None = frozenset()

    def look(self, query: QueryHistory) -> list[str]:
        """List the pins; return the names of those that are over. StorageError if they cannot be listed.

        A pin is over if it has expired, or if it is a consumer's that is too far behind by the history up to now.
        """
        now_s = self._clock.now_s()
        latest = query.latest
        standing: dict[str, Pin] = {}
        places: list[EntryPlace] = []
        consumers: dict[str, int] = {}
        over: list[str] = []
        unreadable: set[str] = set()
        for info in self._store.list(f"{PINS_FOLDER}/"):
            try:
                pin = self._pins.get(info.name) or read_pin(self._store, info.name)
                if pin is None:
                    continue
                place = pin.place
                if has_expired(pin, info, now_s) or self._is_behind(info.name, pin, query):
                    over.append(info.name)
                    continue
                if pin.changes_from is not None:
                    [own] = pin.operators
                    consumers[own.identity] = min(pin.changes_from, consumers.get(own.identity, pin.changes_from))
            except StorageError:
                raise
            except Exception as error:
                # Damaged, or of a form that no version writes: other pins must still count.
                unreadable.add(info.name)
                if info.name not in self._unreadable:
                    _log.warning("%s cannot be read, so nothing is deleted while it stands: %s", info.name, error)
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
                "%s, the pin of %s, is over: the changes since batch %d take %d bytes, and it keeps at most %d."
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

        Some consumer needs them, or may, as its pin was not seen yet or cannot be read.
        """
        unseen = INITIAL_BATCH if self._unreadable else self._seen_through + 1
        return min(self._consumers_from.get(identity, unseen), unseen)

    def need(self, name: str) -> bool:
        """Whether a standing pin, or one that cannot be read, needs an object."""
        return self._names is None or name in self._names

    def need_any(self, is_meant: Callable[[str], bool]) -> bool:
        """Whether a standing pin needs an object of some kind, or one that cannot be read may."""
        return self._names is None or any(map(is_meant, self._names))
