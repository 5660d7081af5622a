"""Chain digests: one hash that stands for everything a subtask's state is made of.

The digest after a batch covers the digest before it and the checksums of the batch's changesets, so two
sides that agree on a digest agree on the whole history. A file of changes is an edge from one digest to
another, and a state is a path of such edges.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def genesis(query_id: str, uid: str, subtask: int, parallelism: int) -> bytes:
    """Digest of the empty state of a subtask, 16 bytes."""
    identity = "\0".join((query_id, uid, str(subtask), str(parallelism)))
    return xxhash.xxh3_128_digest(identity.encode())


def extend(digest: bytes, batch: int, checksums: Iterable[bytes]) -> bytes:
    """Digest after a batch.

    Parameters
    ----------
    digest : bytes
        The digest before.
    batch : int
        Spark's batch id; -1 for what was there before the first.
    checksums : iterable of bytes
        Checksums of the changesets that hold the subtask's keys, in order of their subtasks.
    """
    return xxhash.xxh3_128_digest(digest + batch.to_bytes(8, "big", signed=True) + b"".join(checksums))


def checksum(data: bytes | memoryview) -> bytes:
    """Checksum of a changeset, 16 bytes."""
    return xxhash.xxh3_128_digest(data)
