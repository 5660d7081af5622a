"""How often the rows of benchmarks have each key, and that every benchmark with keys can skew them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

from benchmarks.__main__ import BENCHMARKS
from benchmarks.events import EventStream, mix
from benchmarks.skew import HOT, UNIFORM, ZIPF, skewed_key, skewed_keys

KEYS = 1_000
ROWS = 100_000


def of_numpy(skew: str) -> Any:
    words = mix(np.arange(ROWS).astype(np.uint64))
    return skewed_keys(KEYS, words, (mix(words) % np.uint64(KEYS)).astype(np.int64), skew)


def require_skew(keys: Any, skew: str) -> None:
    """The shares of the first keys are those of the distribution, and all keys are in range."""
    assert 0 <= keys.min() <= keys.max() < KEYS
    counts = Counter(keys.tolist())
    shares = [counts[key] / ROWS for key in range(KEYS)]
    if skew == ZIPF:
        # Of the distribution function at 2, 3 and 11, for keys 0, 1, and 0 to 9.
        whole = 1 - (KEYS + 1) ** -0.2
        below = [(1 - number**-0.2) / whole for number in (2, 3, 11)]
        assert shares[0] == pytest.approx(below[0], abs=0.01)
        assert shares[1] == pytest.approx(below[1] - below[0], abs=0.01)
        assert sum(shares[:10]) == pytest.approx(below[2], abs=0.01)
    else:
        assert shares[0] == pytest.approx(0.3 if skew == HOT else 1 / KEYS, abs=0.01)
        assert max(shares[1:]) < 2.5 / KEYS


@pytest.mark.parametrize("skew", [ZIPF, HOT])
def test_shares_in_numpy(skew: str) -> None:
    require_skew(of_numpy(skew), skew)


@pytest.mark.parametrize("skew", [UNIFORM, ZIPF, HOT])
def test_shares_of_events(skew: str) -> None:
    stream = EventStream(rate=1.0, sources=2, keys=KEYS, value_bytes=8, skew=skew)

    keys = stream.keys_of(0, ROWS)

    require_skew(keys, skew)
    assert EventStream.of({name: str(value) for name, value in vars(stream).items()}) == stream
    assert stream.batch(np.arange(ROWS)).column("key").to_numpy().tolist() == keys.tolist()


@pytest.mark.spark
@pytest.mark.parametrize("skew", [UNIFORM, ZIPF, HOT])
def test_shares_in_spark(spark: SparkSession, skew: str) -> None:
    rows = spark.range(ROWS)

    require_skew(rows.select(skewed_key(KEYS, rows.id, skew)).toArrow().column("key").to_numpy(), skew)


def test_every_benchmark_with_keys_has_a_skew() -> None:
    fields = {each.__name__: {field.name for field in dataclasses.fields(each.Settings)} for each in BENCHMARKS}

    assert {name for name, of in fields.items() if "skew" in of} == {
        name for name, of in fields.items() if of & {"keys", "words"}
    }
    assert len(fields) > 10
