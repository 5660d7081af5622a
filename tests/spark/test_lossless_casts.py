"""Which types become which others in tables that are loaded, compared with Spark's own casts there and back."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import reduce

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructField, StructType

from statelog import ConfigurationError
from statelog.convert.ddl import parse_ddl
from statelog.spark.plan.lossless_casts import converted_columns, require_convertible

pytestmark = pytest.mark.spark

EXTREMES: dict[str, list[str]] = {
    "boolean": ["true", "false"],
    "tinyint": ["-128Y", "127Y", "0Y"],
    "smallint": ["-32768S", "32767S", "255S"],
    "int": ["-2147483648", "2147483647", "16777217"],
    "bigint": ["-9223372036854775808L", "9223372036854775807L", "9007199254740993L"],
    "float": ["float('-Infinity')", "float('NaN')", "float('1.4e-45')", "float('3.4028235e38')", "float('0.1')"],
    "double": ["double('Infinity')", "double('-4.9e-324')", "1.7976931348623157e308D", "0.1D"],
    "decimal(3,0)": ["-999", "999"],
    "decimal(5,2)": ["-999.99", "0.01"],
    "decimal(10,0)": ["-9999999999", "9999999999"],
    "decimal(19,0)": ["-9999999999999999999", "1"],
    "decimal(12,2)": ["-9999999999.99", "0.01"],
    "decimal(38,18)": ["99999999999999999999.999999999999999999", "-0.000000000000000001"],
    "string": ["''", "'ü'", "'1'"],
    "binary": ["X''", "X'FF00'"],
    "date": ["date'0001-01-01'", "date'9999-12-31'", "date'2011-12-30'", "date'2024-03-10'"],
    "timestamp": ["timestamp'2024-11-03 05:30:00Z'", "timestamp'2024-11-03 06:30:00Z'"],
    "timestamp_ntz": ["timestamp_ntz'2024-03-10 02:30:00'", "timestamp_ntz'2024-03-10 03:30:00'"],
    "interval day to second": ["interval '-1 00:00:00.000001' day to second"],
    "interval hour": ["interval '100' hour"],
    "time(3)": ["cast('23:59:59.999' AS time(3))"],
    "time(6)": ["time'23:59:59.999999'"],
    "void": ["null"],
}  # fmt: skip
ALLOWED = {
    "tinyint": "smallint, int, bigint, double, decimal(3,0), decimal(5,2), decimal(10,0), decimal(19,0), decimal(12,2),"
    " decimal(38,18)",
    "smallint": "int, bigint, double, decimal(10,0), decimal(19,0), decimal(12,2), decimal(38,18)",
    "int": "bigint, double, decimal(10,0), decimal(19,0), decimal(12,2), decimal(38,18)",
    "bigint": "decimal(19,0), decimal(38,18)",
    "float": "double",
    "decimal(3,0)": "decimal(5,2), decimal(10,0), decimal(19,0), decimal(12,2), decimal(38,18)",
    "decimal(5,2)": "decimal(12,2), decimal(38,18)",
    "decimal(10,0)": "decimal(19,0), decimal(12,2), decimal(38,18)",
    "decimal(12,2)": "decimal(38,18)",
    "decimal(19,0)": "decimal(38,18)",
    "date": "timestamp_ntz",
    "interval hour": "interval day to second",
    "time(3)": "time(6)",
    "void": ", ".join(kind for kind in EXTREMES if kind != "void"),
}
PAIRS = {(own, wanted) for own, wide in ALLOWED.items() for wanted in wide.replace(", ", ";").split(";")}


def typed(text: str) -> DataType:
    return parse_ddl(text)


def is_allowed(own: str, wanted: str) -> bool:
    try:
        require_convertible(typed(own), typed(wanted), "value_x", "the table", "the state's")
    except ConfigurationError:
        return False
    return True


@pytest.fixture(name="session", params=["America/New_York", "Pacific/Apia"])
def make_session_in_a_zone(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[SparkSession]:
    """A session whose zone has local times that are there twice, or never, with values of type TIME."""
    settings = {"spark.sql.session.timeZone": request.param, "spark.sql.timeType.enabled": "true"}
    for name, value in settings.items():
        spark.conf.set(name, value)
    yield spark
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    spark.conf.unset("spark.sql.timeType.enabled")


def test_the_pairs_that_are_allowed(spark: SparkSession) -> None:
    found = {pair for pair in itertools.permutations(EXTREMES, 2) if is_allowed(*pair)}
    assert found == PAIRS
    cast = spark._jvm.org.apache.spark.sql.catalyst.expressions.Cast  # type: ignore[union-attr]  # there is a JVM
    parse = spark._jsparkSession.parseDataType
    up = {
        pair for pair in itertools.permutations(EXTREMES, 2) if cast.canUpCast(*[parse(typed(k).json()) for k in pair])
    }
    assert found - up == {
        ("bigint", "decimal(19,0)"),  # Spark counts 20 digits
        ("time(3)", "time(6)"),
    }
    assert {(own, wanted) for own, wanted in up - found if wanted != "string"} == {
        *itertools.product(("tinyint", "smallint", "int", "bigint"), ("float",)),
        ("bigint", "double"),
        *itertools.permutations(("bigint", "timestamp"), 2),
        ("decimal(3,0)", "smallint"),  # nothing is lost, but see the next
        *itertools.product(("decimal(3,0)", "decimal(10,0)", "decimal(19,0)"), ("bigint",)),
        ("decimal(3,0)", "int"),
        *itertools.permutations(("timestamp", "timestamp_ntz"), 2),
        ("date", "timestamp"),
        ("interval day to second", "interval hour"),
    }


def values_of(kind: str, rng: random.Random) -> str:
    """An array of extreme and random values of a type, and null, in Spark's SQL."""
    values = list(EXTREMES[kind])
    bits = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}.get(kind)
    if bits:
        values += [f"'{rng.randrange(-(1 << bits - 1), 1 << bits - 1)}'" for _ in range(40)]
    if kind == "float":
        values += [f"'{rng.uniform(-1, 1) * 10.0 ** rng.randrange(-30, 30)}'" for _ in range(40)]
    if kind == "date":
        values += [f"date_add(date'0001-01-01', {rng.randrange(3652059)})" for _ in range(40)]
    return f"array({', '.join(f'cast({value} AS {kind})' for value in values)}, null)"


def test_there_and_back_by_spark_every_value_is_what_it_was(session: SparkSession) -> None:
    rng = random.Random(11)
    checks: list[DataFrame] = []
    for own, wanted in sorted(PAIRS | {(kind, kind) for kind in EXTREMES}):
        df = session.sql(f"SELECT explode({values_of(own, rng)}) AS x")
        both = converted_columns(df.select("x", "x"), [(0, "x", typed(own)), (1, "y", typed(wanted))])
        assert both.schema["y"].dataType == typed(wanted)
        is_same = F.col("y").isNull() if own == "void" else F.col("y").cast(typed(own)).eqNullSafe(F.col("x"))
        checks.append(both.select(F.lit(f"{own} to {wanted}"), F.col("x").cast("string"), is_same.alias("same")))
    found = reduce(DataFrame.union, checks).collect()
    assert len(found) > 1000
    assert not [row for row in found if not row.same]


def test_the_conversions_that_spark_allows_and_that_lose_something(session: SparkSession) -> None:
    zone = session.conf.get("spark.sql.session.timeZone")
    lossy = {
        "America/New_York": ["timestamp_ntz'2024-03-10 02:30:00'", "timestamp'2024-11-03 06:30:00Z'"],
        "Pacific/Apia": ["date'2011-12-30'"],
    }[str(zone)]
    for value in lossy:
        df = session.sql(f"SELECT {value} AS x")
        other = "timestamp_ntz" if "Z'" in value else "timestamp"
        [(same,)] = df.select(F.col("x").cast(other).cast(df.schema["x"].dataType) == F.col("x")).collect()
        assert not same


@pytest.mark.parametrize(
    ("own", "wanted", "message"),
    [
        ("bigint", "int", "column 'value_x' is bigint, but the state's is int. .*Cast it yourself"),
        ("array<double>", "array<float>", "column 'value_x.element' is double, but the state's is float"),
        ("map<string,int>", "map<string,smallint>", "column 'value_x.value' is int"),
        ("map<timestamp,int>", "map<date,int>", "column 'value_x.key' is timestamp"),
        ("struct<a:int>", "struct<a:int,b:int>", "column 'value_x' has no field 'b', but the state's has one"),
        ("struct<count:int>", "struct<cuont:int>", "has no field 'cuont', .* Did you mean 'count'"),
        ("struct<A:int>", "struct<a:int>", "has no field 'a', .* Did you mean 'A'"),
        ("struct<a:int,b:int>", "struct<b:int>", "column 'value_x' has a field 'a', but the state's has none"),
        ("array<struct<s:struct<a:int>>>", "array<struct<s:struct<b:int>>>", "'value_x.element.s' has no field 'b'"),
        ("struct<a:int,a:int>", "struct<a:int>", "has two fields 'a', but the state's has one"),
        ("array<int>", "int", "is array<int>, but the state's is int"),
        ("string collate UTF8_LCASE", "string", "is string collate UTF8_LCASE, but the state's is string"),
    ],
)
def test_what_does_not_fit_is_named(own: str, wanted: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        require_convertible(typed(own), typed(wanted), "value_x", "the table", "the state's")


def test_fields_of_structs_are_matched_by_name_in_any_order(spark: SparkSession) -> None:
    own = "struct<`x.y`:int,x:smallint,X:array<struct<b:int,a:string>>,m:map<struct<b:int,a:string>,void>>"
    wanted = (
        "struct<m:map<struct<a:string,b:bigint>,int>,X:array<struct<a:string,b:decimal(10,0)>>,`x.y`:bigint,x:double>"
    )
    pair = Row(b=1, a="one")
    nulls = Row(None, None, None, None)  # type: ignore[call-overload]  # PySpark declares the names of columns only
    rows = [(Row(**{"x.y": 1, "x": 2, "X": [pair, None], "m": {pair: None}}),), (None,), (nulls,)]
    df = spark.createDataFrame(rows, StructType([StructField("s", typed(own))]))
    require_convertible(df.schema["s"].dataType, typed(wanted), "s", "the table", "the state's")
    found = converted_columns(df, [(0, "s", typed(wanted))])
    assert found.schema["s"].dataType.simpleString() == typed(wanted).simpleString()
    other = Row(a="one", b=1)
    expected = Row(**{"m": {other: None}, "X": [other, None], "x.y": 1, "x": 2.0})
    assert [row.s for row in found.collect()] == [expected, None, nulls]


def test_char_varchar_and_required_elements(spark: SparkSession) -> None:
    assert is_allowed("char(3)", "string")
    assert is_allowed("varchar(3)", "string")
    assert not is_allowed("string", "varchar(3)")
    df = spark.sql("SELECT array(1, null) AS x")
    assert df.schema["x"].dataType.containsNull  # type: ignore[attr-defined]  # of an array
    kind = typed("array<bigint>")
    kind.containsNull = False  # type: ignore[attr-defined]  # of an array
    require_convertible(df.schema["x"].dataType, kind, "value_x", "the table", "the state's")
    assert converted_columns(df, [(0, "x", kind)]).collect() == [Row(x=[1, None])]
