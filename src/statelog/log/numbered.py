"""The numbered log: files ``00000000000000000001.log`` and so on, each made only if its number is free.

The numbers decide every race. A start opens an epoch by making the next file, with its claim as the first frame. So the
writer of an older epoch finds the number taken when it starts a file, and knows that it is fenced.

Where the store can append, an entry may also be appended to the writer's newest file. Then the order of two steps
decides: a writer appends, and *then* looks for the next number before it reports success; a claimer makes its file, and
*then* reads the older ones to their ends, which it writes down in a fence, the second frame of its file. So an entry
that was reported stands before the fence, and an entry after the fence was never reported.

After a failed append it is unknown how much of the frame is on the disk. A later sync that succeeds proves nothing,
because the system discards data that it could not write. So nothing is appended after such a frame. The writer goes on
in the next file, whose fence ends the previous file before the frame. If a newer start has counted the frame, that
number is taken. And a start that counts the last frame of an older one writes it again, before its own fence counts it.

A claim must not be on the disk without the file before it. So a start first makes the name of that file durable: the
writer of the file may not have done so.

Files are removed in an order that even a writer that slept in the meantime notices: the file of a claim goes only after
the file before it. So the writer of an older epoch finds the next number taken, or its own newest file gone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NoReturn

from msgspec import structs

from statelog.clock import Clock
from statelog.errors import CorruptionError, ErrorKind, FencedError, StatelogError, StorageError
from statelog.log.entry import (
    FRAME_HEADER_BYTES,
    READ_AHEAD_BYTES,
    Claim,
    Entry,
    Fence,
    FrameReader,
    QueryCheckpoint,
    damaged_log,
    decode_header,
    encode_frame,
)
from statelog.log.seen_files import SeenFiles
from statelog.log.torn import TornFrames, frame_unless_torn
from statelog.storage.store import ObjectInfo, Store, if_present, read_ahead

LOG_FILE: Final = re.compile(r"(\d{20})\.log")
_READ_ATTEMPTS: Final = 5


@dataclass
class _LogFiles:
    """The log files that were read, newest first."""

    files: list[list[Entry]] = field(default_factory=list)
    """Claims and checkpoints of each file."""
    open_tails: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Start and end of the last frame, by base name, in files without a fence, which may still be appended to."""

    @property
    def entries(self) -> list[Entry]:
        """All entries in order, without those that an epoch wrote after a newer one claimed."""
        valid: list[Entry] = []
        newest = 0
        for entry in (entry for file in reversed(self.files) for entry in file):
            if entry.epoch >= newest:
                newest = entry.epoch
                valid.append(entry)
        return valid


def base_name(number: int) -> str:
    """Name of a log file within the log's folder."""
    return f"{number:020}.log"


class NumberedLog:
    """A query's checkpoints, as entries in numbered files of the folder `prefix`, which one writer extends.

    A writer calls :meth:`claim`, then :meth:`append` for every checkpoint, then :meth:`close`; a reader only calls
    :meth:`read`. One thread at a time calls a log.

    With `appends`, entries are appended to the newest file up to `max_file_bytes`; the store must support it. Otherwise
    each entry is a file of its own. The file of a claim stays for `min_age_s` even if none of its entries is needed, so
    that older writers find it. A log that `remembers` reads only what it has not read before. In an object store,
    where entries are objects, `reads_at_once` are fetched at a time, and all are remembered until the log is claimed: a
    start reads the log before it claims it, and so waits for few round trips.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        clock: Clock,
        *,
        appends: bool,
        max_file_bytes: int = 32 << 20,
        min_age_s: float = 60.0,
        remembers: bool = False,
        reads_at_once: int = 64,
    ) -> None:
        self._store = store
        self._reads_at_once = reads_at_once
        self._remembers = remembers
        self._seen = SeenFiles(store) if remembers or not store.can_append else None
        self._prefix = prefix
        self._clock = clock
        self._appends = appends
        self._max_file_bytes = max_file_bytes
        self._min_age_s = min_age_s
        self.epoch = 0
        """The epoch that the writer has claimed; 0 before."""
        self.number = 0
        """Number of the writer's newest file."""
        self.head = b""
        """The first bytes of the writer's newest file, which distinguish it from any other."""
        self.files_made = 0
        """Number of files that the writer has made."""
        self._end = 0
        # Whether the write of an entry was begun and not seen to succeed, in the newest file or in the next one.
        self._is_in_doubt = False
        self._is_used = False
        self._lost = "it has not claimed the log"
        self._tried: Claim | None = None
        self._looked_s = (0.0, 0.0)
        # The log files that this start knows of: a dictionary is in order, and quick to remove from.
        self._existing: dict[int, None] = {}
        self._claims_seen_s: dict[int, float] = {}

    @property
    def file_name(self) -> str:
        """Object name of the writer's newest file."""
        return self.name_of(self.number)

    def name_of(self, number: int) -> str:
        """Object name of a file of the log."""
        return f"{self._prefix}/{base_name(number)}"

    def read(self) -> list[Entry]:
        """All valid entries of all epochs, in order, from the newest checkpoint's `log_start` on; empty without a log.

        Entries that an older epoch wrote after a newer one claimed are left out. So is a torn tail (an incomplete last
        frame, see ``torn``) of a file: it has committed nothing. Raises CorruptionError, naming file and offset, if a
        complete entry is damaged or a file is missing.
        """
        return self._read().entries

    def claim(self, make: Callable[[int], Claim]) -> list[Entry]:
        """Open the next epoch and return all valid entries before it.

        `make` makes the claim of an epoch from its number; it is called again if another start takes the number. Raises
        CorruptionError as :meth:`read`, FencedError if a still newer start has claimed the log meanwhile, or since an
        earlier call that failed, and StorageError if the store fails; the claim may then exist or not, and claiming
        again is safe with this log object: another one does not know what was tried.
        """
        tried, self._lost, self._is_in_doubt = self._tried, "its claim failed", False
        while True:
            looked_s = self._now_s()
            files = self._files()
            newest = max(files, default=0)
            head = self._first_entry(newest, files[newest]) if newest else None
            if newest and head is None:
                continue
            epoch = 0 if head is None else head.epoch
            # Its own epoch may be another run's, unless the claim is known to have been made.
            if tried is not None and (epoch > tried.epoch or (epoch == tried.epoch > self.epoch and head != tried)):
                self._lose("another run has claimed the log since this run first tried to")
            claim = make(epoch + 1)
            self._tried = structs.replace(claim, number=newest + 1)
            frame = b"".join(encode_frame(claim, []))
            if self._store.put_if_absent(self.name_of(newest + 1), frame):
                break
        self.epoch, self.number = claim.epoch, newest + 1
        self._end, self.head = len(frame), frame[:FRAME_HEADER_BYTES]
        self.files_made += 1
        contents = self._read(claimed=self.number)
        if contents.open_tails:
            # The last entries may only be in the page cache, if their writer was killed or its sync failed.
            for name, (start, end) in contents.open_tails.items():
                self._store.sync(f"{self._prefix}/{name}", start=start, end=end)
            ends = {name: end for name, (_, end) in contents.open_tails.items()}
            fence: list[bytes | memoryview] = [*encode_frame(Fence(self.epoch, ends), [])]
            self._store.append(self.name_of(self.number), fence, at=self._end)
            self._end += sum(map(len, fence))
        # A newer epoch that claims from here on finds the fence, so both agree on the entries before.
        self._require_own_file(self._end)
        self._note_claims(contents)
        if not self._remembers:
            self._seen = None
        self._looked_s, self._lost = looked_s, ""
        self._is_used = claim.has_news
        return contents.entries

    def append(self, entry: QueryCheckpoint, payload: list[bytes]) -> QueryCheckpoint:
        """Make an entry durable, and return it with absolute offsets of its segments.

        Raises FencedError if a newer epoch has claimed the log: the entry has no effect, or the newer epoch has
        counted it, and the caller must stop. Raises StorageError if the store fails: the caller must not count anything
        as durable, and appending the same entry again is safe.
        """
        if self._lost:
            self._lose(self._lost)
        looked_s = self._now_s()
        parts = encode_frame(entry, payload)
        frame_bytes = sum(map(len, parts))
        try:
            if self._appends and not self._is_in_doubt and self._end + frame_bytes <= self._max_file_bytes:
                self._append(parts, frame_bytes)
            else:
                self._start_file(parts)
        except StorageError as error:
            if error.kind is not ErrorKind.OBJECT_MISSING:
                raise
            self._lose("its file is gone")
        self._look_again(looked_s)
        header = decode_header(parts[0][:FRAME_HEADER_BYTES], name=self.file_name, offset=0)
        return entry.placed(header, name=self.file_name, offset=self._end - frame_bytes, number=self.number)

    def removable(self, start: int) -> list[str]:
        """Objects of the files before `start` that no older writer needs to find any more, oldest first."""
        now_s = self._clock.monotonic_s()
        before = itertools.takewhile(lambda number: number < min(start, self.number), self._existing)
        return [self.name_of(number) for number in before if self._is_removable(number, now_s)]

    def _is_removable(self, number: int, now_s: float) -> bool:
        """Whether no older writer needs to find a file. Files that may hold a claim go one by one, oldest first."""
        seen_s = self._claims_seen_s.get(number)
        if seen_s is None:
            return True
        return now_s - seen_s >= self._min_age_s and number - 1 not in self._existing and self._is_gone(number - 1)

    def _is_gone(self, number: int) -> bool:
        try:
            return self._size(number) is None
        except StorageError:
            return False

    def forget(self, names: Iterable[str]) -> None:
        """Note that files are removed: :meth:`removable` does not return them again."""
        for name in names:
            del self._existing[int(name[-len(base_name(0)) : -len(".log")])]

    def close(self) -> None:
        """Release the writer's files. If this claim is all that the log holds, remove it."""
        # Later numbers are never removed here: an older writer must find them taken.
        if self.number == 1 and not self._is_used and not self._lost and list(self._files()) == [1]:
            self._store.delete([self.name_of(1)])
        self._lost = "it was closed"
        self._store.close()

    # ---- Writing ----

    def _append(self, parts: list[bytes], frame_bytes: int) -> None:
        self._is_used = self._is_in_doubt = True
        self._store.append(self.name_of(self.number), [*parts], at=self._end)
        self._require_own_file(self._end + frame_bytes)
        self._end, self._is_in_doubt = self._end + frame_bytes, False

    def _start_file(self, parts: list[bytes]) -> None:
        """Write an entry as the next file.

        If the log appends to files, a fence comes first: it notes the certain end of the file before.
        """
        was_in_doubt, self._is_used, self._is_in_doubt = self._is_in_doubt, True, True
        while True:
            name = self.name_of(self.number + 1)
            ends = {base_name(self.number): self._end}
            head = encode_frame(Fence(self.epoch, ends), []) if self._appends else []
            data = b"".join([*head, *parts])
            if self._store.put_if_absent(name, data):
                break
            found = self._store.read(name)
            if found == data:
                break  # this very entry was written before, and the answer was lost
            if not (was_in_doubt and self._is_own(name, len(found))):
                self._lose(f"entry {self.number + 1} is another run's")
            # An earlier entry of ours whose answer was lost; the new one comes after it.
            self._go_on_in_next(found)
        self._go_on_in_next(data)
        if was_in_doubt:
            # Was the entry in doubt in this very file, and has a newer start counted it and then removed the file?
            self._require_newest()
        self.files_made += 1
        self._is_in_doubt = False

    def _go_on_in_next(self, data: bytes) -> None:
        """Make the next file the newest one, after a look at the file before.

        A newer start may have removed its claim, which had the next number. Then it has removed the file before first.
        """
        if self._store.read(self.name_of(self.number), length=FRAME_HEADER_BYTES) != self.head:
            self._lose("its file was replaced")
        self.number, self._end, self.head = self.number + 1, len(data), data[:FRAME_HEADER_BYTES]
        self._existing[self.number] = None

    def _is_own(self, name: str, size_bytes: int) -> bool:
        frame = FrameReader(self._store, name).frame_at(0, size_bytes)
        return frame is not None and frame.entry.epoch == self.epoch and not isinstance(frame.entry, Claim)

    def _require_own_file(self, end: int) -> None:
        """Check that no newer claim exists, and that the own file does: it would be deleted before any newer file."""
        if self._size(self.number + 1) is not None:
            self._lose(f"file {self.number + 1} is another run's")
        if self._size(self.number) != end:
            self._lose("its file was deleted or replaced")

    def _look_again(self, looked_s: tuple[float, float]) -> None:
        """List the whole log after a long pause: the claim that fences this writer may be gone already."""
        now_s = self._now_s()
        # A suspended machine stops one clock, a corrected time moves the other.
        pause_s = max(now - then for now, then in zip(now_s, self._looked_s, strict=True))
        if pause_s > self._min_age_s / 2:
            self._require_newest()
        self._looked_s = looked_s

    def require_ownership(self) -> None:
        """Raise FencedError if a newer epoch has claimed the log; StorageError if the store fails."""
        if self._lost:
            self._lose(self._lost)
        self._require_newest()

    def _require_newest(self) -> None:
        files = self._files()
        newest = max(files, default=0)
        is_doubted = self._is_in_doubt and newest == self.number + 1
        if newest != self.number and not (is_doubted and self._is_own(self.name_of(newest), files[newest].size_bytes)):
            self._lose("another run's files are newer than its own")

    # ---- Reading ----

    def _read(self, claimed: int | None = None) -> _LogFiles:
        """Read the log, or only the files before the number of a claim that was made just now."""
        for _ in range(_READ_ATTEMPTS):
            files = self._files()
            if claimed is not None and max(files, default=0) > claimed:
                # The number was free because newer starts had removed the files that they do not need any more.
                self._lose("another run's files are newer than its claim")
            if self._seen is not None:
                self._seen.forget_all_but({info.name for info in files.values()})
            try:
                return self._read_files({number: files[number] for number in files if number != claimed})
            except StorageError as error:
                # The oldest files are removed while others read; then a newer entry says that they are not needed.
                if error.kind is not ErrorKind.OBJECT_MISSING:
                    raise
                missing = error
        raise missing

    def _read_files(self, files: dict[int, ObjectInfo]) -> _LogFiles:
        """Read the files that are needed, newest first.

        A fence counts if no newer fence cuts it off. Of several fences for a file the oldest counts, because its writer
        may have acted on it.
        """
        contents = _LogFiles()
        fenced_ends: dict[str, int] = {}
        epoch, start = 0, 0
        heads: Iterator[bytes] = iter(())
        newest = max(files, default=0)
        for number in range(newest, 0, -1):
            if number < start or (not start and number < min(files)):
                break
            if number not in files:
                raise CorruptionError(
                    f"{self._store}: the log {self._prefix} has files up to {newest}, but lacks {number}.",
                    hint="Restore the missing file from a copy; without it the log would lose checkpoints.",
                )
            name = base_name(number)
            # Only the last file of an epoch can have been written to after the next one was made.
            found, tail = self._read_file(number, files[number], fenced_ends.get(name), epoch, next(heads, b""))
            if found[0].epoch != epoch and name not in fenced_ends and self._store.can_append:
                contents.open_tails[name] = tail
            epoch = found[0].epoch
            for entry in found:
                if isinstance(entry, Fence):
                    fenced_ends.update(entry.ends)
            contents.files.append([entry for entry in found if not isinstance(entry, Fence)])
            checkpoints = [entry for entry in contents.files[-1] if isinstance(entry, QueryCheckpoint)]
            if checkpoints and not start:
                start = checkpoints[-1].log_start or min(files)
                heads = self._heads_of([files[other] for other in range(number - 1, start - 1, -1) if other in files])
        return contents

    def _heads_of(self, files: list[ObjectInfo]) -> Iterator[bytes]:
        """The first bytes of files, in their order, while others are fetched ahead; empty for a known file."""
        if self._store.can_append:
            return iter(())  # few files, of many entries
        unknown = [info.name for info in files if not (self._seen and self._seen.knows(info))]
        head_of = partial(self._store.read, length=READ_AHEAD_BYTES)
        heads, names = read_ahead(unknown, head_of, self._reads_at_once), set(unknown)
        return (next(heads) if info.name in names else b"" for info in files)

    def _read_file(
        self, number: int, info: ObjectInfo, fenced_end: int | None, next_epoch: int, head: bytes
    ) -> tuple[list[Entry], tuple[int, int]]:
        """Read all entries up to the file's fenced end or, without a fence, up to its torn tail or its end.

        `head` is the known part of its first bytes. Returns the entries, and the start and end of the last one.
        """
        name = self.name_of(number)
        size = self._store.size_bytes(name) if self._store.can_append else info.size_bytes
        limit = size if fenced_end is None else min(size, fenced_end)
        reader = FrameReader(self._store, name, number, head=head)
        seen = [] if self._seen is None else self._seen.frames(info)
        frames = [frame for frame in seen if frame.end <= limit]
        known = len(frames)
        if not frames:
            first = reader.frame_at(0, limit)
            if first is None:
                raise damaged_log(name, f"its {size} bytes do not begin with a complete log entry")
            frames.append(first)
        may_be_torn = self._store.can_append and fenced_end is None and frames[0].entry.epoch != next_epoch
        torn = TornFrames(reader, size)
        while frame := frame_unless_torn(reader, frames[-1].end, limit, torn if may_be_torn else None):
            frames.append(frame)
        if may_be_torn and len(frames) > max(known, 1):
            # Was the last one acknowledged? Its header and index may be there without all of its payload.
            *before, last = frames
            if torn.has_torn_payload(before[-1].end, last.end, last.entry):
                frames = before
        if self._seen is not None:
            self._seen.note(name, frames)
        end = frames[-1].end
        if fenced_end is not None and end != fenced_end:
            raise damaged_log(name, f"the log has valid entries up to offset {end}, but had them up to {fenced_end}")
        if fenced_end is None and end != size and not may_be_torn:
            raise damaged_log(name, f"its {size} bytes are not a whole number of log entries")
        return [frame.entry for frame in frames], (frames[-2].end if len(frames) > 1 else 0, end)

    def _first_entry(self, number: int, info: ObjectInfo) -> Entry | None:
        """The first entry of a file; `info` is from a list of now. None if it was removed meanwhile."""
        try:
            seen = [] if self._seen is None else self._seen.frames(info)
            frame = seen[0] if seen else FrameReader(self._store, info.name, number).frame_at(0, info.size_bytes)
            if self._store.can_append:
                # Its writer may not have made its name durable yet: after a crash the claim must not stand alone.
                self._store.sync(info.name, start=0, end=0)
        except StorageError as error:
            if error.kind is ErrorKind.OBJECT_MISSING:
                return None
            raise
        if frame is None:
            raise CorruptionError(
                f"{info.name}: the file does not begin with a complete log entry.", hint="Restore the file from a copy."
            )
        return frame.entry

    def _files(self) -> dict[int, ObjectInfo]:
        found = {
            int(match[1]): info
            for info in self._store.list(f"{self._prefix}/")
            if (match := LOG_FILE.fullmatch(info.name[len(self._prefix) + 1 :]))
        }
        return dict(sorted(found.items()))

    # ---- Parts ----

    def _note_claims(self, contents: _LogFiles) -> None:
        """Note since when this start has known the files that older writers may look for: those that may hold a claim.

        A file that was not read because the claim did not need it may hold one.
        """
        now_s = self._clock.monotonic_s()
        read = dict(zip(range(self.number - 1, 0, -1), contents.files, strict=False))
        self._existing = {number: None for number in self._files() if number <= self.number}
        self._claims_seen_s = {
            number: now_s for number in self._existing if number not in read or isinstance(read[number][0], Claim)
        }

    def _now_s(self) -> tuple[float, float]:
        return self._clock.monotonic_s(), self._clock.now_s()

    def _size(self, number: int) -> int | None:
        return if_present(lambda: self._store.size_bytes(self.name_of(number)))

    def _lose(self, reason: str) -> NoReturn:
        self._lost = reason
        raise FencedError(
            f"{self._store}: epoch {self.epoch} does not own the log {self._prefix}: {reason}.{self._owner()}",
            hint="Stop this driver: only one run of a query can write to a location, and the newest claim wins.",
        )

    def _owner(self) -> str:
        """Who owns the log by its newest file, as a sentence; empty if that is not a newer epoch, or cannot be read."""
        with suppress(StatelogError):
            files = self._files()
            newest = max(files, default=self.number)
            reader, end = FrameReader(self._store, self.name_of(newest), newest), 0
            while newest in files and (frame := reader.frame_at(end, files[newest].size_bytes)):
                entry, end = frame.entry, frame.end
                if not isinstance(entry, Fence):
                    is_newer = entry.epoch > self.epoch
                    return f" Run {entry.run_id} of query {entry.query_id} owns it." if is_newer else ""
        return ""
