"""Restrains adaptive execution in queries with stateful operators.

Adaptive execution must not drop a part of a batch. It drops the readers of a shuffle that turns out to have no rows.
Spark then looks for the event times of `withWatermark` only in the plan that remains, so the watermark would stand
still while an operator returns no rows.

It must not plan several reads of one Python source at the same time. Spark does that in threads that call the source's
process over one socket and take each other's answers (Spark 4.3.0), so the query would fail or wait for ever.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql.streaming.query import StreamingQuery

from statelog.log_fields import get_logger
from statelog.spark import internals
from statelog.spark.clock_source import CLOCK_SOURCE

_log = get_logger(__name__)

_ADAPTIVE: Final = "spark.sql.adaptive.enabled"
_EXCLUDED_RULES: Final = "spark.sql.adaptive.optimizer.excludedRules"
_EMPTY_RELATION: Final = "org.apache.spark.sql.execution.adaptive.AQEPropagateEmptyRelation"
_REUSE: Final = "spark.sql.exchange.reuse"


def restrain_adaptive_execution(query: StreamingQuery) -> None:
    """Apply both restraints in the own session of a query that is about to start; a failure is only logged."""
    try:
        excluded = [rule for rule in internals.own(query, _EXCLUDED_RULES, "").split(",") if rule]
        internals.set_own(query, _EXCLUDED_RULES, ",".join([*excluded, _EMPTY_RELATION]))
        sources = internals.python_sources(query)
        if internals.own(query, _REUSE, "true").lower() == "true":
            sources = [name for name in sources if name != CLOCK_SOURCE]  # is behind an exchange that all share
        repeated = sorted({name for name in sources if sources.count(name) > 1})
        if repeated and internals.own(query, _ADAPTIVE, "true").lower() == "true":
            internals.set_own(query, _ADAPTIVE, "false")
            _log.info("query %s runs without adaptive execution: it reads %s several times", query.id, repeated)
    except Exception as error:
        _log.warning(
            "query %s: adaptive execution could not be restrained, set %s=false: %s", query.id, _ADAPTIVE, error
        )
