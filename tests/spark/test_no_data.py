"""Batches without data: when one is needed, and what the clock source then tells Spark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from statelog import ConfigurationError, Options, ProtocolError
from statelog.coordinator.batch import BatchTime
from statelog.rpc.calls import RpcServer
from statelog.rpc.messages import Reply, Request, Tick, Ticked
from statelog.rpc.tls import TlsIdentity
from statelog.spark.driver import internals
from statelog.spark.driver.query_clocks import ClockStarts
from statelog.spark.plan.operator_plan import IdleTime, NoDataRule, QueryProgress, needs_batch
from statelog.spark.source.clock_source import ClockReader, clock_name
from statelog.tasks.keyed_task import BatchInput
from statelog.testing.keyed import KeyedQuery
from statelog.testing.query import LocalQuery, ManualClock
from statelog.testing.rows import OperatorArguments

SECRET = b"s" * 32
IDLE = QueryProgress(
    last=BatchTime(time_ms=10_000, watermark_ms=500),
    spark_watermark_ms=500,
    now_ms=10_900,
    idle_ms=0,
    has_no_data_batches=True,
    ends_when_idle=False,
)
AHEAD = replace(IDLE, spark_watermark_ms=501)
ALL = NoDataRule(spark_watermark=True, own_watermark=True, heartbeat_ms=1000)


@pytest.mark.parametrize(
    ("rule", "progress", "own", "expected"),
    [
        (ALL, IDLE, False, False),
        (NoDataRule(), AHEAD, True, False),
        (NoDataRule(spark_watermark=True), AHEAD, False, True),
        (NoDataRule(spark_watermark=True), IDLE, True, False),
        (NoDataRule(own_watermark=True), AHEAD, False, False),
        (NoDataRule(own_watermark=True), IDLE, True, True),
        (NoDataRule(heartbeat_ms=900), IDLE, False, True),
        (NoDataRule(heartbeat_ms=901), IDLE, False, False),
        # The setting of Spark is about watermarks, the heartbeat was asked for.
        (ALL, replace(AHEAD, has_no_data_batches=False), True, False),
        (NoDataRule(heartbeat_ms=900), replace(IDLE, has_no_data_batches=False), False, True),
        # A query that is to end must not be kept running by the time that passes.
        (NoDataRule(heartbeat_ms=900), replace(IDLE, ends_when_idle=True), False, False),
        (ALL, replace(AHEAD, ends_when_idle=True), False, True),
        (ALL, replace(IDLE, ends_when_idle=True), True, True),
        # The clock was put back by an hour.
        (NoDataRule(heartbeat_ms=900), replace(IDLE, now_ms=10_900 - 3_600_000, idle_ms=899), False, False),
        (NoDataRule(heartbeat_ms=900), replace(IDLE, now_ms=10_900 - 3_600_000, idle_ms=900), False, True),
        (NoDataRule(), replace(IDLE, idle_ms=1 << 40), False, False),
        (NoDataRule(heartbeat_ms=900), replace(IDLE, idle_ms=900, ends_when_idle=True), False, False),
        # Clocks of machines differ: a last batch in the future is no reason for another one.
        (NoDataRule(heartbeat_ms=900), replace(IDLE, now_ms=9_000), False, False),
    ],
)
def test_when_a_batch_is_needed(rule: NoDataRule, progress: QueryProgress, own: bool, expected: bool) -> None:
    assert needs_batch(rule, progress, own_watermark_advances=own) == expected


@pytest.mark.parametrize("jump_ms", [-3_600_000, -1500, 0, 1500, 3_600_000])
def test_heartbeats_go_on_when_the_clock_is_set(jump_ms: int) -> None:
    """Seven seconds with a heartbeat of one: the clock is set after 3.5 s, and batches take the time that it shows."""
    rule, idle = NoDataRule(heartbeat_ms=1000), IdleTime()
    beats: list[int] = []
    last_ms = 50_000_000
    for passed_ms in range(0, 7000, 50):
        now_ms = 50_000_000 + passed_ms + (jump_ms if passed_ms >= 3500 else 0)
        progress = replace(
            IDLE, last=BatchTime(last_ms, 500), now_ms=now_ms, idle_ms=idle.of(len(beats), 7.0 + passed_ms / 1000)
        )
        if needs_batch(rule, progress, own_watermark_advances=False):
            beats.append(passed_ms)
            last_ms = now_ms
    gaps = [after - before for before, after in zip([0, *beats], beats, strict=False)]
    assert 6 <= len(beats) <= 7, "a clock that is put forward makes one beat early"
    assert max(gaps) <= 1050
    assert sum(gap < 1000 for gap in gaps) <= (1 if jump_ms > 0 else 0)


class Alarm(StatefulProcessor):
    """Says two seconds later that a key was seen."""

    def init(self, handle: Any) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 2000)
        return iter([])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(key=key[0], due=expiredTimerInfo.getExpiryTimeInMs())

    def close(self) -> None:
        pass


@pytest.mark.parametrize("table", ["runs", "memory"])
def test_timers_wait_for_a_clock_that_was_put_back(tmp_path: Path, table: str) -> None:
    arguments = OperatorArguments(
        input="key string", keys=["key"], output="key string, due long", timeMode="ProcessingTime"
    )
    keyed = KeyedQuery(Alarm(), arguments, Options(table=table))
    query = LocalQuery(keyed.operator, tmp_path, Options(table=table))
    hour_ms = 3_600_000
    story = [
        (hour_ms, "a", []),
        (hour_ms + 1000, "b", []),
        (hour_ms + 2000, "", [("a", hour_ms + 2000)]),
        # The clock is put back by an hour. What has fired does not fire again, what is new goes by the new time.
        (2500, "c", []),
        (4499, "", []),
        (4500, "", [("c", 4500)]),
        (4501, "d", []),
        # The old timer waits until the clock is there again.
        (hour_ms + 2999, "", [("d", 6501)]),
        (hour_ms + 3000, "", [("b", hour_ms + 3000)]),
        (hour_ms + 9000, "", []),
    ]
    query.times = {batch: BatchTime(time_ms, 0) for batch, (time_ms, _, _) in enumerate(story)}
    query.start(1, 0)
    for batch, (time_ms, key, expected) in enumerate(story):
        data = keyed.data([(key,)] if key else [])
        output = query.run_subtask(batch, 0, BatchInput(data, 0, time_ms if key else None))
        fired = [(row["key"], row["due"]) for rows in output for row in rows.to_pylist()]
        assert fired == expected, f"batch {batch}"
    query.release()


class Connecting:
    """Queries whose processes connect after they were asked for so often; a look takes 100 ms."""

    def __init__(self, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
        self._clock = clock
        self.looks: dict[str, int] = {}
        self.needed: dict[str, int] = {}
        monkeypatch.setattr(internals, "has_sources", self._has_sources)

    def _has_sources(self, query: Any) -> bool:
        self._clock.advance(0.1)
        self.looks[query] = self.looks.get(query, 0) + 1
        return self.looks[query] >= self.needed[query]


def test_processes_of_clocks_start_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(0)
    connecting = Connecting(clock, monkeypatch)
    connecting.needed = {"first": 3, "second": 10**9, "third": 1}
    starts = ClockStarts(clock, pause_s=0)
    names: list[Any] = ["first", "second", "third", "fourth"]
    for name in names:
        starts.wait(name)
    assert connecting.looks["first"] == 3
    assert 90 <= connecting.looks["second"] <= 110, "after 10 seconds Spark no longer waits"
    assert connecting.looks["third"] == 1


@pytest.mark.parametrize(
    ("reader", "value", "has_names"),
    [
        (SimpleNamespace(), "true", False),
        (SimpleNamespace(name=None), "true", True),
        (SimpleNamespace(name=None), "false", False),
    ],
    ids=["a Spark without names", "names", "names are off"],
)
def test_sources_have_names_where_spark_has_them(reader: object, value: str, has_names: bool) -> None:
    session: Any = SimpleNamespace(readStream=reader, conf=SimpleNamespace(get=lambda name, default: value))
    assert internals.has_source_names(session) is has_names


def test_the_name_of_a_clock_has_the_characters_that_spark_allows() -> None:
    names = {uid: clock_name(uid) for uid in ("main", "a-b", "a_b", "Ä", "x" * 200)}
    assert names["main"] == "statelog_clock_main"
    assert len(set(names.values())) == len(names)
    assert all(re.fullmatch("[A-Za-z0-9_]{1,120}", name) for name in names.values())


def test_only_operators_that_wait_for_something_need_a_clock() -> None:
    assert not NoDataRule().needs_clock
    for rule in (NoDataRule(spark_watermark=True), NoDataRule(own_watermark=True), NoDataRule(heartbeat_ms=100)):
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
def server(driver: Driver, identity: TlsIdentity | None) -> Iterator[RpcServer]:
    server = RpcServer("127.0.0.1", 0, SECRET, driver, identity=identity)
    yield server
    server.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def reader(server: RpcServer, clock: ManualClock) -> Iterator[ClockReader]:
    reader = ClockReader("127.0.0.1", server.port, SECRET, clock, certificate=server.certificate)
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
