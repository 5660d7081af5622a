"""Plans an unkeyed operator, and the operator that stores a query's output for the user's sink."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, LongType, MapType, StructField, StructType, VariantType

from statelog.errors import ConfigurationError, ErrorKind, StorageError
from statelog.metrics import Observer
from statelog.operators.unkeyed.processor import OperatorProcessor
from statelog.options import Options
from statelog.spark.driver import internals
from statelog.spark.driver.endpoint import known_endpoint, require_endpoint
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
from statelog.spark.worker.specs import BROADCAST_COLUMN, OutputSpec, UnkeyedSpec, output_columns, output_frame
from statelog.spark.worker.worker import HASH_COLUMN, SUBTASK_COLUMN


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
            hint="Define processBroadcast, or omit broadcast.",
        )


def _operator_frame(
    df: DataFrame, broadcast: DataFrame | None, spec: UnkeyedSpec | OutputSpec, plan: OperatorPlan
) -> DataFrame:
    # mapInArrow cannot take columns whose names need quoting, so columns are renamed to their positions.
    rows = df.toDF(*[f"c{index}" for index in range(len(df.columns))])
    rows = rows.withColumn(SUBTASK_COLUMN, subtask_of(row_hash(rows), spec.parallelism))
    if broadcast is not None:
        copies = broadcast.toDF(*[f"b{index}" for index in range(len(broadcast.columns))])
        everyone = F.explode(F.sequence(F.lit(0), F.lit(spec.parallelism - 1)))
        copies = copies.withColumn(HASH_COLUMN, row_hash(copies)).withColumn(SUBTASK_COLUMN, everyone)
        copies = copies.withColumn(BROADCAST_COLUMN, F.lit(True))
        rows = rows.withColumn(BROADCAST_COLUMN, F.lit(False)).unionByName(copies, allowMissingColumns=True)
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


_NOTHING = StructType([StructField("nothing", LongType())])
"""The operator stores its rows, and returns none."""

Sink = Callable[[DataFrame, int], None]


@dataclass(frozen=True)
class StoredOutputSink:
    """The function for ``foreachBatch``: has a batch's output stored, then gives the stored rows to a sink."""

    sink: Sink
    session: SparkSession
    """The query's session; a batch has a copy of it, which does not know its query."""
    uid: str
    columns: StructType
    options: Options

    def __call__(self, rows: DataFrame, batch: int) -> None:
        """Take a batch; raises the errors of the query and of the sink, FencedError if a newer start owns the log."""
        rows.write.format("noop").mode("append").save()
        session = rows.sparkSession
        query_id = session.sparkContext.getLocalProperty("sql.streaming.queryId")
        query = internals.active_query(self.session, query_id or "")
        _, endpoint = require_endpoint(session)
        running = None if query is None else endpoint.running_query(query)
        if running is None or not running.coordinator.has_operator(self.uid):
            raise ConfigurationError(
                "The function of write_ahead was called for a DataFrame of another query.",
                kind=ErrorKind.STALE_DATAFRAME,
                hint="Start the writer that statelog.write_ahead returns, without another foreachBatch.",
            )
        location, segments = running.location, running.coordinator.durable_checkpoint(self.uid, batch).segments
        is_kept = running.coordinator.kept_batch == batch
        try:
            columns = output_columns(location, segments[0], self.columns) if is_kept else self.columns
            self.sink(output_frame(session, location, segments, columns, self.options), batch)
        except Exception:
            # A newer start deletes what this one still reads, so whatever the sink reports may be a consequence.
            with suppress(StorageError):
                running.coordinator.require_ownership()
            raise


def options_in_front(df: DataFrame) -> Options:
    """The options of an operator that the rows come from; some of them hold for all operators of the query."""
    endpoint, observed = known_endpoint(), internals.observations_of(df)
    plans = [] if endpoint is None else [plan for plan in endpoint.plans() if plan.observation in observed]
    return replace(plans[0].options, observer=Observer()) if plans else Options()


def store_output(df: DataFrame, sink: Sink, own: StatelogArguments) -> tuple[DataFrame, StoredOutputSink]:
    """Plan the operator behind a streaming DataFrame; returns its (empty) output and the function for foreachBatch."""
    plan, _, pickled = check_arguments(df, None, _NOTHING, "append", own)
    _require_no_state_of_sparks(df, plan.uid)
    plan = replace(plan, no_data_rule=NoDataRule(heartbeat_ms=plan.options.heartbeat_ms), stores_output=True)
    rows, plan, driver = registered(df, plan)
    spec = OutputSpec(
        uid=plan.uid,
        instance=plan.instance,
        parallelism=plan.parallelism,
        columns=df.columns,
        output_schema=_NOTHING,
        processor=pickled,
        options=plan.options,
        driver=driver,
        column_types=df.schema.json(),
    )
    return _operator_frame(rows, None, spec, plan), StoredOutputSink(
        sink, plan.session, plan.uid, df.schema, plan.options
    )


def _require_no_state_of_sparks(df: DataFrame, uid: str) -> None:
    found = internals.stateful_nodes(df)
    if found:
        raise ConfigurationError(
            f"operator '{uid}': write_ahead was given a DataFrame with a stateful operator of Spark ({found[0]}).",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Use statelog.key_by instead of that operator. When a batch is repeated, its stored output is"
            " delivered again and no operator computes it, so Spark's own state would lack the batch.",
        )
