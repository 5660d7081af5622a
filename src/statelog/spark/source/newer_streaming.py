"""Spark's classes for streaming sources that Spark 4.0 and 4.1 lack."""

from __future__ import annotations

try:
    from pyspark.sql.streaming.datasource import ReadMaxBytes, SupportsTriggerAvailableNow
except ImportError:  # in these a query with this trigger is a single micro-batch, and nothing asks for limits

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]  # older PySpark has none
        """Stands in for the class that this version of Spark lacks."""

    class ReadMaxBytes:  # type: ignore[no-redef]  # as above
        """Stands in for the class that this version of Spark lacks."""

        def __init__(self, max_bytes: int) -> None:
            self.max_bytes = max_bytes


__all__ = ["ReadMaxBytes", "SupportsTriggerAvailableNow"]
