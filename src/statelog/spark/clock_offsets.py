"""Fits Spark's offset log to a query that has got the clock source since its last start, or lost it.

Spark compares the number of sources with the log's, and numbers the sources by their order in the plan. So a query
whose clock comes or goes could not continue, although the clock has no rows that could be lost.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import Final

from statelog.log_fields import get_logger
from statelog.savepoints.spark_checkpoint import COMMITS, OFFSETS, SparkCheckpoint
from statelog.savepoints.spark_logs import BatchOffsets
from statelog.storage.store import if_present

_log: Final = get_logger(__name__)

_ASIDE: Final = "statelog-replaced"
"""Folder for copies of the files that are replaced; Spark ignores folders whose names it does not know."""


def fit_clock_offsets(spark: SparkCheckpoint, are_clocks: Sequence[bool]) -> list[int]:
    """Add the clock's offsets to Spark's offset log, or remove them; to be called before Spark reads the log.

    `are_clocks` says of each source of the query, in order, whether it is the clock. Returns the batches whose entries
    were replaced, which are the last two at most: Spark reads no others at a start. The old entries are copied first,
    and an interrupted call is completed by the next one. Nothing changes if clocks are before other sources, since
    these would get other numbers, or if other sources differ.

    Raises ConfigurationError for an unknown format of the log, and StorageError if it cannot be read or written.
    """
    _complete(spark)
    replaced: list[int] = []
    clock_id = ""
    for batch in spark.batches(OFFSETS)[-2:]:
        name = f"{OFFSETS}/{batch}"
        data = spark.files.read(name)
        entry = BatchOffsets.parse(data.decode(), f"{spark.location}/{name}")
        clock_id = clock_id or next(iter(entry.clocks), "") or secrets.token_hex(8)
        fitted = entry.with_clocks(are_clocks, clock_id)
        if fitted is None:
            continue
        spark.files.write(f"{_ASIDE}/{name}", data)
        spark.files.write(name, fitted.encode())
        _keep_copy(spark, name)
        replaced.append(batch)
    if replaced:
        change = "added to" if any(are_clocks) else "removed from"
        _log.info("%s: the clock source was %s the offsets of batches %s", spark.location, change, replaced)
    return replaced


def _complete(spark: SparkCheckpoint) -> None:
    """Complete replacements that a crash has interrupted: where files cannot be replaced in one step, one may be lost.

    A lost entry is the one that Spark would go on from, or the one before. If the batch before has no commit any more,
    the query was set back since, and the entry is not missing.
    """
    for copy in spark.files.list(f"{_ASIDE}/{OFFSETS}"):
        batch = copy.rpartition("/")[2]
        if not batch.isdecimal():
            continue
        name = f"{OFFSETS}/{batch}"
        is_lost = if_present(partial(spark.files.read, name)) is None
        if is_lost and (batch == "0" or int(batch) - 1 in spark.batches(COMMITS)):
            spark.files.write(name, spark.files.read(copy))
        _keep_copy(spark, name)


def _keep_copy(spark: SparkCheckpoint, name: str) -> None:
    """Give the copy of a replaced entry a name of its own, by which it is no replacement under way."""
    copy = f"{_ASIDE}/{name}"
    spark.files.move(copy, f"{copy}-{secrets.token_hex(4)}")
