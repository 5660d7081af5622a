"""Commands that read one batch take a savepoint."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from statelog.__main__ import main
from tests.reading.saved import save
from tests.reading.story import Story, list_rows, map_rows, rows


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    story = Story(tmp_path_factory.mktemp("story") / "query")
    story.run_batches(3, random.Random(1))
    return story


@pytest.fixture
def saved(story: Story, tmp_path: Path) -> str:
    save(story.location, tmp_path / "saved", 1)
    return str(tmp_path / "saved")


def objects(capsys: pytest.CaptureFixture[str]) -> list[tuple[Any, ...]]:
    return sorted([tuple(json.loads(line).values()) for line in capsys.readouterr().out.splitlines()], key=repr)


def test_operators_and_states_are_shown(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", saved, "--json"]) == 0
    [operator] = json.loads(capsys.readouterr().out)
    assert (operator["uid"], operator["batch"]) == ("op", 1)
    assert main(["show", saved, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [state["state"] for state in shown["states"]] == ["list", "map", "value"]
    assert shown["checkpoints"] == []
    assert main(["show", saved]) == 0
    text = capsys.readouterr().out
    assert "mapkey_field string" in text
    assert "kept by" not in text


def test_rows_are_shown_and_exported(
    story: Story, saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scan", saved, "--state", "list", "--json", "--limit", "0"]) == 0
    assert objects(capsys) == list_rows(story.models[1])
    key, found = next((key, found) for key, found in story.models[1].keys.items() if found[0] is not None)
    assert main(["get", saved, json.dumps(key), "--state", "value", "--at", "1", "--json"]) == 0
    assert objects(capsys) == [(*key, found[0])]
    assert main(["export", saved, str(tmp_path / "map.parquet"), "--state", "map"]) == 0
    assert rows(pq.read_table(tmp_path / "map.parquet")) == map_rows(story.models[1])


@pytest.mark.parametrize("command", [["history", "[1, null]"], ["changes"], ["verify"]])
def test_other_commands_refuse_a_savepoint(saved: str, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    name, *arguments = command
    assert main([name, saved, *arguments]) == 1
    assert "is a savepoint" in capsys.readouterr().err
