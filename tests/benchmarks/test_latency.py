"""The latency benchmark: events that come when they are due, and the figures of the batches. No Spark here."""

from __future__ import annotations

import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks import latency
from benchmarks.frame import Unavailable
from benchmarks.latency import AGGREGATION, SPARK, STATELOG, KafkaRecords, KafkaSender, SocketLines, SocketSender

RATE = 200.0
SETTINGS = latency.Settings(rate=RATE, warm_up=1, seconds=4)
STARTED_S = 1_000.0


def batches(*committed: tuple[int, float]) -> dict[str, Any]:
    """A round whose batches end with these events, and are committed so many seconds after the start."""
    firsts = [0, *(end for end, _ in committed)]
    made = [
        {"first": first, "end": end, "committed_s": STARTED_S + at_s, "duration_ms": 100}
        for first, (end, at_s) in zip(firsts, committed, strict=False)
    ]
    return {"batches": made, "started_s": STARTED_S, "stopped_s": STARTED_S + 9, "latest_s": 0.003}


def steady(batch_s: float, events_per_batch: int, delay_s: float = 0.5) -> dict[str, Any]:
    """A round of equal batches until all events are committed."""
    count = -(-SETTINGS.events // events_per_batch)
    return batches(
        *(
            (min(SETTINGS.events, number * events_per_batch), number * batch_s + delay_s)
            for number in range(1, count + 1)
        )
    )


class TestFigures:
    def test_an_event_waits_from_when_it_was_due_until_its_batch_is_committed(self) -> None:
        source = random.Random(3)
        ends = [*sorted(source.sample(range(1, SETTINGS.events), 30)), SETTINGS.events]
        committed = [(end, end / RATE + source.random()) for end in ends]

        figures = latency.figures_of([batches(*committed)], SETTINGS)

        waited = []
        for event in range(200, 1000):
            [(_, at_s), *_] = [each for each in committed if each[0] > event]
            waited.append(1000 * (at_s - event / RATE))
        waited.sort()
        # By nearest rank, of 800.
        assert figures["latency_ms"] == {
            "p50": pytest.approx(waited[399]),
            "p90": pytest.approx(waited[719]),
            "p99": pytest.approx(waited[791]),
            "max": pytest.approx(waited[-1]),
        }
        assert figures["events"] == 800
        assert figures["not_committed"] == 0

    def test_a_side_that_commits_at_the_rate_keeps_up(self) -> None:
        figures = latency.figures_of([steady(batch_s=0.5, events_per_batch=100)], SETTINGS)

        assert figures["events_per_s_by_round"] == [pytest.approx(RATE)]
        assert figures["keeps_up"]
        assert not figures["catches_up"]
        # The batch that was due half a second ago, and events since.
        assert figures["backlog_by_round"] == [100]

    def test_a_side_that_falls_behind_in_one_round_does_not_keep_up(self) -> None:
        slow = steady(batch_s=0.6, events_per_batch=100)

        figures = latency.figures_of([steady(batch_s=0.5, events_per_batch=100), slow], SETTINGS)

        assert figures["events_per_s_by_round"] == [pytest.approx(RATE), pytest.approx(100 / 0.6)]
        assert not figures["keeps_up"]
        assert figures["not_committed"] == 0

    def test_a_side_that_commits_more_than_the_rate_works_off_its_start(self) -> None:
        figures = latency.figures_of([steady(batch_s=0.4, events_per_batch=100, delay_s=1.5)], SETTINGS)

        assert figures["events_per_s_by_round"] == [pytest.approx(250)]
        assert figures["keeps_up"]
        assert figures["catches_up"]

    def test_events_that_are_never_committed_count_with_what_they_waited(self) -> None:
        figures = latency.figures_of([batches((300, 4.0))], SETTINGS)

        assert figures["not_committed"] == 700
        assert figures["latency_ms"]["max"] == pytest.approx(1000 * (9 - 300 / RATE))
        assert figures["events_per_s_by_round"] == [0]
        assert not figures["keeps_up"]

    def test_few_events_have_no_p99(self) -> None:
        settings = latency.Settings(rate=RATE, warm_up=3.6, seconds=1.4)

        figures = latency.figures_of([steady(batch_s=0.5, events_per_batch=100)], settings)

        assert figures["events"] == 280
        assert figures["latency_ms"]["p99"] is None


class TestRun:
    def run(self, monkeypatch: pytest.MonkeyPatch, directory: Path, **options: Any) -> Any:
        """Run it on sides that read the events, and commit all at a time that depends on the side."""
        late_s = {STATELOG: 0.25, SPARK: 4, AGGREGATION: 0.125}

        def in_child(call: Any, directory: Path) -> dict[str, Any]:
            side = call.func.__self__
            with (
                socket.create_connection(side.lines.address) as connection,
                connection.makefile() as lines,
            ):
                commits = directory / "checkpoint" / "commits"
                commits.mkdir(parents=True)
                (commits / "0").touch()
                begun_s = time.time()
                events = [int(next(lines)) for _ in range(side.events)]
            assert events == list(range(side.events))
            committed_s = begun_s + side.events / 1000 + late_s[side.side]
            batch = {"first": 0, "end": side.events, "committed_s": committed_s, "duration_ms": 10}
            return {"batches": [batch], "stopped_s": committed_s}

        monkeypatch.setattr(latency, "run_in_child", in_child)
        asked = {"rate": 1000.0, "seconds": 0.4, "warm_up": 0.1, "rounds": 2}
        return latency.run(latency.Settings(**{**asked, **options}), directory)

    def test_all_sides_get_the_same_events(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        result = self.run(monkeypatch, tmp_path)

        sides = result.figures["sides"]
        assert {side: each["events"] for side, each in sides.items()} == dict.fromkeys(sides, 2 * 400)
        for each in sides.values():
            for one, figures in zip(each["by_round"], each["latency_ms_by_round"], strict=True):
                [batch] = one["batches"]
                # The events 100 to 499 are measured; by nearest rank, half of them waited as long as event 300 or less.
                assert figures["p50"] == pytest.approx(1000 * (batch["committed_s"] - one["started_s"]) - 300)
        slow, fast = (sides[side]["latency_ms_by_round"] for side in (SPARK, STATELOG))
        ratios = [one["p50"] / other["p50"] for one, other in zip(fast, slow, strict=True)]
        assert result.figures["statelog_to"][SPARK]["p50"] == pytest.approx(sum(ratios) / 2)
        assert result.figures["statelog_to"][SPARK]["p50"] < 0.5
        assert [row["keeps up"] for row in result.rows] == ["NO"] * 3

    def test_no_event_at_all_is_refused(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        with pytest.raises(click.UsageError, match=r"In 0.1 s there is no event at 1 per second."):
            self.run(monkeypatch, tmp_path, rate=1.0, seconds=0.1)


class TestSender:
    def test_sends_every_event_once_and_none_before_it_is_due(self) -> None:
        arrived: dict[int, float] = {}
        with (
            SocketSender(500, 250, lambda: True) as sender,
            socket.create_connection(sender.lines.address) as connection,
            connection.makefile() as lines,
        ):
            for _ in range(250):
                event = int(next(lines))
                arrived[event] = time.time()

        assert list(arrived) == list(range(250))
        assert all(at_s >= sender.started_s + event / 500 for event, at_s in arrived.items())
        assert arrived[249] - sender.started_s < 30
        assert sender.latest_s <= arrived[249] - sender.started_s

    def test_sends_nothing_before_the_reader_is_ready(self) -> None:
        is_ready = threading.Event()
        with (
            SocketSender(1000, 10, is_ready.is_set) as sender,
            socket.create_connection(sender.lines.address) as connection,
            connection.makefile() as lines,
        ):
            connection.settimeout(0.2)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            connection.settimeout(None)
            ready_s = time.time()
            is_ready.set()
            assert next(lines) == "0\n"

        assert sender.started_s >= ready_s

    def test_ends_when_nobody_comes_and_when_the_reader_goes(self) -> None:
        with SocketSender(10, 10, lambda: True) as lonely:
            pass
        with SocketSender(1_000_000, 10_000_000, lambda: True) as left:
            socket.create_connection(left.lines.address).close()

        with pytest.raises(RuntimeError, match="nobody has read"):
            _ = lonely.started_s

    def test_records_have_the_numbers_of_the_events_as_offsets(self) -> None:
        kafka = pytest.importorskip("confluent_kafka", reason="./dev kafka installs it")
        try:
            made = KafkaSender(1_000, 300, lambda: True)
        except Unavailable as error:
            pytest.skip(error.message)
        with made as sender:
            settings = {"bootstrap.servers": sender.lines.broker, "group.id": "test"}
            consumer = kafka.Consumer(settings)
            consumer.assign([kafka.TopicPartition(sender.lines.topic, 0, 0)])
            read: list[Any] = []
            while len(read) < 300:
                read += consumer.consume(300, 1.0)
            consumer.close()

        assert [(each.offset(), each.value()) for each in read] == [(event, b"%d" % event) for event in range(300)]


def test_offsets_tell_how_many_events_there_are() -> None:
    assert [SocketLines(("127.0.0.1", 1)).events_to(offset) for offset in (None, "0", 41)] == [0, 1, 42]
    assert [KafkaRecords("b", "t").events_to(offset) for offset in (None, {"t": {"0": 42}})] == [0, 42]
