"""How often the rows of a benchmark have each key: uniform, Zipf, or one hot key."""

from __future__ import annotations

from typing import Final

import click
from pyspark.sql import Column
from pyspark.sql import functions as F

UNIFORM: Final = "uniform"
ZIPF: Final = "zipf"
HOT: Final = "hot"
SKEWS: Final = click.Choice([UNIFORM, ZIPF, HOT])

_EXPONENT: Final = 1.2
_HOT_SHARE: Final = 0.3
_FRACTION_BITS: Final = 53


def skewed_key(keys: int, number: Column, skew: str) -> Column:
    """The key of a row, from the row's number: 0 to `keys` - 1, the most frequent first.

    With "zipf" the n-th key has a share that falls with n to the power of -1.2 (the distribution function of a bounded
    Pareto distribution, inverted), with "hot" the first key has 30% of the rows and the others are equally likely.
    """
    mixed = F.xxhash64(number)
    if skew == UNIFORM:
        return F.pmod(mixed, F.lit(keys))
    fraction = F.shiftrightunsigned(mixed, 64 - _FRACTION_BITS) / F.lit(float(1 << _FRACTION_BITS))
    if skew == HOT:
        return F.when(fraction < _HOT_SHARE, F.lit(0).cast("long")).otherwise(F.pmod(F.xxhash64(mixed), F.lit(keys)))
    power = 1 - _EXPONENT
    rank = F.pow(1 + fraction * F.lit((keys + 1) ** power - 1), F.lit(1 / power))
    return F.least(F.floor(rank).cast("long") - 1, F.lit(keys - 1).cast("long"))
