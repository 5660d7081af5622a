"""The coordinator: what makes a checkpoint, what is refused, and what the log then holds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from statelog import (
    ConfigurationError,
    CorruptionError,
    ErrorKind,
    FencedError,
    StateMissingError,
    Step,
    StorageError,
)
from statelog.coordinator.batch import BatchTime
from statelog.log.entry import Checkpoint, QueryCheckpoint
from statelog.metrics import Recorded
from statelog.rpc.messages import Begin, Begun, Fetch
from statelog.runs import digests
from statelog.storage import LocalStore, Store
from statelog.testing.faults import Call, Fault, FaultPlan, FaultStore
from statelog.testing.query import Crash
from tests.acks import make_ack
from tests.model.engine import Engine, Key
from tests.stores import KeptStore


def low_hash(key: Key) -> int:
    """Keys with a number belong to subtask 0 of 2, others to subtask 1."""
    return 0 if key[0] is not None else 2**64 - 1


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path, low_hash)


def begin(
    engine: Engine,
    batch: int,
    subtask: int,
    attempt: int,
    *,
    rows: int = 0,
    partition: int | None = None,
    token: str | None = None,
) -> Begun:
    time_ms = 1000 + batch if rows else None
    at = subtask if partition is None else partition
    own = token or f"{subtask}-{attempt}"
    return engine.coordinator.begin(Begin(engine.task_id(batch, subtask, attempt), at, rows, time_ms, own))


def ack(engine: Engine, batch: int, subtask: int, attempt: int, data: bytes, *, rows: int = 0) -> None:
    message = make_ack(engine.task_id(batch, subtask, attempt), digests.checksum(data), len(data), 1, rows, "", 0.0)
    engine.coordinator.ack(message, data)


def checkpoints(engine: Engine) -> list[Checkpoint]:
    """The operator's checkpoints in all entries of the log."""
    entries = engine.open_log(LocalStore(engine.location)).read()
    found = [entry for entry in entries if isinstance(entry, QueryCheckpoint)]
    return [Checkpoint.of(entry, section) for entry in found for section in entry.sections]


def uploads(engine: Engine) -> list[str]:
    return [info.name for info in LocalStore(engine.location).list(f"{engine.identity}/changes/")]


def complete(engine: Engine, batch: int, *contents: bytes) -> None:
    for subtask, data in enumerate(contents):
        attempt = batch * 100 + subtask
        begin(engine, batch, subtask, attempt)
        ack(engine, batch, subtask, attempt, data)


def test_checkpoint_exists_once_all_have_acked(engine: Engine) -> None:
    engine.start(2, 0)
    begin(engine, 0, 0, 1)
    begin(engine, 0, 1, 2)
    ack(engine, 0, 1, 2, b"one")
    assert checkpoints(engine) == []
    ack(engine, 0, 0, 1, b"zero")
    [entry] = checkpoints(engine)
    assert [segment.checksum for segment in entry.segments] == [digests.checksum(b"zero"), digests.checksum(b"one")]
    for segment, data in zip(entry.segments, (b"zero", b"one"), strict=True):
        stored = LocalStore(engine.location).read(segment.name, offset=segment.offset, length=segment.length)
        assert stored == data


def test_same_result_again_writes_nothing(engine: Engine) -> None:
    engine.start(1, 0)
    complete(engine, 0, b"data")
    begin(engine, 0, 0, 9)
    ack(engine, 0, 0, 9, b"data")
    assert [(entry.batch, entry.revision) for entry in checkpoints(engine)] == [(0, 0)]


def test_other_result_of_a_later_attempt_is_a_revision(engine: Engine) -> None:
    engine.start(2, 0)
    complete(engine, 0, b"zero", b"one")
    begin(engine, 0, 1, 50)
    ack(engine, 0, 1, 50, b"other")
    first, second = checkpoints(engine)
    assert (second.batch, second.revision) == (0, 1)
    assert second.segments[0] == first.segments[0], "what did not change is not written again"
    begun = begin(engine, 1, 1, 101)
    genesis = digests.genesis(engine.identity, 1, 2)
    assert begun.view.head == digests.extend(genesis, 0, [digests.checksum(b"other")])


def test_other_result_of_an_earlier_attempt_does_not_count(engine: Engine) -> None:
    engine.start(1, 0)
    begin(engine, 0, 0, 1)
    begin(engine, 0, 0, 2)
    ack(engine, 0, 0, 2, b"later")
    ack(engine, 0, 0, 1, b"earlier")
    [entry] = checkpoints(engine)
    assert entry.segments[0].attempt == 2


def test_acks_of_many_threads_at_once(tmp_path: Path) -> None:
    """Two attempts of each subtask, with other results: every entry is whole, and the later attempts count."""

    class Slow(FaultPlan):
        def fault(self, call: Call) -> Fault | None:
            return Fault(action=lambda: time.sleep(0.005)) if call.operation == "append" else None

    engine = Engine(tmp_path, low_hash, open_store=lambda location: FaultStore(LocalStore(location), Slow()))
    engine.start(12, 0)
    attempts = [(subtask, number * 12 + subtask) for number in range(2) for subtask in range(12)]
    results = {attempt: f"{attempt} of {subtask} ".encode() * (1 + subtask) for subtask, attempt in attempts}
    for subtask, attempt in attempts:
        begin(engine, 0, subtask, attempt)
    random.Random(4).shuffle(attempts)
    with ThreadPoolExecutor(len(attempts)) as pool:
        list(pool.map(lambda one: ack(engine, 0, one[0], one[1], results[one[1]]), attempts))
    entries = checkpoints(engine)
    assert [entry.revision for entry in entries] == list(range(len(entries)))
    for entry in entries:
        for segment in entry.segments:
            stored = LocalStore(engine.location).read(segment.name, offset=segment.offset, length=segment.length)
            assert stored == results[segment.attempt]
    assert [segment.attempt for segment in entries[-1].segments] == list(range(12, 24))


def test_certain_batch_refuses_late_tasks(engine: Engine) -> None:
    engine.start(1, 0)
    complete(engine, 0, b"data")
    begin(engine, 0, 0, 7)
    begin(engine, 1, 0, 8)
    with pytest.raises(FencedError, match="task of batch 0 called, but batch 1 has begun"):
        ack(engine, 0, 0, 7, b"late")
    with pytest.raises(FencedError, match="batch 1 has begun"):
        begin(engine, 0, 0, 9)
    assert len(checkpoints(engine)) == 1


def test_incomplete_batch_stops_the_next(engine: Engine) -> None:
    engine.start(3, 0)
    complete(engine, 0, b"0", b"1", b"2")
    begin(engine, 1, 1, 101)
    ack(engine, 1, 1, 101, b"only one")
    with pytest.raises(
        StateMissingError, match="checkpoint 1 does not exist: these subtasks of batch 1 .*: 0, 2"
    ) as caught:
        begin(engine, 2, 0, 200)
    assert caught.value.kind is ErrorKind.CHECKPOINT_INCOMPLETE
    assert "statelog.rewind" in caught.value.hint
    with pytest.raises(StateMissingError, match="no subtask of operator 'op' ran in batch 2"):
        begin(engine, 3, 0, 300)


def test_a_committed_batch_needs_a_checkpoint(engine: Engine) -> None:
    engine.start(2, 0)
    with pytest.raises(
        StateMissingError, match="checkpoint 0 does not exist: no subtask of operator 'op' ran in batch 0"
    ):
        engine.coordinator.require_committed(0)
    complete(engine, 0, b"0", b"1")
    engine.coordinator.require_committed(0)
    with pytest.raises(StateMissingError, match="no subtask of operator 'op' ran in batch 1"):
        engine.coordinator.require_committed(1)
    begin(engine, 1, 1, 101)
    ack(engine, 1, 1, 101, b"only one")
    engine.coordinator.require_committed(0)
    with pytest.raises(
        StateMissingError, match=r"these subtasks of batch \d+ did not run to completion: operator 'op': 0\."
    ) as caught:
        engine.coordinator.require_committed(1)
    assert caught.value.kind is ErrorKind.CHECKPOINT_INCOMPLETE


@pytest.mark.parametrize(
    ("subtask", "partition", "rows"), [(3, 3, 0), (0, 1, 5), (-1, 0, 0)], ids=["beyond", "moved", "negative"]
)
def test_renumbered_partitions_are_refused(engine: Engine, subtask: int, partition: int, rows: int) -> None:
    engine.start(3, 0)
    with pytest.raises(ConfigurationError, match="renumbered or joined") as caught:
        begin(engine, 0, subtask, 1, rows=rows, partition=partition)
    assert "repartition" in caught.value.hint


def test_two_subtasks_in_one_task_are_refused(engine: Engine) -> None:
    engine.start(2, 0)
    begin(engine, 0, 0, 1)
    for subtask in (0, 1):  # a partition without rows may take itself for another one's subtask
        with pytest.raises(ConfigurationError, match="task attempt 1, which had already run another"):
            begin(engine, 0, subtask, 1, token="other")


def test_a_begin_whose_answer_was_lost_is_repeated(engine: Engine) -> None:
    engine.start(1, 0)
    complete(engine, 0, b"data")
    begun = begin(engine, 1, 0, 101)
    assert begin(engine, 1, 0, 101) == begun
    ack(engine, 1, 0, 101, b"more")
    assert [entry.batch for entry in checkpoints(engine)] == [0, 1]


def test_rows_of_another_batch_are_refused(engine: Engine) -> None:
    engine.start(1, 0)
    complete(engine, 0, b"data")
    stale = Begin(engine.task_id(1, 0, 5), 0, 3, 1000, "token")
    with pytest.raises(ConfigurationError, match="rows of a batch with time 1000 ms ran as batch 1"):
        engine.coordinator.begin(stale)


def test_empty_rerun_of_a_batch_with_rows_is_refused(engine: Engine) -> None:
    engine.start(1, 0)
    begin(engine, 0, 0, 1, rows=4)
    ack(engine, 0, 0, 1, b"changes", rows=4)
    begin(engine, 0, 0, 2)
    with pytest.raises(ConfigurationError, match="had 4 rows in batch 0, but none"):
        ack(engine, 0, 0, 2, b"empty", rows=0)
    assert len(checkpoints(engine)) == 1


def test_ack_without_begin_is_refused(engine: Engine) -> None:
    engine.start(1, 0)
    begin(engine, 0, 0, 1)
    with pytest.raises(FencedError, match="attempt 2 of subtask 0 has not begun"):
        ack(engine, 0, 0, 2, b"data")


def test_damaged_payload_is_refused(engine: Engine) -> None:
    engine.start(1, 0)
    begin(engine, 0, 0, 1)
    message = make_ack(engine.task_id(0, 0, 1), digests.checksum(b"data"), 4, 1, 0, "", 0.0)
    with pytest.raises(CorruptionError, match="subtask 0 was damaged in transit"):
        engine.coordinator.ack(message, b"dat\0")


def test_older_run_is_fenced_and_its_late_commit_has_no_effect(engine: Engine, tmp_path: Path) -> None:
    engine.start(1, 0)
    complete(engine, 0, b"zero")
    begin(engine, 1, 0, 100)
    newer = Engine(tmp_path, low_hash)
    newer.runs = 5
    newer.start(1, 1)
    with pytest.raises(FencedError):
        ack(engine, 1, 0, 100, b"late")
    with pytest.raises(FencedError):
        begin(engine, 1, 0, 101)
    complete(newer, 1, b"newer")
    assert [entry.segments[0].checksum for entry in checkpoints(newer)] == [
        digests.checksum(b"zero"),
        digests.checksum(b"newer"),
    ]


def test_failed_append_can_be_acked_again(engine: Engine) -> None:
    plan = FaultPlan.at(operation="append", call=1, when="before")
    store = FaultStore(LocalStore(engine.location), plan)
    engine.open_store = lambda location: store
    engine.start(1, 0)
    begin(engine, 0, 0, 1)
    with pytest.raises(StorageError):
        ack(engine, 0, 0, 1, b"data")
    begin(engine, 0, 0, 2)
    ack(engine, 0, 0, 2, b"data")
    assert [entry.batch for entry in checkpoints(engine)] == [0]


def test_missing_checkpoint_is_refused_at_start(engine: Engine) -> None:
    engine.start(1, 0)
    complete(engine, 0, b"data")
    with pytest.raises(StateMissingError, match="batch 5, which needs checkpoint 4, but the newest is checkpoint 0"):
        engine.start(1, 5)


def test_first_run_in_the_middle_is_refused(engine: Engine) -> None:
    with pytest.raises(StateMissingError, match="batch 3.*there is no checkpoint") as caught:
        engine.start(1, 3)
    assert "uid" in caught.value.hint


def test_another_query_is_refused_and_does_not_fence(engine: Engine, tmp_path: Path) -> None:
    engine.start(1, 0)
    complete(engine, 0, b"data")
    other = Engine(tmp_path, low_hash, query_id="other")
    with pytest.raises(ConfigurationError, match="belongs to query query, not to query other") as caught:
        other.start(1, 0)
    assert caught.value.kind is ErrorKind.OTHER_OWNER
    complete(engine, 1, b"continues")
    assert len(checkpoints(engine)) == 2


def test_rerun_from_batch_0_starts_empty(engine: Engine) -> None:
    engine.start(1, 0)
    complete(engine, 0, b"old")
    complete(engine, 1, b"older")
    engine.start(1, 0)
    begun = begin(engine, 0, 0, 1)
    assert begun.view.head == begun.view.genesis
    ack(engine, 0, 0, 1, b"new")
    with pytest.raises(StateMissingError):
        engine.start(1, 2)


def test_orphans_of_dead_epochs_go_and_referenced_uploads_stay(tmp_path: Path) -> None:
    engine = Engine(tmp_path, low_hash, inline_budget_bytes=0)
    engine.clock.advance(10**10)
    engine.start(1, 0)
    engine.run_commands(0, 0, [((1, None), ("set", 1))])
    store = LocalStore(engine.location)
    [referenced] = uploads(engine)
    store.put(f"{engine.identity}/changes/1/0/9-orphan.run", b"left behind")
    store.put("other-1/changes/1/0/0-orphan.run", b"of an operator that no checkpoint has")
    store.put("other/place.run", b"not ours")
    engine.start(1, 1)
    assert uploads(engine) == [referenced]
    assert [info.name for info in store.list("other")] == ["other/place.run"]


def test_replaced_upload_is_removed(tmp_path: Path) -> None:
    engine = Engine(tmp_path, low_hash, inline_budget_bytes=0)
    engine.start(1, 0)
    engine.run_commands(0, 0, [((1, None), ("set", 1))])
    engine.run_commands(0, 0, [((1, None), ("set", 2))])
    engine.run_commands(0, 0, [((1, None), ("set", 2))])
    engine.run_commands(1, 0, [])
    assert uploads(engine) == [checkpoints(engine)[-2].segments[0].name]


def test_run_without_checkpoint_leaves_nothing(engine: Engine) -> None:
    engine.start(2, 0)
    engine.coordinator.close()
    assert LocalStore(engine.location).list() == []


def test_run_that_stops_in_a_batch_leaves_no_upload(tmp_path: Path) -> None:
    engine = Engine(tmp_path, low_hash, inline_budget_bytes=0)
    engine.start(2, 0)
    engine.run_commands(0, 0, [((1, None), ("set", 1))])
    engine.coordinator.close()
    assert LocalStore(engine.location).list() == []


def test_crash_before_the_entry_leaves_the_previous_checkpoint(engine: Engine) -> None:
    engine.start(1, 0)
    engine.run_commands(0, 0, [((1, None), ("set", 1))])
    engine.crash_point.arm(Step.LAST_ACK)
    with pytest.raises(Crash):
        engine.run_commands(1, 0, [((1, None), ("set", 2))])
    engine.start(1, 1)
    [[_, found]] = engine.run_commands(1, 0, [((1, None), ("read",))])
    assert found[0] == [1]


def test_what_tasks_have_measured_comes_with_the_checkpoint_once(engine: Engine) -> None:
    engine.start(2, 0)
    for subtask in range(2):
        begin(engine, 0, subtask, subtask)
        message = make_ack(
            *(engine.task_id(0, subtask, subtask), digests.checksum(b"data"), 4, 1, 0, "", 0.0),
            measured=Recorded({"upload_requests": 2 + subtask}, {"upload_size_bytes": [float(subtask)]}),
        )
        engine.coordinator.ack(message, b"data")
    complete(engine, 1, b"10", b"11")
    first, second = (metrics.measured for metrics in engine.crash_point.checkpoints)
    assert first == Recorded({"upload_requests": 5}, {"upload_size_bytes": [0.0, 1.0]})
    assert second == Recorded()


@pytest.mark.parametrize(("merging", "objects"), [("across", 0), ("within", 1), ("off", 1 + 2)])
def test_checkpoints_tell_how_many_objects_they_took(tmp_path: Path, merging: str, objects: int) -> None:
    engine = Engine(tmp_path, low_hash, file_merging=merging)
    engine.start(2, 0)
    for batch in range(2):
        before = len(LocalStore(engine.location).list())
        for subtask, key in enumerate([(1, None), (None, "a")]):
            engine.run_commands(batch, subtask, [(key, ("set", batch))])
        assert len(LocalStore(engine.location).list()) - before == objects
        assert engine.crash_point.checkpoints[-1].objects == objects


def test_fetch_names_only_what_is_missing(engine: Engine) -> None:
    engine.start(2, 0)
    complete(engine, 0, b"00", b"01")
    complete(engine, 1, b"10", b"11")
    begun = begin(engine, 2, 1, 900)
    genesis = begun.view.genesis
    middle = digests.extend(genesis, 0, [digests.checksum(b"01")])
    fetch = engine.coordinator.fetch(Fetch(engine.task_id(2, 1, 900), [genesis, middle]))
    assert fetch.missing.since == middle
    assert [part.segment.checksum for part in fetch.missing.segments] == [digests.checksum(b"11")]


# ---- Entries that are in the log although their writer does not know ----


@pytest.mark.parametrize(("merging", "operation"), [("across", "append"), ("within", "put_if_absent")])
def test_close_keeps_uploads_of_an_entry_in_doubt(tmp_path: Path, merging: str, operation: str) -> None:
    """The entry was written and its answer lost: what it names stays when the run ends."""
    call = 1 if operation == "append" else 2  # the first put_if_absent is the claim
    stores = iter([FaultStore(LocalStore(tmp_path / "location"), FaultPlan.at(operation, call=call, when="after"))])
    engine = Engine(
        tmp_path,
        lambda key: 0,
        file_merging=merging,
        inline_budget_bytes=0,
        open_store=lambda location: next(stores, None) or LocalStore(location),
    )
    engine.start(1, 0)
    with pytest.raises(StorageError):
        engine.run_commands(0, 0, [((1, None), ("set", 7))])
    engine.coordinator.close()
    [entry] = checkpoints(engine)  # the checkpoint exists for everybody who reads the log
    held = {info.name for info in LocalStore(engine.location).list()}
    assert {segment.name for segment in entry.segments} <= held
    engine.start(1, 1, keep_local=False)
    assert engine.run_commands(1, 0, [((1, None), ("read",))])[0][1][0] == [7]


def test_close_keeps_uploads_that_a_newer_run_has_counted(tmp_path: Path) -> None:
    """A claim between the append and the look for it: the newer run counts an entry that the older does not know of."""
    newer = Engine(tmp_path, lambda key: 0, inline_budget_bytes=0)
    newer.runs = 5
    plan = FaultPlan.at("append", when="after", action=lambda: newer.start(1, 1))
    stores = iter([FaultStore(LocalStore(tmp_path / "location"), plan)])
    older = Engine(
        tmp_path,
        lambda key: 0,
        inline_budget_bytes=0,
        open_store=lambda location: next(stores, None) or LocalStore(location),
    )
    older.start(1, 0)
    with pytest.raises(FencedError):
        older.run_commands(0, 0, [((1, None), ("set", 7))])
    older.coordinator.close()
    [entry] = checkpoints(newer)
    assert {segment.name for segment in entry.segments} <= {info.name for info in LocalStore(newer.location).list()}


@pytest.mark.parametrize("inline_bytes", [0, 8 << 20])
@pytest.mark.parametrize(("merging", "operation", "call"), [("across", "append", 2), ("within", "put_if_absent", 3)])
def test_a_revision_in_doubt_is_settled_before_the_next_batch(
    tmp_path: Path, merging: str, operation: str, call: int, inline_bytes: int
) -> None:
    """A copy of a task that Spark no longer waits for has another result, and the answer to its revision is lost.

    The run and its restart must continue from the same of the two.
    """
    stores = iter([FaultStore(LocalStore(tmp_path / "location"), FaultPlan.at(operation, call=call, when="after"))])
    engine = Engine(
        tmp_path,
        lambda key: 0,
        file_merging=merging,
        inline_budget_bytes=inline_bytes,
        open_store=lambda location: next(stores, None) or LocalStore(location),
    )
    engine.start(1, 0)
    engine.run_commands(0, 0, [((1, None), ("set", 1))])
    with pytest.raises(StorageError):  # nobody waits for it: its first attempt has succeeded
        engine.run_commands(0, 0, [((1, None), ("set", 2))])
    before = engine.run_commands(1, 0, [((1, None), ("read",))])
    engine.start(1, 2, keep_local=False)
    assert engine.run_commands(2, 0, [((1, None), ("read",))]) == before


@pytest.mark.parametrize(
    ("store", "budget", "share"),
    [(LocalStore, None, 4 << 20), (KeptStore, None, 16 << 20), (KeptStore, 100, 50), (LocalStore, 0, 0)],
)
def test_changesets_travel_with_the_acks_up_to_a_size_that_suits_the_store(
    tmp_path: Path, store: Callable[[str], Store], budget: int | None, share: int
) -> None:
    engine = Engine(tmp_path, low_hash, file_merging="auto", inline_budget_bytes=budget, open_store=store)
    engine.start(2, 0)
    assert begin(engine, 0, 0, 100).permit.inline_bytes == share


def test_a_copy_of_the_query_does_not_go_on_from_the_other_ones_state(tmp_path: Path) -> None:
    """Both have Spark's query id and a location; which of them wrote a checkpoint is told by the time of its batch."""
    original, copy = (Engine(tmp_path, low_hash) for _ in range(2))
    original.start(1, 0)
    complete(original, 0, b"0")
    complete(original, 1, b"1")
    copy.start(1, 2)
    begin(copy, 2, 0, 200)
    copy.times |= {batch: BatchTime(5000 + batch, 0) for batch in range(2, 5)}
    copy.start(1, 2)
    complete(copy, 2, b"of the copy")
    before = LocalStore(copy.location).list()
    with pytest.raises(ConfigurationError, match=r"00:00:05\.002 UTC, .* 00:00:01\.002 UTC: another copy") as raised:
        original.start(1, 3)
    assert raised.value.kind == ErrorKind.OTHER_OWNER
    assert LocalStore(copy.location).list() == before, "nothing is claimed"
    complete(copy, 3, b"continues")


def test_a_batch_that_spark_has_forgotten_is_not_compared(engine: Engine) -> None:
    engine.start(1, 0)
    complete(engine, 0, b"0")

    class Forgotten(dict[int, BatchTime]):
        def __missing__(self, batch: int) -> BatchTime:
            raise FencedError(f"no batch {batch}", hint="")

    engine.times = Forgotten({1: BatchTime(1001, 0)})
    engine.start(1, 1)
    complete(engine, 1, b"1")
    assert [entry.batch for entry in checkpoints(engine)] == [0, 1]
