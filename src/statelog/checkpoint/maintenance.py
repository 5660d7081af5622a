"""Maintenance of a subtask's state, after a batch or as a part of it: merging local runs, and materializing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from statelog.local.materializer import MaintenanceRequest, Materialized, Materializer
from statelog.local.runs import LocalRun, LocalRuns
from statelog.metrics import Step
from statelog.runs.merge import Garbage, choose_merge


@dataclass(frozen=True)
class Maintenance:
    """Merges a subtask's local runs and materializes its state."""

    local: LocalRuns
    chain: Sequence[LocalRun]
    """The local runs of the state before the batch, oldest first; that state is certain."""
    materializer: Materializer
    request: MaintenanceRequest | None
    """The coordinator's request; None if it has none."""
    genesis: bytes
    """Digest of the empty state."""
    fan_in: int
    """As in :func:`statelog.runs.merge.choose_merge`."""
    garbage: Garbage
    """Rows that merges may drop."""
    token: str
    """Unique among all attempts."""
    step: Callable[[Step], None]

    @property
    def has_backlog(self) -> bool:
        """Whether local runs are being merged, or wait to be, that are too large to merge at once."""
        return self.materializer.is_merging or not self._is_done_at_once(self._to_merge())

    def work(self) -> None:
        """Merge local runs that are due, and do a slice of the coordinator's request."""
        chain, merges = list(self.chain), self._to_merge()
        if merges and self._is_done_at_once(merges):
            self.step(Step.MERGING)
            chain[-len(merges) :] = [self.local.merge(merges, self.genesis, self.token, garbage=self.garbage)]
            merges = []
        if self.request is not None:
            self.step(Step.MATERIALIZING)
            self.materializer.work(self.request, chain, merges)

    def store_now(self, local_run: LocalRun) -> Materialized | None:
        """Materialize the state after the batch, whose changes are in `local_run`; None without new changes."""
        assert self.request is not None
        if not self.request.is_due and not self.local.open(local_run).rows:
            return None
        return self.materializer.store_now(self.request, [*self.chain, local_run])

    def _to_merge(self) -> list[LocalRun]:
        """The newest runs that are due for a merge, except the inputs of a job."""
        busy = self.materializer.inputs()
        places = [place for place, local_run in enumerate(self.chain) if local_run.file_name in busy]
        free = list(self.chain[places[-1] + 1 if places else 0 :])
        newest = choose_merge(
            [self.local.open(local_run).rows for local_run in free], self.fan_in, self.local.policy.smallest_tier_rows
        )
        return free[len(free) - newest :]

    def _is_done_at_once(self, local_runs: Sequence[LocalRun]) -> bool:
        runs, policy = [self.local.open(local_run) for local_run in local_runs], self.local.policy
        return (
            sum(run.rows for run in runs) <= policy.at_once_rows
            and sum(run.size_bytes for run in runs) <= policy.at_once_bytes
        )
