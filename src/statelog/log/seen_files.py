"""Remembers the entries of log files for a reader that reads the log again and again."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from statelog.log.entry import FRAME_HEADER_BYTES, Frame
from statelog.storage.store import ObjectInfo, Store


@dataclass(frozen=True)
class _Seen:
    """The state of a file when it was read."""

    info: ObjectInfo
    head: bytes
    """Its first bytes, which distinguish it from another file with the same number."""
    frames: Sequence[Frame]


class SeenFiles:
    """The frames of log files, which never change: a file only grows, or another query begins a log in its place."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._files: dict[str, _Seen] = {}

    def knows(self, info: ObjectInfo) -> bool:
        """Whether all frames of a file are known; `info` is from a list of now."""
        seen = self._files.get(info.name)
        return seen is not None and seen.info == info and bool(seen.frames)

    def frames(self, info: ObjectInfo) -> list[Frame]:
        """The frames of a file that need not be read again, from its first one on; `info` is from a list of now."""
        seen = self._files.get(info.name)
        if seen is None or seen.info != info:
            head = b""
            kept: Sequence[Frame] = ()
            if self._store.can_append:
                head = self._store.read(info.name, length=FRAME_HEADER_BYTES)
                if seen is not None and head == seen.head and seen.info.size_bytes < info.size_bytes:
                    kept = seen.frames
            seen = self._files[info.name] = _Seen(info, head, kept)
        return list(seen.frames)

    def note(self, name: str, frames: Sequence[Frame]) -> None:
        """Remember all frames of a file, the rest of which was read just now."""
        self._files[name] = replace(self._files[name], frames=tuple(frames))

    def forget_all_but(self, names: AbstractSet[str]) -> None:
        """Forget files that are gone."""
        self._files = {name: seen for name, seen in self._files.items() if name in names}
