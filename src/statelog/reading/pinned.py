"""Keeps a checkpoint readable while it is being read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from statelog.checkpoint.held_pin import HeldPin, gone, is_retained
from statelog.checkpoint.history import History
from statelog.checkpoint.pins import Pin
from statelog.errors import CorruptionError, ErrorKind, StorageError
from statelog.storage import Store

READER_S: Final = 300.0
"""How long a reader's pin lasts; it is made anew while the reader reads."""


@contextmanager
def reading(store: Store, root: str, history: History, batch: int) -> Iterator[Callable[[], None]]:
    """Pin a checkpoint during the block; yields a function to call between two reads.

    Without the right to write there is no pin, and PinExpiredError is raised if the files go meanwhile.
    """
    held: HeldPin | None = None
    with suppress(StorageError):
        held = HeldPin(store, root, history, batch, owner=f"reader {os.getpid()}", lasts_s=READER_S)
    try:
        yield held.keep if held is not None else _nothing
    except (CorruptionError, StorageError) as error:
        if error.kind is ErrorKind.OBJECT_MISSING and held is None:
            pin = Pin.of(root, history, batch, owner="", made_ms=0, lasts_s=None)
            if not is_retained(store, root, pin):
                raise gone(root, batch) from error
        raise
    finally:
        if held is not None:
            held.release()


def _nothing() -> None:
    """Without a pin there is nothing to renew."""
