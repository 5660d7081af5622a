"""Writing the changeset of a subtask: a local run for the next batch, and the stored form for the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from statelog.changelog import chain
from statelog.changelog.local_runs import Edge, LocalRuns
from statelog.state.phases import BatchChanges
from statelog.state.run_writer import LOCAL_BLOCK_ROWS, STORED_BLOCK_ROWS
from statelog.storage import Store

__all__ = ["Changeset", "write_changeset"]


@dataclass(frozen=True)
class Changeset:
    """A changeset that is ready to be acked.

    Parameters
    ----------
    checksum : bytes
        Checksum of the stored form.
    length : int
        Size of the stored form in bytes.
    rows : int
        Number of changes.
    name : str
        The object that holds it; empty if `payload` does.
    payload : bytes
        The stored form, to be sent with the ack.
    """

    checksum: bytes
    length: int
    rows: int
    name: str
    payload: bytes


def write_changeset(
    changes: BatchChanges,
    *,
    local: LocalRuns,
    head: bytes,
    batch: int,
    inline_bytes: int,
    upload_name: str,
    open_store: Callable[[], Store],
    token: str,
) -> Changeset:
    """Write a batch's changes.

    Parameters
    ----------
    changes : BatchChanges
        The changes.
    local : LocalRuns
        Gets the run, so that the next batch finds it.
    head : bytes
        Chain digest of the state before the batch.
    batch : int
        Spark's batch id.
    inline_bytes : int
        Changesets up to this size travel with the ack.
    upload_name : str
        Name of the object that a larger one is written to; used once.
    open_store : callable
        Opens the store for that.
    token : str
        Unique among the directory's writers.

    Raises
    ------
    StorageError
        If the upload fails.
    """
    stored = changes.encode(compress=True, block_rows=STORED_BLOCK_ROWS)
    checksum = chain.checksum(stored)
    edge = Edge(batch, batch, head, chain.extend(head, batch, [checksum]))
    local.write(edge, changes.encode(compress=False, block_rows=LOCAL_BLOCK_ROWS), token)
    if len(stored) <= inline_bytes:
        return Changeset(checksum, len(stored), changes.rows, "", stored)
    open_store().put(upload_name, stored)
    return Changeset(checksum, len(stored), changes.rows, upload_name, b"")
