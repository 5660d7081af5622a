"""Lists the operators of a location, their states, and the checkpoints that can be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from statelog.checkpoint.history import History
from statelog.checkpoint.pins import Pin, standing_pins
from statelog.clock import SystemClock
from statelog.log.entry import Checkpoint
from statelog.reading.savepoint import SavedSource, open_operator, read_manifest
from statelog.reading.source import At, Source, find_operator, find_operators, is_savepoint, read_history
from statelog.reading.states import tables_of
from statelog.runs.schema import decode_schema
from statelog.runs.times import NO_TIME_MS
from statelog.storage import Store

RETAINED = "retained_checkpoints"
"""What keeps the newest checkpoints: the option."""


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
        Number of its subtasks; in a savepoint, into how many ranges its keys are cut.
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
        When the last of its pins expires, in milliseconds since the Unix epoch; None if the number of checkpoints or a
        pin without an end keeps it.
    state_bytes : int
        Stored bytes that a reader of the whole checkpoint reads.
    own_bytes : int
        Bytes of the stored files that no other checkpoint in the list needs: what goes if this one goes.
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
    if is_savepoint(str(location)):
        return _saved_operators(str(location))
    found: list[OperatorInfo] = []
    for store, place, root in find_operators(str(location)):
        history = read_history(store, root)
        newest = history.latest
        if newest is None:
            continue
        found.append(
            OperatorInfo(
                uid=newest.uid,
                query_id=newest.query_id,
                location=place,
                parallelism=newest.parallelism,
                key=_key_of(newest.key_schema),
                states=tuple(table.name for table in tables_of(Source(store, place, root, history, newest))),
                batch=newest.batch,
                batch_time_ms=newest.batch_time_ms,
                state_bytes=_needed(root, history, newest.batch).state_bytes,
            )
        )
    return sorted(found, key=lambda one: one.uid)


def _saved_operators(location: str) -> list[OperatorInfo]:
    """The operators of a savepoint."""
    store, manifest = read_manifest(location)
    return [
        OperatorInfo(
            uid=operator.uid,
            query_id=manifest.query_id,
            location=location,
            parallelism=operator.parts,
            key=_key_of(operator.key_schema),
            states=tuple(table.name for table in tables_of(SavedSource(store, location, operator))),
            batch=manifest.batch,
            batch_time_ms=operator.batch_time_ms,
            state_bytes=sum(file.length for state in operator.states for file in state.files),
        )
        for operator in manifest.operators
    ]


def _key_of(key_schema: bytes) -> str:
    """The fields of a key with their types."""
    return ", ".join(_fields(decode_schema(key_schema))) if key_schema else ""


def list_states(location: str | Path, uid: str | None = None, *, at: At | None = None) -> list[StateInfo]:
    """List the states of an operator at a checkpoint.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given; or a savepoint.
    uid : str, optional
        The operator; needed if there are several.
    at : int or datetime, optional
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
    source = open_operator(str(location), uid, at)
    return [
        StateInfo(
            uid=source.uid,
            state=table.name,
            kind=table.kind,
            columns=tuple(_fields(table.shown_schema)),
        )
        for table in tables_of(source)
    ]


def list_checkpoints(location: str | Path, uid: str | None = None) -> list[CheckpointInfo]:
    """List the checkpoints of an operator that can be read, and the bytes that each of them keeps.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given.
    uid : str, optional
        The operator; by default all of them.

    Returns
    -------
    list of CheckpointInfo
        In order of operators and batches. A batch that was repeated after a repair may be there twice: as it is now,
        and as a pin keeps it.

    Raises
    ------
    ConfigurationError
        If there is no such operator.
    CorruptionError, StorageError
        If a log or a pin is damaged or cannot be read.
    """
    operators = find_operators(str(location)) if uid is None else [find_operator(str(location), uid)]
    found = [info for store, _, root in operators for info in _checkpoints_of(store, root)]
    return sorted(found, key=lambda info: (info.uid, info.batch, info.batch_time_ms))


@dataclass
class _Kept:
    """A checkpoint, and what keeps it."""

    checkpoint: Checkpoint | None
    needed: Pin
    by: list[str]
    until_ms: int | None


def _checkpoints_of(store: Store, root: str) -> Iterator[CheckpointInfo]:
    history = read_history(store, root)
    kept: dict[bytes, _Kept] = {}
    for checkpoint in history.checkpoints:
        if history.has_batch(checkpoint.batch):
            kept[checkpoint.token] = _Kept(checkpoint, _needed(root, history, checkpoint.batch), [RETAINED], None)
    for info, pin in standing_pins(store, root, SystemClock().now_s()):
        until_ms = None if pin.lasts_s is None else int((info.modified_s + pin.lasts_s) * 1000)
        known = kept.get(pin.token)
        if known is None:
            kept[pin.token] = _Kept(pin.history(store, root).latest, pin, [pin.owner], until_ms)
            continue
        known.by.append(pin.owner)
        if known.until_ms is not None:
            known.until_ms = None if until_ms is None else max(known.until_ms, until_ms)
    sizes = {info.name: info.size_bytes for info in store.list(f"{root}/")}
    users = Counter(name for one in kept.values() for name in one.needed.objects)
    for one in kept.values():
        known_as, needed = one.checkpoint, one.needed
        if known_as is None:
            continue
        yield CheckpointInfo(
            uid=known_as.uid,
            batch=known_as.batch,
            batch_time_ms=known_as.batch_time_ms,
            watermark_ms=None if known_as.watermark_ms == NO_TIME_MS else known_as.watermark_ms,
            parallelism=known_as.parallelism,
            kept_by=tuple(one.by),
            kept_until_ms=one.until_ms,
            state_bytes=needed.state_bytes,
            own_bytes=sum(sizes.get(name, 0) for name in needed.objects if users[name] == 1),
        )


def _needed(root: str, history: History, batch: int) -> Pin:
    """What a checkpoint needs, as a pin of it would name it."""
    return Pin.of(root, history, batch, owner="", made_ms=0, lasts_s=None)


def _fields(schema: pa.Schema) -> list[str]:
    return [f"{field.name} {field.type}" for field in schema]
