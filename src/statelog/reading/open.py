"""Opens what is stored at a location: a query's log, or a savepoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from statelog.errors import ConfigurationError, ErrorKind
from statelog.history.query_history import read_history
from statelog.log.open import LOG_FOLDER, STATE_FOLDER, open_location
from statelog.reading.checkpoints import LoggedPoint, StoredQuery
from statelog.reading.point import At, Point
from statelog.reading.savepoint import MANIFEST, SavedQuery
from statelog.storage import Store
from statelog.storage.store import if_present

SPARK_METADATA: Final = "metadata"
"""The file that Spark writes into a checkpointLocation when a query starts."""


def open_point(location: str, uid: str | None, at: At | None) -> Point:
    """Open an operator's checkpoint, or the operator in a savepoint.

    `location` is a query's checkpointLocation, a location of state, or a savepoint. `uid` names the operator; None is
    the only one. `at` is the checkpoint; None is the newest one. Raises ConfigurationError if there is no such
    operator, StateMissingError if it has no such checkpoint, CorruptionError or StorageError if the log or the manifest
    cannot be read.
    """
    return _opened(location).point(uid, at)


def open_points(location: str) -> Sequence[Point]:
    """Open the newest checkpoint of each operator, or all operators of a savepoint; raises as :func:`open_point`."""
    return _opened(location).points()


def open_logged(location: str, uid: str | None, at: At | None) -> LoggedPoint:
    """Open an operator's checkpoint; raises as :func:`open_point`, and ConfigurationError if there is no log."""
    return open_query(location).point(uid, at)


def open_query(location: str) -> StoredQuery:
    """Read the log at a location, or in the folder of a checkpointLocation; ConfigurationError if there is none."""
    store, place = find_log(location)
    return StoredQuery(store, place, read_history(store))


def find_savepoint(location: str) -> SavedQuery | None:
    """The savepoint at a location, None if there is none: it has a manifest, and no log."""
    if not _has_manifest(location) or any(open_location(one).list(f"{LOG_FOLDER}/") for one in places_of(location)):
        return None
    return SavedQuery.open(location)


def _has_manifest(location: str) -> bool:
    return if_present(lambda: open_location(location).size_bytes(MANIFEST)) is not None


def find_log(location: str) -> tuple[Store, str]:
    """The place of a query's log, and its store; ConfigurationError if there is none."""
    for place in places_of(location):
        store = open_location(place)
        if store.list(f"{LOG_FOLDER}/"):
            return store, place
    if _has_manifest(location):
        raise ConfigurationError(
            f"{location} is a savepoint: it has the state of one batch, and no log.",
            kind=ErrorKind.CHECKPOINT_MISSING,
            hint="Only read_state, list_operators and list_states read a savepoint. To create a query from it, call"
            " statelog.restore.",
        )
    if any(info.name == SPARK_METADATA for info in open_location(location).list(SPARK_METADATA)):
        raise ConfigurationError(
            f"{location} holds no state yet: it is the checkpointLocation of a query without a checkpoint.",
            kind=ErrorKind.CHECKPOINT_MISSING,
            hint="Try again after the query's first batch. If its operators were given a location, pass that location.",
        )
    raise ConfigurationError(
        f"{location} holds no state: neither it nor {places_of(location)[1]} has a log.",
        kind=ErrorKind.CHECKPOINT_MISSING,
        hint="Pass the query's checkpointLocation after its first batch, or the location of its state.",
    )


def places_of(location: str) -> tuple[str, str]:
    """Where a location's log may be: there, or in the folder of a checkpointLocation."""
    return location, f"{location.rstrip('/')}/{STATE_FOLDER}"


def _opened(location: str) -> StoredQuery | SavedQuery:
    return find_savepoint(location) or open_query(location)
