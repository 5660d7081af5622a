"""The way of a changeset, as docs/ARCHITECTURE.md tells it, is the way that one takes."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from statelog import Options
from statelog.clock import SystemClock
from statelog.coordinator.batch import AcceptedAck, BatchTime, OperatorBatch
from statelog.history.query_history import read_history
from statelog.log.entry import QueryCheckpoint, Section
from statelog.log.references import SegmentRef
from statelog.rpc.calls import RpcClient
from statelog.rpc.messages import Ack, TaskId
from statelog.runs.writer import StateChanges
from statelog.spark.driver import internals
from statelog.spark.driver.endpoint import Endpoint
from statelog.spark.plan.operator_plan import OperatorPlan
from statelog.storage import LocalStore
from statelog.tasks.attempt import Attempt, WorkerMemory
from statelog.tasks.changeset import Changeset
from statelog.testing.keyed import KeyedQuery
from statelog.testing.rows import OperatorArguments

PAGE = Path(__file__).parents[2] / "docs" / "ARCHITECTURE.md"
VALUE = "a value that is found again in bytes"
FIRST, LAST = "operators/keyed/changes.py", "storage/local.py"
MOST_MODULES = 15

FORMS = (StateChanges, Changeset, SegmentRef, Ack, AcceptedAck)
"""What a changeset is on its way, besides bytes, batches, sections and entries."""


class Remember(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.value = handle.getValueState("value", "text string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self.value.update((VALUE,))
        return iter(())

    def close(self) -> None:
        pass


def test_a_changeset_goes_the_way_that_the_page_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = re.findall(r"^\d+\. `([a-z_/]+\.py)`", PAGE.read_text(), re.MULTILINE)
    assert len(told) == len(set(told)) <= MOST_MODULES
    assert sorted(traced(tmp_path, monkeypatch)) == sorted(told)


def traced(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules through which the changesets of a batch of two operators go, from the processors to the log."""
    way, ended = Way(), threading.Event()
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=1))
    queries = [
        KeyedQuery(
            Remember(),
            OperatorArguments(input="user string", output="user string", keys=["user"], uid=uid),
            Options(),
        )
        for uid in ("first", "second")
    ]
    plans: list[OperatorPlan] = []
    for query in queries:
        config = query.operator.config_of("query", "run", 1)
        in_front = frozenset(plan.observation for plan in plans)
        plans.append(
            OperatorPlan(
                f"instance of {config.uid}",
                session,
                config.uid,
                1,
                str(directory / "state"),
                Options(),
                config.key_schema,
                config.states,
                in_front=in_front,
            )
        )
    spark = {
        "when_queries_start_and_fail": None,
        "find_query": SimpleNamespace(id="query", runId="run", awaitTermination=ended.wait),
        "is_progress_asynchronous": False,
        "observations": {plan.observation for plan in plans},
        "checkpoint_location": str(directory / "checkpoint"),
        "batch_time": BatchTime(1000, 0),
    }
    for name, answer in spark.items():
        monkeypatch.setattr(internals, name, lambda *_, answer=answer: answer)
    with way.followed():
        endpoint = Endpoint("127.0.0.1")
        for plan in plans:
            endpoint.register(plan)
        client = RpcClient("127.0.0.1", endpoint.port, endpoint.secret)
        for number, (query, plan) in enumerate(zip(queries, plans, strict=True)):
            assert not way.is_stored, "the log has an entry before all operators have acked"
            attempt = Attempt(
                TaskId("query", "run", plan.uid, plan.instance, 0, 0, number),
                partition=0,
                parallelism=1,
                options=Options(compression="none"),
                call=client.call,
                memory=WorkerMemory(),
                local_of=lambda identity: directory / "local" / identity / "1" / "0",
                open_store=LocalStore,
                clock=SystemClock(),
                token=f"token-{number}",
            )
            [read] = query.operator.split(query.data([("ann",)]), 1, 1000)
            assert sum(output.num_rows for output in query.operator.task(attempt).run(read)) == 0
        client.close()
    ended.set()
    assert [len(entry.sections) for entry in read_history(LocalStore(str(directory / "state"))).entries] == [2]
    return way.modules()


class Way:
    """Notes which module of statelog gives a changeset to which other one, as an argument or as a result."""

    def __init__(self) -> None:
        self.given: set[tuple[str, str]] = set()
        self.is_stored = False

    @contextmanager
    def followed(self) -> Iterator[None]:
        sys.setprofile(self._note)
        threading.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def modules(self) -> list[str]:
        """The modules between the first and the last: those that get it, and give it on."""
        return sorted(self._reached(FIRST, self.given) & self._reached(LAST, {(to, by) for by, to in self.given}))

    def _note(self, frame: FrameType, event: str, result: Any) -> None:
        module = _module(frame)
        if self.is_stored or not module or event not in ("call", "return"):
            return
        caller = frame.f_back
        while caller is not None and not _module(caller):
            caller = caller.f_back
        if caller is None or _module(caller) == module:
            return
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        arguments = [frame.f_locals.get(name) for name in names if name != "self"]
        is_given = any(map(_is_changeset, arguments))
        if event == "call" and is_given:
            self.given.add((_module(caller), module))
            self.is_stored = module == LAST
        if event == "return":
            writes = is_given and any(isinstance(argument, pa.NativeFile) for argument in arguments)
            if writes or _is_changeset(result):
                self.given.add((module, _module(caller)))

    @staticmethod
    def _reached(start: str, given: set[tuple[str, str]]) -> set[str]:
        found = [start]
        for module in found:
            found += [to for by, to in given if by == module and to not in found]
        return set(found)


def _module(frame: FrameType) -> str:
    """The module that runs; empty outside of statelog's packages: core modules are tools of those above."""
    name = str(frame.f_globals.get("__name__", ""))
    _, *parts = name.split(".")
    return f"{'/'.join(parts)}.py" if name.startswith("statelog.") and len(parts) > 1 else ""


def _is_changeset(value: object) -> bool:
    match value:
        case bytes() | bytearray() | memoryview():
            return VALUE.encode() in bytes(value)
        case list() | tuple():
            return any(map(_is_changeset, value))
        case dict():
            return any(map(_is_changeset, value.values()))
        case Section():
            return bool(value.segments)
        case QueryCheckpoint():
            return any(map(_is_changeset, value.sections))
        case OperatorBatch():
            return bool(value.acks)
    return isinstance(value, FORMS)
