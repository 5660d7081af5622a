"""Runs one batch again for one key, on the state and the rows that the query had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

from statelog.checkpoint.sample import SampledOperator
from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, ErrorKind, StateMissingError
from statelog.operators.keyed.operator import BatchContext, KeyedOperator, KeyedRows
from statelog.operators.keyed.subtask import KeyedSubtask
from statelog.operators.keyed.timers import TIMERS, timer_descriptor
from statelog.reading.batch_of_key import BatchOfKey, open_batch, sampled_operator
from statelog.reading.states import TIMERS_NAME
from statelog.runs.reader import Run
from statelog.runs.times import NO_TIME_MS
from statelog.stopwatch import Stopwatch
from statelog.streams.replayed_operator import OperatorArguments, described, make_operator
from statelog.tables.runs import RunsTable

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class Replay:
    """What a processor did when a batch was run again for one key, and what the log has of that batch.

    Parameters
    ----------
    uid : str
        The operator.
    batch : int
        The batch.
    key : dict of str to value
        The fields of the key.
    batch_time_ms, watermark_ms : int
        The batch's processing time and watermark, in milliseconds since the Unix epoch.
    rows : pyarrow.Table
        The input rows of the key, late ones included.
    is_order_known : bool
        Whether the rows are in the order in which the query processed them: they are those of a sample, or there are
        none. Given rows may have had another order.
    timers_ms : tuple of int
        The times of the key's timers that were due when the batch began, in milliseconds since the Unix epoch.
    output : pyarrow.Table
        The rows that the processor returned. The log has no output to compare them with.
    changes : dict of str to pyarrow.Table
        For each state the changes that the processor made now: the columns of :func:`read_changes` from ``operation``
        on, without the key. ``timers`` are the timers. Deletions of what was not there are left out.
    logged : dict of str to pyarrow.Table
        The changes of the batch in the log, in the same columns.
    """

    uid: str
    batch: int
    key: dict[str, Any]
    batch_time_ms: int
    watermark_ms: int
    rows: pa.Table
    is_order_known: bool
    timers_ms: tuple[int, ...]
    output: pa.Table
    changes: dict[str, pa.Table]
    logged: dict[str, pa.Table]

    @property
    def different_states(self) -> tuple[str, ...]:
        """The states whose changes are not those of the log."""
        # As text, because NaN is equal to NaN here.
        return tuple(
            name
            for name, made in self.changes.items()
            if list(map(repr, made.to_pylist())) != list(map(repr, self.logged[name].to_pylist()))
        )

    @property
    def is_equal(self) -> bool:
        """Whether the processor made the changes of the log again: it is deterministic, as far as this batch shows."""
        return not self.different_states


def replay(
    location: str | Path,
    batch: int,
    key: Any,
    processor: Any,
    *,
    uid: str | None = None,
    rows: pa.Table | pa.RecordBatch | pd.DataFrame | DataFrame | None = None,
    output: StructType | str | None = None,
    pandas: bool | None = None,
    eventTime: str | None = None,
    sessionTimeZone: str | None = None,
    breakpoint: bool = False,
) -> Replay:
    """Run a batch of an operator again for one key, on the state and the rows that the query had.

    A copy of the processor is called as in the batch, in this process and without Spark: with the key's rows, and then
    for each timer that was due. It reads the key's state at the checkpoint before the batch, and has the batch's times.
    Nothing is written but for a pin, and the query does not notice.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given.
    batch : int
        The batch. Its changes and the checkpoint before it must be retained.
    key : tuple, dict or value
        The key, as in :func:`read_state`.
    processor : StatefulProcessor or ArrowProcessor
        The processor, or another version of it.
    uid : str, optional
        The operator; needed if there are several.
    rows : pyarrow.Table, pyarrow.RecordBatch, pandas.DataFrame or pyspark.sql.DataFrame, optional
        The input rows of the batch, or those of the key; other keys' rows are left out. By default those of the sample
        that the query has stored with ``Options(sample_batches=...)``.
    output : StructType or str, optional
        Columns of the output.
    pandas : bool, optional
        Whether the processor takes and returns pandas frames.
    eventTime : str, optional
        The column with the event time, if the operator has a watermark.
    sessionTimeZone : str, optional
        Spark's session time zone. These four come from the samples of the query, if it has stored any since it was
        started; they are needed otherwise, where they are not the defaults (rows, no event time, UTC).
    breakpoint : bool
        Whether to stop in Python's debugger before each call of the processor.

    Returns
    -------
    Replay
        The rows, the output, and the changes beside those of the log.

    Raises
    ------
    ConfigurationError
        If there is no such operator; if it has no keys, no changes in its log (``Options(changelog=False)``), or no
        processor of yours, as windows and ready-made aggregates; if the key, the rows or the processor do not fit; or
        if nothing happened to the key in the batch.
    StateMissingError
        If the batch, its changes or the checkpoint before it are not retained, or there is no sample of the rows.
    ProcessorError
        If the processor fails.
    PinExpiredError, CorruptionError, StorageError
        As :func:`read_state`; CorruptionError also if the sample is damaged.

    Examples
    --------
    >>> again = statelog.replay("/data/checkpoints/flights", 1207, "a1b2c3", Count())  # doctest: +SKIP
    >>> again.is_equal, again.output.to_pylist()  # doctest: +SKIP
    (True, [{'aircraft': 'a1b2c3', 'n': 17}])
    """
    found = open_batch(str(location), batch, key, uid)
    _require_processor(found)
    given = None if rows is None else _as_table(rows)
    sampled = sampled_operator(found)
    arguments = OperatorArguments(output, pandas, eventTime, sessionTimeZone)
    operator_described = described(found, sampled, None if given is None else given.column_names, arguments)
    operator = make_operator(found, operator_described, processor, stops=breakpoint)
    own = _own_rows(found, operator_described) if given is None else _given_rows(found, operator_described, given)
    initial = _initial_rows(found, operator_described, may_have_some=sampled is None and _takes_initial(processor))
    timers_ms = _due_timers(found, operator)
    if not own.num_rows and not timers_ms and initial is None:
        raise ConfigurationError(
            f"Nothing happened to {found.name}: it had no rows, and no timer was due.",
            kind=ErrorKind.VALUE_MISMATCH,
            hint="read_history(location, key) tells in which batches the key changed.",
        )
    subtask = KeyedSubtask(operator, RunsTable([found.before]), _context(found), Stopwatch(SystemClock()))
    returned = list(subtask.process(_keyed(found, own), None if initial is None else _keyed(found, initial)))
    declared = {one.name: replace(one.descriptor, name=one.name).to_stored() for one in operator.states}
    return Replay(
        uid=found.checkpoint.uid,
        batch=batch,
        key=found.key_values,
        batch_time_ms=found.checkpoint.batch_time_ms,
        watermark_ms=found.checkpoint.watermark_ms,
        rows=own.rename_columns(operator_described.columns) if own.num_columns else own,
        is_order_known=given is None,
        timers_ms=timers_ms,
        output=pa.Table.from_batches(returned, operator.output.encode([], str).schema),
        changes=_by_shown_name(found.changes(_changes_of(subtask), declared)),
        logged=_by_shown_name(found.changes(found.logged, declared)),
    )


def _require_processor(found: BatchOfKey) -> None:
    settings = found.checkpoint.settings
    if "results" in settings or settings.get("windows", "none") != "none":
        raise ConfigurationError(
            f"{found.source.name} has no processor of yours: it is made of windows or ready-made aggregates.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Only operators of transformWithState, ...InPandas and ...InArrow can be replayed.",
        )


def _context(found: BatchOfKey) -> BatchContext:
    return BatchContext(found.checkpoint.epoch, found.checkpoint.batch, found.moment)


def _keyed(found: BatchOfKey, rows: pa.Table) -> KeyedRows:
    return KeyedRows(rows, np.repeat(found.key.hashes, rows.num_rows))


def _own_rows(found: BatchOfKey, operator: SampledOperator) -> pa.Table:
    """The rows of the key in the sample; StateMissingError if there is none."""
    if found.sample is None:
        if not found.has_input:
            return pa.table({})
        raise StateMissingError(
            f"{found.name}: there is no sample of the rows of subtask {found.subtask}.",
            kind=ErrorKind.OBJECT_MISSING,
            hint="Pass the rows as rows=. Options(sample_batches=K) has a query store those of its newest K batches.",
        )
    if found.sample.header.left_out_bytes:
        raise StateMissingError(
            f"{found.name}: the sample of subtask {found.subtask} was left out, because its rows took"
            f" {found.sample.header.left_out_bytes:,} bytes.",
            kind=ErrorKind.TOO_LARGE,
            hint="Pass the rows as rows=. Options(sample_max_bytes=...) allows larger samples.",
        )
    return found.rows_of_key(found.sample.rows, operator.key_columns)


def _takes_initial(processor: Any) -> bool:
    ignored = StatefulProcessor.handleInitialState
    return getattr(type(processor), "handleInitialState", ignored) is not ignored


def _initial_rows(found: BatchOfKey, operator: SampledOperator, *, may_have_some: bool) -> pa.Table | None:
    """The key's rows of an initial state; StateMissingError if there may be some that no sample has."""
    sample = found.sample
    if found.checkpoint.batch != 0:
        return None
    if sample is None or (sample.header.has_initial and sample.header.left_out_bytes):
        if operator.initial_columns or may_have_some:
            raise StateMissingError(
                f"{found.name}: it may have had rows of an initial state, and there is no sample of them.",
                kind=ErrorKind.INITIAL_STATE,
                hint="Replay a later batch.",
            )
        return None
    if sample.initial is None:
        return None
    rows = found.rows_of_key(sample.initial, operator.initial_key_columns)
    return rows if rows.num_rows else None


def _due_timers(found: BatchOfKey, operator: KeyedOperator) -> tuple[int, ...]:
    """The times of the key's timers that are due in the batch, as far as they were registered before it."""
    domain = operator.timer_domain
    if domain is None:
        return ()
    until_ms = found.moment.now_ms(domain)
    return tuple(RunsTable([found.before]).due_timers(timer_descriptor(domain), NO_TIME_MS, until_ms).times_ms.tolist())


def _changes_of(subtask: KeyedSubtask) -> Run:
    sink = pa.BufferOutputStream()
    subtask.changes.write_local(sink)
    return Run(sink.getvalue(), "changes of a replay")


def _by_shown_name(changes: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
    has_own = TIMERS_NAME in changes
    return {TIMERS_NAME if name == TIMERS and not has_own else name: rows for name, rows in changes.items()}


# ---- Given rows ----


def _as_table(rows: Any) -> pa.Table:
    """Given rows as a table; ConfigurationError if they are none."""
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if isinstance(rows, pa.Table):
        return rows
    if hasattr(rows, "toArrow"):
        return rows.toArrow()
    try:
        return pa.Table.from_pandas(rows, preserve_index=False)
    except (AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"rows is {rows!r:.80}.", hint="Pass a pyarrow.Table, a pandas.DataFrame or a DataFrame of Spark."
        ) from error


def _given_rows(found: BatchOfKey, operator: SampledOperator, given: pa.Table) -> pa.Table:
    """The rows of the key among given ones, in the operator's columns and in types of Spark."""
    missing = [name for name in operator.columns if name not in given.column_names]
    if missing:
        raise ConfigurationError(
            f"{found.name}: the rows have no column '{missing[0]}'.",
            kind=ErrorKind.OTHER_SCHEMA,
            hint=f"They have {', '.join(given.column_names)}, and need {', '.join(operator.columns)}.",
        )
    keys = {
        operator.columns[place]: field.type
        for place, field in zip(operator.key_columns, found.codec.schema, strict=True)
    }
    known = found.sample.rows.schema if found.sample is not None else pa.schema([])
    columns: list[pa.ChunkedArray] = []
    for name in operator.columns:
        column = given.column(name)
        wanted = known.field(name).type if name in known.names else _spark_type(keys.get(name, column.type), operator)
        try:
            columns.append(column.cast(wanted))
        except pa.ArrowException as error:
            raise ConfigurationError(
                f"{found.name}: column '{name}' of the rows is {column.type}, and {wanted} is needed: {error}.",
                kind=ErrorKind.OTHER_SCHEMA,
                hint="Cast it.",
            ) from error
    return found.rows_of_key(pa.Table.from_arrays(columns, operator.columns), operator.key_columns)


def _spark_type(kind: pa.DataType, operator: SampledOperator) -> pa.DataType:
    """The type in which Spark hands on a column of a type."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", operator.session_zone if kind.tz else None)
    if pa.types.is_large_string(kind):
        return pa.string()
    return pa.binary() if pa.types.is_large_binary(kind) else kind
