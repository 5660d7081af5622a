"""When a query needs a batch although no source has new rows."""

from __future__ import annotations

from dataclasses import dataclass

from statelog.checkpoint.batch import BatchTime


@dataclass(frozen=True)
class NoDataRule:
    """What an operator needs batches without data for.

    Parameters
    ----------
    spark_watermark : bool
        The operator goes by Spark's watermark, so a batch must follow when that has advanced.
    own_watermark : bool
        The same for a watermark of the operator's own.
    heartbeat_ms : int or None
        A batch must follow when the last one's processing time is this long ago, or when it has been over for so long;
        None for never.
    """

    spark_watermark: bool = False
    own_watermark: bool = False
    heartbeat_ms: int | None = None

    @property
    def needs_clock(self) -> bool:
        """Whether there is anything that a batch without data can be needed for."""
        return self.spark_watermark or self.own_watermark or self.heartbeat_ms is not None


@dataclass(frozen=True)
class QueryProgress:
    """How far a query has come between two batches.

    Parameters
    ----------
    last : BatchTime
        Spark's times of the last batch.
    spark_watermark_ms : int
        Spark's watermark after it, which is the next batch's.
    now_ms : int
        The processing time.
    idle_ms : int
        How long it is known that the last batch is over, by a clock that nobody sets.
    has_no_data_batches : bool
        Whether the watermark may cause batches without data: spark.sql.streaming.noDataMicroBatches.enabled.
    ends_when_idle : bool
        Whether the query ends once it has read what was there at its start (trigger ``availableNow``).
    """

    last: BatchTime
    spark_watermark_ms: int
    now_ms: int
    idle_ms: int
    has_no_data_batches: bool
    ends_when_idle: bool


class IdleTime:
    """Measures how long a query has had the same last batch."""

    def __init__(self) -> None:
        self._batch: int | None = None
        self._since_s = 0.0

    def of(self, batch: int, monotonic_s: float) -> int:
        """Milliseconds since a batch was first seen to be the last one, by the clock that never goes back."""
        if batch != self._batch:
            self._batch, self._since_s = batch, monotonic_s
        return int((monotonic_s - self._since_s) * 1000)


def needs_batch(rule: NoDataRule, progress: QueryProgress, *, own_watermark_advances: bool) -> bool:
    """Whether an operator needs a batch now, with or without data.

    A watermark that has advanced needs one batch and no more: the next one has it. So a query that ends when it is idle
    does end. A heartbeat would keep it running for ever, and does not count there.

    Parameters
    ----------
    rule : NoDataRule
        What the operator needs batches for.
    progress : QueryProgress
        How far the query has come.
    own_watermark_advances : bool
        Whether the next batch's watermark of the operator's own is larger than the last one's.
    """
    if progress.has_no_data_batches:
        if rule.spark_watermark and progress.spark_watermark_ms > progress.last.watermark_ms:
            return True
        if rule.own_watermark and own_watermark_advances:
            return True
    if rule.heartbeat_ms is None or progress.ends_when_idle:
        return False
    # After the machine's clock was put back the last batch's time is in the future, perhaps for hours.
    return max(progress.now_ms - progress.last.time_ms, progress.idle_ms) >= rule.heartbeat_ms
