"""The gate that every deletion passes: whether an object of an operator may go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from statelog.checkpoint.orphans import CHANGES_FOLDER
from statelog.log.entry import Checkpoint
from statelog.log.open import LOG_FOLDER

_NEVER: Final = 1 << 63


class DeletionGate:
    """Decides whether an object may be deleted.

    It stays while a retained or held checkpoint needs it, while an entry in doubt names it, while an open grant lets a
    job name it, while an attempt of a batch that can be repeated may name it, and as a file of the log from the one on
    that the newest durable entry says is needed. What may go once may always go: nobody names it again.

    Parameters
    ----------
    root : str
        The operator's folder in the store.
    needs : callable
        Whether a checkpoint that is retained or held needs an object.
    is_granted : callable
        Whether an object is one that the job of an open grant may name.
    """

    def __init__(self, root: str, needs: Callable[[str], bool], is_granted: Callable[[str], bool]) -> None:
        self._log = f"{root}/{LOG_FOLDER}/"
        self._changes = f"{root}/{CHANGES_FOLDER}/"
        self._needs = needs
        self._is_granted = is_granted
        # Each is replaced as a whole, so that the thread that deletes sees one state or the other.
        self._in_doubt: frozenset[str] = frozenset()
        self._live = (0, 0)
        self._log_from = ""

    def may_go(self, name: str) -> bool:
        """Whether an object may be deleted."""
        if name in self._in_doubt or self._needs(name) or self._is_granted(name):
            return False
        if name.startswith(self._log):
            return name < self._log_from
        return not (name.startswith(self._changes) and self._is_live(name.removeprefix(self._changes)))

    def _is_live(self, name: str) -> bool:
        """Whether an attempt wrote a changeset that it may still ack; the name begins with epoch, subtask and batch."""
        epoch, first_batch = self._live
        own, _, rest = name.partition("/")
        batch = rest.partition("/")[2].partition("-")[0]
        return own == str(epoch) and batch.isdecimal() and int(batch) >= first_batch

    def doubt(self, entry: Checkpoint) -> None:
        """An entry is about to be written: from now on it may be in the log, whatever the answer."""
        names = {segment.name for segment in entry.segments}
        names |= {run.name for base in entry.bases for level in base.levels for run in level.runs}
        self._in_doubt |= names

    def settle(self, log_from: str) -> None:
        """An entry is durable, which replaces those in doubt; the log is needed from a file on."""
        self._in_doubt = frozenset()
        self._log_from = log_from

    def begin(self, epoch: int, batch: int) -> None:
        """The batches before this one are certain: no attempt of them is heard any more."""
        self._live = (epoch, batch)

    def end(self) -> None:
        """The run is over: no attempt of it is heard any more."""
        self._live = (self._live[0], _NEVER)
