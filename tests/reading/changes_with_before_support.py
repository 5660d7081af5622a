"""What the tests of :mod:`tests.reading.test_changes_with_before` and others share."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from tests.reading.changes_support import Rows
from tests.reading.story import STATES, Story

_NAMES = ["key_a", "key_b", "mapkey_field"]


def require_before(story: Story, rows: Rows, state: str) -> None:
    """Compare the former values with the model's state before each batch."""
    for batch, found in itertools.groupby(rows, lambda row: row["batch"]):
        own = list(found)
        known = STATES[state](story.models[batch - 1]) if batch else []
        if state == "list":
            require_removed_elements(own, known, STATES[state](story.models[batch]))
            continue
        before = {tuple(row[:-1]): row[-1] for row in known}
        names = _NAMES if state == "map" else _NAMES[:2]
        for row in own:
            assert row["operation"] != "clear" or row["before_field"] is None
            if row["operation"] != "clear":
                assert row["before_field"] == before.get(tuple(row[name] for name in names)), row
        after = sum(row[-1] for row in STATES[state](story.models[batch]))
        assert after - sum(before.values()) == sum(
            (row["value_field"] or 0) - (row["before_field"] or 0) for row in own
        )


def require_removed_elements(rows: Rows, known: list[tuple[Any, ...]], now: list[tuple[Any, ...]]) -> None:
    before, after = (Counter((*row[:2], row[3]) for row in side) for side in (known, now))
    removed = Counter((row["key_a"], row["key_b"], row["before_field"]) for row in rows if row["operation"] == "delete")
    added = Counter((row["key_a"], row["key_b"], row["value_field"]) for row in rows if row["operation"] == "put")
    assert not removed - before
    assert before - removed + added == after
    assert all(row["before_field"] is None for row in rows if row["operation"] != "delete")
