"""Decides which stored objects no checkpoint needs any more.

References to files are counted. The log is truncated where an entry repeats the base map. Orphans are found at a
start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from statelog.clock import Clock
from statelog.coordinator.deletion import Deleter, DeletionGate, find_orphans
from statelog.coordinator.grants import Grants
from statelog.coordinator.standing_pins import RetainedPoints, StandingPins
from statelog.history.bases import BaseMap
from statelog.history.operator_history import Record
from statelog.history.pins import read_pin
from statelog.history.query_history import QueryHistory
from statelog.log.entry import INITIAL_BATCH, Checkpoint, Claim, Entry, Parent, QueryCheckpoint
from statelog.log.numbered import NumberedLog, base_name
from statelog.log.open import CHANGES_FOLDER, LOG_FOLDER, RUNS_FOLDER, open_location
from statelog.log.references import Level, SegmentRef, StoredRun
from statelog.log_fields import get_logger
from statelog.options import Options
from statelog.storage import Store
from statelog.storage.links import is_link
from statelog.storage.open import is_same_place

_log = get_logger(__name__)

_ROUND_S: Final = 5.0
"""Seconds between two rounds of deletions in an object store, which charges for the list of pins."""
_RANGE_BYTES: Final = 100
_RUN_BYTES: Final = 60
_SEGMENT_BYTES: Final = 80


class Truncation:
    """Decides which entries repeat the base map.

    An entry does if the log can then begin later, and if the log has grown by at least the size of the base map since
    the last repetition. So repetitions at most double the log.
    """

    def __init__(self) -> None:
        self._repeated_through = -1
        self._grown_bytes = 0
        self._last = (-1, -1, 0)
        """The batch of the last repetition, and the two numbers as they were before it."""
        self._seen: BaseMap | None = None
        self._seen_through = -1
        self._seen_bytes = 0

    def base_map_to_repeat(self, before: Record) -> BaseMap | None:
        """The base map that the entry after a checkpoint repeats; None if it need not repeat one."""
        base_map = before.base_map
        if base_map is None:
            return None
        if base_map is not self._seen:
            runs = sum([len(level.runs) for base_range in base_map.ranges for level in base_range.base.levels])
            self._seen, self._seen_through = base_map, base_map.through
            self._seen_bytes = _RANGE_BYTES * len(base_map.ranges) + _RUN_BYTES * runs
        batch, repeated_through, grown_bytes = self._last
        if batch != before.checkpoint.batch + 1:  # else its entry is revised, and the revision replaces it
            repeated_through, grown_bytes = self._repeated_through, self._grown_bytes
        return base_map if self._seen_through > repeated_through and self._seen_bytes <= grown_bytes else None

    def committed(self, record: Record, repeated: BaseMap | None, payload_bytes: int) -> None:
        """Note that an entry is durable."""
        if repeated is not None:
            if self._last[0] != record.checkpoint.batch:
                self._last = record.checkpoint.batch, self._repeated_through, self._grown_bytes
            self._repeated_through, self._grown_bytes = self._seen_through, 0
        self._grown_bytes += payload_bytes + _SEGMENT_BYTES * len(record.checkpoint.segments)


@dataclass
class _Segment:
    length: int
    references: int = 0


@dataclass
class _File:
    """A file: its size, as far as it is known, and its needed segments by offset."""

    size_bytes: int = 0
    needed_bytes: int = 0
    segments: dict[int, _Segment] = field(default_factory=dict)


class Retention:
    """Counts the references of checkpoints to files.

    Changesets of keyed state inside the entry that references them are not counted: they stay as long as the entry, and
    later checkpoints build on it.

    `max_space_amplification` limits the size of all files divided by their needed bytes (`size_bytes / needed_bytes`).
    Above the limit, the most wasteful files are emptied: their needed bytes are stored again elsewhere. A file that is
    within the limit by itself stays.
    """

    def __init__(self, max_space_amplification: float) -> None:
        self._max_amplification = max_space_amplification
        self._log_folder = f"{LOG_FOLDER}/"
        self._files: dict[str, _File] = {}
        self._unneeded: set[str] = set()
        self.wasteful: frozenset[str] = frozenset()
        """The files to empty."""
        self.size_bytes = 0
        self.needed_bytes = 0

    def add(self, checkpoint: Checkpoint) -> None:
        """Count the references of a checkpoint."""
        self.add_runs(self._counted(checkpoint))

    def add_runs(self, runs: Iterable[StoredRun | SegmentRef]) -> None:
        """Count stored runs or segments, each as often as it occurs."""
        for segment in runs:
            file = self._files.setdefault(segment.name, _File())
            # A parent's object does not count toward the query's size, so it is never wasteful: storing its parts again
            # frees nothing.
            growth = 0 if is_link(segment.name) else max(segment.offset + segment.length - file.size_bytes, 0)
            file.size_bytes += growth
            self.size_bytes += growth
            held = file.segments.get(segment.offset)
            if held is None:
                held = file.segments[segment.offset] = _Segment(segment.length)
                file.needed_bytes += held.length
                self.needed_bytes += held.length
                self._unneeded.discard(segment.name)
            held.references += 1

    def remove(self, checkpoint: Checkpoint) -> None:
        """Drop the references of a checkpoint that was added."""
        self.remove_runs(self._counted(checkpoint))

    def remove_runs(self, runs: Iterable[StoredRun | SegmentRef]) -> None:
        """Drop references that were counted."""
        for segment in runs:
            file = self._files[segment.name]
            held = file.segments[segment.offset]
            held.references -= 1
            if not held.references:
                del file.segments[segment.offset]
                file.needed_bytes -= held.length
                self.needed_bytes -= held.length
            if not file.segments:
                self._unneeded.add(segment.name)

    def release(self) -> list[str]:
        """The files outside the log that are no longer needed since the last call, sorted."""
        released = sorted(self._unneeded)
        self._unneeded.clear()
        for name in released:
            self.size_bytes -= self._files.pop(name).size_bytes
        return [name for name in released if not name.startswith(self._log_folder)]

    def needs(self, name: str) -> bool:
        """Whether any part of a file is needed."""
        return name in self._files

    def choose_wasteful(self, log_from: str) -> None:
        """Choose the files to empty: the most wasteful ones above the limit, until the others are small enough.

        Log files from `log_from` on are never emptied.
        """
        excess = self.size_bytes - self.needed_bytes * self._max_amplification
        closed = [
            (file.size_bytes - file.needed_bytes, name)
            for name, file in self._files.items()
            if file.size_bytes > file.needed_bytes * self._max_amplification
            and not (name.startswith(self._log_folder) and name >= log_from)
        ]
        chosen: list[str] = []
        for wasted, name in sorted(closed, reverse=True):
            if excess <= 0:
                break
            chosen.append(name)
            excess -= wasted
        self.wasteful = frozenset(chosen)

    def lasting(self, levels: list[Level]) -> list[Level]:
        """The levels before the first one that has to be stored again."""
        for count, level in enumerate(levels):
            if any(run.name in self.wasteful for run in level.runs):
                return levels[:count]
        return levels

    def _counted(self, checkpoint: Checkpoint) -> Iterator[SegmentRef]:
        own = f"{self._log_folder}{base_name(checkpoint.number)}"
        for segment in checkpoint.segments:
            # A revision of an entry references segments in the entry before it.
            if checkpoint.is_whole or segment.name != own:
                yield segment


class _ParentObjects:
    """The parent's objects that a branch still needs; none for a query that is not a branch.

    Entries name the parent while one of its objects is needed. The pin at the parent is removed once an
    entry without the name is durable.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._needed: set[str] = set()
        self.parent: Parent | None = None
        """The parent that the next entry has to name."""
        self._left: Parent | None = None
        """The parent that the newest durable entry no longer names."""
        self._is_free = False

    def open(self, query: QueryHistory) -> None:
        """Continue with the parent that the newest entry names."""
        self.parent = query.parent
        self._needed = {name for name in query.object_names() if is_link(name)}

    def unreferenced(self, is_referenced: Callable[[str], bool]) -> set[str]:
        """The objects that only pins may need."""
        return {name for name in self._needed if not is_referenced(name)}

    def look(self, unreferenced: set[str], may_go: Callable[[str], bool], pins: StandingPins) -> None:
        """See whether an object is still needed; one that is not never will be again. `may_go` is the deletion gate.

        `unreferenced` are those of before the pins were listed: no later pin can name them.
        """
        if self._left is not None:
            self._release(self._left)
        if self.parent is not None:
            self._needed -= {name for name in unreferenced if may_go(name)}
            self._is_free = not self._needed and not pins.need_any(is_link)

    def to_name(self) -> Parent | None:
        """The parent that an entry about to be written names."""
        return None if self._is_free else self.parent

    def committed(self, entry: QueryCheckpoint) -> None:
        """Note that an entry is durable."""
        if self.parent is not None and entry.parent is None:
            self._left, self.parent = self.parent, None

    @property
    def is_due(self) -> bool:
        """Whether the pin at the parent can be removed."""
        return self._left is not None

    def _release(self, parent: Parent) -> None:
        try:
            store = open_location(parent.location)
            pin = read_pin(store, parent.pin)
            is_own = pin is not None and bool(pin.branch) and is_same_place(pin.branch, self._name)
            if is_own:
                store.delete([parent.pin])
        except Exception as error:
            _log.warning("%s: the branch's pin at its parent could not be removed yet: %s", self._name, error)
            return
        if pin is not None and not is_own:
            _log.warning("%s: %s in its parent %s is not its pin, and stays", self._name, parent.pin, parent.location)
        _log.info("%s: the branch no longer needs any object of its parent %s", self._name, parent.location)
        self._left = None


def _inline_bytes(entry: QueryCheckpoint) -> int:
    """Bytes of changes inside an entry."""
    own = f"{LOG_FOLDER}/{base_name(entry.number)}"
    return sum([segment.length for section in entry.sections for segment in section.segments if segment.name == own])


class Inventory:
    """The history of a query, and the parts that decide together which files it needs."""

    def __init__(self, store: Store, name: str, options: Options, clock: Clock, *, deletes_in_background: bool) -> None:
        self.query = QueryHistory()
        self.retention = Retention(options.max_space_amplification)
        self.pins = StandingPins(store, clock)
        self.parent = _ParentObjects(name)
        self.points = RetainedPoints(store, name, options.retained_spans_s, clock)
        self.gate = DeletionGate(self.retention.needs, self._is_granted, self.pins.need)
        self.deleter = Deleter(
            store,
            name,
            self.gate.may_go,
            in_background=deletes_in_background,
            look=self._look,
            pause_s=0.0 if store.can_append else _ROUND_S,
        )
        self.epoch = 0
        self._store = store
        self._name = name
        self._options = options
        self._grants: dict[str, Grants] = {}
        self._truncations: dict[str, Truncation] = {}
        self._active: Sequence[str] = ()
        self._log_bytes: dict[int, int] = {}
        """Bytes of changes inside the entries up to each batch, as far as known, in order of the batches."""
        self._log_holder: tuple[str, int] | None = None
        self._orphans: list[str] = []

    def work_for(self, identities: Sequence[str]) -> None:
        """Note the operators that this start has."""
        self._active = identities

    def grants_of(self, identity: str) -> Grants:
        """The grants of an operator in this start."""
        return self._grants.setdefault(
            identity, Grants(lambda subtask: f"{identity}/{RUNS_FOLDER}/{self.epoch}/{subtask}")
        )

    def _is_granted(self, name: str) -> bool:
        return any(grants.is_open(name) for grants in list(self._grants.values()))

    def _look(self) -> list[str]:
        """Pin the checkpoints that are to stay, then list the pins; return those that have expired."""
        self.points.pin()
        unreferenced = self.parent.unreferenced(self.gate.is_referenced)
        expired = self.pins.look(self.query.copy())
        self.parent.look(unreferenced, self.gate.may_go, self.pins)
        return expired

    def changes_from(self, oldest: int) -> dict[str, int]:
        """The first batch whose changes consumers need, by operator, if a rewind can reach back to batch `oldest`.

        Operators without keys have no changes. Changes stay until the pins have been listed after them.
        """
        found: dict[str, int] = {}
        for identity, history in list(self.query.histories.items()):
            if history.latest is None or history.latest.is_whole:
                continue
            if not self.pins.has_seen(history.needed_from(oldest) - 1):
                self.deleter.look()
            found[identity] = self.pins.changes_from(identity)
        return found

    def open(
        self, entries: Sequence[Entry], epoch: int, run_id: str, clock: Clock, given: Collection[str] = ()
    ) -> None:
        """Count the files that the log references, and find the orphans of earlier starts.

        `given` are the objects with which operators begin.
        """
        self.epoch = epoch
        self.gate.begin(epoch, INITIAL_BATCH)
        self.query = QueryHistory(entries)
        for history in self.query.histories.values():
            for record in history.records:
                self.retention.add(record.checkpoint)
                self.retention.add_runs(record.added_runs)
        self.parent.open(self.query)
        sizes = [_inline_bytes(entry) for entry in self.query.entries]
        batches = [entry.batch for entry in self.query.entries]
        self._log_bytes = dict(zip(batches, accumulate(sizes), strict=True))
        min_age_s = self._options.tuning.orphan_min_age_s
        self._orphans = find_orphans(
            self._store,
            self.query,
            epoch=epoch,
            run_id=run_id,
            fenced_runs={entry.run_id for entry in entries if isinstance(entry, Claim)},
            given=given,
            min_age_s=min_age_s,
            clock=clock,
        )
        self._store.remove_unfinished("", clock.now_s() - min_age_s)

    def remove_orphans(self) -> None:
        """Delete the orphans that were found; last in a start, since the thread that deletes ends with the start."""
        if self._orphans:
            _log.info("%s: removing %d objects that crashed runs left behind", self._name, len(self._orphans))
            self.deleter.delete(self._orphans)

    def add(self, entry: QueryCheckpoint, repeated: Mapping[str, BaseMap], payload_bytes: int) -> None:
        """Count the files of a durable checkpoint, and drop those of the checkpoints that it replaces.

        `repeated` has the base maps that its sections repeat, by operator; `payload_bytes` is the entry's size without
        the index.
        """
        replaced = self.query.add(entry, may_replace=self.gate.doubted > 1)
        self._log_bytes[entry.batch] = self._log_bytes.get(entry.batch - 1, 0) + payload_bytes
        for section in entry.sections:
            record = self.query.histories[section.identity].latest_record
            assert record is not None, "it was just added"
            self.retention.add(record.checkpoint)
            self.retention.add_runs(record.added_runs)
            self._truncation(section.identity).committed(record, repeated.get(section.identity), payload_bytes)
        for other in replaced:
            self.retention.remove(other.checkpoint)
            self.retention.remove_runs(other.added_runs)
        self.parent.committed(entry)
        # The entry makes the checkpoint before it certain.
        certain = self.query.at(entry.batch - 1)
        if certain is not None:
            self.points.add(self.query, certain)
        if self.points.pending or self.parent.is_due:
            self.deleter.look()

    def _truncation(self, identity: str) -> Truncation:
        return self._truncations.setdefault(identity, Truncation())

    def base_map_to_repeat(self, identity: str, batch: int) -> BaseMap | None:
        """The base map that an operator's section of a batch has to repeat; None if it need not repeat one."""
        history = self.query.histories.get(identity)
        before = None if history is None else history.record(batch - 1)
        return None if before is None else self._truncation(identity).base_map_to_repeat(before)

    def changes_folder(self, identity: str, subtask: int) -> str:
        """The folder of a subtask's large changesets and snapshots."""
        return f"{identity}/{CHANGES_FOLDER}/{self.epoch}/{subtask}"

    def release(
        self,
        entry: QueryCheckpoint,
        oldest: int,
        log: NumberedLog,
        removable: Iterable[str],
        changes_from: dict[str, int],
    ) -> None:
        """Delete the files that only checkpoints before the oldest retained one need, after a new entry is durable.

        `removable` are the log files that no older writer needs. For the operators in `changes_from`, the changes since
        a batch stay.
        """
        self.gate.settle(log.name_of(entry.log_start))
        for settled in self.query.settle(oldest):
            self.retention.remove_runs(settled.removed_runs)
        given_up, left = self.query.retain(oldest, changes_from)
        for record in given_up:
            self.retention.remove(record.checkpoint)
        self.retention.remove_runs(left)
        self.query.drop_cuts(self.pins.oldest_place)
        released = self.retention.release()
        # Files from the log's start on stay anyway if an operator has keys; otherwise only the newest is certain to.
        is_whole = all(not section.key_schema for section in entry.sections)
        self.retention.choose_wasteful(log.file_name if is_whole else log.name_of(entry.log_start))
        # A log file is deleted once neither its entries nor bytes that a later entry references are needed.
        log_files = [name for name in removable if not self.retention.needs(name)]
        log.forget(log_files)
        self.deleter.delete([*log_files, *released])

    def find_log_holder(self, oldest: int, most_bytes: Callable[[str], float]) -> None:
        """See whether one operator alone keeps more of the log than it may; `oldest` as in :meth:`release`.

        `most_bytes` gives an operator's limit.
        """
        kept_from = self.query.entries[0].batch - 1
        while (batch := next(iter(self._log_bytes))) < kept_from:
            del self._log_bytes[batch]
        histories = self.query.histories
        needed = sorted((histories[one].needed_from(oldest), one) for one in self._active if one in histories)
        self._log_holder = None
        if len(needed) > 1:
            (first, identity), (second, _) = needed[:2]
            held_bytes = self._log_bytes.get(second - 1, 0) - self._log_bytes.get(first - 1, 0)
            if held_bytes > most_bytes(identity):
                self._log_holder = identity, second

    def needed_by(self, identity: str) -> int | None:
        """The batch up to which an operator has to materialize its state, because it alone holds back the log.

        None if it does not hold the log back.
        """
        return self._log_holder[1] if self._log_holder is not None and self._log_holder[0] == identity else None

    def remove_lost(self, identity: str, batch: int, lost: Iterable[int], ended: Iterable[str]) -> None:
        """Delete the files of a certain batch's attempts that do not count, and the folders of ended grants."""
        for subtask in sorted(lost):
            self.deleter.delete_below(f"{self.changes_folder(identity, subtask)}/{batch}-")
        for folder in ended:
            self.deleter.delete_below(f"{folder}/")

    def close(self) -> None:
        """Delete the files that this start's attempts and jobs have left, and stop deleting."""
        self.gate.end()
        for grants in self._grants.values():
            grants.end_all()
        for identity in self._active:
            for folder in (CHANGES_FOLDER, RUNS_FOLDER):
                self.deleter.delete_below(f"{identity}/{folder}/{self.epoch}/")
        self.deleter.close()
