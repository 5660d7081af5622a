"""Brings rows to the partitions of their subtasks. Spark 4.0 has no shuffle by partition number."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

_SEED = 42
"""Of the hash by which Spark's hash partitioning goes."""


def to_subtasks(rows: DataFrame, parallelism: int, subtask: Column) -> DataFrame:
    """Bring rows to the partition of their subtask; `subtask` is an int from 0 to the parallelism, exclusive."""
    return rows.repartition(parallelism, label_of(subtask, parallelism))


def label_of(subtask: Column, parallelism: int) -> Column:
    """An int by which hash partitioning brings a row to the partition of its subtask."""
    return F.get(F.expr(f"array({', '.join(map(str, labels(parallelism)))})"), subtask)


@lru_cache
def labels(parallelism: int) -> tuple[int, ...]:
    """For each partition of as many, the smallest int from 0 on that Spark's hash partitioning brings there."""
    found: dict[int, int] = {}
    start = 0
    while len(found) < parallelism:
        partitions = _spark_hash(np.arange(start, start + 4 * parallelism, dtype=np.uint32)) % np.int32(parallelism)
        for partition, first in zip(*np.unique(partitions, return_index=True), strict=True):
            found.setdefault(int(partition), start + int(first))
        start += 4 * parallelism
    return tuple(found[partition] for partition in range(parallelism))


def _spark_hash(values: NDArray[np.uint32]) -> NDArray[np.int32]:
    """Spark's ``hash`` of ints: 32-bit Murmur3 of their four bytes."""
    mixed = _rotated(values * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    hashed = _rotated(np.uint32(_SEED) ^ mixed, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    hashed ^= np.uint32(4)
    hashed = (hashed ^ (hashed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    hashed = (hashed ^ (hashed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return (hashed ^ (hashed >> np.uint32(16))).view(np.int32)


def _rotated(values: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    return (values << np.uint32(bits)) | (values >> np.uint32(32 - bits))
