"""Decimals in Python: exact to their last digit, whatever context the user's code has set."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Context, Decimal, Inexact, Rounded, localcontext
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import DecimalType

from statelog.convert.python_values import to_storage
from statelog.runs.column_values import ColumnValues

MOST = 10**38 - 1


@pytest.fixture(params=[None, Context(prec=3), Context(prec=3, traps=[Inexact, Rounded])], ids=str, autouse=True)
def context(request: pytest.FixtureRequest) -> Iterator[None]:
    """Python's default context, and others that code of the user's may have set."""
    with localcontext(request.param):
        yield


@pytest.mark.parametrize(
    ("scale", "given", "stored"),
    [
        (0, MOST, Decimal(MOST)),
        (0, -MOST, Decimal(-MOST)),
        (0, Decimal(MOST), Decimal(MOST)),
        (0, Decimal(f"{MOST}.4"), Decimal(MOST)),
        (2, Decimal("9" * 36 + ".994"), Decimal("9" * 36 + ".99")),
        (38, Decimal(f"-0.{MOST}"), Decimal(f"-0.{MOST}")),
        (38, 0, Decimal("0E-38")),
        (0, Decimal("0E+80"), Decimal(0)),
        (10, 0.1, Decimal("0.1000000000")),
    ],
)
def test_a_value_of_all_digits_is_stored(scale: int, given: Any, stored: Decimal) -> None:
    assert to_storage(DecimalType(38, scale))(given).as_tuple() == stored.as_tuple()


@pytest.mark.parametrize(
    ("scale", "given"),
    [
        (0, MOST + 1),
        (0, Decimal(f"{MOST}.5")),
        (0, Decimal("1E+80")),
        (0, 1e300),
        (38, 1),
        (38, Decimal("0." + "9" * 39)),
    ],
)
def test_a_value_of_more_digits_is_refused(scale: int, given: Any) -> None:
    with pytest.raises(ValueError, match="it has too many digits"):
        to_storage(DecimalType(38, scale))(given)


@pytest.mark.parametrize("scale", [0, 2, 18])
def test_columns_are_read_exactly(scale: int) -> None:
    numbers = [1 - 10**18, -1, 0, 123456789, 10**18 - 1]
    column = pa.array([None], pa.decimal128(18, scale))
    column = pa.concat_arrays([column, _column(numbers, scale)])
    found = ColumnValues().of(column)
    assert [None if value is None else value.as_tuple() for value in found] == [
        None,
        *(Decimal(f"{number}E-{scale}").as_tuple() for number in numbers),
    ]


def _column(unscaled: list[int], scale: int) -> pa.Array:
    words = b"".join(number.to_bytes(16, "little", signed=True) for number in unscaled)
    return pa.Array.from_buffers(pa.decimal128(18, scale), len(unscaled), [None, pa.py_buffer(words)])
