"""Rewind on files as Spark leaves them, without Spark."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import statelog
from statelog import ConfigurationError, CorruptionError, ErrorKind, StateMissingError
from statelog.__main__ import main
from statelog.checkpoint.admission import OperatorConfig
from statelog.checkpoint.history import History
from statelog.clock import SystemClock
from statelog.log.entry import Claim, Entry, QueryOperators
from statelog.log.open import open_log
from statelog.options import Options
from statelog.savepoints import spark_files as spark_files_module
from statelog.storage import LocalStore
from statelog.testing.query import LocalOperator
from tests.model.engine import Engine
from tests.model.operator_engine import OperatorEngine


def text_of(folder: str, batch: int) -> str:
    """What Spark writes of a batch, as far as it counts here; times are those of :class:`Engine`."""
    return f"v1\n{json.dumps({'batchTimestampMs': 1000 + batch, 'of': folder})}\n"


def spark_checkpoint(root: Path, offsets: range, commits: range, query_id: str = "query") -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / "metadata").write_text(json.dumps({"id": query_id}))
    for folder, batches in (("offsets", offsets), ("commits", commits)):
        (root / folder).mkdir(parents=True)
        for batch in batches:
            (root / folder / str(batch)).write_text(text_of(folder, batch))
            (root / folder / f".{batch}.crc").write_text(f"crc of {folder} {batch}")


def spark_files(root: Path) -> dict[str, str]:
    """Spark's files that a query would read, and what is in them."""
    files = [path for folder in ("offsets", "commits") for path in (root / folder).glob("*")]
    return {str(path.relative_to(root)): path.read_text() for path in files}


def expected_files(offsets: range, commits: range) -> dict[str, str]:
    return {
        name: text
        for folder, batches in (("offsets", offsets), ("commits", commits))
        for batch in batches
        for name, text in (
            (f"{folder}/{batch}", text_of(folder, batch)),
            (f"{folder}/.{batch}.crc", f"crc of {folder} {batch}"),
        )
    }


MATERIALIZING = Options(
    file_merging="across",
    retained_checkpoints=2,
    materialization_interval_s=0,
    merge_fan_in=2,
    orphan_min_age_s=0,
    log_min_age_s=0,
)


@dataclass
class NotedOperator:
    """An operator whose checkpoints note the operators of the query."""

    operator: LocalOperator
    note: QueryOperators

    def __getattr__(self, name: str) -> Any:
        return getattr(self.operator, name)

    def config_of(self, *arguments: Any) -> OperatorConfig:
        return replace(self.operator.config_of(*arguments), operators=self.note)


class SharingEngine(Engine):
    """An operator that is at a location beside others."""

    shared = ""

    @property
    def location(self) -> str:
        return self.shared


class Operators:
    """Operators at one location; a run of a query has the same id in all of them.

    Parameters
    ----------
    directory : Path
        Holds the location.
    options : Options
        Of all operators.
    is_noted : bool
        Whether checkpoints note the query's operators; older versions did not.
    places : dict of str to str, optional
        What they note of operators that are elsewhere, by uid.
    arguments
        Of the engines.
    """

    def __init__(
        self,
        directory: Path,
        options: Options | None = None,
        *,
        is_noted: bool = True,
        places: dict[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        self._directory = directory
        self._options = options
        self._is_noted = is_noted
        self._places = places or {}
        self._arguments = arguments
        self._engines: dict[tuple[str, str], Engine] = {}
        self._operators: dict[Engine, LocalOperator] = {}

    @property
    def location(self) -> str:
        return str(self._directory / "location")

    def engine(self, uid: str, query_id: str = "query") -> Engine:
        key = (query_id, uid)
        if key not in self._engines:
            engine = SharingEngine(
                self._directory / query_id / uid, lambda key: 0, query_id=query_id, uid=uid, **self._arguments
            )
            engine.shared = self.location
            if self._options is not None:
                engine.options = replace(self._options, observer=engine.crash_point)
            self._engines[key] = engine
            self._operators[engine] = engine.operator
        return self._engines[key]

    def run(self, run: int, uids: str, first: int, last: int, *, query_id: str = "query", action_on: str = "") -> None:
        """Let a run of a query have checkpoints of some batches; each character of `uids` is an operator.

        Only operators in `action_on` get the last batch, if that is given.
        """
        engines = {uid: self.engine(uid, query_id) for uid in uids}
        for uid, engine in engines.items():
            engine.runs = run - 1
            engine.clock.advance(100)
            if self._is_noted:
                note = QueryOperators(run, dict.fromkeys(uids, self.location) | self._places)
                engine.operator = NotedOperator(self._operators[engine], note)
            if first == last and action_on and uid not in action_on:
                continue  # Its first task would claim the location.
            engine.start(1, first)
        for batch in range(first, last + 1):
            for uid, engine in engines.items():
                if batch < last or not action_on or uid in action_on:
                    engine.run_commands(batch, 0, [((1, None), ("set", batch))])
        for engine in engines.values():
            if hasattr(engine, "coordinator"):
                engine.coordinator.close()
                engine.release()

    def newest(self, uid: str) -> int:
        log = open_log(LocalStore(self.location), uid, Options(), SystemClock())
        latest = History(log.read()).latest
        assert latest is not None
        return latest.batch


def state(directory: Path, batches: int) -> str:
    operators = Operators(directory)
    operators.run(1, "a", 0, batches - 1)
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
    assert planned.former_operators == []
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
    monkeypatch.setattr(spark_files_module, "sync_directory", pending.discard)
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


# ---- Several queries and operators ----


def test_other_queries_at_the_location_do_not_count(tmp_path: Path) -> None:
    operators = Operators(tmp_path)
    operators.run(1, "a", 0, 9)
    operators.run(1, "b", 0, 3, query_id="other")
    spark_checkpoint(tmp_path / "own", range(11), range(10))
    done = statelog.rewind(tmp_path / "own", location=operators.location)
    assert (done.taken_back, done.operators, done.former_operators) == ([], ["a"], [])

    spark_checkpoint(tmp_path / "other's", range(6), range(5), query_id="other")
    done = statelog.rewind(tmp_path / "other's", location=operators.location)
    assert (done.next_batch, done.taken_back, done.operators) == (4, [4], ["b"])

    spark_checkpoint(tmp_path / "third", range(4), range(3), query_id="third")
    with pytest.raises(ConfigurationError, match="holds no state of statelog that belongs to query third"):
        statelog.rewind(tmp_path / "third", location=operators.location)


@pytest.mark.parametrize("is_noted", [True, False])
def test_the_operator_that_is_furthest_behind_decides(tmp_path: Path, is_noted: bool) -> None:
    operators = Operators(tmp_path, is_noted=is_noted)
    operators.run(1, "ab", 0, 5, action_on="a")
    spark_checkpoint(tmp_path, range(7), range(6))
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.taken_back, done.operators) == (5, [5], ["a", "b"])


@pytest.mark.parametrize("is_noted", [True, False])
def test_a_start_in_vain_changes_nothing_of_that(tmp_path: Path, is_noted: bool) -> None:
    """The complete operator has claimed its log, and has even a checkpoint more; the other was refused."""
    operators = Operators(tmp_path, is_noted=is_noted)
    operators.run(1, "ab", 0, 5, action_on="a")
    operators.run(2, "ab", 6, 6, action_on="a")
    spark_checkpoint(tmp_path, range(7), range(6))
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.taken_back, done.operators) == (5, [5], ["a", "b"])


@pytest.mark.parametrize("is_noted", [True, False])
def test_an_operator_that_was_removed_does_not_count(tmp_path: Path, is_noted: bool) -> None:
    operators = Operators(tmp_path, is_noted=is_noted)
    operators.run(1, "ab", 0, 3)
    operators.run(2, "a", 4, 49)
    spark_checkpoint(tmp_path, range(51), range(50))
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.taken_back) == (50, [])
    assert (done.operators, done.former_operators) == (["a"], ["b"])


@pytest.mark.parametrize("is_noted", [True, False])
def test_an_operator_that_was_removed_while_a_batch_was_incomplete_does_not_count(
    tmp_path: Path, is_noted: bool
) -> None:
    operators = Operators(tmp_path, is_noted=is_noted)
    operators.run(1, "ab", 0, 4, action_on="a")
    operators.run(2, "a", 5, 9)
    spark_checkpoint(tmp_path, range(12), range(11))
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.taken_back) == (10, [10])
    assert (done.operators, done.former_operators) == (["a"], ["b"])


@pytest.mark.parametrize("is_noted", [True, False])
def test_all_are_as_old_as_the_copy_that_was_restored(tmp_path: Path, is_noted: bool) -> None:
    operators = Operators(tmp_path, is_noted=is_noted)
    operators.run(1, "abc", 0, 3)
    operators.run(2, "ab", 4, 8, action_on="b")
    spark_checkpoint(tmp_path, range(51), range(50))
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.operators, done.former_operators) == (8, ["a", "b"], ["c"])


def test_an_operator_that_no_action_has_read_decides(tmp_path: Path) -> None:
    """It was not read in the first batch of a run, and has no trace of that; but the other's checkpoint names it."""
    operators = Operators(tmp_path)
    operators.run(1, "ab", 0, 3)
    operators.run(2, "ab", 4, 4, action_on="a")
    spark_checkpoint(tmp_path, range(6), range(5))
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.taken_back, done.operators) == (4, [4], ["a", "b"])


def test_an_operator_that_was_removed_just_before_does_not_count(tmp_path: Path) -> None:
    operators = Operators(tmp_path)
    operators.run(1, "ab", 0, 3)
    operators.run(2, "a", 4, 4)
    spark_checkpoint(tmp_path, range(6), range(5))
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.taken_back, done.former_operators) == (5, [], ["b"])


def test_a_run_that_has_committed_nothing_yet_knows_its_operators(tmp_path: Path) -> None:
    operators = Operators(tmp_path)
    operators.run(1, "ab", 0, 3, action_on="a")
    operators.run(2, "a", 4, 4)
    spark_checkpoint(tmp_path, range(5), range(4))
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.taken_back, done.former_operators) == (4, [], ["b"])


@pytest.mark.parametrize("is_copy", [True, False])
def test_what_older_checkpoints_do_not_tell_is_asked_for(tmp_path: Path, is_copy: bool) -> None:
    """Its log may be a copy; or else no action read it in the first batch of a run, or it was removed before that."""
    if is_copy:
        operators = behind(tmp_path, 3, is_noted=False)
        end = 9
    else:
        operators = Operators(tmp_path, is_noted=False)
        operators.run(1, "ab", 0, 3)
        operators.run(2, "ab", 4, 4, action_on="a")
        spark_checkpoint(tmp_path, range(6), range(5))
        end = 4
    with pytest.raises(ConfigurationError, match=r"'b' \(newest checkpoint 3\).*operators=\[") as caught:
        statelog.rewind(tmp_path, location=operators.location)
    assert caught.value.kind is ErrorKind.UID_REQUIRED
    assert spark_files(tmp_path) == expected_files(range(end + 2), range(end + 1))

    removed = statelog.rewind(tmp_path, location=operators.location, operators=["a"])
    assert (removed.next_batch, removed.taken_back, removed.operators) == (end + 1, [], ["a"])
    done = statelog.rewind(tmp_path, location=operators.location, operators=["b", "a"])
    assert (done.next_batch, done.operators) == (4, ["a", "b"])


def test_operators_elsewhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "spark").mkdir()
    here, there = (Operators(tmp_path / name, places={"b": str(tmp_path / "2" / "location")}) for name in "12")
    here.run(1, "a", 0, 5)
    there.run(1, "b", 0, 3)
    spark_checkpoint(tmp_path / "spark", range(7), range(6))
    done = statelog.rewind(tmp_path / "spark", location=here.location)
    assert (done.next_batch, done.operators) == (4, ["a", "b"])

    spark_checkpoint(tmp_path / "again", range(7), range(6))
    shutil.rmtree(there.location)
    with pytest.raises(ConfigurationError, match="an operator 'b', and .*2/location holds no state of it"):
        statelog.rewind(tmp_path / "again", location=here.location)


def set_times(root: Path, batches: range) -> None:
    """Let Spark have run other batches of these numbers."""
    for batch in batches:
        (root / "offsets" / str(batch)).write_text('v1\n{"batchTimestampMs": 7}\n')


def test_checkpoints_of_batches_that_were_taken_back_do_not_count(tmp_path: Path) -> None:
    operators = Operators(tmp_path)
    operators.run(1, "ab", 0, 9)
    spark_checkpoint(tmp_path, range(6), range(6))
    set_times(tmp_path, range(4, 6))
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.taken_back, done.operators) == (4, [4, 5], ["a", "b"])


def test_state_of_another_copy_is_an_error(tmp_path: Path) -> None:
    operators = Operators(tmp_path)
    operators.run(1, "ab", 0, 9)
    spark_checkpoint(tmp_path, range(6), range(6))
    set_times(tmp_path, range(6))
    with pytest.raises(StateMissingError, match="no checkpoint of any batch that Spark has committed"):
        statelog.rewind(tmp_path, location=operators.location)


def test_state_that_is_ahead_of_spark_is_left_alone(tmp_path: Path) -> None:
    """Spark's checkpoint may be an older copy than anything that the log still holds."""
    operators = Operators(tmp_path, replace(MATERIALIZING, file_merging="within"))
    operators.run(1, "a", 0, 20)
    assert not (Path(operators.location) / "a" / "log" / f"{5:020}.log").exists()
    spark_checkpoint(tmp_path, range(4), range(3))
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.taken_back) == (3, [])


def test_a_batch_that_spark_has_not_committed_needs_nothing(tmp_path: Path) -> None:
    location = state(tmp_path, 1)
    spark_checkpoint(tmp_path, range(1), range(0))
    done = statelog.rewind(tmp_path, location=location)
    assert (done.next_batch, done.taken_back, done.operators) == (0, [], ["a"])


def test_the_first_batch_is_taken_back_if_there_is_no_state(tmp_path: Path) -> None:
    spark_checkpoint(tmp_path, range(2), range(1))
    done = statelog.rewind(tmp_path, location=str(tmp_path / "location"))
    assert (done.next_batch, done.taken_back, done.removed) == (0, [0], ["offsets/1", "commits/0"])


def test_a_log_that_lost_a_file_is_damage(tmp_path: Path) -> None:
    operators = Operators(tmp_path, Options(file_merging="within"))
    operators.run(1, "a", 0, 4)
    (Path(operators.location) / "a" / "log" / f"{1:020}.log").unlink()
    (Path(operators.location) / "a" / "log" / f"{2:020}.log").unlink()
    spark_checkpoint(tmp_path, range(7), range(6))
    with pytest.raises(CorruptionError, match="but not 2"):
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

    [snapshot] = (Path(engine.location) / "op" / "changes").glob("*/1/5-*.snapshot")
    snapshot.unlink()
    with pytest.raises(StateMissingError, match="1 of its objects are gone"):
        statelog.rewind(tmp_path, location=engine.location)


def test_named_operators_must_be_there(tmp_path: Path) -> None:
    location = state(tmp_path, 3)
    spark_checkpoint(tmp_path, range(4), range(4))
    with pytest.raises(
        ConfigurationError, match="an operator 'b', and .* holds no state of it that belongs to query query"
    ):
        statelog.rewind(tmp_path, location=location, operators=["a", "b"])
    refused: tuple[Sequence[str], ...] = ("a", [])
    for wrong in refused:
        with pytest.raises(ConfigurationError, match="list of uids"):
            statelog.rewind(tmp_path, location=location, operators=wrong)


def test_a_named_operator_without_state_after_the_first_batch(tmp_path: Path) -> None:
    location = state(tmp_path, 1)
    spark_checkpoint(tmp_path, range(1), range(1))
    assert statelog.rewind(tmp_path, location=location).taken_back == []
    done = statelog.rewind(tmp_path, location=location, operators=["a", "b"])
    assert (done.next_batch, done.taken_back) == (0, [0])


# ---- What must still be there ----


def behind(tmp_path: Path, batch: int, **arguments: Any) -> Operators:
    """Two operators of one run up to batch 9, of which `b` lost what came after a batch."""
    operators = Operators(tmp_path, **arguments)
    operators.run(1, "ab", 0, batch)
    location = Path(operators.location)
    shutil.copytree(location / "b", tmp_path / "copy")
    operators.run(1, "ab", batch + 1, 9)
    shutil.rmtree(location / "b")
    (tmp_path / "copy").rename(location / "b")
    spark_checkpoint(tmp_path, range(11), range(10))
    return operators


def test_a_copy_of_one_operator_takes_all_back(tmp_path: Path) -> None:
    operators = behind(tmp_path, 5)
    done = statelog.rewind(tmp_path, location=operators.location)
    assert (done.next_batch, done.operators) == (6, ["a", "b"])
    operators.run(2, "ab", 6, 12)
    assert [operators.newest(uid) for uid in "ab"] == [12, 12]


def require_nothing_changed(tmp_path: Path) -> None:
    assert spark_files(tmp_path) == expected_files(range(11), range(10))
    assert not (tmp_path / "statelog-rewound").exists()


def append_entry(location: str, uid: str, *, retained_from: int | None) -> None:
    """Repeat the newest entry of a log, with another word on what is retained."""
    log = open_log(LocalStore(location), uid, Options(), SystemClock())
    entries = log.claim(lambda epoch: Claim(epoch, "query", "run-1", uid, b"t" * 16, 0))
    latest = History(entries).latest
    assert latest is not None
    log.append(msgspec.structs.replace(latest, epoch=log_epoch(entries), retained_from=retained_from), [])
    log.close()


def log_epoch(entries: list[Entry]) -> int:
    return 1 + max(entry.epoch for entry in entries)


@pytest.mark.parametrize(("retained_from", "is_kept"), [(6, False), (5, True), (None, True)])
def test_it_does_not_go_back_beyond_what_is_retained(tmp_path: Path, retained_from: int | None, is_kept: bool) -> None:
    operators = behind(tmp_path, 5)
    append_entry(operators.location, "a", retained_from=retained_from)
    if is_kept:
        assert statelog.rewind(tmp_path, location=operators.location).next_batch == 6
        return
    for dry_run in (True, False):
        with pytest.raises(StateMissingError, match=r"'a'.* back to checkpoint 5, but the oldest .* is checkpoint 6"):
            statelog.rewind(tmp_path, location=operators.location, dry_run=dry_run)
    require_nothing_changed(tmp_path)


def delete(path: Path) -> None:
    path.unlink()


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [delete, shorten])
def test_every_object_of_the_target_must_be_whole(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    operators = behind(tmp_path, 5, inline_budget_bytes=0)
    location = Path(operators.location)
    # Its changesets are objects of their own, and the restored state is made of all of them.
    [changeset] = (location / "a" / "changes").glob("*/0/3-*.run")
    harm(changeset)
    for dry_run in (True, False):
        with pytest.raises(StateMissingError, match="1 of its objects are gone or too short: a/changes/") as caught:
            statelog.rewind(tmp_path, location=operators.location, dry_run=dry_run)
        assert caught.value.kind is ErrorKind.OBJECT_MISSING
    require_nothing_changed(tmp_path)


def test_the_first_checkpoint_must_be_whole_too(tmp_path: Path) -> None:
    operators = behind(tmp_path, 0, inline_budget_bytes=0)
    [changeset] = (Path(operators.location) / "a" / "changes").glob("*/0/0-*.run")
    changeset.unlink()
    with pytest.raises(StateMissingError, match="back to checkpoint 0, but 1 of its objects"):
        statelog.rewind(tmp_path, location=operators.location)
    require_nothing_changed(tmp_path)


def test_objects_of_other_checkpoints_need_not_be_there(tmp_path: Path) -> None:
    operators = behind(tmp_path, 5, inline_budget_bytes=0)
    [changeset] = (Path(operators.location) / "a" / "changes").glob("*/0/6-*.run")
    changeset.unlink()
    assert statelog.rewind(tmp_path, location=operators.location).next_batch == 6


@pytest.mark.parametrize("inline_budget_bytes", [0, 8 << 20])
@pytest.mark.parametrize("batch", range(1, 9))
def test_it_goes_back_to_what_can_be_started_or_changes_nothing(
    tmp_path: Path, batch: int, inline_budget_bytes: int
) -> None:
    options = replace(MATERIALIZING, inline_budget_bytes=inline_budget_bytes)
    operators = behind(tmp_path, batch, options=options)
    try:
        done = statelog.rewind(tmp_path, location=operators.location)
    except StateMissingError:
        assert batch < 8, "two checkpoints are retained"
        require_nothing_changed(tmp_path)
        return
    assert batch > 1, "the runs of that checkpoint are deleted"
    assert done.next_batch == batch + 1
    for uid in "ab":
        engine = operators.engine(uid)
        engine.start(1, batch + 1, keep_local=False)
        [(_, [value, *_])] = engine.run_commands(batch + 1, 0, [((1, None), ("read",))])
        assert value == [batch]


def test_it_notices_whatever_a_restart_would_miss(tmp_path: Path) -> None:
    """Each object in turn is a byte shorter: it is refused, or the restart does not need it."""
    operators = behind(tmp_path, 8, options=replace(MATERIALIZING, inline_budget_bytes=0))
    kinds: set[str] = set()
    location = Path(operators.location)
    objects = [path for kind in ("runs", "changes") for path in (location / "a" / kind).rglob("*.run")]
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
        copy = tmp_path / f"restart-{place}"
        shutil.copytree(location, copy / "location")
        engine = Operators(copy).engine("a")
        engine.start(1, 9, keep_local=False)
        [(_, [value, *_])] = engine.run_commands(9, 0, [((1, None), ("read",))])
        assert value == [8]
        engine.release()
        path.write_bytes(healthy)
    assert kinds == {"runs", "changes"}, "the state is in both"


def test_the_first_batch_needs_no_checkpoint(tmp_path: Path) -> None:
    operators = Operators(tmp_path, MATERIALIZING)
    operators.run(1, "ab", 0, 0, action_on="a")
    spark_checkpoint(tmp_path, range(2), range(1))
    done = statelog.rewind(tmp_path, location=operators.location, operators=["a", "b"])
    assert (done.next_batch, done.taken_back) == (0, [0])


# ---- The command ----


def test_the_command_names_operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    operators = Operators(tmp_path, is_noted=False)
    operators.run(1, "ab", 0, 3)
    operators.run(2, "ab", 4, 4, action_on="a")
    spark_checkpoint(tmp_path, range(6), range(5))
    arguments = ["rewind", str(tmp_path), "--location", operators.location]
    assert main(arguments) == 1
    assert "operators=[...]" in capsys.readouterr().err
    assert main([*arguments, "--operator", "a", "--operator", "b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "next_batch": 4,
        "taken_back": [4],
        "removed": ["offsets/5", "commits/4"],
        "moved_to": str(tmp_path / "statelog-rewound" / "1"),
        "operators": ["a", "b"],
        "former_operators": [],
    }
