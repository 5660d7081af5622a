"""``fall_back``: a query with damaged state goes on from its newest checkpoint without damage."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import statelog
from statelog import ConfigurationError, CorruptionError, StatelogError, StateMissingError
from statelog.__main__ import main
from tests.reading.story import STATES, Story, rows
from tests.savepoints.test_rewind import expected_files, spark_checkpoint, spark_files

BATCHES = 10


@pytest.fixture(scope="module", params=["inline", "objects"])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    made = Story(
        tmp_path_factory.mktemp("story") / "query",
        parallelism=2,
        inline_budget_bytes=0 if request.param == "objects" else None,
        retained_checkpoints=4,
        materialization_interval_s=0.0,
        log_min_age_s=0.0,
    )
    made.run_batches(BATCHES, random.Random(1))
    return made


@pytest.fixture
def query(story: Story, tmp_path: Path) -> Story:
    """A stopped copy to damage, whose last batch Spark has not committed."""
    spark_checkpoint(tmp_path, range(BATCHES), range(BATCHES - 1))
    return story.copied(tmp_path / "copy")


def is_readable(query: Story, batch: int) -> bool:
    try:
        for state in STATES:
            statelog.read_state(query.location, state=state, at=batch).read_all()
    except StatelogError:
        return False
    return True


def require_same(query: Story) -> None:
    for state, expected in STATES.items():
        assert rows(statelog.read_state(query.location, state=state).read_all()) == expected(query.models[-1])


def damage(path: Path, place: float) -> bytes:
    """Change a byte at a place between 0 and 1, and return the bytes as they are now."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 255
    path.write_bytes(data)
    return bytes(data)


def go_on(query: Story, batch: int, *, keep_local: bool) -> None:
    """Start the query with a batch, and compare its state after some of them."""
    del query.models[batch:]
    query.start(keep_local=keep_local)
    query.run_batches(5, random.Random(9))
    require_same(query)


@pytest.mark.parametrize("keeps_local", [False, True])
def test_a_query_goes_on_from_its_newest_whole_checkpoint(query: Story, tmp_path: Path, keeps_local: bool) -> None:
    """Whatever object is damaged; the batch is the newest one that Spark has committed and that can be read."""
    back = 0
    paths = sorted(path for path in Path(query.location).rglob("*.*") if path.is_file())
    places = [(path, number / 20) for path in paths for number in (range(1, 20) if path.suffix == ".log" else [10])]
    for number, (path, place) in enumerate(places):
        root = tmp_path / f"{number}"
        spark_checkpoint(root, range(BATCHES), range(BATCHES - 1))
        own = query.copied(root / "copy")
        name = path.relative_to(query.location)
        data = damage(Path(own.location) / name, place)
        kept = [batch for batch in range(BATCHES - 1) if is_readable(own, batch)]
        if not kept:
            problem = "log/" if path.suffix == ".log" else "no retained checkpoint is without damage: .*checksum"
            with pytest.raises(StatelogError, match=problem):
                statelog.fall_back(root, location=own.location)
            assert spark_files(root) == expected_files(range(BATCHES), range(BATCHES - 1))
            continue
        planned = statelog.fall_back(root, location=own.location, dry_run=True)
        assert spark_files(root) == expected_files(range(BATCHES), range(BATCHES - 1))
        done = statelog.fall_back(root, location=own.location)
        assert done.next_batch == planned.next_batch == kept[-1] + 1
        assert done.taken_back == list(range(kept[-1] + 1, BATCHES - 1))
        assert spark_files(root) == expected_files(range(kept[-1] + 2), range(kept[-1] + 1))
        if done.damages:
            assert {one.name for one in done.damages} == {str(name)}
            [copy] = done.copies
            assert Path(copy).read_bytes() == data
            back += bool(done.taken_back)
        go_on(own, kept[-1] + 1, keep_local=keeps_local)
    assert back


def test_checkpoints_of_which_spark_has_no_record_are_in_nobodys_way(query: Story, tmp_path: Path) -> None:
    """The oldest are 6 and 7; Spark has its records from batch 7 on."""
    root = tmp_path / "spark"
    spark_checkpoint(root, range(7, BATCHES), range(7, BATCHES - 1))
    for path in [*Path(query.location).glob("*/changes/*/*/8-*")]:
        damage(path, 0.5)
    done = statelog.fall_back(root, location=query.location)
    assert done.next_batch == (8 if done.damages else 9)


def test_a_query_does_not_fall_back_to_a_checkpoint_that_it_has_given_up(query: Story, tmp_path: Path) -> None:
    for path in Path(query.location).rglob("*.run"):
        path.unlink()
    if not statelog.verify(query.location).damages:
        pytest.skip("all is in the log")
    with pytest.raises(StateMissingError, match="no retained checkpoint is without damage"):
        statelog.fall_back(tmp_path, location=query.location)


def test_without_damage_nothing_is_done(query: Story, tmp_path: Path) -> None:
    done = statelog.fall_back(tmp_path, location=query.location)
    assert (done.next_batch, done.taken_back, done.damages, done.copies) == (BATCHES - 1, [], (), [])
    assert not (Path(query.location) / "statelog-damaged").exists()


def test_the_command_shows_damage_and_changes(query: Story, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in Path(query.location).glob("*/changes/*/*/8-*"):
        path.unlink()
    if main(["verify", query.location]) == 0:
        pytest.skip("all is in the log")
    capsys.readouterr()
    assert main(["fall-back", str(tmp_path), "--location", query.location]) == 0
    shown = capsys.readouterr().out
    assert "object-missing" in shown
    assert "taken back" in shown
    assert spark_files(tmp_path) == expected_files(range(9), range(8))


def test_a_damaged_log_is_an_error(query: Story, tmp_path: Path) -> None:
    [path] = Path(query.location).glob("*/log/*")
    damage(path, 0)
    with pytest.raises(CorruptionError):
        statelog.fall_back(tmp_path, location=query.location)
    assert spark_files(tmp_path) == expected_files(range(BATCHES), range(BATCHES - 1))


@pytest.mark.parametrize("to", [6, 7, 8])
def test_a_query_goes_back_to_a_retained_checkpoint(query: Story, tmp_path: Path, to: int) -> None:
    planned = statelog.rewind(tmp_path, location=query.location, to=to, dry_run=True)
    assert spark_files(tmp_path) == expected_files(range(BATCHES), range(BATCHES - 1))
    assert statelog.rewind(tmp_path, location=query.location, to=to) == planned
    assert planned.next_batch == to + 1
    assert planned.taken_back == list(range(to + 1, BATCHES - 1))
    go_on(query, to + 1, keep_local=to == 7)


@pytest.mark.parametrize(
    ("to", "error", "message"),
    [
        (9, ConfigurationError, "go back to batch 9; the newest checkpoint .* is 8"),
        (-1, ConfigurationError, "go back to batch -1"),
        (0, StateMissingError, "have to go back to checkpoint 0, but the oldest that is retained is checkpoint 6"),
        (3, StateMissingError, "have to go back to checkpoint 3, but the oldest that is retained is checkpoint 6"),
    ],
)
def test_a_query_cannot_go_back_anywhere(
    query: Story, tmp_path: Path, to: int, error: type[StatelogError], message: str
) -> None:
    with pytest.raises(error, match=message):
        statelog.rewind(tmp_path, location=query.location, to=to)
    assert spark_files(tmp_path) == expected_files(range(BATCHES), range(BATCHES - 1))


def test_a_checkpoint_of_a_repeated_batch_is_no_target(query: Story, tmp_path: Path) -> None:
    """Spark's batch 7 has another time than that of the checkpoint."""
    path = tmp_path / "offsets" / "7"
    path.write_text(path.read_text().replace("1007", "5007"))
    with pytest.raises(StateMissingError, match="its checkpoint 7 is not of the batch 7 that Spark has committed"):
        statelog.rewind(tmp_path, location=query.location, to=7)
    assert statelog.rewind(tmp_path, location=query.location, to=6, dry_run=True).next_batch == 7
