"""How often the rows of a benchmark have each key: uniform, Zipf, or one hot key."""

from __future__ import annotations

from typing import Final

import click
import numpy as np
import numpy.typing as npt
from pyspark.sql import Column
from pyspark.sql import functions as F

UNIFORM: Final = "uniform"
ZIPF: Final = "zipf"
HOT: Final = "hot"
SKEWS: Final = click.Choice([UNIFORM, ZIPF, HOT])
SKEW_HELP: Final = "How often rows have each key."

_EXPONENT: Final = 1.2
_POWER: Final = 1 - _EXPONENT
_HOT_SHARE: Final = 0.3
_FRACTION_BITS: Final = 53


def skewed_key(keys: int, number: Column, skew: str) -> Column:
    """The column `key` of a row, from the row's number: 0 to `keys` - 1.

    With "uniform" all keys are equally likely. With "zipf" the n-th key has a share that falls with n to the power of
    -1.2 (the distribution function of a bounded Pareto distribution, inverted), with "hot" the first key has 30% of
    the rows and the others are equally likely.
    """
    mixed = F.xxhash64(number)
    if skew == UNIFORM:
        return F.pmod(mixed, F.lit(keys)).alias("key")
    fraction = F.shiftrightunsigned(mixed, 64 - _FRACTION_BITS) / F.lit(float(1 << _FRACTION_BITS))
    if skew == HOT:
        other = F.pmod(F.xxhash64(mixed), F.lit(keys))
        return F.when(fraction < _HOT_SHARE, F.lit(0).cast("long")).otherwise(other).alias("key")
    rank = F.pow(1 + fraction * F.lit(_zipf_range(keys)), F.lit(1 / _POWER))
    return F.least(F.floor(rank).cast("long") - 1, F.lit(keys - 1).cast("long")).alias("key")


def skewed_keys(
    keys: int, words: npt.NDArray[np.uint64], others: npt.NDArray[np.int64], skew: str
) -> npt.NDArray[np.int64]:
    """The same keys of random words of 64 bits; with "hot", `others` are the keys of all rows that are not hot."""
    fraction = (words >> np.uint64(64 - _FRACTION_BITS)) / float(1 << _FRACTION_BITS)
    if skew == HOT:
        return np.where(fraction < _HOT_SHARE, 0, others)
    rank = (1 + fraction * _zipf_range(keys)) ** (1 / _POWER)
    return np.minimum(np.floor(rank).astype(np.int64) - 1, keys - 1)


def _zipf_range(keys: int) -> float:
    return float((keys + 1) ** _POWER - 1)
