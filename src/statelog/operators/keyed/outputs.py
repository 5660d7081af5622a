"""What a processor yields: taken as it is at that moment, encoded in chunks of bounded size."""

from __future__ import annotations

import gc
import inspect
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, Final

import pyarrow as pa

from statelog.errors import ErrorKind, ProcessorError
from statelog.operators.keyed.operator import OutputCodec
from statelog.runs.byte_slices import Budget, Pace, RowsTooLarge, cut_rows, in_parts, join_rows

_FIRST_ROWS: Final = 64
_MOST_ROWS: Final = 4096
"""Rows that are objects at once; encoding more of them together is not faster."""
_PART_OF_CHUNK: Final = 4
_CHUNK_ROWS: Final = 65_536
"""Of small rows a chunk is given on before it is large, so that who reads it has something to do."""
_COLLECTION_THRESHOLD: Final = 100_000
_NOT_ITERABLE: Final = re.compile(r"^'(\w+)' object is not iterable$")
_HOW_TO_RETURN: Final = (
    "Yield it, or return a list: each part of what is returned is taken for a row, also of a Row, a tuple, a dict, a"
    " text or a frame."
)


class NoRow(ProcessorError):
    """What was to be an output row is a part of one at most, such as a text or a number."""

    default_kind = ErrorKind.OUTPUT_MISMATCH


class Outputs:
    """The output rows of a subtask.

    The order of calls is :meth:`begin` for some calls of the processor, then in turn :meth:`take`, which makes them,
    and :meth:`encoded`, until there are no more rows. In between nothing of the processor runs.

    Parameters
    ----------
    codec : OutputCodec
        Makes columns of the rows.
    budget : Budget
        How large a chunk is.

    Attributes
    ----------
    taken : list
        Rows that are not encoded yet.
    starts : list of int
        How many of these there were when each call began; who makes the calls appends ``len(taken)``. The list grows
        while rows are taken, as CPython's ``list.extend`` lets it be seen.
    """

    def __init__(self, codec: OutputCodec, budget: Budget) -> None:
        self.taken: list[Any] = []
        self.starts: list[int] = []
        self._codec = codec
        self._max_bytes = budget.slice_bytes
        self._pace = Pace(budget.slice_bytes // _PART_OF_CHUNK, _FIRST_ROWS, _MOST_ROWS)
        self._calls_before = 0
        self._ready: list[pa.RecordBatch] = []
        self._ready_bytes = self._ready_rows = 0
        self._rows: Iterator[Any] = iter(())
        self._name_of: Callable[[int], str] = str
        self._method: Callable[..., Any] = str

    def begin(self, calls: Iterable[Iterable[Any]], name_of: Callable[[int], str], method: Callable[..., Any]) -> None:
        """Start on calls of a method of the processor; `name_of` names the i-th of them, for messages."""
        self.end()
        self._method = method
        rows = chain.from_iterable(calls)
        self._rows = rows if self._codec.hold is None else map(self._codec.hold, rows)
        self._name_of = name_of

    def end(self) -> None:
        """Give up the rows that are left: generators of the processor are closed."""
        self._rows = iter(())
        self.taken.clear()
        self.starts.clear()
        self._calls_before = 0

    def take(self) -> bool:
        """Take some rows; whether there may be more. What the processor raises is not caught.

        Raises
        ------
        ProcessorError
            If a call returned nothing that rows can be taken from.
        """
        room = self._pace.rows
        try:
            self.taken.extend(islice(self._rows, room))
        except TypeError as error:
            refused = _NOT_ITERABLE.match(str(error))
            if refused is None or error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # the processor's own
            returned = "None" if refused[1] == "NoneType" else f"a value of type {refused[1]}"
            raise NoRow(
                f"it returned {returned}, not rows.",
                hint="Yield rows, or return a list of them, empty if there are none.",
            ) from error
        return len(self.taken) == room

    def encoded(self, *, is_last: bool) -> list[pa.RecordBatch]:
        """Encode the rows that were taken, and give on what has become a chunk; the last time all of them.

        The last time there is a batch also if there are no rows.

        Raises
        ------
        ProcessorError
            If a row does not fit the output's types.
        """
        count = len(self.taken)
        if count or (is_last and not self._ready):
            size_bytes = 0
            for part in in_parts(count, self._encode, self._max_bytes):
                size_bytes += part.nbytes
                self._ready.extend(cut_rows(part, self._max_bytes))
            self._pace.learn(count, size_bytes)
            self._ready_bytes += size_bytes
            self._ready_rows += count
            self._start_over()
        if not is_last and self._ready_bytes < self._max_bytes and self._ready_rows < _CHUNK_ROWS:
            return []
        ready, self._ready = self._ready, []
        self._ready_bytes = self._ready_rows = 0
        return list(join_rows(ready, self._max_bytes))

    def _encode(self, start: int, end: int) -> pa.RecordBatch:
        try:
            return self._codec.encode(self.taken[start:end], lambda row: self._caller(start + row))
        except NoRow as error:
            if inspect.isgeneratorfunction(self._method):
                raise
            raise NoRow(error.message, hint=_HOW_TO_RETURN) from error
        except RowsTooLarge as error:
            if end - start > 1:
                raise
            raise ProcessorError(
                f"{self._caller(start)} returned a row or frame that does not fit into a column: {error}.",
                kind=ErrorKind.TOO_LARGE,
                hint="Return several smaller ones.",
            ) from error

    def _caller(self, row: int) -> str:
        return self._name_of(self._calls_before + bisect_right(self.starts, row) - 1)

    def _start_over(self) -> None:
        """The rows are encoded, and the call that runs goes on."""
        self.taken.clear()
        if self.starts:
            self._calls_before += len(self.starts) - 1
            self.starts[:] = [0]


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Look for reference cycles less often, in the whole process: nothing may be yielded inside.

    A window makes several objects per row, which the collector would visit again and again: with Python's own
    thresholds it took a third of the time of a batch.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(max(thresholds[0], _COLLECTION_THRESHOLD), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
