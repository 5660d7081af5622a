"""Plans the operator that stores a query's output, and hands the stored rows of each batch to the user's sink."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import LongType, StructField, StructType

from statelog.errors import ConfigurationError, ErrorKind, StorageError
from statelog.metrics import Observer
from statelog.options import Options
from statelog.spark.driver import internals
from statelog.spark.driver.endpoint import known_endpoint, require_endpoint
from statelog.spark.plan.operator_plan import NoDataRule, OperatorPlan
from statelog.spark.plan.plan import StatelogArguments, check_arguments, registered, subtask_of
from statelog.spark.plan.unkeyed_plan import mapped_by_subtask, row_hash
from statelog.spark.worker.output_spec import OutputSpec, output_columns, output_frame
from statelog.spark.worker.worker import SUBTASK_COLUMN

_NOTHING = StructType([StructField("nothing", LongType())])
"""The operator stores its rows, and returns none."""

Sink = Callable[[DataFrame, int], None]


@dataclass(frozen=True)
class StoredOutputSink:
    """The function for ``foreachBatch``: has a batch's output stored, then gives the stored rows to a sink."""

    sink: Sink
    session: SparkSession
    """The query's; a batch has a copy of it, which does not know its query."""
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
            # A newer start deletes what this one still reads, so whatever the sink reports may be its doing.
            with suppress(StorageError):
                running.coordinator.require_ownership()
            raise


def options_in_front(df: DataFrame) -> Options:
    """The options of an operator from which rows come, with which the query's other operators share some."""
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
    return _operator_frame(rows, spec, plan), StoredOutputSink(sink, plan.session, plan.uid, df.schema, plan.options)


def _operator_frame(df: DataFrame, spec: OutputSpec, plan: OperatorPlan) -> DataFrame:
    rows = df.toDF(*[f"c{index}" for index in range(len(df.columns))])
    rows = rows.withColumn(SUBTASK_COLUMN, subtask_of(row_hash(rows), spec.parallelism))
    return mapped_by_subtask(rows, spec, plan)


def _require_no_state_of_sparks(df: DataFrame, uid: str) -> None:
    found = internals.stateful_nodes(df)
    if found:
        raise ConfigurationError(
            f"operator '{uid}': write_ahead was given a DataFrame with a stateful operator of Spark's ({found[0]}).",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="When a batch is repeated its stored output is handed out again, and no operator computes it; Spark's"
            " own state would lack the batch. Use statelog.key_by for it.",
        )
