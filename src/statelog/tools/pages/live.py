"""The driver's own figures of a running query, for the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from statelog.coordinator.active_operator import Restore
from statelog.errors import ConfigurationError
from statelog.metrics import CheckpointMetrics

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from statelog.coordinator.coordinator import Coordinator
    from statelog.spark.driver.endpoint import PlannedOperator


@dataclass(frozen=True)
class LiveOperator:
    """An operator of a running query; empty until the query's first task has called."""

    uid: str
    parallelism: int
    has_begun: bool = False
    """Whether a task of this start of the query has called."""
    metrics: Sequence[CheckpointMetrics] = ()
    """The latest ones, the oldest first."""
    last_restore: CheckpointMetrics | None = None
    """The newest checkpoint whose subtasks had to fetch state."""
    restore: Restore | None = None
    """As reported by subtasks that restore for more than a second."""
    newest: CheckpointMetrics | None = None
    """The latest metrics, with subtasks, states and hot keys."""

    @property
    def restoring(self) -> Restore | None:
        """The restore for the batch that runs now; None once its checkpoint is durable."""
        if self.restore is None or (self.metrics and self.metrics[-1].batch >= self.restore.batch):
            return None
        return self.restore


@dataclass(frozen=True)
class Watched:
    """What a page is about: locations, and of a running query its operators."""

    locations: Sequence[str]
    operators: Sequence[LiveOperator] = ()
    redacts_keys: bool = False
    """Whether an operator asks for that."""


def watch(query: StreamingQuery | str | Path) -> Callable[[], Watched]:
    """A function that looks at a location, or at a running query; raises ConfigurationError for anything else."""
    if isinstance(query, (str, Path)):
        location = str(query)
        return lambda: Watched([location])
    from pyspark.sql.streaming.query import StreamingQuery

    from statelog.spark.driver.endpoint import known_endpoint

    endpoint = known_endpoint()
    is_query = isinstance(query, StreamingQuery)
    planned = endpoint.planned_operators(query) if is_query and endpoint is not None else []
    if endpoint is None or not planned:
        raise ConfigurationError(
            f"{query!r} is neither a query of this process with operators of statelog, nor a location.",
            hint="Pass what start() has returned, or the query's checkpointLocation.",
        )
    locations = list(dict.fromkeys(one.location for one in planned))
    redacts_keys = any(one.redacts_keys for one in planned)

    def look() -> Watched:
        coordinators = {one.run_id: endpoint.coordinator_of(one.query_id, one.run_id) for one in planned}
        return Watched(locations, [_live(one, coordinators[one.run_id]) for one in planned], redacts_keys)

    return look


def _live(planned: PlannedOperator, coordinator: Coordinator | None) -> LiveOperator:
    if coordinator is None or not coordinator.has_operator(planned.uid):
        return LiveOperator(planned.uid, planned.parallelism)
    operator = coordinator.operator(planned.uid)
    return LiveOperator(
        uid=planned.uid,
        parallelism=planned.parallelism,
        has_begun=True,
        metrics=operator.metrics.recent,
        newest=operator.metrics.newest,
        last_restore=operator.metrics.last_restore,
        restore=operator.restoring.latest,
    )
