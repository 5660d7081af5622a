"""Lists the orphans of crashed starts, without changing anything."""

from __future__ import annotations

from statelog.checkpoint.garbage import find_orphans
from statelog.checkpoint.history import History
from statelog.checkpoint.query_operators import operators_of
from statelog.clock import Clock, SystemClock
from statelog.log.entry import Checkpoint
from statelog.log.numbered import LOG_FILE
from statelog.log.open import LOG_FOLDER, open_location, open_log
from statelog.options import Options
from statelog.storage import ObjectInfo, Store


def list_orphans(location: str, *, min_age_s: float = 3600.0, clock: Clock | None = None) -> list[ObjectInfo]:
    """List the objects that no checkpoint needs; the next start of the query would remove them.

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
        If a log is damaged.
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
    starts = [entry.log_start for entry in entries if isinstance(entry, Checkpoint)]
    first = starts[-1] if starts else 0
    needed = history.object_names()
    now_s = clock.now_s()
    folder = f"{operator}/{LOG_FOLDER}/"
    return [
        info
        for info in store.list(f"{operator}/")
        if info.name in names
        or (
            (match := LOG_FILE.fullmatch(info.name.removeprefix(folder)))
            and int(match[1]) < first
            and info.name not in needed
            and now_s - info.modified_s >= min_age_s
        )
    ]
