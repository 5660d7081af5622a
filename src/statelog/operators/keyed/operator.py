"""What a keyed operator is made of, on the side of the tasks. No Spark here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from statelog.operators.event_time import EventTime
from statelog.operators.keyed.grouping import KeyChunk
from statelog.runs.byte_slices import BUDGET, Budget
from statelog.runs.keys import KeyCodec
from statelog.runs.schema import StateDescriptor, TimeDomain
from statelog.runs.times import Moment, Ttl
from statelog.runs.values import RowCodec


class Processor(Protocol):
    """The methods of ``pyspark.sql.streaming.StatefulProcessor`` that are called."""

    def init(self, handle: Any) -> None: ...

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]: ...

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]: ...

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None: ...

    def close(self) -> None: ...


class InputCodec(Protocol):
    """Makes the objects that the processor gets from columns."""

    def keys(self, columns: list[pa.Array]) -> list[tuple[Any, ...]]:
        """Keys from their columns."""
        ...

    def by_key(self, window: KeyChunk) -> Iterable[Iterator[Any]]:
        """The rows of each key of a window."""
        ...


class OutputCodec(Protocol):
    """Converts what the processor returns to columns."""

    @property
    def hold(self) -> Callable[[Any], Any] | None:
        """Makes of what was yielded, row or frame, something that stays as it is and can be encoded.

        None if the processor cannot change rows of the declared types in place. It refuses nothing.
        """
        ...

    def encode(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> pa.RecordBatch:
        """Convert rows, held or not; `owner_of` names what returned the i-th, for messages.

        Raises
        ------
        RowsTooLarge
            If they are too much for one batch.
        """
        ...


class TimeFactory(Protocol):
    """Makes the objects that tell the processor the time."""

    def timer_values(self, moment: Moment) -> Any:
        """The times of a batch."""
        ...

    def expired_timer(self, time_ms: int) -> Any:
        """What is known of a timer that fires."""
        ...


@dataclass(frozen=True)
class StateBinding:
    """A state as the processor declared it, with the codecs of its values and map keys.

    The descriptor's name is the one that the state is stored under.
    """

    name: str
    descriptor: StateDescriptor
    codec: RowCodec
    entry_codec: RowCodec | None
    to_row: Callable[[tuple[Any, ...]], Any]
    ttl: Ttl | None = None


@dataclass(frozen=True)
class KeyedInput:
    """One of the two kinds of rows that an operator reads: its stream's, or those of its initial state.

    Parameters
    ----------
    key_columns : list of int
        Which columns are the grouping key.
    codec : InputCodec
        Makes the processor's objects.
    """

    key_columns: list[int]
    codec: InputCodec


@dataclass(frozen=True)
class KeyedOperator:
    """A keyed operator.

    Parameters
    ----------
    uid : str
        The operator's name, for messages.
    processor : Processor
        The user's processor.
    key_codec : KeyCodec
        Codec of the grouping key.
    decode_key : callable
        The key as the processor sees it, from its canonical bytes.
    states : list of StateBinding
        The states that the processor declared.
    batch_states : list of StateBinding
        Those whose values live for a batch.
    deleted_states : dict
        Handles of those that are deleted after they were declared, by name.
    input : KeyedInput
        The stream's rows.
    output : OutputCodec
        Makes columns from the processor's output rows.
    times : TimeFactory
        Makes the objects that tell the time.
    timer_domain : TimeDomain or None
        What fires the operator's timers; None if it has none.
    event_time : EventTime or None
        The rows' event time, if the operator goes by it.
    output_event_time : EventTime or None
        The event time of the output rows, if a later operator goes by it.
    initial : KeyedInput or None
        The rows of the initial state.
    budget : Budget
        How much a subtask works on at once.
    """

    uid: str
    processor: Processor
    key_codec: KeyCodec
    decode_key: Callable[[bytes], tuple[Any, ...]]
    states: list[StateBinding]
    input: KeyedInput
    output: OutputCodec
    times: TimeFactory
    timer_domain: TimeDomain | None = None
    event_time: EventTime | None = None
    output_event_time: EventTime | None = None
    initial: KeyedInput | None = None
    budget: Budget = BUDGET
    batch_states: list[StateBinding] = field(default_factory=list)
    deleted_states: dict[str, Any] = field(default_factory=dict)
