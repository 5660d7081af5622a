"""The checkpoints of a query that can be read: those that its log retains, and those that pins keep."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import pyarrow as pa

from statelog.clock import SystemClock
from statelog.convert.state_tables import ElementColumns, Positions, StateColumns
from statelog.errors import (
    ConfigurationError,
    CorruptionError,
    ErrorKind,
    StatelogError,
    StateMissingError,
    StorageError,
)
from statelog.history.footprint import Footprint
from statelog.history.operator_history import History
from statelog.history.pins import HeldPin, Pin, gone, is_retained, pins_of, read_pin, standing_pins
from statelog.history.query_history import QueryHistory
from statelog.local.restore import read_segment
from statelog.log.entry import Checkpoint, QueryCheckpoint
from statelog.log.open import PINS_FOLDER
from statelog.operators.unkeyed.snapshot import Snapshot
from statelog.operators.unkeyed.states import OperatorStateMode
from statelog.reading.keys import Keys
from statelog.reading.point import At, Point, checked_at, listed, time_limit_ms, utc_text
from statelog.reading.rows import ReadPart, Rows, cut_parts
from statelog.runs.schema import StateSchema
from statelog.storage import ObjectInfo, Store

READER_S: Final = 300.0
"""How long a reader's pin lasts; it is renewed while the reader reads."""


@dataclass(frozen=True)
class StoredQuery:
    """A query's log, as of the time it was read."""

    store: Store
    location: str
    """The location of the log: the one that the user has passed, or the folder of state in it."""
    history: QueryHistory
    _pinned: dict[tuple[str, ...], QueryHistory] = field(default_factory=dict, compare=False, repr=False)
    """What pins keep, if it was read already, by the pins' entries and operators."""

    def require_checkpoint(self) -> QueryCheckpoint:
        """The newest checkpoint; StateMissingError if there is none yet."""
        if self.history.latest is None:
            raise StateMissingError(
                f"{self.location} has no checkpoint yet.", hint="Try again after the query's first batch."
            )
        return self.history.latest

    def retained(self, identity: str, batch: int) -> LoggedPoint | None:
        """An operator's checkpoint of a batch; None if the query does not retain it."""
        history = self.history.histories.get(identity)
        checkpoint = None if history is None or not history.has_batch(batch) else history.at(batch)
        return None if checkpoint is None else LoggedPoint.of(self, self.history, checkpoint)

    def pinned(self, identity: str, pin: Pin) -> LoggedPoint:
        """An operator's checkpoint that a pin keeps; PinExpiredError if the pin is gone, or why it cannot be read."""
        key = repr(pin.entries), *(one.identity for one in pin.operators)
        if key not in self._pinned:
            self._pinned[key] = pin.query(self.store)
        lineage = self._pinned[key]
        checkpoint = lineage.histories[identity].latest
        assert checkpoint is not None, "a pin names its checkpoint"
        return LoggedPoint.of(self, lineage, checkpoint, pin)

    def uids_of(self, pin: Pin) -> dict[str, str]:
        """The operators that a pin keeps: their names by identity, their present names if the log has them."""
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
        shown = listed(sorted(names))
        if uid is None and names:
            raise ConfigurationError(
                f"{self.location} has several operators: {shown}.", hint="Pass one of them as uid."
            )
        what = "no operator" if uid is None else f"no operator '{uid}'"
        raise ConfigurationError(
            f"{self.location} has {what}; it has {shown}.",
            hint="Pass one of them as uid. State that was given up can be read if a pin keeps it: pass the pin's name"
            " as at=.",
        )

    # ---- Choosing ----

    def point(self, uid: str | None, at: At | None) -> LoggedPoint:
        """An operator's checkpoint: of the operator `uid`, or the only one; the one that `at` names, or the newest.

        Raises ConfigurationError if there is no such operator, StateMissingError if it has no such checkpoint.
        """
        at = checked_at(at)
        return self._of_pin(uid, at) if isinstance(at, str) else self.point_of(self.one(uid), at)

    def points(self) -> list[LoggedPoint]:
        """The newest checkpoint of each operator, in order of their names."""
        latest = (self.history.histories[identity].latest for identity in self.identities(None))
        return [LoggedPoint.of(self, self.history, one) for one in latest if one is not None]

    def point_of(self, identity: str, at: int | datetime | None = None) -> LoggedPoint:
        """A checkpoint of an operator on the query's line; raises StateMissingError if there is none."""
        history = self.history.histories[identity]
        latest = history.latest
        assert latest is not None, "an operator has a checkpoint"
        name = f"operator '{latest.uid}' at {self.location}"
        if isinstance(at, datetime):
            times_ms = {one.batch: one.batch_time_ms for one in history.checkpoints if history.has_batch(one.batch)}
            for pin in self._pins_of(identity):
                times_ms.setdefault(pin.batch, pin.batch_time_ms)
            batches = _before(at, times_ms)
            if not batches:
                raise _none_before(at, times_ms, name)
            chosen = batches[0]
        else:
            chosen = latest.batch if at is None else at
        retained = self.retained(identity, chosen)
        if retained is not None:
            return retained
        if pins := self._pins_of(identity, chosen):
            return self.pinned(identity, pins[-1])
        raise _no_checkpoint(name, chosen, history.oldest, latest)

    def _pins_of(self, identity: str, batch: int | None = None) -> list[Pin]:
        """The pins of an operator's checkpoints on the line."""
        return [pin for _, pin in pins_of(self.store, self.history, identity, SystemClock().now_s(), batch)]

    def _of_pin(self, uid: str | None, name: str) -> LoggedPoint:
        """The checkpoint that a pin keeps, on whichever line it lies; the operator may have ended since."""
        pin = self._read_pin(name)
        uids = self.uids_of(pin)
        # The present name takes precedence over the one at the pin's time, which another operator may have now.
        for names in (uids, {one.identity: one.uid for one in pin.operators}):
            found = [identity for identity, known in names.items() if uid in (None, known)]
            if len(found) == 1:
                retained = self.retained(found[0], pin.batch)
                is_retained = retained is not None and retained.checkpoint.token == pin.token
                return retained if retained is not None and is_retained else self.pinned(found[0], pin)
        raise ConfigurationError(
            f"{self.location}: the pin '{name}' keeps {listed(sorted(uids.values()))}.",
            hint="Pass one of them as uid.",
        )

    def _read_pin(self, name: str) -> Pin:
        """The pin of a checkpoint, on whichever line it lies; StateMissingError if there is none of this name."""
        pin = read_pin(self.store, name) if name.startswith(f"{PINS_FOLDER}/") else None
        if pin is None or pin.consumer is not None:
            raise StateMissingError(
                f"{self.location} has no pin '{name}' of a checkpoint.",
                hint="Pass a name that list_pins returns; the pin may have expired.",
            )
        return pin

    def all_at(self, at: At | None) -> tuple[QueryHistory, int]:
        """A checkpoint of all operators, or of those that a pin keeps if `at` is its name.

        Returns the checkpoints of these operators that lead to it, and its batch; raises as :meth:`point`.
        """
        at = checked_at(at)
        if isinstance(at, str):
            pin = self._read_pin(at)
            return pin.query(self.store), pin.batch
        history, latest, name = self.history, self.require_checkpoint(), f"the query at {self.location}"
        pins: dict[int, list[Pin]] = defaultdict(list)
        if at is not None:
            for _, pin in standing_pins(self.store, SystemClock().now_s(), at if isinstance(at, int) else None):
                if pin.is_on_line(history):
                    pins[pin.batch].append(pin)
        times_ms = {batch: of_batch[-1].batch_time_ms for batch, of_batch in pins.items()}
        if isinstance(at, datetime):
            entries = (entry for entry in history.entries if history.has_batch(entry.batch))
            times_ms |= {entry.batch: entry.batch_time_ms for entry in entries}
            wanted = _before(at, times_ms)
        else:
            wanted = [latest.batch if at is None else at]
        for batch in wanted:
            if history.has_batch(batch):
                return history, batch
            for pin in reversed(pins.get(batch, [])):
                if pin.lacks(self.store).issubset(history.ended):
                    return pin.query(self.store), batch
        if isinstance(at, datetime):
            raise _none_before(at, times_ms, name)
        raise _no_checkpoint(name, wanted[0], history.oldest, latest)

    # ---- All that can be read ----

    def kept(
        self,
        identity: str,
        pins: Iterable[tuple[ObjectInfo, Pin]] = (),
        unread: Callable[[ObjectInfo, Pin, StatelogError], None] | None = None,
    ) -> list[KeptPoint]:
        """The checkpoints of an operator that the query or some pins keep, on whichever line they lie.

        `unread` is called if the entries that a pin names cannot be read; by default the error is raised.
        """
        kept: dict[bytes, KeptPoint] = {}
        history = self.history.histories.get(identity)
        for checkpoint in () if history is None else history.checkpoints:
            point = self.retained(identity, checkpoint.batch)
            if point is not None:
                kept[checkpoint.token] = KeptPoint(point, point.needs())
        for info, pin in pins:
            if pin.operator(identity) is None:
                continue
            if pin.token not in kept:
                try:
                    point = self.pinned(identity, pin)
                except StatelogError as error:
                    if unread is None:
                        raise
                    unread(info, pin, error)
                    continue
                kept[pin.token] = KeptPoint(point, point.needs())
            kept[pin.token].pins.append((info, pin))
        return list(kept.values())


@dataclass(frozen=True)
class LoggedPoint(Point):
    """An operator's checkpoint."""

    stored: StoredQuery
    """The operator's query."""
    lineage: QueryHistory
    """The checkpoints that lead to it: those of the query, or of a pin alone."""
    checkpoint: Checkpoint
    pin: Pin | None = None
    """What keeps the checkpoint, if the query does not retain it."""
    parts: Sequence[ReadPart] | None = None
    """What is read of a keyed operator; None for all."""
    _rows: dict[str, Rows] = field(default_factory=dict, compare=False, repr=False)
    """By state; what they have read for some keys stays in memory."""

    @classmethod
    def of(
        cls, stored: StoredQuery, lineage: QueryHistory, checkpoint: Checkpoint, pin: Pin | None = None
    ) -> LoggedPoint:
        """An operator's checkpoint of a query."""
        return cls(
            store=stored.store,
            location=stored.location,
            name=f"operator '{checkpoint.uid}' at {stored.location}",
            uid=checkpoint.uid,
            query_id=checkpoint.query_id,
            parallelism=checkpoint.parallelism,
            batch=checkpoint.batch,
            batch_time_ms=checkpoint.batch_time_ms,
            watermark_ms=checkpoint.watermark_ms,
            key_schema=checkpoint.key_schema,
            states=checkpoint.states,
            settings=checkpoint.settings,
            stored=stored,
            lineage=lineage,
            checkpoint=checkpoint,
            pin=pin,
        )

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
        """Whether it can be read by its batch: it was not taken back, and the operator's state was not given up."""
        history = self.stored.history
        return self.pin is None or (self.identity in history.histories and self.pin.is_on_line(history))

    def follows(self, earlier: LoggedPoint) -> bool:
        """Whether the changes of the batches after an earlier checkpoint of the operator lead to this one."""
        if self.identity != earlier.identity:
            return False  # another operator's checkpoint of the same batch has the same token
        known = self.history.at(earlier.batch)
        if known is not None:
            return known.token == earlier.checkpoint.token
        return self.is_on_line and earlier.is_on_line

    def before(self, batch: int) -> LoggedPoint:
        """An earlier checkpoint of the operator, from which changes lead to this one.

        Raises StateMissingError if it is neither retained nor pinned, or not on this line.
        """
        retained = self.stored.retained(self.identity, batch)
        if retained is not None and self.follows(retained):
            return retained
        pins = pins_of(self.store, self.stored.history, self.identity, SystemClock().now_s(), batch)
        for _, pin in reversed(list(pins)):
            found = self.stored.pinned(self.identity, pin)
            if self.follows(found):
                return found
        raise _no_checkpoint(self.name, batch, self.history.oldest, self.checkpoint)

    def needs(self, since: int | None = None) -> Footprint:
        """What it needs, with the changes from the batch `since` on."""
        return Footprint.of(self.lineage, self.batch, since=since, operators=[self.identity])

    def cut(self, count: int | None = None) -> list[ReadPart]:
        """Cut the state of a keyed operator into parts; see :func:`cut_parts`."""
        return cut_parts(self.history, self.checkpoint, count=count)

    @property
    def state_bytes(self) -> int:
        """Stored bytes of the whole state."""
        return self.needs().state_bytes

    @contextmanager
    def held(self, since: int | None = None) -> Iterator[Callable[[], None]]:
        """Pin the checkpoint during the block.

        Without the right to write, there is no pin. In this case, and if the query deletes the pin early because its
        clock is ahead, PinExpiredError is raised if the files are deleted meanwhile.
        """
        pin: HeldPin | None = None
        with suppress(StorageError):
            pin = HeldPin(self.store, self.needs(since), owner=f"reader {os.getpid()}", lasts_s=READER_S)
        try:
            yield pin.keep if pin is not None else _nothing
        except (CorruptionError, StorageError) as error:
            if pin is None or not pin.stands():
                self.require_kept(error, since)
            raise
        finally:
            if pin is not None:
                pin.release()

    def require_kept(self, error: StatelogError, since: int | None = None) -> None:
        """Raise PinExpiredError if an object is missing because the checkpoint is no longer retained."""
        if error.kind is ErrorKind.OBJECT_MISSING and not is_retained(self.store, self.needs(since)):
            raise gone(self.needs()) from error

    def changes(self, stored: StateSchema, keys: Keys | None = None) -> Iterator[pa.RecordBatch]:
        """The entries of a keyed state, or of some keys; with `parts`, only the entries in these parts."""
        if stored.name not in self._rows:
            self._rows[stored.name] = Rows(self.store, self.history, self.checkpoint, stored, self.name)
        rows = self._rows[stored.name]
        return rows.within(self.parts) if keys is None else rows.of(keys)

    def rows(
        self,
        stored: StateSchema,
        columns: StateColumns | ElementColumns,
        chosen: Sequence[str],
        keys: Keys | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """All columns of a state's rows, or of those of some keys."""
        if isinstance(columns, StateColumns):
            positions = Positions()
            return (columns.to_rows(batch, positions) for batch in self.changes(stored, keys))
        return self._elements(stored, columns)

    def _elements(self, stored: StateSchema, columns: ElementColumns) -> Iterator[pa.RecordBatch]:
        """The rows of a state of an unkeyed operator."""
        segments = self.checkpoint.segments
        for subtask, segment in enumerate(segments[:1] if stored.kind == OperatorStateMode.BROADCAST else segments):
            section = Snapshot(read_segment(self.store, segment), segment.name).sections.get(stored.name)
            if section is not None and section.count:
                yield columns.to_rows(section.rows, subtask)


def _nothing() -> None:
    """Without a pin there is nothing to renew."""


@dataclass(frozen=True)
class KeptPoint:
    """A checkpoint of an operator that can be read."""

    point: LoggedPoint
    needed: Footprint
    pins: list[tuple[ObjectInfo, Pin]] = field(default_factory=list)
    """Those that keep it."""

    @property
    def is_retained(self) -> bool:
        """Whether it needs no pin."""
        return self.point.pin is None


def _no_checkpoint(
    name: str, batch: int, oldest: Checkpoint | QueryCheckpoint | None, latest: Checkpoint | QueryCheckpoint
) -> StateMissingError:
    kept = "none can be restored" if oldest is None else f"it retains {oldest.batch} to {latest.batch}"
    return StateMissingError(
        f"{name[0].upper()}{name[1:]} has no checkpoint {batch}: {kept}.",
        hint="Options(retained_checkpoints=...) keeps more checkpoints. One that was taken back can be read while a pin"
        " keeps it: pass the pin's name as at=.",
    )


def _before(time: datetime, times_ms: Mapping[int, int]) -> list[int]:
    """The batches that are not after a time, of some with their times, newest first."""
    limit_ms = time_limit_ms(time)
    return sorted((batch for batch, time_ms in times_ms.items() if time_ms <= limit_ms), reverse=True)


def _none_before(time: datetime, times_ms: Mapping[int, int], name: str) -> StateMissingError:
    first = min(times_ms.values(), default=None)
    oldest = "it has none" if first is None else f"the oldest one is of {utc_text(first)}"
    return StateMissingError(
        f"{name[0].upper()}{name[1:]} has no checkpoint of {time.isoformat()} or before: {oldest}.",
        hint="Options(retained_s=...) keeps checkpoints for longer.",
    )
