"""What `key_by` was given: the grouping columns of a DataFrame, the arguments of its operator, the initial state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from statelog.aggregates.build import KeyedDefinition, KeyedPlan
from statelog.convert.codecs import ProcessorCodecs
from statelog.errors import ConfigurationError, ErrorKind
from statelog.runs.keys import KeyCodec
from statelog.runs.times import Watermark
from statelog.spark.driver.internals import selected_column
from statelog.spark.plan.checks import is_ansi, is_case_sensitive
from statelog.spark.plan.keyed_plan import (
    WATERMARK_DELAY,
    KeyedFrame,
    SparkArguments,
    StepOf,
    apply_keyed,
    watermark_column,
)
from statelog.spark.plan.plan import StatelogArguments


@dataclass
class KeyedInput:
    """The input of a keyed operator, and the arguments that it was keyed with."""

    frame: KeyedFrame
    own: StatelogArguments
    _is_used: bool = False

    def apply(
        self,
        arguments: SparkArguments,
        codecs: ProcessorCodecs,
        step_of: StepOf | None = None,
        *,
        united: tuple[KeyedFrame, Watermark] | None = None,
    ) -> DataFrame:
        """Plan an operator; refuse a second one with the same uid.

        `united` are the rows of this input and of another one, and their watermark.
        """
        if self._is_used and self.own.uid is not None:
            raise ConfigurationError(
                f"The keyed stream of operator '{self.own.uid}' was used for another operator.",
                kind=ErrorKind.UID_REQUIRED,
                hint="Call key_by once for each operator, with a uid of its own.",
            )
        frame, watermark = (self.frame, self.own.watermark) if united is None else united
        output = apply_keyed(frame, arguments, replace(self.own, watermark=watermark), codecs, step_of)
        self._is_used = True
        return output

    def apply_planned(self, plan: KeyedPlan, output_mode: str, event_time_column: str) -> DataFrame:
        """Apply a ready-made operator."""
        arguments = SparkArguments(plan.operator, plan.output, output_mode, plan.time_mode, event_time_column)
        # A partial aggregate has one event time, and does not say which of several inputs its rows came from.
        watermark = self.own.watermark
        if plan.step is not None and watermark and (watermark.inputs > 1 or watermark.max_ahead is not None):
            raise ConfigurationError(
                "With a watermark of several inputs or with max_ahead, rows cannot be combined before the shuffle.",
                hint="Omit combine=True.",
            )
        return self.apply(arguments, plan.operator.codecs, plan.step)

    @property
    def definition(self) -> KeyedDefinition:
        """What ready-made operators are planned from."""
        frame, session, watermark = self.frame, self.frame.df.sparkSession, self.own.watermark
        schema = frame.df.schema
        marked = watermark_column(schema, frame.columns)
        marked_name = None if marked is None else schema.names[marked]
        return KeyedDefinition(
            schema=schema,
            keys=frame.key_columns,
            key_schema=frame.key_schema,
            event_time=marked_name if watermark is None else watermark.column,
            is_streaming=frame.df.isStreaming,
            ansi=is_ansi(session),
            is_case_sensitive=is_case_sensitive(session),
        )


def marked_columns(df: DataFrame) -> list[str]:
    """The columns with Spark's watermark."""
    return [field.name for field in df.schema if WATERMARK_DELAY in field.metadata]


def keyed_frame(df: DataFrame, given: Sequence[str | Column]) -> KeyedFrame:
    """Find the grouping columns, and add those that are computed; raises the errors of ``key_by``."""
    columns: list[str] = []
    computed: list[Column] = []
    for column in given:
        if not isinstance(column, (str, Column)):
            raise ConfigurationError(f"key_by takes columns and their names, not {column!r:.80}.")
        with _naming(df, [column]):
            place, name = selected_column(df, column)
            if place is None:
                computed.append((F.col(column) if isinstance(column, str) else column).alias(name))
                df.select(computed[-1], "*")
        columns.append(name if place is None else df.columns[place])
    frame = KeyedFrame(df.select(*computed, "*") if computed else df, columns)
    doubled = [name for name in frame.df.columns if frame.df.columns.count(name) > 1]
    if doubled:
        raise ConfigurationError(
            f"key_by: two columns are named {doubled[0]!r}.", hint="Give one of them another name, with alias()."
        )
    KeyCodec(frame.key_schema)
    with _naming(df, given):
        df.groupBy(*given).count()  # refuses columns that only select() takes: generators, windows, stars
    return frame


def checked_initial(given: object) -> tuple[KeyedFrame | None, Mapping[str, DataFrame]]:
    """The keyed rows of an initial state, or its tables."""
    if given is None:
        return None, {}
    if isinstance(given, Mapping):
        other = next((name for name, table in given.items() if not isinstance(table, DataFrame)), None)
        if other is not None:
            raise ConfigurationError(
                f"initialState[{other!r}] is {given[other]!r:.80}.", hint="Pass a batch DataFrame."
            )
        return None, given
    if not isinstance(given, KeyedInput):
        raise ConfigurationError(
            f"initialState is {given!r:.80}.",
            hint="Pass statelog.key_by(batch_df, ...) with the same keys, or a mapping of a DataFrame per state.",
        )
    if given.frame.df.isStreaming:
        raise ConfigurationError("initialState is a streaming DataFrame.", hint="Pass a batch DataFrame.")
    unused = [name for name, value in vars(given.own).items() if value is not None]
    if unused:
        raise ConfigurationError(
            f"initialState is a keyed stream with {', '.join(unused)}, but it is not an operator.",
            hint="Give these arguments to the key_by of the stream that the operator applies to.",
        )
    return given.frame, {}


@contextmanager
def _naming(df: DataFrame, given: Sequence[str | Column]) -> Iterator[None]:
    """Turn an error of Spark into one that names the columns that it cannot group by."""
    try:
        yield
    except AnalysisException as error:
        dotted = next((name for name in given if isinstance(name, str) and "." in name and name in df.columns), None)
        raise ConfigurationError(
            f"key_by: rows cannot be grouped by {', '.join(map(str, given))}: {str(error).splitlines()[0]}",
            hint=f"Write `{dotted}` for the column; without backticks, a dot selects a struct's field."
            if dotted
            else f"The columns are {', '.join(df.columns)}.",
        ) from error
