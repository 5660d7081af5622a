"""Being told of a query's start: Spark calls a listener before the first batch, and waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener

__all__ = ["when_queries_start"]

_listening: WeakSet[SparkSession] = WeakSet()
_lock = threading.Lock()


def when_queries_start(session: SparkSession, call: Callable[[str, str], None]) -> None:
    """Have a function called with the query id and run id of every query before its first batch; once per session."""
    with _lock:
        if session not in _listening:
            session.streams.addListener(_StartListener(call))
            _listening.add(session)


class _StartListener(StreamingQueryListener):
    def __init__(self, call: Callable[[str, str], None]) -> None:
        self._call = call

    def onQueryStarted(self, event: Any) -> None:
        self._call(str(event.id), str(event.runId))

    def onQueryProgress(self, event: Any) -> None:
        pass

    def onQueryIdle(self, event: Any) -> None:
        pass

    def onQueryTerminated(self, event: Any) -> None:
        pass
