"""Measures the stored state of operators: its size, how much of it is live, and how evenly it is spread."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from statelog.history.footprint import stored_parts
from statelog.history.pins import retry_given_up
from statelog.local.restore import read_segment
from statelog.log.open import LOG_FOLDER, PINS_FOLDER
from statelog.metrics import space_amplification, storage_overhead
from statelog.operators.unkeyed.snapshot import Snapshot
from statelog.operators.unkeyed.states import OperatorStateMode
from statelog.progress import tracked
from statelog.reading.checkpoints import KeptPoint, LoggedPoint, StoredQuery
from statelog.reading.footers import KeySizes, SectionSizes, StoredSizes, measure_keyed, measure_unkeyed
from statelog.reading.open import open_query
from statelog.reading.pins import stored_pins
from statelog.reading.rows import part_sizes, scan_part
from statelog.reading.states import shown_name
from statelog.runs.byte_slices import bytes_before
from statelog.runs.key_groups import GROUP_SHIFT, KEY_GROUPS, hash_range
from statelog.runs.keys import KeyCodec
from statelog.runs.schema import StateDescriptor, decode_schema
from statelog.storage.links import is_link

_GROUP_RANGES: Final = 128
_LARGEST_KEYS: Final = 20


@dataclass(frozen=True)
class KeyStats:
    """A large key of a state.

    Parameters
    ----------
    key : tuple or None
        The values of its fields; None if one has no Python value, such as a date after the year 9999.
    rows : int
        Its rows: entries of a map or list, or timers.
    size_bytes : int
        Their keys, map keys and values, without compression.
    """

    key: tuple[Any, ...] | None
    rows: int
    size_bytes: int


@dataclass(frozen=True)
class StateStats:
    """The size of a state at the newest checkpoint.

    Parameters
    ----------
    state : str
        Its name, as :func:`read_state` takes it.
    kind : str
        Such as ``value``, ``list``, ``map`` or ``timer``.
    stored_rows : int
        Rows in the stored files, including those that later rows have replaced or deleted, and those that have expired.
    stored_bytes : int
        Stored bytes of these rows.
    uncompressed_bytes : int
        Bytes of these rows without compression.
    rows : int or None
        Rows that :func:`read_state` returns; None without `scan`, like all that follow.
    keys : int or None
        Keys with rows; None also for an operator without keys.
    most_rows : int or None
        The largest number of rows of one key; None also for an operator without keys.
    key_bytes : int or None
        Bytes of the rows' keys and map keys, without compression.
    value_bytes : int or None
        Bytes of the rows' values, without compression.
    largest_keys : tuple of KeyStats or None
        The 20 keys whose rows take the most bytes, the largest first; None also for an operator without keys.
    """

    state: str
    kind: str
    stored_rows: int
    stored_bytes: int
    uncompressed_bytes: int
    rows: int | None = None
    keys: int | None = None
    most_rows: int | None = None
    key_bytes: int | None = None
    value_bytes: int | None = None
    largest_keys: tuple[KeyStats, ...] | None = None


@dataclass(frozen=True)
class OperatorStats:
    """The size of an operator's state at its newest checkpoint, and of everything that is stored for the operator.

    The log and the pins belong to the query: their objects count for each of its operators.

    Parameters
    ----------
    uid : str
        The operator.
    location : str
        Location of its state.
    parallelism : int
        Number of its subtasks.
    batch, batch_time_ms : int
        The newest checkpoint, and Spark's time of its batch in milliseconds since the Unix epoch.
    oldest_batch, oldest_batch_time_ms : int
        The oldest retained checkpoint, and Spark's time of its batch.
    checkpoints : int
        Number of retained checkpoints.
    pins : int
        Number of unexpired pins that keep the operator, including those of active readers.
    state_bytes : int
        Stored bytes of the newest checkpoint, which a restart would read: `base_bytes` and `log_bytes`, or the
        snapshots of an operator without keys.
    base_bytes, runs, levels : int
        The materialized state of the newest checkpoint: its bytes, its runs, and the largest number of levels of a
        subtask, each of which a look-up searches.
    log_bytes, changesets : int
        The changes since then: their bytes, and the number of changesets.
    files : int
        Objects that the newest checkpoint needs, including files of the log.
    stored_bytes : int
        Bytes of all objects below the operator's folder, and of the log and the pins.
    retained_bytes : int
        Bytes of those objects that retained checkpoints need. Here and below, a branch's files at its parent do not
        count.
    pinned_bytes : int
        Bytes of those objects that only pins keep. All others are newer than the newest checkpoint, will be deleted, or
        are orphans.
    space_amplification : float or None
        The size of the files that hold snapshots, large changesets and materialized runs, divided by the part of it
        that retained checkpoints need; None if there are no such files. `Options(max_space_amplification=...)` limits
        it.
    largest_subtask : int or None
        The subtask whose keys have the most bytes in the newest checkpoint; None if the state is empty.
    subtask_skew : float or None
        Its bytes divided by those of the median subtask; None if that has none.
    largest_groups : tuple of int or None
        First and last key group of the largest of 128 equal ranges of key groups; None if the state is empty or has no
        keys. A stored block counts as if its bytes were spread evenly over its key hashes.
    group_skew : float or None
        Its bytes divided by those of the median range; None if that has none.
    states : tuple of StateStats
        The states, in order of their names.
    """

    uid: str
    location: str
    parallelism: int
    batch: int
    batch_time_ms: int
    oldest_batch: int
    oldest_batch_time_ms: int
    checkpoints: int
    pins: int
    state_bytes: int
    base_bytes: int
    runs: int
    levels: int
    log_bytes: int
    changesets: int
    files: int
    stored_bytes: int
    retained_bytes: int
    pinned_bytes: int
    space_amplification: float | None
    largest_subtask: int | None
    subtask_skew: float | None
    largest_groups: tuple[int, int] | None
    group_skew: float | None
    states: tuple[StateStats, ...]

    @property
    def storage_overhead(self) -> float | None:
        """`stored_bytes` per byte of `state_bytes`; None if there is no state."""
        return storage_overhead(self.stored_bytes, self.state_bytes)


def stats(location: str | Path, uid: str | None = None, *, scan: bool = False) -> list[OperatorStats]:
    """Measure the stored state of a query, while it runs or later.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given.
    uid : str, optional
        The operator; by default all of them.
    scan : bool
        Whether to read all state of the newest checkpoint, to find its live rows and largest keys. Otherwise, only the
        log, the sizes of the objects, and the footers of the newest checkpoint's files are read; files of up to 64 KiB
        are read completely.

    Returns
    -------
    list of OperatorStats
        In order of their names; without operators that have no checkpoint yet.

    Raises
    ------
    ConfigurationError
        If there is no such operator.
    StateMissingError, PinExpiredError
        If the newest checkpoint cannot be restored, or is deleted while it is read, as in :func:`read_state`.
    CorruptionError, StorageError
        If a log, a pin or a file is damaged or cannot be read.

    Examples
    --------
    >>> [one] = statelog.stats("/data/checkpoints/flights", scan=True)  # doctest: +SKIP
    >>> one.space_amplification, one.states[0].largest_keys[0]  # doctest: +SKIP
    (1.4, KeyStats(key=('a1b2c3',), rows=80210, size_bytes=5133440))
    """
    query = open_query(str(location))
    found = (_measured(query, identity, scan=scan) for identity in query.identities(uid))
    return [one for one in found if one is not None]


def _measured(query: StoredQuery, identity: str, *, scan: bool) -> OperatorStats | None:
    """The measures of an operator, at a newer checkpoint if one is deleted meanwhile; None if the operator is gone."""
    looks = itertools.chain([query], iter(lambda: open_query(query.location), None))

    def measure() -> OperatorStats | None:
        newest = next(looks)
        if identity not in newest.history.histories:
            return None
        point = newest.point_of(identity)
        objects = _Objects(point)
        with point.held() as keep:
            return _of_checkpoint(point, objects, keep, scan=scan)

    return retry_given_up(measure)


def _of_checkpoint(point: LoggedPoint, objects: _Objects, keep: Callable[[], None], *, scan: bool) -> OperatorStats:
    checkpoint, oldest = point.checkpoint, point.history.oldest
    assert oldest is not None, "the newest checkpoint is retained"
    if checkpoint.is_whole:
        sizes = measure_unkeyed(point.store, checkpoint, keep)
        by_subtask = np.array(sizes.subtask_bytes, np.float64)
        by_range = np.zeros(0)
    else:
        parts = point.cut(point.parallelism)
        sizes = measure_keyed(point.store, parts, keep)
        by_subtask = _subtask_bytes(sizes.group_bytes, checkpoint.parallelism)
        by_range = sizes.group_bytes.reshape(_GROUP_RANGES, -1).sum(axis=1)
    largest_range, group_skew = _skew(by_range)
    largest_subtask, subtask_skew = _skew(by_subtask)
    state_bytes = sizes.base_bytes + sizes.log_bytes + sizes.snapshot_bytes
    width = KEY_GROUPS // _GROUP_RANGES
    return OperatorStats(
        uid=checkpoint.uid,
        location=point.location,
        parallelism=checkpoint.parallelism,
        batch=checkpoint.batch,
        batch_time_ms=checkpoint.batch_time_ms,
        oldest_batch=oldest.batch,
        oldest_batch_time_ms=oldest.batch_time_ms,
        checkpoints=objects.checkpoints,
        pins=objects.pins,
        state_bytes=state_bytes,
        base_bytes=sizes.base_bytes,
        runs=sizes.runs,
        levels=_levels(point),
        log_bytes=sizes.log_bytes,
        changesets=sizes.changesets,
        files=objects.files,
        stored_bytes=objects.stored_bytes,
        retained_bytes=objects.retained_bytes,
        pinned_bytes=objects.pinned_bytes,
        space_amplification=objects.space_amplification,
        largest_subtask=largest_subtask,
        subtask_skew=subtask_skew,
        largest_groups=None if largest_range is None else (largest_range * width, (largest_range + 1) * width - 1),
        group_skew=group_skew,
        states=_states(point, sizes, keep, scan=scan),
    )


def _levels(point: LoggedPoint) -> int:
    """The largest number of levels that count for a key."""
    record = point.history.record(point.batch)
    ranges = record.base_map.ranges if record is not None and record.base_map is not None else ()
    return max((len(base_range.base.levels) for base_range in ranges), default=0)


class _Objects:
    """The objects of an operator, and what keeps them."""

    def __init__(self, point: LoggedPoint) -> None:
        store, identity = point.store, point.identity
        folders = (f"{identity}/", f"{LOG_FOLDER}/", f"{PINS_FOLDER}/")
        sizes = {info.name: info.size_bytes for folder in folders for info in store.list(folder)}
        kept = point.stored.kept(identity)
        retained = {name for one in kept for name in one.needed.objects}
        pins = [pin for _, pin in stored_pins(store) if pin.operator(identity) is not None]
        pinned = {name for pin in pins for name in pin.objects} - retained
        self.checkpoints = len(kept)
        self.pins = len(pins)
        self.files = len(point.needs().objects)
        self.stored_bytes = sum(sizes.values())
        self.retained_bytes = sum(sizes.get(name, 0) for name in retained)
        self.pinned_bytes = sum(sizes.get(name, 0) for name in pinned)
        self.space_amplification = _amplification(kept, sizes)


def _amplification(kept: Sequence[KeptPoint], sizes: Mapping[str, int]) -> float | None:
    """The space amplification of an operator's files, of these sizes by name."""
    parts = {
        (part.name, part.offset): part.length
        for one in kept
        for part in stored_parts(one.point.history, one.point.batch)
        if not is_link(part.name) and (one.point.checkpoint.is_whole or not part.name.startswith(f"{LOG_FOLDER}/"))
    }
    files: dict[str, int] = {}
    for (name, offset), length in parts.items():
        # A file of the log also has other content.
        size_bytes = offset + length if name.startswith(f"{LOG_FOLDER}/") else sizes.get(name, 0)
        files[name] = max(files.get(name, 0), size_bytes)
    return space_amplification(sum(files.values()), sum(parts.values()))


def _subtask_bytes(group_bytes: npt.NDArray[np.float64], parallelism: int) -> npt.NDArray[np.float64]:
    starts = [hash_range(subtask, parallelism).first >> GROUP_SHIFT for subtask in range(parallelism)]
    return np.add.reduceat(group_bytes, starts)


def _skew(sizes: npt.NDArray[np.float64]) -> tuple[int | None, float | None]:
    """The place of the largest size, if there is any, and how many times the median it is, if that is not 0."""
    if not sizes.any():
        return None, None
    median = float(np.median(sizes))
    return int(sizes.argmax()), float(sizes.max()) / median if median else None


def _states(point: LoggedPoint, sizes: StoredSizes, keep: Callable[[], None], *, scan: bool) -> tuple[StateStats, ...]:
    by_name: dict[str, StateStats] = {}
    for stored in point.states:
        held = sizes.states.get(stored.name, SectionSizes())
        by_name[stored.name] = StateStats(
            state=shown_name(stored),
            kind=str(stored.kind),
            stored_rows=held.rows,
            stored_bytes=held.stored_bytes,
            uncompressed_bytes=held.uncompressed_bytes,
        )
    if scan:
        scanned = _scanned_elements if point.checkpoint.is_whole else _scanned_keys
        by_name = scanned(point, by_name, keep)
    return tuple(by_name.values())


def _scanned_keys(
    point: LoggedPoint, by_name: dict[str, StateStats], keep: Callable[[], None]
) -> dict[str, StateStats]:
    """The states of a keyed operator, with statistics of their live rows, which are read."""
    codec = KeyCodec(decode_schema(point.key_schema))
    found = {
        stored.name: KeySizes(len(StateDescriptor.from_stored(stored).value_schema), _LARGEST_KEYS)
        for stored in point.states
    }
    for part in tracked(point.cut(), part_sizes):
        for state, changes in scan_part(point.store, part, point.checkpoint, list(found)):
            found[state.name].add(changes)
            keep()
    return {
        name: replace(
            by_name[name],
            # First, as it counts the last key.
            largest_keys=tuple(KeyStats(_decoded(codec, one.key), one.rows, one.size_bytes) for one in sizes.largest()),
            rows=sizes.rows,
            keys=sizes.keys,
            most_rows=sizes.most_rows,
            key_bytes=sizes.key_bytes,
            value_bytes=sizes.value_bytes,
        )
        for name, sizes in found.items()
    }


def _decoded(codec: KeyCodec, key: bytes) -> tuple[Any, ...] | None:
    try:
        return codec.decode(key)
    except (ValueError, OverflowError):
        return None


def _scanned_elements(
    point: LoggedPoint, by_name: dict[str, StateStats], keep: Callable[[], None]
) -> dict[str, StateStats]:
    """The states of an unkeyed operator, with statistics of their elements; all subtasks have the same broadcasts."""
    counted = {name: [0, 0, 0] for name in by_name}
    # Without states the segments may be a query's stored output.
    for place, segment in enumerate(point.checkpoint.segments if by_name else []):
        sections = Snapshot(read_segment(point.store, segment), segment.name).sections
        for stored in point.states:
            section = sections.get(stored.name)
            if section is None or (stored.kind == OperatorStateMode.BROADCAST and place):
                continue
            sizes = [int(bytes_before(column, np.array([section.count]))[0]) for column in section.rows.columns]
            key_bytes = sizes[0] if stored.entry_schema else 0
            counted[stored.name] = np.add(
                counted[stored.name], [section.count, key_bytes, sum(sizes) - key_bytes]
            ).tolist()
        keep()
    return {
        name: replace(by_name[name], rows=rows, key_bytes=key_bytes, value_bytes=value_bytes)
        for name, (rows, key_bytes, value_bytes) in counted.items()
    }
