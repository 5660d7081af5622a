"""A processor that carries out commands on states of all kinds and on timers, and returns what it reads."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import xxhash
from pyspark.sql.streaming import StatefulProcessor

from statelog import AggregateFunction, Ttl

Command = Sequence[Any]

VALUES = ("value", "brief_value")
LISTS = ("list", "brief_list")
MAPS = ("map", "brief_map")
SUMS = ("sum", "brief_sum", "mean")
"""Names of the states by kind; the brief ones have a TTL. Of the sums the first two are reducing states."""

INPUT = "a long, b string, at timestamp, command string"
OUTPUT = "json string"

READ_ALL: Command = [
    "all",
    *(["get", name] for name in VALUES),
    *(["elements", name] for name in LISTS),
    *(["entries", name] for name in MAPS),
    *(["sum", name] for name in SUMS),
    ["timers"],
    ["times"],
]


def write_all(text: str, n: int) -> Command:
    """A command that writes to every state."""
    return [
        "all",
        *(["set", name, n] for name in VALUES),
        *(["append", name, text] for name in LISTS),
        *(["put", name, text, n] for name in MAPS),
        *(["add", name, n] for name in SUMS),
    ]


_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def as_input(row: tuple[tuple[Any, ...], int | None, Command]) -> tuple[Any, ...]:
    """The input row of a key, an event time in milliseconds, and a command."""
    key, at, command = row
    time = None if at is None else _EPOCH + datetime.timedelta(milliseconds=at)
    return (*key, time, json.dumps(command))


def json_like(answers: Mapping[Any, list[Any]]) -> dict[Any, list[Any]]:
    """Answers by key as they come back from JSON."""
    return {key: json.loads(json.dumps(held)) for key, held in answers.items()}


def good_hash(key: tuple[Any, ...]) -> int:
    return xxhash.xxh64_intdigest(repr(key).encode())


def colliding_hash(key: tuple[Any, ...]) -> int:
    """Few hashes, so that different keys share one, spread over the key groups."""
    return (good_hash(key) % 4) * (1 << 62) + 17


FIRED: list[list[Command]] = [
    [["timers"], ["times"]],
    [["register", "+", 7], ["delete", "+", 3], ["timers"]],
    [["register", "+", 0], ["get", "brief_value"]],
    [["delete", "+", 1], ["delete", "+", 2], ["append", "brief_list", "fired"]],
    [["register", "+", -5], ["elements", "brief_list"]],
    [["delete", "+", 1], ["register", "+", 1], ["add", "brief_sum", 1], ["entries", "brief_map"]],
    [["delete", "+", 2], ["set", "value", 6], ["set", "brief_value", 6], ["put", "brief_map", "fired", 6]],
    [["delete", "+", 0], ["clear", "map"], ["lookup", "brief_map", "a"], ["sum", "mean"]],
]
"""What is done when a timer fires, by its time modulo 8; times are relative to its own."""


class Mean(AggregateFunction[int, Any]):
    def createAccumulator(self) -> tuple[int, int]:
        return (0, 0)

    def add(self, value: int, accumulator: tuple[Any, ...]) -> tuple[Any, ...]:
        return (accumulator[0] + 1, accumulator[1] + value)

    def getResult(self, accumulator: tuple[Any, ...]) -> Any:
        return accumulator[1] / accumulator[0]


def add(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    return (one[0] + other[0],)


class Commands(StatefulProcessor):
    """Takes commands from rows, and from the times of the timers that fire.

    Parameters
    ----------
    ttl : Ttl
        That of the brief states.
    by_watermark : bool
        Whether timers go by the watermark; the times of timers that rows ask for are relative to now.
    """

    def __init__(self, ttl: Ttl, *, by_watermark: bool = False) -> None:
        self.ttl = ttl
        self.by_watermark = by_watermark

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.states = {
            "value": handle.getValueState("value", "n long"),
            "brief_value": handle.getValueState("brief_value", "n long", self.ttl),
            "list": handle.getListState("list", "text string"),
            "brief_list": handle.getListState("brief_list", "text string", self.ttl),
            "map": handle.getMapState("map", "text string", "n long"),
            "brief_map": handle.getMapState("brief_map", "text string", "n long", self.ttl),
            "sum": handle.getReducingState("sum", "n long", add),
            "brief_sum": handle.getReducingState("brief_sum", "n long", add, self.ttl),
            "mean": handle.getAggregatingState("mean", "count long, sum long", Mean()),
        }

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._run(json.loads(initialState.command), self._now_ms(timerValues), timerValues)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            result = self._run(json.loads(row.command), self._now_ms(timerValues), timerValues)
            yield (json.dumps([list(key), "row", result]),)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        time_ms = expiredTimerInfo.getExpiryTimeInMs()
        for command in FIRED[time_ms % len(FIRED)]:
            yield (json.dumps([list(key), time_ms, self._run(command, time_ms, timerValues)]),)

    def _now_ms(self, times: Any) -> int:
        now_ms: int = times.getCurrentWatermarkInMs() if self.by_watermark else times.getCurrentProcessingTimeInMs()
        return max(0, now_ms)

    def _run(self, command: Command, base_ms: int, times: Any) -> Any:
        match command:
            case ["all", *commands]:
                return [self._run(one, base_ms, times) for one in commands]
            case ["register", "+", *delays_ms]:
                for delay_ms in delays_ms:
                    self.handle.registerTimer(base_ms + delay_ms)
                return None
            case ["delete", "+", delay_ms]:
                return self.handle.deleteTimer(base_ms + delay_ms)
            case ["timers"]:
                return sorted(self.handle.listTimers())
            case ["times"]:
                return [times.getCurrentProcessingTimeInMs(), times.getCurrentWatermarkInMs()]
            case [name, state, *arguments]:
                return self._on_state(name, self.states[state], arguments)
        raise AssertionError(command)

    def _on_state(self, name: str, state: Any, arguments: list[Any]) -> Any:
        match name, arguments:
            case "set", [n]:
                state.update((n,))
            case "add", [n]:
                state.add(n if type(state).__name__ == "AggregatingState" else (n,))
            case (("get" | "sum"), []):
                return state.get()
            case "exists", []:
                return state.exists()
            case "clear", []:
                state.clear()
            case "append", texts:
                state.appendList([(text,) for text in texts])
            case "replace", texts:
                state.put([(text,) for text in texts])
            case "elements", []:
                return [text for (text,) in state.get()]
            case "put", [text, n]:
                state.updateValue((text,), (n,))
            case "remove", [text]:
                state.removeKey((text,))
            case "lookup", [text]:
                return state.getValue((text,))
            case "contains", [text]:
                return state.containsKey((text,))
            case "entries", []:
                return sorted([text, n] for (text,), (n,) in state.iterator())
            case _:
                raise AssertionError(name)
        return None

    def close(self) -> None:
        pass
