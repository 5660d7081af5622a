"""Follows the changes of a state while its query runs, from one position in the log to the next."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from statelog.clock import Clock, SystemClock
from statelog.errors import ConfigurationError, ErrorKind, PinExpiredError, StateMissingError, StorageError
from statelog.history.footprint import Footprint
from statelog.history.operator_history import History
from statelog.history.pins import Consumer, HeldPin, Pin, PinnedBase, consumer_pins, retry_given_up
from statelog.history.query_history import QueryHistory
from statelog.history.restore_plan import RestorePlan
from statelog.log.entry import Checkpoint, QueryCheckpoint
from statelog.log.open import open_location, open_log
from statelog.log_fields import get_logger
from statelog.options import Options
from statelog.reading.changes import (
    SubtaskChanges,
    begins_empty_with,
    change_table,
    first_with_before,
    first_with_changes,
)
from statelog.reading.checkpoints import LoggedPoint
from statelog.runs import digests
from statelog.storage import ObjectInfo
from statelog.storage.store import if_present

_log = get_logger(__name__)

OWNER: Final = "spark.readStream"
"""Begins the owner of a consumer's pin; its name follows."""

_RENEWAL_S: Final = 60.0
"""Seconds after which a consumer's pin is renewed, so that it names little that the consumer no longer needs."""


@dataclass(frozen=True)
class Position:
    """How far a consumer has come: the last batch whose changes it has."""

    batch: int
    """-1 before batch 0."""
    token: str
    """Of the batch's entry, in hexadecimal digits; empty if the entry was gone when the consumer began after it."""
    id: str
    """Of the batch's checkpoint, which the next one names; like the token."""
    consumer: str
    """The consumer's name, by which it finds its pin again after a restart."""


@dataclass(frozen=True)
class _Look:
    """The log, as of the time it was read."""

    query: QueryHistory
    history: History
    """The operator's."""
    latest: Checkpoint
    """The operator's newest one."""


class ChangeConsumer:
    """Finds the changes of a state after a position, and keeps those that it still needs.

    `point` is the operator, as of any checkpoint, and `state` the name of the state. `pin_s` is how many seconds the
    changes are kept for a consumer that has stopped; they are kept no longer if they take more than `max_bytes`. The
    changes of the newest batch come with the batch after it, which makes them certain; with asynchronous progress, with
    a batch that was written after Spark had stored the commit. `takes_last` takes them as soon as Spark has stored the
    batch's commit. `with_before` also keeps the state at the position, in which readers look up the values before the
    changes. Without the right to write, nothing is kept.

    Raises the errors of :func:`change_table`, and ConfigurationError if `takes_last` and `location`, where a user looks
    for the state, is not a query's checkpointLocation.
    """

    def __init__(
        self,
        location: str,
        point: LoggedPoint,
        state: str | None,
        *,
        pin_s: float,
        max_bytes: int,
        takes_last: bool = False,
        with_before: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.point = point
        self.state, self.table = change_table(point, state, with_before=with_before)
        self._pin_s = pin_s
        self._max_bytes = max_bytes
        self._clock = clock or SystemClock()
        self._spark = open_location(location) if takes_last else None
        if self._spark is not None and not self._spark.list("offsets/"):
            raise ConfigurationError(
                f"{location} has no Spark offsets, so its last batch is never known to be committed.",
                kind=ErrorKind.INVALID_OPTION,
                hint="Pass the query's checkpointLocation, or omit with_last.",
            )
        self._log = open_log(point.store, Options(), self._clock, remembers=True)
        self._name = secrets.token_hex(8)
        self._pinned_s = -math.inf
        self._base: PinnedBase | None = None

    def first(self, after: int | None) -> Position:
        """The position of a new consumer: after a batch, or before all changes that are still stored.

        One that needs former values begins after a retained checkpoint. Raises StateMissingError if changes since
        `after` are gone, or if there is no such batch yet.
        """
        # Unless a batch is named, the oldest changes may be deleted meanwhile.
        return retry_given_up(lambda: self._first(after), is_fixed=after is not None, errors=(StateMissingError,))

    def _first(self, after: int | None) -> Position:
        look = self._look()
        kept_from = first_with_before(look.history) if self.table.with_before else first_with_changes(look.history)
        if after is None:
            after = kept_from - 1
        elif after < -1:
            raise ConfigurationError(
                f"The changes after batch {after} were requested.",
                kind=ErrorKind.INVALID_OPTION,
                hint="Pass the number of a batch, from 0, or -1 for all batches.",
            )
        elif begins_empty_with(look.history, kept_from):
            after = max(after, kept_from - 1)  # the query may have had batches before the operator was added
        position = self._position(look, after, self._name)
        if after > look.latest.batch:
            raise StateMissingError(
                f"{self.point.name} has no batch {after} yet; its newest one is {look.latest.batch}.",
                hint="Begin after a batch that list_checkpoints returns.",
            )
        if look.latest.batch > after:
            self._require_kept(look, position)
        self._keep(look, position)
        return position

    def newest(self, since: Position | None, up_to: int | None = None, max_bytes: int | None = None) -> Position:
        """The newest position that one step can read up to, from a position whose changes have been read.

        A step ends at batch `up_to` at the latest. If `since` is known, the step has batches of one parallelism, and at
        most `max_bytes` of stored changes, of all states, but at least one batch. Raises StateMissingError if changes
        after `since` are gone, or if its batch was replaced.
        """
        look = self._look()
        last = self._last_certain(look)
        if up_to is not None:
            last = min(last, up_to)
        if since is None:
            return self._position(look, last, self._name)
        self._require_same(look, since)
        if last <= since.batch:
            return since
        self._require_kept(look, since)
        self._keep(look, since)
        end = parallelism = size_bytes = 0
        for checkpoint in self._after(look, since, last):
            size_bytes += sum([segment.length for segment in checkpoint.segments])
            is_full = max_bytes is not None and size_bytes > max_bytes
            if parallelism and (is_full or checkpoint.parallelism != parallelism):
                break
            parallelism, end = checkpoint.parallelism, checkpoint.batch
        return self._position(look, end, since.consumer)

    def changes(self, start: Position, end: Position) -> list[list[SubtaskChanges]]:
        """The changes after one position up to another one, of each subtask by batch.

        Raises StateMissingError as :meth:`newest` does, and ConfigurationError if the state now has other columns or a
        batch has no changes in the log.
        """
        look = self._look()
        self._require_same(look, start)
        self._require_same(look, end)
        self._require_kept(look, start)
        self._keep(look, start)
        found = self._after(look, start, end.batch)
        for checkpoint in found:
            self._require_readable(checkpoint)
        parallelism = max((checkpoint.parallelism for checkpoint in found), default=0)
        return [[SubtaskChanges.of(checkpoint, subtask) for checkpoint in found] for subtask in range(parallelism)]

    def states(self, start: Position, parallelism: int) -> list[RestorePlan]:
        """What the state of each subtask at a position is read from.

        Raises StateMissingError if it is no longer kept.
        """
        look = self._look()
        self._keep(look, start)
        base = self._base
        if base is None or start.batch < base.batch:
            raise self._gone(start.batch + 1)
        checkpoint, batch = self.point.checkpoint, start.batch
        needed = self._checkpoints(look, base.since, batch)[0] if base.since <= batch else []
        own = History.on_base(base.ranges, needed)
        genesis = [digests.genesis(checkpoint.identity, subtask, parallelism) for subtask in range(parallelism)]
        return [
            own.missing_segments(empty, subtask, parallelism, batch, set()) for subtask, empty in enumerate(genesis)
        ]

    # ---- Parts ----

    def _look(self) -> _Look:
        query = QueryHistory(self._log.read())
        history = query.histories.get(self.point.identity)
        if history is None or history.latest is None:
            raise StateMissingError(
                f"{self.point.name} no longer has a checkpoint.",
                hint="Check whether its state was given up, the query was set back to before it began, or the location"
                " was emptied.",
            )
        return _Look(query, history, history.latest)

    def _position(self, look: _Look, batch: int, consumer: str) -> Position:
        entry = look.query.at(batch)
        return Position(
            batch, "" if entry is None else entry.token.hex(), "" if entry is None else entry.id.hex(), consumer
        )

    def _last_certain(self, look: _Look) -> int:
        latest = look.latest.batch
        if self._spark is not None:
            spark, name = self._spark, f"commits/{latest}"
            if if_present(lambda: spark.read(name)) is not None:
                return latest
        entry = look.query.at(latest)
        stored = None if entry is None else entry.stored_commit
        return latest - 1 if stored is None else min(latest - 1, stored)

    def _require_same(self, look: _Look, position: Position) -> None:
        """Raise StateMissingError if the batch of a position was taken back."""
        own = look.query.at(position.batch)
        # A deleted entry is recognized by the one after it, see `_after`.
        is_same = position.batch <= look.latest.batch if own is None else own.token.hex() == position.token
        if position.token and not is_same:
            raise self._replaced(look, position)

    def _replaced(self, look: _Look, position: Position) -> StateMissingError:
        was = "is no longer in the log" if look.query.at(position.batch) is None else "was replaced"
        return StateMissingError(
            f"{self.point.name}: batch {position.batch} {was} after its changes were read: the query was set back, or"
            " started over.",
            hint="Start over from a checkpoint: read_state(at=N), then the changes after N.",
        )

    def _require_kept(self, look: _Look, since: Position) -> None:
        """Raise StateMissingError if the changes after a position may be gone."""
        first = since.batch + 1
        if first <= look.latest.batch and not self._are_kept(look.history, first):
            raise self._gone(first)

    def _are_kept(self, history: History, first: int) -> bool:
        """Whether the changes from a batch on are stored, by the log or because a consumer needs them."""
        return history.changes_from <= first or bool(self._pins_from(first))

    def _consumer_pins(self) -> Iterator[tuple[ObjectInfo, Pin]]:
        return consumer_pins(self.point.store, self.point.identity, self._clock.now_s())

    def _pins_from(self, first: int) -> list[Pin]:
        """The consumers' pins that keep the changes from a batch on."""
        return [pin for _, pin in self._consumer_pins() if pin.since is not None and pin.since <= first]

    def _gone(self, batch: int) -> StateMissingError:
        return StateMissingError(
            f"{self.point.name}: the changes of batch {batch} are gone.",
            hint="Start over from a checkpoint: read_state(at=N), then the changes after N. A consumer keeps changes"
            " while it runs and for pin_s after that, up to max_pin_bytes.",
        )

    def _after(self, look: _Look, since: Position, last: int) -> list[Checkpoint]:
        """The checkpoints after a position; raises StateMissingError if one is gone, or the position was taken back."""
        first = since.batch + 1
        found, oldest = self._checkpoints(look, first, last)
        if oldest.batch == first and since.id and oldest.follows.hex() != since.id:
            raise self._replaced(look, since)
        return found

    def _checkpoints(self, look: _Look, first: int, last: int) -> tuple[list[Checkpoint], QueryCheckpoint]:
        """The checkpoints of some batches, from the log or, where it begins later, from consumers' pins.

        Also returns the entry of the first one, or an earlier entry. Raises StateMissingError if one is gone.
        """
        found = {checkpoint.batch: checkpoint for checkpoint in look.history.between(first, last)}
        oldest = look.query.at(first) or look.query.entries[0]
        if oldest.batch > first:
            # Pinned checkpoints may be from before a rewind. Only those that the log's checkpoints lead back to count.
            pinned: dict[bytes, tuple[QueryCheckpoint, Checkpoint | None]] = {}
            for pin in self._pins_from(first):
                query = if_present(partial(pin.query, self.point.store))
                if query is None:
                    continue  # the query considers the pin expired, and has deleted its files
                history = query.histories[self.point.identity]
                for entry in query.entries:
                    if entry.id not in pinned or pinned[entry.id][0].revision < entry.revision:
                        pinned[entry.id] = entry, history.at(entry.batch)
            while oldest.batch > first and oldest.follows in pinned:
                oldest, own = pinned[oldest.follows]
                if own is not None and own.batch <= last:
                    found[own.batch] = own
        for batch in range(first, last + 1):
            if batch not in found:
                raise self._gone(batch)
        return [found[batch] for batch in range(first, last + 1)], oldest

    def _require_readable(self, checkpoint: Checkpoint) -> None:
        """Raise ConfigurationError unless a batch has changes, in the columns that the consumer began with."""
        if not checkpoint.segments:
            raise ConfigurationError(
                f"{self.point.name} has no changes in batch {checkpoint.batch}: the batch ran with"
                " Tuning(changelog=False).",
                kind=ErrorKind.UNSUPPORTED_FEATURE,
                hint="Compare two checkpoints with read_diff.",
            )
        if checkpoint.key_schema == self.point.key_schema and self.state in checkpoint.states:
            return
        raise ConfigurationError(
            f"{self.point.name}: from batch {checkpoint.batch} on, state '{self.state.name}' is gone or has other"
            " columns.",
            kind=ErrorKind.OTHER_SCHEMA,
            hint="Start over with the new columns, after the preceding batch.",
        )

    def _keep(self, look: _Look, since: Position) -> None:
        """Keep the changes after a position, and the state that they need, if the pin for them is missing or old."""
        now_s = self._clock.monotonic_s()
        if now_s - self._pinned_s <= min(_RENEWAL_S, self._pin_s / 2):
            return
        for base in self._bases(look, since) if self.table.with_before else [None]:
            try:
                self._pin(look, since, base)
            except PinExpiredError:
                continue  # it has been deleted since the log was read
            self._base = base
            return
        raise self._gone(since.batch + 1)

    def _pin(self, look: _Look, since: Position, base: PinnedBase | None) -> None:
        """Make a pin of the changes after a position, if there are any, and of the state that they build on."""
        # The entry of the position itself is kept too, so that a batch that was replaced is recognized.
        first = max(since.batch, 0) if base is None else base.since
        history = look.history
        if base is None and (history.at(first) is None or not self._are_kept(history, first)):
            first = since.batch + 1
        if history.at(first) is None:
            return  # nothing is there yet, or a pin keeps it that the log does not reach
        store, owner, now_s = self.point.store, self._owner(since), self._clock.monotonic_s()
        try:
            ranges = [] if base is None else base.ranges
            made = HeldPin(
                store,
                Footprint.of_changes(history, look.latest.batch, since=first, base_ranges=ranges),
                Consumer(self._max_bytes) if base is None else Consumer(self._max_bytes, base.batch, base.token),
                owner=owner,
                lasts_s=self._pin_s,
                is_shared=True,
                clock=self._clock,
            )
            pins = self._consumer_pins()
            store.delete([info.name for info, pin in pins if pin.owner == owner and info.name != made.name])
        except StorageError as error:
            _log.warning("%s: the changes since batch %d cannot be kept: %s", self.point.name, first, error)
        self._pinned_s = now_s

    def _bases(self, look: _Look, since: Position) -> Iterator[PinnedBase]:
        """What the state at a position can be built from: according to the log, or to a pin of an earlier position."""
        history = look.history
        batch, record = since.batch, history.record(since.batch)
        if begins_empty_with(history, batch + 1):
            yield PinnedBase(batch, b"", batch + 1, [])
        elif record is not None and record.base_map is not None and history.has_batch(batch):
            yield PinnedBase(batch, record.checkpoint.token, record.needed_from, list(record.base_map.ranges))

        def counts(base: PinnedBase, owner: str) -> bool:
            then = history.at(base.batch)
            is_same = owner == self._owner(since) if then is None else then.token == base.token
            return base.batch <= batch and is_same

        pins = self._consumer_pins()
        kept = [pin.base for _, pin in pins if pin.base is not None and counts(pin.base, pin.owner)]
        yield from sorted(kept, key=lambda base: -base.batch)[:1]

    def _owner(self, position: Position) -> str:
        return f"{OWNER} {position.consumer}"
