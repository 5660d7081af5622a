"""Conversion of values between the form that users see (tuples) and the stored one (Arrow columns)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from types import NoneType
from typing import Any, Final

import numpy as np
import pyarrow as pa

from statelog.errors import ErrorKind, ProcessorError
from statelog.runs.byte_slices import to_array

MISFITS: Final = (pa.ArrowException, TypeError, ValueError, ArithmeticError, AttributeError)
"""Errors of a value that does not fit its field; converters call methods of values of any class."""


@dataclass(frozen=True)
class FieldCodec:
    """How one field is stored and read."""

    name: str
    type: pa.DataType
    """Storage type."""
    exact: type | None = None
    """Values of exactly this class are stored as they are; others are converted one by one.

    None if every value must be converted, as mutable ones must.
    """
    to_storage: Callable[[Any], Any] | None = None
    """Converts a value that is not None for Arrow. May return None; raises one of `MISFITS`."""
    from_storage: Callable[[Any], Any] | None = None
    """Converts a value that is not None from Arrow to the form that users see."""
    declared: str = ""
    """The user's name of the type, for messages; empty stands for Arrow's name."""

    def normalize(self, value: Any) -> Any:
        """The value as it would be read back, sharing nothing mutable with `value`."""
        if value is None or type(value) is self.exact or self.to_storage is None:
            return value
        stored = self.to_storage(value)
        return stored if self.from_storage is None or stored is None else self.from_storage(stored)

    def stored(self, value: Any) -> Any:
        """The value in storage types; raises one of `MISFITS` if it does not fit."""
        return value if value is None or self.to_storage is None else self.to_storage(value)

    def to_array(self, values: Sequence[Any]) -> pa.Array:
        """A column of values; raises RowsTooLarge, or one of `MISFITS` if a value does not fit."""
        convert = self.to_storage
        if convert is not None and not {self.exact, NoneType}.issuperset(map(type, values)):
            values = [None if value is None else convert(value) for value in values]
        return to_array(values, self.type)

    def misfit(self, value: Any) -> Exception | None:
        """The error that storing a value raises; None if it can be stored."""
        try:
            pa.scalar(self.stored(value), self.type)
        except MISFITS as error:
            return error
        return None


_SCALARS: Final = (str, bytes, bytearray, int, float, Decimal, date, time, timedelta, np.generic)
"""Classes of values that can only be the value of a single field."""


class RowCodec:
    """Converts tuples of one schema to columns and back; `subject` names them in messages, as in "state 'x'"."""

    def __init__(self, fields: Sequence[FieldCodec], subject: str) -> None:
        self.fields = list(fields)
        self.subject = subject
        self.schema = pa.schema([(field.name, field.type) for field in fields])
        self.is_mutable = any(pa.types.is_nested(field.type) for field in fields)
        # Normalized values of a field with an exact class are stored as they are.
        self._converts = [field.to_storage if field.exact is None else None for field in fields]
        self._is_converted = any(self._converts)
        self._exact_types = tuple(field.exact for field in fields)
        # The exact class of a single field; None if there are several, or if every value must be converted.
        self._only_type = fields[0].exact if len(fields) == 1 else None

    def normalize(self, row: Any) -> tuple[Any, ...]:
        """Convert a user's row to the schema's types; ProcessorError if its length or a value does not fit."""
        # This runs for every update, so the plain cases come first.
        if type(row) is tuple:
            if len(row) == 1:
                if type(row[0]) is self._only_type:
                    return row
            elif tuple(map(type, row)) == self._exact_types:
                return row
        if len(self.fields) == 1 and isinstance(row, _SCALARS):
            row = (row,)
        if not isinstance(row, (tuple, list)) or len(row) != len(self.fields):
            names = ", ".join(f"{field.name} {field.declared or field.type}" for field in self.fields)
            count = f" of {len(row)} values" if isinstance(row, (tuple, list)) else ""
            hint = "A single value is wrapped as (value,)." if len(self.fields) == 1 else "Give a value for each field."
            raise ProcessorError(
                f"{self.subject} takes a tuple of {len(self.fields)} ({names}), not {_shown(row)}{count}.",
                kind=ErrorKind.VALUE_MISMATCH,
                hint=hint,
            )
        values: list[Any] = []
        for field, value in zip(self.fields, row, strict=True):
            try:
                values.append(field.normalize(value))
            except MISFITS as error:
                raise self._misfit(field, value, error) from error
        return tuple(values)

    def decode(self, rows: pa.RecordBatch | pa.Table) -> list[tuple[Any, ...]]:
        """Convert columns to tuples, one per row."""
        columns: list[list[Any]] = []
        for field, column in zip(self.fields, rows.columns, strict=True):
            values = column.to_pylist(maps_as_pydicts="strict")
            convert = field.from_storage
            if convert is not None:
                values = [None if value is None else convert(value) for value in values]
            columns.append(values)
        return list(zip(*columns, strict=True))

    def encode(self, rows: Sequence[tuple[Any, ...] | None], owner_of: Callable[[int], str]) -> list[pa.Array]:
        """Convert normalized tuples to columns; None is a row of nulls.

        `owner_of` names the key of the i-th row in messages. Raises ProcessorError if a number is too large for its
        field, and RowsTooLarge if a column does not fit into Arrow's offsets.
        """
        if None in rows:
            nulls = (None,) * len(self.fields)
            rows = [nulls if row is None else row for row in rows]
        columns = zip(*rows, strict=True) if rows else [()] * len(self.fields)
        return [
            self._encode_column(field, column, owner_of) for field, column in zip(self.fields, columns, strict=True)
        ]

    def to_storage(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """One normalized row in storage types."""
        if not self._is_converted:
            return row
        return tuple(
            value if value is None or convert is None else convert(value)
            for convert, value in zip(self._converts, row, strict=True)
        )

    def misfit(self, row: tuple[Any, ...], error: Exception) -> ProcessorError:
        """The error of a normalized row that could not be stored; names the field and the value."""
        for field, value in zip(self.fields, row, strict=True):
            if (reason := field.misfit(value)) is not None:
                return self._misfit(field, value, reason)
        return self._misfit(self.fields[0], row[0], error)

    def from_storage(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """One row of storage types in the form that users see."""
        return tuple(
            value if value is None or field.from_storage is None else field.from_storage(value)
            for field, value in zip(self.fields, row, strict=True)
        )

    def _encode_column(self, field: FieldCodec, values: Sequence[Any], owner_of: Callable[[int], str]) -> pa.Array:
        try:
            # Without from_storage users see the stored form, so normalized values are in that form already.
            return field.to_array(values) if field.from_storage is not None else to_array(values, field.type)
        except MISFITS:
            for index, value in enumerate(values):
                if (reason := field.misfit(value)) is not None:
                    raise self._misfit(field, value, reason, f" of key {owner_of(index)}") from reason
            raise

    def copied(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """The row, or a copy of it if the user could change it."""
        return copy.deepcopy(row) if self.is_mutable else row

    def _misfit(self, field: FieldCodec, value: Any, error: Exception, owner: str = "") -> ProcessorError:
        return ProcessorError(
            f"{self.subject}{owner}: {_shown(value)} does not fit field '{field.name}' of type"
            f" {field.declared or field.type}: {error}.",
            kind=ErrorKind.VALUE_MISMATCH,
            hint="Convert the value, or declare the field with another type.",
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
