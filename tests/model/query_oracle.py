"""What a query's state must be, from the attempts that the driver has accepted: no statelog in it.

Of each subtask the accepted attempt with the highest id counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tests.model.query_graph import State, operator_of


@dataclass
class Result:
    """What an attempt's ack says."""

    changes: State
    checksums: list[bytes]
    """Of the segments that it sends or refers to."""
    is_accepted: bool = False
    """Whether the driver has answered the ack; otherwise it is on its way."""


@dataclass
class Oracle:
    """The states of the operators after each batch."""

    parallelism: Mapping[str, int] = field(default_factory=dict)
    states: dict[int, dict[str, State]] = field(default_factory=dict)
    """By batch and operator, once no later attempt can change them."""
    results: dict[tuple[int, str], dict[int, dict[int, Result]]] = field(default_factory=dict)
    """For a batch and operator, by subtask and attempt."""

    def before(self, batch: int, uid: str) -> State:
        """The state that a batch starts from."""
        return self.states.get(batch - 1, {}).get(uid, {})

    # ---- Starts ----

    def start(self, first_batch: int, parallelism: Mapping[str, int]) -> None:
        """A start begins with a batch, and some operators begin with it, for the first time or anew."""
        held = self.states.setdefault(first_batch - 1, {})
        for uid in parallelism.keys() - self.parallelism.keys():
            held.setdefault(uid, {})
        self.parallelism = parallelism

    def stop(self, newest: int) -> None:
        """A start has ended, and Spark has committed the batches up to `newest`: all others have not been."""
        for batch, uid in sorted(self.results):
            if batch <= newest and not self.missing(batch, uid):
                self.settle(batch, uid)
        self.results.clear()
        self.forget_from(newest + 1)

    def forget_from(self, batch: int) -> None:
        """A batch and all after it have not been."""
        self.results = {key: held for key, held in self.results.items() if key[0] < batch}
        self.states = {of: held for of, held in self.states.items() if of < batch}

    def rewind(self, next_batch: int) -> None:
        """A stopped query has gone back to a batch; operators that it did not have there start over."""
        self.forget_from(next_batch)
        known = self.states.get(next_batch - 1, {})
        self.parallelism = {uid: count for uid, count in self.parallelism.items() if uid in known}

    def give_up(self, uid: str) -> None:
        """The state of an operator of a stopped query is given up."""
        self.parallelism = {other: count for other, count in self.parallelism.items() if other != uid}
        self.results = {key: held for key, held in self.results.items() if key[1] != uid}
        for states in self.states.values():
            states.pop(uid, None)

    # ---- Batches ----

    def settle(self, batch: int, uid: str) -> None:
        """No attempt can change an operator's state after a batch any more."""
        held = self.states.setdefault(batch, {})
        if uid not in held:
            held[uid] = self.after(batch, uid)

    def is_settled(self, batch: int, uid: str) -> bool:
        """Whether no attempt can change an operator's state after a batch any more."""
        return uid in self.states.get(batch, {})

    def send(self, batch: int, uid: str, subtask: int, attempt: int, result: Result) -> Result:
        """An ack is on its way; returns its result, which is the earlier one if it is sent again."""
        return self.results.setdefault((batch, uid), {}).setdefault(subtask, {}).setdefault(attempt, result)

    def is_passed_by_equal(self, batch: int, uid: str, subtask: int, attempt: int) -> bool:
        """Whether an earlier and a later attempt than this one have sent the same result."""
        found = self.results.get((batch, uid), {}).get(subtask, {})
        earlier = [result.checksums for number, result in found.items() if number < attempt]
        return any(result.checksums in earlier for number, result in found.items() if number > attempt)

    def take_back(self, batch: int, uid: str, subtask: int, attempt: int) -> None:
        """An ack has had no effect."""
        self.results.get((batch, uid), {}).get(subtask, {}).pop(attempt, None)

    def missing(self, batch: int, uid: str) -> list[int]:
        """The subtasks of which no attempt was accepted."""
        if self.is_settled(batch, uid):
            return []
        found = self.results.get((batch, uid), {})
        return [
            subtask
            for subtask in range(self.parallelism[uid])
            if not any(result.is_accepted for result in found.get(subtask, {}).values())
        ]

    def is_complete(self, batch: int, uids: Iterable[str] | None = None) -> bool:
        """Whether all subtasks of operators have been accepted, by default of all."""
        return not any(self.missing(batch, uid) for uid in (self.parallelism if uids is None else uids))

    def counted(self, batch: int, uid: str) -> list[Result]:
        """The results that count, by subtask."""
        return [self._candidates(batch, uid, subtask)[0] for subtask in range(self.parallelism[uid])]

    def possible(self, batch: int, uid: str) -> list[list[list[bytes]]]:
        """For each subtask the checksums that may be stored while acks are on their way."""
        return [
            [result.checksums for result in self._candidates(batch, uid, subtask)]
            for subtask in range(self.parallelism[uid])
        ]

    def after(self, batch: int, uid: str) -> State:
        """The state after a batch that is complete."""
        if self.is_settled(batch, uid):
            return self.states[batch][uid]
        changes = [result.changes for result in self.counted(batch, uid)]
        return operator_of(uid).after(self.before(batch, uid), changes)

    def _candidates(self, batch: int, uid: str, subtask: int) -> list[Result]:
        """The result of the highest accepted attempt, and those of higher ones that are on their way."""
        attempts = sorted(self.results[batch, uid][subtask].items())
        highest = max(place for place, (_, result) in enumerate(attempts) if result.is_accepted)
        return [result for _, result in attempts[highest:]]
