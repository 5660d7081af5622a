"""The query that is harmed, and what it must return: computed once more in plain Python, without Spark and statelog."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

import statelog

UID: Final = "totals"
ROWS: Final = 200
"""Rows of each batch."""
TOPIC: Final = "numbers"
"""Has them, in one partition, if there is a broker."""
COLUMNS: Final = "k long, n long, total long, batches long, closed boolean"

Answer = list[list[Any]]

_START_S: Final = 1_700_000_000
_DELAY_MS: Final = 4000
_GAP_MS: Final = 5000
# Ten keys have rows for eight batches, then those of the next group: their timers are due before they have rows again.
_GROUPS: Final = 5
_GROUP_ROWS: Final = 8 * ROWS
_KEYS: Final = 10
_JITTER: Final = 7919
_JITTER_MS: Final = 3000


def make_query(session: SparkSession, location: str, parallelism: int, broker: str) -> DataFrame:
    """Totals per key, which end when the key has had no rows for a while; the rows are a broker's, if there is one."""
    numbers = _records(session, broker) if broker else _numbers(session)
    rows = numbers.selectExpr(
        "value",
        f"((value div {_GROUP_ROWS}) % {_GROUPS}) * {_KEYS} + value % {_KEYS} AS k",
        f"({_START_S} + value div {ROWS}) * 1000 - (value * {_JITTER}) % {_JITTER_MS} AS ms",
    )
    timed = rows.selectExpr("*", "timestamp_millis(ms) AS at").withWatermark("at", f"{_DELAY_MS} milliseconds")
    # Workers write each batch's changes to the store themselves, however few they are.
    options = statelog.Options(inline_budget_bytes=0)
    keyed = statelog.key_by(timed, "k", uid=UID, location=location, parallelism=parallelism, options=options)
    return keyed.transformWithState(Totals(), COLUMNS, "update", "EventTime")


def _numbers(session: SparkSession) -> DataFrame:
    """The numbers from 0 on."""
    stream = session.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).option("numPartitions", 2)
    return stream.option("startTimestamp", _START_S * 1000).load()


def _records(session: SparkSession, broker: str) -> DataFrame:
    """The same, in the same batches, from a topic."""
    options = {
        "kafka.bootstrap.servers": broker,
        "subscribe": TOPIC,
        "startingOffsets": "earliest",
        "minPartitions": "2",
        "minOffsetsPerTrigger": str(ROWS),
        "maxOffsetsPerTrigger": str(ROWS),
    }
    return (
        session.readStream.format("kafka")
        .options(**options)
        .load()
        .selectExpr("CAST(CAST(value AS STRING) AS LONG) AS value")
    )


class Totals(StatefulProcessor):
    """Keeps a value, a list and a timer per key."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._sum = handle.getValueState("sum", "n long, total long, latest long")
        self._history = handle.getListState("history", "total long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        read = [(row.value, row.ms) for row in rows]
        n, total, latest = self._sum.get() or (0, 0, 0)
        if latest:
            self._handle.deleteTimer(latest + _GAP_MS)
        latest = max(latest, *(ms for _, ms in read))
        n, total = n + len(read), total + sum(value for value, _ in read)
        self._sum.update((n, total, latest))
        self._history.appendValue((total,))
        self._handle.registerTimer(latest + _GAP_MS)
        yield self._answer(key, n, total, closed=False)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        n, total, _ = self._sum.get()
        yield self._answer(key, n, total, closed=True)
        self._sum.clear()
        self._history.clear()

    def _answer(self, key: Any, n: int, total: int, *, closed: bool) -> Row:
        return Row(k=key[0], n=n, total=total, batches=sum(1 for _ in self._history.get()), closed=closed)

    def close(self) -> None:
        pass


@dataclass
class _Key:
    n: int = 0
    total: int = 0
    latest: int = 0
    history: list[int] = field(default_factory=list)


class Model:
    """The answers and the state of each batch, in order."""

    def __init__(self) -> None:
        self.batch = -1
        self._keys: dict[int, _Key] = {}
        self._watermark_ms = 0
        self._latest_ms = 0

    def next_answer(self) -> Answer:
        """What the next batch returns, sorted."""
        self.batch += 1
        self._watermark_ms = max(self._watermark_ms, self._latest_ms - _DELAY_MS)
        read: dict[int, list[tuple[int, int]]] = {}
        for value in range(self.batch * ROWS, (self.batch + 1) * ROWS):
            ms = (_START_S + value // ROWS) * 1000 - value * _JITTER % _JITTER_MS
            read.setdefault(value // _GROUP_ROWS % _GROUPS * _KEYS + value % _KEYS, []).append((value, ms))
            self._latest_ms = max(self._latest_ms, ms)
        answer: Answer = []
        for key, rows in read.items():
            held = self._keys.setdefault(key, _Key())
            held.n += len(rows)
            held.total += sum(value for value, _ in rows)
            held.latest = max(held.latest, *(ms for _, ms in rows))
            held.history.append(held.total)
            answer.append([key, held.n, held.total, len(held.history), False])
        for key, held in list(self._keys.items()):
            if held.latest + _GAP_MS <= self._watermark_ms:
                answer.append([key, held.n, held.total, len(held.history), True])
                del self._keys[key]
        return sorted(answer)

    def state(self) -> dict[str, Answer]:
        """The rows of each state after the newest batch, sorted."""
        keys = sorted(self._keys.items())
        return {
            "sum": [[key, held.n, held.total, held.latest] for key, held in keys],
            "history": [[key, place, total] for key, held in keys for place, total in enumerate(held.history)],
            "timers": [[key, held.latest + _GAP_MS] for key, held in keys],
        }


def read_newest(location: str) -> tuple[int, dict[str, Answer]]:
    """The batch of the newest checkpoint, and its stored rows of each state, in the same form."""
    columns = {
        "sum": ["key_k", "value_n", "value_total", "value_latest"],
        "history": ["key_k", "position", "value_total"],
        "timers": ["key_k", "time_ms"],
    }
    with statelog.open_state(location, UID) as reader:
        found: dict[str, Answer] = {}
        for state, names in columns.items():
            rows = reader.read(state, columns=names).read_all().to_pylist()
            found[state] = sorted([row[name] for name in names] for row in rows)
        return reader.batch, found
