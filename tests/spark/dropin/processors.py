"""Processors that show what an engine lets a processor see.

A *probe* is a small function that uses states and timers and yields what it observes. The rows of a scenario name
probes, so one query runs many of them, each for a key of its own. What processors return is text: it must not
depend on how a result is converted.
"""

from __future__ import annotations

import datetime
import decimal
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

SEEN = "key string, seen string"
"""Type of the output rows of most processors."""

UTC = datetime.UTC


def show(value: Any) -> str:
    """A value as text; a row and a tuple look the same."""
    if isinstance(value, (np.ndarray, list)):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(show, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{show(key)}: {show(item)}' for key, item in value.items())}}}"
    return repr(value)


def show_typed(value: Any) -> str:
    """A value as text with its type."""
    return f"{type(value).__name__} {show(value)}"


class OnFrames:
    """Lets a processor of rows take and return pandas frames."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        records = (record for frame in rows for record in frame.itertuples(index=False))
        yield from _frames(cast(Any, super()).handleInputRows(key, records, timerValues))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield from _frames(cast(Any, super()).handleExpiredTimer(key, timerValues, expiredTimerInfo))


def _frames(rows: Iterator[Row]) -> Iterator[pd.DataFrame]:
    return (pd.DataFrame([row.asDict()]) for row in rows)


# ---- Probes ----


@dataclass(frozen=True)
class Bench:
    """What a probe works with. Times are shown relative to `base`, unless they are near 1970."""

    handle: Any
    states: Any
    now: int
    watermark: int
    base: int

    @property
    def timers(self) -> list[int]:
        """The key's timers."""
        return sorted(self.relative(time) for time in self.handle.listTimers())

    def relative(self, time: int) -> int:
        """A time as it is shown."""
        return time if abs(time) < 10**6 else time - self.base


Probe = Callable[[Bench], Iterator[Any]]
PROBES: dict[str, Probe] = {}


def probe(function: Probe) -> Probe:
    """Make a function known to the rows by its name."""
    PROBES[function.__name__] = function
    return function


class Probing(StatefulProcessor):
    """Runs the probes that rows name, and, when a timer fires, the probe that was set for timers.

    Parameters
    ----------
    counts_from_now : bool
        Whether the times of a key are shown relative to the processing time of its first batch.
    """

    def __init__(self, *, counts_from_now: bool = False) -> None:
        self._counts_from_now = counts_from_now

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.base = handle.getValueState("base", "time long")
        self.at_timer = handle.getValueState("at timer", "probe string")
        self.declare(handle)

    def declare(self, handle: Any) -> None:
        """Declare the states that the probes use."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        bench = self._bench(timerValues)
        for row in sorted(rows, key=lambda row: row.seq):
            yield self.report(key, bench, row.probe)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        bench = self._bench(timerValues)
        time = bench.relative(expiredTimerInfo.getExpiryTimeInMs())
        yield Row(key=key[0], seen=f"timer {time} of {bench.timers}")
        names = self.at_timer.get()
        if names is not None:
            self.at_timer.clear()
            yield self.report(key, bench, names[0])

    def close(self) -> None:
        pass

    def report(self, key: Any, bench: Bench, name: str) -> Row:
        """What a probe sees, until it fails."""
        seen = []
        try:
            for value in PROBES[name](bench):
                seen.append(show(value))
        except Exception as error:
            seen.append(f"raises {type(error).__name__}: {error}")
        return Row(key=key[0], seen=f"{name}: {' '.join(seen)}")

    def _bench(self, timer_values: Any) -> Bench:
        now = timer_values.getCurrentProcessingTimeInMs()
        watermark = timer_values.getCurrentWatermarkInMs()
        if self._counts_from_now and not self.base.exists():
            self.base.update((now,))
        base = self.base.get()
        return Bench(self.handle, self, now, watermark, base[0] if base else 0)


@probe
def nothing(bench: Bench) -> Iterator[Any]:
    yield from ()


# ---- States ----


class States(Probing):
    """States of every kind and many types."""

    def declare(self, handle: Any) -> None:
        self.value = handle.getValueState("value", "number long, word string")
        self.list = handle.getListState("list", "number long")
        self.map = handle.getMapState("map", "word string", "number long")
        self.pairs = handle.getMapState("pairs", "number long, word string", "number long")
        self.typed = handle.getValueState(
            "typed",
            "whole int, exact decimal(10,2), real double, single float, word string, flag boolean, "
            "at timestamp, day date, bytes binary, wall timestamp_ntz, small short, tiny byte",
        )
        self.nested = handle.getValueState(
            "nested",
            "numbers array<long>, counts map<string,long>, pair struct<number:long,word:string>, "
            "pairs array<struct<number:long>>, many map<string,array<long>>",
        )


@probe
def left(bench: Bench) -> Iterator[Any]:
    """What is left of the batches before; in a key of its own for each probe."""
    states = bench.states
    yield states.value.exists()
    yield states.value.get()
    yield states.list.exists()
    yield list(states.list.get())
    yield states.map.exists()
    yield sorted(states.map.iterator(), key=repr)
    yield sorted(states.pairs.iterator(), key=repr)
    yield states.typed.get()
    yield states.nested.get()


@probe
def value_life(bench: Bench) -> Iterator[Any]:
    value = bench.states.value
    yield value.get()
    yield value.exists()
    value.update((1, "a"))
    yield show_typed(value.get())
    yield value.exists()
    value.clear()
    yield value.get()
    yield value.exists()
    value.update((2, "b"))


@probe
def value_that_is_null(bench: Bench) -> Iterator[Any]:
    value = bench.states.value
    value.update((None, None))
    yield value.exists()
    yield value.get()


@probe
def value_cleared(bench: Bench) -> Iterator[Any]:
    value = bench.states.value
    value.update((1, "a"))
    value.clear()
    value.clear()
    yield value.exists()


@probe
def value_shapes(bench: Bench) -> Iterator[Any]:
    """A row is a tuple: its names do not matter."""
    value = bench.states.value
    for new in ([1, "list"], Row(number=2, word="row"), Row("number", "word")(3, "made"), (np.int64(4), np.str_("np"))):
        value.update(new)
        yield value.get()


@probe
def list_life(bench: Bench) -> Iterator[Any]:
    numbers = bench.states.list
    yield list(numbers.get())
    yield numbers.exists()
    numbers.appendValue((1,))
    numbers.appendList([(2,), (3,)])
    yield [show_typed(element) for element in numbers.get()]
    numbers.put([(9,), (None,)])
    yield list(numbers.get())
    yield numbers.exists()
    numbers.clear()
    yield list(numbers.get())
    yield numbers.exists()
    numbers.appendValue((4,))


@probe
def list_appended(bench: Bench) -> Iterator[Any]:
    """Elements keep their order over batches."""
    numbers = bench.states.list
    count = len(list(numbers.get()))
    for number in range(count, count + 20):
        numbers.appendValue((number,))
    yield list(numbers.get())


@probe
def list_of_iterables(bench: Bench) -> Iterator[Any]:
    numbers = bench.states.list
    numbers.put((number,) for number in range(3))
    numbers.appendList((number,) for number in range(2))
    yield list(numbers.get())


@probe
def list_while_it_is_read(bench: Bench) -> Iterator[Any]:
    numbers = bench.states.list
    numbers.put([(1,), (2,)])
    for element in numbers.get():
        yield element
        numbers.appendValue((element[0] + 10,))
    yield list(numbers.get())
    elements = numbers.get()
    yield next(elements)
    numbers.clear()
    yield list(elements)


@probe
def two_readers_of_a_list(bench: Bench) -> Iterator[Any]:
    numbers = bench.states.list
    numbers.put([(1,), (2,), (3,)])
    yield [(first, second) for first in numbers.get() for second in numbers.get()]


@probe
def map_life(bench: Bench) -> Iterator[Any]:
    words = bench.states.map
    yield words.exists()
    yield words.getValue(("a",))
    yield words.containsKey(("a",))
    words.updateValue(("a",), (1,))
    words.updateValue(("b",), (None,))
    yield words.getValue(("a",))
    yield words.getValue(("b",))
    yield words.containsKey(("b",))
    yield words.exists()
    yield sorted(show_typed(word) for word in words.keys())  # noqa: SIM118 - a state, no dictionary
    yield sorted(show_typed(number) for number in words.values())
    yield sorted(show_typed(entry) for entry in words.iterator())
    words.removeKey(("a",))
    words.removeKey(("zz",))
    yield sorted(words.iterator(), key=repr)
    words.removeKey(("b",))
    yield words.exists()
    words.updateValue(("c",), (3,))
    words.clear()
    yield words.exists()
    words.updateValue(("d",), (4,))


@probe
def map_value_by_name(bench: Bench) -> Iterator[Any]:
    """``getValue`` returns a row."""
    words = bench.states.map
    words.updateValue(("a",), (1,))
    yield words.getValue(("a",)).number


@probe
def map_with_null_key(bench: Bench) -> Iterator[Any]:
    words = bench.states.map
    words.updateValue((None,), (1,))
    words.updateValue(("",), (2,))
    yield words.getValue((None,))
    yield words.getValue(("",))


@probe
def map_while_it_is_read(bench: Bench) -> Iterator[Any]:
    words = bench.states.map
    words.clear()
    for word in "abc":
        words.updateValue((word,), (1,))
    seen = []
    for word, _ in words.iterator():
        seen.append(word)
        words.removeKey(word)
        words.updateValue((word[0] + "x",), (2,))
    yield sorted(seen)
    yield sorted(words.iterator(), key=repr)


@probe
def map_of_pairs(bench: Bench) -> Iterator[Any]:
    pairs = bench.states.pairs
    pairs.updateValue((1, "a"), (1,))
    pairs.updateValue((1, None), (2,))
    pairs.updateValue((None, "a"), (3,))
    pairs.updateValue((1, "a"), (4,))
    yield pairs.getValue((1, "a"))
    yield pairs.containsKey((None, None))
    yield sorted(pairs.iterator(), key=repr)


@probe
def values_of_all_types(bench: Bench) -> Iterator[Any]:
    typed = bench.states.typed
    typed.update(
        (
            -(2**31),
            decimal.Decimal("1.5"),
            1.5,
            2.5,
            "ä",
            True,
            datetime.datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
            datetime.date(1960, 1, 1),
            b"\0b",
            datetime.datetime(1960, 1, 2, 3),
            3,
            -4,
        )
    )
    yield [show_typed(value) for value in typed.get()]


@probe
def values_that_are_converted(bench: Bench) -> Iterator[Any]:
    typed = bench.states.typed
    typed.update(
        (
            np.int32(1),
            decimal.Decimal("1.567"),
            np.float64(0.5),
            np.float32(0.25),
            np.str_("a"),
            np.bool_(True),
            datetime.datetime(2024, 1, 2, 3, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
            datetime.datetime(2024, 1, 2, 3),
            bytearray(b"z"),
            pd.Timestamp(2024, 1, 2),
            np.int16(3),
            np.int8(4),
        )
    )
    yield [show_typed(value) for value in typed.get()]


@probe
def values_without_zone(bench: Bench) -> Iterator[Any]:
    typed = bench.states.typed
    for at in (datetime.datetime(2024, 1, 2, 3, 4, 5, 6), pd.Timestamp(2024, 1, 2)):
        typed.update((None,) * 6 + (at,) + (None,) * 5)
        yield show_typed(typed.get()[6])


@probe
def nested_values(bench: Bench) -> Iterator[Any]:
    nested = bench.states.nested
    nested.update(([1, None], {"a": 1, "b": None}, (1, "y"), [(1,), Row(number=2)], {"z": [1, 2]}))
    yield [show_typed(value) for value in nested.get()]
    nested.update(((1, 2), {}, Row(number=None, word=None), [], {}))
    yield [show_typed(value) for value in nested.get()]
    nested.update((None, None, {"number": 3, "word": "dict"}, None, None))
    yield nested.get()
    yield nested.get()[2].word


STATE_PROBES = (
    value_life,
    value_that_is_null,
    value_cleared,
    value_shapes,
    list_life,
    list_appended,
    list_of_iterables,
    list_while_it_is_read,
    two_readers_of_a_list,
    map_life,
    map_value_by_name,
    map_with_null_key,
    map_while_it_is_read,
    map_of_pairs,
    values_of_all_types,
    values_that_are_converted,
    values_without_zone,
    nested_values,
)


class Converts(Probing):
    """States whose values are not of their fields' types."""

    def declare(self, handle: Any) -> None:
        self.word = handle.getValueState("word", "word string")
        self.number = handle.getValueState("number", "number long")
        self.small = handle.getListState("small", "small short")
        self.wall = handle.getValueState("wall", "wall timestamp_ntz")
        self.words = handle.getMapState("words", "word string", "word string")


def _written(state: Any, value: Any) -> str:
    """A value that is written to a value state, as it is read back."""
    try:
        state.update(value)
    except Exception:
        return "fails"
    return show_typed(state.get())


@probe
def texts_of_other_values(bench: Bench) -> Iterator[Any]:
    yield [_written(bench.states.word, (value,)) for value in (5, True, 1.5, 1e300, -0.0, 2**70, np.int64(5))]
    bench.states.words.updateValue((5,), (True,))
    yield list(bench.states.words.iterator())


@probe
def whole_number_that_is_nan(bench: Bench) -> Iterator[Any]:
    yield [_written(bench.states.number, (value,)) for value in (float("nan"), np.float64("nan"))]
    bench.states.small.appendValue((float("nan"),))
    yield list(bench.states.small.get())


@probe
def wall_time_of_a_time_in_a_zone(bench: Bench) -> Iterator[Any]:
    for hours in (0, 5):
        at = datetime.datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=datetime.timezone(datetime.timedelta(hours=hours)))
        yield _written(bench.states.wall, (at,))


@probe
def bare_values(bench: Bench) -> Iterator[Any]:
    """To Spark a text of one character is a row of one field: it has one item."""
    yield _written(bench.states.word, "x")
    words = bench.states.words
    words.updateValue("x", "y")
    yield words.getValue("x")
    yield words.getValue(("x",))
    yield words.containsKey("x")
    words.removeKey("x")
    yield list(words.keys())


CONVERSION_PROBES = (
    texts_of_other_values,
    whole_number_that_is_nan,
    wall_time_of_a_time_in_a_zone,
    bare_values,
)


class Frames(OnFrames, States):
    """:class:`States` in pandas mode."""


# ---- Large states ----


class Large(Probing):
    """A list of many elements and values of millions of characters."""

    def declare(self, handle: Any) -> None:
        self.list = handle.getListState("list", "number long")
        self.value = handle.getValueState("value", "text string")


@probe
def large_list(bench: Bench) -> Iterator[Any]:
    numbers = bench.states.list
    yield len(list(numbers.get()))
    numbers.appendList([(number,) for number in range(15_000)])
    held = [number for (number,) in numbers.get()]
    yield len(held)
    yield sum(held)


@probe
def large_value(bench: Bench) -> Iterator[Any]:
    value = bench.states.value
    yield len((value.get() or ("",))[0])
    value.update(("x" * 2_000_000,))
    yield len(value.get()[0])


class Collections(Probing):
    """A list and a map of many entries."""

    def declare(self, handle: Any) -> None:
        self.list = handle.getListState("list", "number long")
        self.map = handle.getMapState("map", "word string", "number long")


@probe
def collections_filled(bench: Bench) -> Iterator[Any]:
    bench.states.list.appendList([(number,) for number in range(10_000)])
    for number in range(10_000):
        bench.states.map.updateValue((f"{number * 7919 % 10_007}",), (number,))
    yield from collections_read(bench)


@probe
def collections_read(bench: Bench) -> Iterator[Any]:
    numbers, words = bench.states.list, bench.states.map
    numbers.appendValue((10_000,))
    yield [number for (number,) in numbers.get()] == list(range(10_001)), len(list(numbers.get()))
    held = sorted((word, number) for (word,), (number,) in words.iterator())
    yield len(held), zlib.crc32(repr(held).encode())


# ---- Timers ----


@probe
def times(bench: Bench) -> Iterator[Any]:
    """The times of a batch that are not measured."""
    yield bench.now if bench.now < 0 else "now"
    yield bench.watermark


@probe
def timers_in_the_past(bench: Bench) -> Iterator[Any]:
    for time in (-10, -20, -10):
        bench.handle.registerTimer(bench.base + time)
    yield bench.timers


@probe
def timers_at_odd_times(bench: Bench) -> Iterator[Any]:
    for time in (0, -5, 1):
        bench.handle.registerTimer(time)
    bench.handle.deleteTimer(1)
    yield bench.timers


@probe
def timer_now(bench: Bench) -> Iterator[Any]:
    bench.handle.registerTimer(bench.base)
    yield bench.timers


@probe
def timer_soon(bench: Bench) -> Iterator[Any]:
    """Not due in this batch, but in the next one."""
    bench.handle.registerTimer(bench.base + 1)
    yield bench.timers


@probe
def timers_far_away(bench: Bench) -> Iterator[Any]:
    for time in (10**9, 5 * 10**8, 7 * 10**8, 10**9):
        bench.handle.registerTimer(bench.base + time)
    yield bench.timers


@probe
def timer_deleted(bench: Bench) -> Iterator[Any]:
    bench.handle.deleteTimer(bench.base + 5 * 10**8)
    bench.handle.deleteTimer(bench.base + 12345)
    yield bench.timers


@probe
def timer_deleted_before_it_fires(bench: Bench) -> Iterator[Any]:
    bench.handle.registerTimer(bench.base - 1)
    bench.handle.registerTimer(bench.base - 2)
    bench.handle.deleteTimer(bench.base - 1)
    yield bench.timers


@probe
def timer_set_again_when_it_fires(bench: Bench) -> Iterator[Any]:
    bench.handle.registerTimer(bench.base - 3)
    bench.states.at_timer.update(("_registers_the_same",))
    yield bench.timers


@probe
def _registers_the_same(bench: Bench) -> Iterator[Any]:
    bench.handle.registerTimer(bench.base - 3)
    yield bench.timers


@probe
def timers_set_when_one_fires(bench: Bench) -> Iterator[Any]:
    bench.handle.registerTimer(bench.base - 3)
    bench.states.at_timer.update(("_registers_others",))
    yield bench.timers


@probe
def _registers_others(bench: Bench) -> Iterator[Any]:
    for time in (-50, -2, 10**9):
        bench.handle.registerTimer(bench.base + time)
    yield bench.timers


@probe
def listed(bench: Bench) -> Iterator[Any]:
    yield bench.timers


@probe
def handler_writes_state(bench: Bench) -> Iterator[Any]:
    """A handler sees what the rows wrote, and the next batch what the handler wrote."""
    bench.states.list.appendValue((1,))
    yield list(bench.states.list.get())
    bench.handle.registerTimer(bench.base)
    bench.states.at_timer.update(("_writes_state",))


@probe
def _writes_state(bench: Bench) -> Iterator[Any]:
    yield list(bench.states.list.get())
    bench.states.list.appendValue((2,))
    bench.states.value.update((7, "handler"))
    yield bench.watermark


class EventTimers(StatefulProcessor):
    """Keeps the rows' times in order of arrival, and sets timers at times that rows name (milliseconds, in text)."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._times = handle.getListState("times", "time long")
        self._at_timer = handle.getValueState("at timer", "times string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        times = []
        for row in sorted(rows, key=lambda row: row.seq):
            now, _, at_timer = row.probe.partition("/")
            self._apply(now)
            if at_timer:
                self._at_timer.update((at_timer,))
            times.append(millis(row.at))
        self._times.appendList([(time,) for time in times])
        held = [time for (time,) in self._times.get()]
        timers = sorted(self._handle.listTimers())
        yield Row(key=key[0], seen=f"rows {times} of {held} at {self._now(timerValues)} timers {timers}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        time = expiredTimerInfo.getExpiryTimeInMs()
        held = len(list(self._times.get()))
        timers = sorted(self._handle.listTimers())
        at_timer = self._at_timer.get()
        if at_timer is not None:
            self._at_timer.clear()
            self._apply(at_timer[0])
        yield Row(key=key[0], seen=f"timer {time} of {timers} at {self._now(timerValues)} rows {held}")

    def _apply(self, times: str) -> None:
        for time in times.split():
            if time.startswith("x"):
                self._handle.deleteTimer(int(time[1:]))
            else:
                self._handle.registerTimer(int(time))

    def _now(self, timer_values: Any) -> str:
        return f"{timer_values.getCurrentProcessingTimeInMs() > 0} {timer_values.getCurrentWatermarkInMs()}"

    def close(self) -> None:
        pass


class EventTimersOfFrames(OnFrames, EventTimers):
    """:class:`EventTimers` in pandas mode."""


def millis(at: Any) -> int | None:
    """A time as milliseconds since 1970, with a zone or in local time."""
    return None if at is None or at is pd.NaT else round(at.timestamp() * 1000)


class Emits(StatefulProcessor):
    """Returns rows with the event times that the input names."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            for text in row.probe.split():
                time = None if text == "null" else datetime.datetime.fromtimestamp(int(text) / 1000, UTC)
                yield Row(key=key[0], seen=str(timerValues.getCurrentWatermarkInMs()), time=time)

    def close(self) -> None:
        pass


class Follows(StatefulProcessor):
    """The second of two operators: shows its watermark, which of its rows are late, and when its timer fires."""

    def init(self, handle: Any) -> None:
        self._handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        times = sorted(millis(row.time) or 0 for row in rows)
        self._handle.registerTimer(max(times))
        yield Row(key=key[0], seen=f"{times} at {timerValues.getCurrentWatermarkInMs()}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        seen = f"timer {expiredTimerInfo.getExpiryTimeInMs()} at {timerValues.getCurrentWatermarkInMs()}"
        yield Row(key=key[0], seen=seen)

    def close(self) -> None:
        pass


# ---- TTL ----


class Expiring(Probing):
    """States that do not outlive their batch, states that live for long, and states without TTL."""

    def declare(self, handle: Any) -> None:
        for name, ttl in (("short", 1), ("long", 10**9), ("zero", 0)):
            states = (
                handle.getValueState(f"{name} value", "number long", ttl),
                handle.getListState(f"{name} list", "number long", ttl),
                handle.getMapState(f"{name} map", "word string", "number long", ttl),
            )
            setattr(self, name, states)


def _entries(states: Any) -> Iterator[Any]:
    value, numbers, words = states
    yield (value.exists(), value.get(), numbers.exists(), list(numbers.get()), words.exists())
    yield (words.getValue(("a",)), words.containsKey(("a",)), sorted(words.iterator(), key=repr))
    yield (sorted(words.keys()), sorted(words.values()))


def _all_entries(bench: Bench) -> Iterator[Any]:
    for name in ("short", "long", "zero"):
        yield name
        yield from _entries(getattr(bench.states, name))


@probe
def ttl_write(bench: Bench) -> Iterator[Any]:
    for value, numbers, words in (bench.states.short, bench.states.long, bench.states.zero):
        value.update((1,))
        numbers.put([(1,), (2,)])
        words.updateValue(("a",), (1,))
        words.updateValue(("b",), (2,))
    yield from _all_entries(bench)


@probe
def ttl_read(bench: Bench) -> Iterator[Any]:
    yield from _all_entries(bench)


@probe
def ttl_write_a_part(bench: Bench) -> Iterator[Any]:
    """What was written before has expired, the rest not."""
    yield from _all_entries(bench)
    for _, numbers, words in (bench.states.short, bench.states.long, bench.states.zero):
        numbers.appendValue((3,))
        words.updateValue(("b",), (3,))
    yield from _all_entries(bench)


@probe
def ttl_touch(bench: Bench) -> Iterator[Any]:
    """Operations on what has expired."""
    value, numbers, words = bench.states.short
    words.removeKey(("a",))
    value.clear()
    numbers.clear()
    yield from _all_entries(bench)
    value.update((5,))
    yield value.get()


# ---- Initial state ----


class Initial(StatefulProcessor):
    """Keeps the initial rows, with what came with them, and shows them with the input rows."""

    def __init__(self, *, sets_timers: bool = False) -> None:
        self._sets_timers = sets_timers

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._kept = handle.getListState("kept", "seen string")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        kept = [tuple(key), initialState.asDict(), timerValues.getCurrentWatermarkInMs()]
        self._keep(kept, timerValues)

    def _keep(self, kept: list[Any], timer_values: Any) -> None:
        self._kept.appendValue((show([*kept, timer_values.getCurrentProcessingTimeInMs() > 0]),))
        if self._sets_timers:
            self._handle.registerTimer(1)
            self._handle.registerTimer(10**15)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        count = sum(1 for _ in rows)
        timers = sorted(self._handle.listTimers()) if self._sets_timers else []
        yield Row(key=show(tuple(key)), seen=f"{count} rows, timers {timers}, kept {self._all()}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        time = expiredTimerInfo.getExpiryTimeInMs()
        yield Row(key=show(tuple(key)), seen=f"timer {time}, kept {self._all()}")

    def _all(self) -> list[str]:
        return sorted(kept for (kept,) in self._kept.get())

    def close(self) -> None:
        pass


class InitialFrames(OnFrames, Initial):
    """:class:`Initial` in pandas mode."""

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        rows = sorted(initialState.itertuples(index=False, name=None))
        kept = [tuple(key), list(initialState.columns), [str(dtype) for dtype in initialState.dtypes], rows]
        self._keep([*kept, timerValues.getCurrentWatermarkInMs()], timerValues)


# ---- Rows, frames and keys ----


class LooksAtRows(StatefulProcessor):
    """Shows rows and keys with their types."""

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "count long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        texts = sorted(", ".join(f"{name}={show_typed(row[name])}" for name in row.asDict()) for row in rows)
        yield Row(key=self.counted(key), seen="; ".join(texts))

    def counted(self, key: Any) -> str:
        """The key, and how many times it was there."""
        (count,) = self._count.get() or (0,)
        self._count.update((count + 1,))
        return f"{show([show_typed(value) for value in key])} {count + 1}"

    def close(self) -> None:
        pass


class LooksAtFrames(LooksAtRows):
    """Shows frames, their columns and keys with their types."""

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        texts = []
        for frame in rows:
            columns = [f"{name} {frame[name].dtype} {_typed(frame[name])}" for name in frame.columns]
            texts.append(f"index {list(frame.index)} {', '.join(columns)}")
        yield pd.DataFrame({"key": [self.counted(key)], "seen": ["; ".join(texts)]})


def _typed(column: pd.Series) -> list[str]:
    return [show_typed(value) for value in column.tolist()]


class CountsKeys(StatefulProcessor):
    """Counts rows; every time a key is met, its count continues."""

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "count long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        (count,) = self._count.get() or (0,)
        count += sum(1 for _ in rows)
        self._count.update((count,))
        yield Row(key=show([show_typed(value) for value in key]), seen=str(count))

    def close(self) -> None:
        pass


class CountsKeysOfFrames(OnFrames, CountsKeys):
    """:class:`CountsKeys` in pandas mode."""


class Chunks(StatefulProcessor):
    """Shows into which frames a key's rows are cut; ``part`` reads one frame only."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        if key[0].startswith("part"):
            yield pd.DataFrame({"key": [key[0]], "seen": [str(len(next(rows)))]})
            return
        cuts = [(len(frame), list(frame.index), sorted(frame.columns)) for frame in rows]
        yield pd.DataFrame({"key": [key[0]], "seen": [show(cuts)]})

    def close(self) -> None:
        pass


# ---- What processors return ----


TYPED = (
    "key string, whole long, real double, exact decimal(10,2), word string, flag boolean, at timestamp, "
    "wall timestamp_ntz, day date, numbers array<long>, counts map<string,long>, pair struct<number:long,word:string>"
)

Returned = Callable[[str], Any]
_AT = datetime.datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)
_DAY = datetime.date(2024, 1, 2)


def _full(key: str, **other: Any) -> dict[str, Any]:
    row = {
        "key": key,
        "whole": 1,
        "real": 1.5,
        "exact": decimal.Decimal("1.25"),
        "word": "a",
        "flag": True,
        "at": _AT,
        "wall": datetime.datetime(2024, 1, 2),
        "day": _DAY,
        "numbers": [1, 2],
        "counts": {"a": 1},
        "pair": Row(number=1, word="a"),
    }
    return row | other


def _growing(key: str, name: str) -> Iterator[dict[str, Any]]:
    """Three rows that share a list or a dict, which grows after every yield."""
    numbers: list[int] = []
    counts: dict[str, int] = {}
    held = {"numbers": numbers, "counts": counts}[name]
    for number in range(3):
        numbers.append(number)
        counts[str(number)] = number
        yield _full(key, **{name: held})


ROW_RESULTS: dict[str, Returned] = {
    "list that grows": lambda key: (Row(**row) for row in _growing(key, "numbers")),
    "map that grows": lambda key: (Row(**row) for row in _growing(key, "counts")),
    "pair as Row in another order": lambda key: [Row(**_full(key, pair=Row(word="b", number=2)))],
    "pair with a field missing": lambda key: [Row(**_full(key, pair={"number": 2}))],
    "pair as Row with a field missing": lambda key: [Row(**_full(key, pair=Row(number=2)))],
    "tuple for list": lambda key: [Row(**_full(key, numbers=(3, 4)))],
    "array for list": lambda key: [Row(**_full(key, numbers=np.array([3, 4])))],
    "rows in a list": lambda key: [Row(**_full(key)), Row(**_full(key))],
    "nothing": lambda key: [],
    "other order": lambda key: [Row(**dict(reversed(list(_full(key).items()))))],
    "another column": lambda key: [Row(**_full(key), more=1)],
    "columns missing": lambda key: [Row(key=key, word="b")],
    "nulls": lambda key: [Row(**_full(key, **{name: None for name in _full(key) if name != "key"}))],
    "int for double and decimal": lambda key: [Row(**_full(key, real=1, exact=2))],
    "whole float for long": lambda key: [Row(**_full(key, whole=2.0))],
    "numpy scalars": lambda key: [Row(**_full(key, whole=np.int64(2), real=np.float64(0.5), word=np.str_("b")))],
    "pair as dict": lambda key: [Row(**_full(key, pair={"number": 2, "word": "b"}))],
    "pair as tuple": lambda key: [Row(**_full(key, pair=(2, "b")))],
    "map as list": lambda key: [Row(**_full(key, counts=[("b", 2)]))],
    "time in a zone": lambda key: [
        Row(**_full(key, at=_AT.astimezone(datetime.timezone(datetime.timedelta(hours=5)))))
    ],
}

FRAME_RESULTS: dict[str, Returned] = {
    "list that grows": lambda key: (pd.DataFrame([row]) for row in _growing(key, "numbers")),
    "map that grows": lambda key: (pd.DataFrame([row]) for row in _growing(key, "counts")),
    "pair as Row": lambda key: [pd.DataFrame([_full(key, pair=Row(number=2, word="b"))])],
    "pair with a field missing": lambda key: [pd.DataFrame([_full(key, pair={"number": 2})])],
    "NaN in a list": lambda key: [pd.DataFrame([_full(key, numbers=[3, float("nan")])])],
    "NaN in an array": lambda key: [pd.DataFrame([_full(key, numbers=np.array([3, np.nan]))])],
    "NaN in a map": lambda key: [pd.DataFrame([_full(key, counts={"a": 1.0, "b": float("nan")})])],
    "frames in a list": lambda key: [pd.DataFrame([_full(key)]), pd.DataFrame([_full(key), _full(key)])],
    "nothing": lambda key: [],
    "an empty frame": lambda key: [pd.DataFrame()],
    "other order": lambda key: [pd.DataFrame([_full(key)])[list(reversed(_full(key)))]],
    "another column": lambda key: [pd.DataFrame([_full(key) | {"more": 1}])],
    "by position": lambda key: [pd.DataFrame([list(_full(key).values())])],
    "by position, more": lambda key: [pd.DataFrame([[*_full(key).values(), "more"]])],
    "odd index": lambda key: [pd.DataFrame([_full(key), _full(key)], index=[7, 7])],
    "nulls": lambda key: [pd.DataFrame([_full(key, **{name: None for name in _full(key) if name != "key"})])],
    "NaN for null": lambda key: [pd.DataFrame([_full(key), _full(key, whole=np.nan, real=np.nan)])],
    "nullable integers": lambda key: [pd.DataFrame([_full(key)]).assign(whole=pd.array([None], dtype="Int64"))],
    "whole float for long": lambda key: [pd.DataFrame([_full(key, whole=2.0)])],
    "int for double": lambda key: [pd.DataFrame([_full(key, real=2)])],
    "int for boolean": lambda key: [pd.DataFrame([_full(key, flag=1)])],
    "float for decimal": lambda key: [pd.DataFrame([_full(key, exact=1.5)])],
    "pair as dict": lambda key: [pd.DataFrame([_full(key, pair={"number": 2, "word": "b"})])],
    "pair as tuple": lambda key: [pd.DataFrame([_full(key, pair=(2, "b"))])],
    "array for list": lambda key: [pd.DataFrame([_full(key, numbers=np.array([3, 4]))])],
    "time without zone": lambda key: [pd.DataFrame([_full(key, at=pd.Timestamp(2024, 1, 2, 3))])],
    "time in a zone": lambda key: [pd.DataFrame([_full(key, at=pd.Timestamp(2024, 1, 2, 3, tz="Asia/Tokyo"))])],
    "Python times": lambda key: [pd.DataFrame([_full(key, at=datetime.datetime(2024, 1, 2, 3))])],
}


class Returns(StatefulProcessor):
    """Returns what the key names."""

    def __init__(self, results: dict[str, Returned]) -> None:
        self._results = results

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Any:
        return self._results[key[0]](key[0])

    def close(self) -> None:
        pass


# ---- Life cycle and declarations ----


class Attributes(StatefulProcessor):
    """An attribute that counts keys, and a file that gets a line per call of the life cycle."""

    def __init__(self, log: str) -> None:
        self._log = log
        self._count = 0

    def init(self, handle: Any) -> None:
        self._write("init")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self._count += 1
        yield Row(key=key[0], seen=str(self._count))

    def close(self) -> None:
        self._write("close")

    def _write(self, text: str) -> None:
        with open(self._log, "a") as file:
            file.write(f"{text} {self._count}\n")


class Declares(StatefulProcessor):
    """Deletes and declares states by name, shows what they held, and writes to them.

    Parameters
    ----------
    states : list of str
        Names of the states; those that start with ``l`` are lists.
    deleted : list of str
        Names that are deleted first.
    """

    def __init__(self, states: list[str], deleted: list[str]) -> None:
        self._states, self._deleted = states, deleted

    def init(self, handle: Any) -> None:
        for name in self._deleted:
            handle.deleteIfExists(name)
        self._values = {
            name: handle.getListState(name, "seen string")
            if name.startswith("l")
            else handle.getValueState(name, "seen string")
            for name in self._states
        }

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        words = [row.probe for row in rows]
        held = {}
        for name, state in self._values.items():
            held[name] = list(state.get()) if name.startswith("l") else state.get()
            write = state.appendValue if name.startswith("l") else state.update
            write((f"{name} {words}",))
        yield Row(key=key[0], seen=show(held))

    def close(self) -> None:
        pass


class DeletesOwn(StatefulProcessor):
    """Declares states and deletes them, in an order, and shows what each call on them does.

    Parameters
    ----------
    order : str
        The steps of ``init``: ``declare`` and ``delete``.
    """

    def __init__(self, order: str) -> None:
        self._order = order

    def init(self, handle: Any) -> None:
        for step in self._order.split():
            if step == "delete":
                for name in ("value", "list", "map"):
                    handle.deleteIfExists(name)
            else:
                self._value = handle.getValueState("value", "word string")
                self._list = handle.getListState("list", "word string")
                self._map = handle.getMapState("map", "word string", "number long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        value, words, numbers = self._value, self._list, self._map
        reads = {
            "value": [value.exists, value.get],
            "list": [words.exists, lambda: list(words.get())],
            "map": [
                numbers.exists,
                lambda: numbers.getValue(("a",)),
                lambda: numbers.containsKey(("a",)),
                lambda: list(numbers.iterator()),
                lambda: list(numbers.keys()),
                lambda: list(numbers.values()),
            ],
        }
        writes = {
            "value": [value.clear, lambda: value.update(("b",))],
            "list": [
                words.clear,
                lambda: words.put([("c",)]),
                lambda: words.appendValue(("d",)),
                lambda: words.appendList([("e",), ("f",)]),
            ],
            "map": [lambda: numbers.removeKey(("a",)), numbers.clear, lambda: numbers.updateValue(("a",), (1,))],
        }
        for name in reads:
            for calls in (reads, writes, reads):
                yield Row(key=key[0], seen=f"{name} {[_answer(call) for call in calls[name]]}")

    def close(self) -> None:
        pass


def _answer(call: Callable[[], Any]) -> str:
    """What a call returns; or the error, up to where the engines begin to explain it."""
    try:
        return show(call())
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error).partition(' initialized')[0]}"


class Evolves(StatefulProcessor):
    """Shows what states of a schema hold, and writes a value to each."""

    def __init__(self, schema: str, value: tuple[Any, ...], map_key: str = "number long") -> None:
        self._schema, self._new, self._map_key = schema, value, map_key

    def init(self, handle: Any) -> None:
        self._value = handle.getValueState("value", self._schema)
        self._list = handle.getListState("list", self._schema)
        self._map = handle.getMapState("map", self._map_key, self._schema)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        entries = sorted(self._map.iterator(), key=repr)
        yield Row(key=key[0], seen=show([self._value.get(), list(self._list.get()), entries]))
        self._value.update(self._new)
        self._list.appendValue(self._new)
        self._map.updateValue((len(entries),), self._new)

    def close(self) -> None:
        pass


class Mistake(StatefulProcessor):
    """Makes a mistake in ``init`` or in ``handleInputRows``.

    Parameters
    ----------
    init : callable or None
        Gets the handle.
    use : callable or None
        Gets the processor, which has a value, a list and a map.
    returns : callable or None
        Makes what ``handleInputRows`` returns.
    """

    def __init__(
        self,
        init: Callable[[Any], Any] | None = None,
        use: Callable[[Any], Any] | None = None,
        returns: Callable[[], Any] | None = None,
    ) -> None:
        self._init, self._use, self._returns = init, use, returns

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", "number long, exact decimal(4,1), at timestamp")
        self.list = handle.getListState("list", "number long")
        self.map = handle.getMapState("map", "number long, word string", "number long")
        if self._init:
            self._init(handle)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Any:
        if self._use:
            self._use(self)
        return self._returns() if self._returns else [Row(key="a", number=1)]

    def close(self) -> None:
        pass


def failing_rows() -> Iterator[Row]:
    """A row, and then an exception."""
    yield Row(key="a", number=1)
    raise ZeroDivisionError
