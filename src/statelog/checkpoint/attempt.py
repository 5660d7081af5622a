"""One attempt of a subtask at a batch: its surroundings, which keyed and unkeyed tasks share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from statelog.checkpoint.protocol import Acked, Begin, Begun, CheckOwner, Kept, Reply, Request, TaskId
from statelog.clock import Clock
from statelog.errors import CorruptionError, ErrorKind, FencedError, ProtocolError, StatelogError, StorageError
from statelog.local.policy import MERGE_POLICY, MergePolicy
from statelog.local.use import LocalCache, in_use, is_turn_to_remove, remove_unused
from statelog.metrics import Measurements, Step
from statelog.options import Options
from statelog.stopwatch import Part, Stopwatch
from statelog.storage import Store
from statelog.tables.open import MemoryTables

_Reply = TypeVar("_Reply")


class WorkerMemory:
    """The state that a Python worker keeps in memory from task to task."""

    def __init__(self, policy: MergePolicy = MERGE_POLICY) -> None:
        self.tables = MemoryTables()
        self.local = LocalCache(released=self.tables.forget, policy=policy)


@dataclass(frozen=True)
class Attempt:
    """The surroundings of one attempt: Spark's arguments, the worker, and the host's files."""

    task: TaskId
    partition: int
    """Spark's partition id."""
    parallelism: int
    options: Options
    call: Callable[[Request, bytes], Reply]
    """Sends a request and its payload to the coordinator."""
    memory: WorkerMemory
    local_of: Callable[[str], Path]
    """Gives the subtask's local directory, by the operator's identity."""
    open_store: Callable[[str], Store]
    """Opens the store of a location."""
    clock: Clock
    token: str
    """Unique among all attempts."""
    measurements: Measurements = field(default_factory=Measurements)

    @cached_property
    def stopwatch(self) -> Stopwatch:
        """Counts the time of the attempt."""
        return Stopwatch(self.clock)

    @property
    def file_token(self) -> str:
        """Unique among the writers of local files; begins with the batch."""
        return f"{self.task.batch}-{self.token}"

    @contextmanager
    def local_in_use(self, local: Path) -> Iterator[None]:
        """Hold the local directory during the block, and then remove those that no subtask has used for long."""
        task = self.task
        with in_use(local, task.batch), self._fenced_first():
            yield
        if is_turn_to_remove(task.batch, task.subtask, self.parallelism):
            remove_unused(local, task.batch)

    @contextmanager
    def _fenced_first(self) -> Iterator[None]:
        """Report damage as FencedError if a newer start owns the location: it deletes what this one still reads."""
        try:
            yield
        except (CorruptionError, StorageError) as error:
            if isinstance(error, CorruptionError) or error.kind is ErrorKind.OBJECT_MISSING:
                try:
                    self.call(CheckOwner(self.task), b"")
                except FencedError as fenced:
                    raise fenced from error
                except StatelogError:
                    pass  # who owns it cannot be told now
            raise

    def begin(self, input_rows: int, time_ms: int | None) -> Begun | None:
        """Ask the coordinator for the state before the batch; `time_ms` is the batch time in the rows.

        None if the batch's stored checkpoint stays: then nothing is to be done.
        """
        with self.stopwatch.counting(Part.WAIT):
            reply = self.call(Begin(self.task, self.partition, input_rows, time_ms), b"")
        return None if isinstance(reply, Kept) else require_reply(reply, Begun, "begin")

    def step(self, step: Step) -> None:
        """Tell the observer that the attempt has come to a step."""
        self.options.observer.step(step, self.task.batch, self.task.subtask)


def require_reply(reply: Reply, kind: type[_Reply], what: str) -> _Reply:
    """The reply, if it is one to the request that `what` names; otherwise raises ProtocolError."""
    if not isinstance(reply, kind):
        raise ProtocolError(f"The coordinator answered {what} with {type(reply).__name__}.")
    return reply


class Task(Protocol):
    """The work of an attempt: a KeyedTask or an UnkeyedTask."""

    def run(self, read: Any) -> Generator[pa.RecordBatch, None, Acked]:
        """Process the batch, yield the output, and return the coordinator's reply to the ack."""
