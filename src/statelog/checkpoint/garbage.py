"""Decides which stored objects no checkpoint needs any more, and deletes them.

The log is truncated where an entry repeats the base map. Orphans are found at a start. A thread deletes, beside the
work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Final

from statelog.checkpoint.bases import BaseMap
from statelog.checkpoint.batch import Batch
from statelog.checkpoint.deletion_gate import DeletionGate
from statelog.checkpoint.grants import Grants
from statelog.checkpoint.history import History, Record
from statelog.checkpoint.retention import Retention
from statelog.clock import Clock
from statelog.errors import StorageError
from statelog.log.entry import INITIAL_BATCH, Checkpoint, Claim, Entry
from statelog.log.numbered import NumberedLog
from statelog.log.open import CHANGES_FOLDER, INITIAL_FOLDER, LOG_FOLDER, RUNS_FOLDER
from statelog.log.references import Level
from statelog.options import Options
from statelog.storage import Store

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


"""Rows of an initial state, in a folder per start, until the start's first batch is over."""


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


_log = logging.getLogger(__name__)

_SPARE_FAILURES: Final = 16
"""Failed requests of one round, beyond those that it takes to find one bad object; after so many the store is out of
order."""


class Deleter:
    """Deletes objects, as many per request as have come together, and each only if the gate lets it go.

    An object that fails to be deleted is tried again in the next round, and does not keep others from being deleted. An
    object that the gate holds back waits until it may go.

    `may_go` is the gate: once it returns True for a name, it always does. Without `in_background` the caller does the
    work and waits. `close` waits at most `close_timeout_s` for the thread.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        may_go: Callable[[str], bool],
        *,
        in_background: bool,
        close_timeout_s: float = 10.0,
    ) -> None:
        self._store = store
        self._name = name
        self._may_go = may_go
        self._waiting: dict[str, None] = {}
        self._searches: list[str] = []
        self._failing: set[str] = set()
        self._changed = threading.Condition()
        self._is_closed = False
        self._has_more = False
        self._in_background = in_background
        self._close_timeout_s = close_timeout_s
        self._thread: threading.Thread | None = None
        self.deleted = 0

    def delete(self, names: Iterable[str]) -> None:
        """Schedule objects for deletion, in this order."""
        with self._changed:
            self._waiting.update(dict.fromkeys(names))
            self._has_more = True
        self._start()

    def delete_below(self, prefix: str) -> None:
        """Schedule all objects under a prefix for deletion, except those that the gate holds back at that time."""
        with self._changed:
            self._searches.append(prefix)
            self._has_more = True
        self._start()

    def close(self) -> None:
        """Finish the scheduled deletions and stop; do not wait long for a store that hangs."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(self._close_timeout_s)
            if self._thread.is_alive():
                _log.warning("%s: the store hangs; what is left to be deleted goes with the next start", self._name)
                return
        self._work_off()

    def _start(self) -> None:
        if not self._in_background:
            self._work_off()
            return
        with self._changed:
            if self._thread is None and (self._waiting or self._searches):
                self._thread = threading.Thread(target=self._run, name="statelog-delete", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            self._work_off()
            with self._changed:
                if self._is_closed:
                    return
                # Objects still here wait for the next request: the store may be out of order, or the gate holds them.
                self._changed.wait_for(lambda: self._has_more or self._is_closed)

    def _work_off(self) -> None:
        with self._changed:
            names, self._waiting = list(self._waiting), {}
            searches, self._searches = self._searches, []
            self._has_more = False
        allowed: list[str] = []
        held_back: list[str] = []
        for name in names:
            (allowed if self._may_go(name) else held_back).append(name)
        try:
            while searches:
                allowed += [info.name for info in self._store.list(searches[-1]) if self._may_go(info.name)]
                searches.pop()
        except StorageError as error:
            _log.warning("%s: leftovers of attempts could not be listed yet: %s", self._name, error)
        left = self._delete(list(dict.fromkeys(allowed)))
        with self._changed:
            self._waiting = dict.fromkeys([*held_back, *left, *self._waiting])
            self._searches = searches + self._searches

    def _delete(self, names: list[str]) -> list[str]:
        """Delete objects, and return the names that failed.

        Failures are found by halving the request, unless the store fails as a whole.
        """
        fresh = [name for name in names if name not in self._failing]
        known = [name for name in names if name in self._failing]
        pending = [*([name] for name in known[:_SPARE_FAILURES]), *([fresh] if fresh else [])]
        left = known[_SPARE_FAILURES:]
        failures, most = 0, _SPARE_FAILURES + len(names).bit_length()
        while pending:
            group = pending.pop()
            if failures > most:
                left += group
                continue
            try:
                self._store.delete(group)
            except StorageError as error:
                failures += 1
                if len(group) > 1:
                    middle = len(group) // 2
                    pending += [group[middle:], group[:middle]]
                    continue
                left += group
                self._note_failure(group[0], error)
                continue
            self.deleted += len(group)
            self._failing.difference_update(group)
        return left

    def _note_failure(self, name: str, error: StorageError) -> None:
        if name not in self._failing:
            self._failing.add(name)
            _log.warning("%s: %s could not be deleted yet: %s", self._name, name, error)


class Inventory:
    """The history of an operator, and the files that it needs.

    It holds the parts that decide about files together: history, grants of jobs, the gate that each deletion passes,
    and the deleter.
    """

    def __init__(self, store: Store, root: str, name: str, options: Options, *, deletes_in_background: bool) -> None:
        self.history = History()
        self.grants = Grants(self._runs_folder)
        self.gate = DeletionGate(root, self.needs, self.grants.is_open)
        self.deleter = Deleter(store, name, self.gate.may_go, in_background=deletes_in_background)
        self.epoch = 0
        self._store = store
        self._root = root
        self._name = name
        self._options = options
        self._retention = Retention(options.max_space_amplification, f"{root}/{LOG_FOLDER}")
        self._truncation = Truncation()

    # ---- Stored files ----

    def needs(self, name: str) -> bool:
        """Whether a retained or held checkpoint needs a part of a file."""
        return self._retention.needs(name)

    def open(self, entries: Iterable[Entry], epoch: int, run_id: str, clock: Clock) -> None:
        """Take over the files that the log references, and delete the orphans of earlier starts."""
        self.epoch = epoch
        self.gate.begin(epoch, INITIAL_BATCH)
        entries = list(entries)
        self.history = History(entries)
        for record in self.history.records:
            self._retention.add(record.checkpoint)
            self._retention.add_runs(record.added_runs)
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
        self._retention.add(checkpoint)
        replaced = self.history.add(checkpoint)
        record = self.history.latest_record
        assert record is not None
        self._retention.add_runs(record.added_runs)
        for other in replaced:
            self._retention.remove(other.checkpoint)
            self._retention.remove_runs(other.added_runs)
        self._truncation.committed(record, base_map, payload_bytes)

    def base_map_to_repeat(self, batch: int) -> BaseMap | None:
        """The base map that the entry of a batch has to repeat; None if it need not."""
        before = self.history.record(batch - 1)
        return None if before is None else self._truncation.base_map_to_repeat(before)

    def is_wasteful(self, name: str) -> bool:
        """Whether a file has so much garbage that its needed bytes have to move to another file, or be stored again."""
        return self._retention.is_wasteful(name)

    def lasting(self, levels: list[Level]) -> list[Level]:
        """The levels before the first that has to be stored again."""
        for count, level in enumerate(levels):
            if any(self._retention.is_wasteful(run.name) for run in level.runs):
                return levels[:count]
        return levels

    @property
    def has_wasteful(self) -> bool:
        """Whether there are such files."""
        return self._retention.has_wasteful

    @property
    def stored_bytes(self) -> int:
        """Size of all needed files, without changesets inside the log."""
        return self._retention.size_bytes

    @property
    def needed_bytes(self) -> int:
        """Size of the needed parts of these files."""
        return self._retention.needed_bytes

    # ---- Names ----

    def changes_folder(self, subtask: int) -> str:
        """The folder of a subtask's large changesets and snapshots."""
        return f"{self._root}/{CHANGES_FOLDER}/{self.epoch}/{subtask}"

    def _runs_folder(self, subtask: int) -> str:
        """The folder of a subtask's materialized state."""
        return f"{self._root}/{RUNS_FOLDER}/{self.epoch}/{subtask}"

    # ---- Deletion ----

    def retained_from(self) -> int:
        """The oldest batch that can be restored: as recorded, or for a log of version 1 as its existing files allow."""
        latest = self.history.latest
        if latest is None or latest.retained_from is not None:
            return self.history.retained_from
        return self.history.whole_from({info.name for info in self._store.list(f"{self._root}/")}.__contains__)

    def release(self, checkpoint: Checkpoint, oldest: int, log: NumberedLog) -> None:
        """Delete the files that only checkpoints before the oldest retained one need, after a new entry is durable."""
        self.gate.settle(log.name_of(checkpoint.log_start))
        for settled in self.history.settle(oldest):
            self._retention.remove_runs(settled.removed_runs)
        for given_up in self.history.retain(oldest):
            self._retention.remove(given_up.checkpoint)
        released = self._retention.release()
        # Keyed: the log's files from its start on stay anyway. Unkeyed: only the newest is certain to stay.
        self._retention.choose_wasteful(log.file_name if checkpoint.is_whole else log.name_of(checkpoint.log_start))
        # A log file is deleted once neither its entries nor bytes that a later entry references are needed.
        log_files = [name for name in log.removable(checkpoint.log_start) if not self.needs(name)]
        log.forget(log_files)
        self.deleter.delete([*log_files, *released])

    def begin(self, batch: int) -> None:
        """Note that all earlier batches are certain: the coordinator no longer accepts their attempts."""
        self.gate.begin(self.epoch, batch)

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
