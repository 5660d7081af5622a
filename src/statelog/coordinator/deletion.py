"""Finds the orphans of earlier starts, and deletes objects in the background; a gate decides which may go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from typing import Final

from statelog.clock import Clock
from statelog.errors import StatelogError
from statelog.history.query_history import QueryHistory
from statelog.log.entry import QueryCheckpoint
from statelog.log.open import CHANGES_FOLDER, INITIAL_FOLDER, LOG_FOLDER, RUNS_FOLDER
from statelog.log_fields import get_logger, in_background
from statelog.storage import Store

_log = get_logger(__name__)

_NEVER: Final = 1 << 63
_SPARE_FAILURES: Final = 16
"""The number of failed requests of one round, beyond those that it takes to find one bad object, after which the store
is considered out of order."""


def find_orphans(
    store: Store,
    query: QueryHistory,
    *,
    epoch: int,
    run_id: str,
    fenced_runs: Collection[str] = (),
    given: Collection[str] = (),
    min_age_s: float,
    clock: Clock,
) -> list[str]:
    """Objects of operators that no checkpoint references and no live start can still reference, sorted.

    `epoch` was just claimed: writers of older epochs are fenced, so objects that they wrote since the last entry can
    never be referenced. `run_id` is the start whose initial state may still be needed. Objects younger than
    `min_age_s` stay, because a start without a claim in the log may be about to claim. The initial state of
    `fenced_runs` goes at any age. The state that operators are `given` stays.
    """
    referenced = query.object_names() | set(given)
    now_s = clock.now_s()
    found: list[str] = []
    for info in store.list():
        match info.name.split("/"):
            case [_, folder, of_epoch, _, *_] if folder in (CHANGES_FOLDER, RUNS_FOLDER):
                is_fenced, is_free = False, info.name not in referenced and _epoch_of(of_epoch) < epoch
            case [_, folder, run, _] if folder == INITIAL_FOLDER:
                is_fenced, is_free = run in fenced_runs, run != run_id
            case _:
                continue
        if is_free and (is_fenced or now_s - info.modified_s >= min_age_s):
            found.append(info.name)
    return sorted(found)


def _epoch_of(folder: str) -> int:
    return int(folder) if folder.isdecimal() else 0


class DeletionGate:
    """Decides whether an object may be deleted.

    An object stays while

    - a retained, held or pinned checkpoint needs it,
    - an entry in doubt references it,
    - an open grant lets a job reference it,
    - an attempt of a batch that can be repeated may reference it,
    - it is a log file, and not older than the first one that the newest durable entry needs.

    If an object that no pin names may go, it may go from then on: nothing can reference it again, and a pin that comes
    later does not keep it.
    """

    def __init__(
        self,
        needs: Callable[[str], bool],
        is_granted: Callable[[str], bool],
        is_pinned: Callable[[str], bool],
    ) -> None:
        self._log = f"{LOG_FOLDER}/"
        self._needs = needs
        self._is_granted = is_granted
        self._is_pinned = is_pinned
        # Each is replaced as a whole, so that the deleting thread sees either the old or the new state.
        self._in_doubt: frozenset[str] = frozenset()
        self.doubted = 0
        """How many entries were about to be written since the last durable one."""
        self._live = (0, 0)
        self._log_from = ""

    def is_referenced(self, name: str) -> bool:
        """Whether a checkpoint needs an object, or may reference it."""
        return name in self._in_doubt or self._needs(name) or self._is_granted(name)

    def may_go(self, name: str) -> bool:
        """Whether an object may be deleted."""
        if self.is_referenced(name) or self._is_pinned(name):
            return False
        if name.startswith(self._log):
            return name < self._log_from
        return not self._is_live(name)

    def _is_live(self, name: str) -> bool:
        """Whether it is a changeset that an attempt may still ack: <identity>/changes/<epoch>/<subtask>/<batch>-..."""
        epoch, first_batch = self._live
        match name.split("/"):
            case [_, folder, own, _, base] if folder == CHANGES_FOLDER and own == str(epoch):
                batch = base.partition("-")[0]
                return batch.isdecimal() and int(batch) >= first_batch
        return False

    def doubt(self, entry: QueryCheckpoint) -> None:
        """Keep the objects of an entry that is about to be written.

        From now on the entry may be in the log, whatever the store answers.
        """
        names: set[str] = set()
        for section in entry.sections:
            names |= {segment.name for segment in section.segments}
            names |= {run.name for base in section.bases for level in base.levels for run in level.runs}
            names |= {run.name for base_range in section.base_ranges or () for run in base_range.runs}
        self._in_doubt |= names
        self.doubted += 1

    def settle(self, log_from: str) -> None:
        """An entry is durable: it replaces those in doubt, and needs the log from the file `log_from` on."""
        self._in_doubt, self.doubted = frozenset(), 0
        self._log_from = log_from

    def begin(self, epoch: int, batch: int) -> None:
        """Batches before this one are certain: the coordinator no longer accepts their attempts."""
        self._live = (epoch, batch)

    def end(self) -> None:
        """The start is over: the coordinator no longer accepts any of its attempts."""
        self._live = (self._live[0], _NEVER)


class Deleter:
    """Deletes objects, as many per request as are waiting, and each only if the gate lets it go.

    An object that cannot be deleted, whatever the error, is logged once and tried again in the next round. It does not
    keep others from being deleted, does not end the thread, and does not make :meth:`close` fail. An object that the
    gate holds back waits until it may go.

    In a round, `look` lists the pins and returns those that have expired; then `may_go`, the gate, is asked for each
    object. Between two rounds of the thread are at least `pause_s`. Without `in_background` the caller does the work
    and waits. `close` waits at most `close_timeout_s` for the thread.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        may_go: Callable[[str], bool],
        *,
        in_background: bool,
        look: Callable[[], list[str]] = list,
        pause_s: float = 0.0,
        close_timeout_s: float = 10.0,
    ) -> None:
        self._store = store
        self._name = name
        self._may_go = may_go
        self._look = look
        self._is_due = False
        self._pause_s = pause_s
        self._waiting: dict[str, None] = {}
        self._searches: list[str] = []
        self._failing: set[str] = set()
        self._why_blind: str | None = None
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

    def look(self) -> None:
        """Begin a round soon, even if nothing is to be deleted."""
        with self._changed:
            self._is_due = self._has_more = True
        self._start()

    def close(self) -> None:
        """Finish the scheduled deletions and stop; do not wait long for a store that hangs."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(self._close_timeout_s)
            if self._thread.is_alive():
                _log.warning("%s: the store hangs; the remaining deletions wait for the next start", self._name)
                return
        self._work_off()

    def _start(self) -> None:
        if not self._in_background:
            self._work_off()
            return
        with self._changed:
            if self._thread is None and (self._waiting or self._searches or self._is_due):
                thread = threading.Thread(target=in_background(self._run), name="statelog-delete", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return  # the process ends, or cannot start a thread: the next call or close() tries again
                self._thread = thread
            self._changed.notify()

    def _run(self) -> None:
        while True:
            self._work_off()
            with self._changed:
                if self._is_closed:
                    return
                self._changed.wait_for(lambda: self._is_closed, self._pause_s)
                # Objects still here wait for the next request: the store may be out of order, or the gate holds them.
                self._changed.wait_for(lambda: self._has_more or self._is_closed)

    def _work_off(self) -> None:
        with self._changed:
            names, self._waiting = list(self._waiting), {}
            searches, self._searches = self._searches, []
            is_due, self._is_due = self._is_due, False
            self._has_more = False
        if not names and not searches and not is_due:
            return
        # What is found below a prefix has to be free before the pins are listed: no later pin can name it then.
        found, not_listed = self._found(searches)
        try:
            expired = self._look()
        except Exception as error:
            why = _kind_of(error)
            if why != self._why_blind:
                _log.warning("%s: nothing is deleted until the pins can be listed: %s", self._name, error)
            self._why_blind = why
            with self._changed:
                self._waiting = dict.fromkeys([*names, *self._waiting])
                self._searches = searches + self._searches
            return
        self._why_blind = None
        allowed: list[str] = expired
        held_back: list[str] = []
        for name in names:
            (allowed if self._is_free(name) else held_back).append(name)
        allowed += filter(self._is_free, found)
        left = self._delete(list(dict.fromkeys(allowed)))
        with self._changed:
            self._waiting = dict.fromkeys([*held_back, *left, *self._waiting])
            self._searches = not_listed + self._searches

    def _found(self, prefixes: list[str]) -> tuple[list[str], list[str]]:
        """The objects below some prefixes that the gate lets go now, and the prefixes that could not be listed."""
        found: list[str] = []
        not_listed: list[str] = []
        for place, prefix in enumerate(prefixes):
            if len(not_listed) == _SPARE_FAILURES:
                not_listed += prefixes[place:]
                break
            try:
                infos = self._store.list(prefix)
            except Exception as error:
                not_listed.append(prefix)
                self._note_failure(prefix, error, "leftovers of attempts below it could not be listed yet")
            else:
                self._failing.discard(prefix)
                found += [info.name for info in infos if self._is_free(info.name)]
        return found, not_listed

    def _is_free(self, name: str) -> bool:
        """Whether the gate lets an object go."""
        try:
            return self._may_go(name)
        except Exception as error:
            self._note_failure(name, error)
            return False

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
            except Exception as error:
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

    def _note_failure(self, name: str, error: Exception, what: str = "it could not be deleted yet") -> None:
        if name not in self._failing:
            self._failing.add(name)
            told = error if isinstance(error, StatelogError) else f"{type(error).__name__}: {error}"
            _log.warning("%s: %s: %s: %s", self._name, name, what, told)


def _kind_of(error: Exception) -> str:
    return str(error.kind) if isinstance(error, StatelogError) else type(error).__name__
