"""``fall_back``: a query with damaged state continues from its newest checkpoint without damage."""

from __future__ import annotations

import itertools
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import statelog
from statelog import ConfigurationError, CorruptionError, Options, StatelogError, StateMissingError, Tuning
from statelog.__main__ import main
from statelog.log.references import SegmentRef
from statelog.storage import LocalStore
from statelog.storage.links import is_link
from tests.compat.savepoints_support import collecting
from tests.model.engine import command_query, command_rows
from tests.model.stored_files import needed_objects
from tests.queries.branch_support import OPTIONS, branch_of, commit
from tests.queries.rewind_support import CHANGES, Kill, Killed, Operators, expected_files, spark_checkpoint, spark_files
from tests.query_runner import QueryRunner
from tests.reading.story import STATES, Story, rows

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
            problem = "log/" if path.suffix == ".log" else "every retained checkpoint is damaged: .*checksum"
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
    with pytest.raises(StateMissingError, match="every retained checkpoint is damaged"):
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
    [path] = Path(query.location).glob("log/*")
    damage(path, 0)
    with pytest.raises(CorruptionError):
        statelog.fall_back(tmp_path, location=query.location)
    assert spark_files(tmp_path) == expected_files(range(BATCHES), range(BATCHES - 1))


# ---- Several operators, deaths, and branches ----


@pytest.fixture
def of_two(tmp_path: Path) -> Operators:
    """A query of two operators with checkpoints up to batch 8; those from batch 6 on need an object that is damaged."""
    made = Operators(
        tmp_path / "two",
        Options(file_merging="across", inline_budget_bytes=0, tuning=Tuning(orphan_min_age_s=0, log_min_age_s=0)),
    )
    made.run("ab", 0, 8)
    spark_checkpoint(tmp_path / "two", range(10), range(9))
    [path] = made.objects("b", "changes/*/0/6-*.run")
    damage(path, 0.5)
    return made


def test_damage_of_one_operator_sets_all_back(of_two: Operators, tmp_path: Path) -> None:
    done = statelog.fall_back(tmp_path / "two", location=of_two.location)
    assert (done.next_batch, done.taken_back, done.operators) == (6, [6, 7, 8], ["a", "b"])
    assert {one.uid for one in done.damages} == {"b"}
    of_two.start("ab", 6)
    assert [of_two.value(uid, 6) for uid in "ab"] == [5, 5]


@pytest.mark.parametrize("is_after", [False, True])
def test_the_copies_come_before_everything_else_and_another_call_finishes(
    of_two: Operators, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_after: bool
) -> None:
    [damaged] = of_two.objects("b", "changes/*/0/6-*.run")
    data, name = damaged.read_bytes(), damaged.relative_to(of_two.location)
    for number in itertools.count(1):
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "two", root)
        own, kill = Operators(root, of_two.options), Kill(number, is_after)
        own.runner.runs = 1
        with monkeypatch.context() as patched:
            for owner, change in (*CHANGES, (LocalStore, "put")):
                patched.setattr(owner, change, kill.around(getattr(owner, change)))
            try:
                statelog.fall_back(root, location=own.location)
            except Killed:
                pass
            else:
                break
        copies = [path.read_bytes() for path in Path(own.location).glob(f"statelog-damaged/*/{name}")]
        latest = own.history.latest
        assert latest is not None
        if latest.batch != 8 or (root / "statelog-rewound").exists():
            assert copies == [data]
        assert statelog.fall_back(root, location=own.location).next_batch == 6
        assert spark_files(root) == expected_files(range(7), range(6))
        own.run("ab", 6, 9)
        own.start("ab", 10)
        assert [own.value(uid, 10) for uid in "ab"] == [9, 9]
    assert number > 10


def test_a_branch_falls_back_whatever_of_its_parent_is_damaged(tmp_path: Path) -> None:
    """Checkpoints that need the parent's object are none; the object is left to the parent."""
    parent = Story(tmp_path / "parent", inline_budget_bytes=0, **OPTIONS)
    parent.run_batches(5, random.Random(1))
    branch = branch_of(parent, tmp_path / "branch")
    branch.engine.options = replace(branch.engine.options, retained_checkpoints=30)
    branch.start(2, keep_local=False)
    while (last := len(branch.models)) < 12 or links_needed(branch, last - 2):
        branch.run_batches(1, random.Random(2))
        assert last < 60, "the branch has never materialized all state anew"
    commit(branch, tmp_path / "branch/checkpoint")
    checkpoint = tmp_path / "branch/checkpoint"
    [lost, *_] = sorted(links_needed(branch, 5))
    Path(lost.replace("!", "")).write_bytes(b"damaged")
    done = statelog.fall_back(checkpoint, location=branch.location)
    assert (done.next_batch, done.taken_back, done.copies) == (last, [], [])
    assert {one.name for one in done.damages} == {lost}

    for path in Path(branch.location).glob(f"*/changes/*/*/{last - 1}-*"):
        damage(path, 0.5)
    done = statelog.fall_back(checkpoint, location=branch.location)
    assert (done.next_batch, done.taken_back) == (last - 1, [last - 1])
    assert lost in {one.name for one in done.damages}
    assert done.copies
    assert all(copy.startswith(branch.location) for copy in done.copies)
    go_on(branch, last - 1, keep_local=False)


def test_a_branch_none_of_whose_checkpoints_can_do_without_a_damaged_object_of_its_parent(tmp_path: Path) -> None:
    parent = Story(tmp_path / "parent", inline_budget_bytes=0, **OPTIONS)
    parent.run_batches(5, random.Random(1))
    branch = branch_of(parent, tmp_path / "branch")
    [lost, *_] = sorted(links_needed(branch, 4))
    Path(lost.replace("!", "")).write_bytes(b"damaged")
    with pytest.raises(StateMissingError, match="every retained checkpoint is damaged"):
        statelog.fall_back(tmp_path / "branch/checkpoint", location=branch.location)
    assert not (Path(branch.location) / "statelog-damaged").exists()


def links_needed(branch: Story, batch: int) -> set[str]:
    """The parent's objects that a checkpoint of a branch needs."""
    history = branch.query().histories[branch.identity]
    record = history.record(batch)
    assert record is not None
    return {name for name in needed_objects(history, record) if is_link(name)}


# ---- Where the user wants to go back to ----


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
        (9, ConfigurationError, "go back to batch 9: the newest checkpoint .* is 8"),
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
    with pytest.raises(StateMissingError, match="checkpoint 7 does not belong to the batch 7 that Spark has"):
        statelog.rewind(tmp_path, location=query.location, to=7)
    assert statelog.rewind(tmp_path, location=query.location, to=6, dry_run=True).next_batch == 7


# ---- What holds nothing ----


def test_a_snapshot_without_elements_is_checked_as_a_start_reads_it(tmp_path: Path) -> None:
    words = collecting()
    query = QueryRunner(tmp_path, Options(inline_budget_bytes=0))
    query.start([words.operator], 3, 0)
    query.run_operator("words", 0, words.data([("a",)], []))
    empty = [segment for segment in segments_of(query, "words") if not segment.rows]
    assert len(empty) == 2
    damage(Path(query.location) / empty[0].name, 0.5)
    [found] = statelog.verify(query.location).damages
    assert (found.uid, found.name, found.batches) == ("words", empty[0].name, (0,))


def test_a_changeset_without_rows_is_in_nobodys_way(tmp_path: Path) -> None:
    """Neither a start nor a reader needs it."""
    options = Options(file_merging="within", inline_budget_bytes=0)
    keyed = command_query("op", lambda key: (key[0] or 0) << 62, options)
    query = QueryRunner(tmp_path, options)
    query.start([keyed.operator], 3, 0)
    query.run_operator("op", 0, command_rows(keyed, [((0, None), ("set", 1))]))
    empty = [segment for segment in segments_of(query, "op") if not segment.rows]
    assert len(empty) == 2
    for segment in empty:
        path = Path(query.location) / segment.name
        data = bytearray(path.read_bytes())
        data[segment.offset] ^= 255
        path.write_bytes(data)
    assert statelog.verify(query.location).damages == ()
    for parallelism in (1, 3):
        query.start([keyed.operator], parallelism, 1, keep_local=False)
        outputs = query.run_operator("op", 1, command_rows(keyed, [((0, None), ("read",))]))
        assert [text for output in outputs for text in output.column(0).to_pylist()] == [
            "[[0, null], [[1], [], [], [true, false, false]]]"
        ]


def segments_of(query: QueryRunner, uid: str) -> list[SegmentRef]:
    """The segments of an operator in the newest checkpoint."""
    latest = query.coordinator.history.latest
    assert latest is not None
    return [segment for section in latest.sections if section.uid == uid for segment in section.segments]
