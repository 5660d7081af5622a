"""``read_diff``: the difference of two checkpoints, applied to the first state, gives the second one."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog import ConfigurationError, StateMissingError
from statelog.reading import diff, rows
from tests.reading.story import KEYS, STATES, Story, map_rows, value_rows

PINNED = 3


@pytest.fixture(scope="module", params=["whole log", "given up", "scanned"])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """A query that was restarted with another parallelism; a pin keeps a checkpoint whose changes are gone."""
    options: dict[str, Any] = {}
    if request.param == "given up":
        options = {
            "retained_checkpoints": 3,
            "materialization_interval_s": 0.0,
            "max_file_bytes": 1,
            "log_min_age_s": 0.0,
        }
    patch = pytest.MonkeyPatch()
    if request.param == "scanned":
        patch.setattr(diff, "MOST_CHANGED_BYTES", -1)
        patch.setattr(rows, "PART_BYTES", 16_384)
    made = Story(tmp_path_factory.mktemp("story") / "query", parallelism=2, **options)
    made.run_batches(PINNED + 1, random.Random(1))
    statelog.pin(made.location, at=PINNED, lasts_s=None, owner="audit")
    made.run_batches(6, random.Random(2))
    made.start(3, keep_local=False)
    made.run_batches(4, random.Random(3))
    yield made
    patch.undo()


def difference(story: Story, before: int, after: int | None, state: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = statelog.read_diff(story.location, before, after, state=state).read_all().to_pylist()
    return found


def batches(story: Story) -> list[int]:
    return [info.batch for info in statelog.list_checkpoints(story.location)]


def test_checkpoints_to_compare(story: Story) -> None:
    assert PINNED in batches(story)
    assert len(batches(story)) >= 4


@pytest.mark.parametrize("state", ["value", "map"])
def test_entries_that_differ(story: Story, state: str) -> None:
    rows_of = value_rows if state == "value" else map_rows
    for before, after in itertools.permutations(random.Random(state).sample(batches(story), 4), 2):
        old = {row[:-1]: row[-1] for row in rows_of(story.models[before])}
        new = {row[:-1]: row[-1] for row in rows_of(story.models[after])}
        expected = {
            entry: (
                "changed" if entry in old and entry in new else "added" if entry in new else "removed",
                old.get(entry),
                new.get(entry),
            )
            for entry in old | new
            if old.get(entry) != new.get(entry)
        }
        names = ["key_a", "key_b", *(["mapkey_field"] if state == "map" else [])]
        found = difference(story, before, after, state)
        assert len(found) == len(expected)
        assert {
            tuple(row[name] for name in names): (row["change"], row["before_field"], row["value_field"])
            for row in found
        } == expected
        assert expected


def test_elements_of_lists_that_differ(story: Story) -> None:
    for before, after in itertools.permutations(random.Random(1).sample(batches(story), 3), 2):
        elements = [
            Counter((*row[:2], row[3]) for row in STATES["list"](story.models[batch])) for batch in (before, after)
        ]
        found = difference(story, before, after, "list")
        assert {row["change"] for row in found} <= {"added", "removed"}
        removed, added = (
            Counter((row["key_a"], row["key_b"], row[name]) for row in found if row["change"] == change)
            for change, name in (("removed", "before_field"), ("added", "value_field"))
        )
        assert not removed - elements[0]
        assert elements[0] - removed + added == elements[1]


def test_the_newest_checkpoint_and_itself(story: Story) -> None:
    newest = batches(story)[-1]
    before = batches(story)[-2]
    assert difference(story, before, None, "map") == difference(story, before, newest, "map")
    assert difference(story, newest, None, "map") == []


def test_mistakes_are_named(story: Story, tmp_path: Path) -> None:
    with pytest.raises(StateMissingError, match="has no checkpoint 1000"):
        difference(story, 1000, None, "value")
    with pytest.raises(ConfigurationError, match="Pass one of them as state"):
        statelog.read_diff(story.location, PINNED)
    with pytest.raises(ConfigurationError, match="has no column 'value'"):
        statelog.read_diff(story.location, PINNED, state="value", columns=["value"])


def test_only_changes_and_the_blocks_of_their_keys_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small difference of a large state."""
    query = Story(tmp_path, parallelism=2, retained_checkpoints=2, materialization_interval_s=0.0, log_min_age_s=0.0)
    for number in range(6):
        query.run(number, [((place, "k" * 50), ("set", number)) for place in range(number * 4000, (number + 1) * 4000)])
    for number in range(6, 12):
        query.run(number, [(KEYS[number], ("set", number))])
    assert statelog.list_checkpoints(query.location)[0].batch == 10
    monkeypatch.setattr(diff, "MOST_CHANGED_BYTES", 1 << 20)
    monkeypatch.delattr(diff, "scan_part")
    [row] = difference(query, 10, 11, "value")
    assert (row["change"], row["value_field"], (row["key_a"], row["key_b"])) == ("added", 11, KEYS[11])
