"""Spark's daemon of Python workers for tests: it imports the workers' libraries once, before it forks."""

from contextlib import suppress

from pyspark.daemon import manager

with suppress(ImportError):  # a test hides statelog from the workers
    import pandas  # noqa: F401 - for the workers

    import statelog.spark.worker.specs  # noqa: F401 - for the workers
    import tests.spark.support  # noqa: F401 - for the workers; it imports pytest

if __name__ == "__main__":
    manager()
