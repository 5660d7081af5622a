"""Aggregates of each key, as a processor of columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import LongType, StructField, StructType

from statelog.aggregates.accumulators import Reduction, held_types
from statelog.aggregates.groups import Groups, in_types, stored_name
from statelog.aggregates.kernels import Columns, Overflow
from statelog.aggregates.list_kernels import ListTooLarge
from statelog.convert.codecs import ColumnCodecs
from statelog.convert.types import arrow_type
from statelog.errors import ProcessorError
from statelog.numbers import US_PER_MS
from statelog.operators.event_time import EventTime
from statelog.operators.keyed.column_caller import DueTimers
from statelog.operators.keyed.columns import TimerColumns, ValueColumns
from statelog.operators.keyed.indexing import IndexedRows, Int64s
from statelog.runs.keys import KeyCodec
from statelog.runs.schema import TimeDomain
from statelog.runs.times import NO_TIME_MS, Moment, Ttl, expiries_ms
from statelog.shown import shown_key
from statelog.tables.table import KeyBatch

STATE: Final = "aggregates"
LAST_FIELD: Final = stored_name("", "last_ms")
"""The time of the key's newest row; it precedes the accumulators' fields where the end of the key depends on it."""


@dataclass(frozen=True)
class Completion:
    """When a key is complete: it is forgotten then, and returned if it was not returned before."""

    ttl: Ttl | None = None
    """A time after its last row."""
    key_time: int | None = None
    """When the watermark passes the time in this grouping column, by its position in the key."""
    is_append: bool = False
    """Whether a key is returned when it is complete; otherwise with each change."""

    @property
    def has_timers(self) -> bool:
        """Whether timers complete keys; otherwise the state expires, or stays."""
        return self.key_time is not None or (self.is_append and self.ttl is not None)

    @property
    def stores_last(self) -> bool:
        """Whether the state holds the time of the key's newest row: a late row does not shorten the key's life."""
        return self.ttl is not None and (self.is_append or self.ttl.domain is TimeDomain.EVENT)


class KeyedAggregates:
    """Keeps the accumulators of each key in one row of a value state.

    `keys` are the grouping columns of the input. If it `takes_partials`, the input is that of
    :class:`statelog.aggregates.build.PartialAggregates`, whose last columns are the accumulators.
    """

    def __init__(
        self,
        reduction: Reduction,
        key_schema: pa.Schema,
        keys: Sequence[int],
        completion: Completion,
        codecs: ColumnCodecs,
        *,
        takes_partials: bool,
    ) -> None:
        self.codecs = codecs
        self._reduction = reduction
        self._key_schema = key_schema
        self._keys = keys
        self._completion = completion
        self._takes_partials = takes_partials
        self._output = pa.schema(
            [
                *key_schema,
                *[(field.name, arrow_type(field.dataType, "an aggregate")) for field in reduction.result],
            ]
        )

    def init(self, handle: Any) -> None:
        """Declare the state."""
        completion = self._completion
        last = [StructField(LAST_FIELD, LongType())] if completion.stores_last else []
        schema = StructType([*last, *self._reduction.schema.fields])
        self._state: ValueColumns = handle.getValueState(
            STATE, schema, None if completion.has_timers else completion.ttl
        )
        self._timers: TimerColumns = handle.timers
        self._key_codec = KeyCodec(self._key_schema)

    def reduce(self, rows: IndexedRows) -> IndexedRows:
        """The keys and accumulators of each key's rows."""
        groups_before, parts = 0, []
        for batch in rows.rows:
            index = rows.key_index[groups_before : groups_before + batch.num_rows]
            groups_before += batch.num_rows
            with key_named(self._key_of(rows.keys)):
                parts.append(self._reduction.reduce(self._lifted(batch), Groups(index, len(rows.keys))))
        held = parts[0] if len(parts) == 1 else self._merged(parts, rows.keys)
        reduced = pa.RecordBatch.from_arrays(
            [*self._keys_of(rows), *held], names=[f"{index}" for index in range(len(self._key_schema) + len(held))]
        )
        own = np.arange(len(rows.keys))
        return replace(rows, rows=[reduced], key_index=own, firsts=own)

    def process(self, chunk: IndexedRows, moment: Moment) -> Iterator[pa.RecordBatch]:
        """Merge a row of accumulators per key with the state."""
        (rows,) = chunk.rows
        width = len(self._key_schema)
        stored, has = self._state.read()
        held = rows.columns[width:]
        known = np.flatnonzero(has)
        if len(known):
            first = 1 if self._completion.stores_last else 0
            picked = pa.array(known)
            before = [column.take(picked) for column in stored[first:]]
            held = self._merged([before, held], chunk.keys, [known, np.arange(len(has))])
        last = self._last(chunk, moment, stored)
        self._state.write(held if last is None else [pa.array(last), *held])
        if self._completion.has_timers:
            self._register(rows.columns[:width], ~has, last)
        elif last is not None:
            self._state.count_ttl_from(last)
        if not self._completion.is_append:
            yield self._returned(chunk.keys, rows.columns[:width], held)

    def fire(self, due: DueTimers, moment: Moment) -> Iterator[pa.RecordBatch]:
        """Return and forget the keys that are complete; others have had rows since their timer was set."""
        stored, has = self._state.read()
        is_over = has.copy()
        completion = self._completion
        if completion.stores_last:
            assert completion.ttl is not None
            ends_ms = expiries_ms(completion.ttl, stored[0].fill_null(NO_TIME_MS).to_numpy())
            waits = has & (ends_ms > moment.now_ms(completion.ttl.domain))
            self._timers.register(np.flatnonzero(waits), ends_ms[waits])
            is_over &= ~waits
        over = np.flatnonzero(is_over)
        self._state.clear(over)
        if completion.is_append and len(over):
            picked = pa.array(over)
            keys = KeyBatch(due.keys.hashes[over], due.keys.keys.take(picked))
            first = 1 if completion.stores_last else 0
            held = [column.take(picked) for column in stored[first:]]
            yield self._returned(keys, self._key_codec.decode_columns(keys.keys), held)

    def load_initial_state(self, chunk: IndexedRows, moment: Moment) -> Iterable[pa.RecordBatch]:
        raise AssertionError("aggregates take no initial rows")

    def close(self) -> None:
        """End the batch."""

    # ---- Parts ----

    @cached_property
    def _types(self) -> list[pa.DataType]:
        return held_types(self._reduction.schema)

    def _lifted(self, rows: pa.RecordBatch) -> Columns:
        if self._takes_partials:
            return in_types(rows.columns[-len(self._types) :], self._types)
        return self._reduction.lift(rows, pa.array(np.zeros(rows.num_rows, np.int64)))

    def _keys_of(self, rows: IndexedRows) -> Columns:
        """The grouping columns of the keys; as in Spark, zeros have no sign there, and NaNs are one."""
        if any(_has_floats(field.type) for field in self._key_schema):
            return self._key_codec.decode_columns(rows.keys.keys)
        columns = rows.first_of_keys(self._keys)
        return [column.cast(field.type) for column, field in zip(columns, self._key_schema, strict=True)]

    def _merged(self, parts: Sequence[Columns], keys: KeyBatch, owners: Sequence[Int64s] | None = None) -> Columns:
        """Merge accumulators of keys, the earlier ones first; `owners` has the key of each row."""
        index = [np.arange(len(keys))] * len(parts) if owners is None else owners
        held = [pa.concat_arrays(list(columns)) for columns in zip(*parts, strict=True)]
        with key_named(self._key_of(keys)):
            return self._reduction.reduce(held, Groups(np.concatenate(index), len(keys)))

    def _last(self, chunk: IndexedRows, moment: Moment, stored: Columns) -> Int64s | None:
        """The time of each key's newest row, by the clock of its TTL; None if the state does not hold it."""
        ttl = self._completion.ttl
        if not self._completion.stores_last or ttl is None:
            return None
        last: Int64s = stored[0].fill_null(NO_TIME_MS).to_numpy()
        if self._completion.has_timers:
            last = np.maximum(last, moment.now_ms(ttl.domain))
        if chunk.newest_ms is not None and ttl.domain is TimeDomain.EVENT:
            last = np.maximum(last, chunk.newest_ms)
        return last

    def _register(self, keys: Columns, is_new: npt.NDArray[np.bool_], last: Int64s | None) -> None:
        completion = self._completion
        if last is not None:
            assert completion.ttl is not None
            self._timers.register(np.flatnonzero(is_new), expiries_ms(completion.ttl, last[is_new]))
            return
        assert completion.key_time is not None
        rows = pa.RecordBatch.from_arrays(keys, schema=self._key_schema)
        times_us = EventTime(completion.key_time).times_us(rows)
        has_time = times_us.is_valid().to_numpy(zero_copy_only=False)
        ends_ms = -(-times_us.fill_null(0).to_numpy() // US_PER_MS)
        wanted = is_new & has_time
        self._timers.register(np.flatnonzero(wanted), ends_ms[wanted])

    def _returned(self, keys: KeyBatch, columns: Columns, held: Columns) -> pa.RecordBatch:
        """The output of keys, from their columns and accumulators."""
        with key_named(self._key_of(keys)):
            results = self._reduction.results(held)
        if results.owners is not None:
            owners = pa.array(results.owners)
            columns = [column.take(owners) for column in columns]
        return pa.RecordBatch.from_arrays([*columns, *results.columns], schema=self._output)

    def _key_of(self, keys: KeyBatch) -> Callable[[int], tuple[Any, ...]]:
        return lambda position: self._key_codec.decode(keys.keys[position].as_py())


@contextmanager
def key_named(key_of: Callable[[int], tuple[Any, ...]]) -> Iterator[None]:
    """Name the key in errors of groups, given the key of a group."""
    try:
        yield
    except (Overflow, ListTooLarge) as error:
        key = shown_key(key_of(error.group))
        raise ProcessorError(f"key {key}: {error.message}.", kind=error.kind, hint=error.hint) from error


def _has_floats(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or any(_has_floats(kind.field(index).type) for index in range(kind.num_fields))
