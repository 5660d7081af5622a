"""Log entries: claims, fences and checkpoints, and the frame that each is stored in.

The byte layout is specified in ``docs/format.md``.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from operator import attrgetter
from typing import Final

import msgspec
import xxhash
from msgspec.structs import replace

from statelog.errors import ConfigurationError, CorruptionError, ErrorKind
from statelog.log.references import Base, BaseRange, SegmentRef
from statelog.runs.schema import StateSchema

_MAGIC: Final = b"SLE"
VERSION: Final = 2
"""Version of the entries that are written; those of version 1 do not record what is retained."""
FRAME_MAGIC: Final = _MAGIC + b"%d" % VERSION
_READABLE: Final = frozenset(_MAGIC + b"%d" % version for version in range(1, VERSION + 1))
_HEADER: Final = struct.Struct("<4sIQQQ")
FRAME_HEADER_BYTES: Final = _HEADER.size
"""Size of a frame header: magic, index length, payload length, index checksum, header checksum."""

INITIAL_BATCH: Final = -1
"""The batch of a checkpoint that holds what an operator was given before its first batch."""
Settings = Mapping[str, int | str]
"""Settings by the names that users know."""


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    """A run takes over the location; everything written by older epochs after it is void."""

    epoch: int
    query_id: str
    run_id: str
    uid: str
    token: bytes
    time_ms: int


class Fence(msgspec.Struct, frozen=True, tag="fence"):
    """Where older files end, by base name: what stands behind that does not count."""

    epoch: int
    ends: dict[str, int]


class QueryOperators(msgspec.Struct, frozen=True):
    """The operators that a query has in one of its runs.

    Parameters
    ----------
    started_ms : int
        When the operator's part of the run began, milliseconds since the Unix epoch by the driver's clock.
    locations : dict of str to str
        For each operator, by uid, where its state is; empty if that is below the query's checkpointLocation.
    """

    started_ms: int
    locations: dict[str, str]


class Checkpoint(msgspec.Struct, frozen=True, tag="checkpoint"):
    """The state after one micro-batch: the changesets of all subtasks of the batch.

    Parameters
    ----------
    epoch : int
        The epoch that wrote the entry.
    batch : int
        Spark's batch id, which is the checkpoint's id; or :data:`INITIAL_BATCH`.
    revision : int
        0, or the number of times that an attempt with another result replaced one.
    parallelism : int
        Number of subtasks.
    segments : list of SegmentRef
        By subtask; of one that has several a later one counts more.
    key_schema : bytes
        Arrow IPC schema message of the key columns.
    states : list of StateSchema
        The operator's states, by name.
    batch_time_ms, watermark_ms : int
        Time and watermark of the batch, milliseconds since the Unix epoch. The watermark is Spark's, unless the
        operator has one of its own.
    token : bytes
        Unique per written entry.
    max_event_ms : list of (int or None)
        The largest event time seen so far of each input of an operator with a watermark of its own.
    element_counts : list of list of int, shape (parallelism, states)
        Number of elements of each state in the subtasks' snapshots; empty if the operator has keys.
    generations : dict
        For each state that was ever deleted, how often. Rows of earlier generations do not count.
    log_start : int
        The first file of the log with an entry that is still needed; 0 if the whole log is.
    retained_from : int or None
        The oldest batch whose checkpoint can be restored once this entry is durable: what only older ones need may be
        deleted from then on. None in entries of version 1.
    operators : QueryOperators or None
        All operators of the query in the run that wrote the entry. None in entries of version 1.
    bases : list of Base
        Materialized states that count from this checkpoint on.
    base_ranges : list of BaseRange or None
        All materialized states that count before `bases` do, so that no earlier entry is needed for them; None if the
        entries before say so.
    number : int
        The log file that holds the entry; the reader sets it.
    settings : dict
        The settings of the operator that its state depends on, see :mod:`statelog.checkpoint.settings`. Empty in
        entries of version 1 and of operators without keys.
    """

    epoch: int
    batch: int
    revision: int
    query_id: str
    run_id: str
    uid: str
    parallelism: int
    segments: list[SegmentRef]
    key_schema: bytes
    states: list[StateSchema]
    batch_time_ms: int
    watermark_ms: int
    token: bytes
    max_event_ms: list[int | None] = []
    element_counts: list[list[int]] = []
    generations: dict[str, int] = {}
    log_start: int = 0
    bases: list[Base] = []
    base_ranges: list[BaseRange] | None = msgspec.field(default=None, name="cover")
    number: int = 0
    retained_from: int | None = None
    operators: QueryOperators | None = None
    settings: dict[str, int | str] = {}

    def segments_of(self, first: int, last: int) -> list[SegmentRef]:
        """The segments of some subtasks, the last one included."""
        segments = self.segments
        if len(segments) == self.parallelism and self._begins(first, first) and self._begins(last + 1, last + 1):
            return segments[first : last + 1]
        start = bisect_left(segments, first, key=_subtask)
        return segments[start : bisect_right(segments, last, lo=start, key=_subtask)]

    def _begins(self, subtask: int, place: int) -> bool:
        """Whether the segments from a subtask on are those from a place on, which is usual."""
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
        """The entry as a reader sees it, with the segments' offsets made absolute.

        Parameters
        ----------
        header : FrameHeader
            Header of its frame.
        name : str
            The object that holds the frame.
        offset : int
            Where the frame starts in it.
        number : int
            The object's number in the log.
        """
        payload = offset + header.payload_offset
        segments = [
            segment if segment.name else replace(segment, name=name, offset=payload + segment.offset)
            for segment in self.segments
        ]
        bases = [_placed_base(base, name, payload) for base in self.bases]
        return replace(self, segments=segments, bases=bases, number=number)

    @property
    def is_whole(self) -> bool:
        """Whether the state is all in the entry's own segments, so that no earlier entry is needed for it."""
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

    @property
    def payload_offset(self) -> int:
        """Where the payload starts, from the start of the frame."""
        return FRAME_HEADER_BYTES + self.index_bytes


def encode_frame(entry: Entry, payload: list[bytes]) -> list[bytes]:
    """Encode an entry and the segments it carries.

    Returns
    -------
    list of bytes
        Parts of the frame in order: the header with the index, then the segments as given.
    """
    index = _encoder.encode(entry)
    payload_bytes = sum(map(len, payload))
    checksum = xxhash.xxh3_64_intdigest(index)
    head = _HEADER.pack(FRAME_MAGIC, len(index), payload_bytes, checksum, 0)[:-8]
    return [head + xxhash.xxh3_64_digest(head)[::-1] + index, *payload]


def decode_header(data: bytes, *, name: str, offset: int) -> FrameHeader:
    """Decode the first FRAME_HEADER_BYTES of a frame that stands at `offset` of object `name`.

    Raises
    ------
    ConfigurationError
        If it is of a later version.
    CorruptionError
        If magic or checksum are wrong.
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
        raise CorruptionError(
            f"{name}: the header of the log entry at offset {offset} is damaged.",
            hint="Restore the file from a copy; a shorter log would lose checkpoints.",
        )
    return FrameHeader(index_bytes, payload_bytes, index_checksum)


def decode_index(header: FrameHeader, index: bytes, *, name: str, offset: int, number: int) -> Entry:
    """Decode an entry's index, with the segments' offsets made absolute.

    Parameters
    ----------
    header : FrameHeader
        The frame's header.
    index : bytes
        `header.index_bytes` bytes that follow the header.
    name : str
        The object that holds the frame.
    offset : int
        Where the frame starts in it.
    number : int
        The object's number in the log.
    """
    if xxhash.xxh3_64_intdigest(index) != header.index_checksum:
        raise CorruptionError(
            f"{name}: the index of the log entry at offset {offset} is damaged.",
            hint="Restore the file from a copy; a shorter log would lose checkpoints.",
        )
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
