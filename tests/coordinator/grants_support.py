"""What the tests of :mod:`tests.coordinator.test_grants` and others share."""

from __future__ import annotations

from typing import Any

from statelog.history.operator_history import History
from statelog.history.query_history import read_history
from statelog.local.materializer import Grant
from statelog.log.entry import Checkpoint
from statelog.log.references import Level, StoredRun
from statelog.rpc.messages import Begin, Begun, JobOutcome, TaskId
from statelog.runs import digests
from statelog.runs.key_groups import hash_range
from statelog.storage import LocalStore
from tests.acks import make_ack
from tests.model.engine import Engine

WHOLE = hash_range(0, 1)


def run(name: str, content: bytes = b"x") -> StoredRun:
    return StoredRun(name, 0, len(content), digests.checksum(content), 1, WHOLE.first, WHOLE.last)


def level(first: int, last: int, before: bytes, after: bytes, *names: str) -> Level:
    return Level(first, last, before, after, WHOLE.first, WHOLE.last, [run(name) for name in names])


OLD = level(0, 2, b"0", b"2", "op-1/runs/1/0/3-4/2-a-0.run")


OLDER = [OLD, level(3, 3, b"2", b"3", "op-1/runs/1/0/4-6/3-a-0.run")]


def history_of(engine: Engine) -> History:
    """The operator's checkpoints in the log."""
    history = read_history(LocalStore(engine.location)).of(engine.uid)
    assert history is not None
    return history


class Attempts:
    """Attempts of a subtask, whose changesets are given as bytes."""

    def __init__(self, engine: Engine, subtask: int = 0) -> None:
        self.engine = engine
        self.subtask = subtask
        self.attempt = 100 + 1000 * subtask

    def begin(self, batch: int) -> Begun:
        self.attempt += 1
        return self.engine.coordinator.begin(Begin(self.task(batch), self.subtask, 0, None, "token"))

    def task(self, batch: int) -> TaskId:
        return self.engine.task_id(batch, self.subtask, self.attempt)

    def ack(
        self,
        batch: int,
        data: bytes,
        levels: list[Level] | None = None,
        job: str = "",
        *,
        name: str = "",
        **more: Any,
    ) -> JobOutcome:
        task, checksum = self.task(batch), digests.checksum(data)
        message = make_ack(task, checksum, len(data), 1, 0, name, levels=levels or [], job=job, **more)
        return self.engine.coordinator.ack(message, data).job

    def batch(self, batch: int) -> Begun:
        begun = self.begin(batch)
        self.ack(batch, b"%d" % batch)
        return begun

    def grant(self, begun: Begun) -> Grant:
        assert begun.permit.maintenance is not None
        assert begun.permit.maintenance.grant is not None
        return begun.permit.maintenance.grant

    def store(self, begun: Begun, last: int, token: str = "a") -> list[Level]:
        """Do the job of a grant: the state after a batch, in one object."""
        grant = self.grant(begun)
        first = grant.known[-1].last + 1 if grant.known else 0
        made = level(first, last, grant.base, begun.view.head, f"{grant.folder}/{last}-{token}-0.run")
        LocalStore(self.engine.location).put(made.runs[0].name, b"x")
        return [*grant.known, made]

    @property
    def runs(self) -> list[str]:
        return [info.name for info in LocalStore(self.engine.location).list(f"{self.engine.identity}/runs/")]

    @property
    def latest(self) -> Checkpoint:
        latest = history_of(self.engine).latest
        assert latest is not None
        return latest
