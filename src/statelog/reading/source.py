"""Finds the checkpoint of an operator that is to be read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

from statelog.checkpoint.history import History
from statelog.checkpoint.pins import pinned_history
from statelog.checkpoint.query_operators import operators_of
from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, ErrorKind, StateMissingError
from statelog.log.entry import Checkpoint
from statelog.log.open import LOG_FOLDER, STATE_FOLDER, open_location, open_log, operator_folder
from statelog.options import Options
from statelog.storage import Store


@dataclass(frozen=True)
class Source:
    """An operator's checkpoint that is being read."""

    store: Store
    location: str
    root: str
    """The operator's folder in the location."""
    history: History
    checkpoint: Checkpoint

    @property
    def name(self) -> str:
        """The operator in messages."""
        return f"operator '{self.checkpoint.uid}' at {self.location}/{self.root}"


def open_source(location: str, uid: str | None, batch: int | None) -> Source:
    """Open an operator's checkpoint; `location` is a query's checkpointLocation or a location of state.

    `uid` names the operator, and None the only one. `batch` names the checkpoint, and None the newest one. Raises
    ConfigurationError if there is no such operator, StateMissingError if it has no such checkpoint, CorruptionError or
    StorageError if the log cannot be read.
    """
    store, place, root = _find(location, uid)
    history = History(open_log(store, root, Options(), SystemClock()).read())
    if history.latest is None:
        raise StateMissingError(f"{place}/{root} has no checkpoint yet.", hint="Read it after the query's first batch.")
    chosen = history.latest.batch if batch is None else batch
    if not history.has_batch(chosen):
        pinned = pinned_history(store, root, chosen, SystemClock().now_s())
        if pinned is not None and pinned.latest is not None:
            return Source(store, place, root, pinned, pinned.latest)
        first = history.oldest
        kept = "none can be restored" if first is None else f"it retains {first.batch} to {history.latest.batch}"
        raise StateMissingError(
            f"Operator '{history.latest.uid}' at {place}/{root} has no checkpoint {chosen}: {kept}.",
            hint="Options(retained_checkpoints=...) keeps more of them.",
        )
    checkpoint = history.at(chosen)
    assert checkpoint is not None, "it can be restored"
    return Source(store, place, root, history, checkpoint)


def _find(location: str, uid: str | None) -> tuple[Store, str, str]:
    """The store, location and folder of an operator."""
    places = (location, f"{location.rstrip('/')}/{STATE_FOLDER}")
    found: dict[str, list[str]] = {}
    for place in places:
        store = open_location(place)
        if uid is not None:
            root = operator_folder(store, uid)
            if store.list(f"{root}/{LOG_FOLDER}/"):
                return store, place, root
        found[place] = operators_of(store)
        if uid is None and found[place]:
            return store, place, _only(found[place], place)
    known = [root for roots in found.values() for root in roots]
    if known:
        raise ConfigurationError(
            f"{location} has no operator '{uid}'; it has {_listed(known)}.", hint="Pass one of them as uid."
        )
    raise ConfigurationError(
        f"{location} holds no state: neither it nor {places[1]} has an operator's log.",
        kind=ErrorKind.CHECKPOINT_MISSING,
        hint="Pass the query's checkpointLocation, or the location that its operators were given.",
    )


def _only(roots: list[str], place: str) -> str:
    if len(roots) > 1:
        raise ConfigurationError(f"{place} has several operators: {_listed(roots)}.", hint="Pass one of them as uid.")
    return roots[0]


def _listed(folders: Iterable[str]) -> str:
    return ", ".join(f"'{unquote(folder)}'" for folder in sorted(folders))
