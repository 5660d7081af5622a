"""Log entries (claims, fences, checkpoints) and the frames that store them."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, TypeVar

import msgspec
import xxhash
from msgspec.structs import asdict, replace

from statelog.errors import ConfigurationError, CorruptionError, ErrorKind, StorageError
from statelog.log.references import (
    Base,
    BaseRange,
    SegmentRef,
    StoredRun,
    is_pin,
    names_of_runs,
    require_identities,
    require_objects,
)
from statelog.runs.key_groups import Natural, Parallelism
from statelog.runs.schema import StateSchema
from statelog.sealed import MALFORMED
from statelog.storage.links import is_link
from statelog.storage.store import Store

FRAME_MAGIC: Final = b"SLE1"
_MAGIC: Final = b"SLE"
VERSION: Final = 1
_HEADER: Final = struct.Struct("<4sIQQQ")
FRAME_HEADER_BYTES: Final = _HEADER.size
"""Size of a frame header: magic, index length, payload length, index checksum, header checksum."""
READ_AHEAD_BYTES: Final = 64 * 1024
"""Number of bytes that are read from a file at a time."""

INITIAL_BATCH: Final = -1
"""The batch before the first one."""
_Part = TypeVar("_Part", SegmentRef, StoredRun)
Settings = Mapping[str, int | str]
"""Settings of an operator, by the names that users know."""


class EntryPlace(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Where an entry is in the log; of two entries the later one has the greater place."""

    number: Natural
    """Number of the log file."""
    offset: Natural
    """Bytes from the start of the file."""

    def inside(self, parts: Iterable[_Part]) -> list[_Part]:
        """Of the segments and runs of the entry at this place, those in its payload; others are in other objects.

        A link may lead to a file of the same number, in another location.
        """
        own = f"/{self.number:020}.log"
        return [p for p in parts if p.offset > self.offset and p.name.endswith(own) and not is_link(p.name)]


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """The entries before `place` in the log whose batch is after `batch` were taken back."""

    batch: int
    place: EntryPlace


class Parent(msgspec.Struct, frozen=True):
    """The query that a branch began from, and whose objects it reads."""

    location: str
    """Location of the parent's state; absolute."""
    batch: Natural
    """The checkpoint that the branch began with."""
    pin: str
    """The object name of the branch's pin there."""


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    """A start or a tool claims the location; entries that older epochs write after the claim do not count.

    A tool's claim carries its news: operators that get another name or end, and a checkpoint to go back to.
    """

    epoch: Natural
    query_id: str
    run_id: str
    token: bytes
    time_ms: int
    follows: bytes | None = None
    """Id of the checkpoint that the query goes back to, empty for the state before batch 0; None to change nothing."""
    renames: dict[str, str] = {}
    """New uids, by the operators' identities."""
    ended: list[str] = []
    """Identities of the operators whose state is given up."""
    begins_at: int | None = None
    """The batch, other than batch 0, with which a query without a checkpoint may begin its state."""
    number: int = 0
    """Number of the log file that the claim begins; the reader sets it."""

    @property
    def has_news(self) -> bool:
        """Whether the claim says more than that a new epoch has begun."""
        return bool(self.follows or self.renames or self.ended) or self.begins_at is not None


class Fence(msgspec.Struct, frozen=True, tag="fence"):
    """End offsets of older files, by base name: bytes after them do not count."""

    epoch: Natural
    ends: dict[str, Natural]


class Section(msgspec.Struct, frozen=True):
    """The part of a checkpoint that belongs to one operator: the changesets or snapshots of all its subtasks."""

    identity: str
    """Created when the operator's state begins, and never reused."""
    uid: str
    """The operator's name in the program that wrote the entry."""
    parallelism: Parallelism
    segments: list[SegmentRef]
    """In order of their subtasks. Of several segments of a subtask the later ones win."""
    key_schema: bytes
    """Arrow IPC schema message of the key columns; empty if the operator is unkeyed."""
    states: list[StateSchema]
    """In order of their names."""
    watermark_ms: int | None = None
    """The operator's own watermark, milliseconds since the Unix epoch; None if it is Spark's."""
    max_event_ms: list[int | None] = []
    """The largest event time so far of each input, if the operator has a watermark of its own."""
    silent_ms: list[Natural] = []
    """How long each input has had no rows, in processing time, if the watermark does not wait for idle inputs."""
    element_counts: list[list[Natural]] = []
    """Number of elements by subtask and state, of shape (parallelism, states); empty if the operator is keyed."""
    generations: dict[str, Natural] = {}
    """How often each state was deleted, for states that ever were. Rows of earlier generations do not count."""
    bases: list[Base] = []
    """Materialized states that count from this checkpoint on."""
    base_ranges: list[BaseRange] | None = msgspec.field(default=None, name="base_map")
    """All materialized states that counted before `bases`, repeated so that no earlier entry is needed for them.

    None if they are not repeated.
    """
    settings: dict[str, int | str] = {}
    """Settings that the state depends on, see :mod:`statelog.history.settings`; empty for unkeyed operators."""
    begins: bool = False
    """Whether the operator's state begins with this batch: earlier sections do not count."""

    def placed(self, name: str, payload: int) -> Section:
        """The section with object `name` and absolute offsets for everything that is inside the entry.

        The entry's payload starts at offset `payload` of the object.
        """
        segments = [
            segment if segment.name else replace(segment, name=name, offset=payload + segment.offset)
            for segment in self.segments
        ]
        return replace(self, segments=segments, bases=[_placed_base(base, name, payload) for base in self.bases])


class QueryCheckpoint(msgspec.Struct, frozen=True, tag="checkpoint"):
    """The state of a query after one micro-batch, with a section for each operator."""

    epoch: Natural
    batch: Natural
    """Spark's batch id."""
    revision: Natural
    """How many times an attempt with another result has replaced the batch's checkpoint."""
    id: bytes
    """Id of the checkpoint, 16 bytes; its revisions share it."""
    follows: bytes
    """Id of the checkpoint before it; empty if there is none."""
    query_id: str
    run_id: str
    token: bytes
    """Unique per written entry."""
    batch_time_ms: int
    """Spark's time of the batch, milliseconds since the Unix epoch."""
    watermark_ms: int
    """Spark's watermark in the batch, milliseconds since the Unix epoch."""
    sections: list[Section]
    """In order of the operators' uids."""
    log_start: Natural = 0
    """The first log file with an entry that is still needed; 0 if all are."""
    retained_from: int = INITIAL_BATCH
    """The oldest batch whose checkpoint can be restored once this entry is durable. Objects that only older ones need
    may be deleted from then on.
    """
    parent: Parent | None = None
    """The parent of a branch, while the branch needs an object of it."""
    ended: list[str] = []
    """Identities that have ended, but of which older entries still have sections."""
    cuts: list[Cut] = []
    """What was taken back before this entry, oldest first; see :class:`statelog.history.query_history.Line`."""
    stored_commit: int | None = None
    """The newest batch whose commit Spark had stored, if it stores commits later: a restart may take back all after it.

    None if Spark stores each commit before it begins the next batch.
    """
    number: int = 0
    """Number of the log file that holds the entry; the reader sets it."""
    offset: int = 0
    """Where the entry begins in that file; the reader sets it."""

    @property
    def place(self) -> EntryPlace:
        """Where the entry is."""
        return EntryPlace(self.number, self.offset)

    @property
    def inside(self) -> tuple[int, int]:
        """Start and end of the changes inside the entry, bytes from the start of the log file; zeros without any."""
        parts = self.place.inside(segment for section in self.sections for segment in section.segments)
        ends = [segment.offset + segment.length for segment in parts]
        return (min([segment.offset for segment in parts]), max(ends)) if parts else (0, 0)

    def placed(self, header: FrameHeader, *, name: str, offset: int, number: int) -> QueryCheckpoint:
        """The entry as readers see it: segments and runs inside it get the object's name, and absolute offsets.

        The frame starts at `offset` of object `name`, which is file `number` of the log.
        """
        payload = offset + FRAME_HEADER_BYTES + header.index_bytes
        sections = [section.placed(name, payload) for section in self.sections]
        return replace(self, sections=sections, number=number, offset=offset)


class Checkpoint(Section, frozen=True, kw_only=True):
    """A checkpoint of a query as one operator sees it: its section, under its present name, and the common fields.

    It is not stored. The fields beside the section's are those of :class:`QueryCheckpoint`.
    """

    epoch: int = 0
    batch: int
    revision: int = 0
    query_id: str
    run_id: str
    token: bytes = b""
    batch_time_ms: int = 0
    watermark_ms: int = 0
    """The operator's own watermark, Spark's if it has none."""
    log_start: int = 0
    retained_from: int = INITIAL_BATCH
    number: int = 0
    offset: int = 0
    inside: tuple[int, int] = (0, 0)
    """Start and end of the changes of all operators inside the entry, bytes from the start of the log file."""

    @classmethod
    def of(
        cls, entry: QueryCheckpoint, section: Section, uid: str | None = None, inside: tuple[int, int] = (0, 0)
    ) -> Checkpoint:
        """The projection of an entry on a section; `uid` is the operator's present name, if it was renamed later.

        `inside` is :attr:`QueryCheckpoint.inside`.
        """
        own = {
            "uid": section.uid if uid is None else uid,
            "watermark_ms": entry.watermark_ms if section.watermark_ms is None else section.watermark_ms,
            "inside": inside,
        }
        return cls(**asdict(section) | {name: getattr(entry, name) for name in _SHARED} | own)

    @property
    def section(self) -> Section:
        """The operator's section."""
        return Section(**{name: getattr(self, name) for name in Section.__struct_fields__})

    @property
    def place(self) -> EntryPlace:
        """Where the entry is."""
        return EntryPlace(self.number, self.offset)

    @property
    def is_whole(self) -> bool:
        """Whether its own segments hold the whole state, as those of unkeyed operators do."""
        return not self.key_schema

    def segments_of(self, first: int, last: int) -> list[SegmentRef]:
        """The segments of the subtasks from `first` to `last`, both included."""
        segments = self.segments
        if len(segments) == self.parallelism and self._begins(first, first) and self._begins(last + 1, last + 1):
            return segments[first : last + 1]
        start = bisect_left(segments, first, key=_subtask)
        return segments[start : bisect_right(segments, last, lo=start, key=_subtask)]

    def _begins(self, subtask: int, place: int) -> bool:
        """Whether the segments of `subtask` and of all later ones begin at index `place`; usually they do."""
        segments = self.segments
        is_end = place == len(segments) or segments[place].subtask >= subtask
        return is_end and (place == 0 or segments[place - 1].subtask < subtask)

    def by_subtask(self) -> list[list[SegmentRef]]:
        """The segments of each subtask."""
        found: list[list[SegmentRef]] = [[] for _ in range(self.parallelism)]
        for segment in self.segments:
            found[segment.subtask].append(segment)
        return found


def _placed_base(base: Base, name: str, payload: int) -> Base:
    levels = [
        replace(
            level,
            runs=[run if run.name else replace(run, name=name, offset=payload + run.offset) for run in level.runs],
        )
        for level in base.levels
    ]
    return replace(base, levels=levels)


_subtask: Final = attrgetter("subtask")
_SHARED: Final = set(Checkpoint.__struct_fields__) & set(QueryCheckpoint.__struct_fields__)

Entry = Claim | Fence | QueryCheckpoint


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Entry)


class FrameHeader(msgspec.Struct, frozen=True):
    """Lengths of a frame's parts, and the checksum of its index."""

    index_bytes: int
    payload_bytes: int
    index_checksum: int

    @property
    def frame_bytes(self) -> int:
        """Length of the whole frame."""
        return FRAME_HEADER_BYTES + self.index_bytes + self.payload_bytes


def encode_frame(entry: Entry, payload: list[bytes]) -> list[bytes]:
    """Encode an entry as the parts of its frame, in order: header with index, then `payload` as given."""
    index = _encoder.encode(entry)
    payload_bytes = sum(map(len, payload))
    checksum = xxhash.xxh3_64_intdigest(index)
    head = _HEADER.pack(FRAME_MAGIC, len(index), payload_bytes, checksum, 0)[:-8]
    return [head + xxhash.xxh3_64_digest(head)[::-1] + index, *payload]


def decode_header(data: bytes, *, name: str, offset: int) -> FrameHeader:
    """Decode the first FRAME_HEADER_BYTES of a frame at `offset` of object `name`.

    Raises ConfigurationError for a later version, CorruptionError for a wrong magic or checksum.
    """
    magic, index_bytes, payload_bytes, index_checksum, own = _HEADER.unpack(data)
    is_whole = own == xxhash.xxh3_64_intdigest(data[:-8])
    if magic != FRAME_MAGIC and magic.startswith(_MAGIC) and is_whole:
        version = magic.removeprefix(_MAGIC).decode("latin-1")
        raise ConfigurationError(
            f"{name}: the log entry at offset {offset} has version {version}, but this version of"
            f" statelog reads version {VERSION}.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Use the version of statelog that wrote it, or a later one.",
        )
    if magic != FRAME_MAGIC:
        raise CorruptionError(
            f"{name}: there is no log entry at offset {offset}: its bytes start with {magic!r}.",
            kind=ErrorKind.FORMAT,
            hint="Restore the file from a copy, or use the version of statelog that wrote it.",
        )
    if not is_whole:
        raise damaged_log(name, f"the header of the log entry at offset {offset} is damaged")
    return FrameHeader(index_bytes, payload_bytes, index_checksum)


def decode_index(header: FrameHeader, index: bytes, *, name: str, offset: int, number: int) -> Entry:
    """Decode an entry from its index, the `header.index_bytes` bytes after the header; offsets become absolute.

    The frame starts at `offset` of object `name`, which is file `number` of the log. Raises CorruptionError.
    """
    if xxhash.xxh3_64_intdigest(index) != header.index_checksum:
        raise damaged_log(name, f"the index of the log entry at offset {offset} is damaged")
    try:
        entry: Entry = _decoder.decode(index)
    except MALFORMED as error:
        raise _unknown_form(name, offset, str(error)) from error
    match entry:
        case Claim():
            return replace(entry, number=number)
        case Fence():
            return entry
    _require_sound(entry, name, offset)
    return entry.placed(header, name=name, offset=offset, number=number)


def _require_sound(entry: QueryCheckpoint, name: str, offset: int) -> None:
    """Raise CorruptionError if a name in an entry leads elsewhere, or the parts of a section do not fit together."""
    where = f"{name}, log entry at offset {offset}"
    require_identities({section.identity for section in entry.sections}, where)
    names: set[str] = set()
    for section in entry.sections:
        names.update([segment.name for segment in section.segments])
        names.update(names_of_runs(section.bases))
        names.update(names_of_runs(part.base for part in section.base_ranges or ()))
        counts = section.element_counts
        if (
            max(map(_subtask, section.segments), default=0) >= section.parallelism
            or any(base.subtask >= base.parallelism for base in section.bases)
            or any(part.base.subtask >= part.base.parallelism for part in section.base_ranges or ())
            or (counts and {len(one) for one in counts} != {len(section.states)})
            or (counts and len(counts) != section.parallelism)
        ):
            raise _unknown_form(name, offset, f"operator '{section.uid}' has parts of subtasks that are not its own")
    names.discard("")  # inside the entry
    require_objects(names, where)
    if entry.parent is not None and not is_pin(entry.parent.pin):
        raise _unknown_form(name, offset, f"{entry.parent.pin!r:.200} is not a pin name")


def _unknown_form(name: str, offset: int, reason: str) -> CorruptionError:
    return CorruptionError(
        f"{name}: the log entry at offset {offset} is of an unknown form: {reason}.",
        kind=ErrorKind.FORMAT,
        hint="Use the version of statelog that wrote it, which may be a newer one.",
    )


def damaged_log(name: str, damage: str) -> CorruptionError:
    """The error for a damaged log file `name`."""
    return CorruptionError(
        f"{name}: {damage}.", hint="Restore the file from a copy; a shorter log would lose checkpoints."
    )


@dataclass(frozen=True, slots=True)
class Frame:
    """An entry and the offset at which its frame ends."""

    entry: Entry
    end: int


class FrameReader:
    """Reads the entries of an object, log file `number`, with few range reads and without their payloads."""

    def __init__(self, store: Store, name: str, number: int = 0, *, head: bytes = b"") -> None:
        self._store = store
        self.name = name
        self._number = number
        self._start = 0
        self._buffer = head
        """The bytes that were read last; at first, the beginning of the object if the caller has read it already."""

    def frame_at(self, offset: int, size_bytes: int) -> Frame | None:
        """Read the frame at `offset`; None if there is no complete frame before byte `size_bytes`.

        A frame is incomplete if it is truncated, or if only zero bytes follow, which a crash of the machine may leave
        behind. Raises CorruptionError if the frame's header or index is damaged.
        """
        if offset + FRAME_HEADER_BYTES > size_bytes:
            return None
        head = self.read(offset, FRAME_HEADER_BYTES)
        if not any(head) and self._is_zero(offset, size_bytes):
            return None
        header = decode_header(head, name=self.name, offset=offset)
        end = offset + header.frame_bytes
        if end > size_bytes:
            return None
        index = self.read(offset + FRAME_HEADER_BYTES, header.index_bytes)
        return Frame(decode_index(header, index, name=self.name, offset=offset, number=self._number), end)

    def read(self, offset: int, length: int) -> bytes:
        """Read bytes that are there; StorageError if the object has become shorter."""
        if not self._start <= offset <= offset + length <= self._start + len(self._buffer):
            self._start = offset
            self._buffer = self._store.read(self.name, offset=offset, length=max(length, READ_AHEAD_BYTES))
            if len(self._buffer) < length:
                raise StorageError(
                    f"{self._store}: {self.name} became shorter while it was read:"
                    f" {len(self._buffer)} of {length} bytes are there at offset {offset}.",
                    hint="Try again.",
                )
        return self._buffer[offset - self._start : offset - self._start + length]

    def _is_zero(self, offset: int, size_bytes: int) -> bool:
        for start in range(offset, size_bytes, READ_AHEAD_BYTES):
            data = self._store.read(self.name, offset=start, length=min(READ_AHEAD_BYTES, size_bytes - start))
            if not data:
                break  # the object is shorter than `size_bytes`, which a caller may not know
            if any(data):
                return False
        return True
