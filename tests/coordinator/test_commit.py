"""An operator's section of an entry: where each subtask's result lies, which states there are, and whose they are."""

from __future__ import annotations

import dataclasses
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace

from statelog.coordinator.admission import OperatorConfig
from statelog.coordinator.batch import AcceptedAck
from statelog.coordinator.commit import compose_section, generations_of
from statelog.log.entry import Checkpoint, Section
from statelog.log.references import Base, Level, SegmentRef, StoredRun
from statelog.operators.event_time import WatermarkPolicy
from statelog.rpc.messages import TaskId
from statelog.runs.schema import StateSchema, encode_schema
from tests.acks import make_ack
from tests.entries import checkpoint_of

NUMBER, PAIR = (
    encode_schema(pa.schema([(name, pa.int64()) for name in names])) for names in (["number"], ["number", "other"])
)


def state(name: str, value_schema: bytes = NUMBER) -> StateSchema:
    return StateSchema(name, "value", b"", value_schema)


KEYED = OperatorConfig("query", "run", "op", 2, b"keys", [state("count")])
WITHOUT_KEYS = dataclasses.replace(KEYED, key_schema=b"")


def taken(subtask: int, payload: bytes = b"", *, name: str = "", **more: Any) -> AcceptedAck:
    """The ack of attempt 100 of subtask 0, 101 of 1, whose changeset has ten changes for each byte."""
    length = more.pop("length", len(payload))
    task = TaskId("query", "run", "op", "instance", 5, subtask, 100 + subtask)
    ack = make_ack(task, b"sum of %d" % subtask, length, 10 * length, 7 + subtask, name, 0.0, **more)
    return AcceptedAck(ack, payload)


def composed(
    *acks: AcceptedAck, run: OperatorConfig = KEYED, before: Checkpoint | None = None, **more: Any
) -> tuple[Section, bytes]:
    run = dataclasses.replace(run, parallelism=len(acks))
    given: dict[str, Any] = {
        "watermark_ms": 4000,
        "time_ms": 5000,
        "generations": {},
        "base_ranges": None,
        "settings": {},
        "begins": False,
        **more,
    }
    section, payload = compose_section(run, "op-1", acks, before, **given)
    return section, b"".join(payload)


def placed(subtask: int, offset: int, length: int, name: str = "", checksum: bytes = b"") -> SegmentRef:
    return SegmentRef(
        subtask, 100 + subtask, checksum or b"sum of %d" % subtask, offset, length, 10 * length, 7 + subtask, name
    )


def checkpoint(*states: StateSchema, **more: Any) -> Checkpoint:
    return checkpoint_of(4, parallelism=2, states=list(states), **more)


# ---- Where the results lie ----


def test_results_that_came_with_the_acks_stand_one_after_the_other() -> None:
    entry, payload = composed(taken(0, b"zero"), taken(1, b"one"))
    assert entry.segments == [placed(0, 0, 4), placed(1, 4, 3)]
    assert payload == b"zeroone"


def test_objects_are_named_and_take_no_place_in_the_entry() -> None:
    entry, payload = composed(taken(0, b"zero"), taken(1, name="op-1/changes/1", length=9), taken(2, b"two"))
    assert entry.segments == [placed(0, 0, 4), placed(1, 0, 9, "op-1/changes/1"), placed(2, 4, 3)]
    assert payload == b"zerotwo"


def test_parts_stand_in_front_of_the_last_and_count_no_rows_read() -> None:
    """The rows that a subtask has read are said once."""
    parts = [
        SegmentRef(1, 101, b"part %d" % number, 0, 20 + number, 3, 0, f"op-1/changes/{number}") for number in (0, 1)
    ]
    entry, payload = composed(taken(0, b"zero"), taken(1, b"last", parts=parts))
    assert entry.segments == [
        placed(0, 0, 4),
        SegmentRef(1, 101, b"part 0", 0, 20, 3, 0, "op-1/changes/0"),
        SegmentRef(1, 101, b"part 1", 0, 21, 3, 0, "op-1/changes/1"),
        placed(1, 4, 4),
    ]
    assert payload == b"zerolast"


def test_what_an_entry_of_the_batch_names_already_is_not_written_again() -> None:
    stored = [
        SegmentRef(0, 90, b"part", 0, 5, 1, 0, "op-1/changes/0"),
        SegmentRef(0, 90, b"sum", 70, 5, 1, 1, "log/1"),
    ]
    kept = taken(0, b"")
    kept.stored, kept.is_stored = stored, True
    entry, payload = composed(kept, taken(1, b"one"))
    assert entry.segments == [*stored, placed(1, 0, 3)]
    assert payload == b"one"


def test_changes_that_are_only_in_the_materialized_state_have_no_segment() -> None:
    entry, payload = composed(taken(0, has_changeset=False, length=3), taken(1, b"one"))
    assert entry.segments == [placed(1, 0, 3)]
    assert payload == b"one"


@pytest.mark.parametrize("moved", [b"", b"snapshot"])
def test_a_snapshot_that_has_not_changed_stays_unless_its_file_is_to_be_emptied(moved: bytes) -> None:
    old = SegmentRef(0, 55, b"old", 30, 8, 4, 9, "log/1")
    kept = taken(1, is_unchanged=True, element_counts={})
    kept.unchanged_segment, kept.rewritten_bytes = old, moved
    entry, payload = composed(taken(0, b"zero"), kept, taken(2, b"two"), run=WITHOUT_KEYS)
    same = replace(old, subtask=1, attempt=101, rows=0, input_rows=8)
    if moved:
        assert entry.segments == [placed(0, 0, 4), replace(same, name="", offset=4), placed(2, 12, 3)]
    else:
        assert entry.segments == [placed(0, 0, 4), same, placed(2, 4, 3)]
    assert payload == b"zero" + moved + b"two"


def test_materialized_runs_stand_behind_the_changesets() -> None:
    def run(name: str, length: int, offset: int = 0) -> StoredRun:
        return StoredRun(name, offset, length, b"sum", 1, 0, 9)

    def level(first: int, *runs: StoredRun) -> Level:
        return Level(first, first, b"before", b"after", 0, 9, list(runs))

    acks = [taken(0, b"zero"), taken(1, b"one"), taken(2, b"two")]
    acks[0].levels = [level(0, run("op-1/runs/0", 50, 3)), level(1, run("", 2), run("", 3))]
    acks[0].levels_payload = b"aabbb"
    acks[2].levels, acks[2].levels_payload = [level(0, run("", 4))], b"cccc"
    entry, payload = composed(*acks)
    assert payload == b"zeroonetwoaabbbcccc"
    assert entry.bases == [
        Base(0, 3, [level(0, run("op-1/runs/0", 50, 3)), level(1, run("", 2, 10), run("", 3, 12))]),
        Base(2, 3, [level(0, run("", 4, 15))]),
    ]


def test_a_section_behind_another_has_its_bytes_behind_the_others() -> None:
    acks = [taken(0, b"zero"), taken(1, name="op-1/changes/1", length=9), taken(2, b"two")]
    acks[0].levels = [Level(0, 0, b"", b"", 0, 9, [StoredRun("", 0, 4, b"sum", 1, 0, 9)])]
    acks[0].levels_payload = b"runs"
    section, payload = composed(*acks, offset=1000)
    assert payload == b"zerotworuns"
    assert [one.offset for one in section.segments] == [1000, 0, 1004]
    [base] = section.bases
    assert [run.offset for level in base.levels for run in level.runs] == [1007]


# ---- What else a section says ----


def test_a_section_says_whose_it_is_and_what_it_builds_on() -> None:
    section, _ = composed(
        taken(0),
        taken(1),
        generations={"gone": 2},
        base_ranges=[],
        settings={"size": 10, "kind": "tumbling"},
        begins=True,
    )
    assert section == Section(
        identity="op-1",
        uid="op",
        parallelism=2,
        segments=[placed(0, 0, 0), placed(1, 0, 0)],
        key_schema=b"keys",
        states=[state("count")],
        watermark_ms=4000,
        generations={"gone": 2},
        base_ranges=[],
        settings={"size": 10, "kind": "tumbling"},
        begins=True,
    )
    assert composed(taken(0), taken(1))[0].base_ranges is None, "the entries before say what is materialized"


def test_states_that_are_not_declared_any_more_stay_and_deleted_ones_go() -> None:
    before = checkpoint(state("a"), state("count", PAIR), state("gone"), state("z"))
    run = dataclasses.replace(KEYED, states=[state("count"), state("new")], deleted=("gone", "never there"))
    entry, _ = composed(taken(0), run=run, before=before)
    assert [one.name for one in entry.states] == ["a", "count", "new", "z"]
    assert entry.states[1].value_schema == PAIR, "and a field that was removed is remembered"


def test_elements_are_counted_by_state_where_there_are_no_keys() -> None:
    counts = [{"a": 3}, {"b": 4}]
    run = dataclasses.replace(WITHOUT_KEYS, states=[state("a"), state("b")])
    acks = [taken(subtask, element_counts=one) for subtask, one in enumerate(counts)]
    assert composed(*acks, run=run)[0].element_counts == [[3, 0], [0, 4]]
    assert composed(*acks, run=dataclasses.replace(run, key_schema=b"keys"))[0].element_counts == []


@pytest.mark.parametrize(("before", "expected"), [(None, 40), (checkpoint(max_event_ms=[90]), 90)])
def test_the_largest_event_time_is_that_of_all_subtasks_and_batches(before: Checkpoint | None, expected: int) -> None:
    acks = [taken(0, max_event_ms=[40]), taken(1, max_event_ms=[30])]
    run = dataclasses.replace(KEYED, watermark=WatermarkPolicy(10))
    assert composed(*acks, run=run, before=before)[0].max_event_ms == [expected]
    assert composed(*acks, before=before)[0].max_event_ms == [], "Spark's watermark goes by itself"


def test_a_deletion_begins_the_next_generation_of_a_state_that_exists() -> None:
    before = checkpoint(state("once"), state("again"), state("stays"), generations={"again": 2, "earlier": 1})
    run = dataclasses.replace(KEYED, deleted=("once", "again", "earlier"))
    assert generations_of(run, before) == {"once": 1, "again": 3, "earlier": 1}, "what is gone is not deleted again"
    assert generations_of(KEYED, before) == before.generations
    assert generations_of(run, None) == {}
