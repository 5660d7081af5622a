"""``migrate`` begins a query of statelog with the state of Spark's own ``transformWithState``."""

from __future__ import annotations

import secrets
import uuid
from pathlib import Path
from typing import Final

from msgspec.structs import replace
from pyspark.sql import SparkSession

from statelog.clock import SystemClock
from statelog.convert.codecs import RowCodecs, recorded_settings
from statelog.convert.types import key_schema
from statelog.coordinator.views import given_base
from statelog.errors import ConfigurationError, StateMissingError
from statelog.log.entry import Fence, QueryCheckpoint
from statelog.log.open import RUNS_FOLDER, new_identity, open_location, open_log
from statelog.log.references import StoredRun
from statelog.options import Options
from statelog.queries.load import RestoreTarget, first_section, new_log
from statelog.queries.save import require_apart
from statelog.queries.save_restore import Restored
from statelog.queries.sorted_runs import RunsPlace, store_sorted
from statelog.queries.transform_with_state import SparkOperator, SparkState
from statelog.reading.savepoint import SavedOperator, SavedState
from statelog.runs.schema import encode_schema
from statelog.spark.checkpoint.checkpoint import COMMITS, OFFSETS, STATE, SparkCheckpoint
from statelog.spark.checkpoint.location import open_checkpoint, state_location
from statelog.spark.checkpoint.logs import BatchOffsets
from statelog.spark.driver import internals
from statelog.spark.plan.checks import check_options, check_session, checked_location, checked_uid
from statelog.storage.names import distinct_parts
from statelog.storage.open import absolute

_RUN_ID: Final = "migrate"


def migrate(
    old_checkpoint: str | Path,
    new_checkpoint: str | Path,
    *,
    uid: str | None = None,
    location: str | None = None,
    options: Options | None = None,
) -> Restored:
    """Write a checkpointLocation with which a query continues from the state of Spark's own ``transformWithState``.

    The query must be stopped. The new query is the same one with ``statelog.key_by(...)`` in place of ``groupBy(...)``.
    It continues after the last batch that Spark has committed: with all values, lists, maps, expirations, timers, the
    positions of the sources, and the watermark. The old checkpoint is not changed. An interrupted migration can be
    repeated with the same arguments. Spark reads the state, in the active session or a new one. See
    docs/migrating.md.

    Parameters
    ----------
    old_checkpoint : str or Path
        The checkpointLocation of the query with Spark's operator.
    new_checkpoint : str or Path
        An empty directory, a folder in an object store, or one in any other file system that Spark can access; then
        `location` is required. The executors write the state, so they must be able to access it.
    uid : str, optional
        The name that the operator will have, if it is given one.
    location : str, optional
        The location of the state, if the operator will be given one; by default below `new_checkpoint`.
    options : Options, optional
        The options that the operator will have; only those that affect stored files matter here.

    Returns
    -------
    Restored
        The new query.

    Raises
    ------
    ConfigurationError
        If the query is running, its state is not that of one ``transformWithState`` in RocksDB, or the new location is
        not empty.
    StateMissingError
        If Spark has committed no batch, or cannot read the state of the last one.
    StorageError
        If a checkpoint cannot be read, or a location cannot be written.

    Examples
    --------
    >>> statelog.migrate("/data/checkpoints/clicks", "/data/checkpoints/clicks-2")  # doctest: +SKIP
    Restored(checkpoint_location='/data/checkpoints/clicks-2', query_id='...', next_batch=1208)
    """
    session = SparkSession.builder.getOrCreate()
    check_session(session)
    own = options or Options()
    check_options(own)
    name, place = checked_uid(uid), checked_location(location)
    old, new = open_checkpoint(str(old_checkpoint), session), open_checkpoint(str(new_checkpoint), session)
    state = absolute(place or state_location(new, place))
    require_apart(new.location, [old.location], "The new checkpointLocation")
    require_apart(state, [old.location], "The operator's location")
    old_id = old.query_id()
    if internals.active_query(session, old_id) is not None:
        raise ConfigurationError(f"The query of {old.location} is running.", hint="Stop it first.")
    batch, newest = _batches(old)
    # The same for a repetition, so that it recognizes what an interrupted migration has left.
    told = [old_id, str(batch), absolute(new.location), state, name]
    query_id = str(uuid.uuid5(uuid.NAMESPACE_URL, "\n".join(told)))
    target = RestoreTarget(
        location=state,
        query_id=query_id,
        run_id=_RUN_ID,
        batch=batch,
        options=own,
        clock=SystemClock(),
        new_token=lambda: secrets.token_bytes(16),
    )
    if not _is_done(new, target):
        _migrate(SparkState(session, old.location, batch), old, newest, new, name, target)
    return Restored(str(new_checkpoint), query_id, batch + 1)


def _migrate(
    read: SparkState, old: SparkCheckpoint, newest: int, new: SparkCheckpoint, uid: str, target: RestoreTarget
) -> None:
    """Store the state of `old`, and write `new`; `newest` is the last batch that Spark has begun."""
    is_begun, is_stored = _progress(target)
    if not is_begun:
        new.require_empty()
    batch = target.batch
    offsets = {one: old.batch_offsets(one) for one in range(max(batch - 1, 0), newest + 1)}
    operator = read.operator(offsets[batch].conf, old.files.list(STATE))
    texts = {str(one): entry.text for one, entry in offsets.items()}
    sources = old.source_files(offsets[newest].text)
    if not is_stored:
        _store(read, operator, uid, offsets[batch], target)
    new.write(sources, texts, old.commits(batch), query_id=target.query_id, clock_id=secrets.token_hex(8))


def _batches(old: SparkCheckpoint) -> tuple[int, int]:
    """The last batch that Spark has committed, and the last one that it has begun."""
    committed = old.batches(COMMITS)
    if not committed:
        raise StateMissingError(f"{old.location}: Spark has committed no batch.", hint="Run the query, then stop it.")
    batch, newest = committed[-1], max(old.batches(OFFSETS), default=-1)
    if newest > batch + 1:
        raise StateMissingError(
            f"{old.location}: Spark has begun batch {newest}, but the last batch that it has committed is {batch}.",
            hint="Files may have been removed. Restore the folder from a copy.",
        )
    return batch, max(batch, newest)


# ---- Progress ----


def _is_done(new: SparkCheckpoint, target: RestoreTarget) -> bool:
    """Whether an earlier attempt has reached its last write.

    Raises ConfigurationError if there is another query, or if this one has run since then.
    """
    if not new.has_query():
        return False
    if new.query_id() != target.query_id or new.batches(COMMITS)[-1:] != [target.batch]:
        new.require_empty()
    return True


def _progress(target: RestoreTarget) -> tuple[bool, bool]:
    """Whether an earlier attempt has begun the migration, and whether it has stored the state."""
    log = open_log(open_location(target.location), target.options, target.clock)
    entries = [entry for entry in log.read() if not isinstance(entry, Fence)]
    own = [entry for entry in entries if (entry.query_id, entry.run_id) == (target.query_id, _RUN_ID)]
    return bool(own), any(isinstance(entry, QueryCheckpoint) for entry in own)


# ---- State ----


def _store(read: SparkState, operator: SparkOperator, uid: str, offsets: BatchOffsets, target: RestoreTarget) -> None:
    """Begin the operator's log with the state."""
    schemas = [rows.state.to_stored() for rows in operator.states]
    saved = SavedOperator(
        uid=uid,
        folder="",
        parts=operator.partitions,
        key_schema=encode_schema(key_schema(operator.key_fields)),
        states=[SavedState(schema, {}, []) for schema in schemas],
        batch_time_ms=offsets.time_ms or 0,
        watermark_ms=offsets.watermark_ms,
        settings=dict(recorded_settings(operator.time_mode, RowCodecs())),
    )
    parts = distinct_parts(schema.name for schema in schemas)
    # The same for a repetition, so that it overwrites the files that an interrupted migration has left.
    identity = new_identity(uid, uuid.UUID(target.query_id).bytes)
    section = replace(first_section(saved, target), identity=identity)
    with new_log(target) as log:
        place = RunsPlace(target.location, f"{section.identity}/{RUNS_FOLDER}/{log.epoch}", target.options.codec)
        runs: dict[int, list[StoredRun]] = {}
        for rows in operator.states:
            with read.reading(str(rows.state)):
                stored = store_sorted(rows, operator.partitions, place, parts[rows.state.name])
            for subtask, own in stored.items():
                runs.setdefault(subtask, []).extend(own)
        base = given_base(section.identity, section.parallelism, target.batch, runs, first=0)
        entry = target.entry(log, target.batch, saved.batch_time_ms, [replace(section, base_ranges=base)])
        log.append(entry, [])
