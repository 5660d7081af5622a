"""The command line, on a directory and an S3 server: what each command shows, as a table and as JSON, how it fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import statelog
from statelog.__main__ import main
from statelog.storage import open_store
from statelog.tools.cli.main import commands
from tests.reading.story import STATES, Story, map_rows, rows, value_rows
from tests.tools.cli.commands_support import START_MS, make_story
from tests.tools.cli.spark_files import write_spark_files

pytest_plugins = ("tests.s3.plugin",)


@pytest.fixture(scope="module", params=["directory", "s3"])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    return make_story(request, tmp_path_factory.mktemp("story") / "query", request.param)


@pytest.fixture
def run(story: Story, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command on the query's location; returns its output, as values of JSON if it was asked for."""

    def run(command: str, *arguments: str, code: int = 0) -> Any:
        assert main([command, story.location, *arguments]) == code
        shown = capsys.readouterr()
        if code:
            assert shown.out == ""
            return shown.err
        if "--json" not in arguments:
            return shown.out
        if command in ("get", "scan", "changes", "history", "diff"):
            return [json.loads(line) for line in shown.out.splitlines()]
        return json.loads(shown.out)

    return run


def plain(results: list[Any]) -> Any:
    """Dataclass instances as JSON has them."""
    return json.loads(json.dumps([asdict(one) for one in results]))


def test_the_page_lists_every_command() -> None:
    page = Path(__file__).parents[3] / "docs" / "command-line.md"
    assert sorted(re.findall(r"^\| `([a-z-]+) ", page.read_text(), re.MULTILINE)) == sorted(commands.commands)


def test_ls_and_show_have_the_fields_of_the_lists(story: Story, run: Any) -> None:
    assert run("ls", "--json") == plain(statelog.list_operators(story.location))
    assert run("show", "--json") == {
        "states": plain(statelog.list_states(story.location)),
        "checkpoints": plain(statelog.list_checkpoints(story.location)),
    }
    table = run("ls")
    assert "a int64, b string" in table
    assert "2026-05-28 20:26:47" in table
    table = run("show")
    for text in ("mapkey_field string", "retained_checkpoints", "2026-05-28 20:26:44"):
        assert text in table


def test_scan_shows_the_first_rows_or_all(story: Story, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    expected = value_rows(story.models[-1])
    found = run("scan", "--state", "value", "--limit", "0", "--json")
    assert sorted((tuple(row.values()) for row in found), key=repr) == expected
    assert main(["scan", story.location, "--state", "value", "--limit", "3", "--columns", "value_field, key_b"]) == 0
    shown = capsys.readouterr()
    assert "Only the first 3 rows" in shown.err
    assert shown.out.split()[0] == "value_field"
    assert len(shown.out.split("\n")) < 12
    assert len(run("scan", "--state", "value", "--limit", str(len(expected)), "--json")) == len(expected)


@pytest.mark.parametrize("at", ["5", "2026-05-28T20:26:45.500", "2026-05-28T22:26:45+02:00"])
def test_at_is_a_batch_or_a_time(story: Story, run: Any, at: str) -> None:
    found = run("scan", "--state", "map", "--at", at, "--limit", "0", "--json")
    assert sorted((tuple(row.values()) for row in found), key=repr) == map_rows(story.models[5])


def test_get_shows_the_rows_of_keys(story: Story, run: Any) -> None:
    known = value_rows(story.models[-1])
    wanted = known[:2]
    texts = [json.dumps(list(row[:2])) for row in wanted]
    assert sorted((tuple(row.values()) for row in run("get", *texts, "--state", "value", "--json")), key=repr) == wanted
    by_name = json.dumps({"b": wanted[0][1], "a": wanted[0][0]})
    assert [tuple(row.values()) for row in run("get", by_name, "--state", "value", "--json")] == wanted[:1]
    assert run("get", '[99, "unknown"]', "--state", "value") == "none\n"


def test_changes_shows_what_batches_have_changed(story: Story, run: Any) -> None:
    found = run("changes", "--state", "list", "--after", "5", "--limit", "0", "--json")
    assert found == statelog.read_changes(story.location, state="list", after=5).read_all().to_pylist()
    key = json.dumps([found[0]["key_a"], found[0]["key_b"]])
    of_key = run("changes", "--state", "list", "--after", "5", "--up-to", "6", "--key", key, "--json")
    assert of_key == [row for row in found if row["batch"] == 6 and [row["key_a"], row["key_b"]] == json.loads(key)]


def test_history_shows_what_happened_to_a_key(story: Story, run: Any) -> None:
    key = value_rows(story.models[-1])[0][:2]
    found = run("history", json.dumps(key), "--state", "value", "--json")
    assert found == statelog.read_history(story.location, key, state="value").read_all().to_pylist()
    assert found


def test_diff_shows_what_is_different(story: Story, run: Any) -> None:
    found = run("diff", "5", "--state", "map", "--limit", "0", "--json")
    assert found == statelog.read_diff(story.location, 5, state="map").read_all().to_pylist()
    assert len(run("diff", "2026-05-28T20:26:45", "7", "--state", "map", "--limit", "0", "--json")) == len(found) > 3


def test_export_writes_a_parquet_file(story: Story, run: Any, tmp_path: Path) -> None:
    target = tmp_path / "value.parquet"
    count = len(value_rows(story.models[-1]))
    assert run("export", str(target), "--state", "value", "--json") == {"target": str(target), "rows": count}
    assert rows(pq.read_table(target)) == value_rows(story.models[-1])
    assert list(tmp_path.iterdir()) == [target]
    assert "already exists" in run("export", str(target), "--state", "value", code=1)
    assert "cannot be written" in run("export", str(tmp_path / "nowhere" / "file"), "--state", "value", code=1)


def test_pins_are_made_listed_and_removed(story: Story, run: Any) -> None:
    made = run("pin", "--at", "6", "--lasts-s", "60", "--owner", "audit", "--json")
    assert (made["batch"], made["owner"], made["uids"], made["is_on_line"]) == (6, "audit", ["op"], True)
    assert run("pins", "--json") == run("pins", "--uid", "op", "--json") == [made]
    assert "audit" in run("pins")
    assert "no operator 'other'" in run("pins", "--uid", "other", code=1)
    by_name = run("scan", "--state", "map", "--at", made["name"], "--limit", "0", "--json")
    assert sorted((tuple(row.values()) for row in by_name), key=repr) == map_rows(story.models[6])
    assert run("unpin", made["name"]) == ""
    assert run("pins") == "none\n"
    assert "has no pin" in run("unpin", made["name"], code=1)


@pytest.mark.parametrize("scan", [False, True])
def test_stats_measures_the_state(story: Story, run: Any, scan: bool) -> None:
    options = ["--scan"] if scan else []
    [found] = run("stats", "--json", *options)
    assert [found] == plain(statelog.stats(story.location, scan=scan))
    stored = open_store(story.location).list()
    assert found["stored_bytes"] == sum(info.size_bytes for info in stored)
    rows_of = {one["state"]: one["rows"] for one in found["states"]}
    assert rows_of == {name: len(rows_at(story.models[-1])) if scan else None for name, rows_at in STATES.items()}
    table = run("stats", *options)
    assert "space amplification" in table
    assert ("largest keys" in table) == scan


def test_verify_reads_all(story: Story, run: Any) -> None:
    done = run("verify", "--json")
    assert (done["operators"], done["checkpoints"], done["whole"], done["damages"]) == (1, 4, {"op": 7}, [])
    assert "newest undamaged: op: 7" in run("verify")


@pytest.fixture(scope="module")
def checkpoint(story: Story) -> str:
    """A checkpointLocation beside the state, whose query has committed seven batches."""
    location = f"{story.location}-checkpoint"
    write_spark_files(location, story, 7)
    return location


@pytest.fixture
def query(story: Story, checkpoint: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command on the query's checkpointLocation; returns its output as a value of JSON."""

    def run(command: str, *arguments: str) -> Any:
        assert main([command, checkpoint, *arguments, "--location", story.location, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_a_query_is_set_back(query: Any, story: Story, capsys: pytest.CaptureFixture[str], checkpoint: str) -> None:
    done = query("rewind", "--dry-run", "--to", "5")
    assert (done["next_batch"], done["taken_back"]) == (6, [6])
    assert done["removed"] == ["offsets/7", "commits/6"]
    done = query("rewind")
    assert (done["next_batch"], done["taken_back"]) == (7, [])
    done = query("fall-back", "--dry-run")
    assert (done["next_batch"], done["damages"], done["copies"]) == (7, [], [])
    assert main(["fall-back", checkpoint, "--dry-run", "--location", story.location]) == 0
    assert "next batch" in capsys.readouterr().out
    assert main(["rewind", checkpoint, "--to", "1", "--location", story.location]) == 1
    assert "the oldest that is retained is checkpoint 4" in capsys.readouterr().err


def test_a_savepoint_is_made_and_restored(query: Any, story: Story, checkpoint: str) -> None:
    saved, restored = f"{checkpoint}-saved", f"{checkpoint}-restored"
    assert query("savepoint", saved)["batch"] == 6
    assert main(["restore", saved, restored, "--location", f"{restored}/statelog"]) == 0
    assert rows(statelog.read_state(restored, state="map").read_all()) == map_rows(story.models[6])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scan"], "Pass one of them as state"),
        (["scan", "--state", "nothing"], "has no state 'nothing'"),
        (["scan", "--state", "value", "--at", "1000"], "has no checkpoint 1000"),
        (["scan", "--state", "value", "--columns", "value"], "has no column 'value'"),
        (["scan", "--uid", "other"], "has no operator 'other'"),
        (["get", "1", "--state", "value"], "a key with several fields as a JSON array"),
        (["get", '["x", "y"]', "--state", "value"], "does not fit the key's fields"),
        (["get", "[1, 2, 3]", "--state", "value"], "it has other fields"),
        (["get", "[1", "--state", "value"], "does not fit the key's fields"),
        (["pin", "--lasts-s", "-1"], "a finite number of seconds, more than 0"),
    ],
    ids=" ".join,
)
def test_mistakes_end_with_a_message(run: Any, arguments: list[str], message: str) -> None:
    command, *rest = arguments
    error = run(command, *rest, code=1)
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "arguments", [["scan"], ["scan", "x", "--at", "noon"], ["nothing"], ["scan", "x", "--limit", "-1"]]
)
def test_wrong_arguments_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "Error" in capsys.readouterr().err


def test_a_location_without_state_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(tmp_path)]) == 1
    assert "holds no state" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--json"], []])
def test_a_pipe_that_its_reader_has_closed_is_no_failure(story: Story, options: list[str]) -> None:
    unread, pipe = os.pipe()
    os.close(unread)
    try:
        command = [sys.executable, "-m", "statelog", "scan", story.location, "--state", "value", "--limit", "0"]
        done = subprocess.run([*command, *options], stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(pipe)
    assert (done.returncode, done.stderr) == (0, "")


def test_times_before_the_first_checkpoint_are_named(run: Any) -> None:
    assert "the oldest one is of 2026-05-28T20:26:44" in run("scan", "--state", "value", "--at", "2026-01-01", code=1)
    assert datetime.fromtimestamp(START_MS / 1000, UTC).isoformat() == "2026-05-28T20:26:40+00:00"


def test_it_runs_as_a_module_and_says_which_extra_is_missing(story: Story, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "statelog", "ls", story.location, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[0]["uid"] == "op"
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError(name='click')")
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "pip install 'statelog[cli]'" in done.stderr
