"""Attempts as tests of a task's parts need them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from statelog import Options
from statelog.checkpoint.attempt import Attempt, WorkerMemory
from statelog.checkpoint.protocol import Acked, ReadProgress, Reply, Request, TaskId
from statelog.storage import LocalStore
from statelog.testing.clock import ManualClock


def make_attempt(local: Path, batch: int = 1, **given: Any) -> Attempt:
    """Attempt 7 of subtask 0 at a batch, in a local directory; it must not call the coordinator, unless told how."""
    return Attempt(
        **{
            "task": TaskId("query", "run", "op", "instance", batch, 0, 7),
            "partition": 0,
            "parallelism": 1,
            "options": Options(),
            "call": _refuse,
            "memory": WorkerMemory(),
            "local_of": lambda identity: local,
            "open_store": LocalStore,
            "clock": ManualClock(),
            "token": "token",
            **given,
        }
    )


def telling(told: list[tuple[int, int]]) -> Callable[[Request, bytes], Reply]:
    """A coordinator that notes the progress of a restore: the bytes read, and the bytes in total."""

    def call(request: Request, payload: bytes) -> Reply:
        assert isinstance(request, ReadProgress)
        told.append((request.read_bytes, request.known_bytes))
        return Acked()

    return call


def _refuse(request: Request, payload: bytes) -> Reply:
    raise AssertionError(f"the coordinator is called: {request}")
