"""A disk that is full, for tests of those who write to it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

FULL: Final = "File too large"
"""The text of the errors."""


@contextmanager
def full_disk(limit_bytes: int = 4096) -> Iterator[None]:
    """Let no file of this process become larger: writes fail half-way, as on a full disk. 0 is no limit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
