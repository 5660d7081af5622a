"""The types, the values, and how a result is shown."""

from __future__ import annotations

import array
import datetime
import decimal
import enum
import re
import uuid
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd
from pyspark.sql import Row
from pyspark.sql.types import VariantVal

ZONE: Final = "America/New_York"
"""The session's and the processes' zone."""

UTC: Final = datetime.UTC
EAST: Final = datetime.timezone(datetime.timedelta(hours=2))


@dataclass(frozen=True)
class Plain:
    """An object with attributes."""

    a: int = 1
    b: str = "x"


class Color(enum.Enum):
    RED = 1


TYPES: Final = [
    "boolean",
    "tinyint",
    "smallint",
    "int",
    "bigint",
    "float",
    "double",
    "decimal(5,2)",
    "string",
    "binary",
    "date",
    "timestamp",
    "timestamp_ntz",
    "time(6)",
    "interval day to second",
    "array<int>",
    "array<double>",
    "array<string>",
    "map<string,int>",
    "struct<a:int,b:string>",
    "array<struct<a:int,b:string>>",
    "void",
    "variant",
    "interval year to month",
    "interval",
    "varchar(4)",
    "string collate UTF8_LCASE",
]

_TEXTS: Final = """
None
True
5
300
2**31
2**63
5.0
1.5
float('nan')
float('inf')
1e300
Decimal('1.5')
Decimal('5')
Decimal('1.235')
Decimal('1.245')
Decimal('100000')
Decimal('NaN')
''
'5'
'text'
'true'
'2024-01-02'
b'ab'
bytearray(b'ab')
date(2024, 1, 2)
datetime(2024, 1, 2, 3, 4, 5, 6)
datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=EAST)
datetime(2024, 3, 10, 2, 30)
datetime(2024, 11, 3, 1, 30, fold=1)
time(3, 4, 5, 6)
timedelta(days=1, microseconds=2)
pd.Timestamp(2024, 1, 2, 3)
pd.Timestamp('2024-01-02T03:00+02:00')
pd.Timedelta(days=1)
pd.NaT
pd.NA
np.int64(5)
np.float64(1.5)
np.float64('nan')
np.bool_(True)
np.str_('text')
np.datetime64('2024-01-02T03:04:05.000006')
np.timedelta64(1, 'D')
np.array([1, 2])
np.array([1.5])
array.array('i', [1, 2])
[1, 2]
(1, 2)
[1.5]
[1, None]
[float('nan')]
[True]
['a']
[5, 'a']
{1, 2}
{'a': 1}
{'a': 1.5}
{'a': None}
{5: 1}
[('a', 1)]
Row(a=1, b='x')
Row(b='x', a=1)
(1, 'x')
[1, 'x']
{'a': 1, 'b': 'x'}
{'b': 'x'}
{'a': 1, 'b': 'x', 'c': 2}
(1,)
(1, 'x', 2)
(1.5, 5)
Plain()
[Row(a=1, b='x')]
[Row(b='x', a=1)]
[(1, 'x')]
[{'b': 'x', 'a': 1}]
pd.DataFrame({'a': [1], 'b': ['x']})
pd.Series([1, 2])
Color.RED
UUID(int=5)
VariantVal.parseJson('5')
object
"""

_NAMES: Final[dict[str, Any]] = {
    "Decimal": decimal.Decimal,
    "date": datetime.date,
    "datetime": datetime.datetime,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "EAST": EAST,
    "np": np,
    "pd": pd,
    "array": array,
    "Row": Row,
    "Plain": Plain,
    "Color": Color,
    "UUID": uuid.UUID,
    "VariantVal": VariantVal,
}

VALUES: Final = _TEXTS.strip().splitlines()
"""Values, as Python expressions."""


INPUTS: Final[dict[str, list[str]]] = {
    "boolean": ["true"],
    "tinyint": ["-128Y"],
    "smallint": ["-32768S"],
    "int": ["5", "-2147483648"],
    "bigint": ["5L", "9223372036854775807L"],
    "float": ["float(1.1)", "float('nan')"],
    "double": ["double(1.1)", "double('nan')", "double('-inf')"],
    "decimal(5,2)": ["decimal(1.5)"],
    "decimal(38,18)": ["12345678901234567890.000000000000000001"],
    "string": ["'text'", "''"],
    "binary": ["x'0061'"],
    "date": ["date'2024-01-02'", "date'0001-01-01'", "date'9999-12-31'"],
    "timestamp": [
        "timestamp'2024-01-02 03:04:05.000006'",
        "timestamp'2024-11-03 01:30:00-05:00'",
    ],
    "timestamp_ltz": ["timestamp'0001-01-02 00:00:00'", "timestamp'9999-12-30 00:00:00'"],
    "timestamp_ntz": ["timestamp_ntz'2024-01-02 03:04:05.000006'"],
    "time(6)": ["time'03:04:05.000006'"],
    "interval day to second": ["interval '1 00:00:00.000002' day to second"],
    "array<int>": ["array(1, 2)", "array(1, null)", "array()"],
    "array<double>": ["array(1.5D, null)"],
    "array<timestamp>": ["array(timestamp'2024-01-02 03:04:05')"],
    "array<array<int>>": ["array(array(1), null)"],
    "map<string,int>": ["map('b', 1, 'a', null)", "map()"],
    "map<string,timestamp>": ["map('a', timestamp'2024-01-02 03:04:05')"],
    "struct<a:int,b:string>": ["struct(1 as a, 'x' as b)", "struct(null as a, null as b)"],
    "struct<t:timestamp>": ["struct(timestamp'2024-01-02 03:04:05' as t)"],
    "array<struct<a:int,b:string>>": ["array(struct(1 as a, 'x' as b), null)"],
    "void": [],
    "variant": ["parse_json('{\"a\": 5}')"],
    "interval year to month": ["interval '1-2' year to month"],
    "interval": ["make_interval(1, 2, 3, 4, 5, 6, 7.000008)"],
    "varchar(4)": ["cast('text' as varchar(4))"],
    "string collate UTF8_LCASE": ["'Text' collate UTF8_LCASE"],
}
"""Values of columns, as SQL; each type has null as well. The timestamps of ``timestamp_ltz`` are too far for frames."""


def value(text: str) -> Any:
    """A value, made anew."""
    return eval(text, dict(_NAMES))


def show(result: Any) -> str:
    """A result as text, with its type where it is not obvious."""
    if isinstance(result, float) and result != result:
        return "nan"
    if isinstance(result, str) and ("java." in result or "razorvine" in result or re.search(r"@[0-9a-f]+", result)):
        return "a name of a Java object"
    if result is None or isinstance(result, (bool, int, float, str)):
        return repr(result) if type(result).__module__ == "builtins" else f"{type(result).__name__} {result!r}"
    if isinstance(result, Row):
        return f"Row({', '.join(f'{name}={show(item)}' for name, item in result.asDict().items())})"
    if isinstance(result, tuple):
        return f"({', '.join(map(show, result))}{',' if len(result) == 1 else ''})"
    if isinstance(result, list):
        return f"[{', '.join(map(show, result))}]"
    if isinstance(result, np.ndarray):
        return f"array {result.dtype}[{', '.join(map(show, result.tolist()))}]"
    if isinstance(result, dict):
        return f"{{{', '.join(f'{show(key)}: {show(item)}' for key, item in result.items())}}}"
    if type(result) is datetime.datetime:
        zone = "" if result.tzinfo is None else " Z"
        at = result if result.tzinfo is None else result.astimezone(UTC)
        return f"{at.replace(tzinfo=None).isoformat()}{' fold' if result.fold else ''}{zone}"
    if type(result) in (datetime.date, datetime.time):
        return f"{type(result).__name__} {result.isoformat()}"
    if type(result) is datetime.timedelta:
        return f"timedelta {result}"
    return f"{type(result).__name__} {result}".replace("\n", " ")[:120]
