"""What the tests of :mod:`tests.reading.test_kinds_of_state` and others share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import statelog
from statelog.testing import Harness


class Visits:
    """Keeps the last visit for 100 ms, and a timer 1,000 ms after it; `renamed` deletes a state and makes it anew."""

    def __init__(self, renamed: str = "") -> None:
        self._renamed = renamed

    def init(self, handle: Any) -> None:
        self._handle = handle
        if self._renamed:
            handle.deleteIfExists(self._renamed)
        else:
            self._old = handle.getValueState("old", "n long")
        self._last = handle.getValueState("timers", "n long", 100)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            self._last.update((row.n,))
            if not self._renamed:
                self._old.update((row.n,))
            self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 1000)
        yield from ()

    def close(self) -> None:
        pass


class Sums(statelog.OperatorProcessor):
    """Keeps a sum for each subtask, and the broadcast rows."""

    def init(self, handle: Any) -> None:
        self.sums = handle.getListState("sums", "n long")
        self.rules = handle.getBroadcastState("rules", "name string", "n long")

    def processBroadcast(self, rows: Iterator[Any], context: Any) -> None:
        for row in rows:
            self.rules.put((row.name,), (row.n,))

    def process(self, rows: Iterator[Any], context: Any) -> Iterator[Any]:
        self.sums.update([(sum(row.n for row in rows),)])
        yield from ()


def visits(processor: Any) -> Harness:
    return Harness(
        processor, input="k string, n long", keys=["k"], output="n long", timeMode="ProcessingTime", parallelism=2
    )


class Reminders(Visits):
    """Has timers and one state that is not called so."""

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield from ()

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._last = handle.getValueState("last", "n long")
        self._old = self._last


class Declared:
    """Declares its states as `declare` says and, with `write`, gives them the rows."""

    def __init__(self, declare: Callable[[Any], Any], write: Callable[[Any, Any], None] | None = None) -> None:
        self._declare = declare
        self._write = write

    def init(self, handle: Any) -> None:
        self._state = self._declare(handle)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            if self._write is not None:
                self._write(self._state, row)
        yield from ()

    def close(self) -> None:
        pass
