"""Writes a subtask's changeset: a local run for the next batch, and the stored form for the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from statelog.checkpoint.uploads import Uploads
from statelog.local.runs import LocalRun, LocalRuns
from statelog.operators.keyed.phases import BatchChanges, Part
from statelog.runs import digests


@dataclass(frozen=True)
class StoredPart:
    """A part of a changeset, or all of it, in its stored form: `length` in bytes, `rows` changes."""

    checksum: bytes
    length: int
    rows: int
    name: str
    """The object that holds it; empty if it is sent with the ack."""


@dataclass(frozen=True)
class Changeset:
    """A changeset ready to be acked."""

    parts: list[StoredPart]
    """In order, at least one; all but the last are objects."""
    payload: bytes
    """Bytes of the last part, unless it is an object too."""


class ChangesetWriter:
    """Writes the changes of one attempt; large ones in parts, while the batch runs.

    Objects are named after `prefix`, which no other attempt uses. A part is written during the batch once its changes
    take `part_bytes` in memory. The last part is sent with the ack if it has at most `inline_bytes` or no changes.
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
        """Upload parts while enough changes have come together; StorageError if an upload has failed."""
        while self._changes.unstored_bytes >= self._part_bytes:
            self._upload(self._changes.take_part(self._compression, self._part_bytes))

    def finish(self, local: LocalRuns, head: bytes, batch: int, token: str) -> Changeset:
        """Write the remaining changes, and the local run that the next batch starts from.

        `head` is the digest of the state before the batch, `token` unique among the directory's writers. Raises
        StorageError if an upload has failed.
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
        """Write the local run only; the changeset is one part with its checksum and rows, and no bytes.

        The parameters are those of :meth:`finish`.
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
