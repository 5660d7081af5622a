"""Taking back Spark's commit of batches whose checkpoint does not exist."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from statelog.checkpoint.admission import require_complete
from statelog.checkpoint.history import History
from statelog.checkpoint.leftovers import operators_of
from statelog.checkpoint.open_log import open_log
from statelog.checkpoint.open_store import open_retrying_store
from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, ErrorKind, StateMissingError
from statelog.metrics import Measurements
from statelog.options import Options
from statelog.spark.endpoint import STATE_FOLDER
from statelog.storage.open import local_path

__all__ = ["Rewound", "rewind"]


@dataclass(frozen=True)
class Rewound:
    """What :func:`rewind` did, or would do.

    Parameters
    ----------
    next_batch : int
        The batch that Spark runs first when the query is started again.
    taken_back : list of int
        Batches that Spark had committed and will repeat.
    removed : list of str
        Files removed from Spark's checkpoint.
    """

    next_batch: int
    taken_back: list[int]
    removed: list[str]


def rewind(checkpoint_location: str | Path, *, location: str | None = None, dry_run: bool = False) -> Rewound:
    """Make Spark repeat the batches that it committed although their state is missing.

    This happens when an action did not run every subtask to its end (``limit`` in foreachBatch, say), or when
    the state was restored from an older copy. The query must be stopped. Sinks see the repeated batches
    under the same batch ids.

    Parameters
    ----------
    checkpoint_location : str or Path
        The query's checkpointLocation, on a local or mounted file system.
    location : str, optional
        The operators' location, if they were given one.
    dry_run : bool
        Only tell what would be done.

    Returns
    -------
    Rewound
        What was done; nothing if Spark and the state agree.

    Raises
    ------
    ConfigurationError
        If there is no Spark checkpoint, or no state.
    StateMissingError
        If Spark no longer holds what it needs to repeat the batches.
    CorruptionError
        If the state's log is damaged.

    Examples
    --------
    >>> statelog.rewind("/data/checkpoints/flights", dry_run=True)  # doctest: +SKIP
    Rewound(next_batch=41, taken_back=[41], removed=['offsets/42', 'commits/41'])
    """
    root = Path(local_path(str(checkpoint_location)))
    offsets, commits = _batches(root / "offsets"), _batches(root / "commits")
    if not offsets:
        raise ConfigurationError(
            f"{root} holds no checkpoint of a Spark query.", hint="Pass the query's checkpointLocation."
        )
    newest = _newest_common(location or str(root / STATE_FOLDER), is_first=commits == [0])
    taken_back = [batch for batch in commits if batch > newest]
    if not taken_back:
        return Rewound(max(commits, default=-1) + 1, [], [])
    if newest + 1 not in offsets:
        raise StateMissingError(
            f"{root}: the newest checkpoint of the state is {newest}, but Spark no longer knows the input of batch"
            f" {newest + 1}: its oldest is {offsets[0]}.",
            hint="Restore the state from a newer copy, or start with a new checkpointLocation.",
        )
    # The offsets go first: after a crash in between Spark and the state still disagree visibly. The other
    # way round Spark would skip a batch.
    doomed = [("offsets", batch) for batch in reversed(offsets) if batch > newest + 1]
    doomed += [("commits", batch) for batch in reversed(taken_back)]
    if not dry_run:
        for folder, batch in doomed:
            _remove(root / folder, batch)
    return Rewound(newest + 1, taken_back, [f"{folder}/{batch}" for folder, batch in doomed])


def _newest_common(location: str, *, is_first: bool) -> int:
    """The newest checkpoint that every operator of the query has; -1 if one has none.

    A run that stops before its first checkpoint leaves no state. So none is right if Spark's only commit is
    the first; later it means that the state is elsewhere or gone.
    """
    store = open_retrying_store(location, Options(), SystemClock(), Measurements())
    logs = operators_of(store)
    if not logs and is_first:
        return -1
    if not logs:
        raise ConfigurationError(
            f"{location} holds no state of statelog.",
            kind=ErrorKind.CHECKPOINT_MISSING,
            hint="Pass location= if the operators were given one.",
        )
    newest: list[int] = []
    for operator in logs:
        history = History(open_log(store, operator, Options(), SystemClock()).read())
        require_complete(history, f"operator '{operator}' at {location}/{operator}")
        latest = history.latest
        newest.append(-1 if latest is None else latest.batch)
    return min(newest)


def _batches(folder: Path) -> list[int]:
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(name) for name in names if re.fullmatch(r"\d+", name))


def _remove(folder: Path, batch: int) -> None:
    (folder / str(batch)).unlink(missing_ok=True)
    (folder / f".{batch}.crc").unlink(missing_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
