"""``spark.read.format("statelog")``: the same rows as ``read_state``, whatever the query does meanwhile."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession, datasource

import statelog
from statelog import PinExpiredError, StatelogError, StateMissingError
from statelog.aggregates.build import KeyedDefinition, plan_aggregates
from statelog.convert.types import key_schema
from statelog.reading import rows as merged
from statelog.storage import LocalStore
from statelog.testing import Harness
from statelog.testing.harness import parts_of
from statelog.testing.rows import read_schema
from tests.reading.pins_support import ReadOnly
from tests.reading.story import STATES, Story, map_rows, value_rows


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    made = Story(tmp_path_factory.mktemp("story") / "query", retained_checkpoints=4)
    made.run_batches(8, random.Random(1))
    return made


@pytest.fixture(scope="module")
def source(spark: SparkSession) -> SparkSession:
    spark.dataSource.register(statelog.StateSource)
    return spark


def load(source: SparkSession, story: Story, **options: Any) -> DataFrame:
    return source.read.format("statelog").options(**options).load(story.location)


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, frame.collect()), key=repr)


@pytest.mark.parametrize("state", STATES)
def test_rows_are_those_of_the_state(source: SparkSession, story: Story, state: str) -> None:
    assert rows(load(source, story, state=state)) == STATES[state](story.models[-1])


def test_a_checkpoint_and_columns_are_chosen(source: SparkSession, story: Story) -> None:
    assert rows(load(source, story, state="map", at="5")) == map_rows(story.models[5])
    found = load(source, story, state="value", at="6", columns="value_field, key_a")
    assert found.columns == ["value_field", "key_a"]
    assert rows(found) == sorted(((row[2], row[0]) for row in value_rows(story.models[6])), key=repr)
    at = load(source, story, state="value", at="1970-01-01T00:00:01.006")
    assert rows(at) == value_rows(story.models[6])


@pytest.fixture
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are cut where partitions are planned, which is in a process of Spark's; so this is for its own code."""
    monkeypatch.setattr(merged, "PART_BYTES", 4096)


def test_the_state_is_read_in_parts_that_make_up_the_whole(many_parts: None, story: Story) -> None:
    reader: Any = statelog.StateSource({"path": story.location, "state": "list"})
    reader = reader.reader(reader.schema())
    parts = reader.partitions()
    assert len(parts) > 3
    read = [tuple(row.values()) for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
    assert sorted(read, key=repr) == STATES["list"](story.models[-1])
    pinned = {pin.batch for pin in statelog.list_pins(story.location) if pin.owner == "spark.read"}
    assert len(story.models) - 1 in pinned


def read_all(reader: Any, parts: list[Any]) -> list[tuple[Any, ...]]:
    found = [tuple(row.values()) for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
    return sorted(found, key=repr)


def test_what_was_planned_is_read_although_the_query_goes_back(tmp_path: Path) -> None:
    """Without Spark: what the driver plans, and what tasks do then."""
    query = Story(tmp_path / "query")
    query.run_batches(6, random.Random(1))
    before = map_rows(query.models[5])
    options = {"path": query.location, "state": "map"}
    first: Any = statelog.StateSource(options)
    planned = first.reader(first.schema())
    parts = planned.partitions()
    query.go_back(3)
    query.run_batches(2, random.Random(2))
    assert read_all(planned, parts) == before
    [pin] = [one for one in statelog.list_pins(query.location) if not one.is_on_line]
    again: Any = statelog.StateSource({**options, "at": pin.name})
    by_name = again.reader(again.schema())
    parts = by_name.partitions()
    statelog.unpin(query.location, pin.name)
    assert read_all(by_name, parts) == before
    for one in statelog.list_pins(query.location):
        statelog.unpin(query.location, one.name)
    with pytest.raises(PinExpiredError, match="batch 5 was repeated"):
        read_all(by_name, parts)


def test_without_the_right_to_write_nothing_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query = Story(tmp_path / "query", retained_checkpoints=2)
    query.run_batches(6, random.Random(1))
    monkeypatch.setattr("statelog.reading.open.open_location", lambda location: ReadOnly(LocalStore(location)))
    opened: Any = statelog.StateSource({"path": query.location, "state": "map"})
    reader = opened.reader(opened.schema())
    parts = reader.partitions()
    assert statelog.list_pins(query.location) == []
    assert read_all(reader, parts) == map_rows(query.models[-1])
    query.run_batches(4, random.Random(2))
    with pytest.raises(StateMissingError, match="has no checkpoint 5"):
        read_all(reader, parts)


def test_filters_on_the_whole_key_read_these_keys(source: SparkSession, story: Story) -> None:
    """With and without pushing them down."""
    known = value_rows(story.models[-1])
    wanted = [row for row in known if row[0] in (1, 2) and row[1] == "a"]
    frame = load(source, story, state="value").where("key_a in (1, 2) and key_b = 'a'")
    assert rows(frame) == wanted
    if not hasattr(datasource, "EqualTo"):
        pytest.skip("this Spark pushes no filters down")
    source.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = load(source, story, state="value", push_filters="true").where("key_a in (1, 2) and key_b = 'a'")
        assert frame.rdd.getNumPartitions() == 1
        assert rows(frame) == wanted
        assert rows(load(source, story, state="value", push_filters="true").where("key_a = 1")) == [
            row for row in known if row[0] == 1
        ]
    finally:
        source.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_a_key_list_is_one_partition(story: Story) -> None:
    if not hasattr(datasource, "EqualTo"):
        pytest.skip("this Spark pushes no filters down")
    whole: Any = statelog.StateSource({"path": story.location, "state": "value", "push_filters": "true"})
    reader = whole.reader(whole.schema())
    filters = [datasource.In(("key_a",), (1, 2)), datasource.EqualTo(("key_b",), "a")]
    assert list(reader.pushFilters(filters)) == filters
    [part] = reader.partitions()
    assert sorted(part.keys.to_pylist(), key=repr) == [{"a": 1, "b": "a"}, {"a": 2, "b": "a"}]


@pytest.mark.parametrize(
    "values",
    [{"key_a": (1,)}, {"key_a": ("x",), "key_b": ("a",)}, {"key_a": range(1000), "key_b": map(str, range(1000))}],
)
def test_other_filters_read_the_whole_state(story: Story, values: dict[str, Any]) -> None:
    if not hasattr(datasource, "EqualTo"):
        pytest.skip("this Spark pushes no filters down")
    whole: Any = statelog.StateSource({"path": story.location, "state": "value", "push_filters": "true"})
    reader = whole.reader(whole.schema())
    reader.pushFilters([datasource.In((name,), tuple(allowed)) for name, allowed in values.items()])
    assert all(part.keys is None for part in reader.partitions())


@pytest.fixture
def amounts() -> Iterator[tuple[str, list[Decimal]]]:
    """State with decimals as keys: its location, and the keys."""
    keys = [
        Decimal(text) for text in ("12345678901234567890.123456789012345678", "1.5", "-9999999999.999999999999999999")
    ]
    schema = read_schema("amount decimal(38,18)", "input")
    definition = KeyedDefinition(schema, [0], key_schema(list(schema)), None, is_streaming=True, ansi=True)
    plan = plan_aggregates(definition, [], {"n": statelog.Count()}, output_mode="update", ttl=None, combine=False)
    with Harness(plan.operator, input=schema, output=plan.output, keys=["amount"]) as query:
        query.push([(key,) for key in keys])
        yield parts_of(query).query.location, keys


def test_a_decimal_that_spark_may_have_rounded_is_not_looked_up(amounts: tuple[str, list[Decimal]]) -> None:
    """Spark multiplies the unscaled number in Python's default context, of 28 digits."""
    if not hasattr(datasource, "EqualTo"):
        pytest.skip("this Spark pushes no filters down")
    location, keys = amounts
    for key, is_looked_up in zip(keys, (False, True, False), strict=True):
        literal = Decimal(int(key.scaleb(18, Context(prec=50)))) * Decimal(10) ** -18
        whole: Any = statelog.StateSource({"path": location, "push_filters": "true"})
        reader = whole.reader(whole.schema())
        reader.pushFilters([datasource.EqualTo(("key_amount",), literal)])
        assert [part.keys is not None for part in reader.partitions()] == [is_looked_up]


def test_filters_on_decimals_lose_no_rows(source: SparkSession, amounts: tuple[str, list[Decimal]]) -> None:
    if not hasattr(datasource, "EqualTo"):
        pytest.skip("this Spark pushes no filters down")
    location, keys = amounts
    source.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        for key in keys:
            frame = source.read.format("statelog").option("push_filters", "true").load(location)
            assert [row.key_amount for row in frame.where(f"key_amount = {key}BD").collect()] == [key]
    finally:
        source.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_lists_are_frames(source: SparkSession, story: Story) -> None:
    checkpoints = load(source, story, show="checkpoints").collect()
    assert [row.batch for row in checkpoints] == [4, 5, 6, 7]
    [operator] = load(source, story, show="operators").collect()
    assert operator == Row(**{**vars(statelog.list_operators(story.location)[0]), "states": ["list", "map", "value"]})
    assert {row.state for row in load(source, story, show="states").collect()} == set(STATES)
    assert load(source, story, show="pins").count() == len(statelog.list_pins(story.location))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Pass one of them as state"),
        ({"state": "nothing"}, "has no state 'nothing'"),
        ({"state": "value", "at": "noon"}, "neither a batch nor a time"),
        ({"state": "value", "at": "1000"}, "has no checkpoint 1000"),
        ({"state": "value", "batch": "1"}, "no option 'batch'"),
        ({"show": "all"}, "It must be one of rows, operators"),
        ({"state": "value", "pin_s": "long"}, "a number of seconds"),
        ({"state": "value", "push_filters": "yes"}, "It must be true or false"),
    ],
    ids=str,
)
def test_mistakes_are_named(story: Story, options: dict[str, str], message: str) -> None:
    source = statelog.StateSource({"path": story.location, **options})
    with pytest.raises(StatelogError, match=re.escape(message)):
        source.reader(source.schema()).partitions()


def test_a_path_without_state_is_named(source: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(PySparkException, match="holds no state"):
        source.read.format("statelog").load(str(tmp_path)).collect()
