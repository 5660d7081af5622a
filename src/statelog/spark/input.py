"""Input rows as the processor gets them: Spark rows, or pandas frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statelog.spark.python_values import row_maker
from statelog.state.grouping import Window

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FrameInput", "RowInput"]

_CHUNK_ROWS: Final = 10_000
_CHUNK_BYTES: Final = 16 << 20
"""Of the rows of one key, how many become objects at once."""


class RowInput:
    """Rows as Spark's ``transformWithState`` gives them.

    Parameters
    ----------
    columns : list of str
        Names of the columns.
    """

    def __init__(self, columns: list[str]) -> None:
        self._make = row_maker(columns)

    def keys(self, columns: list[pa.Array]) -> list[tuple[Any, ...]]:
        return list(zip(*(column.to_pylist() for column in columns), strict=True))

    def by_key(self, window: Window) -> list[Iterator[Any]]:
        if len(window.keys) == 1:
            return [(row for chunk in window.chunks(_CHUNK_ROWS, _CHUNK_BYTES) for row in self.rows(chunk))]
        rows = self.rows(window.rows)
        return [iter(rows[start:end]) for start, end in pairwise(window.starts.tolist())]

    def rows(self, rows: pa.RecordBatch) -> list[Any]:
        """The rows of columns."""
        return self._make([column.to_pylist() for column in rows.columns])


class FrameInput:
    """Frames as Spark's ``transformWithStateInPandas`` gives them: all columns, with an index from 0.

    Parameters
    ----------
    columns : list of str
        Names of the columns.
    max_rows : int
        Rows per frame; 0 or less is no limit. Spark's spark.sql.execution.arrow.maxRecordsPerBatch.
    max_bytes : int
        Bytes per frame, about. Spark's spark.sql.execution.arrow.maxBytesPerBatch.
    """

    def __init__(self, columns: list[str], max_rows: int, max_bytes: int) -> None:
        self._columns = columns
        self._max_rows = max_rows if max_rows > 0 else 1 << 31
        self._max_bytes = max_bytes

    def keys(self, columns: list[pa.Array]) -> list[tuple[Any, ...]]:
        return list(zip(*(_as_pandas(column).to_pylist() for column in columns), strict=True))

    def by_key(self, window: Window) -> Iterator[Iterator[pd.DataFrame]]:
        rows = window.rows
        limit = self._max_rows
        if rows.nbytes > self._max_bytes:
            limit = max(1, min(limit, rows.num_rows * self._max_bytes // rows.nbytes))
        if len(window.keys) == 1 and (rows.num_rows > limit or window.more):
            yield (self._frame(chunk) for chunk in window.chunks(limit, self._max_bytes))
            return
        owners = np.repeat(np.arange(len(window.keys)), np.diff(window.starts))
        # Going through groups takes a third of the time of cutting out and copying a frame for every key. They are
        # views of a copy that nothing else reads, so the processor may change them.
        for _, frame in self._frame(rows).groupby(owners, sort=False):
            yield _frames(frame, limit)

    def _frame(self, rows: pa.RecordBatch) -> pd.DataFrame:
        columns = [_as_pandas(column) for column in rows.columns]
        frame: pd.DataFrame = pa.RecordBatch.from_arrays(columns, names=self._columns).to_pandas(
            date_as_object=True, maps_as_pydicts="strict"
        )
        for name, column in zip(self._columns, columns, strict=True):
            if pa.types.is_struct(column.type):
                # PyArrow makes floats of a struct's integers where one of them is null.
                frame[name] = np.fromiter(column.to_pylist(maps_as_pydicts="strict"), object, len(column))
        return frame


def _frames(frame: pd.DataFrame, limit: int) -> Iterator[pd.DataFrame]:
    from pandas import RangeIndex

    if len(frame) <= limit:
        frame.index = RangeIndex(len(frame))
        yield frame
        return
    for first in range(0, len(frame), limit):
        yield frame.iloc[first : first + limit].reset_index(drop=True)


_WIDENED: Final[list[tuple[Callable[[pa.DataType], bool], pa.DataType]]] = [
    (pa.types.is_integer, pa.int64()),
    (pa.types.is_floating, pa.float64()),
]


def _as_pandas(column: pa.Array) -> pa.Array:
    """A column of the types that Spark's frames have: wide numbers, and times of day without a zone."""
    kind = column.type
    for is_kind, wide in _WIDENED:
        if is_kind(kind):
            return column if kind == wide else column.cast(wide)
    if pa.types.is_timestamp(kind):
        local = column if kind.tz is None else pc.local_timestamp(column)
        return local.cast(pa.timestamp("ns"))
    return column
