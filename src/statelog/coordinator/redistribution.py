"""Redistributes operator state over the subtasks of a new start.

The algorithm is Flink's RoundRobinOperatorStateRepartitioner (FLIP-8). It looks only at the numbers of elements, never
at the elements.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from statelog.errors import ErrorKind, ProcessorError
from statelog.log.entry import Checkpoint
from statelog.log.references import SegmentRef
from statelog.log_fields import get_logger
from statelog.operators.unkeyed.states import OperatorStateMode
from statelog.rpc.messages import SnapshotSlice, SnapshotView

_log: Final = get_logger(__name__)

LARGE_SNAPSHOT_BYTES: Final = 16 << 20
"""Above this size, a subtask's operator state is larger than operator state is meant to be."""


@dataclass(frozen=True)
class Share:
    """Consecutive elements of one state of an old subtask."""

    subtask: int
    """The old subtask."""
    state: int
    """Index of the state."""
    first: int
    count: int


def redistribute(
    modes: Sequence[OperatorStateMode], counts: Sequence[Sequence[int]], parallelism: int
) -> list[list[Share]]:
    """Deal the elements of old subtasks to new ones.

    With the same parallelism each subtask keeps its own elements, except for unions. Otherwise the elements of a list,
    in the order of the old subtasks, are cut into contiguous pieces, the larger ones first; their sizes differ by at
    most one. The first piece of a state goes to the subtask after the one that got the last larger piece of the state
    before. Each subtask gets all elements of a union, and one copy of a broadcast state.

    `modes` has one element per state, in order of the states' names; `counts` the numbers of elements, shape (old
    parallelism, states). The result has, for each new subtask, its shares by state and then by old subtask, without
    empty ones.
    """
    old = len(counts)
    dealt: list[list[Share]] = [[] for _ in range(parallelism)]
    first_subtask = 0
    for state, mode in enumerate(modes):
        held = [of_subtask[state] for of_subtask in counts]
        if mode is OperatorStateMode.LIST and old != parallelism:
            size, surplus = divmod(sum(held), parallelism)
            pieces = _cut(held, [size + (position < surplus) for position in range(parallelism)])
            for position, piece in enumerate(pieces):
                shares = dealt[(first_subtask + position) % parallelism]
                shares.extend(Share(subtask, state, first, count) for subtask, first, count in piece)
            first_subtask = (first_subtask + surplus) % parallelism
        else:
            for new, shares in enumerate(dealt):
                sources = range(old) if mode is OperatorStateMode.UNION else [new % old]
                shares.extend(Share(source, state, 0, held[source]) for source in sources if held[source])
    return dealt


def _cut(held: Sequence[int], sizes: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Cut the concatenation of lists of `held` elements into pieces: (list, first, count) each."""
    pieces: list[list[tuple[int, int, int]]] = []
    source, first = 0, 0
    for size in sizes:
        piece: list[tuple[int, int, int]] = []
        while size:
            count = min(size, held[source] - first)
            if count:
                piece.append((source, first, count))
                size, first = size - count, first + count
            else:
                source, first = source + 1, 0
        pieces.append(piece)
    return pieces


def restored_views(before: Checkpoint, declared: set[str], parallelism: int) -> list[SnapshotView]:
    """The views with which the subtasks of a new start begin, one per subtask.

    `declared` are the names of the states that the start declares. Other states are retained.
    """
    modes = [
        mode
        if (mode := OperatorStateMode(state.kind)) is not OperatorStateMode.UNION or state.name in declared
        # A union that the processor does not declare is never reduced to each subtask's own part. Treated as a union
        # it would multiply.
        else OperatorStateMode.LIST
        for state in before.states
    ]
    dealt = redistribute(modes, before.element_counts, parallelism)
    is_redistributed = parallelism != before.parallelism
    return [_view(before, shares, is_redistributed) for shares in dealt]


def _view(before: Checkpoint, shares: list[Share], is_redistributed: bool) -> SnapshotView:
    held = [sum(of_subtask) for of_subtask in before.element_counts]
    # An empty snapshot is equivalent to none, and need not be written again.
    subtasks = sorted({share.subtask for share in shares}) or [i for i, count in enumerate(held) if count == 0][:1]
    snapshots = [before.segments[subtask] for subtask in subtasks]
    if len(subtasks) == 1 and sum(share.count for share in shares) == held[subtasks[0]]:
        return SnapshotView(snapshots, None, True, is_redistributed)
    slices = [
        SnapshotSlice(subtasks.index(share.subtask), before.states[share.state].name, share.first, share.count)
        for share in shares
    ]
    return SnapshotView(snapshots, slices, True, is_redistributed)


def warn_of_large_snapshot(snapshot: SegmentRef, noted: set[int], name: str) -> None:
    """Log that a subtask's operator state is larger than it is meant to be; once per subtask as a warning.

    `noted` has the subtasks that have been warned of.
    """
    if snapshot.length <= LARGE_SNAPSHOT_BYTES:
        return
    level = logging.DEBUG if snapshot.subtask in noted else logging.WARNING
    noted.add(snapshot.subtask)
    _log.log(
        level,
        "%s: the operator state of subtask %d has %.1f MB, and is stored as a whole in every batch that changes it;"
        " use keyed state for large states",
        name,
        snapshot.subtask,
        snapshot.length / 1e6,
    )


def require_equal_copies(copies: Sequence[Mapping[str, bytes]], name: str) -> None:
    """Raise ProcessorError if the copies of a broadcast state differ.

    `copies` holds each subtask's checksums by state, without those of empty states.
    """
    for state in sorted(set().union(*copies)):
        other = next((i for i, checksums in enumerate(copies) if checksums.get(state) != copies[0].get(state)), None)
        if other is not None:
            raise ProcessorError(
                f"{name}: after the batch, broadcast state '{state}' differs between subtasks 0 and {other}.",
                kind=ErrorKind.COPIES_DIFFER,
                hint="processBroadcast() may depend only on its rows and on broadcast states, not on the subtask, list"
                " states, the clock or random numbers. Nothing from the batch was kept.",
            )
