"""Rows of DataFrames that become sorted runs of a state."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import DoubleType, LongType, StructField, StructType

from statelog import ConfigurationError, error_of
from statelog.convert.state_tables import Positions, StateColumns
from statelog.convert.types import state_codecs
from statelog.queries.sorted_runs import RunsPlace, StateRows, store_sorted
from statelog.runs import digests
from statelog.runs.key_groups import hash_range
from statelog.runs.reader import Run
from statelog.runs.schema import StateDescriptor, StateKind
from statelog.spark.plan.keyed_plan import KeyedFrame
from tests.spark.dropin.scenarios import settings

pytestmark = pytest.mark.spark

PARALLELISM = 3
ENTRIES = "user string, mapkey_share double, value_number long"


@pytest.fixture
def session(spark: SparkSession) -> Iterator[SparkSession]:
    """A session that sends ten rows at a time to Python."""
    with settings(spark, {"spark.sql.execution.arrow.maxRecordsPerBatch": "10"}):
        yield spark


def map_rows(session: SparkSession, rows: list[tuple[str, float, int]]) -> StateRows:
    value = StructType([StructField("number", LongType())])
    codec, entry = state_codecs("shares", value, StructType([StructField("share", DoubleType())]))
    assert entry is not None
    state = StateDescriptor("shares", StateKind.MAP, codec.schema, entry.schema)
    return StateRows(state, KeyedFrame(session.createDataFrame(rows, ENTRIES), ["user"]), value)


def test_runs_are_of_bounded_size_sorted_and_without_a_common_hash(session: SparkSession, tmp_path: Path) -> None:
    rows = [(f"user-{number % 40}", -float(number), number) for number in range(600)]
    shares = map_rows(session, rows)
    place = RunsPlace(str(tmp_path), "runs", None, run_bytes=2000)
    stored = store_sorted(shares, PARALLELISM, place, "shares")

    columns, found = StateColumns(shares.frame.key_schema, shares.state), []
    assert sorted(stored) == [0, 1, 2]
    for subtask, runs in stored.items():
        within = hash_range(subtask, PARALLELISM)
        assert len(runs) > 3
        assert within.first <= runs[0].first_hash
        assert runs[-1].last_hash <= within.last
        assert all(one.last_hash < other.first_hash for one, other in pairwise(runs))
        for run in runs:
            data = (tmp_path / run.name).read_bytes()
            assert (run.length, run.checksum) == (len(data), digests.checksum(data))
            section = Run(pa.py_buffer(data), run.name, is_stored=True).section(shares.state)
            assert section is not None
            batches = [block.batch for block in section.blocks]
            assert sum(batch.num_rows for batch in batches) == run.rows
            entries = [row for batch in batches for row in zip(*batch.to_pydict().values(), strict=True)]
            assert (entries[0][0], entries[-1][0]) == (run.first_hash, run.last_hash)
            assert [row[:3] for row in entries] == sorted(row[:3] for row in entries)
            found += [row for batch in batches for row in columns.to_rows(batch, Positions()).to_pylist()]
    assert sorted((row["key_user"], row["mapkey_share"], row["value_number"]) for row in found) == sorted(rows)


def test_two_rows_for_one_entry_are_refused(session: SparkSession, tmp_path: Path) -> None:
    """To Spark's state ``0.0`` and ``-0.0`` are two keys of a map."""
    rows = map_rows(session, [("ann", 0.0, 1), ("ann", -0.0, 2), ("bob", 0.0, 3)])
    with pytest.raises(Exception, match="two rows for one entry") as failure:
        store_sorted(rows, PARALLELISM, RunsPlace(str(tmp_path), "runs", None), "shares")
    error = error_of(failure.value)
    assert isinstance(error, ConfigurationError)
    assert "map state 'shares'" in error.message
