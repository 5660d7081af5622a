"""``verify``: every damage of a stored object is found, and which checkpoints it concerns."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog import StatelogError
from statelog.__main__ import main
from statelog.storage import LocalStore
from statelog.testing.faults import FaultStore
from tests.reading.pins_support import Stop
from tests.reading.story import Story, rows, value_rows


@pytest.fixture(scope="module", params=["inline", "objects"])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    made = Story(
        tmp_path_factory.mktemp("story") / "query",
        parallelism=2,
        inline_budget_bytes=0 if request.param == "objects" else None,
        retained_checkpoints=3,
        materialization_interval_s=0.0,
        max_file_bytes=4000,
        log_min_age_s=0.0,
    )
    made.run_batches(4, random.Random(1))
    statelog.pin(made.location, at=3, lasts_s=None, owner="audit")
    made.run_batches(6, random.Random(2))
    return made


@pytest.fixture
def query(story: Story, tmp_path: Path) -> Story:
    """A copy to damage."""
    return story.copied(tmp_path / "copy")


def readable(query: Story, batch: int) -> bool:
    """Whether all states of a checkpoint can be read, and are right."""
    try:
        for state in ("value", "list", "map"):
            found = rows(statelog.read_state(query.location, state=state, at=batch).read_all())
            if state == "value":
                assert found == value_rows(query.models[batch])
    except StatelogError:
        return False
    return True


def objects(query: Story) -> Iterator[Path]:
    yield from sorted(path for path in Path(query.location).rglob("*") if path.is_file() and "pins" not in path.parts)


def test_a_whole_query_has_no_damage(query: Story) -> None:
    done = statelog.verify(query.location)
    assert done.damages == ()
    assert (done.operators, done.checkpoints, done.whole) == (1, 4, {"op": 9})
    stored = sum(path.stat().st_size for path in objects(query))
    assert stored / 2 < done.stored_bytes <= stored


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a_checkpoint_that_cannot_be_read_is_named(query: Story, how: str, seed: int) -> None:
    rng = random.Random(f"{how} {seed}")
    path = rng.choice(list(objects(query)))
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif how == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    else:
        path.unlink()
    done = statelog.verify(query.location)
    damaged = {batch for damage in done.damages for batch in damage.batches}
    is_log_damaged = any(not damage.batches for damage in done.damages)
    unreadable = {batch for batch in (3, 7, 8, 9) if not readable(query, batch)}
    # The end of the newest log file may be a write that was cut off: then the log is shorter, and no damage is seen.
    newest = statelog.list_operators(query.location)[0].batch if not is_log_damaged else 9
    if newest == 9:
        assert unreadable <= damaged or is_log_damaged
    whole = done.whole.get("op")
    if whole is not None:
        assert readable(query, whole)
    if not done.damages and newest == 9:
        assert not unreadable


def test_a_damaged_run_names_the_checkpoints_that_need_it(query: Story, capsys: pytest.CaptureFixture[str]) -> None:
    [first] = [info for info in statelog.list_checkpoints(query.location) if info.batch == 3]
    own = [path for path in objects(query) if "log" not in path.parts]
    if not own:
        pytest.skip("all is in the log")
    assert first.kept_by == ("audit",)
    for path in own:
        path.write_bytes(bytes(path.stat().st_size))
    done = statelog.verify(query.location)
    assert {batch for damage in done.damages for batch in damage.batches} == {3, 7, 8, 9}
    assert done.whole == {"op": None}
    assert {damage.kind for damage in done.damages} == {"checksum"}
    assert main(["verify", query.location]) == 3
    shown = capsys.readouterr().out
    assert "newest undamaged: op: none" in shown
    assert "checksum" in shown


def test_the_command_says_what_was_checked(query: Story, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", query.location]) == 0
    assert "4 checkpoints" in capsys.readouterr().out
    assert main(["verify", query.location, "--json"]) == 0
    assert '"damages": []' in capsys.readouterr().out


def test_a_query_that_deletes_meanwhile_is_not_damaged(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query deletes what it can before the n-th request."""
    for number in itertools.count(1):
        query = story.copied(tmp_path / str(number))
        query.start(keep_local=False)
        stop: Any = Stop(number, lambda query=query: query.run_batches(4, random.Random(3)))  # type: ignore[misc]  # a lambda with a default has no inferred type
        with monkeypatch.context() as patch:
            patch.setattr(
                "statelog.reading.open.open_location",
                lambda location, stop=stop: FaultStore(LocalStore(location), stop),
            )
            assert statelog.verify(query.location).damages == ()
        if stop.requests < number:
            break
    assert number > 10
