"""Queries of several operators, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from pyspark.sql import DataFrame

import statelog
from benchmarks.processors import OUTPUT, Count, pass_on
from benchmarks.query import Checks, Numbers, Side, check_of, counted

STATELESS: Final = "stateless"


@dataclass(frozen=True, kw_only=True)
class ChainSide(Side):
    """Some operators one after the other, with a shuffle before each: counts by key, or nothing."""

    operators: int

    def chain(self, rows: DataFrame, options: statelog.Options, location: str | None = None) -> DataFrame:
        """The operators; rows have a `key`, and if they are stateless also an `n`."""
        for number in range(self.operators):
            if self.side == STATELESS:
                rows = rows.repartition(self.parallelism, "key").mapInArrow(pass_on, OUTPUT)
            else:
                rows = self.transform(rows, Count(), OUTPUT, options, location=location, uid=f"count-{number}")
        return rows

    def expected_chain(self, batches: Iterable[Numbers], below: int) -> Iterator[Checks]:
        """The checks of what the last operator returns, from the keys, `below` a limit, of the rows of each batch.

        The first operator counts rows; the others have a row per key and batch, so they count the batches of a key.
        """
        if self.side == STATELESS:
            for keys in batches:
                yield check_of(keys, np.ones_like(keys))
            return
        inputs = batches if self.operators == 1 else map(np.unique, batches)
        for keys, _, counts in counted(inputs, below):
            yield check_of(keys, counts)
