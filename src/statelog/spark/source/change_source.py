"""The changes of a state as a stream of Spark's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from statelog.clock import Clock, SystemClock
from statelog.history.restore_plan import RestorePlan
from statelog.log.open import open_location
from statelog.reading.change_columns import ChangeColumns
from statelog.reading.changes import SubtaskChanges, change_table, changed_rows
from statelog.reading.checkpoints import LoggedPoint
from statelog.reading.consumer import ChangeConsumer, Position
from statelog.reading.open import open_logged
from statelog.reading.states import chosen_columns, shown_name
from statelog.runs.schema import StateDescriptor, StateSchema, decode_schema
from statelog.spark.source.newer_streaming import ReadMaxBytes, SupportsTriggerAvailableNow
from statelog.spark.source.source_options import SourceOptions

_POLL_S: Final = 1.0
"""Between micro-batches Spark asks every 10 ms; the log is read no more often than this."""

Offset = dict[str, Any]
"""A :class:`Position`, as Spark stores it."""


def change_columns(point: LoggedPoint, options: SourceOptions) -> pa.Schema:
    """The columns of a state's changes that a user has chosen; raises the errors of :func:`change_table`."""
    stored, table = change_table(point, options.state, with_before=options.with_before)
    return chosen_columns(table.schema, options.columns, f"State '{shown_name(stored)}' of {point.name}")


@dataclass
class _Partition(InputPartition):
    """The changes of one subtask, batch after batch."""

    location: str
    key_schema: bytes
    state: StateSchema
    changes: list[SubtaskChanges]
    before: RestorePlan | None
    """The subtask's state before them, if former values are asked for."""


class ChangeReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Tells Spark how far the log has come, and reads the changes between two positions.

    Each start of a query has one process for it, and its tasks have copies. Spark calls :meth:`initialOffset` if the
    query is new, :meth:`latestOffset` before every micro-batch and again and again between them, and
    :meth:`partitions` when it plans a micro-batch.
    """

    def __init__(self, options: SourceOptions, names: Sequence[str], clock: Clock | None = None) -> None:
        self._options = options
        self._names = list(names)
        self._clock = clock or SystemClock()
        self._consumer: ChangeConsumer | None = None
        self._ends_when_idle = False
        self._last: int | None = None
        self._end: Position | None = None
        self._idle: tuple[Position, float] | None = None

    def initialOffset(self) -> Offset:
        return asdict(self._opened().first(self._options.after))

    def prepareForTriggerAvailableNow(self) -> None:
        self._ends_when_idle = True

    def getDefaultReadLimit(self) -> ReadMaxBytes:
        """The limit with which Spark 4.2 and later call :meth:`latestOffset`, unless the trigger wants everything."""
        return ReadMaxBytes(self._options.max_batch_bytes)

    def latestOffset(self, start: Offset | None = None, limit: object = None) -> Offset:
        since = self._end if start is None else Position(**start)
        if self._ends_when_idle:
            if self._last is None:
                self._last = self._opened().newest(None).batch
        elif since is not None and self._is_asked_too_soon(since):
            return asdict(since)
        max_bytes: int | None = self._options.max_batch_bytes
        if limit is not None:
            max_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        found = self._opened().newest(since, self._last, max_bytes)
        self._idle = (found, self._clock.monotonic_s()) if found == since else None
        return asdict(found)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        self._end = Position(**end)
        if start == end:  # a restarted query says where it was, and may repeat what it has read up to there
            return []
        consumer = self._opened()
        point, since = consumer.point, Position(**start)
        changes = consumer.changes(since, self._end)
        before = consumer.states(since, len(changes)) if consumer.table.with_before else [None] * len(changes)
        return [
            _Partition(point.location, point.key_schema, consumer.state, *own)
            for own in zip(changes, before, strict=True)
        ]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of a subtask, in a task."""
        assert isinstance(partition, _Partition)
        store = open_location(partition.location)
        state, plan = partition.state, partition.before
        key_schema, declared = decode_schema(partition.key_schema), StateDescriptor.from_stored(state)
        table = ChangeColumns(key_schema, declared, with_before=plan is not None)
        batches = ((changes, changes.rows(store, state)) for changes in partition.changes)
        for rows in changed_rows(store, state, table, batches, None if plan is None else [plan]):
            yield rows.select(self._names)

    def commit(self, end: Offset) -> None:
        """Do nothing: Spark calls it when the next position is known, and that one gives up the changes before."""

    def stop(self) -> None:
        """Leave the pin, by which the query goes on where it was."""

    def _opened(self) -> ChangeConsumer:
        """The consumer; made when it is needed, as the copy that goes to the tasks needs none."""
        if self._consumer is None:
            options = self._options
            self._consumer = ChangeConsumer(
                options.location,
                open_logged(options.location, options.uid, None),
                options.state,
                pin_s=options.pin_s,
                max_bytes=options.max_pin_bytes,
                takes_last=options.with_last,
                with_before=options.with_before,
            )
        return self._consumer

    def _is_asked_too_soon(self, since: Position) -> bool:
        if self._idle is None or self._idle[0] != since:
            return False
        return self._clock.monotonic_s() - self._idle[1] < _POLL_S
