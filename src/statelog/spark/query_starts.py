"""Notices a query's start: Spark calls a listener before the first batch, and waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakSet

from pyspark.sql import SparkSession

from statelog.spark import internals

_listening: WeakSet[SparkSession] = WeakSet()
_lock = threading.Lock()


def when_queries_start(session: SparkSession, call: Callable[[str, str], None]) -> None:
    """Have a function called with the query id and run id of every query of a session, before its first batch.

    Only the first function of a session counts.
    """
    with _lock:
        if session not in _listening:
            internals.add_listener(session, _StartListener(call))
            _listening.add(session)


class _StartListener:
    """A listener for Spark's JVM; a listener of PySpark would first make a Python object of every progress event."""

    def __init__(self, call: Callable[[str, str], None]) -> None:
        self._call = call

    def onQueryStarted(self, event: Any) -> None:
        self._call(event.id().toString(), event.runId().toString())

    def onQueryProgress(self, event: Any) -> None:
        pass

    def onQueryIdle(self, event: Any) -> None:
        pass

    def onQueryTerminated(self, event: Any) -> None:
        pass

    class Java:
        implements: ClassVar = ["org.apache.spark.sql.streaming.PythonStreamingQueryListener"]
