"""Lists the orphans of crashed starts, and deletes those that no start of the query can come to need.

The next start removes all orphans. It has claimed the location; whoever deletes by hand has not, and the query may run.
So `delete_orphans` asks for more than `list_orphans`; docs/design/0014-reading-state.md has the argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from statelog.checkpoint.garbage import find_orphans
from statelog.checkpoint.history import History
from statelog.checkpoint.parent import read_parent
from statelog.checkpoint.pins import PINS_FOLDER, has_expired, read_pin
from statelog.checkpoint.query_operators import operators_of
from statelog.clock import Clock, SystemClock
from statelog.errors import CorruptionError, StatelogError, StorageError
from statelog.log.entry import Checkpoint, Entry, Fence
from statelog.log.numbered import LOG_FILE, base_name
from statelog.log.open import CHANGES_FOLDER, INITIAL_FOLDER, LOG_FOLDER, RUNS_FOLDER, open_location, open_log
from statelog.options import Options
from statelog.reading.source import find_operators
from statelog.storage import ObjectInfo, Store
from statelog.storage.links import split_link
from statelog.storage.wrapper import StoreWrapper


def list_orphans(location: str, *, min_age_s: float = 3600.0, clock: Clock | None = None) -> list[ObjectInfo]:
    """List the objects that no checkpoint or pin needs; the next start of the query would remove them.

    While a query runs, its newest objects may not belong to a checkpoint yet; `min_age_s` leaves them out. Only the
    operators' own folders are searched.

    Parameters
    ----------
    location : str
        The operators' location: a directory, or a folder in an object store.
    min_age_s : float
        Objects younger than this are left out, in seconds.
    clock : Clock, optional
        The clock that tells an object's age; by default the machine's.

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
    store = open_location(location)
    found = [
        info
        for operator in operators_of(store)
        for info in _orphans_of(store, operator, min_age_s, clock or SystemClock())
    ]
    return sorted(found, key=lambda info: info.name)


def _orphans_of(store: Store, operator: str, min_age_s: float, clock: Clock) -> list[ObjectInfo]:
    entries = open_log(store, operator, Options(), clock).read()
    history = History(entries)
    next_epoch = 1 + max((entry.epoch for entry in entries), default=0)
    names = set(find_orphans(store, operator, history, epoch=next_epoch, run_id="", min_age_s=min_age_s, clock=clock))
    now_s = clock.now_s()
    pinned, _ = _read_pins(store, operator, now_s)
    first, needed = _log_start(entries), history.object_names() | pinned
    folder = f"{operator}/{LOG_FOLDER}/"
    return [
        info
        for info in store.list(f"{operator}/")
        if (info.name in names and info.name not in pinned)
        or (
            (match := LOG_FILE.fullmatch(info.name.removeprefix(folder)))
            and int(match[1]) < first
            and info.name not in needed
            and now_s - info.modified_s >= min_age_s
        )
    ]


def delete_orphans(
    location: str | Path,
    *,
    min_age_s: float = 3600.0,
    release: bool = False,
    dry_run: bool = False,
    clock: Clock | None = None,
) -> list[ObjectInfo]:
    """Delete the objects that no checkpoint needs or can come to need, while the query runs or later.

    These are orphans of starts before the one that wrote the newest checkpoint, log files before the start of the log,
    and expired pins. The other orphans wait for the next start of the query, which removes what is left. Nothing goes
    that a pin keeps, and nothing at all if a pin cannot be read.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given.
    min_age_s : float
        Objects younger than this stay, in seconds; expired pins go at any age.
    release : bool
        Also remove the pins of branches that are gone: whose location does not exist any more, or is another branch's.
        All branches must be within reach.
    dry_run : bool
        Only report; delete nothing.
    clock : Clock, optional
        The clock that tells an object's age; by default the machine's.

    Returns
    -------
    list of ObjectInfo
        Name below the operators' location, size and modification time of each deleted object, sorted by name.

    Raises
    ------
    ConfigurationError
        If there is no operator.
    CorruptionError
        If a log or a pin is damaged; nothing was deleted.
    StorageError
        If the store cannot be read, or an object cannot be deleted. Then some objects may be gone; the call can be
        repeated.

    Examples
    --------
    >>> statelog.delete_orphans("/data/checkpoints/flights", dry_run=True)  # doctest: +SKIP
    [ObjectInfo(name='main/changes/3/0/17-204-1f0c-0.run', size_bytes=81920, modified_s=1780000000.0)]
    """
    clock = clock or SystemClock()
    operators = find_operators(str(location))
    found = [(store, root, _deletable(store, root, min_age_s, clock, release)) for store, _, root in operators]
    if not dry_run:
        for store, root, infos in found:
            _delete(store, root, [info.name for info in infos])
    return sorted((info for _, _, infos in found for info in infos), key=lambda info: info.name)


def _delete(store: Store, root: str, names: Sequence[str]) -> None:
    """Delete an operator's objects; log files one after the other, as a claim may go only after the file before it."""
    log = f"{root}/{LOG_FOLDER}/"
    store.delete([name for name in names if not name.startswith(log)])
    for name in names:
        if name.startswith(log):
            store.delete([name])


def _deletable(store: Store, root: str, min_age_s: float, clock: Clock, release: bool) -> list[ObjectInfo]:
    """The objects of an operator that may be deleted, sorted by name."""
    # The order matters: an object that was listed is judged by a later log, and by pins listed later still.
    listed = store.list(f"{root}/")
    entries = open_log(store, root, Options(), clock).read()
    before = _before_newest(store, root, entries, clock)
    now_s = clock.now_s()
    released_until_s = now_s - min_age_s if release else None
    pinned, expired = _read_pins(store, root, now_s, released_until_s)
    kept = pinned | History(entries).object_names() | History(before).object_names()
    fenced = _Fenced(root, entries)

    def may_go(info: ObjectInfo) -> bool:
        return info.name not in kept and now_s - info.modified_s >= min_age_s

    found = [*expired, *(info for info in listed if fenced.has_written(info.name) and may_go(info))]
    first_needed = min(_log_start(entries), _log_start(before))
    found += _log_files(listed, f"{root}/{LOG_FOLDER}/", first_needed, may_go)
    return sorted(found, key=lambda info: info.name)


def _read_pins(
    store: Store, root: str, now_s: float, released_until_s: float | None = None
) -> tuple[set[str], list[ObjectInfo]]:
    """All objects that standing pins name, and the pins that have expired.

    With `released_until_s` also the pins, made until then, of branches that are gone.
    """
    pinned: set[str] = set()
    expired: list[ObjectInfo] = []
    for info in store.list(f"{root}/{PINS_FOLDER}/"):
        try:
            pin = read_pin(store, info.name)
        except StorageError:
            raise
        except StatelogError as error:
            raise CorruptionError(
                f"Nothing can be deleted, because nobody knows what a pin keeps: {error.message}",
                kind=error.kind,
                hint=f"{error.hint} If nobody needs what it keeps, remove it: statelog unpin LOCATION {info.name}",
            ) from error
        if pin is None:
            continue
        may_release = released_until_s is not None and info.modified_s <= released_until_s
        if has_expired(pin, info, now_s) or (may_release and _is_gone(pin.branch, info.name)):
            expired.append(info)
        else:
            pinned.update(pin.objects)
    return pinned, expired


def _is_gone(branch: str, pin: str) -> bool:
    """Whether a pin is that of a branch that does not rely on it, or not any more."""
    if not branch:
        return False
    location, root = split_link(branch)
    parent = read_parent(open_location(location), root)
    return parent is None or parent.pin != pin


def _before_newest(store: Store, root: str, entries: Sequence[Entry], clock: Clock) -> list[Entry]:
    """The log as it was before its newest checkpoint.

    That one may not last: a claim may come to end the log before it, and a crash of the machine to lose it. Then what
    it gave up or replaced counts again.
    """
    checkpoints = [entry for entry in entries if isinstance(entry, Checkpoint)]
    if not checkpoints:
        return []
    newest = checkpoints[-1]
    earlier = _EarlierLog(store, f"{root}/{LOG_FOLDER}/", newest.number, newest.offset)
    try:
        return open_log(earlier, root, Options(), clock).read()
    except CorruptionError:
        # Its files are gone. Whoever has deleted them knows that the newest checkpoint lasts.
        return list(checkpoints[:-1])


class _EarlierLog(StoreWrapper):
    """A store for reading a log that ends at an offset of one of its files."""

    def __init__(self, inner: Store, folder: str, number: int, offset: int) -> None:
        super().__init__(inner)
        self._last = f"{folder}{base_name(number)}"
        self._end = offset

    def size_bytes(self, name: str) -> int:
        return self._end if name == self._last else super().size_bytes(name)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        listed = super().list(prefix)
        last = [replace(info, size_bytes=self._end) for info in listed if info.name == self._last and self._end]
        return [info for info in listed if info.name < self._last] + last


def _log_start(entries: Iterable[Entry]) -> int:
    """The first log file that the newest checkpoint needs; 0 without one."""
    return next((entry.log_start for entry in reversed([*entries]) if isinstance(entry, Checkpoint)), 0)


def _log_files(
    listed: Iterable[ObjectInfo], folder: str, first_needed: int, may_go: Callable[[ObjectInfo], bool]
) -> Iterator[ObjectInfo]:
    """The log files that may go: those before a number, up to the first that has to stay.

    Later ones may be claims, which stay as long as the file before them: it tells a frozen driver that it is fenced.
    """
    numbered = [(match, info) for info in listed if (match := LOG_FILE.fullmatch(info.name.removeprefix(folder)))]
    for match, info in numbered:
        if int(match[1]) >= first_needed or not may_go(info):
            return
        yield info


class _Fenced:
    """The starts before the one that wrote the newest checkpoint, and the objects that they have written.

    A newer claim alone does not settle which entries are before it: its start may still find one of an older start.
    Before it writes a checkpoint it has.
    """

    def __init__(self, root: str, entries: Sequence[Entry]) -> None:
        self._root = root
        self._epoch = max((entry.epoch for entry in entries if isinstance(entry, Checkpoint)), default=0)
        runs = [(entry.run_id, entry.epoch) for entry in entries if not isinstance(entry, Fence)]
        # A start may claim more than once.
        live = {run for run, epoch in runs if epoch >= self._epoch}
        self._runs: Collection[str] = {run for run, _ in runs} - live

    def has_written(self, name: str) -> bool:
        """Whether one of these starts has written an object, so that no later entry can reference it anew."""
        folder, _, rest = name.removeprefix(f"{self._root}/").partition("/")
        first, _, rest = rest.partition("/")
        if folder == INITIAL_FOLDER:
            return first in self._runs
        if folder not in (CHANGES_FOLDER, RUNS_FOLDER) or not first.isdecimal():
            return False
        if int(first) == 0:
            # Written before the start had an epoch: <run>-<attempt>.run
            return rest.rpartition("/")[2].rpartition("-")[0] in self._runs
        return int(first) < self._epoch
