"""Copies of values that a processor can change in place, by their Spark type."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StructType

__all__ = ["copier"]

_Copy = Callable[[Any], Any]


def copier(kind: DataType) -> _Copy | None:
    """What copies values of a type; None if they cannot be changed in place.

    A value that is not of the type is copied as well as that is possible: whoever converts it refuses it.
    """
    if isinstance(kind, BinaryType):
        return _copied_binary
    if isinstance(kind, ArrayType):
        return _of_array(copier(kind.elementType))
    if isinstance(kind, MapType):
        return _of_map(copier(kind.keyType), copier(kind.valueType))
    if isinstance(kind, StructType):
        return _of_struct([copier(field.dataType) for field in kind])
    return None


def _copied_binary(value: Any) -> Any:
    if value is None or type(value) is bytes:
        return value
    return bytes(value) if isinstance(value, (bytearray, memoryview)) else _deep_copy(value)


def _of_array(of_element: _Copy | None) -> _Copy:
    def copied(value: Any) -> Any:
        kind = type(value)
        if value is None or (kind is tuple and of_element is None):
            return value
        if kind is not list and kind is not tuple:
            return _deep_copy(value)
        return value[:] if of_element is None else [of_element(element) for element in value]

    return copied


def _of_map(of_key: _Copy | None, of_value: _Copy | None) -> _Copy:
    def copied(value: Any) -> Any:
        if value is None:
            return None
        if type(value) is not dict or of_key is not None:
            return _deep_copy(value)
        return value.copy() if of_value is None else {key: of_value(item) for key, item in value.items()}

    return copied


def _of_struct(of_fields: list[_Copy | None]) -> _Copy:
    is_flat = not any(of_fields)

    def copied(value: Any) -> Any:
        if value is None or (is_flat and isinstance(value, tuple)):
            return value
        return _deep_copy(value)

    return copied


def _deep_copy(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # of an object of any class: no value of a column
        return value
