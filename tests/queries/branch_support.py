"""What the tests of :mod:`tests.queries.test_branch` and others share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import statelog
from statelog.log.open import open_location
from statelog.testing.query import ManualClock
from tests.model.engine import Engine
from tests.reading.story import Story, hash_of

OPTIONS: dict[str, Any] = {
    "retained_checkpoints": 3,
    "materialization_interval_s": 0,
    "max_log_to_base": 0,
    "max_file_bytes": 4000,
    "log_min_age_s": 0,
}


def commit(story: Story, checkpoint: Path) -> None:
    """Write Spark's files of the story's batches."""
    for folder in ("offsets", "commits"):
        (checkpoint / folder).mkdir(parents=True, exist_ok=True)
    (checkpoint / "metadata").write_text(json.dumps({"id": story.engine.query_id}))
    for batch in range(len(story.models)):
        time = story.engine.times[batch]
        watermark = f'"batchWatermarkMs":{time.watermark_ms},"batchTimestampMs":{time.time_ms}'
        (checkpoint / "offsets" / str(batch)).write_text(f"v1\n{{{watermark}}}\n{batch}\n")
        (checkpoint / "commits" / str(batch)).write_text('v1\n{"nextBatchWatermarkMs":0}')


def branch_of(parent: Story, directory: Path, at: int | None = None) -> Story:
    """Branch a query, by its checkpointLocation, and make the branch; it has not been started."""
    commit(parent, directory / "parent")
    branched = Engine(directory, hash_of, open_store=open_location)
    made = statelog.branch(
        directory / "parent", directory / "checkpoint", at=at, location=parent.location, new_location=branched.location
    )
    branched.query_id = made.query_id
    branched.options = replace(parent.engine.options, observer=branched.options.observer)
    branched.clock = ManualClock(parent.engine.clock.now_s())
    branched.times = dict(parent.engine.times)
    story: Story = object.__new__(Story)
    story.__dict__ = dict(parent.__dict__)
    story.engine, story.location, story.parallelism = branched, branched.location, parent.parallelism
    story.models = parent.models[: made.next_batch]
    return story
