"""Lists the orphans of crashed starts, and deletes those that no start of the query can ever need.

The next start removes all orphans: it has claimed the location. `delete_orphans` has not, and the query may be running,
so it deletes only some of the objects that `list_orphans` lists; docs/design/0014-reading-state.md has the argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from statelog.clock import Clock, SystemClock
from statelog.coordinator.deletion import find_orphans
from statelog.errors import CorruptionError, StatelogError, StorageError
from statelog.history.pins import Pin, has_expired, read_pin, read_pins
from statelog.history.query_history import QueryHistory, read_history
from statelog.log.entry import Entry, Fence, QueryCheckpoint
from statelog.log.numbered import LOG_FILE, base_name
from statelog.log.open import (
    CHANGES_FOLDER,
    INITIAL_FOLDER,
    LOG_FOLDER,
    RUNS_FOLDER,
    open_location,
    open_log,
)
from statelog.numbers import Seconds, checked_seconds
from statelog.options import Options
from statelog.reading.open import open_query
from statelog.storage import ObjectInfo, Store
from statelog.storage.store import StoreWrapper


def list_orphans(location: str, *, min_age_s: Seconds = 3600.0, clock: Clock | None = None) -> list[ObjectInfo]:
    """List the objects that no checkpoint or pin needs; the next start of the query would remove them.

    While a query runs, its newest objects may not belong to a checkpoint yet; `min_age_s` leaves them out. Only the
    operators' own folders are searched.

    Parameters
    ----------
    location : str
        The operators' location: a directory, or a folder in an object store or in HDFS.
    min_age_s : float, timedelta or str
        Objects younger than this are left out, in seconds.
    clock : Clock, optional
        The clock by which an object's age is measured; by default the machine's.

    Returns
    -------
    list of ObjectInfo
        Name below the location, size and modification time of each orphan, sorted by name.

    Raises
    ------
    ConfigurationError
        If the scheme of the location is not supported.
    CorruptionError
        If a log or a pin is damaged.
    StorageError
        If the store cannot be read.
    """
    min_age = checked_seconds(min_age_s, "min_age_s")
    store, clock = open_location(location), clock or SystemClock()
    entries = open_log(store, Options(), clock).read()
    query = QueryHistory(entries)
    next_epoch = 1 + max((entry.epoch for entry in entries), default=0)
    names = set(find_orphans(store, query, epoch=next_epoch, run_id="", min_age_s=min_age, clock=clock))
    now_s = clock.now_s()
    pinned, _ = _read_pins(store, now_s)
    first, needed = _log_start(entries), query.object_names() | pinned

    def is_orphan(info: ObjectInfo) -> bool:
        if info.name in names:
            return info.name not in pinned
        match = LOG_FILE.fullmatch(info.name.removeprefix(f"{LOG_FOLDER}/"))
        is_old = match is not None and int(match[1]) < first and now_s - info.modified_s >= min_age
        return is_old and info.name not in needed

    return sorted(filter(is_orphan, store.list()), key=lambda info: info.name)


def delete_orphans(
    location: str | Path,
    *,
    min_age_s: Seconds = 3600.0,
    release: bool = False,
    dry_run: bool = False,
    clock: Clock | None = None,
) -> list[ObjectInfo]:
    """Delete the objects that no checkpoint needs or can ever need, while the query runs or later.

    These are orphans of starts before the one that wrote the newest checkpoint, log files before the start of the log,
    and expired pins. The next start of the query removes the other orphans. Nothing that a pin keeps is deleted, and
    nothing at all if a pin cannot be read.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given.
    min_age_s : float, timedelta or str
        Objects younger than this stay, in seconds; expired pins are deleted at any age.
    release : bool
        Also remove the pins of branches that are gone: branches whose location no longer exists, or belongs to another
        branch. The locations of all branches must be reachable.
    dry_run : bool
        Only report; delete nothing.
    clock : Clock, optional
        The clock by which an object's age is measured; by default the machine's.

    Returns
    -------
    list of ObjectInfo
        Name below the operators' location, size and modification time of each deleted object, sorted by name.

    Raises
    ------
    ConfigurationError
        If there is no operator.
    CorruptionError
        If a log or a pin is damaged; then nothing was deleted.
    StorageError
        If the store cannot be read, or an object cannot be deleted. Then some objects may have been deleted; the call
        can be repeated.

    Examples
    --------
    >>> statelog.delete_orphans("/data/checkpoints/flights", dry_run=True)  # doctest: +SKIP
    [ObjectInfo(name='main/changes/3/0/17-204-1f0c-0.run', size_bytes=81920, modified_s=1780000000.0)]
    """
    min_age = checked_seconds(min_age_s, "min_age_s")
    clock = clock or SystemClock()
    store = open_query(str(location)).store
    found = _deletable(store, min_age, clock, release)
    if not dry_run:
        _delete(store, [info.name for info in found])
    return found


def _delete(store: Store, names: Sequence[str]) -> None:
    """Delete objects; log files one by one, because a claim may be deleted only after the file before it."""
    log = f"{LOG_FOLDER}/"
    store.delete([name for name in names if not name.startswith(log)])
    for name in names:
        if name.startswith(log):
            store.delete([name])


def _deletable(store: Store, min_age_s: float, clock: Clock, release: bool) -> list[ObjectInfo]:
    """The objects of a query that may be deleted, sorted by name."""
    # The order matters: an object that was listed is judged by a later log, and by pins listed later still.
    listed = store.list()
    entries = open_log(store, Options(), clock).read()
    before = _before_newest(store, entries, clock)
    now_s = clock.now_s()
    released_until_s = now_s - min_age_s if release else None
    pinned, expired = _read_pins(store, now_s, released_until_s)
    kept = pinned | QueryHistory(entries).object_names() | QueryHistory(before).object_names()
    fenced = _Fenced(entries)

    def may_go(info: ObjectInfo) -> bool:
        return info.name not in kept and now_s - info.modified_s >= min_age_s

    found = [*expired, *(info for info in listed if fenced.has_written(info.name) and may_go(info))]
    found += _log_files(listed, min(_log_start(entries), _log_start(before)), may_go)
    return sorted(found, key=lambda info: info.name)


def _read_pins(store: Store, now_s: float, released_until_s: float | None = None) -> tuple[set[str], list[ObjectInfo]]:
    """All objects that unexpired pins name, and the pins that have expired.

    With `released_until_s`, also the pins that were made until then for branches that are gone.
    """
    pinned: set[str] = set()
    expired: list[ObjectInfo] = []
    for info, pin in read_pins(store, lambda name: _read(store, name)):
        may_release = released_until_s is not None and info.modified_s <= released_until_s
        if has_expired(pin, info, now_s) or (may_release and _is_gone(pin.branch, info.name)):
            expired.append(info)
        else:
            pinned.update(pin.objects)
    return pinned, expired


def _read(store: Store, name: str) -> Pin | None:
    try:
        return read_pin(store, name)
    except StorageError:
        raise
    except StatelogError as error:
        raise CorruptionError(
            f"Nothing can be deleted, because a pin cannot be read: {error.message}",
            kind=error.kind,
            hint=f"{error.hint} If what it keeps is not needed, remove it: statelog unpin LOCATION {name}",
        ) from error


def _is_gone(branch: str, pin: str) -> bool:
    """Whether a pin is that of a branch that does not, or no longer, need it: its newest entry does not name it."""
    if not branch:
        return False
    parent = read_history(open_location(branch)).parent
    return parent is None or parent.pin != pin


def _before_newest(store: Store, entries: Sequence[Entry], clock: Clock) -> list[Entry]:
    """The log as it was before its newest checkpoint.

    The newest checkpoint may not last: a later claim may end the log before it, and a crash of the machine may lose it.
    Then what it ended or replaced counts again.
    """
    checkpoints = [entry for entry in entries if isinstance(entry, QueryCheckpoint)]
    if not checkpoints:
        return []
    newest = checkpoints[-1]
    try:
        return open_log(_EarlierLog(store, newest.number, newest.offset), Options(), clock).read()
    except CorruptionError:
        # Its files are gone. They were deleted only because the newest checkpoint lasts.
        return list(checkpoints[:-1])


class _EarlierLog(StoreWrapper):
    """A store for reading a log that ends at an offset of one of its files."""

    def __init__(self, inner: Store, number: int, offset: int) -> None:
        super().__init__(inner)
        self._last = f"{LOG_FOLDER}/{base_name(number)}"
        self._end = offset

    def size_bytes(self, name: str) -> int:
        return self._end if name == self._last else super().size_bytes(name)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        listed = super().list(prefix)
        last = [replace(info, size_bytes=self._end) for info in listed if info.name == self._last and self._end]
        return [info for info in listed if info.name < self._last] + last


def _log_start(entries: Iterable[Entry]) -> int:
    """The first log file that the newest checkpoint needs; 0 without one."""
    return next((entry.log_start for entry in reversed([*entries]) if isinstance(entry, QueryCheckpoint)), 0)


def _log_files(
    listed: Iterable[ObjectInfo], first_needed: int, may_go: Callable[[ObjectInfo], bool]
) -> Iterator[ObjectInfo]:
    """The log files that may be deleted: those before a number, up to the first that must stay.

    Later ones may be claims, which stay as long as the file before them, so that a frozen driver finds itself fenced.
    """
    numbered = [
        (match, info) for info in listed if (match := LOG_FILE.fullmatch(info.name.removeprefix(f"{LOG_FOLDER}/")))
    ]
    for match, info in numbered:
        if int(match[1]) >= first_needed or not may_go(info):
            return
        yield info


class _Fenced:
    """The starts before the one that wrote the newest checkpoint, and the objects that they have written.

    A newer claim alone does not determine which entries precede it: until its start writes a checkpoint, it may still
    find an entry of an older start.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._epoch = max((entry.epoch for entry in entries if isinstance(entry, QueryCheckpoint)), default=0)
        runs = [(entry.run_id, entry.epoch) for entry in entries if not isinstance(entry, Fence)]
        # A start may claim more than once.
        live = {run for run, epoch in runs if epoch >= self._epoch}
        self._runs: Collection[str] = {run for run, _ in runs} - live

    def has_written(self, name: str) -> bool:
        """Whether one of these starts has written an object, so that no later entry can start to reference it."""
        match name.split("/"):
            case [_, folder, run, _] if folder == INITIAL_FOLDER:
                return run in self._runs
            case [_, folder, epoch, _, *rest] if folder in (CHANGES_FOLDER, RUNS_FOLDER) and epoch.isdecimal():
                if int(epoch) == 0:
                    # Written before the start had an epoch: <run>-<attempt>.run
                    return bool(rest) and rest[-1].rpartition("-")[0] in self._runs
                return int(epoch) < self._epoch
        return False
