"""Sets a query with damaged state back to a checkpoint without damage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

from statelog.errors import ErrorKind, StateMissingError
from statelog.queries.rewind import Rewound, free_folder, open_stopped, rewind_to
from statelog.queries.stopped import StoppedQuery
from statelog.reading.verify import Damage, verify
from statelog.storage.links import is_link
from statelog.storage.store import if_present

_ASIDE: Final = "statelog-damaged"
"""Folder in a location of state; it holds no operator, since nothing in it is called like a log."""


@dataclass(frozen=True)
class FellBack(Rewound):
    """The changes that :func:`fall_back` made, or would make.

    Parameters
    ----------
    damages : tuple of Damage
        All that is damaged or missing.
    copies : list of str
        Copies of the damaged objects. You may delete them; the query deletes the objects when it does not need them.
    """

    damages: tuple[Damage, ...]
    copies: list[str]


def fall_back(
    checkpoint_location: str | Path,
    *,
    location: str | None = None,
    dry_run: bool = False,
) -> FellBack:
    """Set a stopped query back to its newest checkpoint without damage, after which Spark repeats the later batches.

    Everything that the query's checkpoints consist of is read and checked, as by :func:`verify`. Then Spark is set
    back, as by :func:`rewind`. Sinks see the repeated batches under the same batch ids.

    Parameters
    ----------
    checkpoint_location, location
        As of :func:`rewind`.
    dry_run : bool
        Report the damage and the changes without making them.

    Returns
    -------
    FellBack
        The changes; there are none if the newest checkpoint is without damage.

    Raises
    ------
    ConfigurationError, StateMissingError, CorruptionError
        As of :func:`rewind`. StateMissingError also if no retained checkpoint is without damage, CorruptionError if a
        log is damaged: then only a savepoint or a copy helps.

    Examples
    --------
    >>> statelog.fall_back("/data/checkpoints/flights", dry_run=True)  # doctest: +SKIP
    FellBack(next_batch=41, taken_back=[41, 42], ..., damages=(Damage(uid='main', kind='checksum', ...),), copies=[])
    """
    query = open_stopped(checkpoint_location, location)
    newest = query.rewind_target()
    damages = tuple(verify(query.location).damages) if query.history.latest is not None else ()
    if not damages:
        return FellBack(**asdict(rewind_to(query, newest, dry_run=dry_run)), damages=(), copies=[])
    damaged = {batch for damage in damages for batch in damage.batches}
    batches = [] if any(damage.is_general for damage in damages) else range(newest + 1)
    whole = [batch for batch in batches if batch not in damaged and query.is_of_batch(batch)]
    if not whole:
        problems = "; ".join(damage.problem for damage in damages[:3])
        raise StateMissingError(
            f"{query.spark.location}: no retained checkpoint is without damage: {problems}.",
            kind=ErrorKind.CHECKPOINT_MISSING,
            hint="Restore a savepoint, or the damaged objects from a copy. 'statelog verify' lists all damage.",
        )
    # The copies come first: once Spark's files are moved, the call must not fail any more.
    copies = [] if dry_run else _copied(query, damages)
    return FellBack(**asdict(rewind_to(query, max(whole), dry_run=dry_run)), damages=damages, copies=copies)


def _copied(query: StoppedQuery, damages: Sequence[Damage]) -> list[str]:
    """Copy the damaged objects, those that are there; those of a branch's parent stay where they are."""
    store = query.store
    names = sorted({damage.name for damage in damages if damage.name and not is_link(damage.name)})
    folder = free_folder((info.name for info in store.list(f"{_ASIDE}/")), _ASIDE)
    copies = []
    for name in names:
        data = if_present(partial(store.read, name))
        if data is not None:
            store.put(f"{folder}/{name}", data)
            copies.append(f"{query.location}/{folder}/{name}")
    return copies
