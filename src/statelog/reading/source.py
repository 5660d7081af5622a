"""Finds the checkpoint of an operator that is to be read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol, TypeAlias

from statelog.checkpoint.history import History
from statelog.checkpoint.pins import Pin, pins_of, read_pin
from statelog.checkpoint.query_history import QueryHistory, read_history
from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, ErrorKind, StateMissingError
from statelog.log.entry import Checkpoint, Settings
from statelog.log.open import LOG_FOLDER, PINS_FOLDER, STATE_FOLDER, open_location
from statelog.reading.manifest import MANIFEST
from statelog.runs.schema import StateSchema
from statelog.storage import Store
from statelog.storage.store import if_present

At: TypeAlias = int | datetime | str
"""A checkpoint: its batch; a time, which means the newest one whose batch is not later; or the name of a pin."""


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

    def identities(self, uid: str | None) -> list[str]:
        """The operators of the newest checkpoint in order of their names, or only `uid`; raises as :meth:`one`."""
        if uid is not None:
            return [self.one(uid)]
        return [identity for _, identity in sorted(self.history.names.items())]

    def one(self, uid: str | None) -> str:
        """The operator named `uid` of the newest checkpoint, or its only one.

        Raises ConfigurationError if there is no such operator, or several and no `uid`; StateMissingError if there is
        no checkpoint yet.
        """
        names = self.history.names
        if self.history.latest is None:
            raise StateMissingError(
                f"{self.location} has no checkpoint yet.", hint="Read it after the query's first batch."
            )
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

    store: Store
    location: str
    query: QueryHistory
    """The checkpoints of the operator's query."""
    history: History
    """Those of the operator that lead to its checkpoint; of a pin, only these."""
    checkpoint: Checkpoint
    pin: Pin | None = None
    """What keeps the checkpoint, if the query does not retain it."""

    @property
    def identity(self) -> str:
        """The operator's identity."""
        return self.checkpoint.identity

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
    query = open_query(location)
    if isinstance(at, str):
        return _of_pin(query, uid, at)
    return choose_checkpoint(query, query.one(uid), at)


def choose_checkpoint(query: StoredQuery, identity: str, at: int | datetime | None = None) -> Source:
    """Choose a checkpoint of an operator on the query's line; the rest is that of :func:`open_source`."""
    history = query.history.histories[identity]
    assert history.latest is not None, "an operator has a checkpoint"
    name = f"operator '{history.latest.uid}' at {query.location}"
    if isinstance(at, datetime):
        chosen = _newest_before(at, query, identity, name)
    else:
        chosen = history.latest.batch if at is None else at
    if not history.has_batch(chosen):
        pins = [pin for _, pin in pins_of(query.store, query.history, identity, SystemClock().now_s(), chosen)]
        if pins:
            return _pinned(query, identity, pins[-1])
        first = history.oldest
        kept = "none can be restored" if first is None else f"it retains {first.batch} to {history.latest.batch}"
        raise StateMissingError(
            f"{name[0].upper()}{name[1:]} has no checkpoint {chosen}: {kept}.",
            hint="Options(retained_checkpoints=...) keeps more of them. One that was taken back can be read while a pin"
            " keeps it: pass the pin's name as at=.",
        )
    checkpoint = history.at(chosen)
    assert checkpoint is not None, "it can be restored"
    return Source(query.store, query.location, query.history, history, checkpoint)


def _pinned(query: StoredQuery, identity: str, pin: Pin) -> Source:
    history = pin.history(query.store, identity)
    assert history.latest is not None, "a pin names its checkpoint"
    return Source(query.store, query.location, query.history, history, history.latest, pin)


def _of_pin(query: StoredQuery, uid: str | None, name: str) -> Source:
    """The checkpoint that a pin keeps, on whichever line it lies; the operator may have ended since."""
    pin = read_pin(query.store, name) if name.startswith(f"{PINS_FOLDER}/") else None
    if pin is None or pin.max_bytes is not None:
        raise StateMissingError(
            f"{query.location} has no pin '{name}' of a checkpoint.",
            hint="Pass a name that list_pins returns; the pin may have expired.",
        )
    now = {one.identity: query.history.name_of(one.identity) or one.uid for one in pin.operators}
    # The present name counts before the one of the pin's time, which another operator may have now.
    for names in (now, {one.identity: one.uid for one in pin.operators}):
        found = [identity for identity, known in names.items() if uid in (None, known)]
        if len(found) == 1:
            return _pinned(query, found[0], pin)
    raise ConfigurationError(
        f"{query.location}: the pin '{name}' keeps {_listed(now.values())}.", hint="Pass one of them as uid."
    )


def _newest_before(time: datetime, query: StoredQuery, identity: str, name: str) -> int:
    """The newest checkpoint on the line that can be read and whose batch is not after a time."""
    limit_ms = time_limit_ms(time)
    history = query.history.histories[identity]
    times_ms = {
        checkpoint.batch: checkpoint.batch_time_ms
        for checkpoint in history.checkpoints
        if history.has_batch(checkpoint.batch)
    }
    for _, pin in pins_of(query.store, query.history, identity, SystemClock().now_s()):
        times_ms.setdefault(pin.batch, pin.batch_time_ms)
    found = max((batch for batch, time_ms in times_ms.items() if time_ms <= limit_ms), default=None)
    if found is None:
        first = min(times_ms.values(), default=None)
        oldest = "none" if first is None else f"the oldest one is of {utc_text(first)}"
        raise StateMissingError(
            f"{name} has no checkpoint of {time.isoformat()} or before: {oldest}.",
            hint="Options(retained_s=...) keeps checkpoints for longer.",
        )
    return found


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
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")


def open_query(location: str) -> StoredQuery:
    """Read the log at a location, or in the folder of a checkpointLocation; ConfigurationError if there is none."""
    for place in places_of(location):
        store = open_location(place)
        if store.list(f"{LOG_FOLDER}/"):
            return StoredQuery(store, place, read_history(store))
    if is_savepoint(location):
        raise ConfigurationError(
            f"{location} is a savepoint: it has the state of one batch, and no log.",
            kind=ErrorKind.CHECKPOINT_MISSING,
            hint="Only read_state, list_operators and list_states read a savepoint; statelog.restore begins a query"
            " with it.",
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
