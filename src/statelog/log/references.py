"""References to stored state: to changesets, and to materialized runs, which replace the changesets before them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Final

import msgspec

from statelog.errors import CorruptionError, ErrorKind
from statelog.runs.key_groups import HashRange, KeyHash, Natural, Parallelism, hash_range
from statelog.storage.links import is_link, split_link
from statelog.storage.names import PLAIN_PART as _PART


class StoredRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A run in the store."""

    name: str
    """The object that holds the run; empty while the run is inside the log entry that names it."""
    offset: Natural
    """Offset in bytes from the start of the object or, while `name` is empty, of the entry's payload."""
    length: Natural
    checksum: bytes
    """xxh3-128 of the run's bytes."""
    rows: Natural
    first_hash: KeyHash
    """The run may hold key hashes from this one to `last_hash`, both included."""
    last_hash: KeyHash


class Level(msgspec.Struct, frozen=True, array_like=True):
    """Merged changes of successive batches, cut by key hash into runs."""

    first: int
    """The first batch."""
    last: int
    """The last batch, included."""
    before: bytes
    """Chain digest of the subtask before batch `first`."""
    after: bytes
    """Chain digest of the subtask after batch `last`."""
    first_hash: KeyHash
    """Only keys with hashes from this one to `last_hash`, both included, count; the runs may hold more."""
    last_hash: KeyHash
    runs: list[StoredRun]
    """The runs that hold rows of the same state are disjoint, and in order of their hashes."""

    @property
    def within(self) -> HashRange:
        """The hashes that count."""
        return HashRange(self.first_hash, self.last_hash)

    def has_part_of(self, run: StoredRun) -> bool:
        """Whether a run of the level may hold keys that do not count."""
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
    """The materialized state of a subtask."""

    subtask: Natural
    parallelism: Parallelism
    levels: Annotated[list[Level], msgspec.Meta(min_length=1)]
    """At least one, oldest first. The first one begins at the empty state, each later one where the one before ends."""

    @property
    def through(self) -> int:
        """The last batch whose changes the base holds."""
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


def names_of_runs(bases: Iterable[Base]) -> Iterator[str]:
    """The names of the objects of materialized states; empty for a run inside an entry."""
    return (run.name for base in bases for level in base.levels for run in level.runs)


class BaseRange(msgspec.Struct, frozen=True, array_like=True):
    """A range of key hashes, and the base that counts for it."""

    first_hash: KeyHash
    """The range, both ends included, lies within the hashes of the base's subtask."""
    last_hash: KeyHash
    base: Base

    @property
    def runs(self) -> list[StoredRun]:
        """The runs of the base."""
        return [run for level in self.base.levels for run in level.runs]


class SegmentRef(msgspec.Struct, frozen=True, gc=False):
    """Where the changeset of one subtask, or a part of it, is stored; or the snapshot of an unkeyed subtask.

    A driver keeps very many of them, so the garbage collector does not visit them; they refer to nothing that
    could refer back.
    """

    subtask: Natural
    """Number of the subtask, at the checkpoint's parallelism."""
    attempt: int
    """Spark's id of the task attempt that wrote the changeset."""
    checksum: bytes
    """xxh3-128 of the segment's bytes."""
    offset: Natural
    """Offset in bytes from the start of the object `name`; in a stored entry, while `name` is empty, from the start of
    its payload. Readers see absolute offsets only.
    """
    length: Natural
    rows: Natural
    """Number of changes, or of elements in a snapshot."""
    input_rows: Natural
    """Number of input rows that the subtask read in this batch."""
    name: str = ""
    """The object that holds the segment; empty while the segment is inside the entry."""


LOG_FOLDER: Final = "log"
PINS_FOLDER: Final = "pins"
CHANGES_FOLDER: Final = "changes"
RUNS_FOLDER: Final = "runs"
INITIAL_FOLDER: Final = "initial"

_IDENTITY: Final = re.compile(_PART)
_OBJECT: Final = re.compile(
    rf"{_PART}/(?:{CHANGES_FOLDER}|{RUNS_FOLDER}|{INITIAL_FOLDER})(?:/{_PART})+|{LOG_FOLDER}/\d{{20}}\.log"
)
_PIN: Final = re.compile(rf"{PINS_FOLDER}/\d{{20}}-[0-9a-f]+\.json")


def is_pin(name: str) -> bool:
    """Whether a name has the form that only pins have."""
    return _PIN.fullmatch(name) is not None


def require_identities(identities: Iterable[str], where: str) -> None:
    """Raise CorruptionError unless all are names of a single folder; `where` names the document in messages."""
    for identity in identities:
        if identity in (LOG_FOLDER, PINS_FOLDER) or not _IDENTITY.fullmatch(identity):
            raise _forged(where, f"{identity!r:.200} is not an identity of an operator")


def require_objects(names: Iterable[str], where: str) -> None:
    """Raise CorruptionError unless all are names of objects that operators and logs have, or links to such."""
    for name in names:
        own = split_link(name)[1] if is_link(name) else name
        if not _OBJECT.fullmatch(own):
            raise _forged(where, f"{name!r:.200} is not a name of an operator's object")


def _forged(where: str, reason: str) -> CorruptionError:
    return CorruptionError(
        f"{where}: {reason}.",
        kind=ErrorKind.FORMAT,
        hint="Only another program can have written it. Restore the file from a copy, and check who may write there.",
    )
