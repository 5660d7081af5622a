"""Approximate aggregates: their error, their bytes, and what is refused."""

from __future__ import annotations

import datetime
import math
import sys
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import ArrayType, DataType, DoubleType, LongType, StringType, StructField, StructType

import statelog
from statelog import Aggregate, ConfigurationError, CorruptionError, ErrorKind
from statelog.aggregates import sketches
from statelog.aggregates.accumulators import Accumulators, bind_aggregates
from statelog.aggregates.groups import Groups
from statelog.aggregates.hyperloglog import value_hashes
from statelog.aggregates.list_kernels import ListTooLarge
from statelog.aggregates.quantiles import Summary

FRACTIONS = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


def bound(aggregate: Aggregate, kind: DataType) -> Accumulators:
    return bind_aggregates([aggregate], StructType([StructField("x", kind)]), ansi=True)


def merged(aggregate: Accumulators, parts: list[pa.Array], owners: list[Any], count: int) -> pa.Array:
    """The accumulators of groups, of the rows of all parts."""
    held = [pa.concat_arrays(parts)]
    (column,) = aggregate.reduce(held, Groups(np.concatenate(owners).astype(np.int64), count))
    return column


def reduced(aggregate: Accumulators, values: pa.Array, owners: Any, count: int, parts: int = 1) -> pa.Array:
    """The accumulators of groups, of rows that are reduced in parts first."""
    made = []
    for rows in np.array_split(np.arange(len(values)), parts):
        batch = pa.RecordBatch.from_arrays([values.take(pa.array(rows))], names=["x"])
        (lifted,) = aggregate.lift(batch, pa.array(np.zeros(len(rows), np.int64)))
        made.append(merged(aggregate, [lifted], [owners[rows]], count))
    return made[0] if parts == 1 else merged(aggregate, made, [np.arange(count)] * parts, count)


def results(aggregate: Accumulators, held: pa.Array) -> list[Any]:
    values: list[Any] = aggregate.results([held]).columns[0].to_pylist()
    return values


# ---- Distinct values ----


@pytest.mark.parametrize("rsd", [0.25, 0.05, 0.01])
@pytest.mark.parametrize("size", [100, 3000, 20_000])
def test_the_deviation_of_a_count_is_the_documented_one(rsd: float, size: int) -> None:
    count = 2_000_000 // size if size > 1000 else 2000
    aggregate = bound(statelog.ApproxCountDistinct("x", rsd=rsd), LongType())
    values = np.random.default_rng(size).integers(-(2**63), 2**63 - 1, count * size)
    found = results(aggregate, reduced(aggregate, pa.array(values), np.repeat(np.arange(count), size), count))
    errors = np.array(found) / size - 1
    deviation = math.sqrt(float((errors**2).mean()))
    assert deviation <= rsd * 1.1, "a tenth for chance"
    assert abs(errors.mean()) < 0.3 * rsd
    if size * 4 <= (1.04 / rsd) ** 2:
        assert not errors.any(), "few values are counted nearly exactly"


def plain_sketch(values: list[int], lg_k: int) -> bytes:
    """The stored bytes, computed value by value."""
    hashes = value_hashes(pa.array(values, pa.int64())).tolist()

    def rank(hash_: int) -> int:
        return next((bit + 1 for bit in range(38) if hash_ >> bit & 1), 39)

    few: dict[int, int] = {}
    for hash_ in hashes:
        few[hash_ >> 38] = max(few.get(hash_ >> 38, 0), rank(hash_))
    if len(few) <= 2**lg_k // 4:
        return b"\x01\x00" + b"".join((key << 6 | few[key]).to_bytes(4, "little") for key in sorted(few))
    registers = bytearray(2**lg_k)
    for key, value in few.items():
        registers[key >> (26 - lg_k)] = max(registers[key >> (26 - lg_k)], value)
    return b"\x01\x01" + bytes(registers)


@given(st.lists(st.integers(-50, 50), max_size=60), st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_bytes_depend_on_the_set_of_values_alone(values: list[int], parts: int, random: Any) -> None:
    """Sketches of 16 registers store up to four values, and registers from the fifth on."""
    aggregate = bound(statelog.ApproxCountDistinct("x", rsd=0.25), LongType())
    lg_k = math.ceil(2 * math.log2(1.04 / 0.25))
    owners = np.array([value % 3 for value in values], np.int64)
    expected = []
    for group in range(3):
        own = [value for value in values if value % 3 == group]
        expected.append(plain_sketch(own, lg_k) if own else None)
    order = list(range(len(values)))
    random.shuffle(order)
    shuffled = pa.array([values[place] for place in order], pa.int64())
    assert reduced(aggregate, shuffled, owners[np.array(order, np.int64)], 3, parts).to_pylist() == expected


def test_equal_values_have_equal_hashes() -> None:
    """In all types of integers and floats; stored sketches depend on the hashes, so they may not change."""
    whole = [value_hashes(pa.array([-3, 0, 7], kind)).tolist() for kind in (pa.int8(), pa.int16(), pa.int32())]
    assert whole == [value_hashes(pa.array([-3, 0, 7], pa.int64())).tolist()] * 3
    other_nan = np.frombuffer(b"\x01\0\0\0\0\0\xf8\xff", "<f8")[0]
    doubles = value_hashes(pa.array([0.0, -0.0, math.nan, other_nan, 0.5])).tolist()
    assert doubles[0] == doubles[1]
    assert doubles[2] == doubles[3]
    assert len(set(doubles)) == 3
    assert value_hashes(pa.array([0.5], pa.float32())).tolist() == doubles[4:]
    assert value_hashes(pa.array([1, 0], pa.int64())).tolist() == [0x910A2DEC89025CC1, 0xE220A8397B1DCDAF]
    texts = ["", "a", "ä" * 50]
    assert value_hashes(pa.array(texts)).tolist() == value_hashes(pa.array([text.encode() for text in texts])).tolist()
    assert value_hashes(pa.array(["a"])).tolist() == [0xE6C632B61E964E1F]
    moments = pa.array([True, False]), pa.array([datetime.date(1970, 1, 2), datetime.date(1970, 1, 1)])
    assert [value_hashes(column).tolist() for column in moments] == [value_hashes(pa.array([1, 0])).tolist()] * 2
    decimals = [Decimal("1.50"), Decimal("-1.50"), Decimal(10**30), Decimal("1.50")]
    hashes = value_hashes(pa.array([None, *decimals], pa.decimal128(38, 2)).slice(1)).tolist()
    assert hashes[0] == hashes[3]
    assert len(set(hashes)) == 3


# ---- Quantiles ----


def rank_errors(values: Any, found: list[float]) -> list[float]:
    """How far each fraction is from the ranks of its quantile."""
    ordered = np.sort(values)
    lowest = np.searchsorted(ordered, found) / len(values)
    highest = np.searchsorted(ordered, found, "right") / len(values)
    pairs = zip(FRACTIONS, lowest.tolist(), highest.tolist(), strict=True)
    return [max(low - fraction, fraction - high, 0.0) for fraction, low, high in pairs]


def shapes(size: int) -> dict[str, Any]:
    """Values in ascending order."""
    random, places = np.random.default_rng(size), np.arange(size)
    return {
        "even": places * 1.0,
        "normal": np.sort(random.normal(size=size)),
        "skewed": np.sort(np.exp(4 * random.normal(size=size))),
        "of all magnitudes": np.exp(places / size * 1400 - 700),
        "with both signs": np.concatenate(
            [-np.exp(np.arange(size // 2, 0, -1.0) % 700), np.exp(np.arange(size - size // 2) % 700)]
        ),
        "in two clusters": np.concatenate([np.arange(size // 2) * 1e-9, 1e9 + np.arange(size - size // 2)]),
        "repeated": np.sort(np.floor(1 / random.random(size))),
    }


def orders(ordered: Any) -> dict[str, Any]:
    """Values in orders that are hard for a summary."""
    from_middle = np.argsort(np.abs(np.arange(len(ordered)) - len(ordered) / 2), kind="stable")
    ends = np.empty_like(ordered)
    ends[0::2], ends[1::2] = ordered[: (len(ordered) + 1) // 2], ordered[(len(ordered) + 1) // 2 :][::-1]
    return {
        "ascending": ordered,
        "descending": ordered[::-1],
        "random": np.random.default_rng(0).permutation(ordered),
        "from the middle": ordered[from_middle],
        "to the middle": ordered[from_middle[::-1]],
        "from both ends": ends,
        "in combs": np.concatenate([ordered[start::7][:: 1 if start % 2 else -1] for start in range(7)]),
    }


@pytest.mark.parametrize("compression", [20, 200])
@pytest.mark.parametrize("parts", [1, 3, 40])
@pytest.mark.parametrize("size", [201, 1_000, 20_000])
def test_the_error_of_a_quantile_is_the_documented_one(compression: int, parts: int, size: int) -> None:
    aggregate = bound(statelog.Quantiles("x", FRACTIONS, compression=compression), DoubleType())
    for shape, ordered in shapes(size).items():
        for order, values in orders(ordered).items():
            held = reduced(aggregate, pa.array(values), np.zeros(size, np.int64), 1, parts)
            assert len(held[0].as_py()) <= 80 * compression
            (found,) = results(aggregate, held)
            for fraction, error in zip(FRACTIONS, rank_errors(values, found), strict=True):
                bound_of_error = 20 / compression * fraction * (1 - fraction) + 1 / size
                assert error <= bound_of_error, (shape, order, fraction)


@pytest.mark.parametrize("per_batch", [1, 30, 2_000])
def test_a_summary_stays_small_and_exact_over_many_batches(per_batch: int) -> None:
    """Of a key that gets a few values with each batch, or those of a task that were combined."""
    count, compression = 600, 50
    values = np.random.default_rng(per_batch).lognormal(0, 3, size=(count, per_batch))
    aggregate = bound(statelog.Quantiles("x", FRACTIONS, compression=compression), DoubleType())
    held: pa.Array | None = None
    for batch in values:
        new = reduced(aggregate, pa.array(batch), np.zeros(per_batch, np.int64), 1)
        held = new if held is None else merged(aggregate, [held, new], [np.zeros(1), np.zeros(1)], 1)
        assert len(held[0].as_py()) <= 80 * compression
    (found,) = results(aggregate, held)
    for fraction, error in zip(FRACTIONS, rank_errors(values.ravel(), found), strict=True):
        assert error <= 20 / compression * fraction * (1 - fraction) + 1 / values.size


def test_the_largest_and_the_least_doubles() -> None:
    most, least = sys.float_info.max, 5e-324
    values = np.repeat([-most, -least, 0.0, least, most], 100)
    aggregate = bound(statelog.Quantiles("x", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0], compression=20), DoubleType())
    for own in orders(values).values():
        (found,) = results(aggregate, reduced(aggregate, pa.array(own), np.zeros(500, np.int64), 1, 7))
        assert set(found) <= set(values.tolist())
        assert (found[0], found[-1]) == (-most, most)


@pytest.mark.parametrize("body", [b"", b"\x04", b"\x05" + bytes(18), b"\x04" + bytes(15), b"\x08" + bytes(16)])
def test_bytes_that_are_no_summary_are_refused(body: bytes) -> None:
    aggregate = bound(statelog.Quantiles("x", [0.5]), DoubleType())
    with pytest.raises(CorruptionError, match="not a summary of values") as caught:
        aggregate.results([pa.array([b"\x01\x01" + body])])
    assert caught.value.kind is ErrorKind.FORMAT


def test_ranks_beyond_32_bits_are_stored() -> None:
    ranks = np.array([1, 1 << 33, 1 << 34])
    stored = Summary.read(Summary(np.array([0.0, 1.0, 2.0]), ranks, ranks).written())
    assert stored.lowest.tolist() == stored.highest.tolist() == ranks.tolist()
    assert stored.quantiles([0.0, 0.5, 1.0]).tolist() == [0.0, 1.0, 2.0]


@given(st.lists(st.floats(), min_size=1, max_size=300), st.integers(1, 5), st.floats(0, 1))
def test_bounds_of_ranks_hold(values: list[float], parts: int, fraction: float) -> None:
    """Of all doubles, also infinite ones and NaN: the model counts."""
    summary = Summary.of_values(np.array(values[:1]))
    for part in np.array_split(np.array(values[1:]), parts):
        if len(part):
            summary = Summary.read(summary.merged(Summary.of_values(part)).compressed(2).written())
    ordered = sorted(values, key=lambda value: (math.isnan(value), value))
    assert summary.count == len(values)
    for value, lowest, highest in zip(summary.values, summary.lowest, summary.highest, strict=True):
        ranks = [
            rank for rank, other in enumerate(ordered, 1) if other == value or (math.isnan(other) and math.isnan(value))
        ]
        assert any(lowest <= rank <= highest for rank in ranks)
    (found,) = summary.quantiles([fraction])
    assert math.isnan(found) or found in values


@pytest.mark.parametrize("size", [200, 201, 1000])
def test_the_same_rows_make_the_same_bytes(size: int) -> None:
    aggregate = bound(statelog.Quantiles("x", [0.5]), DoubleType())
    values = pa.array(np.random.default_rng(1).normal(size=3 * size))
    owners = np.arange(3 * size) % 3
    one, other = (reduced(aggregate, values, owners, 4, 5) for _ in range(2))
    assert one == other
    assert one.is_valid().to_pylist() == [True, True, True, False]
    assert {body[1] for body in one.to_pylist() if body} == {int(size > 200)}


@pytest.mark.parametrize("parts", [1, 3])
def test_many_values_with_infinite_ones(parts: int) -> None:
    """NaN is the greatest; infinite values are values like others."""
    numbers = np.arange(1000) * 1.0
    specials = [-math.inf] * 500 + [math.inf] * 300 + [math.nan] * 200
    values = np.random.default_rng(2).permutation(np.concatenate([numbers, specials]))
    aggregate = bound(statelog.Quantiles("x", [0.0, 0.22, 0.5, 0.85, 0.93, 1.0]), DoubleType())
    (found,) = results(aggregate, reduced(aggregate, pa.array(values), np.zeros(2000, np.int64), 1, parts))
    assert found[:2] == [-math.inf] * 2
    assert found[2] == pytest.approx(500, abs=50)
    assert found[3] == math.inf
    assert all(map(math.isnan, found[4:]))
    only = bound(statelog.Quantiles("x", [0.5]), DoubleType())
    infinite = pa.array([math.inf] * 300)
    assert results(only, reduced(only, infinite, np.zeros(300, np.int64), 1)) == [[math.inf]]


def test_quantiles_are_doubles_in_an_array() -> None:
    result = bound(statelog.Quantiles("x", [0.5]), LongType()).result
    assert result == StructType([StructField("quantiles(x)", ArrayType(DoubleType(), containsNull=False))])


# ---- Stored bytes ----


@pytest.mark.parametrize("stored", [b"\x02\x00", b"\x00\x00", b"\x01\x02", b"\x01", b""])
@pytest.mark.parametrize("aggregate", [statelog.ApproxCountDistinct("x"), statelog.Quantiles("x", [0.5])])
def test_bytes_of_another_version_are_refused(aggregate: Aggregate, stored: bytes) -> None:
    kernel = bound(aggregate, LongType())
    good = reduced(kernel, pa.array([1, 2]), np.arange(2), 2)
    column = pa.concat_arrays([good, pa.array([stored])])
    for call in (lambda: results(kernel, column), lambda: merged(kernel, [column], [np.arange(3)], 3)):
        with pytest.raises(CorruptionError, match=f"stored state of {type(aggregate).__name__}.*version") as caught:
            call()
        assert caught.value.kind is ErrorKind.FORMAT


def test_another_rsd_is_refused_for_many_values_and_reads_few() -> None:
    coarse, fine = (bound(statelog.ApproxCountDistinct("x", rsd=rsd), LongType()) for rsd in (0.05, 0.04))
    held = reduced(coarse, pa.array(np.arange(2200)), np.repeat([0, 1, 2], [1000, 1000, 200]), 3)
    assert {len(body) for body in held.to_pylist()} == {514}
    for call in (lambda: results(fine, held), lambda: merged(fine, [held], [np.arange(3)], 3)):
        with pytest.raises(CorruptionError, match="has 512 registers, but rsd asks for 1024"):
            call()
    few = reduced(coarse, pa.array(np.arange(100)), np.zeros(100, np.int64), 1)
    assert results(fine, merged(fine, [few], [np.arange(1)], 1)) == [100]


def test_a_digest_without_news_stays_as_it_is() -> None:
    kernel = bound(statelog.Quantiles("x", [0.5]), DoubleType())
    held = reduced(kernel, pa.array(np.random.default_rng(3).normal(size=5000)), np.zeros(5000, np.int64), 1, 7)
    assert merged(kernel, [held, pa.nulls(1, pa.binary())], [np.arange(1)] * 2, 1) == held


def test_a_column_of_sketches_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = bound(statelog.ApproxCountDistinct("x"), LongType())
    values, owners = pa.array(np.arange(3000)), np.arange(3000) // 1000
    monkeypatch.setattr(sketches, "MAX_COLUMN_BYTES", 3 * 514)
    reduced(kernel, values, owners, 3)
    monkeypatch.setattr(sketches, "MAX_COLUMN_BYTES", 3 * 514 - 1)
    with pytest.raises(ListTooLarge, match="its values take"):
        reduced(kernel, values, owners, 3)


# ---- Arguments ----


@pytest.mark.parametrize(
    ("aggregate", "message"),
    [
        (statelog.ApproxCountDistinct("x", rsd=0), "rsd is 0.*0.0025 to 0.25"),
        (statelog.ApproxCountDistinct("x", rsd=0.3), "rsd is 0.3"),
        (statelog.ApproxCountDistinct("x", rsd=math.nan), "rsd is nan"),
        (statelog.ApproxCountDistinct("x", rsd="0.1"), "rsd is '0.1'"),  # type: ignore[arg-type]  # a user's mistake
        (statelog.Quantiles("x", []), "fractions is ()"),
        (statelog.Quantiles("x", 0.5), "fractions is 0.5"),  # type: ignore[arg-type]  # a user's mistake
        (statelog.Quantiles("x", [0.5, 1.1]), "a fraction is 1.1"),
        (statelog.Quantiles("x", [True]), "a fraction is True"),
        (statelog.Quantiles("x", [0.5], compression=10), "compression is 10.*20 to 2000"),
        (statelog.Quantiles("x", [0.5], compression=99.5), "whole number"),  # type: ignore[arg-type]  # a user's mistake
    ],
)
def test_arguments_that_mean_nothing_are_refused(aggregate: Aggregate, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        bound(aggregate, LongType())


def test_types_that_have_no_sketch_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="the column is string"):
        bound(statelog.Quantiles("x", [0.5]), StringType())
    with pytest.raises(ConfigurationError, match="the column is array<bigint>"):
        bound(statelog.ApproxCountDistinct("x"), ArrayType(LongType()))


def test_names_tell_what_the_state_depends_on() -> None:
    """A changed setting of the state is refused at the next start by these texts; the fractions may change."""
    assert str(statelog.ApproxCountDistinct("x")) == "approx_count_distinct(x)"
    assert str(statelog.ApproxCountDistinct("x", rsd=0.01)) == "approx_count_distinct(x, rsd=0.01)"
    assert str(statelog.Quantiles("x", [0.5])) == str(statelog.Quantiles("x", [0.9])) == "quantiles(x)"
    named = statelog.Quantiles("x", [0.5], compression=400).alias("q")
    assert (str(named), named.output_name, named.fractions) == ("quantiles(x, 400)", "q", (0.5,))
