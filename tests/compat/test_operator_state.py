"""Locations of unkeyed operators, as each version has stored their snapshots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from statelog import Options
from statelog.testing import Harness
from tests.compat.savepoints_support import Collect
from tests.compat.stored import read_query, write_query

FIXTURES: Final = Path(__file__).parent / "operators"
TIMES_MS: Final = [1_000, 2_000, 3_000]
WORDS: Final = ["a", "b", "c", "d", "e"]


BUDGETS: Final = {"inline": 1_000_000, "uploaded": 0}


def make_harness(form: str = "inline") -> Harness:
    return Harness(
        Collect(),
        input="word string",
        output="json string",
        broadcast="name string, n long",
        parallelism=2,
        options=Options(file_merging="within", inline_budget_bytes=BUDGETS[form]),
    )


def write(directory: Path) -> None:
    """Write the fixture: for each form two starts, a change of parallelism, and a batch without changes."""
    for form in BUDGETS:
        with make_harness(form) as harness:
            harness.push([(word,) for word in WORDS[:4]], TIMES_MS[0], broadcast=[("x", 1)])
            harness.push([], TIMES_MS[1])
            harness.restart(3)
            harness.push([(word,) for word in WORDS[4:]], TIMES_MS[2], broadcast=[("y", 2)])
            write_query(directory / form, harness)


@pytest.mark.parametrize("fixture", sorted(FIXTURES.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}")
@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_state_is_dealt_out_and_goes_on(fixture: Path, parallelism: int) -> None:
    snapshot = read_query(fixture, make_harness(), TIMES_MS)
    with Harness.restore(snapshot, Collect(), parallelism=parallelism) as harness:
        require_words(harness, [], WORDS, {"x": 1, "y": 2}, parallelism)
        require_words(harness, ["f"], [*WORDS, "f"], {"x": 1, "y": 2, "f": 0}, parallelism)
        harness.restart(2)
        require_words(harness, [], [*WORDS, "f"], {"x": 1, "y": 2, "f": 0}, 2)


def require_words(harness: Harness, new: list[str], words: list[str], rules: dict[str, int], parallelism: int) -> None:
    """Push words, each of them as a rule, too, and look at the state of all subtasks."""
    found = [json.loads(row.json) for row in harness.push([(word,) for word in new], broadcast=[(n, 0) for n in new])]
    assert len(found) == parallelism
    assert sorted(word for own, _, _ in found for word in own) == words
    assert {word for _, union, _ in found for word in union} == set(words)
    assert all(each == rules for _, _, each in found)


def test_every_form_has_a_fixture() -> None:
    assert {path.name for path in FIXTURES.glob("v1/*")} == set(BUDGETS)
