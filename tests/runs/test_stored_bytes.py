"""Stored files of every kind, damaged so that their checksums fit: errors of statelog, in bounded memory and time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.stored_fuzz import KINDS

ROOT = Path(__file__).parents[2]
MEMORY_MB = 1024


def fuzz(kinds: str, seed: int, rounds: int, timeout_s: float) -> None:
    """Damage and read files in another process, which may die of it."""
    command = [sys.executable, "-m", "tests.stored_fuzz", kinds, str(seed), str(rounds), str(MEMORY_MB)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}"
    for line in done.stdout.splitlines():
        kind, _, rest = line.partition(": ")
        undamaged = int(rest.split()[0])
        assert kind in kinds
        assert undamaged > 0, f"{line}: the files must be readable"
        assert undamaged < rounds or kind == "jobs", f"{line}: damage must be found; a damaged job is begun again"


def test_damaged_files_of_every_kind() -> None:
    fuzz(",".join(KINDS), 0, 60, 120)


@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [10_000, 20_000])
def test_many_damaged_files(kind: str, seed: int) -> None:
    fuzz(kind, seed, 3000, 280)
