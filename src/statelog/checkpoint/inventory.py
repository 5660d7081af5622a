"""What the store holds for an operator's checkpoints, and what of it goes when."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Final

from statelog.changelog.base import Level
from statelog.checkpoint.batch import Batch
from statelog.checkpoint.cover import Cover
from statelog.checkpoint.deletion import Deleter
from statelog.checkpoint.entry import Checkpoint, Entry
from statelog.checkpoint.history import History
from statelog.checkpoint.log import Log
from statelog.checkpoint.open_log import LOG_FOLDER
from statelog.checkpoint.orphans import CHANGES_FOLDER, RUNS_FOLDER, find_orphans
from statelog.checkpoint.retention import Retention
from statelog.checkpoint.truncation import Truncation
from statelog.clock import Clock
from statelog.options import Options
from statelog.storage import Store

__all__ = ["Inventory"]

_log: Final = logging.getLogger(__name__)


class Inventory:
    """The history of an operator, and the files that it needs.

    Parameters
    ----------
    store : Store
        The store.
    root : str
        The operator's folder in it.
    name : str
        The operator, for messages.
    options : Options
        Options.
    deletes_in_background : bool
        Whether what is not needed any more is deleted by a thread, beside the work.

    Attributes
    ----------
    history : History
        The checkpoints.
    deleter : Deleter
        Deletes objects.
    epoch : int
        The run's epoch.
    """

    def __init__(self, store: Store, root: str, name: str, options: Options, *, deletes_in_background: bool) -> None:
        self.history = History()
        self.deleter = Deleter(store, name, in_background=deletes_in_background)
        self.epoch = 0
        self._store = store
        self._root = root
        self._name = name
        self._options = options
        self._retention = Retention(options.max_space_amplification, f"{root}/{LOG_FOLDER}")
        self._truncation = Truncation()

    # ---- What is there ----

    def open(self, entries: Iterable[Entry], epoch: int, run_id: str, clock: Clock) -> None:
        """Take over what the log names for a run, and remove what earlier runs have left."""
        self.epoch = epoch
        self.history = History(entries)
        for record in self.history.records:
            self._retention.add(record.checkpoint)
            self._retention.add_runs(record.added_runs)
        min_age_s = self._options.orphan_min_age_s
        orphans = find_orphans(
            self._store, self._root, self.history, epoch=epoch, run_id=run_id, min_age_s=min_age_s, clock=clock
        )
        if orphans:
            _log.info("%s: removing %d objects that crashed runs left behind", self._name, len(orphans))
            self._store.delete(orphans)
        self._store.remove_unfinished(f"{self._root}/", clock.now_s() - min_age_s)

    def add(self, checkpoint: Checkpoint, cover: Cover | None, payload_bytes: int) -> None:
        """Count what a durable checkpoint names, and no more what it replaces.

        Parameters
        ----------
        checkpoint : Checkpoint
            The checkpoint.
        cover : Cover or None
            What its entry repeats.
        payload_bytes : int
            Size of its entry without the index.
        """
        self._retention.add(checkpoint)
        replaced = self.history.add(checkpoint)
        record = self.history.latest_record
        assert record is not None
        self._retention.add_runs(record.added_runs)
        for other in replaced:
            self._retention.remove(other.checkpoint)
            self._retention.remove_runs(other.added_runs)
        self._truncation.committed(record, cover, payload_bytes)

    def cover_to_repeat(self, batch: int) -> Cover | None:
        """What the entry of a batch repeats of the materialized states; None for nothing."""
        before = self.history.record(batch - 1)
        return None if before is None else self._truncation.cover_to_repeat(before)

    def is_wasteful(self, name: str) -> bool:
        """Whether what is needed of a file is to be moved to another one, or stored again."""
        return self._retention.is_wasteful(name)

    def lasting(self, levels: list[Level]) -> list[Level]:
        """Levels of a materialized state, up to the first that is to be stored again."""
        for count, level in enumerate(levels):
            if any(self._retention.is_wasteful(run.name) for run in level.runs):
                return levels[:count]
        return levels

    @property
    def has_wasteful(self) -> bool:
        """Whether there are files to empty."""
        return self._retention.has_wasteful

    @property
    def stored_bytes(self) -> int:
        """Size of all files of which something is needed, without changesets inside the log."""
        return self._retention.size_bytes

    @property
    def needed_bytes(self) -> int:
        """What is needed of them."""
        return self._retention.needed_bytes

    # ---- Names ----

    def changes_folder(self, subtask: int) -> str:
        """Where a subtask writes large changesets and snapshots."""
        return f"{self._root}/{CHANGES_FOLDER}/{self.epoch}/{subtask}"

    def runs_folder(self, subtask: int) -> str:
        """Where a subtask writes its materialized state."""
        return f"{self._root}/{RUNS_FOLDER}/{self.epoch}/{subtask}"

    # ---- What goes ----

    def release(self, checkpoint: Checkpoint, oldest: int, log: Log) -> None:
        """Have deleted what only checkpoints before the oldest retained one needed; the new entry is durable."""
        for settled in self.history.settle(oldest):
            self._retention.remove_runs(settled.removed_runs)
        for given_up in self.history.retain(oldest):
            self._retention.remove(given_up.checkpoint)
        released = self._retention.release()
        # The log's files stay anyway from its start on; of operator state only the newest is certain to.
        self._retention.choose_wasteful(log.file_name if checkpoint.is_whole else log.name_of(checkpoint.log_start))
        # A file of the log goes when no entry in it is needed, and nothing that a later entry names.
        log_files = [name for name in log.removable(checkpoint.log_start) if not self._retention.needs(name)]
        log.forget(log_files)
        self.deleter.delete([*log_files, *released])

    def remove_lost(self, batch: Batch) -> None:
        """Delete what attempts have written that ended without an ack that counts; the batch is certain."""
        assert batch.durable is not None
        counted = {one.ack.task.attempt for one in batch.acks.values()}
        lost = {subtask for attempt, subtask in batch.begun.items() if attempt not in counted}
        named = {segment.name for segment in batch.durable.segments}
        for subtask in sorted(lost):
            prefix = f"{self.changes_folder(subtask)}/{batch.number}-"
            self.deleter.delete_all(prefix, keeps=named.__contains__)
        for base in batch.durable.bases:
            if base.through < batch.number or base.subtask in lost:
                folder = f"{self.runs_folder(base.subtask)}/"
                self.deleter.delete_all(folder, keeps=partial(self._keeps_run, folder, base.through))

    def _keeps_run(self, folder: str, through: int, name: str) -> bool:
        """Whether a stored run is named, or may be yet: of a job that began after one that is over now."""
        batch = name.removeprefix(folder).partition("-")[0]
        return self._retention.needs(name) or not batch.isdecimal() or int(batch) > through

    def remove_unnamed_runs(self) -> None:
        """Delete what materializations in progress have stored; no entry will name it any more."""
        self.deleter.delete_all(f"{self._root}/{RUNS_FOLDER}/{self.epoch}/", keeps=self._retention.needs)
