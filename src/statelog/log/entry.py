"""Log entries (claims, fences, checkpoints) and the frames that store them."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import msgspec
import xxhash
from msgspec.structs import replace

from statelog.errors import ConfigurationError, CorruptionError, ErrorKind, StorageError
from statelog.log.references import Base, BaseRange, SegmentRef
from statelog.runs.schema import StateSchema
from statelog.storage.store import Store

_MAGIC: Final = b"SLE"
VERSION: Final = 3
"""The newest version of entries. Version 1 does not record which checkpoints are retained.

Version 3 is that of claims that give up the state and of initial checkpoints; all others are written as version 2.
"""
FRAME_MAGIC: Final = _MAGIC + b"2"
_NEWER_MAGIC: Final = _MAGIC + b"%d" % VERSION
_READABLE: Final = frozenset(_MAGIC + b"%d" % version for version in range(1, VERSION + 1))
_HEADER: Final = struct.Struct("<4sIQQQ")
FRAME_HEADER_BYTES: Final = _HEADER.size
"""Size of a frame header: magic, index length, payload length, index checksum, header checksum."""
_READ_AHEAD_BYTES: Final = 64 * 1024

INITIAL_BATCH: Final = -1
"""Batch of the initial checkpoint: the state that an operator was given before its first batch."""
Settings = Mapping[str, int | str]
"""Settings of an operator, by the names that users know."""


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    """A start takes over the location; entries that older epochs write after it are void."""

    epoch: int
    query_id: str
    run_id: str
    uid: str
    token: bytes
    time_ms: int
    gives_up: bool = False
    """Whether all earlier checkpoints are given up: the operator starts empty, or is not used any more."""
    renamed_to: str = ""
    """The uid under which the operator goes on, in a log of its own, if that is why they are given up."""


class Fence(msgspec.Struct, frozen=True, tag="fence"):
    """End offsets of older files, by base name: bytes behind them do not count."""

    epoch: int
    ends: dict[str, int]


class QueryOperators(msgspec.Struct, frozen=True):
    """All operators of a query in one of its starts."""

    started_ms: int
    """When the operator's part of the start began: milliseconds since the Unix epoch, by the driver's clock."""
    locations: dict[str, str]
    """Location of each operator's state, by uid; empty for state below the query's checkpointLocation."""


class Checkpoint(msgspec.Struct, frozen=True, tag="checkpoint"):
    """The state after one micro-batch: the changesets or snapshots of all its subtasks."""

    epoch: int
    batch: int
    """Spark's batch id, or :data:`INITIAL_BATCH`; it is the checkpoint's id too."""
    revision: int
    """How many times an attempt with another result has replaced the batch's checkpoint."""
    query_id: str
    run_id: str
    uid: str
    parallelism: int
    segments: list[SegmentRef]
    """In order of their subtasks. Of several segments of a subtask the later ones win."""
    key_schema: bytes
    """Arrow IPC schema message of the key columns; empty if the operator is unkeyed."""
    states: list[StateSchema]
    """In order of their names."""
    batch_time_ms: int
    """Milliseconds since the Unix epoch."""
    watermark_ms: int
    """Milliseconds since the Unix epoch: Spark's watermark, unless the operator has one of its own."""
    token: bytes
    """Unique per written entry."""
    max_event_ms: list[int | None] = []
    """The largest event time so far of each input, if the operator has a watermark of its own."""
    element_counts: list[list[int]] = []
    """Number of elements by subtask and state, of shape (parallelism, states); empty if the operator is keyed."""
    generations: dict[str, int] = {}
    """How often each state that was ever deleted has been. Rows of earlier generations do not count."""
    log_start: int = 0
    """The first log file with an entry that is still needed; 0 if all are."""
    bases: list[Base] = []
    """Materialized states that count from this checkpoint on."""
    base_ranges: list[BaseRange] | None = msgspec.field(default=None, name="cover")
    """All materialized states that counted before `bases`, repeated so that no earlier entry is needed for them.

    None if they are not repeated.
    """
    number: int = 0
    """The log file that holds the entry; the reader sets it."""
    offset: int = 0
    """Where the entry begins in that file; the reader sets it."""
    retained_from: int | None = None
    """The oldest batch whose checkpoint can be restored once this entry is durable. Objects that only older ones need
    may be deleted from then on. None in entries of version 1.
    """
    operators: QueryOperators | None = None
    """All operators of the query in the start that wrote the entry; None in entries of version 1."""
    settings: dict[str, int | str] = {}
    """Settings that the state depends on, see :mod:`statelog.checkpoint.settings`. Empty in entries of version 1 and of
    unkeyed operators.
    """
    is_initial: bool = False
    """Whether the entry stands for the start of an operator that was added to its query, and not for a batch."""

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

    def placed(self, header: FrameHeader, *, name: str, offset: int, number: int) -> Checkpoint:
        """The entry as readers see it: segments and runs inside it get the object's name, and absolute offsets.

        The frame starts at `offset` of object `name`, which is file `number` of the log.
        """
        payload = offset + FRAME_HEADER_BYTES + header.index_bytes
        segments = [
            segment if segment.name else replace(segment, name=name, offset=payload + segment.offset)
            for segment in self.segments
        ]
        bases = [_placed_base(base, name, payload) for base in self.bases]
        return replace(self, segments=segments, bases=bases, number=number, offset=offset)

    @property
    def is_whole(self) -> bool:
        """Whether the entry's own segments hold the whole state, as those of unkeyed operators do."""
        return not self.key_schema


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

Entry = Claim | Fence | Checkpoint


def renamed_to(entries: Iterable[Entry], query_id: str) -> str:
    """The uid under which an operator goes on whose log has these entries; empty if it has not been renamed."""
    claims = [entry for entry in entries if isinstance(entry, Claim) and entry.gives_up and entry.query_id == query_id]
    return claims[-1].renamed_to if claims else ""


def gave_up(entries: Iterable[Entry], query_id: str) -> bool:
    """Whether a query has given up checkpoints of a log with these entries."""
    return any(isinstance(entry, Claim) and entry.gives_up and entry.query_id == query_id for entry in entries)


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
    head = _HEADER.pack(_magic_of(entry), len(index), payload_bytes, checksum, 0)[:-8]
    return [head + xxhash.xxh3_64_digest(head)[::-1] + index, *payload]


def _magic_of(entry: Entry) -> bytes:
    """The version that a reader must know at least; older ones refuse the entry instead of passing over its news."""
    is_newer = getattr(entry, "gives_up", False) or getattr(entry, "is_initial", False)
    return _NEWER_MAGIC if is_newer else FRAME_MAGIC


def decode_header(data: bytes, *, name: str, offset: int) -> FrameHeader:
    """Decode the first FRAME_HEADER_BYTES of a frame at `offset` of object `name`.

    Raises ConfigurationError for a later version, CorruptionError for a wrong magic or checksum.
    """
    magic, index_bytes, payload_bytes, index_checksum, own = _HEADER.unpack(data)
    is_whole = own == xxhash.xxh3_64_intdigest(data[:-8])
    if magic not in _READABLE and magic.startswith(_MAGIC) and is_whole:
        version = magic.removeprefix(_MAGIC).decode("latin-1")
        raise ConfigurationError(
            f"{name}: the log entry at offset {offset} is of version {version}, and this statelog reads up to"
            f" {VERSION}.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Use the version of statelog that wrote it, or a later one.",
        )
    if magic not in _READABLE:
        raise CorruptionError(
            f"{name}: no log entry at offset {offset}: it starts with {magic!r}.",
            kind=ErrorKind.FORMAT,
            hint="The file is damaged or was written by another version of statelog.",
        )
    if not is_whole:
        raise damaged_log(name, f"the header of the log entry at offset {offset} is damaged")
    return FrameHeader(index_bytes, payload_bytes, index_checksum)


def decode_index(header: FrameHeader, index: bytes, *, name: str, offset: int, number: int) -> Entry:
    """Decode an entry from its index, the `header.index_bytes` bytes behind the header; offsets become absolute.

    The frame starts at `offset` of object `name`, which is file `number` of the log. Raises CorruptionError.
    """
    if xxhash.xxh3_64_intdigest(index) != header.index_checksum:
        raise damaged_log(name, f"the index of the log entry at offset {offset} is damaged")
    try:
        entry: Entry = _decoder.decode(index)
    except msgspec.MsgspecError as error:
        raise CorruptionError(
            f"{name}: the log entry at offset {offset} is of an unknown form: {error}.",
            kind=ErrorKind.FORMAT,
            hint="Was it written by a newer version of statelog?",
        ) from error
    if not isinstance(entry, Checkpoint):
        return entry
    return entry.placed(header, name=name, offset=offset, number=number)


def damaged_log(name: str, damage: str) -> CorruptionError:
    """The error for the log file `name`."""
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

    def __init__(self, store: Store, name: str, number: int = 0) -> None:
        self._store = store
        self._name = name
        self._number = number
        self._start = 0
        self._buffer = b""

    def frame_at(self, offset: int, size_bytes: int) -> Frame | None:
        """Read the frame at `offset`; None if there is no complete frame before byte `size_bytes`.

        It is incomplete if it is cut short, or if only zero bytes follow, which a crash of the machine may leave of a
        write. Raises CorruptionError if the frame's header or index is damaged.
        """
        if offset + FRAME_HEADER_BYTES > size_bytes:
            return None
        head = self._bytes(offset, FRAME_HEADER_BYTES)
        if not any(head) and self._is_zero(offset, size_bytes):
            return None
        header = decode_header(head, name=self._name, offset=offset)
        end = offset + header.frame_bytes
        if end > size_bytes:
            return None
        index = self._bytes(offset + FRAME_HEADER_BYTES, header.index_bytes)
        return Frame(decode_index(header, index, name=self._name, offset=offset, number=self._number), end)

    def _bytes(self, offset: int, length: int) -> bytes:
        if not self._start <= offset <= offset + length <= self._start + len(self._buffer):
            self._start = offset
            self._buffer = self._store.read(self._name, offset=offset, length=max(length, _READ_AHEAD_BYTES))
            if len(self._buffer) < length:
                raise StorageError(f"{self._name} became shorter while it was read.", hint="Try again.")
        return self._buffer[offset - self._start : offset - self._start + length]

    def _is_zero(self, offset: int, size_bytes: int) -> bool:
        for start in range(offset, size_bytes, _READ_AHEAD_BYTES):
            data = self._store.read(self._name, offset=start, length=min(_READ_AHEAD_BYTES, size_bytes - start))
            if not data:
                break  # the object is shorter than `size_bytes`, which a caller may not know
            if any(data):
                return False
        return True
