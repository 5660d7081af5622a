"""The changes of a batch in several phases: the local run and the stored parts hold the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from statelog.operators.keyed import changes as changes_module
from statelog.operators.keyed.changes import BatchChanges
from statelog.runs.merge import merge_runs
from statelog.runs.reader import Run
from statelog.runs.schema import VALUE_COLUMN, StateDescriptor, StateKind
from statelog.tables.runs import RunsTable
from statelog.tables.table import KeyBatch

STATE = StateDescriptor("n", StateKind.VALUE, pa.schema([("n", pa.int64())]))
KEYS = KeyBatch(np.arange(10, dtype=np.uint64), pa.array([bytes([number]) for number in range(10)], pa.binary()))


def put(changes: BatchChanges, positions: list[int], number: int) -> None:
    changes.buffer.add_columns(STATE, KEYS, np.array(positions), None, [pa.array([number] * len(positions))])


def held(*runs: bytes) -> dict[bytes, Any]:
    """The value of each key; those of later runs count."""
    found: dict[bytes, Any] = {}
    for data in runs:
        section = Run(pa.py_buffer(data), "a run").section(STATE)
        for block in section.blocks_between(0, (1 << 64) - 1) if section else ():
            rows = block.load()
            found |= dict(zip(rows.column(1).to_pylist(), rows.column(VALUE_COLUMN).to_pylist(), strict=True))
    return found


def local(changes: BatchChanges) -> bytes:
    sink = pa.BufferOutputStream()
    changes.write_local(sink)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def two_phases() -> BatchChanges:
    changes = BatchChanges(RunsTable())
    put(changes, [1, 2, 3], 1)
    changes.begin_phase()
    put(changes, [2, 3, 4], 2)
    return changes


EXPECTED = {b"\x01": 1, b"\x02": 2, b"\x03": 2, b"\x04": 2}


def test_both_forms_have_the_changes_of_all_phases() -> None:
    changes = two_phases()

    part, rows = changes.take_part("lz4")

    assert (held(part), rows) == (EXPECTED, 6)
    assert held(local(changes)) == EXPECTED
    assert changes.take_part("lz4")[1] == 0


def test_phases_are_merged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs: list[int] = []

    def noted(runs: list[Run], *arguments: Any, **more: Any) -> int:
        inputs.append(len(runs))
        return merge_runs(runs, *arguments, **more)

    monkeypatch.setattr(changes_module, "merge_runs", noted)
    changes = two_phases()
    changes.take_part("lz4")
    local(changes)
    assert inputs == [2, 1]


@pytest.mark.parametrize("max_bytes", [None, 1])
def test_parts_taken_before_are_in_the_local_run_too(max_bytes: int | None) -> None:
    changes = two_phases()
    parts = [changes.take_part("lz4", max_bytes)[0]]
    put(changes, [5, 6], 3)
    changes.begin_phase()
    put(changes, [6, 7], 4)
    parts.append(changes.take_part("lz4")[0])

    expected = EXPECTED | {b"\x05": 3, b"\x06": 4, b"\x07": 4}
    assert held(*parts) == held(local(changes)) == expected


def test_changes_after_the_last_part_are_in_the_local_run() -> None:
    changes = two_phases()
    part, _ = changes.take_part("lz4")
    put(changes, [5, 6], 3)

    expected = EXPECTED | {b"\x05": 3, b"\x06": 3}
    assert held(local(changes)) == expected
    assert held(part, changes.take_part("lz4")[0]) == expected
