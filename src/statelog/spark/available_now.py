"""Spark's class for sources that support the trigger availableNow."""

from __future__ import annotations

try:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
except ImportError:  # Spark 4.1: there a query with this trigger is a single micro-batch.

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]  # older PySpark has none
        """Stands in for the class that this version of Spark lacks."""


__all__ = ["SupportsTriggerAvailableNow"]
