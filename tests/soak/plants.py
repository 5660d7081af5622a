"""Defects that the soak must find: each takes one guard of the coordinator away, as it once was missing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final
from unittest.mock import patch

from msgspec.structs import replace

from statelog.checkpoint.batch import AcceptedAck, Batch
from statelog.checkpoint.materialization import MaterializationPolicy
from statelog.checkpoint.protocol import Ack, JobOutcome
from statelog.local.materializer import Grant, MaintenanceRequest, Materialized, Materializer

_result, _work, _fits, _take = (
    Materializer.result,
    Materializer.work,
    MaterializationPolicy._fits,
    MaterializationPolicy.accept,
)


def _own_grant(materializer: Materializer, grant: Grant | None) -> Grant | None:
    """The grant of the job that is here, whatever has become of it since."""
    job = materializer._load()
    if job is None or not job.grant:
        return grant
    return Grant(job.grant, b"", [], "") if grant is None else replace(grant, job=job.grant)


def _result_of_any(self: Materializer, grant: Grant | None) -> Materialized | None:
    return _result(self, _own_grant(self, grant))


def _work_on(self: Materializer, order: MaintenanceRequest, *arguments: Any) -> None:
    _work(self, replace(order, grant=_own_grant(self, order.grant)) if order.grant else order, *arguments)


def _is_newer(self: MaterializationPolicy, ack: Ack, genesis: bytes) -> bool:
    """Only the last level is compared with what is materialized."""
    if not ack.has_changeset:
        return _fits(self, ack, genesis)
    subtask = ack.task.subtask
    record = self._inventory.history.latest_record
    base = record.base_map.base_of(subtask, self._config.parallelism) if record and record.base_map else None
    if not ack.levels or (base is not None and ack.levels[-1].last <= base.through):
        return False
    self._grants.end(subtask, has_leftovers=False)
    self._grants.open(subtask, ack.job, b"", [])
    return True


def stale_jobs() -> AbstractContextManager[object]:
    """A job that was finished on a host a while ago counts, whatever base it was begun on."""
    planted = ExitStack()
    for owner, name, wrapper in (
        (Materializer, "result", _result_of_any),
        (Materializer, "work", _work_on),
        (MaterializationPolicy, "_fits", _is_newer),
    ):
        planted.enter_context(patch.object(owner, name, wrapper))
    return planted


def _take_first(self: MaterializationPolicy, batch: Batch, taken: AcceptedAck, genesis: bytes) -> JobOutcome:
    held = batch.acks.get(taken.ack.task.subtask)
    if taken.ack.has_changeset and held is not None and held.ack.checksums == taken.ack.checksums:
        taken.levels, taken.levels_payload = [], b""
    return _take(self, batch, taken, genesis)


def lost_jobs() -> AbstractContextManager[object]:
    """What comes with the ack of a second action is dropped, as its result is that of the first."""
    return patch.object(MaterializationPolicy, "accept", _take_first)


PLANTS: Final[dict[str, Callable[[], AbstractContextManager[object]]]] = {
    "stale-jobs": stale_jobs,
    "lost-jobs": lost_jobs,
}
