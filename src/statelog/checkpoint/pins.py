"""Pins: objects that keep a checkpoint readable while they stand, whoever made them.

A pin names everything that its checkpoint needs. The coordinator and the makers of pins share no lock; the order of
their steps decides. A maker writes the pin, *then* reads the log again: the pin holds if the checkpoint is still
retained. The coordinator deletes only what no durable entry retains, and lists the pins *after* it has chosen what may
go. So whatever a pin that holds names is not deleted before the pin is removed or has expired.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
from msgspec.structs import replace

from statelog.checkpoint.history import History
from statelog.clock import Clock
from statelog.errors import CorruptionError, StatelogError, StorageError
from statelog.log.entry import INITIAL_BATCH, Checkpoint, FrameReader
from statelog.log.numbered import base_name
from statelog.log.open import LOG_FOLDER
from statelog.log.references import BaseRange, SegmentRef, StoredRun
from statelog.log_fields import get_logger
from statelog.sealed import seal, unseal
from statelog.storage import ObjectInfo, Store
from statelog.storage.store import if_present

_log = get_logger(__name__)

PINS_FOLDER: Final = "pins"
"""The folder of an operator's pins, in its own."""
MARGIN_S: Final = 60.0
"""A pin counts so much longer than it lasts, since clocks differ."""

_KIND: Final = "statelog pin"
_VERSION: Final = 1


class EntryPlace(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Where a checkpoint's entry is in the log."""

    number: int
    """Of the log file."""
    offset: int
    """Bytes from the start of the file."""


class PinnedBase(msgspec.Struct, frozen=True):
    """What the state after a batch, and after each later one, can be made of."""

    batch: int
    token: bytes
    """Of the batch's entry; empty for the empty state before batch 0."""
    since: int
    """The first batch whose changes are needed beside the materialized states; not after `batch` if that has an entry.
    """
    ranges: list[BaseRange]
    """The materialized states that count in the batch's checkpoint."""


class Pin(msgspec.Struct, frozen=True):
    """A checkpoint that is kept, and all that it needs."""

    uid: str
    query_id: str
    batch: int
    token: bytes
    """Of the checkpoint's entry."""
    batch_time_ms: int
    """Milliseconds since the Unix epoch."""
    owner: str
    """Who made the pin, and what for. A consumer finds its own by it."""
    made_ms: int
    """Milliseconds since the Unix epoch, by the maker's clock."""
    lasts_s: float | None
    """From the modification time that the store gives the pin; None is for ever."""
    entries: list[EntryPlace]
    """The entries that the checkpoint is made of, oldest first; its own is the last."""
    base_ranges: list[BaseRange]
    """The materialized states that count in the checkpoint."""
    objects: list[str]
    """All objects that the checkpoint needs, those of the log included, sorted."""
    state_bytes: int
    """What a reader of the whole checkpoint reads, besides the log's entries."""
    since: int | None = None
    """If not None, the pin also keeps the changes of each batch from this one on."""
    max_bytes: int | None = None
    """If not None, the pin is that of a consumer: instead of a checkpoint it keeps the changes of each batch from
    `since` on, those of batches after its own too, until they take more bytes.
    """
    holds: bool = False
    """Whether its maker has seen that it holds, so that others may rely on it."""
    state_at: int | None = None
    """If not None, a consumer's pin that also keeps the state after this batch: `base_ranges`, and the changes from
    `since` on that these lack.
    """
    state_token: bytes = b""
    """Of that batch's entry."""
    branch: str = ""
    """If not empty, the link to the folder of the branch that goes on from the checkpoint."""

    @classmethod
    def of(
        cls,
        root: str,
        history: History,
        batch: int,
        *,
        owner: str,
        made_ms: int,
        lasts_s: float | None,
        since: int | None = None,
    ) -> Pin:
        """A pin of a checkpoint that the history can restore; `root` is the operator's folder.

        With `since` it also keeps the changes of each batch from that one on.
        """
        record = history.record(batch)
        assert record is not None, f"checkpoint {batch} is not there"
        own = record.checkpoint
        first = record.needed_from if since is None else min(record.needed_from, since)
        needed = list(history.between(first, batch))
        ranges = [] if record.base_map is None else list(record.base_map.ranges)
        parts: list[StoredRun | SegmentRef] = [segment for checkpoint in needed for segment in checkpoint.segments]
        parts += [run for base_range in ranges for run in base_range.runs]
        names = {part.name for part in parts} | {_log_file(root, checkpoint.number) for checkpoint in needed}
        return cls(
            uid=own.uid,
            query_id=own.query_id,
            batch=batch,
            token=own.token,
            batch_time_ms=own.batch_time_ms,
            owner=owner,
            made_ms=made_ms,
            lasts_s=lasts_s,
            entries=[EntryPlace(checkpoint.number, checkpoint.offset) for checkpoint in needed],
            base_ranges=ranges,
            objects=sorted(names),
            state_bytes=sum(part.length for part in parts),
            since=since,
        )

    @classmethod
    def of_changes(
        cls,
        root: str,
        history: History,
        batch: int,
        *,
        owner: str,
        made_ms: int,
        lasts_s: float | None,
        since: int,
        max_bytes: int,
        base: PinnedBase | None = None,
    ) -> Pin:
        """A consumer's pin: of the changes from the batch `since` to another one, and of all later ones.

        With `base`, the changes build on a state that it keeps as well.
        """
        kept = list(history.between(since, batch))
        assert kept, f"there are no changes from {since} to {batch}"
        ranges = [] if base is None else base.ranges
        parts: list[StoredRun | SegmentRef] = [segment for checkpoint in kept for segment in checkpoint.segments]
        parts += [run for base_range in ranges for run in base_range.runs]
        names = {part.name for part in parts} | {_log_file(root, checkpoint.number) for checkpoint in kept}
        own = kept[-1]
        return cls(
            uid=own.uid,
            query_id=own.query_id,
            batch=own.batch,
            token=own.token,
            batch_time_ms=own.batch_time_ms,
            owner=owner,
            made_ms=made_ms,
            lasts_s=lasts_s,
            entries=[EntryPlace(checkpoint.number, checkpoint.offset) for checkpoint in kept],
            base_ranges=ranges,
            objects=sorted(names),
            state_bytes=sum(part.length for part in parts),
            since=since,
            max_bytes=max_bytes,
            state_at=None if base is None else base.batch,
            state_token=b"" if base is None else base.token,
        )

    def with_later(self, root: str, history: History) -> Pin:
        """A consumer's pin that names the changes of later batches of a history too; other pins as they are."""
        last = self.batch if history.latest is None else history.latest.batch
        if self.max_bytes is None or last <= self.batch:
            return self
        later = Pin.of_changes(
            root,
            history,
            last,
            owner=self.owner,
            made_ms=self.made_ms,
            lasts_s=self.lasts_s,
            since=self.batch + 1,
            max_bytes=self.max_bytes,
        )
        return replace(
            self,
            batch=later.batch,
            token=later.token,
            batch_time_ms=later.batch_time_ms,
            entries=self.entries + later.entries,
            objects=sorted({*self.objects, *later.objects}),
            state_bytes=self.state_bytes + later.state_bytes,
        )

    @property
    def changes_from(self) -> int | None:
        """The first batch whose changes a consumer's pin keeps, with those of all later ones; None for other pins."""
        return None if self.max_bytes is None else self.since

    @property
    def base(self) -> PinnedBase | None:
        """The state that a consumer's pin keeps."""
        if self.state_at is None or self.since is None:
            return None
        return PinnedBase(self.state_at, self.state_token, self.since, self.base_ranges)

    def covers(self, other: Pin) -> bool:
        """Whether it keeps all that another pin names: that of the same checkpoint, or of another consumer."""
        if other.changes_from is not None:
            keeps_changes = self.changes_from is not None and self.changes_from <= other.changes_from
            return keeps_changes and (other.state_at is None or self.base == other.base)
        return self.max_bytes is None and other.token == self.token and self.entries[0] <= other.entries[0]

    def history(self, store: Store, root: str) -> History:
        """The history of the pinned checkpoint alone; CorruptionError or StorageError if an entry cannot be read."""
        found: list[Checkpoint] = []
        readers: dict[int, FrameReader] = {}
        for place in self.entries:
            name = _log_file(root, place.number)
            reader = readers.setdefault(place.number, FrameReader(store, name, place.number))
            frame = reader.frame_at(place.offset, sys.maxsize)
            if frame is None or not isinstance(frame.entry, Checkpoint):
                raise CorruptionError(
                    f"{name}: the entry at offset {place.offset}, which a pin names, is no checkpoint.",
                    hint="Restore the file from a copy.",
                )
            found.append(frame.entry)
        if found[-1].token != self.token:
            raise CorruptionError(
                f"{root}: the entries that a pin of checkpoint {self.batch} names are not those of its time.",
                hint="Restore the log from a copy.",
            )
        if self.max_bytes is None:
            found[-1] = replace(found[-1], base_ranges=self.base_ranges)
        return History([replace(entry, retained_from=self.batch) for entry in found])


def _log_file(root: str, number: int) -> str:
    return f"{root}/{LOG_FOLDER}/{base_name(number)}"


def pinned_history(store: Store, root: str, batch: int, now_s: float) -> History | None:
    """The history of a checkpoint that a pin keeps for others, or None; raises the errors of :func:`read_pin`."""
    found = [pin for _, pin in standing_pins(store, root, now_s, batch)]
    # Of a batch that was repeated later, the state of the last time.
    return max(found, key=lambda pin: pin.made_ms).history(store, root) if found else None


def standing_pins(store: Store, root: str, now_s: float, batch: int | None = None) -> Iterator[tuple[ObjectInfo, Pin]]:
    """The pins of checkpoints that hold for others and stand for a while yet, of one batch or of all.

    They come in order of their batches. Raises the errors of :func:`read_pin`.
    """
    return ((info, pin) for info, pin in holding_pins(store, root, now_s, batch) if pin.max_bytes is None)


def consumer_pins(store: Store, root: str, now_s: float) -> Iterator[tuple[ObjectInfo, Pin]]:
    """The pins of consumers that hold and stand for a while yet; raises the errors of :func:`read_pin`."""
    return ((info, pin) for info, pin in holding_pins(store, root, now_s) if pin.max_bytes is not None)


def holding_pins(store: Store, root: str, now_s: float, batch: int | None = None) -> Iterator[tuple[ObjectInfo, Pin]]:
    """The pins of both kinds that hold for others and stand for a while yet; raises the errors of :func:`read_pin`."""
    for info in store.list(f"{root}/{PINS_FOLDER}/" if batch is None else f"{root}/{PINS_FOLDER}/{batch:020}-"):
        pin = read_pin(store, info.name)
        if pin is not None and pin.holds and not has_expired(pin, info, now_s, -MARGIN_S):
            yield info, pin


def pin_name(root: str, batch: int, token: bytes) -> str:
    """The object of a pin; `token` is unique."""
    return f"{root}/{PINS_FOLDER}/{batch:020}-{token.hex()}.json"


def write_pin(store: Store, name: str, pin: Pin) -> None:
    """Store a pin; whether it holds is for the maker to see."""
    store.put_if_absent(name, seal(pin, _KIND, _VERSION))


def read_pin(store: Store, name: str) -> Pin | None:
    """Read a pin; None if it is gone. Raises the errors of :func:`unseal`, or StorageError."""
    data = if_present(lambda: store.read(name))
    return None if data is None else unseal(data, Pin, kind=_KIND, version=_VERSION, name=name)


def has_expired(pin: Pin, info: ObjectInfo, now_s: float, margin_s: float = MARGIN_S) -> bool:
    """Whether a pin's time is over, `margin_s` after its end."""
    return pin.lasts_s is not None and now_s > info.modified_s + pin.lasts_s + margin_s


class StandingPins:
    """The pins of an operator, as the coordinator saw them last."""

    def __init__(self, store: Store, root: str, clock: Clock) -> None:
        self._store = store
        self._folder = f"{root}/{PINS_FOLDER}/"
        self._clock = clock
        self._pins: dict[str, Pin] = {}
        self._unreadable: set[str] = set()
        self._behind: set[str] = set()
        self._consumers_from: int | None = None
        self._seen_through = INITIAL_BATCH - 1
        # Of all objects that pins name; None while a pin cannot be read. Replaced as a whole: other threads look here.
        self._names: frozenset[str] | None = frozenset()

    def look(self, history: History) -> list[str]:
        """List the pins; return the names of those that are over. StorageError if they cannot be listed.

        A pin is over if it has expired, or if it is a consumer's that is too far behind by the history up to now.
        """
        now_s = self._clock.now_s()
        latest = history.latest
        standing: dict[str, Pin] = {}
        over: list[str] = []
        unreadable: set[str] = set()
        for info in self._store.list(self._folder):
            try:
                pin = self._pins.get(info.name) or read_pin(self._store, info.name)
            except StorageError:
                raise
            except StatelogError as error:
                unreadable.add(info.name)
                if info.name not in self._unreadable:
                    _log.warning("%s cannot be read, so nothing is deleted while it stands: %s", info.name, error)
                continue
            if pin is None:
                continue
            if has_expired(pin, info, now_s) or self._is_behind(info.name, pin, history):
                over.append(info.name)
            else:
                standing[info.name] = pin
        self._pins, self._unreadable = standing, unreadable
        self._names = None if unreadable else frozenset(name for pin in standing.values() for name in pin.objects)
        consumers = [pin.changes_from for pin in standing.values() if pin.changes_from is not None]
        self._consumers_from = INITIAL_BATCH if unreadable else min(consumers, default=None)
        if latest is not None:
            self._seen_through = latest.batch
        return over

    def _is_behind(self, name: str, pin: Pin, history: History) -> bool:
        """Whether the changes that a consumer's pin keeps have become too many."""
        if pin.max_bytes is None:
            return False
        assert pin.since is not None, "every consumer begins with some batch"
        # The changes up to the state that a consumer builds on are part of that state.
        first = pin.since if pin.state_at is None else pin.state_at + 1
        kept_bytes = history.changes_bytes(first)
        if kept_bytes <= pin.max_bytes:
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
                pin.max_bytes,
            )
        return True

    def has_seen(self, batch: int) -> bool:
        """Whether the pins were listed since the checkpoint of a batch became durable."""
        return batch <= self._seen_through

    @property
    def changes_from(self) -> int:
        """The first batch whose changes must stay: some consumer needs them, or may, as its pin was not seen yet."""
        unseen = self._seen_through + 1
        return unseen if self._consumers_from is None else min(self._consumers_from, unseen)

    def need(self, name: str) -> bool:
        """Whether a standing pin, or one that cannot be read, needs an object."""
        return self._names is None or name in self._names

    def need_any(self, is_meant: Callable[[str], bool]) -> bool:
        """Whether a standing pin needs an object of some kind, or one that cannot be read may."""
        return self._names is None or any(map(is_meant, self._names))
