"""Chain digests: one hash that stands for the whole history of a subtask's state.

The digest after a batch covers the digest before it and the checksums of the batch's changesets. So two sides with the
same digest agree on the whole history. A local run leads from one digest to another, and a state is a chain of local
runs.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def genesis(identity: str, subtask: int, parallelism: int) -> bytes:
    """Digest of the empty state of a subtask of the operator with an identity, 16 bytes."""
    return xxhash.xxh3_128_digest("\0".join((identity, str(subtask), str(parallelism))).encode())


def extend(digest: bytes, batch: int, checksums: Iterable[bytes]) -> bytes:
    """Digest after a batch; `batch` is Spark's batch id, or the id before the operator's first batch.

    `checksums` are those of the changesets that hold the subtask's keys, in order of their subtasks.
    """
    return xxhash.xxh3_128_digest(digest + batch.to_bytes(8, "big", signed=True) + b"".join(checksums))


def checksum(data: bytes | memoryview) -> bytes:
    """Checksum of a changeset, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


class Checksum:
    """The checksum of bytes that come one part after the other."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def add(self, data: bytes) -> None:
        """Add the next bytes."""
        self._hash.update(data)

    @property
    def value(self) -> bytes:
        """:func:`checksum` of all bytes so far."""
        return self._hash.digest()
