"""Finds the checkpoint of an operator that is to be read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Protocol, TypeAlias

from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, ErrorKind, StateMissingError
from statelog.history.operator_history import History
from statelog.history.pins import Pin, pins_of, read_pin, standing_pins
from statelog.history.query_history import QueryHistory, read_history
from statelog.log.entry import Checkpoint, QueryCheckpoint, Settings
from statelog.log.open import LOG_FOLDER, PINS_FOLDER, STATE_FOLDER, open_location
from statelog.numbers import is_whole
from statelog.reading.manifest import MANIFEST
from statelog.runs.schema import StateSchema
from statelog.shown import utc_time
from statelog.storage import Store
from statelog.storage.store import if_present

SPARK_METADATA: Final = "metadata"
"""The file that Spark writes into a checkpointLocation when a query starts."""

At: TypeAlias = int | datetime | str
"""A checkpoint: its batch; a time, which means the newest one whose batch is not later; or the name of a pin.

Users may pass a text for each, see :func:`parse_at`."""


def parse_at(text: str) -> At:
    """A checkpoint from text: a batch, a pin, or a time in ISO 8601, in UTC without a zone; else ConfigurationError."""
    if text.startswith(f"{PINS_FOLDER}/"):
        return text
    try:
        return int(text)
    except ValueError:
        pass
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigurationError(
            f"'{text}' is neither a batch nor a time nor the name of a pin.",
            kind=ErrorKind.VALUE_MISMATCH,
            hint="Pass a number, or a time such as 2026-05-01T12:00:00.",
        ) from error
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def checked_at(at: object) -> At | None:
    """A checkpoint as a user names it: a text as :func:`parse_at`; ConfigurationError if it is nothing of the kind."""
    if at is None or isinstance(at, datetime):
        return at
    if isinstance(at, str):
        return parse_at(at)
    if is_whole(at):
        return int(at)
    raise ConfigurationError(
        f"at is {at!r:.80}.",
        kind=ErrorKind.VALUE_MISMATCH,
        hint="Pass a batch, a datetime with its zone, a text such as '2026-05-01T12:00:00+02:00', or a pin's name.",
    )


class StoredOperator(Protocol):
    """What an operator has in a checkpoint or in a savepoint."""

    @property
    def name(self) -> str:
        """The operator in messages."""
        ...

    @property
    def uid(self) -> str:
        """The operator's name."""
        ...

    @property
    def key_schema(self) -> bytes:
        """The key's fields, encoded; empty for an operator without keys."""
        ...

    @property
    def states(self) -> Sequence[StateSchema]:
        """The operator's states."""
        ...

    @property
    def batch_time_ms(self) -> int:
        """Spark's time of the batch, milliseconds since the Unix epoch."""
        ...

    @property
    def watermark_ms(self) -> int:
        """The watermark in the batch, milliseconds since the Unix epoch."""
        ...

    @property
    def settings(self) -> Settings:
        """The settings that the state depends on."""
        ...


@dataclass(frozen=True)
class StoredQuery:
    """A query's log, as it was when it was read."""

    store: Store
    location: str
    """Of the log: what the user has passed, or the folder of state in it."""
    history: QueryHistory
    _pinned: dict[tuple[str, ...], QueryHistory] = field(default_factory=dict, compare=False, repr=False)
    """What pins keep, as far as it was read, by the pins' entries and operators."""

    def require_checkpoint(self) -> QueryCheckpoint:
        """The newest checkpoint; StateMissingError if there is none yet."""
        if self.history.latest is None:
            raise StateMissingError(
                f"{self.location} has no checkpoint yet.", hint="Read it after the query's first batch."
            )
        return self.history.latest

    def retained(self, identity: str, batch: int) -> Source | None:
        """An operator's checkpoint of a batch; None if the query does not retain it."""
        history = self.history.histories.get(identity)
        checkpoint = None if history is None or not history.has_batch(batch) else history.at(batch)
        return None if checkpoint is None else Source(self, self.history, checkpoint)

    def pinned(self, identity: str, pin: Pin) -> Source:
        """An operator's checkpoint that a pin keeps; CorruptionError or StorageError if it cannot be read."""
        key = repr(pin.entries), *(one.identity for one in pin.operators)
        if key not in self._pinned:
            self._pinned[key] = pin.query(self.store)
        lineage = self._pinned[key]
        checkpoint = lineage.histories[identity].latest
        assert checkpoint is not None, "a pin names its checkpoint"
        return Source(self, lineage, checkpoint, pin)

    def uids_of(self, pin: Pin) -> dict[str, str]:
        """The operators that a pin keeps: their names by identity, the present ones as far as the log tells them."""
        return {one.identity: self.history.name_of(one.identity) or one.uid for one in pin.operators}

    def identities(self, uid: str | None) -> list[str]:
        """The operators of the newest checkpoint in order of their names, or only `uid`; raises as :meth:`one`."""
        if uid is not None:
            return [self.one(uid)]
        return [identity for _, identity in sorted(self.history.names.items())]

    def named(self, uid: str | None, pins: Iterable[Pin]) -> dict[str, str]:
        """The operators of the newest checkpoint and of some pins, or only those named `uid`: names by identity.

        Raises the errors of :meth:`one` if none is named `uid`.
        """
        names = {identity: name for name, identity in self.history.names.items()}
        for pin in pins:
            names |= self.uids_of(pin)
        if uid is not None and uid not in names.values():
            self.one(uid)
        return {identity: name for identity, name in names.items() if uid in (None, name)}

    def one(self, uid: str | None) -> str:
        """The operator named `uid` of the newest checkpoint, or its only one.

        Raises ConfigurationError if there is no such operator, or several and no `uid`; StateMissingError if there is
        no checkpoint yet.
        """
        self.require_checkpoint()
        names = self.history.names
        if uid is not None and uid in names:
            return names[uid]
        if uid is None and len(names) == 1:
            return next(iter(names.values()))
        shown = _listed(names)
        if uid is None and names:
            raise ConfigurationError(
                f"{self.location} has several operators: {shown}.", hint="Pass one of them as uid."
            )
        what = "no operator" if uid is None else f"no operator '{uid}'"
        raise ConfigurationError(
            f"{self.location} has {what}; it has {shown}.",
            hint="Pass one of them as uid. Given up state can be read through a pin: pass the pin's name as at=.",
        )


@dataclass(frozen=True)
class Source:
    """An operator's checkpoint that is being read."""

    stored: StoredQuery
    """The operator's query."""
    lineage: QueryHistory
    """The checkpoints that lead to it: those of the query, or of a pin alone."""
    checkpoint: Checkpoint
    pin: Pin | None = None
    """What keeps the checkpoint, if the query does not retain it."""

    @property
    def store(self) -> Store:
        """The store of the query's location."""
        return self.stored.store

    @property
    def location(self) -> str:
        """The query's location."""
        return self.stored.location

    @property
    def query(self) -> QueryHistory:
        """The checkpoints of the operator's query."""
        return self.stored.history

    @property
    def history(self) -> History:
        """The operator's checkpoints that lead to it."""
        return self.lineage.histories[self.identity]

    @property
    def identity(self) -> str:
        """The operator's identity."""
        return self.checkpoint.identity

    @property
    def is_on_line(self) -> bool:
        """Whether it can be read by its batch: it was not taken back, nor the operator's state given up."""
        return self.pin is None or (self.identity in self.query.histories and self.pin.is_on_line(self.query))

    def follows(self, earlier: Source) -> bool:
        """Whether the changes of the batches after an earlier checkpoint of the operator lead to this one."""
        known = self.history.at(earlier.checkpoint.batch)
        if known is not None:
            return known.token == earlier.checkpoint.token
        return self.identity == earlier.identity and self.is_on_line and earlier.is_on_line

    def before(self, batch: int) -> Source:
        """An earlier checkpoint of the operator, from which changes lead to this one.

        Raises StateMissingError if it is neither retained nor pinned, or not of this line.
        """
        retained = self.stored.retained(self.identity, batch)
        if retained is not None and self.follows(retained):
            return retained
        pins = pins_of(self.store, self.query, self.identity, SystemClock().now_s(), batch)
        for _, pin in reversed(list(pins)):
            found = self.stored.pinned(self.identity, pin)
            if self.follows(found):
                return found
        raise _no_checkpoint(self.name, batch, self.history.oldest, self.checkpoint)

    def needs(self, since: int | None = None) -> Pin:
        """What it needs, as a pin would name it, with the changes from the batch `since` on."""
        return Pin.of(self.lineage, self.checkpoint.batch, since=since, operators=[self.identity])

    @property
    def name(self) -> str:
        """The operator in messages."""
        return f"operator '{self.checkpoint.uid}' at {self.location}"

    @property
    def uid(self) -> str:
        """The operator's name."""
        return self.checkpoint.uid

    @property
    def key_schema(self) -> bytes:
        """The key's fields, encoded; empty for an operator without keys."""
        return self.checkpoint.key_schema

    @property
    def states(self) -> Sequence[StateSchema]:
        """The operator's states."""
        return self.checkpoint.states

    @property
    def batch_time_ms(self) -> int:
        """Spark's time of the batch, milliseconds since the Unix epoch."""
        return self.checkpoint.batch_time_ms

    @property
    def watermark_ms(self) -> int:
        """The watermark in the batch, milliseconds since the Unix epoch."""
        return self.checkpoint.watermark_ms

    @property
    def settings(self) -> Settings:
        """The settings that the state depends on."""
        return self.checkpoint.settings


def open_source(location: str, uid: str | None, at: At | None) -> Source:
    """Open an operator's checkpoint; `location` is a query's checkpointLocation or a location of state.

    `uid` names the operator, and None the only one. `at` is the checkpoint, and None the newest one. Raises
    ConfigurationError if there is no such operator, StateMissingError if it has no such checkpoint, CorruptionError or
    StorageError if the log cannot be read.
    """
    return choose_source(open_query(location), uid, at)


def choose_source(query: StoredQuery, uid: str | None, at: At | None) -> Source:
    """Choose an operator's checkpoint of a query; the rest is that of :func:`open_source`."""
    at = checked_at(at)
    if isinstance(at, str):
        return _of_pin(query, uid, at)
    return choose_checkpoint(query, query.one(uid), at)


def choose_checkpoint(query: StoredQuery, identity: str, at: int | datetime | None = None) -> Source:
    """Choose a checkpoint of an operator on the query's line; the rest is that of :func:`open_source`."""
    latest = query.history.histories[identity].latest
    assert latest is not None, "an operator has a checkpoint"
    name = f"operator '{latest.uid}' at {query.location}"
    if isinstance(at, datetime):
        chosen = _newest_before(at, query, identity, name)
    else:
        chosen = latest.batch if at is None else at
    retained = query.retained(identity, chosen)
    if retained is not None:
        return retained
    pins = [pin for _, pin in pins_of(query.store, query.history, identity, SystemClock().now_s(), chosen)]
    if pins:
        return query.pinned(identity, pins[-1])
    raise _no_checkpoint(name, chosen, query.history.histories[identity].oldest, latest)


def _no_checkpoint(
    name: str, batch: int, oldest: Checkpoint | QueryCheckpoint | None, latest: Checkpoint | QueryCheckpoint
) -> StateMissingError:
    kept = "none can be restored" if oldest is None else f"it retains {oldest.batch} to {latest.batch}"
    return StateMissingError(
        f"{name[0].upper()}{name[1:]} has no checkpoint {batch}: {kept}.",
        hint="Options(retained_checkpoints=...) keeps more of them. One that was taken back can be read while a pin"
        " keeps it: pass the pin's name as at=.",
    )


def read_named_pin(query: StoredQuery, name: str) -> Pin:
    """Read the pin of a checkpoint, on whichever line it lies; StateMissingError if there is none of this name."""
    pin = read_pin(query.store, name) if name.startswith(f"{PINS_FOLDER}/") else None
    if pin is None or pin.max_bytes is not None:
        raise StateMissingError(
            f"{query.location} has no pin '{name}' of a checkpoint.",
            hint="Pass a name that list_pins returns; the pin may have expired.",
        )
    return pin


def _of_pin(query: StoredQuery, uid: str | None, name: str) -> Source:
    """The checkpoint that a pin keeps, on whichever line it lies; the operator may have ended since."""
    pin = read_named_pin(query, name)
    uids = query.uids_of(pin)
    # The present name counts before the one of the pin's time, which another operator may have now.
    for names in (uids, {one.identity: one.uid for one in pin.operators}):
        found = [identity for identity, known in names.items() if uid in (None, known)]
        if len(found) == 1:
            retained = query.retained(found[0], pin.batch)
            is_retained = retained is not None and retained.checkpoint.token == pin.token
            return retained if retained is not None and is_retained else query.pinned(found[0], pin)
    raise ConfigurationError(
        f"{query.location}: the pin '{name}' keeps {_listed(uids.values())}.", hint="Pass one of them as uid."
    )


def choose_for_all(query: StoredQuery, at: At | None) -> tuple[QueryHistory, int]:
    """Choose a checkpoint of all operators of a query, or of those that a pin keeps if `at` is its name.

    Returns the checkpoints of these operators that lead to it, and its batch; the rest is that of :func:`open_source`.
    """
    at = checked_at(at)
    if isinstance(at, str):
        pin = read_named_pin(query, at)
        return pin.query(query.store), pin.batch
    history, latest, name = query.history, query.require_checkpoint(), f"the query at {query.location}"
    pins: dict[int, list[Pin]] = defaultdict(list)
    if at is not None:
        for _, pin in standing_pins(query.store, SystemClock().now_s(), at if isinstance(at, int) else None):
            if pin.is_on_line(history):
                pins[pin.batch].append(pin)
    times_ms = {batch: of_batch[-1].batch_time_ms for batch, of_batch in pins.items()}
    if isinstance(at, datetime):
        times_ms |= {entry.batch: entry.batch_time_ms for entry in history.entries if history.has_batch(entry.batch)}
        wanted = _before(at, times_ms)
    else:
        wanted = [latest.batch if at is None else at]
    for batch in wanted:
        if history.has_batch(batch):
            return history, batch
        for pin in reversed(pins.get(batch, [])):
            if pin.lacks(query.store).issubset(history.ended):
                return pin.query(query.store), batch
    if isinstance(at, datetime):
        raise _none_before(at, times_ms, name)
    raise _no_checkpoint(name, wanted[0], history.oldest, latest)


def _newest_before(time: datetime, query: StoredQuery, identity: str, name: str) -> int:
    """The newest checkpoint on the line that can be read and whose batch is not after a time."""
    history = query.history.histories[identity]
    times_ms = {
        checkpoint.batch: checkpoint.batch_time_ms
        for checkpoint in history.checkpoints
        if history.has_batch(checkpoint.batch)
    }
    for _, pin in pins_of(query.store, query.history, identity, SystemClock().now_s()):
        times_ms.setdefault(pin.batch, pin.batch_time_ms)
    batches = _before(time, times_ms)
    if not batches:
        raise _none_before(time, times_ms, name)
    return batches[0]


def _before(time: datetime, times_ms: Mapping[int, int]) -> list[int]:
    """The batches that are not after a time, of some with their times, newest first."""
    limit_ms = time_limit_ms(time)
    return sorted((batch for batch, time_ms in times_ms.items() if time_ms <= limit_ms), reverse=True)


def _none_before(time: datetime, times_ms: Mapping[int, int], name: str) -> StateMissingError:
    first = min(times_ms.values(), default=None)
    oldest = "none" if first is None else f"the oldest one is of {utc_text(first)}"
    return StateMissingError(
        f"{name[0].upper()}{name[1:]} has no checkpoint of {time.isoformat()} or before: {oldest}.",
        hint="Options(retained_s=...) keeps checkpoints for longer.",
    )


def time_limit_ms(time: datetime) -> float:
    """A time in milliseconds since the Unix epoch; ConfigurationError if it has no zone."""
    if time.tzinfo is None:
        raise ConfigurationError(
            f"at is {time!r}, which has no time zone.",
            kind=ErrorKind.VALUE_MISMATCH,
            hint="Pass a datetime with tzinfo, such as datetime.now(timezone.utc), or a batch.",
        )
    return time.timestamp() * 1000


def utc_text(time_ms: int) -> str:
    """A time in UTC, as ISO 8601 has it, to the millisecond."""
    time = utc_time(time_ms)
    return f"{time_ms} ms" if time is None else time.isoformat(timespec="milliseconds")


def open_query(location: str) -> StoredQuery:
    """Read the log at a location, or in the folder of a checkpointLocation; ConfigurationError if there is none."""
    store, place = find_log(location)
    return StoredQuery(store, place, read_history(store))


def find_log(location: str) -> tuple[Store, str]:
    """The place of a query's log, and its store; ConfigurationError if there is none."""
    for place in places_of(location):
        store = open_location(place)
        if store.list(f"{LOG_FOLDER}/"):
            return store, place
    if is_savepoint(location):
        raise ConfigurationError(
            f"{location} is a savepoint: it has the state of one batch, and no log.",
            kind=ErrorKind.CHECKPOINT_MISSING,
            hint="Only read_state, list_operators and list_states read a savepoint; statelog.restore begins a query"
            " with it.",
        )
    if any(info.name == SPARK_METADATA for info in open_location(location).list(SPARK_METADATA)):
        raise ConfigurationError(
            f"{location} holds no state yet: it is the checkpointLocation of a query without a checkpoint.",
            kind=ErrorKind.CHECKPOINT_MISSING,
            hint="Read it after the query's first batch. If its operators were given a location, pass that.",
        )
    raise ConfigurationError(
        f"{location} holds no state: neither it nor {places_of(location)[1]} has a log.",
        kind=ErrorKind.CHECKPOINT_MISSING,
        hint="Pass the query's checkpointLocation after its first batch, or the location of its state.",
    )


def is_savepoint(location: str) -> bool:
    """Whether a location is that of a savepoint: it has a manifest, and no log."""
    if if_present(lambda: open_location(location).size_bytes(MANIFEST)) is None:
        return False
    return not any(open_location(place).list(f"{LOG_FOLDER}/") for place in places_of(location))


def places_of(location: str) -> tuple[str, str]:
    """Where a location's log may be: there, or in the folder of a checkpointLocation."""
    return location, f"{location.rstrip('/')}/{STATE_FOLDER}"


def _listed(uids: Iterable[str]) -> str:
    return ", ".join(f"'{uid}'" for uid in sorted(uids)) or "none"
