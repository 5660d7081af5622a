"""Sketches as stored bytes: a version byte, a form byte, and the sketch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.aggregates.groups import Groups
from statelog.aggregates.list_kernels import ListTooLarge
from statelog.errors import CorruptionError, ErrorKind
from statelog.operators.keyed.indexing import Int64s
from statelog.runs.byte_slices import MAX_COLUMN_BYTES

VERSION: Final = 1
VALUES: Final = 0
"""Form of a few values, one after the other."""
FULL: Final = 1
"""Form of many values."""
_HEADER_BYTES: Final = 2


@dataclass(frozen=True)
class StoredSketches:
    """Sketches by group."""

    owners: Int64s
    """The group of each sketch, ascending."""
    bodies: pa.Array
    """Their bytes behind the header."""
    is_full: npt.NDArray[np.bool_]
    """Whether a sketch has the form of many values."""

    def values(self, dtype: npt.DTypeLike) -> tuple[npt.NDArray[Any], Int64s]:
        """All values of the sketches of a few, and the group of each."""
        bodies = self.bodies.filter(pa.array(~self.is_full))
        values = flat(bodies, dtype)
        counts = pc.binary_length(bodies).to_numpy() // values.dtype.itemsize
        return values, np.repeat(self.owners[~self.is_full], counts)

    @property
    def full_owners(self) -> Int64s:
        """The group of each sketch of many values."""
        return self.owners[self.is_full]

    @property
    def full_bodies(self) -> pa.Array:
        """The bytes of the sketches of many values."""
        return self.bodies.filter(pa.array(self.is_full))


def read_sketches(column: pa.Array, groups: Groups, subject: str) -> StoredSketches:
    """Sketches, those of each group in the order of their rows; nulls are left out.

    Raises CorruptionError for bytes of another version.
    """
    owners, order = groups.index, None
    if len(owners) > 1 and (np.diff(owners) < 0).any():
        order = groups.order
    if column.null_count:
        rows = np.arange(len(column)) if order is None else order
        order = rows[column.is_valid().to_numpy(zero_copy_only=False)[rows]]
    if order is not None:
        owners, column = owners[order], column.take(pa.array(order))
    starts, data = _buffers(column)
    if (np.diff(starts) < _HEADER_BYTES).any():
        raise _unknown(subject, "no version")
    versions, forms = data[starts[:-1]], data[starts[:-1] + 1]
    other = (versions != VERSION) | (forms > FULL)
    if other.any():
        first = int(np.flatnonzero(other)[0])
        raise _unknown(subject, f"version {versions[first]}, form {forms[first]}")
    return StoredSketches(owners, _without_header(starts, data), forms == FULL)


def stored_values(values: npt.NDArray[Any], valid: npt.NDArray[np.bool_]) -> pa.Array:
    """A sketch of one value each; null where the mask is not set."""
    width = values.dtype.itemsize
    rows = np.empty((len(values), _HEADER_BYTES + width), np.uint8)
    rows[:, 0], rows[:, 1] = VERSION, VALUES
    rows[:, _HEADER_BYTES:] = values.view(np.uint8).reshape(len(values), width)
    made = pa.FixedSizeBinaryArray.from_buffers(pa.binary(rows.shape[1]), len(values), [None, pa.py_buffer(rows)])
    made = made.cast(pa.binary())
    return made if valid.all() else pc.if_else(pa.array(valid), made, pa.scalar(None, pa.binary()))


def store_sketches(
    count: int,
    values: npt.NDArray[Any],
    owners: Int64s,
    full_owners: Int64s,
    full_bodies: pa.Array,
) -> pa.Array:
    """A column of `count` sketches: of the values of each group, in the order given, or of many values; else null.

    `owners` ascend, and no group is in both.
    """
    counts = np.bincount(owners, minlength=count)
    few = np.flatnonzero(counts)
    sizes = values.dtype.itemsize * counts
    sizes[full_owners] = pc.binary_length(full_bodies).to_numpy()
    if int(sizes.sum()) + _HEADER_BYTES * count > MAX_COLUMN_BYTES:
        raise ListTooLarge(int(sizes.argmax()), int(sizes.sum()), MAX_COLUMN_BYTES)
    bodies = _column(np.concatenate(([0], np.cumsum(sizes[few]))), values)
    column = pa.concat_arrays([_with_header(bodies, VALUES), _with_header(full_bodies, FULL)])
    places, is_missing = np.zeros(count, np.int64), np.ones(count, bool)
    for held, start in ((few, 0), (full_owners, len(few))):
        places[held] = start + np.arange(len(held))
        is_missing[held] = False
    if len(few) == count:
        return column
    return column.take(pa.array(places, mask=is_missing))


def flat(bodies: pa.Array, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The bytes of all sketches, one after the other, as numbers."""
    starts, data = _buffers(bodies)
    numbers: npt.NDArray[Any] = data[int(starts[0]) : int(starts[-1])].view(dtype)
    return numbers


def binaries(values: Sequence[bytes]) -> pa.Array:
    """Bytes as a column."""
    return pa.array(values, pa.binary())


def _buffers(column: pa.Array) -> tuple[Int64s, npt.NDArray[np.uint8]]:
    """The n + 1 bounds of n binaries, and the bytes that they count in."""
    if not len(column):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    _, ends, data = column.buffers()
    starts = np.frombuffer(ends, np.int32, len(column) + 1, 4 * column.offset).astype(np.int64)
    return starts, np.frombuffer(data or b"", np.uint8)


def _without_header(starts: Int64s, data: npt.NDArray[np.uint8]) -> pa.Array:
    kept = np.ones(int(starts[-1] - starts[0]), bool)
    for place in range(_HEADER_BYTES):
        kept[starts[:-1] - starts[0] + place] = False
    offsets = starts - starts[0] - _HEADER_BYTES * np.arange(len(starts))
    return _column(offsets, data[starts[0] : starts[-1]][kept])


def _column(offsets: Int64s, data: npt.NDArray[Any]) -> pa.Array:
    """Binaries, by their n + 1 bounds."""
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def _with_header(bodies: pa.Array, form: int) -> pa.Array:
    header = pa.scalar(bytes([VERSION, form]), pa.binary())
    return pc.binary_join_element_wise(header, bodies, pa.scalar(b"", pa.binary()))


def _unknown(subject: str, found: str) -> CorruptionError:
    return CorruptionError(
        f"The stored state of {subject} begins with {found}; this statelog reads version {VERSION}.",
        kind=ErrorKind.FORMAT,
        hint="If a newer statelog wrote it, use that version or a later one.",
    )
