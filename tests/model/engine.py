"""A query of one operator whose subtasks a test runs one by one, on the machinery of the harness.

Commands are rows; the processor carries them out on a value, a list and a map state and returns what it reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from statelog import Options, Tuning
from statelog.coordinator.batch import BatchTime
from statelog.operators.keyed.operator import KeyedRows
from statelog.runs.key_groups import subtasks_of
from statelog.storage import LocalStore, Store
from statelog.tasks.keyed_task import BatchInput
from statelog.testing.keyed import KeyedQuery
from statelog.testing.query import LocalQuery, ManualClock
from statelog.testing.rows import OperatorArguments

Key = tuple[int | None, str | None]
Command = tuple[Any, ...]

_BATCHES = 1000


class TickingClock(ManualClock):
    """Time passes whenever somebody looks, so that a slice of maintenance is over after some steps."""

    def monotonic_s(self) -> float:
        self.advance(0.05)
        return super().monotonic_s()


class CommandProcessor:
    """Carries out commands on its states and returns what they read, as JSON."""

    def init(self, handle: Any) -> None:
        self.value = handle.getValueState("value", "field long")
        self.list = handle.getListState("list", "field string")
        self.map = handle.getMapState("map", "field string", "field long")

    def handleInputRows(self, key: Key, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            yield (json.dumps([key, self._run(json.loads(row.command))]),)

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


def command_query(
    uid: str, hash_of: Callable[[Key], int], options: Options, processor: object | None = None
) -> KeyedQuery:
    """An operator whose input are commands for keys; by default it is :class:`CommandProcessor`."""
    arguments = OperatorArguments(
        input="a long, b string, command string", keys=["a", "b"], output="json string", keyHash=hash_of, uid=uid
    )
    return KeyedQuery(processor or CommandProcessor(), arguments, options)


def command_rows(keyed: KeyedQuery, commands: Iterable[tuple[Key, Command]]) -> KeyedRows:
    """The input of :func:`command_query`."""
    return keyed.data([(*key, json.dumps(command)) for key, command in commands])


class Engine(LocalQuery):
    """One operator of one query; batch `n` takes place at 1000 + `n` ms.

    Parameters
    ----------
    directory : Path
        Holds the location and the hosts' local directories.
    hash_of : callable
        Key hash, 64 bits.
    table, file_merging, merge_fan_in, inline_budget_bytes
        Options.
    """

    def __init__(
        self,
        directory: Path,
        hash_of: Callable[[Key], int],
        *,
        table: str = "runs",
        file_merging: str = "across",
        merge_fan_in: int = 2,
        inline_budget_bytes: int | None = None,
        query_id: str = "query",
        uid: str = "op",
        open_store: Callable[[str], Store] = LocalStore,
    ) -> None:
        options = Options(
            table=table,
            file_merging=file_merging,
            inline_budget_bytes=inline_budget_bytes,
            tuning=Tuning(merge_fan_in=merge_fan_in, orphan_min_age_s=0),
        )
        self.keyed = command_query(uid, hash_of, options)
        super().__init__(self.keyed.operator, directory, options, query_id=query_id, open_store=open_store)
        self.uid = uid
        self.times = {batch: BatchTime(1000 + batch, 0) for batch in range(_BATCHES)}

    def run_commands(self, batch: int, subtask: int, commands: Iterable[tuple[Key, Command]]) -> list[Any]:
        """Run one attempt of a subtask with commands for keys of its own, and return its output."""
        data = command_rows(self.keyed, commands)
        time_ms = self.times[batch].time_ms if len(data.hashes) else None
        outputs = self.run_subtask(batch, subtask, BatchInput(data, subtask, time_ms))
        return [json.loads(text) for output in outputs for text in output.column(0).to_pylist()]

    def parts(self, commands: Iterable[tuple[Key, Command]]) -> list[list[tuple[Key, Command]]]:
        """The commands for each subtask's keys."""
        held = list(commands)
        parts: list[list[tuple[Key, Command]]] = [[] for _ in range(self.parallelism)]
        for command, subtask in zip(
            held, subtasks_of(command_rows(self.keyed, held).hashes, self.parallelism), strict=True
        ):
            parts[subtask].append(command)
        return parts
