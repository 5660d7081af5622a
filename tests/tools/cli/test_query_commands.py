"""Commands that change a query or make a new one, on a directory and an S3 server, each with a query of its own."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog.__main__ import main
from statelog.log.open import open_location
from statelog.storage import open_store
from tests.reading.story import STATES, Story, rows
from tests.tools.cli.commands_support import make_story
from tests.tools.cli.spark_files import write_spark_files

pytest_plugins = ("tests.s3.plugin",)

COMMITTED = 7


@pytest.fixture(params=["directory", "s3"])
def story(request: pytest.FixtureRequest, tmp_path: Path) -> Story:
    """A running query with eight batches, all but one of which Spark has committed."""
    made = make_story(request, tmp_path / "query", request.param)
    write_spark_files(checkpoint_of(made), made, COMMITTED)
    return made


def checkpoint_of(story: Story) -> str:
    return f"{story.location}-checkpoint"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command; returns its output as a value of JSON."""

    def run(*arguments: str, code: int = 0) -> Any:
        assert main([*arguments, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    return run


def require_state(location: str, story: Story, batch: int, at: int | None = None) -> None:
    for state, expected in STATES.items():
        assert rows(statelog.read_state(location, state=state, at=at).read_all()) == expected(story.models[batch])


def test_a_branch_is_made_beside_the_running_query_and_released_when_it_is_gone(
    story: Story, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    new, state = f"{story.location}-new", f"{story.location}-new-state"
    made = run("branch", checkpoint_of(story), new, "--location", story.location, "--new-location", state)
    assert (made["checkpoint_location"], made["next_batch"]) == (new, COMMITTED)
    require_state(state, story, COMMITTED - 1)
    story.run_batches(6, random.Random(2))
    require_state(state, story, COMMITTED - 1)
    assert [one["states"] for one in run("ls", state)] == [["list", "map", "value"]]
    assert main(["branch", checkpoint_of(story), new, "--location", story.location]) == 1
    assert new in capsys.readouterr().err

    [pin] = run("pins", story.location)
    assert pin["name"] not in [info["name"] for info in run("gc", story.location, "--release", "--min-age-s", "-60")]
    for place in (new, state):
        store = open_store(place)
        store.delete([info.name for info in store.list()])
    assert pin["name"] not in [info["name"] for info in run("gc", story.location, "--min-age-s", "-60")]
    found = run("gc", story.location, "--release", "--min-age-s", "-60")
    assert [info["name"] for info in found if info["name"].startswith("pins/")] == [pin["name"]]
    assert run("pins", story.location) == [pin]
    assert run("gc", story.location, "--release", "--min-age-s", "-60", "--delete") == found
    assert run("pins", story.location) == []
    story.run_batches(1, random.Random(3))
    require_state(story.location, story, -1)


def test_a_query_with_damage_falls_back_and_goes_on(story: Story, run: Any) -> None:
    story.engine.coordinator.close()
    store = open_location(story.location)
    newest = story.query().histories[story.identity].at(COMMITTED - 1)
    assert newest is not None
    segment = next(one for one in newest.segments if one.rows)
    data = bytearray(store.read(segment.name))
    data[segment.offset + segment.length // 2] ^= 1
    store.own.put(segment.name, bytes(data))

    verified = run("verify", story.location, code=3)
    assert verified["whole"] == {"op": COMMITTED - 2}
    assert [damage["name"] for damage in verified["damages"]] == [segment.name]
    planned = run("fall-back", checkpoint_of(story), "--location", story.location, "--dry-run")
    done = run("fall-back", checkpoint_of(story), "--location", story.location)
    assert done | {"copies": []} == planned
    assert (done["next_batch"], done["taken_back"]) == (COMMITTED - 1, [COMMITTED - 1])
    assert done["damages"] == verified["damages"]
    [copy] = done["copies"]
    assert copy.startswith(f"{story.location}/statelog-damaged/")
    assert store.read(copy.removeprefix(f"{story.location}/")) == bytes(data)
    commits = [info.name for info in open_store(checkpoint_of(story)).list("commits/")]
    assert commits == [f"commits/{batch}" for batch in range(COMMITTED - 1)]

    del story.models[COMMITTED - 1 :]
    story.start()
    story.run_batches(2, random.Random(4))
    require_state(story.location, story, -1)


def test_two_queries_are_compared(story: Story, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    same = run("compare", story.location, story.location)
    assert [one["state"] for one in same] == sorted(STATES)
    assert not any(one["different_groups"] for one in same)
    different = run("compare", story.location, story.location, "--at", "5", "--other-at", "7", code=4)
    for one in different:
        expected = STATES[one["state"]]
        assert (one["rows"], one["other_rows"]) == tuple(len(expected(story.models[batch])) for batch in (5, 7))
        assert one["different_groups"]
    assert main(["compare", story.location, story.location]) == 0
    assert "different key groups" in capsys.readouterr().out


def test_a_query_beside_which_a_savepoint_was_made_goes_on(story: Story, run: Any) -> None:
    saved, restored = f"{story.location}-saved", f"{story.location}-restored"
    made = run("savepoint", checkpoint_of(story), saved, "--location", story.location, "--batch", "5")
    assert made["rows"] == {"op": {name: len(expected(story.models[5])) for name, expected in STATES.items()}}
    require_state(saved, story, 5)
    assert run("restore", saved, restored, "--claim")["next_batch"] == 6
    assert open_store(saved).list() == []
    require_state(restored, story, 5)
    story.run_batches(1, random.Random(5))
    require_state(story.location, story, -1)


def test_an_operator_is_renamed(story: Story, run: Any) -> None:
    made = run("rename", checkpoint_of(story), story.engine.uid, "other", "--location", story.location)
    assert (made["uid"], made["former_uid"], made["batch"]) == ("other", story.engine.uid, len(story.models) - 1)
    assert [one["uid"] for one in run("ls", story.location)] == ["other"]
    require_state(story.location, story, -1)


def test_the_state_of_an_operator_is_given_up(story: Story, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, identity = ("forget", checkpoint_of(story), "op", "--location", story.location), story.identity
    for dry in (["--dry-run"], []):
        made = run(*arguments, *dry)
        assert (made["uid"], made["folder"].endswith(f"/{identity}")) == ("op", True)
        assert made["batch"] == len(story.models) - 1
    assert run("ls", story.location) == []
    assert run(*arguments)["batch"] is None, "again"
    assert main(["forget", checkpoint_of(story), "another", "--location", story.location]) == 1
    assert "has no operator 'another'; it has none" in capsys.readouterr().err
