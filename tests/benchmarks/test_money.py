"""The bill: requests of a store and of a file system, the line through them, and prices. No Spark here."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks import money
from benchmarks.money import LOGS, SPARK, STATELOG, MoneySide, bill
from benchmarks.requests import GET, LIST, PUT, CountingStore, Seen, count, noted, watched
from statelog.storage import Store
from statelog.testing.contracts import StoreContract


class TestCountingStoreContract(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        notes = tmp_path / "notes"
        notes.mkdir()
        return CountingStore(str(tmp_path / "store"), str(notes))


class TestCountingStore:
    def test_notes_what_a_bucket_would_charge(self, tmp_path: Path) -> None:
        (tmp_path / "notes").mkdir()
        store = CountingStore(str(tmp_path / "store"), str(tmp_path / "notes"))
        store.put("a", b"123")
        assert store.put_if_absent("b", b"1")
        assert not store.put_if_absent("b", b"2")
        store.read("a")
        store.read_into(memoryview(bytearray(2)), "a", offset=1)
        store.size_bytes("a")
        store.list()
        store.delete(["a"])
        store.remove_unfinished("folder/", 0)

        assert not store.can_append
        assert count(noted(tmp_path / "notes"), 0, time.time() + 1) == {"": {PUT: 3, GET: 3, LIST: 1}}

    def test_a_request_lists_a_thousand_names(self, tmp_path: Path) -> None:
        (tmp_path / "notes").mkdir()
        store = CountingStore(str(tmp_path / "store"), str(tmp_path / "notes"))
        for number in range(1_001):
            (tmp_path / "store" / f"{number}").parent.mkdir(exist_ok=True)
            (tmp_path / "store" / f"{number}").touch()

        assert len(store.list()) == 1_001

        assert count(noted(tmp_path / "notes"), 0, time.time() + 1) == {"": {LIST: 2}}


class TestWatched:
    def test_counts_what_other_code_does_with_files(self, tmp_path: Path) -> None:
        folder = tmp_path / "state" / "0"
        folder.mkdir(parents=True)
        (tmp_path / "commits").mkdir()
        with watched(tmp_path) as seen:
            (folder / ".1.tmp").write_bytes(b"1")
            (folder / ".1.tmp").rename(folder / "1.changelog")
            (folder / ".1.changelog.crc").write_bytes(b"1")
            (folder / "1.changelog").read_bytes()
            (tmp_path / "commits" / "0").write_bytes(b"1")
            list(folder.iterdir())
            (folder / "1.changelog").unlink()
            until(lambda: len(seen) >= 4)

        assert count(seen, 0, time.time() + 1) == {"state": {PUT: 1, GET: 1, LIST: 1}, "commits": {PUT: 1}}

    def test_folders_that_are_made_meanwhile_are_watched_too(self, tmp_path: Path) -> None:
        with watched(tmp_path) as seen:
            (tmp_path / "state" / "0" / "SSTs").mkdir(parents=True)
            (tmp_path / "state" / "0" / "SSTs" / "1.sst").write_bytes(b"1")
            until(lambda: len(seen) == 1)
            (tmp_path / "state" / "0" / "SSTs" / "2.sst").write_bytes(b"1")
            until(lambda: len(seen) == 2)

        assert [(kind, folder) for _, kind, folder in seen] == [(PUT, "state")] * 2

    def test_only_requests_of_the_time_count(self) -> None:
        seen: list[Seen] = [(at_s, PUT, "state") for at_s in (1.0, 2.0, 3.0, 4.0)]

        assert count(seen, 2.0, 4.0) == {"state": {PUT: 2}}


def until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def side(name: str, partitions: int, trigger_s: float = 1.0, operators: int = 1) -> MoneySide:
    return MoneySide(
        side=name,
        operators=operators,
        parallelism=partitions,
        keys=100,
        skew="uniform",
        rows_per_batch=1,
        batches=70,
        warm_up=10,
        batch_s=0.5,
        trigger_s=trigger_s,
    )


def run_of(each: MoneySide, place: Path | None = None) -> dict[str, Any]:
    """Spark's side writes a file per partition and batch, statelog's one per batch and one per subtask and minute."""
    batches = each.batches - each.warm_up
    subtasks = each.parallelism * each.operators
    puts = batches * each.parallelism if each.side == SPARK else batches + subtasks * batches // 60
    return {
        "state": {PUT: puts, LIST: each.parallelism},
        "logs": {PUT: 2 * batches, GET: 60},
        "batches": batches,
        "took_s": batches * each.batch_s,
        "bytes": 1_000_000 * each.parallelism,
    }


class TestBill:
    def test_is_on_the_line_through_what_was_measured(self) -> None:
        runs = [(each, run_of(each)) for each in (side(SPARK, 2), side(SPARK, 8), side(STATELOG, 2), side(STATELOG, 8))]

        found = bill(SPARK, runs, 200)

        assert found["requests_a_batch"] == pytest.approx({PUT: 200, LIST: 200 / 60, GET: 0}, abs=1e-9)
        assert found["requests_a_day"][PUT] == pytest.approx(200 * 86_400)
        # A million requests cost 5 dollars; 8 MB for a month 0.000184.
        dollars = (200 + 200 / 60) * 86_400 / 1e6 * 5 + 0.008 * 0.023 / 30
        assert found["dollars_a_day"] == pytest.approx(dollars)
        assert not found["is_measured"]
        statelog = bill(STATELOG, runs, 8)
        assert statelog["requests_a_batch"][PUT] == pytest.approx(1 + 8 / 60)
        assert statelog["is_measured"]

    def test_of_more_operators_is_their_own(self) -> None:
        """A batch is one object with any number of operators; they only have more to materialize."""
        sides = [side(STATELOG, partitions, operators=operators) for partitions in (2, 8) for operators in (1, 5)]
        runs = [(each, run_of(each)) for each in sides]

        found = {operators: bill(STATELOG, runs, 200, operators) for operators in (1, 5)}

        assert {operators: each["operators"] for operators, each in found.items()} == {1: 1, 5: 5}
        assert found[1]["requests_a_batch"][PUT] == pytest.approx(1 + 200 / 60)
        assert found[5]["requests_a_batch"][PUT] == pytest.approx(1 + 5 * 200 / 60)

    def test_of_sparks_own_logs(self) -> None:
        runs = [(each, run_of(each)) for each in (side(STATELOG, 2, 10.0), side(STATELOG, 4, 10.0))]

        found = bill(LOGS, runs, 200)

        assert found["requests_a_day"] == pytest.approx({PUT: 17_280, LIST: 0, GET: 8_640}, abs=1e-6)
        assert found["dollars_a_day"] == pytest.approx(17_280 * 5e-6 + 8_640 * 4e-7)

    def test_more_partitions_never_make_fewer_requests(self) -> None:
        one, other = ({**run_of(side(SPARK, 2)), "state": {LIST: number}} for number in (130, 120))

        found = bill(SPARK, [(side(SPARK, 2), one), (side(SPARK, 8), other)], 200)

        assert found["requests_a_batch"][LIST] == pytest.approx(125 / one["batches"])
        assert found["requests_a_batch"][PUT] == 0

    def test_is_never_below_nothing(self) -> None:
        one, other = ({**run_of(side(SPARK, 2)), "state": {LIST: number}} for number in (100, 500))

        assert bill(SPARK, [(side(SPARK, 2), one), (side(SPARK, 8), other)], 1)["requests_a_batch"][LIST] > 0
        assert bill(SPARK, [(side(SPARK, 4), one), (side(SPARK, 8), other)], 2)["requests_a_batch"][LIST] == 0


class TestRun:
    def test_time_runs_faster_for_all_intervals(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        asked: list[MoneySide] = []

        def run(each: MoneySide, place: Path) -> dict[str, Any]:
            asked.append(each)
            return run_of(each)

        monkeypatch.setattr(MoneySide, "run", run)
        result = money.run(money.Settings(), tmp_path)

        # Two intervals: of a minute for Spark, or the 60 batches at least in which it deletes; of ten for statelog.
        assert [
            (each.side, each.trigger_s, each.parallelism, each.speed, each.batches, each.rows_per_batch)
            for each in asked
        ] == [
            (STATELOG, 1, 2, 2, 1_330, 1_000),
            (SPARK, 1, 2, 2, 250, 1_000),
            (STATELOG, 1, 8, 2, 1_330, 1_000),
            (SPARK, 1, 8, 2, 250, 1_000),
            (STATELOG, 10, 2, 20, 250, 10_000),
            (SPARK, 10, 2, 20, 190, 10_000),
            (STATELOG, 10, 8, 20, 250, 10_000),
            (SPARK, 10, 8, 20, 190, 10_000),
        ]
        assert [(row["partitions"], row["trigger"], row["requests of"]) for row in result.rows] == [
            (shown, trigger, owner)
            for shown in ("2", "200 (by the line)")
            for trigger in ("1 s", "10 s")
            for owner in (SPARK, STATELOG, LOGS)
        ]
        assert result.rows[6]["PUT a day"] == "17,280,000"
        assert not any("too slow" in line for line in result.remarks)

    def test_spark_has_one_operator(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(MoneySide, "run", run_of)
        result = money.run(money.Settings(operators=(1, 5), trigger_s=(10.0,), priced_partitions=(2,)), tmp_path)

        assert [
            (one["side"], one["operators"], one["parallelism"], one["state"][PUT]) for one in result.figures["measured"]
        ] == [
            (STATELOG, 1, 2, 124),
            (STATELOG, 5, 2, 140),
            (SPARK, 1, 2, 120),
            (STATELOG, 1, 8, 136),
            (STATELOG, 5, 8, 200),
            (SPARK, 1, 8, 480),
        ]
        assert [row["requests of"] for row in result.rows] == [SPARK, STATELOG, f"{STATELOG}, 5 operators", LOGS]

    def test_a_slow_machine_is_named(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(MoneySide, "run", lambda each, place: {**run_of(each), "took_s": 1e6})

        assert any("too slow" in line for line in money.run(money.Settings(quick=True), tmp_path).remarks)

    def test_a_line_needs_two_points(self, tmp_path: Path) -> None:
        with pytest.raises(click.UsageError, match="two numbers"):
            money.run(money.Settings(partitions=(2, 2)), tmp_path)
