"""Spark's daemon of Python workers for tests: it imports the workers' libraries once, before it forks."""

import pandas  # noqa: F401 - for the workers
from pyspark.daemon import manager

import statelog.spark.keyed_spec  # noqa: F401 - for the workers

if __name__ == "__main__":
    manager()
