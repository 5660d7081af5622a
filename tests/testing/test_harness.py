"""The harness itself: rows in and out, time, crashes, snapshots, and what it refuses."""

from __future__ import annotations

import datetime
import random
import threading
from collections.abc import Iterator
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from statelog import (
    ConfigurationError,
    ErrorKind,
    Observer,
    OperatorContext,
    OperatorHandle,
    OperatorProcessor,
    Options,
    ProcessorError,
    RestoreProgress,
    Step,
    StorageError,
    Tuning,
    Watermark,
)
from statelog.testing import FaultPlan, Harness
from statelog.testing.faults import Call, Fault
from statelog.testing.harness import parts_of
from statelog.testing.query import CrashPoint


class Base(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        yield from ()

    def close(self) -> None:
        pass


class Sum(Base):
    def init(self, handle: Any) -> None:
        super().init(handle)
        self.sum = handle.getValueState("sum", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        total = (self.sum.get() or (0,))[0]
        for row in rows:
            if row.n is None:
                raise RuntimeError("no number")
            total += row.n
        self.sum.update((total,))
        yield Row(key=key[0], total=total)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.sum.update((initialState.start,))


class Echo(Base):
    """Returns what it gets, as text."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            yield (repr(key), repr(row))


class Timers(Base):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            self.handle.registerTimer(row.delay)
        yield from ()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield (key[0], expiredTimerInfo.getExpiryTimeInMs())


class EventTimes(Base):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        watermark = timerValues.getCurrentWatermarkInMs()
        yield Row(key=key[0], rows=sum(1 for _ in rows), watermark=max(watermark, -1))


def sums(**arguments: Any) -> Harness:
    return Harness(Sum(), input="key string, n long", keys=["key"], output="key string, total long", **arguments)


def timers(**arguments: Any) -> Harness:
    output = "key string, at long"
    return Harness(
        Timers(), input="key string, delay long", keys=["key"], output=output, timeMode="ProcessingTime", **arguments
    )


def event_times(**arguments: Any) -> Harness:
    output = "key string, rows int, watermark long"
    return Harness(EventTimes(), input="key string, at timestamp", keys=["key"], output=output, **arguments)


def second(number: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(number, datetime.UTC)


# ---- Rows ----


def test_rows_by_position_and_by_name() -> None:
    unnamed = Row("a", 16)  # type: ignore[call-overload]  # PySpark declares the names of columns only
    with sums(parallelism=1) as harness:
        output = harness.push([("a", 1), {"n": 2, "key": "a"}, Row(n=4, key="a"), ["a", 8], unnamed])
    assert output == [Row(key="a", total=31)]
    assert output[0].asDict() == {"key": "a", "total": 31}


def test_values_of_every_type_reach_the_processor_as_in_spark() -> None:
    zone = ZoneInfo("Europe/Berlin")
    columns = """a tinyint, b boolean, c float, d decimal(10,2), e date, f timestamp, g timestamp_ntz, h array<int>,
        i map<string, int>, j struct<x: int, y: timestamp>, k binary, l interval day to second"""
    noon = datetime.datetime(2024, 7, 1, 12)
    row = (
        *(1, True, 0.5, Decimal("1.50"), noon.date(), noon.replace(tzinfo=datetime.UTC), noon, [1, None]),
        *({"p": 1}, Row(x=1, y=noon.replace(tzinfo=zone)), b"\0", datetime.timedelta(seconds=1.5)),
    )
    with Harness(Echo(), input=columns, keys=["f", "a"], output="k string, r string", sessionTimeZone=zone.key) as one:
        [(key, text)] = one.push([row])
    berlin = "tzinfo=zoneinfo.ZoneInfo(key='Europe/Berlin'))"
    assert key == f"(datetime.datetime(2024, 7, 1, 14, 0, {berlin}, 1)"
    assert text == (
        "Row(a=1, b=True, c=0.5, d=Decimal('1.50'), e=datetime.date(2024, 7, 1),"
        f" f=datetime.datetime(2024, 7, 1, 14, 0, {berlin}, g=datetime.datetime(2024, 7, 1, 12, 0), h=[1, None],"
        f" i=[('p', 1)], j={{'x': 1, 'y': datetime.datetime(2024, 7, 1, 12, 0, {berlin}}}, k=b'\\x00',"
        " l=datetime.timedelta(seconds=1, microseconds=500000))"
    )


class TimesOfKeys(Timers):
    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield (str(key[0]), expiredTimerInfo.getExpiryTimeInMs())


def test_session_time_zone_may_be_an_offset() -> None:
    arguments: dict[str, Any] = {"timeMode": "ProcessingTime", "sessionTimeZone": "+02:00", "keys": ["key"]}
    columns, output = "key timestamp, delay long", "key string, at long"
    with Harness(TimesOfKeys(), input=columns, output=output, **arguments) as harness:
        harness.push([(datetime.datetime(2024, 7, 1, 12, tzinfo=datetime.UTC), 5), (None, 4)])
        assert harness.advanceProcessingTime(5) == [("None", 4), ("2024-07-01 14:00:00+02:00", 5)]


def test_session_time_zone_does_not_matter_without_times() -> None:
    with sums(sessionTimeZone="GMT+2") as harness:
        assert harness.push([("a", 1)]) == [Row(key="a", total=1)]


def test_keys_go_to_the_subtasks_of_their_hashes() -> None:
    with sums(keyHash=lambda key: 0 if key[0] == "low" else (1 << 64) - 1) as harness:
        assert harness.push([("high", 1), ("low", 2)]) == [Row(key="low", total=2), Row(key="high", total=1)]
    with sums(keyHash=lambda key: 0) as harness:
        harness.push([("x", 1), ("y", 2), (None, 3)])
        assert [harness.value("sum", key) for key in ("x", "y", None, "z")] == [(1,), (2,), (3,), None]


def test_frames() -> None:
    class Frames(Base):
        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
            for frame in rows:
                yield pd.DataFrame({"key": [key[0]], "total": [int(frame["n"].sum())]})

    with Harness(
        Frames(), input="key string, n long", keys=["key"], output="key string, total long", pandas=True
    ) as harness:
        assert sorted(harness.push([("a", 1), ("b", 2), ("a", 3)])) == [("a", 4), ("b", 2)]


def test_initial_state_is_loaded_once() -> None:
    initial = ("start long, key string", [(10, "a"), (20, "b")])
    with sums(initialState=initial, parallelism=3) as harness:
        harness.crash(Step.LAST_ACK)
        assert harness.push([("a", 1)]) == [Row(key="a", total=11)]
        harness.restart(parallelism=1)
        assert harness.push([("b", 1)]) == [Row(key="b", total=21)]


def test_operator_without_keys() -> None:
    class Numbered(OperatorProcessor):
        def init(self, handle: OperatorHandle) -> None:
            self.seen = handle.getListState("seen", "n long")
            self.names = handle.getBroadcastState("names", "n long", "name string")

        def processBroadcast(self, rows: Iterator[Any], context: OperatorContext) -> None:
            for row in rows:
                self.names.put((row.n,), (row.name,))

        def process(self, rows: Iterator[Any], context: OperatorContext) -> Iterator[Any]:
            for row in rows:
                self.seen.add((row.n,))
                yield Row(n=row.n, name=(self.names.get((row.n,)) or (None,))[0])

    with Harness(
        Numbered(), input="n long", output="n long, name string", broadcast="n long, name string", parallelism=3
    ) as harness:
        assert harness.operatorState("seen") == []
        harness.crash(Step.DURABLE)
        output = harness.push([(number,) for number in range(6)], broadcast=[(1, "one"), (2, "two")])
        assert sorted(output) == [(0, None), (1, "one"), (2, "two"), (3, None), (4, None), (5, None)]
        harness.restart(parallelism=2, keepLocal=False)
        harness.push([])
        assert sorted(chain.from_iterable(harness.operatorState("seen"))) == [(number,) for number in range(6)]
        assert harness.operatorState("names") == {(1,): ("one",), (2,): ("two",)}
        with pytest.raises(ConfigurationError, match="There is no state 'other'"):
            harness.operatorState("other")
        with pytest.raises(ConfigurationError, match="has no keys"):
            harness.value("seen", 1)


# ---- Time ----


def test_timers_of_a_subtask_fire_in_order_of_their_times() -> None:
    with timers(parallelism=1) as harness:
        harness.push([("a", 30), ("b", 20), ("a", 10), ("c", 25), ("c", 40)])
        assert harness.advanceProcessingTime(30) == [("a", 10), ("b", 20), ("c", 25), ("a", 30)]
        assert (harness.timers("a"), harness.timers("c")) == ([], [40])


def test_processing_time_stands_still_and_never_goes_back() -> None:
    with timers() as harness:
        harness.push([("a", 100)], processingTimeMs=99)
        assert harness.push([]) == []
        assert harness.processingTimeMs == 99
        for time_ms in (98, 100.5, True):
            with pytest.raises(ConfigurationError, match="processing time is 99 ms and cannot become"):
                harness.push([], processingTimeMs=time_ms)  # type: ignore[arg-type]  # misuse
        assert harness.advanceProcessingTime(100) == [("a", 100)]


def test_watermark_of_spark_is_set_by_the_test() -> None:
    with event_times(timeMode="EventTime", eventTime="at") as harness:
        assert harness.push([("a", second(1)), ("a", None)]) == [("a", 2, 0)]
        harness.advanceWatermark(2000)
        assert harness.push([("a", second(2)), ("a", second(2.001)), ("a", None)]) == [("a", 2, 2000)]
        assert harness.checkpoints[-1].late_rows == 1
        with pytest.raises(ConfigurationError, match="the watermark is 2000 and cannot go back"):
            harness.advanceWatermark(1999)


def test_watermark_of_the_operator_follows_from_the_rows() -> None:
    own = Watermark("at", delay="0.5 seconds")
    with event_times(timeMode="EventTime", watermark=own) as harness:
        assert harness.push([("a", second(3)), ("a", second(1))]) == [("a", 2, -1)]
        assert harness.push([("a", second(1))]) == [("a", 1, 2500)], "late by the watermark of the batch before"
        assert harness.push([("a", second(1)), ("a", second(2.6))]) == [("a", 1, 2500)]
        harness.restart(parallelism=1)
        harness.push([])
        assert harness.watermarkMs == 2500
        with pytest.raises(ConfigurationError, match="its own watermark"):
            harness.advanceWatermark(9000)


def test_rows_are_late_in_event_time_only() -> None:
    for time_mode, rows in (("None", 2), ("ProcessingTime", 2), ("EventTime", 1)):
        with event_times(timeMode=time_mode, watermark=Watermark("at")) as harness:
            for _ in range(2):
                harness.push([("b", second(9))])
            [(key, seen, _)] = harness.push([("a", second(1)), ("a", second(10))])
            assert (key, seen) == ("a", rows)
            assert harness.checkpoints[-1].late_rows == 2 - rows


# ---- Crashes ----


@pytest.mark.parametrize("step", [step for step in Step if step not in (Step.MERGING, Step.MATERIALIZING)])
@pytest.mark.parametrize("driver", [False, True])
def test_batch_survives_a_crash_at_any_step(step: Step, driver: bool) -> None:
    with sums(parallelism=2) as harness:
        harness.push([("a", 1), ("b", 1)])
        harness.crash(step, driver=driver)
        assert sorted(harness.push([("a", 1), ("b", 1)])) == [("a", 2), ("b", 2)]
        assert harness.crashes == 1
        assert sorted(harness.repeatBatch()) == [("a", 2), ("b", 2)]
        assert sorted(harness.repeatBatch(restart=True)) == [("a", 2), ("b", 2)]
        assert harness.batchId == 1


def test_crash_of_one_subtask_and_while_merging() -> None:
    with sums(parallelism=2, options=Options(tuning=Tuning(merge_fan_in=2))) as harness:
        harness.crash(Step.MERGING, subtask=1)
        for total in range(1, 6):
            assert sorted(harness.push([(name, 1) for name in "abcdef"])) == [(name, total) for name in "abcdef"]
        assert harness.crashes == 1


def test_other_parallelism_after_the_drivers_death() -> None:
    with sums(parallelism=2) as harness:
        harness.push([(name, 1) for name in "abcdef"])
        harness.crash(Step.DURABLE, parallelism=5, keepLocal=False)
        assert sorted(harness.push([(name, 1) for name in "abcdef"])) == [(name, 2) for name in "abcdef"]
        assert harness.parallelism == 5


def test_repeated_batch_with_another_output_is_reported() -> None:
    class Changing(Sum):
        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
            yield Row(key=key[0], total=random.getrandbits(60))

    with Harness(Changing(), input="key string", keys=["key"], output="key string, total long") as harness:
        harness.push([("a",)])
        with pytest.raises(AssertionError, match=r"Batch 0 returned other rows.*Only the first time: \[.*only now: \["):
            harness.repeatBatch()


def test_failing_processor_ends_the_query_and_the_next_batch_starts_from_before() -> None:
    with sums() as harness:
        harness.push([("a", 1), ("b", 1)])
        with pytest.raises(ProcessorError, match=r"handleInputRows\(\) failed for key \('b',\): RuntimeError: no num"):
            harness.push([("a", 5), ("b", None)])
        assert harness.value("sum", "a") == (1,)
        assert sorted(harness.repeatBatch()) == [("a", 1), ("b", 1)]
        assert sorted(harness.push([("b", 1)])) == [("b", 2)]
        assert harness.batchId == 1


# ---- Stores that fail ----


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("file_merging", ["across", "within"])
def test_failing_store_changes_nothing(seed: int, file_merging: str) -> None:
    options = Options(file_merging=file_merging, inline_budget_bytes=0)
    with sums(storeFaults=0.02, seed=seed, options=options) as harness:
        for total in range(1, 13):
            assert harness.push([("a", 1)]) == [("a", total)]
        assert harness.value("sum", "a") == (12,)


def test_store_that_fails_always_ends_the_query() -> None:
    with sums(storeFaults=0.999) as harness, pytest.raises(StorageError, match="injected fault"):
        harness.push([("a", 1)])


def test_slow_store() -> None:
    class Slow(FaultPlan):
        def fault(self, call: Call) -> Fault | None:
            return Fault(action=lambda: calls.append(call.operation))

    calls: list[str] = []
    with sums(storeFaults=Slow()) as harness:
        assert harness.push([("a", 1)]) == [("a", 1)]
    assert "append" in calls


# ---- Starting again ----


def test_new_version_of_the_processor() -> None:
    class Named(Sum):
        def init(self, handle: Any) -> None:
            self.sum = handle.getValueState("sum", "n long, name string")

        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
            yield Row(key=repr(self.sum.get()), total=0)

    with sums() as harness:
        harness.push([("a", 3)])
        harness.restart(processor=Named())
        assert harness.push([("a", 1)]) == [("(3, None)", 0)]


@pytest.mark.parametrize("parallelism", [None, 1, 4])
def test_snapshot_is_gone_on_from_twice(parallelism: int | None) -> None:
    with timers() as harness:
        harness.push([("a", 500), ("b", 50)], processingTimeMs=100)
        saved = harness.snapshot()
        harness.advanceProcessingTime(1000)
    for _ in range(2):
        with Harness.restore(saved, Timers(), parallelism=parallelism) as restored:
            assert (restored.batchId, restored.processingTimeMs) == (0, 100)
            assert restored.timers("a") == [500]
            with pytest.raises(ConfigurationError, match="no batch to repeat"):
                restored.repeatBatch()
            assert restored.push([], processingTimeMs=500) == [("a", 500)]


def test_files_go_with_the_harness() -> None:
    harness = sums()
    harness.push([("a", 1)])
    directory = Path(parts_of(harness).query.location).parent
    assert directory.exists()
    harness.close()
    harness.close()
    assert not directory.exists()
    with pytest.raises(ConfigurationError, match="harness is closed"):
        harness.push([])


def test_own_observer_is_told() -> None:
    class Counting(Observer):
        def __init__(self) -> None:
            self.steps: list[Step] = []

        def step(self, step: Step, batch: int, subtask: int) -> None:
            self.steps.append(step)

    observer = Counting()
    with sums(parallelism=1, options=Options(observer=observer)) as harness:
        harness.push([("a", 1)])
    assert observer.steps == [Step.RESTORED, Step.ACKING, Step.LAST_ACK, Step.DURABLE, Step.ACKED]


def test_own_observer_is_told_of_a_long_restart() -> None:
    told: list[RestoreProgress] = []

    class Telling(Observer):
        def restoring(self, progress: RestoreProgress) -> None:
            told.append(progress)

    progress = RestoreProgress("query", "main", batch=3, subtasks=1, read_bytes=5, known_bytes=9)
    CrashPoint(Telling()).restoring(progress)
    assert told == [progress]


@pytest.mark.parametrize("inline_budget_bytes", [0, 1 << 20])
def test_what_is_stored_for_changes_and_for_materializations_is_counted_apart(inline_budget_bytes: int) -> None:
    options = Options(materialization_interval_s=0, inline_budget_bytes=inline_budget_bytes)
    with sums(parallelism=2, options=options) as harness:
        for total in range(1, 9):
            harness.push([(key, total) for key in "abcdefgh"])
        metrics = harness.checkpoints
    started = sum(one.materializations_started for one in metrics)
    materialized = sum(one.materialized for one in metrics)
    assert 0 < materialized <= started <= materialized + 2
    uploads = sum(one.measured.counts.get("materialization_uploads", 0) for one in metrics)
    logged = {one.logged_changesets for one in metrics}
    if inline_budget_bytes:
        assert (logged, uploads) == ({2}, 0), "all of it travels with the acks"
    else:
        assert logged == {0}
        assert materialized <= uploads <= started


# ---- Misuse ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input": "key strng"}, "input 'key strng' cannot be parsed: expected a type at position 5"),
        ({"input": "key string, key int"}, "two columns of input have the same name"),
        ({"keys": []}, r"keys is \[\]"),
        ({"keys": "key"}, "keys is 'key'"),
        ({"keys": ["other"]}, "no key column 'other'; its columns are key, n"),
        ({"output": "key"}, "outputStructType 'key' cannot be parsed"),
        ({"timeMode": "Sometimes"}, "timeMode is 'Sometimes'"),
        ({"parallelism": 0}, "parallelism is 0"),
        ({"storeFaults": 1}, "storeFaults is 1"),
        ({"watermark": Watermark("n")}, "column 'n', which is not a timestamp column"),
        ({"eventTime": "other"}, "column 'other', which is not a timestamp column"),
        ({"eventTimeColumnName": "total"}, "the input has no watermark"),
        ({"broadcast": "n long"}, "keyed operator has no broadcast input"),
        ({"initialState": ("other string", [])}, "initialState has no key column 'key'"),
        ({"initialState": ("key int", [])}, "initialState is keyed by"),
        ({"processor": Sum}, "takes an instance of StatefulProcessor"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "processor": Sum(),
        "input": "key string, n long",
        "keys": ["key"],
        "output": "key string, total long",
    }
    merged = good | arguments
    with pytest.raises(ConfigurationError, match=message):
        Harness(merged.pop("processor"), **merged)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("ab", "takes a list of rows"),
        ([("a", 1, 2)], r"row 0 is \('a', 1, 2\), which does not have the columns"),
        ([("a", 1), 5], "row 1 is 5"),
        ([{"key": "a", "m": 1}], r"row 0 has the columns \(key, m\)"),
        ([Row(key="a")], r"row 0 has the columns \(key\)"),
        ([("a", 1), ("a", "two")], "row 1 has str 'two' in column 'n' of type bigint"),
        ([("a", 1 << 63)], "row 0 has int 9223372036854775808 in column 'n'"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: Any, message: str) -> None:
    with sums() as harness:
        with pytest.raises(ConfigurationError, match=message) as caught:
            harness.push(rows)
        assert caught.value.hint == "The columns are: key, n."
        assert harness.batchId == -1


def test_looking_for_what_is_not_there_is_refused() -> None:
    with sums() as harness:
        with pytest.raises(ConfigurationError, match="no list state 'sum'") as caught:
            harness.list("sum", "a")
        assert caught.value.kind is ErrorKind.STATE_USAGE
        assert caught.value.hint == "The processor declares: value state 'sum'."
        with pytest.raises(ConfigurationError, match="timeMode is None"):
            harness.timers("a")
        with pytest.raises(ConfigurationError, match="The key: row 0"):
            harness.value("sum", ("a", "b"))
        with pytest.raises(ConfigurationError, match="no batch to repeat"):
            harness.repeatBatch()
        with pytest.raises(ConfigurationError, match="'acking-ish' is not a step"):
            harness.crash("acking-ish")  # type: ignore[arg-type]  # misuse
        with pytest.raises(ConfigurationError, match="'durable' is a step of the driver, and of no subtask"):
            harness.crash(Step.DURABLE, subtask=1)
        with pytest.raises(ConfigurationError, match="operator is keyed"):
            harness.operatorState("sum")
        with pytest.raises(ConfigurationError, match="no broadcast input"):
            harness.push([], broadcast=[(1,)])


def test_processor_that_cannot_be_sent_to_workers_is_refused() -> None:
    processor = Sum()
    processor.lock = threading.Lock()  # type: ignore[attr-defined]  # cannot be pickled
    with pytest.raises(ProcessorError) as caught:
        Harness(processor, input="key string", keys=["key"], output="key string")
    assert caught.value.kind is ErrorKind.PROCESSOR_NOT_PICKLABLE


class SeenFrames(Base):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for frame in rows:
            yield frame[["n"]]


@pytest.mark.parametrize(
    ("keys", "words"),
    [(["at"], "operator 'main': a grouping column has a time beyond"), (["n"], "column 'at' has a time beyond")],
)
def test_a_time_that_frames_cannot_hold_is_refused_by_its_column(keys: list[str], words: str) -> None:
    far = datetime.datetime(9999, 1, 1, tzinfo=datetime.UTC)
    with (
        Harness(SeenFrames(), input="n long, at timestamp", keys=keys, output="n long", pandas=True) as harness,
        pytest.raises(ProcessorError, match=words) as caught,
    ):
        harness.push([(1, far)])
    assert caught.value.kind is ErrorKind.VALUE_MISMATCH
    assert "transformWithState" in caught.value.hint
