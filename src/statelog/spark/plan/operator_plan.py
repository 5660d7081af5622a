"""An operator's plan: what the driver knows of it before its query starts, and when it needs a batch without rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyspark.sql import DataFrame, SparkSession

from statelog.coordinator.batch import BatchTime
from statelog.log.entry import Settings
from statelog.operators.event_time import WatermarkPolicy
from statelog.options import Options
from statelog.runs.schema import StateSchema
from statelog.spark.plan.initial import InitialTable
from statelog.spark.plan.placement import Placement


@dataclass(frozen=True)
class NoDataRule:
    """When an operator needs a batch without data."""

    spark_watermark: bool = False
    """When Spark's watermark has advanced, because the operator uses it."""
    own_watermark: bool = False
    """When the operator's own watermark has advanced."""
    heartbeat_ms: int | None = None
    """When the processing time or the end of the last batch is this long ago; None for never."""

    @property
    def needs_clock(self) -> bool:
        """Whether the operator can ever need a batch without data."""
        return self.spark_watermark or self.own_watermark or self.heartbeat_ms is not None


@dataclass(frozen=True)
class QueryProgress:
    """The progress of a query between two batches."""

    last: BatchTime
    """Spark's times of the last batch."""
    spark_watermark_ms: int
    """Spark's watermark after the last batch; the next batch will have it."""
    now_ms: int
    idle_ms: int
    """How long the last batch is known to be over, by the monotonic clock."""
    has_no_data_batches: bool
    """Whether the watermark may cause batches without data: ``spark.sql.streaming.noDataMicroBatches.enabled``."""
    ends_when_idle: bool
    """Whether the query ends once it has read the rows that were there at its start (trigger ``availableNow``)."""


class IdleTime:
    """Measures how long a query has had the same last batch."""

    def __init__(self) -> None:
        self._batch: int | None = None
        self._since_s = 0.0

    def of(self, batch: int, monotonic_s: float) -> int:
        """Milliseconds since a batch was first seen to be the last one; `monotonic_s` is now."""
        if batch != self._batch:
            self._batch, self._since_s = batch, monotonic_s
        return int((monotonic_s - self._since_s) * 1000)


def needs_batch(rule: NoDataRule, progress: QueryProgress, *, own_watermark_advances: bool) -> bool:
    """Whether an operator needs a batch now, with or without data.

    A watermark that has advanced needs exactly one batch, because the next batch has it. So a query that ends when it
    is idle does end. A heartbeat would keep such a query running for ever, so there it does not count.
    """
    if progress.has_no_data_batches:
        if rule.spark_watermark and progress.spark_watermark_ms > progress.last.watermark_ms:
            return True
        if rule.own_watermark and own_watermark_advances:
            return True
    if rule.heartbeat_ms is None or progress.ends_when_idle:
        return False
    # After the machine's clock was set back, the last batch's time is in the future, perhaps for hours. The idle time
    # does not depend on that clock.
    return max(progress.now_ms - progress.last.time_ms, progress.idle_ms) >= rule.heartbeat_ms


@dataclass(frozen=True)
class OperatorPlan:
    """A planned operator, as the driver's endpoint knows it."""

    instance: str
    """Unique among the operators of the driver's program."""
    session: SparkSession
    uid: str
    parallelism: int
    location: str | None
    """None for a folder below the query's checkpointLocation."""
    options: Options
    key_schema: bytes = b""
    """Arrow IPC schema message of the grouping columns; empty for an unkeyed operator."""
    states: list[StateSchema] = field(default_factory=list)
    watermark: WatermarkPolicy | None = None
    """The operator's own watermark."""
    deleted: tuple[str, ...] = ()
    """States to delete if they exist."""
    initial: DataFrame | None = None
    """The rows of the initial state, each in the partition of its subtask."""
    tables: list[InitialTable] = field(default_factory=list)
    """States to load before the first batch."""
    no_data_rule: NoDataRule = field(default_factory=NoDataRule)
    placement: Placement | None = None
    stores_output: bool = False
    """Whether the operator stores the query's output, for a sink that gets the stored rows."""
    in_front: frozenset[str] = frozenset()
    """The observations in the plan of its input, which mark the operators from which its rows come."""
    settings: Settings = field(default_factory=dict)
    """Settings that the state of a keyed operator depends on, such as its time mode."""

    @property
    def observation(self) -> str:
        """Name of the observation that marks the operator in a query's plan."""
        return f"statelog {self.uid} {self.instance}"

    @property
    def has_initial(self) -> bool:
        """Whether state must be stored before the first batch."""
        return self.initial is not None or bool(self.tables)
