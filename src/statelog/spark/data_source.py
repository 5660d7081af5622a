"""The data source ``statelog``: state as a DataFrame."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, get_type_hints

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from statelog.checkpoint.held_pin import HeldPin
from statelog.errors import ConfigurationError, ErrorKind, PinExpiredError
from statelog.reading.listing import (
    CheckpointInfo,
    OperatorInfo,
    StateInfo,
    list_checkpoints,
    list_operators,
    list_states,
)
from statelog.reading.pinning import PinInfo, list_pins
from statelog.reading.read import chosen_state, open_rows, select_columns
from statelog.reading.scan import ReadPart, cut_parts
from statelog.reading.source import At, Source, open_source, parse_at
from statelog.runs.schema import decode_schema

_OPTIONS: Final = ("path", "uid", "state", "at", "columns", "show", "pin_s", "push_filters")
_PIN_S: Final = 3600.0
"""How long the tasks of a read may take to begin."""
_MOST_KEYS: Final = 100_000
"""Keys of filters that are looked up; for more the whole state is read."""

_LISTS: Final[dict[str, tuple[type, Callable[[str, str | None], list[Any]]]]] = {
    "operators": (OperatorInfo, lambda location, uid: list_operators(location)),
    "states": (
        StateInfo,
        lambda location, uid: [
            state
            for one in ([uid] if uid else [operator.uid for operator in list_operators(location)])
            for state in list_states(location, one)
        ],
    ),
    "checkpoints": (CheckpointInfo, list_checkpoints),
    "pins": (PinInfo, list_pins),
}


class StateSource(DataSource):
    """State of statelog's operators as a DataFrame, in batch queries: ``spark.read.format("statelog")``.

    Register it first: ``spark.dataSource.register(statelog.StateSource)``. The path is a query's checkpointLocation, or
    the location that its operators were given; all executors must see it. The query of the state may run meanwhile.

    Options, as text: ``uid``, ``state``, ``at`` (a batch, or a time in ISO 8601) and ``columns`` (separated by commas)
    are those of :func:`read_state`. ``show`` is ``rows`` (default), ``operators``, ``states``, ``checkpoints`` or
    ``pins``. ``pin_s`` is how many seconds the checkpoint is kept for tasks that have not begun; 3600 by default. Each
    task then keeps it as long as it reads.

    With ``push_filters`` (``true`` or ``false``, the default) a filter that gives values of all fields of the key, such
    as ``key_user = 'ann'``, reads only the blocks of these keys. It needs Spark 4.1 or later, and Spark's
    ``spark.sql.python.filterPushdown.enabled``.

    Examples
    --------
    >>> spark.dataSource.register(statelog.StateSource)  # doctest: +SKIP
    >>> spark.read.format("statelog").option("state", "count").load("/data/checkpoints/flights")  # doctest: +SKIP
    """

    @classmethod
    def name(cls) -> str:
        """The format."""
        return "statelog"

    def schema(self) -> StructType:
        """The columns of the state, or of the list."""
        return from_arrow_schema(_Read.of(self.options).schema())

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of one checkpoint."""
        read = _Read.of(self.options)
        return (_KeyReader if read.pushes_filters else _Reader)(read, schema.names)


@dataclass(frozen=True)
class _Read:
    """What a user has asked for."""

    location: str
    uid: str | None
    state: str | None
    at: At | None
    columns: tuple[str, ...] | None
    show: str
    pin_s: float
    pushes_filters: bool

    @classmethod
    def of(cls, options: Mapping[str, str]) -> _Read:
        given = {name.lower(): value for name, value in options.items()}
        if unknown := sorted(set(given) - set(_OPTIONS)):
            raise _misuse(f"The format statelog has no option '{unknown[0]}'.", f"It has {', '.join(_OPTIONS)}.")
        if "path" not in given:
            raise _misuse("The format statelog has no path.", "Call load(path) with the checkpointLocation.")
        show = given.get("show", "rows")
        if show not in ("rows", *_LISTS):
            raise _misuse(f"Option show is '{show}'.", f"It must be one of rows, {', '.join(_LISTS)}.")
        try:
            pin_s = float(given.get("pin_s", _PIN_S))
        except ValueError:
            raise _misuse(f"Option pin_s is '{given['pin_s']}'.", "It must be a number of seconds.") from None
        pushes = given.get("push_filters", "false").lower()
        if pushes not in ("true", "false"):
            raise _misuse(f"Option push_filters is '{pushes}'.", "It must be true or false.")
        columns = given.get("columns")
        return cls(
            location=given["path"],
            uid=given.get("uid"),
            state=given.get("state"),
            at=parse_at(given["at"]) if "at" in given else None,
            columns=None if columns is None else tuple(name.strip() for name in columns.split(",")),
            show=show,
            pin_s=pin_s,
            pushes_filters=pushes == "true",
        )

    def schema(self) -> pa.Schema:
        if self.show in _LISTS:
            return _schema_of(_LISTS[self.show][0])
        source = self.source()
        return select_columns(source, chosen_state(source, self.state), self.columns)

    def source(self) -> Source:
        return open_source(self.location, self.uid, self.at)


def _misuse(message: str, hint: str) -> ConfigurationError:
    return ConfigurationError(message, kind=ErrorKind.INVALID_OPTION, hint=hint)


@dataclass
class _Partition(InputPartition):
    """The work of one task; without a part and keys it reads the list, or the state of an operator without keys."""

    batch: int
    token: bytes
    part: ReadPart | None = None
    keys: pa.Table | None = None


class _Reader(DataSourceReader):
    def __init__(self, read: _Read, names: list[str]) -> None:
        self._read = read
        self._names = names
        self._wanted: dict[str, list[Any]] = {}

    def partitions(self) -> list[InputPartition]:
        """Pin the checkpoint, and cut the state."""
        if self._read.show in _LISTS:
            return [_Partition(0, b"")]
        source = self._read.source()
        checkpoint = source.checkpoint
        HeldPin(
            source.store,
            source.root,
            source.history,
            checkpoint.batch,
            owner="spark.read",
            lasts_s=self._read.pin_s,
            is_shared=True,
        )
        if checkpoint.is_whole:
            return [_Partition(checkpoint.batch, checkpoint.token)]
        keys = self._keys(decode_schema(checkpoint.key_schema))
        if keys is not None:
            return [_Partition(checkpoint.batch, checkpoint.token, keys=keys)]
        return [_Partition(checkpoint.batch, checkpoint.token, part) for part in cut_parts(source.history, checkpoint)]

    def _keys(self, schema: pa.Schema) -> pa.Table | None:
        """The keys that the filters allow, if they are a list of values of each field."""
        if set(self._wanted) != set(schema.names):
            return None
        values = [self._wanted[name] for name in schema.names]
        if math.prod(map(len, values)) > _MOST_KEYS:
            return None
        columns = zip(*itertools.product(*values), strict=True)
        try:
            return pa.table(
                [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
            )
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return None  # Spark compares values of other types in its own way

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of a part, in a task."""
        assert isinstance(partition, _Partition)
        if self._read.show in _LISTS:
            kind, listed = _LISTS[self._read.show]
            infos = [asdict(one) for one in listed(self._read.location, self._read.uid)]
            yield from pa.Table.from_pylist(infos, _schema_of(kind)).to_batches()
            return
        source = open_source(self._read.location, self._read.uid, partition.batch)
        if source.checkpoint.token != partition.token:
            raise PinExpiredError(
                f"{source.name}: batch {partition.batch} was repeated after a repair while its state was read.",
                hint="Read again.",
            )
        stored = chosen_state(source, self._read.state)
        for rows in open_rows(source, stored, partition.keys, partition.part):
            if rows is not None:
                yield rows.select(self._names)


class _KeyReader(_Reader):
    """A reader that takes keys from filters; Spark refuses one that could if pushing filters down is off."""

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:
        """Note the values that filters allow; Spark applies all filters again."""
        for each in filters:
            kind, column = type(each).__name__, tuple(getattr(each, "attribute", ()))
            if len(column) == 1 and kind in ("EqualTo", "In") and column[0].startswith("key_"):
                values = [each.value] if kind == "EqualTo" else list(each.value)
                self._wanted.setdefault(column[0].removeprefix("key_"), values)
        return filters


def _schema_of(kind: type) -> pa.Schema:
    """The columns of a list."""
    types = {int: pa.int64(), str: pa.string(), tuple[str, ...]: pa.list_(pa.string()), int | None: pa.int64()}
    return pa.schema([pa.field(name, types[hint]) for name, hint in get_type_hints(kind).items()])
