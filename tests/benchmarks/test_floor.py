"""The figures of fixed costs: what chains of operators return, and what the processes of a session have used."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import floor
from benchmarks.chain import STATELESS
from benchmarks.floor import FloorSide, IdleSide, Settings
from benchmarks.frame import scratch
from benchmarks.usage import Usage

BATCHES = [np.array([3, 3, 5]), np.array([5, 7, 7, 3])]


@pytest.mark.parametrize(("name", "operators"), [("stateless", 1), ("stateless", 3), ("statelog", 1), ("statelog", 3)])
def test_a_chain_returns_what_its_operators_return_one_by_one(name: str, operators: int) -> None:
    counts: list[Counter[int]] = [Counter() for _ in range(operators)]
    found = []
    for batch in BATCHES:
        rows = [(key, 1) for key in batch.tolist()]
        for count in counts if name == "statelog" else []:
            count.update(key for key, _ in rows)
            rows = [(key, count[key]) for key in {key for key, _ in rows}]
        weighted = sum(key * n for key, n in rows)
        found.append({"keys": len(rows), "total": sum(n for _, n in rows), "weighted": weighted})
    side = FloorSide.of(Settings(), side=name, parallelism=2, operators=operators)

    assert found == list(side.expected_chain(BATCHES, 8))


def test_figures_and_targets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(side: FloorSide, place: Path) -> dict[str, Any]:
        longer = 10 * side.parallelism * side.operators if side.side == floor.STATELOG else 0
        batch = {"queryPlanning": 20, "addBatch": 100 + longer, "triggerExecution": 200 + longer}
        slow = {"queryPlanning": 999, "addBatch": 999, "triggerExecution": 1_998}
        batches = [{"batch": number, **(slow if number < 2 else batch)} for number in range(side.batches)]
        return {"batches": batches, "checkpoints": [], **dict.fromkeys(FILES, 0)}

    def idle(side: IdleSide, place: Path) -> dict[str, float]:
        puts = 0.0 if side.side == STATELESS else 0.25 * side.operators
        return {"cpu_s": 1.5 * side.operators, "written_bytes": 2_000.0, "requests": 0.0, "puts_per_batch": puts}

    monkeypatch.setattr(FloorSide, "run", run)
    monkeypatch.setattr(IdleSide, "run", idle)
    settings = Settings(subtasks=(2, 4), batches=5, warm_up=2, rounds=2)
    result = floor.run(settings, tmp_path)

    assert result.figures["above_stateless_ms"] == {
        "2 subtasks, 1 operator": 20,
        "2 subtasks, 5 operators": 100,
        "4 subtasks, 1 operator": 40,
        "4 subtasks, 5 operators": 200,
    }
    assert [(target.name, target.value, target.met) for target in result.targets] == [
        ("planning and batch of 1,000 rows, 2 subtasks, 1 operator: statelog - stateless, ms", 20, True),
        ("2 subtasks, 1 operator: PUTs per batch", 0.25, True),
        ("2 subtasks, 5 operators: PUTs per batch", 1.25, False),
    ]
    assert result.rows[1] == {
        "shape": "2 subtasks, 1 operator",
        "side": "statelog",
        "planning ms": "20",
        "batch ms": "120",
        "planning and batch ms": "140.0",
        "above stateless ms": "20.0",
        "trigger ms": "220",
    }
    assert [line.startswith("Idle") for line in result.remarks] == [False, True, True, True, True]
    assert result.figures["idle_per_minute"]["2 subtasks, 5 operators"]["statelog"]["cpu_s"] == 7.5


FILES = ("files_live", "bytes_live", "files_seen", "bytes_seen")


def test_usage_is_that_of_all_processes_of_a_session() -> None:
    """What a process has used before does not count; what one has used that has ended since does."""
    burn = "import time\nwhile time.process_time() < 0.5: pass\n"
    program = f"""
import os, subprocess, sys, time
{burn}
print("ready", flush=True)
sys.stdin.readline()
with subprocess.Popen([sys.executable, "-c", {burn + "input()"!r}], stdin=subprocess.PIPE) as child:
    time.sleep(0.8)
    with open("file", "wb") as file:
        file.write(os.urandom(3 << 20))
        os.fsync(file.fileno())
    print("done", flush=True)
    sys.stdin.readline()
print("ended", flush=True)
sys.stdin.read()
"""
    with scratch(None) as place:  # not in a file system in memory
        child = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=place,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        with child:
            assert child.stdout is not None
            assert child.stdin is not None
            child.stdout.readline()
            used = Usage(child.pid)
            for _ in range(2):
                child.stdin.write(b"\n")
                child.stdin.flush()
                child.stdout.readline()
                used.look()

    total = used.total()
    assert 0.3 <= total["cpu_s"] < 30
    assert total["written_bytes"] >= 3 << 20
