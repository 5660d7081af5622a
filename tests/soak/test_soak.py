"""A slice of the soak, and that it finds what it is there for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.spark.support import REPOSITORY

pytestmark = pytest.mark.timeout(600)


def soak(*arguments: str, lane: str = "engine") -> tuple[int, str]:
    """Run a lane; return its exit code and what it said."""
    command = [sys.executable, "-m", "tests.soak", "--lane", lane, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def told(text: str, state: str) -> dict[str, Any]:
    """The counters of the line with a state."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"soak"')]
    return next(line for line in lines if line["soak"] == state)


@pytest.mark.parametrize(
    ("lane", "seeds", "moves"),
    [
        ("engine", (24, 25, 22), "batches,kills of drivers,kills of workers,host moves,rescales,restores,branches"),
        (
            "queries",
            (26, 30, 22, 23, 28),
            "batches,kills,failed tasks,lost outputs,speculative attempts,drivers cut off,"
            "attempts of superseded starts,incomplete batches,renames,branches,pins,batches followed,deletions by hand,"
            "jumps of clocks,lost commits,reads from outside",
        ),
    ],
)
def test_a_slice_of_the_soak(lane: str, seeds: Sequence[int], moves: str) -> None:
    """The first life of a seed or two has all moves; as that depends on the machine too, others follow if need be."""
    missing = set(moves.split(","))
    for seed in seeds:
        code, text = soak("--life", "0", "--seed", str(seed), lane=lane)
        assert code == 0, text[-20_000:]
        missing -= {name for name, count in told(text, "passed").items() if name in missing and count}
        if not missing:
            break
    assert not missing


@pytest.mark.parametrize(
    ("plant", "seed"),
    [
        ("newest-state", "7"),
        *[
            pytest.param(plant, "43", marks=pytest.mark.extended)
            for plant in ("debris", "taken-back", "ignored-pins", "not-fenced")
        ],
    ],
)
def test_the_soak_of_queries_finds_a_planted_defect(plant: str, seed: str) -> None:
    code, text = soak("--minutes", "8", "--seed", seed, "--plant", plant, lane="queries")
    assert code == 1, text[-20_000:]
    failed = told(text, "failed")
    shutil.rmtree(failed["kept"])
    assert f"repeat it with: ./dev soak --lane queries --seed {seed} --life {failed['life']}" in text


@pytest.mark.parametrize(
    ("plant", "mood", "sign"),
    [
        # The check after each batch finds it, or whoever reads the state first.
        pytest.param("stale-jobs", "moving", r"objects are missing|\[object-missing\]", marks=pytest.mark.extended),
        pytest.param("lost-jobs", "calm", "objects that no entry names", marks=pytest.mark.extended),
    ],
)
def test_a_planted_defect_is_found(plant: str, mood: str, sign: str) -> None:
    """A few lives are enough; without the defect the one that finds it passes."""
    code, text = soak("--minutes", "4", "--seed", "7", "--mood", mood, "--plant", plant)
    assert code == 1, text[-20_000:]
    assert re.search(sign, text), text[-20_000:]
    failed = told(text, "failed")
    shutil.rmtree(failed["kept"])
    life = failed["life"]
    assert f"repeat it with: ./dev soak --lane engine --seed 7 --life {life} --mood {mood}" in text
    code, text = soak("--seed", "7", "--mood", mood, "--life", str(life))
    assert code == 0, text[-20_000:]
