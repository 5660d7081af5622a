"""Dealing out operator state, compared with Flink's algorithm written down naively, element by element."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from statelog.coordinator.redistribution import redistribute, restored_views
from statelog.log.entry import Checkpoint
from statelog.log.references import SegmentRef
from statelog.operators.unkeyed.states import OperatorStateMode
from statelog.rpc.messages import SnapshotView
from statelog.runs.schema import StateSchema
from tests.entries import checkpoint_of

LIST, UNION, BROADCAST = OperatorStateMode.LIST, OperatorStateMode.UNION, OperatorStateMode.BROADCAST

Element = tuple[int, int, int]
"""(old subtask, state, index)"""


@dataclass(frozen=True)
class Case:
    modes: list[OperatorStateMode]
    counts: list[list[int]]
    parallelism: int

    @property
    def is_rescaled(self) -> bool:
        return self.parallelism != len(self.counts)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    modes = draw(st.lists(st.sampled_from(OperatorStateMode), max_size=4))
    old = draw(st.integers(1, 6))
    counts = [[draw(st.integers(0, 7)) for _ in modes] for _ in range(old)]
    for state, mode in enumerate(modes):
        if mode is BROADCAST:
            for of_subtask in counts:
                of_subtask[state] = counts[0][state]
    return Case(modes, counts, draw(st.integers(1, 8)))


def naive(case: Case) -> list[list[Element]]:
    """Each element on its own, as facts about Flink's RoundRobinOperatorStateRepartitioner say it."""
    dealt: list[list[Element]] = [[] for _ in range(case.parallelism)]
    start = 0
    for state, mode in enumerate(case.modes):
        elements = [(subtask, state, index) for subtask, held in enumerate(case.counts) for index in range(held[state])]
        if mode is UNION:
            for new in dealt:
                new.extend(elements)
        elif not case.is_rescaled:
            for subtask, new in enumerate(dealt):
                new.extend(element for element in elements if element[0] == subtask)
        elif mode is BROADCAST:
            for subtask, new in enumerate(dealt):
                new.extend(element for element in elements if element[0] == subtask % len(case.counts))
        else:
            base, remainder = len(elements) // case.parallelism, len(elements) % case.parallelism
            for i in range(case.parallelism):
                index = (i + start) % case.parallelism
                size = base + 1 if i < remainder else base
                dealt[index].extend(elements[:size])
                del elements[:size]
            start = (start + remainder) % case.parallelism
    return dealt


def expanded(case: Case) -> list[list[Element]]:
    return [
        [
            (share.subtask, share.state, index)
            for share in shares
            for index in range(share.first, share.first + share.count)
        ]
        for shares in redistribute(case.modes, case.counts, case.parallelism)
    ]


@given(cases())
def test_everyone_gets_what_the_algorithm_says(case: Case) -> None:
    assert expanded(case) == naive(case)


@given(cases())
def test_no_element_of_a_list_is_lost_or_doubled(case: Case) -> None:
    lists = {state for state, mode in enumerate(case.modes) if mode is LIST}
    dealt = Counter(element for new in expanded(case) for element in new if element[1] in lists)
    held = Counter(
        (subtask, state, index)
        for subtask, counts in enumerate(case.counts)
        for state in lists
        for index in range(counts[state])
    )
    assert dealt == held


@given(cases())
def test_lists_are_dealt_out_evenly_one_by_one_and_together(case: Case) -> None:
    if not case.is_rescaled:
        return
    lists = [state for state, mode in enumerate(case.modes) if mode is LIST]
    sizes = [Counter(state for _, state, _ in new) for new in expanded(case)]
    for state in lists:
        of_state = [size[state] for size in sizes]
        assert max(of_state) - min(of_state) <= 1
    totals = [sum(size[state] for state in lists) for size in sizes]
    assert max(totals) - min(totals) <= 1


@given(cases())
def test_the_same_parallelism_changes_nothing_but_unions(case: Case) -> None:
    same = Case(case.modes, case.counts, len(case.counts))
    for subtask, new in enumerate(expanded(same)):
        own = [element for element in new if case.modes[element[1]] is not UNION]
        assert own == [
            (subtask, state, index)
            for state, mode in enumerate(case.modes)
            if mode is not UNION
            for index in range(case.counts[subtask][state])
        ]


def test_example_of_four_partitions() -> None:
    def owners(counts: list[int], parallelism: int) -> list[int]:
        dealt = redistribute([LIST], [[count] for count in counts], parallelism)
        return [sum(share.count for share in shares) for shares in dealt]

    assert owners([2, 2], 1) == [4]
    assert owners([2, 2], 4) == [1, 1, 1, 1]
    assert owners([4], 3) == [2, 1, 1]


# ---- What subtasks of a new run start from ----


def checkpoint(case: Case) -> Checkpoint:
    count = len(case.counts)
    return checkpoint_of(
        7,
        [SegmentRef(i, 0, bytes([i]), 0, 1, 0, 0, f"object-{i}") for i in range(count)],
        parallelism=count,
        key_schema=b"",
        states=[StateSchema(f"s{i}", str(mode), b"", b"") for i, mode in enumerate(case.modes)],
        element_counts=case.counts,
    )


def elements_of(start: SnapshotView, case: Case) -> list[Element]:
    if start.slices is None:
        [whole] = start.snapshots
        return [
            (whole.subtask, state, index)
            for state, count in enumerate(case.counts[whole.subtask])
            for index in range(count)
        ]
    return [
        (start.snapshots[piece.snapshot].subtask, int(piece.state[1:]), piece.first + index)
        for piece in start.slices
        for index in range(piece.count)
    ]


@given(cases())
@example(Case([LIST], [[1]], 3))
@example(Case([LIST], [[1], [0]], 3))
def test_starts_name_the_snapshots_that_hold_the_elements(case: Case) -> None:
    declared = {f"s{i}" for i in range(len(case.modes))}
    starts = restored_views(checkpoint(case), declared, case.parallelism)
    assert [elements_of(start, case) for start in starts] == naive(case)
    for start in starts:
        assert (start.is_restored, start.is_redistributed) == (True, case.is_rescaled)
        used = {piece.snapshot for piece in start.slices or []}
        assert start.slices is None or used == set(range(len(start.snapshots))), "no snapshot is read for nothing"
    if not case.is_rescaled and UNION not in case.modes:
        assert all(start.slices is None for start in starts), "nothing is written again that has not changed"


@given(cases())
def test_a_union_that_the_processor_has_forgotten_does_not_multiply(case: Case) -> None:
    starts = restored_views(checkpoint(case), set(), case.parallelism)
    as_lists = Case([LIST if mode is UNION else mode for mode in case.modes], case.counts, case.parallelism)
    assert [elements_of(start, case) for start in starts] == naive(as_lists)
