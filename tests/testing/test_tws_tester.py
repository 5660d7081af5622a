"""TwsTester beside Spark's own: what a test for Spark's sees here, and what only this one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pytest
from pyspark.errors import IllegalArgumentException, PySparkValueError
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming import TwsTester as SparkTester

from statelog import ConfigurationError, Options, ProcessorError
from statelog.testing import TwsTester

Tester = Callable[..., Any]


@pytest.fixture(params=[SparkTester, TwsTester], ids=["spark", "statelog"])
def tester(request: pytest.FixtureRequest) -> Tester:
    made: Tester = request.param
    return made


class Base(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n long")
        self.list = handle.getListState("list", "text string")
        self.map = handle.getMapState("map", "word string", "n long, last string")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        yield from ()

    def close(self) -> None:
        pass


class Count(Base):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        count = (self.count.get() or (0,))[0]
        for row in rows:
            count += 1
            self.list.appendValue((row.word,))
            seen = self.map.getValue((row.word,)) if self.map.containsKey((row.word,)) else (0, "")
            self.map.updateValue((row.word,), (seen[0] + 1, key[0]))
        self.count.update((count,))
        yield Row(key=key[0], count=count)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.count.update(((self.count.get() or (0,))[0] + initialState.start,))


class Reminders(Base):
    """Sets a timer for each row's delay, takes back those that are negative, and shows the times that it is given."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        event_time = timerValues.getCurrentWatermarkInMs()
        now = timerValues.getCurrentProcessingTimeInMs()
        for row in rows:
            if row.delay > 0:
                self.handle.registerTimer(row.delay)
            else:
                self.handle.deleteTimer(-row.delay)
        yield Row(key=key[0], timers=sorted(self.handle.listTimers()), now=now, watermark=max(event_time, 0))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        fired = expiredTimerInfo.getExpiryTimeInMs()
        if fired == 77:
            self.handle.registerTimer(1077)
        yield Row(key=key[0], fired=fired)


class Sums(Base):
    """Takes and returns frames."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        total = (self.count.get() or (0,))[0]
        for frame in rows:
            total += int(frame["amount"].sum())
            self.list.appendValue((",".join(map(str, frame.index)),))
        self.count.update((total,))
        if total > 100:
            self.handle.registerTimer(500)
        yield pd.DataFrame({"key": [key[0]], "total": [total]})

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.count.update((int(initialState["start"].sum()),))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield pd.DataFrame({"key": [key[0]], "total": [-1]})


class Failing(Base):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            self.count.update((row.n,))
            if row.n < 0:
                raise KeyError("negative")
        yield Row(n=1)


def words(*values: str) -> list[Row]:
    return [Row(word=value) for value in values]


# ---- As Spark's ----


def test_rows_of_several_keys(tester: Tester) -> None:
    made = tester(Count())
    assert made.test("a", words("x", "y", "x")) == [Row(key="a", count=3)]
    assert made.test("b", words("x")) == [Row(key="b", count=1)]
    assert made.test("a", words("z")) == [Row(key="a", count=4)]
    assert made.peekValueState("count", "a") == (4,)
    assert made.peekListState("list", "a") == [("x",), ("y",), ("x",), ("z",)]
    assert made.peekMapState("map", "a") == {("x",): (2, "a"), ("y",): (1, "a"), ("z",): (1, "a")}
    assert made.peekValueState("count", "c") is None
    assert made.peekListState("list", "c") == []
    assert made.peekMapState("map", "c") == {}


def test_keys_of_any_hashable_type(tester: Tester) -> None:
    made = tester(Base())
    for number, key in enumerate([None, 1, "1", 2.5, ("a", 1), frozenset({3})]):
        made.updateValueState("count", key, (number,))
    assert [made.peekValueState("count", key) for key in (None, "1", 1.0, ("a", 1))] == [(0,), (2,), (1,), (4,)]


def test_states_are_set_and_deleted_from_outside(tester: Tester) -> None:
    made = tester(Count())
    made.updateValueState("count", "a", (5,))
    made.updateListState("list", "a", [("p",), ("q",)])
    made.updateMapState("map", "a", {("x",): (7, "?"), ("y",): (1, "?")})
    assert made.test("a", words("x")) == [Row(key="a", count=6)]
    assert made.peekListState("list", "a") == [("p",), ("q",), ("x",)]
    assert made.peekMapState("map", "a") == {("x",): (8, "a"), ("y",): (1, "?")}
    made.updateMapState("map", "a", {("z",): (0, "!")})
    assert made.peekMapState("map", "a") == {("z",): (0, "!")}
    for name in ("count", "list", "map"):
        made.deleteState(name, "a")
        made.deleteState(name, "unknown")
    assert made.peekValueState("count", "a") is None
    assert (made.peekListState("list", "a"), made.peekMapState("map", "a")) == ([], {})


def test_initial_rows(tester: Tester) -> None:
    made = tester(Count(), initialStateRow=[("a", Row(start=10)), ("b", Row(start=1)), ("a", Row(start=5))])
    assert made.peekValueState("count", "a") == (15,)
    assert made.test("b", words("x")) == [Row(key="b", count=2)]


def test_frames(tester: Tester) -> None:
    initial = [("a", pd.DataFrame({"start": [10, 20]}))]
    made = tester(Sums(), initialStatePandas=initial, timeMode="ProcessingTime")
    assert made.peekValueState("count", "a") == (30,)
    found = made.testInPandas("a", pd.DataFrame({"amount": [1, 2]}, index=[0, 1]))
    pd.testing.assert_frame_equal(found, pd.DataFrame({"key": ["a"], "total": [33]}))
    made.testInPandas("b", pd.DataFrame({"amount": [200]}))
    pd.testing.assert_frame_equal(made.setProcessingTime(500), pd.DataFrame({"key": ["b"], "total": [-1]}))
    assert made.setProcessingTime(501).empty
    assert made.peekListState("list", "a") == [("0,1",)]


def test_timers_in_processing_time(tester: Tester) -> None:
    made = tester(Reminders(), timeMode="processingtime")
    assert made.test("a", [Row(delay=100), Row(delay=77), Row(delay=100), Row(delay=300)]) == [
        Row(key="a", timers=[77, 100, 300], now=0, watermark=0)
    ]
    made.test("b", [Row(delay=80)])
    assert made.setProcessingTime(76) == []
    assert sorted(made.setProcessingTime(100)) == [
        Row(key="a", fired=77),
        Row(key="a", fired=100),
        Row(key="b", fired=80),
    ]
    assert made.test("a", [Row(delay=-300)]) == [Row(key="a", timers=[1077], now=100, watermark=0)]
    assert made.setProcessingTime(2000) == [Row(key="a", fired=1077)]


def test_timers_and_late_rows_in_event_time(tester: Tester) -> None:
    made = tester(Reminders(), timeMode="EventTime", eventTimeExtractor=lambda row: row.at)
    assert made.test("a", [Row(at=5, delay=77)])[0].timers == [77]
    assert made.setWatermark(76) == []
    found = made.test("a", [Row(at=76, delay=90), Row(at=77, delay=95), Row(at=10, delay=96)])
    assert found == [Row(key="a", timers=[77, 95], now=0, watermark=76)]
    assert made.setWatermark(94) == [Row(key="a", fired=77)]
    assert made.setWatermark(1077) == [Row(key="a", fired=95), Row(key="a", fired=1077)]


def test_late_rows_of_frames(tester: Tester) -> None:
    made = tester(Sums(), timeMode="EventTime", eventTimeExtractor=lambda row: row["at"])
    made.testInPandas("a", pd.DataFrame({"at": [1, 2], "amount": [1, 1]}))
    made.setWatermark(10)
    found = made.testInPandas("a", pd.DataFrame({"at": [5, 11, 10, 12], "amount": [1000, 10, 1000, 20]}))
    pd.testing.assert_frame_equal(found, pd.DataFrame({"key": ["a"], "total": [32]}))
    assert made.peekListState("list", "a") == [("0,1",), ("0,1",)]


def test_time_does_not_go_back(tester: Tester) -> None:
    made = tester(Count(), timeMode="ProcessingTime")
    made.setProcessingTime(10)
    with pytest.raises(IllegalArgumentException, match="Processing time must move forward"):
        made.setProcessingTime(10)
    with pytest.raises(PySparkValueError, match="setWatermark"):
        made.setWatermark(5)
    made = tester(Count(), timeMode="EventTime", eventTimeExtractor=lambda row: 0)
    made.setWatermark(10)
    with pytest.raises(IllegalArgumentException, match="Watermark must move forward"):
        made.setWatermark(9)
    with pytest.raises(PySparkValueError, match="setProcessingTime"):
        made.setProcessingTime(5)


def test_misuse_is_refused(tester: Tester) -> None:
    with pytest.raises(PySparkValueError, match="eventTimeExtractor"):
        tester(Count(), timeMode="EventTime")
    made = tester(Count())
    for call in (made.peekValueState, made.peekListState, made.peekMapState):
        with pytest.raises(AssertionError, match="State other has not been initialized"):
            call("other", "a")
    with pytest.raises(AssertionError, match="State list has not been initialized"):
        made.updateValueState("list", "a", (1,))


def test_errors_of_the_processor_come_as_they_are(tester: Tester) -> None:
    made = tester(Failing())
    with pytest.raises(KeyError, match="negative"):
        made.test("a", [Row(n=3), Row(n=-1)])
    assert made.test("a", [Row(n=4)]) == [Row(n=1)]


# ---- What only this one does ----


class Session(Base):
    def init(self, handle: Any) -> None:
        super().init(handle)
        self.recent = handle.getValueState("recent", "n long", 100)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        self.recent.update((sum(1 for _ in rows),))
        yield from ()


def test_values_expire_as_processing_time_moves() -> None:
    made = TwsTester(Session(), timeMode="ProcessingTime", options=Options(table="memory"))
    made.test("a", [Row(), Row()])
    made.setProcessingTime(99)
    assert made.peekValueState("recent", "a") == (2,)
    made.setProcessingTime(100)
    assert made.peekValueState("recent", "a") is None


def test_failed_batch_leaves_nothing() -> None:
    made = TwsTester(Failing())
    made.test("a", [Row(n=1)])
    with pytest.raises(KeyError):
        made.test("a", [Row(n=3), Row(n=-1)])
    assert made.peekValueState("count", "a") == (1,)


def test_watermark_follows_from_the_rows() -> None:
    made = TwsTester(Reminders(), timeMode="EventTime", eventTimeExtractor=lambda row: row.at, watermarkDelay=10)
    assert made.test("a", [Row(at=50, delay=45)]) == [Row(key="a", timers=[45], now=0, watermark=0)]
    found = made.test("b", [Row(at=60, delay=70), Row(at=41, delay=70)])
    assert found == [Row(key="b", timers=[70], now=0, watermark=40), Row(key="a", fired=45)]
    assert made.test("b", [Row(at=50, delay=99)]) == [], "a late row"
    with pytest.raises(PySparkValueError, match="follows from the rows"):
        made.setWatermark(100)


def test_due_timers_fire_in_the_batch() -> None:
    made = TwsTester(Reminders(), timeMode="ProcessingTime")
    made.setProcessingTime(1000)
    assert made.test("a", [Row(delay=500)]) == [
        Row(key="a", timers=[500], now=1000, watermark=0),
        Row(key="a", fired=500),
    ]


def test_values_must_fit_their_schemas() -> None:
    made = TwsTester(Base())
    with pytest.raises(ProcessorError, match="state 'count'"):
        made.updateValueState("count", "a", ("text",))
    with pytest.raises(ConfigurationError, match="ttlDurationMs"):
        TwsTester(Session())


def test_processor_is_not_copied() -> None:
    processor = Base()
    made = TwsTester(processor)
    processor.sink = object()  # type: ignore[attr-defined]  # could not be pickled
    made.test("a", [Row(n=1)])
    assert made.processor is processor
