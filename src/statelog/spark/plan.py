"""The user's entry: a keyed stream, and the plan that a stateful operator becomes."""

from __future__ import annotations

import itertools
import os
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from statelog.errors import ConfigurationError, ErrorKind
from statelog.options import Options
from statelog.spark.arguments import (
    check_session,
    checked_parallelism,
    checked_uid,
    parse_output,
    pickled_processor,
    require_endpoint,
    task_function,
)
from statelog.spark.declare import declare_states
from statelog.spark.endpoint import OperatorPlan
from statelog.spark.types import key_schema
from statelog.spark.worker import HASH_COLUMN, TIME_COLUMN, SubtaskSpec, bind_state
from statelog.state.key_groups import GROUP_SHIFT, KEY_GROUPS
from statelog.state.keys import KeyCodec
from statelog.state.schema import encode_schema

__all__ = ["KeyedStream", "key_by"]

_OUTPUT_MODES = ("append", "update", "complete")
_instances = itertools.count()


def key_by(df: DataFrame, *cols: str) -> KeyedStream:
    """Key a DataFrame by columns, like ``df.groupBy(*cols)``.

    Parameters
    ----------
    df : DataFrame
        A streaming DataFrame, or a batch one: then the state is empty at first and not kept.
    *cols : str
        Names of the grouping columns; at least one.

    Returns
    -------
    KeyedStream
        What ``transformWithState`` is called on.

    Raises
    ------
    ConfigurationError
        If a column does not exist, or its type cannot be a key.

    Examples
    --------
    >>> counts = statelog.key_by(events, "user").transformWithState(  # doctest: +SKIP
    ...     Counter(), "user string, count long", "update", "None"
    ... )
    """
    if not isinstance(df, DataFrame):
        raise ConfigurationError(f"key_by takes a DataFrame, not {type(df).__name__}.")
    if not cols or not all(isinstance(name, str) for name in cols):
        raise ConfigurationError(
            f"key_by takes names of columns, not {cols!r}.", hint="Make a column of an expression first."
        )
    unknown = [name for name in cols if name not in df.columns]
    if unknown:
        raise ConfigurationError(f"key_by: there is no column {unknown[0]!r}; the columns are {', '.join(df.columns)}.")
    doubled = [name for name in df.columns if df.columns.count(name) > 1]
    if doubled:
        raise ConfigurationError(f"key_by: two columns are named {doubled[0]!r}.", hint="Rename one of them first.")
    KeyCodec(key_schema(df.schema, list(cols)))
    return KeyedStream(df, list(cols))


class KeyedStream:
    """A DataFrame keyed by columns; made by :func:`key_by`."""

    def __init__(self, df: DataFrame, columns: list[str]) -> None:
        self._df = df
        self._columns = columns

    def transformWithState(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: Any = None,
        eventTimeColumnName: str = "",
        *,
        uid: str | None = None,
        parallelism: int | None = None,
        location: str | None = None,
        options: Options | None = None,
    ) -> DataFrame:
        """Apply a stateful processor to each key, as Spark's method of this name does.

        Parameters
        ----------
        statefulProcessor : StatefulProcessor
            A processor as written for Spark's ``transformWithState`` with rows.
        outputStructType : StructType or str
            Type of the output rows.
        outputMode : {"append", "update", "complete"}
            As Spark's; it has no effect on what the processor does.
        timeMode : {"None"}
            As Spark's; time modes with timers are not supported yet.
        initialState : None
            Not supported yet.
        eventTimeColumnName : str
            Not supported yet.
        uid : str, optional
            The operator's name in the checkpoint. It must be given, and differ, once a query has two
            stateful operators.
        parallelism : int, optional
            Number of subtasks, from 1 to 32,768; may differ at every start. The default is the
            application's number of cores.
        location : str, optional
            Where the state is kept: a directory that driver and executors share. The default is the folder
            ``statelog`` below the query's checkpointLocation.
        options : Options, optional
            Options.

        Returns
        -------
        DataFrame
            The output rows; a streaming DataFrame if the input is one.

        Raises
        ------
        ConfigurationError
            If an argument or a setting of the session is not supported.
        ProcessorError
            If the processor cannot be pickled, or its ``init`` fails.
        """
        session = self._df.sparkSession
        _check_arguments(statefulProcessor, outputMode, timeMode, initialState, eventTimeColumnName)
        check_session(session)
        uid = checked_uid(uid)
        subtasks = checked_parallelism(parallelism, session)
        settings = options or Options()
        output = parse_output(session, outputStructType)
        processor = pickled_processor(statefulProcessor, uid)
        states = declare_states(processor, session, uid)
        keys = key_schema(self._df.schema, self._columns)
        plan = OperatorPlan(
            instance=f"{os.getpid()}-{next(_instances)}",
            session=session,
            uid=uid,
            parallelism=subtasks,
            location=location,
            key_schema=encode_schema(keys),
            states=[bind_state(state).descriptor.to_stored() for state in sorted(states, key=lambda s: s.name)],
            options=settings,
        )
        host, port, secret = "", 0, b""
        if self._df.isStreaming:
            host, endpoint = require_endpoint(session)
            endpoint.register(plan)
            port, secret = endpoint.port, endpoint.secret
        spec = SubtaskSpec(
            uid=uid,
            instance=plan.instance,
            parallelism=subtasks,
            is_streaming=self._df.isStreaming,
            key_schema=keys,
            columns=self._df.columns,
            key_columns=[self._df.columns.index(name) for name in self._columns],
            states=states,
            output_schema=output,
            processor=processor,
            options=settings,
            host=host,
            port=port,
            secret=secret,
        )
        return self._operator(spec, output)

    def _operator(self, spec: SubtaskSpec, output: StructType) -> DataFrame:
        # mapInArrow cannot take columns whose names need quoting, so names of our own stand in for them.
        plain = self._df.toDF(*[f"c{index}" for index in range(len(self._df.columns))])
        key_hash = F.xxhash64(*[F.col(f"c{index}") for index in spec.key_columns])
        rows = plain.withColumns({HASH_COLUMN: key_hash, TIME_COLUMN: F.unix_millis(F.current_timestamp())})
        if spec.is_streaming:
            # Spark folds away a branch that it can prove empty, and then the batch would miss an operator;
            # it does not fold what is observed.
            rows = rows.observe(f"statelog {spec.uid} {spec.instance}", F.count(F.lit(1)).alias("rows"))
        group = F.shiftrightunsigned(F.col(HASH_COLUMN), GROUP_SHIFT)
        subtask = F.floor(group * spec.parallelism / KEY_GROUPS).cast("int")
        return rows.repartitionById(spec.parallelism, subtask).mapInArrow(task_function(spec), output)


def _check_arguments(
    processor: object, output_mode: str, time_mode: str, initial_state: object, event_time_column: str
) -> None:
    missing = [name for name in ("init", "handleInputRows", "close") if not hasattr(processor, name)]
    if missing or isinstance(processor, type):
        raise ConfigurationError(
            f"statefulProcessor must be an instance of StatefulProcessor, not {processor!r}.",
            hint="Pass an object, not a class, that has init, handleInputRows and close.",
        )
    if str(output_mode).lower() not in _OUTPUT_MODES:
        raise ConfigurationError(f"outputMode is {output_mode!r}.", hint="It must be 'append', 'update' or 'complete'.")
    if str(time_mode).lower() in ("processingtime", "eventtime") or event_time_column:
        raise _not_yet("Timers (timeMode other than 'None', eventTimeColumnName)")
    if str(time_mode).lower() != "none":
        raise ConfigurationError(f"timeMode is {time_mode!r}.", hint="It must be 'None'.")
    if initial_state is not None:
        raise _not_yet("initialState")


def _not_yet(feature: str) -> ConfigurationError:
    return ConfigurationError(
        f"{feature} is not supported yet.",
        kind=ErrorKind.UNSUPPORTED_FEATURE,
        hint="Use Spark's own transformWithState for it.",
    )
