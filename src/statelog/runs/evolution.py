"""State schemas that change from one start to another: the allowed changes, and reading old values with a new schema.

Fields match by name. A field may be added (null in older rows), removed, moved, or widened as in Avro. Values are
converted when they are read. A removed field stays in the rows until these are written again: if it comes back it has
its old values, whether or not runs were merged in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from statelog.errors import ConfigurationError, ErrorKind
from statelog.runs.schema import StateDescriptor, StateKind, StateSchema, decode_schema, encode_schema

_WIDER: Final[dict[pa.DataType, tuple[pa.DataType, ...]]] = {
    pa.int8(): (pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
    pa.int16(): (pa.int32(), pa.int64(), pa.float32(), pa.float64()),
    pa.int32(): (pa.int64(), pa.float32(), pa.float64()),
    pa.int64(): (pa.float32(), pa.float64()),
    pa.float32(): (pa.float64(),),
    pa.string(): (pa.binary(),),
    pa.binary(): (pa.string(),),
}

_Fits = Callable[[pa.DataType, pa.DataType], bool]
_Join = Callable[[pa.DataType, pa.DataType], pa.DataType]
_Misfit = tuple[str, pa.DataType, pa.DataType]
"""A field that cannot be read as the wanted type: path (empty for the whole row), stored type and wanted type."""


def require_evolution(stored: StateDescriptor, declared: StateDescriptor, where: str) -> None:
    """Raise ConfigurationError if the declared state cannot replace the stored one.

    Kind and map keys must be the same, and every change of a field an allowed one. `where` names operator and location
    in messages.
    """
    if stored == declared:
        return
    if _is_other_state(stored, declared):
        raise ConfigurationError(
            f"{where}: the location holds {stored}, but the processor declares {declared}.",
            kind=ErrorKind.OTHER_SCHEMA,
            hint="Declare the state as it was, or use another name for the new one.",
        )
    for path, held, wanted in _misfits(pa.struct(stored.value_schema), pa.struct(declared.value_schema), _is_widening):
        field = f"field '{path}'" if path else "the row"
        raise ConfigurationError(
            f"{where}: {field} of {declared.kind} state '{declared.name}' is {held} in the location, but the processor"
            f" declares {wanted}.",
            kind=ErrorKind.OTHER_SCHEMA,
            hint="Fields can be added, removed, reordered and widened: integers to larger ones, float or double, float"
            " to double, decimals to a larger precision, string to binary and back. For anything else, declare a field"
            " with another name.",
        )


def can_read(stored: StateDescriptor, wanted: StateDescriptor) -> bool:
    """Whether rows written with one description can be read with another."""
    if _is_other_state(stored, wanted):
        return False
    return not any(_misfits(pa.struct(stored.value_schema), pa.struct(wanted.value_schema), _is_readable))


def recorded_schema(stored: StateSchema, declared: StateSchema) -> StateSchema:
    """The schema that a checkpoint records: the declared one, with the removed fields after its own.

    So a field can only come back with a type that can read its old values. A state that has lost its TTL keeps the time
    domain, because rows written with the TTL still expire.
    """
    if not declared.expires_by:
        declared = msgspec.structs.replace(declared, expires_by=stored.expires_by)
    if stored.value_schema == declared.value_schema:
        return declared
    joined = _joined(decode_schema(stored.value_schema), decode_schema(declared.value_schema), lambda _, new: new)
    return msgspec.structs.replace(declared, value_schema=encode_schema(joined))


def merged_schema(older: StateDescriptor, newer: StateDescriptor) -> StateDescriptor:
    """A description that holds the rows of both without loss, with every field of either.

    If the newer one cannot read the older one, the result is the newer one.
    """
    if older == newer or not can_read(older, newer):
        return newer
    joined = _joined(older.value_schema, newer.value_schema, _common)
    return StateDescriptor(newer.name, newer.kind, joined, newer.entry_schema, newer.expires_by)


def project(columns: Sequence[pa.Array], stored: StateDescriptor, wanted: StateDescriptor) -> list[pa.Array]:
    """Convert columns with the fields of `stored` to columns with the fields of `wanted`.

    `wanted` must be able to read `stored`. A binary wanted as a string raises ConfigurationError if it is not valid
    UTF-8.
    """
    held = dict(zip(stored.value_schema.names, columns, strict=True))
    rows = len(columns[0]) if columns else 0
    projected: list[pa.Array] = []
    for field in wanted.value_schema:
        try:
            projected.append(_projected(held.get(field.name, pa.nulls(rows)), field.type))
        except pa.ArrowInvalid as error:
            raise ConfigurationError(
                f"field '{field.name}' of {wanted.kind} state '{wanted.name}' holds a value that is not of type"
                f" {field.type}: {error}.",
                kind=ErrorKind.OTHER_SCHEMA,
                hint="Declare the field with the type that it had before.",
            ) from error
    return projected


def _is_other_state(stored: StateDescriptor, wanted: StateDescriptor) -> bool:
    is_same = (stored.name, stored.kind, stored.entry_schema) == (wanted.name, wanted.kind, wanted.entry_schema)
    return not is_same or (stored.kind is StateKind.TIMER and stored != wanted)


def _misfits(stored: pa.DataType, wanted: pa.DataType, fits: _Fits, path: str = "") -> Iterator[_Misfit]:
    if stored == wanted or pa.types.is_null(stored):
        return
    parts = _parts(stored, wanted)
    if parts is None and not fits(stored, wanted):
        yield path, stored, wanted
    for old, new in parts or ():
        below = f"{path}.{new.name}" if path else new.name
        if old.nullable and not new.nullable:
            yield below, stored, wanted
        yield from _misfits(old.type, new.type, fits, below)


def _parts(stored: pa.DataType, wanted: pa.DataType) -> list[tuple[pa.Field, pa.Field]] | None:
    """The fields that two nested types have in common; None if the types are nested differently."""
    if pa.types.is_struct(stored) and pa.types.is_struct(wanted):
        held, own = ({field.name: field for field in kind.fields} for kind in (stored, wanted))
        if len(held) < stored.num_fields or len(own) < wanted.num_fields:
            return None  # several fields have one name
        return [(held[field.name], field) for field in wanted.fields if field.name in held]
    if pa.types.is_list(stored) and pa.types.is_list(wanted):
        return [(stored.value_field, wanted.value_field)]
    if pa.types.is_map(stored) and pa.types.is_map(wanted) and stored.key_type == wanted.key_type:
        return [(stored.item_field, wanted.item_field)]
    return None


def _is_widening(stored: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_decimal128(stored) and pa.types.is_decimal128(wanted):
        return bool(stored.scale == wanted.scale and stored.precision <= wanted.precision)
    return bool(wanted in _WIDER.get(stored, ()))


def _is_readable(stored: pa.DataType, wanted: pa.DataType) -> bool:
    # A merge keeps integers and floats of one field as doubles.
    return _is_widening(stored, wanted) or (stored == pa.float64() and wanted == pa.float32())


def _common(older: pa.DataType, newer: pa.DataType) -> pa.DataType:
    """The type that holds the values of both, so that a merge makes no difference."""
    if pa.types.is_null(newer):
        return older
    if pa.types.is_signed_integer(older) and newer == pa.float32():
        return pa.float64()
    if {older, newer} == {pa.string(), pa.binary()}:
        return pa.binary()
    return newer if _is_widening(older, newer) else older


def _joined(older: pa.Schema, newer: pa.Schema, join: _Join) -> pa.Schema:
    return pa.schema(_join_types(pa.struct(older), pa.struct(newer), join).fields)


def _join_types(older: pa.DataType, newer: pa.DataType, join: _Join) -> pa.DataType:
    if older == newer or pa.types.is_null(older):
        return newer
    parts = _parts(older, newer)
    if parts is None:
        return join(older, newer)
    joined = {new.name: new.with_type(_join_types(old.type, new.type, join)) for old, new in parts}
    if pa.types.is_list(newer):
        return pa.list_(joined[newer.value_field.name])
    if pa.types.is_map(newer):
        return pa.map_(newer.key_field, joined[newer.item_field.name])
    fields = [joined.get(field.name, field) for field in newer.fields]
    own = {field.name for field in fields}
    return pa.struct(fields + [field for field in older.fields if field.name not in own])


def _projected(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type == kind:
        return column
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), kind)
    if pa.types.is_struct(kind):
        held = {field.name: index for index, field in enumerate(column.type.fields)}
        missing = pa.nulls(len(column))
        children = [
            _projected(column.field(held[field.name]) if field.name in held else missing, field.type)
            for field in kind.fields
        ]
        return pa.StructArray.from_arrays(children, fields=kind.fields, mask=column.is_null())
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        return _projected_collection(column, kind)
    if pa.types.is_integer(column.type) and kind == pa.float32():
        column = column.cast(pa.float64(), safe=False)  # as it would be after a merge
    return column.cast(kind, safe=not pa.types.is_floating(kind))


def _projected_collection(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if not len(column):
        return pa.array([], kind)
    offsets = column.offsets
    start, end = offsets[0].as_py(), offsets[-1].as_py()
    offsets = pc.subtract(offsets, start)
    if pa.types.is_map(kind):
        keys = column.keys.slice(start, end - start)
        items = _projected(column.items.slice(start, end - start), kind.item_type)
        return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=column.is_null())
    values = _projected(column.values.slice(start, end - start), kind.value_type)
    return pa.ListArray.from_arrays(offsets, values, type=kind, mask=column.is_null())
