"""A materialization job: attempts that share it, die in it or find it void, and what it stores in the end."""

from __future__ import annotations

import fcntl
import itertools
import json
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from msgspec import defstruct, structs

from statelog.local.materializer import Grant, MaintenanceRequest, Materialized, Materializer
from statelog.local.policy import MERGE_POLICY, MergePolicy
from statelog.local.runs import LocalRun, LocalRuns
from statelog.log.references import Level
from statelog.runs import digests
from statelog.runs.byte_slices import BUDGET, Budget
from statelog.runs.key_groups import HashRange, hash_range
from statelog.runs.merge import Garbage
from statelog.runs.reader import Run
from statelog.runs.schema import Operation, TimeDomain
from statelog.runs.times import Moment
from statelog.runs.writer import STORED_BLOCK_BYTES
from statelog.sealed import seal
from statelog.storage import LocalStore, Store
from statelog.testing.faults import FaultPlan, FaultStore
from tests.contract.table_contract import VALUE, encode_changes, write_run

GENESIS = bytes(16)
Changes = Mapping[int, str | None]
"""New values by key, from 0 to 255; None removes it."""


class Subtask:
    """A subtask's local runs on a host, one for each batch, and the store."""

    def __init__(
        self, folder: Path, store: Store | None = None, budget: Budget = BUDGET, policy: MergePolicy = MERGE_POLICY
    ) -> None:
        self.local = LocalRuns(folder / "local", budget, policy)
        self.local.directory.mkdir(parents=True)
        self.store = store or LocalStore(folder / "store")
        self.chain: list[LocalRun] = []
        self.known: list[Level] = []
        self.times: Iterator[float] = itertools.repeat(0.0)
        self.opened = 0
        self.now_ms = 0

    def batch(self, changes: Changes, expiry_ms: int | None = None) -> LocalRun:
        """A batch that makes changes, whose values live up to a time."""
        number, before = (self.chain[-1].last + 1, self.chain[-1].after) if self.chain else (0, GENESIS)
        data = encode(changes, expiry_ms)
        local_run = LocalRun(number, number, before, digests.extend(before, number, [digests.checksum(data)]))
        write_run(self.local, local_run, data, f"{number}-token")
        self.chain.append(local_run)
        return local_run

    def attempt(self, token: str = "one", run_id: str = "run", within: HashRange | None = None) -> Materializer:
        """Another attempt, as a rule in another process."""
        return Materializer(
            local=LocalRuns(self.local.directory, self.local.budget, self.local.policy),
            within=within or hash_range(0, 1),
            genesis=GENESIS,
            run_id=run_id,
            compression=None,
            garbage=Garbage(Moment(self.now_ms, 0), {}),
            max_space_amplification=2.0,
            open_store=self.open_store,
            monotonic_s=lambda: next(self.times),
            token=token,
        )

    def open_store(self) -> Store:
        self.opened += 1
        return self.store

    def grant(self, job: str = "1-7") -> Grant:
        return Grant(job, self.known[-1].after if self.known else GENESIS, self.known, f"runs/1/0/{job}")

    def work(
        self,
        grant: Grant | None,
        *,
        merges: Sequence[LocalRun] = (),
        token: str = "one",
        inline: int = 0,
        looks: int | None = None,
    ) -> None:
        """One slice by a new attempt; its time is over when it has looked at the clock so many times, if ever."""
        if looks is not None:
            self.times = itertools.chain([0.0] * (1 + looks), itertools.repeat(1.0))
        self.chain = self.here()
        self.attempt(token).work(order(grant, inline), self.chain, merges)
        self.times = itertools.repeat(0.0)

    def materialize(self, job: str, inline: int = 0) -> Materialized:
        """A job from its beginning to its end, which counts."""
        grant = self.grant(job)
        self.work(grant, inline=inline)
        done = self.attempt().result(grant)
        assert done is not None
        assert not done.failure
        self.attempt().end(job)
        self.known = done.levels
        self.chain = self.here()
        return done

    def here(self) -> list[LocalRun]:
        """The local runs that lead to the state."""
        chain = self.local.chain(GENESIS, self.chain[-1].after)
        assert chain is not None
        return chain

    def stored_state(self, done: Materialized) -> dict[int, str]:
        """What the levels hold together, read from the store."""
        runs = [(run, self.store.read(run.name) if run.name else done.payload) for lv in done.levels for run in lv.runs]
        for run, data in runs:
            assert (run.offset, run.length, run.checksum) == (0, len(data), digests.checksum(data))
            keys = state_of(iter([Run(pa.py_buffer(data), run.name)]))
            assert all(run.first_hash <= key << 56 <= run.last_hash for key in keys), "runs of a level are disjoint"
        return state_of(Run(pa.py_buffer(data), run.name) for run, data in runs)

    def local_state(self) -> dict[int, str]:
        """What the local runs hold together."""
        return state_of(LocalRuns(self.local.directory).open(local_run) for local_run in self.here())

    @property
    def objects(self) -> list[str]:
        return sorted(info.name for info in self.store.list())

    @property
    def job(self) -> Path:
        """Where a job keeps what it has reached."""
        return self.local.directory / "job"

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Meanwhile another process works on the job."""
        with (self.local.directory / "job.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def order(grant: Grant | None, inline: int = 0) -> MaintenanceRequest:
    return MaintenanceRequest(1.0, inline, grant, is_due=True)


def encode(changes: Changes, expiry_ms: int | None = None) -> bytes:
    rows = [
        (key << 56, b"%d" % key, b"", Operation.DELETE if value is None else Operation.PUT, value)
        for key, value in changes.items()
    ]
    return encode_changes(replace(VALUE, expires_by=TimeDomain.PROCESSING), rows, expiry_ms=expiry_ms)


def state_of(runs: Iterator[Run]) -> dict[int, str]:
    """The state that runs hold, oldest first."""
    state: dict[int, str] = {}
    for run in runs:
        for section in run.sections.values():
            for block in section.blocks:
                columns = block.batch.to_pydict()
                keys, operations, values = (list(columns.values())[column] for column in (1, 3, -1))
                for key, operation, value in zip(keys, operations, values, strict=True):
                    state.pop(int(key), None)
                    if operation == Operation.PUT:
                        state[int(key)] = value
    return state


@pytest.fixture
def subtask(tmp_path: Path) -> Subtask:
    return Subtask(tmp_path)


# ---- Whose job it is ----


def test_one_attempt_at_a_time_works_on_a_job_or_ends_it(subtask: Subtask) -> None:
    """Several processes of a host can have tasks of the subtask, for instance for two actions on one micro-batch."""
    subtask.batch({1: "a"})
    grant = subtask.grant()
    with subtask.busy():
        subtask.work(grant)
    assert subtask.attempt().result(grant) is None
    assert subtask.objects == []
    subtask.work(grant)
    with subtask.busy():
        subtask.attempt().end(grant.job)
    assert subtask.attempt().result(grant) is not None
    subtask.attempt().end(grant.job)
    assert subtask.attempt().result(grant) is None


def test_the_end_of_a_grant_ends_no_other_job(subtask: Subtask) -> None:
    subtask.batch({1: "a"})
    subtask.attempt().end("0-3")
    grant = subtask.grant()
    subtask.work(grant)
    subtask.attempt().end("0-3")
    assert subtask.attempt().result(grant) is not None


def test_a_job_that_is_over_waits_for_the_next_ack(subtask: Subtask) -> None:
    """Also if its run was merged with newer ones meanwhile: what is stored is not stored again."""
    subtask.batch({1: "a"})
    subtask.batch({2: "b"})
    grant = subtask.grant()
    subtask.work(grant)
    assert subtask.attempt().inputs() == set(), "local runs may be merged again"
    merged = subtask.local.local_runs()
    subtask.chain = [*merged, subtask.batch({3: "c"})]
    subtask.chain = [subtask.local.merge(subtask.chain, GENESIS, "3-token")]
    subtask.work(grant, token="two")
    done = subtask.attempt().result(grant)
    assert done is not None
    assert subtask.stored_state(done) == {1: "a", 2: "b"}
    assert subtask.objects == ["runs/1/0/1-7/1-one-0.run"]


def test_a_job_that_failed_is_not_tried_again_under_its_grant(tmp_path: Path) -> None:
    """The coordinator counts failures, and another grant has another folder."""
    subtask = Subtask(tmp_path, FaultStore(LocalStore(tmp_path / "store"), FaultPlan.at("put")))
    subtask.batch({1: "a"})
    grant = subtask.grant()
    for _ in range(3):
        subtask.work(grant)
        done = subtask.attempt().result(grant)
        assert done is not None
        assert (done.levels, done.job) == ([], grant.job)
        assert "injected fault" in done.failure
        assert stat.S_IMODE(subtask.job.stat().st_mode) == 0o700
    assert subtask.opened == 1
    assert subtask.stored_state(subtask.materialize("2-8")) == {1: "a"}


@pytest.mark.parametrize("is_known", [False, True])
def test_a_job_whose_grant_has_ended_makes_room(subtask: Subtask, is_known: bool) -> None:
    """For that of the new grant, and if there is nothing to do, for merges of its local runs."""
    subtask.batch({1: "a"})
    done = subtask.materialize("0-1") if is_known else None
    known, subtask.known = subtask.known, []
    subtask.work(subtask.grant("1-7"), token="old")
    subtask.known = known
    grant = subtask.grant("2-8")
    subtask.work(grant, token="new")
    assert subtask.attempt().inputs() == set()
    assert not subtask.attempt().is_merging
    found = subtask.attempt().result(grant)
    if is_known:
        assert found is None
        assert not subtask.job.exists()
        assert subtask.local_state() == {1: "a"}
    else:
        assert found is not None
        assert found.levels[0].runs[0].name == "runs/1/0/2-8/0-new-0.run"
    assert done is None or subtask.stored_state(done) == {1: "a"}


def test_a_job_about_another_state_than_the_one_here_is_begun_anew(subtask: Subtask) -> None:
    """The subtask was elsewhere meanwhile, and came back: its state was fetched again."""
    subtask.batch({1: "a"})
    subtask.batch({2: "b"})
    grant = subtask.grant()
    subtask.work(grant, looks=2)
    [merged] = subtask.local.local_runs()
    assert subtask.attempt().inputs() == {merged.file_name}, "it is merged, and not stored"
    subtask.local.remove([merged.file_name])
    subtask.chain = []
    subtask.batch({1: "a", 2: "b"})
    subtask.work(grant)
    done = subtask.attempt().result(grant)
    assert done is not None
    assert not done.failure
    assert subtask.stored_state(done) == {1: "a", 2: "b"}
    assert done.levels[0].after == subtask.chain[-1].after


@pytest.mark.parametrize("damage", ["remove", "another"])
def test_a_small_run_that_is_not_as_it_was_written_is_made_again(subtask: Subtask, damage: str) -> None:
    subtask.batch({1: "a"})
    grant = subtask.grant()
    subtask.work(grant, inline=10_000)
    [inline] = subtask.job.glob("*.run")
    if damage == "remove":
        inline.unlink()
    else:
        inline.write_bytes(encode({1: "z"}))
    assert subtask.attempt().result(grant) is None
    subtask.work(grant, inline=10_000)
    done = subtask.attempt().result(grant)
    assert done is not None
    assert subtask.stored_state(done) == {1: "a"}
    assert subtask.objects == []


@pytest.mark.parametrize("is_later", [False, True])
def test_a_job_that_a_later_version_has_left_is_begun_again(subtask: Subtask, is_later: bool) -> None:
    subtask.batch({1: "a"})
    grant = subtask.grant()
    subtask.work(grant)
    [state] = subtask.job.glob("*.json")
    kind = "materialization job"
    fields = json.loads(state.read_bytes())
    assert (fields.pop("kind"), fields.pop("version"), len(fields.pop("checksum"))) == (kind, 1, 32)
    job = defstruct("Job", list(fields))(**fields)
    state.write_bytes(seal(job, kind, 1 + is_later))
    assert (subtask.attempt().result(grant) is None) == is_later
    assert subtask.job.exists() != is_later


@pytest.mark.parametrize(
    ("looks", "changed"),
    [
        (2, {"prefix": "log/precious"}),
        (2, {"prefix": "runs/1/0/1-7/../../../precious"}),
        (1, {"target": "../precious.run"}),
        (1, {"merging": {"inputs": ["../precious.run"]}}),
    ],
)
def test_a_job_that_names_files_elsewhere_is_begun_again(
    subtask: Subtask, looks: int, changed: dict[str, object]
) -> None:
    """Its checksum is right, but only another program can have written it."""
    precious = subtask.local.directory.parent / "precious.run"
    precious.write_bytes(b"precious")
    subtask.batch({1: "a"})
    subtask.batch({2: "b"})
    grant = subtask.grant()
    subtask.work(grant, looks=looks)
    [state] = subtask.job.glob("*.json")
    fields = json.loads(state.read_bytes())
    assert bool(fields["merging"]["inputs"]) == (looks == 1), "merging, or merged and not stored"
    kind = fields.pop("kind")
    del fields["version"], fields["checksum"]
    state.write_bytes(seal(defstruct("Job", list(fields))(**fields | changed), kind, 1))
    subtask.work(grant)
    done = subtask.attempt().result(grant)
    assert done is not None
    assert not done.failure
    assert subtask.stored_state(done) == {1: "a", 2: "b"}
    assert {info.name.rpartition("/")[0] for info in subtask.store.list()} == {grant.folder}
    assert precious.read_bytes() == b"precious"


def test_a_job_of_another_run_leaves_no_files(subtask: Subtask) -> None:
    """It is never gone on with, and no other job may ever be begun."""
    subtask.batch({1: "a"})
    subtask.work(subtask.grant())
    assert subtask.job.exists()
    assert not subtask.attempt(run_id="another").is_merging
    assert not subtask.job.exists()


# ---- Slices ----


def test_merges_of_local_runs_come_first_and_are_not_stored(subtask: Subtask) -> None:
    """A grant that comes meanwhile is for the job after it."""
    for number in range(4):
        subtask.batch({number: "a", 9: f"{number}"})
    grant = subtask.grant()
    subtask.work(grant, merges=subtask.chain[2:], looks=1)
    assert subtask.attempt().is_merging
    merged = LocalRun(2, 3, subtask.chain[2].before, subtask.chain[3].after)
    assert subtask.attempt().inputs() == {local_run.file_name for local_run in [*subtask.chain[2:], merged]}
    subtask.work(grant)
    assert not subtask.attempt().is_merging
    subtask.chain[2:] = [merged]
    assert set(subtask.local.local_runs()) == set(subtask.chain)
    assert subtask.attempt().result(grant) is None
    assert subtask.attempt().inputs() == set()
    assert not subtask.job.exists()
    assert subtask.local_state() == {0: "a", 1: "a", 2: "a", 3: "a", 9: "3"}
    assert subtask.objects == []


def test_a_job_that_stores_is_no_merge_of_local_runs(subtask: Subtask) -> None:
    """Who merges takes turns with other subtasks; who stores has a turn."""
    subtask.batch({1: "a"})
    subtask.batch({2: "b"})
    subtask.work(subtask.grant(), looks=1)
    assert subtask.attempt().inputs()
    assert not subtask.attempt().is_merging


def test_without_anything_to_do_nothing_is_begun(subtask: Subtask) -> None:
    subtask.batch({1: "a"})
    subtask.work(None)
    assert subtask.local.local_runs() == subtask.chain
    assert not subtask.job.exists()


@pytest.mark.parametrize(("slice_rows", "slice_bytes", "text"), [(50, 1 << 20, "short"), (10_000, 5000, "long" * 25)])
def test_a_slice_that_dies_is_done_again(tmp_path: Path, slice_rows: int, slice_bytes: int, text: str) -> None:
    """Only what is noted counts, whatever it has written. A slice is bounded by rows and by bytes."""
    subtask = Subtask(tmp_path, budget=Budget(slice_bytes=slice_bytes), policy=MergePolicy(slice_rows=slice_rows))
    expected: dict[int, str] = {}
    for number in range(2):
        changes = dict.fromkeys(range(number, 250, 2), text)
        subtask.batch(changes)
        expected |= changes
    grant = subtask.grant()
    slices = 0
    while subtask.attempt().result(grant) is None:
        subtask.work(grant, looks=1)
        slices += 1
        assert slices < 20
        for part in subtask.job.glob("*.part"):
            with part.open("ab") as torn:
                torn.write(b"of a process that died")
    assert slices >= 7, "five of the merge, one that ends it, one that stores it"
    done = subtask.attempt().result(grant)
    assert done is not None
    assert not done.failure
    assert subtask.stored_state(done) == expected == subtask.local_state()
    [merged] = subtask.here()
    assert b"died" not in (subtask.local.directory / merged.file_name).read_bytes()


def test_blocks_are_bounded_by_bytes(tmp_path: Path) -> None:
    """Those of the merged local run as its slices are; those of a stored run, because a look-up reads one of each."""
    subtask = Subtask(tmp_path, budget=Budget(slice_bytes=100_000))
    for first in (0, 1):
        subtask.batch({key: "x" * (40_000 if key < 20 else 10) for key in range(first, 250, 2)})
    done = subtask.materialize("1-7")
    [merged] = subtask.here()
    assert max(block_bytes(subtask.local.open(merged))) <= 100_000
    [stored] = done.levels[0].runs
    assert max(block_bytes(Run(pa.py_buffer(subtask.store.read(stored.name)), stored.name))) <= STORED_BLOCK_BYTES


def block_bytes(run: Run) -> list[int]:
    return [block.batch.nbytes for section in run.sections.values() for block in section.blocks]


@pytest.mark.parametrize(("oldest", "rows"), [(0, 1), (1, 3)])
def test_a_merge_keeps_removals_of_what_is_below_it(subtask: Subtask, oldest: int, rows: int) -> None:
    for changes in ({1: "a", 2: "a"}, {3: "b"}, {1: None, 3: "c", 2: None}, {2: None}):
        subtask.batch(changes)
    subtask.work(None, merges=subtask.chain[oldest:])
    *_, merged = subtask.here()
    assert subtask.local.open(merged).rows == rows
    assert subtask.local_state() == {3: "c"}


def test_a_failed_merge_of_local_runs_is_begun_again(subtask: Subtask) -> None:
    """It belongs to no grant, so nobody hears of it: the batch continues, and what is damaged is fetched."""
    subtask.batch({1: "a"})
    damaged = subtask.batch({2: "b"})
    path = subtask.local.directory / damaged.file_name
    data = path.read_bytes()
    subtask.work(None, merges=subtask.chain, looks=1)
    assert subtask.attempt().is_merging
    path.write_bytes(data[:-1])
    subtask.work(None, merges=subtask.chain)
    assert not subtask.attempt().is_merging
    assert subtask.attempt().inputs() == set()
    assert not path.exists()
    path.write_bytes(data)
    subtask.work(None, merges=subtask.chain)
    assert len(subtask.local.local_runs()) == 1
    assert subtask.local_state() == {1: "a", 2: "b"}


def test_a_failure_that_cannot_be_noted_fails_no_batch(subtask: Subtask) -> None:
    """The disk is full, or holds something else at the place."""
    subtask.batch({1: "a"})
    subtask.job.write_bytes(b"")
    grant = subtask.grant()
    subtask.work(grant)
    assert subtask.attempt().result(grant) is None
    subtask.job.unlink()
    assert subtask.stored_state(subtask.materialize(grant.job)) == {1: "a"}


def test_what_a_job_keeps_is_for_the_user_only(subtask: Subtask) -> None:
    """Also the job of a state that has not changed since it was stored."""
    for number, changes in enumerate(({1: "a"}, {})):
        subtask.batch(changes)
        subtask.work(subtask.grant(f"{number}-6"))
        assert stat.S_IMODE(subtask.job.stat().st_mode) == 0o700
        subtask.materialize(f"{number}-7")


def test_a_folder_that_cannot_be_removed_holds_no_job_up(subtask: Subtask, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS a file that another process has open stays, under another name."""
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    for number in range(2):
        subtask.batch({number: "a"})
        subtask.materialize(f"{number}-7")
    subtask.batch({})
    subtask.materialize("2-7")
    subtask.open_store = _no_store  # type: ignore[method-assign]  # replaced in this test
    subtask.batch({1: "b"})
    grant = subtask.grant("3-7")
    subtask.work(grant)
    done = subtask.attempt().result(grant)
    assert done is not None
    assert "no store" in done.failure


def _no_store() -> Store:
    raise OSError("no store")


# ---- What is stored ----


def test_a_state_that_is_stored_already_is_left_alone(subtask: Subtask) -> None:
    subtask.batch({1: "a"})
    subtask.materialize("0-7")
    objects = subtask.objects
    subtask.work(subtask.grant("1-8"))
    assert not subtask.job.exists()
    assert subtask.objects == objects
    assert subtask.local_state() == {1: "a"}


def test_levels_that_are_no_local_runs_are_not_built_upon(subtask: Subtask) -> None:
    """Local runs are merged without regard to levels; what a level lacks must not be taken for stored."""
    subtask.batch(dict.fromkeys(range(100), "a"))
    subtask.materialize("0-7")
    subtask.batch({1: "b"})
    assert len(subtask.materialize("1-8").levels) == 2
    subtask.chain = [subtask.local.merge(subtask.chain, GENESIS, "2-token")]
    subtask.batch({2: "c"})
    done = subtask.materialize("2-9")
    assert subtask.stored_state(done) == dict.fromkeys(range(100), "a") | {1: "b", 2: "c"}
    assert [(level.first, level.last) for level in done.levels] == [(0, 2)]


@pytest.mark.parametrize(("new", "levels"), [(50, 2), (51, 1)])
def test_a_level_less_than_twice_as_large_is_stored_again(subtask: Subtask, new: int, levels: int) -> None:
    subtask.batch(dict.fromkeys(range(100), "a"))
    subtask.materialize("0-7")
    subtask.batch(dict.fromkeys(range(new), None))
    done = subtask.materialize("1-8")
    assert len(done.levels) == levels
    assert subtask.stored_state(done) == dict.fromkeys(range(new, 100), "a")


def test_levels_that_grow_are_stored_again_together(subtask: Subtask) -> None:
    """A row is stored again when the state has doubled, so there are few levels."""
    expected: dict[int, str] = {}
    for number, rows in enumerate([200, 90, 40, 30, 10]):
        changes = dict.fromkeys(range(rows), f"{number}")
        subtask.batch(changes)
        expected |= changes
        done = subtask.materialize(f"{number}-7")
        assert subtask.stored_state(done) == expected
        assert len(done.levels) == [1, 2, 3, 1, 2][number]


def test_nothing_is_stored_for_batches_without_changes(subtask: Subtask) -> None:
    """The newest level stands for them as well, so the log before can go; a local run does, so the state is here."""
    subtask.batch(dict.fromkeys(range(100), "a"))
    subtask.materialize("0-7")
    subtask.batch({1: "b"})
    before = subtask.materialize("1-8")
    subtask.batch({})
    last = subtask.batch({})
    objects = subtask.objects
    done = subtask.materialize("3-9")
    assert subtask.objects == objects
    *older, newest = before.levels
    assert done.levels == [*older, structs.replace(newest, last=3, after=last.after)]
    assert subtask.stored_state(done) == dict.fromkeys(range(100), "a") | {1: "b"} == subtask.local_state()
    assert LocalRun(1, 3, newest.before, last.after) in subtask.chain


def test_a_state_without_keys_is_materialized_as_well(subtask: Subtask) -> None:
    """Otherwise the log of a query without input would grow for ever."""
    subtask.batch({})
    subtask.batch({})
    done = subtask.materialize("1-7")
    last = subtask.chain[-1]
    whole = hash_range(0, 1)
    assert done.levels == [Level(0, 1, GENESIS, last.after, whole.first, whole.last, [])]
    assert (done.payload, subtask.objects) == (b"", [])


@pytest.mark.parametrize("room", [0, -1])
def test_what_is_small_travels_with_the_ack(subtask: Subtask, room: int) -> None:
    subtask.batch({1: "a"})
    size = subtask.materialize("0-7").levels[0].length
    subtask.known = []
    done = subtask.materialize("1-8", inline=size + room)
    assert len(done.payload) == (size if room == 0 else 0)
    assert subtask.stored_state(done) == {1: "a"}


@pytest.mark.parametrize("number", [0, 1])
def test_a_large_state_is_cut_evenly_and_no_piece_travels_with_the_ack(subtask: Subtask, number: int) -> None:
    """Though each is small: together they are not."""
    changes = dict.fromkeys(range(128 * number, 128 * (number + 1)), "a")
    subtask.batch(changes)
    size = subtask.local.open(subtask.chain[0]).size_bytes
    subtask.local.policy = MergePolicy(stored_run_bytes=-(-size // 2))
    grant = subtask.grant()
    subtask.attempt(within=hash_range(number, 2)).work(order(grant, size - 1), subtask.chain, [])
    done = subtask.attempt().result(grant)
    assert done is not None
    [level] = done.levels
    quarters = [hash_range(2 * number + half, 4) for half in range(2)]
    assert [HashRange(run.first_hash, run.last_hash) for run in level.runs] == quarters
    assert done.payload == b""
    assert len(subtask.objects) == 2
    assert subtask.stored_state(done) == changes


@pytest.mark.parametrize("number", [0, 1])
def test_a_subtask_stores_its_own_range_of_hashes(subtask: Subtask, number: int) -> None:
    within = hash_range(number, 2)
    changes = {key: "a" for key in range(256) if within.first <= key << 56 <= within.last}
    subtask.batch(changes)
    grant = subtask.grant()
    subtask.attempt(within=within).work(order(grant), subtask.chain, [])
    done = subtask.attempt().result(grant)
    assert done is not None
    [level] = done.levels
    [run] = level.runs
    assert (level.within, HashRange(run.first_hash, run.last_hash)) == (within, within)
    assert subtask.stored_state(done) == changes


# ---- At once ----


@pytest.mark.parametrize("inline", [0, 10_000])
def test_what_is_stored_with_its_batch_replaces_no_local_run(subtask: Subtask, inline: int) -> None:
    """The batch may be repeated, and begins with the state before it; and nothing else of the attempt stays."""
    subtask.batch({1: "a"})
    subtask.batch({1: "b", 2: "b"})
    done = subtask.attempt().store_now(order(subtask.grant(), inline), subtask.chain)
    assert subtask.stored_state(done) == {1: "b", 2: "b"}
    assert bool(done.payload) == bool(inline)
    assert set(subtask.chain) < set(subtask.local.local_runs())
    assert [path.name for path in subtask.local.directory.iterdir() if not path.name.endswith(".run")] == []


def test_a_batch_that_cannot_be_stored_leaves_no_job(tmp_path: Path) -> None:
    subtask = Subtask(tmp_path, FaultStore(LocalStore(tmp_path / "store"), FaultPlan.at("put")))
    subtask.batch({1: "a"})
    with pytest.raises(Exception, match="injected fault"):
        subtask.attempt().store_now(order(subtask.grant()), subtask.chain)
    assert subtask.local.local_runs() == subtask.chain
    assert [path.name for path in subtask.local.directory.iterdir()] == [subtask.chain[0].file_name]


def test_two_attempts_of_a_batch_may_store_it_at_a_time(tmp_path: Path) -> None:
    subtask = Subtask(tmp_path)
    subtask.batch({1: "a"})
    subtask.batch({2: "b"})
    others: list[Materialized] = []
    first: Callable[[], Store] = subtask.open_store

    def meanwhile() -> Store:
        subtask.open_store = first  # type: ignore[method-assign]  # replaced in this test
        others.append(subtask.attempt("two").store_now(order(subtask.grant()), subtask.chain))
        return first()

    subtask.open_store = meanwhile  # type: ignore[method-assign]  # replaced in this test
    done = subtask.attempt("one").store_now(order(subtask.grant()), subtask.chain)
    for one in (done, *others):
        assert subtask.stored_state(one) == {1: "a", 2: "b"}
    assert len(subtask.objects) == 2


# ---- What has expired ----


@pytest.mark.parametrize(("expired", "levels"), [(8, 2), (20, 1)])
def test_a_state_of_mostly_expired_rows_is_stored_anew(tmp_path: Path, expired: int, levels: int) -> None:
    """Only a merge of all rows leaves them out; it is made once they are most of the rows, counted in eighths."""
    subtask = Subtask(tmp_path)
    subtask.batch(dict.fromkeys(range(expired), "short"), expiry_ms=100)
    subtask.batch(dict.fromkeys(range(expired, 30), "long"), expiry_ms=1000)
    subtask.materialize("1-1")
    subtask.now_ms = 100
    subtask.batch({29: "new"}, expiry_ms=1000)
    done = subtask.materialize("1-2")
    assert len(done.levels) == levels
    rest = {key: "long" for key in range(expired, 29)} | {29: "new"}
    kept = {key: "short" for key in range(expired)} if levels == 2 else {}
    assert subtask.stored_state(done) == subtask.local_state() == kept | rest


def test_rows_that_expired_go_with_a_batch_that_changes_nothing(tmp_path: Path) -> None:
    subtask = Subtask(tmp_path)
    subtask.batch(dict.fromkeys(range(20), "short"), expiry_ms=100)
    subtask.batch({20: "long"})
    subtask.materialize("1-1")
    subtask.now_ms = 100
    subtask.batch({})
    assert subtask.stored_state(subtask.materialize("1-2")) == {20: "long"}
