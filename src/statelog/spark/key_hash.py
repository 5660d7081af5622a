"""The key hash as a Spark expression: equal keys have equal hashes."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructType


def key_hash(columns: Sequence[Column], kinds: Sequence[DataType]) -> Column:
    """Spark's ``xxhash64`` of the grouping columns.

    It takes ``-0.0`` as ``0.0`` and all NaNs as one, nested ones too. Spark refuses to hash maps, because equal maps
    may list their entries in different orders. So a map is hashed as the array of its entries, sorted by key.
    """
    return F.xxhash64(*[_hashable(column, kind) for column, kind in zip(columns, kinds, strict=True)])


def _hashable(column: Column, kind: DataType) -> Column:
    if not _has_map(kind):
        return column
    if isinstance(kind, StructType):
        return F.struct(*[_hashable(column.getField(field.name), field.dataType) for field in kind])
    if isinstance(kind, ArrayType):
        element = kind.elementType
        return F.transform(column, lambda value: _hashable(value, element))
    assert isinstance(kind, MapType)
    of_key, of_value = kind.keyType, kind.valueType

    def entry(pair: Column) -> Column:
        return F.struct(_hashable(pair["key"], of_key), _hashable(pair["value"], of_value))

    return F.array_sort(F.transform(F.map_entries(column), entry))


def _has_map(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_has_map(field.dataType) for field in kind)
    return isinstance(kind, MapType) or (isinstance(kind, ArrayType) and _has_map(kind.elementType))
