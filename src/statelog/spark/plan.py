"""The part of planning that keyed and unkeyed operators share: arguments, registration, the way of rows to tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from statelog.options import Options
from statelog.runs.key_groups import GROUP_SHIFT, KEY_GROUPS
from statelog.runs.times import Watermark
from statelog.spark.checks import (
    check_options,
    check_output_mode,
    check_session,
    checked_location,
    checked_parallelism,
    checked_uid,
    new_instance,
    parse_output,
    require_endpoint,
)
from statelog.spark.clock_frame import with_clock
from statelog.spark.operator_plan import OperatorPlan
from statelog.spark.placement import make_placement
from statelog.spark.worker import TIME_COLUMN, DriverAddress, pickled_processor


@dataclass(frozen=True)
class StatelogArguments:
    """The arguments that Spark's method does not have; see :class:`statelog.KeyedStream`."""

    uid: str | None
    parallelism: int | None
    location: str | None
    options: Options
    watermark: Watermark | None = None
    tables: Mapping[str, DataFrame] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckedArguments:
    """The arguments of any operator, checked."""

    session: SparkSession
    uid: str
    parallelism: int
    location: str | None
    options: Options
    output: StructType
    processor: bytes
    """The pickled processor."""

    def plan(self, *, is_streaming: bool) -> OperatorPlan:
        """The plan of an operator without states."""
        instance = new_instance()
        placement = None
        if is_streaming:
            placement = make_placement(self.session, self.uid, instance, self.parallelism, self.options)
        return OperatorPlan(
            instance=instance,
            session=self.session,
            uid=self.uid,
            parallelism=self.parallelism,
            location=self.location,
            options=self.options,
            placement=placement,
        )


def check_arguments(
    df: DataFrame, processor: object, output_type: StructType | str, output_mode: str, own: StatelogArguments
) -> CheckedArguments:
    """Check the session and the arguments of an operator.

    Raises ConfigurationError if one is not supported, and ProcessorError if the processor cannot be pickled.
    """
    session = df.sparkSession
    check_output_mode(output_mode)
    check_session(session)
    check_options(own.options)
    uid = checked_uid(own.uid)
    parallelism = checked_parallelism(own.parallelism, session)
    output = parse_output(output_type)
    pickled = pickled_processor(processor, uid)
    return CheckedArguments(session, uid, parallelism, checked_location(own.location), own.options, output, pickled)


def registered(df: DataFrame, plan: OperatorPlan) -> tuple[DataFrame, DriverAddress | None]:
    """Make a streaming operator known to the driver's endpoint.

    Returns the input, with the clock source if the operator needs batches without data, and the endpoint's address;
    None in a batch query.
    """
    if not df.isStreaming:
        return df, None
    host, endpoint = require_endpoint(plan.session)
    endpoint.register(plan)
    return with_clock(df, plan, endpoint), DriverAddress(host, endpoint.port, endpoint.secret)


def subtask_of(key_hash: Column, parallelism: int) -> Column:
    """The subtask of a hash."""
    group = F.shiftrightunsigned(key_hash, GROUP_SHIFT)
    return F.floor(group * parallelism / KEY_GROUPS).cast("int")


def marked_rows(rows: DataFrame, plan: OperatorPlan, *, is_streaming: bool) -> DataFrame:
    """The rows with their batch's time; in a stream also with the observation that marks the operator."""
    rows = rows.withColumn(TIME_COLUMN, F.unix_millis(F.current_timestamp()))
    if not is_streaming:
        return rows
    # Spark folds away a branch that it can prove empty, and the batch would then miss an operator. It does not fold an
    # observed branch.
    return rows.observe(plan.observation, F.count(F.lit(1)).alias("rows"))
