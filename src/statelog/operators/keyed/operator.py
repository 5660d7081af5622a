"""A keyed operator as its tasks see it: processor, codecs, states and time. No Spark here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from statelog.operators.event_time import EventTime
from statelog.operators.keyed.grouping import KeyChunk
from statelog.runs.byte_slices import BUDGET, Budget
from statelog.runs.key_groups import Hashes
from statelog.runs.keys import KeyCodec
from statelog.runs.schema import StateDescriptor, TimeDomain
from statelog.runs.times import NO_TIME_MS, Moment, Ttl
from statelog.runs.values import RowCodec


@dataclass(frozen=True)
class BatchContext:
    """The number and the times of a batch."""

    epoch: int
    batch: int
    """Spark's batch id."""
    moment: Moment
    timers_after_ms: int = NO_TIME_MS
    """No timer up to this time is left to fire."""
    arrivals_after_ms: int = NO_TIME_MS
    """No arrival up to this time is left whose limit is over."""
    closed_ms: int = NO_TIME_MS
    """Windows that end at this time or before were closed by starts with other settings."""


@dataclass(frozen=True)
class KeyedRows:
    """Rows and their key hashes."""

    rows: pa.RecordBatch | pa.Table
    """In order of arrival; without columns if there are no rows."""
    hashes: Hashes
    """One for each row."""


class Processor(Protocol):
    """The methods of ``pyspark.sql.streaming.StatefulProcessor`` that a subtask calls."""

    def init(self, handle: Any) -> None: ...

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]: ...

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]: ...

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None: ...

    def close(self) -> None: ...


class InputCodec(Protocol):
    """Makes the processor's keys and rows from columns."""

    def keys(self, columns: list[pa.Array]) -> list[tuple[Any, ...]]:
        """The keys of some rows, from their key columns."""

    def by_key(self, window: KeyChunk) -> Iterable[Iterator[Any]]:
        """The rows of each key of a chunk, in the order of the keys.

        The call raises if the whole chunk cannot be converted, the iteration if the rows of its next key cannot.
        """


class OutputCodec(Protocol):
    """Makes columns from the rows or frames that a processor returns."""

    @property
    def hold(self) -> Callable[[Any], Any] | None:
        """Makes a copy, for :meth:`encode`, of a row or frame that the processor could still change.

        None if rows of the declared types cannot be changed in place. It raises nothing: :meth:`encode` finds misfits.
        """

    def encode(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> pa.RecordBatch:
        """Convert rows, held or not; `owner_of` names the call that returned the i-th, for messages.

        Raises ProcessorError if a row does not fit the output type, RowsTooLarge if the rows do not fit into one batch.
        """


@dataclass(frozen=True)
class StateBinding:
    """A declared state, with the codecs of its values and map keys."""

    name: str
    """The declared name; the descriptor has the stored one."""
    descriptor: StateDescriptor
    codec: RowCodec
    entry_codec: RowCodec | None
    to_row: Callable[[tuple[Any, ...]], Any]
    """Makes the result of ``MapState.getValue`` from a value."""
    ttl: Ttl | None = None


@dataclass(frozen=True)
class KeyedInput:
    """How to read the rows of the operator's stream, or of its initial state."""

    key_columns: list[int]
    """The columns of the grouping key."""
    codec: InputCodec | None
    """None if the processor takes columns."""


@dataclass(frozen=True)
class KeyedOperator:
    """A keyed operator as its tasks see it."""

    uid: str
    processor: Any
    """A :class:`Processor`, or a :class:`statelog.operators.keyed.column_caller.ColumnProcessor`."""
    key_codec: KeyCodec
    decode_keys: Callable[[Sequence[bytes]], list[tuple[Any, ...]]]
    """Makes the processor's keys from canonical bytes."""
    states: list[StateBinding]
    input: KeyedInput
    output: OutputCodec
    timer_values: Callable[[Moment], Any]
    """Makes the object that gives the processor the times of a batch."""
    expired_timer: Callable[[int], Any]
    """Makes the description of a timer that fires, from its time in milliseconds."""
    timer_domain: TimeDomain | None = None
    """The clock that fires timers; None if the operator has none."""
    event_time: EventTime | None = None
    """Of the input rows, if the operator uses it."""
    output_event_time: EventTime | None = None
    """Of the output rows, if a later operator uses it."""
    initial: KeyedInput | None = None
    takes_columns: bool = False
    """Whether the processor is called with the columns of many keys; otherwise it is called key by key."""
    makes_objects: bool = False
    """Whether a processor of columns makes Python objects of them, and so takes fewer keys at once."""
    adds_floats: bool = False
    """Whether the last digits of results depend on the order of the rows, so that attempts may differ."""
    budget: Budget = BUDGET
    batch_states: list[StateBinding] = field(default_factory=list)
    """The states whose values live for one batch only; `states` has the others."""
    deleted_states: dict[str, Any] = field(default_factory=dict)
    """Handles, by name, of the states that ``init`` declares and then deletes."""
