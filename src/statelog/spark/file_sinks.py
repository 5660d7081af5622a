"""Refuses starts whose batches Spark's file sink would leave out.

The sink has a log of its own, beside its files and outside of the checkpoint. It leaves out each batch up to the newest
one there, without computing it. That is right for a batch whose commit Spark lacks after a crash. But a rewind, or a
new query in an old folder, begin further back. Their batches would read input and go to nowhere, also input that the
sink has never had: Spark deals it anew to all batches but the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from statelog.errors import ConfigurationError, ErrorKind
from statelog.log_fields import get_logger
from statelog.spark import internals

_log = get_logger(__name__)

_LOG: Final = "_spark_metadata"
"""The sink's log in its folder; an entry has the number of a batch, and each tenth one ends with ``.compact``."""


def check_file_sink(session: SparkSession, query: StreamingQuery, has_state_of: Callable[[int], bool]) -> None:
    """Make a query that is about to start fail if its sink would leave out batches whose rows or state are missing.

    `has_state_of` tells whether the query has the checkpoint of a batch: a rewind has taken back that of a batch which
    the sink still has. A failure of the check is only logged.
    """
    try:
        sink, first = internals.file_sink(query), internals.first_batch(query)
        if sink is None or sink[1] < first:
            return
        folder, newest = sink
        if newest > first or not internals.is_planned(query, first) or not has_state_of(first):
            internals.fail(session, query, _left_out(query, folder, first, newest))
    except Exception as error:
        _log.warning("query %s: the batches that its sink has could not be looked up: %s", query.id, error)


def _left_out(query: StreamingQuery, folder: str, first: int, newest: int) -> ConfigurationError:
    remedy = "Start the query with another folder for its output."
    if first > 0:
        remedy = (
            f"Remove the files of the batches from {first} on from {folder}/{_LOG}, also those that end with .compact"
            " or .crc. In an empty folder Spark could not read the output: the log there would not begin with batch 0."
        )
    return ConfigurationError(
        f"Query {query.id} begins with batch {first}, but Spark's file sink in {folder} has batches up to {newest}, of"
        " another query or from before a rewind. It leaves these out, so rows would be missing.",
        kind=ErrorKind.OTHER_OWNER,
        hint=remedy,
    )
