"""One run of ``commit``, in a process of its own: drives a coordinator through many checkpoints."""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from benchmarks import machine
from benchmarks.counting import CommitRecorder
from statelog.checkpoint.admission import OperatorConfig
from statelog.checkpoint.batch import BatchTime
from statelog.checkpoint.coordinator import Coordinator
from statelog.checkpoint.protocol import Ack, Acked, Begin, Begun, Fetch, Reply, Request, TaskId
from statelog.clock import SystemClock
from statelog.log.entry import Checkpoint
from statelog.log.open import open_log, open_retrying_store
from statelog.log.references import SegmentRef
from statelog.metrics import Measurements
from statelog.options import Options
from statelog.runs import digests
from statelog.runs.schema import StateDescriptor, StateKind, encode_schema
from statelog.spark.rpc import RpcClient, RpcServer
from statelog.storage import open_store

__all__ = ["run"]

_ROOT: Final = "main"
_PAYLOADS: Final = 257
_CHECKED_SEGMENTS: Final = 1_000
_INTERVAL_MS: Final = 100

Call = Callable[[Request, bytes], Reply]


@dataclass(frozen=True)
class _Load:
    """What the tasks of a run send."""

    subtasks: int
    payloads: list[bytes]
    checksums: list[bytes]

    def pick(self, batch: int, subtask: int) -> int:
        """Which payload a subtask has in a batch."""
        return (batch * self.subtasks + subtask) % len(self.payloads)


@dataclass
class _Counts:
    """What was done so far, in all locations."""

    commit_s: list[float]
    coordinator_commit_s: list[float]
    total_s: float = 0.0
    log_read_s: float = 0.0
    rss_before_bytes: int | None = None
    rss_after_bytes: int | None = None


def run(
    file_merging: str,
    checkpoints: int,
    subtasks: int,
    changeset_bytes: int,
    calls: str,
    per_location: int,
    base: str,
) -> dict[str, Any]:
    """Commit checkpoints, and read them back.

    Parameters
    ----------
    file_merging : {"across", "within"}
        What shares a file.
    checkpoints, subtasks, changeset_bytes : int
        Size of the run.
    calls : {"rpc", "direct"}
        Whether the coordinator is called through server and client.
    per_location : int
        Checkpoints after which a fresh location is used and the old one deleted.
    base : str
        An empty directory, or folder in an object store.

    Raises
    ------
    RuntimeError
        If what was committed is not what the log holds.
    """
    source = random.Random(0)
    payloads = [source.randbytes(changeset_bytes) for _ in range(_PAYLOADS)]
    load = _Load(subtasks, payloads, [digests.checksum(payload) for payload in payloads])
    counts = _Counts([], [])
    done, location = 0, base
    while done < checkpoints:
        if done:
            store = open_store(location)
            store.delete([info.name for info in store.list()])
        location = f"{base}/location-{done}"
        number = min(per_location, checkpoints - done)
        _run_location(load, number, file_merging, calls, location, counts)
        _check_log(load, number, file_merging, location, counts)
        done += number
    sizes = [info.size_bytes for info in open_store(location).list()]
    return {
        "checkpoints": checkpoints,
        "subtasks": subtasks,
        "changeset_bytes": changeset_bytes,
        "checkpoints_per_s": checkpoints / counts.total_s,
        "files": len(sizes),
        "bytes": sum(sizes),
        "log_read_s": counts.log_read_s,
        "rss_before_bytes": counts.rss_before_bytes,
        "rss_after_bytes": counts.rss_after_bytes,
        "commit_s": counts.commit_s,
        "coordinator_commit_s": counts.coordinator_commit_s,
    }


def _run_location(load: _Load, checkpoints: int, file_merging: str, calls: str, location: str, counts: _Counts) -> None:
    recorder = CommitRecorder()
    coordinator = _coordinator(load.subtasks, file_merging, location, recorder)
    coordinator.open(0)
    call = _direct(coordinator) if calls == "direct" else _over_rpc(coordinator)
    warm_up = max(1, checkpoints // 100)
    for batch in range(checkpoints):
        if batch == warm_up and counts.rss_before_bytes is None:
            counts.rss_before_bytes = machine.rss_bytes()
        started_s = time.perf_counter()
        counts.commit_s.append(_checkpoint(load, batch, call))
        counts.total_s += time.perf_counter() - started_s
    counts.rss_after_bytes = machine.rss_bytes()
    counts.coordinator_commit_s.extend(recorder.commit_s)
    coordinator.close()


def _checkpoint(load: _Load, batch: int, call: Call) -> float:
    """All subtasks begin and ack a batch, one after the other; returns how long the last ack took."""
    tasks = [
        TaskId("query", "run", "main", "bench", batch, subtask, batch * load.subtasks + subtask)
        for subtask in range(load.subtasks)
    ]
    for subtask, task in enumerate(tasks):
        begun = call(Begin(task, subtask, 1, batch * _INTERVAL_MS), b"")
        if not isinstance(begun, Begun) or begun.inline_bytes < len(load.payloads[0]):
            raise RuntimeError(f"changesets of {len(load.payloads[0])} bytes would not travel with the acks")
    elapsed_s = 0.0
    for subtask, task in enumerate(tasks):
        picked = load.pick(batch, subtask)
        payload = load.payloads[picked]
        segment = SegmentRef(task.subtask, task.attempt, load.checksums[picked], 0, len(payload), 1, 1)
        ack = Ack(task, [segment], 0.0)
        started_s = time.perf_counter()
        reply = call(ack, payload)
        elapsed_s = time.perf_counter() - started_s
        if not isinstance(reply, Acked):
            raise RuntimeError(f"the ack of subtask {subtask} in batch {batch} was answered with {reply}")
    return elapsed_s


def _coordinator(subtasks: int, file_merging: str, location: str, recorder: CommitRecorder) -> Coordinator:
    schema = pa.schema([("n", pa.int64())])
    state = StateDescriptor("n", StateKind.VALUE, schema).to_stored()
    key_schema = encode_schema(pa.schema([("key", pa.int64())]))
    # Nobody does what the coordinator orders here.
    options = Options(file_merging=file_merging, materialization=False, observer=recorder)
    store = open_retrying_store(location, options, SystemClock(), Measurements())
    return Coordinator(
        OperatorConfig("query", "run", "main", "bench", subtasks, key_schema, [state]),
        store=store,
        location=location,
        root=_ROOT,
        log=open_log(store, _ROOT, options, SystemClock()),
        options=options,
        clock=SystemClock(),
        new_token=lambda: secrets.token_bytes(16),
        batch_time=lambda batch: BatchTime(batch * _INTERVAL_MS, 0),
        measurements=Measurements(),
        deletes_in_background=True,
        slots=1,
    )


def _direct(coordinator: Coordinator) -> Call:
    def call(request: Request, payload: bytes) -> Reply:
        if isinstance(request, Begin):
            return coordinator.begin(request)
        if isinstance(request, Fetch):
            return coordinator.fetch(request)
        assert isinstance(request, Ack)
        return coordinator.ack(request, payload)

    return call


def _over_rpc(coordinator: Coordinator) -> Call:
    secret = os.urandom(32)
    server = RpcServer("127.0.0.1", 0, secret, _direct(coordinator))
    return RpcClient("127.0.0.1", server.port, secret).call


def _check_log(load: _Load, checkpoints: int, file_merging: str, location: str, counts: _Counts) -> None:
    """Read the log as a restart would, and compare it with what was sent."""
    store = open_store(location)
    started_s = time.perf_counter()
    entries = open_log(store, _ROOT, Options(file_merging=file_merging), SystemClock()).read()
    counts.log_read_s = time.perf_counter() - started_s
    found = [entry for entry in entries if isinstance(entry, Checkpoint)]
    if [entry.batch for entry in found] != list(range(checkpoints)):
        raise RuntimeError(f"the log holds {len(found)} checkpoints after {checkpoints} commits")
    segments = [(entry.batch, segment) for entry in found for segment in entry.segments]
    if [segment.checksum for _, segment in segments] != [
        load.checksums[load.pick(batch, segment.subtask)] for batch, segment in segments
    ]:
        raise RuntimeError("the log does not name the changesets that were sent")
    step = max(1, len(segments) // _CHECKED_SEGMENTS)
    for batch, segment in segments[::step]:
        data = store.read(segment.name, offset=segment.offset, length=segment.length)
        if data != load.payloads[load.pick(batch, segment.subtask)]:
            raise RuntimeError(f"the changeset of subtask {segment.subtask} in batch {batch} is not what was sent")
