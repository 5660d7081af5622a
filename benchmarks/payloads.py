"""Queries that keep a payload per key, and the check of what they return; for ``recovery`` and ``memory``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import statelog
from benchmarks.processors import KeepPayload
from benchmarks.query import Checks, Side, expected_counts, payload, random_key


@dataclass(frozen=True, kw_only=True)
class PayloadSide(Side):
    """Rows of successive keys until each has one, then of random ones; a key always has the same payload."""

    keys: int
    value_bytes: int
    rows_per_batch: int

    def rows(self, source: DataFrame) -> DataFrame:
        """Keys and payloads, from successive numbers in `value`."""
        return source.select(self._key("value")).select("key", payload("key", self.value_bytes))

    def output(self, source: DataFrame, options: statelog.Options) -> DataFrame:
        """The query."""
        return self.transform(self.rows(source), KeepPayload(), "key long, n long, found long", options)

    def expected(self, session: SparkSession, ranges: Iterable[tuple[int, int]]) -> Iterator[Checks]:
        """The checks of batches with these rows."""
        return expected_counts(session, ranges, self.keys, self._key("id"), self.value_bytes)

    def _key(self, number: str) -> Column:
        column = F.col(number)
        return F.when(column < self.keys, column).otherwise(random_key(self.keys, column)).alias("key")
