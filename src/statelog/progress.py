"""The progress of a long call, for its observers: the bytes that are done, of those that are known.

A call does not know whether it is watched or by whom, so no function has an argument for a watcher. The watcher belongs
to the context of the caller (:mod:`contextvars`); a call that runs elsewhere, such as in a Spark task, has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, TypeVar

_Item = TypeVar("_Item")


@dataclass
class Progress:
    """How far the watched calls have got; other threads may read it."""

    done_bytes: int = 0
    known_bytes: int = 0
    """Of the work that has begun; it grows while more begins."""


_watched: Final[ContextVar[Progress | None]] = ContextVar("watched", default=None)


@contextmanager
def watching() -> Iterator[Progress]:
    """Watch the calls in the block, and the iterators that are used in it."""
    progress = Progress()
    token = _watched.set(progress)
    try:
        yield progress
    finally:
        _watched.reset(token)


def tracked(items: Sequence[_Item], sizes: Callable[[Sequence[_Item]], Sequence[int]]) -> Iterator[_Item]:
    """The items, each of which is done when the next one is requested; `sizes` returns their bytes, for a watcher."""
    progress = _watched.get()
    if progress is None:
        yield from items
        return
    found = sizes(items)
    progress.known_bytes += sum(found)
    for item, size_bytes in zip(items, found, strict=True):
        yield item
        progress.done_bytes += size_bytes
