"""What the commands of ``keyed_commands`` mean, in plain Python: states, timers, lateness and expiry.

Nothing here is taken from statelog. A batch has up to three phases: the rows of the initial state, the rows, and the
timers that are due by then, in order of their times for each key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.model.keyed_commands import FIRED, LISTS, MAPS, SUMS, VALUES, Command

Key = tuple[int | None, str | None]
Row = tuple[Key, int | None, Command]
"""Key, event time in milliseconds, and command."""

NEVER = 1 << 80
BEFORE_ALL = -(1 << 63)


@dataclass
class Held:
    """A value, an element or an entry, and when it expires."""

    value: Any
    expiry_ms: int = NEVER


@dataclass
class KeyState:
    """Everything that a key has."""

    values: dict[str, Held] = field(default_factory=dict)
    lists: dict[str, list[Held]] = field(default_factory=lambda: {name: [] for name in LISTS})
    maps: dict[str, dict[str, Held]] = field(default_factory=lambda: {name: {} for name in MAPS})
    timers: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Rules:
    """How the operator is set up.

    Parameters
    ----------
    event_time : bool
        Whether timers go by the watermark, and rows can be late.
    delay_ms : int or None
        That of the operator's own watermark; None if the test moves Spark's.
    ttl_ms : int
        How long what is in the brief states lives.
    ttl_by_event : bool
        Whether that counts in event time.
    renews : bool
        Whether reading renews.
    """

    event_time: bool
    delay_ms: int | None
    ttl_ms: int
    ttl_by_event: bool
    renews: bool


class Model:
    """The operator's state after some batches."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.keys: dict[Key, KeyState] = {}
        self.now_ms = 0
        self.watermark_ms = 0 if rules.delay_ms is None else BEFORE_ALL
        self.late_ms = self.watermark_ms
        self._newest_ms: int | None = None
        self._expiry_ms = NEVER

    # ---- Batches ----

    def give_up(self) -> None:
        """Lose all state, and the operator's own watermark with it; Spark's stays."""
        self.keys = {}
        if self.rules.delay_ms is not None:
            self.watermark_ms = self.late_ms = BEFORE_ALL
            self._newest_ms = None

    def run(
        self, rows: Sequence[Row], now_ms: int, watermark_ms: int | None = None, initial: Sequence[Row] = ()
    ) -> dict[Key, list[Any]]:
        """Run a batch, and return for each key what its rows and timers answer."""
        self.now_ms = now_ms
        self._move_watermark(watermark_ms)
        answers: dict[Key, list[Any]] = {}
        for key, _, command in initial:
            # There is no event time while the initial state is loaded.
            self._expiry_ms = self._expiry(None)
            self._run(key, command, self._base_ms())
        on_time = [row for row in rows if not self._is_late(row[1])]
        for key in dict.fromkeys(key for key, _, _ in on_time):
            times = [at for own, at, _ in on_time if own == key and at is not None]
            self._expiry_ms = self._expiry(max(times, default=None))
            for own, _, command in on_time:
                if own == key:
                    answers.setdefault(key, []).append(["row", self._run(key, command, self._base_ms())])
        for key, fired in self._fire().items():
            answers.setdefault(key, []).extend(fired)
        self._see([at for _, at, _ in rows if at is not None])
        return answers

    def _move_watermark(self, watermark_ms: int | None) -> None:
        self.late_ms = self.watermark_ms
        if self.rules.delay_ms is None:
            self.watermark_ms = self.watermark_ms if watermark_ms is None else watermark_ms
        elif self._newest_ms is not None:
            self.watermark_ms = max(self.watermark_ms, self._newest_ms - self.rules.delay_ms)

    def _see(self, times: list[int]) -> None:
        if times:
            self._newest_ms = max(times) if self._newest_ms is None else max(self._newest_ms, *times)

    def _is_late(self, at: int | None) -> bool:
        return self.rules.event_time and at is not None and at <= self.late_ms

    def _fire(self) -> dict[Key, list[Any]]:
        clock_ms = self.watermark_ms if self.rules.event_time else self.now_ms
        due = {key: sorted(at for at in state.timers if at <= clock_ms) for key, state in self.keys.items()}
        answers: dict[Key, list[Any]] = {}
        for key, times in due.items():
            self._expiry_ms = self._expiry(max(times, default=None))
            for at in times:
                if at not in self.keys[key].timers:
                    continue
                for command in FIRED[at % len(FIRED)]:
                    answers.setdefault(key, []).append([at, self._run(key, command, at)])
                self.keys[key].timers.discard(at)
        return answers

    def _base_ms(self) -> int:
        return max(0, self.watermark_ms if self.rules.event_time else self.now_ms)

    # ---- Expiry ----

    def _expiry(self, newest_ms: int | None) -> int:
        """When what is written to a brief state now expires."""
        if not self.rules.ttl_by_event:
            return self.now_ms + self.rules.ttl_ms
        if newest_ms is None and self.watermark_ms <= 0:
            return NEVER  # there is no event time yet
        return max(self.watermark_ms, self.watermark_ms if newest_ms is None else newest_ms) + self.rules.ttl_ms

    def _is_live(self, held: Held) -> bool:
        return held.expiry_ms > (self.watermark_ms if self.rules.ttl_by_event else self.now_ms)

    def _new(self, state: str, value: Any) -> Held:
        return Held(value, self._expiry_ms if state.startswith("brief") else NEVER)

    def _renew(self, state: str, held: list[Held]) -> None:
        if self.rules.renews and state.startswith("brief"):
            for one in held:
                one.expiry_ms = self._expiry_ms

    # ---- Commands ----

    def _run(self, key: Key, command: Command, base_ms: int) -> Any:
        state = self.keys.setdefault(key, KeyState())
        match command:
            case ["all", *commands]:
                return [self._run(key, one, base_ms) for one in commands]
            case ["register", "+", *delays_ms]:
                state.timers |= {base_ms + delay_ms for delay_ms in delays_ms}
            case ["delete", "+", delay_ms]:
                state.timers.discard(base_ms + delay_ms)
            case ["timers"]:
                return sorted(state.timers)
            case ["times"]:
                return [self.now_ms, self.watermark_ms]
            case [name, on, *arguments]:
                return self._on_state(state, name, on, arguments)
        return None

    def _on_state(self, state: KeyState, name: str, on: str, arguments: list[Any]) -> Any:
        if on in VALUES or on in SUMS:
            return self._on_value(state.values, name, on, arguments)
        if on in LISTS:
            state.lists[on] = [held for held in state.lists[on] if self._is_live(held)]
            return self._on_list(state.lists, name, on, arguments)
        state.maps[on] = {text: held for text, held in state.maps[on].items() if self._is_live(held)}
        return self._on_map(state.maps[on], name, on, arguments)

    def _on_value(self, values: dict[str, Held], name: str, on: str, arguments: list[Any]) -> Any:
        held = values.get(on)
        if held is not None and not self._is_live(held):
            held = None
        match name, arguments:
            case "set", [n]:
                values[on] = self._new(on, [n])
            case "add", [n]:
                before = [0, 0] if held is None else held.value
                values[on] = self._new(on, [before[0] + 1, before[1] + n])
            case "clear", []:
                values.pop(on, None)
            case "exists", []:
                return held is not None
            case "get", []:
                if held is None:
                    return None
                self._renew(on, [held])
                return held.value
            case "sum", []:
                if held is None:
                    return None
                self._renew(on, [held])
                return held.value[1] / held.value[0] if on == "mean" else [held.value[1]]
        return None

    def _on_list(self, lists: dict[str, list[Held]], name: str, on: str, arguments: list[Any]) -> Any:
        match name:
            case "append":
                lists[on] += [self._new(on, text) for text in arguments]
            case "replace":
                lists[on] = [self._new(on, text) for text in arguments]
            case "clear":
                lists[on] = []
            case "exists":
                return bool(lists[on])
            case "elements":
                self._renew(on, lists[on])
                return [held.value for held in lists[on]]
        return None

    def _on_map(self, entries: dict[str, Held], name: str, on: str, arguments: list[Any]) -> Any:
        match name, arguments:
            case "put", [text, n]:
                entries[text] = self._new(on, n)
            case "remove", [text]:
                entries.pop(text, None)
            case "clear", []:
                entries.clear()
            case "exists", []:
                return bool(entries)
            case (("lookup" | "contains"), [text]):
                held = entries.get(text)
                self._renew(on, [] if held is None else [held])
                if name == "contains":
                    return held is not None
                return None if held is None else [held.value]
            case "entries", []:
                self._renew(on, list(entries.values()))
                return sorted([text, held.value] for text, held in entries.items())
        return None

    # ---- What is there ----

    def seen(self, key: Key) -> dict[str, Any]:
        """Everything that a key has and that has not expired."""
        state = self.keys.get(key, KeyState())
        values: dict[str, Any] = {}
        for name in (*VALUES, *SUMS):
            held = state.values.get(name)
            value = None if held is None or not self._is_live(held) else held.value
            values[name] = value if value is None or name == "mean" or name in VALUES else [value[1]]
        for name in LISTS:
            values[name] = [held.value for held in state.lists[name] if self._is_live(held)]
        for name in MAPS:
            values[name] = {text: held.value for text, held in state.maps[name].items() if self._is_live(held)}
        values["timers"] = sorted(state.timers)
        return values
