"""Which checkpoint all operators of a query can go back to, from what their logs say and Spark has committed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from statelog import ConfigurationError, CorruptionError, ErrorKind, StateMissingError
from statelog.checkpoint.history import History
from statelog.checkpoint.query_operators import OperatorLog, QueryLogs
from statelog.checkpoint.rewind_target import RewindTarget, find_target, target_at
from statelog.log.entry import Checkpoint, QueryOperators
from statelog.log.references import Base, BaseRange, Level, SegmentRef, StoredRun
from statelog.runs.key_groups import hash_range
from statelog.storage import LocalStore, Store
from statelog.storage.links import LinkedStore, link

HOME = "/home/of/the/query"


def checkpoint(batch: int, run: str = "run-1", note: Sequence[str] | None = None, **changes: object) -> Checkpoint:
    made = Checkpoint(1, batch, 0, "query", run, "op", 1, [], b"keys", [], 1000 + batch, 0, b"")
    operators = None if note is None else QueryOperators(1, dict.fromkeys(note, ""))
    return replace(made, operators=operators, **changes)


def log(uid: str, *checkpoints: Checkpoint, runs: Sequence[str] = ()) -> OperatorLog:
    known = frozenset(one.run_id for one in checkpoints) | frozenset(runs)
    return OperatorLog(uid, HOME, uid, History(checkpoints), known)


def nothing_there(location: str) -> Store:
    return LocalStore(Path(location))


def target(
    *logs: OperatorLog,
    commits: Sequence[int],
    uids: Sequence[str] | None = None,
    time_ms: Callable[[int], int | None] = lambda batch: 1000 + batch,
) -> RewindTarget:
    return find_target(QueryLogs("query", HOME, None, nothing_there, list(logs)), commits, time_ms, uids)


def noted(uid: str, batches: range, note: str) -> OperatorLog:
    return log(uid, *(checkpoint(batch, note=note) for batch in batches))


# ---- The checkpoint ----


def test_it_is_the_newest_that_all_have_of_what_spark_has_committed() -> None:
    a, b = noted("a", range(6), "ab"), noted("b", range(5), "ab")
    for commits, expected in ((range(4), 3), (range(5), 4), (range(6), 4), (range(7), 4), (range(5, 6), 4)):
        found = target(a, b, commits=commits)
        assert (found.batch, found.operators, found.former) == (expected, [a, b], [])


def test_checkpoints_of_batches_that_spark_ran_at_another_time_do_not_count() -> None:
    """One whose time Spark has forgotten is taken for its own."""
    a = noted("a", range(6), "a")
    assert target(a, commits=range(6), time_ms=lambda batch: 1000 + batch if batch < 3 else 7).batch == 2
    assert target(a, commits=range(6), time_ms=lambda batch: None if batch < 5 else 7).batch == 4


def test_state_that_is_ahead_is_left_alone() -> None:
    """The log does not hold checkpoints as old as Spark's any more."""
    entries = [checkpoint(batch, key_schema=b"", note="a") for batch in range(7, 9)]
    assert target(log("a", *entries), commits=range(4)).batch == 3
    assert target(log("a", *entries), commits=range(8)).batch == 7
    assert target(log("a", *entries), commits=[*range(7)]).batch == 6


def test_before_sparks_first_commit_there_is_nothing_to_go_back_to() -> None:
    assert target(noted("a", range(1), "a"), commits=[]).batch == -1


def test_operators_without_any_checkpoint_that_counts_are_an_error() -> None:
    with pytest.raises(StateMissingError, match="no checkpoint of any batch that Spark has committed"):
        target(noted("a", range(6), "a"), commits=range(4), time_ms=lambda batch: 7)
    assert target(noted("a", range(1), "a"), commits=[0], time_ms=lambda batch: 7).batch == -1, "batch 0 needs none"


def test_a_query_without_state_goes_back_to_its_start_only_from_the_first_batch() -> None:
    assert target(commits=[0]) == RewindTarget(-1, [], [])
    for commits in ([], [0, 1], [1]):
        with pytest.raises(
            ConfigurationError, match="holds no state of statelog that belongs to query query"
        ) as caught:
            target(commits=commits)
        assert caught.value.kind is ErrorKind.CHECKPOINT_MISSING


def test_a_lost_checkpoint_is_damage_of_the_query_only() -> None:
    damaged = log("b", *(checkpoint(batch, note="ab") for batch in (0, 1, 3)))
    with pytest.raises(CorruptionError, match="'b'.*lacks checkpoint 2"):
        target(noted("a", range(4), "ab"), damaged, commits=range(4))
    assert target(noted("a", range(4), "a"), damaged, commits=range(4), uids=["a"]).batch == 3


# ---- An earlier batch ----


def earlier(*logs: OperatorLog, batch: int, time_ms: int | None = None) -> RewindTarget:
    """The target for a batch, if the newest one is batch 9 of the first operator."""
    newest = RewindTarget(9, [logs[0]], [])
    return target_at(QueryLogs("query", HOME, None, nothing_there, list(logs)), newest, batch, lambda _: time_ms)


def test_operators_that_were_added_later_do_not_count_for_an_earlier_batch() -> None:
    a = log("a", *[checkpoint(batch, note="a" if batch < 5 else "ab") for batch in range(10)])
    initial = checkpoint(4, is_initial=True)
    b = log("b", initial, *[checkpoint(batch, note="ab") for batch in range(5, 10)])
    for batch, operators, former in ((3, [a], [b]), (4, [a], [b]), (5, [a, b], [])):
        assert earlier(b, a, batch=batch) == RewindTarget(batch, operators, former)


def test_the_newest_operators_count_if_no_note_tells_or_one_cannot_be_found() -> None:
    a, b = (log(uid, *[checkpoint(batch) for batch in range(10)]) for uid in "ab")
    assert earlier(a, b, batch=3) == RewindTarget(3, [a], []), "there is no note"
    lacking = noted("c", range(10), "cx")
    assert earlier(a, lacking, batch=3) == RewindTarget(3, [a], []), "x cannot be found"
    other_time = noted("c", range(10), "c")
    assert earlier(a, other_time, batch=3, time_ms=7) == RewindTarget(3, [a], [])


# ---- The operators ----


def test_operators_that_are_named_must_have_state_after_the_first_batch() -> None:
    a, b = noted("a", range(3), "ab"), noted("b", range(2), "ab")
    assert target(a, b, commits=range(3), uids=["b", "a", "b"]) == RewindTarget(1, [a, b], [])
    assert target(a, b, commits=range(3), uids=["a"]) == RewindTarget(2, [a], [])
    with pytest.raises(ConfigurationError, match=f"an operator 'c', and {HOME} holds no state of it") as caught:
        target(a, b, commits=range(3), uids=["a", "c"])
    assert caught.value.kind is ErrorKind.CHECKPOINT_MISSING
    assert target(noted("a", range(1), "a"), commits=[0], uids=["a", "c"]).batch == -1
    with pytest.raises(ConfigurationError, match="an operator 'c'"):
        target(noted("a", range(2), "a"), commits=[1], uids=["a", "c"])
    with pytest.raises(ConfigurationError, match="and /given holds no state of it"):
        find_target(QueryLogs("query", HOME, "/given", nothing_there, [a]), range(3), lambda batch: None, ["a", "c"])


def test_an_operator_that_checkpoints_note_must_have_state() -> None:
    with pytest.raises(ConfigurationError, match="an operator 'b'"):
        target(noted("a", range(3), "ab"), commits=range(3))
    assert target(noted("a", range(1), "ab"), commits=[0]).batch == -1


def test_the_newest_note_of_batches_as_spark_knows_them_says_which_operators_there_are() -> None:
    """Also of the batch that Spark is about to commit: its run has no other."""
    older = [checkpoint(batch, note="ab") for batch in range(3)]
    a, b = log("a", *older, checkpoint(3, "run-2", note="a")), log("b", *older)
    for commits in (range(4), range(3)):
        assert target(a, b, commits=commits) == RewindTarget(commits[-1], [a], [b])
    assert target(a, b, commits=range(2)) == RewindTarget(1, [a, b], [])
    other_time = target(a, b, commits=range(4), time_ms=lambda batch: 7 if batch == 3 else 1000 + batch)
    assert other_time == RewindTarget(2, [a, b], []), "that run's batches were taken back"


def test_without_notes_who_lacks_more_than_the_newest_batch_is_a_former_operator() -> None:
    batches = [checkpoint(batch) for batch in range(6)]
    a, b, c = log("a", *batches), log("b", *batches[:5]), log("c", *(checkpoint(one, "run-0") for one in range(3)))
    assert target(a, b, c, commits=range(6)) == RewindTarget(4, [a, b], [c])
    assert target(a, b, commits=range(6)) == RewindTarget(4, [a, b], [])
    ahead = log("a", *(checkpoint(batch) for batch in (7, 8)))
    assert (
        target(log("a", *(replace(one, key_schema=b"") for one in ahead.history.checkpoints)), commits=[3]).batch == 3
    )


def test_a_guess_that_the_runs_speak_against_is_refused() -> None:
    a = log("a", *(checkpoint(batch) for batch in range(5)), checkpoint(5, "run-2"))
    took_no_part = log("b", *(checkpoint(batch) for batch in range(5)))
    took_part = log("c", *(checkpoint(batch) for batch in range(2)), runs=["run-2"])
    for others, names in (
        ([took_no_part], r"'b' \(newest checkpoint 4\)\."),
        ([took_part], r"'c' \(newest checkpoint 1\)\."),
        ([took_no_part, took_part], r"'b' .*, 'c' \(newest checkpoint 1\)\. The newest .* others is 5"),
    ):
        with pytest.raises(ConfigurationError, match=names) as caught:
            target(a, *others, commits=range(6))
        assert caught.value.kind is ErrorKind.UID_REQUIRED
    assert target(a, took_no_part, commits=range(6), uids=["a", "b"]).batch == 4
    ahead = log("b", *(checkpoint(batch, "run-9", key_schema=b"") for batch in (7, 8)))
    assert target(a, ahead, commits=range(6)) == RewindTarget(5, [a, ahead], []), "it has more than the newest batch"
    assert target(a, log("b", *took_no_part.history.checkpoints, runs=["run-2"]), commits=range(6)).batch == 4


# ---- What must be there ----


def segment(subtask: int, name: str, offset: int = 0, length: int = 10) -> SegmentRef:
    return SegmentRef(subtask, 0, b"", offset, length, 1, 1, name)


def require_restorable(root: Path, batch: int, *logs: OperatorLog) -> None:
    RewindTarget(batch, list(logs), []).require_restorable(lambda location: LocalStore(root))


def test_every_operators_checkpoint_must_be_retained(tmp_path: Path) -> None:
    a = log("a", *(checkpoint(batch, retained_from=max(batch - 1, 0)) for batch in range(6)))
    require_restorable(tmp_path, 4, a)
    with pytest.raises(StateMissingError, match="'a'.*back to checkpoint 3, but the oldest that is retained .* 4"):
        require_restorable(tmp_path, 3, log("b", *map(checkpoint, range(6))), a)
    with pytest.raises(StateMissingError, match="back to checkpoint 3, but it has none"):
        require_restorable(tmp_path, 3, log("a"))
    require_restorable(tmp_path, -1, log("a"))  # batch 0 starts from nothing


def test_every_object_must_be_there_in_full_length(tmp_path: Path) -> None:
    """Of keyed state the changes since the materialized state, and that; objects may hold several parts."""
    own = hash_range(0, 1)
    names = {kind: f"op/{kind}" for kind in ("run", "old", "changes", "empty")}
    run = StoredRun(names["run"], 5, 10, b"", 1, own.first, own.last)
    base = Base(0, 1, [Level(0, 0, b"", b"", own.first, own.last, [run])])
    entries = [
        checkpoint(0, segments=[segment(0, names["old"])]),
        checkpoint(
            1, base_ranges=[BaseRange(own.first, own.last, base)], segments=[segment(0, names["changes"], 3, 4)]
        ),
        checkpoint(2, segments=[segment(0, names["empty"], 0, 0)]),
    ]
    held = OperatorLog("a", HOME, "op", History(entries))
    store = LocalStore(tmp_path)
    with pytest.raises(StateMissingError, match="but 3 of its objects .* short: op/changes, op/empty, op/run"):
        require_restorable(tmp_path, 2, held)
    store.put(names["empty"], b"")
    for run_bytes, changes_bytes, gone in (
        (15, 7, []),
        (14, 7, ["run"]),
        (15, 6, ["changes"]),
        (None, None, ["changes", "run"]),
    ):
        for kind, size_bytes in (("run", run_bytes), ("changes", changes_bytes)):
            store.delete([names[kind]])
            if size_bytes is not None:
                store.put(names[kind], bytes(size_bytes))
        if not gone:
            require_restorable(tmp_path, 2, held)
            continue
        shown = ", ".join(names[kind] for kind in gone)
        with pytest.raises(StateMissingError, match=rf"but {len(gone)} of its objects .* short: {shown}\.") as caught:
            require_restorable(tmp_path, 2, held)
        assert caught.value.kind is ErrorKind.OBJECT_MISSING


def test_operator_state_needs_the_snapshots_of_its_checkpoint_and_none_before(tmp_path: Path) -> None:
    entries = [
        checkpoint(batch, key_schema=b"", parallelism=3, segments=[segment(n, f"op/{batch}-{n}") for n in range(3)])
        for batch in range(2)
    ]
    held = OperatorLog("a", HOME, "op", History(entries))
    with pytest.raises(StateMissingError, match=r"3 of its objects .*: op/1-0, op/1-1, op/1-2\."):
        require_restorable(tmp_path, 1, held)
    for number in range(3):
        LocalStore(tmp_path).put(f"op/1-{number}", bytes(10))
    require_restorable(tmp_path, 1, held)


def test_of_many_objects_the_first_three_are_named(tmp_path: Path) -> None:
    names = [f"op/{number}" for number in range(4)]
    entry = checkpoint(0, key_schema=b"", parallelism=4, segments=[segment(*one) for one in enumerate(names)])
    with pytest.raises(StateMissingError, match=r"4 of its objects .*: op/0, op/1, op/2, \.\.\."):
        require_restorable(tmp_path, 0, OperatorLog("a", HOME, "op", History([entry])))


def test_a_branch_needs_the_objects_of_its_parents_where_they_are(tmp_path: Path) -> None:
    parent, branch = tmp_path / "parent", tmp_path / "branch"
    names = [link(str(parent), name) for name in ("op/a", "op/b")]
    parts = [segment(0, names[0], 0, 1), segment(1, names[1], 2, 3), segment(2, "op/own", 0, 1)]
    entry = checkpoint(0, key_schema=b"", parallelism=3, segments=parts)
    target = RewindTarget(0, [OperatorLog("a", HOME, "op", History([entry]))], [])
    stores = LinkedStore(LocalStore(branch), lambda location: LocalStore(Path(location)))
    for gone in ((names[0], names[1], "op/own"), (names[1], "op/own"), ("op/own",)):
        with pytest.raises(StateMissingError, match=rf"but {len(gone)} of its objects .* short: {', '.join(gone)}\."):
            target.require_restorable(lambda location: stores)
        LocalStore(parent).put("op/b" if len(gone) == 2 else "op/a", bytes(5))
    LocalStore(branch).put("op/own", b"x")
    target.require_restorable(lambda location: stores)
    (parent / "op/b").write_bytes(bytes(4))
    with pytest.raises(StateMissingError, match=r"but 1 of its objects .* short: /.*!/op/b\."):
        target.require_restorable(lambda location: stores)
