"""Attempts as tests of a task's parts need them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from statelog import Options
from statelog.rpc.messages import Acked, Begun, Permit, ReadProgress, Reply, Request, TaskId, View
from statelog.storage import LocalStore
from statelog.tasks.attempt import Attempt, WorkerMemory
from statelog.testing.query import ManualClock


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


def make_begun(
    *,
    genesis: bytes = b"genesis",
    head: bytes = b"head",
    inline_bytes: int = 0,
    upload_prefix: str = "op-1/changes/1/0",
    batch_time_ms: int = 0,
    **permit: Any,
) -> Begun:
    """What a coordinator answers to a subtask that begins a batch."""
    return Begun(
        View(identity="op-1", genesis=genesis, head=head),
        Permit(
            epoch=1,
            inline_bytes=inline_bytes,
            upload_prefix=upload_prefix,
            store="store",
            batch_time_ms=batch_time_ms,
            watermark_ms=0,
            **permit,
        ),
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
