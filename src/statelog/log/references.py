"""The materialized part of a state: merged runs in the store, which replace the changesets before them."""

from __future__ import annotations

import msgspec

from statelog.runs.key_groups import HashRange, hash_range


class StoredRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A run in the store.

    Parameters
    ----------
    name : str
        The object that holds it; empty while it is inside the log entry that names it.
    offset, length : int
        Byte range in the object; in a stored entry from the start of its payload while `name` is empty.
    checksum : bytes
        xxh3-128 of the run's bytes.
    rows : int
        Number of its rows.
    first_hash, last_hash : int
        Bounds of the key hashes in it.
    """

    name: str
    offset: int
    length: int
    checksum: bytes
    rows: int
    first_hash: int
    last_hash: int


class Level(msgspec.Struct, frozen=True, array_like=True):
    """Merged changes of successive batches, cut by key hash into runs.

    Parameters
    ----------
    first, last : int
        The batches.
    before, after : bytes
        Chain digests of the subtask before the first and after the last of them.
    first_hash, last_hash : int
        Only keys of these hashes count; the runs may hold more.
    runs : list of StoredRun
        The runs; those that hold a state are disjoint and stand in order of their hashes.
    """

    first: int
    last: int
    before: bytes
    after: bytes
    first_hash: int
    last_hash: int
    runs: list[StoredRun]

    @property
    def within(self) -> HashRange:
        """The hashes that count."""
        return HashRange(self.first_hash, self.last_hash)

    def has_part_of(self, run: StoredRun) -> bool:
        """Whether a run of it holds keys that do not count."""
        return run.first_hash < self.first_hash or self.last_hash < run.last_hash

    @property
    def length(self) -> int:
        """Size of the runs in bytes."""
        return sum([run.length for run in self.runs])

    @property
    def rows(self) -> int:
        """Number of the runs' rows."""
        return sum([run.rows for run in self.runs])


class Base(msgspec.Struct, frozen=True, array_like=True):
    """The materialized state of a subtask.

    Parameters
    ----------
    subtask, parallelism : int
        The subtask.
    levels : list of Level
        At least one, oldest first; each goes on where the one before ends, from the empty state on.
    """

    subtask: int
    parallelism: int
    levels: list[Level]

    @property
    def through(self) -> int:
        """The last batch that it holds."""
        return self.levels[-1].last

    @property
    def digest(self) -> bytes:
        """Chain digest of the state."""
        return self.levels[-1].after

    @property
    def length(self) -> int:
        """Size in bytes."""
        return sum([level.length for level in self.levels])

    @property
    def within(self) -> HashRange:
        """The subtask's hashes."""
        return hash_range(self.subtask, self.parallelism)


class BaseRange(msgspec.Struct, frozen=True, array_like=True):
    """A range of key hashes, and the base that counts for it.

    Parameters
    ----------
    first_hash, last_hash : int
        The range, within that of the base's subtask.
    base : Base
        The materialized state.
    """

    first_hash: int
    last_hash: int
    base: Base

    @property
    def runs(self) -> list[StoredRun]:
        """The runs of the base."""
        return [run for level in self.base.levels for run in level.runs]


class SegmentRef(msgspec.Struct, frozen=True, gc=False):
    """Where the changeset of one subtask is stored.

    A driver keeps very many of them, so the garbage collector does not visit them; they refer to nothing that
    could refer back.

    Parameters
    ----------
    subtask : int
        Number of the subtask, of the checkpoint's parallelism.
    attempt : int
        Spark's task attempt id that wrote the changeset.
    checksum : bytes
        xxh3-128 of the changeset's bytes.
    offset, length : int
        Byte range. In a stored entry the offset counts from the start of the entry's payload while
        `name` is empty; a reader sees absolute offsets in the object `name`.
    rows : int
        Number of changes.
    input_rows : int
        Number of input rows that the subtask read in this batch.
    name : str
        The object that holds the segment; empty while it is inside the entry itself.
    """

    subtask: int
    attempt: int
    checksum: bytes
    offset: int
    length: int
    rows: int
    input_rows: int
    name: str = ""
