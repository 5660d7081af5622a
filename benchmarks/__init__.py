"""Benchmarks of statelog: ``python -m benchmarks --list`` names them, README.md says what they measure.

A benchmark is a module with `Settings`, a dataclass whose fields are the command's options, and `run`, which measures
in an empty directory and returns a result: figures for the JSON file, targets, and the rows of a table.

A benchmark compares *sides* (``query.Side``). A side is measured in a process of its own, with a JVM of its own; sides
take turns (``frame.alternate``). A ``query.BatchSide`` runs a query for some batches. It has two methods: ``output``
makes the query, and ``expected`` gives the right output of each batch, computed without any state. Durations,
checkpoints and files then come from the base class, and medians and ratios from ``figures``.

``processors`` holds the code that runs in Spark's workers.
"""
