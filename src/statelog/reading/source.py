"""Finds the checkpoint of an operator that is to be read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol, TypeAlias
from urllib.parse import unquote

from statelog.checkpoint.history import History
from statelog.checkpoint.pins import pinned_history, standing_pins
from statelog.checkpoint.query_operators import operators_of
from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, ErrorKind, StateMissingError
from statelog.log.entry import Checkpoint, Settings
from statelog.log.open import LOG_FOLDER, STATE_FOLDER, open_location, open_log, operator_folder
from statelog.options import Options
from statelog.reading.manifest import MANIFEST
from statelog.runs.schema import StateSchema
from statelog.storage import Store
from statelog.storage.store import if_present

At: TypeAlias = int | datetime
"""A checkpoint: its batch, or a time, which means the newest one whose batch is not later."""


def parse_at(text: str) -> At:
    """A checkpoint from text: a batch, or a time in ISO 8601, in UTC without a zone; ConfigurationError if neither."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigurationError(
            f"'{text}' is neither a batch nor a time.",
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
class Source:
    """An operator's checkpoint that is being read."""

    store: Store
    location: str
    root: str
    """The operator's folder in the location."""
    history: History
    checkpoint: Checkpoint

    @property
    def name(self) -> str:
        """The operator in messages."""
        return f"operator '{self.checkpoint.uid}' at {self.location}/{self.root}"

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
    store, place, root = find_operator(location, uid)
    return choose_checkpoint(store, place, root, read_history(store, root), at)


def choose_checkpoint(store: Store, place: str, root: str, history: History, at: At | None = None) -> Source:
    """Choose a checkpoint from an operator's history; the rest is that of :func:`open_source`."""
    if history.latest is None:
        raise StateMissingError(f"{place}/{root} has no checkpoint yet.", hint="Read it after the query's first batch.")
    if isinstance(at, datetime):
        chosen = _newest_before(at, store, root, history, f"Operator '{history.latest.uid}' at {place}/{root}")
    else:
        chosen = history.latest.batch if at is None else at
    if not history.has_batch(chosen):
        pinned = pinned_history(store, root, chosen, SystemClock().now_s())
        if pinned is not None and pinned.latest is not None:
            return Source(store, place, root, pinned, pinned.latest)
        first = history.oldest
        kept = "none can be restored" if first is None else f"it retains {first.batch} to {history.latest.batch}"
        raise StateMissingError(
            f"Operator '{history.latest.uid}' at {place}/{root} has no checkpoint {chosen}: {kept}.",
            hint="Options(retained_checkpoints=...) keeps more of them.",
        )
    checkpoint = history.at(chosen)
    assert checkpoint is not None, "it can be restored"
    return Source(store, place, root, history, checkpoint)


def read_history(store: Store, root: str) -> History:
    """The checkpoints of an operator's log; CorruptionError or StorageError if it cannot be read."""
    return History(open_log(store, root, Options(), SystemClock()).read())


def _newest_before(time: datetime, store: Store, root: str, history: History, name: str) -> int:
    """The newest checkpoint that can be read and whose batch is not after a time."""
    limit_ms = time_limit_ms(time)
    times_ms = {
        checkpoint.batch: checkpoint.batch_time_ms
        for checkpoint in history.checkpoints
        if history.has_batch(checkpoint.batch)
    }
    for _, pin in standing_pins(store, root, SystemClock().now_s()):
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


def find_operators(location: str) -> list[tuple[Store, str, str]]:
    """The store, location and folder of each operator at a location; ConfigurationError if there is none."""
    for place in _places(location):
        store = open_location(place)
        if roots := operators_of(store):
            return [(store, place, root) for root in roots]
    if is_savepoint(location):
        raise ConfigurationError(
            f"{location} is a savepoint: it has the state of one batch, and no operator's log.",
            kind=ErrorKind.CHECKPOINT_MISSING,
            hint="Only read_state, list_operators and list_states read a savepoint; statelog.restore begins a query"
            " with it.",
        )
    raise ConfigurationError(
        f"{location} holds no state: neither it nor {_places(location)[1]} has an operator's log.",
        kind=ErrorKind.CHECKPOINT_MISSING,
        hint="Pass the query's checkpointLocation, or the location that its operators were given.",
    )


def find_operator(location: str, uid: str | None) -> tuple[Store, str, str]:
    """The store, location and folder of an operator; ConfigurationError if there is none, or several and no `uid`."""
    if uid is not None:
        for place in _places(location):
            store = open_location(place)
            root = operator_folder(store, uid)
            if store.list(f"{root}/{LOG_FOLDER}/"):
                return store, place, root
    found = find_operators(location)
    if uid is None and len(found) > 1:
        # An operator whose state was given up, or that has another uid now, is none to choose.
        found = [one for one in found if read_history(one[0], one[2]).latest is not None] or found
    if uid is None and len(found) == 1:
        return found[0]
    names = _listed(root for _, _, root in found)
    if uid is None:
        raise ConfigurationError(f"{location} has several operators: {names}.", hint="Pass one of them as uid.")
    raise ConfigurationError(f"{location} has no operator '{uid}'; it has {names}.", hint="Pass one of them as uid.")


def is_savepoint(location: str) -> bool:
    """Whether a location is that of a savepoint: it has a manifest, and no operator's log."""
    if if_present(lambda: open_location(location).size_bytes(MANIFEST)) is None:
        return False
    return not any(operators_of(open_location(place)) for place in _places(location))


def _places(location: str) -> tuple[str, str]:
    """Where a location's operators are: there, or in the folder of a checkpointLocation."""
    return location, f"{location.rstrip('/')}/{STATE_FOLDER}"


def _listed(folders: Iterable[str]) -> str:
    return ", ".join(f"'{unquote(folder)}'" for folder in sorted(folders))
