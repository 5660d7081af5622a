"""A processor that stops in the debugger before it is called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


class Debugged:
    """Stops in Python's debugger before each call of a processor with a key's rows, timer or initial state.

    The debugger is that of ``sys.breakpointhook``, so an IDE's works too. A step leads into the processor.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._processor, name)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        sys.breakpointhook()
        yield from self._processor.handleInputRows(key, rows, timerValues)  # step into it

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        sys.breakpointhook()
        yield from self._processor.handleExpiredTimer(key, timerValues, expiredTimerInfo)  # step into it

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> Any:
        sys.breakpointhook()
        return self._processor.handleInitialState(key, initialState, timerValues)  # step into it

    def process(self, batch: Any) -> Any:
        sys.breakpointhook()
        return self._processor.process(batch)  # step into it

    def fire(self, timers: Any) -> Any:
        sys.breakpointhook()
        return self._processor.fire(timers)  # step into it
