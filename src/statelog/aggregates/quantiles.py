"""The kernel of approximate quantiles: a few values of a group as they are, many as a summary.

A summary has some of the values, and for each of them bounds of its rank among all (Greenwald, Khanna: Space-Efficient
Online Computation of Quantile Summaries, 2001). It is merged with another one without loss (the same: Power-Conserving
Computation of Order-Statistics over Sensor Networks, 2004). How far apart the bounds may be depends on the rank, so
quantiles at both ends are nearly exact (Cormode, Korn, Muthukrishnan, Srivastava: Effective Computation of Biased
Quantiles over Data Streams, 2005). Only the order of values counts: they may be as large and as different as they like.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.aggregates.groups import Groups, as_doubles
from statelog.aggregates.kernels import Columns, Kernel
from statelog.aggregates.sketches import StoredSketches, binaries, read_sketches, store_sketches, stored_values
from statelog.errors import CorruptionError, ErrorKind
from statelog.operators.keyed.indexing import Int64s

DEFAULT_COMPRESSION: Final = 200
"""The number of values that are kept exactly, unless another is requested."""
ERROR: Final = 20
"""A quantile of f is one of a fraction that is off by this, divided by the compression, times f (1 - f), at most."""
_SUBJECT: Final = "Quantiles"
_VALUE: Final = np.dtype("<f8")
_WIDTHS: Final = (4, 8)
"""Bytes of a rank in a stored summary."""
_MOST_VALUES: Final = 2
"""Values are left out of a summary that has more of them than this times the compression."""
_SPARED: Final = 4
"""The larger, the less of the error a small summary uses; what it leaves is for the merges to come."""

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Summary:
    """Some values of a group in their order, the least and the greatest among them; NaN is greater than all numbers."""

    values: _Floats
    lowest: Int64s
    """The lowest rank that each value may have among all values, from 1."""
    highest: Int64s
    """The highest rank that it may have."""

    @classmethod
    def of_values(cls, values: _Floats) -> Summary:
        """A summary that has all values."""
        ranks = np.arange(1, len(values) + 1)
        return cls(np.sort(values), ranks, ranks)

    @classmethod
    def read(cls, body: bytes) -> Summary:
        """The summary with these bytes: the width of a rank, values, differences of lowest ranks, and of both ranks."""
        width = body[0] if body else 0
        if width not in _WIDTHS or len(body) == 1 or (len(body) - 1) % (_VALUE.itemsize + 2 * width):
            raise CorruptionError(
                f"The stored state of {_SUBJECT} has {len(body)} bytes that are not a summary of values.",
                kind=ErrorKind.FORMAT,
                hint="If a newer statelog wrote it, use that version or a later one.",
            )
        count = (len(body) - 1) // (_VALUE.itemsize + 2 * width)
        values = np.frombuffer(body, _VALUE, count, 1).astype(np.float64)
        ranks = np.frombuffer(body, f"<u{width}", 2 * count, 1 + values.nbytes).astype(np.int64)
        lowest = np.cumsum(ranks[:count])
        return cls(values, lowest, lowest + ranks[count:])

    def written(self) -> bytes:
        """The bytes of the summary."""
        width = _WIDTHS[self.count >= 1 << 32]
        ranks = np.concatenate([np.diff(self.lowest, prepend=0), self.highest - self.lowest])
        return bytes([width]) + self.values.astype(_VALUE).tobytes() + ranks.astype(f"<u{width}").tobytes()

    @property
    def count(self) -> int:
        """The number of all values."""
        return int(self.highest[-1])

    def merged(self, other: Summary) -> Summary:
        """The summary of the values of both; of equal values its own come first."""
        own_places = np.searchsorted(other.values, self.values, "left")
        other_places = np.searchsorted(self.values, other.values, "right")
        lowest = np.concatenate([self.lowest + other._before(own_places), other.lowest + self._before(other_places)])
        highest = np.concatenate([self.highest + other._until(own_places), other.highest + self._until(other_places)])
        values = np.concatenate([self.values, other.values])
        order = np.argsort(values, kind="stable")
        return Summary(values[order], lowest[order], highest[order])

    def _before(self, places: Int64s) -> Int64s:
        """How many values at least are before those that would be inserted at places."""
        found: Int64s = np.concatenate([[0], self.lowest])[places]
        return found

    def _until(self, places: Int64s) -> Int64s:
        """How many values at most are before those that would be inserted at places."""
        found: Int64s = np.concatenate([self.highest - 1, [self.count]])[places]
        return found

    def compressed(self, compression: int) -> Summary:
        """The summary without values that are not needed, if it has many.

        Between two successive values the ranks differ by ``2 e r (n - r) / n`` at most, for the rank r of either, or by
        one. As this function of r and n is concave and homogeneous, a merge keeps it so. The error e grows with the
        number of values, up to ``ERROR / compression``: so a merge of a large summary with a small one leaves room.
        """
        if len(self.values) <= _MOST_VALUES * compression:
            return self
        count, lowest = float(self.count), self.lowest.astype(np.float64)
        doublings = 1 + math.log2(max(1.0, count / compression))
        twice = 2 * ERROR / compression * doublings / (doublings + _SPARED)
        by_lower = lowest + twice * lowest * (count - lowest) / count
        rest = 1 - twice  # the greatest x with x - lowest <= twice * x * (count - x) / count
        by_higher = count * (np.sqrt(rest * rest + 4 * twice * lowest / count) - rest) / (2 * twice)
        reach = np.searchsorted(self.highest, np.minimum(by_lower, by_higher), "right") - 1
        following = np.maximum(reach, np.arange(1, len(lowest) + 1)).tolist()
        kept, place, last = [0], 0, len(lowest) - 1
        while place < last:
            place = following[place]
            kept.append(place)
        return Summary(self.values[kept], self.lowest[kept], self.highest[kept])

    def quantiles(self, fractions: Sequence[float]) -> _Floats:
        """The value whose rank is nearest to that of each fraction."""
        ranks = _ranks(np.array(fractions), np.array(self.count))[:, None]
        found: _Floats = self.values[np.maximum(self.highest - ranks, ranks - self.lowest).argmin(axis=1)]
        return found


class QuantilesKernel(Kernel):
    """The values at fractions of each group's values, as a list of type `result`; null if there are none.

    Up to `compression` values are kept, and their quantiles exact.
    """

    adds_floats = True

    def __init__(self, fractions: Sequence[float], compression: int, result: pa.DataType) -> None:
        self._fractions = fractions
        self._compression = compression
        self._result = result

    def lift(self, column: pa.Array, by: pa.Array) -> Columns:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        values = as_doubles(column).fill_null(0.0).to_numpy() + 0.0  # zeros without a sign
        values[np.isnan(values)] = np.nan
        return [stored_values(values.astype(_VALUE, copy=False), valid)]

    def reduce(self, held: Columns, groups: Groups) -> Columns:
        sketches = read_sketches(held[0], groups, _SUBJECT)
        values, owners = sketches.values(_VALUE)
        is_full = np.bincount(owners, minlength=groups.count) > self._compression
        is_full[sketches.full_owners] = True
        full = np.flatnonzero(is_full)
        bodies = self._summaries(sketches, full, values, owners)
        is_few = ~is_full[owners]
        values, owners = values[is_few], owners[is_few]
        if len(owners) > 1 and not (np.diff(owners) > 0).all():
            values = values[np.lexsort((values, owners))]
        return [store_sketches(groups.count, values, owners, full, bodies)]

    def result(self, held: Columns) -> pa.Array:
        count, width = len(held[0]), len(self._fractions)
        sketches = read_sketches(held[0], Groups(np.arange(count), count), _SUBJECT)
        values, owners = sketches.values(_VALUE)
        counts = np.bincount(owners, minlength=count)
        few = np.flatnonzero(counts)
        found = np.zeros((count, width))
        starts = np.cumsum(counts[few]) - counts[few]
        for place, fraction in enumerate(self._fractions):
            found[few, place] = values[starts + _ranks(fraction, counts[few]) - 1]
        for group, body in zip(sketches.full_owners.tolist(), sketches.full_bodies.to_pylist(), strict=True):
            found[group] = Summary.read(body).quantiles(self._fractions)
        offsets = pa.array(np.arange(count + 1, dtype=np.int32) * width)
        is_missing = counts == 0
        is_missing[sketches.full_owners] = False
        lists = pa.ListArray.from_arrays(offsets, pa.array(found.reshape(-1)), type=self._result)
        return pc.if_else(pa.array(~is_missing), lists, pa.scalar(None, self._result)) if is_missing.any() else lists

    def _summaries(self, sketches: StoredSketches, full: Int64s, values: _Floats, owners: Int64s) -> pa.Array:
        """The sketches of the groups `full`, made of their summaries and then of their values."""
        stored = sketches.full_bodies
        of_stored = _bounds(sketches.full_owners, full)
        of_values = _bounds(owners, full)
        made: list[bytes] = []
        for (first, last), (start, end) in zip(of_stored, of_values, strict=True):
            bodies = stored[first:last].to_pylist()
            if len(bodies) == 1 and start == end:
                made += bodies
                continue
            parts = list(map(Summary.read, bodies))
            if start < end:
                parts.append(Summary.of_values(values[start:end]))
            summary = parts[0]
            for part in parts[1:]:
                summary = summary.merged(part).compressed(self._compression)
            made.append(summary.compressed(self._compression).written())
        return binaries(made)


def _ranks(fractions: _Floats | float, counts: Int64s) -> Int64s:
    """The rank of the least value with at least this fraction of the values up to it, from 1."""
    ranks: Int64s = np.clip(np.ceil(fractions * counts).astype(np.int64), 1, counts)
    return ranks


def _bounds(owners: Int64s, groups: Int64s) -> list[tuple[int, int]]:
    """The stretch of each group's rows; `owners` ascend."""
    starts, ends = np.searchsorted(owners, groups), np.searchsorted(owners, groups, "right")
    return list(zip(starts.tolist(), ends.tolist(), strict=True))
