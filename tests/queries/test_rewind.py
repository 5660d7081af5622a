"""Rewind on files as Spark leaves them, without Spark."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import statelog
from statelog import ConfigurationError, CorruptionError, ErrorKind, StateMissingError
from statelog.__main__ import main
from statelog.clock import SystemClock
from statelog.history.query_history import QueryHistory
from statelog.log.entry import Claim
from statelog.log.open import open_log
from statelog.options import Options
from statelog.spark.checkpoint import checkpoint as checkpoint_module
from statelog.storage import LocalStore
from tests.model.operator_engine import OperatorEngine
from tests.options import make_options
from tests.queries.rewind_support import (
    CHANGES,
    SMALL,
    Kill,
    Killed,
    Operators,
    expected_files,
    spark_checkpoint,
    spark_files,
)

MATERIALIZING = make_options(**SMALL)


def state(directory: Path, batches: int) -> str:
    operators = Operators(directory)
    operators.run("a", 0, batches - 1)
    return operators.location


# ---- One operator ----


@pytest.mark.parametrize("scheme", ["", "file:", "file://"])
def test_commits_without_state_are_taken_back(tmp_path: Path, scheme: str) -> None:
    root = tmp_path / "odd %41#name"
    spark_checkpoint(root, range(5), range(4))
    location = state(root, 2)
    planned = statelog.rewind(f"{scheme}{root}", location=location, dry_run=True)
    assert spark_files(root) == expected_files(range(5), range(4)), "a dry run changes nothing"
    assert not (root / "statelog-rewound").exists()
    assert statelog.rewind(f"{scheme}{root}", location=location) == planned
    assert planned.next_batch == 2
    assert planned.taken_back == [2, 3]
    assert planned.removed == ["offsets/4", "offsets/3", "commits/3", "commits/2"]
    assert planned.operators == ["a"]
    assert spark_files(root) == expected_files(range(3), range(2))


def test_what_is_taken_back_is_moved_aside(tmp_path: Path) -> None:
    spark_checkpoint(tmp_path, range(5), range(4))
    done = statelog.rewind(tmp_path, location=state(tmp_path, 2))
    aside = Path(done.moved_to)
    assert aside.parent == tmp_path / "statelog-rewound"
    assert spark_files(aside) == expected_files(range(3, 5), range(2, 4))


def test_later_rewinds_replace_nothing_of_the_former_ones(tmp_path: Path) -> None:
    spark_checkpoint(tmp_path, range(5), range(4))
    location = state(tmp_path, 2)
    first = statelog.rewind(tmp_path, location=location)
    later = []
    for text in ("another one", "a third one"):
        for folder in ("offsets", "commits"):
            (tmp_path / folder / "3").write_text(text)
        (tmp_path / "commits" / "2").write_text(text)
        later.append(statelog.rewind(tmp_path, location=location))
    assert [done.taken_back for done in later] == [[2, 3], [2, 3]]
    assert spark_files(Path(first.moved_to)) == expected_files(range(3, 5), range(2, 4))
    seen = [set(spark_files(Path(done.moved_to)).values()) for done in later]
    assert seen == [{"another one"}, {"a third one"}]


def test_every_move_is_for_good_before_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power failure as after a crash: what was moved first is not where it was."""
    spark_checkpoint(tmp_path, range(5), range(4))
    location = state(tmp_path, 2)
    aside = tmp_path / "statelog-rewound" / "1"
    rename = Path.rename
    # New names of folders, and names that were moved away or to a folder, as long as that is not for good.
    pending = {str(aside), str(aside.parent), str(tmp_path)}
    moved = []

    def move(source: Path, target: Path) -> Path:
        assert pending == set()
        pending.update((str(source.parent), str(target.parent)))
        moved.append(source.name)
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", move)
    monkeypatch.setattr(checkpoint_module, "sync_directory", pending.discard)
    statelog.rewind(tmp_path, location=location)

    assert moved == [name for batch in (4, 3, 3, 2) for name in (f".{batch}.crc", f"{batch}")]
    assert pending == set()


@pytest.mark.parametrize("moves", range(1, 8))
def test_a_crash_between_two_moves_is_repaired_by_another_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    spark_checkpoint(tmp_path, range(5), range(4))
    location = state(tmp_path, 2)
    rename, left = Path.rename, moves

    def crash_later(source: Path, target: Path) -> Path:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", crash_later)
    with pytest.raises(KeyboardInterrupt):
        statelog.rewind(tmp_path, location=location)
    monkeypatch.undo()
    seen = spark_files(tmp_path)
    newest = [
        max(int(name.partition("/")[2]) for name in seen if name.startswith(f"{folder}/") and "." not in name)
        for folder in ("offsets", "commits")
    ]
    assert newest[1] > 1, "Spark and the state disagree until the last move"
    # A checksum without its file would damage the file that Spark writes in its place.
    assert not [name for name in seen if name.endswith(".crc") and name.replace("/.", "/")[:-4] not in seen]

    again = statelog.rewind(tmp_path, location=location)
    assert again.next_batch == 2
    assert spark_files(tmp_path) == expected_files(range(3), range(2))
    moved = {
        name: text for folder in (tmp_path / "statelog-rewound").iterdir() for name, text in spark_files(folder).items()
    }
    assert moved == expected_files(range(3, 5), range(2, 4))


def test_nothing_is_done_when_spark_and_the_state_agree(tmp_path: Path) -> None:
    spark_checkpoint(tmp_path, range(4), range(3))
    done = statelog.rewind(tmp_path, location=state(tmp_path, 3))
    assert (done.next_batch, done.taken_back, done.removed, done.moved_to) == (3, [], [], "")


def test_input_that_spark_forgot_is_an_error(tmp_path: Path) -> None:
    spark_checkpoint(tmp_path, range(5, 9), range(5, 9))
    with pytest.raises(StateMissingError, match="no longer knows the input of batch 2: its oldest is 5"):
        statelog.rewind(tmp_path, location=state(tmp_path, 2))
    assert spark_files(tmp_path) == expected_files(range(5, 9), range(5, 9))


@pytest.mark.parametrize(
    ("batch", "offsets", "commits"),
    [
        (1, range(2, 5), range(2, 5)),
        (1, range(1, 5), range(2, 5)),
        (1, range(2, 5), range(1, 5)),
        (0, range(1, 5), range(1, 5)),
    ],
)
def test_spark_needs_to_know_where_the_batch_before_ended(
    tmp_path: Path, batch: int, offsets: range, commits: range
) -> None:
    spark_checkpoint(tmp_path, offsets, commits)
    known = f"no longer knows where batch {batch} ended: its oldest commit is {commits[0]}"
    with pytest.raises(StateMissingError, match=known):
        statelog.rewind(tmp_path, location=state(tmp_path, batch + 1))
    assert spark_files(tmp_path) == expected_files(offsets, commits)


def test_a_wrong_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no checkpoint of a Spark query"):
        statelog.rewind(tmp_path)
    spark_checkpoint(tmp_path / "copied in part", range(0), range(3))
    with pytest.raises(ConfigurationError, match="holds no checkpoint of a Spark query"):
        statelog.rewind(tmp_path / "copied in part", location=state(tmp_path, 2))
    spark_checkpoint(tmp_path, range(4), range(3))
    with pytest.raises(ConfigurationError, match="holds no state of statelog"):
        statelog.rewind(tmp_path)


# ---- Several operators ----


def test_state_of_another_query_at_the_location_is_none(tmp_path: Path) -> None:
    operators = Operators(tmp_path)
    operators.run("a", 0, 9)
    spark_checkpoint(tmp_path / "own", range(11), range(10))
    done = statelog.rewind(tmp_path / "own", location=operators.location)
    assert (done.taken_back, done.operators) == ([], ["a"])

    spark_checkpoint(tmp_path / "other", range(4), range(3), query_id="other")
    for to in (None, 2):
        with pytest.raises(ConfigurationError, match="holds no state of statelog that belongs to query other"):
            statelog.rewind(tmp_path / "other", location=operators.location, to=to)


def test_a_batch_that_one_operator_has_not_completed_has_no_checkpoint(tmp_path: Path) -> None:
    operators = Operators(tmp_path)
    operators.run("ab", 0, 5, lacks_last=True)
    spark_checkpoint(tmp_path, range(7), range(6))
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.taken_back, done.operators) == (5, [5], ["a", "b"])
    operators.start("ab", 5)
    assert [operators.value(uid, 5) for uid in "ab"] == [4, 4]


def test_a_start_in_vain_changes_nothing_of_that(tmp_path: Path) -> None:
    operators = Operators(tmp_path)
    operators.run("ab", 0, 5, lacks_last=True)
    with pytest.raises(StateMissingError, match=r"the newest is checkpoint 4.*rewind"):
        operators.start("ab", 6)
    spark_checkpoint(tmp_path, range(7), range(6))
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.taken_back, done.operators) == (5, [5], ["a", "b"])


def test_a_batch_that_is_not_complete_may_be_the_first_of_a_start(tmp_path: Path) -> None:
    operators = Operators(tmp_path)
    operators.run("ab", 0, 3)
    operators.run("ab", 4, 4, lacks_last=True)
    spark_checkpoint(tmp_path, range(6), range(5))
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.taken_back, done.operators) == (4, [4], ["a", "b"])


def forget(operators: Operators, uid: str) -> None:
    """Give up an operator of the query whose Spark files are beside the location."""
    statelog.forget(Path(operators.location).parent, uid, location=operators.location)


def test_an_operator_that_was_removed_does_not_count(tmp_path: Path) -> None:
    spark_checkpoint(tmp_path, range(51), range(50))
    operators = Operators(tmp_path)
    operators.run("ab", 0, 3)
    forget(operators, "b")
    operators.run("a", 4, 49)
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.taken_back, done.operators) == (50, [], ["a"])


def test_an_operator_that_was_removed_while_a_batch_was_incomplete_does_not_count(tmp_path: Path) -> None:
    spark_checkpoint(tmp_path, range(6), range(5))
    operators = Operators(tmp_path)
    operators.run("ab", 0, 4, lacks_last=True)
    forget(operators, "b")
    with pytest.raises(StateMissingError, match="the newest is checkpoint 3"):
        operators.start("a", 5)
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.taken_back, done.operators) == (4, [4], ["a"])
    operators.start("a", 4)
    assert operators.value("a", 4) == 3


@pytest.mark.parametrize("to", [2, 4, 6])
def test_no_rewind_brings_an_operator_back(tmp_path: Path, to: int) -> None:
    """It has ended on every line: it starts over, whether the checkpoint has it or not."""
    spark_checkpoint(tmp_path, range(9), range(8))
    operators = Operators(tmp_path)
    operators.run("ab", 0, 4)
    former = operators.history.names["b"]
    forget(operators, "b")
    operators.run("a", 5, 7)
    assert statelog.rewind(tmp_path, location=operators.location, to=to).operators == ["a"]
    operators.start("ab", to + 1)
    assert [operators.value(uid, to + 1) for uid in "ab"] == [to, None]
    assert operators.history.names.keys() == {"a", "b"}
    assert operators.history.names["b"] != former


def test_operators_that_were_added_after_the_checkpoint_begin_anew(tmp_path: Path) -> None:
    spark_checkpoint(tmp_path, range(8), range(7))
    operators = Operators(tmp_path)
    operators.run("a", 0, 3)
    operators.run("ab", 4, 6)
    former = operators.history.names["b"]
    assert statelog.rewind(tmp_path, location=operators.location, to=2).operators == ["a"]
    operators.run("ab", 3, 4)
    assert operators.history.names["b"] != former
    operators.start("ab", 5)
    assert [operators.value(uid, 5) for uid in "ab"] == [4, 4]


def test_all_are_as_old_as_the_copy_that_was_restored(tmp_path: Path) -> None:
    spark_checkpoint(tmp_path, range(51), range(50))
    operators = Operators(tmp_path)
    operators.run("abc", 0, 3)
    forget(operators, "c")
    operators.run("ab", 4, 7)
    shutil.copytree(operators.location, tmp_path / "copy")
    operators.run("ab", 8, 12)
    shutil.rmtree(operators.location)
    (tmp_path / "copy").rename(operators.location)
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.operators) == (8, ["a", "b"])
    operators.run("ab", 8, 12)
    operators.start("ab", 13)
    assert [operators.value(uid, 13) for uid in "ab"] == [12, 12]


def set_times(root: Path, batches: range) -> None:
    """Let Spark have run other batches of these numbers."""
    for batch in batches:
        (root / "offsets" / str(batch)).write_text('v1\n{"batchTimestampMs": 7}\n')


def test_checkpoints_of_batches_that_were_taken_back_do_not_count(tmp_path: Path) -> None:
    operators = Operators(tmp_path)
    operators.run("ab", 0, 9)
    spark_checkpoint(tmp_path, range(6), range(6))
    set_times(tmp_path, range(4, 6))
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.taken_back, done.operators) == (4, [4, 5], ["a", "b"])


def test_state_of_another_copy_is_an_error(tmp_path: Path) -> None:
    operators = Operators(tmp_path)
    operators.run("ab", 0, 9)
    spark_checkpoint(tmp_path, range(6), range(6))
    set_times(tmp_path, range(6))
    with pytest.raises(StateMissingError, match="no checkpoint of any batch that Spark has committed"):
        statelog.rewind(tmp_path, location=operators.location)


def test_state_that_is_ahead_of_spark_is_left_alone(tmp_path: Path) -> None:
    """Spark's checkpoint may be an older copy than anything that the log still holds."""
    operators = Operators(tmp_path, replace(MATERIALIZING, file_merging="within"))
    operators.run("a", 0, 20)
    assert not (Path(operators.location) / "log" / f"{5:020}.log").exists()
    spark_checkpoint(tmp_path, range(4), range(3))
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.taken_back) == (3, [])


def test_a_batch_that_spark_has_not_committed_needs_nothing(tmp_path: Path) -> None:
    location = state(tmp_path, 1)
    spark_checkpoint(tmp_path, range(1), range(0))
    done = statelog.rewind(tmp_path, location=location)
    assert (done.next_batch, done.taken_back, done.operators) == (0, [], [])


def test_the_first_batch_is_taken_back_if_there_is_no_state(tmp_path: Path) -> None:
    spark_checkpoint(tmp_path, range(2), range(1))
    done = statelog.rewind(tmp_path, location=str(tmp_path / "location"))
    assert (done.next_batch, done.taken_back, done.removed) == (0, [0], ["offsets/1", "commits/0"])


def test_a_log_that_lost_a_file_is_damage(tmp_path: Path) -> None:
    operators = Operators(tmp_path, Options(file_merging="within"))
    operators.run("a", 0, 4)
    (Path(operators.location) / "log" / f"{1:020}.log").unlink()
    (Path(operators.location) / "log" / f"{2:020}.log").unlink()
    spark_checkpoint(tmp_path, range(7), range(6))
    with pytest.raises(CorruptionError, match="but lacks 2"):
        statelog.rewind(tmp_path, location=operators.location)


def test_operator_state_needs_its_newest_snapshots_only(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path, inline_budget_bytes=0, retained_checkpoints=2)
    engine.start(2, 0)
    for batch in range(6):
        for subtask in range(2):
            engine.run_subtask(batch, subtask, [("add", "units", f"{batch}")])
    engine.coordinator.close()
    spark_checkpoint(tmp_path, range(8), range(7))
    assert statelog.rewind(tmp_path, location=engine.location, dry_run=True).next_batch == 6

    [snapshot] = (Path(engine.location) / engine.identity / "changes").glob("*/1/5-*.snapshot")
    snapshot.unlink()
    with pytest.raises(StateMissingError, match="1 of its objects are gone"):
        statelog.rewind(tmp_path, location=engine.location)


# ---- What must still be there ----


def behind(tmp_path: Path, batch: int, **options: Any) -> Operators:
    """A query with checkpoints up to batch 9, of which those after a batch are not of the batches that Spark knows."""
    operators = Operators(tmp_path, make_options(**{"file_merging": "across", "orphan_min_age_s": 0, **options}))
    operators.run("ab", 0, 9)
    spark_checkpoint(tmp_path, range(11), range(10))
    set_times(tmp_path, range(batch + 1, 10))
    return operators


def require_nothing_changed(tmp_path: Path, before: dict[str, str], operators: Operators) -> None:
    """Neither Spark's files nor the log: the query could continue as it was."""
    assert spark_files(tmp_path) == before
    assert not (tmp_path / "statelog-rewound").exists()
    latest = operators.history.latest
    assert latest is not None
    assert latest.batch == 9


def append_entry(location: str, retained_from: int) -> None:
    """Repeat the newest entry of a log, with another word on what is retained."""
    log = open_log(LocalStore(location), Options(), SystemClock())
    latest = QueryHistory(log.claim(lambda epoch: Claim(epoch, "query", "run-1", b"t" * 16, 0))).latest
    assert latest is not None
    log.append(msgspec.structs.replace(latest, epoch=log.epoch, retained_from=retained_from), [])
    log.close()


@pytest.mark.parametrize(("retained_from", "is_kept"), [(6, False), (5, True), (-1, True)])
def test_it_does_not_go_back_beyond_what_is_retained(tmp_path: Path, retained_from: int, is_kept: bool) -> None:
    operators = behind(tmp_path, 5, retained_checkpoints=10)
    append_entry(operators.location, retained_from)
    before = spark_files(tmp_path)
    if is_kept:
        assert statelog.rewind(tmp_path, location=operators.location).next_batch == 6
        return
    for dry_run in (True, False):
        with pytest.raises(StateMissingError, match=r"back to checkpoint 5, but the oldest .* is checkpoint 6"):
            statelog.rewind(tmp_path, location=operators.location, dry_run=dry_run)
    require_nothing_changed(tmp_path, before, operators)


def delete(path: Path) -> None:
    path.unlink()


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("uid", ["a", "b"])
@pytest.mark.parametrize("harm", [delete, shorten])
def test_every_object_of_the_target_must_be_whole(tmp_path: Path, harm: Callable[[Path], None], uid: str) -> None:
    operators = behind(tmp_path, 5, inline_budget_bytes=0, retained_checkpoints=10)
    before = spark_files(tmp_path)
    # Its changesets are objects of their own, and the restored state is made of all of them.
    [changeset] = operators.objects(uid, "changes/*/0/3-*.run")
    harm(changeset)
    for dry_run in (True, False):
        with pytest.raises(
            StateMissingError, match=f"1 of its objects are gone or too short: {uid}-.*/changes/"
        ) as caught:
            statelog.rewind(tmp_path, location=operators.location, dry_run=dry_run)
        assert caught.value.kind is ErrorKind.OBJECT_MISSING
    require_nothing_changed(tmp_path, before, operators)


def test_the_first_checkpoint_must_be_whole_too(tmp_path: Path) -> None:
    operators = behind(tmp_path, 0, inline_budget_bytes=0, retained_checkpoints=10)
    before = spark_files(tmp_path)
    [changeset] = operators.objects("a", "changes/*/0/0-*.run")
    changeset.unlink()
    with pytest.raises(StateMissingError, match="back to checkpoint 0, but 1 of its objects"):
        statelog.rewind(tmp_path, location=operators.location)
    require_nothing_changed(tmp_path, before, operators)


def test_objects_of_other_checkpoints_need_not_be_there(tmp_path: Path) -> None:
    operators = behind(tmp_path, 5, inline_budget_bytes=0, retained_checkpoints=10)
    [changeset] = operators.objects("a", "changes/*/0/6-*.run")
    changeset.unlink()
    assert statelog.rewind(tmp_path, location=operators.location).next_batch == 6


@pytest.mark.parametrize("inline_budget_bytes", [0, 8 << 20])
@pytest.mark.parametrize("batch", range(1, 9))
def test_it_goes_back_to_what_can_be_started_or_changes_nothing(
    tmp_path: Path, batch: int, inline_budget_bytes: int
) -> None:
    operators = behind(tmp_path, batch, **{**SMALL, "inline_budget_bytes": inline_budget_bytes})
    before = spark_files(tmp_path)
    try:
        done = statelog.rewind(tmp_path, location=operators.location)
    except StateMissingError:
        assert batch < 8, "two checkpoints are retained"
        require_nothing_changed(tmp_path, before, operators)
        return
    assert batch == 8
    assert done.next_batch == batch + 1
    operators.start("ab", batch + 1)
    assert [operators.value(uid, batch + 1) for uid in "ab"] == [batch, batch]


def test_it_notices_whatever_a_restart_would_miss(tmp_path: Path) -> None:
    """Each object in turn is a byte shorter: it is refused, or the restart does not need it."""
    operators = behind(tmp_path, 8, **{**SMALL, "inline_budget_bytes": 0})
    kinds: set[str] = set()
    location = Path(operators.location)
    objects = [path for kind in ("runs", "changes") for path in operators.objects("a", f"{kind}/**/*.run")]
    for place, path in enumerate(objects):
        healthy = path.read_bytes()
        shorten(path)
        name = path.relative_to(location)
        try:
            statelog.rewind(tmp_path, location=operators.location, dry_run=True)
        except StateMissingError as error:
            assert str(name) in error.message, place
            kinds.add(name.parts[1])
            path.write_bytes(healthy)
            continue
        restarted = Operators(tmp_path / f"restart-{place}", operators.options)
        shutil.copytree(location, restarted.location)
        restarted.start("ab", 9)
        assert restarted.value("a", 9) == 8
        restarted.runner.release()
        path.write_bytes(healthy)
    assert kinds == {"runs", "changes"}, "the state is in both"


def test_the_first_batch_needs_no_checkpoint(tmp_path: Path) -> None:
    operators = Operators(tmp_path, MATERIALIZING)
    operators.run("ab", 0, 0, lacks_last=True)
    spark_checkpoint(tmp_path, range(2), range(1))
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.taken_back) == (0, [0])


# ---- Deaths ----


def next_batch(root: Path) -> int:
    """The batch that Spark would run first: its newest, unless that is committed."""
    newest = [max(int(path.name) for path in (root / name).glob("[0-9]*")) for name in ("offsets", "commits")]
    return newest[0] + (newest[0] == newest[1])


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("to", [None, 2])
def test_until_an_interrupted_call_is_repeated_no_other_state_is_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: int | None, is_after: bool
) -> None:
    """The log says first that the query goes back. Then a start is refused, or it repeats the right batch."""
    whole = tmp_path / "whole"
    spark_checkpoint(whole, range(7), range(6))
    made = Operators(whole)
    made.run("ab", 0, 5, lacks_last=True)
    refused: list[int] = []
    target = 4 if to is None else to
    for number in itertools.count(1):
        root = tmp_path / str(number)
        shutil.copytree(whole, root)
        operators = Operators(root)
        operators.runner.runs = 1
        kill = Kill(number, is_after)
        with monkeypatch.context() as patched:
            for owner, name in CHANGES:
                patched.setattr(owner, name, kill.around(getattr(owner, name)))
            try:
                statelog.rewind(root, location=operators.location, to=to)
            except Killed:
                pass
            else:
                break
        shutil.copytree(root, root / "started")
        started = Operators(root / "started")
        started.runner.runs = 2
        wanted = next_batch(root)
        try:
            started.start("ab", wanted)
        except StateMissingError:
            refused.append(wanted)
        else:
            assert wanted == target + 1
            assert [started.value(uid, wanted) for uid in "ab"] == [target, target]
        moved = (root / "statelog-rewound").exists()
        latest = operators.history.latest
        assert latest is not None
        assert not moved or latest.batch == target, "the claim comes first"
        assert statelog.rewind(root, location=operators.location, to=to).next_batch == target + 1
        assert next_batch(root) == target + 1
        assert spark_files(root) == expected_files(range(target + 2), range(target + 1))
        operators.run("ab", target + 1, 8)
        operators.start("ab", 9)
        assert [operators.value(uid, 9) for uid in "ab"] == [8, 8]
    assert number > (6 if to is None else 12)
    assert len(refused) >= number // 3, "before the commits are moved"


def test_a_query_that_goes_on_meanwhile_is_not_rewound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start has repeated the batch between the look at the log and the claim."""
    operators = behind(tmp_path, 8, retained_checkpoints=10)
    files = spark_files(tmp_path)
    put = LocalStore.put_if_absent
    others: list[str] = []

    def put_later(store: LocalStore, name: str, data: bytes) -> bool:
        if not others:
            others.append(name)
            operators.run("ab", 8, 9)
        return put(store, name, data)

    monkeypatch.setattr(LocalStore, "put_if_absent", put_later)
    with pytest.raises(StateMissingError, match="checkpoint 8 was replaced meanwhile"):
        statelog.rewind(tmp_path, location=operators.location)
    assert spark_files(tmp_path) == files


# ---- What was taken back ----


def test_later_checkpoints_are_read_by_the_names_of_pins_only(tmp_path: Path) -> None:
    spark_checkpoint(tmp_path, range(8), range(7))
    operators = Operators(tmp_path, replace(MATERIALIZING, retained_checkpoints=10))
    operators.run("ab", 0, 6)
    pins = {batch: statelog.pin(operators.location, at=batch, lasts_s=None, owner="audit").name for batch in (4, 6)}
    statelog.rewind(tmp_path, location=operators.location, to=5)
    for batches in ([], [6, 7]):
        if batches:
            operators.run("ab", 6, 7)
        for uid in "ab":
            for batch, pin in pins.items():
                rows = statelog.read_state(operators.location, uid, state="value", at=pin).read_all()
                assert rows["value_field"].to_pylist() == [batch]
            assert statelog.read_state(operators.location, uid, state="value", at=4).read_all().num_rows == 1
        assert [info.batch for info in statelog.list_pins(operators.location)] == [4, 6]
        if not batches:
            with pytest.raises(StateMissingError, match="no checkpoint 6"):
                statelog.read_state(operators.location, "a", state="value", at=6)


# ---- The command ----


def test_the_command_shows_what_it_has_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    operators = Operators(tmp_path)
    operators.run("ab", 0, 4, lacks_last=True)
    spark_checkpoint(tmp_path, range(6), range(5))
    assert main(["rewind", str(tmp_path), "--location", operators.location, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "next_batch": 4,
        "taken_back": [4],
        "removed": ["offsets/5", "commits/4"],
        "moved_to": str(tmp_path / "statelog-rewound" / "1"),
        "operators": ["a", "b"],
    }
