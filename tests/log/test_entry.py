"""What an entry of the log says, and how a reader finds the parts that it carries."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest
import xxhash
from msgspec.structs import replace

from statelog.errors import CorruptionError, ErrorKind
from statelog.log.entry import (
    FRAME_HEADER_BYTES,
    Checkpoint,
    EntryPlace,
    FrameHeader,
    QueryCheckpoint,
    Section,
    decode_header,
    decode_index,
    encode_frame,
)
from statelog.log.references import Base, Level, SegmentRef, StoredRun
from statelog.runs.key_groups import hash_range
from statelog.runs.schema import StateSchema
from tests.entries import checkpoint_of, entry_of

WHOLE = hash_range(0, 1)


def checkpoint(parallelism: int, *segments: SegmentRef) -> Checkpoint:
    return checkpoint_of(0, segments, parallelism=parallelism)


def of_subtasks(*subtasks: int) -> list[SegmentRef]:
    return [SegmentRef(subtask, 0, b"", place, 1, 1, 1) for place, subtask in enumerate(subtasks)]


@pytest.mark.parametrize("count", range(6))
@pytest.mark.parametrize("parallelism", range(1, 5))
def test_subtasks_have_any_number_of_segments(parallelism: int, count: int) -> None:
    for subtasks in combinations_with_replacement(range(parallelism), count):
        segments = of_subtasks(*subtasks)
        made = checkpoint(parallelism, *segments)
        assert made.by_subtask() == [
            [one for one in segments if one.subtask == subtask] for subtask in range(parallelism)
        ]
        for first in range(parallelism):
            for last in range(first, parallelism):
                expected = [one for one in segments if first <= one.subtask <= last]
                assert made.segments_of(first, last) == expected, (subtasks, first, last)


def test_what_is_inside_an_entry_is_behind_its_beginning_in_its_own_file() -> None:
    file, other = (f"log/{number:020}.log" for number in (7, 8))
    places = [
        (file, 500),
        (file, 150),
        (file, 50),  # a snapshot that has not changed since an earlier entry
        (other, 200),
        ("op/changes/1/0/x", 200),
        (f"/data/parent!/{file}", 200),
    ]
    parts = [SegmentRef(subtask, 0, b"", offset, 25, 1, 1, name) for subtask, (name, offset) in enumerate(places)]
    assert EntryPlace(7, 100).inside(parts) == parts[:2]
    entry = entry_of(checkpoint_of(0, parts[1:]), checkpoint_of(0, parts[:1]), number=7, offset=100)
    assert entry.inside == (150, 525)
    assert entry_of(checkpoint_of(0, parts[2:]), number=7, offset=100).inside == (0, 0)


def test_a_reader_knows_where_in_the_object_each_part_is() -> None:
    """Also of materialized state; parts in other objects stay where they are."""
    inside = [StoredRun("", offset, 10, b"", 1, WHOLE.first, WHOLE.last) for offset in (5, 15)]
    elsewhere = StoredRun("op/runs/1/0/x", 3, 10, b"", 1, WHOLE.first, WHOLE.last)
    levels = [
        Level(batch, batch, b"", b"", WHOLE.first, WHOLE.last, runs)
        for batch, runs in enumerate([[elsewhere, inside[0]], [inside[1]]])
    ]
    segments = [SegmentRef(0, 0, b"", 0, 5, 1, 1), SegmentRef(0, 0, b"", 7, 5, 1, 1, "op/changes/1/0/x")]
    made = replace(checkpoint(1, *segments), bases=[Base(0, 1, levels)])
    entry = entry_of(checkpoint(1, segments[1]), made)
    parts = encode_frame(entry, [bytes(25)])
    header = decode_header(parts[0][:FRAME_HEADER_BYTES], name="log/7.log", offset=100)
    index = parts[0][FRAME_HEADER_BYTES:]
    found = decode_index(header, index, name="log/7.log", offset=100, number=7)
    assert isinstance(found, QueryCheckpoint)
    payload = 100 + len(parts[0])
    assert found.place == EntryPlace(7, 100)
    other, own = found.sections
    assert other.segments == [segments[1]]
    assert [(one.name, one.offset) for one in own.segments] == [("log/7.log", payload), ("op/changes/1/0/x", 7)]
    [base] = own.bases
    assert [[(run.name, run.offset) for run in level.runs] for level in base.levels] == [
        [("op/runs/1/0/x", 3), ("log/7.log", payload + 5)],
        [("log/7.log", payload + 15)],
    ]
    assert found == entry.placed(header, name="log/7.log", offset=100, number=7)


def test_only_operator_state_is_all_in_its_entry() -> None:
    assert checkpoint(1).is_whole is False
    assert replace(checkpoint(1), key_schema=b"").is_whole is True


def test_an_index_of_another_form_is_damage() -> None:
    index = b"\xc1"
    header = FrameHeader(len(index), 0, xxhash.xxh3_64_intdigest(index))
    with pytest.raises(CorruptionError, match="log entry at offset 7 is of an unknown form") as caught:
        decode_index(header, index, name="x.log", offset=7, number=1)
    assert caught.value.kind is ErrorKind.FORMAT


def test_a_checkpoint_is_an_entry_as_one_operator_sees_it() -> None:
    """Nothing gets lost, but for what belongs to others; its name may be a later one, its watermark Spark's."""
    own = Section(
        identity="op-1",
        uid="op",
        parallelism=1,
        segments=of_subtasks(0),
        key_schema=b"keys",
        states=[StateSchema("s", "value", b"", b"v")],
        watermark_ms=8,
        max_event_ms=[7, None],
        silent_ms=[0, 2000],
        element_counts=[[1]],
        generations={"s": 2},
        bases=[Base(0, 1, [])],
        base_ranges=[],
        settings={"time mode": "none"},
        begins=True,
    )
    sparks = Section("other-2", "other", 2, [], b"", [])
    entry = QueryCheckpoint(
        *(5, 7, 1, b"id", b"before", "query", "run", b"token", 1000, 900, [own, sparks]),
        log_start=3,
        retained_from=4,
        number=9,
        offset=10,
    )
    found = Checkpoint.of(entry, own)
    assert found.section == own
    shared = set(Checkpoint.__struct_fields__) & set(QueryCheckpoint.__struct_fields__) - {"watermark_ms"}
    assert shared > {"epoch", "batch", "token", "log_start", "retained_from", "number", "offset"}
    assert all(getattr(found, name) == getattr(entry, name) for name in shared)
    assert (found.uid, found.watermark_ms, found.place) == ("op", 8, entry.place)
    assert Checkpoint.of(entry, own, "renamed").uid == "renamed"
    assert Checkpoint.of(entry, sparks).watermark_ms == 900
