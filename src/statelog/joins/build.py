"""Plans joins: checks their arguments against the columns of both sides, and names the output columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import IntegerType, StructField, StructType, TimestampNTZType, TimestampType

from statelog.convert.codecs import ColumnCodecs
from statelog.convert.times import TimeMode
from statelog.convert.types import arrow_type, key_schema
from statelog.errors import ConfigurationError, ErrorKind
from statelog.history.settings import JOIN, JOIN_FIRST, JOIN_LAST, JOIN_TIMEOUT, JOIN_TOLERANCE
from statelog.joins.asof import AsofJoin
from statelog.joins.interval import Condition, IntervalJoin, IntervalSide, JoinKind
from statelog.joins.pairs import Interval
from statelog.joins.sides import JoinOperator, JoinShape, Side
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
        """The columns except the grouping columns, without their metadata, all nullable."""
        return StructType(
            [StructField(field.name, field.dataType) for field in self.schema if field.name not in self.keys]
        )

    @property
    def shown_keys(self) -> str:
        """The grouping columns and their types."""
        return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in self.key_fields)

    def require_time(self, method: str) -> None:
        """Raise ConfigurationError if the column of event time cannot be one."""
        if self.time not in self.schema.names or not isinstance(
            self.schema[self.time].dataType, (TimestampType, TimestampNTZType)
        ):
            columns = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in self.schema)
            raise ConfigurationError(
                f"{method}: the watermark of the {self.name} side names column {self.time!r}, which is not a"
                " timestamp column of that side.",
                hint=f"Its columns are: {columns}.",
            )
        if self.time in self.keys:
            raise ConfigurationError(
                f"{method}: the event time of the {self.name} side, {self.time!r}, is a grouping column.",
                hint="Group by the other columns only: rows match by the distance of their times.",
            )

    def side(self, first: int) -> Side:
        """The side, whose columns in the operator's input begin at a place."""
        return Side(self.others, first, self.others.names.index(self.time))


@dataclass(frozen=True)
class JoinPlan:
    """A join, ready to be planned like any stateful processor."""

    operator: JoinOperator
    input: StructType
    """The grouping columns, the side, the event time, and the other columns of the left and of the right side."""
    output: StructType
    """The output columns."""
    time_mode: TimeMode = TimeMode.EVENT_TIME


@dataclass(frozen=True)
class JoinSides:
    """The two sides of a join, and the names of its columns."""

    left: JoinInput
    right: JoinInput
    method: str
    """The method that the user calls, for messages."""
    suffixes: Sequence[str] = ("_left", "_right")
    is_case_sensitive: bool = True
    """Whether the session distinguishes names of columns by case."""

    def check(self) -> None:
        """Raise ConfigurationError if the sides do not fit each other."""
        left, right = self.left, self.right
        for side in (left, right):
            side.require_time(self.method)
        if [field.dataType for field in left.key_fields] != [field.dataType for field in right.key_fields]:
            raise ConfigurationError(
                f"{self.method}: the left side is keyed by ({left.shown_keys}), the right one by ({right.shown_keys}).",
                kind=ErrorKind.OTHER_SCHEMA,
                hint="Key both by columns of the same types, in the same order; cast those that differ.",
            )
        kinds = [side.schema[side.time].dataType.simpleString() for side in (left, right)]
        if kinds[0] != kinds[1]:
            raise ConfigurationError(
                f"{self.method}: the event time of the left side is a {kinds[0]}, that of the right side a {kinds[1]}.",
                kind=ErrorKind.OTHER_SCHEMA,
                hint="Cast one of them: a timestamp_ntz has no time zone.",
            )

    def kind(self, how: str, kinds: Sequence[JoinKind]) -> JoinKind:
        """One of some kinds of joins; raises ConfigurationError for any other."""
        if how not in kinds:
            raise ConfigurationError(
                f"{self.method}: how is {how!r:.80}.",
                hint=f"It must be one of {', '.join(map(repr, map(str, kinds)))}.",
            )
        return JoinKind(how)

    @property
    def first_columns(self) -> tuple[int, int]:
        """Where the other columns of each side begin in the operator's input."""
        first = len(self.left.keys) + 2
        return first, first + len(self.left.others)

    @property
    def keys(self) -> list[StructField]:
        """The grouping columns of input and output."""
        return [StructField(field.name, field.dataType) for field in self.left.key_fields]

    @property
    def input(self) -> StructType:
        """The columns of the operator's input."""
        internal = [
            StructField(f"__statelog_{place}", field.dataType)
            for place, field in enumerate([*self.left.others, *self.right.others])
        ]
        time = StructField(TIME_COLUMN, self.left.schema[self.left.time].dataType)
        return StructType([*self.keys, StructField(SIDE_COLUMN, IntegerType()), time, *internal])

    def shape(self, *, returns_pairs: bool = True) -> JoinShape:
        """Input and output of the operator; raises ConfigurationError if two output columns have one name."""
        others = self._paired_fields() if returns_pairs else list(self.left.others)
        return JoinShape(key_schema(self.keys), StructType([*self.keys, *others]))

    def _paired_fields(self) -> list[StructField]:
        """The output columns behind the grouping columns, with suffixes where both sides have a name."""
        left, right, suffixes = list(self.left.others), list(self.right.others), self.suffixes
        if not isinstance(suffixes, (list, tuple)) or [type(suffix) for suffix in suffixes] != [str, str]:
            raise ConfigurationError(
                f"{self.method}: suffixes is {suffixes!r:.80}.", hint="Pass two strings, such as ('_left', '_right')."
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
                f"{self.method}: two output columns are named {doubled!r}.",
                hint="Pass other suffixes, or rename a column of one side: equal names get the suffixes.",
            )
        return named

    def _folded(self, name: str) -> str:
        return name if self.is_case_sensitive else name.lower()


@dataclass(frozen=True)
class IntervalDefinition:
    """An interval join as the user describes it."""

    sides: JoinSides
    lower: Duration
    upper: Duration
    how: str = "inner"
    timeout: Duration | None = None
    condition: pc.Expression | None = None

    def plan(self) -> JoinPlan:
        """Plan the join; raises ConfigurationError if its parts do not fit each other."""
        kind, interval = self.sides.kind(self.how, list(JoinKind)), self._interval()
        timeout_ms = self._timeout_ms(kind)
        self.sides.check()
        left, right = self.sides.left, self.sides.right
        returned, first = kind.returns_unmatched, self.sides.first_columns
        sides = (
            self._side(left, first[0], interval, kind, returns_unmatched=returned[0]),
            self._side(right, first[1], interval.reversed, kind, returns_unmatched=returned[1]),
        )
        settings: dict[str, int | str] = {
            "results": "interval join",
            JOIN: f"{kind}, by {left.time} and {right.time}",
            JOIN_FIRST: interval.first_ms,
            JOIN_LAST: interval.last_ms,
            JOIN_TIMEOUT: "none" if timeout_ms is None else timeout_ms,
        }
        shape, condition = self.sides.shape(returns_pairs=kind.returns_pairs), self._checked_condition()
        codecs = ColumnCodecs(
            settings=settings,
            completes_in_batch=True,
            needs_heartbeat="" if timeout_ms is None else f"{self.sides.method} has a timeout",
        )
        operator = IntervalJoin(kind, sides, shape, codecs, timeout_ms, condition)
        return JoinPlan(operator, self.sides.input, shape.output)

    def _checked_condition(self) -> Condition | None:
        if self.condition is None:
            return None
        method = f"{self.sides.method}: condition"
        if not isinstance(self.condition, pc.Expression):
            raise ConfigurationError(
                f"{method} is {self.condition!r:.80}.",
                hint="Pass an expression of pyarrow.compute, such as pc.field('euro') >= pc.field('price').",
            )
        fields = self.sides.shape().output
        made = Condition(self.condition, fields.names)
        try:
            made.holds([pa.array([], arrow_type(field.dataType, field.name)) for field in fields])
        except (pa.ArrowException, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigurationError(
                f"{method} {self.condition} cannot be computed for a pair: {reason}.",
                hint=f"It must be true or false for columns of a pair, which are: {', '.join(fields.names)}.",
            ) from error
        return made

    def _timeout_ms(self, kind: JoinKind) -> int | None:
        if self.timeout is None:
            return None
        method = self.sides.method
        timeout_ms = in_milliseconds(self.timeout, f"{method}: timeout")
        if not any(kind.returns_unmatched):
            raise ConfigurationError(
                f"{method}: timeout is given, but how={str(kind)!r} returns no rows without a match.",
                hint="Omit timeout, or use one of 'left', 'right', 'full' and 'anti'.",
            )
        return timeout_ms

    def _interval(self) -> Interval:
        method = self.sides.method
        first_ms, last_ms = (
            in_milliseconds(bound, f"{method}: {name}", least=-LONGEST_MS)
            for name, bound in (("lower", self.lower), ("upper", self.upper))
        )
        if first_ms > last_ms:
            raise ConfigurationError(
                f"{method}: lower, {first_ms} ms, is after upper, {last_ms} ms, so no two rows would match.",
                hint="A right row matches if its time is from the left row's time plus lower to that time plus upper;"
                " both may be negative.",
            )
        return Interval(first_ms, last_ms)

    def _side(
        self, given: JoinInput, first: int, interval: Interval, kind: JoinKind, *, returns_unmatched: bool
    ) -> IntervalSide:
        side = given.side(first)
        made = IntervalSide(
            side.columns,
            side.first_column,
            side.time,
            interval,
            returns_unmatched,
            marks_matched=returns_unmatched and kind.returns_pairs,
        )
        taken = next((field.name for field in made.own_fields if field.name in given.others.names), None)
        if taken is not None:
            raise ConfigurationError(
                f"{self.sides.method}: the {given.name} side has a column {taken!r}, a name that its state uses.",
                hint="Rename the column.",
            )
        return made


@dataclass(frozen=True)
class AsofDefinition:
    """An as-of join as the user describes it."""

    sides: JoinSides
    tolerance: Duration | None = None
    how: str = "inner"
    wait: bool = True

    def plan(self) -> JoinPlan:
        """Plan the join; raises ConfigurationError if its parts do not fit each other."""
        method = self.sides.method
        kind = self.sides.kind(self.how, [JoinKind.INNER, JoinKind.LEFT])
        tolerance_ms = None
        if self.tolerance is not None:
            tolerance_ms = in_milliseconds(self.tolerance, f"{method}: tolerance", least=0)
        if not isinstance(self.wait, bool):
            raise ConfigurationError(
                f"{method}: wait is {self.wait!r:.80}.",
                hint="Pass True to answer a left row when the watermark has passed it, False to answer it at once.",
            )
        self.sides.check()
        left, right = self.sides.left, self.sides.right
        settings: dict[str, int | str] = {
            "results": "as-of join",
            JOIN: f"{kind} as of, {'waiting' if self.wait else 'at once'}, by {left.time} and {right.time}",
            JOIN_TOLERANCE: "none" if tolerance_ms is None else tolerance_ms,
        }
        shape, first = self.sides.shape(), self.sides.first_columns
        operator = AsofJoin(
            (left.side(first[0]), right.side(first[1])),
            shape,
            ColumnCodecs(settings=settings, completes_in_batch=True),
            tolerance_ms=tolerance_ms,
            waits=self.wait,
            returns_unmatched=kind is JoinKind.LEFT,
        )
        return JoinPlan(operator, self.sides.input, shape.output)
