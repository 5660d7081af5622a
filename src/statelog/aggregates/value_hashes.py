"""64-bit hashes of values, by which approximate counts tell them apart; stored sketches depend on them."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from statelog.runs.byte_slices import is_variable

Hashes = npt.NDArray[np.uint64]

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT: Final = np.uint64(31)


def value_hashes(column: pa.Array) -> Hashes:
    """Hash the values of a column without nulls.

    Equal values have equal hashes: zeros have no sign, and NaNs are one. An integer has the hash of the same number in
    every integer type, and a float that of the same number as a double. So a column may become wider.
    """
    kind = column.type
    if not len(column):
        return np.zeros(0, np.uint64)
    if is_variable(kind):
        values = column.cast(pa.binary()).to_numpy(zero_copy_only=False)
        return np.fromiter(map(xxhash.xxh3_64_intdigest, values), np.uint64, len(values))
    if pa.types.is_decimal(kind):
        words = np.frombuffer(column.buffers()[1], np.uint64, 2 * len(column), 16 * column.offset).reshape(-1, 2)
        return _mixed(_mixed(words[:, 1]) ^ words[:, 0])
    if pa.types.is_floating(kind):
        floats = column.cast(pa.float64()).to_numpy(zero_copy_only=False) + 0.0
        floats[np.isnan(floats)] = np.nan
        return _mixed(floats.view(np.uint64))
    whole = column.cast(pa.int32()) if pa.types.is_date32(kind) else column
    return _mixed(whole.cast(pa.int64()).to_numpy().view(np.uint64))


def _mixed(words: Hashes) -> Hashes:
    """The output function of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    mixed = words + _GOLDEN
    for shift, factor in _MIX:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * factor
    return mixed ^ (mixed >> _LAST_SHIFT)
