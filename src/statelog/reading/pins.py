"""Pins a checkpoint for a user, lists pins, and removes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, ErrorKind
from statelog.history.footprint import Footprint
from statelog.history.pins import HeldPin, Pin, has_expired, read_pin
from statelog.log.open import PINS_FOLDER
from statelog.numbers import Seconds, checked_seconds
from statelog.reading.checkpoints import StoredQuery
from statelog.reading.open import find_log, open_query
from statelog.reading.point import At
from statelog.storage import ObjectInfo, Store


@dataclass(frozen=True)
class PinInfo:
    """A pin, which keeps a checkpoint.

    Parameters
    ----------
    name : str
        The pin's object, below the location of the query's state. Readers take it as `at`.
    uids : tuple of str
        The operators whose state it keeps, by their present names.
    batch : int
        The checkpoint's batch.
    batch_time_ms : int
        Spark's time of the batch, in milliseconds since the Unix epoch.
    owner : str
        Who created it, and for what purpose.
    expires_ms : int or None
        When it expires, in milliseconds since the Unix epoch; None if it does not.
    state_bytes : int
        Stored bytes that a reader of all these operators reads.
    is_on_line : bool
        Whether the checkpoint counts: it was not taken back by a rewind, a fall-back or a repetition of its batch. One
        that was taken back can be read only by the pin's name.
    """

    name: str
    uids: tuple[str, ...]
    batch: int
    batch_time_ms: int
    owner: str
    expires_ms: int | None
    state_bytes: int
    is_on_line: bool


def pin_info(info: ObjectInfo, pin: Pin, query: StoredQuery) -> PinInfo:
    """A pin and its object, as of a query's log."""
    return PinInfo(
        name=info.name,
        uids=tuple(sorted(query.uids_of(pin).values())),
        batch=pin.batch,
        batch_time_ms=pin.batch_time_ms,
        owner=pin.owner,
        expires_ms=expiry_ms(info, pin),
        state_bytes=pin.state_bytes,
        is_on_line=pin.is_on_line(query.history),
    )


def expiry_ms(info: ObjectInfo, pin: Pin) -> int | None:
    """When a pin expires, in milliseconds since the Unix epoch; None if it does not."""
    return None if pin.lasts_s is None else int((info.modified_s + pin.lasts_s) * 1000)


def pin(
    location: str | Path,
    uid: str | None = None,
    *,
    at: At | None = None,
    lasts_s: Seconds | None,
    owner: str,
) -> PinInfo:
    """Keep a checkpoint readable: its query deletes nothing that the checkpoint needs.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given. It must be writable.
    uid : str, optional
        The operator; by default all operators of the query. If `at` is the name of another pin, by default all
        operators that this pin keeps.
    at : int, datetime or str, optional
        The checkpoint, as in :func:`read_state`.
    lasts_s : float, timedelta, str or None
        How many seconds the pin lasts; None means until it is removed.
    owner : str
        Who creates the pin and for what purpose, for people who find it.

    Returns
    -------
    PinInfo
        The pin.

    Raises
    ------
    ConfigurationError
        If there is no such operator, or `lasts_s` is not positive.
    StateMissingError, PinExpiredError
        If there is no such checkpoint, or it has just been deleted.
    CorruptionError, StorageError
        If the log is damaged or cannot be read, or the pin cannot be written.

    Examples
    --------
    >>> statelog.pin("/data/checkpoints/flights", at=1200, lasts_s="7 days", owner="audit of May")  # doctest: +SKIP
    """
    lasting_s = None if lasts_s is None else checked_seconds(lasts_s, "lasts_s", is_positive=True)
    query = open_query(str(location))
    if uid is None:
        lineage, batch = query.all_at(at)
        operators = list(lineage.names_at(batch).values())
    else:
        point = query.point(uid, at)
        lineage, batch, operators = point.lineage, point.batch, [point.identity]
    needed = Footprint.of(lineage, batch, operators=operators)
    held = HeldPin(query.store, needed, owner=owner, lasts_s=lasting_s, is_shared=True)
    [info] = [one for one in query.store.list(held.name) if one.name == held.name]
    stored = read_pin(query.store, held.name)
    assert stored is not None, "it was just written"
    return pin_info(info, stored, query)


def list_pins(location: str | Path, uid: str | None = None) -> list[PinInfo]:
    """List the pins of a query, including those of active readers.

    Pins of checkpoints that were taken back, and of operators whose state was given up, are among them.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given.
    uid : str, optional
        Only the pins that keep this operator; by default all.

    Returns
    -------
    list of PinInfo
        In order of batches; without those that have expired.

    Raises
    ------
    ConfigurationError
        If there is no such operator.
    StateMissingError
        If `uid` is given, and the query has no checkpoint yet.
    CorruptionError, StorageError
        If the log or a pin is damaged or cannot be read.
    """
    query = open_query(str(location))
    found = [pin_info(info, stored, query) for info, stored in stored_pins(query.store)]
    if uid is not None:
        found = [one for one in found if uid in one.uids]
        if not found:
            query.one(uid)
    return sorted(found, key=lambda one: (one.batch, one.name))


def stored_pins(store: Store) -> Iterator[tuple[ObjectInfo, Pin]]:
    """All pins of a query that have not expired, with their objects; raises the errors of :func:`read_pin`."""
    now_s = SystemClock().now_s()
    for info in store.list(f"{PINS_FOLDER}/"):
        stored = read_pin(store, info.name)
        if stored is not None and not has_expired(stored, info, now_s, 0.0):
            yield info, stored


def unpin(location: str | Path, name: str) -> None:
    """Remove a pin, so that the query may delete what only this pin keeps.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given.
    name : str
        The pin's name, from :func:`list_pins`.

    Raises
    ------
    ConfigurationError
        If there is no such pin.
    StorageError
        If it cannot be removed.
    """
    store, _ = find_log(str(location))
    if not any(info.name == name for info in store.list(f"{PINS_FOLDER}/")):
        raise ConfigurationError(
            f"{location} has no pin '{name}'.",
            kind=ErrorKind.VALUE_MISMATCH,
            hint="Pass a name that list_pins returns; the pin may have expired.",
        )
    store.delete([name])
