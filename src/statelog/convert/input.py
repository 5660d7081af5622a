"""Makes a processor's keys and rows from columns: Spark rows, or pandas frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.types import VariantVal

from statelog.convert.python_values import row_maker
from statelog.errors import ErrorKind, ProcessorError
from statelog.operators.keyed.grouping import KeyChunk
from statelog.runs.column_values import ColumnValues, MapsAsDicts
from statelog.time_zones import local_clock

if TYPE_CHECKING:
    import pandas as pd

_CHUNK_ROWS: Final = 10_000
_CHUNK_BYTES: Final = 16 << 20
"""The rows of one key become Python objects in chunks of this size at most."""
_VALUES: Final = ColumnValues()
_WITH_DICTS: Final = MapsAsDicts()


class RowInput:
    """Rows as Spark's ``transformWithState`` gives them."""

    def __init__(self, columns: list[str]) -> None:
        self._make = row_maker(columns)

    def keys(self, columns: list[pa.Array]) -> list[tuple[Any, ...]]:
        return list(zip(*map(_VALUES.of, columns), strict=True))

    def by_key(self, window: KeyChunk) -> list[Iterator[Any]]:
        if len(window.keys) == 1:
            return [(row for chunk in window.chunks(_CHUNK_ROWS, _CHUNK_BYTES) for row in self.rows(chunk))]
        rows = self.rows(window.rows)
        return [iter(rows[start:end]) for start, end in pairwise(window.starts.tolist())]

    def rows(self, rows: pa.RecordBatch) -> list[Any]:
        """A Row for each row of the columns."""
        return self._make(list(map(_VALUES.of, rows.columns)))


class FrameInput:
    """Frames as Spark's ``transformWithStateInPandas`` gives them: all columns, with an index from 0.

    The limits are those of :class:`statelog.convert.codecs.FrameCodecs`.
    """

    def __init__(self, columns: list[str], max_rows: int, max_bytes: int, *, keeps_integers: bool = False) -> None:
        self._columns = columns
        self._max_rows = max_rows if max_rows > 0 else 1 << 31
        self._max_bytes = max_bytes
        self._keeps_integers = keeps_integers

    def keys(self, columns: list[pa.Array]) -> list[tuple[Any, ...]]:
        return list(zip(*(_key_values(column, "a grouping column") for column in columns), strict=True))

    def by_key(self, window: KeyChunk) -> Iterator[Iterator[pd.DataFrame]]:
        rows = window.rows
        limit = self._max_rows
        if rows.nbytes > self._max_bytes:
            limit = max(1, min(limit, rows.num_rows * self._max_bytes // rows.nbytes))
        if len(window.keys) == 1 and (rows.num_rows > limit or window.more):
            return iter([(self._frame(chunk) for chunk in window.chunks(limit, self._max_bytes))])
        objects = self._objects_for_nulls(rows)
        # The parts are views of a copy that nothing else reads, so the processor may change them.
        parts = _parts(self._frame(rows).copy(), window.starts.tolist())
        return (_frames(_narrowed(frame, objects) if objects else frame, limit) for frame in parts)

    def _frame(self, rows: pa.RecordBatch) -> pd.DataFrame:
        columns = [
            _plain(column, f"column '{name}'", keeps_integers=self._keeps_integers)
            for name, column in zip(self._columns, rows.columns, strict=True)
        ]
        frame: pd.DataFrame = pa.RecordBatch.from_arrays(columns, names=self._columns).to_pandas(date_as_object=True)
        for name, column in zip(self._columns, rows.columns, strict=True):
            if pa.types.is_nested(column.type):
                frame[name] = _objects(column)
            elif column.null_count and self._stays_whole(column):
                frame[name] = _object_integers(column)
        return frame

    def _objects_for_nulls(self, rows: pa.RecordBatch) -> dict[str, Any]:
        """The columns that hold objects because they have a null, with the NumPy type that they have without one."""
        return {
            name: column.type.to_pandas_dtype()
            for name, column in zip(self._columns, rows.columns, strict=True)
            if column.null_count and (pa.types.is_boolean(column.type) or self._stays_whole(column))
        }

    def _stays_whole(self, column: pa.Array) -> bool:
        return self._keeps_integers and bool(pa.types.is_integer(column.type))


def _narrowed(frame: pd.DataFrame, objects: dict[str, Any]) -> pd.DataFrame:
    """A key's frame; a column gets its NumPy type back if the nulls are all in the frames of other keys."""
    whole = {name: kind for name, kind in objects.items() if not frame[name].isna().any()}
    return frame.astype(whole) if whole else frame


def _parts(frame: Any, starts: list[int]) -> Iterator[pd.DataFrame]:
    """Cut a frame into views, each with an index from 0, by the way of pandas' own groups but in half their time."""
    from pandas import RangeIndex

    manager = frame._mgr
    indexes: dict[int, Any] = {}
    for start, end in pairwise(starts):
        part = manager.get_slice(slice(start, end), axis=1)
        index = indexes.get(end - start)
        if index is None:
            index = indexes[end - start] = RangeIndex(end - start)
        part.axes[1] = index.view()  # of each frame's own, because an index can be given a name
        yield frame._constructor_from_mgr(part, axes=part.axes)


def _frames(frame: pd.DataFrame, limit: int) -> Iterator[pd.DataFrame]:
    if len(frame) <= limit:
        return iter((frame,))
    return (frame.iloc[first : first + limit].reset_index(drop=True) for first in range(0, len(frame), limit))


_WIDENED: Final[list[tuple[Callable[[pa.DataType], bool], pa.DataType]]] = [
    (pa.types.is_integer, pa.int64()),
    (pa.types.is_floating, pa.float64()),
    (pa.types.is_duration, pa.duration("ns")),
    (pa.types.is_timestamp, pa.timestamp("ns")),
]


def _plain(column: pa.Array, subject: str, *, keeps_integers: bool = False) -> pa.Array:
    """A column in the types of Spark's frames: wide numbers, and local times without a zone.

    Raises ProcessorError, with `subject` as the column, for a time beyond the range of nanoseconds.
    """
    kind = column.type
    if pa.types.is_nested(kind):
        return pa.nulls(len(column))
    if keeps_integers and pa.types.is_integer(kind):
        return pa.nulls(len(column)) if column.null_count else column
    if pa.types.is_timestamp(kind):
        column, kind = local_clock(column) if kind.tz else column, pa.timestamp("us")
    for is_kind, wide in _WIDENED:
        if is_kind(kind) and kind != wide:
            try:
                return column.cast(wide)
            except pa.ArrowInvalid as error:
                raise ProcessorError(
                    f"{subject} has a time beyond pandas' nanoseconds, which range from 1677 to 2262: {error}.",
                    kind=ErrorKind.VALUE_MISMATCH,
                    hint="Use transformWithState, which takes rows, or filter out such rows.",
                ) from error
    return column


def _key_values(column: pa.Array, subject: str) -> list[Any]:
    if not pa.types.is_nested(column.type):
        return _VALUES.of(_plain(column, subject))
    return list(map(_converter(column.type, is_key=True), _VALUES.of(column)))


def _object_integers(column: pa.Array) -> Any:
    from pandas import NA

    kind = column.type.to_pandas_dtype()
    return np.fromiter((NA if value is None else kind(value) for value in column.to_pylist()), object, len(column))


def _objects(column: pa.Array) -> Any:
    """The values of a nested column as in Spark's frames: dicts, and NumPy arrays."""
    kind = column.type
    if not pa.types.is_struct(kind) and not _has_times(kind):
        return column.to_pandas(date_as_object=True, maps_as_pydicts="strict", integer_object_nulls=True).to_numpy()
    return np.fromiter(map(_converter(kind), _WITH_DICTS.of(column)), object, len(column))


def _has_times(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) or any(_has_times(kind.field(at).type) for at in range(kind.num_fields))


def _converter(kind: pa.DataType, *, is_key: bool = False) -> Callable[[Any], Any]:
    """Conversion of Arrow's values, None included: timestamps become local times, variants Spark's objects."""
    if pa.types.is_timestamp(kind):
        return _local_timestamp
    if pa.types.is_struct(kind):
        if kind.num_fields == 2 and (kind.field(1).metadata or {}).get(b"variant") == b"true":
            return lambda value: None if value is None else VariantVal(value["value"], value["metadata"])
        fields = {field.name: _converter(field.type, is_key=is_key) for field in kind.fields}
        return lambda value: None if value is None else {name: one(value[name]) for name, one in fields.items()}
    if pa.types.is_list(kind):
        of_element = _converter(kind.value_type, is_key=is_key)
        return lambda value: None if value is None else _collected([of_element(one) for one in value], is_key=is_key)
    if pa.types.is_map(kind):
        of_key, of_item = _converter(kind.key_type, is_key=is_key), _converter(kind.item_type, is_key=is_key)
        if is_key:
            return lambda value: None if value is None else [(of_key(key), of_item(item)) for key, item in value]
        return lambda value: None if value is None else {of_key(key): of_item(item) for key, item in value.items()}
    return lambda value: value


def _collected(values: list[Any], *, is_key: bool) -> Any:
    return values if is_key else np.fromiter(values, object, len(values))


def _local_timestamp(value: Any) -> Any:
    from pandas import Timestamp

    return None if value is None else Timestamp(value.replace(tzinfo=None))
