"""Saving and restoring operators: what is done at once, and what may be done by many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Final, Protocol, TypeVar

from msgspec.structs import replace

from statelog.checkpoint.history import History
from statelog.checkpoint.initial import initial_checkpoint
from statelog.checkpoint.orphans import RUNS_FOLDER
from statelog.clock import Clock, SystemClock
from statelog.errors import ConfigurationError, ErrorKind
from statelog.log.entry import Checkpoint, Claim, QueryOperators
from statelog.log.open import open_log
from statelog.log.open_store import open_retrying_store
from statelog.log.references import SegmentRef, StoredRun
from statelog.metrics import Measurements
from statelog.options import Options
from statelog.runs import digests
from statelog.savepoint.load import KeyedLoad, keyed_loads, load_elements, load_keyed
from statelog.savepoint.manifest import SavedFile, SavedOperator
from statelog.savepoint.save import KeyedExport, export_elements, export_keyed, export_plan, saved_operator
from statelog.storage import Store
from statelog.storage.names import name_part

OPERATORS_FOLDER: Final = "operators"

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class RunAll(Protocol):
    """Does some work for each of several items, here or elsewhere."""

    def __call__(self, work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """The results in order."""
        ...


def one_by_one(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Do it here, one after the other."""
    return [work(item) for item in items]


def open_location(location: str) -> Store:
    """The store of a location, which repeats what fails."""
    return open_retrying_store(location, Options(), SystemClock(), Measurements())


def save_operator(
    history: History, batch: int, folder: str, *, location: str, target: str, run_all: RunAll
) -> SavedOperator:
    """Write the tables of an operator.

    Parameters
    ----------
    history : History
        Its checkpoints.
    batch : int
        One that can be restored, and is while this goes on.
    folder : str
        The operator's folder in the savepoint.
    location : str
        The store that holds the state.
    target : str
        The savepoint's location.
    run_all : RunAll
        Does the work.

    Raises
    ------
    CorruptionError, StorageError
        If the state cannot be read, or the tables cannot be written.
    """
    checkpoint = history.at(batch)
    assert checkpoint is not None, f"checkpoint {batch} is not there"
    path = f"{OPERATORS_FOLDER}/{folder}"
    if not checkpoint.key_schema:
        files = export_elements(checkpoint, path, open_location(location), open_location(target))
        return saved_operator(checkpoint, folder, checkpoint.parallelism, [files])
    plan = export_plan(history, checkpoint, path)
    found = run_all(partial(_export, location, target), plan)
    return saved_operator(checkpoint, folder, len(plan), found)


def _export(location: str, target: str, export: KeyedExport) -> dict[str, SavedFile]:
    return export_keyed(export, open_location(location), open_location(target))


@dataclass(frozen=True)
class RestoreTarget:
    """Where saved operators go.

    Parameters
    ----------
    location : str
        The store.
    query_id, run_id : str
        The query that is to own the state, and what its first entries say wrote them.
    batch : int
        The batch whose checkpoint is the first.
    options : Options
        How files are written.
    clock : Clock
        Time.
    new_token : callable
        Makes 16 unique bytes.
    operators : QueryOperators or None
        What the first entries say about the query's operators.
    """

    location: str
    query_id: str
    run_id: str
    batch: int
    options: Options
    clock: Clock
    new_token: Callable[[], bytes]
    operators: QueryOperators | None = None


def restore_operator(saved: SavedOperator, source: str, target: RestoreTarget, run_all: RunAll) -> None:
    """Begin the location of an operator with what a savepoint has of it.

    Parameters
    ----------
    saved : SavedOperator
        The operator.
    source : str
        The savepoint's location.
    target : RestoreTarget
        Where it goes.
    run_all : RunAll
        Does the work.

    Raises
    ------
    ConfigurationError
        If the location holds state of the operator already.
    CorruptionError, StorageError
        If the savepoint cannot be read, or the location cannot be written; nothing is left of it that counts.
    """
    store = open_location(target.location)
    root = name_part(saved.uid)
    log = open_log(store, root, target.options, target.clock)
    if any(isinstance(entry, Checkpoint) for entry in log.read()):
        raise ConfigurationError(
            f"{target.location}/{root} holds state already.",
            kind=ErrorKind.OTHER_OWNER,
            hint="Restore into an empty location, or remove the folder first.",
        )
    epochs: list[int] = []

    def claim(epoch: int) -> Claim:
        epochs.append(epoch)
        now_ms = int(target.clock.now_s() * 1000)
        return Claim(epoch, target.query_id, target.run_id, saved.uid, target.new_token(), now_ms)

    log.claim(claim)
    try:
        entry = _entry(saved, target, epochs[-1], log.number)
        if saved.key_schema:
            loads = keyed_loads(saved, source, f"{root}/{RUNS_FOLDER}/{entry.epoch}", target.options.codec)
            runs = run_all(partial(_load, source, target.location), loads)
            held = {load.part: [run] for load, run in zip(loads, runs, strict=True)}
            log.append(initial_checkpoint(entry, held), [])
        else:
            snapshots, counts = load_elements(saved, open_location(source), source)
            log.append(replace(entry, segments=_segments(snapshots, counts), element_counts=counts), snapshots)
    finally:
        log.close()


def _entry(saved: SavedOperator, target: RestoreTarget, epoch: int, log_start: int) -> Checkpoint:
    """The operator's first checkpoint, still without its state."""
    return Checkpoint(
        epoch=epoch,
        batch=target.batch,
        revision=0,
        query_id=target.query_id,
        run_id=target.run_id,
        uid=saved.uid,
        parallelism=saved.parts,
        segments=[],
        key_schema=saved.key_schema,
        states=[state.schema for state in saved.states],
        batch_time_ms=saved.batch_time_ms,
        watermark_ms=saved.watermark_ms,
        token=target.new_token(),
        max_event_ms=saved.max_event_ms,
        settings=saved.settings,
        log_start=log_start,
        retained_from=target.batch,
        operators=target.operators,
    )


def _segments(snapshots: list[bytes], counts: list[list[int]]) -> list[SegmentRef]:
    """Where the snapshots are in the entry's payload."""
    offsets = [0, *accumulate(map(len, snapshots))]
    return [
        SegmentRef(subtask, 0, digests.checksum(data), offset, len(data), sum(counts[subtask]), 0)
        for subtask, (data, offset) in enumerate(zip(snapshots, offsets, strict=False))
    ]


def _load(source: str, location: str, load: KeyedLoad) -> StoredRun:
    return load_keyed(load, open_location(source), open_location(location))
