"""Refuses starts whose batches Spark's file sink would leave out.

The sink has a log of its own, beside its files and outside of the checkpoint. It leaves out each batch up to the newest
one there, without computing it. That is right for a batch whose commit Spark lacks after a crash. But a rewind, or a
new query in an old folder, begin further back. Their batches would read input and go to nowhere, also input that the
sink has never had: Spark deals it anew to all batches but the first.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from statelog.errors import ConfigurationError, ErrorKind
from statelog.log_fields import get_logger
from statelog.spark import internals
from statelog.spark.checkpoint_location import open_checkpoint

_log = get_logger(__name__)

_LOG: Final = "_spark_metadata"
"""The sink's log in its folder; an entry has the number of a batch, and each tenth one ends with ``.compact``."""


def check_file_sink(session: SparkSession, query: StreamingQuery) -> None:
    """Make a query that is about to start fail if its sink would leave out batches for which it lacks the rows.

    A warning is logged if the sink leaves out the first batch only, which it has from before a rewind. A failure of the
    check is only logged.
    """
    try:
        sink, first = internals.file_sink(query), internals.first_batch(query)
        if sink is None or sink[1] < first:
            return
        folder, newest = sink
        if newest > first or not internals.is_planned(query, first):
            internals.fail(session, query, _left_out(query, folder, first, newest))
        elif open_checkpoint(internals.checkpoint_location(query), session).was_taken_back(first):
            _log.warning(
                "query %s: Spark's file sink in %s has batch %d, which a rewind has taken back, and leaves it out: its"
                " older rows and its older state stay. To have it computed again, stop the query, rewind it once more,"
                " and remove that batch's files from its folder %s.",
                query.id,
                folder,
                first,
                _LOG,
            )
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
