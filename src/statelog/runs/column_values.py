"""Python values of whole columns: what Arrow's ``to_pylist`` makes one by one, several times faster."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from decimal import Context, Decimal
from itertools import pairwise, repeat
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.time_zones import time_zone

Integers = npt.NDArray[np.int64]

EPOCH: Final = datetime.datetime(1970, 1, 1)
_US: Final = datetime.timedelta(microseconds=1)
_DAY_US: Final = 86_400_000_000
_FIRST_US: Final = (datetime.datetime.min - EPOCH) // _US
_LAST_US: Final = (datetime.datetime.max - EPOCH) // _US
_NOT_A_TIME: Final = -(1 << 63)
"""The number that stands for no time in NumPy."""
_EXACT: Final = Context(prec=76, traps=[])


class ColumnValues:
    """Makes the values that ``to_pylist`` makes; subclasses make other values of timestamps, structs, lists or maps.

    Arrow itself is fast for most types. It is slow for the types in `own`, and for nested ones that hold them.
    """

    own: ClassVar[frozenset[int]] = frozenset(
        (
            pa.lib.Type_TIMESTAMP,
            pa.lib.Type_DATE32,
            pa.lib.Type_TIME64,
            pa.lib.Type_DURATION,
            pa.lib.Type_DECIMAL128,
        )
    )
    """The ids of the types that Arrow itself converts slowly."""

    def of(self, column: pa.Array | pa.ChunkedArray) -> list[Any]:
        """The values of a column; None is null."""
        if isinstance(column, pa.ChunkedArray):
            return [value for chunk in column.chunks for value in self.of(chunk)]
        make = _MAKERS.get(column.type.id)
        if make is None or not self._is_own(column.type):
            return _as_in_arrow(self, column)
        if not column.null_count:
            return make(self, column)
        values = iter(make(self, column.drop_null()))
        is_valid = column.is_valid().to_numpy(zero_copy_only=False).tolist()
        return [next(values) if has_value else None for has_value in is_valid]

    def _is_own(self, kind: pa.DataType) -> bool:
        return kind.id in self.own or any(self._is_own(kind.field(place).type) for place in range(kind.num_fields))

    # ---- Columns without nulls ----

    def timestamps(self, times_us: Integers, zone: datetime.tzinfo | None) -> list[Any]:
        """The values of times since 1970 that are shown in a time zone, or without one."""
        require_datetimes(times_us)
        if zone is None:
            datetimes: list[Any] = times_us.view("M8[us]").tolist()
            return datetimes
        # These have the zone already, but the clock of UTC.
        in_utc = map(EPOCH.replace(tzinfo=zone).__add__, times_us.view("m8[us]").tolist())
        return list(map(zone.fromutc, in_utc) if zone.utcoffset(None) != datetime.timedelta() else in_utc)

    def structs(self, column: pa.Array) -> list[Any]:
        """The values of structs."""
        names = [field.name for field in column.type]
        if not names or len(set(names)) < len(names):
            return _as_in_arrow(self, column)
        rows = zip(*map(self.of, column.flatten()), strict=True)
        return list(map(dict, map(zip, repeat(names), rows)))

    def lists(self, values: list[Any], bounds: list[int]) -> list[Any]:
        """The values of lists: successive slices of `values`."""
        return _slices(values, bounds)

    def maps(self, column: pa.Array, keys: list[Any], items: list[Any], bounds: list[int]) -> list[Any]:
        """The values of maps: successive slices of `keys` and `items`."""
        return _slices(list(zip(keys, items, strict=True)), bounds)


class MapsAsDicts(ColumnValues):
    """Makes dicts of maps; raises KeyError if one has a key twice."""

    own = ColumnValues.own | {pa.lib.Type_MAP}

    def maps(self, column: pa.Array, keys: list[Any], items: list[Any], bounds: list[int]) -> list[Any]:
        dicts = list(map(dict, super().maps(column, keys, items, bounds)))
        if sum(map(len, dicts)) < len(keys):
            return list(column.to_pylist(maps_as_pydicts="strict"))  # raises
        return dicts


def _slices(values: list[Any], bounds: list[int]) -> list[Any]:
    return [values[start:end] for start, end in pairwise(bounds)]


def require_datetimes(times_us: Integers) -> None:
    """Raise OverflowError, as Python does, if a time is beyond its datetimes."""
    if len(times_us) and not _FIRST_US <= times_us.min() <= times_us.max() <= _LAST_US:
        raise OverflowError("date value out of range")


def _as_in_arrow(values: ColumnValues, column: pa.Array) -> list[Any]:
    found: list[Any] = column.to_pylist()
    return found


def _timestamps(values: ColumnValues, column: pa.Array) -> list[Any]:
    kind = column.type
    if kind.unit != "us":
        return _as_in_arrow(values, column)
    return values.timestamps(_integers(column), None if kind.tz is None else time_zone(kind.tz))


def _dates(values: ColumnValues, column: pa.Array) -> list[Any]:
    days = column.view(pa.int32()).to_numpy().astype(np.int64)
    if len(days):
        require_datetimes(np.array([days.min(), days.max()]) * _DAY_US)
    found: list[Any] = days.view("M8[D]").tolist()
    return found


def _durations(values: ColumnValues, column: pa.Array) -> list[Any]:
    times_us = _integers(column)
    if column.type.unit != "us" or (times_us == _NOT_A_TIME).any():
        return _as_in_arrow(values, column)
    found: list[Any] = times_us.view("m8[us]").tolist()
    return found


def _times(values: ColumnValues, column: pa.Array) -> list[Any]:
    times_ns = _integers(column)
    if column.type.unit != "ns" or (times_ns % 1000).any() or (times_ns // 1000 % _DAY_US != times_ns // 1000).any():
        return _as_in_arrow(values, column)
    return [at.time() for at in (times_ns // 1000).view("M8[us]").tolist()]


def _decimals(values: ColumnValues, column: pa.Array) -> list[Any]:
    words = np.frombuffer(column.buffers()[1], "<i8", 2 * len(column), 16 * column.offset).reshape(-1, 2)
    low, high = words[:, 0], words[:, 1]
    if (high != low >> 63).any():
        found: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
        return found  # some have more than 64 bits
    step = Decimal(1).scaleb(-column.type.scale, _EXACT)
    return list(map(_EXACT.multiply, low.tolist(), repeat(step)))


def _structs(values: ColumnValues, column: pa.Array) -> list[Any]:
    return values.structs(column)


def _lists(values: ColumnValues, column: pa.Array) -> list[Any]:
    bounds, start, count = _bounds(column)
    return values.lists(values.of(column.values.slice(start, count)), bounds)


def _maps(values: ColumnValues, column: pa.Array) -> list[Any]:
    bounds, start, count = _bounds(column)
    keys, items = (values.of(part.slice(start, count)) for part in (column.keys, column.items))
    return values.maps(column, keys, items, bounds)


def _bounds(column: pa.Array) -> tuple[list[int], int, int]:
    """Where each value begins among those of the whole column, and its end; the column's own first and number."""
    offsets = column.offsets.to_numpy()
    if not len(offsets):
        return [0], 0, 0
    start = int(offsets[0])
    return (offsets - start).tolist(), start, int(offsets[-1]) - start


def _integers(column: pa.Array) -> Integers:
    integers: Integers = column.view(pa.int64()).to_numpy()
    return integers


_MAKERS: Final[dict[int, Callable[[ColumnValues, pa.Array], list[Any]]]] = {
    pa.lib.Type_TIMESTAMP: _timestamps,
    pa.lib.Type_DATE32: _dates,
    pa.lib.Type_DURATION: _durations,
    pa.lib.Type_TIME64: _times,
    pa.lib.Type_DECIMAL128: _decimals,
    pa.lib.Type_STRUCT: _structs,
    pa.lib.Type_LIST: _lists,
    pa.lib.Type_LARGE_LIST: _lists,
    pa.lib.Type_MAP: _maps,
}
