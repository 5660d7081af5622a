"""``python -m tests.spark.class_archive FILE``: writes Spark's classes as a JVM maps them, by running a query."""

from __future__ import annotations

import os
import sys
import tempfile
from subprocess import Popen

from pyspark.sql import DataFrame

import statelog
from tests.jvm import LOG_TO_STDERR, jvm_options
from tests.spark.support import make_session


def collect(rows: DataFrame, batch: int) -> None:
    """Take the rows of a batch to the driver."""
    rows.collect()


def main() -> None:
    options = [*jvm_options(), f"-XX:ArchiveClassesAtExit={sys.argv[1]}", *LOG_TO_STDERR]
    os.environ["JDK_JAVA_OPTIONS"] = " ".join(options)
    session = make_session()
    with tempfile.TemporaryDirectory() as folder:
        session.range(10).selectExpr("id % 2 AS user").write.json(f"{folder}/events")
        events = session.readStream.schema("user long").json(f"{folder}/events")
        counts = statelog.key_by(events, "user").agg(n=statelog.Count())
        query = counts.writeStream.outputMode("update").foreachBatch(collect)
        query.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start().awaitTermination()
    jvm: Popen[bytes] = session.sparkContext._gateway.proc  # type: ignore[union-attr]  # there is a JVM
    session.stop()
    # The JVM writes the archive when it ends, which a program that ends does not wait for.
    assert jvm.stdin
    jvm.stdin.close()
    jvm.wait()


if __name__ == "__main__":
    main()
