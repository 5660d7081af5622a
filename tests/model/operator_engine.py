"""An operator without keys without Spark: the real coordinator, log and tasks, driven batch by batch by a test.

Commands are rows; the processor carries them out on two lists, a union list and a broadcast state and returns what it
reads. :class:`OperatorModel` says what must come out, in plain lists and dictionaries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from statelog import Observer, OperatorContext, OperatorHandle, OperatorProcessor, Options, Step, Tuning
from statelog.coordinator.admission import OperatorConfig
from statelog.coordinator.batch import BatchTime
from statelog.coordinator.coordinator import Coordinator
from statelog.history.footprint import log_file
from statelog.history.operator_history import History
from statelog.history.query_history import QueryHistory
from statelog.log.entry import Claim, Entry, FrameReader, QueryCheckpoint
from statelog.log.open import LOG_FOLDER, open_log
from statelog.metrics import Measurements
from statelog.operators.unkeyed.states import OperatorStateBinding, OperatorStateDescriptor, OperatorStateMode
from statelog.operators.unkeyed.subtask import UnkeyedInput, UnkeyedOperator
from statelog.rpc.messages import Ack, Acked, Begin, CheckOwner, Reply, Request, TaskId
from statelog.runs.values import FieldCodec, RowCodec
from statelog.storage import LocalStore, Store
from statelog.tasks.attempt import Attempt, WorkerMemory
from statelog.tasks.unkeyed_task import UnkeyedTask
from statelog.testing.query import CrashPoint, ManualClock

Command = Sequence[Any]

LISTS = ("items", "more")
_ROWS = pa.schema([("command", pa.string())])


class Commands(OperatorProcessor):
    """Carries out commands on its states and returns what they read, as JSON."""

    def init(self, handle: OperatorHandle) -> None:
        self.lists = {name: handle.getListState(name, None) for name in LISTS}
        self.lists["units"] = handle.getUnionListState("units", None)
        self.rules = handle.getBroadcastState("rules", None, None)

    def processBroadcast(self, rows: Iterator[Any], context: OperatorContext) -> None:
        for row in rows:
            match json.loads(row[0]):
                case ["put", key, value]:
                    self.rules.put((key,), (value,))
                case ["remove", key]:
                    self.rules.remove((key,))

    def process(self, rows: Iterator[Any], context: OperatorContext) -> Iterator[Any]:
        yield json.dumps([context.subtaskIndex, context.parallelism, context.isRestored, context.isRedistributed])
        for row in rows:
            yield json.dumps(self._run(json.loads(row[0])))

    def _run(self, command: Command) -> Any:
        match command:
            case ["update", name, *elements]:
                self.lists[name].update([(element,) for element in elements])
            case ["add", name, element]:
                self.lists[name].add((element,))
            case ["addAll", name, *elements]:
                self.lists[name].addAll([(element,) for element in elements])
            case ["clear", name]:
                self.lists[name].clear()
            case ["get", key]:
                return [self.rules.get((key,)), self.rules.contains((key,))]
            case ["read"]:
                rules = sorted([key, value] for (key,), (value,) in self.rules.items())
                return [{name: [element for (element,) in state.get()] for name, state in self.lists.items()}, rules]
        return None


@dataclass
class Subtask:
    """The lists of one subtask."""

    lists: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in (*LISTS, "units")})

    def run(self, command: Command, rules: dict[str, int]) -> Any:
        match command:
            case ["update", name, *elements]:
                self.lists[name] = list(elements)
            case ["add" | "addAll", name, *elements]:
                self.lists[name] += elements
            case ["clear", name]:
                self.lists[name] = []
            case ["get", key]:
                return [[rules[key]] if key in rules else None, key in rules]
            case ["read"]:
                return [{name: list(held) for name, held in self.lists.items()}, sorted(map(list, rules.items()))]
        return None

    def copy(self) -> Subtask:
        return Subtask({name: list(held) for name, held in self.lists.items()})


@dataclass
class OperatorModel:
    """What the commands mean. `subtasks` are those of the last checkpoint, as many as its run had."""

    subtasks: list[Subtask] = field(default_factory=list)
    rules: dict[str, int] = field(default_factory=dict)

    def restored(self, parallelism: int) -> list[Subtask]:
        """What the subtasks of a new run start from."""
        if not self.subtasks:
            return [Subtask() for _ in range(parallelism)]
        dealt = [Subtask() for _ in range(parallelism)]
        first = 0
        for name in LISTS:
            if len(self.subtasks) == parallelism:
                for new, old in zip(dealt, self.subtasks, strict=True):
                    new.lists[name] = list(old.lists[name])
                continue
            elements = [element for old in self.subtasks for element in old.lists[name]]
            size, surplus = divmod(len(elements), parallelism)
            for i in range(parallelism):
                count = size + 1 if i < surplus else size
                dealt[(first + i) % parallelism].lists[name] = elements[:count]
                del elements[:count]
            first = (first + surplus) % parallelism
        for new in dealt:
            new.lists["units"] = [unit for old in self.subtasks for unit in old.lists["units"]]
        return dealt


def _codec(name: str, kind: pa.DataType, exact: type) -> RowCodec:
    return RowCodec([FieldCodec("field", kind, exact)], name)


def bindings() -> list[OperatorStateBinding]:
    """The states of :class:`Commands`."""
    texts, numbers = pa.schema([("field", pa.string())]), pa.schema([("field", pa.int64())])
    modes = [*((name, OperatorStateMode.LIST) for name in LISTS), ("units", OperatorStateMode.UNION)]
    states = [
        OperatorStateBinding(OperatorStateDescriptor(name, mode, texts), _codec(f"state '{name}'", pa.string(), str))
        for name, mode in modes
    ]
    rules = OperatorStateDescriptor("rules", OperatorStateMode.BROADCAST, numbers, texts)
    codecs = _codec("state 'rules'", pa.int64(), int), _codec("map key of state 'rules'", pa.string(), str)
    return [*states, OperatorStateBinding(rules, *codecs)]


class JsonOutput:
    hold = None

    def encode(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({"json": pa.array(rows, pa.string())})


def _to_rows(rows: pa.RecordBatch) -> list[Any]:
    return list(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def _batch(commands: Sequence[Command]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"command": [json.dumps(one) for one in commands]}, schema=_ROWS)


class LogBeforeCommit(Observer):
    """Notes which files the log has when an entry is about to be written."""

    def __init__(self, list_files: Callable[[], set[int]]) -> None:
        self._list_files = list_files
        self.files: set[int] = set()

    def step(self, step: Step, batch: int, subtask: int) -> None:
        if step is Step.LAST_ACK:
            self.files = self._list_files()


@dataclass
class OperatorEngine:
    """One operator without keys of one query.

    Parameters
    ----------
    directory : Path
        Holds the location and the hosts' local directories.
    file_merging, inline_budget_bytes, max_file_bytes, retained_checkpoints
        Options.
    states : list of OperatorStateBinding
        The states that the run declares.
    processor : callable
        Makes the processor.
    """

    directory: Path
    file_merging: str = "across"
    inline_budget_bytes: int = 8 << 20
    max_file_bytes: int = 32 << 20
    retained_checkpoints: int = 10
    states: list[OperatorStateBinding] = field(default_factory=bindings)
    processor: Callable[[], OperatorProcessor] = Commands
    open_store: Callable[[str], Store] = LocalStore
    uid: str = "op"
    query_id: str = "query"
    key_schema: bytes = b""

    def __post_init__(self) -> None:
        self.runs = 0
        self.attempts = 0
        self.clock = ManualClock(10**10)
        self._before_commit = LogBeforeCommit(self._log_files)
        self.observer = CrashPoint(self._before_commit)
        self.host = 0

    @property
    def location(self) -> str:
        return str(self.directory / "location")

    def start(self, parallelism: int, first_batch: int, *, keep_local: bool = True) -> None:
        """Start a run of the query, as a new driver process would."""
        self.runs += 1
        self.host += 0 if keep_local else 1
        self.parallelism = parallelism
        self.observer.arm(None)
        self.options = Options(
            file_merging=self.file_merging,
            inline_budget_bytes=self.inline_budget_bytes,
            retained_checkpoints=self.retained_checkpoints,
            observer=self.observer,
            tuning=Tuning(max_file_bytes=self.max_file_bytes, log_min_age_s=0, orphan_min_age_s=0),
        )
        store = self.open_store(self.location)
        states = sorted((binding.descriptor.to_stored() for binding in self.states), key=lambda state: state.name)
        config = OperatorConfig(self.query_id, f"run-{self.runs}", self.uid, parallelism, self.key_schema, states)
        self.coordinator = Coordinator(
            [replace(config, options=self.options, instance="instance")],
            store=store,
            location=self.location,
            log=open_log(store, self.options, self.clock),
            options=self.options,
            clock=self.clock,
            new_token=lambda: f"{self.runs}-{self.attempts}".rjust(16).encode(),
            batch_time=lambda batch: BatchTime(1000 + batch, 0),
            measurements=Measurements(),
            deletes_in_background=False,
            slots=1,
        )
        self.coordinator.open(first_batch)
        self._claims = self._possible_claims(store)

    @property
    def epoch(self) -> int:
        """The current run's."""
        return self.read_log()[-1].epoch

    @property
    def identity(self) -> str:
        """The operator's identity in the current run."""
        return self.coordinator.operator(self.uid).identity

    def read_log(self) -> list[Entry]:
        """The log's entries, as another process reads them."""
        return open_log(LocalStore(self.location), self.options, self.clock).read()

    def leaked(self) -> list[str]:
        """Objects that neither a retained checkpoint nor the log needs.

        The log needs a file that may hold a claim until the file before it has been removed by an earlier commit.
        """
        query = QueryHistory(self.read_log())
        history = query.histories.get(self.identity, History())
        kept = list(history.checkpoints)[-self.retained_checkpoints :]
        named = {segment.name for checkpoint in kept for segment in checkpoint.segments}
        start = query.latest.log_start if query.latest is not None else 1
        waiting = {number for number in self._claims if number - 1 in self._before_commit.files}
        needed = {number for number in self._log_files() if number >= start} | waiting
        named |= {log_file(number) for number in needed}
        return [info.name for info in LocalStore(self.location).list() if info.name not in named]

    def _possible_claims(self, store: Store) -> set[int]:
        """The files that this start has not read, or has found to begin with a claim."""
        checkpoints = [entry for entry in self.read_log() if isinstance(entry, QueryCheckpoint)]
        start = checkpoints[-1].log_start if checkpoints else 1
        files = self._log_files()
        names = {number: log_file(number) for number in files}
        first = {
            number: FrameReader(store, names[number]).frame_at(0, store.size_bytes(names[number])) for number in files
        }
        return {
            number for number, frame in first.items() if number < start or (frame and isinstance(frame.entry, Claim))
        }

    def _log_files(self) -> set[int]:
        return {int(Path(info.name).stem) for info in LocalStore(self.location).list(f"{LOG_FOLDER}/")}

    def call(self, request: Request, payload: bytes) -> Reply:
        if isinstance(request, Begin):
            return self.coordinator.begin(request)
        if isinstance(request, CheckOwner):
            return self.coordinator.handle(request, payload)
        assert isinstance(request, Ack)
        self.coordinator.ack(request, payload)
        return Acked()

    def run_subtask(
        self, batch: int, subtask: int, commands: Sequence[Command] = (), broadcast: Sequence[Command] = ()
    ) -> list[Any]:
        """Run one attempt of one subtask and return its output."""
        self.attempts += 1
        operator = UnkeyedOperator(
            uid=self.uid,
            processor=self.processor(),
            states=self.states,
            to_rows=_to_rows,
            to_broadcast_rows=_to_rows,
            output=JsonOutput(),
        )
        attempt = Attempt(
            task=TaskId(self.query_id, f"run-{self.runs}", self.uid, "instance", batch, subtask, self.attempts),
            partition=subtask,
            parallelism=self.parallelism,
            options=self.options,
            call=self.call,
            memory=WorkerMemory(),
            local_of=lambda identity: (
                self.directory / f"host-{self.host}" / identity / str(self.parallelism) / str(subtask)
            ),
            open_store=self.open_store,
            clock=self.clock,
            token=f"attempt-{self.attempts}",
        )
        task = UnkeyedTask(attempt, operator)
        rows, copies = _batch(commands), _batch(broadcast)
        read = UnkeyedInput([rows], [copies], subtask, 1000 + batch if rows.num_rows + copies.num_rows else None)
        return [json.loads(text) for output in task.run(read) for text in output.column(0).to_pylist()]
