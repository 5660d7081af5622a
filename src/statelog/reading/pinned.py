"""Keeps a checkpoint readable while it is being read."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import pyarrow as pa

from statelog.errors import CorruptionError, ErrorKind, PinExpiredError, StatelogError, StorageError
from statelog.history.held_pin import HeldPin, gone, is_retained
from statelog.reading.source import Source

READER_S: Final = 300.0
"""How long a reader's pin lasts; it is made anew while the reader reads."""
_ATTEMPTS: Final = 5


def open_pinned(
    make: Callable[[], tuple[pa.Schema, Iterator[pa.RecordBatch | None]]], *, is_fixed: bool
) -> pa.RecordBatchReader:
    """Make a reader of rows, which have the schema's columns among theirs and perhaps others.

    `make` finds the checkpoint and returns its schema and rows; the first step of the rows pins the checkpoint and
    yields None. Unless it `is_fixed` which one it is, another one is found if it is given up meanwhile.
    """
    for attempt in itertools.count(1):
        schema, rows = make()
        try:
            next(rows)  # the pin goes with the generator
        except PinExpiredError:
            if is_fixed or attempt == _ATTEMPTS:
                raise
            continue
        break
    return pa.RecordBatchReader.from_batches(
        schema, (batch.select(schema.names) for batch in rows if batch is not None)
    )


@contextmanager
def reading(source: Source, since: int | None = None) -> Iterator[Callable[[], None]]:
    """Pin a checkpoint of an operator during the block; yields a function to call between two reads.

    With `since` the changes of each batch from that one on are kept too.

    Without the right to write there is no pin, and PinExpiredError is raised if the files go meanwhile.
    """
    held: HeldPin | None = None
    with suppress(StorageError):
        held = HeldPin(
            source.store,
            source.lineage,
            source.checkpoint.batch,
            operators=[source.identity],
            owner=f"reader {os.getpid()}",
            lasts_s=READER_S,
            since=since,
        )
    try:
        yield held.keep if held is not None else _nothing
    except (CorruptionError, StorageError) as error:
        if held is None and is_given_up(error, source, since):
            raise gone(source.needs()) from error
        raise
    finally:
        if held is not None:
            held.release()


def is_given_up(error: StatelogError, source: Source, since: int | None = None) -> bool:
    """Whether an object is missing because its checkpoint is not retained any more."""
    return error.kind is ErrorKind.OBJECT_MISSING and not is_retained(source.store, source.needs(since))


def _nothing() -> None:
    """Without a pin there is nothing to renew."""
