"""``read_history``: the changes of one key, and its state before them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog import ConfigurationError
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
