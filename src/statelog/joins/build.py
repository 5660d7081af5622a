"""Plans an interval join: checks its arguments against the columns of both sides, and names the output columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql.types import IntegerType, StructField, StructType, TimestampNTZType, TimestampType

from statelog.convert.codecs import ColumnCodecs
from statelog.convert.times import TimeMode
from statelog.convert.types import key_schema
from statelog.errors import ConfigurationError, ErrorKind
from statelog.history.settings import JOIN, JOIN_FIRST, JOIN_LAST
from statelog.joins.interval import MATCHED_FIELD, IntervalJoin, JoinKind, Side
from statelog.joins.pairs import Interval
from statelog.numbers import LONGEST_MS, Duration, in_milliseconds

SIDE_COLUMN: Final = "__statelog_side"
"""Tells the sides apart in the operator's input: 0 is left, 1 is right."""
TIME_COLUMN: Final = "__statelog_time"
"""The event time of a row of either side."""


@dataclass(frozen=True)
class JoinInput:
    """The columns of one side."""

    name: str
    """The word for it in messages."""
    schema: StructType
    keys: Sequence[str]
    """The grouping columns."""
    time: str
    """The column of event time."""

    @property
    def key_fields(self) -> list[StructField]:
        """The grouping columns."""
        return [self.schema[name] for name in self.keys]

    @property
    def others(self) -> StructType:
        """The columns but for the grouping columns, without their metadata, all nullable."""
        return StructType(
            [StructField(field.name, field.dataType) for field in self.schema if field.name not in self.keys]
        )

    @property
    def shown_keys(self) -> str:
        """The grouping columns and their types."""
        return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in self.key_fields)

    def require_time(self) -> None:
        """Raise ConfigurationError if the column of event time cannot be one."""
        if self.time not in self.schema.names or not isinstance(
            self.schema[self.time].dataType, (TimestampType, TimestampNTZType)
        ):
            columns = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in self.schema)
            raise ConfigurationError(
                f"join_interval: the watermark of the {self.name} side names column {self.time!r}, which is not a"
                " timestamp column of it.",
                hint=f"Its columns are: {columns}.",
            )
        if self.time in self.keys:
            raise ConfigurationError(
                f"join_interval: the event time of the {self.name} side, {self.time!r}, is a grouping column.",
                hint="Rows match by a distance of their times: group by the other columns only.",
            )


@dataclass(frozen=True)
class JoinPlan:
    """An interval join, ready to be planned like any stateful processor."""

    operator: IntervalJoin
    input: StructType
    """The grouping columns, the side, the event time, and the other columns of the left and of the right side."""
    output: StructType
    """The output columns."""
    time_mode: TimeMode = TimeMode.EVENT_TIME


@dataclass(frozen=True)
class JoinDefinition:
    """An interval join as the user describes it."""

    left: JoinInput
    right: JoinInput
    lower: Duration
    upper: Duration
    how: str = "inner"
    suffixes: Sequence[str] = ("_left", "_right")
    is_case_sensitive: bool = True
    """Whether the session tells names of columns apart by case."""

    def plan(self) -> JoinPlan:
        """Plan the join; raises ConfigurationError if its parts do not fit each other."""
        kind, interval = self._kind(), self._interval()
        left, right = self.left, self.right
        for side in (left, right):
            side.require_time()
        self._require_same_types()
        returned, first = kind.returns_unmatched, len(left.keys) + 2
        sides = (
            self._side(left, first, interval, kind, returns_unmatched=returned[0]),
            self._side(right, first + len(left.others), interval.reversed, kind, returns_unmatched=returned[1]),
        )
        keys = [StructField(field.name, field.dataType) for field in left.key_fields]
        settings: dict[str, int | str] = {
            "results": "interval join",
            JOIN: f"{kind}, by {left.time} and {right.time}",
            JOIN_FIRST: interval.first_ms,
            JOIN_LAST: interval.last_ms,
        }
        codecs = ColumnCodecs(settings=settings, completes_in_batch=True)
        output = StructType([*keys, *self._output_fields(kind)])
        operator = IntervalJoin(kind, sides, key_schema(keys), output, codecs)
        internal = StructType(
            [
                StructField(f"__statelog_{place}", field.dataType)
                for place, field in enumerate([*left.others, *right.others])
            ]
        )
        time = StructField(TIME_COLUMN, left.schema[left.time].dataType)
        read = StructType([*keys, StructField(SIDE_COLUMN, IntegerType()), time, *internal])
        return JoinPlan(operator, read, output)

    # ---- Parts ----

    def _kind(self) -> JoinKind:
        if self.how not in list(JoinKind):
            raise ConfigurationError(
                f"join_interval: how is {self.how!r:.80}.",
                hint=f"It must be one of {', '.join(map(repr, map(str, JoinKind)))}.",
            )
        return JoinKind(self.how)

    def _interval(self) -> Interval:
        first_ms, last_ms = (
            in_milliseconds(bound, f"join_interval: {name}", least=-LONGEST_MS)
            for name, bound in (("lower", self.lower), ("upper", self.upper))
        )
        if first_ms > last_ms:
            raise ConfigurationError(
                f"join_interval: lower, {first_ms} ms, is after upper, {last_ms} ms, so no two rows would match.",
                hint="A right row matches if its time is from the left row's time plus lower to that time plus upper;"
                " both may be negative.",
            )
        return Interval(first_ms, last_ms)

    def _require_same_types(self) -> None:
        left, right = self.left, self.right
        if [field.dataType for field in left.key_fields] != [field.dataType for field in right.key_fields]:
            raise ConfigurationError(
                f"join_interval: the left side is keyed by ({left.shown_keys}), the right one by ({right.shown_keys}).",
                kind=ErrorKind.OTHER_SCHEMA,
                hint="Key both by columns of the same types, in the same order; cast those that differ.",
            )
        kinds = [side.schema[side.time].dataType.simpleString() for side in (left, right)]
        if kinds[0] != kinds[1]:
            raise ConfigurationError(
                f"join_interval: the event time of the left side is a {kinds[0]}, that of the right side a {kinds[1]}.",
                kind=ErrorKind.OTHER_SCHEMA,
                hint="Cast one of them: a timestamp_ntz has no time zone.",
            )

    def _side(
        self, given: JoinInput, first: int, interval: Interval, kind: JoinKind, *, returns_unmatched: bool
    ) -> Side:
        marks = returns_unmatched and kind.returns_pairs
        others = given.others
        if marks and MATCHED_FIELD in others.names:
            raise ConfigurationError(
                f"join_interval: the {given.name} side has a column {MATCHED_FIELD!r}, which its state uses itself.",
                hint="Rename the column.",
            )
        return Side(others, first, others.names.index(given.time), interval, returns_unmatched, marks)

    def _output_fields(self, kind: JoinKind) -> list[StructField]:
        """The output columns behind the grouping columns; raises ConfigurationError if two have one name."""
        left, right = list(self.left.others), list(self.right.others)
        if not kind.returns_pairs:
            return left
        suffixes = self.suffixes
        if not isinstance(suffixes, (list, tuple)) or [type(suffix) for suffix in suffixes] != [str, str]:
            raise ConfigurationError(
                f"join_interval: suffixes is {suffixes!r:.80}.", hint="Pass two texts, such as ('_left', '_right')."
            )
        keys = [self._folded(name) for name in self.left.keys]
        taken = ({self._folded(field.name) for field in right}, {*keys, *(self._folded(field.name) for field in left)})
        named = [
            StructField(field.name + suffix if self._folded(field.name) in others else field.name, field.dataType)
            for fields, suffix, others in ((left, suffixes[0], taken[0]), (right, suffixes[1], taken[1]))
            for field in fields
        ]
        names = [*keys, *(self._folded(field.name) for field in named)]
        doubled = next((name for name in names if names.count(name) > 1), None)
        if doubled is not None:
            raise ConfigurationError(
                f"join_interval: two output columns are named {doubled!r}.",
                hint="Equal names get the suffixes; pass others, or rename a column of one side.",
            )
        return named

    def _folded(self, name: str) -> str:
        return name if self.is_case_sensitive else name.lower()
