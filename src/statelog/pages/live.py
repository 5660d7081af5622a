"""Finds what the page needs of a running query: the locations of its state, and its driver's measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from statelog.errors import ConfigurationError
from statelog.metrics import CheckpointMetrics

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(frozen=True)
class Watched:
    """Where the page looks."""

    locations: Callable[[], Sequence[str]]
    metrics: Callable[[], Mapping[str, Sequence[CheckpointMetrics]]]


def watch(query: StreamingQuery | str | Path) -> Watched:
    """Look at a location, or at a running query; raises ConfigurationError for anything else."""
    if isinstance(query, (str, Path)):
        location = str(query)
        return Watched(lambda: [location], dict)
    from pyspark.sql.streaming.query import StreamingQuery

    from statelog.spark.endpoint import known_endpoint

    endpoint = known_endpoint()
    if not isinstance(query, StreamingQuery) or endpoint is None:
        raise ConfigurationError(
            f"{query!r} is neither a query of this process with operators of statelog, nor a location.",
            hint="Pass what start() has returned, or the query's checkpointLocation.",
        )
    operators = endpoint.operators_of(query)
    locations = list(dict.fromkeys(one.location for one in operators))
    return Watched(lambda: locations, lambda: {one.uid: one.coordinator.metrics.recent for one in operators})
