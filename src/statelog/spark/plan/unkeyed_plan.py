"""Plans an unkeyed operator: checks its arguments, registers it with the endpoint, and makes its output DataFrame."""

from __future__ import annotations

from dataclasses import replace

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, VariantType

from statelog.errors import ConfigurationError
from statelog.operators.unkeyed.processor import OperatorProcessor
from statelog.spark.plan.declare import declare_unkeyed
from statelog.spark.plan.operator_plan import NoDataRule, OperatorPlan
from statelog.spark.plan.placement import to_subtasks
from statelog.spark.plan.plan import (
    StatelogArguments,
    check_arguments,
    key_hash,
    mapped,
    marked_rows,
    registered,
    subtask_of,
)
from statelog.spark.worker.unkeyed_spec import BROADCAST_COLUMN, UnkeyedSpec
from statelog.spark.worker.worker import HASH_COLUMN, SUBTASK_COLUMN, TaskSpec


def apply_unkeyed(
    df: DataFrame,
    processor: OperatorProcessor,
    output_type: StructType | str,
    output_mode: str,
    own: StatelogArguments,
    broadcast: DataFrame | None,
) -> DataFrame:
    """Plan an unkeyed operator, and return its output rows."""
    plan, output, pickled = check_arguments(df, processor, output_type, output_mode, own)
    states = declare_unkeyed(pickled, plan.uid, plan.parallelism)
    plan = replace(
        plan,
        states=[state.bind().descriptor.to_stored() for state in states],
        no_data_rule=NoDataRule(heartbeat_ms=plan.options.heartbeat_ms),
    )
    rows, plan, driver = registered(df, plan)
    spec = UnkeyedSpec(
        uid=plan.uid,
        instance=plan.instance,
        parallelism=plan.parallelism,
        columns=df.columns,
        output_schema=output,
        processor=pickled,
        options=plan.options,
        driver=driver,
        broadcast_columns=None if broadcast is None else broadcast.columns,
        states=states,
    )
    return _operator_frame(rows, broadcast, spec, plan)


def require_broadcast_method(processor: OperatorProcessor) -> None:
    """Refuse a processor that would never see the rows of a broadcast input."""
    if type(processor).processBroadcast is OperatorProcessor.processBroadcast:
        raise ConfigurationError(
            f"{type(processor).__name__} has no processBroadcast method for the rows of broadcast.",
            hint="Write one, or leave broadcast out.",
        )


def _operator_frame(df: DataFrame, broadcast: DataFrame | None, spec: UnkeyedSpec, plan: OperatorPlan) -> DataFrame:
    # mapInArrow cannot take columns whose names need quoting, so columns are renamed to their positions.
    rows = df.toDF(*[f"c{index}" for index in range(len(df.columns))])
    rows = rows.withColumn(SUBTASK_COLUMN, subtask_of(row_hash(rows), spec.parallelism))
    if broadcast is not None:
        copies = broadcast.toDF(*[f"b{index}" for index in range(len(broadcast.columns))])
        everyone = F.explode(F.sequence(F.lit(0), F.lit(spec.parallelism - 1)))
        copies = copies.withColumn(HASH_COLUMN, row_hash(copies)).withColumn(SUBTASK_COLUMN, everyone)
        copies = copies.withColumn(BROADCAST_COLUMN, F.lit(True))
        rows = rows.withColumn(BROADCAST_COLUMN, F.lit(False)).unionByName(copies, allowMissingColumns=True)
    return mapped_by_subtask(rows, spec, plan)


def mapped_by_subtask(rows: DataFrame, spec: TaskSpec, plan: OperatorPlan) -> DataFrame:
    """The output of an operator for rows that have the number of their subtask."""
    rows = marked_rows(rows, plan)
    if plan.placement is None:
        placed = to_subtasks(rows, spec.parallelism, F.col(SUBTASK_COLUMN))
    else:
        placed = plan.placement.by_subtask(rows, SUBTASK_COLUMN)
    return mapped(placed, spec)


def row_hash(df: DataFrame) -> Column:
    """A hash of all columns that Spark can hash: a repeated batch sends its rows to the same subtasks as before."""
    fields = [field for field in df.schema if not _has_variant(field.dataType)]
    if not fields:
        return F.lit(0).cast("long")
    return key_hash([F.col(field.name) for field in fields], [field.dataType for field in fields])


def _has_variant(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_has_variant(field.dataType) for field in kind)
    if isinstance(kind, MapType):
        return _has_variant(kind.keyType) or _has_variant(kind.valueType)
    return isinstance(kind, VariantType) or (isinstance(kind, ArrayType) and _has_variant(kind.elementType))
