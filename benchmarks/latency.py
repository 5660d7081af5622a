"""How long from an event until its result is committed: the same count at a constant rate of events."""

from __future__ import annotations

import socket
import statistics
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import click
import numpy as np
import numpy.typing as npt
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import statelog
from benchmarks.child import run_in_child
from benchmarks.figures import median_ratio, percentiles, summary
from benchmarks.frame import POSITIVE, POSSIBLE_KEYS, Result, Unavailable, alternate, option
from benchmarks.processors import OUTPUT, Count
from benchmarks.query import (
    Side,
    begun_s,
    count_checks,
    expected_counts,
    last_progress,
    require,
    start,
    stop_when,
)
from benchmarks.skew import SKEW_HELP, SKEWS, UNIFORM, ZIPF, skewed_key

STATELOG: Final = "statelog"
SPARK: Final = "Spark transformWithState"
AGGREGATION: Final = "Spark aggregation in the JVM"

_PERCENTILES: Final = ("p50", "p90", "p99")
_MIN_THROUGHPUT: Final = 0.95
"""A side keeps up if it commits at least this share of the rate: it commits whole batches, so not exactly the rate."""
_MAX_THROUGHPUT: Final = 1.05
"""A side that commits more than this share of the rate still works off what has come while it started."""
_START_S: Final = 120
"""The longest time for a query to start."""

_TICK_S: Final = 0.002
_POLL_S: Final = 0.05

_Round = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    source: str = option("socket", "Where events come from.", click.Choice(["socket", "kafka"]))
    rate: float = option(5_000.0, "Events per second.", POSITIVE)
    keys: int = option(100_000, "Number of possible keys.", POSSIBLE_KEYS)
    skew: str = option(UNIFORM, SKEW_HELP, SKEWS)
    seconds: float = option(60.0, "Events of so many seconds are measured.", POSITIVE)
    warm_up: float = option(60.0, "First seconds to leave out.", click.FloatRange(0))
    drain: float = option(
        120.0, "Seconds to wait after the last event for those that are not committed.", click.FloatRange(0)
    )
    parallelism: int = option(2, "Subtasks, state partitions and cores.")
    rounds: int = option(1, "How often every side runs.")

    @property
    def first(self) -> int:
        """The first event that is measured."""
        return round(self.rate * self.warm_up)

    @property
    def events(self) -> int:
        """How many there are."""
        return round(self.rate * self.length_s)

    @property
    def length_s(self) -> float:
        """From the first event to the last."""
        return self.warm_up + self.seconds


QUICK: Final = [
    Settings(source=source, skew=ZIPF, rate=500.0, keys=1_000, seconds=3.0, warm_up=1.0)
    for source in ("socket", "kafka")
]


@dataclass(frozen=True)
class SocketLines:
    """The events as lines of a socket. Spark's source is in the JVM, has a line at once, and knows a batch's lines."""

    address: tuple[str, int]

    @property
    def settings(self) -> dict[str, str]:
        """What a session needs."""
        return {}

    def read(self, session: SparkSession, parallelism: int) -> DataFrame:
        """The events, with a `value` that can be cast to the number."""
        host, port = self.address
        return session.readStream.format("socket").option("host", host).option("port", port).load()

    def events_to(self, offset: Any) -> int:
        """How many events there are up to an offset: Spark's is the number of the last line, or nothing."""
        return 0 if offset is None else int(offset) + 1


@dataclass(frozen=True)
class KafkaRecords:
    """The events as records of one partition of a topic, whose offsets are the events' numbers."""

    broker: str
    topic: str = "events"

    @property
    def settings(self) -> dict[str, str]:
        """What a session needs."""
        from tests.jars import KAFKA, spark_jars

        return spark_jars(KAFKA)

    def read(self, session: SparkSession, parallelism: int) -> DataFrame:
        """The events, with a `value` that can be cast to the number, in a task per core."""
        options = {"kafka.bootstrap.servers": self.broker, "subscribe": self.topic, "startingOffsets": "earliest"}
        records = session.readStream.format("kafka").options(**options).option("minPartitions", parallelism).load()
        return records.select(F.col("value").cast("string").alias("value"))

    def events_to(self, offset: Any) -> int:
        """How many events there are up to an offset: Spark's has the next record of each partition, or is nothing."""
        if offset is None:
            return 0
        events: int = offset[self.topic]["0"]
        return events


class EventSender(ABC):
    """Sends event N, the number N, N / rate seconds after `is_ready` says so; in a thread. A context manager."""

    lines: SocketLines | KafkaRecords
    """Where a query reads the events."""

    def __init__(self, rate: float, events: int, is_ready: Callable[[], bool]) -> None:
        self._rate = rate
        self._events = events
        self._is_ready = is_ready
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._started_s: float | None = None
        self.latest_s = 0.0
        """By how much an event was sent later than it was due, at most."""

    @property
    def started_s(self) -> float:
        """When event 0 was due, seconds since the Unix epoch; RuntimeError if nobody has read any events."""
        if self._started_s is None:
            raise RuntimeError("nobody has read any events")
        return self._started_s

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @abstractmethod
    def _serve(self) -> None:
        """Send all events, and stay until it is over."""

    def _send(self, write: Callable[[range], object]) -> None:
        while not self._is_over.is_set() and not self._is_ready():
            self._is_over.wait(_POLL_S)
        if self._is_over.is_set():
            return
        # By the clock that commits are told by, not by a monotonic one.
        started_s = self._started_s = time.time()
        sent = 0
        while sent < self._events and not self._is_over.is_set():
            due = min(self._events, int((time.time() - started_s) * self._rate) + 1)
            if due > sent:
                write(range(sent, due))
                self.latest_s = max(self.latest_s, time.time() - started_s - sent / self._rate)
                sent = due
            self._is_over.wait(_TICK_S)


class SocketSender(EventSender):
    """Sends events to the first one who connects."""

    lines: SocketLines

    def __init__(self, rate: float, events: int, is_ready: Callable[[], bool]) -> None:
        super().__init__(rate, events, is_ready)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.lines = SocketLines(self._server.getsockname())

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        # Closing a socket does not wake up a thread that waits for a connection to it.
        with socket.socket() as own:
            own.connect_ex(self.lines.address)
        super().__exit__(*exception)
        self._server.close()

    def _serve(self) -> None:
        connection, _ = self._server.accept()
        with connection, suppress(OSError):  # the reader has gone
            self._send(lambda numbers: connection.sendall(b"".join(b"%d\n" % number for number in numbers)))
            self._is_over.wait()


class KafkaSender(EventSender):
    """Sends events to a new broker."""

    lines: KafkaRecords

    def __init__(self, rate: float, events: int, is_ready: Callable[[], bool]) -> None:
        # Not at the top: only this source needs a broker and its client.
        from tests.jars import KAFKA, missing_server

        if missing := missing_server(KAFKA):
            raise Unavailable(f"no Kafka ({missing}); ./dev kafka installs it")
        from confluent_kafka import Producer
        from confluent_kafka.admin import AdminClient, NewTopic

        from tests.kafka.broker import KafkaBroker

        super().__init__(rate, events, is_ready)
        with ExitStack() as servers:
            self.lines = KafkaRecords(servers.enter_context(KafkaBroker()).address)
            settings = {"bootstrap.servers": self.lines.broker}
            admin = AdminClient(settings)
            [made] = admin.create_topics([NewTopic(self.lines.topic, 1, 1)]).values()
            made.result()
            self._servers = servers.pop_all()
        # A record in doubt is sent again, once: else offsets would not be the events' numbers.
        self._producer = Producer({**settings, "enable.idempotence": True, "queue.buffering.max.messages": 10_000_000})

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._servers.close()

    def _serve(self) -> None:
        self._send(self._write)
        self._producer.flush()

    def _write(self, numbers: range) -> None:
        for number in numbers:
            self._producer.produce(self.lines.topic, b"%d" % number)
        self._producer.poll(0)


_SENDERS: Final = {"socket": SocketSender, "kafka": KafkaSender}


@dataclass(frozen=True, kw_only=True)
class LatencySide(Side):
    """Counts events by key until all are committed, or it takes too long."""

    events: int
    keys: int
    skew: str
    timeout_s: float
    lines: SocketLines | KafkaRecords

    def measure(self, directory: Path) -> _Round:
        """For each batch its first event, the one after its last, and when it was committed; and the time of the end.

        The output of every batch is checked.
        """
        session = self.session(directory, self.lines.settings)
        events = self.lines.read(session, self.parallelism)
        rows = events.select(skewed_key(self.keys, F.col("value").cast("long"), self.skew))
        if self.side == AGGREGATION:
            output = rows.groupBy("key").agg(F.count(F.lit(1)).alias("n"))
        else:
            output = self.transform(rows, Count(), OUTPUT, statelog.Options())
        stopped_s = 0.0

        def is_over(query: StreamingQuery) -> bool:
            nonlocal stopped_s
            stopped_s = time.time()
            last = last_progress(query)
            is_late = time.monotonic() > end_s
            return is_late or (bool(last) and self._events_to(last, "endOffset") >= self.events)

        end_s = time.monotonic() + self.timeout_s
        # Spark also tells that there was nothing to do, and observes nothing then.
        query = start(output, count_checks(), directory)
        progress = [entry for entry in stop_when(query, is_over) if entry["observedMetrics"]]
        ranges = [(self._events_to(entry, "startOffset"), self._events_to(entry, "endOffset")) for entry in progress]
        counted = [entry["numInputRows"] for entry in progress]
        if counted != [end - first for first, end in ranges]:
            raise RuntimeError(f"{self.side}: the batches read {counted} rows, of the lines {ranges}")
        require(self.side, progress, expected_counts(session, ranges, self.keys, self.skew))
        session.stop()
        return {"batches": [_batch(*each) for each in zip(progress, ranges, strict=True)], "stopped_s": stopped_s}

    def _events_to(self, entry: dict[str, Any], name: str) -> int:
        [source] = entry["sources"]
        return self.lines.events_to(source[name])


def _batch(entry: dict[str, Any], events: tuple[int, int]) -> dict[str, Any]:
    took_ms = entry["durationMs"]["triggerExecution"]
    # The last thing that a trigger does is to commit its batch.
    committed_s = begun_s(entry) + took_ms / 1000
    return {"first": events[0], "end": events[1], "committed_s": committed_s, "duration_ms": took_ms}


def run(settings: Settings, place: Path) -> Result:
    if settings.events == settings.first:
        raise click.UsageError(f"In {settings.seconds:g} s there is no event at {settings.rate:g} per second.")
    sides = {name: partial(_run_side, name, settings, place) for name in (STATELOG, SPARK, AGGREGATION)}
    figures = {name: figures_of(each, settings) for name, each in alternate(sides, settings.rounds).items()}
    ratios = {name: _ratios(figures[STATELOG], figures[name]) for name in (SPARK, AGGREGATION)}
    return Result(
        figures={"sides": figures, "statelog_to": ratios},
        targets=[],
        rows=[_row(name, each) for name, each in figures.items()],
        remarks=_remarks(settings, figures, ratios),
    )


def _run_side(name: str, settings: Settings, place: Path) -> _Round:
    directory = Path(tempfile.mkdtemp(dir=place))
    # A new query runs a batch without events first, in which most of what it needs is started.
    is_ready = (directory / "checkpoint" / "commits" / "0").exists
    timeout_s = _START_S + settings.length_s + settings.drain
    with _SENDERS[settings.source](settings.rate, settings.events, is_ready) as sender:
        side = LatencySide.of(settings, side=name, events=settings.events, timeout_s=timeout_s, lines=sender.lines)
        measured = run_in_child(partial(side.measure, directory), directory)
    return {**measured, "started_s": sender.started_s, "latest_s": sender.latest_s}


def figures_of(rounds: Sequence[_Round], settings: Settings) -> dict[str, Any]:
    """Figures of a side over all rounds and by round; with fewer than 300 events there is no ``p99``.

    A round is what :meth:`LatencySide.measure` returned, with the sender's ``started_s`` and ``latest_s``.
    """
    latencies = [_latencies_ms(one, settings) for one in rounds]
    throughputs = [_throughput(one, settings) for one in rounds]
    # Of the batches with events that are measured.
    durations = [batch["duration_ms"] for one in rounds for batch in one["batches"] if batch["end"] > settings.first]
    return {
        "events": sum(map(len, latencies)),
        "latency_ms": _percentiles(np.concatenate(latencies)),
        "latency_ms_by_round": [_percentiles(one) for one in latencies],
        "not_committed": sum(_missing(one, settings) for one in rounds),
        "batch_ms": summary(durations) if durations else None,
        "events_per_s_by_round": throughputs,
        "keeps_up": all(one >= _MIN_THROUGHPUT * settings.rate for one in throughputs),
        "catches_up": any(one > _MAX_THROUGHPUT * settings.rate for one in throughputs),
        # Events that were not committed when the last one came in.
        "backlog_by_round": [_missing(one, settings, one["started_s"] + settings.length_s) for one in rounds],
        "sent_late_s": max(one["latest_s"] for one in rounds),
        "by_round": list(rounds),
    }


def _latencies_ms(one: _Round, settings: Settings) -> npt.NDArray[np.float64]:
    """Of each measured event; of one that was not committed, how long it had waited at the end."""
    events = np.arange(settings.first, settings.events)
    ends = np.array([batch["end"] for batch in one["batches"]], np.int64)
    committed_s = np.array([*(batch["committed_s"] for batch in one["batches"]), one["stopped_s"]])
    waited_s: npt.NDArray[np.float64] = committed_s[np.searchsorted(ends, events, side="right")] - one["started_s"]
    return 1000 * (waited_s - events / settings.rate)


def _percentiles(latencies_ms: npt.NDArray[np.float64]) -> dict[str, float | None]:
    samples = latencies_ms.tolist()
    return {**dict.fromkeys(_PERCENTILES), **percentiles(samples, _PERCENTILES), "max": max(samples)}


def _missing(one: _Round, settings: Settings, until_s: float = np.inf) -> int:
    """How many events were not committed until some time."""
    committed = [batch["end"] for batch in one["batches"] if batch["committed_s"] <= until_s]
    return settings.events - max(committed, default=0)


def _throughput(one: _Round, settings: Settings) -> float:
    """Events committed per second while the measured ones came in; 0 if there were not two commits meanwhile."""
    begin_s = one["started_s"] + settings.warm_up
    meanwhile = [batch for batch in one["batches"] if begin_s <= batch["committed_s"] <= begin_s + settings.seconds]
    if len(meanwhile) < 2:
        return 0.0
    first, *_, last = meanwhile
    rate: float = (last["end"] - first["end"]) / (last["committed_s"] - first["committed_s"])
    return rate


def _ratios(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float | None]:
    """Percentiles of one side divided by those of another: medians of the rounds' ratios."""
    first, second = one["latency_ms_by_round"], other["latency_ms_by_round"]
    return {
        name: None if first[0][name] is None else median_ratio(*((each[name] for each in of) for of in (first, second)))
        for name in _PERCENTILES
    }


def _row(name: str, figures: dict[str, Any]) -> dict[str, str]:
    batches = figures["batch_ms"]
    at_least = "> " if figures["not_committed"] else ""
    return {
        "side": name,
        "keeps up": "yes" if figures["keeps_up"] else "NO",
        "events/s": f"{statistics.median(figures['events_per_s_by_round']):,.0f}",
        "batches": f"{batches['samples']}" if batches else "0",
        "batch ms": f"{batches['median']:,.0f}" if batches else "",
        **{
            f"{each} ms": "" if value is None else f"{at_least}{value:,.0f}"
            for each, value in figures["latency_ms"].items()
        },
    }


def _remarks(settings: Settings, figures: dict[str, Any], ratios: dict[str, dict[str, float | None]]) -> list[str]:
    late = ", ".join(f"{1000 * each['sent_late_s']:,.0f} ms ({name})" for name, each in figures.items())
    lines = [
        f"{settings.rate:,.0f} events/s, {settings.keys:,} possible keys. Those of the first {settings.warm_up:g} s"
        f" are left out. Every batch's output was checked. Events were sent late, which counts, by up to {late}.",
    ]
    for name, each in figures.items():
        if not each["keeps_up"]:
            lines.append(
                f"{name} does not keep up: it committed {min(each['events_per_s_by_round']):,.0f} of"
                f" {settings.rate:,.0f} events/s, and lacked {max(each['backlog_by_round']):,} when the last one came."
            )
        if each["catches_up"]:
            lines.append(
                f"{name} still worked off what had come while it started: it committed up to"
                f" {max(each['events_per_s_by_round']):,.0f} events/s. Give a longer --warm-up."
            )
        if each["not_committed"]:
            lines.append(f"{name}: {each['not_committed']:,} events were not committed when the run ended.")
    for name, values in ratios.items():
        shown = ", ".join(f"{percentile} {value:.2f}" for percentile, value in values.items() if value is not None)
        lines.append(f"statelog / {name}: {shown}")
    return lines
