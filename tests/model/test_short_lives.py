"""Short lives of a query with everything small, whose location is looked at after every batch.

They go by every path of the checkpoints in half a second, so that a mistake there is found at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.model.random_query import RandomQuery

BATCHES = 14
RETAINED = 2
MOST_OBJECTS = {"off": 50, "within": 40, "across": 36}


@pytest.fixture
def lives() -> Iterator[list[RandomQuery]]:
    lives: list[RandomQuery] = []
    yield lives
    for life in lives:
        life.harness.close()


@pytest.mark.parametrize("inline", [0, 8 << 20], ids=["objects", "inline"])
@pytest.mark.parametrize("changelog", [True, False], ids=["changelog", "at once"])
@pytest.mark.parametrize("merging", ["off", "within", "across"])
def test_a_short_life(lives: list[RandomQuery], merging: str, changelog: bool, inline: int) -> None:
    options: dict[str, Any] = {
        "file_merging": merging,
        "changelog": changelog,
        "inline_budget_bytes": inline,
        "retained_checkpoints": RETAINED,
        "materialization_interval_s": 0.0,
        "max_file_bytes": 3000,
        "max_space_amplification": 1.5,
    }
    lives.append(life := RandomQuery(len(merging) + 2 * changelog, hosts=2, options=options))
    for batch in range(BATCHES):
        if batch in (4, 7, 10):
            life.parallelism = 2 + batch % 2
            life.harness.restart(life.parallelism, keepLocal=batch == 7)
            assert life.files.unreferenced == [], "removed at the start"
        life.run_batch(batch, actions=1 + (batch % 4 == 3))
        files = life.files
        assert files.missing(RETAINED) == {}, f"batch {batch}"
        assert files.history.retained_from == max(-1, batch - RETAINED + 1)
        assert len(files.names) <= MOST_OBJECTS[merging], f"batch {batch}: the log is not cut, or files are not removed"
    life.compare_all()
