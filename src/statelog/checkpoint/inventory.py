"""What the store holds for an operator's checkpoints, and what of it goes when."""

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
    grants : Grants
        What may be materialized.
    gate : DeletionGate
        Decides what may be deleted.
    deleter : Deleter
        Deletes objects.
    epoch : int
        The run's epoch.
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

    # ---- What is there ----

    def needs(self, name: str) -> bool:
        """Whether a checkpoint that is retained or held needs something of a file."""
        return self._retention.needs(name)

    def open(self, entries: Iterable[Entry], epoch: int, run_id: str, clock: Clock) -> None:
        """Take over what the log names for a run, and remove what earlier runs have left."""
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
        """Count what a durable checkpoint names, and no more what it replaces.

        Parameters
        ----------
        checkpoint : Checkpoint
            The checkpoint.
        cover : BaseMap or None
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
        self._truncation.committed(record, base_map, payload_bytes)

    def base_map_to_repeat(self, batch: int) -> BaseMap | None:
        """What the entry of a batch repeats of the materialized states; None for nothing."""
        before = self.history.record(batch - 1)
        return None if before is None else self._truncation.base_map_to_repeat(before)

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

    def _runs_folder(self, subtask: int) -> str:
        """Where a subtask writes its materialized state."""
        return f"{self._root}/{RUNS_FOLDER}/{self.epoch}/{subtask}"

    # ---- What goes ----

    def retained_from(self) -> int:
        """The oldest batch that can be restored: as recorded, or what is there of a log of version 1."""
        latest = self.history.latest
        if latest is None or latest.retained_from is not None:
            return self.history.retained_from
        return self.history.whole_from({info.name for info in self._store.list(f"{self._root}/")}.__contains__)

    def release(self, checkpoint: Checkpoint, oldest: int, log: Log) -> None:
        """Have deleted what only checkpoints before the oldest retained one needed; the new entry is durable."""
        self.gate.settle(log.name_of(checkpoint.log_start))
        for settled in self.history.settle(oldest):
            self._retention.remove_runs(settled.removed_runs)
        for given_up in self.history.retain(oldest):
            self._retention.remove(given_up.checkpoint)
        released = self._retention.release()
        # The log's files stay anyway from its start on; of operator state only the newest is certain to.
        self._retention.choose_wasteful(log.file_name if checkpoint.is_whole else log.name_of(checkpoint.log_start))
        # A file of the log goes when no entry in it is needed, and nothing that a later entry names.
        log_files = [name for name in log.removable(checkpoint.log_start) if not self.needs(name)]
        log.forget(log_files)
        self.deleter.delete([*log_files, *released])

    def begin(self, batch: int) -> None:
        """No attempt of the batches before this one is heard any more."""
        self.gate.begin(self.epoch, batch)

    def remove_lost(self, batch: Batch, ended: Iterable[str]) -> None:
        """Delete what is left of attempts that do not count, and of jobs; the batch is certain.

        Parameters
        ----------
        batch : Batch
            The batch.
        ended : iterable of str
            Folders of grants that have ended.
        """
        for subtask in sorted(batch.lost):
            self.deleter.delete_below(f"{self.changes_folder(subtask)}/{batch.number}-")
        for folder in ended:
            self.deleter.delete_below(f"{folder}/")

    def close(self) -> None:
        """The run is over: delete what its attempts and jobs have left, and stop deleting."""
        self.gate.end()
        self.grants.end_all()
        if self.epoch:
            for folder in (CHANGES_FOLDER, RUNS_FOLDER):
                self.deleter.delete_below(f"{self._root}/{folder}/{self.epoch}/")
        self.deleter.close()
