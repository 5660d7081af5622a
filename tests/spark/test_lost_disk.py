"""Two executors, one of which can no longer keep local files: the next attempts run on the other one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.spark.support import start_driver

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

LOST = 2
"""The batch before which the disk is lost."""


def tell(root: Path, *, excludes: bool) -> dict[str, Any]:
    driver = start_driver("lost_disk", root, {"excludes": excludes})
    assert driver.wait(500) == 0, driver.end
    story: dict[str, Any] = json.loads((root / "story.json").read_text())
    assert story["disks"]["1-0"] == story["lost"] != story["disks"]["1-1"], "one subtask on each executor"
    return story


def attempts(story: dict[str, Any], batch: int) -> Counter[int]:
    """How many attempts each subtask has begun at a batch."""
    return Counter(subtask for number, subtask in story["begun"] if number == batch)


def require_other_executor(story: dict[str, Any], first: int) -> None:
    for batch in range(first, 5):
        assert attempts(story, batch) == {0: 1, 1: 1}, "no attempt where the disk is lost"
        assert story["lost"] not in (story["disks"][f"{batch}-0"], story["disks"][f"{batch}-1"])


def test_a_task_is_repeated_elsewhere_and_its_subtask_stays_there(tmp_path: Path) -> None:
    """With the setting by which Spark does not repeat a failed task on the same executor."""
    story = tell(tmp_path, excludes=True)
    assert attempts(story, LOST) == {0: 2, 1: 1}
    assert story["disks"][f"{LOST}-0"] == story["disks"][f"{LOST}-1"]
    require_other_executor(story, LOST + 1)


def test_a_query_that_a_lost_disk_has_ended_starts_elsewhere(tmp_path: Path) -> None:
    """With Spark's default, by which all attempts of a task run on the executor with its cached partition."""
    story = tell(tmp_path, excludes=False)
    assert story["failed"] == "local-disk"
    assert attempts(story, LOST)[0] == 4 + 1
    assert story["disks"][f"{LOST}-0"] == story["disks"][f"{LOST}-1"] != story["lost"]
    require_other_executor(story, LOST + 1)
