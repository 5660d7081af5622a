"""Adds the clock source to an operator's input, so that the query has batches even when its sources have no rows."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from statelog.spark import internals
from statelog.spark.clock_source import CLOCK_SOURCE, source_class
from statelog.spark.endpoint import Endpoint
from statelog.spark.operator_plan import OperatorPlan


def with_clock(rows: DataFrame, plan: OperatorPlan, endpoint: Endpoint) -> DataFrame:
    """Add the clock source to a streaming input if the operator needs batches without data.

    Rows and columns stay the same. A batch without data must run all subtasks too, so the caller has to observe the
    rows: Spark may fold away a branch without rows, but not an observed one.
    """
    if not rows.isStreaming or not plan.no_data_rule.needs_clock or internals.reads_source(rows, CLOCK_SOURCE):
        return rows
    session = rows.sparkSession
    if session not in endpoint.clock_frames:
        endpoint.clock_frames[session] = _clock_frame(session, endpoint)
    clock = endpoint.clock_frames[session]
    nothing = [F.lit(None).cast(field.dataType).alias(field.name) for field in rows.schema]
    return rows.unionByName(clock.select(*nothing))


def _clock_frame(session: SparkSession, endpoint: Endpoint) -> DataFrame:
    # Spark refuses a name that its active session has registered, so that must be this session.
    with internals.active(session):
        session.dataSource.register(source_class(endpoint.local_host, endpoint.port, endpoint.secret))
    # Adaptive execution plans each shuffle in a thread of its own. If several shuffles of a query read one Python
    # source, the threads call its process over one socket at the same time and take each other's answers: the query
    # fails or waits for ever (Spark 4.3.0). Behind an exchange, which all shuffles reuse, the source is planned once.
    return session.readStream.format(CLOCK_SOURCE).load().repartition(1)
