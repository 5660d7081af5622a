"""Pins a checkpoint by hand, lists pins, and removes them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from statelog.checkpoint.held_pin import HeldPin
from statelog.checkpoint.pins import PINS_FOLDER, Pin, has_expired, read_pin
from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, ErrorKind
from statelog.reading.source import At, find_operator, find_operators, open_source
from statelog.storage import ObjectInfo, Store


@dataclass(frozen=True)
class PinInfo:
    """A pin, which keeps a checkpoint.

    Parameters
    ----------
    name : str
        The pin's object, below the location of the operator's state.
    uid : str
        The operator.
    batch : int
        The checkpoint's batch.
    batch_time_ms : int
        Spark's time of the batch, in milliseconds since the Unix epoch.
    owner : str
        Who made it, and what for.
    expires_ms : int or None
        When it expires, in milliseconds since the Unix epoch; None if it does not.
    state_bytes : int
        Stored bytes that a reader of the whole checkpoint reads.
    """

    name: str
    uid: str
    batch: int
    batch_time_ms: int
    owner: str
    expires_ms: int | None
    state_bytes: int

    @classmethod
    def of(cls, info: ObjectInfo, pin: Pin) -> PinInfo:
        """A pin and its object."""
        expires_ms = None if pin.lasts_s is None else int((info.modified_s + pin.lasts_s) * 1000)
        return cls(info.name, pin.uid, pin.batch, pin.batch_time_ms, pin.owner, expires_ms, pin.state_bytes)


def pin(
    location: str | Path,
    uid: str | None = None,
    *,
    at: At | None = None,
    lasts_s: float | None,
    owner: str,
) -> PinInfo:
    """Keep a checkpoint readable: its query deletes nothing that the checkpoint needs.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given. It must be writable.
    uid : str, optional
        The operator; needed if there are several.
    at : int or datetime, optional
        The checkpoint, as in :func:`read_state`.
    lasts_s : float or None
        How many seconds the pin lasts; None until it is removed.
    owner : str
        Who makes the pin and what for, for those who find it.

    Returns
    -------
    PinInfo
        The pin.

    Raises
    ------
    ConfigurationError
        If there is no such operator, or `lasts_s` is not positive.
    StateMissingError, PinExpiredError
        If there is no such checkpoint, or it has just been given up.
    CorruptionError, StorageError
        If the log is damaged or cannot be read, or the pin cannot be written.

    Examples
    --------
    >>> statelog.pin("/data/checkpoints/flights", at=1200, lasts_s=7 * 86400, owner="audit of May")  # doctest: +SKIP
    """
    if lasts_s is not None and not 0 < lasts_s < math.inf:
        raise ConfigurationError(
            f"lasts_s is {lasts_s!r}.",
            kind=ErrorKind.VALUE_MISMATCH,
            hint="Pass a positive number of seconds, or None for a pin that does not expire.",
        )
    source = open_source(str(location), uid, at)
    batch = source.checkpoint.batch
    held = HeldPin(source.store, source.root, source.history, batch, owner=owner, lasts_s=lasts_s, is_shared=True)
    [info] = [one for one in source.store.list(held.name) if one.name == held.name]
    stored = read_pin(source.store, held.name)
    assert stored is not None, "it was just written"
    return PinInfo.of(info, stored)


def list_pins(location: str | Path, uid: str | None = None) -> list[PinInfo]:
    """List the pins of an operator, with those of readers at work.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given.
    uid : str, optional
        The operator; by default all of them.

    Returns
    -------
    list of PinInfo
        In order of operators and batches; without those that have expired.

    Raises
    ------
    ConfigurationError
        If there is no such operator.
    CorruptionError, StorageError
        If a pin is damaged or cannot be read.
    """
    operators = find_operators(str(location)) if uid is None else [find_operator(str(location), uid)]
    found = [PinInfo.of(info, stored) for store, _, root in operators for info, stored in stored_pins(store, root)]
    return sorted(found, key=lambda one: (one.uid, one.batch, one.name))


def stored_pins(store: Store, root: str) -> Iterator[tuple[ObjectInfo, Pin]]:
    """All pins of an operator that have not expired, with their objects; raises the errors of :func:`read_pin`."""
    now_s = SystemClock().now_s()
    for info in store.list(f"{root}/{PINS_FOLDER}/"):
        stored = read_pin(store, info.name)
        if stored is not None and not has_expired(stored, info, now_s, 0.0):
            yield info, stored


def unpin(location: str | Path, name: str) -> None:
    """Remove a pin, so that its query may delete what only the pin keeps.

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
    for store, _, root in find_operators(str(location)):
        folder = f"{root}/{PINS_FOLDER}/"
        if name.startswith(folder) and any(info.name == name for info in store.list(folder)):
            store.delete([name])
            return
    raise ConfigurationError(
        f"{location} has no pin '{name}'.",
        kind=ErrorKind.VALUE_MISMATCH,
        hint="Pass a name that list_pins returns; the pin may have expired.",
    )
