"""State that is read without its query: its rows, its checkpoints, and the errors if there is nothing to read."""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import statelog
from statelog import ConfigurationError, StateMissingError
from statelog.errors import ErrorKind
from statelog.testing import Harness
from statelog.testing.harness import parts_of
from tests.model.engine import Model
from tests.reading.story import KEYS, STATES, Story, list_rows, map_rows, rows, value_rows


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    story = Story(tmp_path_factory.mktemp("story"))
    story.run_batches(12, random.Random(1))
    return story


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
@pytest.mark.parametrize("at", [2, 7, 11, None])
def test_every_state_is_read_as_of_a_checkpoint(
    story: Story, at: int | None, memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statelog.reading.rows.MEMORY_BYTES", memory_bytes)
    monkeypatch.setattr("statelog.reading.rows.PART_BYTES", 2000)
    model = story.models[-1 if at is None else at]
    for state, expected in (("value", value_rows), ("list", list_rows), ("map", map_rows)):
        found = statelog.read_state(story.location, "op", state, at=at).read_all()
        assert rows(found) == expected(model)


def test_columns_are_typed_and_chosen(story: Story) -> None:
    reader = statelog.read_state(story.location, state="map")
    assert reader.schema == pa.schema(
        [("key_a", pa.int64()), ("key_b", pa.string()), ("mapkey_field", pa.string()), ("value_field", pa.int64())]
    )
    chosen = statelog.read_state(story.location, state="map", columns=["value_field", "hash"]).read_all()
    assert chosen.column_names == ["value_field", "hash"]
    assert chosen.column("hash").to_numpy().view("u8").tolist() == sorted(
        chosen.column("hash").to_numpy().view("u8").tolist()
    )


def test_below_a_checkpoint_location(story: Story, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "statelog").symlink_to(story.location)
    assert statelog.read_state(tmp_path / "checkpoint", state="value").read_all().num_rows > 0


def test_a_reader_leaves_nothing_behind(story: Story) -> None:
    def pins() -> list[Path]:
        return list(Path(story.location).glob("pins/*"))

    reader = statelog.read_state(story.location, state="value")
    assert len(pins()) == 1
    reader.read_all()
    assert not pins()
    unread = statelog.read_state(story.location, state="value")
    assert len(pins()) == 1
    del unread
    assert not pins()


@pytest.mark.parametrize("seed", range(4))
def test_after_materializations_and_with_other_parallelisms(tmp_path: Path, seed: int) -> None:
    """As a whole and by key, while levels are cut by several divisions of the hashes."""
    rng = random.Random(seed)
    story = Story(
        tmp_path,
        parallelism=rng.randint(1, 5),
        merge_fan_in=rng.randint(2, 4),
        inline_budget_bytes=rng.choice([0, 300, None]),
        materialization_interval_s=rng.choice([0, 3]),
        max_log_to_base=0,
        retained_checkpoints=4,
    )
    for _ in range(5):
        story.start(rng.randint(1, 5), keep_local=rng.random() < 0.5)
        for _ in range(4):
            story.run_batches(1, rng)
            story.engine.clock.advance(2)
        at = len(story.models) - rng.randint(1, 4)
        keys = rng.sample(KEYS, 7)
        few = Model({key: found for key, found in story.models[at].keys.items() if key in keys})
        for state, expected in STATES.items():
            assert rows(statelog.read_state(story.location, state=state, at=at).read_all()) == expected(
                story.models[at]
            )
            assert rows(statelog.read_state(story.location, state=state, at=at, keys=keys).read_all()) == expected(few)
    record = story.query().histories[story.identity].latest_record
    assert record is not None
    assert record.base_map is not None
    assert record.base_map.ranges, "nothing was materialized"


# ---- Nothing to read ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"uid": "other"}, "has no operator 'other'; it has 'op'"),
        ({"state": "other"}, "has no state 'other'"),
        ({}, "has the states 'list', 'map', 'value'"),
        ({"state": "value", "columns": ["value"]}, "has no column 'value'"),
    ],
)
def test_mistakes_are_named(story: Story, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as one:
        statelog.read_state(story.location, **arguments)
    assert one.value.hint


def test_a_folder_without_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no state"):
        statelog.read_state(tmp_path)


def test_a_query_before_its_first_batch_is_named(tmp_path: Path) -> None:
    (tmp_path / "metadata").write_text('{"id":"query"}')
    with pytest.raises(ConfigurationError, match="holds no state yet: .* Hint: Try again after the query's first"):
        statelog.read_state(tmp_path)
    (tmp_path / "metadata").unlink()
    (tmp_path / "metadata").mkdir()  # of a table, say
    (tmp_path / "metadata" / "v1.json").touch()
    with pytest.raises(ConfigurationError, match="holds no state: neither"):
        statelog.read_state(tmp_path)


def test_a_time_may_be_a_text(story: Story) -> None:
    newest = statelog.read_state(story.location, state="value").read_all()
    texts: list[Any] = ["2100-01-01", "2100-01-01T00:00:00", "2100-01-01T00:00:00+02:00", np.int64(11), "11"]
    for at in texts:
        assert statelog.read_state(story.location, state="value", at=at).read_all() == newest
        with statelog.open_state(story.location, at=at) as reader:
            assert reader.read("value").read_all() == newest
    with pytest.raises(StateMissingError, match="no checkpoint of 1970-01-01T00:00:00\\+00:00 or before"):
        statelog.read_state(story.location, state="value", at="1970-01-01")


@pytest.mark.parametrize("at", [1.5, True, "tomorrow", "", datetime.date(2026, 1, 1), [3]])
def test_what_names_no_checkpoint_is_refused(story: Story, at: Any) -> None:
    with pytest.raises(ConfigurationError, match="Hint: Pass a") as one:
        statelog.read_state(story.location, state="value", at=at)
    assert one.value.kind is ErrorKind.VALUE_MISMATCH


@pytest.mark.parametrize("at", [-1, 0, 12])
def test_a_checkpoint_that_is_not_retained_is_named(story: Story, at: int) -> None:
    with pytest.raises(StateMissingError, match=f"no checkpoint {at}: it retains 2 to 11"):
        statelog.read_state(story.location, state="value", at=at)


# ---- Some keys ----


@pytest.mark.parametrize("at", [5, 11])
def test_some_keys_are_found_without_the_others(story: Story, at: int) -> None:
    wanted = [KEYS[3], KEYS[4], KEYS[20], KEYS[20], KEYS[-1], (1000, "none")]
    model = Model({key: found for key, found in story.models[at].keys.items() if key in wanted})
    for state, expected in (("value", value_rows), ("list", list_rows), ("map", map_rows)):
        found = statelog.read_state(story.location, "op", state, at=at, keys=wanted).read_all()
        assert rows(found) == expected(model)


@pytest.mark.parametrize(
    "keys",
    [
        [{"a": 3, "b": "a"}],
        pa.table({"b": ["a"], "a": pa.array([3], pa.int32())}),
        pa.RecordBatch.from_pydict({"a": [3], "b": ["a"]}),
        [[3, "a"]],
    ],
)
def test_keys_come_in_several_forms(story: Story, keys: Any) -> None:
    model = Model({(3, "a"): story.models[-1].keys[(3, "a")]})
    assert rows(statelog.read_state(story.location, state="map", keys=keys).read_all()) == map_rows(model)


@pytest.mark.parametrize(
    "keys", [[3], [(3,)], ["a"], [("text", "a")], pa.table({"a": [3]}), [{"a": 3}], [(3, 2 << 70)]]
)
def test_keys_that_do_not_fit_are_refused(story: Story, keys: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"has the key \(a int64, b string\)"):
        statelog.read_state(story.location, state="map", keys=keys)


def test_no_keys_are_no_rows(story: Story) -> None:
    assert statelog.read_state(story.location, state="map", keys=[]).read_all().num_rows == 0


# ---- Keys with times ----


@pytest.fixture(params=["America/New_York", "Asia/Kolkata"])
def local_zone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the process live in a zone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("kind", ["timestamp", "timestamp_ntz", "struct<at:timestamp,n:long>"])
@pytest.mark.usefixtures("local_zone")
def test_a_datetime_without_a_zone_is_what_spark_returns(kind: str) -> None:
    schema = f"k {kind}, x long"
    aware = datetime.datetime(2024, 11, 3, 5, 30, 0, 7, datetime.UTC)  # the second half past one in New York
    given: Any = {"timestamp": aware, "timestamp_ntz": aware.replace(tzinfo=None)}.get(kind, {"at": aware, "n": 1})
    with Harness(Echo(), input=schema, keys=["k"], output=schema, sessionTimeZone="America/New_York") as harness:
        [row] = harness.push([(given, 1)])
        location = parts_of(harness).query.location

        def found(key: Any) -> int:
            return int(statelog.read_state(location, keys=[key]).read_all().num_rows)

        returned: Any = row.k.asDict() if isinstance(row.k, Row) else row.k
        assert found((returned,)) == found({"k": returned}) == found((given,)) == 1
        if kind == "timestamp":
            assert returned.tzinfo is None
            assert found(returned) == 1
            assert found(returned.astimezone()) == 1
            assert found(aware.replace(tzinfo=None)) == 0


class Echo(StatefulProcessor):
    """Returns its rows, and keeps that there were some."""

    def init(self, handle: Any) -> None:
        self._seen = handle.getValueState("seen", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self._seen.update((1,))
        yield from rows

    def close(self) -> None:
        pass
