"""Makes columns of the declared output type from a processor's rows or pandas frames."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from statelog.convert.python_values import is_mutable
from statelog.convert.types import field_codecs
from statelog.errors import ConfigurationWarning, ErrorKind, ProcessorError
from statelog.operators.keyed.outputs import NoRow
from statelog.runs.byte_slices import MAX_COLUMN_BYTES, RowsTooLarge
from statelog.runs.values import MISFITS, FieldCodec
from statelog.shown import shown_value
from statelog.time_zones import instants


class _HeldRow(tuple[Any, ...]):
    """The values of an output row in the order of the columns; those of mutable types are in storage types already."""

    __slots__ = ()


class RowOutput:
    """Makes columns from the processor's rows.

    Rows with field names are matched by name: missing fields are null, surplus ones are dropped. Tuples without names
    are matched by position.
    """

    def __init__(self, schema: StructType, uid: str) -> None:
        self._fields = field_codecs(schema, "output column")
        self.schema = pa.schema([(field.name, field.type) for field in self._fields])
        self._names = schema.names
        self._distinct_names = set(schema.names)
        self._warn = _NameWarning(uid, schema.names)
        self._mutable = [place for place, field in enumerate(schema) if is_mutable(field.dataType)]
        self.hold = self._held if self._mutable else None

    def _held(self, row: Any) -> Any:
        """A copy of the row, in order; mutable values are converted, so that nothing is shared with the processor."""
        try:
            is_in_order = getattr(row, "__fields__", None) == self._names
            values = list(row if is_in_order else self._in_order([row], str)[0])
            if len(values) != len(self._fields):
                return row
            for place in self._mutable:
                values[place] = self._fields[place].stored(values[place])
        except (ProcessorError, *MISFITS):
            return row  # encode() raises, and names the key
        return _HeldRow(values)

    def encode(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> pa.RecordBatch:
        if not rows:
            return pa.RecordBatch.from_pylist([], schema=self.schema)
        is_held = set(map(type, rows)) == {_HeldRow}
        columns = self._columns(rows if is_held else self._in_order(rows, owner_of), owner_of)
        arrays = [
            _column(field, values, owner_of, is_stored=is_held and place in self._mutable)
            for place, (field, values) in enumerate(zip(self._fields, columns, strict=True))
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _columns(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> list[tuple[Any, ...]]:
        try:
            columns = list(zip(*rows, strict=True))
        except ValueError:
            columns = []
        if len(columns) == len(self._fields):
            return columns
        index = next(index for index, row in enumerate(rows) if len(row) != len(self._names))
        raise self._misfit(rows[index], owner_of(index))

    def _in_order(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> Sequence[Any]:
        names = self._names
        try:
            if all(row.__fields__ == names for row in rows):
                return rows
        except AttributeError:
            has_no_names = all(map(_is_positional, set(map(type, rows))))
            if has_no_names and set(map(len, rows)) == {len(names)}:
                return rows
        return [self._ordered(row, index, owner_of) for index, row in enumerate(rows)]

    def _ordered(self, row: Any, index: int, owner_of: Callable[[int], str]) -> Any:
        own = getattr(row, "__dict__", {}).get("__fields__") or getattr(type(row), "__fields__", None)
        if own is None:
            if isinstance(row, tuple) and len(row) == len(self._names):
                return row
            raise self._misfit(row, owner_of(index))
        is_exact = set(own) == self._distinct_names
        if not is_exact and self._distinct_names.isdisjoint(own):
            raise self._misfit(row, owner_of(index))
        try:
            values = dict(zip(own, row, strict=True))
        except ValueError as error:
            raise self._misfit(row, owner_of(index)) from error
        if not is_exact:
            self._warn(own)
        return tuple(map(values.get, self._names))

    def _misfit(self, row: Any, owner: str) -> ProcessorError:
        names = f"({', '.join(self._names)})"
        returned = f"{owner} returned {shown_value(row)}, which"
        if not isinstance(row, tuple):
            error = ProcessorError if _is_whole(row) else NoRow
            return error(f"{returned} is not a row.", kind=ErrorKind.OUTPUT_MISMATCH, hint=_way_to_a_row(row, names))
        own: Sequence[str] = getattr(row, "__fields__", ())
        if len(own) == len(row) > 0:
            return ProcessorError(
                f"{returned} has none of the output columns {names}.",
                kind=ErrorKind.OUTPUT_MISMATCH,
                hint="Return Row objects with these names.",
            )
        wanted = f"the output has {_count(self._names, 'column')} {names}"
        return ProcessorError(
            f"{returned} has {_count(row, 'value')}; {wanted}.",
            kind=ErrorKind.OUTPUT_MISMATCH,
            hint="Return a value for each column, in this order, or Row objects with these names.",
        )


@dataclass(slots=True)
class _HeldFrame:
    """Copies of the output columns of a frame."""

    columns: list[Any]
    rows: int

    def __len__(self) -> int:
        return self.rows


class FrameOutput:
    """Makes columns from the processor's pandas frames.

    Named columns are matched by name, numbered ones by position; surplus columns are dropped. Times without a zone are
    in `zone`, the session's.
    """

    def __init__(self, schema: StructType, zone: str, uid: str) -> None:
        self._fields = field_codecs(schema, "output column", nan_is_null=True)
        self.schema = pa.schema([(field.name, field.type) for field in self._fields])
        self._mutable = [place for place, field in enumerate(schema) if is_mutable(field.dataType)]
        self._zone = zone
        self._warn = _NameWarning(uid, schema.names)
        self._names = schema.names
        self._places = list(range(len(schema.names)))

    def hold(self, frame: Any) -> Any:
        try:
            has_rows = self._has_rows(frame, 0, str)
            held = [column.copy() for column in self._columns_of(frame, 0, str)] if has_rows else []
            for place in self._mutable if has_rows else ():
                held[place] = _stored_values(self._fields[place], held[place])
        except (ProcessorError, *MISFITS):
            return frame.copy() if hasattr(frame, "iloc") else frame  # encode() raises, and names the key
        return _HeldFrame(held, len(frame))

    def encode(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> pa.RecordBatch:
        frames = [(index, frame) for index, frame in enumerate(rows) if self._has_rows(frame, index, owner_of)]
        if not frames:
            return pa.RecordBatch.from_pylist([], schema=self.schema)
        parts = [self._columns_of(frame, index, owner_of) for index, frame in frames]
        owners = [index for index, frame in frames for _ in range(len(frame))]
        arrays = [
            self._column(field, column, lambda row: owner_of(owners[row]))
            for field, column in zip(self._fields, zip(*parts, strict=True), strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _has_rows(self, frame: Any, index: int, owner_of: Callable[[int], str]) -> bool:
        if isinstance(frame, _HeldFrame):
            return frame.rows > 0
        if not _is_frame(frame):
            error = ProcessorError if _is_whole(frame) else NoRow
            raise error(
                f"{owner_of(index)} returned {shown_value(frame)}, not a pandas DataFrame.",
                kind=ErrorKind.OUTPUT_MISMATCH,
                hint="Yield pandas DataFrames, or use transformWithState, which takes rows.",
            )
        return len(frame) > 0

    def _columns_of(self, frame: Any, index: int, owner_of: Callable[[int], str]) -> list[Any]:
        if isinstance(frame, _HeldFrame):
            return frame.columns
        names, labels = self._names, frame.columns.tolist()
        if labels == names:
            places = self._places
        elif any(isinstance(label, str) for label in labels):
            places = [labels.index(name) for name in names if name in labels]
            if len(places) == len(names) < len(labels):
                self._warn(labels)
        else:
            places = list(range(min(len(names), len(labels))))
        if len(places) < len(names):
            raise ProcessorError(
                f"{owner_of(index)} returned a frame with the columns ({', '.join(map(str, labels))}); the output"
                f" columns are ({', '.join(names)}).",
                kind=ErrorKind.OUTPUT_MISMATCH,
                hint="Return frames with all of these columns, or with the same number of columns named by numbers.",
            )
        # The frame's own methods read columns this way; making a Series of each takes ten times as long.
        return [frame._get_column_array(place) for place in places]

    def _column(self, field: FieldCodec, parts: Sequence[Any], owner_of: Callable[[int], str]) -> pa.Array:
        """An output column from that column of all frames; successive ones of one NumPy type are converted together."""
        arrays: list[pa.Array] = []
        start = 0
        for dtype, group in itertools.groupby(parts, key=lambda part: part.dtype):
            held = list(group)
            rows = sum(map(len, held))
            values = held[0] if len(held) == 1 else _joined(held)
            array = None if dtype.kind == "O" else self._from_numpy(field, values)
            if array is None:
                array = _column(field, values, owner_of, first=start)
            arrays.append(array)
            start += rows
        if len(arrays) == 1:
            return arrays[0]
        if (size_bytes := sum([array.nbytes for array in arrays])) > MAX_COLUMN_BYTES:
            raise RowsTooLarge(f"{size_bytes:,} bytes of {field.type}")
        return pa.concat_arrays(arrays)

    def _from_numpy(self, field: FieldCodec, values: Any) -> pa.Array | None:
        """Convert numbers, texts and times in bulk; None if the values have to be converted one by one."""
        try:
            array = pa.array(values, from_pandas=True)
            if isinstance(array, pa.ChunkedArray):
                if array.nbytes > MAX_COLUMN_BYTES:
                    raise RowsTooLarge(f"{array.nbytes:,} bytes of {field.type}")
                array = array.combine_chunks()
            return self._cast(array, field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
            return None

    def _cast(self, array: pa.Array, wanted: pa.DataType) -> pa.Array | None:
        """The column as another type; None if Arrow's cast could change a value. Raises Arrow's errors."""
        own = array.type
        if pa.types.is_timestamp(own) and pa.types.is_timestamp(wanted):
            if own.tz is not None:
                return (array if wanted.tz else pc.local_timestamp(array)).cast(wanted, safe=False)
            local = array.cast(pa.timestamp("us"), safe=False)
            if wanted.tz is None:
                return local
            return instants(local, self._zone).cast(wanted)
        if _is_number(own) and _is_number(wanted):
            cast = array.cast(wanted)
            if pa.types.is_floating(own) and pa.types.is_floating(wanted) and wanted.bit_width < own.bit_width:
                return cast if pc.is_inf(array).equals(pc.is_inf(cast)) else None
            return cast
        is_same = own == wanted or (pa.types.is_duration(own) and pa.types.is_duration(wanted))
        is_text = pa.types.is_large_string(own) and pa.types.is_string(wanted)
        return array.cast(wanted) if is_same or is_text else None


class _NameWarning:
    """Warns once that the names of a row or a frame are not those of the output.

    Python itself shows a warning with the same text only once per process.
    """

    def __init__(self, uid: str, names: list[str]) -> None:
        self._uid = uid
        self._names = names
        self._was_given = False

    def __call__(self, given: Sequence[Any]) -> None:
        if self._was_given:
            return
        missing = [name for name in self._names if name not in given]
        unknown = [str(name) for name in given if name not in self._names]
        if not missing and not unknown:
            return  # a frame has a column twice
        self._was_given = True
        found = [f"without ({', '.join(missing)}), for which null is used"] if missing else []
        found += [f"with ({', '.join(unknown)}), whose values are ignored"] if unknown else []
        warnings.warn(
            f"operator '{self._uid}': there are output rows {', and '.join(found)}. The output columns are"
            f" ({', '.join(self._names)}); their names are case-sensitive.",
            ConfigurationWarning,
            stacklevel=2,
        )


def _is_positional(kind: type) -> bool:
    """Whether all values of a type are matched by position: plain and named tuples, which have no ``__fields__``."""
    return issubclass(kind, tuple) and kind.__dictoffset__ == 0 and not hasattr(kind, "__fields__")


def _is_frame(value: Any) -> bool:
    return hasattr(value, "columns") and hasattr(value, "iloc")


def _is_whole(value: Any) -> bool:
    """Whether a value is probably meant as a row or a frame, not as a part of one."""
    return isinstance(value, (tuple, list, Mapping)) or hasattr(value, "iloc")


def _way_to_a_row(value: Any, names: str) -> str:
    if isinstance(value, Mapping):
        return f"Yield Row(**values) instead of a dict, with the names {names}."
    if isinstance(value, list):
        return f"Yield each row separately, as a Row with the names {names} or as a tuple."
    if _is_frame(value):
        return f"Yield Row objects with the names {names}, or use transformWithStateInPandas, which takes frames."
    return f"Yield Row objects with the names {names}."


def _count(items: Sequence[Any], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _stored_values(field: FieldCodec, column: Any) -> Any:
    """The column with values in storage types, if it has objects, which could be changed."""
    if column.dtype.kind != "O" or not isinstance(column, np.ndarray):
        return column
    return np.fromiter(map(field.stored, column), object, len(column))


def _joined(parts: Sequence[Any]) -> Any:
    """Join arrays of one type: NumPy's, or pandas' own for types that NumPy does not have."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return type(parts[0])._concat_same_type(parts)


def _column(
    field: FieldCodec, values: Sequence[Any], owner_of: Callable[[int], str], *, first: int = 0, is_stored: bool = False
) -> pa.Array:
    try:
        return field.column(values) if is_stored else field.to_array(values)
    except MISFITS as failure:
        for index, value in enumerate(values, first):
            if (reason := field.misfit(value)) is not None:
                raise ProcessorError(
                    f"{owner_of(index)} returned {shown_value(value)} for output column"
                    f" '{field.name}' of type {field.declared}: {reason}.",
                    kind=ErrorKind.OUTPUT_MISMATCH,
                    hint="Convert the value, or declare the column with another type.",
                ) from reason
        raise ProcessorError(
            f"output column '{field.name}' of type {field.declared}: {failure}.",
            kind=ErrorKind.OUTPUT_MISMATCH,
            hint="Return values of one type per column.",
        ) from failure
