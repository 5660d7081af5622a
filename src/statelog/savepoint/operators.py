"""Saves and restores one operator; the work per key range can run elsewhere, for example in a Spark job."""

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
    """Applies a function to each of several items, here or elsewhere."""

    def __call__(self, work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """Return the results in the order of the items."""
        ...


def one_by_one(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Apply the function here, to one item after the other."""
    return [work(item) for item in items]


def open_location(location: str) -> Store:
    """The store of a location, with retries."""
    return open_retrying_store(location, Options(), SystemClock(), Measurements())


def save_operator(
    history: History, batch: int, folder: str, *, location: str, target: str, run_all: RunAll
) -> SavedOperator:
    """Write the tables of an operator from `location` to the savepoint `target`.

    `history` must be able to restore the batch until this returns. `folder` names the operator's folder in the
    savepoint.
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
    """The new location of restored operators, and the values of its first entries."""

    location: str
    query_id: str
    """The query that will own the state."""
    run_id: str
    """The writer that the first entries name."""
    batch: int
    """The batch of the first checkpoint."""
    options: Options
    clock: Clock
    new_token: Callable[[], bytes]
    """Makes 16 unique bytes."""
    operators: QueryOperators | None = None
    """The query's operators, as the first entries note them."""


def restore_operator(saved: SavedOperator, source: str, target: RestoreTarget, run_all: RunAll) -> None:
    """Begin an operator's log with the state in the savepoint at `source`.

    Raises ConfigurationError if the location holds state of the operator already. After an error the location has no
    checkpoint, so files that were written do not count.
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
    """The operator's first checkpoint, still without state."""
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
    """The segments of the snapshots in the entry's payload."""
    offsets = [0, *accumulate(map(len, snapshots))]
    return [
        SegmentRef(subtask, 0, digests.checksum(data), offset, len(data), sum(counts[subtask]), 0)
        for subtask, (data, offset) in enumerate(zip(snapshots, offsets, strict=False))
    ]


def _load(source: str, location: str, load: KeyedLoad) -> StoredRun:
    return load_keyed(load, open_location(source), open_location(location))
