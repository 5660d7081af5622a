"""Requests that an object store would charge: those of statelog's store, and those behind Spark's file operations."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from statelog.storage import LocalStore, ObjectInfo
from statelog.storage.store import StoreWrapper

PUT: Final = "PUT"
LIST: Final = "LIST"
GET: Final = "GET"

_REQUESTS: Final = {"put": PUT, "put_if_absent": PUT, "list": LIST, "read": GET, "size_bytes": GET}
"""Of a store's calls; deletions cost nothing."""
_LISTED: Final = 1_000
"""Names that one request lists."""
_POLL_MS: Final = 200
_T = TypeVar("_T")

Seen = tuple[float, str, str]
"""A request: when, of which kind, and for which of the watched folders."""


class CountingStore(StoreWrapper):
    """A directory that is used as a bucket is: nothing can be appended. Notes each request in a file of its process."""

    def __init__(self, directory: str, notes: str) -> None:
        super().__init__(LocalStore(directory))
        self._notes = notes

    @property
    def can_append(self) -> bool:
        return False

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        found = super().list(prefix)
        for _ in range(_LISTED, len(found), _LISTED):
            self._note("list")
        return found

    def _call(self, operation: str, name: str, effect: Callable[[], _T]) -> _T:
        self._note(operation)
        return effect()

    def _note(self, operation: str) -> None:
        if operation in _REQUESTS:
            with open(f"{self._notes}/{os.getpid()}", "a") as notes:
                notes.write(f"{time.time()} {_REQUESTS[operation]}\n")


def noted(notes: Path) -> list[Seen]:
    """The requests of all processes."""
    lines = [line.split() for file in notes.iterdir() for line in file.read_text().splitlines()]
    return [(float(at_s), kind, "") for at_s, kind in lines]


@contextmanager
def watched(folder: Path) -> Iterator[list[Seen]]:
    """Watch what happens to the files below a folder meanwhile; Linux only.

    A file that appears under its final name is one PUT, a file that is read one GET, a folder that is read one LIST.
    Hidden files are left out: they are unfinished, or checksums that Hadoop adds on a local disk only.
    """
    # Not at the top: benchmarks without it run elsewhere, too.
    from inotify_simple import INotify, flags

    seen: list[Seen] = []
    is_over = threading.Event()
    with INotify() as inotify, ThreadPoolExecutor(1) as pool:
        places: dict[int, Path] = {}
        # Of the watcher itself: the folders that it has read, and the files that it has found there.
        listed: set[int] = set()
        found: set[Path] = set()

        def add(kind: str, place: Path) -> None:
            seen.append((time.time(), kind, "".join(place.relative_to(folder).parts[:1])))

        def watch(place: Path) -> None:
            number = inotify.add_watch(place, flags.CREATE | flags.MOVED_TO | flags.CLOSE_NOWRITE)
            places[number] = place
            listed.add(number)
            for inner in place.iterdir():
                if inner.is_dir():
                    watch(inner)
                elif not inner.name.startswith("."):
                    found.add(inner)
                    add(PUT, inner)

        def note(number: int, mask: int, name: str) -> None:
            place, is_read = places[number] / name, bool(mask & flags.CLOSE_NOWRITE)
            if name.startswith("."):
                return
            if not name and is_read and number in listed:
                listed.remove(number)
            elif not name and is_read:
                add(LIST, place)
            elif mask & flags.ISDIR and not is_read and place not in places.values():
                watch(place)
            elif not mask & flags.ISDIR and is_read:
                add(GET, place)
            elif not mask & flags.ISDIR and place in found:
                found.remove(place)
            elif not mask & flags.ISDIR:
                add(PUT, place)

        def look() -> None:
            while not is_over.is_set():
                for event in inotify.read(timeout=_POLL_MS):
                    note(event.wd, event.mask, event.name)

        watch(folder)
        seen.clear()
        looking = pool.submit(look)
        try:
            yield seen
        finally:
            is_over.set()
            looking.result()


def count(seen: Iterable[Seen], from_s: float, to_s: float) -> dict[str, Counter[str]]:
    """The requests of a time, by folder and kind."""
    counts: dict[str, Counter[str]] = {}
    for at_s, kind, folder in seen:
        if from_s <= at_s < to_s:
            counts.setdefault(folder, Counter())[kind] += 1
    return counts
