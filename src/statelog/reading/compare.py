"""Compares the states of two queries by hashes of their rows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from statelog.convert.state_tables import HASH, POSITION, SUBTASK
from statelog.errors import ConfigurationError, ErrorKind
from statelog.reading.point import At
from statelog.reading.read import StateReader, open_state, stored_states
from statelog.runs.key_groups import GROUP_SHIFT, KEY_GROUPS
from statelog.runs.keys import KeyCodec


@dataclass(frozen=True)
class StateComparison:
    """Whether a state of two queries is the same.

    Parameters
    ----------
    state : str
        Its name.
    rows : int
        Rows of the first query's state, as :func:`read_state` returns them.
    other_rows : int
        Rows of the other one's.
    different_groups : tuple of int
        The key groups (0 to 32,767: the upper 15 bits of the key hash) whose rows are not the same; empty if the states
        are equal. Group 0 stands for all rows of an operator without keys.
    """

    state: str
    rows: int
    other_rows: int
    different_groups: tuple[int, ...]

    @property
    def is_equal(self) -> bool:
        """Whether all rows are the same."""
        return not self.different_groups


def compare(
    location: str | Path,
    other: str | Path,
    uid: str | None = None,
    *,
    other_uid: str | None = None,
    at: At | None = None,
    other_at: At | None = None,
    ignore: Collection[str] = (),
) -> list[StateComparison]:
    """Compare all states of an operator with those in another query, such as a new version that runs in parallel.

    Both states are read completely, in bounded memory. For each key group, 128-bit hashes of the columns of its rows
    are added up, so that neither the order of rows, nor parallelism, nor the stored files matter. NaN equals NaN. For
    an operator without keys, the elements of all subtasks count, each as often as it occurs, in any order.

    Parameters
    ----------
    location, other : str or Path
        The queries' checkpointLocations, or the locations that their operators were given.
    uid, other_uid : str, optional
        The operators; required if there are several. `other_uid` is by default `uid`.
    at, other_at : int, datetime or str, optional
        The checkpoints, as in :func:`read_state`. `other_at` is by default `at`; without both, the newest ones.
    ignore : collection of str
        Columns that may differ, such as ``expires_ms`` of state that expires in processing time.

    Returns
    -------
    list of StateComparison
        One for each state, timers among them.

    Raises
    ------
    ConfigurationError
        If an operator is missing or not named, or has states or columns that the other one lacks.
    StateMissingError, PinExpiredError, CorruptionError, StorageError
        As :func:`read_state`.

    Examples
    --------
    >>> statelog.compare("/data/checkpoints/flights", "/data/checkpoints/flights-2", at=1200)  # doctest: +SKIP
    [StateComparison(state='count', rows=81230, other_rows=81230, different_groups=())]
    """
    with (
        open_state(location, uid, at=at) as first,
        open_state(other, uid if other_uid is None else other_uid, at=at if other_at is None else other_at) as second,
    ):
        states = stored_states(first)
        if unknown := sorted(set(states) ^ set(stored_states(second))):
            raise _different(location, other, f"state '{unknown[0]}'")
        return [_compared(first, second, state, ignore, (location, other)) for state in states]


def _compared(
    first: StateReader, second: StateReader, state: str, ignore: Collection[str], names: tuple[str | Path, str | Path]
) -> StateComparison:
    schemas = [reader.read(state).schema for reader in (first, second)]
    fields = [{field.name: field.type for field in schema} for schema in schemas]
    is_keyed = SUBTASK not in schemas[0].names
    # Subtasks have the elements of an operator without keys in any division, so their places mean nothing.
    left_out = set(ignore) | (set() if is_keyed else {SUBTASK, POSITION})
    columns = [name for name in schemas[0].names if name not in left_out]
    for name in sorted(set(columns) | set(schemas[1].names) - left_out):
        if fields[0].get(name) != fields[1].get(name):
            types = " and ".join(str(each.get(name, "missing")) for each in fields)
            raise _different(*names, f"column '{name}' of state '{state}' with the same type: {types}")
    (rows, hashes), (other_rows, other_hashes) = (
        _content(reader, state, columns, is_keyed=is_keyed) for reader in (first, second)
    )
    groups = np.flatnonzero((hashes != other_hashes).any(axis=1))
    return StateComparison(state, rows, other_rows, tuple(groups.tolist()))


def _different(location: str | Path, other: str | Path, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{location} and {other} do not both have {what}.",
        kind=ErrorKind.OTHER_SCHEMA,
        hint="Only states with the same columns can be compared; leave columns out with ignore.",
    )


def _content(
    reader: StateReader, state: str, columns: list[str], *, is_keyed: bool
) -> tuple[int, npt.NDArray[np.uint64]]:
    """The number of rows of a state; and by key group that number and the sum of hashes, of shape (groups, 3)."""
    rows = reader.read(state, columns=[*columns, HASH] if is_keyed else columns)
    codec = KeyCodec(pa.schema([rows.schema.field(name) for name in columns]), "column")
    count, content = 0, np.zeros((KEY_GROUPS, 3), np.uint64)
    for batch in rows:
        if not batch.num_rows:
            continue
        data = codec.encode_columns([batch.column(name) for name in columns])
        digests = np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, data.to_pylist())), np.uint64).reshape(-1, 2)
        groups = np.zeros(batch.num_rows, np.int64)
        if is_keyed:
            groups = (batch.column(HASH).to_numpy().view(np.uint64) >> np.uint64(GROUP_SHIFT)).astype(np.int64)
        starts = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))  # rows come in order of their hashes
        content[groups[starts], 0] += np.diff(np.append(starts, len(groups))).astype(np.uint64)
        content[groups[starts], 1:] += np.add.reduceat(digests, starts, axis=0)
        count += batch.num_rows
    return count, content
