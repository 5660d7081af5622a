"""Which checkpoint a query can go back to, from what its log says and Spark has committed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from statelog import ConfigurationError, CorruptionError, ErrorKind, StateMissingError
from statelog.history.query_history import QueryHistory
from statelog.log.entry import QueryCheckpoint, Section
from statelog.log.references import Base, BaseRange, Level, SegmentRef, StoredRun
from statelog.queries.stopped import StoppedQuery
from statelog.runs.key_groups import hash_range
from statelog.spark.checkpoint.checkpoint import COMMITS, SparkCheckpoint, StoreFiles
from statelog.storage import LocalStore, Store
from statelog.storage.links import LinkedStore, link

HOME = "/home/of/the/query"


def section(uid: str = "a", **changes: object) -> Section:
    return replace(Section(f"{uid}-1", uid, 1, [], b"keys", [], begins=True), **changes)


def checkpoint(batch: int, *sections: Section, **changes: object) -> QueryCheckpoint:
    """A checkpoint, by default of one operator that begins with batch 0."""
    token = b"token %d" % batch
    own = list(sections) or [section(begins=batch == 0)]
    made = QueryCheckpoint(1, batch, 0, token, b"", "query", "run", token, 1000 + batch, 0, own, number=1, offset=batch)
    return replace(made, **changes)


def whole(batch: int, **changes: object) -> QueryCheckpoint:
    """A checkpoint of an operator without keys, which needs none before it."""
    return checkpoint(batch, section(key_schema=b""), **changes)


@dataclass(frozen=True)
class Known(SparkCheckpoint):
    """Spark's knowledge of its batches."""

    commits_of: Sequence[int]
    offsets_of: Sequence[int]
    time_of: Callable[[int], int | None]

    def batches(self, folder: str) -> list[int]:
        return list(self.commits_of if folder == COMMITS else self.offsets_of)

    def time_ms(self, batch: int) -> int | None:
        return self.time_of(batch)


def stopped(
    *entries: QueryCheckpoint,
    commits: Sequence[int] = (),
    offsets: Sequence[int] = range(100),
    time_ms: Callable[[int], int | None] = lambda batch: 1000 + batch,
    store: Store | None = None,
) -> StoppedQuery:
    nowhere = LocalStore(HOME)
    spark = Known(StoreFiles(nowhere), HOME, commits, offsets, time_ms)
    return StoppedQuery(spark, "query", store or nowhere, HOME, QueryHistory(entries))


def target(
    *entries: QueryCheckpoint,
    commits: Sequence[int],
    offsets: Sequence[int] = range(100),
    time_ms: Callable[[int], int | None] = lambda batch: 1000 + batch,
) -> int:
    return stopped(*entries, commits=commits, offsets=offsets, time_ms=time_ms).rewind_target()


# ---- The checkpoint ----


def test_it_is_the_newest_of_what_spark_has_committed() -> None:
    entries = [checkpoint(batch) for batch in range(5)]
    for commits, expected in ((range(4), 3), (range(5), 4), (range(6), 4), (range(5, 6), 4)):
        assert target(*entries, commits=commits) == expected


def test_checkpoints_of_batches_that_spark_ran_at_another_time_do_not_count() -> None:
    """One whose time Spark has forgotten, or never noted, is taken for its own."""
    entries = [checkpoint(batch) for batch in range(6)]
    assert target(*entries, commits=range(6), time_ms=lambda batch: 1000 + batch if batch < 3 else 7) == 2
    assert target(*entries, commits=range(6), time_ms=lambda batch: None if batch < 5 else 7) == 4
    assert target(*entries, commits=range(6), offsets=[5], time_ms=lambda batch: 7) == 4


def test_state_that_is_ahead_is_left_alone() -> None:
    """The log does not hold checkpoints as old as Spark's any more."""
    entries = [whole(batch) for batch in range(7, 9)]
    assert target(*entries, commits=range(4)) == 3
    assert target(*entries, commits=range(8)) == 7
    assert target(*entries, commits=range(7)) == 6


def test_before_sparks_first_commit_there_is_nothing_to_go_back_to() -> None:
    assert target(checkpoint(0), commits=[]) == -1


def test_a_log_without_any_checkpoint_that_counts_is_an_error() -> None:
    entries = [checkpoint(batch) for batch in range(6)]
    with pytest.raises(StateMissingError, match="no checkpoint of any batch that Spark has committed"):
        target(*entries, commits=range(4), time_ms=lambda batch: 7)
    assert target(checkpoint(0), commits=[0], time_ms=lambda batch: 7) == -1, "batch 0 needs none"


def test_a_query_without_state_goes_back_to_its_start_only_from_the_first_batch() -> None:
    assert target(commits=[0]) == -1
    for commits in ([], [0, 1], [1]):
        with pytest.raises(
            ConfigurationError, match="holds no state of statelog that belongs to query query"
        ) as caught:
            target(commits=commits)
        assert caught.value.kind is ErrorKind.CHECKPOINT_MISSING


def test_a_lost_checkpoint_is_damage() -> None:
    entries = [checkpoint(batch) for batch in (0, 1, 3)]
    with pytest.raises(CorruptionError, match="lacks checkpoint 2"):
        target(*entries, commits=range(4))


# ---- What must be there ----


def segment(subtask: int, name: str, offset: int = 0, length: int = 10) -> SegmentRef:
    return SegmentRef(subtask, 0, b"", offset, length, 1, 1, name)


def require_restorable(root: Path, batch: int, *entries: QueryCheckpoint) -> None:
    stopped(*entries, store=LocalStore(root)).require_restorable(batch)


def test_the_checkpoint_must_be_retained(tmp_path: Path) -> None:
    entries = [checkpoint(batch, retained_from=max(batch - 1, 0)) for batch in range(6)]
    require_restorable(tmp_path, 4, *entries)
    with pytest.raises(StateMissingError, match="back to checkpoint 3, but the oldest that is retained .* 4"):
        require_restorable(tmp_path, 3, *entries)
    with pytest.raises(StateMissingError, match="back to checkpoint 3, but it has none"):
        require_restorable(tmp_path, 3)
    require_restorable(tmp_path, -1)  # batch 0 starts from nothing


def test_every_object_must_be_there_in_full_length(tmp_path: Path) -> None:
    """Of keyed state the changes since the materialized state, and that; objects may hold several parts."""
    own = hash_range(0, 1)
    names = {kind: f"a-1/{kind}" for kind in ("run", "old", "changes", "empty", "other")}
    run = StoredRun(names["run"], 5, 10, b"", 1, own.first, own.last)
    base = Base(0, 1, [Level(0, 0, b"", b"", own.first, own.last, [run])])
    entries = [
        checkpoint(0, section(segments=[segment(0, names["old"])])),
        checkpoint(
            1,
            section(
                base_ranges=[BaseRange(own.first, own.last, base)],
                segments=[segment(0, names["changes"], 3, 4)],
                begins=False,
            ),
        ),
        checkpoint(
            2,
            section(segments=[segment(0, names["empty"], 0, 0)], begins=False),
            section("b", segments=[segment(0, names["other"])]),
        ),
    ]
    store = LocalStore(tmp_path)
    with pytest.raises(
        StateMissingError, match=r"but 4 of its objects .* short: a-1/changes, a-1/empty, a-1/other, \.\.\."
    ):
        require_restorable(tmp_path, 2, *entries)
    store.put(names["empty"], b"")
    store.put(names["other"], bytes(10))
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
            require_restorable(tmp_path, 2, *entries)
            continue
        shown = ", ".join(names[kind] for kind in gone)
        with pytest.raises(StateMissingError, match=rf"but {len(gone)} of its objects .* short: {shown}\.") as caught:
            require_restorable(tmp_path, 2, *entries)
        assert caught.value.kind is ErrorKind.OBJECT_MISSING


def test_operators_that_have_ended_need_nothing(tmp_path: Path) -> None:
    entry = checkpoint(0, section(), section("b", segments=[segment(0, "b-1/gone")]))
    with pytest.raises(StateMissingError, match="1 of its objects"):
        require_restorable(tmp_path, 0, entry)
    require_restorable(tmp_path, 0, replace(entry, ended=["b-1"]))


def test_operator_state_needs_the_snapshots_of_its_checkpoint_and_none_before(tmp_path: Path) -> None:
    entries = [
        checkpoint(
            batch, section(key_schema=b"", parallelism=3, segments=[segment(n, f"a-1/{batch}-{n}") for n in range(3)])
        )
        for batch in range(2)
    ]
    with pytest.raises(StateMissingError, match=r"3 of its objects .*: a-1/1-0, a-1/1-1, a-1/1-2\."):
        require_restorable(tmp_path, 1, *entries)
    for number in range(3):
        LocalStore(tmp_path).put(f"a-1/1-{number}", bytes(10))
    require_restorable(tmp_path, 1, *entries)


def test_a_branch_needs_the_objects_of_its_parents_where_they_are(tmp_path: Path) -> None:
    parent, branch = tmp_path / "parent", tmp_path / "branch"
    names = [link(str(parent), name) for name in ("a-1/a", "a-1/b")]
    parts = [segment(0, names[0], 0, 1), segment(1, names[1], 2, 3), segment(2, "a-1/own", 0, 1)]
    stores = LinkedStore(LocalStore(branch), lambda location: LocalStore(Path(location)))
    query = stopped(checkpoint(0, section(key_schema=b"", parallelism=3, segments=parts)), store=stores)
    for gone in ((names[0], names[1], "a-1/own"), (names[1], "a-1/own"), ("a-1/own",)):
        with pytest.raises(StateMissingError, match=rf"but {len(gone)} of its objects .* short: {', '.join(gone)}\."):
            query.require_restorable(0)
        LocalStore(parent).put("a-1/b" if len(gone) == 2 else "a-1/a", bytes(5))
    LocalStore(branch).put("a-1/own", b"x")
    query.require_restorable(0)
    (parent / "a-1/b").write_bytes(bytes(4))
    with pytest.raises(StateMissingError, match=r"but 1 of its objects .* short: /.*!/a-1/b\."):
        query.require_restorable(0)
