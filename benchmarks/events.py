"""The events of `value-state` and `window`: made of their numbers alone, so that any system can have the same.

Event i of source subtask s of p has the index ``s * (10**12 / p) + i``. Its key is ``floorMod(mix(index), keys)``,
where mix is SplitMix64: the finaliser of ``index + 0x9E3779B97F4A7C15``. Its payload consists of the first bytes,
little endian, of the outputs of xorshift64 with the shifts 13, 7 and 17, seeded with ``mix(index ^ 0x5DEECE66D)``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from benchmarks.skew import UNIFORM, skewed_keys

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

_INDEXES: Final = 10**12
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_PAYLOAD: Final = np.uint64(0x5DEECE66D)
_WORD_BYTES: Final = 8
_ARROW_ROWS: Final = 10_000
_OFFSET: Final = "events"
_BACKLOG_EVENTS: Final = 200_000
"""Of a batch."""


def mix(words: Words) -> Words:
    """SplitMix64 (Steele, Lea, Flood 2014): the outputs of its generator for these states."""
    mixed = words + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def indexes(numbers: Numbers, sources: int) -> Words:
    """The indexes of events: event n of all is event n div p of source subtask n mod p."""
    return (numbers % sources * (_INDEXES // sources) + numbers // sources).astype(np.uint64)


def keys_of(index: Words, keys: int, skew: str = UNIFORM) -> Numbers:
    """The keys of events; as Java's, a signed number's remainder is not negative."""
    remainders: Numbers = mix(index).view(np.int64) % keys
    return remainders if skew == UNIFORM else skewed_keys(keys, mix(index), remainders, skew)


def payloads_of(index: Words, value_bytes: int) -> npt.NDArray[np.uint8]:
    """The payloads of events, one a row (Marsaglia 2003, xorshift)."""
    state = mix(index ^ _PAYLOAD)
    words = np.empty((len(index), -(-value_bytes // _WORD_BYTES)), "<u8")
    for place in range(words.shape[1]):
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        words[:, place] = state
    return words.view(np.uint8)[:, :value_bytes]


@dataclass(frozen=True)
class EventStream:
    """Events at a constant rate.

    `first` events were read in an earlier life of the query. `backlog` events are there at once, for large batches;
    then the clock starts. The clock decides only how many events a batch has: which ones follows from its offsets.
    """

    rate: float
    sources: int
    keys: int
    value_bytes: int
    first: int = 0
    backlog: int = 0
    skew: str = UNIFORM

    def load(self, session: SparkSession) -> DataFrame:
        """The streaming DataFrame, with the columns `key` and `payload`."""
        session.dataSource.register(EventSource)
        reader = session.readStream.format(EventSource.name())
        return reader.options(**{name: str(value) for name, value in vars(self).items()}).load()

    @classmethod
    def of(cls, options: Mapping[str, str]) -> EventStream:
        """The stream that :meth:`load` has made these options of."""
        kinds: dict[str, Any] = {"rate": float, "skew": str}  # all others are whole numbers
        given = {name: kinds.get(name, int)(text) for name, text in options.items()}
        return cls(**given)

    def keys_of(self, first: int, end: int) -> Numbers:
        """The keys of successive events."""
        return keys_of(indexes(np.arange(first, end), self.sources), self.keys, self.skew)

    def batch(self, numbers: Numbers) -> pa.RecordBatch:
        """Events by number."""
        index = indexes(numbers, self.sources)
        payloads = np.ascontiguousarray(payloads_of(index, self.value_bytes))
        ends = np.arange(len(index) + 1, dtype=np.int32) * np.int32(self.value_bytes)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(payloads)]
        values = pa.Array.from_buffers(pa.binary(), len(index), buffers)
        return pa.RecordBatch.from_arrays([pa.array(keys_of(index, self.keys, self.skew)), values], ["key", "payload"])


class EventSource(DataSource):
    """The stream as a data source of Spark."""

    @classmethod
    def name(cls) -> str:
        return "benchmark-events"

    def schema(self) -> str:
        return "key long, payload binary"

    def streamReader(self, schema: Any) -> EventReader:
        return EventReader(EventStream.of(dict(self.options)))


@dataclass(frozen=True)
class EventRange(InputPartition):
    """The events of one source subtask in a batch: every `step`-th number."""

    start: int
    end: int
    step: int


class EventReader(DataSourceStreamReader):
    """Tells in the driver which events are due, and makes them in the executors."""

    def __init__(self, stream: EventStream, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._monotonic_s = monotonic_s
        self._known = stream.first
        self._started_s: float | None = None

    def initialOffset(self) -> dict[str, int]:
        return {_OFFSET: 0}

    def latestOffset(self) -> dict[str, int]:  # as in Spark 4.0
        stream = self._stream
        if self._known < stream.backlog:
            self._known = min(stream.backlog, self._known + _BACKLOG_EVENTS)
        elif self._started_s is None:
            self._started_s = self._monotonic_s()
        else:
            due = int(stream.rate * (self._monotonic_s() - self._started_s))
            self._known = max(stream.first, stream.backlog) + due
        return {_OFFSET: self._known}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[EventRange]:
        sources = self._stream.sources
        return [
            EventRange(start[_OFFSET] + (source - start[_OFFSET]) % sources, end[_OFFSET], sources)
            for source in range(sources)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, EventRange)
        numbers = np.arange(partition.start, partition.end, partition.step)
        for first in range(0, len(numbers), _ARROW_ROWS):
            yield self._stream.batch(numbers[first : first + _ARROW_ROWS])
