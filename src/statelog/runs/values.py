"""Conversion of values between the form that users see (tuples) and the stored one (Arrow columns)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from functools import cached_property, partial
from types import NoneType
from typing import Any, Final

import numpy as np
import pyarrow as pa

from statelog.errors import ErrorKind, ProcessorError
from statelog.runs.byte_slices import to_array
from statelog.runs.column_values import ColumnValues, MapsAsDicts
from statelog.shown import shown_value

MISFITS: Final = (pa.ArrowException, TypeError, ValueError, ArithmeticError, AttributeError)
"""Errors of a value that does not fit its field; converters call methods of values of any class."""


Convert = Callable[[Any], Any]
MakeColumn = Callable[[Sequence[Any]], pa.Array]

_DICTS: Final = MapsAsDicts()


def is_text(value: str) -> bool:
    """Whether a string can be encoded: no character of it is half of a surrogate pair."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


_LONGEST: Final = timedelta(microseconds=(1 << 63) - 1)
_TESTED: Final = {"is_text": is_text, "longest": _LONGEST}
"""What the tests of values use."""


@dataclass(frozen=True)
class FieldCodec:
    """How one field is stored and read.

    Between its write and its column a value is *held*: in the form in which it would be read back, or in the storage
    type. A held value cannot change, and a column can be made of it.
    """

    name: str
    type: pa.DataType
    """Storage type."""
    exact: type | None = None
    """Values of exactly this class are stored as they are; others are converted one by one.

    None if every value must be converted, as mutable values must be.
    """
    to_storage: Convert | None = None
    """Converts a value for Arrow; None stays None. Raises one of `MISFITS`."""
    from_storage: Convert | None = None
    """Converts a value that is not None from Arrow to the form that users see."""
    declared: str = ""
    """The user's name of the type, for messages; empty stands for Arrow's name."""
    hold: Convert | None = None
    """Makes a held value; None stays None. By default this is `to_storage`."""
    make_column: MakeColumn | None = None
    """Makes a column of held values, as :func:`statelog.runs.byte_slices.to_array` does by default."""
    plain: type | None = None
    """Values of exactly this class, held or not, become the right column, or making the column raises a misfit."""
    values: ColumnValues = _DICTS
    """Makes the values that users see from a column."""

    def normalize(self, value: Any) -> Any:
        """The value as it would be read back, sharing nothing mutable with `value`; raises one of `MISFITS`."""
        if value is None or self.to_storage is None or self.is_stored_as_is(value):
            return value
        stored = self.to_storage(value)
        return stored if self.from_storage is None or stored is None else self.from_storage(stored)

    @cached_property
    def is_stored_as_is(self) -> Callable[[Any], bool]:
        """A test whether a value has the exact class, and is one that the storage type holds."""
        test: Callable[[Any], bool] = eval(
            f"lambda value: {self.test_of('value', 'exact')}", {**_TESTED, "exact": self.exact}
        )
        return test

    def test_of(self, value: str, exact: str) -> str:
        """The same test as an expression; the texts name the value and the exact class."""
        test = f"type({value}) is {exact}"
        if self.exact is int:
            limit = 1 << (self.type.bit_width - 1)
            return f"{test} and -{limit} <= {value} < {limit}"
        if self.exact is str:
            return f"{test} and ({value}.isascii() or is_text({value}))"
        return f"{test} and -longest <= {value} <= longest" if self.exact is timedelta else test

    def stored(self, value: Any) -> Any:
        """The value in storage types; raises one of `MISFITS` if it does not fit."""
        return value if value is None or self.to_storage is None else self.to_storage(value)

    def column(self, values: Sequence[Any]) -> pa.Array:
        """A column of held values; raises RowsTooLarge, or one of `MISFITS` if a number is too large."""
        return to_array(values, self.type) if self.make_column is None else self.make_column(values)

    def to_array(self, values: Sequence[Any]) -> pa.Array:
        """A column of values; raises RowsTooLarge, or one of `MISFITS` if a value does not fit."""
        convert = self.to_storage
        classes = set(map(type, values)) - {NoneType, self.exact}
        if not classes or convert is None:
            return self.column(values)
        if classes == {self.plain}:
            with suppress(*MISFITS):
                return self.column(values)
        return self.column([None if value is None else convert(value) for value in values])

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
        self._holds = [_exact_first(field) for field in fields]
        self.hold: Callable[[Any], tuple[Any, ...]]
        """Holds a user's row; ProcessorError if its length or a value does not fit."""
        self.normalize: Callable[[Any], tuple[Any, ...]]
        """Converts a user's row to the schema's types; ProcessorError if its length or a value does not fit."""
        if all(field.exact is not None for field in fields):
            self.hold = self.normalize = _as_is_first(self.fields, self._normalized)
        else:
            self.hold, self.normalize = self._held, self._normalized
        copies = [_copy_of(field.type, structs_are_rows=field.from_storage is not None) for field in fields]
        reads = [
            copy if field.from_storage is None else field.normalize for field, copy in zip(fields, copies, strict=True)
        ]
        self.copied = _rows_with(copies)
        """Makes a copy of a row that the user could change; returns any other row itself."""
        self.read_held = _rows_with(reads)
        """Makes from a held row the row that would be read back; the user may change it."""

    def _held(self, row: Any) -> tuple[Any, ...]:
        if type(row) is tuple and len(row) == len(self._holds):
            try:
                return tuple(map(operator.call, self._holds, row))
            except MISFITS:
                pass  # once more, to find the field
        return self._normalized(row)

    def _normalized(self, row: Any) -> tuple[Any, ...]:
        if len(self.fields) == 1 and isinstance(row, _SCALARS):
            row = (row,)
        if not isinstance(row, (tuple, list)) or len(row) != len(self.fields):
            names = ", ".join(f"{field.name} {field.declared or field.type}" for field in self.fields)
            count = f" of {len(row)} values" if isinstance(row, (tuple, list)) else ""
            hint = "Wrap a single value as (value,)." if len(self.fields) == 1 else "Give a value for each field."
            raise ProcessorError(
                f"{self.subject} takes a tuple of {len(self.fields)} ({names}), not {shown_value(row)}{count}.",
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
        return list(zip(*map(_values_of, self.fields, rows.columns), strict=True))

    def encode(self, rows: Sequence[tuple[Any, ...] | None], owner_of: Callable[[int], str]) -> list[pa.Array]:
        """Convert held or normalized tuples to columns; None is a row of nulls.

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
            return field.column(values)
        except MISFITS:
            for index, value in enumerate(values):
                if (reason := field.misfit(value)) is not None:
                    raise self._misfit(field, value, reason, f" of key {owner_of(index)}") from reason
            raise

    def _misfit(self, field: FieldCodec, value: Any, error: Exception, owner: str = "") -> ProcessorError:
        return ProcessorError(
            f"{self.subject}{owner}: {shown_value(value)} does not fit field '{field.name}' of type"
            f" {field.declared or field.type}: {error}.",
            kind=ErrorKind.VALUE_MISMATCH,
            hint="Convert the value, or declare the field with another type.",
        )


def _values_of(field: FieldCodec, column: pa.Array | pa.ChunkedArray) -> list[Any]:
    return field.values.of(column)


def _same(value: Any) -> Any:
    return value


def _exact_first(field: FieldCodec) -> Convert:
    hold = field.hold or field.to_storage or _same
    return hold if field.exact is None else lambda value: value if field.is_stored_as_is(value) else hold(value)


def _as_is_first(fields: Sequence[FieldCodec], convert: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], Any]:
    """A function that returns tuples of values that are stored as they are; all other rows are for `convert`.

    It runs for every update, so its text is made from the schema, without a loop over the fields.
    """
    tests = ["type(row) is tuple", f"len(row) == {len(fields)}"]
    tests += [field.test_of(f"row[{place}]", f"exact_{place}") for place, field in enumerate(fields)]
    names = {f"exact_{place}": field.exact for place, field in enumerate(fields)}
    source = f"lambda row: row if {' and '.join(tests)} else convert(row)"
    made: Callable[[Any], Any] = eval(source, {**_TESTED, **names, "convert": convert})
    return made


def _rows_with(converts: Sequence[Convert | None]) -> Callable[[Iterable[Any]], tuple[Any, ...]]:
    """A function that makes rows in which some values that are not None are converted; without any, rows themselves."""
    by_place = [(place, convert) for place, convert in enumerate(converts) if convert is not None]
    if not by_place:
        return _same
    (first, convert_first), *others = by_place

    def converted(row: Iterable[Any]) -> tuple[Any, ...]:
        values = [*row]
        if values[first] is not None:
            values[first] = convert_first(values[first])
        if others:
            for place, convert in others:
                if values[place] is not None:
                    values[place] = convert(values[place])
        return tuple(values)

    return converted


def _copy_of(kind: pa.DataType, *, structs_are_rows: bool) -> Convert | None:
    """A function that copies what users see of values of a type; None if they cannot be changed."""

    def of(part: pa.DataType) -> Convert | None:
        return _copy_of(part, structs_are_rows=structs_are_rows)

    if pa.types.is_struct(kind):
        copies = [of(field.type) for field in kind]
        copied = _rows_with(copies)
        if not structs_are_rows:
            return lambda value: dict(zip(value, copied(value.values()), strict=True))
        return (lambda value: tuple.__new__(type(value), copied(value))) if any(copies) else None
    if pa.types.is_map(kind):
        copy = of(kind.item_type)
        return dict if copy is None else partial(_copied_map, copy)
    if pa.types.is_list(kind):
        copy = of(kind.value_type)
        return list if copy is None else partial(_each, copy)
    return None


def _copied_map(copy: Convert, value: dict[Any, Any]) -> dict[Any, Any]:
    return dict(zip(value, _each(copy, value.values()), strict=True))


def _each(copy: Convert, values: Iterable[Any]) -> list[Any]:
    return [None if value is None else copy(value) for value in values]
