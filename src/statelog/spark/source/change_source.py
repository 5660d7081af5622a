"""The changes of a state as a stream of Spark's, and its options."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from statelog.clock import Clock, SystemClock
from statelog.errors import ConfigurationError, ErrorKind
from statelog.history.restore_plan import RestorePlan
from statelog.log.open import open_location
from statelog.reading.changes import ChangeColumns, SubtaskChanges, change_table, changed_rows
from statelog.reading.checkpoints import LoggedPoint
from statelog.reading.consumer import ChangeConsumer, Position
from statelog.reading.open import open_logged
from statelog.reading.point import At, parse_at
from statelog.reading.states import chosen_columns, shown_name
from statelog.runs.schema import StateDescriptor, StateSchema, decode_schema
from statelog.spark.source.newer_streaming import ReadMaxBytes, SupportsTriggerAvailableNow

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
    """Reports the log's newest position to Spark, and reads the changes between two positions.

    Each start of a query has one process for the reader, and its tasks have copies. Spark calls :meth:`initialOffset`
    if the query is new, :meth:`latestOffset` before every micro-batch and repeatedly between them, and
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
        """Do nothing: Spark calls this when the next position is known, which releases the changes before it."""

    def stop(self) -> None:
        """Leave the pin, so that the query can continue where it was."""

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


class Show(StrEnum):
    """What the rows are."""

    ROWS = "rows"
    OPERATORS = "operators"
    STATES = "states"
    CHECKPOINTS = "checkpoints"
    PINS = "pins"
    CHANGES = "changes"


_ANY: Final = ("path", "uid", "state", "columns", "show", "pin_s")
_NOT_FOR_CHANGES: Final = ("at", "push_filters")
_FOR_CHANGES: Final = ("after", "with_last", "max_pin_bytes", "max_batch_bytes", "with_before")
_READ_PIN_S: Final = 3600.0
"""How long the tasks of a read may take to begin."""
_CHANGES_PIN_S: Final = 86_400.0
"""How long changes are kept for a stream that has stopped."""
_MAX_PIN_BYTES: Final = 1 << 30
_MAX_BATCH_BYTES: Final = 256 << 20


@dataclass(frozen=True)
class SourceOptions:
    """A user's choices."""

    location: str
    uid: str | None
    state: str | None
    at: At | None
    columns: tuple[str, ...] | None
    show: Show
    pin_s: float
    pushes_filters: bool
    after: int | None
    with_last: bool
    max_pin_bytes: int
    max_batch_bytes: int
    with_before: bool

    @classmethod
    def of(cls, options: Mapping[str, str]) -> SourceOptions:
        """Check the options; ConfigurationError if one is unknown, cannot be understood or does not fit the others."""
        given = {name.lower(): value for name, value in options.items()}
        known = (*_ANY, *_NOT_FOR_CHANGES, *_FOR_CHANGES)
        if unknown := sorted(set(given) - set(known)):
            raise misuse(f"The format statelog has no option '{unknown[0]}'.", f"Its options are {', '.join(known)}.")
        if "path" not in given:
            raise misuse("The format statelog needs a path.", "Call load(path) with the checkpointLocation.")
        text = given.get("show", Show.ROWS)
        if text not in list(Show):
            raise misuse(f"Option show is '{text}'.", f"It must be one of {', '.join(Show)}.")
        show = Show(text)
        for name in _NOT_FOR_CHANGES if show is Show.CHANGES else _FOR_CHANGES:
            if name in given:
                raise misuse(
                    f"Option {name} cannot be used with show={show}.",
                    "Use option after: changes begin after a batch."
                    if show is Show.CHANGES
                    else "Use it with show=changes, in spark.readStream.",
                )
        columns = given.get("columns")
        return cls(
            location=given["path"],
            uid=given.get("uid"),
            state=given.get("state"),
            at=parse_at(given["at"]) if "at" in given else None,
            columns=None if columns is None else tuple(name.strip() for name in columns.split(",")),
            show=show,
            pin_s=_seconds(given, "pin_s", _CHANGES_PIN_S if show is Show.CHANGES else _READ_PIN_S),
            pushes_filters=_truth(given, "push_filters"),
            after=_whole(given, "after", "a batch") if "after" in given else None,
            with_last=_truth(given, "with_last"),
            max_pin_bytes=_whole(given, "max_pin_bytes", "a number of bytes", _MAX_PIN_BYTES),
            max_batch_bytes=_whole(given, "max_batch_bytes", "a number of bytes", _MAX_BATCH_BYTES),
            with_before=_truth(given, "with_before"),
        )


def misuse(message: str, hint: str) -> ConfigurationError:
    """An error of the user's."""
    return ConfigurationError(message, kind=ErrorKind.INVALID_OPTION, hint=hint)


def _seconds(given: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(given.get(name, default))
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise misuse(f"Option {name} is '{given[name]}'.", "It must be a number of seconds.")
    return value


def _whole(given: Mapping[str, str], name: str, what: str, default: int = 0) -> int:
    try:
        return int(given.get(name, default))
    except ValueError:
        raise misuse(f"Option {name} is '{given[name]}'.", f"It must be {what}.") from None


def _truth(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "false").lower()
    if text not in ("true", "false"):
        raise misuse(f"Option {name} is '{text}'.", "It must be true or false.")
    return text == "true"
