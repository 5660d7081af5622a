"""A streaming source without rows: through it a query has batches even when its other sources have no new rows.

Spark runs a batch when a source has a new offset. The clock's offset is a number that grows exactly when an operator
needs a batch: its watermark has advanced, or a heartbeat is due. Spark asks for the offset in a Python process next
to the driver, and that process asks the driver.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Final

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from statelog.clock import Clock, SystemClock
from statelog.rpc.calls import RpcClient
from statelog.rpc.messages import Tick, Ticked
from statelog.spark.source.newer_streaming import SupportsTriggerAvailableNow

CLOCK_SOURCE: Final = "statelog-clock"
_POLL_S: Final = 0.05
"""While a query has nothing to do, Spark asks every 10 ms; the driver is asked no more often than this."""

Offset = dict[str, Any]


def clock_name(uid: str) -> str:
    """The name of an operator's clock in a query whose sources are named; of letters, digits and underscores only."""
    is_plain = re.fullmatch(r"[A-Za-z0-9_]{1,100}", uid) is not None
    return "statelog_clock_" + (uid if is_plain else hashlib.sha256(uid.encode()).hexdigest())


def source_class(host: str, port: int, secret: bytes, certificate: bytes) -> type[DataSource]:
    """Make the source's class, with the driver's address, secret and certificate inside.

    Spark shows the options of a source in plans, but the content of the class is only in its pickle. Because the class
    is local, the pickle holds all of it, and a process that cannot import statelog can say so.
    """

    class ClockSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return CLOCK_SOURCE

        def schema(self) -> str:
            return "tick long"

        def streamReader(self, schema: Any) -> DataSourceStreamReader:
            import sys

            try:
                from statelog.spark.source.clock_source import ClockReader
            except ImportError as error:
                raise ImportError(
                    f"Spark's Python processes run {sys.executable}, which cannot import statelog ({error}). Install"
                    " statelog there, or set PYSPARK_PYTHON (or spark.pyspark.python) before the session is created."
                    " [worker-import]"
                ) from error
            return ClockReader(host, port, secret, certificate=certificate)

    return ClockSource


class ClockReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reports a new offset to Spark when the driver says that a batch is needed.

    Each start of a query has one process for the reader. There Spark calls :meth:`initialOffset` if the query is new,
    :meth:`latestOffset` before every batch and repeatedly between batches, and :meth:`partitions` when it plans a
    batch with a new offset.
    """

    def __init__(
        self, host: str, port: int, secret: bytes, clock: Clock | None = None, *, certificate: bytes = b""
    ) -> None:
        self._address = (host, port, secret)
        self._certificate = certificate
        self._clock = clock or SystemClock()
        self._reader = secrets.token_hex(8)
        self._client: RpcClient | None = None
        self._ends_when_idle = False
        self._is_planned = False
        self._end: Offset = {}
        self._asked: tuple[Offset, float] | None = None

    def initialOffset(self) -> Offset:
        return {"clock": self._reader, "tick": 0}

    def prepareForTriggerAvailableNow(self) -> None:
        self._ends_when_idle = True

    def latestOffset(self, start: Offset | None = None, limit: object = None) -> Offset:
        offset = start or self._end or self.initialOffset()
        if offset["clock"] == self._reader and not self._is_planned:
            return offset  # The query is new; a batch without data can only follow another batch.
        if not self._ends_when_idle and self._is_asked_too_soon(offset):
            return offset
        if self._needs_batch(offset["clock"]):
            return {**offset, "tick": offset["tick"] + 1}
        return offset

    def _is_asked_too_soon(self, offset: Offset) -> bool:
        now_s = self._clock.monotonic_s()
        if self._asked is not None and self._asked[0] == offset and now_s - self._asked[1] < _POLL_S:
            return True
        self._asked = (offset, now_s)
        return False

    def _needs_batch(self, clock: str) -> bool:
        if self._client is None:
            self._client = RpcClient(*self._address, certificate=self._certificate)
        answer = self._client.call(Tick(clock, self._reader, self._ends_when_idle))
        return isinstance(answer, Ticked) and answer.needs_batch

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        self._is_planned = True
        self._end = end
        return []

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        return iter(())

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
