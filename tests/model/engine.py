"""A query without Spark: the real coordinator, log and tasks, driven batch by batch by a test.

Commands are rows; the processor carries them out on a value, a list and a map state and returns what it reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from statelog import Observer, Options, Step
from statelog.changelog.local_runs import LocalRuns
from statelog.checkpoint.admission import OperatorRun
from statelog.checkpoint.batch import BatchTime
from statelog.checkpoint.coordinator import OperatorCoordinator
from statelog.checkpoint.open_log import open_log
from statelog.checkpoint.protocol import Acked, Begin, Fetch, Reply, Request, TaskId
from statelog.checkpoint.task import BatchInput, BatchTask, MemoryTables
from statelog.clock import ManualClock
from statelog.state.grouping import Window
from statelog.state.key_groups import subtasks_of
from statelog.state.keys import KeyCodec
from statelog.state.operator import KeyedInput, KeyedOperator, StateBinding
from statelog.state.schema import StateDescriptor, StateKind, encode_schema
from statelog.state.times import Moment
from statelog.state.values import FieldCodec, RowCodec
from statelog.storage import LocalStore, Store

Key = tuple[int | None, str | None]
Command = tuple[Any, ...]

KEY_SCHEMA = pa.schema([("a", pa.int64()), ("b", pa.string())])
_ROWS = pa.schema([*KEY_SCHEMA, ("command", pa.string())])


class Crash(Exception):
    """The process that passes a step dies there."""


@dataclass
class CrashPoint(Observer):
    """Crashes at a step, once; at -1 on the driver."""

    at: Step | None = None
    subtask: int = -1
    passed: list[Step] = field(default_factory=list)

    def step(self, step: Step, batch: int, subtask: int) -> None:
        self.passed.append(step)
        if step is self.at and (subtask == -1 or self.subtask in (-1, subtask)):
            self.at = None
            raise Crash(step)


class CommandProcessor:
    """Carries out commands on its states and returns what they read, as JSON."""

    def init(self, handle: Any) -> None:
        self.value = handle.getValueState("value", None)
        self.list = handle.getListState("list", None)
        self.map = handle.getMapState("map", None, None)

    def handleInputRows(self, key: Key, rows: Iterator[Any], timer_values: Any) -> Iterator[Any]:
        for row in rows:
            yield json.dumps([key, self._run(json.loads(row[2]))])

    def _run(self, command: Sequence[Any]) -> Any:
        match command:
            case ["set", value]:
                self.value.update((value,))
            case ["unset"]:
                self.value.clear()
            case ["append", *elements]:
                self.list.appendList([(element,) for element in elements])
            case ["replace", *elements]:
                self.list.put([(element,) for element in elements])
            case ["empty"]:
                self.list.clear()
            case ["put", entry, value]:
                self.map.updateValue((entry,), (value,))
            case ["remove", entry]:
                self.map.removeKey((entry,))
            case ["wipe"]:
                self.map.clear()
            case ["lookup", entry]:
                return [self.map.getValue((entry,)), self.map.containsKey((entry,))]
            case ["read"]:
                return [
                    self.value.get(),
                    [element for (element,) in self.list.get()],
                    sorted([entry, value] for (entry,), (value,) in self.map.iterator()),
                    [self.value.exists(), self.list.exists(), self.map.exists()],
                ]
        return None

    def close(self) -> None:
        pass


class Model:
    """What the commands mean, in plain dictionaries."""

    def __init__(self, keys: dict[Key, tuple[Any, list[str], dict[str, int]]] | None = None) -> None:
        self.keys = keys or {}

    def copy(self) -> Model:
        return Model({key: (value, [*items], {**entries}) for key, (value, items, entries) in self.keys.items()})

    def run(self, key: Key, command: Command) -> Any:
        value, items, entries = self.keys.setdefault(key, (None, [], {}))
        result: Any = None
        match command:
            case ("set", new):
                value = new
            case ("unset",):
                value = None
            case ("append", *new):
                items = items + list(new)
            case ("replace", *new):
                items = list(new)
            case ("empty",):
                items = []
            case ("put", entry, new):
                entries[entry] = new
            case ("remove", entry):
                entries.pop(entry, None)
            case ("wipe",):
                entries.clear()
            case ("lookup", entry):
                found = entries.get(entry)
                result = [None if found is None else [found], found is not None]
            case ("read",):
                pairs = sorted([entry, number] for entry, number in entries.items())
                exists = [value is not None, bool(items), bool(entries)]
                result = [None if value is None else [value], items, pairs, exists]
        self.keys[key] = (value, items, entries)
        return result


class _TupleInput:
    def keys(self, columns: list[pa.Array]) -> list[tuple[Any, ...]]:
        return list(zip(*(column.to_pylist() for column in columns), strict=True))

    def by_key(self, window: Window) -> list[Iterator[Any]]:
        rows = self.keys(window.rows.columns)
        return [iter(rows[start:end]) for start, end in pairwise(window.starts.tolist())]


class _NoTimes:
    def timer_values(self, moment: Moment) -> None:
        return None

    def expired_timer(self, time_ms: int) -> None:
        return None


class _JsonOutput:
    def encode(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({"json": pa.array(rows, pa.string())})


def _bindings() -> list[StateBinding]:
    def codec(name: str, kind: pa.DataType, exact: type) -> RowCodec:
        return RowCodec([FieldCodec("field", kind, exact)], name)

    texts, numbers = codec("text", pa.string(), str), codec("number", pa.int64(), int)
    return [
        StateBinding("value", StateDescriptor("value", StateKind.VALUE, numbers.schema), numbers, None, list),
        StateBinding("list", StateDescriptor("list", StateKind.LIST, texts.schema), texts, None, list),
        StateBinding("map", StateDescriptor("map", StateKind.MAP, numbers.schema, texts.schema), numbers, texts, list),
    ]


@dataclass
class Engine:
    """One operator of one query.

    Parameters
    ----------
    directory : Path
        Holds the location and the hosts' local directories.
    hash_of : callable
        Key hash, 64 bits.
    table, log_form, merge_fan_in, inline_budget_bytes
        Options.
    """

    directory: Path
    hash_of: Callable[[Key], int]
    table: str = "runs"
    log_form: str = "append"
    merge_fan_in: int = 2
    inline_budget_bytes: int = 8 << 20
    open_store: Callable[[str], Store] = LocalStore
    uid: str = "op"
    query_id: str = "query"

    def __post_init__(self) -> None:
        self.runs = 0
        self.attempts = 0
        self.clock = ManualClock(1000)
        self.observer = CrashPoint()
        self.host = 0

    @property
    def location(self) -> str:
        return str(self.directory / "location")

    def start(self, parallelism: int, first_batch: int, *, keep_local: bool = True) -> None:
        """Start a run of the query, as a new driver process would."""
        self.runs += 1
        self.host += 0 if keep_local else 1
        self.parallelism = parallelism
        self.processes = (MemoryTables(), MemoryTables())
        self.observer.at = None
        self.options = Options(
            table=self.table,
            log_form=self.log_form,
            merge_fan_in=self.merge_fan_in,
            inline_budget_bytes=self.inline_budget_bytes,
            orphan_min_age_s=0,
            observer=self.observer,
        )
        store = self.open_store(self.location)
        run = OperatorRun(
            self.query_id,
            f"run-{self.runs}",
            self.uid,
            "instance",
            parallelism,
            encode_schema(KEY_SCHEMA),
            [binding.descriptor.to_stored() for binding in _bindings()],
        )
        self.coordinator = OperatorCoordinator(
            run,
            store=store,
            location=self.location,
            root=self.uid,
            log=open_log(store, f"{self.uid}/log", self.log_form),
            options=self.options,
            clock=self.clock,
            new_token=lambda: f"{self.runs}-{self.attempts}".rjust(16).encode(),
            batch_time=lambda batch: BatchTime(1000 + batch, 0),
        )
        self.coordinator.open(first_batch)

    def call(self, request: Request, payload: bytes) -> Reply:
        if isinstance(request, Begin):
            return self.coordinator.begin(request)
        if isinstance(request, Fetch):
            return self.coordinator.fetch(request)
        self.coordinator.ack(request, payload)
        return Acked()

    def run_subtask(self, batch: int, subtask: int, rows: Iterable[tuple[Key, Command]]) -> list[Any]:
        """Run one attempt of one subtask and return its output."""
        self.attempts += 1
        operator = KeyedOperator(
            uid=self.uid,
            processor=CommandProcessor(),
            key_codec=KeyCodec(KEY_SCHEMA),
            decode_key=KeyCodec(KEY_SCHEMA).decode,
            states=_bindings(),
            input=KeyedInput([0, 1], _TupleInput()),
            output=_JsonOutput(),
            times=_NoTimes(),
        )
        local = self.directory / f"host-{self.host}" / str(self.parallelism) / str(subtask)
        task = BatchTask(
            task=TaskId(self.query_id, f"run-{self.runs}", self.uid, "instance", batch, subtask, self.attempts),
            partition=subtask,
            parallelism=self.parallelism,
            operator=operator,
            options=self.options,
            call=self.call,
            local=LocalRuns(local),
            tables=self.processes[self.attempts % 2],
            open_store=self.open_store,
            clock=self.clock,
            token=f"attempt-{self.attempts}",
        )
        held = list(rows)
        columns = {
            "a": [key[0] for key, _ in held],
            "b": [key[1] for key, _ in held],
            "command": [json.dumps(command) for _, command in held],
        }
        hashes = np.array([self.hash_of(key) for key, _ in held], np.uint64)
        read = BatchInput(
            pa.RecordBatch.from_pydict(columns, schema=_ROWS), hashes, subtask, 1000 + batch if held else None
        )
        return [json.loads(text) for output in task.run(read) for text in output.column(0).to_pylist()]

    def parts(self, rows: Iterable[tuple[Key, Command]]) -> list[list[tuple[Key, Command]]]:
        """The rows of each subtask."""
        parts: list[list[tuple[Key, Command]]] = [[] for _ in range(self.parallelism)]
        for key, command in rows:
            subtask = subtasks_of(np.array([self.hash_of(key)], np.uint64), self.parallelism)[0]
            parts[int(subtask)].append((key, command))
        return parts
