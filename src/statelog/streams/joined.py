"""Joins of two keyed streams: brings the rows of both sides into one DataFrame, for one operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from statelog.errors import ConfigurationError, ErrorKind
from statelog.joins.build import (
    SIDE_COLUMN,
    TIME_COLUMN,
    AsofDefinition,
    IntervalDefinition,
    JoinInput,
    JoinPlan,
    JoinSides,
)
from statelog.numbers import Duration
from statelog.runs.times import Watermark
from statelog.spark.plan.checks import is_case_sensitive
from statelog.spark.plan.keyed_plan import KeyedFrame, SparkArguments
from statelog.streams.grouping import KeyedInput

_NAMES: Final = ("left", "right")


@dataclass(frozen=True)
class JoinedSides:
    """Two keyed streams that are to be joined by one operator."""

    left: KeyedInput
    right: KeyedInput
    method: str
    """The method that the user called, for messages."""
    suffixes: Sequence[str]

    def by_interval(
        self, lower: Duration, upper: Duration, how: str, timeout: Duration | None, condition: pc.Expression | None
    ) -> DataFrame:
        """The output of an interval join; raises ConfigurationError if its parts do not fit each other."""
        return self._apply(lambda sides: IntervalDefinition(sides, lower, upper, how, timeout, condition).plan())

    def as_of(self, tolerance: Duration | None, how: str, wait: bool) -> DataFrame:
        """The output of an as-of join; raises ConfigurationError if its parts do not fit each other."""
        return self._apply(lambda sides: AsofDefinition(sides, tolerance, how, wait).plan())

    def _apply(self, planned: Callable[[JoinSides], JoinPlan]) -> DataFrame:
        left, right = self.left, self.right
        watermark = _joined_watermark(left, right, self.method)
        _require_no_operator(right, self.method)
        one, other = [
            JoinInput(name, side.frame.df.schema, side.frame.columns, column)
            for name, side, column in zip(_NAMES, (left, right), _time_columns(left, right), strict=True)
        ]
        is_sensitive = is_case_sensitive(left.frame.df.sparkSession)
        plan = planned(JoinSides(one, other, self.method, self.suffixes, is_sensitive))
        rows = _side_rows(left, plan, 0).union(_side_rows(right, plan, 1))
        frame = KeyedFrame(rows, left.frame.columns)
        arguments = SparkArguments(plan.operator, plan.output, "append", plan.time_mode)
        return left.apply(arguments, plan.operator.codecs, united=(frame, watermark))


def _side_rows(side: KeyedInput, plan: JoinPlan, place: int) -> DataFrame:
    """The rows of a side in the columns of the operator's input."""
    frame, schema = side.frame, side.frame.df.schema
    own = [name for name in schema.names if name not in frame.columns]
    count = len(plan.input) - len(frame.columns) - 2
    before = count - len(own) if place else 0
    assert side.own.watermark is not None
    given: list[Column | None] = [
        *[_column(name) for name in frame.columns],
        F.lit(place),
        _column(side.own.watermark.column),
        *[None] * before,
        *[_column(name) for name in own],
        *[None] * (count - before - len(own)),
    ]
    return frame.df.select(
        *[
            (F.lit(None).cast(field.dataType) if column is None else column).alias(field.name)
            for column, field in zip(given, plan.input, strict=True)
        ]
    )


def _column(name: str) -> Column:
    return F.col("`" + name.replace("`", "``") + "`")


def _time_columns(left: KeyedInput, right: KeyedInput) -> list[str]:
    return [side.own.watermark.column for side in (left, right) if side.own.watermark is not None]


def _joined_watermark(left: KeyedInput, right: KeyedInput, method: str) -> Watermark:
    """The watermark of the operator: the smaller of both sides' watermarks."""
    if left.frame.df.isStreaming != right.frame.df.isStreaming:
        name = _NAMES[int(left.frame.df.isStreaming)]
        raise ConfigurationError(
            f"{method}: the {name} side is a batch DataFrame, but the other one is a stream.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Read both as streams, or join the stream with the batch DataFrame by Spark's join().",
        )
    found: list[Watermark] = []
    for name, side in zip(_NAMES, (left, right), strict=True):
        watermark = side.own.watermark
        if watermark is None:
            raise ConfigurationError(
                f"{method}: the {name} side has no watermark, which names its event time.",
                hint="Pass key_by(..., watermark=statelog.Watermark(column, delay)) on both sides.",
            )
        if watermark.inputs > 1:
            raise ConfigurationError(
                f"{method}: the watermark of the {name} side has {watermark.inputs} inputs.",
                hint="Give each side a watermark of one input; the join takes the smaller one of both sides.",
            )
        found.append(watermark)
    if found[0].max_ahead_ms != found[1].max_ahead_ms:
        raise ConfigurationError(
            f"{method}: the watermarks of the two sides have different values of max_ahead.",
            hint="Give both sides the same max_ahead.",
        )
    return Watermark(
        TIME_COLUMN,
        delay=[watermark.delay_ms for watermark in found],
        inputs=2,
        input_column=SIDE_COLUMN,
        max_ahead=found[0].max_ahead_ms,
        idle=[watermark.idle_of_inputs_ms[0] for watermark in found],
    )


def _require_no_operator(right: KeyedInput, method: str) -> None:
    unused = [name for name, value in vars(right.own).items() if value is not None and name != "watermark"]
    if unused:
        raise ConfigurationError(
            f"{method}: the right side has {', '.join(unused)}, but it is not an operator.",
            hint="Give these arguments to the key_by of the left side.",
        )
