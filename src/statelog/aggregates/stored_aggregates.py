"""Aggregates as a checkpoint describes them: found again without the query, by their text and their stored fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from statelog.aggregates.groups import Groups, stored_name, to_given
from statelog.aggregates.hyperloglog import DEFAULT_RSD, HyperLogLogKernel, lg_k_of
from statelog.aggregates.kernels import (
    MAX_PRECISION,
    MEAN_DIGITS,
    OVERFLOWED,
    SUM_DIGITS,
    Columns,
    CountKernel,
    DecimalMeanKernel,
    DecimalSumKernel,
    ExtremeKernel,
    FirstLastKernel,
    Kernel,
    MeanKernel,
    SumKernel,
    VarianceKernel,
)
from statelog.aggregates.list_kernels import MAX_LIST_BYTES, DistinctKernel, ListKernel
from statelog.aggregates.quantiles import DEFAULT_COMPRESSION, QuantilesKernel

_VALUE: Final = ("",)
_MOMENTS: Final = ("count", "mean", "m2")
_BY_TIME: Final = ("", "time_ms")
_BY_COLUMN: Final = ("", "by")
_QUANTILES: Final = "quantiles"
_DOUBLES: Final = pa.list_(pa.field("element", pa.float64(), nullable=False))
_TEXT: Final = re.compile(r"(\w+)(?:\((.*)\))?", re.DOTALL)
_RSD: Final = re.compile(r", rsd=([\d.e-]+)$")
_COMPRESSION: Final = re.compile(r", (\d+)$")


@dataclass(frozen=True)
class _Kind:
    """How the accumulators of one kind of aggregate are stored."""

    fields: tuple[tuple[str, ...], ...]
    """The suffixes of the fields, see :class:`statelog.aggregates.functions.BoundAggregate`; one of several choices."""
    kernel: Callable[[str, pa.DataType, str], Kernel]
    """Makes the kernel, given what is in the brackets of the text, the type of the first field, and the detail."""


def _rsd(inner: str) -> float:
    found = _RSD.search(inner)
    return DEFAULT_RSD if found is None else float(found[1])


def _compression(inner: str) -> int:
    found = _COMPRESSION.search(inner)
    return DEFAULT_COMPRESSION if found is None else int(found[1])


def _fractions(detail: str) -> list[float]:
    return [float(each) for each in detail.split(",")]


def _sum_kernel(sums: pa.DataType) -> Kernel:
    if pa.types.is_decimal(sums):
        return DecimalSumKernel(sums, ansi=False)
    return SumKernel(sums, wraps=False)


def _mean_kernel(sums: pa.DataType) -> Kernel:
    """Of sums with the most digits the mean has as many."""
    if not pa.types.is_decimal(sums):
        return MeanKernel()
    most = MAX_PRECISION
    digits = most if sums.precision == most else sums.precision - SUM_DIGITS + MEAN_DIGITS
    result = pa.decimal128(min(digits, most), min(sums.scale + MEAN_DIGITS, most))
    return DecimalMeanKernel(sums, result, ansi=False)


def _moments(*, is_sample: bool, is_deviation: bool) -> _Kind:
    return _Kind(
        (_MOMENTS,), lambda inner, kind, detail: VarianceKernel(is_sample=is_sample, is_deviation=is_deviation)
    )


_KINDS: Final = {
    "count": _Kind((_VALUE,), lambda inner, kind, detail: CountKernel()),
    "sum": _Kind((("", OVERFLOWED), _VALUE), lambda inner, kind, detail: _sum_kernel(kind)),
    "mean": _Kind((("sum", "count"),), lambda inner, kind, detail: _mean_kernel(kind)),
    "var_samp": _moments(is_sample=True, is_deviation=False),
    "var_pop": _moments(is_sample=False, is_deviation=False),
    "stddev_samp": _moments(is_sample=True, is_deviation=True),
    "stddev_pop": _moments(is_sample=False, is_deviation=True),
    "min": _Kind((_VALUE,), lambda inner, kind, detail: ExtremeKernel(is_max=False)),
    "max": _Kind((_VALUE,), lambda inner, kind, detail: ExtremeKernel(is_max=True)),
    "first": _Kind((_BY_TIME, _BY_COLUMN), lambda inner, kind, detail: FirstLastKernel(is_last=False)),
    "last": _Kind((_BY_TIME, _BY_COLUMN), lambda inner, kind, detail: FirstLastKernel(is_last=True)),
    "collect": _Kind((_VALUE,), lambda inner, kind, detail: ListKernel(MAX_LIST_BYTES)),
    "count_distinct": _Kind((_VALUE,), lambda inner, kind, detail: DistinctKernel(MAX_LIST_BYTES)),
    "approx_count_distinct": _Kind((_VALUE,), lambda inner, kind, detail: HyperLogLogKernel(lg_k_of(_rsd(inner)))),
    _QUANTILES: _Kind(
        (_VALUE,), lambda inner, kind, detail: QuantilesKernel(_fractions(detail), _compression(inner), _DOUBLES)
    ),
}
"""By the name with which the text of an aggregate begins."""


@dataclass(frozen=True)
class _Part:
    """One aggregate of several."""

    kernel: Kernel
    columns: tuple[int, ...]
    """Its fields in the stored row."""
    given_type: pa.DataType | None = None
    """The type of its values, if it is not the one that they are stored in."""

    def result(self, held: Columns) -> pa.Array:
        values = self.kernel.result([held[column] for column in self.columns])
        return values if self.given_type is None else to_given(values, self.given_type)


@dataclass(frozen=True)
class StoredAggregates:
    """Merges the stored accumulators of several aggregates, and makes their values."""

    result: pa.Schema
    """The aggregates' values."""
    _parts: tuple[_Part, ...]

    @classmethod
    def of(cls, described: Mapping[str, str], stored: pa.Schema, details: Mapping[str, str]) -> StoredAggregates | None:
        """The aggregates with these names and texts that have fields in a stored row; None if a field has none.

        `details` are those of :func:`statelog.aggregates.accumulators.value_details`.
        """
        parts: dict[str, _Part] = {}
        for name, text in described.items():
            part = _part(name, text, stored, details.get(name, ""))
            if part is not None:
                parts[name] = part
        order = sorted(parts, key=lambda name: parts[name].columns)
        if sorted(column for part in parts.values() for column in part.columns) != list(range(len(stored))):
            return None
        held = [pa.array([], field.type) for field in stored]
        fields = [pa.field(name, parts[name].result(held).type) for name in order]
        return cls(pa.schema(fields), tuple(parts[name] for name in order))

    def reduce(self, held: Columns, groups: Groups) -> Columns:
        """Merge the accumulators of each group, in their order."""
        merged = list(held)
        for part in self._parts:
            own = part.kernel.reduce([held[column] for column in part.columns], groups)
            for column, values in zip(part.columns, own, strict=True):
                merged[column] = values
        return merged

    def results(self, held: Columns) -> Columns:
        """The aggregates' values of accumulators."""
        return [part.result(held) for part in self._parts]


def _part(name: str, text: str, stored: pa.Schema, detail: str) -> _Part | None:
    """One aggregate; None if its text is not known, or the stored row has no fields of it."""
    found = _TEXT.fullmatch(text)
    kind = None if found is None else _KINDS.get(found[1])
    if found is None or kind is None:
        return None
    inner = found[2] or ""
    for suffixes in kind.fields:
        columns = tuple(stored.get_field_index(stored_name(name, suffix)) for suffix in suffixes)
        if min(columns) < 0:
            continue
        kernel = kind.kernel(inner, stored.field(columns[0]).type, detail)
        has_type = detail and found[1] != _QUANTILES
        return _Part(kernel, columns, _given_type(detail) if has_type else None)
    return None


def _given_type(text: str) -> pa.DataType:
    """The type of timestamps, or of an array of them, from Spark's name."""
    inner = re.fullmatch(r"array<(.*)>", text)
    if inner is not None:
        return pa.list_(_given_type(inner[1]))
    return pa.timestamp("us", None if text == "timestamp_ntz" else "UTC")
