"""Takes the rows that a processor yields, as they are at that moment, and encodes them in chunks of bounded size."""

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
"""Most rows that are Python objects at once; encoding more of them together is not faster."""
_PART_OF_CHUNK: Final = 4
_CHUNK_ROWS: Final = 65_536
"""A chunk of small rows ends here, before it has many bytes, so that its reader has something to do."""
_COLLECTION_THRESHOLD: Final = 100_000
_NOT_ITERABLE: Final = re.compile(r"^'(\w+)' object is not iterable$")
_HOW_TO_RETURN: Final = (
    "Yield it, or return a list: each element of what is returned becomes a row, even of a Row, a tuple, a dict, a"
    " string or a frame."
)


class NoRow(ProcessorError):
    """A returned value cannot be a row; at most it is part of one, such as a text or a number."""

    default_kind = ErrorKind.OUTPUT_MISMATCH


class Outputs:
    """The output rows of a subtask.

    The order of calls is :meth:`begin` with calls of the processor, then in turn :meth:`take`, which makes these calls,
    and :meth:`encoded`, until there are no more rows. Between two calls of :meth:`take`, the processor is suspended.
    """

    def __init__(self, codec: OutputCodec, budget: Budget) -> None:
        self.taken: list[Any] = []
        """Rows that are not encoded yet."""
        self.starts: list[int] = []
        """How many of these rows there were when each call began.

        The caller of the processor appends ``len(taken)`` at each call. It is correct even during :meth:`take`,
        because CPython's ``list.extend`` shows the list as it grows.
        """
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
        """Start on calls of one method of the processor; `name_of` names the i-th call, for messages."""
        self.end()
        self._method = method
        rows = chain.from_iterable(calls)
        self._rows = rows if self._codec.hold is None else map(self._codec.hold, rows)
        self._name_of = name_of

    def end(self) -> None:
        """Drop the rows that are left, which closes the processor's generators."""
        self._rows = iter(())
        self.taken.clear()
        self.starts.clear()
        self._calls_before = 0

    def take(self) -> bool:
        """Take some rows; returns whether there may be more.

        Errors of the processor pass through; raises NoRow if a call returned something that is not iterable.
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
        """Encode the rows taken so far; returns them once they make a chunk, or `is_last` is set.

        With `is_last` there is at least one batch, if need be without rows. Raises ProcessorError if a row does not fit
        the output's types.
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
            self.taken.clear()
            if self.starts:  # the call that yielded the last of these rows may yield more
                self._calls_before += len(self.starts) - 1
                self.starts[:] = [0]
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


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect reference cycles less often, in the whole process; so nothing may be yielded inside.

    A key chunk makes several objects per row, which the collector would visit again and again: with Python's own
    thresholds it took a third of the time of a batch.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(max(thresholds[0], _COLLECTION_THRESHOLD), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
