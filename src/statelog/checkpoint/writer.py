"""Writing the changeset of a subtask: a local run for the next batch, and the stored form for the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from statelog.checkpoint.uploads import Uploads
from statelog.local.runs import LocalRun, LocalRuns
from statelog.operators.keyed.phases import BatchChanges, Part
from statelog.runs import digests


@dataclass(frozen=True)
class StoredPart:
    """A part of a changeset, or all of it.

    Parameters
    ----------
    checksum : bytes
        Checksum of the stored form.
    length : int
        Size of the stored form in bytes.
    rows : int
        Number of changes.
    name : str
        The object that holds it; empty if it travels with the ack.
    """

    checksum: bytes
    length: int
    rows: int
    name: str


@dataclass(frozen=True)
class Changeset:
    """A changeset that is ready to be acked.

    Parameters
    ----------
    parts : list of StoredPart
        Its parts in order, at least one; all but the last are objects.
    payload : bytes
        The last part, unless it is an object too.
    """

    parts: list[StoredPart]
    payload: bytes


class ChangesetWriter:
    """Takes the changes of one attempt: large ones in parts, while the batch runs.

    Parameters
    ----------
    changes : BatchChanges
        The changes.
    uploads : Uploads
        Writes objects.
    prefix : str
        Beginning of the objects' names, which no other attempt uses.
    part_bytes : int
        Size in memory from which a part is written before the batch is over.
    inline_bytes : int
        The last part travels with the ack if it is not larger, or has no changes.
    compression : {"lz4", "zstd", None}
        Of the stored form.
    """

    def __init__(
        self,
        changes: BatchChanges,
        uploads: Uploads,
        *,
        prefix: str,
        part_bytes: int,
        inline_bytes: int,
        compression: str | None,
    ) -> None:
        self._changes = changes
        self._uploads = uploads
        self._prefix = prefix
        self._part_bytes = max(part_bytes, inline_bytes)
        self._inline_bytes = inline_bytes
        self._compression = compression
        self._parts: list[StoredPart] = []

    def offer(self) -> None:
        """Some changes more are there; write a part if there are enough.

        Raises
        ------
        StorageError
            If an upload has failed.
        """
        while self._changes.unstored_bytes >= self._part_bytes:
            self._upload(self._changes.take_part(self._compression, self._part_bytes))

    def finish(self, local: LocalRuns, head: bytes, batch: int, token: str) -> Changeset:
        """Write what is left, and the local run, so that the next batch finds it.

        Parameters
        ----------
        local : LocalRuns
            Gets the run.
        head : bytes
            Chain digest of the state before the batch.
        batch : int
            Spark's batch id.
        token : str
            Unique among the directory's writers.

        Raises
        ------
        StorageError
            If an upload has failed.
        """
        last = self._changes.take_part(self._compression)
        payload = b""
        if len(last.data) <= self._inline_bytes or not last.rows:
            payload = last.data
            self._parts.append(StoredPart(digests.checksum(payload), len(payload), last.rows, ""))
        else:
            self._upload(last)
        checksums = [part.checksum for part in self._parts]
        local_run = LocalRun(batch, batch, head, digests.extend(head, batch, checksums))
        local.keep(local.write_new(self._changes.write_local, token), local_run)
        self._uploads.finish()
        return Changeset(self._parts, payload)

    def finish_local(self, local: LocalRuns, head: bytes, batch: int, token: str) -> tuple[LocalRun, Changeset]:
        """Write the local run only; the parameters are those of :meth:`finish`.

        Returns
        -------
        edge : LocalRun
            The local run.
        changeset : Changeset
            A part with its checksum and its rows, and no bytes.
        """
        written, rows = local.write_new(self._changes.write_local, token), self._changes.rows
        with pa.memory_map(str(written)) as mapped:
            checksum = digests.checksum(memoryview(mapped.read_buffer()))
        local_run = LocalRun(batch, batch, head, digests.extend(head, batch, [checksum] if rows else []))
        local.keep(written, local_run)
        return local_run, Changeset([StoredPart(checksum, 0, rows, "")], b"")

    def _upload(self, part: Part) -> None:
        name = f"{self._prefix}-{len(self._parts)}.run"
        self._parts.append(StoredPart(digests.checksum(part.data), len(part.data), part.rows, name))
        self._uploads.add(name, part.data)
