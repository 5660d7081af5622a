"""Checks everything that the readable checkpoints consist of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from statelog.checkpoint.held_pin import is_retained
from statelog.checkpoint.history import History
from statelog.checkpoint.pins import Pin, standing_pins
from statelog.clock import SystemClock
from statelog.errors import CorruptionError, ErrorKind, StatelogError, StorageError
from statelog.local.restore import read_segment
from statelog.local.stored_reader import read_ahead, read_run, read_threads
from statelog.log.references import SegmentRef, StoredRun
from statelog.operators.unkeyed.snapshot import Snapshot
from statelog.progress import tracked
from statelog.reading.source import find_operator, find_operators, read_history
from statelog.storage import Store


@dataclass(frozen=True)
class Damage:
    """Something stored that is damaged or missing.

    Parameters
    ----------
    uid : str
        The operator; the name of its folder if its log cannot be read.
    kind : str
        The code of the error, such as ``checksum`` or ``object-missing``.
    name : str
        The object below the location; empty if the damage is not that of a single one.
    problem : str
        What is wrong, with object and offset.
    batches : tuple of int
        The checkpoints that cannot be read because of it, among those that should be; empty if the log is damaged,
        which concerns all.
    """

    uid: str
    kind: str
    name: str
    problem: str
    batches: tuple[int, ...]


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
        For each operator its newest checkpoint without damage; None if there is none.
    damages : tuple of Damage
        All that is damaged or missing.
    """

    operators: int
    checkpoints: int
    stored_parts: int
    stored_bytes: int
    whole: dict[str, int | None]
    damages: tuple[Damage, ...]


def verify(location: str | Path, uid: str | None = None) -> Verified:
    """Read and check all that the checkpoints of a query consist of, while the query runs or later.

    Every entry of the log, changeset, snapshot and block is read once and compared with its checksum.

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
        If the store fails otherwise than by a missing object.

    Examples
    --------
    >>> statelog.verify("/data/checkpoints/flights").damages  # doctest: +SKIP
    ()
    """
    operators = find_operators(str(location)) if uid is None else [find_operator(str(location), uid)]
    checks = [_Check(store, root) for store, _, root in operators]
    for check in checks:
        check.run()
    return Verified(
        operators=len(checks),
        checkpoints=sum(len(check.pins) for check in checks),
        stored_parts=sum(len(check.parts) for check in checks),
        stored_bytes=sum(part.stored.length for check in checks for part in check.parts.values()),
        whole={check.uid: check.whole for check in checks},
        damages=tuple(damage for check in checks for damage in check.damages),
    )


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

    def __init__(self, store: Store, root: str) -> None:
        self._store = store
        self._root = root
        self.uid = root
        self.pins: dict[bytes, Pin] = {}
        """The checkpoints by token, each as a pin would name it."""
        self.parts: dict[tuple[str, int], _Part] = {}
        self.damages: list[Damage] = []

    def run(self) -> None:
        try:
            history = read_history(self._store, self._root)
        except StatelogError as error:
            self._note(error)
            return
        if history.latest is None:
            return
        self.uid = history.latest.uid
        if history.first_missing is not None:
            self.damages.append(
                Damage(
                    self.uid,
                    ErrorKind.CHECKPOINT_MISSING,
                    "",
                    f"The log of operator '{self.uid}' lacks the checkpoint of batch {history.first_missing}.",
                    (),
                )
            )
        retained = [
            Pin.of(self._root, history, checkpoint.batch, owner="", made_ms=0, lasts_s=None)
            for checkpoint in history.checkpoints
            if history.has_batch(checkpoint.batch)
        ]
        for pin in retained:
            self._add(pin, history)
        try:
            for _, pin in standing_pins(self._store, self._root, SystemClock().now_s()):
                if pin.token not in self.pins:
                    self._add(pin, pin.history(self._store, self._root))
        except StatelogError as error:
            self._note(error)
        for part, damage in read_ahead(
            tracked([*self.parts.values()], _sizes), self._checked, read_threads(self._store)
        ):
            if damage is not None:
                self._note(damage, part.stored.name, part.users)
        self._forget_given_up()

    @property
    def whole(self) -> int | None:
        """The newest checkpoint without damage."""
        if any(not damage.batches for damage in self.damages):
            return None
        damaged = {batch for damage in self.damages for batch in damage.batches}
        return max((pin.batch for pin in self.pins.values() if pin.batch not in damaged), default=None)

    def _add(self, pin: Pin, history: History) -> None:
        self.pins[pin.token] = pin
        checkpoint = history.at(pin.batch)
        has_states = checkpoint is not None and bool(checkpoint.states)
        for stored, is_snapshot in _parts_of(pin, history):
            part = self.parts.setdefault((stored.name, stored.offset), _Part(stored, is_snapshot, has_states))
            part.users.add(pin.token)

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

    def _note(self, error: StatelogError, name: str = "", users: Iterable[bytes] = ()) -> None:
        batches = tuple(sorted({self.pins[token].batch for token in users}))
        self.damages.append(Damage(self.uid, str(error.kind), name, str(error).partition("\n")[0], batches))

    def _forget_given_up(self) -> None:
        """Objects may be missing because the query has given up their checkpoints meanwhile."""
        if not any(damage.kind == ErrorKind.OBJECT_MISSING for damage in self.damages):
            return
        standing = {pin.token for _, pin in standing_pins(self._store, self._root, SystemClock().now_s())}
        kept = {
            pin.batch
            for pin in self.pins.values()
            if pin.token in standing or is_retained(self._store, self._root, pin)
        }
        self.pins = {token: pin for token, pin in self.pins.items() if pin.batch in kept}
        left: list[Damage] = []
        for damage in self.damages:
            batches = tuple(batch for batch in damage.batches if batch in kept)
            if batches or not damage.batches:
                left.append(replace(damage, batches=batches))
        self.damages = left


def _sizes(parts: Sequence[_Part]) -> list[int]:
    return [part.stored.length for part in parts]


def _parts_of(pin: Pin, history: History) -> Iterator[tuple[SegmentRef | StoredRun, bool]]:
    """All that a checkpoint consists of, and whether each part is a snapshot of an unkeyed operator."""
    record = history.record(pin.batch)
    assert record is not None
    for checkpoint in history.between(record.needed_from, pin.batch):
        for segment in checkpoint.segments:
            if segment.rows:
                yield segment, checkpoint.is_whole
    for base_range in pin.base_ranges:
        for run in base_range.runs:
            yield run, False
