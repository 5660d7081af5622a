"""The upkeep of a subtask's state: merging its local runs, and materializing, after a batch or as a part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from statelog.local.materializer import MaintenanceRequest, Materialized, Materializer
from statelog.local.runs import LocalRun, LocalRuns
from statelog.observer import Step
from statelog.runs.merge import Garbage, choose_merge

_AT_ONCE_ROWS: Final = 524_288
"""Rows of a merge that is done at once, in about a fifth of a second."""
_AT_ONCE_BYTES: Final = 128 << 20
"""And their size."""


@dataclass(frozen=True)
class Maintenance:
    """What a subtask can do for its state beside the changes of a batch.

    Parameters
    ----------
    local : LocalRuns
        The subtask's local runs.
    path : sequence of LocalRun
        Those of the state before the batch, oldest first; that state is certain.
    materializer : Materializer
        Does what takes long.
    order : MaintenanceRequest or None
        What the coordinator wants.
    genesis : bytes
        Chain digest of the empty state.
    fan_in : int
        As in :func:`statelog.runs.merge.choose_merge`.
    garbage : Garbage
        What may be left out.
    token : str
        Unique among all attempts.
    step : callable
        Told about steps.
    """

    local: LocalRuns
    chain: Sequence[LocalRun]
    materializer: Materializer
    request: MaintenanceRequest | None
    genesis: bytes
    fan_in: int
    garbage: Garbage
    token: str
    step: Callable[[Step], None]

    @property
    def has_backlog(self) -> bool:
        """Whether local runs are to be merged, or being merged, that are too many for one go."""
        return self.materializer.is_merging or not self._is_done_at_once(self._to_merge())

    def work(self) -> None:
        """Merge what is to be merged, and do a slice of what the coordinator wants."""
        chain, merges = list(self.chain), self._to_merge()
        if merges and self._is_done_at_once(merges):
            self.step(Step.MERGING)
            chain[-len(merges) :] = [self.local.merge(merges, self.genesis, self.token, garbage=self.garbage)]
            merges = []
        if self.request is not None:
            self.step(Step.MATERIALIZING)
            self.materializer.work(self.request, chain, merges)

    def store_now(self, local_run: LocalRun) -> Materialized | None:
        """Materialize the state after the batch; None if there is nothing new.

        Parameters
        ----------
        edge : LocalRun
            The local run of the batch.
        """
        assert self.request is not None
        if not self.request.is_due and not self.local.open(local_run).rows:
            return None
        return self.materializer.store_now(self.request, [*self.chain, local_run])

    def _to_merge(self) -> list[LocalRun]:
        """The newest runs that are to be merged, without those that a job is about."""
        busy = self.materializer.inputs()
        places = [place for place, local_run in enumerate(self.chain) if local_run.file_name in busy]
        free = list(self.chain[places[-1] + 1 if places else 0 :])
        newest = choose_merge([self.local.open(local_run).rows for local_run in free], self.fan_in)
        return free[len(free) - newest :]

    def _is_done_at_once(self, local_runs: Sequence[LocalRun]) -> bool:
        runs = [self.local.open(local_run) for local_run in local_runs]
        return sum(run.rows for run in runs) <= _AT_ONCE_ROWS and sum(run.size_bytes for run in runs) <= _AT_ONCE_BYTES
