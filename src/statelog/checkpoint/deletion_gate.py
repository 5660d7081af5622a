"""The gate that every deletion passes: it decides whether an object of an operator may go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from statelog.log.entry import Checkpoint
from statelog.log.open import CHANGES_FOLDER, LOG_FOLDER

_NEVER: Final = 1 << 63


class DeletionGate:
    """Decides whether an object may be deleted.

    An object stays while

    - a retained or held checkpoint needs it,
    - an entry in doubt references it,
    - an open grant lets a job reference it,
    - an attempt of a batch that can be repeated may reference it,
    - it is a log file, and not older than the first one that the newest durable entry needs.

    An object that may go once may always go: nothing can reference it again.
    """

    def __init__(self, root: str, needs: Callable[[str], bool], is_granted: Callable[[str], bool]) -> None:
        self._log = f"{root}/{LOG_FOLDER}/"
        self._changes = f"{root}/{CHANGES_FOLDER}/"
        self._needs = needs
        self._is_granted = is_granted
        # Each is replaced as a whole, so that the deleting thread sees either the old or the new state.
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
        """Keep the objects of an entry about to be written.

        From now on it may be in the log, whatever the store answers.
        """
        names = {segment.name for segment in entry.segments}
        names |= {run.name for base in entry.bases for level in base.levels for run in level.runs}
        self._in_doubt |= names

    def settle(self, log_from: str) -> None:
        """An entry is durable: it replaces those in doubt, and needs the log from the file `log_from` on."""
        self._in_doubt = frozenset()
        self._log_from = log_from

    def begin(self, epoch: int, batch: int) -> None:
        """Batches before this one are certain: the coordinator no longer accepts their attempts."""
        self._live = (epoch, batch)

    def end(self) -> None:
        """The start is over: the coordinator no longer accepts any of its attempts."""
        self._live = (self._live[0], _NEVER)
