"""Defects that the model of queries must find: each takes one rule of the commit protocol away.

The rules, and the plants that break them in the code:

1. An ack that finds its batch complete returns only when all that counts is durable: `equal_acks_return_at_once`,
   `failed_writes_count`.
2. Attempts are told apart by operator, subtask and attempt: `attempts_of_all_subtasks`, `the_last_ack_counts`.
3. An entry is written only when all operators are complete: `one_complete_operator_is_enough`.
4. A repeated batch starts from the checkpoint before it: `repeated_batches_start_from_the_newest`.
5. A revision is durable before its ack returns: `revisions_are_not_written`.
6. Acks of an older batch are refused: `acks_of_older_batches_are_taken`.
7. After an incomplete batch no other begins: `incomplete_batches_are_passed_over`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final
from unittest.mock import patch

from statelog.coordinator import coordinator
from statelog.coordinator.admission import OperatorConfig
from statelog.coordinator.batch import AcceptedAck, Batch, OperatorBatch
from statelog.coordinator.coordinator import Coordinator
from statelog.coordinator.views import Views
from statelog.errors import StorageError
from statelog.history.operator_history import History
from statelog.history.query_history import Line, QueryHistory
from statelog.log.entry import QueryCheckpoint
from statelog.log.numbered import NumberedLog
from statelog.rpc.messages import Ack, Acked, Begin, Begun
from tests.model import query_driver

Plant = Callable[[], AbstractContextManager[object]]


# ---- Acks ----


class _Noting(Coordinator):
    """Notes the batch that has begun last."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.newest = -1

    def begin(self, request: Begin) -> Begun:
        begun = super().begin(request)
        self.newest = request.task.batch
        return begun


class _EqualAtOnce(_Noting):
    """Answers an ack at once if one with its result has come before."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._seen: dict[tuple[str, int, int], list[bytes]] = {}

    def ack(self, ack: Ack, payload: bytes) -> Acked:
        of = ack.task.uid, ack.task.batch, ack.task.subtask
        if ack.task.batch == self.newest and self._seen.get(of) == ack.checksums:
            return Acked()
        self._seen[of] = ack.checksums
        return super().ack(ack, payload)


def equal_acks_return_at_once() -> AbstractContextManager[object]:
    """An ack with the result of an earlier one does not wait until that one's entry is durable."""
    return patch.object(query_driver, "Coordinator", _EqualAtOnce)


_append: Final = NumberedLog.append


def appends_ignore(ignored: type[Exception]) -> AbstractContextManager[object]:
    """An entry counts as durable although its write has raised an error."""

    def append(log: NumberedLog, entry: QueryCheckpoint, payload: list[bytes]) -> QueryCheckpoint:
        try:
            return _append(log, entry, payload)
        except ignored:
            return entry

    return patch.object(NumberedLog, "append", append)


def failed_writes_count() -> AbstractContextManager[object]:
    """An entry whose write has failed counts as durable."""
    return appends_ignore(StorageError)


class _AnyBatch(_Noting):
    """Takes the acks of batches that are over, and forgets them."""

    def ack(self, ack: Ack, payload: bytes) -> Acked:
        return Acked() if ack.task.batch < self.newest else super().ack(ack, payload)


def acks_of_older_batches_are_taken() -> AbstractContextManager[object]:
    """An attempt whose batch is over is told that its result counts."""
    return patch.object(query_driver, "Coordinator", _AnyBatch)


# ---- The attempt that counts ----

_accept: Final = OperatorBatch.accept


def _accept_last(batch: OperatorBatch, accepted: AcceptedAck, name: str) -> bool:
    batch.acks[accepted.ack.task.subtask] = accepted
    return True


def the_last_ack_counts() -> AbstractContextManager[object]:
    """The ack that comes last counts, and not that of the latest attempt."""
    return patch.object(OperatorBatch, "accept", _accept_last)


def _accept_highest(batch: OperatorBatch, accepted: AcceptedAck, name: str) -> bool:
    highest = max((one.ack.task.attempt for one in batch.acks.values()), default=-1)
    is_first = accepted.ack.task.subtask not in batch.acks
    return (is_first or accepted.ack.task.attempt > highest) and _accept(batch, accepted, name)


def attempts_of_all_subtasks() -> AbstractContextManager[object]:
    """An attempt is compared with those of other subtasks."""
    return patch.object(OperatorBatch, "accept", _accept_highest)


def _accept_silently(batch: OperatorBatch, accepted: AcceptedAck, name: str) -> bool:
    is_counted = _accept(batch, accepted, name)
    accepted.is_stored = batch.durable is not None
    return is_counted


def revisions_are_not_written() -> AbstractContextManager[object]:
    """A later attempt's result replaces that of an earlier one in memory only, once the batch is durable."""
    return patch.object(OperatorBatch, "accept", _accept_silently)


def one_complete_operator_is_enough() -> AbstractContextManager[object]:
    """A batch is complete with the last ack of any operator."""
    return patch.object(
        Batch, "is_complete", property(lambda batch: any(one.is_complete for one in batch.operators.values()))
    )


# ---- Starts ----

_of_first_batch: Final = Views.of_first_batch


def _of_newest(config: OperatorConfig, identity: str, history: History, batch: int) -> Views:
    latest = history.latest
    return _of_first_batch(config, identity, history, batch if latest is None else max(batch, latest.batch + 1))


@contextmanager
def repeated_batches_start_from_the_newest() -> Iterator[None]:
    """A batch that a former start has completed starts from its own checkpoint."""
    with patch.object(Line, "go_back"), patch.object(Views, "of_first_batch", _of_newest):
        yield


def _admit_any(query: QueryHistory, roster: Sequence[OperatorConfig], *_: object) -> dict[str, str]:
    return {config.uid: query.names[config.uid] for config in roster if config.uid in query.names}


def incomplete_batches_are_passed_over() -> AbstractContextManager[object]:
    """A start goes on although the checkpoint before its first batch is missing."""
    return patch.object(coordinator, "admit", _admit_any)


PLANTS: Final[Mapping[str, Plant]] = {
    "equal acks return at once": equal_acks_return_at_once,
    "failed writes count": failed_writes_count,
    "acks of older batches are taken": acks_of_older_batches_are_taken,
    "the last ack counts": the_last_ack_counts,
    "attempts of all subtasks": attempts_of_all_subtasks,
    "revisions are not written": revisions_are_not_written,
    "one complete operator is enough": one_complete_operator_is_enough,
    "repeated batches start from the newest": repeated_batches_start_from_the_newest,
    "incomplete batches are passed over": incomplete_batches_are_passed_over,
}
