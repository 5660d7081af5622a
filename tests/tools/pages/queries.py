"""Queries for tests of the checkpoint page."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.reading.story import Story


def materialized(directory: Path, **options: Any) -> Story:
    """A query that materializes all the time, retains four checkpoints, and has a log file per batch."""
    defaults = {
        "materialization_interval_s": 0.0,
        "max_log_to_base": 0.0,
        "max_file_bytes": 1,
        "log_min_age_s": 0.0,
        "retained_checkpoints": 4,
    }
    made = Story(directory, inline_budget_bytes=0, file_merging="off", **(defaults | options))
    made.run_batches(12, random.Random(2))
    return made


def log_files(query: Story) -> list[Path]:
    return sorted((Path(query.location) / "log").iterdir())
