"""The options of the tests' JVMs."""

from __future__ import annotations


def jvm_options(archive: str = "") -> list[str]:
    """Options for a JVM that lives for seconds: the quick compiler and the simple collector halve its processor time.

    Spark starts a program for each file of a checkpoint, to set its permissions;
    VFORK does so without a helper program.
    `archive` is a file with Spark's classes, as :mod:`tests.spark.class_archive` makes it. A JVM with another class
    path does without it, and says so; where Spark reads what a JVM prints, that must not go to standard output.
    """
    options = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Djdk.lang.Process.launchMechanism=VFORK"]
    return [*options, f"-XX:SharedArchiveFile={archive}", *LOG_TO_STDERR] if archive else options


LOG_TO_STDERR = ("-Xlog:disable", "-Xlog:all=error:stderr")
