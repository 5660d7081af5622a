"""Keyed streams: ``key_by``, and the operators that apply to its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from statelog.aggregates.build import plan_aggregates, plan_deduplication, plan_latest, plan_top
from statelog.aggregates.functions import Aggregate
from statelog.convert.arrow import ArrowProcessor
from statelog.convert.codecs import ArrowCodecs, FrameCodecs, RowCodecs
from statelog.errors import ConfigurationError
from statelog.numbers import Duration
from statelog.options import Options
from statelog.runs.times import Ttl, Watermark
from statelog.spark.plan.checks import require_classic
from statelog.spark.plan.keyed_plan import KeyedFrame, SparkArguments
from statelog.spark.plan.plan import StatelogArguments
from statelog.streams.grouping import KeyedInput, checked_initial, keyed_frame
from statelog.streams.joined import JoinedSides
from statelog.streams.windowed import WindowedStream, dedup_delay_ms, windowed
from statelog.windows.assigners import WindowAssigner


def key_by(
    df: DataFrame,
    *cols: str | Column | Sequence[str | Column],
    uid: str | None = None,
    parallelism: int | None = None,
    location: str | None = None,
    options: Options | None = None,
    watermark: Watermark | None = None,
) -> KeyedStream:
    """Key a DataFrame by columns, like ``df.groupBy(*cols)``.

    Parameters
    ----------
    df : DataFrame
        A streaming or batch DataFrame. In a batch query, state starts empty and is discarded afterwards.
    *cols : str or Column, or a list of them
        The grouping columns, at least one, as in ``df.groupBy``. An expression, or a field of a struct, becomes a new
        column in front of the others.
    uid : str, optional
        The operator's name in the checkpoint. A query with two or more stateful operators needs a different uid
        for each, so a keyed stream with a uid takes one operator.
    parallelism : int, optional
        Number of subtasks, from 1 to 32,768; may differ at every start. The default is the application's number of
        cores.
    location : str, optional
        The directory of the state, which driver and executors must share, or a folder in an object store or in HDFS.
        The default is the folder ``statelog`` below the query's checkpointLocation.
    options : Options, optional
        The operator's options; the defaults if None.
    watermark : Watermark, optional
        A watermark of the operator's own, instead of Spark's.

    Returns
    -------
    KeyedStream
        The keyed stream, which has the methods ``transformWithState``, ``agg`` and ``window``.

    Raises
    ------
    ConfigurationError
        If a column does not exist, or its type cannot be a key. The method that applies the operator checks the other
        arguments.

    Examples
    --------
    >>> counts = statelog.key_by(events, "user").transformWithState(  # doctest: +SKIP
    ...     Counter(), "user string, count long", "update", "None"
    ... )
    """
    if not isinstance(df, DataFrame):
        raise ConfigurationError(f"key_by takes a DataFrame, not {type(df).__name__}.")
    require_classic(df.sparkSession)
    given: list[Any] = list(cols[0]) if len(cols) == 1 and isinstance(cols[0], (list, tuple)) else list(cols)
    if not given:
        raise ConfigurationError("key_by was called without a column.", hint="Name at least one grouping column.")
    if watermark is not None and not isinstance(watermark, Watermark):
        raise ConfigurationError(f"watermark is {watermark!r:.80}.", hint="Pass statelog.Watermark(column, delay).")
    own = StatelogArguments(uid, parallelism, location, options, watermark)
    return KeyedStream(KeyedInput(keyed_frame(df, given), own))


class KeyedStream:
    """A DataFrame keyed by columns; made by :func:`key_by`."""

    def __init__(self, keyed: KeyedInput) -> None:
        self._keyed = keyed

    def transformWithState(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: KeyedStream | Mapping[str, DataFrame] | None = None,
        eventTimeColumnName: str = "",
    ) -> DataFrame:
        """Apply a stateful processor to each key, as Spark's method of this name does.

        Parameters
        ----------
        statefulProcessor : StatefulProcessor
            A processor as written for Spark's ``transformWithState``: it takes and returns rows.
        outputStructType : StructType or str
            Type of the output rows.
        outputMode : {"append", "update", "complete"}
            One of Spark's output modes. It has no effect on the processor.
        timeMode : {"None", "ProcessingTime", "EventTime"}
            The time that the processor sees and that fires its timers: none, the batches' processing time, or the
            watermark. Event time needs a column with ``withWatermark``, or the `watermark` of :func:`key_by`.
        initialState : KeyedStream, or mapping of str to DataFrame, optional
            The state before the first batch. The rows of a keyed batch DataFrame are passed to ``handleInitialState``
            before the first rows of the stream; its grouping columns must have the same types as the stream's. A
            mapping has a batch DataFrame for each state, by name, which is loaded as is; timers are ``$timers``. Its
            columns are those of a savepoint's tables: ``key_<grouping column>``, ``value_<field>``, ``mapkey_<field>``
            of a map, ``position`` of a list's elements, ``time_ms`` of timers. A column of another type is converted if
            nothing can be lost, and refused otherwise; docs/savepoints.md has the rule.
        eventTimeColumnName : str
            The output column that a later operator uses as event time.

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
        initial, tables = self._initial(initialState)
        arguments = SparkArguments(
            statefulProcessor, outputStructType, outputMode, timeMode, eventTimeColumnName, initial, tables
        )
        return self._keyed.apply(arguments, RowCodecs())

    def transformWithStateInPandas(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: KeyedStream | Mapping[str, DataFrame] | None = None,
        eventTimeColumnName: str = "",
    ) -> DataFrame:
        """Apply a stateful processor that takes and returns pandas frames, as Spark's method of this name does.

        The parameters, the result and the errors are those of :meth:`transformWithState`. The processor gets each
        key's rows in frames of at most ``spark.sql.execution.arrow.maxRecordsPerBatch`` rows.
        """
        initial, tables = self._initial(initialState)
        arguments = SparkArguments(
            statefulProcessor, outputStructType, outputMode, timeMode, eventTimeColumnName, initial, tables
        )
        return self._keyed.apply(arguments, FrameCodecs.of(self._keyed.frame.df.sparkSession.conf.get))

    def transformWithStateInArrow(
        self,
        arrow_processor: ArrowProcessor,
        outputStructType: StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: Mapping[str, DataFrame] | None = None,
        eventTimeColumnName: str = "",
    ) -> DataFrame:
        """Apply a processor that takes the rows of many keys at once, as Arrow columns.

        The parameters, the result and the errors are those of :meth:`transformWithState`; the processor is an
        :class:`statelog.ArrowProcessor`.
        """
        if not isinstance(arrow_processor, ArrowProcessor):
            raise ConfigurationError(
                f"arrow_processor must be an instance of statelog.ArrowProcessor, not {arrow_processor!r}.",
                hint="For processors called key by key, use transformWithState or transformWithStateInPandas.",
            )
        initial, tables = self._initial(initialState)
        if initial is not None:
            raise ConfigurationError(
                "initialState is a keyed stream, but an ArrowProcessor has no handleInitialState.",
                hint="Pass a mapping with a DataFrame for each state.",
            )
        arguments = SparkArguments(
            arrow_processor, outputStructType, outputMode, timeMode, eventTimeColumnName, tables=tables
        )
        return self._keyed.apply(arguments, ArrowCodecs())

    def agg(
        self,
        *aggregates: Aggregate,
        outputMode: str = "update",
        ttl: Duration | Ttl | None = None,
        combine: bool = False,
        eventTimeColumnName: str = "",
        **named: Aggregate,
    ) -> DataFrame:
        """Aggregate the rows of each key, like ``df.groupBy(...).agg(...)``.

        Values, types, nulls and overflow are those of Spark's own aggregates.

        Parameters
        ----------
        *aggregates : Aggregate
            Such as ``statelog.Count()`` and ``statelog.Sum("amount").alias("total")``.
        outputMode : {"update", "append"}
            With "update", a key is returned in each batch that has rows of it; with "append", once, when it is
            complete. A batch query returns every key once.
        ttl : int, timedelta, str or Ttl, optional
            A key is complete, and forgotten, this many milliseconds after its last row. If a grouping column has the
            watermark, a key is complete when the watermark passes it, and late rows are dropped. Other keys are kept.
        combine : bool
            Whether rows are also aggregated before the shuffle, as in Spark. This step in Python pays off for large
            batches of few or hot keys. Aggregates that depend on the order of arrival are never combined.
        eventTimeColumnName
            As in :meth:`transformWithState`.
        **named : Aggregate
            Aggregates by the names of their output columns.

        Returns
        -------
        DataFrame
            The grouping columns, and a column per aggregate.

        Raises
        ------
        ConfigurationError
            If a column does not exist, has a type that an aggregate cannot take, or the arguments cannot be combined.

        Examples
        --------
        >>> totals = statelog.key_by(orders, "user").agg(n=Count(), total=Sum("amount"))  # doctest: +SKIP
        """
        plan = plan_aggregates(
            self._keyed.definition, aggregates, named, output_mode=outputMode, ttl=ttl, combine=combine
        )
        return self._keyed.apply_planned(plan, outputMode, eventTimeColumnName)

    def dedup(
        self,
        ttl: Duration | Ttl | None = None,
        within_watermark: bool = False,
        *,
        eventTimeColumnName: str = "",
    ) -> DataFrame:
        """Return the first row of each key, like ``df.dropDuplicates(...)`` on the grouping columns.

        Parameters
        ----------
        ttl : int, timedelta, str or Ttl, optional
            A key is remembered for this many milliseconds after the row that was returned; by default forever.
        within_watermark : bool
            Whether keys are remembered for the watermark's delay in event time, and late rows dropped, like
            ``dropDuplicatesWithinWatermark``.
        eventTimeColumnName
            As in :meth:`transformWithState`; late rows are then dropped and counted.

        Returns
        -------
        DataFrame
            The columns of the input.

        Raises
        ------
        ConfigurationError
            If the arguments cannot be combined.
        """
        delay_ms = dedup_delay_ms(self._keyed.frame, self._keyed.own.watermark) if within_watermark else None
        plan = plan_deduplication(self._keyed.definition, ttl, delay_ms, drops_late=bool(eventTimeColumnName))
        return self._keyed.apply_planned(plan, "append", eventTimeColumnName)

    def latest(
        self,
        by: str,
        ttl: Duration | Ttl | None = None,
        *,
        combine: bool = False,
        eventTimeColumnName: str = "",
    ) -> DataFrame:
        """Return the newest row of each key that had rows in the batch.

        Parameters
        ----------
        by : str
            The column that orders rows: the row with its greatest value is the newest; of several, the last to arrive.
        ttl : int, timedelta, str or Ttl, optional
            A key is forgotten this many milliseconds after its last row.
        combine, eventTimeColumnName
            As in :meth:`agg` and :meth:`dedup`.

        Returns
        -------
        DataFrame
            The grouping columns, and the other columns of the input.

        Raises
        ------
        ConfigurationError
            If there is no such column, or its values have no order.
        """
        plan = plan_latest(self._keyed.definition, by, ttl, combine=combine, drops_late=bool(eventTimeColumnName))
        return self._keyed.apply_planned(plan, "update", eventTimeColumnName)

    def top(
        self,
        n: int,
        by: str,
        ttl: Duration | Ttl | None = None,
        *,
        combine: bool = False,
        eventTimeColumnName: str = "",
    ) -> DataFrame:
        """Return the `n` greatest rows of each key that had rows in the batch; they take at most 64 MB per key.

        Parameters
        ----------
        n : int
            The number of rows, at least 1.
        by : str
            The column that orders rows; of rows with the same value, the first to arrive count.
        ttl : int, timedelta, str or Ttl, optional
            A key is forgotten this many milliseconds after its last row.
        combine, eventTimeColumnName
            As in :meth:`agg`.

        Returns
        -------
        DataFrame
            The grouping columns, ``rank`` from 1, the column `by`, and the other columns of the input.

        Raises
        ------
        ConfigurationError
            If there is no such column, or its values have no order.
        """
        plan = plan_top(self._keyed.definition, n, by, ttl, combine=combine)
        return self._keyed.apply_planned(plan, "update", eventTimeColumnName)

    def join_interval(
        self,
        right: KeyedStream,
        *,
        lower: Duration,
        upper: Duration,
        how: str = "inner",
        condition: pc.Expression | None = None,
        timeout: Duration | None = None,
        suffixes: Sequence[str] = ("_left", "_right"),
    ) -> DataFrame:
        """Join with the rows of another keyed stream that have the same key and a nearby time.

        The event time of each side is the column of its `watermark`. A right row matches a left row if its time is from
        the left row's time plus `lower` to that time plus `upper`. A null in a key or a time matches nothing.

        Parameters
        ----------
        right : KeyedStream
            The right side, keyed by columns of the same types. The operator's uid, parallelism, location and options
            are those of the left side.
        lower, upper : int, timedelta or str
            The bounds, which are part of the interval: milliseconds, a timedelta, or words such as "-10 seconds".
        how : {"inner", "left", "right", "full", "semi", "anti"}
            The rows that are returned: pairs; pairs and the rows without a match of the left side, the right side or
            both; or only the left rows with a match ("semi") or without one ("anti"). A row without a match is returned
            when the watermark has passed its interval.
        condition : pyarrow.compute.Expression, optional
            A further condition on a pair, over its output columns: ``pc.field("euro") >= pc.field("price")``. If it is
            false or null, the pair is not a match.
        timeout : int, timedelta or str, optional
            How long in processing time a row without a match waits: milliseconds, a timedelta, or words such as "15
            minutes". After that, it is returned although the watermark has not passed its interval, and matches no
            later row. A timeout needs ``Options(heartbeat_s=...)``, and a `how` that returns rows without a match.
        suffixes : two str
            Appended to the names of columns that both sides have, except the grouping columns.

        Returns
        -------
        DataFrame
            The grouping columns under their names on the left side, the other columns of the left side and, except
            with "semi" and "anti", those of the right side.

        Raises
        ------
        ConfigurationError
            If an argument is not supported, a side has no watermark, or the two sides do not fit together.

        Examples
        --------
        >>> orders.join_interval(payments, lower=0, upper="10 minutes", how="left")  # doctest: +SKIP
        """
        return self._joined(right, "join_interval", suffixes).by_interval(lower, upper, how, timeout, condition)

    def join_asof(
        self,
        right: KeyedStream,
        *,
        tolerance: Duration | None = None,
        how: str = "inner",
        wait: bool = True,
        suffixes: Sequence[str] = ("_left", "_right"),
    ) -> DataFrame:
        """Join each row with the newest row of another keyed stream that has the same key and is not later.

        The event time of each side is the column of its `watermark`. Of right rows with the same time, the last to
        arrive counts. A null in a key or a time matches nothing.

        Parameters
        ----------
        right : KeyedStream
            The right side, such as prices or rates with the times from which they are valid; as in
            :meth:`join_interval`.
        tolerance : int, timedelta or str, optional
            How much older than the left row the right row may be: milliseconds, a timedelta, or words such as "1 day".
            By default any age is allowed, and the newest row of each key is kept.
        how : {"inner", "left"}
            Whether left rows without a right row are dropped, or returned with nulls.
        wait : bool
            Whether a left row waits until the watermark has passed its time, so that it gets the right row that belongs
            to it. Otherwise it is returned in its own batch, with the right rows received so far, and never corrected.
        suffixes : two str
            As in :meth:`join_interval`.

        Returns
        -------
        DataFrame
            The grouping columns under their names on the left side, and the other columns of both sides.

        Raises
        ------
        ConfigurationError
            As in :meth:`join_interval`.

        Examples
        --------
        >>> purchases.join_asof(prices, tolerance="30 days", how="left")  # doctest: +SKIP
        """
        return self._joined(right, "join_asof", suffixes).as_of(tolerance, how, wait)

    def _joined(self, right: KeyedStream, method: str, suffixes: Sequence[str]) -> JoinedSides:
        if not isinstance(right, KeyedStream):
            raise ConfigurationError(
                f"{method} takes a keyed stream, not {right!r:.80}.", hint="Pass statelog.key_by(df, ...)."
            )
        return JoinedSides(self._keyed, right._keyed, method, suffixes)

    @staticmethod
    def _initial(given: object) -> tuple[KeyedFrame | None, Mapping[str, DataFrame]]:
        return checked_initial(given._keyed if isinstance(given, KeyedStream) else given)

    def window(
        self,
        windows: WindowAssigner,
        timeMode: str | None = None,
        time_column: str | None = None,
        allowed_lateness: Duration = 0,
        late_column: str | None = None,
    ) -> WindowedStream:
        """Cut the rows of each key into windows.

        Parameters
        ----------
        windows : TumblingWindows, SlidingWindows, SessionWindows or CountWindows
            The rule that assigns windows to a row.
        timeMode : {"EventTime", "ProcessingTime"}, optional
            The source of a row's time: its time column, which is the default, or the time of its batch. Counted windows
            have no time.
        time_column : str, optional
            The column of event time. The default is the column with the watermark; a batch DataFrame needs none.
        allowed_lateness : int, timedelta or str
            How long a window still accepts late rows after its result was returned: milliseconds, a timedelta, or words
            such as "1 hour". Late rows make the window return a new result.
        late_column : str, optional
            Name of a struct column that the output gets for rows that are too late. By default they are dropped and
            counted.

        Returns
        -------
        WindowedStream
            The windowed stream, which has the methods ``agg``, ``reduce``, ``aggregate`` and ``process``.

        Raises
        ------
        ConfigurationError
            If the arguments cannot be combined, or do not fit the columns.

        Examples
        --------
        >>> by_user = statelog.key_by(events, "user")  # doctest: +SKIP
        >>> by_user.window(statelog.TumblingWindows("1 minute")).agg(statelog.Count())  # doctest: +SKIP
        """
        return windowed(self._keyed, windows, timeMode, time_column, allowed_lateness, late_column)
