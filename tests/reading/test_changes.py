"""``read_changes``: replayed on a plain dictionary, the changes give the state of every batch."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog import ConfigurationError, StateMissingError
from statelog.reading.consumer import ChangeConsumer
from statelog.reading.open import open_logged
from statelog.storage import LocalStore
from statelog.testing.faults import FaultStore
from tests.reading.changes_support import Rows, replayed
from tests.reading.pins_support import Stop
from tests.reading.story import KEYS, STATES, Story, list_rows, map_rows, random_commands, rows, value_rows
from tests.stored_query import StoredQuery


@pytest.fixture(scope="module", params=["inline", "objects", "materialized"])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """A query that was restarted with other parallelisms."""
    options: dict[str, Any] = {"inline_budget_bytes": 0 if request.param == "objects" else None}
    if request.param == "materialized":
        options |= {"retained_checkpoints": 4, "materialization_interval_s": 0.0, "max_file_bytes": 4000}
        options |= {"log_min_age_s": 0.0}
    made = Story(tmp_path_factory.mktemp("story") / "query", **options)
    rng = random.Random(request.param)
    for parallelism in (None, 2, 5):
        if parallelism is not None:
            made.start(parallelism, keep_local=parallelism == 2)
        made.run_batches(6, rng)
    return made


def changes(story: Story, state: str, **arguments: Any) -> Rows:
    found: Rows = statelog.read_changes(story.location, state=state, **arguments).read_all().to_pylist()
    return found


@pytest.mark.parametrize("state", STATES)
def test_replayed_changes_are_the_state_of_every_batch(story: Story, state: str) -> None:
    found = changes(story, state)
    by_batch = {batch: list(own) for batch, own in itertools.groupby(found, lambda row: row["batch"])}
    assert list(by_batch) == sorted(by_batch), "batch after batch"
    first = min(by_batch)
    known = STATES[state](story.models[first - 1]) if first else []
    for batch in range(first, len(story.models)):
        known = replayed(known, by_batch.get(batch, []), state)
        assert known == STATES[state](story.models[batch]), batch
        assert {row["batch_time_ms"] for row in by_batch.get(batch, [])} <= {1000 + batch}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("count", [1, 5])
def test_the_changes_of_some_keys_are_those_among_all(story: Story, state: str, count: int) -> None:
    keys = random.Random(count).sample(KEYS, count)
    everything = changes(story, state)
    assert changes(story, state, keys=[*keys, (99, "unknown")]) == [
        row for row in everything if (row["key_a"], row["key_b"]) in keys
    ]


def test_a_range_of_batches(story: Story) -> None:
    everything = changes(story, "map")
    last = len(story.models) - 1
    assert changes(story, "map", after=last) == []
    assert changes(story, "map", after=last + 5) == []
    assert changes(story, "map", after=last - 2) == [row for row in everything if row["batch"] > last - 2]
    assert changes(story, "map", after=last - 3, up_to=last - 1) == [
        row for row in everything if last - 3 < row["batch"] <= last - 1
    ]


def test_changes_that_are_gone_are_refused(tmp_path: Path) -> None:
    query = Story(
        tmp_path,
        parallelism=2,
        retained_checkpoints=2,
        materialization_interval_s=0.0,
        max_file_bytes=1,
        log_min_age_s=0.0,
    )
    query.run_batches(12, random.Random(1))
    first = changes(query, "value")[0]["batch"]
    assert first > 3
    with pytest.raises(StateMissingError, match=f"batch {first} and later batches, but the changes since batch 3"):
        changes(query, "value", after=2)


@pytest.mark.parametrize("batches", [1, 6])
def test_a_reader_of_changes_stopped_at_any_request_reads_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    """The query deletes what it can before the reader's n-th request."""
    story = Story(
        tmp_path / "query",
        parallelism=2,
        inline_budget_bytes=0,
        retained_checkpoints=2,
        materialization_interval_s=0.0,
        max_file_bytes=1,
        log_min_age_s=0.0,
    )
    story.run_batches(7, random.Random(1))
    deleted = 0
    for number in itertools.count(1):
        query = story.copied(tmp_path / str(number))
        query.start(keep_local=False)
        stop = Stop(number, lambda query=query: query.run_batches(batches, random.Random(2)))  # type: ignore[misc]  # a lambda with a default has no inferred type
        with monkeypatch.context() as patch:
            patch.setattr(
                "statelog.reading.open.open_location",
                lambda location, stop=stop: FaultStore(LocalStore(location), stop),
            )
            found = changes(query, "value")
        first = min(row["batch"] for row in found)
        deleted += first > 3
        last = max(row["batch"] for row in found)
        known = replayed(value_rows(query.models[first - 1]) if first else [], found, "value")
        assert known == value_rows(query.models[last])
        if stop.requests < number:
            break
    assert deleted, "the query deletes nothing"
    assert number > 10


def test_columns_and_kinds_of_changes(tmp_path: Path) -> None:
    query = Story(tmp_path)
    key = KEYS[0]
    query.run(0, [(key, ("put", "p", 1)), (key, ("put", "q", 2)), (key, ("append", "x"))])
    query.run(1, [(key, ("remove", "p")), (key, ("set", 5))])
    query.run(2, [(key, ("wipe",)), (key, ("put", "r", 3)), (key, ("replace", "y", "z"))])
    kinds = ["batch", "operation", "mapkey_field", "value_field"]
    assert [tuple(row.values()) for row in changes(query, "map", columns=kinds)] == [
        (0, "put", "p", 1),
        (0, "put", "q", 2),
        (1, "delete", "p", None),
        (2, "clear", None, None),
        (2, "put", "r", 3),
    ]
    assert [tuple(row.values()) for row in changes(query, "list", columns=["batch", "operation", "value_field"])] == [
        (0, "put", "x"),
        (2, "clear", None),
        (2, "put", "y"),
        (2, "put", "z"),
    ]
    assert rows(statelog.read_state(query.location, state="list").read_all()) == list_rows(query.models[2])
    assert rows(statelog.read_state(query.location, state="map").read_all()) == map_rows(query.models[2])
    with pytest.raises(ConfigurationError, match="has no column 'position'"):
        changes(query, "list", columns=["position"])


def test_without_a_changelog_there_are_no_changes(tmp_path: Path) -> None:
    query = Story(tmp_path, changelog=False)
    query.run(0, random_commands(random.Random(1), 10))
    with pytest.raises(ConfigurationError, match=r"changelog=False"):
        changes(query, "value")


@pytest.mark.parametrize("after", ["1", 1.5, True])
def test_what_is_no_batch_is_refused(story: Story, after: Any) -> None:
    with pytest.raises(statelog.ConfigurationError, match="^after is .* Hint: It must be a whole number"):
        statelog.read_changes(story.location, state="value", after=after)


@pytest.mark.parametrize("after", [None, -1, 1, 2])
def test_the_changes_of_an_operator_that_was_added_begin_with_it(tmp_path: Path, after: int | None) -> None:
    query = StoredQuery(tmp_path / "query").run(["a"], range(3)).run(["a", "b"], range(3, 6))
    found = statelog.read_changes(query.location, "b", state="list", after=after).read_all()
    assert set(found["batch"].to_pylist()) == {3, 4, 5}
    point = open_logged(query.location, "b", None)
    consumer = ChangeConsumer(query.location, point, "list", pin_s=60, max_bytes=1 << 20)
    assert consumer.first(after).batch == 2
