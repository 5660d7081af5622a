"""The events of the workloads: published values, and the same events however batches and subtasks divide them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

import benchmarks
from benchmarks.events import EventReader, EventStream, indexes, keys_of, mix, payloads_of

MASK = (1 << 64) - 1
STREAM = EventStream(rate=100.0, sources=2, keys=1_000, value_bytes=20)


def scalar_mix(number: int) -> int:
    """SplitMix64 on Python's integers."""
    mixed = (number + 0x9E3779B97F4A7C15) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)


def scalar_key(index: int, keys: int) -> int:
    mixed = scalar_mix(index)
    return (mixed - (1 << 64) if mixed >> 63 else mixed) % keys


def scalar_payload(index: int, value_bytes: int) -> bytes:
    state = scalar_mix(index ^ 0x5DEECE66D)
    payload = b""
    while len(payload) < value_bytes:
        state ^= (state << 13) & MASK
        state ^= state >> 7
        state ^= (state << 17) & MASK
        payload += state.to_bytes(8, "little")
    return payload[:value_bytes]


def scalar_event(source: int, number: int) -> tuple[int, bytes]:
    index = source * (10**12 // STREAM.sources) + number
    return scalar_key(index, STREAM.keys), scalar_payload(index, STREAM.value_bytes)


class TestEvents:
    def test_published_values(self) -> None:
        page = (Path(benchmarks.__path__[0]) / "README.md").read_text()
        published = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \| `([0-9a-f]{48})` \|$", page, re.MULTILINE)
        assert len(published) == 6
        for shown_index, shown_key, payload in published:
            index, key = (int(shown.replace(",", "")) for shown in (shown_index, shown_key))
            one = np.array([index], np.uint64)
            assert key == scalar_key(index, 2_000_000) == keys_of(one, 2_000_000)[0]
            assert payload == scalar_payload(index, 256)[:24].hex() == payloads_of(one, 256)[0, :24].tobytes().hex()

    def test_the_first_output_of_splitmix64_with_seed_0(self) -> None:
        assert mix(np.zeros(1, np.uint64))[0] == 0xE220A8397B1DCDAF

    @given(st.lists(st.integers(0, MASK), min_size=1), st.integers(2, 10**8), st.integers(1, 40))
    def test_are_those_of_the_scalar_computation(self, numbers: list[int], keys: int, value_bytes: int) -> None:
        index = np.array(numbers, np.uint64)

        assert keys_of(index, keys).tolist() == [scalar_key(number, keys) for number in numbers]
        payloads = [row.tobytes() for row in payloads_of(index, value_bytes)]
        assert payloads == [scalar_payload(number, value_bytes) for number in numbers]
        assert index.tolist() == numbers

    @given(st.integers(1, 9), st.integers(0, 10**9))
    def test_an_index_is_one_of_its_source_subtask(self, sources: int, first: int) -> None:
        numbers = np.arange(first, first + 20)

        expected = [n % sources * (10**12 // sources) + n // sources for n in numbers.tolist()]

        assert indexes(numbers, sources).tolist() == expected


class TestReader:
    @given(st.lists(st.integers(0, 30), min_size=1, max_size=8))
    def test_each_source_subtask_has_its_events_in_order_however_batches_divide_them(self, sizes: list[int]) -> None:
        reader = EventReader(STREAM)
        read: list[list[tuple[int, bytes]]] = [[], []]
        first = 0
        for size in sizes:
            partitions = reader.partitions({"events": first}, {"events": first + size})
            assert len(partitions) == 2
            for source, partition in enumerate(partitions):
                for _ in range(2):  # a repetition reads the same
                    rows = pa.Table.from_batches(reader.read(partition), SCHEMA).to_pylist()
                    events = [(row["key"], row["payload"]) for row in rows]
                read[source] += events
            first += size

        assert sum(map(len, read)) == first
        for source, events in enumerate(read):
            assert events == [scalar_event(source, number) for number in range(len(events))]
            assert len(events) == len(range(source, first, 2))

    def test_large_ranges_come_in_several_batches(self) -> None:
        reader = EventReader(STREAM)
        _, partition = reader.partitions({"events": 0}, {"events": 50_000})

        batches = list(reader.read(partition))

        assert [batch.num_rows for batch in batches] == [10_000, 10_000, 5_000]
        assert batches[2]["key"][4_999].as_py() == scalar_event(1, 24_999)[0]

    def test_events_are_due_at_the_rate_once_the_backlog_is_read(self) -> None:
        now_s = 7.0
        stream = EventStream(rate=100.0, sources=2, keys=1_000, value_bytes=20, backlog=450_000)
        reader = EventReader(stream, lambda: now_s)

        assert reader.initialOffset() == {"events": 0}
        assert [reader.latestOffset()["events"] for _ in range(4)] == [200_000, 400_000, 450_000, 450_000]
        now_s += 2.555
        assert reader.latestOffset() == {"events": 450_255}

    def test_a_restart_goes_on_where_the_query_was(self) -> None:
        now_s = 7.0
        stream = EventStream(rate=100.0, sources=2, keys=1_000, value_bytes=20, first=5_000, backlog=4_000)
        reader = EventReader(stream, lambda: now_s)

        assert reader.latestOffset() == {"events": 5_000}
        now_s += 0.5
        assert reader.latestOffset() == {"events": 5_050}


SCHEMA = pa.schema([("key", pa.int64()), ("payload", pa.binary())])


@pytest.mark.spark
def test_spark_reads_them(spark: SparkSession, tmp_path: Path) -> None:
    events = EventStream(rate=1.0, sources=2, keys=1_000, value_bytes=20, backlog=25_001).load(spark)
    query = events.writeStream.format("memory").queryName("events").trigger(availableNow=True)
    query.option("checkpointLocation", str(tmp_path)).start().awaitTermination()

    rows = sorted((row.key, bytes(row.payload)) for row in spark.table("events").collect())

    assert rows == sorted(scalar_event(number % 2, number // 2) for number in range(25_001))
