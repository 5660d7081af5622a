"""Lists the operators of a location, their states, and the checkpoints that can be read."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from statelog.clock import SystemClock
from statelog.history.pins import standing_pins
from statelog.reading.open import open_point, open_points, open_query
from statelog.reading.pins import expiry_ms
from statelog.reading.point import At
from statelog.reading.states import tables_of
from statelog.runs.schema import decode_schema
from statelog.runs.times import NO_TIME_MS

RETAINED = "retained_checkpoints"
"""The option that keeps the newest checkpoints."""


@dataclass(frozen=True)
class OperatorInfo:
    """An operator of a query, as of its newest checkpoint or in a savepoint.

    Parameters
    ----------
    uid : str
        Its name.
    query_id : str
        Spark's id of the query.
    location : str
        Location of its state.
    parallelism : int
        Number of its subtasks; in a savepoint, the number of ranges of its keys.
    key : str
        The fields of its key with their types; empty for an operator without keys.
    states : tuple of str
        The names of its states, as :func:`read_state` takes them.
    batch : int
        The batch of the checkpoint.
    batch_time_ms : int
        Spark's time of the batch, in milliseconds since the Unix epoch.
    state_bytes : int
        Stored bytes that a restart would read, or the bytes of the tables in a savepoint.
    """

    uid: str
    query_id: str
    location: str
    parallelism: int
    key: str
    states: tuple[str, ...]
    batch: int
    batch_time_ms: int
    state_bytes: int


@dataclass(frozen=True)
class StateInfo:
    """A state of an operator.

    Parameters
    ----------
    uid : str
        The operator.
    state : str
        Its name, as :func:`read_state` takes it.
    kind : str
        Such as ``value``, ``list``, ``map`` or ``timer``; ``windows`` or their ``panes``.
    columns : tuple of str
        The columns of its rows with their types, as :func:`read_state` returns them.
    """

    uid: str
    state: str
    kind: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint that can be read.

    Parameters
    ----------
    uid : str
        The operator.
    batch : int
        The checkpoint's batch.
    batch_time_ms : int
        Spark's time of the batch, in milliseconds since the Unix epoch.
    watermark_ms : int or None
        The watermark in the batch, in milliseconds since the Unix epoch; None if there was none.
    parallelism : int
        Number of subtasks.
    kept_by : tuple of str
        ``retained_checkpoints`` for the newest ones, and the owners of the pins that keep the checkpoint.
    kept_until_ms : int or None
        When the last of its pins expires, in milliseconds since the Unix epoch; None if it is one of the newest
        checkpoints, or if a pin that does not expire keeps it.
    state_bytes : int
        Stored bytes that a reader of the whole checkpoint reads.
    own_bytes : int
        Bytes of its stored files that no other checkpoint of the query needs: they are deleted with this checkpoint. A
        file of the log counts for each operator.
    is_on_line : bool
        Whether it can be read by its batch and its time. Otherwise, it can be read only by the name of its pin, see
        :func:`list_pins`: it was taken back by a rewind, a fall-back or a repetition of its batch, or the operator's
        state was given up.
    """

    uid: str
    batch: int
    batch_time_ms: int
    watermark_ms: int | None
    parallelism: int
    kept_by: tuple[str, ...]
    kept_until_ms: int | None
    state_bytes: int
    own_bytes: int
    is_on_line: bool


def list_operators(location: str | Path) -> list[OperatorInfo]:
    """List the operators of a query.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given; or a savepoint.

    Returns
    -------
    list of OperatorInfo
        In order of their names; without those that have no checkpoint yet.

    Raises
    ------
    ConfigurationError
        If there is no operator.
    CorruptionError, StorageError
        If a log is damaged or cannot be read.
    """
    return [
        OperatorInfo(
            uid=point.uid,
            query_id=point.query_id,
            location=point.location,
            parallelism=point.parallelism,
            key=", ".join(_fields(decode_schema(point.key_schema))) if point.key_schema else "",
            states=tuple(table.name for table in tables_of(point)),
            batch=point.batch,
            batch_time_ms=point.batch_time_ms,
            state_bytes=point.state_bytes,
        )
        for point in open_points(str(location))
    ]


def list_states(location: str | Path, uid: str | None = None, *, at: At | None = None) -> list[StateInfo]:
    """List the states of an operator at a checkpoint.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given; or a savepoint.
    uid : str, optional
        The operator; required if there are several.
    at : int, datetime or str, optional
        The checkpoint, as in :func:`read_state`.

    Returns
    -------
    list of StateInfo
        In order of their names.

    Raises
    ------
    ConfigurationError, StateMissingError
        If there is no such operator or checkpoint.
    CorruptionError, StorageError
        If the log is damaged or cannot be read.
    """
    point = open_point(str(location), uid, at)
    return [
        StateInfo(
            uid=point.uid,
            state=table.name,
            kind=table.kind,
            columns=tuple(_fields(table.shown_schema)),
        )
        for table in tables_of(point)
    ]


def list_checkpoints(location: str | Path, uid: str | None = None) -> list[CheckpointInfo]:
    """List the checkpoints of an operator that can be read, and the bytes that each of them keeps.

    Pinned checkpoints that were taken back, and those of operators whose state was given up, are among them.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given.
    uid : str, optional
        The operator; by default all of them.

    Returns
    -------
    list of CheckpointInfo
        In order of operators and batches. A batch that was repeated may occur twice: as it is now, and as a pin keeps
        it.

    Raises
    ------
    ConfigurationError
        If there is no such operator.
    StateMissingError
        If `uid` is given, and the query has no checkpoint yet.
    CorruptionError, StorageError
        If the log or a pin is damaged or cannot be read.
    """
    query = open_query(str(location))
    pins = list(standing_pins(query.store, SystemClock().now_s()))
    chosen = query.named(uid, (pin for _, pin in pins))
    kept = [one for identity in query.named(None, (pin for _, pin in pins)) for one in query.kept(identity, pins)]
    sizes = {info.name: info.size_bytes for info in query.store.list()}
    needed_by: dict[str, set[bytes]] = defaultdict(set)
    for one in kept:
        for name in one.needed.objects:
            needed_by[name].add(one.point.checkpoint.token)
    found: list[CheckpointInfo] = []
    for one in kept:
        checkpoint = one.point.checkpoint
        if checkpoint.identity not in chosen:
            continue
        expiries = [expiry_ms(info, pin) for info, pin in one.pins]
        lasting = [expiry for expiry in expiries if expiry is not None]
        is_lasting = one.is_retained or len(lasting) < len(expiries)
        info = CheckpointInfo(
            uid=chosen[checkpoint.identity],
            batch=checkpoint.batch,
            batch_time_ms=checkpoint.batch_time_ms,
            watermark_ms=None if checkpoint.watermark_ms == NO_TIME_MS else checkpoint.watermark_ms,
            parallelism=checkpoint.parallelism,
            kept_by=(*([RETAINED] if one.is_retained else []), *(pin.owner for _, pin in one.pins)),
            kept_until_ms=None if is_lasting else max(lasting),
            state_bytes=one.needed.state_bytes,
            own_bytes=sum(sizes.get(name, 0) for name in one.needed.objects if len(needed_by[name]) == 1),
            is_on_line=one.point.is_on_line,
        )
        found.append(info)
    return sorted(found, key=lambda info: (info.uid, info.batch, info.batch_time_ms, info.is_on_line))


def _fields(schema: pa.Schema) -> list[str]:
    return [f"{field.name} {field.type}" for field in schema]
