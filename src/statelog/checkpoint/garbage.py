"""Decides which stored objects no checkpoint needs any more.

References to files are counted. The log is truncated where an entry repeats the base map. Orphans are found at a
start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from statelog.checkpoint.bases import BaseMap
from statelog.checkpoint.batch import Batch
from statelog.checkpoint.deletion import Deleter, DeletionGate
from statelog.checkpoint.grants import Grants
from statelog.checkpoint.history import History, Record
from statelog.checkpoint.parent import ParentObjects
from statelog.checkpoint.pins import StandingPins
from statelog.checkpoint.retained_points import RetainedPoints
from statelog.clock import Clock
from statelog.log.entry import INITIAL_BATCH, Checkpoint, Claim, Entry
from statelog.log.numbered import NumberedLog, base_name
from statelog.log.open import CHANGES_FOLDER, INITIAL_FOLDER, LOG_FOLDER, RUNS_FOLDER
from statelog.log.references import Level, SegmentRef, StoredRun
from statelog.log_fields import get_logger
from statelog.options import Options
from statelog.storage import Store
from statelog.storage.links import is_link

_log = get_logger(__name__)

_ROUND_S: Final = 5.0
"""Seconds between two rounds of deletions in an object store, which charges for the list of pins."""
_RANGE_BYTES: Final = 100
_RUN_BYTES: Final = 60
_SEGMENT_BYTES: Final = 80


class Truncation:
    """Decides which entries repeat the base map.

    An entry does if the log can then begin later, and if the log has grown by as many bytes since the last repetition.
    So repetitions at most double the log.
    """

    def __init__(self) -> None:
        self._repeated_through = -1
        self._grown_bytes = 0
        self._seen: BaseMap | None = None
        self._seen_through = -1
        self._seen_bytes = 0

    def base_map_to_repeat(self, before: Record) -> BaseMap | None:
        """The base map that the entry after a checkpoint repeats; None if it need not."""
        base_map = before.base_map
        if base_map is None:
            return None
        if base_map is not self._seen:
            runs = sum([len(level.runs) for base_range in base_map.ranges for level in base_range.base.levels])
            self._seen, self._seen_through = base_map, base_map.through
            self._seen_bytes = _RANGE_BYTES * len(base_map.ranges) + _RUN_BYTES * runs
        is_useful = self._seen_through > self._repeated_through
        return base_map if is_useful and self._seen_bytes <= self._grown_bytes else None

    def committed(self, record: Record, repeated: BaseMap | None, payload_bytes: int) -> None:
        """Note that an entry is durable."""
        if repeated is not None:
            self._repeated_through, self._grown_bytes = self._seen_through, 0
        self._grown_bytes += payload_bytes + _SEGMENT_BYTES * len(record.checkpoint.segments)


def find_orphans(
    store: Store,
    root: str,
    history: History,
    *,
    epoch: int,
    run_id: str,
    fenced_runs: Collection[str] = (),
    min_age_s: float,
    clock: Clock,
) -> list[str]:
    """Objects of an operator that no checkpoint references and no live start can still reference, sorted.

    Looks only below `root`, the operator's folder. `epoch` was just claimed: writers of older epochs are fenced, so
    objects that they wrote since the last entry can never be referenced. `run_id` is the start whose initial state may
    still be needed. Objects younger than `min_age_s` stay, because a start without a claim in the log may be about to
    claim. The initial state of `fenced_runs` goes at any age.
    """
    referenced = history.object_names()
    initial, own = (f"{root}/{folder}/" for folder in (INITIAL_FOLDER, f"{INITIAL_FOLDER}/{run_id}"))
    found = [
        info
        for folder in (f"{root}/{CHANGES_FOLDER}/", f"{root}/{RUNS_FOLDER}/")
        for info in store.list(folder)
        if info.name not in referenced and _epoch_of(info.name, folder) < epoch
    ]
    found += [info for info in store.list(initial) if not info.name.startswith(own)]
    fenced = tuple(f"{initial}{run}/" for run in fenced_runs)
    now_s = clock.now_s()
    return sorted(info.name for info in found if info.name.startswith(fenced) or now_s - info.modified_s >= min_age_s)


def _epoch_of(name: str, prefix: str) -> int:
    folder = name.removeprefix(prefix).partition("/")[0]
    return int(folder) if folder.isdecimal() else 0


@dataclass
class _Segment:
    length: int
    references: int = 0


@dataclass
class _File:
    """A file: its size as far as known, and its needed segments by offset."""

    size_bytes: int = 0
    needed_bytes: int = 0
    segments: dict[int, _Segment] = field(default_factory=dict)


class Retention:
    """Counts the references of checkpoints to files.

    Changesets of keyed state inside the entry that references them are not counted: they stay as long as the entry, and
    later checkpoints build on it.

    `max_space_amplification` limits the size of all files divided by their needed bytes (`size_bytes / needed_bytes`).
    Above the limit the most wasteful files are emptied: their needed bytes are stored again elsewhere. A file that is
    within the limit by itself stays.
    """

    def __init__(self, max_space_amplification: float, log_folder: str) -> None:
        self._max_amplification = max_space_amplification
        self._log_folder = f"{log_folder}/"
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
            # The size of a parent's object is not the operator's, and so it is never wasteful: storing its parts again
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
        """The files outside the log that have become unneeded since the last call, sorted."""
        released = sorted(self._unneeded)
        self._unneeded.clear()
        for name in released:
            self.size_bytes -= self._files.pop(name).size_bytes
        return [name for name in released if not name.startswith(self._log_folder)]

    def needs(self, name: str) -> bool:
        """Whether any part of a file is needed."""
        return name in self._files

    def choose_wasteful(self, log_from: str) -> None:
        """Choose the files to empty: of those above the limit the most wasteful, until the others are small enough.

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
        """The levels before the first that has to be stored again."""
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


class Inventory:
    """The history of an operator, and the parts that decide together which files it needs."""

    def __init__(
        self, store: Store, root: str, name: str, options: Options, clock: Clock, *, deletes_in_background: bool
    ) -> None:
        self.history = History()
        self.grants = Grants(self._runs_folder)
        self.retention = Retention(options.max_space_amplification, f"{root}/{LOG_FOLDER}")
        self.pins = StandingPins(store, root, clock)
        self.parent = ParentObjects(store, root, name)
        self.points = RetainedPoints(store, root, name, options.retained_s, clock)
        self.gate = DeletionGate(root, self.retention.needs, self.grants.is_open, self.pins.need)
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
        self._root = root
        self._name = name
        self._options = options
        self._truncation = Truncation()

    def _look(self) -> list[str]:
        """Pin what is to stay, then list the pins; return those that have expired."""
        self.points.pin()
        expired = self.pins.look(self.history.copy())
        self.parent.release(self.gate.may_go, self.pins)
        return expired

    def changes_from(self, oldest: int) -> int | None:
        """The first batch whose changes consumers need, if `oldest` is the oldest batch that a rewind can reach.

        None if the operator has no changes. Changes stay until the pins were listed after them.
        """
        if self.history.latest is None or self.history.latest.is_whole:
            return None
        if not self.pins.has_seen(self.history.needed_from(oldest) - 1):
            self.deleter.look()
        return self.pins.changes_from

    def open(self, entries: Iterable[Entry], epoch: int, run_id: str, clock: Clock) -> None:
        """Take over the files that the log references, and delete the orphans of earlier starts."""
        self.epoch = epoch
        self.gate.begin(epoch, INITIAL_BATCH)
        entries = list(entries)
        self.history = History(entries)
        for record in self.history.records:
            self.retention.add(record.checkpoint)
            self.retention.add_runs(record.added_runs)
        self.parent.open(self.history)
        min_age_s = self._options.orphan_min_age_s
        orphans = find_orphans(
            self._store,
            self._root,
            self.history,
            epoch=epoch,
            run_id=run_id,
            fenced_runs={entry.run_id for entry in entries if isinstance(entry, Claim)},
            min_age_s=min_age_s,
            clock=clock,
        )
        if orphans:
            _log.info("%s: removing %d objects that crashed runs left behind", self._name, len(orphans))
            self.deleter.delete(orphans)
        self._store.remove_unfinished(f"{self._root}/", clock.now_s() - min_age_s)

    def add(self, checkpoint: Checkpoint, base_map: BaseMap | None, payload_bytes: int) -> None:
        """Count the files of a durable checkpoint, and drop those of the checkpoints that it replaces.

        `base_map` is the one that its entry repeats, `payload_bytes` the entry's size without the index.
        """
        self.retention.add(checkpoint)
        replaced = self.history.add(checkpoint)
        record = self.history.latest_record
        assert record is not None
        self.retention.add_runs(record.added_runs)
        for other in replaced:
            self.retention.remove(other.checkpoint)
            self.retention.remove_runs(other.added_runs)
        self._truncation.committed(record, base_map, payload_bytes)
        # The entry makes the checkpoint before it certain.
        certain = self.history.at(checkpoint.batch - 1)
        if certain is not None:
            self.points.add(self.history, certain)
        if self.points.pending:
            self.deleter.look()

    def base_map_to_repeat(self, batch: int) -> BaseMap | None:
        """The base map that the entry of a batch has to repeat; None if it need not."""
        before = self.history.record(batch - 1)
        return None if before is None else self._truncation.base_map_to_repeat(before)

    def changes_folder(self, subtask: int) -> str:
        """The folder of a subtask's large changesets and snapshots."""
        return f"{self._root}/{CHANGES_FOLDER}/{self.epoch}/{subtask}"

    def _runs_folder(self, subtask: int) -> str:
        """The folder of a subtask's materialized state."""
        return f"{self._root}/{RUNS_FOLDER}/{self.epoch}/{subtask}"

    def retained_from(self) -> int:
        """The oldest batch that can be restored: as recorded, or for a log of version 1 as its existing files allow."""
        latest = self.history.latest
        if latest is None or latest.retained_from is not None:
            return self.history.retained_from
        return self.history.whole_from({info.name for info in self._store.list(f"{self._root}/")}.__contains__)

    def release(self, checkpoint: Checkpoint, oldest: int, log: NumberedLog, changes_from: int | None = None) -> None:
        """Delete the files that only checkpoints before the oldest retained one need, after a new entry is durable.

        The changes of batches from `changes_from` on stay.
        """
        self.gate.settle(log.name_of(checkpoint.log_start))
        for settled in self.history.settle(oldest):
            self.retention.remove_runs(settled.removed_runs)
        for given_up in self.history.retain(oldest, changes_from):
            self.retention.remove(given_up.checkpoint)
        released = self.retention.release()
        # Keyed: the log's files from its start on stay anyway. Unkeyed: only the newest is certain to stay.
        self.retention.choose_wasteful(log.file_name if checkpoint.is_whole else log.name_of(checkpoint.log_start))
        # A log file is deleted once neither its entries nor bytes that a later entry references are needed.
        log_files = [name for name in log.removable(checkpoint.log_start) if not self.retention.needs(name)]
        log.forget(log_files)
        self.deleter.delete([*log_files, *released])

    def remove_lost(self, batch: Batch, ended: Iterable[str]) -> None:
        """Delete the files of a certain batch's attempts that do not count, and the folders of ended grants."""
        for subtask in sorted(batch.lost):
            self.deleter.delete_below(f"{self.changes_folder(subtask)}/{batch.number}-")
        for folder in ended:
            self.deleter.delete_below(f"{folder}/")

    def close(self) -> None:
        """Delete the files that this start's attempts and jobs have left, and stop deleting."""
        self.gate.end()
        self.grants.end_all()
        if self.epoch:
            for folder in (CHANGES_FOLDER, RUNS_FOLDER):
                self.deleter.delete_below(f"{self._root}/{folder}/{self.epoch}/")
        self.deleter.close()
