"""The kernel of approximate distinct counts: HyperLogLog.

The values of a group are hashed. The first bits of a hash choose one of 2^lg_k registers, and a register holds the
greatest rank of its hashes: the place of the lowest bit that is set (Flajolet, Fusy, Gandouet, Meunier: HyperLogLog,
2007). A group of few values has no registers: it stores the first 26 bits and the rank of each hash, as numbers of 4
bytes, which count few values nearly exactly. Its form depends on the number of these alone. So the stored bytes depend
on the set of values, and neither on their order nor on how they were split.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from statelog.aggregates.groups import Groups
from statelog.aggregates.kernels import Columns, Kernel
from statelog.aggregates.sketches import StoredSketches, flat, read_sketches, store_sketches, stored_values
from statelog.errors import CorruptionError, ErrorKind
from statelog.operators.keyed.indexing import Int64s
from statelog.runs.byte_slices import is_variable
from statelog.runs.key_groups import Hashes

DEFAULT_RSD: Final = 0.05
"""The relative standard deviation of counts, unless another is requested."""
_SUBJECT: Final = "ApproxCountDistinct"
_INDEX_BITS: Final = 26
_REST_BITS: Final = 64 - _INDEX_BITS
_RANK_BITS: Final = 6
_RANK: Final = (1 << _RANK_BITS) - 1
_ENTRY: Final = np.dtype("<u4")
"""The first bits of a hash, and its rank."""
_ENTRY_BITS: Final = 8 * _ENTRY.itemsize
_ERROR: Final = 1.04
"""The relative standard deviation of a count is this, divided by the square root of the number of registers."""
_BIAS: Final = 0.5 / math.log(2)
_SLICE: Final = 1 << 22
"""Registers that are summed at once."""
_WEIGHTS: Final = 0.5 ** np.arange(_RANK + 1)
_WEIGHTS[0] = 0.0  # an empty register counts otherwise

_Registers = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float64]


def lg_k_of(rsd: float) -> int:
    """The least power of two of registers whose counts have a relative standard deviation of `rsd` at most."""
    return math.ceil(2 * math.log2(_ERROR / rsd))


class HyperLogLogKernel(Kernel):
    """Approximate number of different values, counted with 2^lg_k registers."""

    def __init__(self, lg_k: int) -> None:
        self._lg_k = lg_k
        self._size = 1 << lg_k
        self._most_few = self._size // _ENTRY.itemsize

    def lift(self, column: pa.Array, by: pa.Array) -> Columns:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        entries = np.zeros(len(column), _ENTRY)
        entries[valid] = _entries(value_hashes(column.drop_null()))
        return [stored_values(entries, valid)]

    def reduce(self, held: Columns, groups: Groups) -> Columns:
        sketches = read_sketches(held[0], groups, _SUBJECT)
        entries, owners = sketches.values(_ENTRY)
        is_full = np.zeros(groups.count, bool)
        is_full[sketches.full_owners] = True
        of_stored = is_full[owners]
        stored_entries, stored_owners = entries[of_stored], owners[of_stored]
        entries, owners = _distinct(entries[~of_stored], owners[~of_stored])
        is_full |= np.bincount(owners, minlength=groups.count) > self._most_few
        full, of_full = np.flatnonzero(is_full), is_full[owners]
        registers = self._registers(
            sketches,
            full,
            np.concatenate([stored_entries, entries[of_full]]),
            np.concatenate([stored_owners, owners[of_full]]),
        )
        return [store_sketches(groups.count, entries[~of_full], owners[~of_full], full, _bodies(registers))]

    def result(self, held: Columns) -> pa.Array:
        count = len(held[0])
        sketches = read_sketches(held[0], Groups(np.arange(count), count), _SUBJECT)
        _, owners = sketches.values(_ENTRY)
        few = 1 << _INDEX_BITS
        counts = -few * np.log1p(-np.bincount(owners, minlength=count) / few)  # linear counting
        registers = self._read(sketches)
        rows = max(1, _SLICE // self._size)
        for start in range(0, len(registers), rows):
            counts[sketches.full_owners[start : start + rows]] = _counts(registers[start : start + rows])
        return pa.array(np.rint(counts).astype(np.int64))

    def _read(self, sketches: StoredSketches) -> _Registers:
        bodies = sketches.full_bodies
        other = pc.binary_length(bodies).to_numpy() != self._size
        if other.any():
            raise CorruptionError(
                f"The stored state of {_SUBJECT} has {len(bodies[int(other.argmax())].as_py())} registers, but rsd asks"
                f" for {self._size}.",
                kind=ErrorKind.FORMAT,
                hint="Leave rsd as it was, or give the aggregate another name.",
            )
        registers: _Registers = flat(bodies, np.uint8).reshape(-1, self._size)
        return registers

    def _registers(
        self, sketches: StoredSketches, full: Int64s, entries: npt.NDArray[Any], owners: Int64s
    ) -> _Registers:
        """The registers of the groups `full`, a row each."""
        registers = np.zeros((len(full), self._size), np.uint8)
        stored = self._read(sketches)
        if len(stored):
            firsts = np.flatnonzero(np.diff(sketches.full_owners, prepend=-1))
            merged = stored if len(firsts) == len(stored) else np.maximum.reduceat(stored, firsts, axis=0)
            registers[np.searchsorted(full, sketches.full_owners[firsts])] = merged
        places = np.searchsorted(full, owners) << self._lg_k | entries >> (_RANK_BITS + _INDEX_BITS - self._lg_k)
        np.maximum.at(registers.reshape(-1), places, (entries & _RANK).astype(np.uint8))
        return registers


def _entries(hashes: Hashes) -> npt.NDArray[Any]:
    rest = hashes | np.uint64(1 << _REST_BITS)
    lowest = rest & (~rest + np.uint64(1))
    ranks = np.frexp(lowest.astype(np.float64))[1]  # exact: it is a power of two
    return (hashes >> np.uint64(_REST_BITS) << np.uint64(_RANK_BITS) | ranks.astype(np.uint64)).astype(_ENTRY)


def _counts(registers: _Registers) -> _Floats:
    """The counts by rows of registers.

    Ertl: New cardinality estimation algorithms for HyperLogLog sketches, 2017, algorithm 6; the term for registers of
    the highest rank is left out, as hardly any hash has it.
    """
    size = registers.shape[1]
    empty = 1 - np.count_nonzero(registers, axis=1) / size
    counts: _Floats = _BIAS * size**2 / (size * _sigma(empty) + _WEIGHTS[registers].sum(axis=1))
    return counts


def _sigma(shares: _Floats) -> _Floats:
    """The sum of x and of x^(2^n) 2^(n-1) for all n from 1, for each share x of empty registers, less than 1."""
    powers, sums, weight = shares, shares, 1.0
    while True:
        powers = powers * powers
        more = sums + powers * weight
        if (more == sums).all():
            return sums
        sums, weight = more, 2 * weight


def _distinct(entries: npt.NDArray[Any], owners: Int64s) -> tuple[npt.NDArray[Any], Int64s]:
    """The entries of each group, ascending; of those with the same bits the one of the greatest rank."""
    if len(owners) < 2 or (np.diff(owners) > 0).all():
        return entries, owners
    found = np.sort(owners << _ENTRY_BITS | entries)
    found = found[np.append(np.diff(found >> _RANK_BITS) > 0, True)]
    return found.astype(_ENTRY), found >> _ENTRY_BITS


def _bodies(registers: _Registers) -> pa.Array:
    count, size = registers.shape
    column = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(size), count, [None, pa.py_buffer(np.ascontiguousarray(registers))]
    )
    return column.cast(pa.binary())


# ---- Hashes of values: stored sketches depend on them ----


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
