"""``read_history``: the changes of one key, and its state before them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog import ConfigurationError
from statelog.testing import Harness
from statelog.testing.harness import parts_of
from tests.reading.kinds_of_state_support import Declared, Reminders, visits
from tests.reading.story import KEYS, STATES, Story


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """A query that has given up its first changes, with a pinned checkpoint among them."""
    made = Story(
        tmp_path_factory.mktemp("story") / "query",
        parallelism=2,
        retained_checkpoints=3,
        materialization_interval_s=0.0,
        max_file_bytes=1,
        log_min_age_s=0.0,
    )
    made.run_batches(4, random.Random(1))
    statelog.pin(made.location, at=3, lasts_s=None, owner="audit")
    made.run_batches(8, random.Random(2))
    return made


def history(story: Story, key: Any, state: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = statelog.read_history(story.location, key, state=state).read_all().to_pylist()
    return found


def entries(rows: list[dict[str, Any]], state: str) -> list[Any]:
    names = ["key_a", "key_b", *(["mapkey_field"] if state == "map" else []), "value_field"]
    return sorted((tuple(row[name] for name in names) for row in rows), key=repr)


@pytest.mark.parametrize("state", STATES)
def test_a_keys_changes_and_its_state_before_them(story: Story, state: str) -> None:
    everything = statelog.read_changes(story.location, state=state).read_all().to_pylist()
    assert min(row["batch"] for row in everything) > 3
    oldest = statelog.list_checkpoints(story.location)[1].batch
    told = 0
    for key in KEYS:
        found = history(story, key, state)
        assert [row["batch"] for row in found] == sorted(row["batch"] for row in found)
        changes = [row for row in found if row["operation"] != "state"]
        assert changes == [row for row in everything if (row["key_a"], row["key_b"]) == key]
        for batch in (3, oldest):
            own = [row for row in found if row["operation"] == "state" and row["batch"] == batch]
            expected = [row for row in STATES[state](story.models[batch]) if row[:2] == key]
            if state == "list":
                expected = [(*row[:2], row[3]) for row in expected]
            assert entries(own, state) == sorted(expected, key=repr)
            told += len(own)
        assert {row["batch"] for row in found if row["operation"] == "state"} <= {3, oldest}
    assert told > len(KEYS) / 4


def test_an_unknown_key_has_no_history_and_a_wrong_one_is_named(story: Story, tmp_path: Path) -> None:
    assert history(story, (99, "unknown"), "value") == []
    with pytest.raises(ConfigurationError, match="do not fit"):
        history(story, "text", "value")


def told(harness: Harness, key: str, state: str) -> list[tuple[Any, ...]]:
    rows = statelog.read_history(parts_of(harness).query.location, key, state=state).read_all().to_pylist()
    return [tuple(row.values()) for row in rows]


def test_timers_have_a_history() -> None:
    with visits(Reminders()) as harness:
        harness.push([("a", 1), ("b", 2)], processingTimeMs=10)
        harness.push([("a", 3)], processingTimeMs=1010)
        assert told(harness, "a", "timers") == [
            (0, 10, "put", "a", 1010),
            (0, 10, "state", "a", 1010),
            (1, 1010, "delete", "a", 1010),
            (1, 1010, "put", "a", 2010),
        ]


@pytest.mark.parametrize(
    ("fields", "row", "before"),
    [
        ("b long", {"value_b": 5, "value_a": None}, {"value_b": 2, "value_a": 1}),
        (
            "a long, c long, b long",
            {"value_a": 5, "value_c": 10, "value_b": 15},
            {"value_a": 1, "value_c": None, "value_b": 2},
        ),
    ],
)
def test_earlier_states_have_the_newest_fields(fields: str, row: dict[str, Any], before: dict[str, Any]) -> None:
    def values(schema: str) -> Declared:
        width = schema.count(",") + 1
        return Declared(
            lambda handle: handle.getValueState("v", schema),
            lambda v, row: v.update(tuple(row.n * (number + 1) for number in range(width))),
        )

    with visits(values("a long, b long")) as harness:
        harness.push([("x", 1)], processingTimeMs=10)
        harness.restart(processor=values(fields))
        harness.push([("x", 5)], processingTimeMs=20)
        found = statelog.read_history(parts_of(harness).query.location, "x", state="v").read_all().to_pylist()
    shown = [(each["operation"], {name: each[name] for name in each if name.startswith("value_")}) for each in found]
    assert shown == [("put", before), ("state", before), ("put", row)]
