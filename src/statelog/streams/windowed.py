"""Windowed streams: the operators that apply to the windows of a keyed stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from statelog.aggregates.functions import Aggregate
from statelog.convert.times import TimeMode
from statelog.errors import ConfigurationError
from statelog.numbers import Duration, in_milliseconds
from statelog.operators.keyed.cursor import Row
from statelog.operators.keyed.values import AggregateFunction
from statelog.runs.times import Watermark
from statelog.spark.plan.checks import is_ansi, is_case_sensitive
from statelog.spark.plan.keyed_plan import WATERMARK_DELAY, KeyedFrame, SparkArguments, watermark_column
from statelog.streams.grouping import KeyedInput, marked_columns
from statelog.windows.assigners import CountWindows, WindowAssigner
from statelog.windows.build import WindowDefinition, WindowPlan
from statelog.windows.processor import WindowProcessor


class WindowedStream:
    """A keyed stream cut into windows; made by :meth:`statelog.KeyedStream.window`.

    Each method applies an operator and returns its output as a DataFrame. `eventTimeColumnName` is that of
    :meth:`statelog.KeyedStream.transformWithState`.
    """

    def __init__(self, keyed: KeyedInput, definition: WindowDefinition) -> None:
        self._keyed = keyed
        self._definition = definition

    def agg(
        self,
        *aggregates: Aggregate,
        eventTimeColumnName: str = "",
    ) -> DataFrame:
        """Aggregate each window with ready-made aggregates.

        Parameters
        ----------
        *aggregates : Aggregate
            Such as ``statelog.Count()`` and ``statelog.Sum("amount").alias("total")``; at least one.

        Returns
        -------
        DataFrame
            The grouping columns, ``window_start``, ``window_end``, and a column per aggregate.

        Raises
        ------
        ConfigurationError
            If a column does not exist, or has a type that an aggregate cannot take.
        """
        plan = self._definition.aggregated(aggregates)
        return self._build(plan, eventTimeColumnName)

    def aggregate(
        self,
        aggregate_function: AggregateFunction[Any, Any],
        accumulator_schema: StructType | str,
        result_type: StructType | str,
        *,
        eventTimeColumnName: str = "",
    ) -> DataFrame:
        """Aggregate each window with your own function, which gets the rows.

        Parameters
        ----------
        aggregate_function : AggregateFunction
            Its results are tuples of `result_type`. For sliding and session windows it needs ``merge``.
        accumulator_schema, result_type : StructType or str
            Fields of the accumulator, and of the result.

        Returns
        -------
        DataFrame
            The grouping columns, ``window_start``, ``window_end``, and the fields of the result.

        Raises
        ------
        ConfigurationError
            If the function lacks a method, or a schema is not supported.
        """
        plan = self._definition.folded(aggregate_function, accumulator_schema, result_type)
        return self._build(plan, eventTimeColumnName)

    def reduce(
        self,
        reduce_function: Callable[[Row, Row], Row],
        value_schema: StructType | str,
        value_of: Callable[[Any], Row] | None = None,
        *,
        eventTimeColumnName: str = "",
    ) -> DataFrame:
        """Reduce the values of each window to one.

        Parameters
        ----------
        reduce_function : callable
            Takes two values, tuples of `value_schema`, and returns one. It must be associative.
        value_schema : StructType or str
            Fields of a value.
        value_of : callable, optional
            Makes the value of a row; by default the value has the row's columns with the names in `value_schema`.

        Returns
        -------
        DataFrame
            The grouping columns, ``window_start``, ``window_end``, and the fields of the value.

        Raises
        ------
        ConfigurationError
            If the schema is not supported, or names columns that do not exist.
        """
        plan = self._definition.reduced(reduce_function, value_schema, value_of)
        return self._build(plan, eventTimeColumnName)

    def process(
        self,
        window_processor: WindowProcessor,
        outputStructType: StructType | str,
        *,
        eventTimeColumnName: str = "",
    ) -> DataFrame:
        """Give all rows of each window to a processor.

        Parameters
        ----------
        window_processor : WindowProcessor
            The processor, an instance of a subclass.
        outputStructType : StructType or str
            Type of the rows that the processor returns.

        Returns
        -------
        DataFrame
            The rows that the processor returns.

        Raises
        ------
        ConfigurationError
            If a type is not supported.
        """
        plan = self._definition.processed(window_processor, outputStructType)
        return self._apply(plan, eventTimeColumnName)

    def _build(self, plan: WindowPlan, event_time_column: str) -> DataFrame:
        lateness_ms = self._definition.allowed_lateness_ms
        if event_time_column and lateness_ms:
            raise ConfigurationError(
                f"The windows have an allowed_lateness of {lateness_ms} ms, and eventTimeColumnName is"
                f" {event_time_column!r}: a result that late rows have changed would be late for the next operator.",
                hint="Omit allowed_lateness or eventTimeColumnName. With late_column, late rows are returned instead.",
            )
        return self._apply(plan, event_time_column)

    def _apply(self, plan: WindowPlan, event_time_column: str) -> DataFrame:
        arguments = SparkArguments(plan.operator, plan.output, "append", plan.time_mode, event_time_column)
        return self._keyed.apply(arguments, plan.operator.codecs)


def window_time_mode(windows: object, text: str | None) -> TimeMode:
    """The time mode of windows, from the user's name for it; raises ConfigurationError if they do not fit together."""
    if isinstance(windows, CountWindows):
        if text is not None and TimeMode.parse(text) is not TimeMode.NONE:
            raise ConfigurationError(
                f"timeMode is {text!r}, but CountWindows do not depend on time.", hint="Omit timeMode."
            )
        return TimeMode.NONE
    mode = TimeMode.EVENT_TIME if text is None else TimeMode.parse(text)
    if mode is TimeMode.NONE:
        raise ConfigurationError(
            "timeMode is 'None', but windows of time need one.", hint="Use 'EventTime' or 'ProcessingTime'."
        )
    return mode


def window_time_column(df: DataFrame, asked: str | None, watermark: Watermark | None) -> str:
    """The column of event time, which in a stream must be the column with the watermark."""
    marked = marked_columns(df)
    if watermark is not None:
        marked = [watermark.column]
    if asked is not None and (not df.isStreaming or asked in marked):
        return asked
    if not marked:
        raise ConfigurationError(
            "Windows in event time need "
            + ("a watermark, but the input has none." if df.isStreaming else "a time column."),
            hint="Call withWatermark(column, delay) on the DataFrame before key_by, or pass it watermark=."
            if df.isStreaming
            else "Pass time_column.",
        )
    if asked is not None:
        raise ConfigurationError(
            f"time_column is {asked!r}, but column {marked[0]!r} has the watermark.",
            hint="Omit time_column, or give that column the watermark, which determines when windows are complete.",
        )
    return marked[0]


def on_time(df: DataFrame, late_column: str) -> DataFrame:
    """Select the results from the output of windows with a column of late rows; drop that column.

    Parameters
    ----------
    df : DataFrame
        The output of the windows.
    late_column : str
        The column of late rows, as given to :meth:`statelog.KeyedStream.window`.

    Returns
    -------
    DataFrame
        The results, without that column.

    Raises
    ------
    ConfigurationError
        If there is no such column.
    """
    column = _late_column(df, late_column)
    return df.where(column.isNull()).drop(late_column)


def late(df: DataFrame, late_column: str) -> DataFrame:
    """Select the rows that came too late from the output of windows with a column of late rows.

    They are returned as they came in; :func:`on_time`, which has the same parameters and errors, selects all others.
    """
    column = _late_column(df, late_column)
    return df.where(column.isNotNull()).select(column.alias("late")).select("late.*")


def _late_column(df: DataFrame, name: str) -> Any:
    if name not in df.columns or not isinstance(df.schema[name].dataType, StructType):
        raise ConfigurationError(
            f"There is no column {name!r} of late rows; the columns are {', '.join(df.columns)}.",
            hint="Pass the late_column that the windows were made with.",
        )
    return F.col("`" + name.replace("`", "``") + "`")


def dedup_delay_ms(frame: KeyedFrame, watermark: Watermark | None) -> int:
    """The delay of the watermark within which `dedup` finds copies; raises ConfigurationError if there is none."""
    if watermark is not None:
        return watermark.delay_ms
    schema = frame.df.schema
    marked = watermark_column(schema, frame.columns)
    if marked is None:
        raise ConfigurationError(
            "dedup: within_watermark needs a watermark, but the input has none.",
            hint="Call withWatermark(column, delay) on the DataFrame before key_by, or pass it watermark=.",
        )
    return int(schema[marked].metadata[WATERMARK_DELAY])


def windowed(
    keyed: KeyedInput,
    windows: WindowAssigner,
    time_mode: str | None,
    time_column: str | None,
    allowed_lateness: Duration,
    late_column: str | None,
) -> WindowedStream:
    """Cut a keyed stream into windows; raises ConfigurationError if the arguments cannot be combined."""
    df, watermark = keyed.frame.df, keyed.own.watermark
    mode = window_time_mode(windows, time_mode)
    if mode is not TimeMode.EVENT_TIME and (time_column is not None or watermark is not None):
        raise ConfigurationError(
            "time_column and watermark apply in event time only.",
            hint="Omit them, or use timeMode 'EventTime' with tumbling, sliding or session windows.",
        )
    if mode is TimeMode.PROCESSING_TIME and not df.isStreaming:
        raise ConfigurationError(
            "timeMode is 'ProcessingTime', but the DataFrame is a batch: all of its rows have one processing time.",
            hint="Use event time with time_column.",
        )
    definition = WindowDefinition(
        schema=df.schema,
        keys=keyed.frame.columns,
        zone=str(df.sparkSession.conf.get("spark.sql.session.timeZone")),
        windows=windows,
        time_mode=mode,
        time_column=window_time_column(df, time_column, watermark) if mode is TimeMode.EVENT_TIME else None,
        allowed_lateness_ms=in_milliseconds(allowed_lateness, "allowed_lateness", least=0),
        late_column=late_column,
        ansi=is_ansi(df.sparkSession),
        is_case_sensitive=is_case_sensitive(df.sparkSession),
    )
    return WindowedStream(keyed, definition)
