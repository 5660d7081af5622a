"""Processors whose batches are replayed, and a query of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from statelog import Options
from statelog.storage import LocalStore
from statelog.testing import Harness
from statelog.testing.harness import parts_of

INPUT = "user string, command string, n long"
OUTPUT = "user string, what string"
USERS = ["ann", "bob", "carl", "dora", None]


class Commands(StatefulProcessor):
    """Carries out commands on states of every kind and on timers."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", "n long", 5000)
        self.list = handle.getListState("list", "n long")
        self.map = handle.getMapState("map", "entry long", "n long", 3000)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            self._run(row.command, row.n, timerValues.getCurrentProcessingTimeInMs())
            yield Row(user=key[0], what=f"{row.command} {row.n} {self._seen()}")

    def _run(self, command: str, n: int, now_ms: int) -> None:
        match command:
            case "set":
                self.value.update((n,))
            case "unset":
                self.value.clear()
            case "append":
                self.list.appendList([(n,), (n + 1,)])
            case "replace":
                self.list.put([(n,)])
            case "empty":
                self.list.clear()
            case "put":
                self.map.updateValue((n % 5,), (n,))
            case "remove":
                self.map.removeKey((n % 5,))
            case "wipe":
                self.map.clear()
            case "timer":
                self.handle.registerTimer(now_ms + 500 * (n % 6))
            case "stop":
                for time_ms in list(self.handle.listTimers()):
                    self.handle.deleteTimer(time_ms)

    def _seen(self) -> list[Any]:
        entries = sorted((entry[0], value[0]) for entry, value in self.map.iterator())
        return [self.value.get(), [item[0] for item in self.list.get()], entries]

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        time_ms = expiredTimerInfo.getExpiryTimeInMs()
        self.list.appendValue((time_ms,))
        if time_ms % 1000:
            self.value.clear()
            self.handle.registerTimer(time_ms + 1500)
        yield Row(user=key[0], what=f"fired {time_ms} {self._seen()}")

    def close(self) -> None:
        pass


COMMANDS = ["set", "unset", "append", "replace", "empty", "put", "put", "remove", "wipe", "timer", "timer", "stop"]


def random_rows(rng: random.Random, count: int) -> list[tuple[str | None, str, int]]:
    return [(rng.choice(USERS), rng.choice(COMMANDS), rng.randrange(100)) for _ in range(count)]


class Sampled(Harness):
    """A query of Commands, which stores samples; it notes what each batch has returned."""

    def __init__(self, processor: Any = None, sample_batches: int = 8, **arguments: Any) -> None:
        options = arguments.pop("options", {})
        super().__init__(
            processor or Commands(),
            **{
                "input": INPUT,
                "output": OUTPUT,
                "keys": ["user"],
                "timeMode": "ProcessingTime",
                "options": Options(sample_batches=sample_batches, **options),
                **arguments,
            },
        )
        self.returned: list[list[Any]] = []

    def run(self, rows: list[Any], time_ms: int | None = None) -> None:
        self.returned.append(self.push(rows, time_ms))

    def run_again(self, rows: list[Any]) -> None:
        """Run a later attempt at the newest batch, in its only subtask."""
        parts = parts_of(self)
        batch = parts.batches.next_batch - 1
        [read] = parts.query.operator.split(parts.description.data(rows, ()), 1, parts.query.times[batch].time_ms)
        parts.query.run_subtask(batch, 0, read)

    @property
    def location(self) -> str:
        return parts_of(self).query.location

    def of(self, batch: int, user: str | None) -> list[Any]:
        """What a batch has returned for a user."""
        return [row for row in self.returned[batch] if row.user == user]

    def samples(self) -> set[tuple[int, int]]:
        """The batch and the subtask of each stored sample."""
        names = [name.split("/") for name in sample_objects(self)]
        return {(int(name[-1].partition("-")[0]), int(name[-2])) for name in names}

    def objects(self) -> list[str]:
        """The names of all objects."""
        return objects_of(self)


def objects_of(harness: Harness) -> list[str]:
    """The names of all objects of a query."""
    return [info.name for info in LocalStore(parts_of(harness).query.location).list()]


def sample_objects(harness: Harness) -> list[str]:
    """The names of the samples of a query."""
    return [name for name in objects_of(harness) if "/samples/" in name]


_numbers = itertools.count()


class Restless(Commands):
    """Is not deterministic: counts its calls in the process."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        self.value.update((next(_numbers),))
        yield from super().handleInputRows(key, rows, timerValues)
