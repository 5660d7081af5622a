"""Spark types that Spark 4.0 lacks."""

from __future__ import annotations

try:
    from pyspark.sql.types import TimeType
except ImportError:  # Spark 4.0
    from pyspark.sql.types import AtomicType

    from statelog.errors import ConfigurationError, ErrorKind

    class TimeType(AtomicType):  # type: ignore[no-redef]  # older PySpark has none
        """Stands in for the class that this version of Spark lacks; nothing is of this type."""

        def __init__(self, precision: int = 6) -> None:
            raise ConfigurationError(
                "This version of Spark has no type 'time'.",
                kind=ErrorKind.UNSUPPORTED_FEATURE,
                hint="Use Spark 4.1 or later, or a long with the microseconds of the day.",
            )


__all__ = ["TimeType"]
