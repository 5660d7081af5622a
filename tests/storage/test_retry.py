"""Retries and hedges, most of them in simulated time: a request's duration is a number, and nothing waits."""

from __future__ import annotations

import heapq
import math
import os
import pickle
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import Empty, Queue, SimpleQueue
from typing import Any, ClassVar

import pytest

from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, ErrorKind, StorageError
from statelog.metrics import Measurements, Metric
from statelog.storage import LocalStore
from statelog.storage.hedging import Ended, Hedging, Race, Races
from statelog.storage.retry import RetryingStore, RetryPolicy
from statelog.storage.store import Store, StoreWrapper
from statelog.testing.faults import FaultPlan, FaultStore
from statelog.testing.query import ManualClock
from tests.storage.retry_support import OK, BlockingStore, ScriptedStore, Step, T, threaded

BUSY = ErrorKind.STORE_BUSY
UNAVAILABLE = ErrorKind.STORE_UNAVAILABLE
FAILED = ErrorKind.STORE_FAILED


class SimulatedRaces(Races):
    """Attempts side by side in simulated time: each is made at once, and heard of when its time has passed."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(sleep=clock.advance)
        self._clock = clock

    def side_by_side(self) -> Race[Any]:
        return SimulatedRace(self._clock)


class SimulatedRace(Race[Any]):
    def __init__(self, clock: ManualClock) -> None:
        super().__init__(None, clock.advance)
        self._clock = clock
        self._ends: list[tuple[float, int, Ended[Any]]] = []

    def start(self, attempt: Callable[[], Any]) -> bool:
        self.started += 1
        self.under_way += 1
        started_s = self._clock.monotonic_s()
        value, error = None, None
        try:
            value = attempt()
        except Exception as raised:
            error = raised
        ended_s = self._clock.monotonic_s()
        self._clock.advance(started_s - ended_s)
        heapq.heappush(self._ends, (ended_s, self.started, Ended(self.started, value, error)))
        return True

    def wait(self, timeout_s: float | None) -> Ended[Any] | None:
        now_s = self._clock.monotonic_s()
        until_s = math.inf if timeout_s is None else now_s + timeout_s
        if self._ends and self._ends[0][0] <= until_s:
            ended_s, _, ended = heapq.heappop(self._ends)
            self._clock.advance(max(ended_s - now_s, 0.0))
            self.under_way -= 1
            return ended
        assert timeout_s is not None, "waits for an attempt that does not exist"
        self._clock.advance(timeout_s)
        return None


class Simulation:
    """A retrying store over a scripted one."""

    def __init__(self, policy: RetryPolicy, *script: Step, seed: int = 0) -> None:
        self.clock = ManualClock()
        self.inner = ScriptedStore(self.clock, *script)
        self.measured = Measurements()
        self.store = RetryingStore(
            self.inner,
            policy,
            clock=self.clock,
            recorder=self.measured,
            new_random=lambda: random.Random(seed),
            new_races=lambda: SimulatedRaces(self.clock),
        )


def failing(times: int, kind: ErrorKind = UNAVAILABLE, *, has_effect: bool = False) -> list[Step]:
    return [Step(error=kind, has_effect=has_effect)] * times


class TestPolicy:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"attempts": 0},
            {"attempts": 1.5},
            {"attempts": True},
            {"timeout_s": 0},
            {"timeout_s": math.nan},
            {"timeout_s": "1"},
            {"timeout_s": True},
            {"delay_s": -0.1},
            {"delay_s": math.inf},
            {"max_delay_s": -1},
            {"max_delay_s": None},
        ],
    )
    def test_values_out_of_range_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            RetryPolicy(**wrong)

    def test_none_is_one_attempt_however_long_it_takes(self) -> None:
        simulation = Simulation(RetryPolicy.none(), Step(takes_s=3600, error=UNAVAILABLE))

        with pytest.raises(StorageError):
            simulation.store.put("x", b"1")

        assert simulation.inner.times_of("put") == [0]
        assert simulation.clock.monotonic_s() == 3600

    def test_the_longest_delay_doubles_up_to_its_limit(self) -> None:
        policy = RetryPolicy(delay_s=0.5, max_delay_s=3)

        assert [policy.longest_delay_s(failures) for failures in (1, 2, 3, 4, 5000)] == [0.5, 1, 2, 3, 3]


class TestRetries:
    def test_the_number_of_attempts_is_limited(self) -> None:
        simulation = Simulation(RetryPolicy(attempts=4), *failing(10))

        with pytest.raises(StorageError) as raised:
            simulation.store.put("x", b"1")

        assert raised.value.kind == UNAVAILABLE
        assert len(simulation.inner.times_of("put")) == 4
        recorded = simulation.measured.take()
        assert recorded.counts == {"upload_requests": 1, "upload_failures": 1, "upload_retries": 3}
        assert recorded.samples == {}

    def test_success_on_the_last_attempt(self) -> None:
        simulation = Simulation(RetryPolicy(attempts=4), *failing(2), *failing(1, BUSY), Step(takes_s=0.25))

        simulation.store.put("x", b"123")

        assert simulation.inner.objects == {"x": b"123"}
        recorded = simulation.measured.take()
        assert recorded.counts == {"upload_requests": 1, "upload_retries": 3, "slow_downs": 1}
        assert recorded.samples[Metric.ATTEMPTS_PER_UPLOAD] == [4]
        assert recorded.samples[Metric.TOTAL_ATTEMPTS_PER_UPLOAD] == [4]
        assert recorded.samples[Metric.UPLOAD_LATENCY_S] == [simulation.clock.monotonic_s()]
        assert recorded.samples[Metric.UPLOAD_SIZE_BYTES] == [3]

    @pytest.mark.parametrize("last", [BUSY, FAILED])
    def test_the_last_failure_is_raised(self, last: ErrorKind) -> None:
        simulation = Simulation(RetryPolicy(attempts=3), *failing(2), *failing(1, last), OK)

        with pytest.raises(StorageError) as raised:
            simulation.store.put("x", b"1")

        assert raised.value.kind == last

    def test_a_failure_that_stays_ends_the_attempts(self) -> None:
        simulation = Simulation(RetryPolicy(attempts=5), *failing(1), *failing(1, FAILED))

        with pytest.raises(StorageError) as raised:
            simulation.store.put("x", b"1")

        assert raised.value.kind == FAILED
        assert len(simulation.inner.times_of("put")) == 2

    def test_an_upload_takes_from_its_own_start_to_success(self) -> None:
        simulation = Simulation(RetryPolicy(timeout_s=None), Step(takes_s=0.25), Step(takes_s=0.5))

        simulation.store.put("x", b"1")
        simulation.store.put("y", b"1")

        assert simulation.measured.take().samples[Metric.UPLOAD_LATENCY_S] == [0.25, 0.5]

    @pytest.mark.parametrize("kind", [FAILED, ErrorKind.OBJECT_MISSING, ErrorKind.STORE_UNSAFE])
    def test_other_failures_are_raised_at_once(self, kind: ErrorKind) -> None:
        for operation in OPERATIONS.values():
            simulation = Simulation(RetryPolicy(), Step(error=kind))
            simulation.inner.objects["there"] = b"content"

            with pytest.raises(StorageError) as raised:
                operation(simulation.store)

            assert raised.value.kind == kind
            assert len(simulation.inner.calls) == 1

    def test_what_is_no_failure_of_the_store_is_raised_at_once(self) -> None:
        simulation = Simulation(RetryPolicy())
        tried: list[str] = []

        def refuse(name: str, data: bytes | memoryview) -> None:
            tried.append(name)
            raise ConfigurationError("no such name")

        simulation.inner.put = refuse  # type: ignore[method-assign]  # only for the test

        with pytest.raises(ConfigurationError, match="no such name"):
            simulation.store.put("../x", b"")

        assert tried == ["../x"]

    def test_delays_have_full_jitter(self) -> None:
        delays = []
        for seed in range(200):
            simulation = Simulation(RetryPolicy(attempts=4, delay_s=0.5, max_delay_s=1.5), *failing(3), seed=seed)
            simulation.store.put("x", b"1")
            first, *later = simulation.inner.times_of("put")
            assert first == 0
            delays.append([after - before for before, after in zip([first, *later], later, strict=False)])

        for number, longest_s in enumerate([0.5, 1.0, 1.5]):
            seen = sorted(each[number] for each in delays)
            assert 0 <= seen[0] < 0.1 * longest_s
            assert 0.4 * longest_s < seen[100] < 0.6 * longest_s
            assert 0.9 * longest_s < seen[-1] <= longest_s

    def test_every_operation_is_repeated(self) -> None:
        for name, operation in OPERATIONS.items():
            simulation = Simulation(RetryPolicy(), *failing(2))
            simulation.inner.objects["there"] = b"content"

            operation(simulation.store)

            assert len(simulation.inner.times_of(name)) == 3, name
            counts = simulation.measured.take().counts
            is_write = name in ("put", "put_if_absent", "append")
            assert counts[Metric.UPLOAD_RETRIES if is_write else Metric.READ_RETRIES] == 2
            assert (Metric.UPLOAD_REQUESTS in counts) == name.startswith("put")

    def test_a_store_that_asks_for_fewer_requests_is_counted_for_every_operation(self) -> None:
        simulation = Simulation(RetryPolicy(), *failing(2, BUSY))

        simulation.store.list()

        assert simulation.measured.take().counts == {"slow_downs": 2, "read_retries": 2}


OPERATIONS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read("there"),
    "size_bytes": lambda store: store.size_bytes("there"),
    "put": lambda store: store.put("x", b"1"),
    "put_if_absent": lambda store: store.put_if_absent("x", b"1"),
    "append": lambda store: store.append("there", [b"1"], at=0),
    "sync": lambda store: store.sync("there", start=0, end=1),
    "delete": lambda store: store.delete(["there"]),
    "list": lambda store: store.list(),
}


class TestHedges:
    def test_a_write_that_takes_long_is_hedged_without_delay(self) -> None:
        simulation = Simulation(RetryPolicy(timeout_s=2), Step(takes_s=60), Step(takes_s=0.5))

        simulation.store.put("x", b"1")

        assert simulation.inner.times_of("put") == [0, 2]
        assert simulation.clock.monotonic_s() == 2.5
        recorded = simulation.measured.take()
        assert recorded.counts == {"upload_requests": 1, "upload_hedges": 1}
        assert recorded.samples[Metric.ATTEMPTS_PER_UPLOAD] == [2]
        assert recorded.samples[Metric.UPLOAD_LATENCY_S] == [2.5]

    def test_the_first_attempt_may_win_all_the_same(self) -> None:
        simulation = Simulation(RetryPolicy(timeout_s=2), Step(takes_s=3), Step(takes_s=60))

        simulation.store.put("x", b"1")

        assert simulation.clock.monotonic_s() == 3
        samples = simulation.measured.take().samples
        assert samples[Metric.ATTEMPTS_PER_UPLOAD] == [1]
        assert samples[Metric.TOTAL_ATTEMPTS_PER_UPLOAD] == [2]

    def test_a_failed_attempt_is_no_failure_while_another_is_under_way(self) -> None:
        script = [Step(takes_s=5), Step(takes_s=0.5, error=UNAVAILABLE)]
        simulation = Simulation(RetryPolicy(attempts=2, timeout_s=2), *script)

        simulation.store.put("x", b"1")

        assert simulation.clock.monotonic_s() == 5
        assert simulation.measured.take().counts == {"upload_requests": 1, "upload_hedges": 1}

    def test_a_failed_hedge_is_repeated_while_the_first_attempt_is_under_way(self) -> None:
        script = [Step(takes_s=60), Step(takes_s=0.5, error=UNAVAILABLE), Step(takes_s=0.25)]
        simulation = Simulation(RetryPolicy(attempts=3, timeout_s=2, delay_s=0.5), *script)

        simulation.store.put("x", b"1")

        _, _, third = simulation.inner.times_of("put")
        assert 2.5 <= third <= 3
        assert simulation.clock.monotonic_s() == third + 0.25

    def test_failure_waits_for_all_attempts(self) -> None:
        script = [Step(takes_s=5, error=UNAVAILABLE), Step(takes_s=0.5, error=BUSY)]
        simulation = Simulation(RetryPolicy(attempts=2, timeout_s=2), *script)

        with pytest.raises(StorageError):
            simulation.store.put("x", b"1")

        assert simulation.clock.monotonic_s() == 5

    def test_after_an_error_that_stays_no_attempt_is_started_and_the_others_still_count(self) -> None:
        script = [Step(takes_s=5), Step(takes_s=0.5, error=FAILED), OK]
        simulation = Simulation(RetryPolicy(attempts=3, timeout_s=2), *script)
        simulation.store.put("x", b"1")
        assert simulation.inner.times_of("put") == [0, 2]
        assert simulation.clock.monotonic_s() == 5

        script = [Step(takes_s=5, error=UNAVAILABLE), Step(takes_s=0.5, error=FAILED), OK]
        simulation = Simulation(RetryPolicy(attempts=3, timeout_s=2), *script)
        with pytest.raises(StorageError) as raised:
            simulation.store.put("x", b"1")
        assert raised.value.kind == FAILED
        assert simulation.inner.times_of("put") == [0, 2]

    def test_hedges_are_attempts(self) -> None:
        simulation = Simulation(RetryPolicy(attempts=2, timeout_s=2), *[Step(takes_s=9, error=UNAVAILABLE)] * 5)

        with pytest.raises(StorageError):
            simulation.store.put("x", b"1")

        assert simulation.inner.times_of("put") == [0, 2]

    def test_only_writes_of_whole_objects_are_hedged(self) -> None:
        for name, operation in OPERATIONS.items():
            simulation = Simulation(RetryPolicy(timeout_s=1), Step(takes_s=10))
            simulation.inner.objects["there"] = b"content"

            operation(simulation.store)

            assert len(simulation.inner.times_of(name)) == (2 if name in ("put", "put_if_absent") else 1), name

    def test_a_hedge_that_finds_no_room_is_tried_again_and_costs_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        simulation = Simulation(RetryPolicy(timeout_s=1), Step(takes_s=60), Step(takes_s=0.5))
        tried: list[float] = []
        start = SimulatedRace.start

        def start_if_there_is_room(race: SimulatedRace, attempt: Callable[[], Any]) -> bool:
            tried.append(simulation.clock.monotonic_s())
            return len(tried) in (1, 30) and start(race, attempt)

        monkeypatch.setattr(SimulatedRace, "start", start_if_there_is_room)

        for _ in range(40):
            simulation.store.hedging.add_request()
        simulation.store.put("x", b"1")

        assert tried == list(range(30))
        assert simulation.clock.monotonic_s() == 29.5
        assert simulation.measured.take().counts == {"upload_requests": 1, "upload_hedges": 1}
        # 41 requests allow two hedges.
        hedging = simulation.store.hedging
        assert [hedging.take_hedge(), hedging.take_hedge()] == [True, False]

    def test_a_repetition_that_finds_no_room_gives_no_hedge_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        script = [Step(takes_s=60), Step(takes_s=0.5, error=UNAVAILABLE), Step(takes_s=0.25)]
        simulation = Simulation(RetryPolicy(timeout_s=1, delay_s=0), *script)
        tried: list[float] = []
        start = SimulatedRace.start

        def start_if_there_is_room(race: SimulatedRace, attempt: Callable[[], Any]) -> bool:
            tried.append(simulation.clock.monotonic_s())
            return len(tried) != 3 and start(race, attempt)

        monkeypatch.setattr(SimulatedRace, "start", start_if_there_is_room)

        for _ in range(40):
            simulation.store.hedging.add_request()
        simulation.store.put("x", b"1")

        assert tried == [0, 1, 1.5, 2.5]
        assert simulation.clock.monotonic_s() == 2.75
        assert simulation.measured.take().counts == {"upload_requests": 1, "upload_hedges": 1, "upload_retries": 1}
        # One of two is left.
        hedging = simulation.store.hedging
        assert [hedging.take_hedge(), hedging.take_hedge()] == [True, False]

    @pytest.mark.parametrize("policy", [RetryPolicy(timeout_s=None), RetryPolicy(attempts=1)])
    def test_nothing_is_hedged_unless_the_policy_says_so(self, policy: RetryPolicy) -> None:
        simulation = Simulation(policy, Step(takes_s=100))

        simulation.store.put("x", b"1")

        assert simulation.inner.times_of("put") == [0]

    def test_nothing_is_hedged_where_objects_are_appended_to(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ScriptedStore, "can_append", True)
        simulation = Simulation(RetryPolicy(), Step(takes_s=100))

        simulation.store.put("log", b"head")

        assert simulation.inner.times_of("put") == [0]


class TestHedging:
    """When hedges start, and how many there may be."""

    def test_the_usual_latency_decides_once_it_is_known(self) -> None:
        hedging = Hedging(1.0, ManualClock())
        latencies = [number / 1000 for number in range(1, 101)]
        random.Random(1).shuffle(latencies)

        for latency_s in latencies[:99]:
            hedging.add_latency(10_000, latency_s)
        assert hedging.patience_s(10_000) == 1.0
        hedging.add_latency(10_000, latencies[99])
        assert hedging.patience_s(10_000) == 0.097
        # Of about the same size, within a factor of four, and of another.
        assert {hedging.patience_s(size_bytes) for size_bytes in (1 << 13, 9_000, (1 << 15) - 1)} == {0.097}
        assert {hedging.patience_s(size_bytes) for size_bytes in (100, (1 << 13) - 1, 1 << 15, 1_000_000)} == {1.0}

    def test_where_nothing_is_hedged_no_write_takes_too_long(self) -> None:
        hedging = Hedging(None, ManualClock())
        for _ in range(100):
            hedging.add_latency(10, 0.1)

        assert not hedging.is_on
        assert hedging.patience_s(10) is None

    def test_the_timeout_is_the_longest(self) -> None:
        hedging = Hedging(1.0, ManualClock())
        for _ in range(200):
            hedging.add_latency(10, 5.0)

        assert hedging.patience_s(10) == 1.0

    def test_only_recent_writes_count(self) -> None:
        hedging = Hedging(100.0, ManualClock())
        source = random.Random(3)
        latencies = [source.expovariate(1) for _ in range(2_000)]
        for latency_s in latencies:
            hedging.add_latency(10, latency_s)

        assert hedging.patience_s(10) == sorted(latencies[-500:])[484]

    def test_a_write_is_hedged_at_the_usual_latency(self) -> None:
        simulation = Simulation(RetryPolicy(timeout_s=1))
        for takes_s in [0.010] * 95 + [0.050] * 10:
            simulation.inner.script.append(Step(takes_s))
            simulation.store.put("x", b"1")
        before_s = simulation.clock.monotonic_s()
        simulation.inner.script += [Step(takes_s=60), Step(takes_s=0.010)]

        simulation.store.put("late", b"1")

        assert simulation.clock.monotonic_s() - before_s == pytest.approx(0.060)

    def test_the_first_hedge_is_lent(self) -> None:
        hedging = Hedging(1.0, ManualClock())
        hedging.add_request()

        assert [hedging.take_hedge(), hedging.take_hedge()] == [True, False]
        for _ in range(38):
            hedging.add_request()
            assert not hedging.take_hedge()
        hedging.add_request()
        # Two hedges in 40 requests.
        assert [hedging.take_hedge(), hedging.take_hedge()] == [True, False]

    def test_a_first_hedge_that_could_not_start_is_lent_again(self) -> None:
        hedging = Hedging(1.0, ManualClock())
        hedging.add_request()
        assert hedging.take_hedge()

        hedging.give_back_hedge()

        assert [hedging.take_hedge(), hedging.take_hedge()] == [True, False]

    @pytest.mark.parametrize("hedges", range(1, 11))
    def test_so_many_twentieths_are_a_hedge(self, hedges: int) -> None:
        """Although as floating-point numbers they may add up to a little less."""
        hedging = Hedging(1.0, ManualClock())
        for _ in range(20 * hedges):
            hedging.add_request()

        assert sum(hedging.take_hedge() for _ in range(20)) == hedges

    def test_a_calm_past_saves_no_more_than_ten_hedges(self) -> None:
        hedging = Hedging(1.0, ManualClock())
        for _ in range(10_000):
            hedging.add_request()

        assert sum(hedging.take_hedge() for _ in range(100)) == 10

    def test_the_budget_is_never_exceeded(self) -> None:
        simulation = Simulation(RetryPolicy(timeout_s=1))
        source = random.Random(5)
        hedges = 0
        for requests in range(1, 20_001):
            # Slower and slower, so that always more than the usual share takes longer than usual.
            scale = 0.01 * 1.001**requests if requests < 10_000 else 1.5
            simulation.inner.script = [Step(takes_s=scale * source.expovariate(1)) for _ in range(3)]
            simulation.store.put("x", b"1")
            hedges += simulation.measured.take().counts.get(Metric.UPLOAD_HEDGES, 0)
            assert hedges <= max(1, 0.05 * requests)
        assert hedges > 0.045 * 20_000

    def test_hedging_does_not_feed_itself(self) -> None:
        """With steady latencies three requests in a hundred are hedged: the slow losers count as well."""
        simulation = Simulation(RetryPolicy(timeout_s=100))
        source = random.Random(6)
        for _ in range(20_000):
            simulation.inner.script = [Step(takes_s=source.lognormvariate(0, 1)) for _ in range(3)]
            simulation.store.put("x", b"1")

        hedges = simulation.measured.take().counts[Metric.UPLOAD_HEDGES]
        assert 0.026 * 20_000 < hedges < 0.036 * 20_000

    def test_none_while_the_store_asks_for_fewer_requests(self) -> None:
        simulation = Simulation(RetryPolicy(timeout_s=1), Step(error=BUSY))
        simulation.store.list()
        asked_s = simulation.clock.monotonic_s()

        simulation.inner.script = [Step(takes_s=20)]
        simulation.store.put("x", b"1")
        assert len(simulation.inner.times_of("put")) == 1

        # A write that is still under way when the store has been calm for long enough is hedged then.
        simulation.inner.script = [Step(takes_s=60)]
        simulation.store.put("y", b"1")
        _, first, hedge = simulation.inner.times_of("put")
        assert first < asked_s + 30 <= hedge <= asked_s + 31

    def test_after_thirty_calm_seconds_hedges_start_again(self) -> None:
        clock = ManualClock(1000.0)
        hedging = Hedging(1.0, clock)
        hedging.add_request()
        hedging.slow_down()

        assert not hedging.take_hedge()
        clock.advance(29.5)
        assert not hedging.take_hedge()
        clock.advance(0.5)
        assert hedging.take_hedge()

    def test_a_loser_that_is_asked_to_slow_down_counts(self) -> None:
        simulation = Simulation(RetryPolicy(timeout_s=1), Step(takes_s=60, error=BUSY), OK)

        simulation.store.put("x", b"1")

        assert simulation.measured.take().counts[Metric.SLOW_DOWNS] == 1


class TestPutIfAbsent:
    def store_with(self, tmp_path: Path, *plans: FaultPlan, attempts: int = 3) -> tuple[RetryingStore, Measurements]:
        inner: Store = LocalStore(tmp_path)
        for plan in plans:
            inner = FaultStore(inner, plan)
        clock, measured = ManualClock(), Measurements()
        policy = RetryPolicy(attempts=attempts)
        races = SimulatedRaces(clock)
        return RetryingStore(inner, policy, clock=clock, recorder=measured, new_races=lambda: races), measured

    def test_the_answer_of_the_attempt_that_won_was_lost(self, tmp_path: Path) -> None:
        store, measured = self.store_with(tmp_path, FaultPlan.at("put_if_absent", when="after", kind=UNAVAILABLE))

        assert store.put_if_absent("log/1", b"ours")

        assert store.read("log/1") == b"ours"
        assert measured.take().counts == {"upload_requests": 1, "upload_retries": 1}

    def test_another_one_won_while_the_attempt_failed(self, tmp_path: Path) -> None:
        def win() -> None:
            LocalStore(tmp_path).put("log/1", b"theirs")
            raise StorageError("No answer.", kind=UNAVAILABLE)

        store, measured = self.store_with(tmp_path, FaultPlan.at("put_if_absent", action=win))

        assert not store.put_if_absent("log/1", b"ours")

        assert store.read("log/1") == b"theirs"
        recorded = measured.take()
        # Not written, but not failed either.
        assert recorded.counts == {"upload_requests": 1, "upload_retries": 1}
        assert recorded.samples == {}

    def test_a_plain_conflict_reads_nothing(self) -> None:
        simulation = Simulation(RetryPolicy())
        simulation.inner.objects["log/1"] = b"theirs"

        assert not simulation.store.put_if_absent("log/1", b"ours")

        assert [name for name, _ in simulation.inner.calls] == ["put_if_absent"]

    def test_equal_bytes_of_another_are_a_plain_conflict(self) -> None:
        simulation = Simulation(RetryPolicy())

        assert simulation.store.put_if_absent("log/1", b"same")
        assert not simulation.store.put_if_absent("log/1", b"same")

    def test_an_object_that_the_second_attempt_made_is_ours_without_a_look(self) -> None:
        simulation = Simulation(RetryPolicy(), *failing(1))

        assert simulation.store.put_if_absent("log/1", b"ours")

        assert [name for name, _ in simulation.inner.calls] == ["put_if_absent", "put_if_absent"]
        assert simulation.measured.take().samples.keys() >= {Metric.ATTEMPTS_PER_UPLOAD, Metric.UPLOAD_SIZE_BYTES}

    def test_a_hedge_finds_the_object_of_the_attempt_under_way(self) -> None:
        simulation = Simulation(RetryPolicy(timeout_s=1), Step(takes_s=60), Step(takes_s=0.5))

        assert simulation.store.put_if_absent("log/1", b"ours")

        assert [name for name, _ in simulation.inner.calls] == ["put_if_absent", "put_if_absent", "read"]
        assert simulation.clock.monotonic_s() == 1.5

    def test_the_first_attempt_finds_the_object_of_its_hedge(self) -> None:
        simulation = Simulation(RetryPolicy(timeout_s=1))

        def race(name: str, data: bytes | memoryview) -> bool:
            # The first attempt reaches the store after the second one, but is answered before it.
            is_first = not simulation.inner.times_of("put_if_absent")
            simulation.inner.script = [Step(takes_s=1.5 if is_first else 60)]
            if is_first:
                return bool(simulation.inner._follow("put_if_absent", lambda: False))
            return ScriptedStore.put_if_absent(simulation.inner, name, data)

        simulation.inner.put_if_absent = race  # type: ignore[method-assign]  # only for the test

        assert simulation.store.put_if_absent("log/1", b"ours")
        assert simulation.clock.monotonic_s() == 1.5

    def test_all_answers_were_lost(self) -> None:
        for attempts in (1, 3):
            simulation = Simulation(RetryPolicy(attempts=attempts), *failing(attempts, has_effect=True))

            assert simulation.store.put_if_absent("log/1", b"ours")

            assert len(simulation.inner.times_of("put_if_absent")) == attempts
            recorded = simulation.measured.take()
            assert Metric.UPLOAD_FAILURES not in recorded.counts
            # Which attempt it was nobody knows.
            assert Metric.ATTEMPTS_PER_UPLOAD not in recorded.samples
            assert recorded.samples[Metric.TOTAL_ATTEMPTS_PER_UPLOAD] == [attempts]

    def test_all_answers_were_lost_and_another_one_won(self) -> None:
        simulation = Simulation(RetryPolicy(), *failing(3))
        simulation.inner.objects["log/1"] = b"theirs"

        assert not simulation.store.put_if_absent("log/1", b"ours")

    def test_all_attempts_failed_and_nobody_won(self) -> None:
        simulation = Simulation(RetryPolicy(), *failing(3))

        with pytest.raises(StorageError) as raised:
            simulation.store.put_if_absent("log/1", b"ours")

        assert raised.value.kind == UNAVAILABLE
        assert simulation.measured.take().counts[Metric.UPLOAD_FAILURES] == 1

    def test_reading_back_is_repeated(self) -> None:
        script = [*failing(1, has_effect=True), OK, *failing(2)]
        simulation = Simulation(RetryPolicy(), *script)

        assert simulation.store.put_if_absent("log/1", b"ours")

        assert len(simulation.inner.times_of("read")) == 3
        assert simulation.measured.take().counts[Metric.READ_RETRIES] == 2

    def test_the_object_is_gone_when_it_is_read_back(self, tmp_path: Path) -> None:
        store, measured = self.store_with(
            tmp_path,
            FaultPlan.at("put_if_absent", when="after", kind=UNAVAILABLE),
            FaultPlan.at("read", action=lambda: LocalStore(tmp_path).delete(["log/1"])),
        )

        with pytest.raises(StorageError, match="log/1.*unknown.*[Aa]ttempt 2 of 2") as raised:
            store.put_if_absent("log/1", b"ours")

        assert not raised.value.is_transient
        assert measured.take().counts[Metric.UPLOAD_FAILURES] == 1


class TestThreads:
    def test_the_second_attempt_ends_the_call_while_the_first_one_blocks(self) -> None:
        inner = BlockingStore("x")
        store = threaded(inner, timeout_s=0.05)
        clock = SystemClock()
        started_s = clock.monotonic_s()

        store.put("x", b"1")

        assert 0.05 <= clock.monotonic_s() - started_s < 30
        assert inner.objects == {"x": b"1"}
        assert inner.late == []
        inner.finish()
        assert inner.late == ["x"]
        assert inner.objects == {"x": b"1"}

    def test_a_loser_writes_what_it_was_given(self) -> None:
        inner = BlockingStore("x")
        data = bytearray(b"the object")

        threaded(inner).put("x", memoryview(data))
        data[:] = b"something!"
        inner.finish()

        assert inner.late == ["x"]
        assert inner.objects == {"x": b"the object"}

    def test_a_loser_may_leave_an_object_that_was_deleted(self) -> None:
        """Nothing can prevent this: the request may already be on its way. Orphans are looked for in any case."""
        inner = BlockingStore("x")
        store = threaded(inner)

        store.put("x", b"1")
        store.delete(["x"])
        assert store.list() == []
        inner.finish()

        assert [info.name for info in store.list()] == ["x"]

    def test_a_failing_loser_does_not_show(self) -> None:
        inner = BlockingStore("x")
        inner.script = [OK, Step(error=FAILED)]
        store = threaded(inner)

        store.put("x", b"1")
        inner.finish()

        store.put("y", b"2")
        assert inner.objects == {"x": b"1", "y": b"2"}

    def test_no_thread_is_left_by_a_thousand_hedged_writes(self) -> None:
        before = set(threading.enumerate())
        most = 4
        inner = BlockingStore()
        store = threaded(inner, timeout_s=0.0001, threads=most)
        hedging = store.hedging
        hedging.take_hedge = lambda: True  # type: ignore[method-assign]  # only for the test
        seen = 0
        for number in range(1_000):
            inner.blocked.add(f"{number}")
            inner.release = threading.Event()
            store.put(f"{number}", b"1")
            seen = max(seen, len(set(threading.enumerate()) - before))
            inner.release.set()

        assert len(inner.threads) == 2_000
        assert set(inner.threads).isdisjoint([threading.current_thread()])
        assert 2 <= seen <= most
        inner.finish()
        assert set(threading.enumerate()) <= before

    def test_who_hears_of_the_end_finds_the_thread_free(self) -> None:
        races = Races(1)
        heard: SimpleQueue[object] = SimpleQueue()

        def go_on(_: None) -> None:
            heard.put(races.run(lambda: None, lambda _: heard.put("again")))

        assert races.run(lambda: None, go_on)

        assert [heard.get(timeout=60), heard.get(timeout=60)] == [True, "again"]

    def test_closing_ends_the_threads_that_wait(self) -> None:
        inner = BlockingStore()
        store = threaded(inner, timeout_s=60, threads=1, idle_s=3600)
        store.put("x", b"1")
        inner.threads[0].join(0.05)
        assert inner.threads[0].is_alive()

        store.close()

        inner.finish()
        store.put("y", b"1")
        assert inner.threads[1] not in (inner.threads[0], threading.current_thread())
        store.close()
        inner.finish()

    def test_threads_end_when_they_are_not_needed(self) -> None:
        inner = BlockingStore()
        store = threaded(inner, timeout_s=60, idle_s=0.001)
        # At some of these moments a thread is about to end.
        for number in range(300):
            store.put(f"{number}", b"1")
            time.sleep(random.Random(number).choice([0, 0.0005, 0.001, 0.002]))
        inner.finish()

        assert len(inner.objects) == 300
        assert 2 < len(set(inner.threads)) < 300
        assert not any(thread.is_alive() for thread in inner.threads)

    def test_with_all_threads_taken_a_write_runs_in_its_own(self) -> None:
        inner = BlockingStore("x", "y")
        store = threaded(inner, threads=2)
        store.put("x", b"1")  # a thread stays with its first attempt
        hedging = store.hedging
        for _ in range(60):
            hedging.add_request()
        other = threading.Thread(target=store.put, args=("y", b"1"))
        other.start()  # takes the other thread, and there is none for a hedge
        while len(inner.threads) < 3:
            time.sleep(0.001)
        time.sleep(0.05)

        store.put("z", b"1")

        assert inner.threads[-1] is threading.current_thread()
        assert inner.objects.keys() == {"x", "z"}
        inner.finish()
        other.join(60)
        store.put("later", b"1")
        assert inner.threads[-1] is not threading.current_thread()
        assert inner.objects.keys() == {"x", "y", "z", "later"}

    def test_a_child_has_threads_of_its_own(self) -> None:
        inner = BlockingStore("x", "y")
        sources: list[random.Random] = []

        def new_random() -> random.Random:
            sources.append(random.Random(len(sources)))
            return sources[-1]

        store = RetryingStore(
            inner,
            RetryPolicy(attempts=2, timeout_s=0.001),
            clock=SystemClock(),
            recorder=Measurements(),
            new_random=new_random,
            new_races=lambda: Races(2, idle_s=0.02),
        )
        store.put("x", b"1")  # its first attempt holds a thread that the child does not have

        pid = os.fork()
        if pid == 0:
            try:
                store.put("y", b"1")  # needs two threads, and a hedge
                is_hedged = [thread.name for thread in inner.threads] == ["statelog-request"] * 4
                delays_differ = sources[1].random() == random.Random(1).random()
                os._exit(0 if is_hedged and delays_differ else 3)
            except BaseException:
                os._exit(1)
        inner.finish()

        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    def test_a_request_that_hangs_does_not_keep_the_process(self) -> None:
        script = """
import threading
from tests.storage.retry_support import BlockingStore, threaded

store = BlockingStore("x")
threaded(store, idle_s=10).put("x", b"1")
print(threading.active_count())
"""
        ended = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
        )

        # The main thread, the one that hangs, and one that waits.
        assert (ended.returncode, ended.stdout) == (0, "3\n"), ended.stderr

    @pytest.mark.parametrize("new_policy", [RetryPolicy.none, partial(RetryPolicy, timeout_s=None)])
    def test_what_is_never_hedged_runs_in_its_callers_thread(self, new_policy: Callable[[], RetryPolicy]) -> None:
        inner = BlockingStore()
        store = RetryingStore(inner, new_policy(), clock=SystemClock(), recorder=Measurements())

        store.put("x", b"1")

        assert inner.threads == [threading.current_thread()]


PATIENCE_S = 10


class Panic(BaseException):
    """As native libraries raise them: no Exception."""


def panic() -> None:
    raise Panic


class TestRaces:
    """What a race promises to a request. Nothing depends on how long something takes, unless a test fails."""

    @pytest.fixture(autouse=True)
    def what_hangs_ends_with_the_test(self) -> Iterator[None]:
        self.made: list[Races] = []
        self.released = threading.Event()
        yield
        self.released.set()
        for races in self.made:
            races.close()

    def races(self, threads: int) -> Races:
        self.made.append(Races(threads, idle_s=60))
        return self.made[-1]

    def take(self, races: Races, threads: int = 1) -> None:
        """Have attempts that hang hold so many threads."""
        for _ in range(threads):
            has_begun: SimpleQueue[threading.Thread] = SimpleQueue()
            race: Race[None] = races.side_by_side()
            assert race.start(partial(hang, threading.current_thread(), has_begun, self.released))
            assert has_begun.get(timeout=PATIENCE_S) is not threading.current_thread()

    @pytest.mark.parametrize("is_side_by_side", [False, True])
    def test_an_end_is_what_the_attempt_did(self, is_side_by_side: bool) -> None:
        races = self.races(1)
        race: Race[object] = races.side_by_side() if is_side_by_side else races.in_line()

        assert race.start(lambda: "result")
        returned = heard(race)
        assert race.start(panic)
        raised = heard(race)

        assert returned == Ended(1, "result", None)
        assert returned.result() == "result"
        assert (raised.number, raised.value, type(raised.error)) == (2, None, Panic)
        with pytest.raises(Panic):
            raised.result()

    def test_side_by_side_the_first_to_end_is_heard_first(self) -> None:
        race: Race[threading.Thread] = self.races(2).side_by_side()
        go_on = threading.Event()

        assert race.start(partial(thread_after, go_on))
        assert race.start(threading.current_thread)
        second = heard(race)
        assert race.wait(0) is None
        go_on.set()
        first = heard(race)

        assert (second.number, first.number) == (2, 1)
        assert len({first.value, second.value, threading.current_thread()}) == 3
        # A request that hangs must not keep the process.
        assert [first.result().daemon, second.result().daemon] == [True, True]

    def test_in_line_waiting_is_sleeping(self) -> None:
        slept: list[float] = []
        race: Race[None] = Races(sleep=slept.append).in_line()

        assert race.wait(2.5) is None
        assert race.wait(0.0) is None
        # Nothing is under way that could be waited for.
        assert race.wait(None) is None

        assert slept == [2.5, 0.0]

    def test_with_all_threads_taken_attempts_of_a_race_run_in_its_thread_one_at_a_time(self) -> None:
        races = self.races(1)
        self.take(races)
        race: Race[threading.Thread] = races.side_by_side()

        for number in (1, 2, 3):
            assert race.start(threading.current_thread)
            # There is one whose end was not heard of.
            assert not race.start(threading.current_thread)
            assert race.wait(0) == Ended(number, threading.current_thread(), None)
            assert race.wait(0) is None

    def test_an_attempt_that_finds_no_thread_beside_another_does_not_run(self) -> None:
        races = self.races(1)
        race: Race[Any] = races.side_by_side()
        go_on = threading.Event()
        ran: list[object] = []

        assert race.start(partial(thread_after, go_on))
        assert not race.start(lambda: ran.append(1))
        go_on.set()
        first = heard(race)

        assert first.number == 1
        assert race.start(threading.current_thread)
        second = heard(race)
        assert (second.number, second.value) == (2, first.value)
        assert ran == []

    def test_no_more_threads_than_there_may_be(self) -> None:
        races = self.races(2)
        first = self.threads_of(races, 1)
        both = self.threads_of(races, 2)

        assert len(both) == 2
        assert first < both
        for attempts in (1, 2, 1, 2):
            assert self.threads_of(races, attempts) <= both
        self.take(races, 2)
        assert self.threads_of(races, 1) == {threading.current_thread()}

    def test_a_thread_that_waits_takes_one_attempt(self) -> None:
        races = self.races(3)
        (waiting,) = self.threads_of(races, 1)

        # None of them is left to a thread that has another one.
        threads = self.threads_of(races, 3)

        assert len(threads) == 3
        assert waiting in threads

    def test_a_system_without_threads_is_like_one_with_all_threads_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        races = self.races(1)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse_to_start)
            race: Race[threading.Thread] = races.side_by_side()
            assert race.start(threading.current_thread)
            assert not race.start(threading.current_thread)
            assert race.wait(0) == Ended(1, threading.current_thread(), None)

        # Later there is as much room as before.
        self.take(races)
        assert self.threads_of(races, 1) == {threading.current_thread()}

    def test_closed_races_start_threads_anew(self) -> None:
        races = self.races(2)
        before = self.threads_of(races, 2)

        races.close()

        assert all(has_ended(thread) for thread in before)
        after = self.threads_of(races, 2)
        assert len(after) == 2
        assert after.isdisjoint({*before, threading.current_thread()})
        self.take(races, 2)
        assert self.threads_of(races, 1) == {threading.current_thread()}

    def test_a_thread_that_had_nothing_to_do_makes_room_for_another(self) -> None:
        races = self.races(2)
        races.idle_s = 0
        for _ in range(3):
            assert all(has_ended(thread) for thread in self.threads_of(races, 2))

        races.idle_s = 60
        threads = self.threads_of(races, 2)
        assert self.threads_of(races, 2) == threads
        self.take(races, 2)
        assert self.threads_of(races, 1) == {threading.current_thread()}

    def test_a_thread_that_is_needed_the_moment_its_time_is_over_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patched:
            patched.setattr("statelog.storage.hedging.Queue", LateQueue)
            races = self.races(1)
        first = self.threads_of(races, 1)

        # Its time is over between the decision that it makes the attempt and the arrival of the attempt.
        assert self.threads_of(races, 1) == first
        assert self.threads_of(races, 1) == first

    def test_a_thread_that_waits_keeps_nothing_alive(self) -> None:
        races = self.races(1)
        gone = [threading.Event(), threading.Event()]
        attempt, result = Kept(), Kept()
        attempt.result = result
        for kept, event in zip([attempt, result], gone, strict=True):
            weakref.finalize(kept, event.set)
        race: Race[Kept | None] = races.side_by_side()
        assert race.start(attempt)
        heard(race)

        del attempt, result, kept, race

        assert [event.wait(PATIENCE_S) for event in gone] == [True, True]

    def threads_of(self, races: Races, attempts: int) -> set[threading.Thread]:
        """The threads of so many attempts of one race, which are under way at the same time; all have ended."""
        race: Race[threading.Thread] = races.side_by_side()
        together = threading.Barrier(attempts)
        for _ in range(attempts):
            assert race.start(partial(thread_when_all_are_here, together))
        return {heard(race).result() for _ in range(attempts)}


def heard(race: Race[T]) -> Ended[T]:
    """The end of an attempt that is under way."""
    ended = race.wait(PATIENCE_S)
    assert ended is not None
    return ended


def hang(caller: threading.Thread, has_begun: SimpleQueue[threading.Thread], until: threading.Event) -> None:
    """Wait, unless that would be the caller's own thread."""
    has_begun.put(threading.current_thread())
    if threading.current_thread() is not caller:
        until.wait(60)


def thread_after(event: threading.Event) -> threading.Thread:
    assert event.wait(60)
    return threading.current_thread()


def thread_when_all_are_here(together: threading.Barrier) -> threading.Thread:
    together.wait(PATIENCE_S)
    return threading.current_thread()


def has_ended(thread: threading.Thread) -> bool:
    thread.join(PATIENCE_S)
    return not thread.is_alive()


def refuse_to_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


class Kept:
    """An attempt, or a result, that can be watched."""

    result: Kept | None = None

    def __call__(self) -> Kept | None:
        return self.result


class LateQueue(Queue[Any]):
    """A queue in which the waiting thread's time is over whenever something is about to be put."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: SimpleQueue[str] = SimpleQueue()
        self._waits = threading.Event()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self._waits.set()
        if self._steps.get(timeout=60) == "time is over":
            raise Empty
        return super().get(block, timeout)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if item is not None:
            assert self._waits.wait(PATIENCE_S)
            self._waits.clear()
            self._steps.put("time is over")
            assert self._waits.wait(PATIENCE_S), "the thread has ended"
            self._waits.clear()
        super().put(item, block, timeout)
        self._steps.put("come")


ROOT = Path(__file__).parents[2]


class Unavailable(StoreWrapper):
    """Answers no request, and counts those of all its copies."""

    requests: ClassVar[int] = 0

    def _call(self, operation: str, name: str, effect: Callable[[], T]) -> T:
        Unavailable.requests += 1
        raise StorageError("No answer.", kind=UNAVAILABLE)


def test_a_pickled_store_carries_store_and_policy(tmp_path: Path) -> None:
    policy = RetryPolicy(attempts=2, delay_s=0)
    store = RetryingStore(Unavailable(LocalStore(tmp_path)), policy, clock=ManualClock(), recorder=Measurements())
    with pytest.raises(StorageError):
        store.put("x", b"1")

    other = pickle.loads(pickle.dumps(store))

    assert repr(other) == repr(store)
    before = Unavailable.requests
    with pytest.raises(StorageError):
        other.put("x", b"1")
    assert Unavailable.requests == before + 2


def test_a_later_attempt_that_makes_the_object_needs_no_look_at_it() -> None:
    simulation = Simulation(RetryPolicy(attempts=3), *failing(1))
    assert simulation.store.put_if_absent("log/1", b"ours")
    assert [name for name, _ in simulation.inner.calls] == ["put_if_absent", "put_if_absent"]


def test_only_an_object_that_was_made_counts_as_written() -> None:
    simulation = Simulation(RetryPolicy())
    assert simulation.store.put_if_absent("log/1", b"ours")
    assert not simulation.store.put_if_absent("log/1", b"theirs")
    recorded = simulation.measured.take()
    assert recorded.samples[Metric.UPLOAD_SIZE_BYTES] == [4]
    assert recorded.counts == {"upload_requests": 2}


def test_what_has_no_answer_is_forwarded_as_well() -> None:
    told: list[object] = []

    class Told(ScriptedStore):
        def remove_unfinished(self, prefix: str, before_s: float) -> None:
            self._follow("remove_unfinished", lambda: told.append((prefix, before_s)))

        def close(self) -> None:
            told.append("close")

    clock = ManualClock()
    inner = Told(clock, *failing(1))
    store = RetryingStore(
        inner,
        RetryPolicy(),
        clock=clock,
        recorder=Measurements(),
        new_races=lambda: SimulatedRaces(clock),
    )
    store.remove_unfinished("runs/", 7.0)
    store.close()
    assert told == [("runs/", 7.0), "close"]


def test_nothing_is_made_before_the_first_call(tmp_path: Path) -> None:
    def fail() -> Any:
        raise AssertionError

    store = RetryingStore(
        LocalStore(tmp_path),
        RetryPolicy(),
        clock=ManualClock(),
        recorder=Measurements(),
        new_random=fail,
        new_races=fail,
    )

    store.close()
    assert store.can_append
