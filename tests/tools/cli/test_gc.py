"""``statelog gc`` on a directory and an S3 server, beside a running query."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import statelog
from statelog.__main__ import main
from statelog.storage import open_store
from tests.reading.story import rows, value_rows
from tests.tools.cli.commands_support import make_story

pytest_plugins = ("tests.s3.plugin",)


@pytest.mark.parametrize("place", ["directory", "s3"])
def test_objects_that_nothing_needs_are_listed_and_deleted(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    """Objects of the running start stay, and so do young ones."""
    story = make_story(request, tmp_path / "query", place)
    story.start()
    story.run_batches(2, random.Random(2))
    lost, own = (f"{story.identity}/changes/{epoch}/0/orphan.run" for epoch in (1, 2))
    for name in (lost, own):
        open_store(story.location).put(name, bytes(2000))

    def gc(*arguments: str) -> tuple[str, str]:
        assert main(["gc", story.location, *arguments]) == 0
        shown = capsys.readouterr()
        return shown.out, shown.err

    assert gc() == ("none\n", "Found 0 objects, 0 B.\n")
    found = json.loads(gc("--min-age-s", "-60", "--json")[0])
    names = [info["name"] for info in found]
    assert lost in names
    assert own not in names
    listed, hint = gc("--min-age-s", "-60")
    assert all(name in listed for name in names)
    assert hint.startswith(f"Found {len(found)} objects, 2.")
    assert hint.endswith("Add --delete to delete them.\n")
    assert gc("--min-age-s", "-60", "--delete")[1].startswith(f"Deleted {len(found)} objects, 2.")
    assert gc("--min-age-s", "-60", "--json") == ("[]\n", "")
    story.run_batches(1, random.Random(3))
    assert rows(statelog.read_state(story.location, state="value").read_all()) == value_rows(story.models[-1])
