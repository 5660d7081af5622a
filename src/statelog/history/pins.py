"""Pins: objects that keep a checkpoint readable while they stand, whoever made them.

A pin names everything that its checkpoint needs. The coordinator and the makers of pins share no lock; the order of
their steps decides. A maker writes the pin, *then* reads the log again: the pin holds if the checkpoint is still
retained. The coordinator deletes only what no durable entry retains, and lists the pins *after* it has chosen what may
go. So whatever a pin that holds names is not deleted before the pin is removed or has expired.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

import msgspec
from msgspec.structs import replace

from statelog.clock import Clock
from statelog.errors import CorruptionError, ErrorKind, StorageError
from statelog.history.operator_history import History
from statelog.history.query_history import QueryHistory
from statelog.log.entry import INITIAL_BATCH, Checkpoint, EntryPlace, FrameReader, QueryCheckpoint
from statelog.log.names import require_identities, require_objects
from statelog.log.numbered import base_name
from statelog.log.open import LOG_FOLDER, PINS_FOLDER
from statelog.log.references import BaseRange, SegmentRef, StoredRun, names_of_runs
from statelog.log_fields import get_logger
from statelog.runs.key_groups import Natural
from statelog.sealed import seal, unseal
from statelog.storage import ObjectInfo, Store
from statelog.storage.store import if_present

_log = get_logger(__name__)

MARGIN_S: Final = 60.0
"""A pin counts so much longer than it lasts, since clocks differ."""

_KIND: Final = "statelog pin"
_VERSION: Final = 1


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


class PinnedOperator(msgspec.Struct, frozen=True):
    """An operator whose state a pin keeps."""

    identity: str
    uid: str
    """Its name when the pin was made."""
    base_ranges: list[BaseRange]
    """The materialized states that count in the checkpoint, or in the state that a consumer builds on."""
    state_bytes: int
    """What a reader of the whole state reads, besides the log's entries."""


class Pin(msgspec.Struct, frozen=True):
    """A checkpoint that is kept for some operators of its query, and all that these need."""

    query_id: str
    batch: Natural
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
    operators: list[PinnedOperator]
    """In order of their names; exactly one in a consumer's pin."""
    objects: list[str]
    """All objects that the operators need, those of the log included, sorted."""
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
    """If not empty, the absolute location of the branch that goes on from the checkpoint."""

    @classmethod
    def of(
        cls,
        query: QueryHistory,
        batch: int,
        *,
        owner: str = "",
        made_ms: int = 0,
        lasts_s: float | None = None,
        since: int | None = None,
        operators: Collection[str] | None = None,
    ) -> Pin:
        """A pin of a checkpoint that the history can restore.

        `operators` are the identities of those that it keeps; None for all. With `since` it also keeps the changes of
        each batch from that one on.
        """
        entry = query.at(batch)
        assert entry is not None, f"checkpoint {batch} is not there"
        names: set[str] = set()
        places: set[EntryPlace] = set()
        kept: list[PinnedOperator] = []
        for history in query.histories_at(batch):
            record = history.record(batch)
            assert record is not None, "the entry has a section of the operator"
            own = record.checkpoint
            if operators is not None and own.identity not in operators:
                continue
            first = record.needed_from if since is None else min(record.needed_from, since)
            needed = list(history.between(first, batch))
            ranges = [] if record.base_map is None else list(record.base_map.ranges)
            parts = _parts(needed, ranges)
            names |= {part.name for part in parts}
            places |= {one.place for one in needed}
            kept.append(PinnedOperator(own.identity, own.uid, ranges, sum(part.length for part in parts)))
        return cls(
            query_id=entry.query_id,
            batch=batch,
            token=entry.token,
            batch_time_ms=entry.batch_time_ms,
            owner=owner,
            made_ms=made_ms,
            lasts_s=lasts_s,
            entries=sorted(places | {entry.place}),
            operators=kept,
            objects=sorted(names | {log_file(place.number) for place in places | {entry.place}}),
            since=since,
        )

    @classmethod
    def of_changes(
        cls,
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
        """A consumer's pin: of an operator's changes from the batch `since` to another one, and of all later ones.

        With `base`, the changes build on a state that it keeps as well.
        """
        kept = list(history.between(since, batch))
        assert kept, f"there are no changes from {since} to {batch}"
        ranges = [] if base is None else base.ranges
        parts = _parts(kept, ranges)
        own = kept[-1]
        return cls(
            query_id=own.query_id,
            batch=own.batch,
            token=own.token,
            batch_time_ms=own.batch_time_ms,
            owner=owner,
            made_ms=made_ms,
            lasts_s=lasts_s,
            entries=[checkpoint.place for checkpoint in kept],
            operators=[PinnedOperator(own.identity, own.uid, ranges, sum(part.length for part in parts))],
            objects=sorted({part.name for part in parts} | {log_file(one.number) for one in kept}),
            since=since,
            max_bytes=max_bytes,
            state_at=None if base is None else base.batch,
            state_token=b"" if base is None else base.token,
        )

    def with_later(self, query: QueryHistory) -> Pin:
        """A consumer's pin that names the changes of later batches of a history too; other pins as they are."""
        if self.max_bytes is None:
            return self
        [own] = self.operators
        history = query.histories.get(own.identity, History())
        last = self.batch if history.latest is None else history.latest.batch
        if last <= self.batch:
            return self
        later = Pin.of_changes(
            history,
            last,
            owner=self.owner,
            made_ms=self.made_ms,
            lasts_s=self.lasts_s,
            since=self.batch + 1,
            max_bytes=self.max_bytes,
        )
        [more] = later.operators
        return replace(
            self,
            batch=later.batch,
            token=later.token,
            batch_time_ms=later.batch_time_ms,
            entries=self.entries + later.entries,
            objects=sorted({*self.objects, *later.objects}),
            operators=[replace(own, state_bytes=own.state_bytes + more.state_bytes)],
        )

    @property
    def place(self) -> EntryPlace:
        """Where the checkpoint's entry is."""
        return self.entries[-1]

    @property
    def state_bytes(self) -> int:
        """What a reader of the whole checkpoint reads, besides the log's entries."""
        return sum(one.state_bytes for one in self.operators)

    def operator(self, identity: str) -> PinnedOperator | None:
        """An operator that the pin keeps; None if it is not one of them."""
        return next((one for one in self.operators if one.identity == identity), None)

    def is_on_line(self, query: QueryHistory) -> bool:
        """Whether the pinned entry counts now, or did until it was deleted."""
        return query.has_on_line(self.batch, self.token, self.place)

    @property
    def changes_from(self) -> int | None:
        """The first batch whose changes a consumer's pin keeps, with those of all later ones; None for other pins."""
        return None if self.max_bytes is None else self.since

    @property
    def base(self) -> PinnedBase | None:
        """The state that a consumer's pin keeps."""
        if self.state_at is None or self.since is None:
            return None
        return PinnedBase(self.state_at, self.state_token, self.since, self.operators[0].base_ranges)

    def covers(self, other: Pin) -> bool:
        """Whether it keeps all that another pin names: that of the same checkpoint, or of another consumer."""
        mine = {one.identity for one in self.operators}
        if not mine.issuperset(one.identity for one in other.operators):
            return False
        if other.changes_from is not None:
            keeps_changes = self.changes_from is not None and self.changes_from <= other.changes_from
            return keeps_changes and (other.state_at is None or self.base == other.base)
        return self.max_bytes is None and other.token == self.token and set(self.objects).issuperset(other.objects)

    def history(self, store: Store, identity: str) -> History:
        """The history of an operator's pinned checkpoint alone; raises CorruptionError or StorageError."""
        return self.query(store).histories[identity]

    def query(self, store: Store) -> QueryHistory:
        """The pinned checkpoint alone, for the operators that the pin keeps; raises the errors of :meth:`history`."""
        kept = {one.identity: one for one in self.operators}
        found: list[QueryCheckpoint] = []
        for entry in self._read_entries(store):
            own = [replace(one, uid=kept[one.identity].uid) for one in entry.sections if one.identity in kept]
            found.append(replace(entry, sections=own, retained_from=self.batch, ended=[], cuts=[]))
        if self.max_bytes is None:
            own = [replace(one, base_ranges=kept[one.identity].base_ranges) for one in found[-1].sections]
            found[-1] = replace(found[-1], sections=own)
        return QueryHistory(found)

    def lacks(self, store: Store) -> set[str]:
        """The operators of the checkpoint that the pin does not keep; raises the errors of :meth:`history`."""
        sections = self._read_entries(store)[-1].sections
        return {section.identity for section in sections if self.operator(section.identity) is None}

    def _read_entries(self, store: Store) -> list[QueryCheckpoint]:
        found: list[QueryCheckpoint] = []
        readers: dict[int, FrameReader] = {}
        for place in self.entries:
            name = log_file(place.number)
            reader = readers.setdefault(place.number, FrameReader(store, name, place.number))
            frame = reader.frame_at(place.offset, sys.maxsize)
            if frame is None or not isinstance(frame.entry, QueryCheckpoint):
                raise CorruptionError(
                    f"{name}: the entry at offset {place.offset}, which a pin names, is no checkpoint.",
                    hint="Restore the file from a copy.",
                )
            found.append(frame.entry)
        if found[-1].token != self.token:
            raise CorruptionError(
                f"The entries that a pin of checkpoint {self.batch} names are not those of its time.",
                hint="Restore the log from a copy.",
            )
        return found


def _parts(checkpoints: Iterable[Checkpoint], ranges: Iterable[BaseRange]) -> list[StoredRun | SegmentRef]:
    """The segments of some checkpoints, and the runs of some base ranges."""
    parts: list[StoredRun | SegmentRef] = [segment for checkpoint in checkpoints for segment in checkpoint.segments]
    return parts + [run for base_range in ranges for run in base_range.runs]


def log_file(number: int) -> str:
    """The object name of a log file."""
    return f"{LOG_FOLDER}/{base_name(number)}"


def standing_pins(store: Store, now_s: float, batch: int | None = None) -> Iterator[tuple[ObjectInfo, Pin]]:
    """The pins of checkpoints that hold for others and stand for a while yet, of one batch or of all.

    They come in order of their batches. Raises the errors of :func:`read_pin`.
    """
    return ((info, pin) for info, pin in holding_pins(store, now_s, batch) if pin.max_bytes is None)


def pins_of(
    store: Store, query: QueryHistory, identity: str, now_s: float, batch: int | None = None
) -> Iterator[tuple[ObjectInfo, Pin]]:
    """The :func:`standing_pins` that keep an operator, and whose checkpoints lie on the query's line."""
    for info, pin in standing_pins(store, now_s, batch):
        if pin.operator(identity) is not None and pin.is_on_line(query):
            yield info, pin


def consumer_pins(store: Store, identity: str, now_s: float) -> Iterator[tuple[ObjectInfo, Pin]]:
    """The pins of an operator's consumers that hold and stand for a while yet; raises those of :func:`read_pin`."""
    for info, pin in holding_pins(store, now_s):
        if pin.max_bytes is not None and pin.operator(identity) is not None:
            yield info, pin


def holding_pins(store: Store, now_s: float, batch: int | None = None) -> Iterator[tuple[ObjectInfo, Pin]]:
    """The pins of both kinds that hold for others and stand for a while yet; raises the errors of :func:`read_pin`."""
    for info in store.list(f"{PINS_FOLDER}/" if batch is None else f"{PINS_FOLDER}/{batch:020}-"):
        pin = read_pin(store, info.name)
        if pin is not None and pin.holds and not has_expired(pin, info, now_s, -MARGIN_S):
            yield info, pin


def pin_name(batch: int, token: bytes) -> str:
    """The object of a pin; `token` is unique."""
    return f"{PINS_FOLDER}/{batch:020}-{token.hex()}.json"


def write_pin(store: Store, name: str, pin: Pin) -> None:
    """Store a pin; whether it holds is for the maker to see."""
    store.put_if_absent(name, seal(pin, _KIND, _VERSION))


def read_pin(store: Store, name: str) -> Pin | None:
    """Read a pin; None if it is gone. Raises the errors of :func:`unseal`, or StorageError."""
    data = if_present(lambda: store.read(name))
    if data is None:
        return None
    pin = unseal(data, Pin, kind=_KIND, version=_VERSION, name=name)
    require_identities([one.identity for one in pin.operators], name)
    bases = [part.base for one in pin.operators for part in one.base_ranges]
    require_objects({*pin.objects, *names_of_runs(bases)}, name)
    is_consumers = pin.max_bytes is not None
    if not pin.entries or (is_consumers and (pin.since is None or len(pin.operators) != 1)):
        raise CorruptionError(
            f"{name}: the pin does not say what it keeps.",
            kind=ErrorKind.FORMAT,
            hint="Only another program can have written it. See who may write there.",
        )
    return pin


def has_expired(pin: Pin, info: ObjectInfo, now_s: float, margin_s: float = MARGIN_S) -> bool:
    """Whether a pin's time is over, `margin_s` after its end."""
    return pin.lasts_s is not None and now_s > info.modified_s + pin.lasts_s + margin_s


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
        if pin.max_bytes is None:
            return False
        assert pin.since is not None, "every consumer begins with some batch"
        # The changes up to the state that a consumer builds on are part of that state.
        first = pin.since if pin.state_at is None else pin.state_at + 1
        [own] = pin.operators
        history = query.histories.get(own.identity)
        kept_bytes = 0 if history is None else history.changes_bytes(first)
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
