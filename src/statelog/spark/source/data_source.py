"""The data source ``statelog``: state as a DataFrame."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from decimal import Decimal, getcontext
from typing import Any, Final, get_type_hints

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from statelog.errors import PinExpiredError, StateMissingError, StorageError
from statelog.history.pins import HeldPin
from statelog.reading.checkpoints import LoggedPoint
from statelog.reading.listing import (
    CheckpointInfo,
    OperatorInfo,
    StateInfo,
    list_checkpoints,
    list_operators,
    list_states,
)
from statelog.reading.open import open_logged
from statelog.reading.pins import PinInfo, list_pins
from statelog.reading.read import open_rows, select_columns
from statelog.reading.rows import ReadPart
from statelog.reading.states import chosen_table
from statelog.runs.schema import decode_schema
from statelog.spark.source.change_source import ChangeReader, Show, SourceOptions, change_columns, misuse

_MOST_KEYS: Final = 100_000
"""At most this many keys of filters are looked up; for more, the whole state is read."""

_LISTS: Final[dict[str, tuple[type, Callable[[str, str | None], list[Any]]]]] = {
    Show.OPERATORS: (OperatorInfo, lambda location, uid: list_operators(location)),
    Show.STATES: (
        StateInfo,
        lambda location, uid: [
            state
            for one in ([uid] if uid else [operator.uid for operator in list_operators(location)])
            for state in list_states(location, one)
        ],
    ),
    Show.CHECKPOINTS: (CheckpointInfo, list_checkpoints),
    Show.PINS: (PinInfo, list_pins),
}


class StateSource(DataSource):
    """State of statelog's operators as a DataFrame: ``spark.read.format("statelog")``, and its changes as a stream.

    Register it first: ``spark.dataSource.register(statelog.StateSource)``. The path is a query's checkpointLocation, or
    the location that its operators were given; all executors must have access. The query may be running.

    Options, as text: ``uid``, ``state``, ``at`` (a batch, a time in ISO 8601, or the name of a pin) and ``columns``
    (separated by commas) are those of :func:`read_state`. ``show`` is ``rows`` (default), ``operators``, ``states``,
    ``checkpoints``, ``pins`` or ``changes``. ``pin_s`` is how many seconds the checkpoint is kept for tasks that have
    not begun; 3600 by default. A task that has begun keeps the checkpoint while it reads.

    With ``push_filters`` (``true`` or ``false``, the default) a filter that gives values for all fields of the key,
    such as ``key_user = 'ann'``, reads only the blocks of these keys. This needs Spark 4.1 or later, and Spark's
    ``spark.sql.python.filterPushdown.enabled``.

    ``show=changes`` is for ``spark.readStream``: the rows of :func:`read_changes`, each change once, from the batch
    after ``after`` on, by default from the oldest that is still stored. With ``with_before=true``, they also have the
    former values, and begin by default after the oldest retained checkpoint, or with the first batch while the changes
    of all batches are stored. The changes of the newest batch come when
    the next batch has begun or, with ``with_last=true``, as soon as Spark has committed their batch; then the path must
    be a checkpointLocation. Changes that a stream has not read are kept while it runs and for ``pin_s`` seconds after,
    by default 86400, unless they take more than ``max_pin_bytes`` (1 GiB by default); ``pin_s`` must be longer than the
    longest micro-batch. A micro-batch has at most ``max_batch_bytes`` of stored changes (256 MiB by default), but at
    least one batch. A stream fails with StateMissingError if changes are gone, or if the query was set back to a
    batch before those that were read.

    Examples
    --------
    >>> spark.dataSource.register(statelog.StateSource)  # doctest: +SKIP
    >>> spark.read.format("statelog").option("state", "count").load("/data/checkpoints/flights")  # doctest: +SKIP
    >>> spark.readStream.format("statelog").options(state="count", show="changes").load(path)  # doctest: +SKIP
    """

    @classmethod
    def name(cls) -> str:
        """The format."""
        return "statelog"

    def schema(self) -> StructType:
        """The columns of the state, of its changes, or of the list."""
        options = SourceOptions.of(self.options)
        if options.show in _LISTS:
            return from_arrow_schema(_schema_of(_LISTS[options.show][0]))
        point = open_logged(options.location, options.uid, options.at)
        if options.show == Show.CHANGES:
            return from_arrow_schema(change_columns(point, options))
        return from_arrow_schema(select_columns(point, chosen_table(point, options.state), options.columns))

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of one checkpoint."""
        options = SourceOptions.of(self.options)
        if options.show == Show.CHANGES:
            raise misuse("Changes are read as a stream.", "Use spark.readStream or statelog.read_changes.")
        return (_KeyReader if options.pushes_filters else _Reader)(options, schema.names)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A reader of changes."""
        options = SourceOptions.of(self.options)
        if options.show != Show.CHANGES:
            raise misuse(
                f"A stream of {options.show} was requested.", "Only changes are a stream: option('show', 'changes')."
            )
        return ChangeReader(options, schema.names)


@dataclass
class _Partition(InputPartition):
    """The work of one task; without a part and keys it reads the list, or the state of an operator without keys."""

    batch: int
    token: bytes
    pin: str = ""
    """The pin that keeps the checkpoint until all tasks have begun; empty if there is none."""
    part: ReadPart | None = None
    keys: pa.Table | None = None


class _Reader(DataSourceReader):
    def __init__(self, options: SourceOptions, names: list[str]) -> None:
        self._options = options
        self._names = names
        self._wanted: dict[str, list[Any]] = {}

    def partitions(self) -> list[InputPartition]:
        """Pin the checkpoint, and cut the state."""
        if self._options.show in _LISTS:
            return [_Partition(0, b"")]
        point = open_logged(self._options.location, self._options.uid, self._options.at)
        whole = _Partition(point.batch, point.checkpoint.token, self._pin(point))
        if point.checkpoint.is_whole:
            return [whole]
        keys = self._keys(decode_schema(point.key_schema))
        if keys is not None:
            return [replace(whole, keys=keys)]
        return [replace(whole, part=part) for part in point.cut()]

    def _pin(self, point: LoggedPoint) -> str:
        """Pin the checkpoint for the tasks; the pin's name, or an empty one without the right to write."""
        try:
            held = HeldPin(point.store, point.needs(), owner="spark.read", lasts_s=self._options.pin_s, is_shared=True)
        except StorageError:
            return ""
        return held.name

    def _point(self, partition: _Partition) -> LoggedPoint:
        """The checkpoint as a task finds it; PinExpiredError if another one has taken its place."""
        location = self._options.location
        if partition.pin:
            with suppress(StateMissingError):
                return open_logged(location, None, partition.pin)
        # There is no pin, or it has expired; the query may still retain the checkpoint.
        point = open_logged(location, self._options.uid, partition.batch)
        if point.checkpoint.token != partition.token:
            raise PinExpiredError(
                f"{point.name}: batch {partition.batch} was repeated after a repair while its state was read.",
                hint="Read again.",
            )
        return point

    def _keys(self, schema: pa.Schema) -> pa.Table | None:
        """The keys that the filters allow, if they are a list of values of each field."""
        if set(self._wanted) != set(schema.names):
            return None
        values = [self._wanted[name] for name in schema.names]
        if any(map(_may_be_rounded, itertools.chain(*values))):
            return None
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
        if self._options.show in _LISTS:
            kind, listed = _LISTS[self._options.show]
            infos = [asdict(one) for one in listed(self._options.location, self._options.uid)]
            yield from pa.Table.from_pylist(infos, _schema_of(kind)).to_batches()
            return
        point = self._point(partition)
        if partition.part is not None:
            point = replace(point, parts=[partition.part])
        table = chosen_table(point, self._options.state)
        for rows in open_rows(point, table, self._names, partition.keys):
            if rows is not None:
                yield rows.select(self._names)


class _KeyReader(_Reader):
    """A reader that takes keys from filters; Spark refuses such a reader if filter pushdown is off."""

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:
        """Note the values that filters allow; Spark applies all filters again."""
        for each in filters:
            kind, column = type(each).__name__, tuple(getattr(each, "attribute", ()))
            if len(column) == 1 and kind in ("EqualTo", "In") and column[0].startswith("key_"):
                values = [each.value] if kind == "EqualTo" else list(each.value)
                self._wanted.setdefault(column[0].removeprefix("key_"), values)
        return filters


def _may_be_rounded(value: Any) -> bool:
    """Whether Spark may have rounded a literal: it computes decimals in the context that Python has by default."""
    return isinstance(value, Decimal) and len(value.as_tuple().digits) >= getcontext().prec


def _schema_of(kind: type) -> pa.Schema:
    """The columns of a list."""
    types = {
        int: pa.int64(),
        str: pa.string(),
        bool: pa.bool_(),
        tuple[str, ...]: pa.list_(pa.string()),
        int | None: pa.int64(),
    }
    return pa.schema([pa.field(name, types[hint]) for name, hint in get_type_hints(kind).items()])
