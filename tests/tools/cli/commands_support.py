"""What the tests of :mod:`tests.tools.cli.test_commands` and others share."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from statelog.coordinator.batch import BatchTime
from statelog.storage import open_store
from tests.reading.story import Story
from tests.s3.server import BUCKET

START_MS = 1_780_000_000_000


def make_story(request: pytest.FixtureRequest, directory: Path, place: str) -> Story:
    """A query with a batch per second of Spark's time, which is not stopped, in a directory or on an S3 server."""
    if place == "s3":
        request.getfixturevalue("s3_server")
        location = f"s3://{BUCKET}/{directory.parent.name}-{os.getpid()}"
        made = Story(directory, open_store=lambda _: open_store(location), retained_checkpoints=4, file_merging="auto")
        made.location = location
    else:
        made = Story(directory, retained_checkpoints=4)
    made.engine.times |= {batch: BatchTime(START_MS + 1000 * batch, 0) for batch in made.engine.times}
    made.run_batches(8, random.Random(1))
    return made
