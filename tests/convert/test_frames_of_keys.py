"""The frames that a processor gets are those that pandas would cut out, and each is the processor's own."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from decimal import Decimal
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pyarrow as pa
from hypothesis import given, settings

from statelog.convert.input import FrameInput
from statelog.operators.keyed.grouping import KeyChunk
from statelog.tables.table import KeyBatch

AT = datetime.datetime(2024, 7, 1, 12, tzinfo=datetime.UTC)
COLUMNS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "n": (pa.int32(), [1, 2, 3]),
    "m": (pa.int64(), [1, None]),
    "x": (pa.float64(), [0.5, None]),
    "truth": (pa.bool_(), [True, None]),
    "s": (pa.string(), ["a", None]),
    "d": (pa.decimal128(5, 2), [Decimal("1.50"), None]),
    "day": (pa.date32(), [AT.date(), None]),
    "at": (pa.timestamp("us", "Europe/Berlin"), [AT, None]),
    "clock": (pa.timestamp("us"), [AT.replace(tzinfo=None), None]),
    "items": (pa.list_(pa.int64()), [[1], None]),
    "times": (pa.list_(pa.timestamp("us", "UTC")), [[AT], None]),
    "pair": (pa.struct([("a", pa.int64())]), [{"a": 1}, None]),
}


def chunk(rows: pa.RecordBatch, counts: list[int]) -> KeyChunk:
    keys = KeyBatch(np.arange(len(counts), dtype=np.uint64), pa.array([b"%d" % key for key in range(len(counts))]))
    return KeyChunk(keys, rows, np.cumsum([0, *counts]))


@st.composite
def chunks(draw: st.DrawFn) -> KeyChunk:
    counts = draw(st.lists(st.integers(1, 5), min_size=2, max_size=6))
    names = draw(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, unique=True))
    columns = []
    for name in names:
        kind, values = COLUMNS[name]
        held = draw(st.lists(st.sampled_from(values), min_size=sum(counts), max_size=sum(counts)))
        columns.append(pa.array(held, kind))
    return chunk(pa.RecordBatch.from_arrays(columns, names=names), counts)


def cut_by_pandas(made: FrameInput, window: KeyChunk, limit: int) -> Iterator[list[pd.DataFrame]]:
    """The frame of all rows, cut by pandas; a column of objects because of nulls has none where a key has no null."""
    [[whole]] = [list(frames) for frames in made.by_key(chunk(window.rows, [window.rows.num_rows]))]
    for start, end in pairwise(window.starts.tolist()):
        frame = whole.iloc[start:end].copy()
        for name in {"n", "m", "truth"} & set(frame):
            if frame[name].dtype == object and not frame[name].isna().any():
                frame[name] = frame[name].astype(COLUMNS[name][0].to_pandas_dtype())
        yield [frame.iloc[first : first + limit].reset_index(drop=True) for first in range(0, len(frame), limit)]


@settings(max_examples=200)
@given(chunks(), st.integers(1, 6), st.booleans())
def test_frames_are_those_of_each_key_alone(window: KeyChunk, limit: int, keeps_integers: bool) -> None:
    names = window.rows.schema.names
    limited = FrameInput(names, limit, 1 << 31, keeps_integers=keeps_integers)
    unlimited = FrameInput(names, 0, 1 << 31, keeps_integers=keeps_integers)
    found = [list(frames) for frames in limited.by_key(window)]
    expected = list(cut_by_pandas(unlimited, window, limit))
    assert [len(frames) for frames in found] == [len(frames) for frames in expected]
    for one, other in zip(found, expected, strict=True):
        for frame, wanted in zip(one, other, strict=True):
            pd.testing.assert_frame_equal(frame, wanted, check_index_type=True, check_column_type=True)
            assert type(frame.index) is pd.RangeIndex


def test_a_processor_may_change_its_frames() -> None:
    rows = pa.RecordBatch.from_pydict({"x": [0.5, 1.5, 2.5], "items": [[1], [2], [3]], "s": ["a", "b", "c"]})
    before = [
        frame.copy(deep=True)
        for frames in FrameInput(["x", "items", "s"], 0, 1 << 31).by_key(chunk(rows, [1, 2]))
        for frame in frames
    ]
    seen = []
    for frames in FrameInput(["x", "items", "s"], 0, 1 << 31).by_key(chunk(rows, [1, 2])):
        for frame in frames:
            seen.append(frame.copy(deep=True))
            frame.loc[0, "x"] = 9.0
            frame["x"].to_numpy()[:] = 8.0
            frame.loc[0, "s"] = "z"
            frame["more"] = 1
            frame.index.name = "mine"
            frame.drop(columns="items", inplace=True)
    for one, other in zip(seen, before, strict=True):
        pd.testing.assert_frame_equal(one, other)
        assert one.index.name is None
    assert rows.column("x").to_pylist() == [0.5, 1.5, 2.5]
