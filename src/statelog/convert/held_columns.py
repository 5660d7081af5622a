"""Makes columns of held values, of types for which Arrow does not: timestamps, and whatever holds them or structs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, TimestampType

from statelog.convert.local_times import timestamp_column
from statelog.runs.byte_slices import RowsTooLarge, to_array
from statelog.runs.values import MakeColumn

_MOST_ELEMENTS: Final = (1 << 31) - 1


def column_maker(kind: DataType, stored: pa.DataType) -> MakeColumn | None:
    """Make a function that makes columns of held values, None among them; None if Arrow does it as well.

    The function raises one of :data:`statelog.runs.values.MISFITS`, or RowsTooLarge.
    """
    if isinstance(kind, TimestampType):
        return timestamp_column
    if isinstance(kind, StructType):
        fields = [_part_maker(field.dataType, own.type) for field, own in zip(kind, stored, strict=True)]
        return lambda values: _struct_column(values, stored, fields)
    if isinstance(kind, ArrayType):
        of_elements = column_maker(kind.elementType, stored.value_type)
        return of_elements and (lambda values: _list_column(values, stored, of_elements))
    if isinstance(kind, MapType):
        if (column_maker(kind.keyType, stored.key_type) or column_maker(kind.valueType, stored.item_type)) is None:
            return None
        parts = _part_maker(kind.keyType, stored.key_type), _part_maker(kind.valueType, stored.item_type)
        return lambda values: _map_column(values, stored, *parts)
    return None


def _part_maker(kind: DataType, stored: pa.DataType) -> MakeColumn:
    return column_maker(kind, stored) or (lambda values: to_array(values, stored))


def _struct_column(values: Sequence[Any], stored: pa.DataType, fields: list[MakeColumn]) -> pa.Array:
    """A column of structs, which are dicts in the storage type and Rows as they are read."""
    nothing = (None,) * len(fields)
    rows = [nothing if value is None else value.values() if isinstance(value, dict) else value for value in values]
    columns = zip(*rows, strict=True) if rows else [()] * len(fields)
    arrays = [make(column) for make, column in zip(fields, columns, strict=True)]
    return pa.StructArray.from_arrays(arrays, fields=list(stored), mask=pa.array(_is_null(values)))


def _list_column(values: Sequence[Any], stored: pa.DataType, of_elements: MakeColumn) -> pa.Array:
    elements = of_elements(list(chain.from_iterable(value for value in values if value is not None)))
    offsets = _offsets(values)
    return pa.ListArray.from_arrays(offsets, elements, type=stored, mask=pa.array(_is_null(values)))


def _map_column(values: Sequence[Any], stored: pa.DataType, of_keys: MakeColumn, of_items: MakeColumn) -> pa.Array:
    dicts: list[dict[Any, Any]] = [value for value in values if value is not None]
    keys = of_keys(list(chain.from_iterable(dicts)))
    items = of_items(list(chain.from_iterable(value.values() for value in dicts)))
    return pa.MapArray.from_arrays(_offsets(values), keys, items, type=stored, mask=pa.array(_is_null(values)))


def _is_null(values: Sequence[Any]) -> npt.NDArray[np.bool_]:
    return np.fromiter((value is None for value in values), bool, len(values))


def _offsets(values: Sequence[Collection[Any] | None]) -> pa.Array:
    """Where the parts of each value begin, and where the last ones end; RowsTooLarge if they are too many."""
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.fromiter((0 if value is None else len(value) for value in values), np.int64), out=offsets[1:])
    if offsets[-1] > _MOST_ELEMENTS:
        raise RowsTooLarge(f"{offsets[-1]:,} elements")
    return pa.array(offsets.astype(np.int32))
