"""The hash that the harness gives keys is Spark's: the values are those of xxhash64 and key_hash in Spark 4.3.0."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from statelog.runs.key_groups import row_hashes
from statelog.testing.rows import ColumnWriter, read_schema

_NOON = datetime.datetime(2024, 7, 1, 12, 0, 0, 123456)
_INTERVAL = datetime.timedelta(days=1, hours=2, minutes=3, seconds=4.5)
_NAN = float("nan")


def _utc(value: datetime.datetime) -> datetime.datetime:
    return value.replace(tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("string", "Spark", -4294468057691064905),
        ("string", "", -7444071767201028348),
        ("string", "é", 2065146811275570100),
        ("string", "x" * 40, -5348608777870439244),
        ("string", None, 42),
        ("tinyint", -5, 9201179564109417620),
        ("smallint", 300, 4595878464234128934),
        ("int", -1, 2017008487422258757),
        ("int", 7, 2786828215451145335),
        ("bigint", -1, 3858142552250413010),
        ("bigint", (1 << 63) - 1, -3246596055638297850),
        ("boolean", True, -6698625589789238999),
        ("boolean", False, 3614696996920510707),
        ("float", 1.5, 6163473420726370430),
        ("float", -0.0, 3614696996920510707),
        ("float", _NAN, 2692338816207849720),
        ("double", 1.5, 7738255526519901366),
        ("double", -0.0, -5252525462095825812),
        ("double", _NAN, -3127944061524951246),
        ("double", float("-inf"), 5326262080505358431),
        ("binary", b"\x00\xff", 879945414100663330),
        ("date", datetime.date(2024, 2, 29), 4183429117450946631),
        ("date", datetime.date(1960, 1, 1), 5231712984053086986),
        ("timestamp", _utc(_NOON), -2028256130531983515),
        ("timestamp", _utc(datetime.datetime(1960, 1, 1, 0, 0, 0, 500000)), -2393078403517092117),
        ("timestamp_ntz", _NOON, -2028256130531983515),
        ("interval day to second", _INTERVAL, -5867921652851782348),
        ("interval day to second", -_INTERVAL, -1891207343073278726),
        ("decimal(10,2)", Decimal("-12.34"), -1614697014534150208),
        ("decimal(38,4)", Decimal("1234567890123456789012.5"), 4058505230115216861),
        ("decimal(38,4)", Decimal(-1), -2367915111685644447),
        ("decimal(38,4)", Decimal(0), -8959994473701255385),
        ("decimal(38,4)", Decimal("-12.8"), -86829086755877238),
        ("array<int>", [1, None, 3], -3383274367486667931),
        ("array<int>", [], 42),
        ("struct<a: int, b: string>", (1, "x"), 8510603489595372987),
        ("struct<a: int, b: string>", (None, "x"), -5636050478767222463),
        ("map<string, int>", {"b": 2, "a": 1}, 7428138486932782616),
        ("map<int, array<string>>", {3: ["x"], -1: []}, -5814159066903856697),
    ],
)
@pytest.mark.parametrize("zone", ["UTC", "Asia/Kathmandu"])
def test_hash_is_that_of_spark(kind: str, value: Any, expected: int, zone: str) -> None:
    column = ColumnWriter(read_schema(f"c {kind}", "columns"), "test", zone).batch([(value,)]).column(0)
    assert row_hashes([column]).view(np.int64).tolist() == [expected]


def test_hash_of_several_columns_is_that_of_sparks_documentation() -> None:
    columns = read_schema("a string, b array<int>, c int", "columns")
    batch = ColumnWriter(columns, "test", "UTC").batch([("Spark", [123], 2)])
    assert row_hashes(batch.columns).view(np.int64).tolist() == [5602566077635097486]
