"""Distinguishes the remains of an append after a crash of the machine from damage.

Any sectors of an append that was not synced may be on the disk, in any order; the others are zeros, or the file ends
before them. An append is one frame, and nothing is appended after a frame until it is durable. So a frame is torn
if it lacks a sector, and no frame follows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import xxhash

from statelog.errors import ConfigurationError, CorruptionError
from statelog.log.entry import (
    FRAME_HEADER_BYTES,
    FRAME_MAGIC,
    Entry,
    Frame,
    FrameReader,
    QueryCheckpoint,
    decode_header,
)
from statelog.log.references import SegmentRef, StoredRun
from statelog.runs import digests

SECTOR_BYTES: Final = 512
"""The smallest unit that a disk writes; in a file, sectors begin at its multiples."""
_CHUNK_BYTES: Final = 1 << 20


class TornFrames:
    """Judges the last frame of a log file that has `size_bytes`; `reader` has read it."""

    def __init__(self, reader: FrameReader, size_bytes: int) -> None:
        self._reader = reader
        self._size_bytes = size_bytes

    def is_torn(self, offset: int) -> bool:
        """Whether the frame at `offset`, whose header or index is damaged, is torn."""
        head = self._reader.read(offset, FRAME_HEADER_BYTES)
        try:
            header = decode_header(head, name=self._reader.name, offset=offset)
        except CorruptionError:
            end, behind = offset + FRAME_HEADER_BYTES, offset + 1
        else:
            end, behind = offset + FRAME_HEADER_BYTES + header.index_bytes, offset + header.frame_bytes
            index = self._reader.read(offset + FRAME_HEADER_BYTES, header.index_bytes)
            if xxhash.xxh3_64_intdigest(index) == header.index_checksum:
                return False  # the frame is as it was written
        return self._lacks_sector(offset, end) and not self._has_frame(behind)

    def has_torn_payload(self, start: int, end: int, entry: Entry) -> bool:
        """Whether the frame from `start` to `end`, whose entry is intact, is torn; then it is the last one."""
        if not isinstance(entry, QueryCheckpoint) or not self._lacks_sector(start, end):
            return False
        segments = (segment for section in entry.sections for segment in section.segments)
        bases = (base for section in entry.sections for base in section.bases)
        runs = (run for base in bases for level in base.levels for run in level.runs)
        parts: list[SegmentRef | StoredRun] = [*entry.place.inside(segments), *entry.place.inside(runs)]
        return any(digests.checksum(self._reader.read(one.offset, one.length)) != one.checksum for one in parts)

    def _lacks_sector(self, start: int, end: int) -> bool:
        """Whether a frame at `start` has only zeros in a sector that overlaps its bytes up to `end`."""
        at = start
        while at < end:
            # Up to the ends of sectors, or of the file: what follows in a sector belongs to the same append.
            stop = min(_sector_end(min(at + _CHUNK_BYTES, end) - 1), self._size_bytes)
            data = self._reader.read(at, stop - at)
            first = min(_sector_end(at), stop) - at
            whole = first + (len(data) - first) // SECTOR_BYTES * SECTOR_BYTES
            if not any(data[:first]) or (whole < len(data) and not any(data[whole:])):
                return True
            zeros = data.find(bytes(SECTOR_BYTES), first, whole)
            while zeros >= 0:
                sector = first + -(-(zeros - first) // SECTOR_BYTES) * SECTOR_BYTES
                if sector < whole and not any(data[sector : sector + SECTOR_BYTES]):
                    return True
                zeros = data.find(bytes(SECTOR_BYTES), sector, whole)
            at = stop
        return False

    def _has_frame(self, start: int) -> bool:
        """Whether a whole frame begins at or after `start`."""
        for offset in self._magics(start):
            try:
                if self._reader.frame_at(offset, self._size_bytes) is not None:
                    return True
            except CorruptionError:
                continue
            except ConfigurationError:
                return True  # of a later version
        return False

    def _magics(self, start: int) -> Iterator[int]:
        """Offsets at which a frame may begin."""
        mark = FRAME_MAGIC[:-1]
        while start + len(mark) <= self._size_bytes:
            data = self._reader.read(start, min(_CHUNK_BYTES, self._size_bytes - start))
            found = data.find(mark)
            while found >= 0:
                yield start + found
                found = data.find(mark, found + 1)
            start += len(data) - len(mark) + 1


def _sector_end(offset: int) -> int:
    """The end of the sector that has the byte at `offset`."""
    return (offset // SECTOR_BYTES + 1) * SECTOR_BYTES


def frame_unless_torn(reader: FrameReader, offset: int, size_bytes: int, torn: TornFrames | None) -> Frame | None:
    """Like :meth:`FrameReader.frame_at`, but also None for a damaged frame, if it may be torn and is."""
    try:
        return reader.frame_at(offset, size_bytes)
    except CorruptionError:
        if torn is None or not torn.is_torn(offset):
            raise
        return None
