"""What `key_by` was given: the grouping columns of a DataFrame, and the arguments of its operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from statelog.convert.codecs import ProcessorCodecs
from statelog.errors import ConfigurationError, ErrorKind
from statelog.runs.keys import KeyCodec
from statelog.spark.driver.internals import selected_column
from statelog.spark.plan.keyed_plan import KeyedFrame, SparkArguments, StepOf, apply_keyed
from statelog.spark.plan.plan import StatelogArguments


@dataclass
class KeyedInput:
    """The input of a keyed operator, and the arguments that it was keyed with."""

    frame: KeyedFrame
    own: StatelogArguments
    _is_used: bool = False

    def apply(self, arguments: SparkArguments, codecs: ProcessorCodecs, step_of: StepOf | None = None) -> DataFrame:
        """Plan an operator; refuse a second one with the same uid."""
        if self._is_used and self.own.uid is not None:
            raise ConfigurationError(
                f"The keyed stream of operator '{self.own.uid}' was used for another operator.",
                kind=ErrorKind.UID_REQUIRED,
                hint="Call key_by once for each operator, with a uid of its own.",
            )
        output = apply_keyed(self.frame, arguments, self.own, codecs, step_of)
        self._is_used = True
        return output


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


@contextmanager
def _naming(df: DataFrame, given: Sequence[str | Column]) -> Iterator[None]:
    """Turn an error of Spark into one that names the columns that it cannot group by."""
    try:
        yield
    except AnalysisException as error:
        dotted = next((name for name in given if isinstance(name, str) and "." in name and name in df.columns), None)
        raise ConfigurationError(
            f"key_by: rows cannot be grouped by {', '.join(map(str, given))}: {str(error).splitlines()[0]}",
            hint=f"Write `{dotted}` for the column; a dot leads to a struct's field."
            if dotted
            else f"The columns are {', '.join(df.columns)}.",
        ) from error
