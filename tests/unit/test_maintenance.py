"""The maintenance of a subtask's state: which local runs are merged at once, and what is left to the job in slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from statelog import Observer, Options, Tuning
from statelog.local.materializer import MaintenanceRequest, Materialized
from statelog.local.policy import MergePolicy
from statelog.local.runs import LocalRun, LocalRuns
from statelog.metrics import Step
from statelog.runs.merge import Garbage
from statelog.runs.schema import Operation, TimeDomain
from statelog.runs.times import Moment
from statelog.tasks.keyed_task import Maintenance
from tests.attempts import make_attempt, make_begun
from tests.contract.table_contract import VALUE, encode_changes, write_run

BRIEF = replace(VALUE, name="brief", expires_by=TimeDomain.PROCESSING)
ORDER = MaintenanceRequest(0.25, 0, None, is_due=False)
DONE = Materialized([], "job")
LARGE = 17_000
"""Rows of a run that is not merged with small ones."""


@dataclass
class Jobs:
    """Notes what it is to do, and what is there meanwhile."""

    is_merging: bool = False
    busy: set[str] = field(default_factory=set)
    worked: list[tuple[MaintenanceRequest, list[LocalRun], list[LocalRun]]] = field(default_factory=list)
    stored: list[list[LocalRun]] = field(default_factory=list)

    def inputs(self) -> set[str]:
        return self.busy

    def work(self, request: MaintenanceRequest, chain: list[LocalRun], merges: list[LocalRun]) -> None:
        self.worked.append((request, chain, merges))

    def store_now(self, request: MaintenanceRequest, chain: list[LocalRun]) -> Materialized:
        self.stored.append(chain)
        return DONE


def digest(number: int) -> bytes:
    return bytes([number]) * 16


def edge_of(batch: int) -> LocalRun:
    return LocalRun(batch, batch, digest(batch), digest(batch + 1))


class Subtask:
    """A subtask after batches that each changed so many rows."""

    def __init__(self, directory: Path, *rows: int) -> None:
        self.local = LocalRuns(directory)
        self.jobs = Jobs()
        self.steps: list[tuple[Step, int, int]] = []
        self.chain = [edge_of(batch) for batch in range(len(rows))]
        for local_run, count in zip(self.chain, rows, strict=True):
            self.write(local_run, count)

    def write(self, local_run: LocalRun, count: int) -> None:
        keys = range(LARGE * local_run.first, LARGE * local_run.first + count)
        changes: list[Any] = [(key, b"%d" % key, b"", Operation.PUT, "text") for key in keys]
        write_run(self.local, local_run, encode_changes(BRIEF, changes, expiry_ms=1000), "token")

    def maintenance(self, request: MaintenanceRequest | None = None, now_ms: int = 0) -> Maintenance:
        attempt = make_attempt(
            self.local.directory, options=Options(observer=Steps(self), tuning=Tuning(merge_fan_in=2))
        )
        return Maintenance(
            attempt,
            make_begun(genesis=digest(0), batch_time_ms=now_ms, maintenance=request),
            self.local,
            self.chain,
            self.jobs,  # type: ignore[arg-type]  # what it is called for
            Garbage(Moment(now_ms, 0), {}),
        )


class Steps(Observer):
    """Notes each step, and what has been done before it."""

    def __init__(self, subtask: Subtask) -> None:
        self.subtask = subtask

    def step(self, step: Step, batch: int, subtask: int) -> None:
        noting = self.subtask
        noting.steps.append((step, len(noting.jobs.worked), len(noting.local.local_runs())))


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Subtask]:
    return lambda *rows: Subtask(tmp_path, *rows)


def test_small_runs_are_merged_at_once_and_the_job_goes_on_from_there(made: Callable[..., Subtask]) -> None:
    subtask = made(LARGE, 3, 3)
    subtask.maintenance(ORDER).work()
    merged = LocalRun(1, 2, digest(1), digest(3))
    assert subtask.local.open(merged).rows == 6
    assert subtask.jobs.worked == [(ORDER, [edge_of(0), merged], [])]
    assert subtask.steps == [(Step.MERGING, 0, 3), (Step.MATERIALIZING, 0, 2)], "each is told before it is done"
    assert subtask.chain == [edge_of(batch) for batch in range(3)], "others go by it"


def test_without_an_order_runs_are_only_merged(made: Callable[..., Subtask]) -> None:
    subtask = made(3, 3)
    subtask.maintenance().work()
    assert (subtask.jobs.worked, [step for step, *_ in subtask.steps]) == ([], [Step.MERGING])
    assert LocalRun(0, 1, digest(0), digest(2)) in subtask.local.local_runs()


def test_a_merge_leaves_out_what_has_expired(made: Callable[..., Subtask]) -> None:
    subtask = made(3, 3)
    subtask.maintenance(now_ms=2000).work()
    assert subtask.local.open(LocalRun(0, 1, digest(0), digest(2))).rows == 0


def test_where_nothing_is_to_be_merged_the_job_has_its_turn_all_the_same(made: Callable[..., Subtask]) -> None:
    subtask = made(LARGE, 3)
    subtask.maintenance(ORDER).work()
    assert subtask.jobs.worked == [(ORDER, subtask.chain, [])]
    assert [step for step, *_ in subtask.steps] == [Step.MATERIALIZING]
    assert not subtask.maintenance().has_backlog


@pytest.mark.parametrize("limit", ["at_once_rows", "at_once_bytes"])
@pytest.mark.parametrize("is_too_large", [False, True])
def test_large_runs_are_left_to_the_job(made: Callable[..., Subtask], limit: str, is_too_large: bool) -> None:
    subtask = made(LARGE, 3, 3)
    local_runs = subtask.chain[1:]
    size = 6 if limit == "at_once_rows" else sum(subtask.local.open(local_run).size_bytes for local_run in local_runs)
    limits: dict[str, Any] = {limit: size - is_too_large}
    subtask.local = LocalRuns(subtask.local.directory, policy=MergePolicy(**limits))
    assert subtask.maintenance().has_backlog == is_too_large
    subtask.maintenance(ORDER).work()
    [(_, chain, merges)] = subtask.jobs.worked
    assert merges == (local_runs if is_too_large else [])
    assert len(chain) == (3 if is_too_large else 2)


def test_a_merge_that_goes_on_is_a_backlog(made: Callable[..., Subtask]) -> None:
    subtask = made(3)
    assert not subtask.maintenance().has_backlog
    subtask.jobs.is_merging = True
    assert subtask.maintenance().has_backlog


@pytest.mark.parametrize(
    ("busy", "merged"),
    [([], (0, 5)), ([0], (1, 5)), ([0, 1], (2, 5)), ([1, 2], (3, 5)), ([0, 1, 2, 3], (4, 5)), ([0, 1, 2, 3, 4], None)],
)
def test_what_a_job_is_about_is_left_alone_and_what_is_before_it(
    made: Callable[..., Subtask], busy: list[int], merged: tuple[int, int] | None
) -> None:
    subtask = made(3, 3, 3, 3, 3, 3)
    subtask.jobs.busy = {edge_of(batch).file_name for batch in busy}
    subtask.maintenance().work()
    new = [local_run for local_run in subtask.local.local_runs() if local_run.first < local_run.last]
    assert [(local_run.first, local_run.last) for local_run in new] == ([] if merged is None else [merged])


@pytest.mark.parametrize(("rows", "is_due", "is_stored"), [(0, False, False), (0, True, True), (2, False, True)])
def test_a_state_is_stored_as_a_part_of_its_batch_if_it_has_changed_or_is_due(
    made: Callable[..., Subtask], rows: int, is_due: bool, is_stored: bool
) -> None:
    subtask = made(3)
    subtask.write(edge_of(1), rows)
    found = subtask.maintenance(MaintenanceRequest(0.25, 0, None, is_due=is_due)).store_now(edge_of(1))
    assert found is (DONE if is_stored else None)
    assert subtask.jobs.stored == ([[edge_of(0), edge_of(1)]] if is_stored else [])
