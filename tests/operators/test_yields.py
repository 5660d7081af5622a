"""What a processor yields: it is taken as it is at that moment, and passed on in chunks while it continues."""

from __future__ import annotations

import datetime
import gc
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import statelog
from statelog import ErrorKind, Options, ProcessorError
from statelog.clock import SystemClock
from statelog.convert.ddl import parse_ddl
from statelog.convert.output import RowOutput
from statelog.convert.times import TimeMode
from statelog.operators.keyed.grouping import KeyChunk
from statelog.operators.keyed.operator import BatchContext, KeyedInput
from statelog.operators.keyed.subtask import KeyedSubtask
from statelog.operators.unkeyed.processor import OperatorContext
from statelog.operators.unkeyed.subtask import UnkeyedInput, UnkeyedSubtask
from statelog.runs.byte_slices import Budget
from statelog.runs.times import Moment
from statelog.stopwatch import Stopwatch
from statelog.tables.runs import RunsTable
from statelog.testing import Harness
from statelog.testing.keyed import KeyedQuery
from statelog.testing.rows import OperatorArguments, read_schema
from statelog.testing.unkeyed import UnkeyedQuery
from statelog.windows.build import WindowDefinition

Change = Callable[[Any], None]

# ---- Objects that are changed after they were yielded ----


def append(value: Any) -> None:
    value.append(len(value))


def append_inside(value: Any) -> None:
    value[0].append(len(value[0]))


def grow(value: Any) -> None:
    value["b"] = value.get("b", 0) + 1


def grow_inside(value: Any) -> None:
    value["a"].append(1)


def append_to_field(value: Any) -> None:
    value[1].append(1)


def fill(value: Any) -> None:
    value[0] += 1


CASES: list[tuple[str, Callable[[], Any], Change]] = [
    ("array<long>", list, append),
    ("array<long>", lambda: np.zeros(2, np.int64), fill),
    ("array<array<long>>", lambda: [[]], append_inside),
    ("array<array<long>>", lambda: ([],), append_inside),
    ("binary", bytearray, append),
    ("binary", lambda: memoryview(bytearray(b"a")), fill),
    ("map<string, long>", dict, grow),
    ("map<string, array<long>>", lambda: {"a": []}, grow_inside),
    ("struct<a: long, b: long>", lambda: {"a": 1}, grow),
    ("struct<a: long, b: long>", lambda: [0, 0], fill),
    ("struct<a: array<long>>", lambda: {"a": []}, grow_inside),
    ("struct<a: long, b: array<long>>", lambda: (1, []), append_to_field),
    ("struct<a: long, b: array<long>>", lambda: Row(a=1, b=[]), append_to_field),
    ("array<struct<a: long>>", lambda: [{"a": 0}], lambda value: value[0].update(a=value[0]["a"] + 1)),
]


class Growing(StatefulProcessor):
    """Yields one object three times, changed after each, from rows or from a timer."""

    def __init__(self, make: Callable[[], Any], change: Change, *, by_timer: bool = False) -> None:
        self._make = make
        self._change = change
        self._by_timer = by_timer

    def init(self, handle: Any) -> None:
        self._handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Any]:
        if self._by_timer:
            self._handle.registerTimer(10)
            return iter(())
        return self._grown(key)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        return self._grown(key)

    def _grown(self, key: Any) -> Iterator[Any]:
        value = self._make()
        for _ in range(3):
            yield Row(v=value, k=key[0])
            self._change(value)
        yield from [(key[0], value)]

    def close(self) -> None:
        pass


class GrowingWithoutKeys(statelog.OperatorProcessor):
    def __init__(self, make: Callable[[], Any], change: Change) -> None:
        self._growing = Growing(make, change)

    def init(self, handle: Any) -> None:
        pass

    def process(self, rows: Iterator[Row], context: Any) -> Iterator[Any]:
        for row in rows:
            yield from self._growing._grown((row.k,))


class GrowingWindow(statelog.WindowProcessor):
    def __init__(self, make: Callable[[], Any], change: Change) -> None:
        self._growing = Growing(make, change)

    def process(self, key: Any, window: Any, rows: Iterator[Row], context: Any) -> Iterator[Any]:
        for row in self._growing._grown(key):
            yield (row[0] if isinstance(row, Row) else row[1],)


def plainly(value: Any) -> Any:
    """Lists and dicts of what a row holds; fields without a value left out."""
    if isinstance(value, Row):
        return {name: plainly(item) for name, item in value.asDict().items() if item is not None}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plainly(item) for item in value]
    if isinstance(value, dict):
        return {name: plainly(item) for name, item in value.items()}
    return bytes(value) if isinstance(value, (bytes, bytearray, memoryview)) else value


def as_grown(kind: str, make: Callable[[], Any], change: Change) -> list[Any]:
    """The object before each change and after the last, as rows of the type would have it."""
    value, grown = make(), []
    for _ in range(4):
        shown = plainly(value)
        if kind.startswith("struct") and isinstance(shown, list):
            shown = dict(zip("ab", shown, strict=False))
        grown.append(shown)
        change(value)
    return grown


@pytest.mark.parametrize(("kind", "make", "change"), CASES, ids=lambda value: value if isinstance(value, str) else None)
def test_rows_are_what_they_were_when_they_were_yielded(kind: str, make: Callable[[], Any], change: Change) -> None:
    expected = as_grown(kind, make, change)
    columns: dict[str, Any] = {"input": "k long", "output": f"k long, v {kind}", "parallelism": 1}
    with Harness(Growing(make, change), keys=["k"], **columns) as harness:
        assert [plainly(row.v) for row in harness.push([(1,), (2,)])] == expected * 2
    timers = Growing(make, change, by_timer=True)
    with Harness(timers, keys=["k"], timeMode="ProcessingTime", **columns) as harness:
        assert harness.push([(1,), (2,)], 1) == []
        assert [plainly(row.v) for row in harness.advanceProcessingTime(20)] == expected * 2
    with Harness(GrowingWithoutKeys(make, change), **columns) as harness:
        assert [plainly(row.v) for row in harness.push([(1,), (2,)])] == expected * 2
    windows = WindowDefinition(
        read_schema("k long", "input"),
        ["k"],
        "UTC",
        statelog.CountWindows(1),
        parse=parse_ddl,
        time_mode=TimeMode.PROCESSING_TIME,
        time_column=None,
    ).processed(GrowingWindow(make, change), f"v {kind}")
    with Harness(
        windows.operator, input="k long", output=windows.output, keys=["k"], timeMode="ProcessingTime", parallelism=1
    ) as harness:
        assert [plainly(row.v) for row in harness.push([(1,), (2,)])] == expected * 2


class GrowingFrames(StatefulProcessor):
    """Yields one frame again and again, and changes it in other ways."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        frame: Any = pd.DataFrame({"k": [0], "v": [[0]], "s": ["0"]})
        values = frame["k"].to_numpy()
        yield frame
        values[0] = 1
        yield frame
        frame.loc[0, "v"].append(2)
        yield frame
        frame["s"].to_numpy()[0] = "3"
        yield frame
        frame.loc[1] = [4, [4], "4"]
        yield frame
        frame.drop(index=[0, 1], inplace=True)
        yield frame
        frame.loc[5] = [5, None, "5"]
        yield frame
        frame.columns = ["other", "v", "s"]

    def close(self) -> None:
        pass


def test_frames_are_what_they_were_when_they_were_yielded() -> None:
    with Harness(
        GrowingFrames(), input="k long", keys=["k"], output="k long, v array<long>, s string", pandas=True
    ) as harness:
        output = [tuple(row) for row in harness.push([(1,)])]
    fourth = (1, [0, 2], "3")
    assert output == [
        (0, [0], "0"),
        (1, [0], "0"),
        (1, [0, 2], "0"),
        *[fourth, fourth],
        (4, [4], "4"),
        (5, None, "5"),
    ]


def test_rows_that_cannot_be_changed_are_not_copied() -> None:
    plain = "a long, b double, c string, d date, e timestamp, f decimal(10, 2), g boolean, h timestamp_ntz"
    assert RowOutput(read_schema(plain, "output"), "main").hold is None
    assert RowOutput(read_schema(f"{plain}, i binary", "output"), "main").hold is not None


@pytest.mark.parametrize("row", [None, 5, {"k": 1}, Row(x=1), (1,), (1, iter(())), Row(k="a", v=[]), (1, [object()])])
def test_what_does_not_fit_is_refused_by_key_also_if_it_would_be_copied(row: Any) -> None:
    class Yields(Growing):
        def _grown(self, key: Any) -> Iterator[Any]:
            yield row if key == (7,) else Row(k=1, v=[])

    query = keyed_query(Yields(list, append), "k long, v array<long>")
    with pytest.raises(ProcessorError, match=r"operator 'main': key \(7,\) returned ") as failure:
        list(subtask_of(query).process(query.data([(key,) for key in range(10)])))
    assert failure.value.kind is ErrorKind.OUTPUT_MISMATCH


# ---- Chunks ----

SLICE_BYTES = 20_000
CONTEXT = OperatorContext(0, 1, batchId=0, batchTimeMs=0)


def keyed_query(processor: Any, output: str, time_mode: str = "None") -> KeyedQuery:
    arguments = OperatorArguments(input="k long", output=output, keys=["k"], timeMode=time_mode)
    return KeyedQuery(processor, arguments, Options())


def subtask_of(query: KeyedQuery, processor: Any = None, budget: Budget | None = None) -> KeyedSubtask:
    """A subtask that has the processor itself, not a copy."""
    operator = query.operator.with_budget(budget or Budget(slice_bytes=SLICE_BYTES)).make()
    if processor is not None:
        operator = replace(operator, processor=processor)
    return KeyedSubtask(operator, RunsTable(), BatchContext(0, 0, Moment(5, 0)), Stopwatch(SystemClock()))


class Counting(StatefulProcessor):
    """Yields texts of 100 letters, and counts them; remembers how it ended."""

    def __init__(self, rows: int, *, by_timer: bool = False, empty: int = 0) -> None:
        self.made = 0
        self.ends: list[Any] = []
        self._rows = rows
        self._by_timer = by_timer
        self._empty = empty

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        if self._by_timer:
            self._handle.registerTimer(3)
            return iter(())
        return self._texts(key)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        return self._texts(key)

    def _texts(self, key: Any) -> Iterator[Row]:
        try:
            if not self._empty or key[0] % self._empty == 0:
                for number in range(self._rows):
                    self.made += 1
                    self._count.update((number,))
                    yield Row(k=key[0], text=f"{number:0100}")
            self.ends.append("end")
        except GeneratorExit:
            try:
                self._count.get()
            except ProcessorError as error:
                self.ends.append(error.kind)
            raise

    def close(self) -> None:
        self.ends.append("close")


@pytest.mark.parametrize("by_timer", [False, True])
def test_output_is_given_on_while_the_processor_yields(by_timer: bool) -> None:
    query = keyed_query(Counting(1), "k long, text string", "ProcessingTime")
    processor = Counting(20_000, by_timer=by_timer)
    given = [0]
    for batch in subtask_of(query, processor).process(query.data([(1,)])):
        given.append(given[-1] + batch.num_rows)
        assert batch.nbytes <= SLICE_BYTES
        assert 0 <= processor.made - given[-1] < 2 * SLICE_BYTES / 100
    assert given[-1] == 20_000
    assert processor.ends == ["end", "close"]


def test_small_outputs_of_many_keys_are_one_batch() -> None:
    query = keyed_query(Counting(1), "k long, text string")
    output = list(subtask_of(query, budget=Budget()).process(query.data([(key,) for key in range(10_000)])))
    assert [batch.num_rows for batch in output] == [10_000]


class CountingWithoutKeys(statelog.OperatorProcessor):
    """Yields texts of 100 letters, and counts them; remembers whether it could use its state in the end."""

    def __init__(self, rows: int) -> None:
        self.made = 0
        self.failure: ErrorKind | None = None
        self._rows = rows

    def init(self, handle: Any) -> None:
        self._state = handle.getListState("state", "n long")

    def process(self, rows: Iterator[Row], context: OperatorContext) -> Iterator[Row]:
        try:
            for number in range(self._rows):
                self.made += 1
                yield Row(text=f"{number:0100}")
        finally:
            try:
                self._state.add((1,))
            except ProcessorError as error:
                self.failure = error.kind


def subtask_without_keys(processor: CountingWithoutKeys) -> UnkeyedSubtask:
    arguments = OperatorArguments("k long", "text string")
    operator = UnkeyedQuery(CountingWithoutKeys(0), arguments, Options()).operator.spec.operator()
    operator = replace(operator, processor=processor, budget=Budget(slice_bytes=SLICE_BYTES))
    return UnkeyedSubtask(operator, {}, CONTEXT)


def test_output_without_keys_is_given_on_while_the_processor_yields() -> None:
    processor = CountingWithoutKeys(20_000)
    given = 0
    for batch in subtask_without_keys(processor).process(UnkeyedInput([], None, 0, 0)):
        given += batch.num_rows
        assert batch.nbytes <= SLICE_BYTES
        assert 0 <= processor.made - given < 2 * SLICE_BYTES / 100
    assert (given, processor.failure) == (20_000, None)


def test_output_without_keys_that_nobody_wants_any_more_ends_the_processor() -> None:
    processor = CountingWithoutKeys(20_000)
    output = subtask_without_keys(processor).process(UnkeyedInput([], None, 0, 0))
    next(output)
    assert isinstance(output, Generator)
    output.close()
    assert processor.made < 20_000
    assert processor.failure is ErrorKind.STATE_USAGE


@pytest.mark.parametrize("by_timer", [False, True])
@pytest.mark.parametrize("wrong", [0, 1, 299, 300, 5_000, 11_999])
def test_a_row_that_does_not_fit_is_refused_by_its_key_wherever_it_is(by_timer: bool, wrong: int) -> None:
    """Every third key yields 300 rows, the others none; in a window of all keys, and in many."""

    class Wrong(Counting):
        def _texts(self, key: Any) -> Iterator[Any]:
            for row in super()._texts(key):
                if self.made - 1 == wrong:
                    self.ends.append(key)
                yield Row(k="wrong", text="") if self.made - 1 == wrong else row

    query = keyed_query(Counting(1), "k long, text string", "ProcessingTime")
    for budget in (Budget(slice_bytes=SLICE_BYTES), Budget(slice_bytes=SLICE_BYTES, window_keys=7)):
        processor = Wrong(300, by_timer=by_timer, empty=3)
        with pytest.raises(ProcessorError) as failure:
            list(subtask_of(query, processor, budget).process(query.data([(key,) for key in range(120)])))
        [key] = [end for end in processor.ends if isinstance(end, tuple)]
        assert f"operator 'main': key {key!r} returned str 'wrong'" in str(failure.value)


def test_an_error_between_two_chunks_names_its_key() -> None:
    class Fails(Counting):
        def _texts(self, key: Any) -> Iterator[Row]:
            for row in super()._texts(key):
                yield row
                if self.made == 7_777:
                    raise ValueError(f"at key {key[0]}")

    query = keyed_query(Counting(1), "k long, text string")
    with pytest.raises(ProcessorError) as failure:
        list(subtask_of(query, Fails(3_000)).process(query.data([(key,) for key in range(5)])))
    number = str(failure.value).partition("at key ")[2][0]
    assert f"handleInputRows() failed for key ({number},): ValueError" in str(failure.value)


class FailingInput:
    """Gives each key its number as its only row; the rows of one key cannot be read."""

    def __init__(self, failing: int) -> None:
        self._failing = failing

    def keys(self, columns: list[pa.Array]) -> list[tuple[Any, ...]]:
        return [(number,) for number in range(len(columns[0]))]

    def by_key(self, window: KeyChunk) -> Iterator[Iterator[Any]]:
        for number in range(len(window.keys)):
            if number == self._failing:
                raise ValueError(f"at key {number}")
            yield iter([number])


@pytest.mark.parametrize("is_initial", [False, True])
@pytest.mark.parametrize("failing", [0, 1, 4])
def test_an_error_in_reading_the_rows_of_a_key_names_this_key(failing: int, is_initial: bool) -> None:
    class Loads(Counting):
        def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
            self._count.update((initialState,))

    query = keyed_query(Counting(1), "k long, text string")
    source = KeyedInput([0], FailingInput(failing))
    operator = replace(query.operator.make(), processor=Loads(1), input=source, initial=source)
    rows, nothing = query.data([(key,) for key in range(5)]), query.data([])
    subtask = KeyedSubtask(operator, RunsTable(), BatchContext(0, 0, Moment(5, 0)), Stopwatch(SystemClock()))
    method = "handleInitialState" if is_initial else "handleInputRows"
    with pytest.raises(
        ProcessorError, match=rf"{method}\(\) failed for key \({failing},\): ValueError: at key {failing}"
    ):
        list(subtask.process(nothing, rows) if is_initial else subtask.process(rows))


@pytest.mark.parametrize("keys", [1, 3])
def test_rows_that_cannot_be_made_frames_name_no_key_but_the_only_one(keys: int) -> None:
    class Frames(Counting):
        def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
            yield from rows

    schema = "k long, at timestamp"
    arguments = OperatorArguments(input=schema, output=schema, keys=["k"], pandas=True)
    query = KeyedQuery(Frames(1), arguments, Options())
    times = [datetime.datetime(2500, 1, 1), *[datetime.datetime(2000, 1, 1)] * (keys - 1)]
    with pytest.raises(ProcessorError, match="column 'at' has a time beyond pandas' nanoseconds") as failure:
        list(subtask_of(query).process(query.data(list(enumerate(times)))))
    found = "handleInputRows() failed for key (0,): " if keys == 1 else "handleInputRows() failed: "
    assert f"operator 'main': {found}column 'at'" in str(failure.value)


@pytest.mark.parametrize("by_timer", [False, True])
def test_output_that_nobody_wants_any_more_ends_the_processor(by_timer: bool) -> None:
    """Its generator is closed, and may not use the state then; Python's garbage collector is as it was."""
    thresholds = gc.get_threshold()
    query = keyed_query(Counting(1), "k long, text string", "ProcessingTime")
    processor = Counting(20_000, by_timer=by_timer)
    output = subtask_of(query, processor).process(query.data([(1,)]))
    while not next(output).num_rows:
        assert gc.get_threshold() == thresholds
    assert (gc.get_threshold(), processor.ends) == (thresholds, [])
    assert isinstance(output, Generator)
    output.close()
    assert (gc.get_threshold(), processor.ends) == (thresholds, [ErrorKind.STATE_USAGE])


# ---- State outside of the calls ----

USES: dict[str, Callable[[Any], Any]] = {
    "value.get": lambda user: user.value.get(),
    "value.exists": lambda user: user.value.exists(),
    "value.update": lambda user: user.value.update((1,)),
    "value.clear": lambda user: user.value.clear(),
    "reducing.get": lambda user: user.reducing.get(),
    "reducing.add": lambda user: user.reducing.add((1,)),
    "list.get": lambda user: user.list.get(),
    "list.appendValue": lambda user: user.list.appendValue((1,)),
    "list.clear": lambda user: user.list.clear(),
    "map.getValue": lambda user: user.map.getValue((1,)),
    "map.updateValue": lambda user: user.map.updateValue((1,), (1,)),
    "map.iterator": lambda user: user.map.iterator(),
    "map.removeKey": lambda user: user.map.removeKey((1,)),
    "registerTimer": lambda user: user.handle.registerTimer(1),
    "deleteTimer": lambda user: user.handle.deleteTimer(1),
    "listTimers": lambda user: user.handle.listTimers(),
}


def added(one: Any, other: Any) -> Any:
    return (one[0] + other[0],)


class UsesState(StatefulProcessor):
    """Uses a state in close(), itself or by a generator that a call has left behind."""

    def __init__(self, use: str, *, on_driver: bool = False, by_generator: bool = False) -> None:
        self._use = use
        self._on_driver = on_driver
        self._by_generator = by_generator

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", "n long")
        self.reducing = handle.getReducingState("reducing", "n long", added)
        self.list = handle.getListState("list", "n long")
        self.map = handle.getMapState("map", "k long", "n long")
        self._is_task = hasattr(self.handle, "closed_ms")
        self._left = self._using()
        next(self._left)

    def _using(self) -> Iterator[None]:
        yield
        yield
        USES[self._use](self)
        yield

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for use in USES.values():
            use(self)
        if self._by_generator:
            next(self._left)
        return iter(())

    def close(self) -> None:
        if self._by_generator and self._is_task:
            next(self._left)
        elif self._is_task or self._on_driver:
            USES[self._use](self)


@pytest.mark.parametrize("use", USES)
def test_state_in_close_is_an_error(use: str) -> None:
    arguments: dict[str, Any] = {"input": "k long", "output": "k long", "keys": ["k"], "timeMode": "ProcessingTime"}
    for rows, by_generator in (([(1,)], False), ([], False), ([(1,)], True)):
        with Harness(UsesState(use, by_generator=by_generator), **arguments, parallelism=1) as harness:
            with pytest.raises(ProcessorError, match=r"close\(\) failed: .* while no key was processed") as failure:
                harness.push(rows)
            assert failure.value.kind is ErrorKind.STATE_USAGE
    with pytest.raises(ProcessorError, match=r"operator 'main': .*init\(\) or close\(\)") as failure:
        Harness(UsesState(use, on_driver=True), **arguments)
    assert failure.value.kind is ErrorKind.STATE_USAGE


# ---- Changes ----


class Large(StatefulProcessor):
    """Keeps a list of 2,000 texts of 100 letters for every key."""

    def init(self, handle: Any) -> None:
        self._texts = handle.getListState("texts", "text string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self._texts.appendList([(f"{key[0]:02}{number:098}",) for number in range(2_000)])
        return iter(())

    def handleInitialState(self, key: Any, initialState: Row, timerValues: Any) -> None:
        list(self.handleInputRows(key, iter(()), None))

    def close(self) -> None:
        pass


def test_large_changes_are_taken_in_parts_of_bounded_size() -> None:
    query = keyed_query(Large(), "k long")
    subtask = subtask_of(query)
    for _ in subtask.process(query.data([(1,), (2,)])):
        pass
    sizes: list[int] = []
    rows = 0
    while subtask.changes.unstored_bytes:
        part, count = subtask.changes.take_part(None, 6_000)
        sizes.append(len(part))
        rows += count
    assert rows == subtask.changes.rows == 4_000
    assert len(sizes) > 30
    assert max(sizes) < SLICE_BYTES
    assert subtask.changes.take_part(None)[1] == 0


def test_changes_of_an_initial_state_can_be_taken_while_it_is_loaded() -> None:
    arguments = OperatorArguments(
        input="k long", output="k long", keys=["k"], initialState=("k long", [(key,) for key in range(20)])
    )
    query = KeyedQuery(Large(), arguments, Options())
    subtask = subtask_of(query, budget=Budget(slice_bytes=SLICE_BYTES, window_keys=2))
    most = 0
    for _ in subtask.process(query.data([]), query.operator.initial):
        most = max(most, subtask.changes.unstored_bytes)
        while subtask.changes.unstored_bytes:
            subtask.changes.take_part(None, 6_000)
    assert subtask.changes.rows == 40_000
    assert 0 < most < 1_000_000


def test_a_local_run_is_written_block_by_block() -> None:
    class Pieces:
        """Notes what is written at once."""

        def __init__(self) -> None:
            self.sizes: list[int] = []

        def write(self, data: Any) -> None:
            self.sizes.append(len(memoryview(data).cast("B")))

        def tell(self) -> int:
            return sum(self.sizes)

    query = keyed_query(Large(), "k long")
    subtask = subtask_of(query)
    for _ in subtask.process(query.data([(1,), (2,), (3,)])):
        pass
    sink: Any = Pieces()
    subtask.changes.write_local(sink)
    assert sum(sink.sizes) > 30 * SLICE_BYTES
    assert max(sink.sizes) < 1.5 * SLICE_BYTES


def test_batches_of_the_output_are_of_the_declared_type() -> None:
    query = keyed_query(Counting(3), "k long, text string")
    for batch in subtask_of(query).process(query.data([(1,)])):
        assert batch.schema == pa.schema([("k", pa.int64()), ("text", pa.string())])
