"""Letting a query have batches that its sources have no rows for: the clock source beside an operator's input."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from statelog.spark import internals
from statelog.spark.clock_source import CLOCK_SOURCE, source_class
from statelog.spark.endpoint import Endpoint
from statelog.spark.operator_plan import OperatorPlan


def with_clock(rows: DataFrame, plan: OperatorPlan, endpoint: Endpoint) -> DataFrame:
    """Rows that Spark also runs batches for when there are none, if the operator needs that.

    Parameters
    ----------
    rows : DataFrame
        The operator's input.
    plan : OperatorPlan
        The operator, known to the endpoint.
    endpoint : Endpoint
        Whom the clock asks.

    Returns
    -------
    DataFrame
        The same rows and columns. Every batch without data must run all subtasks, so the rows must be observed.
    """
    if not rows.isStreaming or not plan.ticks.needs_clock or internals.reads_source(rows, CLOCK_SOURCE):
        return rows
    session = rows.sparkSession
    if session not in endpoint.clock_frames:
        endpoint.clock_frames[session] = _clock_frame(session, endpoint)
    clock = endpoint.clock_frames[session]
    nothing = [F.lit(None).cast(field.dataType).alias(field.name) for field in rows.schema]
    return rows.unionByName(clock.select(*nothing))


def _clock_frame(session: SparkSession, endpoint: Endpoint) -> DataFrame:
    with internals.active(session):  # Otherwise Spark refuses a name that the session active so far has registered.
        session.dataSource.register(source_class(endpoint.local_host, endpoint.port, endpoint.secret))
    # Adaptive execution plans shuffles in threads of their own. Where several of a query's shuffles read one Python
    # source, they call its process over one socket at once and take each other's answers: the query fails or waits for
    # ever (Spark 4.3.0). Behind an exchange, which all of them reuse, the source is planned once.
    return session.readStream.format(CLOCK_SOURCE).load().repartition(1)
