"""Batches without data: when one is needed, and what the clock source then tells Spark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from statelog import ConfigurationError, Options, ProtocolError
from statelog.checkpoint.batch import BatchTime
from statelog.checkpoint.protocol import Reply, Request, Tick, Ticked
from statelog.checkpoint.ticks import Progress, TickRule, needs_batch
from statelog.clock import ManualClock
from statelog.spark.clock_source import ClockReader
from statelog.spark.rpc import RpcServer

SECRET = b"s" * 32
IDLE = Progress(
    last=BatchTime(time_ms=10_000, watermark_ms=500),
    spark_watermark_ms=500,
    now_ms=10_900,
    has_no_data_batches=True,
    ends_when_idle=False,
)
AHEAD = replace(IDLE, spark_watermark_ms=501)
ALL = TickRule(spark_watermark=True, own_watermark=True, heartbeat_ms=1000)


@pytest.mark.parametrize(
    ("rule", "progress", "own", "expected"),
    [
        (ALL, IDLE, False, False),
        (TickRule(), AHEAD, True, False),
        (TickRule(spark_watermark=True), AHEAD, False, True),
        (TickRule(spark_watermark=True), IDLE, True, False),
        (TickRule(own_watermark=True), AHEAD, False, False),
        (TickRule(own_watermark=True), IDLE, True, True),
        (TickRule(heartbeat_ms=900), IDLE, False, True),
        (TickRule(heartbeat_ms=901), IDLE, False, False),
        # The setting of Spark is about watermarks, the heartbeat was asked for.
        (ALL, replace(AHEAD, has_no_data_batches=False), True, False),
        (TickRule(heartbeat_ms=900), replace(IDLE, has_no_data_batches=False), False, True),
        # A query that is to end must not be kept running by the time that passes.
        (TickRule(heartbeat_ms=900), replace(IDLE, ends_when_idle=True), False, False),
        (ALL, replace(AHEAD, ends_when_idle=True), False, True),
        (ALL, replace(IDLE, ends_when_idle=True), True, True),
        # Clocks of machines differ: a last batch in the future is no reason for another one.
        (TickRule(heartbeat_ms=900), replace(IDLE, now_ms=9_000), False, False),
    ],
)
def test_when_a_batch_is_needed(rule: TickRule, progress: Progress, own: bool, expected: bool) -> None:
    assert needs_batch(rule, progress, own_watermark_advances=own) == expected


def test_only_operators_that_wait_for_something_need_a_clock() -> None:
    assert not TickRule().needs_clock
    for rule in (TickRule(spark_watermark=True), TickRule(own_watermark=True), TickRule(heartbeat_ms=100)):
        assert rule.needs_clock


@pytest.mark.parametrize("value", [0, 0.05, -1, float("nan"), float("inf"), True, "1"])
def test_heartbeats_out_of_range_are_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="heartbeat_s"):
        Options(heartbeat_s=value)  # type: ignore[arg-type]  # misuse


def test_heartbeat_in_milliseconds() -> None:
    assert [Options(heartbeat_s=value).heartbeat_ms for value in (None, 0.1, 2, 0.2505)] == [None, 100, 2000, 250]


# ---- The source ----


class Driver:
    """Answers as told, and remembers who asked."""

    def __init__(self) -> None:
        self.answer = False
        self.ticks: list[Tick] = []

    def __call__(self, request: Request, payload: bytes) -> Reply:
        assert isinstance(request, Tick)
        self.ticks.append(request)
        return Ticked(self.answer)


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def server(driver: Driver) -> Iterator[RpcServer]:
    server = RpcServer("127.0.0.1", 0, SECRET, driver)
    yield server
    server.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def reader(server: RpcServer, clock: ManualClock) -> Iterator[ClockReader]:
    reader = ClockReader("127.0.0.1", server.port, SECRET, clock)
    yield reader
    reader.stop()


def test_new_query_is_not_asked_for_before_its_first_batch(reader: ClockReader, driver: Driver) -> None:
    driver.answer = True
    start = reader.initialOffset()
    assert reader.latestOffset(start, None) == start
    assert driver.ticks == []

    assert list(reader.partitions(start, start)) == []
    assert reader.latestOffset(start, None) == {"clock": start["clock"], "tick": 1}


def test_offset_grows_once_per_needed_batch(reader: ClockReader, driver: Driver) -> None:
    reader.prepareForTriggerAvailableNow()
    offset = {"clock": "an earlier run's", "tick": 41}
    assert reader.latestOffset(offset, None) == offset
    driver.answer = True
    assert reader.latestOffset(offset, None) == {"clock": "an earlier run's", "tick": 42}
    assert reader.latestOffset(offset, None) == {"clock": "an earlier run's", "tick": 42}, "Spark may ask again"
    assert {(tick.clock, tick.ends_when_idle) for tick in driver.ticks} == {("an earlier run's", True)}
    assert {tick.reader for tick in driver.ticks} == {reader.initialOffset()["clock"]}


def test_idle_query_asks_every_50_ms(reader: ClockReader, driver: Driver, clock: ManualClock) -> None:
    offset = {"clock": "an earlier run's", "tick": 0}
    for _ in range(100):
        reader.latestOffset(offset, None)
        clock.advance(0.01)
    assert 19 <= len(driver.ticks) <= 21

    driver.answer = True
    clock.advance(0.05)
    after = reader.latestOffset(offset, None)
    driver.answer = False
    asked = len(driver.ticks)
    assert reader.latestOffset(after, None) == after
    assert len(driver.ticks) == asked + 1, "after a batch it asks at once"


def test_spark_that_does_not_say_where_it_is(reader: ClockReader, driver: Driver) -> None:
    """Spark 4.1 passes no start offset; it tells the last one through `partitions`."""
    driver.answer = True
    assert reader.latestOffset()["tick"] == 0
    last = {"clock": "an earlier run's", "tick": 7}
    reader.partitions(last, last)
    assert reader.latestOffset() == {"clock": "an earlier run's", "tick": 8}


def test_driver_that_is_gone_ends_the_query(reader: ClockReader, server: RpcServer) -> None:
    server.close()
    with pytest.raises(ProtocolError, match="cannot be reached"):
        reader.latestOffset({"clock": "an earlier run's", "tick": 0}, None)
