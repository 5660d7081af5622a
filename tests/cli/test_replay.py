"""The command ``replay``: both sides of a batch of a key, and whether they are the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import statelog
from statelog.__main__ import main
from statelog.log.open import open_location
from statelog.storage import LocalStore
from tests.reading.replayed import Commands, Restless, Sampled
from tests.s3.server import BUCKET

pytest_plugins = ("tests.s3.plugin",)

PROCESSOR = "tests.reading.replayed:Commands"
INSTANCE = Commands()
NO_PROCESSOR = 3


@pytest.fixture(scope="module")
def query() -> Iterator[Sampled]:
    with Sampled() as made:
        made.run([("ann", "timer", 2), ("ann", "put", 1)], 1_780_000_000_000)
        made.run([("ann", "append", 3), ("bob", "set", 1), ("ann", "remove", 1)], 1_780_000_001_000)
        yield made


@pytest.fixture(params=["directory", "s3"])
def location(request: pytest.FixtureRequest, query: Sampled, tmp_path: Path) -> str:
    """The query's location, or its objects in a bucket."""
    if request.param == "directory":
        return query.location
    request.getfixturevalue("s3_server")
    bucket = f"s3://{BUCKET}/{tmp_path.name}-{os.getpid()}"
    source, target = LocalStore(query.location), open_location(bucket)
    for info in source.list():
        target.put(info.name, source.read(info.name))
    return bucket


def test_both_sides_are_shown(query: Sampled, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", query.location, "--batch", "1", "--key", "ann", "--processor", PROCESSOR]) == 0
    shown = capsys.readouterr().out
    assert "operator main, batch 1, key ann" in shown
    assert "time 2026-05-28 20:26:41" in shown
    assert "due timers: 2026-05-28 20:26:41" in shown
    assert "rows, in the order of the query" in shown
    assert "remove" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["list", "put", "value_n=4", "put", "value_n=4"] in lines
    assert shown.count("delete mapkey_entry=1") == 2
    assert "The changes are those of the log." in shown
    assert "bob" not in shown


def test_json_has_the_fields_of_the_result(location: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", location, "--batch", "1", "--key", "ann", "--processor", PROCESSOR, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    again = statelog.replay(location, 1, "ann", Commands())
    assert set(found) == set(vars(again)) | {"different_states"}
    assert found["rows"] == again.rows.to_pylist()
    assert found["logged"] == {state: rows.to_pylist() for state, rows in again.logged.items()}
    assert found["timers_ms"] == list(again.timers_ms)
    assert found["different_states"] == []


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_difference_has_an_exit_code(as_json: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with Sampled(Restless()) as query:
        query.run([("ann", "append", 3)])
        name = "tests.reading.replayed:Restless"
        assert main(["replay", query.location, "--batch", "0", "--key", "ann", "--processor", name, *as_json]) == 4
    shown = capsys.readouterr().out
    if as_json:
        assert json.loads(shown)["different_states"] == ["value"]
        return
    assert "The changes are not those of the log: value" in shown
    [value] = [line for line in shown.splitlines() if line.split()[:1] == ["value"]]
    assert value.split()[1] == "!"
    [line, *_] = [line for line in shown.splitlines() if line.split()[:1] == ["list"]]
    assert line.split()[1] == "put"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere:Commands", "ModuleNotFoundError: No module named 'nowhere'"),
        ("tests.cli.test_replay:Nothing", "AttributeError: module 'tests.cli.test_replay' has no attribute 'Nothing'"),
        ("tests.cli.test_replay", "MODULE:NAME"),
        ("tests.spark.support:Salted", "TypeError: .*missing 1 required positional argument"),
        ("tests.cli.test_replay:NO_PROCESSOR", "an instance of StatefulProcessor, not 3"),
    ],
)
def test_a_name_that_is_no_processor(
    query: Sampled, name: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", query.location, "--batch", "1", "--key", "ann", "--processor", name]) == 1
    assert re.search(problem, capsys.readouterr().err)


def test_an_instance_may_be_named(query: Sampled) -> None:
    name = "tests.cli.test_replay:INSTANCE"
    assert main(["replay", query.location, "--batch", "1", "--key", "bob", "--processor", name]) == 0


def test_an_error_is_a_message(query: Sampled, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", query.location, "--batch", "7", "--key", "ann", "--processor", PROCESSOR]) == 1
    assert "has no checkpoint 7" in capsys.readouterr().err
    assert main(["replay", query.location, "--batch", "1", "--key", "dora", "--processor", PROCESSOR]) == 1
    assert "Nothing happened to" in capsys.readouterr().err


def test_pdb_stops_in_the_processor_of_the_working_directory(query: Sampled, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from tests.reading.replayed import Commands\n")
    arguments = ["--batch", "1", "--key", "bob", "--processor", "mine:Commands", "--pdb"]
    done = subprocess.run(
        [str(Path(sys.executable).with_name("statelog")), "replay", query.location, *arguments],
        input="step\nstep\nprint('user', key)\ncontinue\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert "user ('bob',)" in done.stdout
    assert "replayed.py" in done.stdout
    assert "The changes are those of the log." in done.stdout
    assert done.returncode == 0
