"""What a subtask of an operator without keys reads, however Spark brings its rows together."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from statelog import ConfigurationError, ErrorKind, Options
from statelog.spark.worker.specs import UnkeyedSpec

InputRow = tuple[str | None, str | None, int, int, bool]
"""Its value, that of a broadcast row, subtask, time and whether it is a broadcast row; the hash comes after them."""

OWN: list[InputRow] = [(f"row {number}", None, 0, 7, False) for number in range(5)]
# Two of the hashes collide, and one row comes twice.
COPIES: list[InputRow] = [(None, name, 0, 7, True) for name in ("a", "b", "c", "d", "e", "e")]
HASHES: dict[str | None, int | None] = {"a": -5, "b": 3, "c": 3, "d": 2**62, "e": 3, None: None}
SCHEMA = pa.schema(
    [
        ("c0", pa.string()),
        ("b0", pa.string()),
        ("__statelog_subtask", pa.int32()),
        ("__statelog_time_ms", pa.int64()),
        ("__statelog_broadcast", pa.bool_()),
        ("__statelog_hash", pa.int64()),
    ]
)


def spec(broadcast_columns: list[str] | None) -> UnkeyedSpec:
    return UnkeyedSpec(
        uid="op",
        instance="0",
        parallelism=2,
        columns=["name"],
        output_schema=StructType(),
        processor=b"",
        options=Options(),
        broadcast_columns=broadcast_columns,
        states=[],
    )


def batch(rows: list[InputRow]) -> pa.RecordBatch:
    hashed = [(*row, HASHES[row[1]]) for row in rows]
    return pa.RecordBatch.from_arrays([list(column) for column in zip(*hashed, strict=True)], schema=SCHEMA)


def values(batches: Sequence[pa.RecordBatch]) -> list[str]:
    return [value for batch in batches for value in batch.column(0).to_pylist()]


@pytest.mark.parametrize("seed", range(5))
def test_broadcast_rows_come_in_one_order_and_others_as_they_arrive(seed: int) -> None:
    rows = OWN + COPIES
    random.Random(seed).shuffle(rows)
    read = spec(["name"]).read([batch(rows[:4]), batch(rows[4:])], 0)
    assert read.broadcast is not None
    assert values(read.broadcast) == ["a", "b", "c", "e", "e", "d"]
    assert values(read.rows) == [row[0] for row in rows if row[0] is not None]
    assert len(read.rows) == 2, "together they may be more than Arrow's offsets reach"
    assert (read.subtask, read.time_ms, read.count) == (0, 7, 11)


def test_a_partition_without_rows_is_known_by_its_number() -> None:
    read = spec(["name"]).read([], 1)
    assert (read.rows, read.broadcast, read.subtask, read.time_ms) == ([], [], 1, None)
    assert spec(None).read([], 1).broadcast is None


def test_rows_of_several_subtasks_are_refused() -> None:
    rows: list[InputRow] = [OWN[0], ("other", None, 1, 7, False)]
    with pytest.raises(
        ConfigurationError, match="operator 'op': partition 0 holds rows of several subtasks"
    ) as failure:
        spec(None).read([batch(rows)], 0)
    assert failure.value.kind is ErrorKind.PARTITIONS_RENUMBERED
