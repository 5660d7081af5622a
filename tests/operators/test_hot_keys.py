"""The keys and key groups with the most rows, beside a count of all of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from statelog.operators.keyed.caller import MOST, HotKeys, hot_key_groups
from statelog.runs.key_groups import GROUP_SHIFT
from statelog.tables.table import KeyBatch


def noted(rows: list[int], chunk_keys: int) -> list[tuple[int, int, bytes]]:
    """The hot keys of keys 0, 1, ... with these numbers of rows; key i is of key group i."""
    hot, hashes = HotKeys(), np.arange(len(rows), dtype=np.uint64) << np.uint64(GROUP_SHIFT)
    keys = KeyBatch(hashes, pa.array([b"%d" % key for key in range(len(rows))], pa.binary()))
    for start in range(0, len(rows), chunk_keys):
        end = min(start + chunk_keys, len(rows))
        hot.note(keys.slice(start, end), np.array(rows[start:end]))
    return hot.found


@given(st.lists(st.integers(1, 30), max_size=80), st.integers(1, 40))
def test_the_hot_keys_are_those_with_the_most_rows(rows: list[int], chunk_keys: int) -> None:
    found = noted(rows, chunk_keys)
    assert [count for count, _, _ in found] == sorted((count for count in rows if count > 1), reverse=True)[:MOST]
    assert all(rows[group] == count and key == b"%d" % group for count, group, key in found)
    assert len({group for _, group, _ in found}) == len(found)


def test_a_long_key_is_counted_but_not_told() -> None:
    hot = HotKeys()
    keys = KeyBatch(np.array([1 << GROUP_SHIFT, 2 << GROUP_SHIFT], np.uint64), pa.array([b"a" * 1024, b"b" * 1025]))
    hot.note(keys, np.array([2, 3]))
    assert hot.found == [(3, 2, b""), (2, 1, b"a" * 1024)]


@given(st.lists(st.integers(0, 40), max_size=60), st.sampled_from([1, 100]))
def test_the_hot_key_groups_are_those_with_the_most_rows(groups: list[int], times: int) -> None:
    hashes = np.array([(group << GROUP_SHIFT) + 5 for group in groups * times], np.uint64)
    counted = Counter(groups * times)
    found = hot_key_groups(hashes)
    expected = sorted((count for count in counted.values() if count > 1), reverse=True)[:MOST]
    assert [rows for rows, _ in found] == expected
    assert all(counted[group] == rows for rows, group in found)
