"""The kernel of approximate quantiles: a few values of a group as they are, many as a t-digest.

A t-digest (Dunning, Ertl: Computing Extremely Accurate Quantiles Using t-Digests, 2019) is that of Apache DataSketches,
whose quantile sketches with a proven bound are random, without a way to repeat them. It holds numbers only, so
infinite values and NaN are counted beside it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.aggregates.groups import Groups, Int64s
from statelog.aggregates.kernels import Columns, Kernel
from statelog.aggregates.sketches import StoredSketches, binaries, read_sketches, store_sketches, stored_values
from statelog.aggregates.stored import as_doubles
from statelog.errors import ConfigurationError

DEFAULT_COMPRESSION: Final = 200
"""The number of values that are kept exactly, unless another is asked for."""
_SUBJECT: Final = "Quantiles"
_VALUE: Final = np.dtype("<f8")
_COUNTS: Final = struct.Struct("<QQQ")
"""The number of values that are negatively infinite, infinite, NaN."""

_Floats = npt.NDArray[np.float64]


def datasketches_library() -> Any:
    """The optional module datasketches; raises ConfigurationError if it is not installed."""
    try:
        import datasketches
    except ImportError as error:
        raise ConfigurationError(
            "Quantiles needs the package datasketches, which is not installed.",
            hint="Install it for the driver and the tasks: pip install statelog[sketches].",
        ) from error
    return datasketches


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
        bodies = self._digests(sketches, full, values, owners)
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
            found[group] = _quantiles(body, self._fractions)
        offsets = pa.array(np.arange(count + 1, dtype=np.int32) * width)
        is_missing = counts == 0
        is_missing[sketches.full_owners] = False
        lists = pa.ListArray.from_arrays(offsets, pa.array(found.reshape(-1)), type=self._result)
        return pc.if_else(pa.array(~is_missing), lists, pa.scalar(None, self._result)) if is_missing.any() else lists

    def _digests(self, sketches: StoredSketches, full: Int64s, values: _Floats, owners: Int64s) -> pa.Array:
        """The sketches of the groups `full`, made of their digests and then of their values."""
        if not len(full):
            return binaries([])
        library = datasketches_library()
        stored = sketches.full_bodies
        of_stored = _bounds(sketches.full_owners, full)
        of_values = _bounds(owners, full)
        made: list[bytes] = []
        for (first, last), (start, end) in zip(of_stored, of_values, strict=True):
            bodies = stored[first:last].to_pylist()
            if len(bodies) == 1 and start == end:
                made += bodies
                continue
            digest, counts = None, np.zeros(3, np.int64)
            for body in bodies:
                one = library.tdigest_double.deserialize(body[_COUNTS.size :])
                counts += _COUNTS.unpack_from(body)
                if digest is None:
                    digest = one
                else:
                    digest.merge(one)
            if digest is None:
                digest = library.tdigest_double(self._compression)
            own = values[start:end]
            is_finite = np.isfinite(own)
            if not is_finite.all():
                others = own[~is_finite]
                counts += [(others == -math.inf).sum(), (others == math.inf).sum(), np.isnan(others).sum()]
                own = own[is_finite]
            digest.update(own)
            made.append(_COUNTS.pack(*counts.tolist()) + digest.serialize())
        return binaries(made)


def _ranks(fraction: float, counts: Int64s) -> Int64s:
    """The rank of the least value with at least this fraction of the values up to it, from 1."""
    ranks: Int64s = np.clip(np.ceil(fraction * counts).astype(np.int64), 1, counts)
    return ranks


def _bounds(owners: Int64s, groups: Int64s) -> list[tuple[int, int]]:
    """The stretch of each group's rows; `owners` ascend."""
    starts, ends = np.searchsorted(owners, groups), np.searchsorted(owners, groups, "right")
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def _quantiles(body: bytes, fractions: Sequence[float]) -> list[float]:
    lowest, highest, nans = _COUNTS.unpack_from(body)
    digest = datasketches_library().tdigest_double.deserialize(body[_COUNTS.size :])
    finite = digest.get_total_weight()
    total = lowest + finite + highest + nans

    def at(fraction: float) -> float:
        rank = max(1, math.ceil(fraction * total))
        if rank <= lowest:
            return -math.inf
        if rank > lowest + finite:
            return math.inf if rank <= lowest + finite + highest else math.nan
        found: float = digest.get_quantile(min(1.0, max(0.0, (fraction * total - lowest) / finite)))
        return found

    return [at(fraction) for fraction in fractions]
