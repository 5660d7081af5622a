"""Branches in other buckets and folders than their parents, and from a bucket to a directory and back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog.history.query_history import read_history
from statelog.log.open import open_location
from statelog.storage.links import is_link
from statelog.testing.query import ManualClock
from tests.model.engine import Engine
from tests.reading.story import STATES, Story, hash_of, rows
from tests.s3.server import BUCKET, RadosGateway
from tests.tools.cli.spark_files import write_spark_files

pytest_plugins = ("tests.s3.plugin",)

OTHER_BUCKET = "statelog-branches"
OPTIONS: dict[str, Any] = {
    "retained_checkpoints": 3,
    "materialization_interval_s": 0,
    "max_log_to_base": 0,
    "log_min_age_s": 0,
    "file_merging": "auto",
}


@pytest.fixture(scope="module")
def buckets(s3_server: RadosGateway) -> None:
    s3_server.create_bucket(OTHER_BUCKET)


def engine_at(location: str, directory: Path, parent: Story) -> Engine:
    class Placed(Engine):
        @property
        def location(self) -> str:
            return location

    engine = Placed(directory, hash_of, open_store=open_location)
    engine.options = parent.engine.options
    engine.clock = ManualClock(parent.engine.clock.now_s())
    engine.times = dict(parent.engine.times)
    return engine


def branch_of(parent: Story, location: str, directory: Path) -> Story:
    """Branch a query, whose Spark files are beside its state; the branch has not been started."""
    write_spark_files(f"{parent.location}-checkpoint", parent, len(parent.models))
    made = statelog.branch(
        f"{parent.location}-checkpoint", f"{location}-checkpoint", location=parent.location, new_location=location
    )
    story: Story = object.__new__(Story)
    story.__dict__ = dict(parent.__dict__)
    story.engine = engine_at(location, directory, parent)
    story.engine.query_id = made.query_id
    story.location, story.parallelism = location, parent.parallelism
    story.models = parent.models[: made.next_batch]
    return story


def require_state(story: Story, batch: int | None = None) -> None:
    """Read a checkpoint from outside, by default the newest."""
    for state, expected in STATES.items():
        found = statelog.read_state(story.location, state=state, at=batch).read_all()
        assert rows(found) == expected(story.models[-1 if batch is None else batch])


def has_links(story: Story) -> bool:
    return any(map(is_link, read_history(open_location(story.location)).object_names()))


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("inline_budget_bytes", [0, None], ids=["objects", "inline"])
@pytest.mark.parametrize(
    ("parent_at", "branch_at"),
    [
        (f"s3://{BUCKET}/{{}}/parent", f"s3://{OTHER_BUCKET}/{{}}/branch"),
        (f"s3://{BUCKET}/{{}}/parent", f"s3://{BUCKET}/{{}}/branch"),
        (f"s3://{BUCKET}/{{}}/parent", "{}/branch"),
        ("{}/parent", f"s3://{BUCKET}/{{}}/branch"),
    ],
    ids=["other bucket", "other folder", "directory", "bucket"],
)
def test_a_branch_goes_on_elsewhere_until_it_needs_no_parent(
    tmp_path: Path, parent_at: str, branch_at: str, inline_budget_bytes: int | None
) -> None:
    places = [
        place.format(f"{tmp_path.parent.name}/{tmp_path.name}" if place.startswith("s3") else tmp_path)
        for place in (parent_at, branch_at)
    ]
    parent = Story(
        tmp_path / "of parent",
        open_store=lambda _: open_location(places[0]),
        inline_budget_bytes=inline_budget_bytes,
        **OPTIONS,
    )
    parent.location = places[0]
    parent.run_batches(7, random.Random(1))
    branch = branch_of(parent, places[1], tmp_path / "of branch")
    parent.run_batches(4, random.Random(2))
    require_state(branch)
    assert has_links(branch)

    branch.start(2, keep_local=False)
    for batch in range(30):
        branch.run_batches(1, random.Random(batch))
        require_state(branch)
        if not statelog.list_pins(parent.location):
            break
    assert statelog.list_pins(parent.location) == []
    parent.run_batches(1, random.Random(3))
    require_state(parent)

    store = open_location(parent.location)
    store.delete([info.name for info in store.list()])
    for checkpoint in statelog.list_checkpoints(branch.location):
        require_state(branch, checkpoint.batch)
    branch.start(3, keep_local=False)
    branch.run_batches(1, random.Random(4))
    require_state(branch)


@pytest.mark.usefixtures("buckets")
def test_a_branch_of_a_branch_comes_back_to_a_directory(tmp_path: Path) -> None:
    """A link of a link leads to the directory where the first query is."""
    parent = Story(tmp_path / "of parent", inline_budget_bytes=0, **OPTIONS)
    parent.run_batches(5, random.Random(1))
    first = branch_of(parent, f"s3://{BUCKET}/{tmp_path.parent.name}/back", tmp_path / "of first")
    first.start(2, keep_local=False)
    first.run(len(first.models), [])
    assert has_links(first)
    second = branch_of(first, str(tmp_path / "second"), tmp_path / "of second")
    require_state(second)
    second.start(3, keep_local=False)
    second.run_batches(2, random.Random(2))
    require_state(second)
