"""Count windows: a fixed number of rows each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from statelog.convert.codecs import ProcessorCodecs
from statelog.history.window_settings import COUNT_FIELD, COUNT_STATE
from statelog.windows.accumulators import Contents
from statelog.windows.operator import Clock, WindowOperator, schema_behind
from statelog.windows.panes import RowGroup

Row = tuple[Any, ...]


class CountWindowOperator(WindowOperator):
    """Stores the accumulator of the key's current window, and the number of its rows."""

    def __init__(self, size: int, contents: Contents, clock: Clock, codecs: ProcessorCodecs) -> None:
        super().__init__(contents, clock, codecs)
        self._size = size
        self._schema = schema_behind(COUNT_FIELD, contents.schema)

    def init(self, handle: Any) -> None:
        self._current = handle.getValueState(COUNT_STATE, self._schema)
        super().init(handle)

    def handleInputRows(self, key: Row, rows: Iterator[RowGroup], timerValues: Any) -> Iterator[Any]:
        context = self.times(timerValues).context
        for group in rows:
            stored = self._current.get()
            count, held = (0, None) if stored is None else (stored[0], tuple(stored[1:]))
            done = 0
            while count + len(group) - done >= self._size:
                # An earlier start with larger windows may have left one with as many rows: the next row completes it.
                taken = max(self._size - count, 1)
                held = self._contents.added(group.part(done, done + taken), held)
                yield from self._contents.results(key, None, held, context)
                self._contents.clear()
                done, count, held = done + taken, 0, None
            if done < len(group):
                held = self._contents.added(group.part(done, len(group)), held)
                self._current.update((count + len(group) - done, *held))
            elif done:
                self._current.clear()
