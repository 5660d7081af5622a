"""Pins: stored documents that protect a checkpoint from deletion, for users, readers, consumers and branches.

A pin names everything that its checkpoint needs. The coordinator and the creators of pins share no lock; the order of
their steps makes this safe. A creator writes the pin, *then* reads the log again: the pin holds if the checkpoint is
still retained. The coordinator deletes only what no durable entry retains, and lists the pins *after* it has chosen
what to delete. So if a pin holds, nothing that it names is deleted before the pin is removed or has expired.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, TypeVar

import msgspec
from msgspec.structs import asdict, replace

from statelog.clock import Clock, SystemClock
from statelog.errors import CorruptionError, ErrorKind, PinExpiredError, StatelogError, StorageError
from statelog.history.footprint import Footprint
from statelog.history.operator_history import History
from statelog.history.query_history import QueryHistory, read_history
from statelog.log.entry import QueryCheckpoint
from statelog.log.open import PINS_FOLDER
from statelog.log.references import BaseRange, names_of_runs, require_identities, require_objects
from statelog.sealed import seal, unseal
from statelog.storage import ObjectInfo, Store
from statelog.storage.store import if_present

MARGIN_S: Final = 60.0
"""A pin counts for this much longer than it lasts, because clocks differ."""

_KIND: Final = "statelog pin"
_VERSION: Final = 1
_ATTEMPTS: Final = 5
_LISTS: Final = 20
_UNCONFIRMED_S: Final = 600.0
"""How long a pin without an end lasts until its creator has seen that it holds: the write may be repeated late."""

_Result = TypeVar("_Result")


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """For a user, or for a reader at work."""


class Branch(msgspec.Struct, frozen=True, tag="branch"):
    """For a branch that continues from the checkpoint."""

    location: str
    """Location of the branch's state; absolute."""


class Consumer(msgspec.Struct, frozen=True, tag="consumer"):
    """For a consumer of changes.

    Instead of a checkpoint, the changes of each batch from the footprint's `since` on are kept, including those of
    batches after its own.
    """

    max_bytes: int
    """Changes that take more bytes are no longer kept."""
    state_at: int | None = None
    """If not None, the state after this batch is also kept: the `base_ranges`, and the changes from `since` on that
    they lack.
    """
    state_token: bytes = b""
    """Token of that batch's entry."""


class PinnedBase(msgspec.Struct, frozen=True):
    """The parts from which the state after a batch, and after each later one, can be made."""

    batch: int
    token: bytes
    """Token of the batch's entry; empty for the empty state before batch 0."""
    since: int
    """The first batch whose changes are needed in addition to the bases; not after `batch` if that has an entry.
    """
    ranges: list[BaseRange]
    """The materialized states that count in the batch's checkpoint."""


class Pin(Footprint, frozen=True, kw_only=True):
    """A footprint, and the promise that everything in it stays."""

    owner: str
    """Who created the pin, and what for. A consumer finds its own pin by it."""
    made_ms: int
    """Milliseconds since the Unix epoch, by the creator's clock."""
    lasts_s: float | None
    """Counted from the modification time that the store gives the pin; None for no limit."""
    purpose: Hold | Branch | Consumer
    holds: bool = False
    """Whether its creator has seen that it holds, so that others may rely on it."""

    @classmethod
    def on(
        cls,
        needed: Footprint,
        purpose: Hold | Branch | Consumer | None = None,
        *,
        owner: str = "",
        made_ms: int = 0,
        lasts_s: float | None = None,
    ) -> Pin:
        """A pin of a footprint."""
        return cls(**asdict(needed), owner=owner, made_ms=made_ms, lasts_s=lasts_s, purpose=purpose or Hold())

    @property
    def consumer(self) -> Consumer | None:
        """The consumer that the pin is for."""
        return self.purpose if isinstance(self.purpose, Consumer) else None

    @property
    def branch(self) -> str:
        """The absolute location of the branch that the pin is for; empty for other pins."""
        return self.purpose.location if isinstance(self.purpose, Branch) else ""

    @property
    def changes_from(self) -> int | None:
        """The first batch whose changes a consumer's pin keeps, with those of all later ones; None for other pins."""
        return None if self.consumer is None else self.since

    @property
    def base(self) -> PinnedBase | None:
        """The state that a consumer's pin keeps."""
        consumer = self.consumer
        if consumer is None or consumer.state_at is None or self.since is None:
            return None
        return PinnedBase(consumer.state_at, consumer.state_token, self.since, self.operators[0].base_ranges)

    @property
    def _is_of_checkpoint(self) -> bool:
        return self.consumer is None

    def is_retained(self, query: QueryHistory) -> bool:
        """Whether a log retains the checkpoint, or the changes if it is a consumer's."""
        entry = query.at(self.batch)
        if self.consumer is None or entry is None or entry.token != self.token:
            return super().is_retained(query)
        return self._retains(query, self.consumer.state_at if self.operators[0].base_ranges else None)

    def _read_entries(self, store: Store) -> list[QueryCheckpoint]:
        """As for a footprint; PinExpiredError if the pin, and then what it names, was deleted in the meantime."""
        try:
            return super()._read_entries(store)
        except StorageError as error:
            if error.kind is ErrorKind.OBJECT_MISSING and not self._stands(store):
                raise gone(self) from error
            raise

    def _stands(self, store: Store) -> bool:
        found = (read_pin(store, info.name) for info in store.list(f"{PINS_FOLDER}/{self.batch:020}-"))
        return any(pin is not None and (pin.owner, pin.token) == (self.owner, self.token) for pin in found)

    def with_later(self, query: QueryHistory) -> Pin:
        """A consumer's pin that also names the changes of later batches of a history; other pins unchanged."""
        if self.consumer is None:
            return self
        [own] = self.operators
        history = query.histories.get(own.identity, History())
        last = self.batch if history.latest is None else history.latest.batch
        if last <= self.batch:
            return self
        later = Footprint.of_changes(history, last, since=self.batch + 1)
        return replace(
            self,
            batch=later.batch,
            token=later.token,
            batch_time_ms=later.batch_time_ms,
            entries=self.entries + later.entries,
            objects=sorted({*self.objects, *later.objects}),
            operators=[replace(own, state_bytes=own.state_bytes + later.state_bytes)],
        )

    def covers(self, other: Pin) -> bool:
        """Whether it keeps everything that another pin of the same checkpoint, or of another consumer, names."""
        mine = {one.identity for one in self.operators}
        if not mine.issuperset(one.identity for one in other.operators):
            return False
        if other.changes_from is not None:
            keeps_changes = self.changes_from is not None and self.changes_from <= other.changes_from
            return keeps_changes and (other.base is None or self.base == other.base)
        return self.consumer is None and other.token == self.token and set(self.objects).issuperset(other.objects)


def standing_pins(store: Store, now_s: float, batch: int | None = None) -> Iterator[tuple[ObjectInfo, Pin]]:
    """The pins of checkpoints that hold for others and will exist for a while, of one batch or of all.

    They come in order of their batches. Raises the errors of :func:`read_pin`.
    """
    return ((info, pin) for info, pin in holding_pins(store, now_s, batch) if pin.consumer is None)


def pins_of(
    store: Store, query: QueryHistory, identity: str, now_s: float, batch: int | None = None
) -> Iterator[tuple[ObjectInfo, Pin]]:
    """The :func:`standing_pins` that keep an operator, and whose checkpoints lie on the query's line."""
    for info, pin in standing_pins(store, now_s, batch):
        if pin.operator(identity) is not None and pin.is_on_line(query):
            yield info, pin


def consumer_pins(store: Store, identity: str, now_s: float) -> Iterator[tuple[ObjectInfo, Pin]]:
    """The pins of an operator's consumers that hold and will exist for a while; raises as :func:`read_pin`."""
    for info, pin in holding_pins(store, now_s):
        if pin.consumer is not None and pin.operator(identity) is not None:
            yield info, pin


def holding_pins(store: Store, now_s: float, batch: int | None = None) -> Iterator[tuple[ObjectInfo, Pin]]:
    """The pins of both kinds that hold for others and will exist for a while; raises the errors of :func:`read_pin`."""
    for info in store.list(f"{PINS_FOLDER}/" if batch is None else f"{PINS_FOLDER}/{batch:020}-"):
        pin = read_pin(store, info.name)
        if pin is not None and pin.holds and not has_expired(pin, info, now_s, -MARGIN_S):
            yield info, pin


def pin_name(batch: int, token: bytes) -> str:
    """The object name of a pin; `token` is unique."""
    return f"{PINS_FOLDER}/{batch:020}-{token.hex()}.json"


def write_pin(store: Store, name: str, pin: Pin) -> None:
    """Store a pin; its creator has to see whether it holds."""
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
    if not pin.entries or (pin.consumer is not None and (pin.since is None or len(pin.operators) != 1)):
        raise CorruptionError(
            f"{name}: the pin does not say what it keeps.",
            kind=ErrorKind.FORMAT,
            hint="Only another program can have written it. Check who may write there.",
        )
    return pin


def read_pins(store: Store, read: Callable[[str], _Result | None]) -> list[tuple[ObjectInfo, _Result]]:
    """List the pins, and read each; `read` returns None for a pin that is gone.

    Such a pin may have been renewed under another name, which the list lacks. So the pins are then listed again, and
    all that are returned existed at one time. Raises StorageError if pins go each time.
    """
    known: dict[str, _Result] = {}
    for _ in range(_LISTS):
        infos = store.list(f"{PINS_FOLDER}/")
        for info in infos:
            if info.name not in known:
                found = read(info.name)
                if found is None:
                    break
                known[info.name] = found
        else:
            return [(info, known[info.name]) for info in infos]
    raise StorageError(
        f"{PINS_FOLDER}: in {_LISTS} attempts, pins were removed while they were read.", hint="Try again later."
    )


def has_expired(pin: Pin, info: ObjectInfo, now_s: float, margin_s: float = MARGIN_S) -> bool:
    """Whether a pin's time is over, `margin_s` after its end."""
    return pin.lasts_s is not None and now_s > info.modified_s + pin.lasts_s + margin_s


def retry_given_up(
    attempt: Callable[[], _Result],
    *,
    is_fixed: bool = False,
    errors: tuple[type[StatelogError], ...] = (PinExpiredError,),
) -> _Result:
    """Choose a checkpoint and read it, or pin it; try again if its running query dropped it in the meantime.

    One that `is_fixed`, because a user has named it, will not come back. `errors` say that a checkpoint was dropped.
    """
    for _ in range(1 if is_fixed else _ATTEMPTS):
        try:
            return attempt()
        except errors as error:
            last = error
    raise last


class HeldPin:
    """A pin that its creator renews, and removes at the end.

    `lasts_s` is None for a pin that does not expire. With `is_shared`, others may rely on it, too.

    Creating one raises PinExpiredError if what it names is no longer retained, and StorageError if the store does not
    accept the pin, for example without the right to write.
    """

    def __init__(
        self,
        store: Store,
        needed: Footprint,
        purpose: Hold | Branch | Consumer | None = None,
        *,
        owner: str,
        lasts_s: float | None,
        is_shared: bool = False,
        clock: Clock | None = None,
        new_token: Callable[[], bytes] = lambda: secrets.token_bytes(8),
    ) -> None:
        self._store = store
        self._clock = clock or SystemClock()
        self._new_token = new_token
        self._lasts_s = _UNCONFIRMED_S if is_shared and lasts_s is None else lasts_s
        made_ms = int(self._clock.now_s() * 1000)
        self._pin = Pin.on(needed, purpose, owner=owner, made_ms=made_ms, lasts_s=self._lasts_s)
        self.name, self._made_s = self._write()
        try:
            self._require_hold()
            if is_shared:
                self._pin = replace(self._pin, holds=True, lasts_s=lasts_s)
                self._replace()
                self._lasts_s = lasts_s
        except BaseException:
            self.release()
            raise

    def _require_hold(self) -> None:
        """See whether the pin that was written holds; PinExpiredError if it does not."""
        later = self._pin.with_later(self._read_retaining())
        if later != self._pin:
            # The query may have listed the pins after these batches and before the pin. Later lists have either.
            self._pin = later
            self._replace()
            self._read_retaining()

    def _read_retaining(self) -> QueryHistory:
        """Read the log; PinExpiredError unless the log, or another pin, keeps everything that the pin names."""
        query = read_history(self._store)
        if not (self._pin.is_retained(query) or self._another_stands()):
            raise gone(self._pin)
        return query

    def _replace(self) -> None:
        """Write the pin anew while it holds, and remove the former one."""
        former = self.name
        self.name, made_s = self._write()
        self._remove(former)
        self._require_time_left(self._made_s)  # it must have existed until the new one did
        self._made_s = made_s

    def _write(self) -> tuple[str, float]:
        """Store the pin under a new name; returns it, and a time before the pin's own."""
        name, before_s = pin_name(self._pin.batch, self._new_token()), self._clock.monotonic_s()
        try:
            write_pin(self._store, name, self._pin)
        except BaseException:
            self._remove(name)  # it may exist nevertheless
            raise
        return name, before_s

    def _require_time_left(self, made_s: float) -> None:
        """Raise PinExpiredError if a pin made at a time has expired by now."""
        passed_s = self._clock.monotonic_s() - made_s
        if self._lasts_s is not None and passed_s > self._lasts_s:
            raise PinExpiredError(
                f"The pin of checkpoint {self._pin.batch} of {_names(self._pin)} lasted {self._lasts_s:g} s, but the"
                f" reader has not asked for rows for {passed_s:.0f} s.",
                hint="Read the rows faster, or read from a savepoint.",
            )

    def _another_stands(self) -> bool:
        """Whether another pin, which holds, names the same objects."""
        found = holding_pins(self._store, self._clock.now_s())
        return any(other.covers(self._pin) for _, other in found)

    def keep(self) -> None:
        """Renew the pin once half of its time is over; PinExpiredError if all of it is."""
        if self._lasts_s is None:
            return
        self._require_time_left(self._made_s)
        if self._clock.monotonic_s() - self._made_s > self._lasts_s / 2:
            self._replace()

    def stands(self) -> bool:
        """Whether the pin is still there: a query whose clock is ahead may have deleted it before its end."""
        return if_present(lambda: self._store.size_bytes(self.name)) is not None

    def release(self) -> None:
        """Remove the pin; if that fails, it expires."""
        self._remove(self.name)

    def _remove(self, name: str) -> None:
        with suppress(StorageError):
            self._store.delete([name])


def is_retained(store: Store, needed: Footprint) -> bool:
    """Whether the log still retains a checkpoint, or the changes if it is a consumer's."""
    return needed.is_retained(read_history(store))


def gone(needed: Footprint) -> PinExpiredError:
    """The error for a checkpoint whose files may be gone."""
    return PinExpiredError(
        f"Checkpoint {needed.batch} of {_names(needed)} is no longer retained.",
        hint="Read a newer checkpoint, or retain more: Options(retained_checkpoints=...).",
    )


def _names(needed: Footprint) -> str:
    return ", ".join(f"operator '{one.uid}'" for one in needed.operators)
