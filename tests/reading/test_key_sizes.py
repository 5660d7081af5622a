"""The sizes of keys do not depend on how their rows are cut into batches."""

from __future__ import annotations

import random
from collections import Counter

import pyarrow as pa
import pytest

from statelog.reading.footers import KeySizes
from statelog.runs.schema import Operation, StateDescriptor, StateKind, change_schema

STATE = StateDescriptor("state", StateKind.MAP, pa.schema({"text": pa.string()}), pa.schema({"entry": pa.string()}))
ROW_BYTES = 3 * 4
"""The offsets of key, entry and value."""


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("longest", [1, 2, 5, 1000])
def test_keys_are_found_across_batches(seed: int, longest: int) -> None:
    rng = random.Random(f"{seed} {longest}")
    rows = [
        (number, f"key {number}".encode(), f"e{entry}".encode(), Operation.PUT, None, "x" * rng.randrange(20))
        for number in range(40)
        for entry in range(rng.choice([1, 1, 2, 7]))
    ]
    sizes, counts = Counter[bytes](), Counter[bytes]()
    for _, key, entry, _, _, text in rows:
        sizes[key] += ROW_BYTES + len(key) + len(entry) + len(text)
        counts[key] += 1

    measured, place = KeySizes(1, most=5), 0
    while place < len(rows):
        end = place + rng.randint(1, longest)
        columns = [list(column) for column in zip(*rows[place:end], strict=True)]
        measured.add(pa.RecordBatch.from_arrays(columns, schema=change_schema(STATE)))
        place = end

    largest = measured.largest()
    assert (measured.rows, measured.keys, measured.most_rows) == (len(rows), 40, max(counts.values()))
    assert measured.key_bytes == sum(8 + len(key) + len(entry) for _, key, entry, *_ in rows)
    assert measured.key_bytes + measured.value_bytes == sum(sizes.values())
    assert [one.size_bytes for one in largest] == sorted(sizes.values(), reverse=True)[:5]
    assert all((sizes[one.key], counts[one.key]) == (one.size_bytes, one.rows) for one in largest)
