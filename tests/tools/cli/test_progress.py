"""Long commands show their progress, on a terminal only, and never between rows."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from rich.console import Console

from statelog.progress import tracked
from statelog.tools.cli.shown import shown_progress
from tests.reading.story import STATES, Story
from tests.tools.cli.spark_files import write_spark_files

SLOW = """
import json, sys, time
import statelog
from statelog.__main__ import main
from statelog.storage import LocalStore

class Slow(LocalStore):
    def __init__(self, location):
        super().__init__(location.removeprefix("slow:"))

    def read(self, name, **arguments):
        if name.endswith((".run", ".parquet")):
            time.sleep(0.5 if "parquet" in name else 0.15)
        return super().read(name, **arguments)

statelog.register_store("slow", Slow)
for arguments in json.loads(sys.argv[1]):
    assert main(arguments) == 0, arguments
    for stream in (sys.stdout, sys.stderr):
        print("== end", file=stream, flush=True)
"""
BAR, CLEARED = "━", "\x1b[2K"


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """A query with nine changesets in files of their own, which are slow to read, and two committed batches."""
    directory = tmp_path_factory.mktemp("story")
    made = Story(directory / "query", inline_budget_bytes=0, file_merging="off")
    made.run_batches(3, random.Random(1))
    write_spark_files(f"{made.location}-checkpoint", made, 3)
    return made


def run(*commands: Sequence[str], out: str = "pipe", err: str = "terminal") -> list[tuple[str, str]]:
    """What commands write to the standard output and to the standard error, each a terminal or a pipe."""
    ends = {name: os.openpty() if kind == "terminal" else os.pipe() for name, kind in (("out", out), ("err", err))}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, json.dumps(commands)],
        stdout=ends["out"][1],
        stderr=ends["err"][1],
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
    )
    for _, write in ends.values():
        os.close(write)
    with ThreadPoolExecutor(2) as pool:
        shown = list(pool.map(everything, [read for read, _ in ends.values()]))
    assert process.wait() == 0, shown
    shown_out, shown_err = (text.replace("\r\n", "\n").split("== end\n")[:-1] for text in shown)
    return list(zip(shown_out, shown_err, strict=True))


def everything(descriptor: int) -> str:
    data = b""
    with suppress(OSError):  # the terminal's other end is closed
        while part := os.read(descriptor, 65_536):
            data += part
    os.close(descriptor)
    return data.decode()


def slow(story: Story) -> str:
    return f"slow:{story.location}"


LONG = ["verify", "export", "scan", "diff", "changes", "stats", "compare", "savepoint", "restore", "fall-back"]


@pytest.fixture(scope="module")
def long(story: Story) -> dict[str, tuple[str, str]]:
    """What long commands write, with a terminal for errors."""
    location, beside = slow(story), f"{story.location}-checkpoint"
    arguments = {
        "verify": [location],
        "export": [location, f"{beside}.parquet", "--state", "map"],
        "scan": [location, "--state", "map"],
        "diff": [location, "0", "--state", "map"],
        "changes": [location, "--state", "map"],
        "stats": [location, "--scan"],
        "compare": [location, location],
        "savepoint": [beside, f"slow:{beside}-saved", "--location", location],
        "restore": [f"slow:{beside}-saved", f"{beside}-restored"],
        "fall-back": [beside, "--dry-run", "--location", location],
    }
    shown = run(*([command, *arguments[command], "--json"] for command in LONG))
    return dict(zip(LONG, shown, strict=True))


@pytest.mark.parametrize("command", LONG)
def test_a_long_command_shows_its_progress_on_a_terminal(long: dict[str, tuple[str, str]], command: str) -> None:
    out, err = long[command]
    for line in out.splitlines() if command in ("scan", "diff", "changes") else [out]:
        json.loads(line)
    assert BAR in err
    assert " KB of " in err
    assert err.rstrip("\n").endswith(CLEARED), "the line is gone in the end"


def test_a_table_comes_after_the_progress(story: Story) -> None:
    [(out, err)] = run(["scan", slow(story), "--state", "map", "--limit", "2"], out="terminal")
    assert BAR in err
    assert CLEARED not in out
    assert out.count("\n") < 10
    assert "Only the first 2 rows are shown; --limit 0 shows all." in err


def test_rows_that_come_to_a_terminal_are_alone(story: Story) -> None:
    [(out, err)] = run(["scan", slow(story), "--state", "map", "--limit", "0", "--json"], out="terminal")
    assert len(out.splitlines()) == len(STATES["map"](story.models[-1]))
    assert err == ""


def test_without_a_terminal_there_is_no_progress(story: Story) -> None:
    [(_, err)] = run(["verify", slow(story), "--json"], err="pipe")
    assert err == ""


def test_a_short_command_shows_none(story: Story) -> None:
    [(_, err)] = run(["verify", story.location, "--json"])
    assert err == ""


@pytest.mark.parametrize("after_s", [0.0, 60.0])
def test_bytes_are_shown_for_people(after_s: float) -> None:
    shown = io.StringIO()
    with shown_progress(Console(file=shown, force_terminal=True, width=100), after_s):
        for _ in tracked([1, 2], lambda _: [1000, 2000]):
            pass
        for _ in tracked([3], lambda _: [1_500_000]):
            break
    text = shown.getvalue()
    assert ("3.0 KB of 1.5 MB" in text) == (after_s == 0)
    assert after_s == 0 or text == ""
