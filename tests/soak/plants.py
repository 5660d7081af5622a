"""Defects that the soak must find: each takes one guard away, as it once was missing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Final
from unittest.mock import patch

from msgspec.structs import replace

from statelog.coordinator import active_operator
from statelog.coordinator.batch import OperatorBatch
from statelog.coordinator.materialization import MaterializationPolicy
from statelog.coordinator.standing_pins import StandingPins
from statelog.errors import FencedError
from statelog.history.query_history import QueryHistory
from statelog.local import runs
from statelog.local.materializer import Grant, MaintenanceRequest, Materialized, Materializer
from statelog.log.numbered import NumberedLog
from statelog.log.references import Level
from statelog.rpc.messages import Ack, JobOutcome
from statelog.tasks import keyed_task
from tests.model.query_plants import appends_ignore, repeated_batches_start_from_the_newest


class _AnyJob(Materializer):
    """Takes the job that is here for the grant's, whatever has become of it since."""

    def result(self, grant: Grant | None) -> Materialized | None:
        return super().result(self._own_grant(grant))

    def work(self, request: MaintenanceRequest, *arguments: Any) -> None:
        grant = self._own_grant(request.grant) if request.grant else None
        super().work(replace(request, grant=grant), *arguments)

    def _own_grant(self, grant: Grant | None) -> Grant | None:
        job = self._load()
        if job is None or not job.grant:
            return grant
        return Grant(job.grant, b"", [], "") if grant is None else replace(grant, job=job.grant)


class _AnyNewer(MaterializationPolicy):
    """Compares only the last level with the materialized state."""

    def fits(self, ack: Ack, genesis: bytes) -> bool:
        if not ack.has_changeset:
            return super().fits(ack, genesis)
        subtask = ack.task.subtask
        record = self._history().latest_record
        base = record.base_map.base_of(subtask, self._config.parallelism) if record and record.base_map else None
        if not ack.levels or (base is not None and ack.levels[-1].last <= base.through):
            return False
        self._grants.end(subtask, has_leftovers=False)
        self._grants.open(subtask, ack.job, b"", [])
        return True


def stale_jobs() -> AbstractContextManager[object]:
    """A job that was finished on a host a while ago counts, whatever base it was begun on."""
    planted = ExitStack()
    planted.enter_context(patch.object(keyed_task, "Materializer", _AnyJob))
    planted.enter_context(patch.object(active_operator, "MaterializationPolicy", _AnyNewer))
    return planted


class _FirstAck(MaterializationPolicy):
    """Takes a materialization only from the first ack of a result."""

    def settle(
        self, batch: OperatorBatch, ack: Ack, levels: list[Level], payload: bytes, *, fits: bool, is_counted: bool
    ) -> JobOutcome:
        if not is_counted:
            levels, payload = [], b""
        return super().settle(batch, ack, levels, payload, fits=fits, is_counted=is_counted)


def lost_jobs() -> AbstractContextManager[object]:
    """What comes with the ack of a second action is dropped, as its result is that of the first."""
    return patch.object(active_operator, "MaterializationPolicy", _FirstAck)


def debris() -> AbstractContextManager[object]:
    """A local run that could not be written stays as a temporary file."""
    return patch.object(runs, "removed_on_failure", nullcontext)


def taken_back() -> AbstractContextManager[object]:
    """A pin counts although its checkpoint was taken back."""
    return patch.object(QueryHistory, "has_on_line", lambda *_: True)


def ignored_pins() -> AbstractContextManager[object]:
    """Objects are deleted although a pin names them."""
    return patch.object(StandingPins, "need", lambda *_: False)


def not_fenced() -> AbstractContextManager[object]:
    """A driver continues, and deletes, although a newer start has claimed its log."""
    planted = ExitStack()
    planted.enter_context(appends_ignore(FencedError))
    planted.enter_context(patch.object(NumberedLog, "require_ownership", lambda _: None))
    return planted


PLANTS: Final[dict[str, Callable[[], AbstractContextManager[object]]]] = {
    "stale-jobs": stale_jobs,
    "lost-jobs": lost_jobs,
    "debris": debris,
    "taken-back": taken_back,
    "ignored-pins": ignored_pins,
    "not-fenced": not_fenced,
    "newest-state": repeated_batches_start_from_the_newest,
}
