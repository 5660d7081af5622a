"""The README's first program: run it, kill it, run it again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.docs import page

ROWS_PER_S = 9
USERS = range(3)


def test_counts_go_on_after_a_kill(tmp_path: Path) -> None:
    [(name, program)] = page.files("README.md").items()
    (tmp_path / name).write_text(program)
    first = run_and_kill(tmp_path, name, batches=2)
    second = run_and_kill(tmp_path, name, batches=1)

    begun = min(second)
    assert 0 < begun <= max(first) + 1, "it continues where it was"
    counts = dict.fromkeys(USERS, 0)
    for batch, rows in sorted((first | second).items()):
        assert first.get(batch, rows) == rows, "a batch that is repeated has the same result"
        counts |= rows
        # The source's log says how many seconds of rows had been read; its values are 0, 1, 2, ...
        read = ROWS_PER_S * int((tmp_path / "checkpoint" / "offsets" / str(batch)).read_text().split("\n")[-1])
        assert counts == {user: len(range(user, read, len(USERS))) for user in USERS}


def run_and_kill(directory: Path, name: str, *, batches: int) -> dict[int, dict[int, int]]:
    """The rows of each batch that the program has shown when it is killed, with its JVM and its workers."""
    program = subprocess.Popen(
        [sys.executable, name],
        cwd=directory,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert program.stdout is not None
    shown: dict[int, dict[int, int]] = {}
    try:
        for batch, rows in tables(program.stdout):
            shown[batch] = rows
            if sum(bool(rows) for rows in shown.values()) == batches:
                return shown
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
    raise AssertionError(f"the program ended after {shown}")


def tables(lines: Iterator[str]) -> Iterator[tuple[int, dict[int, int]]]:
    """The tables of Spark's console sink: number of the batch, and the count of each user."""
    batch, rows, borders = -1, dict[int, int](), 0
    for line in lines:
        if found := re.match(r"Batch: (\d+)", line):
            batch, rows, borders = int(found[1]), {}, 0
        elif line.startswith("+"):
            borders += 1
            if borders == 3:
                yield batch, rows
        elif found := re.match(r"\|\s*(\d+)\|\s*(\d+)\|", line):
            rows[int(found[1])] = int(found[2])
