"""The benchmark of tail latencies, with a directory for a server."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks import tail
from benchmarks.frame import Result
from benchmarks.tail import (
    HEDGED,
    SINGLE,
    SlowStore,
    Writer,
    latency_of,
    latency_s,
    object_name,
    size_factor,
    slowest_ms,
)
from statelog.metrics import Measurements
from statelog.storage import LocalStore

SETTINGS = tail.Settings(requests=60, warm_up=5, block=25, scale=0.05, concurrency=4, object_bytes=100)


def test_both_sides_write_the_same_objects_with_the_same_latencies(tmp_path: Path) -> None:
    result = tail.measure(str(tmp_path / "store"), tmp_path, SETTINGS)

    for side in (SINGLE, HEDGED):
        stored = [info.name for info in LocalStore(str(tmp_path / "store" / side)).list()]
        assert sorted(stored) == sorted(object_name(number) for number in range(-5, 60))
    single, hedged = (result.figures["sides"][side] for side in (SINGLE, HEDGED))
    longest_ms = max(1000 * 0.05 * latency_of(object_name(number), 1) for number in range(60))
    assert single["injected_ms"]["max"] == hedged["injected_ms"]["max"] == pytest.approx(longest_ms)
    assert single["latency_ms"]["max"] >= longest_ms
    assert single["attempts"] == 65
    assert single["extra_requests_percent"] == 0
    assert hedged["counts"].get("upload_hedges", 0) <= 3
    assert [key for key in single["latency_ms"] if key.startswith("p")] == ["p50", "p90", "p95"]
    # Too few requests for the first target.
    assert [target.value is None for target in result.targets] == [True, False]
    # The losers at the end may still have been on their way.
    assert 130 <= result.figures["server_ms"]["samples"] <= hedged["attempts"] + 65


def test_what_was_not_written_is_an_error(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    writer = Writer(store, SlowStore(store, 1), Measurements(), 100)
    writer.write(1)
    writer.check(1)
    store.put(object_name(1), b"other content")

    with pytest.raises(RuntimeError, match=f"written as {object_name(1)}"):
        writer.check(1)


class TestFigures:
    @pytest.fixture
    def measure(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int, int], Result]:
        """Measures with a client that only says what it measured: 10,000 requests of 1 to 10,000 ms."""

        def side(factor: float, hedges: int, puts: int) -> dict[str, Any]:
            counts = {"upload_requests": 10_000, "upload_hedges": hedges}
            latencies_s = [factor * (number + 1) / 1000 for number in range(10_000)]
            warm_up = {"upload_requests": 10}
            return {"latencies_s": latencies_s, "counts": counts, "warm_up_counts": warm_up, "puts": puts}

        def measure(hedges: int, puts: int) -> Result:
            sides = {SINGLE: side(1, 0, 10_010), HEDGED: side(0.5, hedges, puts - 10_010)}
            times = {"took_s": 10.0, "client_cpu_s": 1.0, "machine_cpu_s": 5.0}
            measured = {**times, "late_s": [0.001], "server_s": [0.002], "sides": sides}
            monkeypatch.setattr(tail, "run_in_child", lambda *_: measured)
            return tail.measure("s3://bucket/bench", tmp_path, SETTINGS)

        return measure

    def test_quantiles_and_targets(self, measure: Callable[[int, int], Result]) -> None:
        result = measure(300, 20_320)

        assert result.figures["sides"][SINGLE]["latency_ms"] == {
            "samples": 10_000,
            "p50": pytest.approx(5_000),
            "p90": pytest.approx(9_000),
            "p95": pytest.approx(9_500),
            "p99": pytest.approx(9_900),
            "p99.9": pytest.approx(9_990),
            "max": pytest.approx(10_000),
        }
        assert [target.value for target in result.targets] == pytest.approx([50, 3])
        assert [target.met for target in result.targets] == [True, True]

    def test_too_many_hedges_miss_the_target(self, measure: Callable[[int, int], Result]) -> None:
        assert [target.met for target in measure(501, 20_521).targets] == [True, False]

    def test_requests_that_the_client_does_not_know_of_are_an_error(
        self, measure: Callable[[int, int], Result]
    ) -> None:
        with pytest.raises(click.ClickException, match="made 20320 attempts, and the store saw 20321"):
            measure(300, 20_321)


class TestSlowest:
    def test_half_of_the_checkpoints_are_done_when_their_slowest_write_is(self) -> None:
        rng = random.Random(7)
        samples = [rng.lognormvariate(0, 1) for _ in range(20_000)]
        slowest = sorted(max(rng.choices(samples, k=50)) for _ in range(2_000))
        assert slowest_ms(samples, 50) == pytest.approx(slowest[1_000], rel=0.1)
        assert slowest_ms(samples, 1) == pytest.approx(sorted(samples)[9_999])
        assert slowest_ms(samples[:2_000], 500) is None

    def test_small_objects_take_a_sixth_of_the_time_and_large_ones_grow_with_their_size(self) -> None:
        assert [size_factor(size) for size in (0, 2_000_000, 5_000_000)] == pytest.approx([1 / 6, 1 / 2, 1])


class TestLatency:
    def test_quantiles_are_those_of_the_flip(self) -> None:
        shares = [0.5, 0.9, 0.95, 0.99, 0.999]
        assert [latency_s(share) for share in shares] == pytest.approx([0.459, 0.740, 0.833, 1.039, 3.202])
        # Half-way between p99 and p99.9: the mean of their logarithms.
        assert latency_s(0.9945) == pytest.approx((1.039 * 3.202) ** 0.5)
        drawn = sorted(latency_of(f"{number}", 1) for number in range(50_000))
        assert [drawn[int(share * 50_000)] for share in shares[:4]] == pytest.approx(
            [0.459, 0.740, 0.833, 1.039], rel=0.015
        )
        assert 0.3 <= drawn[0] < drawn[-1] <= 4.0

    def test_the_same_request_has_the_same_latency(self) -> None:
        assert latency_of("x", 1) == latency_of("x", 1)
        assert len({latency_of("x", 1), latency_of("y", 1), latency_of("x", 2)}) == 3

    @pytest.mark.parametrize("share", [-0.1, 1.1])
    def test_a_share_is_between_0_and_1(self, share: float) -> None:
        with pytest.raises(ValueError, match="not between"):
            latency_s(share)

    def test_a_write_takes_its_time_and_then_reaches_the_store(self, tmp_path: Path) -> None:
        inner = LocalStore(str(tmp_path))
        slow = SlowStore(inner, 0.1)
        for name, number in [("x", 1), ("x", 2), ("y", 1)]:
            started_s = time.perf_counter()
            slow.put(name, b"%d" % number)
            took_s = time.perf_counter() - started_s
            expected_s = 0.1 * latency_of(name, number)
            assert expected_s <= took_s < expected_s + 5
            assert inner.read(name) == b"%d" % number
        started_s = time.perf_counter()
        assert not slow.put_if_absent("x", b"other")
        assert time.perf_counter() - started_s >= 0.1 * latency_of("x", 3)
        assert slow.put_if_absent("z", b"new")
        assert slow.puts == len(slow.late_s) == len(slow.server_s) == 5
        assert min(slow.late_s) >= 0
