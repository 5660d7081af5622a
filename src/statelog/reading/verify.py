"""Verifies everything that the readable checkpoints consist of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from statelog.clock import SystemClock
from statelog.errors import CorruptionError, ErrorKind, PinExpiredError, StatelogError, StorageError
from statelog.history.footprint import stored_parts
from statelog.history.pins import Pin, is_retained, standing_pins
from statelog.history.query_history import read_history
from statelog.local.restore import read_segment
from statelog.local.stored_reader import read_run, read_threads
from statelog.log.references import SegmentRef, StoredRun
from statelog.operators.unkeyed.snapshot import Snapshot
from statelog.progress import tracked
from statelog.reading.checkpoints import KeptPoint, StoredQuery
from statelog.reading.open import find_log
from statelog.storage import ObjectInfo
from statelog.storage.store import read_ahead


@dataclass(frozen=True)
class Damage:
    """Something stored that is damaged or missing.

    Parameters
    ----------
    uid : str
        The operator; empty if the query's log is damaged.
    kind : str
        The code of the error, such as ``checksum`` or ``object-missing``.
    name : str
        The object below the location; empty if the damage is not in a single object.
    problem : str
        What is wrong, with object and offset.
    batches : tuple of int
        The checkpoints that cannot be read because of it, among those that should be; empty if the log is damaged,
        which affects all checkpoints.
    pins : tuple of str
        The pins that cannot be read by name because of it: pins of checkpoints that were taken back, or of an operator
        whose state was given up. If the damage affects only such pins, `batches` is empty too.
    """

    uid: str
    kind: str
    name: str
    problem: str
    batches: tuple[int, ...]
    pins: tuple[str, ...] = ()

    @property
    def is_general(self) -> bool:
        """Whether it affects all checkpoints."""
        return not (self.batches or self.pins)


@dataclass(frozen=True)
class Verified:
    """What :func:`verify` has checked.

    Parameters
    ----------
    operators : int
        Number of operators.
    checkpoints : int
        Number of their checkpoints that can be read, or should be.
    stored_parts : int
        Number of changesets, snapshots and materialized runs.
    stored_bytes : int
        Their size.
    whole : dict of str to (int or None)
        For each operator, its newest undamaged checkpoint; None if there is none. Empty if the log cannot be read.
    damages : tuple of Damage
        Everything that is damaged or missing.
    """

    operators: int
    checkpoints: int
    stored_parts: int
    stored_bytes: int
    whole: dict[str, int | None]
    damages: tuple[Damage, ...]


def verify(location: str | Path, uid: str | None = None) -> Verified:
    """Read and check everything that the checkpoints of a query consist of, while the query runs or later.

    Every log entry, changeset, snapshot and block is read once and compared with its checksum.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given.
    uid : str, optional
        The operator; by default all of them.

    Returns
    -------
    Verified
        What was checked, and what is damaged.

    Raises
    ------
    ConfigurationError
        If there is no such operator.
    StorageError
        If the store fails for any reason other than a missing object.

    Examples
    --------
    >>> statelog.verify("/data/checkpoints/flights").damages  # doctest: +SKIP
    ()
    """
    store, place = find_log(str(location))
    try:
        query = StoredQuery(store, place, read_history(store))
    except StatelogError as error:
        return Verified(0, 0, 0, 0, {}, (_damage("", error),))
    general: list[Damage] = []
    pins: list[tuple[ObjectInfo, Pin]] = []
    try:
        query.history.require_complete(place)
    except CorruptionError as error:
        general.append(_damage("", error))
    try:
        pins += standing_pins(store, SystemClock().now_s())
    except StatelogError as error:
        general.append(_damage("", error))
    operators = query.named(uid, (pin for _, pin in pins))
    checks = [_Check(query, identity, name, pins) for identity, name in operators.items()]
    for check in checks:
        check.run()
    present = query.history.names.values()
    return Verified(
        operators=len(checks),
        checkpoints=sum(len(check.kept) for check in checks),
        stored_parts=sum(len(check.parts) for check in checks),
        stored_bytes=sum(part.stored.length for check in checks for part in check.parts.values()),
        whole={check.uid: None if general else check.whole for check in checks if check.identity in present},
        damages=(*general, *(damage for check in checks for damage in check.damages)),
    )


def _damage(
    uid: str, error: StatelogError, name: str = "", batches: Iterable[int] = (), pins: Iterable[str] = ()
) -> Damage:
    problem = str(error).partition("\n")[0]
    return Damage(uid, str(error.kind), name, problem, tuple(sorted(batches)), tuple(sorted(pins)))


@dataclass
class _Part:
    """A stored changeset, snapshot or run."""

    stored: SegmentRef | StoredRun
    is_snapshot: bool
    has_states: bool
    """Whether the operator has states; one that stores the query's output has none, and its parts are rows."""
    users: set[bytes] = field(default_factory=set)
    """Tokens of the checkpoints that need it."""


class _Check:
    """The check of one operator."""

    def __init__(self, query: StoredQuery, identity: str, uid: str, pins: Sequence[tuple[ObjectInfo, Pin]]) -> None:
        self._query = query
        self._store = query.store
        self._pins = pins
        self.identity = identity
        self.uid = uid
        self.kept: dict[bytes, KeptPoint] = {}
        """The checkpoints by token."""
        self.parts: dict[tuple[str, int], _Part] = {}
        self.damages: list[Damage] = []

    def run(self) -> None:
        for one in self._query.kept(self.identity, self._pins, self._note_unread):
            token = one.point.checkpoint.token
            self.kept[token] = one
            is_snapshot, has_states = one.point.checkpoint.is_whole, bool(one.point.states)
            for stored in stored_parts(one.point.history, one.point.batch):
                part = self.parts.setdefault((stored.name, stored.offset), _Part(stored, is_snapshot, has_states))
                part.users.add(token)
        checked = read_ahead(tracked([*self.parts.values()], _sizes), self._checked, read_threads(self._store))
        damaged = [(part, damage) for part, damage in checked if damage is not None]
        if any(damage.kind is ErrorKind.OBJECT_MISSING for _, damage in damaged):
            self._forget_given_up()
        for part, damage in damaged:
            users = [self.kept[token] for token in part.users if token in self.kept]
            if users:
                self.damages.append(_damage(self.uid, damage, part.stored.name, _batches(users), _names(users)))

    def _note_unread(self, info: ObjectInfo, pin: Pin, error: StatelogError) -> None:
        """Note that the entries of a pinned checkpoint cannot be read, unless the pin was removed meanwhile."""
        if isinstance(error, PinExpiredError):
            return
        if self.identity in self._query.history.histories and pin.is_on_line(self._query.history):
            self.damages.append(_damage(self.uid, error, batches=[pin.batch]))
        else:
            self.damages.append(_damage(self.uid, error, pins=[info.name]))

    @property
    def whole(self) -> int | None:
        """The newest checkpoint without damage, of those that can be read by their batch."""
        if any(damage.is_general for damage in self.damages):
            return None
        damaged = {batch for damage in self.damages for batch in damage.batches}
        return max(_batches(self.kept.values()) - damaged, default=None)

    def _checked(self, part: _Part) -> tuple[_Part, StatelogError | None]:
        """Read a part; an error of the store, other than a missing object, is raised."""
        try:
            if part.is_snapshot:
                assert isinstance(part.stored, SegmentRef)
                data = read_segment(self._store, part.stored)
                if part.has_states:
                    Snapshot(data, part.stored.name)
            else:
                read_run(self._store, part.stored, "a run").verify()
        except CorruptionError as error:
            return part, error
        except StorageError as error:
            if error.kind is not ErrorKind.OBJECT_MISSING:
                raise
            return part, error
        return part, None

    def _forget_given_up(self) -> None:
        """Forget objects that are missing only because the query has deleted their checkpoints meanwhile."""
        standing = {pin.token for _, pin in standing_pins(self._store, SystemClock().now_s())}
        self.kept = {
            token: one for token, one in self.kept.items() if token in standing or is_retained(self._store, one.needed)
        }


def _batches(kept: Iterable[KeptPoint]) -> set[int]:
    """The checkpoints that can be read by their batch."""
    return {one.point.batch for one in kept if one.point.is_on_line}


def _names(kept: Iterable[KeptPoint]) -> set[str]:
    """The pins of the other checkpoints."""
    return {info.name for one in kept if not one.point.is_on_line for info, _ in one.pins}


def _sizes(parts: Sequence[_Part]) -> list[int]:
    return [part.stored.length for part in parts]
