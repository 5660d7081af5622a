"""Tracks which stored files an operator's checkpoints need, and deletes the rest."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from statelog.checkpoint.bases import BaseMap
from statelog.checkpoint.batch import Batch
from statelog.checkpoint.deletion import Deleter
from statelog.checkpoint.deletion_gate import DeletionGate
from statelog.checkpoint.grants import Grants
from statelog.checkpoint.history import History
from statelog.checkpoint.orphans import CHANGES_FOLDER, RUNS_FOLDER, find_orphans
from statelog.checkpoint.retention import Retention
from statelog.checkpoint.truncation import Truncation
from statelog.clock import Clock
from statelog.log.entry import INITIAL_BATCH, Checkpoint, Claim, Entry
from statelog.log.log import Log
from statelog.log.open import LOG_FOLDER
from statelog.log.references import Level
from statelog.options import Options
from statelog.storage import Store

_log: Final = logging.getLogger(__name__)


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

    def release(self, checkpoint: Checkpoint, oldest: int, log: Log) -> None:
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
