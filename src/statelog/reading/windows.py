"""Windows as rows, computed from the stored panes, sessions and counts, without the query's functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from statelog.aggregates.groups import Groups
from statelog.aggregates.kernels import Columns, Overflow
from statelog.aggregates.list_kernels import ListTooLarge
from statelog.aggregates.stored_aggregates import StoredAggregates
from statelog.convert.state_tables import HASH, first_rows, prefixed
from statelog.errors import ProcessorError
from statelog.history.settings import WindowKind, WindowResults, WindowSettings
from statelog.numbers import US_PER_MS
from statelog.operators.keyed.indexing import Int64s
from statelog.operators.keyed.time_columns import TimeRows
from statelog.operators.keyed.time_reader import entry_numbers
from statelog.reading.point import Point
from statelog.runs.byte_slices import BUDGET
from statelog.runs.keys import KeyCodec
from statelog.runs.schema import VALUE_COLUMN, StateSchema, decode_schema
from statelog.windows.pane_columns import PaneMerge, Panes

WINDOWS: Final = "windows"
"""The name under which users read the open windows of an operator."""
PANES: Final = "panes"
"""The name of their panes, if only functions of the query can compute windows from them."""
_ROWS: Final = "rows"
_COMPLETE: Final = "is_complete"
_FAR_MS: Final = 1 << 61
"""Beyond all times of rows; sums of a few such times stay within 64 bits."""


class WindowColumns:
    """Makes rows of open windows from the entries of the state `stored`, which has their accumulators.

    `aggregates` merge accumulators and compute values from them; without any, the fields of the accumulator are the
    values.
    """

    def __init__(
        self,
        source: Point,
        stored: StateSchema,
        settings: WindowSettings,
        aggregates: StoredAggregates | None,
        max_bytes: int,
    ) -> None:
        self.stored = stored
        self._source = source
        self._kind = settings.kind
        self._aggregates = aggregates
        self._keys = KeyCodec(decode_schema(source.key_schema))
        self._value_columns = slice(VALUE_COLUMN, VALUE_COLUMN + len(decode_schema(stored.value_schema)))
        now_ms = closed_ms = source.batch_time_ms
        if settings.is_event_time:
            now_ms = source.watermark_ms
            closed_ms = max(now_ms - settings.lateness_ms, settings.closed_ms)
        self._now_ms, self._closed_ms = (max(-_FAR_MS, min(at_ms, _FAR_MS)) for at_ms in (now_ms, closed_ms))
        self._grid = None if settings.grid is None else Panes(*settings.grid)
        is_merged = self._grid is not None and not self._grid.are_windows
        self._has_values = settings.results is not WindowResults.PROCESS or self._kind is not WindowKind.COUNTS
        self._merge = None
        if self._grid is not None and is_merged and aggregates is not None:
            self._merge = PaneMerge(self._grid, max_bytes)
        self.name = PANES if is_merged and aggregates is None else WINDOWS
        self.schema = pa.schema(
            [
                pa.field(HASH, pa.int64()),
                *prefixed("key", self._keys.schema),
                *self._bounds_fields(),
                *self._content_fields(settings),
            ]
        )

    def _bounds_fields(self) -> list[pa.Field]:
        if self._kind is WindowKind.COUNTS:
            return [pa.field(_ROWS, pa.int64())]
        part = "pane" if self.name == PANES else "window"
        bounds = [pa.field(f"{part}_{side}", pa.timestamp("us", "UTC")) for side in ("start", "end")]
        return bounds if self.name == PANES else [*bounds, pa.field(_COMPLETE, pa.bool_())]

    def _content_fields(self, settings: WindowSettings) -> list[pa.Field]:
        if not self._has_values:
            return []
        if settings.results is WindowResults.PROCESS:
            return [pa.field(_ROWS, pa.int64())]
        held = accumulator_of(self.stored, settings.kind)
        return prefixed("value", held if self._aggregates is None else self._aggregates.result)

    def rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of windows from puts in run order; those of a key may continue in the next batch."""
        if self._merge is not None:
            yield from self._of_panes(self._merge, batches)
            return
        for changes in batches:
            held: Columns = changes.columns[self._value_columns]
            if self._kind is WindowKind.COUNTS:
                yield self._made(changes, held[:1], held[1:] if self._has_values else [])
            else:
                yield self._of_entries(changes, held)

    def _of_entries(self, changes: pa.RecordBatch, held: Columns) -> pa.RecordBatch:
        """A row of each entry that is a window, or a pane."""
        starts = _starts(changes)
        if self._grid is None:
            ends, held = held[0].to_numpy(), held[1:]
            is_open = ends > self._closed_ms
        else:
            ends = starts + self._grid.width_ms
            is_open = self._grid.last_end_of(starts) > self._closed_ms
        if not is_open.all():
            mask = pa.array(is_open)
            changes, starts, ends = changes.filter(mask), starts[is_open], ends[is_open]
            held = [column.filter(mask) for column in held]
        return self._made(changes, self._bounds(starts, ends), held)

    def _bounds(self, starts: Int64s, ends: Int64s) -> Columns:
        bounds = [pa.array(at_ms * US_PER_MS).cast(pa.timestamp("us", "UTC")) for at_ms in (starts, ends)]
        return bounds if self.name == PANES else [*bounds, pa.array(ends <= self._now_ms)]

    def _made(self, owners: pa.RecordBatch, bounds: Sequence[pa.Array], held: Columns) -> pa.RecordBatch:
        """Rows of the keys of changes."""
        values = held if self._aggregates is None else self._aggregates.results(held)
        columns = [owners.column(0).view(pa.int64()), *self._keys.decode_columns(owners.column(1)), *bounds, *values]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    # ---- Overlapping windows ----

    def _of_panes(self, merge: PaneMerge, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Windows that are put together from panes; the last panes of a key wait for those in the next batch."""
        waiting: pa.RecordBatch | None = None
        first_ms = self._closed_ms + 1
        for changes in batches:
            if not changes.num_rows:
                continue
            if waiting is not None:
                changes = pa.concat_batches([waiting, changes])
            last = int(np.flatnonzero(first_rows(changes))[-1])
            yield from self._windows(merge, changes.slice(0, last), first_ms, _FAR_MS)
            if last:
                first_ms = self._closed_ms + 1
            open_ones = changes.slice(last)
            starts = _starts(open_ones)
            known_ms = int(starts[-1]) + 1
            yield from self._windows(merge, open_ones, first_ms, known_ms)
            waiting = open_ones.filter(pa.array(starts > known_ms - merge.grid.size_ms))
            first_ms = max(first_ms, known_ms + 1)
        if waiting is not None:
            yield from self._windows(merge, waiting, first_ms, _FAR_MS)

    def _windows(
        self, merge: PaneMerge, changes: pa.RecordBatch, first_ms: int, last_ms: int
    ) -> Iterator[pa.RecordBatch]:
        """The windows that end up to a time: of the first key from `first_ms` on, of others those that are open."""
        if not changes.num_rows:
            return
        is_first = first_rows(changes)
        firsts, owners = np.flatnonzero(is_first), np.cumsum(is_first) - 1
        panes = TimeRows(owners, _starts(changes), changes.columns[self._value_columns])

        def reduce(held: Columns, groups: Groups, of: Int64s) -> Columns:
            assert self._aggregates is not None
            try:
                return self._aggregates.reduce(held, groups)
            except (Overflow, ListTooLarge) as error:
                key = self._keys.decode(changes.column(1)[int(firsts[of[error.group]])].as_py())
                raise ProcessorError(
                    f"A window of key {key!r} of {self._source.name} cannot be computed: {error.message}.",
                    kind=error.kind,
                    hint=f"Read the state '{self.stored.name}', which has the parts of the windows.",
                ) from error

        from_ms = np.full(len(owners), self._closed_ms + 1)
        from_ms[owners == 0] = first_ms
        for windows in merge.windows(panes, panes, from_ms, last_ms):
            held = merge.merged(panes, windows, reduce)
            bounds = self._bounds(windows.ends_ms - merge.grid.size_ms, windows.ends_ms)
            yield self._made(changes.take(pa.array(firsts[windows.owners])), bounds, held)


def window_columns(source: Point, max_bytes: int = BUDGET.slice_bytes) -> WindowColumns | None:
    """Makes the rows of an operator's windows; None if it has none, or if its settings do not describe them.

    About `max_bytes` of accumulators are merged at once.
    """
    settings = WindowSettings.of(source.settings)
    stored = None if settings is None else next((s for s in source.states if s.name == settings.kind.state), None)
    if settings is None or stored is None:
        return None
    described: Mapping[str, str] | None = None
    if settings.results is WindowResults.AGG:
        described = settings.aggregates
    elif settings.results is WindowResults.PROCESS and settings.kind is not WindowKind.COUNTS:
        described = {_ROWS: "count"}
    aggregates = None
    if described is not None:
        aggregates = StoredAggregates.of(described, accumulator_of(stored, settings.kind), settings.value_details)
        if aggregates is None:
            return None
    return WindowColumns(source, stored, settings, aggregates, max_bytes)


def accumulator_of(stored: StateSchema, kind: WindowKind) -> pa.Schema:
    """The fields of a window's accumulator; those of sessions and count windows come after another field."""
    fields = list(decode_schema(stored.value_schema))
    return pa.schema(fields if kind is WindowKind.OF_TIME else fields[1:])


def _starts(changes: pa.RecordBatch) -> Int64s:
    """The start of each pane or session."""
    (starts,) = entry_numbers(pa.chunked_array([changes.column(2)]), 1)
    return starts
